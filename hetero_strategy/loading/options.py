"""Options of a data module, and the checks before training starts: of options, and of samples against limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from os import PathLike
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from lightning.fabric.utilities import rank_zero_info

from hetero_strategy.data.conversation import MEDIA_FIELDS, SHOWN
from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.manifest import in_words, list_path
from hetero_strategy.data.measured_files import Verify
from hetero_strategy.errors import ConfigError, DataError, check_types, hint, is_whole, require
from hetero_strategy.mask import Prefix
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.kind import Media, ModuleKind, Processor, TargetProcessor

Engine = Literal["local", "ray"]
Payload = Literal["fetch", "all_to_all"]


Tokens = Annotated[Mapping[str, Any], ("a token by media field, such as {'draw': '<draw>'},", lambda tokens: True)]
Processors = Annotated[
    Mapping[str, Any], ("fields of them by module, such as {'vision': {'max_patches': 1024}},", lambda fields: True)
]
Rows = Annotated[Mapping[str, Any], ("rows by module, such as {'vision': 4096},", lambda rows: True)]
Folder = Annotated[PathLike[str] | str, ("a folder", lambda folder: True)]
Fields = Annotated[Sequence[str] | str, ("a media field or a list of them, () for none", lambda fields: True)]
Skipped = Annotated[int, ("a whole number of samples", lambda count: count >= 0)]
Seed = Annotated[int, ("a whole number, at least 0", lambda seed: seed >= 0)]


@dataclass(frozen=True)
class Workers:
    """Processes that make steps beside training.

    Args:
        count: number of processes; 0: steps are made between those of training.
        prefetch: steps that each of them is ahead.
        pin_memory: whether batches lie in page-locked memory; None: on CUDA.
        engine: ``local``: processes of this machine; ``ray``: actors on any machine of a Ray cluster.
    """

    count: Annotated[int, ("a whole number of processes, 0: none", lambda count: count >= 0)] = 0
    prefetch: Annotated[int, ("a whole number of steps, at least 1", lambda steps: steps >= 1)] = 2
    pin_memory: bool | None = None
    engine: Engine = "local"

    def __post_init__(self) -> None:
        check_types("MultimodalDataModule: workers", Workers, **vars(self))
        if self.engine == "ray":
            require("ray", "ray", "engine='ray'")
            if not self.count:
                raise ConfigError("engine='ray' with workers.count=0: say how many actors are to make batches")


@dataclass(frozen=True)
class IndexOptions:
    """Options of the index of a data set.

    Args:
        media_folder: folder to which media paths are relative; None: the folder in which each manifest lies.
        cache_folder: folder of the indices; None: ``.hetero_index`` beside a split's (first) manifest.
        verify: check of media files, see `build_index`.
        max_tokens: longer samples are faulty, see `build_index`.
        leave_out: media fields; their samples are left out (``indices[split].left_out``), else refused where unread.
    """

    media_folder: Folder | None = None
    cache_folder: Folder | None = None
    verify: Verify = "auto"
    max_tokens: Annotated[int, ("a whole number of tokens, at least 1,", lambda tokens: tokens >= 1)] | None = None
    leave_out: Fields = ()

    def __post_init__(self) -> None:
        check_types("MultimodalDataModule: index", IndexOptions, **vars(self))
        if isinstance(self.leave_out, str):
            object.__setattr__(self, "leave_out", (self.leave_out,))


@dataclass(frozen=True)
class TokenizerOptions:
    """Options of the tokenizer.

    Args:
        path: a ``tokenizer.json``, or the folder it lies in.
        bos, eos, placeholders, chat_template: see `ChatTokenizer`.
    """

    path: PathLike[str] | str
    bos: str | None = "auto"
    eos: str = "auto"
    placeholders: Tokens | None = None
    chat_template: PathLike[str] | str | None = None

    def __post_init__(self) -> None:
        check_types("MultimodalDataModule: tokenizer", TokenizerOptions, placeholders=self.placeholders)


Options = TypeVar("Options")


def options_of(cls: type[Options], name: str, value: Any) -> Options:
    """Return an option that is a value of ``cls``, or the fields of one."""
    if isinstance(value, cls):
        return value
    known = [one.name for one in fields(cls)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"MultimodalDataModule: {name}={value!r}; give a {cls.__name__} or its fields: {', '.join(known)}"
        )
    for field in value:
        if field not in known:
            raise ConfigError(f"MultimodalDataModule: {name} has no field '{field}'; {hint(field, known)}")
    for one in fields(cls):  # type: ignore[arg-type]
        if one.name not in value and one.default is MISSING:
            raise ConfigError(f"MultimodalDataModule: {name}={value!r} lacks the field '{one.name}'")
    return cls(**value)


def check_fields(option: str, named: Collection[str], processors: Mapping[str, Media], *, own: bool = False) -> None:
    """Refuse unknown media fields.

    Args:
        option: name of the option.
        named: fields in the option.
        processors: processors of the modules that read fields.
        own: whether a manifest may have further fields, which no module reads. Names of modules, and near misses of a
            known field, are refused all the same.
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
    """Refuse own microbatches for a module that has none, or an invalid number of rows."""
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


