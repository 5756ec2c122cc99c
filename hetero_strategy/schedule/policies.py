"""The schedules that there are, each one registered object: add your own with :func:`register_schedule`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout.pipeline import Pipeline
from hetero_strategy.schedule import programs
from hetero_strategy.schedule.programs import RankProgram


@dataclass(frozen=True)
class ModuleSteps:
    """What a policy orders: the microbatches of one module that is trained. All lists have one entry per microbatch."""

    module: str
    pipeline: Pipeline
    must: Sequence[int]
    """Forwards of the last stage that have to come before each of its backwards, or the step cannot run."""
    should: Sequence[int]
    """The same so that modules after it need not wait."""
    limit: Sequence[int]
    """The most forwards of any stage that may come before it, for ``max_in_flight``."""
    depth: int
    """Pipeline ranks that follow in other modules."""

    @property
    def count(self) -> int:
        """Microbatches."""
        return len(self.must)

    @property
    def bound(self) -> int:
        """Microbatches that a stage may hold at once."""
        return min((c - j for j, c in enumerate(self.limit) if c < self.count), default=self.count)


@dataclass(frozen=True)
class SchedulePolicy:
    """A schedule by name.

    Args:
        name: as in ``HeteroStrategy(schedule=...)``.
        programs: for one module, the list of each of its pipeline ranks: (kind, stage, place of the microbatch)
            with the kinds of ``schedule.programs``. How lists of modules that share ranks take turns is found from
            costs. None: all forwards of a step microbatch, then all its backwards, one step microbatch after the other.
        splits_backward: B is divided in I and W; a rank's W are all in its list, or none is: then they fill waits.
        virtual: style of the virtual stages (``vpp > 1``) it is made for, which some module then must have; ``none``:
            it takes no virtual stages, ``any``: all.
        stages_per_rank: the only ``vpp`` above 1 that it takes.
        instead: what to take where no module has such stages.
    """

    name: str
    programs: Callable[[ModuleSteps], tuple[RankProgram, ...]] | None
    splits_backward: bool = False
    virtual: Literal["none", "any", "loop", "v"] = "none"
    stages_per_rank: int | None = None
    instead: str = "1f1b"


_policies: dict[str, SchedulePolicy] = {}


def register_schedule(policy: SchedulePolicy) -> None:
    """Make a schedule known by its name, in every process that uses it.

    Raises:
        ScheduleError: the name is taken by another one, or it is no policy, or one without ``programs`` that divides
            backwards.
    """
    if not isinstance(policy, SchedulePolicy):
        raise ScheduleError(f"register_schedule takes a SchedulePolicy(name, programs), got a {type(policy).__name__}")
    if policy.programs is None and policy.splits_backward:
        raise ScheduleError(f"schedule {policy.name!r} divides backwards, so it needs programs")
    if _policies.setdefault(policy.name, policy) != policy:
        raise ScheduleError(f"schedule {policy.name!r} is known already; choose another name")


def schedules() -> tuple[str, ...]:
    """Names of all schedules."""
    return tuple(_policies)


def schedule_policy(name: str) -> SchedulePolicy:
    """The policy of a name.

    Raises:
        ScheduleError: there is none.
    """
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
    """Interleaved 1F1B or ZBV of virtual stages, by their style, or 1F1B for modules without them beside these."""
    if steps.pipeline.vpp == 1:
        return _one_forward_one_backward(steps)
    made = programs.virtual(steps.pipeline, steps.count, 2 * steps.depth, tuple(steps.must))
    if max(map(programs.held, made)) <= steps.bound:
        return made
    return programs.windowed(steps.pipeline, tuple(steps.must), steps.bound, steps.module)


for _policy in (
    SchedulePolicy("gpipe", _gpipe, virtual="any"),
    SchedulePolicy("1f1b", _one_forward_one_backward),
    SchedulePolicy("interleaved_1f1b", _virtual, virtual="loop"),
    SchedulePolicy("zb_h1", _one_forward_one_backward, splits_backward=True),
    SchedulePolicy("zbv", _virtual, splits_backward=True, virtual="v", stages_per_rank=2, instead="zb_h1"),
    SchedulePolicy("sequential", None, virtual="any"),
):
    register_schedule(_policy)
