"""Print where modules live as a run starts, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from rich.table import Table
from rich.text import Text

from hetero_strategy.layout.spec import Placement
from hetero_strategy.runtime.memory import size
from recipes import cli, terminal


@rank_zero_only
def print_start(placed: Placement | None, folder: Path, checkpoint: Path | None) -> None:
    """Print where every module lives, unless the planner says so later, and how to continue the run if it stops."""
    console = terminal.console()
    if placed is not None:
        console.print(_placement(placed.table(), f"{placed.world_size} processes", {}))
    console.print(f"run folder  {cli.near(folder)}" + (f"   from {cli.near(checkpoint)}" if checkpoint else ""))
    console.print(f"resume      {cli.command('recipes.train', resume=folder)}", soft_wrap=True)


@rank_zero_only
def print_report(report: dict[str, Any], folder: Path) -> None:
    """Print the report."""
    console = terminal.console()
    console.rule("examples: each token predicted from the right ones before it")
    for example in report["examples"]:
        for file in map(Path, example["files"]):
            console.print(file.name)
        mark = Text("right", "green") if example["exact"] else Text("wrong", "red")
        line = Text(f"{example['question']!r} -> {example['prediction']!r}  (answer {example['answer']!r}) ")
        console.print(line + mark, end="\n\n")
    rows = [(r["module"], r["ranks"], r["degrees"]) for r in report["layouts"]]
    counts = {
        name: parameters(count, report["active_parameters"][name]) for name, count in report["parameters"].items()
    }
    console.print(_placement(rows, f"where each module lived, {report['processes']} processes", counts))
    table = Table(show_header=False, box=None)
    for name, value in _lines(report):
        table.add_row(name, value)
    console.print(table)
    pictures = "examples.png, drawings.png" if report["drawings"] else "examples.png"
    pictures += ", balance.png" if (report.get("balance") or {}).get("imbalance") else ""
    pictures += ", timeline.png, timeline.json (for ui.perfetto.dev)" if report.get("timeline") else ""
    console.print(f"report      {cli.near(folder / 'report.json')}, {pictures}")
    if "resume" in report:
        console.print(f"resume      {report['resume']}", soft_wrap=True)
    if report.get("timeline"):
        console.print(f"plan anew   {cli.command('recipes.plan', run=folder)}", soft_wrap=True)


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("exact match", "none: no validation")] if report["exact_match"] is None else _validation_lines(report)
    if report.get("steps"):
        lines.append(("training", _training_line(report)))
        lines.append(("of that", _spent_line(report["seconds"], report["train_seconds"])))
    for module, loads in (report.get("expert_load") or {}).items():
        busiest = max(loads, key=loads.__getitem__)
        lines.append(
            (f"experts of {module}", f"busiest {loads[busiest]:.2f} times the mean of rows, in block {busiest}")
        )
    if timeline := report.get("timeline"):
        lines.append(("step", _timeline_line(timeline)))
    if whole := report.get("read_whole"):
        counts = ", ".join(f"{count} of {module}" for module, count in whole.items())
        lines.append(("start", f"tensors that transformers converts, read whole by each rank of a module: {counts}"))
    if memory := report.get("memory"):
        lines.append(("memory", _memory_line(memory)))
    if report.get("balance"):
        lines += _balance_lines(report["balance"])
    best = f" ({chosen['metric']} {chosen['value']:.4f})" if (chosen := report.get("chosen_by")) else ""
    lines.append(("checkpoint", f"{cli.near(report['checkpoint'])}{best}" if report["checkpoint"] else "none"))
    return lines


def _training_line(report: dict[str, Any]) -> str:
    """Return the steps of the whole run, with seconds and speed of those that this process has trained."""
    here, seconds = report["steps_here"], report["train_seconds"]
    part = f", {here} of them here" if here != report["steps"] else ""
    speed = f", {here / seconds:.3g} steps/s" if here and seconds else ""
    speed += f", {report['tokens_per_second']:.0f} tokens/s" if report["tokens_per_second"] else ""
    return f"{report['steps']} steps{part}, {seconds:.1f} s{speed}"


PARTS = {
    "step": "in steps",
    "data": "waiting for data",
    "checkpoint": "on checkpoints",
    "between": "between steps (callbacks, loggers, Lightning's loop)",
}


def _spent_line(seconds: dict[str, float], total: float) -> str:
    """Return where the time of training went."""
    shares = ", ".join(
        f"{seconds[part]:.1f} s {what} ({seconds[part] / (total or 1.0):.1%})" for part, what in PARTS.items()
    )
    return f"{shares}; validation {seconds['validation']:.1f} s more"


def _timeline_line(timeline: dict[str, Any]) -> str:
    measured, simulated = (1e3 * timeline[f"{which}_seconds"] for which in ("measured", "simulated"))
    filling = f"; {timeline['filling']}, simulated" if timeline["filling"] else ""
    return (
        f"{measured:.0f} ms, simulated {simulated:.0f} ms (measured / simulated {timeline['ratio']:.2f}); bubble"
        f" {timeline['measured_bubble']:.0%}, simulated {timeline['simulated_bubble']:.0%}; medians of the last"
        f" {timeline['steps']}, without optimizer and hooks{filling}"
    )


def _memory_line(memory: dict[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {size(bytes_)}" for kind, bytes_ in memory["predicted_by_kind"].items())
    low, high = memory["ratios"]
    return (
        f"{size(memory['measured_bytes'])} of tensors at the peak of a step on rank {memory['rank']}, predicted"
        f" {size(memory['predicted_bytes'])} ({kinds}); predicted / measured of all ranks {low:.2f} to {high:.2f}"
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


def _balance_lines(balance: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if balance["imbalance"]:
        ratios = ", ".join(f"{m} {was:.2f} -> {now:.2f}" for m, (was, now) in balance["imbalance"].items())
        lines.append(("balance", f"busiest instance over the mean, as sampled -> as planned: {ratios}"))
    parts = []
    if balance["data_wait_share"] is not None:
        parts.append(f"{balance['data_wait_share']:.1%} of the time waiting")
    if balance["plan_seconds"] is not None:
        hidden = f" ({balance['plan_hidden_share']:.0%} hidden)" if balance["plan_hidden_share"] is not None else ""
        who = "" if balance["workers"] else ", made between steps: no workers"
        payload = f"reading and decoding {1e3 * balance['payload_seconds']:.1f} ms{who}"
        parts.append(f"plan {1e3 * balance['plan_seconds']:.1f} ms a step{hidden}, {payload}")
    if balance["skipped_samples"]:
        parts.append(f"{balance['skipped_samples']} samples skipped")
    if balance["bytes_between_nodes"] is not None:
        parts.append(
            f"{balance['bytes_between_nodes'] / 2**20:.2f} MiB a step between nodes,"
            f" {balance['bytes_within_nodes'] / 2**20:.2f} within"
        )
    return [*lines, ("data", ", ".join(parts))] if parts else lines


def parameters(held: int, active: int) -> str:
    """Describe numbers of parameters that a module has and that a row passes."""
    return f"{held:,}" + (f", {active:,} active" if active < held else "")


def _placement(rows: list[tuple[str, str, str]], title: str, counts: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("module", "ranks", "layout", *(["parameters"] if counts else [])):
        table.add_column(column)
    for module, ranks, degrees in rows:
        table.add_row(module, ranks, degrees, *([counts[module]] if counts else []))
    return table
