"""``Placement``: the layouts of all modules over one world. Pure; every check runs before any process exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import ModuleLayout


class Coordinate(NamedTuple):
    """The coordinates of a rank in a module."""

    instance: int
    """Data-parallel coordinate."""
    shard: int
    """Coordinate among the instance's ranks in its stage (context and tensor parallel)."""
    pp: int
    """Pipeline coordinate."""


@dataclass(frozen=True)
class Placement:
    """The resolved layouts of all modules over ranks ``0 .. world_size - 1``; :func:`place` builds it."""

    layouts: Mapping[str, ModuleLayout]
    world_size: int

    def coordinate(self, module: str, rank: int) -> Coordinate | None:
        """Return the rank's coordinate in the module, or None if the rank does not hold it."""
        layout = self.layouts[module]
        if rank not in layout.ranks:
            return None
        pp, index = divmod(layout.ranks.index(rank), layout.dp * layout.neighbours)
        return Coordinate(*divmod(index, layout.neighbours), pp)

    def instances(self) -> dict[str, int]:
        """Return the number of data-parallel instances of every module."""
        return {name: layout.dp for name, layout in self.layouts.items()}

    def table(self) -> list[tuple[str, str, str]]:
        """Return one row per module for reports: name, ranks, and degrees above 1 with the split into stages."""
        rows = []
        for name, layout in self.layouts.items():
            parts = [f"{k}={v}" for k, v in layout.degrees().items() if v > 1]
            if layout.vpp > 1:
                parts.append(_on_each_rank(layout))
            if layout.tp_chunks > 1:
                parts.append(f"tp_chunks={layout.tp_chunks}")
            if layout.split and len(layout.split) > 1:
                parts.append("split=" + "+".join(map(str, layout.split)))
            rows.append((name, _ranges(layout.ranks), " ".join(parts) or "one rank"))
        return rows


def place(layouts: Mapping[str, ModuleLayout], world_size: int) -> Placement:
    """Resolve and check all layouts over a world of ``world_size`` ranks.

    Any mixture of equal, disjoint and partly overlapping rank sets is allowed, contiguous or not, with idle ranks and
    with data-parallel sizes that do not divide one another.

    Raises:
        LayoutError: layouts have faults; the message has one line for each.
    """
    faults: list[str] = []
    if not layouts:
        faults.append("layouts is empty: give every module of the model a ModuleLayout")
    for name, layout in layouts.items():
        faults += [f"layout of '{name}': {fault}" for fault in layout.faults()]
        outside = [r for r in layout.ranks if r >= world_size]
        if outside:
            faults.append(
                f"layout of '{name}': ranks {_ranges(tuple(outside))} do not exist in a world of {world_size}"
                f" processes; use ranks 0 to {world_size - 1}, or start at least {max(outside) + 1} processes"
            )
    if faults:
        raise LayoutError("\n".join(faults))
    resolved = {name: layout.resolved(name) for name, layout in layouts.items()}
    return Placement(resolved, world_size)


def _on_each_rank(layout: ModuleLayout) -> str:
    """The stages of a pipeline rank, in words."""
    if layout.pp_style == "consecutive":
        return f"{layout.vpp} pieces"
    return f"vpp={layout.vpp}" + (" (v)" if layout.pp_style == "v" else "")


def _ranges(ranks: tuple[int, ...]) -> str:
    """Write ``(0, 1, 2, 5)`` as ``0-2,5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)
