"""Check at the first use of a transformers class that packed sequences are computed as each one alone.

A tiny copy of the config runs through our adapter and, one sequence at a time, through transformers' own eager forward.
The numbers decide whether the class may be packed and run with context parallelism; no list of families does.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetero_strategy.disk_cache import cached, contents
from hetero_strategy.errors import ModelError
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.packed_alone import row_difference
from hetero_strategy.model.packing_errors import LENGTHS, made_up, packing_errors
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.zoo.hf_packed import reason_of_failure
from hetero_strategy.zoo.hf_shrink import SPECIAL, shrink

BOUND = 1e-4
"""Largest error that is taken for rounding of fp32."""
LARGEST = 30_000_000
"""Most parameters of a tiny copy."""
NOISE = 0.05
"""Deviation of the noise on all values, without which norms are 1, biases 0 and attention is nearly uniform."""
PASSING = (OSError, ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors of a machine at a moment, not of a class: no result of a check."""
MEANINGS = {
    "others": "a change of one sequence changes rows of other sequences",
    "earlier": "a change of later rows changes rows before them",
    "alone": "a sequence alone has other rows than packed",
    "eager": "logits differ from transformers' eager forward, one sequence at a time",
    "context": "rows of two context-parallel ranks differ from those of one",
}
"""Name of an error -> what it says."""

Make = Callable[[type, Any], CausalLM]
"""Makes our adapter of a class and a config."""


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    errors: Mapping[str, float]
    """Name as in :data:`MEANINGS` -> error relative to the size of rows or logits; infinite: not finite."""
    failure: str = ""
    """Why the tiny copy did not run; empty: it ran."""
    context_failure: str = ""
    """Why it did not run with context parallelism."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Return why sequences may not be packed, with numbers; none if they may."""
        wrong = [f"{MEANINGS[name]} by {error:.2g} of their size" for name, error in self._wrong() if name != "context"]
        return [self.failure] * bool(self.failure) + wrong

    @property
    def packs(self) -> bool:
        """Return whether packed sequences are computed as each one alone."""
        return not self.reasons

    @property
    def context_parallel(self) -> bool:
        """Return whether rows may be split over context-parallel ranks."""
        return self.packs and "context" in self.errors and "context" not in dict(self._wrong())

    def _wrong(self) -> list[tuple[str, float]]:
        return [(name, error) for name, error in self.errors.items() if not error <= BOUND]

    def require_packing(self, who: str, model_class: type) -> None:
        """Raise ModelError with the class, the version and the numbers unless sequences may be packed."""
        if self.packs:
            return
        version = self.versions.get("transformers", "")
        raise ModelError(
            f"{who}: {model_class.__name__} of transformers {version} failed the check of a tiny copy of its config:"
            f" {'; '.join(self.reasons)} (at most {BOUND:g} is rounding). Results would depend on what is packed with"
            f" what, or be wrong; {reason_of_failure(model_class)}; check=False leaves this check out"
        )


def checked(make: Make, model_class: type, config: Any) -> Verdict:
    """Check a class with a tiny copy of a config, or load the result of the same check.

    The result is kept by class, tiny config, and versions of torch, transformers and this package. Generators of random
    numbers, the default dtype and device, threads and accelerators are as before.

    Args:
        make: makes our adapter.
        model_class: transformers' class.
        config: config of any size; its sizes do not matter, kinds of layers, windows and flags do.

    Raises:
        ModelError: the machine, not the class, ended the check; nothing is kept.
    """
    small = shrink(config)
    key = {
        "class": f"{model_class.__module__}.{model_class.__qualname__}",
        "config": repr(sorted(small.to_dict().items(), key=lambda item: item[0])),
        "code": _code(),
        **_versions(),
    }
    return cached(partial(verdict_of, make, model_class, small), key, lambda data: Verdict(**data), "checks")


def verdict_of(make: Make, model_class: type, config: Any) -> Verdict:
    """Check a class with a tiny config now; arguments as in :func:`checked`."""
    errors: dict[str, float] = {}
    versions = _versions()
    with _undisturbed():
        try:
            reference = _reference(model_class, config)
            module = make(model_class, copy.deepcopy(config))
            module.model.load_state_dict(reference.state_dict(), assign=True)  # type: ignore[union-attr]
            MultimodalModel({"llm": module}, seed=0).eval()  # makes the tables that no state dict has
            ids = torch.randint(3, min(SPECIAL, module.vocab_size or SPECIAL), (int(LENGTHS.sum()),))
            with torch.no_grad():
                expected = torch.cat([_eager(reference, one) for one in ids.split(LENGTHS.tolist())])
                logits = module(made_up(module, ids), keep_logits=True).logits
            errors["eager"] = row_difference(logits, expected)
        except Exception as fault:  # a class may fail in any way
            return Verdict(errors, _said(fault), versions=versions)
        return _with_context(module, ids, errors, versions)


@cache
def _code() -> list[str]:
    """Hash the files that decide what adapters compute."""
    rooms = Path(__file__).parent, Path(__file__).parent.parent / "model"
    return contents(str(file) for room in rooms for file in room.glob("*.py"))


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _with_context(module: CausalLM, ids: Tensor, errors: dict[str, float], versions: dict[str, str]) -> Verdict:
    """Measure the other errors, and without context parallelism if that fails."""
    failure = ""
    while True:
        try:
            return Verdict(errors | packing_errors(module, ids), context_failure=failure, versions=versions)
        except Exception as fault:
            failure = _said(fault)
        if not module.context_parallel:
            return Verdict(errors, failure, versions=versions)
        module.context_parallel = False


def _reference(model_class: type, config: Any) -> nn.Module:
    """Make transformers' own model with eager attention and values that leave nothing trivial."""
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > LARGEST:
        raise ModelError(f"{model_class.__name__}: no rule makes its config tiny, {count / 1e6:.0f}M parameters remain")
    model: nn.Module = model_class(config)
    for part in model.modules():
        of: Any = getattr(part, "config", None)
        if hasattr(of, "_attn_implementation"):
            of._attn_implementation = "eager"
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=NOISE)
    return model.eval()


def _eager(model: nn.Module, ids: Tensor) -> Tensor:
    """Return transformers' logits of one sequence."""
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def _said(fault: Exception) -> str:
    """Return what a check failed with.

    Raises:
        ModelError: another run of the check may succeed, so that its result may not be kept.
    """
    if isinstance(fault, PASSING) or "allocate memory" in str(fault):
        raise ModelError(
            f"the check of a tiny copy was ended by {type(fault).__name__}: {fault}; correct that and start again, or"
            " leave the check out by check=False"
        ) from fault
    return f"the tiny copy does not run: {type(fault).__name__}: {' '.join(str(fault).split())[:400]}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Compute on one thread of the CPU in fp32, and leave every default and generator as it was."""
    dtype, threads, states = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        (random.getstate(), np.random.get_state()),
    )
    try:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)  # threads of OpenMP would not survive a fork
        off = torch.autocast("cpu", enabled=False)
        quiet = warnings.catch_warnings(action="ignore")  # the module itself gives them
        real = models_without_values(False)  # a data module builds its model without values, and so comes here
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), off, torch.inference_mode(False), quiet, real:
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed accelerators, too, and for good
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
