"""What a run says in the terminal: where modules live as it starts, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from rich.table import Table
from rich.text import Text

from hetero_strategy.layout.placement import Placement
from hetero_strategy.runtime.memory import size
from recipes import cli, terminal
from recipes.better import lines as better_lines
from recipes.terminal import blocks, shown


@rank_zero_only
def print_over(said: str) -> None:
    """That there is nothing to train."""
    terminal.console().print(said, soft_wrap=True)


@rank_zero_only
def print_start(placed: Placement | None, folder: Path, checkpoint: Path | None, warnings: Sequence[str] = ()) -> None:
    """Where every module lives, unless the planner says it later, and how to go on if the run is stopped; what it will
    not come to.
    """
    console = terminal.console()
    if placed is not None:
        console.print(_placement(placed.table(), f"{placed.world_size} processes", {}))
    console.print(f"run folder  {_short(folder)}" + (f"   from {_short(checkpoint)}" if checkpoint else ""))
    console.print(f"resume      {cli.command('recipes.train', resume=folder)}", soft_wrap=True)
    for warning in warnings:
        console.print(f"warning     {warning}", soft_wrap=True)


@rank_zero_only
def print_report(report: dict[str, Any], folder: Path) -> None:
    """The report for a person."""
    console = terminal.console()
    console.rule("examples: each token predicted from the right ones before it")
    for example in report["examples"]:
        for file in map(Path, example["files"]):
            console.print(shown(file, console.width - 2))
        for drawn in example["drawn"]:
            console.print(blocks(np.array(drawn)))
        mark = Text("right", "green") if example["exact"] else Text("wrong", "red")
        line = Text(f"{example['question']!r} -> {example['prediction']!r}  (answer {example['answer']!r}) ")
        console.print(line + mark, end="\n\n")
    rows = [(r["module"], r["ranks"], r["degrees"]) for r in report["layouts"]]
    console.print(_placement(rows, f"where each module lived, {report['processes']} processes", report["parameters"]))
    table = Table(show_header=False, box=None)
    for name, value in _lines(report):
        table.add_row(name, value)
    console.print(table)
    pictures = "examples.png, drawings.png" if report["drawings"] else "examples.png"
    pictures += ", balance.png" if (report.get("balance") or {}).get("imbalance") else ""
    pictures += ", timeline.png, timeline.json (for ui.perfetto.dev)" if report.get("timeline") else ""
    console.print(f"report      {_short(folder / 'report.json')}, {pictures}")
    if "resume" in report:
        console.print(f"resume      {report['resume']}", soft_wrap=True)
    if report.get("timeline"):
        console.print(f"plan anew   {cli.command('recipes.plan', run=folder)}", soft_wrap=True)


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("exact match", "none: no validation")] if report["exact_match"] is None else _validation_lines(report)
    if report.get("steps"):
        lines.append(("training", _training_line(report)))
        lines.append(("of that", _spent_line(report["seconds"], report["train_seconds"])))
        lines.append(("network", _network_line(report["groups"], report["connections"])))
    if timeline := report.get("timeline"):
        lines += _timeline_lines(timeline)
    if memory := report.get("memory"):
        lines.append(("memory", _memory_line(memory)))
    if report.get("better"):
        lines += better_lines(report["better"])
    if report.get("balance"):
        lines += _balance_lines(report["balance"])
    best = f" ({chosen['metric']} {chosen['value']:.4f})" if (chosen := report.get("chosen_by")) else ""
    lines.append(("checkpoint", f"{_short(report['checkpoint'])}{best}" if report["checkpoint"] else "none"))
    return lines


def _training_line(report: dict[str, Any]) -> str:
    """Steps of the whole run; seconds and speed of those that this process has trained."""
    here, seconds = report["steps_here"], report["train_seconds"]
    part = f", {here} of them here" if here != report["steps"] else ""
    speed = f", {here / seconds:.3g} steps/s" if here and seconds else ""
    speed += f", {report['tokens_per_second']:.0f} tokens/s" if report["tokens_per_second"] else ""
    return f"{report['steps']} steps{part}, {seconds:.1f} s{speed}"


def _network_line(groups: dict[str, int], pairs: int) -> str:
    """What ranks made before the first step."""
    kinds = ", ".join(f"{count} for {kind}" for kind, count in groups.items())
    most = f"most {sum(groups.values())} process groups on a rank ({kinds})"
    return f"{most}, {pairs} pairs of ranks joined at start (hops, directions and edges apart)"


PARTS = {
    "step": "in steps",
    "data": "waiting for data",
    "checkpoint": "on checkpoints",
    "between": "between steps (callbacks, loggers, Lightning's loop)",
}


def _spent_line(seconds: dict[str, float], total: float) -> str:
    """Where the time of training went."""
    shares = ", ".join(
        f"{seconds[part]:.1f} s {what} ({seconds[part] / (total or 1.0):.1%})" for part, what in PARTS.items()
    )
    return f"{shares}; validation {seconds['validation']:.1f} s more"


def _timeline_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    filling = f"; {found['filling']}, simulated" if found["filling"] else ""
    step = (
        f"{1e3 * found['measured_seconds']:.0f} ms, simulated {1e3 * found['simulated_seconds']:.0f} ms (measured /"
        f" simulated {found['ratio']:.2f}); bubble {found['measured_bubble']:.0%}, simulated"
        f" {found['simulated_bubble']:.0%}; medians of the last {found['steps']}, without optimizer and hooks{filling}"
    )
    speed = f" and {found['transfer_bandwidth'] / 1e9:.2g} GB/s" if found["transfer_bandwidth"] else ""
    fitted = (
        f"what actions take and how it scatters, transfers of {1e3 * found['transfer_latency']:.1f} ms{speed}, a main"
        f" thread of {1e3 * found['host_before']:.1f} ms before the first action, {1e3 * found['host_between']:.1f}"
        f" between two, {1e3 * found['host_after']:.1f} after the last: fitted, for each step to the other ones; not"
        " simulated: which processes compete for a processor"
    )
    return [("step", step), ("simulated by", fitted)]


def _memory_line(found: dict[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {size(bytes_)}" for kind, bytes_ in found["predicted_by_kind"].items())
    low, high = found["ratios"]
    return (
        f"{size(found['measured_bytes'])} of tensors at the peak of a step on rank {found['rank']}, predicted"
        f" {size(found['predicted_bytes'])} ({kinds}); predicted / measured of all ranks {low:.2f} to {high:.2f}"
    )


def _validation_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = ", ".join(f"{kind} {share:.3f}" for kind, share in report["exact_match_by_kind"].items())
    lines = [("exact match", f"{report['exact_match']:.3f} of {report['samples']} {report['split']} samples ({kinds})")]
    if report["drawn_right"]:
        kinds = ", ".join(f"{kind} {share:.3f}" for kind, share in report["drawn_right"].items() if kind != "all")
        share = report["drawn_right"]["all"]
        lines.append(("drawn right", f"{share:.3f} of {report['drawings']} drawings ({kinds})"))
    lines.append((f"{report['split']} loss", f"{report['loss']:.4f}"))
    return lines


def _balance_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if found["imbalance"]:
        ratios = ", ".join(f"{m} {was:.2f} -> {now:.2f}" for m, (was, now) in found["imbalance"].items())
        lines.append(("balance", f"busiest instance over the mean, as sampled -> as planned: {ratios}"))
    said = []
    if found["data_wait_share"] is not None:
        said.append(f"{found['data_wait_share']:.1%} of the time waiting")
    if found["plan_seconds"] is not None:
        hidden = f" ({found['plan_hidden_share']:.0%} hidden)" if found["plan_hidden_share"] is not None else ""
        who = "" if found["workers"] else ", made between steps: no workers"
        payload = f"reading and decoding {1e3 * found['payload_seconds']:.1f} ms{who}"
        said.append(f"plan {1e3 * found['plan_seconds']:.1f} ms a step{hidden}, {payload}")
    for name, what in (("skipped_samples", "samples skipped"), ("worker_restarts", "workers replaced")):
        if found[name]:
            said.append(f"{found[name]} {what}")
    if found["bytes_between_nodes"] is not None:
        said.append(
            f"{found['bytes_between_nodes'] / 2**20:.2f} MiB a step between nodes,"
            f" {found['bytes_within_nodes'] / 2**20:.2f} within"
        )
    return [*lines, ("data", ", ".join(said))] if said else lines


def _placement(rows: list[tuple[str, str, str]], title: str, parameters: dict[str, int]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("module", "ranks", "layout", *(["parameters"] if parameters else [])):
        table.add_column(column)
    for module, ranks, degrees in rows:
        table.add_row(module, ranks, degrees, *([f"{parameters[module]:,}"] if parameters else []))
    return table


def _short(path: Path | str) -> str:
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
