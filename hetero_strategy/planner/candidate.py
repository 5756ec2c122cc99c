"""Candidates of a plan, and the options of the user that every candidate keeps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.spec import ModelSpec, ModuleSpec
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.parallelize.transforms import (
    Transforms,
    check_transforms,
    choices,
    faults,
    key_of,
    read_transforms,
    settings,
)
from hetero_strategy.schedule.config import ScheduleConfig


@dataclass(frozen=True)
class Candidate:
    """A way to train a model on a cluster."""

    layouts: Mapping[str, ModuleLayout]
    microbatches: int = 1
    schedule: str = "auto"
    transforms: Mapping[str, Any] = field(default_factory=dict)
    """Transforms by module and name, or their settings, as :class:`HeteroStrategy` takes them."""
    reshard_after_forward: str = "auto"
    fill: str = "auto"
    pieces: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", read_transforms(self.transforms))

    @classmethod
    def of_run(
        cls, config: ScheduleConfig, layouts: Mapping[str, ModuleLayout], microbatches: int, transforms: Transforms
    ) -> Candidate:
        """Return the candidate that a run executes, with the layouts that the run resolved."""
        return cls(
            config.uncut(layouts), microbatches, config.schedule, transforms, config.reshard_after_forward,
            config.fill, config.pieces,
        )  # fmt: skip

    def __hash__(self) -> int:
        transforms = frozenset((name, key_of(of.values())) for name, of in self.transforms.items())
        return hash((frozenset(self.layouts.items()), self.microbatches, self.schedule, self.fill, transforms))

    def of(self, module: str) -> tuple[Transform, ...]:
        """Return all transforms of a module."""
        return tuple(self.transforms.get(module, {}).values())

    @property
    def scheduling(self) -> ScheduleConfig:
        """Return how its steps are scheduled."""
        return ScheduleConfig(self.schedule, {}, self.reshard_after_forward, self.fill, self.pieces)


class _Accepted(NamedTuple):
    """The facts about a module whose degrees :meth:`RunOptions.narrowed` has reduced to what its transforms accept."""

    has_blocks: bool = True
    tp_compiles: bool = True


@dataclass(frozen=True)
class RunOptions:
    """The options that the user set; a plan chooses what they leave at ``auto`` or empty."""

    transforms: Transforms = field(default_factory=dict)
    """Changes of modules' stages; a plan chooses none of a kind that the user gives to any module."""
    accumulated: int = 1
    """Global batches per optimizer step."""
    microbatch_rows: Mapping[str, int | Literal["equal"]] = field(default_factory=dict)
    """``encoder_microbatch_rows`` of the data module."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Schedule options."""

    @property
    def decoupled(self) -> bool:
        """Return whether ``fill="decoupled"`` may be chosen, which sets what blocks keep and holds all microbatches."""
        kept = any(each.changes_memory for of in self.transforms.values() for each in of.values())
        return self.schedule.fill == "auto" and not kept and not self.schedule.max_in_flight

    @property
    def fixed_schedule(self) -> ScheduleConfig:
        """Return the schedule options of every candidate: pieces are of modules that fill."""
        filled = self.schedule.fill == "auto" and bool(self.schedule.pieces)
        return replace(self.schedule, fill="fine") if filled else self.schedule

    @property
    def reshard_after_forward(self) -> str:
        """Return the moment at which FSDP frees gathered parameters."""
        return self.schedule.reshard_after_forward

    def choices(self, module: ModuleSpec) -> dict[tuple[int, ...], tuple[Transform, ...]]:
        """Return the transforms that a plan may add to a module, by a number for each kind: the higher the number, the
        more memory the kind saves; see :func:`hetero_strategy.parallelize.transforms.choices`.
        """
        given = {name for of in self.transforms.values() for name in of}
        return choices(module.blocks * module.has_blocks, given)

    def of(self, module: str, chosen: Iterable[Transform] = ()) -> dict[str, Transform]:
        """Return all transforms of a module if a plan chooses some."""
        return {**{each.name: each for each in chosen}, **self.transforms.get(module, {})}

    def narrowed(self, shape: ModelSpec) -> ModelSpec:
        """Return the shape with the degrees of tensor and expert parallelism that go with the transforms.

        Raises:
            ConfigError: an option names no module, or no degree goes with the transforms of one.
        """
        modules = {}
        for name, module in shape.modules.items():
            of = self.transforms.get(name, {})
            fits = tuple(tp for tp in module.tp if not faults(name, module, _with_tp(tp), of))
            divided = replace(_with_tp(module.tp[0]), dp_shard=2, ep=2)
            experts = module.experts
            if experts is not None:
                experts = replace(experts, divisible=not faults(name, module, divided, of))
            modules[name] = replace(module, tp=fits or module.tp[:1], experts=experts)
        check_transforms(self.transforms, modules, {name: _with_tp(module.tp[0]) for name, module in modules.items()})
        for option in ("pieces", "max_in_flight"):
            if unknown := sorted({*getattr(self.schedule, option)} - {*modules}):
                raise ConfigError(f"planner: {option} names {unknown}; the modules are {', '.join(modules)}")
        return replace(shape, modules=modules)

    def allows(self, module: str, tp: int, chosen: Iterable[Transform] = ()) -> bool:
        """Return whether a run accepts a module with a degree of tensor parallelism and the plan's transforms."""
        return not faults(module, _Accepted(), _with_tp(tp), self.of(module, chosen))

    def __str__(self) -> str:
        """Return the options as the user spells them, to follow a plan's text; empty: no option was given."""
        parts: dict[str, Any] = {"transforms": settings(self.transforms)} if self.transforms else {}
        if self.accumulated > 1:
            parts["accumulate_grad_batches"] = self.accumulated
        return ", with " + " and ".join(f"{option}={of}" for option, of in parts.items()) if parts else ""


def _with_tp(tp: int) -> ModuleLayout:
    return ModuleLayout(tuple(range(tp)), dp_shard=1, tp=tp)
