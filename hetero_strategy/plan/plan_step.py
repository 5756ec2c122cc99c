"""``plan_step``, the global orchestrator: from the metadata of a global batch to its step plan. Pure, deterministic.

Every module is balanced on its own cost over its own instances: the language model on whole interleaved sequences, an
encoder or generator on its items. Rearranging payloads and rearranging rows are never two exchanges:
:func:`hetero_strategy.plan.step_plan.edge_blocks` reads only the places of a unit on both sides of an edge, so the
route of an edge is OrchMLLM's composed rearrangement for any rearrangement (section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance import Cost, OverLimit, balance, loads
from hetero_strategy.plan.deal_rows import Dealing
from hetero_strategy.plan.greedy import deal as deal_to_least
from hetero_strategy.plan.greedy import descending, whole
from hetero_strategy.plan.masks import AttentionRules
from hetero_strategy.plan.near_home import Rearrangement, balance_near_home, place_batches
from hetero_strategy.plan.packing import Packed, deal, pack, pieces, regroup
from hetero_strategy.plan.step_plan import Assignment, ModuleLoad, StepMetadata, StepPlan


class Size(NamedTuple):
    """The work that one module has in a step."""

    rows: Float64[np.ndarray, "microbatches instances"]
    squares: Float64[np.ndarray, "microbatches instances"]
    """Sums of squared rows, or of the squares of masks."""
    time: Float64[np.ndarray, "microbatches instances"] | None = None
    """Time in the unit of the module's cost; None: its FLOPs."""


UnitSizes = Mapping[str, Size]
"""Module -> its work."""
OtherWork = Mapping[str, Float64[np.ndarray, "instances"]]
"""Other module -> its work on the ranks of each instance, in forwards of one of its instances over the module's own
actions of a forward."""
Orderer = Callable[[UnitSizes], Int64[np.ndarray, "microbatches"]]
"""Work of a step's microbatches -> the order in which to run them."""
AS_SAMPLED = "none"
"""Policy under which samples are dealt in turn and items stay with their samples, at any cost."""


@dataclass(frozen=True)
class Near:
    """The nodes (or ranks) of a module's instances and of the language model's at the other end of its edge.

    Rows are cheap between instances with equal numbers.
    """

    slots: Int64[np.ndarray, "instances"]
    """Node number of each instance of the encoder or generator."""
    homes: Int64[np.ndarray, "language_model_instances"]
    """Node number of each instance of the language model."""
    language_model: str


