"""Pictures of timelines and of balance.

Timelines: ranks go down, time across; colours mark modules, shades and hatches kinds of actions. Balance: how even the
work of every module's instances was, as sampled and as planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from hetero_strategy.monitor.balance import BalanceSummary, Spread
from hetero_strategy.monitor.timeline import Event, Timeline, evenly
from hetero_strategy.schedule.action import Kind
from hetero_strategy.simulator.result import Cause

Colour = tuple[float, float, float]
MODULES = ("#4477aa", "#e08b35", "#4f9d6b", "#aa6bb5", "#cc5a5a", "#4fa9b8", "#a38a3d", "#7a7f8c")
"""Colours of modules in order of appearance, repeated if there are more modules."""
TINTS: dict[Kind, float] = {"F": 0.58, "B": 0.0, "I": 0.22, "W": 0.38, "UNSHARD": -0.45, "REDUCE": -0.6}
"""Share of white in the colour of a kind of action, or of black if negative."""
HATCHES: dict[Kind, str] = {"W": "/////", "UNSHARD": "....", "REDUCE": "xxxx"}
NAMES: dict[Kind, str] = {
    "F": "F forward",
    "B": "B backward",
    "I": "I input gradient",
    "W": "W weight gradient",
    "UNSHARD": "all-gather",
    "REDUCE": "reduce",
}
WAITS: dict[Cause, str] = {
    "warm-up": "#d7e3f4",
    "host": "#d9d9d9",
    "dependency": "#f7d6cf",
    "boundary": "#fbe8b0",
    "straggler": "#e4d3f0",
    "cool-down": "#d8ecd6",
}
"""Colours of the causes of idleness."""
INK, FAINT, IDLE, STRIPE = "#22252b", "#767b85", "#f4f4f6", "#dcdde2"
MOST_RANKS = 64
MOST_NUMBERS = 4000
"""Most microbatch numbers in one picture, as text is slow to draw."""
WIDTH = 14.0
"""Width of the picture in inches."""
SEPARATE = 96
"""Most instances whose bars have gaps between them."""
GAP = 0.08
"""Half a gap, in widths of an instance."""
ROW = 2.5
"""Height of one module's row of balance in inches."""


def draw_timelines(path: Path | str, *timelines: Timeline, title: str = "") -> None:
    """Write a picture of timelines, from top to bottom on one time axis; ``path`` ends in .png or .svg."""
    timeline_figure(*timelines, title=title).savefig(path, dpi=150, facecolor="white")


def timeline_figure(*timelines: Timeline, title: str = "") -> Figure:
    """Draw the picture as a figure, without pyplot and its global state."""
    shown = [_at_most(timeline, MOST_RANKS) for timeline in timelines]
    modules = list(dict.fromkeys(e.action.node.module for t in shown for e in sorted(t.events, key=lambda e: e.start)))
    colours = {m: to_rgb(MODULES[i % len(MODULES)]) for i, m in enumerate(modules)}
    rows = [max(1, len(t.ranks)) for t in shown]
    height = 0.36 if max(rows, default=1) <= 16 else max(0.13, 5.8 / max(rows))
    inches = [height * count for count in rows]
    picture = Figure(figsize=(WIDTH, sum(inches) + 0.75 * len(rows) + 1.1))
    picture.set_layout_engine(ConstrainedLayoutEngine(hspace=0.03, h_pad=0.08))
    if title:
        picture.suptitle(title, fontsize=13, fontweight="bold", color=INK)
    longest = max((t.time for t in shown), default=0.0) or 1.0
    grid = picture.add_gridspec(max(1, len(shown)), 1, height_ratios=inches or [1.0])
    for i, timeline in enumerate(shown):
        axes = picture.add_subplot(grid[i])
        _frame(axes, timeline, longest, height, last=i == len(shown) - 1)
        _waits(axes, timeline)
        _boxes(axes, timeline, colours)
        _numbers(axes, timeline, colours, longest, height)
    kinds = {e.action.kind for t in shown for e in t.events}
    turns = sorted({(modules.index(m), n) for t in shown for (_, m, _), n in _turns(t.events).items()})
    handles = [
        Patch(
            facecolor=_shade(colours[modules[i]], "B", turn),
            label=modules[i] + (f", stage {turn + 1} of its rank" if turn else ""),
        )
        for i, turn in turns
    ]
    grey = to_rgb("#6d7380")
    for kind, label in NAMES.items():
        if kind in kinds:
            handles.append(Patch(facecolor=_shade(grey, kind), hatch=HATCHES.get(kind), edgecolor="white", label=label))
    causes = {wait.cause for t in shown for wait in t.waits}
    handles += [
        Patch(facecolor=colour, hatch="////", edgecolor="white", linewidth=0, label=f"idle: {cause}")
        for cause, colour in WAITS.items()
        if cause in causes
    ]
    if any(not t.waits and t.bubble > 0 for t in shown):
        handles.append(Patch(facecolor=IDLE, hatch="////", edgecolor=STRIPE, label="idle"))
    picture.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 10),
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    return picture


