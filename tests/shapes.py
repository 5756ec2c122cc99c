"""Shapes of arrays, checked in the tests: public functions and classes of the package get and give what they state.

``jaxtyping.install_import_hook`` checks private functions and those without arrays too: tests would take twice as long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable
from enum import Enum
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import isclass, isfunction
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np
from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

TYPED = beartype(conf=BeartypeConf(is_pep484_tower=True, is_random=False))
"""Takes an int for a float, as mypy does, and leaves the random numbers of the tests alone."""
EQUAL_NAMES = jaxtyped("context")
"""Within it equal names are equal sizes."""


def check_shapes() -> None:
    """Check whatever is imported from now on."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("hetero_strategy."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Puts the check around what a module defines before another module can import it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        own = {name: member for name, member in vars(module).items() if not name.startswith("_")}
        for owner in (module, *(c for c in own.values() if isclass(c) and c.__module__ == module.__name__)):
            for name, member in list(vars(owner).items()):
                kind = type(member) if isinstance(member, (staticmethod, classmethod, property)) else None
                function = getattr(member, "fget" if kind is property else "__func__", member)
                if isfunction(function) and _is_public(name) and _states_a_shape(function):
                    function.__annotations__ = get_type_hints(function, vars(module))
                    setattr(owner, name, kind(checked(function)) if kind else checked(function))


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name.endswith("__")


def _states_a_shape(function: Callable[..., Any]) -> bool:
    return any("[np.ndarray, '" in str(hint) for hint in function.__annotations__.values())


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a check of each call. What it sees of most calls it has seen before: then it need not look."""
    typed, results = TYPED(function), list[Any]()
    passed: dict[Any, set[Any]] = {}

    @TYPED
    @wraps(function)
    def same(*args: Any, **kwargs: Any) -> Any:
        return results.pop()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _seen((*kwargs, *args, *kwargs.values()) if kwargs else args)
        before = passed.get(given)
        if before is None:
            with EQUAL_NAMES:
                result = typed(*args, **kwargs)
            returned = _seen((result,))
        else:
            result = function(*args, **kwargs)
            returned = _seen((result,))
            if returned in before:
                return result
            results.append(result)
            with EQUAL_NAMES:
                same(*args, **kwargs)
        if given is not None and returned is not None:
            passed.setdefault(given, set()).add(returned)
        return result

    return call


def _seen(values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that a check sees of values: types, shapes, texts, and the same of what is in tuples; None where it looks
    into another value.
    """
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is np.ndarray:
            found.append((value.dtype, value.shape))
        elif kind is str or kind is type:
            found.append(value)
        elif not _is_deep(kind):
            found.append(kind)
        elif issubclass(kind, tuple) and len(value) <= 8 and (inside := _seen(value)) is not None:
            found.append((kind, inside))
        else:
            return None
    return tuple(found)


@cache
def _is_deep(kind: type) -> bool:
    """Whether a check looks into values of this type, or at which of them it is."""
    return issubclass(kind, (Iterable, Container, Enum, type))
