"""Estimated seconds of a step by a formula, to rank many candidates before few are simulated. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import lcm
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from hetero_strategy import ragged
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.layout.split_layers import split
from hetero_strategy.model.spec import ModelSpec, ModuleSpec, kept_shares
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.parallelize.transforms import key_of, recomputed, way
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.space import Degrees, contexts
from hetero_strategy.profiling.memory import CUDA
from hetero_strategy.profiling.stage_memory import ADAM_STATES, ParameterBytes, parameter_bytes
from hetero_strategy.schedule.action import Kind
from hetero_strategy.simulator.balance_context import attention_rules
from hetero_strategy.simulator.cluster import Numbers
from hetero_strategy.simulator.cost_model import CostModel, expert_synchronization, synchronization
from hetero_strategy.simulator.stage_times import StageTimes

BACKWARD = 1.3
"""Peak of a block's backward over the bytes the block keeps for it: gradients come on top."""
QUANTILES = tuple((NormalDist().inv_cdf((k + 0.5) / 8), (3 * k % 8 + 0.5) / 8) for k in range(8))
"""Quantiles of a normal distribution, each with one of a uniform distribution."""
MEMORY_SHARE = 0.92
"""Share of a device's memory that a plan may use; the rest is for the driver, other libraries and gaps."""


@dataclass(frozen=True, eq=False)
class Work:
    """A module's work in a step, on one instance that does it all."""

    forward: Float64[np.ndarray, "blocks"]
    """Forward seconds of all units."""
    backward: Float64[np.ndarray, "blocks"]
    """Backward seconds of all units."""
    fixed: float
    """Seconds that each microbatch adds, however few rows it has; with the latency of exchanges of keys."""
    travel: float = 0.0
    """Seconds that ranks wait for keys of other context-parallel ranks if all of these share each sequence, without
    latency."""

    @cached_property
    def seconds(self) -> Float64[np.ndarray, "blocks"]:
        """Return the forward and backward seconds of all units."""
        return self.forward + self.backward

    @cached_property
    def total(self) -> float:
        return float(self.seconds.sum())

    @cached_property
    def forward_share(self) -> float:
        """Return the forward's share of all seconds."""
        return float(self.forward.sum()) / self.total if self.total else 0.0


