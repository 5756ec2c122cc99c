"""How steps are scheduled, as a person says it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hetero_strategy.errors import ConfigError, is_whole
from hetero_strategy.layout.islands import check_islands
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.schedule.action import Span, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import stage_graph
from hetero_strategy.schedule.policies import schedule_policy, schedules

RESHARD = ("auto", "never", "always")
FILLS = ("auto", "none", "coarse", "fine", "search", "decoupled")


@dataclass(frozen=True)
class ScheduleConfig:
    """How steps are scheduled; see :class:`HeteroStrategy`."""

    schedule: str = "auto"
    max_in_flight: Mapping[str, int] = field(default_factory=dict)
    reshard_after_forward: str = "auto"
    fill: str = "auto"
    pieces: Mapping[str, int] = field(default_factory=dict)
    prefetch: Mapping[str, int] = field(default_factory=dict)
    islands: int = 1
    tp_bubbles: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        share = "the share of each module's time in which its ranks wait for tensor-parallel collectives"
        object.__setattr__(self, "tp_bubbles", _by_module("tp_bubbles", self.tp_bubbles, _share, share, 0.15))
        count = partial(is_whole, least=1)
        for name in ("max_in_flight", "pieces", "prefetch"):
            given = _by_module(name, getattr(self, name), count, "a whole number of at least 1 for each module", 1)
            object.__setattr__(self, name, given)
        if not count(self.islands):
            raise ConfigError(f"HeteroStrategy: islands={self.islands!r}; give a whole number of at least 1")
        for module, steps in self.prefetch.items():
            if steps != 1:
                raise ConfigError(
                    f"HeteroStrategy: prefetch of '{module}' is {steps}; a module runs 1 step ahead, or leave it out"
                )
        if self.reshard_after_forward not in RESHARD:
            raise ConfigError(
                f"HeteroStrategy: reshard_after_forward={self.reshard_after_forward!r}; use one of {', '.join(RESHARD)}"
            )
        if self.fill not in FILLS:
            raise ConfigError(f"HeteroStrategy: fill={self.fill!r}; use one of {', '.join(FILLS)}")
        if (self.fills or self.prefetch) and (refusal := self._no_filling()):
            asked = f"fill={self.fill!r}" if self.fills else f"prefetch={self.prefetch}"
            raise ConfigError(f"HeteroStrategy: {asked} with {refusal}")
        if self.tp_bubbles and self.fill != "fine":
            raise ConfigError(
                f"HeteroStrategy: tp_bubbles={self.tp_bubbles} with fill={self.fill!r}: encoders run in these bubbles"
                " with fill='fine'"
            )
        if self.reshard_after_forward == "always" and self.splits_backward:
            raise ConfigError(
                f"HeteroStrategy: reshard_after_forward='always' with schedule={self.schedule!r}: a backward in two"
                " halves needs its parameters whole all step; use reshard_after_forward='never' or another schedule"
            )

    @property
    def fills(self) -> bool:
        """Whether modules may fill bubbles."""
        return self.fill not in ("auto", "none")

    @property
    def splits_backward(self) -> bool:
        """Whether backwards are divided in two, as far as the schedule is known."""
        return self.schedule in schedules() and schedule_policy(self.schedule).splits_backward

    def resolved(self, layouts: Mapping[str, ModuleLayout]) -> ScheduleConfig:
        """With the schedule that ``auto`` stands for: what the virtual stages are made for, else 1F1B."""
        if self.schedule != "auto":
            return self
        styles = {layout.pp_style for layout in layouts.values() if layout.vpp > 1}
        return replace(self, schedule="zbv" if "v" in styles else "interleaved_1f1b" if styles else "1f1b")

    def _no_filling(self) -> str | None:
        """Why nothing can fill bubbles here, and what to change; None where it can."""
        if self.schedule == "sequential":
            return "schedule='sequential', in which ranks wait on purpose; leave it out or take another schedule"
        if self.reshard_after_forward == "always":
            return (
                "reshard_after_forward='always': instances that gather with every microbatch cannot act on their own;"
                " use reshard_after_forward='auto' or 'never'"
            )
        return None

    def instead_of_auto(self, other: ScheduleConfig) -> ScheduleConfig:
        """With what another one says where nothing was asked for, as far as it goes with what was."""
        names = ("schedule", "reshard_after_forward")
        chosen = replace(self, **{n: getattr(other, n) for n in names if getattr(self, n) == "auto"})
        if self.fill != "auto" or chosen._no_filling():
            return chosen
        pieces, prefetch = self.pieces or other.pieces, self.prefetch or other.prefetch
        return replace(chosen, fill=other.fill, pieces=pieces, prefetch=prefetch)

    def check(self, layouts: Mapping[str, ModuleLayout]) -> None:
        """Refuse a schedule that these layouts cannot run, whatever the model is.

        Raises:
            ConfigError, ScheduleError: naming module, field and fix.
        """
        check_islands(layouts, self.islands)
        if not (self.fills or self.prefetch):
            self.in_pieces((), layouts)
        trains = {StageId(n, s): True for n, layout in layouts.items() for s in range(layout.pipeline.stages)}
        alone = stage_graph(list(layouts), [], layouts, trains)
        once = StepWork({n: (Span(0, 0, 0),) for n in layouts}, {})
        make_schedule(self.resolved(layouts).schedule, alone, once, max_in_flight=self.max_in_flight)

    def in_pieces(self, filling: Collection[str], layouts: Mapping[str, ModuleLayout]) -> dict[str, ModuleLayout]:
        """Layouts in which modules that fill are cut in stages that follow each other on their ranks.

        Raises:
            ConfigError: ``pieces`` of a module that does not fill, or of a pipeline with a ``split``.
        """
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

    def most_ahead(self, layouts: Mapping[str, ModuleLayout], blocks: Mapping[str, int]) -> dict[str, ModuleLayout]:
        """Layouts in which modules that run ahead in two stages have all blocks but the last in the first one.

        Args:
            blocks: of every module; 0: it is not cut.
        """

        def cut(name: str, layout: ModuleLayout) -> ModuleLayout:
            in_two = layout.pipeline.stages == 2 and layout.pp == 1 and layout.split is None and blocks[name] > 1
            return replace(layout, split=(blocks[name] - 1, 1)) if in_two and name in self.prefetch else layout

        return {name: cut(name, layout) for name, layout in layouts.items()}

    def check_bubbles(self, filling: Collection[str], layouts: Mapping[str, ModuleLayout]) -> None:
        """Refuse bubbles of tensor parallelism of modules that have none, or that nothing fills.

        Raises:
            ConfigError: naming the module, or what to set.
        """
        for module in self.tp_bubbles:
            if module not in layouts or layouts[module].tp == 1:
                split = ", ".join(name for name, layout in layouts.items() if layout.tp > 1)
                raise ConfigError(
                    f"HeteroStrategy: tp_bubbles names '{module}'; modules with tp above 1 are {split or 'none'}"
                )
        if self.tp_bubbles and not filling:
            raise ConfigError(
                f"HeteroStrategy: tp_bubbles={self.tp_bubbles}, but no module feeds a pipeline (pp above 1) on its"
                " ranks; leave it out"
            )

    def uncut(self, layouts: Mapping[str, ModuleLayout]) -> dict[str, ModuleLayout]:
        """Layouts as they were given, from those that :meth:`in_pieces` makes."""
        return {
            n: replace(x, vpp=1, pp_style="loop", split=None) if n in self.pieces else x for n, x in layouts.items()
        }

    def filling(
        self, modules: Collection[str], layouts: Mapping[str, ModuleLayout], edges: Sequence[tuple[str, str]]
    ) -> frozenset[str]:
        """Which of some modules fill bubbles: those whose rows reach a pipeline that they share ranks with, all of
        them where ``fill`` says so, else those that run a step ahead.

        Args:
            modules: that may: all but language models. Those with virtual stages do not.
            layouts: resolved.
            edges: (source, target) module names.
        """
        reached: dict[str, set[str]] = {module: set() for module in layouts}
        for _ in layouts if self.fills or self.prefetch else ():
            for source, target in edges:
                reached[source] |= {target, *reached[target]}
        return frozenset(
            module
            for module in modules
            if (self.fills or module in self.prefetch)
            and layouts[module].vpp == 1
            and any(_on_pipeline(layouts[module], layouts[t]) for t in reached[module])
        )

    def apart(
        self, modules: Collection[str], layouts: Mapping[str, ModuleLayout], edges: Sequence[tuple[str, str]]
    ) -> frozenset[str]:
        """Modules whose instances act on their own: those that fill, and with ``fine`` and ``search`` those that end a
        pipeline that they share ranks with. Each instance of these computes its share of a microbatch when its ranks
        come to it, and not when all of them do.

        Args: see :meth:`filling`.
        """
        own, ends = self.filling(modules, layouts, edges), {*modules} - {source for source, _ in edges}
        if self.fill in ("fine", "search"):
            for source, target in edges:
                alone = layouts[target].pp == layouts[target].vpp == 1
                if target in ends and alone and _on_pipeline(layouts[target], layouts[source]):
                    own |= {target}
        return own

    def gathered_once(self, layout: ModuleLayout, *, casts: bool, apart: bool = False) -> bool:
        """Whether a stage's parameters are gathered at the start of a step and stay whole over it.

        Args:
            apart: its instances may act on their own.
            casts: they compute in another dtype than they are kept in; where nothing shards them, gathering is that.
        """
        if layout.shards == 1:
            return casts and self.reshard_after_forward != "always"
        piped = layout.pp > 1 or self.splits_backward or apart
        return self.reshard_after_forward == "never" or (self.reshard_after_forward == "auto" and piped)


def _on_pipeline(layout: ModuleLayout, other: ModuleLayout) -> bool:
    """Whether a module shares ranks with another one that is a pipeline."""
    return other.pp > 1 and not {*layout.ranks}.isdisjoint(other.ranks)


def _by_module(option: str, given: Any, right: Callable[[Any], bool], what: str, such_as: float) -> dict[str, Any]:
    """What is given by module.

    Raises:
        ConfigError: something else.
    """
    if not isinstance(given, Mapping) or not all(map(right, given.values())):
        example = f"{option}={{'llm': {such_as}}}"
        raise ConfigError(f"HeteroStrategy: {option}={given!r}; give {what}, such as {example}")
    return dict(given)


def _share(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number < 1
