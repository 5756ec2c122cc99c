"""From where payload was sampled to where the step plan has it computed: OrchMLLM's all-to-all batch communicator.

For data whose sizes are known only after decoding. Each rank decodes the samples that are at home there; all ranks then
learn all sizes (one all-gather of a few numbers for each item) and make the same plan; payload moves once, in one
all-to-all per module and step, each item straight to the ranks that compute it (section 5.2.1; an all-gather of all
payload is the paper's strawman). All of it runs ahead of need on the host, so it overlaps with training (section 6).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from hetero_strategy import ragged
from hetero_strategy.data.dataset_index import DatasetIndex
from hetero_strategy.data.media import Media, TargetProcessor
from hetero_strategy.errors import DataError
from hetero_strategy.loading.batch import Batch, LoadTimes
from hetero_strategy.loading.metadata import ItemSizes, step_metadata
from hetero_strategy.loading.payload import Items
from hetero_strategy.loading.read_where_sampled import Decoded, DecodedItems, SampledDataset
from hetero_strategy.loading.steps import RankView
from hetero_strategy.plan.step_plan import StepPlan

MESSAGE = 2048
"""Most bytes of what a rank tells the others about a file that cannot be read."""
NOBODY = -1


@dataclass(frozen=True)
class DispatchedBytes:
    """Bytes of one step."""

    sizes: int
    """That this rank contributes to the all-gather of sizes."""
    sent: int
    """Payload to other ranks."""
    received: int
    """Payload from other ranks."""
    everything: int
    """Of the whole step's payload, each item once."""


@dataclass(frozen=True)
class Moves:
    """Items of one module that a rank keeps, sends and receives; all int64."""

    kept: np.ndarray
    """Items at home here and computed here."""
    sent: np.ndarray
    """Items by receiving rank, then number; one for every rank that computes it."""
    to: np.ndarray
    """Rank that each of them goes to."""
    received: np.ndarray
    """Items by sending rank, then number."""
    source: np.ndarray
    """Rank that each of them comes from."""
    any: bool
    """Whether any rank sends anything."""


def moves(home: np.ndarray, instance: np.ndarray, reader: np.ndarray, rank: int) -> Moves:
    """What a rank has to do so that every rank has the items that it computes. Pure.

    Args:
        home: rank that has read each item of the step, int64 ``[n]``.
        instance: that computes each item, int64 ``[n]``.
        reader: instance whose payload each rank takes, -1: none; int64 ``[world]``. Ranks of one instance (tensor
            parallel ones) all take the same.
        rank: whose moves.
    """
    ranks = np.argsort(reader, kind="stable")
    first = np.searchsorted(reader[ranks], instance, side="left")
    count = np.searchsorted(reader[ranks], instance, side="right") - first
    mine = np.flatnonzero(home == rank)
    sent, to = np.repeat(mine, count[mine]), ranks[ragged.expand(first[mine], count[mine])]
    sent, to = sent[to != rank], to[to != rank]
    order = np.lexsort((sent, to))
    taken = np.flatnonzero(instance == reader[rank]) if reader[rank] != NOBODY else mine[:0]
    kept, received = taken[home[taken] == rank], taken[home[taken] != rank]
    received = received[np.argsort(home[received], kind="stable")]
    crossing = bool(count.sum() > np.count_nonzero(reader[home] == instance))
    return Moves(kept, sent[order], to[order], received, home[received], crossing)