class Estimates:
    """A table of the work of modules at every degree of tensor parallelism, and the estimates that follow from it.

    Degrees may hold arrays of pipeline ranks, replicas and shards, next to arrays of microbatches: an entry for each
    layout, all of which are then estimated at once.

    Args:
        costs: seconds of the model's stages on the cluster.
        batches: global batches whose mean counts.
        options: options that the user set.
    """

    def __init__(
        self,
        costs: CostModel,
        batches: Sequence[StepMetadata],
        options: RunOptions = RunOptions(),  # noqa: B008
    ) -> None:
        self.cluster, self.options, self.shape, self.batches = costs.cluster, options, costs.spec, batches
        self._costs, shape, cluster = costs, costs.spec, costs.cluster
        self.memory = MEMORY_SHARE * cluster.device.memory
        """Bytes of a device that a plan may use."""
        self.kept = 1.0
        """Ratio of the activations that blocks keep to those of the formula; measurements set it."""
        self._earlier = options.accumulated > 1
        """Whether a rank holds gradients of earlier batches."""
        self._allocated = 1.0 if cluster.device.name == "cpu" else 1 + CUDA.margin
        self._sizes = {name: _sizes(shape, name, batches) for name in shape.modules}
        modules = shape.modules.items()
        self._totals = {(name, False): module.held(0, module.blocks) for name, module in modules}
        """Parameters of all stages, and those that train; with True, parameters shared by both pipeline ends count
        twice."""
        self._totals |= {(name, True): (module.parameters.sum(), module.trained.sum()) for name, module in modules}
        self.choices = {name: [*options.choices(module).values()] for name, module in modules}
        """Transforms that a plan may add to each module, the least first and the most last."""
        self._saved: dict[tuple[str, Hashable], np.ndarray] = {}
        self._work: dict[tuple[str, int, Hashable, int, int], Work] = {}
        self._splits: dict[tuple[str, int, int], float] = {}

    def work(self, module: str, tp: int, transforms: tuple[Transform, ...] = (), cp: int = 1, ep: int = 1) -> Work:
        """Return a module's work with so many tensor-parallel, context-parallel and expert-parallel ranks.

        Args:
            transforms: transforms of the module; those of the user that are missing count, too.
        """
        of = self.options.of(module, transforms)
        if (key := (module, tp, key_of(of.values()), cp, ep)) not in self._work:
            shape = self.shape.modules[module]
            blocks = shape.blocks
            each = (1,) * blocks if shape.has_blocks else (0,)
            shards = lcm(ep, tp * cp) // (tp * cp)
            ranks = tuple(range(shards * tp * cp * blocks))
            layout = ModuleLayout(ranks, dp_shard=shards, tp=tp, cp=cp, ep=ep, pp=blocks, split=each)
            stages = self._costs.stages(module, layout, recomputed(of, blocks)[0])
            rows, squares, *_ = self._sizes[module]
            lines = [[t.forward for t in stages], [t.backward for t in stages]]
            forward, backward = (np.array([n.per_row * rows + n.per_pair * squares for n in part]) for part in lines)
            fixed = sum(line.fixed for part in lines for line in part)
            fixed += sum(t.keys.latency * (t.keys.exchanges("F") + t.keys.exchanges("B")) for t in stages if t.keys)
            self._work[key] = Work(forward, backward, fixed, _travel(stages, rows, squares, cp))
        return self._work[key]

    def _work_of(self, module: str, degrees: Degrees) -> Work:
        return self.work(module, degrees.tp, degrees.transforms, degrees.cp, degrees.ep)

    def slowest_share(self, module: str, tp: int, stages: int) -> float:
        """Return the share of the module's work that its slowest stage has if it is cut as well as it can be."""
        if stages == 1:
            return 1.0
        if (module, tp, stages) not in self._splits:
            seconds = self.work(module, tp).seconds
            if not seconds.any():  # all that was measured does not grow with rows
                seconds = np.ones_like(seconds)
            ends = ragged.starts(np.asarray(split(seconds, stages, self.shape.modules[module].first_blocks)))
            self._splits[module, tp, stages] = float(np.add.reduceat(seconds, ends).max() / seconds.sum())
        return self._splits[module, tp, stages]

    def busy(self, module: str, degrees: Degrees, microbatches: Numbers) -> Numbers:
        """Return the seconds in which a rank of the slowest stage computes, on the busiest instance."""
        work, stages = self._work_of(module, degrees), np.ravel(degrees.pp).tolist()
        shares = [self.slowest_share(module, degrees.tp, n) for n in stages]
        share = np.reshape(shares, np.shape(degrees.pp))
        uneven = np.where(np.greater(degrees.dp, 1), self.unevenness(module, degrees.dp, microbatches), 1.0)
        total = (work.total + self.exposed_keys(module, degrees, microbatches)) / degrees.dp * uneven
        return total * share + microbatches * work.fixed / degrees.pp

    def later(self, module: str, degrees: Degrees, microbatches: Numbers) -> Numbers:
        """Return the busy and synchronizing seconds of a rank of the slowest stage after the first microbatch."""
        busy = self.busy(module, degrees, microbatches) * (microbatches - 1) / microbatches
        return busy + self.synchronized(module, degrees, microbatches)

    def unevenness(self, module: str, instances: Numbers, microbatches: Numbers) -> Numbers:
        """Return the most rows of an instance in a microbatch over their mean, on average over the microbatches.

        Units are dealt out evenly, but numbers of items vary between microbatches: 60 of them on average on 60
        instances are often 70, of which some instance has 2, so half of the microbatches take twice as long. Of 640
        samples in 71 microbatches on 9 instances, one has 2 samples in one microbatch alone. An instance has no less
        than the longest item.
        """
        sizes = self._sizes[module]
        each = sizes.units / microbatches
        if not sizes.units:
            return 1.0
        counts = (
            np.floor((each + sizes.deviation(each) * normal + uniform).clip(0.0)) for normal, uniform in QUANTILES
        )
        most = sum(np.ceil(count / instances) for count in counts) / len(QUANTILES)
        return np.maximum(1.0, np.maximum(most, sizes.largest(each)) * instances / each)

    def through(self, module: str, degrees: Degrees, microbatches: Numbers) -> Numbers:
        """Return the seconds that one microbatch needs through all stages, forward and backward."""
        work = self._work_of(module, degrees)
        uneven = self.unevenness(module, degrees.dp, microbatches)
        total = work.total + self.exposed_keys(module, degrees, microbatches)
        return total / (degrees.dp * microbatches) * uneven + work.fixed

    def exposed_keys(self, module: str, degrees: Degrees, microbatches: Numbers) -> Numbers:
        """Return the seconds in which ranks wait for keys, which are fewer the more sequences an instance has at a
        time.
        """
        sequences = np.maximum(1.0, self._sizes[module].units / (degrees.dp * microbatches))
        return self._work_of(module, degrees).travel * degrees.cp / (degrees.cp + sequences - 1)

    def synchronized(self, module: str, degrees: Degrees, microbatches: Numbers) -> Numbers:
        """Return the seconds of a step in which parameters are gathered or gradients summed and nothing is computed.

        A gather once per step overlaps the first forward; collectives of every microbatch overlap its compute. Neither
        overlaps on cores that ranks share.
        """
        share = self._work_of(module, degrees).forward_share
        hidden = 0.0 if self.cluster.shares_cores else self.through(module, degrees, microbatches)
        held, trained, blocks = self._numbers(module, degrees)
        costs, experts = (self.cluster, self._costs.precision), self._experts(module, degrees)
        gather, scatter, replicas = synchronization(
            held, trained, blocks, *costs, tp=degrees.tp, shards=degrees.shards, replicas=degrees.dp_replicate
        ).plus(expert_synchronization(experts, blocks, degrees, *costs))
        once = np.maximum(0.0, gather - share * hidden / degrees.pp) + scatter + replicas
        forward, backward = share * hidden, (1 - share) * hidden
        each = np.maximum(0.0, gather - forward) + np.maximum(0.0, gather + scatter + replicas - backward)
        return np.where(degrees.once, once, microbatches * each)[()]

    def held(self, module: str, degrees: Degrees) -> Numbers:
        """Return the bytes per rank of parameters, gradients and Adam's states, a lower bound of what a rank holds."""
        parameters, trained, _ = self._numbers(module, degrees)
        stage = parameter_bytes(parameters - trained, trained, degrees.shards, degrees.once, self._costs.precision)
        whole, learnt = (n / degrees.ep for n in self._experts(module, degrees))
        apart = parameter_bytes(whole - learnt, learnt, degrees.expert_shards, degrees.once, self._costs.precision)
        stage = ParameterBytes(*(a + b for a, b in zip(stage, apart, strict=True)))
        states = stage.masters + stage.optimizer + self._earlier * stage.optimizer / ADAM_STATES
        passing = 0.0 if np.all(degrees.once) else self._passing(module, degrees)
        return states + stage.gradients + np.where(degrees.once, stage.gathered, passing)

    def _passing(self, module: str, degrees: Degrees) -> float:
        """Return the bytes of whole parameters while a block computes, if they are gathered with every microbatch: two
        blocks and the layers around them. Gradients come on top: of one block as its backward makes them and once more
        as they are summed, and of the layers around.
        """
        shape, size = self.shape.modules[module], self._costs.precision
        stored = shape.stored.sum(axis=3) / degrees.tp
        if shape.experts is not None and degrees.ep > 1:
            stored[:, 0] += shape.experts.stored.sum(axis=2) * (1 / degrees.ep - 1 / degrees.tp)
        block, around = stored[:, 0].max(axis=0), stored[:, 1].sum(axis=0)
        gathered = size.compute * float((2 * block + around).sum())
        return gathered + float(size.compute * (block + around)[1] + size.master * block[1])

    def _numbers(self, module: str, degrees: Degrees) -> tuple[Numbers, Numbers, Numbers]:
        """Return a rank's parameters and trained parameters with equal stages, its shards together, and its blocks;
        without the experts that ``ep`` divides.
        """
        ends = zip(self._totals[module, False], self._totals[module, True], strict=True)
        several = (np.where(np.greater(degrees.pp, 1), twice, once) / degrees.pp for once, twice in ends)
        apart = zip(several, self._experts(module, degrees), strict=True)
        parameters, trained = ((every - experts) / degrees.tp for every, experts in apart)
        return parameters, trained, self.shape.modules[module].blocks / degrees.pp

    def _experts(self, module: str, degrees: Degrees) -> tuple[Numbers, Numbers]:
        """Return the parameters of all experts of a stage that ``ep`` divides, and those that train."""
        shape = self.shape.modules[module]
        parameters, trained = shape.divided_experts(0, shape.blocks, degrees.ep)
        return parameters / degrees.pp, trained / degrees.pp

    def activations(self, module: str, degrees: Degrees, microbatches: Numbers, held: Numbers = 1) -> Numbers:
        """Return the bytes per rank that backward needs: one microbatch of all blocks, since a pipeline of n ranks
        holds n microbatches; of its own blocks if they recompute as a whole. One block counts at the peak of its
        backward.

        Args:
            held: microbatches whose activations a rank holds at a time, see :meth:`ahead_of`.
        """
        shape, tp = self.shape.modules[module], degrees.tp
        sizes, parts = self._sizes[module], degrees.dp * microbatches
        rows = sizes.rows / sizes.units * np.ceil(sizes.units / parts) if sizes.units else 0.0  # of the largest
        transforms = self.options.of(module, degrees.transforms)
        left = kept_shares(tp, shape.row_shardings[tp].parts, degrees.ep)
        if (key := (module, key_of(transforms.values()))) not in self._saved:
            self._saved[key] = saved(shape, transforms)
        saved_, block = self._saved[key] * left, shape.of_block * left
        stages = degrees.pp if any(each.keeps_input_alone for each in transforms.values()) else 1
        numbers = held * float(saved_.sum()) / stages + (BACKWARD * block - saved_ / shape.blocks).clip(0.0).sum()
        if degrees.cp > 1:  # keys and values of all other rows, their gradients, and both once more where they arrive
            kept = saved_.sum() / (block.sum() * stages) + 3
            numbers += kept * shape.keys / tp * (degrees.cp - 0.5)
        return self.kept * numbers * rows / degrees.cp * self._costs.precision.compute

    def bytes(self, module: str, degrees: Degrees, microbatches: Numbers, held: Numbers = 1) -> Numbers:
        """Return :meth:`held` plus :meth:`activations`, with the share that the allocator cannot use."""
        return self._allocated * (self.held(module, degrees) + self.activations(module, degrees, microbatches, held))

    def ahead_of(self, module: str, pp: Mapping[str, Numbers], microbatches: Numbers, apart: bool = False) -> Numbers:
        """Return the microbatches whose activations a module holds at a time if it runs in turns with what it feeds:
        one more than the depth of the pipeline that it feeds, and another if it does not wait for that pipeline's
        ranks.

        Args:
            pp: pipeline ranks of all modules considered together.
            apart: whether the modules that it feeds have other ranks.
        """
        deepest = reduce(np.maximum, [pp[fed] for fed in self.feeds(module) if fed in pp], np.ones((), np.int64))
        ahead = np.equal(pp[module], 1) & (apart | np.greater(deepest, 1))
        return np.where(ahead, np.minimum(microbatches, deepest + 1 + apart), 1)[()]

    def needed(self, candidate: Candidate, in_step: bool = False) -> Float64[np.ndarray, "ranks"]:
        """Return the bytes on every rank.

        Args:
            in_step: encoders on some ranks of what they feed run no microbatch ahead of it, as if all its ranks
                repeated them.
        """
        needed, of, count = np.zeros(self.cluster.ranks), candidate.layouts, candidate.microbatches
        pp = {name: layout.pp for name, layout in of.items()}
        for name, layout in of.items():
            whole = candidate.reshard_after_forward == "never" or self.shape.modules[name].runs_vary
            degrees = Degrees.of(layout, candidate.of(name), whole)
            apart = not in_step and any({*of[fed].ranks} != {*layout.ranks} for fed in self.feeds(name))
            needed[[*layout.ranks]] += self.bytes(name, degrees, count, self.ahead_of(name, pp, count, apart))
        return needed

    def feeds(self, module: str) -> set[str]:
        """Return the modules that take the module's rows."""
        return {target for source, target in self.shape.edges if source == module}

    def contexts(self, module: str) -> list[int]:
        """Return the degrees of context parallelism to try."""
        return contexts(self.cluster.ranks_per_node) if self.shape.modules[module].keys else [1]

    def worth(self, module: str, degrees: Degrees) -> bool:
        """Return whether context parallelism of a module may pay off. It may if half the degree with twice the
        instances leaves some without a sample, or does not fit one sample into memory whatever a plan adds. It may also
        if tensor parallelism in its place is impossible or has more work.
        """
        if degrees.cp == 1:
            return True
        tp = degrees.neighbours
        if tp not in self.shape.modules[module].tp:
            return True
        work = self.work(module, degrees.tp, cp=degrees.cp)
        if work.total + self.exposed_keys(module, degrees, 1) < self.work(module, tp).total:
            return True
        most = self.choices[module][-1]
        half = degrees._replace(cp=degrees.cp // 2, dp_shard=2 * degrees.dp_shard, transforms=most)
        samples = min(len(batch.samples) for batch in self.batches)
        return half.dp > samples or self.activations(module, half, samples // half.dp) > self.memory

    def least_ranks(self, module: str) -> float:
        """Return the ranks needed to hold a module that is gathered block by block, as shards or replicas."""
        parameters, trained = map(float, self._totals[module, False])
        whole = parameter_bytes(parameters - trained, trained, 1, True, self._costs.precision)
        needed = whole.masters + whole.optimizer + (1 + self._earlier) * whole.gradients
        return float(needed) / self.memory


class _Sizes(NamedTuple):
    """The sizes of a step, on average."""

    rows: float
    squares: float
    """Sum of squared lengths, or of the squares of masks."""
    units: float
    lengths: Float64[np.ndarray, "units"]
    """Lengths of all items, ascending, over their mean; empty for samples, whose microbatches are balanced."""
    varies: float
    """Variance of the items of a sample over their mean."""

    def deviation(self, items: Numbers) -> Numbers:
        """Return the standard deviation of the items of microbatches that have so many on average."""
        return np.sqrt(items * self.varies)

    def largest(self, items: Numbers) -> Numbers:
        """Return the length of the longest of so many items, over the mean, as it is to be expected."""
        if not len(self.lengths):
            return 0.0
        return np.interp(items / (items + 1), np.linspace(0, 1, len(self.lengths)), self.lengths)


def _travel(stages: Sequence[StageTimes], rows: float, squares: float, cp: int) -> float:
    """Return the seconds of :attr:`Work.travel`, forward and backward."""
    received = np.full((1, 1), rows * (cp - 1) / cp)
    kinds: tuple[tuple[Kind, str], ...] = (("F", "forward"), ("B", "backward"))
    keys = [(x, x.keys._replace(latency=0.0)) for x in stages if x.keys]
    lines = ((of, kind, getattr(x, name).per_pair * squares) for x, of in keys for kind, name in kinds)
    return sum(float(of.exposed(kind, received, np.full((1, 1), pairs))[0, 0]) for of, kind, pairs in lines)


def lengths_and_squares(spec: ModelSpec, name: str, batch: StepMetadata) -> Float64[np.ndarray, "2 units"]:
    """Return the rows of each unit of a module, and the squares of these or of its mask."""
    rows = batch.tokens if spec.modules[name].samplewise else batch.items[name].inner_rows
    rules, lengths = attention_rules(spec, name), rows.astype(np.float64)
    return np.stack([lengths, lengths * lengths if rules is None else rules.squares(batch)])


def _sizes(spec: ModelSpec, name: str, batches: Sequence[StepMetadata]) -> _Sizes:
    both, module = [lengths_and_squares(spec, name, batch) for batch in batches], spec.modules[name]
    rows, squares = np.mean([np.sum(of, axis=1) for of in both], axis=0).tolist()
    lengths, units = [of[0] for of in both], float(np.mean([of.shape[1] for of in both]))
    ascending = np.sort(np.concatenate(lengths))
    if module.samplewise or not ascending.any():
        return _Sizes(rows, squares, units, np.zeros(0), 0.0)
    counts = np.concatenate([np.bincount(b.items[name].sample, minlength=len(b.samples)) for b in batches])
    return _Sizes(rows, squares, units, ascending / ascending.mean(), float(counts.var() / counts.mean()))


def saved(module: ModuleSpec, transforms: Mapping[str, Transform]) -> Float64[np.ndarray, "kinds=4"]:
    """Return the numbers per row that autograd keeps on the device for the backward of all blocks, by the kinds of
    :data:`hetero_strategy.model.spec.KEPT`. Of the blocks that leave the device one is on its way.
    """
    kept, away = np.tile(module.of_block, (module.blocks, 1)), np.zeros(module.blocks, bool)
    for number in range(module.blocks):
        for each in way(transforms, number):
            kept[number] = each.kept(kept[number], module.width)
        away[number] = any(each.moves for each in way(transforms, number, moved=True))
    return np.asarray(kept[~away].sum(axis=0) + kept[away].max(axis=0, initial=0.0))
