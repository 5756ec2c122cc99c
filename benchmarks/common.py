"""What the benchmarks share: ragged workloads, tables, and JSON with the machine in it."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hetero_strategy import ragged
from hetero_strategy.plan.assign import assignments_of
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, StepPlan

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""(random numbers, n) -> rows of n items, int64 ``[n]``."""


def ragged_step(
    seed: int,
    samples: int,
    encoders: Mapping[str, Draw],
    *,
    items: tuple[int, int] = (0, 3),
    text: tuple[int, int] = (16, 128),
) -> StepMetadata:
    """Metadata of one global batch: per sample some items of every encoder, then text of which every token has a loss.

    Args:
        seed: of all numbers.
        samples: in the global batch.
        encoders: name -> rows of its items.
        items: fewest and most items of one encoder in a sample.
        text: fewest and most text tokens of a sample.
    """
    rng = np.random.default_rng(seed)
    counts = {name: rng.integers(items[0], items[1] + 1, samples) for name in encoders}
    before = np.zeros(samples, dtype=np.int64)  # rows of the sample so far
    placed = {}
    for name, draw in encoders.items():
        sample = np.repeat(np.arange(samples), counts[name])
        rows = np.asarray(draw(rng, len(sample)), dtype=np.int64)
        running = ragged.starts(rows)
        first = np.searchsorted(sample, np.arange(samples))
        start = running - running[np.minimum(first, max(0, len(rows) - 1))][sample] if len(rows) else running
        placed[name] = StepItems(sample, rows, before[sample] + start, rows)
        before = before + np.bincount(sample, weights=rows, minlength=samples).astype(np.int64)
    tail = rng.integers(text[0], text[1] + 1, samples)
    return StepMetadata(0, 0, np.arange(samples), before + tail, tail - 1, placed)


def rearranged(
    plan: StepPlan, instances: Mapping[str, int], instance_of: Mapping[str, np.ndarray], row_multiple: Mapping[str, int]
) -> StepPlan:
    """A plan with the same microbatches, and each unit of every module on the instance that is given."""
    known, assignments = plan.metadata, {}
    for name, chosen in instance_of.items():
        number, items = plan.places(name).microbatch, known.items.get(name)
        rows = (known.tokens, known.tokens) if items is None else (items.edge_rows, items.inner_rows)
        assignments[name] = assignments_of(
            number, len(plan.assignments[name]), chosen, number, *rows, instances[name], row_multiple.get(name, 1)
        )
    return replace(plan, assignments=assignments)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    return parser


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def report(
    name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
) -> None:
    """Print one table; all columns but the first are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(shown(x) for x in row))
    # Wide enough for the table wherever the output goes: a cut figure is worth nothing.
    console = Console(width=max(80, sum(len(c) for c in columns) + 200), highlight=False)
    console.print(table)
    for note in notes:
        console.print(f"{name}: {note}")


def shown(value: Any) -> str:
    """A figure as the table shows it."""
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def write_json(path: Path | None, name: str, device: str, settings: Mapping[str, Any], results: Any) -> None:
    """Write what was measured, with how and on what."""
    if path is not None:
        document = {"benchmark": name, "machine": machine(device), "settings": dict(settings), "results": results}
        path.write_text(json.dumps(document, indent=2) + "\n")
