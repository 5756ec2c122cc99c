"""Read payload where it is sampled, and move it to where it is computed: OrchMLLM's all-to-all batch communicator.

This serves data whose sizes are known only after decoding. Each rank decodes its home samples in its workers. Then all
ranks learn all sizes (one all-gather of a few numbers for each item) and make the same plan. Payload moves once, in one
all-to-all per module and step, each item straight to the ranks that compute it (section 5.2.1; an all-gather of all
payload is the paper's strawman). All of it runs ahead of need on the host, so it overlaps with training (section 6).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from hetero_strategy import ragged
from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.media import of_items, too_long, zero_rows
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.loading.batch import Batch, LoadTimes
from hetero_strategy.loading.metadata import ItemSizes, step_metadata
from hetero_strategy.loading.steps import Place, RankView, StepDataset, complaint
from hetero_strategy.model.kind import Content, Items, Media, TargetProcessor
from hetero_strategy.plan.step_plan import StepPlan

MESSAGE = 2048
"""Most bytes of a rank's message to other ranks about a file that cannot be read."""
NOBODY = -1


@dataclass(frozen=True)
class DecodedItems:
    """The items of one module that a rank has read, by sample, then order in it."""

    values: np.ndarray
    """Raw rows end to end, ``[R, feature]``, without unread items."""
    numbers: np.ndarray
    """Numbers of each item, int64 ``[n, k + 2]``: its sizes as the processor measures them, its raw rows, and its rows
    that cross the module's edges. If its sample could not be read, raw rows are -1 and all other numbers 0."""


@dataclass(frozen=True)
class Decoded:
    """The items that one rank has read of a global batch."""

    epoch: int
    step: int
    items: Mapping[str, DecodedItems]
    failed: Mapping[int, str]
    """Data set index of every sample that could not be read -> reason, with the file's name."""
    seconds: float
    """Seconds that reading took."""


class SampledDataset(StepDataset):
    """A map-style data set over the steps of an epoch; an item is the payload of the samples at home on this rank.

    Sample ``k`` of a step is at home on rank ``k mod world``. Global batches, order and length are those of
    :class:`StepDataset` with the same options. A sample with an item that cannot be read, or with more than the index's
    ``max_tokens``, gives up all its items; all ranks decide together what happens to it when the step is dispatched.
    """

    def __init__(self, index: DatasetIndex, *args: Any, rank: int = 0, world: int = 1, **options: Any) -> None:
        super().__init__(index, *args, **options)
        if index.measured:
            raise ConfigError(
                f"{index.folder}: the index holds the sizes of all media; payload='all_to_all' needs one built with"
                " measure=False, or use payload='fetch'"
            )
        self.rank, self.world = rank, world

    def home(self, samples: int) -> np.ndarray:
        """Return the rank that reads each of a step's samples, int64 ``[S]``."""
        return np.arange(samples, dtype=np.int64) % self.world

    def __getitem__(self, place: int | Place) -> Decoded:  # type: ignore[override]  # a part of a batch
        """Return the payload at home here of (epoch, step), or of a step of epoch 0."""
        epoch, step = self.place(place)
        began = time.perf_counter()
        samples = self.samples(epoch, step)
        home_samples = samples[self.home(len(samples)) == self.rank]
        failed: dict[int, str] = {}
        raw = {name: _decoded(self.index, name, p, home_samples, failed) for name, p in self.processors.items()}
        self._refuse_long(home_samples, {name: items.numbers[:, -1] for name, items in raw.items()}, failed)
        bad = np.isin(home_samples, list(failed))
        items = {
            name: _without(one, np.repeat(bad, self.index.counts(name, home_samples))) for name, one in raw.items()
        }
        return Decoded(epoch, step, items, failed, time.perf_counter() - began)

    def _refuse_long(self, samples: np.ndarray, rows: Mapping[str, np.ndarray], failed: dict[int, str]) -> None:
        most = self.index.max_tokens
        if most is None:
            return
        tokens = np.asarray(self.index.offsets[samples + 1] - self.index.offsets[samples])
        per_item: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for module, item_rows in rows.items():
            counts = self.index.counts(module, samples)
            of_sample = np.repeat(np.arange(len(samples)), counts)
            per_item[self.processors[module].field] = of_sample, item_rows
            tokens = tokens + np.bincount(of_sample, item_rows - 1, len(samples)).astype(np.int64)
        for place in np.flatnonzero(tokens > most).tolist():
            sample = int(samples[place])
            items = of_items(
                self.processors,
                {field: item_rows[of_sample == place].tolist() for field, (of_sample, item_rows) in per_item.items()},
            )
            text = too_long(int(tokens[place]), items, most)
            failed.setdefault(sample, f"sample '{self.index.names[sample]}': {text}")


