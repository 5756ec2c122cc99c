"""`Placement`: the layouts of all modules over one world. Pure; every check runs before any process exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.spec import ModuleLayout


class Coordinate(NamedTuple):
    """Where a rank stands in a module."""

    instance: int
    """Data-parallel coordinate."""
    shard: int
    """Place among the instance's ranks in its stage (tensor-parallel coordinate)."""
    pp: int
    """Pipeline rank."""


@dataclass(frozen=True)
class Placement:
    """Resolved layouts over ranks ``0 .. world_size - 1``; make it with :func:`place`."""

    layouts: Mapping[str, ModuleLayout]
    world_size: int

    def coordinate(self, module: str, rank: int) -> Coordinate | None:
        """The rank's coordinate in the module, or None where the rank does not hold it."""
        layout = self.layouts[module]
        if rank not in layout.ranks:
            return None
        shards = layout.cp * layout.tp
        pp, place = divmod(layout.ranks.index(rank), layout.dp * shards)
        return Coordinate(*divmod(place, shards), pp)

    def modules_on(self, rank: int) -> tuple[str, ...]:
        """Modules the rank holds, in the order they were given."""
        return tuple(name for name, layout in self.layouts.items() if rank in layout.ranks)

    def instances(self) -> dict[str, int]:
        """Number of data-parallel instances of every module."""
        return {name: layout.dp for name, layout in self.layouts.items()}

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks that hold no module: they take part in the run and wait."""
        return tuple(r for r in range(self.world_size) if not self.modules_on(r))

    def table(self) -> list[tuple[str, str, str]]:
        """One row per module for reports: name, ranks, degrees above 1 and how it is cut into stages."""
        rows = []
        for name, layout in self.layouts.items():
            parts = [f"{k}={v}" for k, v in layout.degrees().items() if v > 1]
            if layout.vpp > 1:
                parts.append(f"vpp={layout.vpp}" + (" (v)" if layout.pp_style == "v" else ""))
            if layout.split is not None:
                parts.append("split=" + "+".join(map(str, layout.split)))
            rows.append((name, _ranges(layout.ranks), " ".join(parts) or "one rank"))
        return rows


def place(layouts: Mapping[str, ModuleLayout], world_size: int) -> Placement:
    """Resolve and check all layouts over a world.

    Any mixture of equal, disjoint and partly overlapping rank sets is allowed, contiguous or not, with idle ranks and
    with data-parallel sizes that do not divide one another.

    Raises:
        LayoutError: with one line per fault, all faults at once.
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


def single(modules: tuple[str, ...]) -> Placement:
    """Every module on rank 0 of a world of one: what ``strategy="auto"`` means."""
    return place({name: ModuleLayout(ranks=(0,)) for name in modules}, 1)


def _ranges(ranks: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` as ``0-2,5``."""
    parts: list[str] = []
    start = prev = None
    for rank in (*ranks, None):
        if start is None:
            start = prev = rank
        elif rank is not None and prev is not None and rank == prev + 1:
            prev = rank
        else:
            parts.append(f"{start}" if start == prev else f"{start}-{prev}")
            start = prev = rank
    return ",".join(parts)
