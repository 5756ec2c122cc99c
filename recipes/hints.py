"""What can be given on a command line, and what was probably meant by a field that hydra does not find."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from hetero_strategy.errors import hint


def choices(*groups: str) -> str:
    """Options of some groups of the configuration, a line each; of data those with files alone, where no cluster can be
    chosen: statistics are to plan with.
    """
    loader = GlobalHydra.instance().config_loader()
    found = {group: loader.get_group_options(group) for group in groups}
    if "cluster" not in groups:
        found["data"] = [name for name in found["data"] if not re.search(r"^sample:", _text("data", name), re.M)]
    return "\n".join(f"{group}: {', '.join(sorted(names))}" for group, names in found.items())


OmegaConf.register_new_resolver("choices", choices, replace=True)


def _text(group: str, name: str) -> str:
    """A file of conf/; empty where it lies elsewhere."""
    path = Path(__file__).parents[1] / "conf" / group / f"{name}.yaml"
    return path.read_text() if path.is_file() else ""


def explained(error: HydraException, conf: str, arguments: Sequence[str], saved: DictConfig | None) -> str:
    """Hydra's message; for a field that does not exist, with the one that was probably meant, and for a value that
    hydra's grammar does not take, with the quotes that it needs.

    Args:
        conf: folder of configuration files.
        arguments: of the command line, the program first.
        saved: configuration of the run that the command line names.
    """
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        quoted = f"""'{key}="{value}"'"""
        return f"{error.override}: hydra cannot read this; paths with = ( ) ~ and the like need quotes: {quoted}"
    found = re.search(r"Could not override '([^']+)'", str(error))
    if found is None:
        return str(error).split("Config search path")[0].strip()
    if found[1] == "sweep":
        return "sweep: python -m recipes.sweep sweep=<name> runs it; -m with lists of values needs no file"
    missing = re.search(r"full_key: (\S+)", str(error.__cause__))  # where a mapping is given, one of its keys
    key = missing[1] if missing and missing[1].startswith(found[1]) else found[1]
    node, path = (_composed(conf, arguments) if saved is None else saved), ""
    for name in key.split("."):
        if not isinstance(node, DictConfig):
            return f"{found[1]}: there is no {path} to hold a field '{name}'"
        if name not in node:
            break
        node, path = node[name], f"{path}.{name}".lstrip(".")
    else:
        if saved is None:
            return str(error)
        return f"{found[1]}: the run has this field, which conf/ lacks; write ++{found[1]}=..."
    return f"{path or 'configuration'}: no field '{name}'; {hint(name, [str(key) for key in node])}"


def _composed(conf: str, arguments: Sequence[str]) -> DictConfig:
    """The program's own configuration, with the groups that the command line chooses; where these are several, or not
    found from here, with its own.
    """
    program = Path(arguments[0]).stem if arguments else ""
    config = program if Path(conf, f"{program}.yaml").is_file() else "config"
    groups = [a for a in arguments[1:] if Path(conf, a.partition("=")[0]).is_dir() or a.startswith("hydra.searchpath=")]
    with hydra.initialize_config_dir(conf, version_base=None):
        try:
            return hydra.compose(config, overrides=groups)
        except HydraException:
            return hydra.compose(config)
