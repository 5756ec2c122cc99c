"""Options that are said of some modules: by their names, or with what is meant of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hetero_strategy.errors import ConfigError


def per_module(
    option: str, given: Iterable[str] | Mapping[str, Any] | None, usual: str, allowed: Sequence[str] = ()
) -> dict[str, Any]:
    """What is meant of each module that an option names.

    Args:
        given: nothing, module names, or module name -> what is meant.
        usual: what is meant of a module that is only named.
        allowed: what may be meant, where the caller does not look itself.

    Raises:
        ConfigError: a string, whose letters would be taken for names, something else, or what is not allowed.
    """
    if isinstance(given, str) or not isinstance(given, Iterable | None):
        one = " is one string" * isinstance(given, str)
        raise ConfigError(
            f"HeteroStrategy: {option}={given!r}{one}; give a list of modules, such as {option}=['llm'], or"
            f" what is meant of each, such as {option}={{'llm': {usual!r}}}"
        )
    said = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given or (), usual)
    for name, meant in said.items():
        if allowed and meant not in allowed:
            known = ", ".join(repr(one) if "," in one else one for one in allowed)
            raise ConfigError(f"HeteroStrategy: {option} of '{name}' is {meant!r}; use one of {known}")
    return said


def check_blocks(option: str, named: Collection[str], blocks: Mapping[str, bool]) -> None:
    """Refuse what is said of modules' blocks where there are none.

    Args:
        named: modules that an option names.
        blocks: every module -> whether it has blocks.

    Raises:
        ConfigError: a module that there is not, or that has no blocks.
    """
    if unknown := sorted({*named} - {*blocks}):
        raise ConfigError(f"HeteroStrategy: {option} names {unknown}; the modules are {', '.join(blocks)}")
    for name in named:
        if not blocks[name]:
            raise ConfigError(f"HeteroStrategy: {option} names '{name}', which has no blocks; leave it out")
