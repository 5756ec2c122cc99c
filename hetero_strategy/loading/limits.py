"""Samples and items that a module or a budget cannot take, found before training starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from lightning.fabric.utilities import rank_zero_info

from hetero_strategy.data.conversation import SHOWN
from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.faults import in_words, list_path
from hetero_strategy.data.media import Processor, TargetProcessor
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLM


class Limits(NamedTuple):
    """What a language model can take; None: anything."""

    max_length: int | None
    """Tokens of a sample."""
    vocab_size: int | None
    """Token ids."""

    @classmethod
    def of(cls, model: Adapter) -> Limits:
        """Of a module whose units are samples."""
        return cls(model.max_length if isinstance(model, CausalLM) else None, model.vocab_size)


class ItemLimit(NamedTuple):
    """What an encoder can take of an item."""

    rows: int
    """Inside the module."""
    fixed: bool
    """Whether its weights are in a folder, and have no more."""


def item_limits(modules: Mapping[str, Adapter]) -> dict[str, ItemLimit]:
    """Of modules whose positions end."""
    return {
        name: ItemLimit(module.max_item_rows, module.checkpoint is not None)
        for name, module in modules.items()
        if module.max_item_rows is not None
    }


def most_rows(models: Mapping[str, Limits], items: Mapping[str, ItemLimit], read: Collection[str]) -> dict[str, int]:
    """Most rows that a module can take of a sample or of an item, where it says so.

    Args:
        models: of language models.
        items: of other modules.
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

    Lengths are compared where the index is measured; otherwise they are known only in their step.

    Args:
        where: what a person calls the data set.
        models: of language models.
        items: of other modules.
        budget: module -> most rows of an instance in a microbatch.
        processors: of the modules that read files.
        eos: the token that ends an answer, which may fill the rows of items.

    Raises:
        ConfigError: a token id is not in a model's embedding, or a sample or an item is more than a budget.
        DataError: a sample is longer than a model's ``max_length``, or an item than a module's positions reach.
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


def say_left_out(index: DatasetIndex, split: str, fields: Sequence[str]) -> None:
    """Say on the first rank how many samples are left out, if any, as they hold these media fields or are faulty, and
    how many answers are not learnt.
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
    """Say how many rows of the longest sample are those of its pictures, recordings and the like."""
    longest = np.array([tokens.argmax()])
    parts = {name: int(table.rows[index.item_numbers(name, longest)].sum()) for name, table in index.items.items()}
    said = [f"{rows} are of '{name}'" for name, rows in parts.items() if rows]
    return f", of the longest {' and '.join(said)} (max_patches of a processor bounds a picture)" if said else ""


def _beyond(index: DatasetIndex, vocab_size: int, processors: Mapping[str, Processor], eos: str | None) -> str:
    """Say what to do about ids beyond a vocabulary; those that fill an encoder's rows need no embedding."""
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