def _decoded(
    index: DatasetIndex, module: str, processor: Media, samples: np.ndarray, failed: dict[int, str]
) -> DecodedItems:
    """Decode all items of some samples; items of failed samples have no rows."""
    table, numbers = index.items[module], index.item_numbers(module, samples)
    measured = np.zeros((len(numbers), len(processor.size_names) + 2), np.int64)
    values = [zero_rows(processor)]
    for place, item in enumerate(numbers.tolist()):
        sample = int(table.sample[item])
        if sample in failed:
            continue
        path = index.path(module, item)
        try:
            sizes, rows = processor.measure(path)
            values.append(processor.load(path, sizes))
            if values[-1].dtype != values[0].dtype:
                raise ConfigError(
                    f"the processor of '{module}' gives rows of {values[-1].dtype}, but its dtype says"
                    f" {values[0].dtype}; let {type(processor).__name__}.load give these, or set its dtype"
                )
            measured[place] = (*sizes, len(values[-1]), rows)
        except (DataError, OSError) as error:
            failed[sample] = complaint(index, module, sample, error)
    return DecodedItems(np.concatenate(values), measured)


def _without(items: DecodedItems, bad: np.ndarray) -> DecodedItems:
    """Return the items with those in ``bad``, bool ``[n]``, marked as unread."""
    if not bad.any():
        return items
    unread = np.zeros_like(items.numbers[0])
    unread[-2] = -1
    numbers = np.where(bad[:, None], unread, items.numbers)
    return DecodedItems(items.values[np.repeat(~bad, items.numbers[:, -2])], numbers)


@dataclass(frozen=True)
class Moves:
    """The items of one module that a rank keeps, sends and receives; all int64."""

    kept: np.ndarray
    """Items that this rank has read and computes."""
    sent: np.ndarray
    """Items to send, by receiving rank, then number; one entry for every rank that computes the item."""
    to: np.ndarray
    """Receiving rank of each entry of ``sent``."""
    received: np.ndarray
    """Items to receive, by sending rank, then number."""
    source: np.ndarray
    """Sending rank of each entry of ``received``."""
    any: bool
    """Whether any rank sends anything."""


def moves(home: np.ndarray, instance: np.ndarray, reader: np.ndarray, rank: int) -> Moves:
    """Compute a rank's moves, so that every rank gets the items that it computes. Pure.

    Args:
        home: rank that has read each item of the step, int64 ``[n]``.
        instance: instance that computes each item, int64 ``[n]``.
        reader: instance whose payload each rank takes, -1: none; int64 ``[world]``. All ranks of one instance take the
            same.
        rank: rank whose moves are computed.
    """
    ranks = np.argsort(reader, kind="stable")
    first = np.searchsorted(reader[ranks], instance, side="left")
    count = np.searchsorted(reader[ranks], instance, side="right") - first
    home_items = np.flatnonzero(home == rank)
    sent, to = np.repeat(home_items, count[home_items]), ranks[ragged.expand(first[home_items], count[home_items])]
    sent, to = sent[to != rank], to[to != rank]
    order = np.lexsort((sent, to))
    taken = np.flatnonzero(instance == reader[rank]) if reader[rank] != NOBODY else home_items[:0]
    kept, received = taken[home[taken] == rank], taken[home[taken] != rank]
    received = received[np.argsort(home[received], kind="stable")]
    crossing = bool(count.sum() > np.count_nonzero(reader[home] == instance))
    return Moves(kept, sent[order], to[order], received, home[received], crossing)


