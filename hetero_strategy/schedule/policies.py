"""Registry of all schedules: add your own with :func:`register_schedule`. Pure.

Names in lower case are ours. All other names are those of torch.distributed.pipelining, or aliases of ours
(:data:`ALIASES`). A schedule class of torch computes a grid: for each pipeline rank its actions ``F``, ``B``, ``I`` and
``W`` in order. That grid is used as it is; sends, receives, gathers and sums follow from our routes and plan. Torch's
runtime itself does not run: it passes tensors of one shape along one chain of stages (docs/schedules.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal

from hetero_strategy.errors import ScheduleError, register
from hetero_strategy.layout.spec import Pipeline
from hetero_strategy.schedule import programs
from hetero_strategy.schedule.programs import BACKWARD, FORWARD, WEIGHT, Op, RankProgram

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action


@dataclass(frozen=True)
class ModuleSteps:
    """The input of a policy: the microbatches of one trained module. All lists have one entry per microbatch."""

    module: str
    pipeline: Pipeline
    must: Sequence[int]
    """Forwards of the last stage that have to come before each of its backwards, or the step cannot run."""
    should: Sequence[int]
    """Forwards that should come before each backward, so that later modules need not wait."""
    limit: Sequence[int]
    """Most forwards of any stage that may come before each backward, for ``max_in_flight``."""
    depth: int
    """Pipeline ranks that follow in other modules."""

    @property
    def count(self) -> int:
        """Return the number of microbatches."""
        return len(self.must)

    @property
    def bound(self) -> int:
        """Return the most microbatches that a stage may hold at once."""
        return min((c - j for j, c in enumerate(self.limit) if c < self.count), default=self.count)


@dataclass(frozen=True)
class SchedulePolicy:
    """A schedule by name.

    Args:
        name: name in ``HeteroStrategy(schedule=...)``.
        programs: function that returns, for one module, the list of each of its pipeline ranks: (kind, stage, place of
            the microbatch) with the kinds of ``schedule.programs``. Costs decide how lists of modules on the same ranks
            take turns. None: all forwards of a step microbatch, then all its backwards, one step microbatch after the
            other.
        splits_backward: whether B is split into I and W; a rank's list has all of its W, or none: then they fill waits.
        virtual: style of virtual stages (``vpp > 1``) that the schedule needs in some module; ``none``: it takes no
            virtual stages, ``any``: all styles.
        stages_per_rank: the only ``vpp`` above 1 that it takes.
        instead: schedule to suggest if no module has such stages.
    """

    name: str
    programs: Callable[[ModuleSteps], tuple[RankProgram, ...]] | None
    splits_backward: bool = False
    virtual: Literal["none", "any", "loop", "v"] = "none"
    stages_per_rank: int | None = None
    instead: str = "1f1b"


ALIASES = {"1F1B": "1f1b", "GPipe": "gpipe", "LoopedBFS": "gpipe"}
"""Torch's names of schedules that are ours. Torch's ``LoopedBFS`` runs the backwards of a stage in reverse, which rows
between modules, first in and first out, do not allow."""
_policies: dict[str, SchedulePolicy] = {}


def register_schedule(policy: SchedulePolicy) -> None:
    """Register a schedule by its name, in every process that uses it.

    Raises:
        ScheduleError: another schedule has the name, or the policy is none, or splits backwards without ``programs``.
    """
    if not isinstance(policy, SchedulePolicy):
        raise ScheduleError(f"register_schedule takes a SchedulePolicy(name, programs), got a {type(policy).__name__}")
    if policy.programs is None and policy.splits_backward:
        raise ScheduleError(f"schedule {policy.name!r} divides backwards, so it needs programs")
    register(_policies, policy.name, policy, "schedule", ScheduleError)


def schedules() -> tuple[str, ...]:
    """Return the names of all schedules."""
    return tuple(_policies)


def schedule_policy(name: str) -> SchedulePolicy:
    """Return the policy of a name."""
    name = ALIASES.get(name, name)
    if name not in _policies:
        raise ScheduleError(
            f"schedule {name!r} is not known; choose one of {', '.join(_policies)}, or let a module that is imported"
            " before this give yours to register_schedule (imports=[...] in the recipes; see docs/schedules.md)"
        )
    return _policies[name]


def _gpipe(steps: ModuleSteps) -> tuple[RankProgram, ...]:
    if steps.bound < steps.count:
        raise ScheduleError(
            f"gpipe holds all {steps.count} microbatches of {steps.module}, max_in_flight allows {steps.bound}: "
            f"raise it to {steps.count} or take 1f1b"
        )
    return tuple(programs.gpipe(steps.pipeline.stages_of(r), steps.count) for r in range(steps.pipeline.pp))


def _one_forward_one_backward(steps: ModuleSteps) -> tuple[RankProgram, ...]:
    last = steps.pipeline.pp - 1
    return tuple(
        programs.one_forward_one_backward(
            stage,
            [min(s + last - stage, c, steps.count) for s, c in zip(steps.should, steps.limit, strict=True)],
        )
        for stage in range(steps.pipeline.pp)
    )


def _virtual(steps: ModuleSteps) -> tuple[RankProgram, ...]:
    """Order virtual stages by interleaved 1F1B or ZBV, by their style; order modules without them by 1F1B."""
    if steps.pipeline.vpp == 1:
        return _one_forward_one_backward(steps)
    rank_programs = programs.virtual(steps.pipeline, steps.count, 2 * steps.depth, tuple(steps.must))
    if max(map(programs.held, rank_programs)) <= steps.bound:
        return rank_programs
    return programs.windowed(steps.pipeline, tuple(steps.must), steps.bound, steps.module)


SCHEDULES: Mapping[str, tuple[Literal["loop", "v"], bool]] = {
    "Interleaved1F1B": ("loop", False),
    "InterleavedZeroBubble": ("loop", True),
    "ZBVZeroBubble": ("v", True),
    "DualPipeV": ("v", True),
}
"""Torch's name of a schedule with several stages on a rank -> how its stages lie, and whether it splits backwards."""
KINDS = {"F": (FORWARD,), "I": (BACKWARD,), "W": (WEIGHT,), "B": (BACKWARD, WEIGHT)}
"""Torch's computations and ours."""


