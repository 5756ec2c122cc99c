"""How long a step takes by a formula, for ranking many candidates before few are simulated. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from hetero_strategy import ragged
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.memory import CUDA
from hetero_strategy.planner.partition import split
from hetero_strategy.planner.shape import ModelShape, ModuleShape
from hetero_strategy.planner.space import Degrees, contexts
from hetero_strategy.planner.times import ModuleSeconds, Precision, module_times, synchronization

EVERY = (1, 2, 3, 4)
"""Of so many blocks of a module one may run again."""
BACKWARD = 1.3
"""What a block's backward holds at its peak, over what the block keeps for it: gradients come on top."""
MEMORY_SHARE = 0.92
"""Part of a device's memory that a plan may use; the rest is for the driver, other libraries and gaps."""


@dataclass(frozen=True, eq=False)
class Work:
    """One module's work in a step, on one instance that does it all."""

    forward: Float64[np.ndarray, "blocks"]
    """Seconds of all units."""
    backward: Float64[np.ndarray, "blocks"]
    """Likewise."""
    fixed: float
    """Seconds that each microbatch adds, however few rows it has."""

    @cached_property
    def seconds(self) -> Float64[np.ndarray, "blocks"]:
        """Forward and backward of all units."""
        return self.forward + self.backward

    @cached_property
    def total(self) -> float:
        return float(self.seconds.sum())

    @cached_property
    def forward_share(self) -> float:
        """Share of the forward in all seconds."""
        return float(self.forward.sum()) / self.total if self.total else 0.0


