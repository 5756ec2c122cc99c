"""``draw``: timelines as a picture. Ranks down, time across, a colour per module, a look per kind of action."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from hetero_strategy.monitor.timeline import Event, Timeline, evenly
from hetero_strategy.schedule.action import Kind
from hetero_strategy.simulator.result import Cause

Colour = tuple[float, float, float]
MODULES = ("#4477aa", "#e08b35", "#4f9d6b", "#aa6bb5", "#cc5a5a", "#4fa9b8", "#a38a3d", "#7a7f8c")
"""Colours of modules as they appear, repeated where there are more modules."""
TINTS: dict[Kind, float] = {"F": 0.58, "B": 0.0, "I": 0.22, "W": 0.38, "UNSHARD": -0.45, "REDUCE": -0.6}
"""Share of white in the colour of a kind of action, or of black where it is below 0."""
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
"""Colours of what idle ranks wait for."""
INK, FAINT, IDLE, STRIPE = "#22252b", "#767b85", "#f4f4f6", "#dcdde2"
MOST_RANKS = 64
MOST_NUMBERS = 4000
"""Most microbatch numbers in one picture, as text is slow to draw."""
WIDTH = 14.0
"""Width of the picture in inches."""


def draw(path: Path | str, *timelines: Timeline, title: str = "") -> None:
    """Write a picture of timelines, from top to bottom on one time axis; ``path`` ends in .png or .svg."""
    figure(*timelines, title=title).savefig(path, dpi=150, facecolor="white")


def figure(*timelines: Timeline, title: str = "") -> Figure:
    """Draw the picture as a figure of its own, without pyplot and its global state."""
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
    """Colour of a kind of action, with the hue turned for later stages of a rank."""
    tint = TINTS[kind]
    toward = 1.0 if tint > 0 else 0.0
    hue, saturation, value = rgb_to_hsv(colour)
    turned = hsv_to_rgb(((hue + 0.085 * turn) % 1.0, saturation, value * 0.93**turn))
    red, green, blue = (float(c) + (toward - float(c)) * abs(tint) for c in turned)
    return red, green, blue


def _stages(events: Iterable[Event]) -> dict[tuple[int, str], list[int]]:
    """(rank, module) -> stages of the module that the rank has, ascending."""
    stages: dict[tuple[int, str], set[int]] = defaultdict(set)
    for event in events:
        stages[event.rank, event.action.node.module].add(event.action.node.stage)
    return {key: sorted(numbers) for key, numbers in stages.items()}


def _turns(events: Iterable[Event]) -> dict[tuple[int, str, int], int]:
    """(rank, module, stage) -> number of earlier stages of the module that the rank has."""
    return {(*key, stage): i for key, numbers in _stages(events).items() for i, stage in enumerate(numbers)}


def _frame(axes: Axes, timeline: Timeline, longest: float, height: float, last: bool) -> None:
    """Axes, labels and the idle background."""
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
    """Label of each rank: its number and, where there is space, its stages."""
    if len(timeline.ranks) > 32:
        return [str(rank) for rank in timeline.ranks]
    names: dict[int, list[str]] = defaultdict(list)
    for (rank, module), numbers in _stages(timeline.events).items():
        names[rank].append(f"{module}.{','.join(map(str, numbers))}")
    return [f"{'  '.join(names[rank])}   rank {rank}" for rank in timeline.ranks]


def _waits(axes: Axes, timeline: Timeline) -> None:
    """Draw what idle ranks wait for, where that is known."""
    row = {rank: i for i, rank in enumerate(timeline.ranks)}
    boxes: dict[Cause, list[Sequence[tuple[float, float]]]] = defaultdict(list)
    for rank, cause, start, end in timeline.waits:
        boxes[cause].append(_box(row[rank], start, end))
    for cause, same in boxes.items():
        axes.add_collection(
            PolyCollection(same, facecolors=[WAITS[cause]], edgecolors="white", linewidths=0, hatch="////", zorder=1.5)
        )


def _box(row: int, start: float, end: float, top: float = -0.42, bottom: float = 0.42) -> Sequence[tuple[float, float]]:
    return ((start, row + top), (end, row + top), (end, row + bottom), (start, row + bottom))


def _span(timeline: Timeline, module: str) -> tuple[float, float]:
    """Which part of a row a module has: what runs beside others its lower third, where there is such a module."""
    if not timeline.apart:
        return -0.42, 0.42
    return (0.16, 0.42) if module in timeline.apart else (-0.42, 0.14)


def _boxes(axes: Axes, timeline: Timeline, colours: dict[str, Colour]) -> None:
    """Draw one box per event, boxes of the same look together."""
    row = {rank: i for i, rank in enumerate(timeline.ranks)}
    turns = _turns(timeline.events)
    looks: dict[tuple[Colour, Kind], list[Sequence[tuple[float, float]]]] = defaultdict(list)
    for rank, action, start, end in timeline.events:
        colour = _shade(colours[action.node.module], action.kind, turns[rank, action.node.module, action.node.stage])
        looks[colour, action.kind].append(_box(row[rank], start, end, *_span(timeline, action.node.module)))
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
    numbered = [e for e in timeline.events if e.action.microbatch >= 0 and e.action.node.module not in timeline.apart]
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
            row[rank] + sum(_span(timeline, action.node.module)) / 2,
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
