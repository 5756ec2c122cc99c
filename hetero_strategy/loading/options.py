"""What the options of a data module may be, looked at before a process starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from typing import Any, Literal, get_args

from hetero_strategy.data.build_index import Verify
from hetero_strategy.data.conversation import MEDIA_FIELDS
from hetero_strategy.data.media import Media
from hetero_strategy.errors import FLAG, Allowed, ConfigError, check_options, hint, is_whole, one_of, require
from hetero_strategy.loading.item_reader import OnError
from hetero_strategy.model.kind import ModuleKind

Engine = Literal["local", "ray"]
Payload = Literal["fetch", "all_to_all"]


def _names(value: Any) -> bool:
    listed = isinstance(value, Sequence) and all(isinstance(one, str) for one in value)
    return isinstance(value, str) or listed


OPTIONS: dict[str, Allowed] = {
    "num_workers": ("a whole number of processes, 0: none", lambda v: is_whole(v, 0)),
    "prefetch_factor": ("a whole number of steps, at least 1", lambda v: is_whole(v, 1)),
    "max_skipped": ("a whole number of samples, or None: 1%, at least 10", lambda v: v is None or is_whole(v, 0)),
    "max_tokens": ("a whole number of tokens, at least 1, or None: any", lambda v: v is None or is_whole(v, 1)),
    "seed": ("a whole number, at least 0", lambda v: is_whole(v, 0)),
    **dict.fromkeys(("shuffle", "drop_last"), FLAG),
    "pin_memory": ("True, False, or None: on CUDA", lambda v: v is None or isinstance(v, bool)),
    "payload": one_of(*get_args(Payload)),
    "engine": one_of(*get_args(Engine)),
    "on_error": one_of(*get_args(OnError)),
    "verify": one_of(*get_args(Verify)),
    **dict.fromkeys(
        ("media_folder", "cache_folder"), ("a folder, or None", lambda v: v is None or isinstance(v, str | PathLike))
    ),
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


def check_data_options(**given: Any) -> None:
    """Refuse what cannot be.

    Raises:
        ConfigError: naming the option, or what ``engine="ray"`` lacks.
    """
    check_options("MultimodalDataModule", OPTIONS, **given)
    if given["engine"] == "ray":
        require("ray", "ray", "engine='ray'")
        if not given["num_workers"]:
            raise ConfigError("engine='ray' with num_workers=0: say how many actors are to make batches")


def check_fields(option: str, named: Collection[str], processors: Mapping[str, Media], *, own: bool = False) -> None:
    """Refuse media fields that there are not.

    Args:
        named: by the option.
        processors: of the modules that read fields.
        own: whether a manifest may have others, which no module reads. Names of modules, and those that are nearly
            called as a field is, are none of them.

    Raises:
        ConfigError: naming the option and the field.
    """
    read = {module: processor.field for module, processor in processors.items()}
    known = [*dict.fromkeys((*read.values(), *MEDIA_FIELDS))]
    others = [f"{field}s" for field in MEDIA_FIELDS] if own else []
    for name in named:
        near = name in read or not own or get_close_matches(name, known, cutoff=0.75)
        if name not in (*known, *others) and near:
            meant = f"module '{name}' reads {read[name]}" if name in read else hint(name, known)
            raise ConfigError(f"MultimodalDataModule: {option} names '{name}', which is no media field; {meant}")


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
