"""Print the result of a dry run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from hetero_strategy.strategy.dry_run import BuiltRank, DryRun, Fault
from recipes import terminal
from recipes.printed import parameters

CATEGORIES = ("parameters", "buffers", "gradients", "states", "gathered", "rows")
COUNTS = ("groups", "channels", "meets", "pieces", "actions", "transfers", "MB in a node", "MB between nodes")
SHOWN = 20
"""Faults that are printed."""
WIDTH = 110
"""Least number of columns: a narrow terminal would cut figures."""


def report(found: DryRun) -> None:
    """Print a row for each set of ranks with the same stages, for its rank with the most bytes; then the faults."""
    console = terminal.console()
    console.width = max(console.width, WIDTH)
    lanes: dict[int, list[BuiltRank]] = {}
    for one in found.ranks:
        lanes.setdefault(one.lane, []).append(one)
    console.print(f"dry run of {found.world_size:,} ranks, of which {len(found.ranks)} were built", style="bold")
    for name, shape in found.plan.spec.modules.items():
        console.print(f"{name}: {parameters(shape.held(0, shape.blocks)[0], shape.active)} parameters")
    sizes = _table("GiB of a rank, without activations inside its stages", (*CATEGORIES, "all"))
    counts = _table("what a rank joins, runs, and sends in a step", COUNTS)
    for ranks in lanes.values():
        most = max(ranks, key=lambda one: one.total)
        name = f"{most.alike:,} ({ranks[0].rank} to {ranks[-1].rank})", ", ".join(map(str, most.stages)) or "none"
        sizes.add_row(
            *name, *(f"{size / 2**30:.2f}" for size in (*map(most.bytes.__getitem__, CATEGORIES), most.total))
        )
        counts.add_row(*name, *_counts(ranks))
    console.print(sizes, counts)
    console.print(f"{len(found.faults)} faults" if found.faults else "no faults")
    for fault in found.faults[:SHOWN]:
        console.print(f"  {_where(fault)}: {fault.message}", soft_wrap=True)
    if len(found.faults) > SHOWN:
        console.print(f"  and {len(found.faults) - SHOWN} more")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("ranks", no_wrap=True)
    table.add_column("stages")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _counts(ranks: Sequence[BuiltRank]) -> list[str]:
    """Return the highest of each count over the ranks."""
    programs = [program for one in ranks for program in one.programs]
    sent = [traffic for one in ranks for traffic in one.sent]
    counts = [
        *(max(getattr(one, name) for one in ranks) for name in ("groups", "channels", "connections", "pieces")),
        max((len(program.actions) for program in programs), default=0),
        max((len(program.transfers) for program in programs), default=0),
    ]
    megabytes = [max((getattr(one, way) for one in sent), default=0.0) / 1e6 for way in ("within", "between")]
    return [*(f"{count:,}" for count in counts), *(f"{size:,.1f}" for size in megabytes)]


def _where(fault: Fault) -> str:
    stage = "" if fault.module is None else f" {fault.module}.{fault.stage}"
    return f"{fault.check}{stage}, {'all ranks' if fault.rank is None else f'rank {fault.rank}'}"
