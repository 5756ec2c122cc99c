"""``draw``: how even the work of every module's instances was, as bars as sampled beside bars as planned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hetero_strategy.monitor.balance import BalanceSummary, Spread
from hetero_strategy.monitor.timeline_draw import FAINT, IDLE, INK, MODULES, STRIPE, WIDTH

SEPARATE = 96
"""Most instances whose bars are drawn with gaps between them."""
GAP = 0.08
"""Half of such a gap, in widths of an instance."""
ROW = 2.5
"""Height of one module's row in inches."""


def draw(path: Path | str, summary: BalanceSummary) -> None:
    """Write the picture; ``path`` ends in .png or .svg."""
    figure(summary).savefig(path, dpi=150, facecolor="white")


def figure(summary: BalanceSummary) -> Figure:
    """Draw the picture as a figure of its own: a row per module, before on the left and after on the right.

    Bars are the loads of the module's instances, sorted in every microbatch and averaged over the run; 1 is the mean
    before. Hatched is the time in which an instance waits for the busiest one.
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
            _frame(axes, top, len(loads), first=column == 0, last=row == count - 1)
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
    if len(loads) <= SEPARATE:  # of more, edges of boxes thinner than a pixel would show as noise
        x = np.column_stack([bounds[:-1] + GAP, bounds[1:] - GAP, np.full(len(loads), np.nan)]).ravel()
        y = np.repeat(loads, 3)
    axes.fill_between(x, y, highest, facecolor=IDLE, edgecolor=STRIPE, hatch="////", linewidth=0)
    axes.fill_between(x, 0, y, facecolor=colour, linewidth=0, zorder=2)


def _lines(axes: Axes, loads: np.ndarray, top: float, sampled: float) -> None:
    """Draw the mean and the busiest load as sampled across the bars, with names where they have space."""
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


def _frame(axes: Axes, top: float, count: int, *, first: bool, last: bool) -> None:
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
