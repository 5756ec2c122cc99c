"""``ModuleLayout`` (one module's ranks and degrees), its ``Pipeline``, and ``Placement`` (all modules over one world).

Plain data; every check runs before any process exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from math import prod
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int64

from hetero_strategy.errors import LayoutError, is_whole

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from outermost (slowest varying rank) to innermost; ``ep`` reuses ranks of the other axes."""

ContextOrder = Literal["auto", "zigzag", "blocks"]
ContextForm = Literal["keys", "heads"]


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


@dataclass(frozen=True)
class Pipeline:
    """The stages of one module on its pipeline ranks.

    Args:
        pp: number of pipeline ranks.
        vpp: stages on each pipeline rank.
        style: ``"loop"`` puts stage ``s`` on pipeline rank ``s % pp``. In ``"v"`` every other round of ``pp`` stages
            runs backwards, so with two stages per rank the first and the last stage share a rank. ``"consecutive"``
            puts neighbouring stages on one rank: they are the pieces of its work.
    """

    pp: int = 1
    vpp: int = 1
    style: Literal["loop", "v", "consecutive"] = "loop"

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return self.pp * self.vpp

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
        if self.style == "consecutive":
            return stage // self.vpp
        turn, rank = divmod(stage, self.pp)
        return self.pp - 1 - rank if self.style == "v" and turn % 2 else rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, ascending."""
        return tuple(s for s in range(self.stages) if self.rank_of(s) == rank)


@dataclass(frozen=True)
class ModuleLayout:
    """A module's ranks and its split over them.

    Args:
        ranks: global ranks of the module, in any order (stored ascending: torch orders a group's members by global
            rank, and a mesh in another order gives silently wrong gradients). An int ``n`` means ``range(n)``.
        dp_replicate: replicas of the parameters, whose gradients are all-reduced.
        dp_shard: instances over whose ranks parameters, gradients and optimizer state are sharded (FSDP2).
        cp: context-parallel ranks of an instance: each has a part of the rows of a microbatch, and together they shard
            parameters like ``dp_shard`` ranks. Language models, and encoders whose rows meet in packed attention alone.
        tp: tensor-parallel ranks.
        pp: pipeline ranks; the module is cut by layer into ``pp * vpp`` stages.
        ep: ranks over which a layer's experts are divided. They are ranks of ``dp_shard x cp x tp``, neighbours first;
            parameters of the experts are sharded over the remaining ones.
        vpp: stages on each pipeline rank.
        pp_style: order of stages on pipeline ranks, as in :class:`Pipeline`: ``"loop"``, or ``"v"`` (``vpp=2``: the
            first and the last stage share a rank).
        split: blocks of each of the ``pp * vpp`` stages, in order; None: chosen when the model is placed.
        cp_order: rows of each context-parallel rank: ``"auto"`` (sequences whole or over the fewest ranks, so that work
            is even and few keys travel), ``"zigzag"`` (two chunks of the rows a rank), or ``"blocks"`` (many blocks).
            Not read with ``cp_form="heads"``, which gives each rank a contiguous part.
        cp_form: exchange of context-parallel ranks in attention: ``"keys"`` (each rank receives the keys that
            its rows see and lack) or ``"heads"`` (each attends for its part of the heads, from all rows; ``tp * cp``
            divides the heads). None: ``"keys"`` for language models. Encoders have ``"heads"`` alone.

    One degree may be -1: it is chosen so that the product of all degrees equals the number of ranks. The default
    ``dp_shard=-1`` makes every rank that no other degree uses a shard.

    Raises:
        LayoutError: a field is of the wrong type; from :meth:`resolved`, with every fault in the message.
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
    cp_order: ContextOrder = "auto"
    cp_form: ContextForm | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if not is_whole(value := getattr(self, name)):
                raise _wrong(name, value, "a whole number")
        if not isinstance(self.pp_style, str):
            raise _wrong("pp_style", self.pp_style, "'loop' or 'v'")
        argument: Any = self.ranks
        if self.cp_order not in get_args(ContextOrder):
            raise _wrong("cp_order", self.cp_order, " or ".join(map(repr, get_args(ContextOrder))))
        if self.cp_form not in (None, *get_args(ContextForm)):
            raise _wrong("cp_form", self.cp_form, " or ".join(map(repr, get_args(ContextForm))))
        ranks = (
            range(argument) if is_whole(argument) else _listed("ranks", argument, "a whole number or a list of them")
        )
        object.__setattr__(self, "ranks", tuple(sorted(ranks)))
        if self.split is not None:
            object.__setattr__(self, "split", _listed("split", self.split, "a list of whole numbers"))

    @property
    def dp(self) -> int:
        """Return the number of instances: data-parallel coordinates, each of which computes its own units."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Return the number of ranks over which a parameter is sharded: ``cp`` for each of ``dp_shard``, because
        context-parallel ranks have other tokens, as instances have other samples.
        """
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Return the number of ranks over which a parameter of one rank's experts is sharded."""
        return self.shards * self.tp // self.ep

    @property
    def is_sharded(self) -> bool:
        """Return whether parameters, or those of experts alone, are sharded over ranks that gather them."""
        return self.shards > 1 or (self.ep > 1 and self.expert_shards > 1)

    @property
    def neighbours(self) -> int:
        """Return the number of context-parallel and tensor-parallel ranks of an instance on one stage."""
        return self.cp * self.tp

    @property
    def pipeline(self) -> Pipeline:
        """Return the module's stages on its pipeline ranks; only for resolved layouts."""
        return Pipeline(self.pp, self.vpp, self.pp_style)

    def degrees(self) -> dict[str, int]:
        """Return the mesh axis sizes, outermost first."""
        return {name: getattr(self, name) for name in DEGREES}

    def faults(self) -> list[str]:
        """Return every fault of this layout on its own; empty if it can be resolved."""
        faults: list[str] = []
        if not self.ranks:
            return ["ranks is empty: give the module at least one rank, or leave the module out"]
        repeated = sorted({r for r, after in pairwise(self.ranks) if r == after})
        if repeated:
            faults.append(f"ranks repeats {repeated}: a rank belongs to a module once; remove the repetition")
        if self.ranks[0] < 0:
            faults.append(f"ranks holds {self.ranks[0]}: ranks count from 0")
        sizes = self.degrees()
        for name, size in sizes.items():
            if size == 0 or size < -1:
                faults.append(f"{name}={size}: a degree is a positive number, or -1 to derive it")
        if self.ep < 1:
            faults.append(f"ep={self.ep}: experts are divided over at least one of the module's ranks; set ep=1")
        unknown = [name for name, size in sizes.items() if size == -1]
        if len(unknown) > 1:
            faults.append(f"{' and '.join(unknown)} are all -1: at most one degree can be derived; give the others")
        if faults:
            return faults
        known = prod(size for name, size in self.degrees().items() if size != -1)
        count = len(self.ranks)
        if unknown and count % known:
            faults.append(
                f"{unknown[0]}=-1 cannot be derived: {count} ranks are not a multiple of"
                f" {self._product(skip=unknown[0])} = {known}; change a degree or the number of ranks"
            )
        elif not unknown and known != count:
            faults.append(
                f"{self._product()} = {known} but ranks has {count}; set one degree to -1 or give {known} ranks"
            )
        if faults:
            return faults
        sizes |= dict.fromkeys(unknown, count // known)
        return self._expert_faults(sizes) + self._stage_faults(sizes["pp"])

    def _expert_faults(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the fault of ``ep`` with these degrees, if it has one."""
        shared = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        if shared % self.ep == 0:
            return []
        possible = [n for n in range(1, shared + 1) if shared % n == 0]
        nearest = [n for n in possible if n < self.ep][-1:] + [n for n in possible if n > self.ep][:1]
        axes = f"dp_shard {sizes['dp_shard']} x cp {sizes['cp']} x tp {sizes['tp']}"
        return [f"ep={self.ep} does not divide {axes} = {shared}; set ep={' or '.join(map(str, nearest))}"]

    def _stage_faults(self, pp: int) -> list[str]:
        """Return the faults of ``vpp``, ``pp_style`` and ``split`` if the module has ``pp`` pipeline ranks."""
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
        if min(self.split, default=1) < 1 and tuple(self.split) != (0,):  # a module without blocks has (0,)
            faults.append(f"split={list(self.split)}: every stage has at least one block; move blocks or lower pp")
        return faults

    def resolved(self, module: str = "module") -> ModuleLayout:
        """Return this layout with every -1 replaced."""
        if faults := self.faults():
            raise LayoutError("\n".join(f"layout of '{module}': {fault}" for fault in faults))
        known = prod(size for size in self.degrees().values() if size != -1)
        derived = {name: len(self.ranks) // known for name, size in self.degrees().items() if size == -1}
        return replace(self, **derived)  # type: ignore[arg-type]

    def grid(self) -> Int64[np.ndarray, "pp dp_replicate dp_shard cp tp"]:
        """Return global ranks, ascending; only for resolved layouts."""
        return np.asarray(self.ranks, dtype=np.int64).reshape([getattr(self, name) for name in DEGREES])

    def stage_grid(self, stage: int) -> Int64[np.ndarray, "instances ranks"]:
        """Return the ranks of each instance of a stage; only for resolved layouts."""
        return self.grid()[self.pipeline.rank_of(stage)].reshape(self.dp, -1)

    def _product(self, skip: str = "") -> str:
        shown = [f"{name} {size}" for name, size in self.degrees().items() if size != 1 and name != skip]
        return " x ".join(shown) or "the product of all degrees"

    @classmethod
    def from_config(cls, module: str, config: object) -> ModuleLayout:
        """Build a layout from a mapping (hydra, JSON).

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


_NUMBERS = tuple(each.name for each in fields(ModuleLayout) if each.type == "int")


def _listed(name: str, value: Any, expected: str) -> tuple[int, ...]:
    """Return a field's whole numbers as a tuple of ints."""
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise _wrong(name, value, expected)
    listed = tuple(value)
    kinds = set(map(type, listed))  # by type, because there may be thousands of ranks
    if not all(kind is not bool and issubclass(kind, Integral) for kind in kinds):
        raise _wrong(name, list(listed), expected)
    return listed if kinds == {int} else tuple(map(int, listed))


def _wrong(name: str, value: object, expected: str) -> LayoutError:
    return LayoutError(f"ModuleLayout: {name}={value!r} is not {expected}")


class Coordinate(NamedTuple):
    """The coordinates of a rank in a module."""

    instance: int
    """Data-parallel coordinate."""
    shard: int
    """Coordinate among the instance's ranks in its stage (context and tensor parallel)."""
    pp: int
    """Pipeline coordinate."""
    context: int
    """Context-parallel coordinate."""
    tensor: int
    """Tensor-parallel coordinate."""


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
        instance, shard = divmod(index, layout.neighbours)
        return Coordinate(instance, shard, pp, *divmod(shard, layout.tp))

    def instances(self) -> dict[str, int]:
        """Return the number of data-parallel instances of every module."""
        return {name: layout.dp for name, layout in self.layouts.items()}

    def table(self) -> list[tuple[str, str, str]]:
        """Return one row per module for reports: name, ranks, and degrees above 1 with the split into stages."""
        rows = []
        for name, layout in self.layouts.items():
            parts = [f"{k}={v}" for k, v in {**layout.degrees(), "ep": layout.ep}.items() if v > 1]
            if layout.vpp > 1:
                parts.append(_on_each_rank(layout))
            if layout.split and len(layout.split) > 1:
                parts.append("split=" + "+".join(map(str, layout.split)))
            rows.append((name, _ranges(layout.ranks), " ".join(parts) or "one rank"))
        return rows


def place(layouts: Mapping[str, ModuleLayout], world_size: int) -> Placement:
    """Resolve and check all layouts over a world of ``world_size`` ranks.

    Any mixture of equal, disjoint and partly overlapping rank sets is allowed, contiguous or not, with idle ranks and
    with data-parallel sizes that do not divide one another.

    Raises:
        LayoutError: layouts have faults; the message has one line for each fault.
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
    """Describe the stages of a pipeline rank in words."""
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
