"""The global orchestrator: from the metadata of a global batch to its step plan. Pure and deterministic.

Every module is balanced on its own cost over its own instances: the language model on whole interleaved sequences, an
encoder or generator on its items. Rearranging payloads and rearranging rows are never two exchanges:
:func:`hetero_strategy.plan.step_plan.edge_blocks` reads only where a unit is on either side of an edge, so the route of
an edge is OrchMLLM's composed rearrangement, whatever was rearranged (section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.assign import assignments_of, members_of
from hetero_strategy.plan.balance import Cost, OverLimit, balance, loads
from hetero_strategy.plan.balance.greedy import deal as deal_to_least
from hetero_strategy.plan.balance.greedy import descending, whole
from hetero_strategy.plan.nodes.near_home import balance_near_home
from hetero_strategy.plan.nodes.placement_ilp import place_by_program
from hetero_strategy.plan.nodes.propose import place_items
from hetero_strategy.plan.nodes.slots import volumes
from hetero_strategy.plan.packing import Packed, deal, level_islands, pack, pieces, regroup
from hetero_strategy.plan.step_plan import Assignment, ModuleLoad, StepMetadata, StepPlan


class Size(NamedTuple):
    """How much work one module has in a step."""

    rows: Float64[np.ndarray, "microbatches instances"]
    squares: Float64[np.ndarray, "microbatches instances"]
    """Sums of squared rows."""
    time: Float64[np.ndarray, "microbatches instances"] | None = None
    """Time in the unit of the module's cost, with the instances' speeds; None: its FLOPs."""


UnitSizes = Mapping[str, Size]
"""Module -> its work."""
Beside = Mapping[str, Float64[np.ndarray, "instances"]]
"""Other module -> what its work on the ranks of each instance is worth, in forwards of one of its instances over the
module's own actions of a forward."""
Orderer = Callable[[UnitSizes], Int64[np.ndarray, "microbatches"]]
"""Work of a step's microbatches -> the order in which to run them."""
AS_SAMPLED = "none"
"""Policy under which samples are dealt in turn and items stay with their samples, whatever they cost."""


@dataclass(frozen=True)
class Near:
    """Nodes (or ranks) of a module's instances and of the language model's at the other end of its edge.

    Rows are cheap between instances with equal numbers.
    """

    slots: Int64[np.ndarray, "instances"]
    """Number of the node of each instance of the encoder or generator."""
    homes: Int64[np.ndarray, "language_model_instances"]
    """Likewise of the language model."""
    language_model: str


