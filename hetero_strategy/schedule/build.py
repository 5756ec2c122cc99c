"""Make a step's schedule from its stage graph and its work (``make_schedule``). Pure.

torch.distributed.pipelining has schedule tables for one chain of stages whose microbatches all have one shape and
number. Its names of actions and its orders (interleaved 1F1B, ZBV) are used here. All else is ours: stages form a
graph, and modules have their own microbatches, share ranks, and have groups of unequal size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_strategy.errors import ScheduleError
from hetero_strategy.schedule.action import Action, Lane, Schedule, StageGraph, StepWork
from hetero_strategy.schedule.action_index import ActionIndex, Costs
from hetero_strategy.schedule.fill import StepPrograms, fill_policy
from hetero_strategy.schedule.module_programs import Link, in_a_circle, links, module_programs, most
from hetero_strategy.schedule.policies import SchedulePolicy, schedule_policy, schedules


def make_schedule(
    name: str,
    graph: StageGraph,
    work: StepWork,
    costs: Costs | None = None,
    *,
    train: bool = True,
    max_in_flight: Mapping[str, int] | None = None,
    fill: str = "fine",
) -> Schedule:
    """Build every rank's list of actions.

    Args:
        name: name of a policy in ``schedule.policies``. ``interleaved_1f1b`` interleaves modules with ``vpp > 1``,
            ``zbv`` those with two stages per rank in v style; other modules run 1F1B and ZB-H1 beside them.
        graph: stages of all modules.
        work: microbatches of the step.
        costs: duration of an action in any unit, the same on all ranks; ``None``: F, I and W take 1, B the sum of its
            parts (2, or 1 if nothing in it trains), UNSHARD and REDUCE 0. Costs decide the order of modules that share
            ranks, and the place of W.
        train: whether to schedule backwards.
        max_in_flight: most microbatches of a module that each of its stages may hold, by module.
        fill: name of a policy in ``schedule.fill``, which places cohorts that fill bubbles.

    Raises:
        ScheduleError: a schedule or module is unknown, a schedule does not fit the modules' stages, or a bound cannot
            be kept.
    """
    bounds = dict(max_in_flight or {})
    policy = schedule_policy(name)
    _refuse(policy, graph, bounds)
    numbers = ActionIndex(graph, work, train=train, splits=policy.splits_backward, costs=costs)
    if policy.programs is None:
        starts = _sequential(numbers, graph, work)
    else:
        starts = _pipelined(step_programs(policy, graph, work, numbers, bounds, fill), name, graph)
    starts = [*numbers.opening, *_with_sums(numbers, starts)]
    return _schedule(name, graph, work, train, numbers, starts, bounds)


def _refuse(policy: SchedulePolicy, graph: StageGraph, bounds: Mapping[str, int]) -> None:
    name, only = policy.name, policy.stages_per_rank
    for module, bound in bounds.items():
        if module not in graph.pipelines:
            raise ScheduleError(f"max_in_flight names {module!r}; the modules are {', '.join(graph.pipelines)}")
        if bound < 1:
            raise ScheduleError(f"max_in_flight of {module} is {bound}: it must hold at least 1 microbatch")
    if policy.virtual == "any":
        return
    ordered = {m: p for m, p in graph.pipelines.items() if graph.chains[m][0][0].cohort < 0}
    made_for = [p for p in ordered.values() if p.vpp > 1 and p.style == policy.virtual]
    if policy.virtual != "none" and not made_for:
        raise ScheduleError(
            f"{name} needs a module with vpp{f'={only}' if only else ' > 1'} in {policy.virtual} style: set its vpp, or"
            f" take {policy.instead}"
        )
    for module, pipeline in ordered.items():
        if pipeline.vpp == 1:
            continue
        if pipeline.style != policy.virtual:
            wanted = next(n for n in schedules() if schedule_policy(n).virtual == pipeline.style)
            raise ScheduleError(
                f"{module} has vpp={pipeline.vpp} in {pipeline.style} style, which {name} does not order: "
                f"take {wanted}, or set its vpp to 1"
            )
        if only not in (None, pipeline.vpp):
            raise ScheduleError(
                f"{module} has vpp={pipeline.vpp}, but {name} has {only} stages per rank: set vpp to {only}"
            )


def _sequential(numbers: ActionIndex, graph: StageGraph, work: StepWork) -> list[int]:
    """Order one step microbatch after another: all forwards from sources to sinks, then all backwards in reverse.

    A unit of several step microbatches has its forward with the first of them that needs it, and its backward with the
    last.
    """
    units = numbers.units
    when = numbers.needed * 2
    for i, count in enumerate(numbers.counts):
        latest = 0
        for u in range(numbers.first[i], numbers.first[i] + count):
            when[u] = latest = max(latest, when[u])
            for v in numbers.after[u]:
                when[v] = max(when[v], latest)
    for i in reversed(range(len(numbers.counts))):
        latest = 0
        for u, span in enumerate(work.of(numbers.nodes[i]), numbers.first[i]):
            when[u + units] = latest = max(latest, when[u + units], when[u], span.last)
            for v in numbers.after[u + units]:
                when[v] = max(when[v], latest)
    node = numbers.node_of
    forwards = [(when[u], 0, node[u], u) for u in range(units)]
    backwards = [(when[u + units], 1, -node[u], u + units) for u in range(units) if numbers.backward[node[u]]]
    opened: set[int] = set()
    left = numbers.counts.copy()
    starts: list[int] = []
    for _, back, _, number in sorted(forwards + backwards):
        i = node[number]
        if numbers.gathers[i] and i not in opened:
            starts.append(3 * units + i)
            opened.add(i)
        starts.append(number)
        left[i] -= back
        if back and not left[i] and numbers.reduces[i]:
            starts.append(3 * units + len(left) + i)
    return starts


def step_programs(
    policy: SchedulePolicy,
    graph: StageGraph,
    work: StepWork,
    numbers: ActionIndex,
    bounds: Mapping[str, int],
    fill: str = "fine",
) -> StepPrograms:
    """Make the programs of all modules of a step, before they are put into one order."""
    lanes = [tuple(k for k, (_, nodes) in enumerate(numbers.lanes) if i in nodes) for i in range(len(numbers.nodes))]
    edges = links(graph, work)
    _hold_back(numbers, graph, lanes, edges)
    lane_programs = module_programs(policy, graph, work, numbers, edges, bounds)
    return StepPrograms(
        fill, numbers, graph.pipelines, lane_programs, lanes, most(numbers, lane_programs, bounds), bounds
    )


def _pipelined(step: StepPrograms, schedule: str, graph: StageGraph) -> list[int]:
    """Return the shortest order of starts."""
    merges = fill_policy(step.fill).merges(step) if any(step.fills) else [step.merged()]
    if complete := [merge for merge in merges if merge is not None]:
        return min(complete, key=lambda merge: merge.now).order
    if module := in_a_circle(graph, step.made):
        raise ScheduleError(
            f"schedule {schedule!r}: the lists of {module}'s ranks wait for each other: what one of them has"
            " first needs what another has later; give forwards and backwards of all ranks in orders that fit"
        )
    fed = {target.module for source, target in graph.edges if source.module != target.module}
    waiting = [module for module in graph.filling if module in fed]
    if waiting and step.merged() is not None:
        raise ScheduleError(
            f"{schedule}: fill={step.fill!r} runs {', '.join(waiting)} around the pipeline, and what feeds that runs"
            " between, on the same ranks: they wait for each other in a circle; use fill='fine'"
        )
    raise ScheduleError(
        f"{schedule}: microbatches of neighbouring modules wait for each other in a circle; "
        f"feeds must pair them in ascending order"
    )


def _with_sums(numbers: ActionIndex, starts: Sequence[int]) -> list[int]:
    """Insert the REDUCE of cohorts into an order of starts, after the last backward of all cohorts that sum together.
    Then it waits for that backward only, and overlaps the following work.
    """
    if not numbers.joint_sums:
        return list(starts)
    backwards = range(numbers.units, 3 * numbers.units)
    last = {numbers.nodes[numbers.node_of[a]].all_instances: place for place, a in enumerate(starts) if a in backwards}
    due: dict[int, list[int]] = {}
    for number in numbers.joint_sums:
        due.setdefault(last[numbers.nodes[numbers.node_of[number]].all_instances], []).append(number)
    return [number for place, a in enumerate(starts) for number in (a, *due.get(place, ()))]


def _hold_back(
    numbers: ActionIndex, graph: StageGraph, lanes: Sequence[tuple[int, ...]], edges: Sequence[Link]
) -> None:
    """Keep nodes without backward from running all their forwards first on lanes where the longest waiting action is
    first.

    Such nodes hold no activations that would bound them. A lead of two microbatches over the nearest stage that they
    feed is enough for that stage not to wait.
    """
    shared = {lane for on in lanes if len(on) > 1 for lane in on}
    ahead = 2
    for i, node in enumerate(numbers.nodes):
        virtual = graph.pipelines[node.module].vpp > 1
        if numbers.backward[i] or virtual or node.cohort >= 0 or shared.isdisjoint(lanes[i]):
            continue
        fed = (t for t in graph.outgoing[node] if t in numbers.index and t.cohort < 0)
        nearest = min((numbers.index[t] for t in fed), default=None)
        if nearest is None:
            continue
        target = numbers.nodes[nearest].module
        reads: Sequence[int] = range(numbers.counts[i])
        if target != node.module:
            reads = next(e.first_target for e in edges if (e.source, e.target) == (node.module, target))
        unit = numbers.first[nearest]
        for own, k in enumerate(reads, numbers.first[i]):
            if k >= ahead:
                numbers.precede(unit + k - ahead, own)


def _schedule(
    name: str,
    graph: StageGraph,
    work: StepWork,
    train: bool,
    numbers: ActionIndex,
    starts: Sequence[int],
    bounds: Mapping[str, int],
) -> Schedule:
    holders: list[list[list[Action]]] = [[] for _ in numbers.nodes]
    lists: list[list[Action]] = []
    for _, nodes in numbers.lanes:
        lists.append([])
        for i in nodes:
            holders[i].append(lists[-1])
    order: list[Action] = []
    for number in starts:
        action = numbers.actions[number]
        assert action is not None
        order.append(action)
        for actions in holders[numbers.node_of[number]]:
            actions.append(action)
    most = numbers.in_flight(starts)
    for i, n in enumerate(numbers.nodes):
        if most[i] > bounds.get(n.module, most[i]):
            raise ScheduleError(
                f"{name} holds {most[i]} microbatches of {n}, max_in_flight allows {bounds[n.module]}: "
                f"raise it, or take 1f1b"
            )
    return Schedule(
        name=name,
        graph=graph,
        work=work,
        split=frozenset(n for n, split in zip(numbers.nodes, numbers.split, strict=True) if split),
        train=train,
        lanes=tuple(Lane(ranks, tuple(acts)) for (ranks, _), acts in zip(numbers.lanes, lists, strict=True)),
        in_flight=dict(zip(numbers.nodes, most, strict=True)),
        starts=tuple(order),
    )
