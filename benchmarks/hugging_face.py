"""Compare language models of transformers in mixed layouts with one process, family by family.

Each family is a tiny model in fp32 with every kind of its layers. Columns:

``packed``, ``alone``, ``others``
    The largest errors of the check at the first use of a class: packed logits against transformers' eager forward of
    one sequence at a time; rows of packed sequences against each alone; rows of a sequence if another one changes.
``stages``
    Gradients of three pipeline stages against the whole; 0 means equal bit for bit.
layouts
    The largest error of a gradient in two SGD steps of two microbatches on four processes, against one process. "no":
    the layout is refused; the reason is below the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any

import torch
from typing_extensions import override

from benchmarks.common import Options, option, program, report
from hetero_strategy.errors import HeteroError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.packing_errors import made_up
from hetero_strategy.testing import Pool, Setting, WorkerError, gradients_of, relative_errors
from hetero_strategy.testing.families import OPEN, tiny_family
from hetero_strategy.testing.setting import MERGE, PATCH, VOCABULARY, in_dtype
from hetero_strategy.zoo import HFCausalLM, hf_causal_lm, siglip2_encoder
from hetero_strategy.zoo.hf_check import Verdict, verdict_of
from hetero_strategy.zoo.hf_shrink import shrink

FEW = ("qwen3", "gemma3_text", "qwen3_moe")
RANKS, STEPS, RATE = 4, 2, 1e-3
BOUND = 1e-5
"""Largest error of a gradient that is not noted."""
CHUNK = 6
"""Families whose runs share processes."""
Run = tuple[str, str]
"""Family and column."""
Gradients = dict[str, torch.Tensor]
RECOMPUTE = {"llm": {"recompute": "all"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"layouts": {"llm": ModuleLayout(range(4), tp=2, pp=2)}},
    "shard2 pp2 recompute": {
        "layouts": {"llm": ModuleLayout(range(4), dp_shard=2, pp=2)},
        "transforms": RECOMPUTE,
    },
    "zb_h1 pp4": {"layouts": {"llm": ModuleLayout(range(4), pp=4)}, "schedule": "zb_h1"},
    "cp2 pp2": {"layouts": {"llm": ModuleLayout(range(4), cp=2, pp=2)}},
    "fill pp4": {
        "layouts": {"vision": ModuleLayout(range(4)), "llm": ModuleLayout(range(4), pp=4)},
        "fill": "fine",
    },
}
"""Name of a column -> settings of a run of it."""
SMALL: dict[str, Any] = {
    "samples": 8, "microbatches": 2, "items": (0, 2), "cells": (1, 3), "text": (3, 20), "vision": (64, 4),
}  # fmt: skip


@dataclass(frozen=True)
class Family(Setting):
    """A setting whose language model is a tiny one of a family."""

    model_type: str = ""

    @override
    def model(self, device: str = "meta") -> MultimodalModel:
        with torch.device(device):
            modules: dict[str, Any] = {"llm": tiny(self.model_type)}
            if "vision" in self.layouts:
                width, layers = self.vision
                modules["vision"] = siglip2_encoder(
                    out_width=modules["llm"].width, merge=MERGE, hidden_size=width, intermediate_size=2 * width,
                    num_hidden_layers=layers, num_attention_heads=2, num_channels=3, patch_size=PATCH, num_patches=64,
                )  # fmt: skip
            return MultimodalModel(modules, seed=7).train()


def tiny(model_type: str) -> Any:
    """Build a tiny model of a family; its values are large enough that attention is not uniform.

    No token has a zero row, as a padding token has: norms would make gradients out of rounding.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = inspect.get_annotations(CONFIG_MAPPING[model_type])
    wanted = {"vocab_size": VOCABULARY, "initializer_range": 0.1, "pad_token_id": None}
    fields = tiny_family(model_type) | {name: value for name, value in wanted.items() if name in known}
    return hf_causal_lm(model_type=model_type, check=False, **fields)


def settings_of(model_type: str) -> dict[str, Family]:
    """Return the runs of a family by column."""
    return {name: Family(name, **SMALL, **of, model_type=model_type) for name, of in LAYOUTS.items()}


def one_process(setting: Family) -> Gradients:
    """Return the gradients of all steps in one process."""
    one = replace(setting, layouts=dict.fromkeys(setting.layouts, ModuleLayout((0,))), transforms={})
    model = one.model("cpu")
    found: Gradients = {}
    for seed in range(STEPS):
        model(one.batch(seed, 0)).loss.backward()
        found |= _step(seed, model.modules_by_name)
    return found


def on_rank(rank: int, world: int, runs: Mapping[Run, Family]) -> dict[Run, Gradients]:
    """Return the gradients of all steps of each run on a rank."""
    found: dict[Run, Gradients] = {}
    for name, setting in runs.items():
        executor = setting.assembled(rank).executor
        steps: Gradients = {}
        for seed in range(STEPS):
            executor.run(setting.batch(seed, rank), train=True)
            steps |= _step(seed, executor.modules)
        found[name] = steps
    return found


def _step(number: int, modules: Mapping[str, torch.nn.Module]) -> Gradients:
    """Take a step of SGD; return its gradients."""
    gradients = {f"step {number}: {name}": gradient for name, gradient in gradients_of(modules).items()}
    with torch.no_grad():
        for module in modules.values():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=RATE)
                    parameter.grad = None
    return gradients


