"""`ModuleLayout`: how one module is parallelised and on which ranks. Plain data, no processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np

from hetero_strategy.errors import LayoutError

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from outermost (slowest varying rank) to innermost; ``ep`` reuses ranks of the others."""

NOT_YET = {
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
}


@dataclass(frozen=True)
class ModuleLayout:
    """Where one module lives and how it is split over its ranks.

    Args:
        ranks: global ranks of the module, in any order (they are kept ascending: torch orders a group's members by
            global rank, and a mesh that disagrees gives silently wrong gradients). An int ``n`` means ``range(n)``.
        dp_replicate: replicas of the parameters whose gradients are all-reduced.
        dp_shard: ranks over which parameters, gradients and optimizer state are sharded (FSDP2).
        cp: context-parallel ranks (above 1: not yet).
        tp: tensor-parallel ranks.
        pp: pipeline stages (above 1: not yet).
        ep: expert-parallel ranks (above 1: not yet).

    One degree may be -1: it is derived so that the product of all degrees equals the number of ranks. The default
    ``dp_shard=-1`` makes every rank that no other degree uses a shard.

    Raises:
        LayoutError: from :meth:`resolved`, with every fault found.
    """

    ranks: tuple[int, ...]
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        given: Iterable[int] | int = self.ranks
        ranks = range(given) if isinstance(given, int) else given
        object.__setattr__(self, "ranks", tuple(sorted(int(r) for r in ranks)))

    @property
    def dp(self) -> int:
        """Instances: data-parallel coordinates, each of which computes its own units."""
        return self.dp_replicate * self.dp_shard

    def degrees(self) -> dict[str, int]:
        """Mesh axis sizes, outermost first."""
        return {name: getattr(self, name) for name in DEGREES}

    def faults(self) -> list[str]:
        """Everything wrong with this layout on its own; empty when it can be resolved."""
        found: list[str] = []
        if not self.ranks:
            return ["ranks is empty: give the module at least one rank, or leave the module out"]
        repeated = sorted({r for r in self.ranks if self.ranks.count(r) > 1})
        if repeated:
            found.append(f"ranks repeats {repeated}: a rank belongs to a module once; remove the repetition")
        if self.ranks[0] < 0:
            found.append(f"ranks holds {self.ranks[0]}: ranks count from 0")
        sizes = {**self.degrees(), "ep": self.ep}
        for name, size in sizes.items():
            if size == 0 or size < -1:
                found.append(f"{name}={size}: a degree is a positive number, or -1 to derive it")
            if size > 1 and name in NOT_YET:
                found.append(f"{name}={size}: {NOT_YET[name]} is not available yet; set {name}=1")
        unknown = [name for name, size in sizes.items() if size == -1]
        if len(unknown) > 1:
            found.append(f"{' and '.join(unknown)} are all -1: at most one degree can be derived; give the others")
        if found:
            return found
        known = prod(size for name, size in self.degrees().items() if size != -1)
        count = len(self.ranks)
        if unknown and unknown != ["ep"] and count % known:
            found.append(
                f"{unknown[0]}=-1 cannot be derived: {count} ranks are not a multiple of"
                f" {self._product(skip=unknown[0])} = {known}; change a degree or the number of ranks"
            )
        elif not unknown and known != count:
            found.append(
                f"{self._product()} = {known} but ranks has {count}; set one degree to -1 or give {known} ranks"
            )
        return found

    def resolved(self, module: str = "module") -> ModuleLayout:
        """This layout with every -1 replaced.

        Raises:
            LayoutError: if :meth:`faults` finds any.
        """
        found = self.faults()
        if found:
            raise LayoutError("\n".join(f"layout of '{module}': {fault}" for fault in found))
        known = prod(size for size in self.degrees().values() if size != -1)
        derived = {name: len(self.ranks) // known for name, size in self.degrees().items() if size == -1}
        if self.ep == -1:
            derived["ep"] = 1
        return replace(self, **derived)  # type: ignore[arg-type]

    def grid(self) -> np.ndarray:
        """Global ranks, int64 ``[pp, dp_replicate, dp_shard, cp, tp]``; ascending along every axis. Resolved only."""
        return np.asarray(self.ranks, dtype=np.int64).reshape([getattr(self, name) for name in DEGREES])

    def instances(self) -> np.ndarray:
        """Ranks of each instance, int64 ``[dp, pp * cp * tp]``. Resolved layouts only."""
        return np.moveaxis(self.grid(), 0, 2).reshape(self.dp, -1)

    def _product(self, skip: str = "") -> str:
        shown = [f"{name} {size}" for name, size in self.degrees().items() if size != 1 and name != skip]
        return " x ".join(shown) or "the product of all degrees"

    @classmethod
    def from_config(cls, module: str, config: object) -> ModuleLayout:
        """Build a layout from a mapping (hydra, JSON); a field that does not exist is refused.

        Raises:
            LayoutError: naming the module, the field and the fields that exist.
        """
        if isinstance(config, ModuleLayout):
            return config
        names = [f.name for f in fields(cls)]
        try:
            given = dict(config)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            raise LayoutError(f"layout of '{module}': expected fields {names}, got {config!r}") from None
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise LayoutError(
                f"layout of '{module}': unknown field {', '.join(unknown)}; the fields are {', '.join(names)}"
            )
        if given.get("ranks") is None:
            raise LayoutError(f"layout of '{module}': ranks is missing; give a list such as [0, 1] or a count")
        for name, value in given.items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            listed = name == "ranks" and not isinstance(value, str) and _all_ints(value)
            if not (whole or listed):
                raise LayoutError(
                    f"layout of '{module}': {name}={value!r} is not a whole number"
                    + (" or a list of them" if name == "ranks" else "")
                )
        return cls(**given)


def _all_ints(value: object) -> bool:
    try:
        return all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in value)  # type: ignore[attr-defined]
    except TypeError:
        return False
