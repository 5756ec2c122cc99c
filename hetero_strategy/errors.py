"""Errors that tell a user what is wrong with their input, and checks that raise them.

A message names the module or file, the field, the numbers and the fix, in one or two lines: recipes print it
without a traceback. Faults of the program itself stay ordinary Python exceptions.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections import abc
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from math import inf
from numbers import Integral
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class HeteroError(ValueError):
    """The base class of all errors that a user can fix by changing their input."""


class LayoutError(HeteroError):
    """A layout is impossible, or the layouts do not fit the world."""


class DataError(HeteroError):
    """A manifest, a media file or a batch is not what it should be.

    Args:
        message: text that names the file.
        kind: name under which such faults are counted.
    """

    def __init__(self, message: str = "", kind: str = "other") -> None:
        super().__init__(message)
        self.kind = kind


class ModelError(HeteroError):
    """A module, an edge or a local model folder is not what it should be."""


class CheckpointError(HeteroError):
    """A checkpoint cannot be written, found, read or matched with the model."""


class ConfigError(HeteroError):
    """An option, or a combination of options, is refused."""


class ScheduleError(HeteroError):
    """A schedule cannot be made from what was asked, or a list of actions cannot run."""


def hint(name: str, known: Sequence[str]) -> str:
    """Return the hint on an unknown field: the field with the nearest name, or all fields."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known) or 'not known'}"


def is_whole(value: object, least: float = -inf) -> bool:
    """Return whether a value is a whole number of at least ``least``, and no bool."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool) and int(value) >= least


def check_sizes(who: str, least: int = 1, **sizes: object) -> None:
    """Refuse sizes of a model that are no whole numbers, or too small."""
    for name, value in sizes.items():
        if not is_whole(value, least):
            raise ModelError(f"{who}: {name} is {value!r}; use a whole number of at least {least}")


Allowed = tuple[str, Callable[[Any], bool]]
"""The values that an option may have, in words and as a test; in ``Annotated[int, (words, test)]`` it restricts a type.
"""
Count = Annotated[int, ("a whole number of at least 1", lambda value: value >= 1)]
_TYPES: dict[Any, Allowed] = {
    Any: ("anything", lambda value: True),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    int: ("a whole number", is_whole),
    str: ("a text", lambda value: isinstance(value, str)),
    type(None): ("None", lambda value: value is None),
}


def check_types(who: str, annotated: Any, **values: Any) -> None:
    """Check option values against the annotations of a function or class.

    Args:
        who: name of the function or class in messages.
        **values: values by option; options without an annotation are not checked.
    """
    hints = _hints(annotated)
    for name, value in values.items():
        words, fits = allowed(hints.get(name, Any))
        if not fits(value):
            such = f", such as {[value]}" if isinstance(value, str) and fits([value]) else ""
            raise ConfigError(f"{who}: {name}={value!r}; give {words}{such}")


_hints = cache(partial(get_type_hints, include_extras=True))


@cache
def allowed(hint: Any) -> Allowed:
    """Return the values that a type allows."""
    origin, of = get_origin(hint), get_args(hint)
    if origin is Annotated:
        plain, (words, more) = allowed(of[0])[1], of[1]
        return words, lambda value: plain(value) and more(value)
    if origin is Literal:
        return f"one of {', '.join(map(str, of))}", lambda value: any(value == x and type(value) is type(x) for x in of)
    if origin in (Union, UnionType):
        kinds = [allowed(each) for each in of]
        return " or ".join(words for words, _ in kinds), lambda value: any(fits(value) for _, fits in kinds)
    if origin in (abc.Mapping, abc.Sequence):
        words, fits = allowed(of[-1])
        if origin is abc.Mapping:
            return f"{words} for each module", lambda value: _is(value, origin) and all(map(fits, value.values()))
        return f"a list of {_plural(words)}", lambda value: _is(value, origin) and all(map(fits, value))
    kind = origin or hint
    return _TYPES.get(hint) or (f"a {kind.__name__}", lambda value: isinstance(value, kind))


def _plural(words: str) -> str:
    """Return the plural of an allowed value's words, whose noun follows its article and at most one adjective.

    >>> _plural("a whole number of at least 1")
    'whole numbers of at least 1'
    """
    return re.sub(r"(^| or )an? ((?:whole )?\w+)", r"\1\2s", words)


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, str)


def one_of(*names: str) -> Allowed:
    """Return the restriction of an option to some words."""
    return f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names


def register(known: dict[str, T], name: str, value: T, what: str, error: type[HeteroError]) -> None:
    """Enter a value under its name in a table of extensions; refuse another value of that name."""
    if known.setdefault(name, value) != value:
        raise error(f"{what} {name!r} is known already; choose another name")


def require(package: str, extra: str, what: str) -> None:
    """Refuse what needs an optional package that is not installed.

    Args:
        package: name by which it is imported.
        extra: extra of this distribution that installs it.
        what: the option that needs it.
    """
    if sys.modules.get(package) is None and find_spec(package) is None:
        raise ConfigError(f"{what} needs {package}, which is not installed: pip install 'hetero-strategy[{extra}]'")
