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
from hetero_strategy.data.media import Media, TargetProcessor
from hetero_strategy.errors import DataError
from hetero_strategy.loading.batch import Batch, LoadTimes
from hetero_strategy.loading.metadata import ItemSizes, step_metadata
from hetero_strategy.loading.payload import Content, Items
from hetero_strategy.loading.read_where_sampled import Decoded, DecodedItems, SampledDataset
from hetero_strategy.loading.steps import RankView
from hetero_strategy.plan.step_plan import StepPlan

MESSAGE = 2048
"""Most bytes of what a rank tells the others about a file that cannot be read."""
NOBODY = -1


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
        reader: instance whose payload each rank takes, -1: none; int64 ``[world]``. Ranks of one instance all take
            the same.
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
        """Sizes of all items of the step. How many items each rank has all ranks know beforehand."""
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
        """Rows of all ranks, by rank; ``counts`` says how many each has."""
        if self._group is None or not counts.any():
            return own
        padded = np.zeros((counts.max(), *own.shape[1:]), own.dtype)
        padded[: len(own)] = own
        everyone = [torch.from_numpy(np.empty_like(padded)) for _ in counts]
        dist.all_gather(everyone, torch.from_numpy(padded), group=self._group)
        return np.concatenate([theirs.numpy()[:n] for theirs, n in zip(everyone, counts, strict=True)])

    def _raise(self, decoded: Decoded) -> NoReturn:
        message = next(iter(decoded.failed.values()), "").encode()[:MESSAGE].ljust(MESSAGE, b"\0")
        found = self._gathered(np.frombuffer(message, np.uint8)[None], np.ones(self._world, np.int64))
        lines = "\n".join(bytes(one).rstrip(b"\0").decode(errors="replace") for one in found if one.any())
        raise DataError(f"{lines}; mend the data, or train without such samples: on_error='skip'")

    def _moved(self, who: Moves, items: DecodedItems, home: np.ndarray, length: np.ndarray) -> dict[int, np.ndarray]:
        """Raw rows of every item that this rank computes, by number; ``home`` and ``length`` are those of all items."""
        own = _split(items.values, np.flatnonzero(home == self._rank), length)
        found = {unit: own[unit] for unit in who.kept.tolist()}
        if not who.any:
            return found
        empty = items.values[:0]
        outgoing = torch.from_numpy(np.concatenate([empty, *(own[unit] for unit in who.sent.tolist())]))
        incoming = torch.empty(int(length[who.received].sum()), outgoing.shape[1], dtype=outgoing.dtype)
        rows_to, rows_from = (
            np.bincount(ranks, length[units], self._world).astype(np.int64).tolist()
            for ranks, units in ((who.to, who.sent), (who.source, who.received))
        )
        dist.all_to_all_single(incoming, outgoing, rows_from, rows_to, group=self._group)
        return found | _split(incoming.numpy(), who.received, length)

    def _content(
        self, samples: np.ndarray, measured: Mapping[str, ItemSizes], pieces: Mapping[str, Mapping[int, np.ndarray]]
    ) -> Content:
        """What has come to this rank; ``pieces``: by module, then number, raw rows of the items that it computes."""
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

        return Content(index, samples, items, values, {name: sizes.rows for name, sizes in measured.items()})


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