def _at_most(timeline: Timeline, most: int) -> Timeline:
    ranks = evenly(timeline.ranks, most)
    chosen = set(ranks)
    events = tuple(event for event in timeline.events if event.rank in chosen)
    return replace(timeline, ranks=ranks, events=events, waits=tuple(w for w in timeline.waits if w.rank in chosen))


def _shade(colour: Colour, kind: Kind, turn: int = 0) -> Colour:
    """Return the colour of a kind of action, with the hue turned for later stages of a rank."""
    tint = TINTS[kind]
    toward = 1.0 if tint > 0 else 0.0
    hue, saturation, value = rgb_to_hsv(colour)
    turned = hsv_to_rgb(((hue + 0.085 * turn) % 1.0, saturation, value * 0.93**turn))
    red, green, blue = (float(c) + (toward - float(c)) * abs(tint) for c in turned)
    return red, green, blue


def _stages(events: Iterable[Event]) -> dict[tuple[int, str], list[int]]:
    """Return (rank, module) -> stages of the module on the rank, ascending."""
    stages: dict[tuple[int, str], set[int]] = defaultdict(set)
    for event in events:
        stages[event.rank, event.action.node.module].add(event.action.node.stage)
    return {key: sorted(numbers) for key, numbers in stages.items()}


def _turns(events: Iterable[Event]) -> dict[tuple[int, str, int], int]:
    """Return (rank, module, stage) -> number of earlier stages of the module on the rank."""
    return {(*key, stage): i for key, numbers in _stages(events).items() for i, stage in enumerate(numbers)}


