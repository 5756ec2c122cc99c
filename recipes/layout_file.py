"""A plan as a file of hydra's group ``layout``, for `recipes.train layout=<file>`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.planner.evaluate import Placed
from recipes import cli

OPTIONS = ("schedule", "recompute", "offload", "reshard_after_forward", "fill", "pieces", "prefetch", "tp_bubbles")
IN_FILE = ("layout", "resume", "data.module.microbatches", *(f"strategy.{name}" for name in OPTIONS))
"""Beginnings of what a command line need not say beside a layout file."""


def train_with(
    file: Path, microbatches: int, *, own: Sequence[str] = (), run: Path | None = None, nodes: int = 1
) -> str:
    """The command that trains what this program was asked for with the layouts of a file, and without what that says.

    Args:
        microbatches: said by the file, too, whose value an ``experiment`` may replace.
        own: fields of this program that training does not have.
        run: folder of a run whose configuration this program took; this command line changed it.
        nodes: said where there are several and ``own`` names those of the run.
    """
    every = [*(cli.asked(run) if run else ()), *cli.asked()]
    given = [*dict.fromkeys(reversed(every))][::-1]  # of what is said twice the last counts
    folders = [*dict.fromkeys([*cli.searched(), *(cli.searched(run) if run else ())])]
    left_out = (*IN_FILE, *(f"{name}{mark}" for name in own for mark in "=."))
    kept = [shlex.quote(override) for override in given if not override.lstrip("+~").startswith(left_out)]
    said = [shlex.quote(cli.searchpath(folders))] if folders else []
    said += [f"trainer.num_nodes={nodes}"] if nodes > 1 else []
    said += [f"layout={shlex.quote(str(cli.near(file)))}", f"data.module.microbatches={microbatches}"]
    return " ".join([cli.command("recipes.train"), *kept, *said])


def write_layout(path: Path, placed: Placed, what: str, command: str | None) -> Path:
    """Write layouts, schedule, recompute, offload, when weights are freed and, for data that trains, the microbatches.

    Args:
        what: the first line says it.
        command: that trains with the file, for the second line; None: the data do not train.
    """
    candidate, scheduling = placed.candidate, placed.scheduling
    strategy: dict[str, Any] = {"schedule": scheduling.schedule}
    if candidate.recompute:
        strategy["recompute"] = {name: str(how) for name, how in candidate.recompute.items()}
    if candidate.offload:
        strategy["offload"] = {name: str(how) for name, how in candidate.offload.items()}
    if scheduling.reshard_after_forward != "auto":
        strategy["reshard_after_forward"] = scheduling.reshard_after_forward
    if placed.graph.apart and scheduling.fills:
        strategy["fill"] = scheduling.fill
    for option, by_module in (("pieces", scheduling.pieces), ("prefetch", scheduling.prefetch)):
        if by_module:
            strategy[option] = dict(by_module)
    content: dict[str, Any] = {
        "layout": {name: _fields(x) for name, x in placed.scheduling.uncut(placed.placement.layouts).items()},
        "strategy": strategy,
    }
    if command is not None:
        content["data"] = {"module": {"microbatches": candidate.microbatches}}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"- /fields/layout@layout.{name}" for name in placed.placement.layouts]
    how = [] if command is None else [f"# {command}"]
    head = ["# @package _global_", f"# {what}", *how, "defaults:", *(f"  {line}" for line in lines), "  - _self_", ""]
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=118)
    path.write_text("\n".join([*head, body]))
    return path


def _fields(layout: ModuleLayout) -> dict[str, Any]:
    """What is not default."""
    given: dict[str, Any] = {"ranks": _ranks(layout.ranks), "dp_shard": layout.dp_shard}
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name == "split" and layout.pipeline.stages == 1:
            continue
        if field.name not in given and value != field.default:
            given[field.name] = list(value) if isinstance(value, tuple) else value
    return given


def _ranks(ranks: Sequence[int]) -> list[int] | int:
    return len(ranks) if ranks[0] == 0 and ranks[-1] == len(ranks) - 1 else list(ranks)
