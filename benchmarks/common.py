"""A benchmark is a program: a measurement with its options, which prints tables and can write its figures as JSON."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hetero_strategy.testing import Pool

Options = argparse.Namespace
"""Parsed options of a program, and ``pool``, which starts its processes."""


def option(*flags: str, **settings: Any) -> Callable[[argparse.ArgumentParser], Any]:
    """Return an option of a program, with the arguments of ``ArgumentParser.add_argument``."""
    return lambda parser: parser.add_argument(*flags, **settings)


def program(
    *options: Callable[[argparse.ArgumentParser], Any], threads: int | None = 1
) -> Callable[[Callable[[Options], Any]], Callable[..., Any]]:
    """Make a program of a function that measures, prints its tables and returns its figures.

    The program takes a command line, by default that of the process, and a pool of processes. Its help is the docstring
    of its module; with ``--json FILE`` it writes the figures with its options and the machine.

    Args:
        options: made by :func:`option`.
        threads: threads of torch; None: as they are.
    """

    def decorate(measure: Callable[[Options], Any]) -> Callable[..., Any]:
        @functools.wraps(measure)
        def main(argv: Sequence[str] | None = None, pool: Pool | None = None) -> Any:
            doc = sys.modules[measure.__module__].__doc__
            parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
            parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
            for add in options:
                add(parser)
            given = parser.parse_args(argv)
            settings = {name: value for name, value in vars(given).items() if name != "json"}
            given.pool = pool or Pool()
            if threads is not None:
                torch.set_num_threads(threads)
            figures = measure(given)
            if given.json is not None:
                file = Path(measure.__code__.co_filename)
                name = file.parent.name if file.stem == "__main__" else file.stem
                write_json(given.json, name, settings, figures)
            return figures

        return main

    return decorate


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return what the figures depend on besides the code."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()) -> None:
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
        console.print(note)


def shown(value: Any) -> str:
    """Return a figure as the table shows it."""
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def write_json(path: Path, name: str, settings: dict[str, Any], figures: Any) -> None:
    """Write what was measured, with how and on what."""
    on = machine(settings.get("device", "cpu"))
    document = {"benchmark": name, "machine": on, "settings": settings, "results": figures}
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")
