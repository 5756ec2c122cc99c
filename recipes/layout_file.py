"""A plan as a file of hydra's group ``layout``, for `recipes.train layout=<file>`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.transforms import settings
from hetero_strategy.planner.evaluate import Placed
from recipes import cli

OPTIONS = ("schedule", "transforms", "reshard_after_forward", "fill", "pieces")
IN_FILE = ("layout", "resume", "data.module.microbatches", *(f"strategy.{name}" for name in OPTIONS))
"""Beginnings of overrides that the command of a layout file leaves out, as the file has them."""


def train_with(
    file: Path, microbatches: int, *, own: Sequence[str] = (), run: Path | None = None, nodes: int = 1
) -> str:
    """Return the command that trains with a layout file and with the other overrides of this program.

    Args:
        microbatches: number of the file, repeated because an ``experiment`` would replace it.
        own: fields of this program that training does not have.
        run: folder of the run whose configuration this program plans for.
        nodes: number of nodes, named in the command if there are several.
    """
    overrides = [*(cli.asked(run) if run else ()), *cli.asked()]
    overrides = [*dict.fromkeys(reversed(overrides))][::-1]  # the last of two equal overrides stays
    left_out = (*IN_FILE, *(f"{name}{mark}" for name in own for mark in "=."))
    kept = [shlex.quote(override) for override in overrides if not override.lstrip("+~").startswith(left_out)]
    added = [f"trainer.num_nodes={nodes}"] if nodes > 1 else []
    added += [f"layout={shlex.quote(str(cli.near(file)))}", f"data.module.microbatches={microbatches}"]
    return " ".join([cli.command("recipes.train"), *kept, *added])


def write_layout(path: Path, placed: Placed, what: str, command: str | None) -> Path:
    """Write layouts, schedule, transforms, when weights are freed and, for real data, the microbatches.

    Args:
        what: text of the first line.
        command: command that trains with the file, for the second line; None: the data are statistics alone.
    """
    candidate, scheduling = placed.candidate, placed.scheduling
    strategy: dict[str, Any] = {"schedule": scheduling.schedule}
    if of := settings(candidate.transforms):
        strategy["transforms"] = of
    if scheduling.reshard_after_forward != "auto":
        strategy["reshard_after_forward"] = scheduling.reshard_after_forward
    if placed.graph.apart and scheduling.fills:
        strategy["fill"] = scheduling.fill
    if scheduling.pieces:
        strategy["pieces"] = dict(scheduling.pieces)
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
    """Return the fields that differ from their defaults."""
    chosen: dict[str, Any] = {"ranks": _ranks(layout.ranks), "dp_shard": layout.dp_shard}
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name == "split" and layout.pipeline.stages == 1:
            continue
        if field.name not in chosen and value != field.default:
            chosen[field.name] = list(value) if isinstance(value, tuple) else value
    return chosen


def _ranks(ranks: Sequence[int]) -> list[int] | int:
    return len(ranks) if ranks[0] == 0 and ranks[-1] == len(ranks) - 1 else list(ranks)