class Dispatch:
    """Makes what every rank has decoded of a step each rank's :class:`Batch`; one of a loader's ``finish`` functions.

    The batch equals the one that :class:`~hetero_strategy.loading.steps.StepDataset` makes of a measured index, bit for
    bit. Where ``on_error`` is ``skip``, `hetero_strategy.loading.agree.Agree` has to follow.

    Args:
        steps: whose items are dispatched.
        shares: what each rank computes, by rank.
        group: of all ranks, on the host, used by the loading thread alone; None: this process is the only one.
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
        self.traffic = DispatchedBytes(0, 0, 0, 0)
        """Of the last step."""

    def __call__(self, decoded: Decoded) -> Batch:
        """The batch of a step. All ranks call it for the same steps in the same order.

        Raises:
            DataError: a sample could not be read and ``on_error`` is ``stop``; the same on every rank.
        """
        began = time.perf_counter()
        steps = self.steps
        samples = steps.samples(decoded.epoch, decoded.step)
        home = steps.home(len(samples))
        measured = self._measured(decoded, samples, home)
        if steps.on_error == "stop" and not all(sizes.read.all() for sizes in measured.values()):
            self._raise(decoded)
        known = time.perf_counter()
        metadata = step_metadata(steps.index, decoded.epoch, decoded.step, samples, measured)
        plan = steps.plan_of(metadata)
        assert plan.digest  # as in StepDataset
        planned = time.perf_counter()
        sent = received = everything = 0
        pieces: dict[str, dict[int, np.ndarray]] = {}
        for name, sizes in measured.items():
            length, width = sizes.length[sizes.read], 4 * steps.processors[name].feature
            at = home[metadata.items[name].sample]
            who = moves(at, _instances(plan, name), self._readers[name], self._rank)
            pieces[name] = self._moved(who, decoded.items[name], at, length)
            sent += int(length[who.sent].sum()) * width
            received += int(length[who.received].sum()) * width
            everything += int(length.sum()) * width
        numbers = sum(one.sizes.size + one.length.size + one.rows.size for one in decoded.items.values())
        self.traffic = DispatchedBytes(8 * numbers, sent, received, everything)
        inputs = steps.inputs(plan, Dispatched(steps.index, samples, measured, pieces))
        seconds = decoded.seconds + known - began + time.perf_counter() - planned
        times = LoadTimes(planned - known, seconds)
        return steps.compiled(Batch(plan, inputs, times, mine=steps.share.mine, failed=decoded.failed))

    def _measured(self, decoded: Decoded, samples: np.ndarray, home: np.ndarray) -> dict[str, ItemSizes]:
        """Sizes of all items of the step. How many items each rank has all ranks know beforehand."""
        index, processors = self.steps.index, self.steps.processors
        own = [np.column_stack([x.sizes, x.length, x.rows]).ravel() for x in (decoded.items[n] for n in processors)]
        homes = {name: np.repeat(home, index.counts(name, samples)) for name in processors}
        ahead = np.zeros(self._world, np.int64)  # numbers of each rank before the module's
        place = {}
        for name, processor in processors.items():
            width, at = len(processor.size_names) + 2, homes[name]
            counts = np.bincount(at, minlength=self._world)
            by_rank = np.argsort(at, kind="stable")
            among = np.empty(len(at), np.int64)  # its rank's items
            among[by_rank] = np.arange(len(at)) - np.repeat(ragged.starts(counts), counts)
            place[name] = (ahead[at] + among * width)[:, None] + np.arange(width)
            ahead += counts * width
        gathered = self._gathered(np.concatenate([np.zeros(0, np.int64), *own]), int(ahead.max()))
        return {
            name: _sizes(gathered[homes[name][:, None], place[name]], processor)
            for name, processor in processors.items()
        }

    def _gathered(self, values: np.ndarray, most: int) -> np.ndarray:
        """``[world, most]``: the values of every rank, each at most that many."""
        own = np.zeros(most, values.dtype)
        own[: len(values)] = values
        if self._group is None or not most:
            return np.tile(own, (self._world, 1))
        everyone = torch.empty(self._world, most, dtype=torch.from_numpy(own).dtype)
        dist.all_gather(list(everyone), torch.from_numpy(own), group=self._group)
        return everyone.numpy()

    def _raise(self, decoded: Decoded) -> NoReturn:
        message = next(iter(decoded.failed.values()), "").encode()[:MESSAGE]
        found = self._gathered(np.frombuffer(message, np.uint8), MESSAGE)
        said = [bytes(one).rstrip(b"\0").decode(errors="replace") for one in found]
        lines = "\n".join(one for one in said if one)
        raise DataError(f"{lines}; mend the data, or train without such samples: on_error='skip'")

    def _moved(self, who: Moves, items: DecodedItems, home: np.ndarray, length: np.ndarray) -> dict[int, np.ndarray]:
        """Raw rows of every item that this rank computes, by number.

        Args:
            who: moves what.
            items: that this rank has read.
            home: rank that has read each item of the step, int64 ``[n]``.
            length: raw rows of each item of the step, int64 ``[n]``.
        """
        own = _split(items.values, np.flatnonzero(home == self._rank), length)
        found = {unit: own[unit] for unit in who.kept.tolist()}
        if not who.any:
            return found
        empty = items.values[:0]
        outgoing = torch.from_numpy(np.concatenate([empty, *(own[unit] for unit in who.sent.tolist())]))
        incoming = torch.empty(int(length[who.received].sum()), outgoing.shape[1])
        rows_to, rows_from = (
            np.bincount(ranks, length[units], self._world).astype(np.int64).tolist()
            for ranks, units in ((who.to, who.sent), (who.source, who.received))
        )
        dist.all_to_all_single(incoming, outgoing, rows_from, rows_to, group=self._group)
        return found | _split(incoming.numpy(), who.received, length)


class Dispatched:
    """What has come to this rank, as the :class:`~hetero_strategy.loading.payload.Content` of its inputs.

    Args:
        index: of the data set.
        samples: of the step, int64 ``[S]``.
        measured: sizes of all items of the step, by module.
        pieces: raw rows of the items that this rank computes, by module, then number.
    """

    def __init__(
        self,
        index: DatasetIndex,
        samples: np.ndarray,
        measured: Mapping[str, ItemSizes],
        pieces: Mapping[str, Mapping[int, np.ndarray]],
    ) -> None:
        self._index, self._samples, self._measured, self._pieces = index, samples, measured, pieces
        self._items = {
            name: Items(index.item_numbers(name, samples)[x.read], x.sizes[x.read], x.rows[x.read])
            for name, x in measured.items()
        }

    def items(self, module: str, units: np.ndarray) -> Items:
        all_items = self._items[module]
        return Items(all_items.numbers[units], all_items.sizes[units], all_items.rows[units])

    def values(self, module: str, units: np.ndarray) -> list[np.ndarray]:
        return [self._pieces[module][unit] for unit in units.tolist()]

    def text(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = {}
        for name, found in self._measured.items():
            counts = self._index.counts(name, self._samples)
            rows[name] = found.rows[ragged.expand(ragged.starts(counts)[units], counts[units])]
        return self._index.text(self._samples[units], rows)


def _taken(share: RankView, module: str, target: bool) -> int:
    """Instance whose payload a rank takes."""
    instance = share.mine.get(module)
    return NOBODY if instance is None or not share.reads(module, target=target) else instance


def _instances(plan: StepPlan, module: str) -> np.ndarray:
    """Instance that computes each item of the step, int64 ``[n]``."""
    found = np.zeros(len(plan.metadata.items[module].sample), np.int64)
    for assignment in plan.assignments[module]:
        found[assignment.units] = assignment.instance()
    return found


def _sizes(table: np.ndarray, processor: Media) -> ItemSizes:
    """From what was gathered, int64 ``[n, k + 2]``."""
    sizes, length, rows = table[:, :-2], table[:, -2], table[:, -1]
    read = length >= 0
    inner_rows, targets = np.zeros(len(table), np.int64), None
    inner_rows[read] = processor.inner_rows(sizes[read])
    if isinstance(processor, TargetProcessor):
        targets = np.zeros(len(table), np.int64)
        targets[read] = processor.target_elements(sizes[read])
    return ItemSizes(np.ascontiguousarray(sizes), length, rows, inner_rows, read, targets)


def _split(values: np.ndarray, units: np.ndarray, length: np.ndarray) -> dict[int, np.ndarray]:
    """Views of the rows of some items that lie end to end, by number."""
    return dict(zip(units.tolist(), np.split(values, np.cumsum(length[units])[:-1]), strict=False))
