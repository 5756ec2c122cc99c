"""What is raised when a person's input is wrong.

A message names the module or file, the field, the numbers and the fix, in one or two lines: recipes print it
without a traceback. Faults of the program itself stay ordinary Python exceptions.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from math import inf
from numbers import Integral
from typing import Any


class HeteroError(ValueError):
    """Base of all errors that a person can mend by changing their input."""


class LayoutError(HeteroError):
    """A layout is impossible, or the layouts do not fit the world."""


class DataError(HeteroError):
    """A manifest, a media file or a batch is not what it should be.

    Args:
        message: names the file.
        kind: a few words by which such faults are counted.
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
    """What to say of an unknown field: the one that is nearly called so, or all."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known) or 'not known'}"


def is_whole(value: object, least: float = -inf) -> bool:
    """Whether a value is a whole number, of at least ``least``, as options of numbers ask."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool) and int(value) >= least


def check_sizes(who: str, least: int = 1, **sizes: object) -> None:
    """Refuse sizes of a model that are no whole numbers, or too small.

    Raises:
        ModelError: naming the size.
    """
    for name, value in sizes.items():
        if not is_whole(value, least):
            raise ModelError(f"{who}: {name} is {value!r}; use a whole number of at least {least}")


Allowed = tuple[str, Callable[[Any], bool]]
"""What an option may be, in words and as a predicate."""
FLAG: Allowed = "True or False", lambda value: isinstance(value, bool)


def one_of(*names: str) -> Allowed:
    """Say that an option is one of some words."""
    return f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names


def check_options(who: str, options: Mapping[str, Allowed], **given: Any) -> None:
    """Refuse what cannot be.

    Args:
        who: takes the options.
        options: name -> what it may be.
        **given: name -> value.

    Raises:
        ConfigError: naming the option and what to give.
    """
    for name, value in given.items():
        allowed, can_be = options[name]
        if not can_be(value):
            raise ConfigError(f"{who}: {name}={value!r}; give {allowed}")


def require(package: str, extra: str, what: str) -> None:
    """Refuse what needs an optional package that is not installed.

    Args:
        package: as it is imported.
        extra: of this distribution, which installs it.
        what: needs it.

    Raises:
        ConfigError: naming the package and the extra.
    """
    if sys.modules.get(package) is None and find_spec(package) is None:
        raise ConfigError(f"{what} needs {package}, which is not installed: pip install 'hetero-strategy[{extra}]'")
