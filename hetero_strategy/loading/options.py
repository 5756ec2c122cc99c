"""What the options of a data module may be, looked at before a process starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero_strategy.errors import ConfigError, is_whole
from hetero_strategy.model.kind import ModuleKind


def _names(value: Any) -> bool:
    listed = isinstance(value, Sequence) and all(isinstance(one, str) for one in value)
    return isinstance(value, str) or listed


OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_workers": ("a whole number of processes, 0: none", lambda v: is_whole(v, 0)),
    "prefetch_factor": ("a whole number of steps, at least 1", lambda v: is_whole(v, 1)),
    "max_skipped": ("a whole number of samples, or None: 1%, at least 10", lambda v: v is None or is_whole(v, 0)),
    "max_tokens": ("a whole number of tokens, at least 1, or None: any", lambda v: v is None or is_whole(v, 1)),
    "seed": ("a whole number, at least 0", lambda v: is_whole(v, 0)),
    **dict.fromkeys(("shuffle", "drop_last"), ("True or False", lambda v: isinstance(v, bool))),
    "pin_memory": ("True, False, or None: on CUDA", lambda v: v is None or isinstance(v, bool)),
    "leave_out": ("a media field or a list of them, () for none", _names),
    "processors": (
        "fields of them by module, such as {'vision': {'max_patches': 1024}}",
        lambda v: v is None or isinstance(v, Mapping),
    ),
    "placeholders": (
        "a token by media field, such as {'draw': '<draw>'}, or None",
        lambda v: v is None or isinstance(v, Mapping),
    ),
    "encoder_microbatch_rows": (
        "rows by module, such as {'vision': 4096}, or None",
        lambda v: v is None or isinstance(v, Mapping),
    ),
}
"""Option -> what it may be, in words and as a predicate."""


def check_options(**given: Any) -> None:
    """Refuse what cannot be.

    Raises:
        ConfigError: naming the option.
    """
    for name, value in given.items():
        allowed, can_be = OPTIONS[name]
        if not can_be(value):
            raise ConfigError(f"MultimodalDataModule: {name}={value!r}; give {allowed}")


def check_microbatch_rows(given: Mapping[str, Any], kinds: Mapping[str, ModuleKind]) -> None:
    """Refuse microbatches of their own for what has none, or of what is no number of rows.

    Raises:
        ConfigError: naming the module.
    """
    own = [name for name, kind in kinds.items() if not kind.samplewise]
    for name, rows in given.items():
        if name not in own:
            raise ConfigError(
                f"encoder_microbatch_rows names '{name}', which is none of {', '.join(own)}; language models keep"
                " the step's microbatches"
            )
        if rows != "equal" and not is_whole(rows, 1):
            raise ConfigError(
                f"encoder_microbatch_rows of '{name}' is {rows!r}; use a number of rows, at least 1, or 'equal'"
            )