@dataclass(frozen=True)
class ResolvedBalance:
    """A description of how the work of a step is spread. Modules without a policy stay as sampled."""

    policy: Mapping[str, str] = field(default_factory=dict)
    """Module -> policy of :data:`hetero_strategy.plan.balance.POLICIES`, or ``none``."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Module -> its cost; default: 1 per row."""
    budget: Mapping[str, int] = field(default_factory=dict)
    """Module -> most rows inside it that an instance may have in a microbatch."""
    near: Mapping[str, Near] = field(default_factory=dict)
    """Encoder or generator that keeps items near their samples -> nodes of the instances."""
    rearrange: Rearrangement | None = None
    """Function that permutes whole balanced batches of modules in ``near``; None: they are balanced around homes if
    possible."""
    other_work: Mapping[str, OtherWork] = field(default_factory=dict)
    """Modules whose instances need not keep step with each other -> other work of their ranks: all work of a rank is
    even over the step, not in each microbatch."""
    order: Orderer | None = None
    """Function that chooses the order of microbatches (DistTrain, section 5.2); None: they stay as packed."""
    dealing: Mapping[str, Dealing] = field(default_factory=dict)
    """Module with context parallelism -> how its rows are dealt to the ranks of an instance; default: in order."""
    rules: Mapping[str, AttentionRules] = field(default_factory=dict)
    """Module whose rows do not see all earlier ones -> its rules of attention, whose pairs are counted."""

    def cost(self, module: str) -> Cost:
        """Return the cost of a module."""
        return self.costs.get(module, Cost())

    def policy_of(self, module: str) -> str:
        return self.policy.get(module, AS_SAMPLED)


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
        metadata: facts of the global batch.
        instances: module -> number of its data-parallel instances.
        samplewise: modules whose units are whole samples (language models); all others have items. The first one
            decides which sample is in which microbatch.
        microbatches: number of microbatches, or more if these cannot keep the first language model's budget; None: as
            few as can.
        row_multiple: module -> number (if ranks of an instance share its rows) of which the rows of every instance must
            be a positive multiple; :attr:`Assignment.padding` fills up.
        microbatch_rows: encoder or generator -> about how many rows inside it an instance should have in a microbatch,
            for which step microbatches are joined or split; or ``equal``: as many microbatches as the step's, of equal
            cost, so that work that is too much for one is computed with another. Modules that are not named keep the
            step's microbatches.
        balancing: options of balancing; default: all units are dealt in turn, and the plan has no loads.

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
    for module in sorted(
        instances, key=lambda name: name not in samplewise
    ):  # language models first: encoders follow them
        of_step = planner.of_units(module, packed.microbatch)
        group, groups, instance_of = planner.spread(module, of_step, budgets.get(module), packed)
        assignments[module] = assignments_of(
            group, groups, instance_of, of_step, *planner.rows(module), instances[module], multiple.get(module, 1),
            planner.squares(module),
        )  # fmt: skip
        if module in balancing.dealing:
            orders = balancing.dealing[module].orders(metadata, assignments[module])
            ordered = zip(assignments[module], orders, strict=True)
            assignments[module] = tuple(replace(assignment, order=order) for assignment, order in ordered)
    loads = {name: planner.load(name, assignments[name], packed.count) for name in costed}
    return StepPlan(metadata, packed.count, {name: assignments[name] for name in instances}, loads)


def _members_of(group: np.ndarray, groups: int) -> list[np.ndarray]:
    """List the units of each group, ascending."""
    if groups == 1:
        return [np.arange(len(group))]
    order, offsets = ragged.group_by(group, groups)
    return np.split(order, offsets[1:-1])


