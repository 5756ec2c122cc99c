"""The table of transforms: which there are, the order in which they are applied, and how users name them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import TypeVar

from hetero_strategy.errors import ConfigError, hint
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.compile import Compile
from hetero_strategy.parallelize.float8 import Float8
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.transform import OnPaper, Transform

Transforms = Mapping[str, Mapping[str, Transform]]
"""Transforms by module and name."""
Kind = TypeVar("Kind", bound=Transform)

ORDER: list[type[Transform]] = [Float8, Recompute, Compile, Offload]
"""All transforms, in the order in which they are applied."""


def register_transform(kind: type[Transform]) -> None:
    """Add a transform under its name; it is applied after all others on its side of tensor parallelism.

    Raises:
        ConfigError: another transform has the name.
    """
    if any(known.name == kind.name and known is not kind for known in ORDER):
        raise ConfigError(f"transform {kind.name!r} is known already; choose another name")
    if kind not in ORDER:
        ORDER.append(kind)


def in_order(transforms: Iterable[Transform], tp: int) -> list[Transform]:
    """Sort the transforms of a module. With tensor parallelism ``compile`` comes first after it: torch cannot compile a
    checkpoint around tensor-parallel layers.
    """
    transforms = list(transforms)
    for each in transforms:  # a process that did not make the strategy, only unpickled it, may not know the class
        register_transform(type(each))
    first = Compile if tp > 1 else None
    return sorted(transforms, key=lambda t: (not t.before_tp, type(t) is not first, ORDER.index(type(t))))


def read_transforms(transforms: object) -> dict[str, dict[str, Transform]]:
    """Read the option of :class:`HeteroStrategy`.

    Args:
        transforms: module -> transforms, or module -> name -> setting or transform, of which None leaves a transform
            out; None: no transforms.

    Raises:
        ConfigError: a transform or a setting does not exist, or a module has two of a kind.
    """
    if not isinstance(transforms, Mapping | None):
        raise ConfigError(
            f"HeteroStrategy: transforms={transforms!r}; give the transforms of each module, such as"
            " transforms={'llm': {'recompute': 'all'}}"
        )
    chosen = {str(name): _of_module(str(name), of) for name, of in (transforms or {}).items()}
    return {name: of for name, of in chosen.items() if of}


def _of_module(module: str, transforms: object) -> dict[str, Transform]:
    listed = [] if transforms is None else transforms
    if isinstance(transforms, Mapping):
        listed = [_made(module, str(name), setting) for name, setting in transforms.items() if setting is not None]
    if not isinstance(listed, list | tuple) or not all(isinstance(each, Transform) for each in listed):
        raise ConfigError(
            f"HeteroStrategy: transforms of '{module}' are {transforms!r}; give a list of transforms, such as"
            f" [Recompute()], or their settings by name, such as {{'recompute': 'all'}}"
        )
    by_name = {each.name: each for each in listed}
    if len(by_name) < len(listed):
        raise ConfigError(f"HeteroStrategy: transforms of '{module}' are {listed}; give each kind once")
    for each in listed:
        register_transform(type(each))
    return by_name


def _made(module: str, name: str, setting: object) -> Transform:
    if isinstance(setting, Transform) and setting.name == name:
        return setting
    known = {kind.name: kind for kind in ORDER}
    if name not in known:
        raise ConfigError(f"HeteroStrategy: transforms of '{module}' have no {name!r}; {hint(name, list(known))}")
    transform = known[name].of(setting)
    if transform is None:
        raise ConfigError(f"HeteroStrategy: {name} of '{module}' is {setting!r}; use one of: {known[name].settings}")
    return transform


def settings(transforms: Transforms) -> dict[str, dict[str, str | int]]:
    """Return the spelling of transforms in a configuration file, as :func:`read_transforms` reads it."""
    return {name: {each.name: each.setting for each in of.values()} for name, of in transforms.items()}


def merged(transforms: Transforms, more: Transforms) -> dict[str, dict[str, Transform]]:
    """Add transforms to others; of two of a kind the first stays."""
    modules = dict.fromkeys((*transforms, *more))
    return {name: {**more.get(name, {}), **transforms.get(name, {})} for name in modules}


def of_kind(transforms: Transforms, kind: type[Kind]) -> dict[str, Kind]:
    """Return the transforms of one kind by module."""
    return {name: each for name, of in transforms.items() for each in of.values() if isinstance(each, kind)}


def recomputed(transforms: Mapping[str, Transform], blocks: int) -> tuple[float, float]:
    """Return the shares of a module's forward that run again in backward; see :meth:`Transform.recomputed`."""
    return max((each.recomputed(blocks) for each in transforms.values()), default=(0.0, 0.0))


