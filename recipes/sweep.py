"""Search with a sweep of Weights & Biases: `python -m recipes.sweep sweep=layouts`.

With its server the sweep is registered there and an agent starts here; `wandb agent` on other machines may join.
Offline the same commands run here one after another, for what does not need the server: grid and random search.
"""

from __future__ import annotations

import itertools
import math
import netrc
import os
import random
import re
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import yaml

from hetero_strategy.errors import ConfigError, HeteroError
from recipes import cli, jobs

HELP = """\
Search with a sweep of Weights & Biases, in its own format (conf/sweep).

  python -m recipes.sweep sweep=layouts                          conf/sweep/layouts.yaml
  python -m recipes.sweep sweep=my/sweep.yaml trainer.max_steps=50   other fields go to every run
  python -m recipes.sweep sweep=schedules count=12               so many runs at most
  python -m recipes.sweep sweep=bayes method=random              grid, random or bayes
  python -m recipes.sweep sweep=layouts folder=outputs/mine      where offline runs go
  WANDB_MODE=offline python -m recipes.sweep sweep=layouts       here and offline, also when logged in
"""
OURS = ("sweep", "count", "method", "folder")
FIELDS = {"name", "description", "project", "entity", "program", "command", "method", "metric", "parameters", "run_cap"}
"""Of a sweep, what an offline search can do."""
PARAMETER = {"value", "values", "probabilities", "distribution", "min", "max"}


def main(arguments: list[str]) -> None:
    """Register the sweep and start an agent, or run it here.

    Raises:
        HeteroError: the sweep is not what it should be, or runs failed.
    """
    given = dict(a.split("=", 1) for a in arguments if a.split("=", 1)[0] in OURS and "=" in a)
    if not given.get("sweep"):
        names = ", ".join(sorted(path.stem for path in Path(cli.CONF, "sweep").glob("*.yaml")))
        raise ConfigError(f"sweep is missing: python -m recipes.sweep sweep=<one of {names}, or a path>")
    sweep = read(given["sweep"])
    sweep["method"] = given.get("method", sweep["method"])
    sweep["command"] += [a for a in arguments if a.split("=", 1)[0] not in OURS]
    count = given.get("count") or sweep.get("run_cap") or 0
    if not str(count).isdigit():
        raise ConfigError(f"count={count}: give a number of runs")
    if online():
        _register(sweep, int(count))
        return
    settings = expand(sweep, int(count), random.Random())
    print(f"{sweep['method']} search here, as Weights & Biases is offline (`wandb login` changes that)")
    folder = Path(given.get("folder") or datetime.now().strftime("outputs/sweeps/%Y-%m-%d/%H-%M-%S")).absolute()
    found = [jobs.Job(command(sweep, one), str(number)) for number, one in enumerate(settings)]
    prepared = jobs.prepare(folder, str(sweep["name"]), found, environment={"WANDB_MODE": "offline"})
    if failed := jobs.run(prepared):
        raise failed


def read(name: str) -> dict[str, Any]:
    """A sweep by its name in conf/sweep, or by its path.

    Raises:
        ConfigError: there is none, or it lacks what a sweep needs.
    """
    path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else Path(cli.CONF, "sweep", f"{name}.yaml")
    if not path.is_file():
        raise ConfigError(f"sweep={name}: {path} is missing")
    sweep: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
    if missing := [field for field in ("method", "parameters", "program", "command") if not sweep.get(field)]:
        raise ConfigError(f"{path}: {', '.join(missing)} missing; conf/sweep/layouts.yaml shows what a sweep needs")
    for parameter in filter(lambda given: isinstance(given, dict), sweep["parameters"].values()):
        if "value" in parameter:
            parameter["value"] = as_typed(parameter["value"])
        if isinstance(parameter.get("values"), list):
            parameter["values"] = [as_typed(value) for value in parameter["values"]]
    return {"name": path.stem, **sweep}


def as_typed(value: Any) -> Any:
    """What hydra takes for this value on a command line, where Weights & Biases would write a null or a mapping as
    Python prints it; any other value as it is.
    """
    if value is None or isinstance(value, (dict, list)):
        return _typed(value)
    return value