def worst(expected: Gradients, ranks: Sequence[Gradients]) -> tuple[float, str]:
    """Return the largest relative error of a gradient on any rank and its parameter; infinite if one is missing."""
    missing = set(expected).difference(*ranks)
    errors = [
        (inf if isnan(error) else error, name)
        for rank in ranks
        for name, error in relative_errors(rank, expected, 1e-3).items()
    ]
    return max([*errors, *((inf, name) for name in missing)], default=(0.0, ""))


def stages_error(model_type: str) -> float:
    """Return the largest difference of a gradient of three stages to the whole's."""
    with in_dtype(torch.float32):
        whole = tiny(model_type)
        MultimodalModel({"llm": whole}, seed=7)
        inputs = made_up(whole)
        whole(inputs).loss_sum.backward()
        expected = gradients_of({"llm": whole})
        whole.zero_grad()
        blocks = list(whole.blocks())
        cuts = (blocks[:1], blocks[1:2], blocks[2:])
        stages = [whole.stage(cut, first=number == 0, last=number == 2) for number, cut in enumerate(cuts)]
        first = stages[0](inputs)
        second_in = first.detach().requires_grad_()
        second = stages[1](inputs, hidden=second_in)
        third_in = second.detach().requires_grad_()
        stages[2](inputs, hidden=third_in).loss_sum.backward()
        second.backward(third_in.grad)
        first.backward(second_in.grad)
    found = gradients_of({"llm": whole})
    return max((float((found[n] - e).abs().max()) if n in found else inf) for n, e in expected.items())


def prepared(model_type: str) -> tuple[dict[str, float | None], list[str], dict[str, Family]]:
    """Check one family in this process; return its line of the table, notes and the runs that are not refused."""
    line: dict[str, float | None] = {}
    try:
        verdict = check_of(model_type)
        line |= {"packed": verdict.errors.get("eager"), **{n: verdict.errors.get(n) for n in ("alone", "others")}}
        verdict.require_packing("check", type(tiny(model_type).model))
        line["stages"] = stages_error(model_type)
    except Exception as error:  # some of transformers' classes do not even build
        return line, [f"{model_type}: {_said(error)}"], {}
    settings, notes = settings_of(model_type), []
    for name, setting in list(settings.items()):
        try:
            _ = setting.blueprint
        except HeteroError as error:
            notes.append(f"{model_type}, {name}: {_said(error)}")
            del settings[name]
    return line, notes, settings


def measured(families: Sequence[str], pool: Pool) -> Iterator[tuple[str, dict[str, float | None], list[str]]]:
    """Yield families' lines of the table and notes on what is refused or wrong."""
    lines = {model_type: prepared(model_type) for model_type in families}
    runs = {(m, name): setting for m, (_, _, settings) in lines.items() for name, setting in settings.items()}
    results = _on_processes(runs, pool)
    for model_type, (line, notes, settings) in lines.items():
        for name, setting in settings.items():
            ranks = results[model_type, name]
            error, where = (inf, ranks) if isinstance(ranks, str) else worst(one_process(setting), ranks)
            line[name] = error
            if not error <= BOUND:
                notes.append(f"{model_type}, {name}: {error:.1e} {where}")
        yield model_type, line, notes


def check_of(model_type: str) -> Verdict:
    """Run the check of a family's tiny model afresh."""
    model = tiny(model_type)
    return verdict_of(HFCausalLM, type(model.model), shrink(model.config))


def _on_processes(runs: Mapping[Run, Family], pool: Pool) -> dict[Run, list[Gradients] | str]:
    """Return the gradients of each run by rank, or why it failed; runs share processes, without those that fail."""
    if not runs:
        return {}
    try:
        ranks = pool.run(RANKS, on_rank, runs, timeout=120 + 30 * len(runs))
        return {run: [rank[run] for rank in ranks] for run in runs}
    except WorkerError as error:
        if len(runs) == 1:
            return {run: _said(error) for run in runs}
    keys = list(runs)
    halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    return {run: each for half in halves for run, each in _on_processes({k: runs[k] for k in half}, pool).items()}


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line.split(":")[0]]
    return (causes or lines or [type(error).__name__])[-1][:300]


def all_families() -> list[str]:
    """Return every causal language model of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OPEN})


@program(
    option("--families", nargs="*", default=["few"], help="few, all, or transformers' names (default few)"),
)
def main(given: Options) -> dict[str, Any]:
    """Measure families and print a table."""
    named = {"few": FEW, "all": all_families()}
    families = [name for word in given.families for name in named.get(word, (word,))]
    columns = ["packed", "alone", "others", "stages", *LAYOUTS]
    found: dict[str, Any] = {}
    notes: list[str] = []
    for start in range(0, len(families), CHUNK):
        for model_type, line, said in measured(families[start : start + CHUNK], given.pool):
            found[model_type] = line
            notes += said
            print(model_type, *(f"{n} {e:.1e};" for n, e in line.items() if e is not None), *said, flush=True)
    rows = [
        [name, *("no" if line.get(c) is None else f"{line[c]:.1e}" for c in columns)] for name, line in found.items()
    ]
    report("families of transformers: relative errors", ["family", *columns], rows, notes)
    return {"families": found, "notes": notes}


if __name__ == "__main__":
    main()