def _frame(axes: Axes, timeline: Timeline, longest: float, height: float, last: bool) -> None:
    """Draw axes, labels and the idle background."""
    count = len(timeline.ranks)
    axes.set_xlim(0, longest * 1.004)
    axes.set_ylim(count - 0.4, -0.6)
    hidden = f"{count} of {timeline.world} ranks shown" if count < timeline.world else f"{count} ranks"
    seconds = EngFormatter("s")
    text = f"step {seconds(float(f'{timeline.time:.4g}'))}   ·   bubble {timeline.bubble:.1%}   ·   {hidden}"
    if timeline.filling is not None:
        text = f"{timeline.filling}, alone {seconds(float(f'{timeline.filling.alone:.4g}'))}   ·   {text}"
    axes.set_title(timeline.name, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_title(text, loc="right", fontsize=10, color=FAINT)
    axes.barh(range(count), timeline.time, 0.84, color=IDLE, edgecolor=STRIPE, hatch="////", linewidth=0)
    axes.axvline(timeline.time, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    size = min(9.0, 72 * height * 0.75)
    axes.set_yticks(range(count), _labels(timeline), fontsize=size, color=INK)
    axes.tick_params(axis="both", length=0)
    axes.xaxis.set_major_formatter(seconds)
    axes.tick_params(axis="x", labelbottom=last, labelsize=9, labelcolor=FAINT)
    axes.spines[:].set_visible(False)


def _labels(timeline: Timeline) -> list[str]:
    """Return the label of each rank: its number and, if there is space, its stages."""
    if len(timeline.ranks) > 32:
        return [str(rank) for rank in timeline.ranks]
    names: dict[int, list[str]] = defaultdict(list)
    for (rank, module), numbers in _stages(timeline.events).items():
        names[rank].append(f"{module}.{','.join(map(str, numbers))}")
    return [f"{'  '.join(names[rank])}   rank {rank}" for rank in timeline.ranks]


def _waits(axes: Axes, timeline: Timeline) -> None:
    """Draw the causes of idleness, if known."""
    row = {rank: i for i, rank in enumerate(timeline.ranks)}
    boxes: dict[Cause, list[Sequence[tuple[float, float]]]] = defaultdict(list)
    for rank, cause, start, end in timeline.waits:
        boxes[cause].append(_box(row[rank], start, end))
    for cause, same in boxes.items():
        axes.add_collection(
            PolyCollection(same, facecolors=[WAITS[cause]], edgecolors="white", linewidths=0, hatch="////", zorder=1.5)
        )


def _box(row: int, start: float, end: float) -> Sequence[tuple[float, float]]:
    top, bottom = row - 0.42, row + 0.42
    return ((start, top), (end, top), (end, bottom), (start, bottom))


def _boxes(axes: Axes, timeline: Timeline, colours: dict[str, Colour]) -> None:
    """Draw one box per event, boxes of the same look together."""
    row = {rank: i for i, rank in enumerate(timeline.ranks)}
    turns = _turns(timeline.events)
    looks: dict[tuple[Colour, Kind], list[Sequence[tuple[float, float]]]] = defaultdict(list)
    for rank, action, start, end in timeline.events:
        colour = _shade(colours[action.node.module], action.kind, turns[rank, action.node.module, action.node.stage])
        looks[colour, action.kind].append(_box(row[rank], start, end))
    line = 0.6 if len(timeline.events) < 2500 else 0.2
    for (colour, kind), boxes in looks.items():
        axes.add_collection(
            PolyCollection(
                boxes, facecolors=[colour], edgecolors="white", linewidths=line, hatch=HATCHES.get(kind), zorder=2
            )
        )


def _numbers(axes: Axes, timeline: Timeline, colours: dict[str, Colour], longest: float, height: float) -> None:
    """Write microbatch numbers into boxes that are large enough, if most are."""
    size = min(8.5, 72 * height * 0.55)
    points = 72 * WIDTH * 0.85 / longest
    numbered = [e for e in timeline.events if e.action.microbatch >= 0]
    fits = [e for e in numbered if (e.end - e.start) * points > size * (0.62 * len(str(e.action.microbatch)) + 0.3)]
    if len(fits) < 0.5 * len(numbered) or len(fits) > MOST_NUMBERS:
        return
    row = {rank: i for i, rank in enumerate(timeline.ranks)}
    turns = _turns(timeline.events)
    for rank, action, start, end in fits:
        colour = _shade(colours[action.node.module], action.kind, turns[rank, action.node.module, action.node.stage])
        light = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 0.55
        axes.text(
            (start + end) / 2,
            row[rank],
            str(action.microbatch),
            ha="center",
            va="center_baseline",
            fontsize=size,
            color=INK if light else "white",
            bbox={"boxstyle": "round,pad=0.12", "facecolor": colour, "linewidth": 0}
            if action.kind in HATCHES
            else None,
            zorder=3,
        )


def draw_balance(path: Path | str, summary: BalanceSummary) -> None:
    """Write the picture; ``path`` ends in .png or .svg."""
    balance_figure(summary).savefig(path, dpi=150, facecolor="white")


def balance_figure(summary: BalanceSummary) -> Figure:
    """Draw the picture as a figure: a row per module, as sampled on the left and as planned on the right.

    Bars are the loads of the module's instances, sorted in every microbatch and averaged over the run; 1 is the sampled
    mean. Hatching marks the time in which an instance waits for the busiest one.
    """
    count = max(1, len(summary.spreads))
    picture = Figure(figsize=(WIDTH, ROW * count + 1.35))
    picture.set_layout_engine(ConstrainedLayoutEngine(hspace=0.09, wspace=0.04, h_pad=0.09, w_pad=0.08))
    picture.suptitle(_headline(summary), fontsize=13, fontweight="bold", color=INK)
    grid = picture.add_gridspec(count, 2)
    for row, (module, spread) in enumerate(summary.spreads.items()):
        unit = float(spread.before.mean()) or 1.0
        top = 1.12 * max(float(spread.before.max()), float(spread.after.max()), unit) / unit
        for column, (name, loads, ratio) in enumerate(
            (
                ("as sampled", spread.before / unit, spread.imbalance_before),
                ("as planned", spread.after / unit, spread.imbalance_after),
            )
        ):
            axes = picture.add_subplot(grid[row, column])
            _bars(axes, loads, to_rgb(MODULES[row % len(MODULES)]))
            _lines(axes, loads, top, sampled=float(spread.before.max(initial=0.0)) / unit)
            _balance_frame(axes, top, len(loads), first=column == 0, last=row == count - 1)
            axes.set_title(f"{module}, {name}", loc="left", fontsize=11, fontweight="bold", color=INK)
            axes.set_title(_says(spread, ratio, after=column == 1), loc="right", fontsize=10, color=FAINT)
    handles = [
        Patch(facecolor="#6d7380", label="work of an instance, busiest first"),
        Patch(facecolor=IDLE, hatch="////", edgecolor=STRIPE, label="waits for the busiest"),
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, labelcolor=INK, fontsize=9)
    return picture


def _headline(summary: BalanceSummary) -> str:
    ratios = [f"{m} {s.imbalance_before:.2f} → {s.imbalance_after:.2f}" for m, s in summary.spreads.items()]
    shown = f":  {', '.join(ratios)}" if len(ratios) <= 5 else ""  # as many as fit
    return f"busiest instance over the mean, {summary.steps} step{'s' * (summary.steps != 1)}{shown}"


def _says(spread: Spread, ratio: float, *, after: bool) -> str:
    idle = f"max/mean {ratio:.2f}   ·   {1 - 1 / ratio:.0%} is waiting"
    if not after:
        return idle
    change = spread.saved
    return f"{idle}   ·   busiest has {abs(change):.0%} {'less' if change >= 0 else 'more'}"


def _bars(axes: Axes, loads: np.ndarray, colour: tuple[float, float, float]) -> None:
    """Draw loads from the busiest to the idlest, with the wait above each."""
    bounds, highest = np.arange(len(loads) + 1) + 0.5, float(loads.max(initial=0.0))  # instance 1 is drawn around 1
    x, y = np.repeat(bounds, 2)[1:-1], np.repeat(loads, 2)
    if len(loads) <= SEPARATE:  # with more instances, box edges would be thinner than a pixel
        x = np.column_stack([bounds[:-1] + GAP, bounds[1:] - GAP, np.full(len(loads), np.nan)]).ravel()
        y = np.repeat(loads, 3)
    axes.fill_between(x, y, highest, facecolor=IDLE, edgecolor=STRIPE, hatch="////", linewidth=0)
    axes.fill_between(x, 0, y, facecolor=colour, linewidth=0, zorder=2)


def _lines(axes: Axes, loads: np.ndarray, top: float, sampled: float) -> None:
    """Draw the mean and the busiest sampled load across the bars, with names if there is space."""
    count, mean = len(loads), float(loads.mean()) if len(loads) else 0.0
    axes.axhline(mean, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)
    axes.axhline(sampled, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), zorder=3)
    heights = {"mean": (mean, INK)}
    if sampled - mean > 0.13 * top:
        heights["max\nsampled"] = (sampled, FAINT)
    for name, (height, colour) in heights.items():
        axes.annotate(
            name,
            (count + 0.5, height),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            linespacing=0.9,
            color=colour,
            annotation_clip=False,
        )


def _balance_frame(axes: Axes, top: float, count: int, *, first: bool, last: bool) -> None:
    axes.set_xlim(0.5, count + 0.5)
    axes.set_ylim(0, top)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="both", length=0, labelsize=9, labelcolor=FAINT)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(axis="y", labelleft=first)
    axes.grid(axis="y", color=STRIPE, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    if first:
        axes.set_ylabel("load (mean sampled = 1)", fontsize=9, color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(16 if count <= SEPARATE else 8, integer=True, min_n_ticks=1))
    if last:
        axes.set_xlabel("instances, busiest first", fontsize=9, color=FAINT)