def _typed(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_typed(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_typed, value)) + "]"
    if isinstance(value, str):
        return "'" + re.sub(r"(\\*)('|$)", lambda end: 2 * end[1] + ("\\'" if end[2] else ""), value) + "'"
    return "null" if value is None else str(value)


def online() -> bool:
    """Whether Weights & Biases' server is to be used: WANDB_MODE says so or, without it, somebody is logged in."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode == "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators(str(host)))
    except (OSError, netrc.NetrcParseError):
        return False


def _register(sweep: dict[str, Any], count: int) -> None:
    """Start an agent of a new sweep on the server; its runs find this Python."""
    import wandb

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    whose = {"project": sweep.get("project"), "entity": sweep.get("entity")}
    wandb.agent(wandb.sweep(sweep, **whose), **whose, count=count or None)


# ---- offline ---------------------------------------------------------------------------------------------------------


def expand(sweep: Mapping[str, Any], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Settings of every run of a grid or random search: parameter -> value.

    Args:
        sweep: in the format of Weights & Biases.
        count: runs at most; 0: all of a grid.
        rng: draws them.

    Raises:
        ConfigError: the sweep asks for what only the server can do.
    """
    parameters: dict[str, dict[str, Any]] = sweep["parameters"]
    for name, parameter in parameters.items():
        if not isinstance(parameter, dict) or (unknown := set(parameter) - PARAMETER):
            what = sorted(unknown) if isinstance(parameter, dict) else parameter
            raise ConfigError(
                f"parameters.{name}: {what} needs Weights & Biases' server (`wandb login`); here a parameter"
                f" has {', '.join(sorted(PARAMETER))}"
            )
    if unknown := set(sweep) - FIELDS:
        raise ConfigError(
            f"{', '.join(sorted(unknown))} needs Weights & Biases' server: `wandb login`, or leave it out"
        )
    if sweep["method"] == "random":
        if not count:
            raise ConfigError("method=random has no end of its own: give count=<runs>, or run_cap in the sweep")
        return [{name: _draw(name, parameter, rng) for name, parameter in parameters.items()} for _ in range(count)]
    if sweep["method"] != "grid":
        raise ConfigError(
            f"method={sweep['method']} needs Weights & Biases' server, which chooses by what earlier runs gave: `wandb"
            " login`, or search at random with method=random"
        )
    if open_ended := [n for n, parameter in parameters.items() if not {"value", "values"} & set(parameter)]:
        raise ConfigError(f"parameters {', '.join(open_ended)}: a grid needs values; give them, or method=random")
    lists = [p["values"] if "values" in p else [p["value"]] for p in parameters.values()]
    grid = [dict(zip(parameters, values, strict=True)) for values in itertools.product(*lists)]
    return grid[: count or None]


def _draw(name: str, parameter: Mapping[str, Any], rng: random.Random) -> Any:
    """One value of a parameter, as Weights & Biases draws it."""
    if "value" in parameter:
        return parameter["value"]
    if "values" in parameter:
        return rng.choices(parameter["values"], parameter.get("probabilities"))[0]
    if not {"min", "max"} <= set(parameter):
        raise ConfigError(f"parameters.{name}: give value, values, or min and max")
    low, high = parameter["min"], parameter["max"]
    whole = isinstance(low, int) and isinstance(high, int)
    kind = parameter.get("distribution", "int_uniform" if whole else "uniform")
    if kind == "int_uniform":
        return rng.randint(low, high)
    if kind == "uniform":
        return rng.uniform(low, high)
    if kind == "log_uniform_values":
        return math.exp(rng.uniform(math.log(low), math.log(high)))
    raise ConfigError(
        f"parameters.{name}: distribution {kind} needs Weights & Biases' server (`wandb login`); here it is"
        " int_uniform, uniform or log_uniform_values"
    )


def command(sweep: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """What an agent of Weights & Biases runs for these settings."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    values = create_sweep_command_args({"args": {name: {"value": value} for name, value in settings.items()}})
    values |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
    formed: list[str] = []
    for part in map(str, create_sweep_command(list(sweep["command"]))):
        formed += values.get(part[2:-1], []) if part.startswith("${") and part.endswith("}") else [part]
    return formed


if __name__ == "__main__":
    if {"--help", "-h"} & set(sys.argv):
        print(HELP, end="")
    else:
        try:
            main(sys.argv[1:])
        except HeteroError as error:
            cli.fail(error)
