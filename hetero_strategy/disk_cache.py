"""Results on disk, keyed by all that they depend on, so that none is computed again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def cached(
    make: Callable[[], Result], of: Mapping[str, Any], read: Callable[[Any], Result], kind: str = "profiles"
) -> Result:
    """Load a cached result with the same key; otherwise run ``make`` and store its result.

    The file is in ``$XDG_CACHE_HOME/hetero_strategy/KIND`` (default ``~/.cache``). A damaged file is written again; if
    the folder is not writable, the log says so. A file appears whole, so that any number of processes may share it.

    Args:
        of: all that the result depends on, in JSON values.
        read: restores the result of ``make`` from JSON values: dataclasses are objects, named tuples are lists, arrays
            are lists of lists.
        kind: name of the folder.
    """
    file = folder(kind) / f"{digest(of)}.json"
    try:
        return read(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    value = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            json.dump(value, part, default=_plain)
        os.replace(part.name, file)
    except OSError as error:
        _log.warning("a result is not kept: %s; set XDG_CACHE_HOME to a folder that can be written to", error)
    return value


def folder(kind: str = "profiles") -> Path:
    """Return the folder of results of a kind."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero_strategy" / kind


def digest(of: Mapping[str, Any]) -> str:
    """Hash the key of a result."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:32]


@cache
def package() -> str:
    """Hash the files of this package."""
    files = sorted(map(str, Path(__file__).parent.rglob("*.py")))
    return hashlib.sha256("".join(map(_content, files)).encode()).hexdigest()


def contents(files: Iterable[str]) -> list[str]:
    """Hash files as they were at the first call, that is, as they were imported."""
    return [_content(file) for file in sorted(files)]


@cache
def _content(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _plain(value: Any) -> Any:
    """Convert an array or a dataclass to JSON values."""
    return value.tolist() if isinstance(value, np.ndarray) else vars(value)