class Estimates:
    """Work of modules at every degree of tensor parallelism, and what follows for a way to lay them out.

    Args:
        batches: global batches of which the mean counts.
        measured: seconds of modules' blocks; others follow from FLOPs.
        given: options that a person gave.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        batches: Sequence[StepMetadata],
        precision: Precision,
        measured: Mapping[str, ModuleSeconds] = MappingProxyType({}),
        given: Given = Given(),  # noqa: B008
    ) -> None:
        self.cluster, self.given, self.shape, self.batches = cluster, given, shape, batches
        self._shape, self._batches, self._precision, self._measured = shape, batches, precision, measured
        self.memory = MEMORY_SHARE * cluster.device.memory
        """Bytes of a device that a plan may use."""
        self.kept = 1.0
        """Activations that blocks keep over those of the formula; what measures them says it."""
        self._states = 3 + (given.accumulated > 1)
        """Numbers per parameter that trains: itself, Adam's two, and a gradient of the batches before."""
        self._allocated = 1.0 if cluster.device.name == "cpu" else 1 + CUDA.margin
        self._fed = shape.fed_by_trainable()
        self._sizes = {name: _sizes(shape.modules[name], name, batches) for name in shape.modules}
        modules = shape.modules.items()
        self._totals = {(name, False): module.held(0, module.blocks) for name, module in modules}
        """Parameters of all stages, and those that train: what both ends of a pipeline (True) have counts twice."""
        self._totals |= {(name, True): (module.parameters.sum(), module.trained.sum()) for name, module in modules}
        self._saved = {
            (name, again): module.saved(given.recomputed(name, again * module.has_blocks), given.offload.get(name))
            for name, module in shape.modules.items()
            for again in (0, *EVERY)
        }
        """By module, and of how many blocks one runs again: numbers per row that blocks keep."""
        self._work: dict[tuple[str, int, int, int], Work] = {}
        self._splits: dict[tuple[str, int, int], float] = {}
        self._cuts: dict[tuple[int, int, bool], tuple[int, ...]] = {}
        self._parts: dict[tuple[int, ...], Estimates] = {}

    def of(self, pools: Sequence[int]) -> Estimates:
        """What holds on some pools of the cluster."""
        if len(self.cluster.pools) == 1:
            return self
        if (key := tuple(pools)) not in self._parts:
            made = Estimates(self._shape, self.cluster.of(key), self._batches, self._precision, given=self.given)
            self._parts[key] = made
        self._parts[key].kept = self.kept
        return self._parts[key]

    def on(self, ranks: Collection[int]) -> Estimates:
        """What holds on some ranks: where they lie in several pools, the slowest device and the least memory."""
        return self if len(self.cluster.pools) == 1 else self.of(self.cluster.pools_of(ranks))

    def work(self, module: str, tp: int, recomputed: int = 0, cp: int = 1) -> Work:
        """A module's work, with so many tensor-parallel and context-parallel ranks."""
        if (key := (module, tp, recomputed, cp)) not in self._work:
            shape = self._shape.modules[module]
            blocks = shape.blocks
            each = (1,) * blocks if shape.has_blocks else (0,)
            layout = ModuleLayout(tuple(range(tp * cp * blocks)), dp_shard=1, tp=tp, cp=cp, pp=blocks, split=each)
            made = module_times(
                shape,
                layout,
                self.cluster,
                fed=self._fed[module],
                recomputed=0.0 if (how := self.given.recomputed(module, recomputed)) is None else how.share(blocks),
                precision=self._precision,
                measured=self._measured.get(module),
            )
            rows, squares, _ = self._sizes[module]
            lines = [[t.forward for t in made], [t.backward for t in made]]
            forward, backward = (np.array([n.per_row * rows + n.per_pair * squares for n in part]) for part in lines)
            fixed = sum(line.fixed for part in lines for line in part)
            self._work[key] = Work(forward, backward, fixed)
        return self._work[key]

    def _work_of(self, module: str, degrees: Degrees) -> Work:
        return self.work(module, degrees.tp, degrees.recomputed, degrees.cp)

    def slowest_share(self, module: str, tp: int, stages: int) -> float:
        """Share of the module's work that its slowest stage has, where it is cut as well as it can be."""
        if stages == 1:
            return 1.0
        if (module, tp, stages) not in self._splits:
            seconds = self.work(module, tp).seconds
            if not seconds.any():  # all that was measured does not grow with rows
                seconds = np.ones_like(seconds)
            ends = ragged.starts(np.asarray(split(seconds, stages)))
            self._splits[module, tp, stages] = float(np.add.reduceat(seconds, ends).max() / seconds.sum())
        return self._splits[module, tp, stages]

    def cut(self, tp: int, pp: int, recomputed: bool) -> tuple[int, ...]:
        """Blocks of all modules one after the other on each rank of one pipeline, so that its slowest takes least."""
        if (tp, pp, recomputed) not in self._cuts:
            modules = self._shape.modules.items()
            seconds = [self.work(name, tp, recomputed and m.has_blocks).seconds for name, m in modules]
            self._cuts[tp, pp, recomputed] = split(np.concatenate(seconds), pp)
        return self._cuts[tp, pp, recomputed]

    def busy(self, module: str, degrees: Degrees, microbatches: int) -> float:
        """Seconds in which a rank of the slowest stage computes, on the busiest instance."""
        work = self._work_of(module, degrees)
        share = self.slowest_share(module, degrees.tp, degrees.pp)
        uneven = self.unevenness(module, degrees.dp, microbatches) if degrees.dp > 1 else 1.0
        total = work.total / degrees.dp * uneven
        return total * share + microbatches * work.fixed / degrees.pp

    def later(self, module: str, degrees: Degrees, microbatches: int) -> float:
        """Seconds in which a rank of the slowest stage computes or synchronizes, after the first microbatch."""
        busy = self.busy(module, degrees, microbatches) * (microbatches - 1) / microbatches
        return busy + self.synchronized(module, degrees, microbatches)

    def unevenness(self, module: str, instances: int, microbatches: int) -> float:
        """Units of the instance that has most in a microbatch over the mean, if they are dealt out evenly."""
        each = self._sizes[module].units / microbatches / instances
        return ceil(each) / each if each else 1.0

    def through(self, module: str, degrees: Degrees, microbatches: int) -> float:
        """Seconds that one microbatch needs through all stages, forward and backward."""
        work = self._work_of(module, degrees)
        uneven = self.unevenness(module, degrees.dp, microbatches)
        return work.total / (degrees.dp * microbatches) * uneven + work.fixed

    def synchronized(self, module: str, degrees: Degrees, microbatches: int) -> float:
        """Seconds of a step in which parameters are gathered or gradients summed and nothing is computed.

        What is gathered once per step runs beside the first forward, and what is gathered and summed with every
        microbatch beside its compute; neither does on cores that ranks share.
        """
        share = self._work_of(module, degrees).forward_share
        through = self.through(module, degrees, microbatches)
        if degrees.once:
            return self.waits(*self._numbers(module, degrees), degrees, share * through / degrees.pp, 0.0)
        gather, scatter, replicas = synchronization(
            *self._numbers(module, degrees), degrees, self.cluster, self._precision
        )
        hidden = 0.0 if self.cluster.shares_cores else through
        forward, backward = share * hidden, (1 - share) * hidden
        return microbatches * (max(0.0, gather - forward) + max(0.0, gather + scatter + replicas - backward))

    def held(self, module: str, degrees: Degrees) -> float:
        """Bytes per rank of parameters, gradients and Adam's states; what a rank holds is not less."""
        parameters, trained, _ = self._numbers(module, degrees)
        return self.holds(parameters, trained, degrees) + (0.0 if degrees.once else self._passing(module, degrees))

    def _passing(self, module: str, degrees: Degrees) -> float:
        """Bytes of whole parameters while a block computes, of those that are gathered with every microbatch: two
        blocks and what lies around them, with the gradients that a backward makes of one block, once more as they are
        summed, and of what lies around.
        """
        stored, size = self._shape.modules[module].stored.sum(axis=3) / degrees.tp, self._precision
        block, around = stored[:, 0].max(axis=0), stored[:, 1].sum(axis=0)
        gathered = size.compute * float((2 * block + around).sum())
        return gathered + float(size.compute * (block + around)[1] + size.master * block[1])

    def holds(self, parameters: float, trained: float, degrees: Degrees) -> float:
        """Likewise of so many parameters of one tensor-parallel and pipeline rank, its shards together."""
        size = self._precision
        shards = (self._states * size.master * trained + size.compute * (parameters - trained)) / degrees.shards
        copied = parameters if degrees.shards > 1 else trained * (size.compute != size.master)
        gathered = size.compute * copied + size.master * trained
        return shards + (gathered if degrees.once else size.master * trained / degrees.shards)

    def waits(
        self, parameters: float, trained: float, blocks: float, degrees: Degrees, before: float, after: float
    ) -> float:
        """Seconds of a step in which so many parameters are gathered or their gradients summed, each once, and nothing
        is computed.

        Args:
            blocks: they are in.
            before: seconds from the step's start until the first forward with them ends.
            after: seconds from the end of their last backward to that of the step's.
        """
        gather, scatter, replicas = synchronization(parameters, trained, blocks, degrees, self.cluster, self._precision)
        if self.cluster.shares_cores:
            return gather + scatter + replicas
        return max(0.0, gather - before) + max(0.0, scatter + replicas - after)

    def _numbers(self, module: str, degrees: Degrees) -> tuple[float, float, float]:
        """Parameters of a rank where stages are equal, its shards together, those of them that train, and blocks."""
        parts = degrees.tp * degrees.pp
        parameters, trained = map(float, self._totals[module, degrees.pp > 1])
        return parameters / parts, trained / parts, self._shape.modules[module].blocks / degrees.pp

    def activations(self, module: str, degrees: Degrees, microbatches: int, held: int = 1) -> float:
        """Bytes per rank that backward needs: one microbatch of all blocks, since a pipeline of n ranks holds n; of its
        own blocks where they run again as a whole. Of one block there is all that its backward makes.

        Args:
            held: microbatches of which a rank has them at a time, see :meth:`ahead_of`.
        """
        shape, tp = self._shape.modules[module], degrees.tp
        uneven = self.unevenness(module, degrees.dp, microbatches)
        rows = self._sizes[module].rows * uneven / (degrees.dp * microbatches)
        how = self.given.recomputed(module, degrees.recomputed * shape.has_blocks)
        left = np.array([1 / tp, 1 / shape.row_parts[tp], 1.0])
        saved, block = self._saved[module, degrees.recomputed] * left, shape.of_block * left
        stages = degrees.pp if how is not None and how.whole else 1
        numbers = held * float(saved.sum()) / stages + (BACKWARD * block - saved / shape.blocks).clip(0.0).sum()
        if degrees.cp > 1:  # keys and values of all other rows, their gradients, and both once more where they arrive
            kept = float(saved.sum() / (block.sum() * stages)) + 3
            numbers += kept * shape.keys / tp * (degrees.cp - 0.5)
        return self.kept * float(numbers) * rows / degrees.cp * self._precision.compute

    def bytes(self, module: str, degrees: Degrees, microbatches: int, held: int = 1) -> float:
        """:meth:`held` and :meth:`activations`, with what the allocator cannot use."""
        return self._allocated * (self.held(module, degrees) + self.activations(module, degrees, microbatches, held))

    def ahead_of(
        self, module: str, ways: Mapping[str, Degrees | ModuleLayout], microbatches: int, apart: bool = False
    ) -> int:
        """Microbatches of which a module holds activations at a time, if it runs in turns with what it feeds: one more
        than a pipeline that it feeds is deep, and another one where it does not wait for that one's ranks.

        Args:
            ways: of all that are looked at together.
            apart: what it feeds has other ranks.
        """
        deepest = max((ways[fed].pp for fed in self.feeds(module) if fed in ways), default=1)
        ahead = ways[module].pp == 1 and (apart or deepest > 1)
        return min(microbatches, deepest + 1 + apart) if ahead else 1

    def needed(self, candidate: Candidate, in_step: bool = False) -> Float64[np.ndarray, "ranks"]:
        """Bytes on every rank.

        Args:
            in_step: encoders on some ranks of what they feed run no microbatch ahead of it, as where all its ranks
                repeat them.
        """
        needed, of, count = np.zeros(self.cluster.ranks), candidate.layouts, candidate.microbatches
        for name, layout in of.items():
            again, e = candidate.recompute.get(name), self.on(layout.ranks)
            whole = candidate.reshard_after_forward == "never"
            degrees = Degrees.of(layout, 0 if again is None else again.every, whole)
            apart = not in_step and any({*of[fed].ranks} != {*layout.ranks} for fed in self.feeds(name))
            needed[[*layout.ranks]] += e.bytes(name, degrees, count, e.ahead_of(name, of, count, apart))
        return needed

    @property
    def room(self) -> Float64[np.ndarray, "ranks"]:
        """Bytes that a plan may use, of every rank's own device."""
        pools = enumerate(self.cluster.pools)
        return np.concatenate([np.full(pool.ranks, self.of([i]).memory) for i, pool in pools])

    def feeds(self, module: str) -> set[str]:
        """Modules that take its rows."""
        return {target for source, target in self._shape.edges if source == module}

    def fitting(self, module: str, degrees: Degrees, microbatches: int) -> Degrees | None:
        """These degrees, recomputed if the activations would not fit otherwise; None: they do not even then."""
        for given in (degrees, degrees._replace(recomputed=1)):
            allowed = self.given.allows(module, given.tp, given.recomputed)
            if allowed and self.activations(module, given, microbatches) < self.memory:
                return given
        return None

    def contexts(self, module: str) -> list[int]:
        """Degrees of context parallelism to try."""
        return contexts(self.cluster.ranks_per_node) if self._shape.modules[module].keys else [1]

    def worth(self, module: str, degrees: Degrees) -> bool:
        """Whether its context parallelism may be worth it: with half as many of such ranks and twice as many instances
        some would have no sample, or one has none that fits into memory, even if all blocks run again; or with tensor
        parallelism in its place it has more work.
        """
        if degrees.cp == 1:
            return True
        tp = degrees.neighbours
        if tp not in self._shape.modules[module].tp:
            return True
        if self.work(module, degrees.tp, 0, degrees.cp).total < self.work(module, tp).total:
            return True
        half = degrees._replace(cp=degrees.cp // 2, dp_shard=2 * degrees.dp_shard, recomputed=1)
        samples = min(len(batch.samples) for batch in self._batches)
        return half.dp > samples or self.activations(module, half, samples // half.dp) > self.memory

    def blocks(self, module: str) -> int:
        """Most stages that a module can be cut into."""
        return self._shape.modules[module].most_stages

    def least_ranks(self, module: str, instances: int | None = None) -> float:
        """Ranks that are needed to hold a module, as shards or replicas.

        Args:
            instances: of a pipelined module, which is gathered once per step; None: it is gathered block by block.
        """
        size, (parameters, trained) = self._precision, map(float, self._totals[module, instances is not None])
        if instances is None:
            held = (self._states + 1) * size.master * trained + size.compute * (parameters - trained)
        else:
            ways = (Degrees(1, 2, instances // n, n) for n in (1, instances))
            held = instances * min(self.holds(parameters, trained, way) for way in ways)
        return held / self.memory

    def synchronized_ranks(self, module: str, degrees: Degrees, microbatches: int) -> float:
        """:meth:`synchronized` times ranks, if it is pipelined."""
        piped = degrees._replace(pp=2)
        return self.synchronized(module, piped, microbatches) * piped.ranks


class _Sizes(NamedTuple):
    """Of a step, on average."""

    rows: float
    squares: float
    """Sum of squared lengths."""
    units: float


def _sizes(module: ModuleShape, name: str, batches: Sequence[StepMetadata]) -> _Sizes:
    lengths = [(b.tokens if module.samplewise else b.items[name].inner_rows).astype(np.float64) for b in batches]
    return _Sizes(*(float(np.mean([f(n) for n in lengths])) for f in (np.sum, lambda n: np.sum(n * n), len)))