class Limits(NamedTuple):
    """The limits of a language model; None: no limit."""

    max_length: int | None
    """Most tokens of a sample."""
    vocab_size: int | None
    """Number of token ids."""

    @classmethod
    def of(cls, model: Adapter) -> Limits:
        """Return the limits of a module whose units are samples."""
        return cls(model.max_length if isinstance(model, CausalLM) else None, model.vocab_size)


class ItemLimit(NamedTuple):
    """The limit of an encoder for an item."""

    rows: int
    """Most rows inside the module."""
    fixed: bool
    """Whether its weights come from a folder, and have no more positions."""


def item_limits(modules: Mapping[str, Adapter]) -> dict[str, ItemLimit]:
    """Return the limits of modules with a limited number of positions."""
    return {
        name: ItemLimit(module.max_item_rows, module.checkpoint is not None)
        for name, module in modules.items()
        if module.max_item_rows is not None
    }


def most_rows(models: Mapping[str, Limits], items: Mapping[str, ItemLimit], read: Collection[str]) -> dict[str, int]:
    """Return the most rows that a module can take of a sample or of an item, for modules with such a limit.

    Args:
        models: limits of language models.
        items: limits of other modules.
        read: modules that read files.
    """
    samples = {name: limits.max_length for name, limits in models.items() if limits.max_length is not None}
    return samples | {name: limit.rows for name, limit in items.items() if name in read}


def check_limits(
    index: DatasetIndex,
    where: str,
    models: Mapping[str, Limits],
    items: Mapping[str, ItemLimit],
    budget: Mapping[str, int],
    processors: Mapping[str, Processor],
    eos: str | None,
) -> None:
    """Refuse a data set that cannot be trained to its end, whether or not a run comes to its last sample.

    Lengths are compared if the index is measured; otherwise they are known only in their step.

    Args:
        where: name of the data set in messages.
        models: limits of language models.
        items: limits of other modules.
        budget: most rows of an instance in a microbatch, by module.
        processors: processors of the modules that read files.
        eos: the token that ends an answer, which may fill the rows of items.
    """
    for module, limits in models.items():
        if limits.vocab_size is not None and index.largest_id >= limits.vocab_size:
            raise ConfigError(
                f"{where}: token ids reach {index.largest_id}, but the embedding of '{module}' has"
                f" {limits.vocab_size} rows; {_beyond(index, limits.vocab_size, processors, eos)}"
            )
    if not index.measured:
        return
    samples, tokens = np.arange(len(index)), np.diff(index.offsets)
    for module, limits in models.items():
        if limits.max_length is not None and (worst := _longer(index, samples, tokens, limits.max_length)):
            raise DataError(
                f"{where}: {worst} '{module}' can take (max_length){_of_items(index, tokens)}; shorten these samples or"
                " raise it"
            )
    for module, limit in items.items():
        measured = index.items.get(module)
        if measured is not None and (worst := _longer(index, measured.sample, measured.inner_rows, limit.rows)):
            fix = "" if limit.fixed else ", or give it more positions"
            raise DataError(f"{where}: {worst} '{module}' has positions for; cut these items, or leave them out{fix}")
    for module, most in budget.items():
        if module in models:
            owner, rows, fix = samples, tokens, "leave longer samples out"
        elif module in index.items:
            owner, rows = index.items[module].sample, index.items[module].inner_rows
            fix = "make items smaller in its processor"
        else:
            continue
        if worst := _longer(index, owner, rows, most):
            raise ConfigError(
                f"{where}: {worst} balance.budget gives an instance of '{module}' in a microbatch; raise it to at least"
                f" {int(rows.max())}, or {fix}"
            )


