"""Schedule options of the user. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from hetero_strategy.errors import ConfigError, Count, check_types, one_of
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.schedule.action import Span, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.fill import fill_policy
from hetero_strategy.schedule.graph import stage_graph
from hetero_strategy.schedule.policies import schedule_policy, schedules

Reshard = Annotated[str, one_of("auto", "never", "always")]


@dataclass(frozen=True)
class ScheduleConfig:
    """A set of schedule options; see :class:`HeteroStrategy`."""

    schedule: str = "auto"
    max_in_flight: Mapping[str, Count] = field(default_factory=dict)
    reshard_after_forward: Reshard = "auto"
    fill: str = "auto"
    pieces: Mapping[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types("HeteroStrategy", ScheduleConfig, **vars(self))
        for name in ("max_in_flight", "pieces"):  # a dict of its own: the caller's may change, or not be picklable
            object.__setattr__(self, name, dict(getattr(self, name)))
        if self.fills:
            fill_policy(self.fill)
            if refusal := self._no_filling():
                raise ConfigError(f"HeteroStrategy: fill={self.fill!r} with {refusal}")
        if self.reshard_after_forward == "always" and self.splits_backward:
            raise ConfigError(
                f"HeteroStrategy: reshard_after_forward='always' with schedule={self.schedule!r}: a backward in two"
                " halves needs its parameters whole all step; use reshard_after_forward='never' or another schedule"
            )

    @property
    def fills(self) -> bool:
        """Return whether modules may fill bubbles."""
        return self.fill not in ("auto", "none")

    @property
    def splits_backward(self) -> bool:
        """Return whether backwards are split in two, as far as the schedule is known."""
        return self.schedule in schedules() and schedule_policy(self.schedule).splits_backward

    def resolved(self, layouts: Mapping[str, ModuleLayout]) -> ScheduleConfig:
        """Replace ``auto`` by the schedule for which the virtual stages are made, else by 1F1B."""
        if self.schedule != "auto":
            return self
        styles = {layout.pp_style for layout in layouts.values() if layout.vpp > 1}
        return replace(self, schedule="zbv" if "v" in styles else "interleaved_1f1b" if styles else "1f1b")

    def _no_filling(self) -> str | None:
        """Explain why nothing can fill bubbles here, and the fix; None if it can."""
        if self.schedule == "sequential":
            return "schedule='sequential', in which ranks wait on purpose; leave it out or take another schedule"
        if self.reshard_after_forward == "always":
            return (
                "reshard_after_forward='always': instances that gather with every microbatch cannot act on their own;"
                " use reshard_after_forward='auto' or 'never'"
            )
        return None

    def instead_of_auto(self, other: ScheduleConfig) -> ScheduleConfig:
        """Fill in options left at ``auto`` from another configuration, as far as they fit the options that are set."""
        names = ("schedule", "reshard_after_forward")
        chosen = replace(self, **{n: getattr(other, n) for n in names if getattr(self, n) == "auto"})
        if self.fill != "auto" or chosen._no_filling():
            return chosen
        return replace(chosen, fill=other.fill, pieces=self.pieces or other.pieces)

    def check(self, layouts: Mapping[str, ModuleLayout]) -> None:
        """Refuse a schedule that these layouts cannot run, whatever the model is."""
        if not self.fills:
            self.in_pieces((), layouts)
        trains = {StageId(n, s): True for n, layout in layouts.items() for s in range(layout.pipeline.stages)}
        alone = stage_graph(list(layouts), [], layouts, trains)
        once = StepWork({n: (Span(0, 0, 0),) for n in layouts}, {})
        make_schedule(self.resolved(layouts).schedule, alone, once, max_in_flight=self.max_in_flight)

    def in_pieces(self, filling: Collection[str], layouts: Mapping[str, ModuleLayout]) -> dict[str, ModuleLayout]:
        """Cut modules that fill into stages that follow each other on their ranks."""
        cut = dict(layouts)
        for module, pieces in self.pieces.items():
            if module not in filling:
                raise ConfigError(
                    f"HeteroStrategy: pieces of '{module}' is {pieces}; give them to modules that fill bubbles, which"
                    f" are with fill={self.fill!r} {', '.join(sorted(filling)) or 'none'}"
                )
            layout = layouts[module]
            if layout.pp > 1 and layout.split is not None:
                raise ConfigError(
                    f"HeteroStrategy: pieces of '{module}' is {pieces}, but split={list(layout.split)} of its layout"
                    " says already where it is cut; leave one of them out"
                )
            cut[module] = replace(layout, vpp=pieces, pp_style="consecutive", split=None)
        return cut

    def uncut(self, layouts: Mapping[str, ModuleLayout]) -> dict[str, ModuleLayout]:
        """Undo :meth:`in_pieces`."""
        return {
            n: replace(x, vpp=1, pp_style="loop", split=None) if n in self.pieces else x for n, x in layouts.items()
        }

    def filling(
        self, modules: Collection[str], layouts: Mapping[str, ModuleLayout], edges: Sequence[tuple[str, str]]
    ) -> frozenset[str]:
        """Find the modules that fill bubbles: if ``fill`` is set, those whose rows reach a pipeline on the same ranks.

        Args:
            modules: candidates: all modules but language models. Those with virtual stages or with experts on
                several ranks, in which all instances meet, do not fill.
            layouts: resolved layouts.
            edges: (source, target) module names.
        """
        if not self.fills:
            return frozenset()
        reached: dict[str, set[str]] = {module: set() for module in layouts}
        for _ in layouts:
            for source, target in edges:
                reached[source] |= {target, *reached[target]}
        return frozenset(
            module
            for module in modules
            if layouts[module].vpp == layouts[module].ep == 1
            and any(_on_pipeline(layouts[module], layouts[t]) for t in reached[module])
        )

    def apart(
        self, modules: Collection[str], layouts: Mapping[str, ModuleLayout], edges: Sequence[tuple[str, str]]
    ) -> frozenset[str]:
        """Find the modules whose instances act on their own: those that fill, and with ``fine`` those that end a
        pipeline on the same ranks. Each of their instances computes its share of a microbatch when its own ranks reach
        it, not when all do.

        Args: see :meth:`filling`.
        """
        own, ends = self.filling(modules, layouts, edges), {*modules} - {source for source, _ in edges}
        if self.fills and fill_policy(self.fill).ends:
            for source, target in edges:
                alone = layouts[target].pp == layouts[target].vpp == layouts[target].ep == 1
                if target in ends and alone and _on_pipeline(layouts[target], layouts[source]):
                    own |= {target}
        return own

    def gathered_once(self, layout: ModuleLayout, *, casts: bool, apart: bool = False) -> bool:
        """Return whether a stage's parameters are gathered at the start of a step and stay whole over it.

        Args:
            apart: whether its instances may act on their own, or its blocks run several times in a microbatch.
            casts: whether they compute in another dtype than they are kept in; without shards, gathering is only this
                cast.
        """
        if not layout.is_sharded:
            return casts and self.reshard_after_forward != "always"
        piped = layout.pp > 1 or self.splits_backward or apart
        return self.reshard_after_forward == "never" or (self.reshard_after_forward == "auto" and piped)


def _on_pipeline(layout: ModuleLayout, other: ModuleLayout) -> bool:
    """Return whether a module shares ranks with another module that is a pipeline."""
    return other.pp > 1 and not {*layout.ranks}.isdisjoint(other.ranks)