@dataclass(frozen=True)
class ResolvedBalance:
    """How the work of a step is spread. Modules that it does not name stay as sampled."""

    policy: Mapping[str, str] = field(default_factory=dict)
    """Module -> policy of :data:`hetero_strategy.plan.balance.POLICIES`, or ``none``."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Module -> its cost; default: 1 per row."""
    speeds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Module -> relative speed of each of its instances; default: equal."""
    budget: Mapping[str, int] = field(default_factory=dict)
    """Module -> most rows inside it that an instance may have in a microbatch."""
    near: Mapping[str, Near] = field(default_factory=dict)
    """Encoder or generator that keeps items near their samples -> what is near."""
    rearrange: Literal["home", "permute", "ilp"] = "home"
    """How items are kept near: by balancing around homes, or by permuting whole balanced batches (OrchMLLM, algorithm
    3), fast or by integer program."""
    beside: Mapping[str, Beside] = field(default_factory=dict)
    """Modules whose instances need not keep step with each other -> what else their ranks do: all work of a rank is
    even over the step, not in each microbatch."""
    order: Orderer | None = None
    """Chooses the order of microbatches (DistTrain, section 5.2); None: they stay as packed."""
    islands: Mapping[str, Int64[np.ndarray, "instances"]] = field(default_factory=dict)
    """Module -> number of the island of each instance, equally many in each, which all units of a sample stay in;
    empty: there is one."""

    def cost(self, module: str) -> Cost:
        """What a module costs."""
        return self.costs.get(module, Cost())

    def policy_of(self, module: str) -> str:
        return self.policy.get(module, AS_SAMPLED)

    def seats(self, module: str, instances: int) -> Int64[np.ndarray, "islands seats"]:
        """Instances of a module in each island."""
        own = self.islands.get(module)
        if own is None:
            return np.arange(instances)[None]
        return np.argsort(own, kind="stable").reshape(int(own.max()) + 1, -1)

    def speeds_of(self, module: str) -> Float64[np.ndarray, "instances"] | None:
        speeds = self.speeds.get(module)
        return None if speeds is None else np.asarray(speeds, dtype=np.float64)


def plan_step(
    metadata: StepMetadata,
    instances: Mapping[str, int],
    samplewise: Iterable[str],
    *,
    microbatches: int | None = 1,
    row_multiple: Mapping[str, int] | None = None,
    microbatch_rows: Mapping[str, int | Literal["equal"]] | None = None,
    balancing: ResolvedBalance | None = None,
) -> StepPlan:
    """Plan one step: pack samples, order the microbatches, spread every other module's units over its instances.

    Args:
        metadata: what is known of the global batch.
        instances: module -> number of its data-parallel instances.
        samplewise: modules whose units are whole samples (language models); all others have items. The first one
            decides which sample is in which microbatch.
        microbatches: number of microbatches, or more where these cannot keep the first language model's budget; None:
            as few as can.
        row_multiple: module -> number (where ranks of an instance share its rows) of which the rows of every instance
            must be a positive multiple; :attr:`Assignment.padding` fills up.
        microbatch_rows: encoder or generator -> about how many rows inside it an instance should have in a microbatch,
            for which step microbatches are joined or split; or ``equal``: as many microbatches as the step's, of equal
            cost, so that what is too much for one is computed with another. Others keep the step's.
        balancing: how work is spread; default: all units are dealt in turn, and the plan says no loads.

    Raises:
        ConfigError: a budget cannot be kept.
    """
    multiple, budgets = row_multiple or {}, microbatch_rows or {}
    samplewise = tuple(samplewise)
    costed = [name for name in balancing.policy if name in instances] if balancing else []
    if balancing is None:
        balancing = ResolvedBalance({name: "round_robin" for name in instances if name not in samplewise[:1]})
    planner = _StepPlanner(metadata, instances, samplewise, balancing)
    packed = planner.packed(microbatches)
    assignments: dict[str, tuple[Assignment, ...]] = {}
    for module in sorted(instances, key=lambda name: name not in samplewise):  # encoders look where their samples are
        of_step = planner.of_units(module, packed.microbatch)
        group, groups, instance_of = planner.spread(module, of_step, budgets.get(module), packed)
        assignments[module] = assignments_of(
            group, groups, instance_of, of_step, *planner.rows(module), instances[module], multiple.get(module, 1)
        )
    loads = {name: planner.load(name, assignments[name], packed.count) for name in costed}
    return StepPlan(metadata, packed.count, {name: assignments[name] for name in instances}, loads)


@dataclass
class _StepPlanner:
    """Makes the parts of one plan, which share what is known of the step; fields as arguments of :func:`plan_step`."""

    metadata: StepMetadata
    instances: Mapping[str, int]
    samplewise: tuple[str, ...]
    balancing: ResolvedBalance
    instance_of: dict[str, np.ndarray] = field(default_factory=dict)
    """Language model -> instance of each sample."""
    island: np.ndarray | None = None
    """Of each sample; None: there is one."""

    def rows(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each unit that cross edges, and rows inside the module."""
        if module in self.samplewise:
            return self.metadata.tokens, self.metadata.tokens
        items = self.metadata.items[module]
        return items.edge_rows, items.inner_rows

    def of_units(self, module: str, of_samples: np.ndarray) -> np.ndarray:
        """What each unit has of its sample, or is."""
        return of_samples if module in self.samplewise else of_samples[self.metadata.items[module].sample]

    def packed(self, microbatches: int | None) -> Packed:
        """Pack samples into microbatches, which are numbered in the order in which they run."""
        b, samples = self.balancing, len(self.metadata.samples)
        if not self.samplewise:
            return deal(samples, 1, microbatches or 1)
        first = self.samplewise[0]
        packed = pack(
            self.metadata.tokens,
            self.instances[first],
            microbatches,
            b.cost(first),
            module=first,
            policy=None if b.policy_of(first) == AS_SAMPLED else b.policy_of(first),
            speeds=b.speeds_of(first),
            budget=b.budget.get(first),
            beside=None if microbatches == 1 and first not in b.budget else self._beside.sum(axis=0),
        )
        if (own := b.islands.get(first)) is not None:
            packed = self._in_islands(packed, own)
        if b.order is None or packed.count < 2:
            return packed
        return packed.reordered(np.asarray(b.order(self._sizes(packed)), dtype=np.int64))

    def _in_islands(self, packed: Packed, own: np.ndarray) -> Packed:
        """Samples in the island of their instance; instances of a microbatch change places until islands are level.

        Args:
            own: island of each instance of the first language model.
        """
        first, b = self.samplewise[0], self.balancing
        count = self.instances[first]
        if b.policy_of(first) != AS_SAMPLED and b.speeds_of(first) is None:
            bin_of = packed.microbatch * count + packed.instance
            work = [np.bincount(bin_of, weights=w, minlength=packed.count * count) for w in self._beside]
            place = level_islands(np.array(work).reshape(len(work), packed.count, count), b.seats(first, count))
            packed = replace(packed, instance=place[packed.microbatch, packed.instance])
        self.island = own[packed.instance]
        return packed

    @cached_property
    def _beside(self) -> np.ndarray:
        """What each sample costs other modules per instance, float64 ``[modules, S]``."""
        known = [(n, t) for n, t in self.metadata.items.items() if n in self.instances and len(t.sample)]
        costs = np.zeros((max(1, len(known)), len(self.metadata.samples)))
        for total, (module, items) in zip(costs, known, strict=False):
            alone = self.balancing.cost(module).alone(items.inner_rows) / self.instances[module]
            total += np.bincount(items.sample, weights=alone, minlength=len(total))
        return costs

    def _sizes(self, packed: Packed) -> UnitSizes:
        """Every module's work in each microbatch, that of items spread evenly, as it will be."""
        sizes = {}
        for module, count in self.instances.items():
            inner_rows, group = self.rows(module)[1], self.of_units(module, packed.microbatch)
            cost, speeds = self.balancing.cost(module), self.balancing.speeds_of(module)
            speeds = np.ones(count) if speeds is None else speeds
            bins = packed.count
            if known := module == self.samplewise[0]:
                bins, group = bins * count, group * count + packed.instance
            width, share = (count, 1) if known else (1, count)  # instances that are known apart, and that share evenly
            rows = inner_rows.astype(np.float64)
            sums = [np.bincount(group, weights=x, minlength=bins) / share for x in (rows, rows * rows)]
            alone = np.bincount(group, weights=cost.alone(inner_rows), minlength=bins)
            load = loads(inner_rows, group, bins, cost) if known else alone
            numbers, squares, times = (np.repeat(x.reshape(-1, width), share, 1) for x in (*sums, load))
            sizes[module] = Size(numbers, squares, times / (speeds if known else speeds.sum()))
        return sizes

    def spread(
        self, module: str, of_step: np.ndarray, wanted_rows: int | Literal["equal"] | None, packed: Packed
    ) -> tuple[np.ndarray, int, np.ndarray]:
        """Choose the microbatch of each unit, how many there are, and the instance of each unit."""
        inner_rows, count = self.rows(module)[1], self.instances[module]
        budget = None if module in self.samplewise else self.balancing.budget.get(module)
        group, groups = of_step, packed.count
        if wanted_rows == "equal":
            group, groups = pieces(of_step, self.balancing.cost(module).alone(inner_rows), packed.count)
        elif wanted_rows is not None:
            group, groups = regroup(of_step, inner_rows, packed.count, wanted_rows * count)
        if budget is None:
            return group, groups, self._instances(module, group, groups, packed)
        if len(inner_rows) and int(inner_rows.max()) > budget:
            raise ConfigError(
                f"an item has {int(inner_rows.max())} rows in '{module}', more than its budget of {budget} for an"
                f" instance and microbatch; raise it to at least {int(inner_rows.max())}, or make items smaller in its"
                " processor"
            )
        most = budget * count
        while True:  # whole items leave gaps: split until all items fit, at worst into one item per microbatch
            try:
                return group, groups, self._instances(module, group, groups, packed)
            except OverLimit:
                group, groups = regroup(of_step, inner_rows, packed.count, most)
                if most == 1:
                    return group, groups, self._instances(module, group, groups, packed)
                most = max(1, most * 4 // 5)

    def _instances(self, module: str, group: np.ndarray, groups: int, packed: Packed) -> np.ndarray:
        """Choose the instance of each unit, int64 ``[n]``."""
        if module in self.samplewise[:1]:
            instance_of = packed.instance
        else:
            instance_of = np.zeros(len(group), dtype=np.int64)
            reader, sampled = self._reader(module), None
            if self.balancing.policy_of(module) == AS_SAMPLED:
                sampled = self._sampled(module, packed.count)
            even = self._over_the_step(module)
            for units, seats in self._apart(module, group, groups):
                near = None if reader is None else reader[units]
                stays = None if sampled is None else sampled[units] % len(seats)
                try:
                    spread = self._spread(module, units, seats, stays, near) if even is None else even(units, seats)
                    instance_of[units] = seats[spread]
                except ConfigError as error:
                    raise type(error)(f"'{module}', {len(seats)} instances: {error}") from None
        if module in self.samplewise:
            self.instance_of[module] = instance_of
        return instance_of

    def _apart(self, module: str, group: np.ndarray, groups: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Units of each microbatch in each island, and the module's instances there."""
        seats = self.balancing.seats(module, self.instances[module])
        if self.island is None:
            yield from ((units, seats[0]) for units in members_of(group, groups))
            return
        group = group * len(seats) + self.of_units(module, self.island)
        for number, units in enumerate(members_of(group, groups * len(seats))):
            yield units, seats[number % len(seats)]

    def _over_the_step(self, module: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
        """What gives the units of one microbatch after the other, longest first, to the instance whose ranks have least
        so far, of all that they do in the step; None where a module is balanced in each microbatch.
        """
        b, inner_rows, count = self.balancing, self.rows(module)[1], self.instances[module]
        asked = b.policy_of(module) != "auto" or b.speeds_of(module) is not None
        if module not in b.beside or asked:
            return None
        others = np.zeros(count)
        for name, shares in b.beside[module].items():
            others += shares * float(b.cost(name).alone(self.rows(name)[1]).sum()) / self.instances[name]
        both = whole(np.append(others, b.cost(module).alone(inner_rows)), count)
        so_far, weights, limit = both[:count].copy(), both[count:], b.budget.get(module)

        def even(units: np.ndarray, seats: np.ndarray) -> np.ndarray:
            falling = descending(inner_rows[units])
            seat_of = np.empty_like(units)
            seat_of[falling] = deal_to_least(weights[units[falling]], len(seats), so_far[seats])[0]
            if limit is not None and np.bincount(seat_of, inner_rows[units]).max(initial=0) > limit:
                seat_of = self._spread(module, units, seats, None, None)
            np.add.at(so_far, seats[seat_of], weights[units])
            return seat_of

        return even

    def _reader(self, module: str) -> np.ndarray | None:
        """The language model's instance that has each item's sample, where it matters how near that is."""
        near = self.balancing.near.get(module)
        if near is None or near.language_model not in self.instance_of or self.instances[module] == 1:
            return None
        return self.instance_of[near.language_model][self.metadata.items[module].sample]

    def _sampled(self, module: str, microbatches: int) -> np.ndarray:
        """Instance of each unit as sampled: that of its sample if the language model has as many instances."""
        count = self.instances[module]
        dealt = deal(len(self.metadata.samples), count, microbatches).instance
        if module not in self.samplewise:
            dealt = next((own for name, own in self.instance_of.items() if self.instances[name] == count), dealt)
        return self.of_units(module, dealt)

    def _spread(
        self,
        module: str,
        units: np.ndarray,
        seats: np.ndarray,
        sampled: np.ndarray | None,
        reader: np.ndarray | None,
    ) -> np.ndarray:
        """Choose which of some instances, ``seats``, computes each of some units of one microbatch."""
        b, count = self.balancing, len(seats)
        rows, inner_rows = self.rows(module)
        lengths = inner_rows[units]
        policy, cost, speeds, limit = b.policy_of(module), b.cost(module), b.speeds_of(module), b.budget.get(module)
        speeds = None if speeds is None else speeds[seats]
        if sampled is not None:
            most = loads(lengths, sampled, count, Cost()).max(initial=0.0)
            if limit is not None and most > limit:
                raise OverLimit(f"as sampled, an instance of '{module}' has {most:.0f} rows; its budget is {limit}")
            return sampled
        if reader is None:
            return balance(lengths, count, cost, policy=policy, speeds=speeds, limit=limit)
        near, slots = b.near[module], b.near[module].slots[seats]
        if policy == "auto" and b.rearrange == "home" and cost.padding == "none" and speeds is None:
            instance_of = balance_near_home(cost.alone(lengths), near.homes[reader], slots)
            if limit is None or loads(lengths, instance_of, count, Cost()).max(initial=0.0) <= limit:
                return instance_of
        batch = balance(lengths, count, cost, policy=policy, speeds=speeds, limit=limit)
        classes = None if speeds is None else np.unique(speeds, return_inverse=True)[1]
        if b.rearrange == "ilp":
            volume = volumes(rows[units], reader, batch, len(near.homes), count)
            return place_by_program(volume, near.homes, slots, classes)[batch]
        return place_items(rows[units], reader, batch, near.homes, slots, classes=classes)[batch]

    def load(self, module: str, assignments: tuple[Assignment, ...], microbatches: int) -> ModuleLoad:
        """Costs of the module's instances as sampled and as planned."""
        cost, count = self.balancing.cost(module), self.instances[module]
        inner_rows = self.rows(module)[1]
        dealt = deal(len(self.metadata.samples), count, microbatches)
        bins = self.of_units(module, dealt.microbatch * count + dealt.instance)
        sampled = loads(inner_rows, bins, microbatches * count, cost).reshape(microbatches, count)
        planned = np.stack([loads(a.inner_rows, a.instance(), count, cost) for a in assignments])
        speeds = self.balancing.speeds_of(module)
        pace = np.ones(count) if speeds is None else speeds
        return ModuleLoad(sampled / pace, planned / pace)