@dataclass
class _Stage:
    """The fields of a ``PipelineStage`` that torch's schedule classes read to compute their grid."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: object = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


@lru_cache(64)
def torch_programs(name: str, pp: int, vpp: int, count: int) -> tuple[RankProgram, ...]:
    """Return the program of every pipeline rank in a schedule of torch.

    >>> torch_programs("Interleaved1F1B", pp=2, vpp=2, count=2)[1][:4]   # rank 1 has stages 1 and 3
    ((0, 1, 0), (0, 1, 1), (0, 3, 0), (1, 3, 0))

    Args:
        name: torch's name of the schedule.
        pp: number of pipeline ranks.
        vpp: stages on each of them.
        count: number of microbatches. If torch takes only larger numbers or certain multiples, the grid of the next
            such number is used, without the microbatches that do not exist.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class  # here, so that other schedules need no torch

    stages = [_Stage(i, pp * vpp, pp) for i in range(vpp)]
    try:
        schedule = get_schedule_class(name)(stages, count)
    except ValueError:
        schedule = get_schedule_class(name)(stages, max(pp * vpp, -(-count // pp) * pp))
    grid: dict[int, list[_Action | None]] = schedule.pipeline_order
    return tuple(_program(grid[rank], count, SCHEDULES[name][1]) for rank in range(pp))


def _program(row: Iterable[_Action | None], count: int, splits: bool) -> RankProgram:
    ops: list[Op] = []
    for action in _flat(row):
        stage, place = action.stage_index, action.microbatch_index
        assert place is not None
        if place < count:
            kinds = KINDS[action.computation_type.value]
            ops += [(kind, stage, place) for kind in kinds if splits or kind != WEIGHT]
    return tuple(ops)


def _flat(row: Iterable[_Action | None]) -> Iterator[_Action]:
    """Yield the actions of a rank without bubbles; pairs that torch puts side by side (DualPipeV) are flattened."""
    for action in row:
        if action is not None:
            yield from action.sub_actions or (action,)


def _of_torch(name: str, steps: ModuleSteps) -> tuple[RankProgram, ...]:
    """Return torch's grid, with forwards only as much earlier as the modules need that this one feeds."""
    pipeline = steps.pipeline
    if pipeline.vpp == 1:
        return _one_forward_one_backward(steps)
    rank_programs = _early_enough(name, pipeline, tuple(steps.must))
    if (most := max(map(programs.held, rank_programs))) > steps.bound:
        raise ScheduleError(
            f"{name} holds {most} microbatches of {steps.module}, max_in_flight allows {steps.bound}: raise it to"
            f" {most} or take {'zbv' if pipeline.style == 'v' else 'interleaved_1f1b'}"
        )
    return rank_programs


@lru_cache(64)
def _early_enough(name: str, pipeline: Pipeline, must: tuple[int, ...]) -> tuple[RankProgram, ...]:
    grid = delayed = torch_programs(name, pipeline.pp, pipeline.vpp, len(must))
    late = max(programs.missing(program, pipeline.stages - 1, must) for program in grid)
    while late and programs.duration(pipeline, delayed := tuple(programs.sooner(one, late) for one in grid)) is None:
        late += 1  # a cut last round, moved, may wait in a circle; with all forwards first it cannot
    return delayed


for _policy in (
    SchedulePolicy("gpipe", _gpipe, virtual="any"),
    SchedulePolicy("1f1b", _one_forward_one_backward),
    SchedulePolicy("interleaved_1f1b", _virtual, virtual="loop"),
    SchedulePolicy("zb_h1", _one_forward_one_backward, splits_backward=True),
    SchedulePolicy("zbv", _virtual, splits_backward=True, virtual="v", stages_per_rank=2, instead="zb_h1"),
    SchedulePolicy("sequential", None, virtual="any"),
):
    register_schedule(_policy)
for _name, (_style, _splits) in SCHEDULES.items():
    _stages, _instead = 2 if _style == "v" else None, "zb_h1" if _splits else "1f1b"
    register_schedule(SchedulePolicy(_name, partial(_of_torch, _name), _splits, _style, _stages, _instead))