class Dispatch:
    """The ``finish`` function of a loader, which turns the decoded parts of all ranks into each rank's :class:`Batch`.

    The batch equals, bit for bit, the one that :class:`~hetero_strategy.loading.steps.StepDataset` makes of a measured
    index.

    Args:
        shares: view of each rank on the work, by rank.
        group: host group of all ranks that only the loading thread uses; None: this process is the only one.
    """

    def __init__(
        self, steps: SampledDataset, shares: Sequence[RankView], group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = group
        self._rank, self._world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if (steps.rank, steps.world, len(shares)) != (self._rank, self._world, self._world):
            raise ValueError(
                f"rank {self._rank} of {self._world} dispatches what is read as rank {steps.rank} of {steps.world}, to"
                f" {len(shares)} ranks"
            )
        self.steps = steps
        self._readers = {
            name: np.array([_taken(share, name, isinstance(p, TargetProcessor)) for share in shares], np.int64)
            for name, p in steps.processors.items()
        }

    def __call__(self, decoded: Decoded) -> Batch:
        """Return the batch of a step. All ranks call it for the same steps in the same order.

        Raises:
            DataError: a sample could not be read and ``on_error`` is ``stop``; raised on every rank.
        """
        began = time.perf_counter()
        steps = self.steps
        samples = steps.samples(decoded.epoch, decoded.step)
        home = steps.home(len(samples))
        measured = self._measured(decoded, samples, home)
        if steps.on_error == "stop" and not all(sizes.read.all() for sizes in measured.values()):
            self._raise(decoded)
        known = time.perf_counter()
        metadata = step_metadata(steps.index, decoded.epoch, decoded.step, samples, steps.processors, measured)
        plan = steps.plan_of(metadata)
        assert plan.digest  # as in StepDataset
        planned = time.perf_counter()
        pieces: dict[str, dict[int, np.ndarray]] = {}
        for name, sizes in measured.items():
            at = home[metadata.items[name].sample]
            who = moves(at, _instances(plan, name), self._readers[name], self._rank)
            pieces[name] = self._moved(who, decoded.items[name], at, sizes.length[sizes.read])
        inputs = steps.inputs(plan, self._content(samples, measured, pieces))
        seconds = decoded.seconds + known - began + time.perf_counter() - planned
        times = LoadTimes(planned - known, seconds)
        return steps.compiled(Batch(plan, inputs, times, mine=steps.share.mine, failed=decoded.failed))

    def _measured(self, decoded: Decoded, samples: np.ndarray, home: np.ndarray) -> dict[str, ItemSizes]:
        """Exchange the sizes of all items of the step; all ranks know in advance how many items each rank has."""
        index, processors = self.steps.index, self.steps.processors
        by_home = [ragged.group_by(np.repeat(home, index.counts(name, samples)), self._world) for name in processors]
        widths = [len(processor.size_names) + 2 for processor in processors.values()]
        counts = np.array([np.diff(bounds) * width for (_, bounds), width in zip(by_home, widths, strict=True)])
        own = np.concatenate([np.zeros(0, np.int64), *(decoded.items[name].numbers.ravel() for name in processors)])
        parts = np.split(self._gathered(own, counts.sum(axis=0)), np.cumsum(counts.T)[:-1])  # by rank, then by module
        measured = {}
        for k, (name, processor) in enumerate(processors.items()):
            by_rank, _ = by_home[k]
            table = np.empty((len(by_rank), widths[k]), np.int64)
            table[by_rank] = np.concatenate(parts[k :: len(processors)]).reshape(-1, widths[k])
            measured[name] = _sizes(table, processor)
        return measured

    def _gathered(self, own: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Gather the rows of all ranks, by rank; ``counts``: the number of rows of each."""
        if self._group is None or not counts.any():
            return own
        padded = np.zeros((counts.max(), *own.shape[1:]), own.dtype)
        padded[: len(own)] = own
        everyone = [torch.from_numpy(np.empty_like(padded)) for _ in counts]
        dist.all_gather(everyone, torch.from_numpy(padded), group=self._group)
        return np.concatenate([theirs.numpy()[:n] for theirs, n in zip(everyone, counts, strict=True)])

    def _raise(self, decoded: Decoded) -> NoReturn:
        message = next(iter(decoded.failed.values()), "").encode()[:MESSAGE].ljust(MESSAGE, b"\0")
        messages = self._gathered(np.frombuffer(message, np.uint8)[None], np.ones(self._world, np.int64))
        lines = "\n".join(bytes(one).rstrip(b"\0").decode(errors="replace") for one in messages if one.any())
        raise DataError(f"{lines}; mend the data, or train without such samples: on_error='skip'")

    def _moved(self, who: Moves, items: DecodedItems, home: np.ndarray, length: np.ndarray) -> dict[int, np.ndarray]:
        """Exchange items; return the raw rows of each that this rank computes, by number; ``home``, ``length``: of all
        items.
        """
        own = _split(items.values, np.flatnonzero(home == self._rank), length)
        rows_of = {unit: own[unit] for unit in who.kept.tolist()}
        if not who.any:
            return rows_of
        empty = items.values[:0]
        outgoing = torch.from_numpy(np.concatenate([empty, *(own[unit] for unit in who.sent.tolist())]))
        incoming = torch.empty(int(length[who.received].sum()), outgoing.shape[1], dtype=outgoing.dtype)
        rows_to, rows_from = (
            np.bincount(ranks, length[units], self._world).astype(np.int64).tolist()
            for ranks, units in ((who.to, who.sent), (who.source, who.received))
        )
        dist.all_to_all_single(incoming, outgoing, rows_from, rows_to, group=self._group)
        return rows_of | _split(incoming.numpy(), who.received, length)

    def _content(
        self, samples: np.ndarray, measured: Mapping[str, ItemSizes], pieces: Mapping[str, Mapping[int, np.ndarray]]
    ) -> Content:
        """Describe the items that have arrived; ``pieces``: by module, then number, raw rows of this rank's items."""
        index = self.steps.index
        of_step = {
            name: Items(index.item_numbers(name, samples)[x.read], x.sizes[x.read], x.rows[x.read])
            for name, x in measured.items()
        }

        def items(module: str, units: np.ndarray) -> Items:
            known = of_step[module]
            return Items(known.numbers[units], known.sizes[units], known.rows[units])

        def values(module: str, units: np.ndarray) -> list[np.ndarray]:
            return [pieces[module][unit] for unit in units.tolist()]

        def text(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rows = {}
            for module, sizes in measured.items():  # unread items have rows in the text, too
                counts = index.counts(module, samples)
                rows[module] = sizes.rows[ragged.expand(ragged.starts(counts)[units], counts[units])]
            return index.text(samples[units], rows)

        return Content(text, items, values)


def _taken(share: RankView, module: str, target: bool) -> int:
    """Return the instance whose payload a rank takes."""
    instance = share.mine.get(module)
    return NOBODY if instance is None or not share.reads(module, target=target) else instance


def _instances(plan: StepPlan, module: str) -> np.ndarray:
    """Return the instance that computes each item of the step, int64 ``[n]``."""
    instances = np.zeros(len(plan.metadata.items[module].sample), np.int64)
    for assignment in plan.assignments[module]:
        instances[assignment.units] = assignment.instance()
    return instances


def _sizes(table: np.ndarray, processor: Media) -> ItemSizes:
    """Unpack gathered sizes, int64 ``[n, k + 2]``."""
    sizes, length, rows = table[:, :-2], table[:, -2], table[:, -1]
    read = length >= 0
    inner_rows, targets = np.zeros(len(table), np.int64), None
    inner_rows[read] = processor.inner_rows(sizes[read])
    if isinstance(processor, TargetProcessor):
        targets = np.zeros(len(table), np.int64)
        targets[read] = processor.target_elements(sizes[read])
    return ItemSizes(np.ascontiguousarray(sizes), length, rows, inner_rows, read, targets)


def _split(values: np.ndarray, units: np.ndarray, length: np.ndarray) -> dict[int, np.ndarray]:
    """Return views of the rows of some items that lie end to end, by number."""
    return dict(zip(units.tolist(), np.split(values, np.cumsum(length[units])[:-1]), strict=False))