def undivided(transforms: Transforms) -> set[str]:
    """Return the modules whose backward no schedule divides."""
    return {name for name, of in transforms.items() if not all(each.splits_backward for each in of.values())}


def decoupled(transforms: Transforms, fill: str, filling: Iterable[str]) -> dict[str, dict[str, Transform]]:
    """Add the recompute of modules that ``fill="decoupled"`` runs again whole (Kimi K2.5, arXiv:2602.02276).

    Raises:
        ConfigError: only another part of such a module is to run again.
    """
    added = {name: dict(of) for name, of in transforms.items()}
    for name in filling if fill == "decoupled" else ():
        how = added.setdefault(name, {}).setdefault(Recompute.name, Recompute(whole=True))
        if how != Recompute(whole=True):
            raise ConfigError(
                f"HeteroStrategy: recompute of '{name}' is '{how.setting}', but with fill='decoupled' its whole forward"
                " runs again; leave it out, or take fill='fine'"
            )
    return added


def way(transforms: Mapping[str, Transform], number: int, *, moved: bool = False) -> tuple[Transform, ...]:
    """Return the changes of what one block of a module keeps for backward, see :meth:`Transform.on_block`.

    Args:
        moved: include changes that move activations off the device.
    """
    every = (each.on_block(number) for each in transforms.values() if moved or not each.moves)
    return tuple(in_order((each for each in every if each is not None), tp=1))


def choices(blocks: int, without: Collection[str] = ()) -> dict[tuple[int, ...], tuple[Transform, ...]]:
    """Return the transforms that a plan may add to a module of so many blocks, by a number for each kind: 0 without it,
    n with the n-th of its :meth:`Transform.choices`. The first entry is none, the last has the most of each kind.

    For example, of kinds A with two choices and B with one::

        (0, 0): ()    (0, 1): (B,)    (1, 0): (A1,)    (1, 1): (A1, B)    (2, 0): (A2,)    (2, 1): (A2, B)

    Args:
        without: names of kinds to leave out.
    """
    kinds = [[(), *((each,) for each in kind.choices(blocks))] for kind in ORDER if kind.name not in without]
    products = product(*(list(enumerate(kind)) for kind in kinds))
    return {tuple(n for n, _ in some): tuple(each for _, of in some for each in of) for some in products}


def key_of(transforms: Iterable[Transform]) -> frozenset[tuple[str, str]]:
    """Return a key that is equal for equal transforms in any order, whatever their values are."""
    return frozenset((each.name, str(each.setting)) for each in transforms)


def label(way: Iterable[Transform]) -> str:
    """Return a name of a block's changes; empty: none."""
    return ", ".join(f"{each.name}={each.setting}" for each in way)


def faults(name: str, module: OnPaper, layout: ModuleLayout, transforms: Mapping[str, Transform]) -> list[str]:
    """List what makes the transforms of a module impossible in a layout."""
    if not module.has_blocks and (of_blocks := [n for n, each in transforms.items() if each.of_blocks]):
        return [f"{' and '.join(of_blocks)} of '{name}': it has no blocks; leave it out"]
    return [f"{n} of '{name}' {fault}" for n, t in transforms.items() for fault in t.faults(module, layout, transforms)]


def check_transforms(
    transforms: Transforms, modules: Mapping[str, OnPaper], layouts: Mapping[str, ModuleLayout]
) -> None:
    """Check the transforms of all modules.

    Raises:
        ConfigError: a module does not exist, or :func:`faults`; all at once.
    """
    wrong = [f"transforms name '{n}'; the modules are {', '.join(modules)}" for n in transforms if n not in modules]
    wrong += [f for n, of in transforms.items() if n in modules for f in faults(n, modules[n], layouts[n], of)]
    if wrong:
        raise ConfigError("\n".join(f"HeteroStrategy: {fault}" for fault in wrong))