def assignments_of(
    group: np.ndarray,
    groups: int,
    instance_of: np.ndarray,
    of_step: np.ndarray,
    rows: np.ndarray,
    inner_rows: np.ndarray,
    instances: int,
    multiple: int,
    squares: np.ndarray | None = None,
) -> tuple[Assignment, ...]:
    """Combine the choices for each unit into the units that every instance computes in each microbatch."""
    assignments = []
    for members in _members_of(group, groups):
        order, offsets = ragged.group_by(instance_of[members], instances)
        units = members[order].astype(np.int64)
        inside = inner_rows[units].astype(np.int64)
        padding = np.zeros(instances, np.int64)
        if multiple > 1:  # at least one alignment row per rank, so that no rank works on nothing
            totals = np.diff(ragged.offsets(inside)[offsets])
            padding = np.maximum(-(-totals // multiple), 1) * multiple - totals
        steps = of_step[units]
        first, last = (int(steps.min()), int(steps.max())) if len(units) else (0, 0)
        own = None if squares is None else squares[units]
        columns = units, rows[units].astype(np.int64), inside, offsets, padding, first, last
        assignments.append(Assignment(*columns, squares=own))
    return tuple(assignments)


@dataclass
class _StepPlanner:
    """A maker of the parts of one plan, with the arguments of :func:`plan_step`."""

    metadata: StepMetadata
    instances: Mapping[str, int]
    samplewise: tuple[str, ...]
    balancing: ResolvedBalance
    instance_of: dict[str, np.ndarray] = field(default_factory=dict)
    """Language model -> instance of each sample."""
    of_masks: dict[str, np.ndarray] = field(default_factory=dict)
    """Module -> squares of the mask of each sample, once they are counted."""

    def squares(self, module: str) -> np.ndarray | None:
        """Return the squares of the mask of each unit; None: those of its rows."""
        if module not in self.balancing.rules:
            return None
        if module not in self.of_masks:
            self.of_masks[module] = self.balancing.rules[module].squares(self.metadata)
        return self.of_masks[module]

    def alone(self, module: str) -> np.ndarray:
        """Return the cost of each unit of a module alone."""
        return self.balancing.cost(module).alone(self.rows(module)[1], self.squares(module))

    def rows(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of each unit that cross edges, and its rows inside the module."""
        if module in self.samplewise:
            return self.metadata.tokens, self.metadata.tokens
        items = self.metadata.items[module]
        return items.edge_rows, items.inner_rows

    def of_units(self, module: str, of_samples: np.ndarray) -> np.ndarray:
        """Return the entry of each unit's sample; a unit of a language model is a sample."""
        return of_samples if module in self.samplewise else of_samples[self.metadata.items[module].sample]

    def packed(self, microbatches: int | None) -> Packed:
        """Pack samples into microbatches, numbered in the order in which they run."""
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
            budget=b.budget.get(first),
            other_costs=None if microbatches == 1 and first not in b.budget else self._other_costs(),
            squares=self.squares(first),
        )
        if b.order is None or packed.count < 2:
            return packed
        return packed.reordered(np.asarray(b.order(self._sizes(packed)), dtype=np.int64))

    def _other_costs(self) -> np.ndarray:
        """Sum the costs of each sample in other modules, per instance, float64 ``[S]``."""
        costs = np.zeros(len(self.metadata.samples))
        for module, items in self.metadata.items.items():
            if module in self.instances:
                alone = self.balancing.cost(module).alone(items.inner_rows) / self.instances[module]
                costs += np.bincount(items.sample, weights=alone, minlength=len(costs))
        return costs

    def _sizes(self, packed: Packed) -> UnitSizes:
        """Return every module's work in each microbatch, with items spread evenly over instances."""
        sizes = {}
        for module, count in self.instances.items():
            inner_rows, group = self.rows(module)[1], self.of_units(module, packed.microbatch)
            bins, width, share = packed.count, 1, count  # unknown instances share evenly
            if module == self.samplewise[0]:
                bins, group, width, share = bins * count, group * count + packed.instance, count, 1
            rows, squares = inner_rows.astype(np.float64), self.squares(module)
            terms = (rows, rows * rows if squares is None else squares, self.alone(module))
            sums = (np.bincount(group, weights=x, minlength=bins) / share for x in terms)
            sizes[module] = Size(*(np.repeat(x.reshape(-1, width), share, 1) for x in sums))
        return sizes

    def spread(
        self, module: str, of_step: np.ndarray, wanted_rows: int | Literal["equal"] | None, packed: Packed
    ) -> tuple[np.ndarray, int, np.ndarray]:
        """Choose the microbatch of each unit, how many there are, and the instance of each unit."""
        inner_rows, count = self.rows(module)[1], self.instances[module]
        budget = None if module in self.samplewise else self.balancing.budget.get(module)
        group, groups = of_step, packed.count
        if wanted_rows == "equal":
            group, groups = pieces(of_step, self.alone(module), packed.count)
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
            for units in _members_of(group, groups):
                near = None if reader is None else reader[units]
                stays = None if sampled is None else sampled[units]
                try:
                    instance_of[units] = self._spread(module, units, stays, near) if even is None else even(units)
                except ConfigError as error:
                    raise type(error)(f"'{module}', {self.instances[module]} instances: {error}") from None
        if module in self.samplewise:
            self.instance_of[module] = instance_of
        return instance_of

    def _over_the_step(self, module: str) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return a function that spreads the units of one microbatch after the other, so that the step becomes even.

        It gives units, longest first, to the instance whose ranks have least work so far in the whole step. None: the
        module is balanced in each microbatch.
        """
        b, inner_rows, count = self.balancing, self.rows(module)[1], self.instances[module]
        if module not in b.other_work or b.policy_of(module) != "auto":
            return None
        others = np.zeros(count)
        for name, shares in b.other_work[module].items():
            others += shares * float(self.alone(name).sum()) / self.instances[name]
        both = whole(np.append(others, self.alone(module)), count)
        so_far, weights, limit = both[:count].copy(), both[count:], b.budget.get(module)

        def even(units: np.ndarray) -> np.ndarray:
            falling = descending(inner_rows[units])
            instance_of = np.empty_like(units)
            instance_of[falling] = deal_to_least(weights[units[falling]], count, so_far)[0]
            if limit is not None and np.bincount(instance_of, inner_rows[units]).max(initial=0) > limit:
                instance_of = self._spread(module, units, None, None)
            np.add.at(so_far, instance_of, weights[units])
            return instance_of

        return even

    def _reader(self, module: str) -> np.ndarray | None:
        """Return the language model's instance that has each item's sample, or None if it does not matter."""
        near = self.balancing.near.get(module)
        if near is None or near.language_model not in self.instance_of or self.instances[module] == 1:
            return None
        return self.instance_of[near.language_model][self.metadata.items[module].sample]

    def _sampled(self, module: str, microbatches: int) -> np.ndarray:
        """Return the instance of each unit as sampled: its sample's if the language model has as many instances."""
        count = self.instances[module]
        dealt = deal(len(self.metadata.samples), count, microbatches).instance
        if module not in self.samplewise:
            dealt = next((own for name, own in self.instance_of.items() if self.instances[name] == count), dealt)
        return self.of_units(module, dealt)

    def _spread(
        self,
        module: str,
        units: np.ndarray,
        sampled: np.ndarray | None,
        reader: np.ndarray | None,
    ) -> np.ndarray:
        """Choose the instance that computes each of some units of one microbatch."""
        b, count = self.balancing, self.instances[module]
        (rows, inner_rows), of_masks = self.rows(module), self.squares(module)
        lengths, squares = inner_rows[units], None if of_masks is None else of_masks[units]
        policy, cost, limit = b.policy_of(module), b.cost(module), b.budget.get(module)
        if sampled is not None:
            most = loads(lengths, sampled, count, Cost()).max(initial=0.0)
            if limit is not None and most > limit:
                raise OverLimit(f"as sampled, an instance of '{module}' has {most:.0f} rows; its budget is {limit}")
            return sampled
        if reader is None:
            return balance(lengths, count, cost, policy=policy, limit=limit, squares=squares)
        near, slots = b.near[module], b.near[module].slots
        if policy == "auto" and b.rearrange is None:
            instance_of = balance_near_home(cost.alone(lengths, squares), near.homes[reader], slots)
            if limit is None or loads(lengths, instance_of, count, Cost()).max(initial=0.0) <= limit:
                return instance_of
        batch = balance(lengths, count, cost, policy=policy, limit=limit, squares=squares)
        rearrange = b.rearrange or place_batches
        return rearrange(rows[units], reader, batch, near.homes, slots)[batch]

    def load(self, module: str, assignments: tuple[Assignment, ...], microbatches: int) -> ModuleLoad:
        """Return the costs of the module's instances as sampled and as planned."""
        cost, count = self.balancing.cost(module), self.instances[module]
        inner_rows = self.rows(module)[1]
        dealt = deal(len(self.metadata.samples), count, microbatches)
        bins = self.of_units(module, dealt.microbatch * count + dealt.instance)
        sampled = loads(inner_rows, bins, microbatches * count, cost, self.squares(module)).reshape(-1, count)
        planned = np.stack([loads(a.inner_rows, a.instance(), count, cost, a.squares) for a in assignments])
        return ModuleLoad(sampled, planned)
