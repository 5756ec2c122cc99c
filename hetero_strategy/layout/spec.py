"""``ModuleLayout``: how one module is parallelised and on which ranks. Plain data, no processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import prod
from numbers import Integral
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64

from hetero_strategy.errors import LayoutError, is_whole
from hetero_strategy.layout.pipeline import Pipeline

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from outermost (slowest varying rank) to innermost; ``ep`` reuses ranks of the others."""

NOT_YET = {"ep": "expert parallelism"}


@dataclass(frozen=True)
class ModuleLayout:
    """Where one module lives and how it is split over its ranks.

    Args:
        ranks: global ranks of the module, in any order (they are kept ascending: torch orders a group's members by
            global rank, and a mesh that disagrees gives silently wrong gradients). An int ``n`` means ``range(n)``.
        dp_replicate: replicas of the parameters, whose gradients are all-reduced.
        dp_shard: instances over whose ranks parameters, gradients and optimizer state are sharded (FSDP2).
        cp: context-parallel ranks of an instance: each has a part of the rows of a microbatch, and all of them shard
            parameters as ``dp_shard`` ranks do. Language models only.
        tp: tensor-parallel ranks.
        tp_chunks: most chunks of a microbatch's rows whose tensor-parallel collectives run one by one beside the
            matmuls of the next; 1: collectives and matmuls take turns.
        pp: pipeline ranks; the module is cut by layer into ``pp * vpp`` stages.
        ep: expert-parallel ranks (above 1: not yet).
        vpp: stages on each pipeline rank.
        pp_style: which stages a pipeline rank has, see :class:`Pipeline`: ``"loop"``, or ``"v"`` (``vpp=2``: the first
            and the last stage share a rank).
        split: blocks of each of the ``pp * vpp`` stages, in order; None: chosen when the model is placed.

    One degree may be -1: it is derived so that the product of all degrees equals the number of ranks. The default
    ``dp_shard=-1`` makes every rank that no other degree uses a shard.

    Raises:
        LayoutError: a field is of the wrong type; from :meth:`resolved`, whose message holds every fault.
    """

    ranks: tuple[int, ...]
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    pp_style: Literal["loop", "v", "consecutive"] = "loop"
    split: tuple[int, ...] | None = None
    tp_chunks: int = 1

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if not is_whole(value := getattr(self, name)):
                raise _wrong(name, value, "a whole number")
        if not isinstance(self.pp_style, str):
            raise _wrong("pp_style", self.pp_style, "'loop' or 'v'")
        argument: Any = self.ranks
        ranks = (
            range(argument) if is_whole(argument) else _listed("ranks", argument, "a whole number or a list of them")
        )
        object.__setattr__(self, "ranks", tuple(sorted(ranks)))
        if self.split is not None:
            object.__setattr__(self, "split", _listed("split", self.split, "a list of whole numbers"))

    @property
    def dp(self) -> int:
        """The number of instances: data-parallel coordinates, each of which computes its own units."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """The number of ranks over which a parameter is sharded: those of ``dp_shard``, and of each the ``cp`` ranks,
        which have seen other tokens as other instances have seen other samples.
        """
        return self.dp_shard * self.cp

    @property
    def neighbours(self) -> int:
        """The number of ranks of an instance on one stage: context-parallel and tensor-parallel ones."""
        return self.cp * self.tp

    @property
    def pipeline(self) -> Pipeline:
        """How the module's stages lie on its pipeline ranks; of resolved layouts only."""
        return Pipeline(self.pp, self.vpp, self.pp_style)

    def degrees(self) -> dict[str, int]:
        """Return the mesh axis sizes, outermost first."""
        return {name: getattr(self, name) for name in DEGREES}

    def faults(self) -> list[str]:
        """Return everything wrong with this layout on its own; empty if it can be resolved."""
        faults: list[str] = []
        if not self.ranks:
            return ["ranks is empty: give the module at least one rank, or leave the module out"]
        repeated = sorted({r for r, after in pairwise(self.ranks) if r == after})
        if repeated:
            faults.append(f"ranks repeats {repeated}: a rank belongs to a module once; remove the repetition")
        if self.ranks[0] < 0:
            faults.append(f"ranks holds {self.ranks[0]}: ranks count from 0")
        sizes = {**self.degrees(), "ep": self.ep}
        for name, size in sizes.items():
            if size == 0 or size < -1:
                faults.append(f"{name}={size}: a degree is a positive number, or -1 to derive it")
            if size > 1 and name in NOT_YET:
                faults.append(f"{name}={size}: {NOT_YET[name]} is not available yet; set {name}=1")
        unknown = [name for name, size in sizes.items() if size == -1]
        if len(unknown) > 1:
            faults.append(f"{' and '.join(unknown)} are all -1: at most one degree can be derived; give the others")
        if faults:
            return faults
        known = prod(size for name, size in self.degrees().items() if size != -1)
        count = len(self.ranks)
        if unknown and unknown != ["ep"] and count % known:
            faults.append(
                f"{unknown[0]}=-1 cannot be derived: {count} ranks are not a multiple of"
                f" {self._product(skip=unknown[0])} = {known}; change a degree or the number of ranks"
            )
        elif unknown in ([], ["ep"]) and known != count:
            faults.append(
                f"{self._product()} = {known} but ranks has {count}; set one degree to -1 or give {known} ranks"
            )
        if self.tp_chunks < 1:
            faults.append(f"tp_chunks={self.tp_chunks}: rows are cut into at least one chunk; set tp_chunks=1")
        elif self.tp_chunks > 1 and (count // known if self.tp == -1 else self.tp) == 1:
            faults.append(f"tp_chunks={self.tp_chunks} with tp=1: nothing is exchanged; set tp_chunks=1, or tp above 1")
        return faults or self._stage_faults(count // known if self.pp == -1 else self.pp)

    def _stage_faults(self, pp: int) -> list[str]:
        """Return what is wrong with ``vpp``, ``pp_style`` and ``split`` if the module has ``pp`` pipeline ranks."""
        faults: list[str] = []
        if self.vpp < 1:
            return [f"vpp={self.vpp}: a pipeline rank has at least one stage; set vpp=1"]
        if self.vpp > 1 and pp == 1:
            faults.append(
                f"vpp={self.vpp} with pp=1: stages of one rank run one after the other; set vpp=1, or pp above 1"
            )
        if self.pp_style not in ("loop", "v"):
            faults.append(f"pp_style={self.pp_style!r}: the styles are 'loop' and 'v'")
        if self.pp_style == "v" and (self.vpp != 2 or pp == 1):
            faults.append(
                f"pp_style='v' with pp={pp} vpp={self.vpp}: two stages on each of several pipeline ranks make a v;"
                " set vpp=2 and pp above 1, or pp_style='loop'"
            )
        if self.split is None:
            return faults
        if len(self.split) != pp * self.vpp:
            faults.append(
                f"split={list(self.split)} is of {len(self.split)} stages, but pp {pp} x vpp {self.vpp} ="
                f" {pp * self.vpp}; give the blocks of each stage, or leave split out"
            )
        if min(self.split, default=1) < 1 and tuple(self.split) != (0,):  # that is a module without blocks
            faults.append(f"split={list(self.split)}: every stage has at least one block; move blocks or lower pp")
        return faults

    def resolved(self, module: str = "module") -> ModuleLayout:
        """Return this layout with every -1 replaced.

        Raises:
            LayoutError: :meth:`faults` finds any.
        """
        if faults := self.faults():
            raise LayoutError("\n".join(f"layout of '{module}': {fault}" for fault in faults))
        known = prod(size for size in self.degrees().values() if size != -1)
        derived = {name: len(self.ranks) // known for name, size in self.degrees().items() if size == -1}
        if self.ep == -1:
            derived["ep"] = 1
        return replace(self, **derived)  # type: ignore[arg-type]

    def grid(self) -> Int64[np.ndarray, "pp dp_replicate dp_shard cp tp"]:
        """Return global ranks, ascending; of resolved layouts only."""
        return np.asarray(self.ranks, dtype=np.int64).reshape([getattr(self, name) for name in DEGREES])

    def stage_grid(self, stage: int) -> Int64[np.ndarray, "instances ranks"]:
        """Return the ranks of each instance of a stage; of resolved layouts only."""
        return self.grid()[self.pipeline.rank_of(stage)].reshape(self.dp, -1)

    def first_stage(self) -> ModuleLayout:
        """Return the layout of the first stage alone; of resolved layouts only."""
        ranks = tuple(map(int, self.stage_grid(0).flat))
        return replace(self, ranks=ranks, pp=1, vpp=1, pp_style="loop", split=None)

    def _product(self, skip: str = "") -> str:
        shown = [f"{name} {size}" for name, size in self.degrees().items() if size != 1 and name != skip]
        return " x ".join(shown) or "the product of all degrees"

    @classmethod
    def from_config(cls, module: str, config: object) -> ModuleLayout:
        """Build a layout from a mapping (hydra, JSON); a field that does not exist is refused.

        Raises:
            LayoutError: a field does not exist or has a value of the wrong type; the message names module and field.
        """
        if isinstance(config, ModuleLayout):
            return config
        names = [f.name for f in fields(cls)]
        try:
            values = dict(config)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            raise LayoutError(f"layout of '{module}': expected fields {names}, got {config!r}") from None
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise LayoutError(
                f"layout of '{module}': unknown field {', '.join(unknown)}; the fields are {', '.join(names)}"
            )
        if values.get("ranks") is None:
            raise LayoutError(f"layout of '{module}': ranks is missing; give a list such as [0, 1] or a count")
        try:
            return cls(**values)
        except LayoutError as fault:
            raise LayoutError(str(fault).replace("ModuleLayout:", f"layout of '{module}':")) from None


_NUMBERS = tuple(each.name for each in fields(ModuleLayout) if each.name not in ("ranks", "split", "pp_style"))


def _listed(name: str, value: Any, expected: str) -> tuple[int, ...]:
    """A field's whole numbers, however they are listed."""
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise _wrong(name, value, expected)
    listed = tuple(value)
    kinds = set(map(type, listed))  # by kind, as there may be thousands of ranks
    if not all(kind is not bool and issubclass(kind, Integral) for kind in kinds):
        raise _wrong(name, list(listed), expected)
    return listed if kinds == {int} else tuple(map(int, listed))


def _wrong(name: str, value: object, expected: str) -> LayoutError:
    return LayoutError(f"ModuleLayout: {name}={value!r} is not {expected}")