def check_prompts(index: DatasetIndex, where: str, kinds: Mapping[str, ModuleKind]) -> None:
    """Refuse an index of an earlier version if a rule of attention needs the prompts that it lacks."""
    for module, kind in kinds.items():
        if index.prompts is None and any(isinstance(rule, Prefix) for rule in kind.rules.values()):
            raise DataError(
                f"{where}: attention='prefix' of '{module}' needs the rows before the first predicted token of each"
                f" sample, which the index of an earlier version lacks; delete {index.folder}, and the next run builds"
                " it again"
            )


def say_left_out(index: DatasetIndex, split: str, fields: Sequence[str]) -> None:
    """Report on the first rank how many samples are left out, because of their media fields or faults, and how many
    answers are not learnt.
    """
    if index.left_out:
        rank_zero_info(
            f"{split}: {index.left_out} of {len(index) + index.left_out} samples are left out, as they hold"
            f" {' or '.join(fields)}"
        )
    if count := sum(index.skipped.values()):
        rank_zero_info(
            f"{split}: {count} of {len(index) + count} samples are left out, as they are faulty (on_error='skip'):"
            f" {in_words(index.skipped)}; all are listed in {list_path(index.folder)}; delete {index.folder} when they"
            " are mended"
        )
    if index.unlearnt:
        rank_zero_info(
            f"{split}: {index.unlearnt} answers are not learnt, as the chat template takes text such as reasoning out"
            " of earlier answers; the last one of each sample is"
        )


def _of_items(index: DatasetIndex, tokens: np.ndarray) -> str:
    """Describe how many rows of the longest sample belong to its images, recordings and other items."""
    longest = np.array([tokens.argmax()])
    parts = {name: int(table.rows[index.item_numbers(name, longest)].sum()) for name, table in index.items.items()}
    phrases = [f"{rows} are of '{name}'" for name, rows in parts.items() if rows]
    return f", of the longest {' and '.join(phrases)} (max_patches of a processor bounds a picture)" if phrases else ""


def _beyond(index: DatasetIndex, vocab_size: int, processors: Mapping[str, Processor], eos: str | None) -> str:
    """Advise what to do about ids beyond a vocabulary; ids that only fill an encoder's rows need no embedding."""
    for module, processor in processors.items():
        table = index.items[module]
        filled = index.ids[index.offsets[table.sample] + table.start]
        if filled.max(initial=-1) >= vocab_size and not isinstance(processor, TargetProcessor):
            option = f"placeholders={{'{processor.field}': '{eos}'}}"
            return f"id {int(filled.max())} only fills the rows of '{module}', as any other would: give {option}"
    return f"set vocab_size to at least {index.largest_id + 1}"


def _longer(index: DatasetIndex, owner: np.ndarray, rows: np.ndarray, most: int) -> str:
    """Name the samples whose sequences or items have more rows, the largest first; empty: there are none."""
    over = np.flatnonzero(rows > most)
    worst = over[np.argsort(-rows[over], kind="stable")]
    named = [f"{rows[unit]} in sample '{index.names[owner[unit]]}'" for unit in worst[:SHOWN]]
    rest = [f"and {len(worst) - SHOWN} more"] if len(worst) > SHOWN else []
    return f"{', '.join([*named, *rest])}: more rows than the {most} that" if named else ""
