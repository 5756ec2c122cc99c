"""Attention masks as tables of slices: runs of rows by runs of keys. Pure.

Three rows of text, an image of two rows that see each other, and one more row of text, under Gemma 3's rule:

    row  sees keys         slice                          row rows key keys  low   high
    0    0                 text up to the image            0   3    0   3    False True
    1    0 1
    2    0 1 2
    3    0 1 2 3 4         the image and all before it     3   2    0   5    False False
    4    0 1 2 3 4
    5    0 1 2 3 4 5       text after the image            5   1    0   6    False True

A table has a few lines per sequence and item and none per token, but under :class:`Words` a line for each pair of runs
of equal words that see each other, up to half the square of their number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped

from hetero_strategy import ragged
from hetero_strategy.errors import DataError, ModelError

TEXT = 1
"""Bit of text in the words of :class:`Words`."""


@dataclass(frozen=True, eq=False)
class Slices:
    """The (row, key) pairs of a mask, each in one slice.

    Row ``row + d`` of a slice, ``0 <= d < rows``, sees the keys from ``key + (d if low else 0)`` up to and without
    ``key + keys - (rows - 1 - d if high else 0)``. Lines ascend by row. Make it with :meth:`of`.
    """

    row: Int64[np.ndarray, "slices"]
    """First row of each slice."""
    rows: Int64[np.ndarray, "slices"]
    key: Int64[np.ndarray, "slices"]
    """First key of each slice."""
    keys: Int64[np.ndarray, "slices"]
    low: Bool[np.ndarray, "slices"]
    """Whether the first key that a row sees moves by one from row to row."""
    high: Bool[np.ndarray, "slices"]
    """Whether the last key that a row sees moves by one from row to row."""
    total: int
    """Rows of the mask, T."""

    @staticmethod
    def of(
        row: np.ndarray,
        end: np.ndarray,
        key: np.ndarray,
        last: np.ndarray,
        low: np.ndarray | bool,
        high: np.ndarray | bool,
        total: int,
    ) -> Slices:
        """Return the slices of rows ``row`` to ``end`` and keys ``key`` to ``last``, int64 ``[n]`` or numbers, ends not
        included; slices without rows are left out.

        Raises:
            DataError: a row sees no key, or a slice has rows beyond the mask.
        """
        columns = np.broadcast_arrays(row, end, key, last, low, high)
        order = np.argsort(columns[0], kind="stable")
        order = order[(columns[1] > columns[0])[order]]
        row, end, key, last, low, high = (column[order] for column in columns)
        rows, keys = end - row, last - key
        reach = np.maximum.accumulate(end) if len(end) else end
        gaps = np.append(row, total) > np.append(0, reach)
        if gaps.any() or (len(end) and (row[0] < 0 or reach[-1] > total)):
            at = int(np.append(0, reach)[np.argmax(gaps)]) if gaps.any() else total
            raise DataError(f"a mask of {total} rows has no slice of row {at} alone: give each of its rows a key")
        if (empty := keys <= (rows - 1) * (low | high)).any():
            raise DataError(f"row {int(row[np.argmax(empty)])} begins a slice in which a row sees no key: leave it out")
        return Slices(row, rows, key, keys, low, high, total)

    def same(self, other: Slices) -> bool:
        """Return whether two masks have equal tables."""
        return all(np.array_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))

    def work(self, edges: Int64[np.ndarray, "edges"]) -> Int64[np.ndarray, "blocks"]:
        """Count the pairs of the rows between each two of some ascending row numbers, exactly below 2^53."""
        of, block, first, rows = self._cut(edges)
        start, end = self._keys_of(of, first, first + 1)
        step = self.high[of].astype(np.int64) - self.low[of]
        pairs = rows * (end - start) + step * (rows * (rows - 1) // 2)
        return np.bincount(block, pairs, minlength=len(edges) - 1).astype(np.int64)

    def block_keys(
        self, edges: Int64[np.ndarray, "edges"]
    ) -> tuple[Int64[np.ndarray, "runs"], Int64[np.ndarray, "runs 2"]]:
        """Return the keys that the rows between each two edges see, as runs apart from each other: block, and first key
        and end of each run.
        """
        of, block, first, rows = self._cut(edges)
        start, end = self._keys_of(of, first, first + rows)
        block, start, end = ragged.merged(block, start, end)
        return block, np.stack([start, end], axis=1)

    def intervals(self) -> Int32[np.ndarray, "2 most rows"]:
        """Return the keys that each row sees, as intervals: first keys, and ends.

        There are as many intervals a row as most rows have slices, rounded up to a power of two, because blocks are
        compiled for each number: 1 for all rules but :class:`Words`. Unused ones are empty, from 0 to 0.
        """
        of = np.repeat(np.arange(len(self.row)), self.rows)
        row = ragged.expand(self.row, self.rows)
        order = np.argsort(row, kind="stable")
        of, row = of[order], row[order]
        number = ragged.within(np.bincount(row, minlength=self.total))
        start, end = self._keys_of(of, row, row + 1)
        intervals = np.zeros((2, 1 << int(number.max(initial=0)).bit_length(), self.total), np.int32)
        intervals[:, number, row] = start, end
        return intervals

    def _cut(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Cut slices at edges into pieces: slice, block, first row and rows of each; all rows are between edges."""
        end = self.row + self.rows
        first = np.maximum(np.searchsorted(edges, self.row, side="right") - 1, 0)
        last = np.minimum(np.searchsorted(edges, end, side="left"), len(edges) - 1)
        count = np.maximum(last - first, 0)
        of, block = np.repeat(np.arange(len(count)), count), ragged.expand(first, count)
        start = np.maximum(self.row[of], edges[block])
        rows = np.minimum(end[of], edges[block + 1]) - start
        some = rows > 0
        return of[some], block[some], start[some], rows[some]

    def _keys_of(self, of: np.ndarray, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key that row ``first`` of each slice sees, and the end of the keys of row ``end - 1``."""
        start = self.key[of] + (first - self.row[of]) * self.low[of]
        return start, self.key[of] + self.keys[of] - (self.row[of] + self.rows[of] - end) * self.high[of]


@dataclass(frozen=True, eq=False)
class Spans:
    """Runs of rows that items of other modules have in some sequences, in any order."""

    sequence: Int64[np.ndarray, "items"]
    """Number of each item's sequence."""
    start: Int64[np.ndarray, "items"]
    """Position of the item's first row in its sequence."""
    rows: Int64[np.ndarray, "items"]
    source: Shaped[np.ndarray, "items"]
    """Name of the module that the item is from."""
    prompts: Int64[np.ndarray, "sequences"] | None = None
    """Rows before the first predicted token of each sequence; None: not known."""
    media: Mapping[str, str] = field(default_factory=dict)
    """Module -> manifest field of its files, such as "image"."""

    @staticmethod
    def none() -> Spans:
        """Return no items."""
        empty = np.zeros(0, np.int64)
        return Spans(empty, empty, empty, np.zeros(0, "U1"))


@runtime_checkable  # specs hold rules, and tests check types
class MaskRule(Protocol):
    """A rule by which rows see keys: a pure function, equal on all ranks, of metadata alone."""

    def slices(self, lengths: Int64[np.ndarray, "sequences"], spans: Spans) -> Slices:
        """Return the mask of sequences end to end.

        Raises:
            DataError: items overlap or leave their sequence, or a row sees no key.
        """


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ModelError(f"a window of {window} rows sees nothing: set it to at least 1, or leave it out")


@dataclass(frozen=True)
class Causal:
    """A rule by which each row sees itself and the rows before it.

    Args:
        window: most rows that a row sees, including itself; None: no limit.

    Raises:
        ModelError: the window is below 1.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        _check_window(self.window)

    def slices(self, lengths: np.ndarray, spans: Spans) -> Slices:
        return _looking_back(_runs(lengths, Spans.none(), ()), self.window)


@dataclass(frozen=True)
class BidirectionalItems:
    """A rule by which rows see the rows before them, and rows of an item all of it, too.

    Args:
        of: modules whose items these are; None: all.
        window: most rows that a row sees, including itself and without later ones; None: no limit.
        whole_items: whether a row sees even those rows of its own item that are before the window. transformers has
            both: in Gemma 3 the window ends at them, too.

    Raises:
        ModelError: the window is below 1.
    """

    of: tuple[str, ...] | None = None
    window: int | None = None
    whole_items: bool = False

    def __post_init__(self) -> None:
        _check_window(self.window)

    def slices(self, lengths: np.ndarray, spans: Spans) -> Slices:
        return _looking_back(_runs(lengths, spans, self.of), self.window, self.whole_items)


@dataclass(frozen=True)
class Prefix:
    """A rule by which rows before the first predicted token see each other, and all rows see the rows before them.

    Args:
        window, whole_items: as in :class:`BidirectionalItems`, where the rows before the first predicted
            token are one item.

    Raises:
        ModelError: the window is below 1.
    """

    window: int | None = None
    whole_items: bool = False

    def __post_init__(self) -> None:
        _check_window(self.window)

    def slices(self, lengths: np.ndarray, spans: Spans) -> Slices:
        if spans.prompts is None:
            raise DataError(
                "attention='prefix' needs the rows before the first predicted token of each sample, which this data"
                " does not say: build its index again"
            )
        sequence = np.flatnonzero(lengths)
        none = np.zeros(len(sequence), np.int64)
        prompts = Spans(sequence, none, spans.prompts[sequence], np.zeros(len(sequence), "U1"))
        return _looking_back(_runs(lengths, prompts, None), self.window, self.whole_items)


@dataclass(frozen=True)
class ItemsAlone:
    """A rule by which rows of an item see that item alone, and all others the rows before them.

    It is the mask of encoder outputs in Cornstarch (arXiv:2503.11367): put before the text, in it, and packed.

    Args:
        of: modules whose items these are; None: all.
    """

    of: tuple[str, ...] | None = None

    def slices(self, lengths: np.ndarray, spans: Spans) -> Slices:
        runs = _runs(lengths, spans, self.of)
        alone = np.where(runs.item, runs.start, runs.begin)
        return Slices.of(runs.start, runs.end, alone, runs.end, False, ~runs.item, int(lengths.sum()))


@dataclass(frozen=True)
class Full:
    """A rule by which each row sees its whole sequence."""

    def slices(self, lengths: np.ndarray, spans: Spans) -> Slices:
        bounds = ragged.offsets(lengths)
        return Slices.of(bounds[:-1], bounds[1:], bounds[:-1], bounds[1:], False, False, int(bounds[-1]))


@dataclass(frozen=True)
class Words:
    """A rule by Cornstarch's bitfields: one word a row, whose bit 0 is text and whose other 62 bits are modalities.

    A row of text sees the rows up to itself with which it shares a bit. Any other row sees the rows with its very word,
    before and after it. No row sees another sequence.

    Args:
        words: function of lengths and spans, as in :meth:`MaskRule.slices`, that returns the words, int64 ``[T]``.
    """

    words: Callable[[np.ndarray, Spans], np.ndarray]

    def slices(self, lengths: np.ndarray, spans: Spans) -> Slices:
        words, total = np.asarray(self.words(lengths, spans)), int(lengths.sum())
        if words.shape != (total,) or words.dtype != np.int64 or (words < 0).any():
            raise DataError(
                f"words of {total} rows are int64 [{total}] and at least 0, with a bit for text and at most 62 for"
                f" modalities; these are {words.dtype} {list(words.shape)}, the least {words.min(initial=TEXT)}"
            )
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        changed = np.append(True, (words[1:] != words[:-1]) | (sequence[1:] != sequence[:-1]))[:total]
        start = np.flatnonzero(changed)
        end, word, of = np.append(start[1:], total)[: len(start)], words[start], sequence[start]
        # All pairs of runs of a sequence, of which those that follow each other make one slice.
        count = np.bincount(of, minlength=len(lengths))
        row = np.repeat(np.arange(len(start)), count[of])
        key = ragged.expand(ragged.starts(count)[of], count[of])
        text = (word & TEXT) > 0
        seen = np.where(text[row], (key <= row) & ((word[row] & word[key]) > 0), word[row] == word[key])
        row, key = row[seen], key[seen]
        goes_on = (row[1:] == row[:-1]) & (key[1:] == key[:-1] + 1)
        first = np.flatnonzero(np.append(True, ~goes_on)[: len(row)])
        last = np.append(first[1:], len(row))[: len(first)] - 1
        row = row[first]
        return Slices.of(
            start[row], end[row], start[key[first]], end[key[last]], False, text[row] & (key[last] == row), total
        )


RULES: Mapping[str, MaskRule] = {
    "causal": Causal(),
    "bidirectional_items": BidirectionalItems(),
    "items_alone": ItemsAlone(),
    "prefix": Prefix(),
    "full": Full(),
}
"""Rules by name."""


def by_window(rule: MaskRule | str, windows: Iterable[int | None]) -> dict[int | None, MaskRule]:
    """Return a rule, or that of a name in :data:`RULES`, for layers of each window, None for those without one.

    Raises:
        ModelError: there is no such name, the rule cannot be hashed, or it knows no window and a layer has one.
    """
    if isinstance(rule, str) and rule not in RULES:
        raise ModelError(f"attention={rule!r}; choose {', '.join(RULES)} or give a rule of hetero_strategy.mask")
    rule, rules = RULES[rule] if isinstance(rule, str) else rule, {}
    try:
        hash(rule)
    except TypeError as error:
        name = type(rule).__name__
        raise ModelError(f"attention: {name} cannot be hashed ({error}); rules are frozen dataclasses") from error
    for window in windows:
        if window is not None and not hasattr(rule, "window"):
            raise ModelError(f"attention={rule} knows no window, and some layers have a window of {window} rows")
        rules[window] = rule if window is None else replace(rule, window=window)  # type: ignore[type-var]
    return rules


def rule_faults(module: str, rule: MaskRule, sources: Collection[str]) -> Iterator[str]:
    """Yield a fault for each module that a rule names and that has no items in the sequences of ``module``.

    Args:
        sources: modules with files of their own and an edge to it.
    """
    of = getattr(rule, "of", None) or ()
    for name in (of,) if isinstance(of, str) else of:
        if name not in sources:
            yield (
                f"{module}: its attention is of items of {name!r}, but modules with files and an edge to it are"
                f" {', '.join(sorted(sources)) or 'none'}"
            )


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of text and items, which fill all rows."""

    begin: np.ndarray
    """First row of each run's sequence."""
    start: np.ndarray
    end: np.ndarray
    item: np.ndarray
    """Whether the run is an item."""


def _runs(lengths: np.ndarray, spans: Spans, of: tuple[str, ...] | None) -> _Runs:
    """Cut sequences into runs of text and of items of some modules."""
    wanted = spans.rows > 0 if of is None else (spans.rows > 0) & np.isin(spans.source, of)
    columns = spans.sequence, spans.start, spans.rows, spans.source
    sequence, position, rows, source = (column[wanted] for column in columns)
    begins = ragged.starts(lengths)
    if (out := (position < 0) | (position + rows > lengths[sequence])).any():
        at = int(np.argmax(out))
        raise DataError(
            f"{source[at]}: an item of {rows[at]} rows from row {position[at]} leaves its sequence {sequence[at]} of"
            f" {lengths[sequence[at]]} rows: correct its start or rows in the metadata"
        )
    first = begins[sequence] + position
    order = np.argsort(first, kind="stable")
    first, end = first[order], (first + rows)[order]
    if (over := end[:-1] > first[1:]).any():
        at = order[np.argmax(over)]
        raise DataError(
            f"{source[at]}: an item of {rows[at]} rows from row {position[at]} of sequence {sequence[at]} overlaps the"
            " next: correct its start or rows in the metadata"
        )
    edges = np.unique(np.concatenate([begins[lengths > 0], first, end]))
    total = int(lengths.sum())
    edges = edges[edges < total]
    number = np.searchsorted(first, edges, side="right") - 1
    item = (number >= 0) & (edges < np.append(end, 0)[number])
    begin = begins[np.searchsorted(begins, edges, side="right") - 1]
    return _Runs(begin, edges, np.append(edges[1:], total)[: len(edges)], item)


def _looking_back(runs: _Runs, window: int | None, whole_items: bool = False) -> Slices:
    """Return the mask of rows that see those before them, as far as a window reaches, and rows of items all of it."""
    begin, start, end, item = runs.begin, runs.start, runs.end, runs.item
    total = int(end[-1]) if len(end) else 0
    if window is None:
        return Slices.of(start, end, begin, end, False, ~item, total)
    # Rows whose window reaches the sequence's first row; those with a whole window; those who see before it their item.
    near = np.clip(begin + window - 1, start, end)
    far = np.where(item & whole_items, np.clip(start + window - 1, near, end), end)
    rows, ends = np.concatenate([start, near, far]), np.concatenate([near, far, end])
    item = np.tile(item, 3)
    return Slices.of(
        rows,
        ends,
        np.concatenate([begin, near - window + 1, start]),
        np.where(item, np.tile(end, 3), ends),
        np.repeat([False, True, False], len(start)),
        ~item,
        total,
    )
