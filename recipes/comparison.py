"""What came of a sweep: one table and one picture of all its jobs, in its folder and in Weights & Biases."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from recipes import cli
from recipes.jobs import Job, Sweep, failure

METRICS = {"exact match": "exact_match", "loss": "loss", "tokens/s": "tokens_per_second"}
"""Title -> field of a run's report."""
FORMATS = {"exact match": "{:.3f}", "loss": "{:.4f}", "tokens/s": "{:,.0f}"}


def show(sweep: Sweep, console: Console) -> None:
    """Print the table; write ``sweep.md`` and ``sweep.png``; log both where the jobs log to Weights & Biases."""
    columns, rows = table(sweep)
    failed = [number for number, job in enumerate(sweep.jobs) if job.state == "failed"]
    shown = Table(title=f"sweep {sweep.name}", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in columns[:-1]:
        shown.add_column(column)
    for row in rows:
        shown.add_row(*row[:-1])
    console.rule()
    console.print(shown)
    for where in dict.fromkeys(row[-1] for row in rows if row[-1]):
        console.print(f"job {', '.join(row[0] for row in rows if row[-1] == where)}: {where}", soft_wrap=True)
    for number in failed:
        console.print(f"job {number} failed: {failure(sweep, number)}", style="red", soft_wrap=True)
    text = markdown(columns, rows)
    for number in failed:
        text += f"\nJob {number} failed: {failure(sweep, number)}\n"
    (sweep.folder / "sweep.md").write_text(text)
    draw(sweep, sweep.folder / "sweep.png")
    console.print(f"compared    {cli.near(sweep.folder / 'sweep.md')}, sweep.png, sweep.json")
    _log(sweep, columns, rows)


def table(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Columns, and a row for every job: what is different in it, what came of it, where its modules lived."""
    differences = sweep.differences()
    fields = list(dict.fromkeys(field for difference in differences for field in difference))
    rows = []
    for number, (job, difference) in enumerate(zip(sweep.jobs, differences, strict=True)):
        report = job.report or {}
        values = [report.get(name) for name in METRICS.values()]
        numbers = ["" if v is None else FORMATS[m].format(v) for m, v in zip(METRICS, values, strict=True)]
        settings = [difference.get(field, "") for field in fields]
        where = [str(report.get("processes", "")), report.get("split", ""), placement(job)]
        rows.append([str(number), *settings, job.state, *numbers, f"{job.seconds:.0f} s", *where])
    return ["job", *fields, "state", *METRICS, "time", "ranks", "samples", "where modules lived"], rows


def placement(job: Job) -> str:
    """Ranks and degrees of a job's modules; empty if it has no report."""
    layouts = (job.report or {}).get("layouts", [])
    degrees = [one["degrees"] if "=" in one["degrees"] else "" for one in layouts]  # not "one rank"
    return "; ".join(f"{one['module']} {one['ranks']} {d}".strip() for one, d in zip(layouts, degrees, strict=True))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def draw(sweep: Sweep, path: Path) -> None:
    """A PNG with a bar for every job and metric; colours say where modules lived, failed jobs show their message."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    jobs, places = sweep.jobs, range(len(sweep.jobs))
    kinds = list(dict.fromkeys(placement(job) for job in jobs if job.report))
    colors = [f"C{kinds.index(placement(job)) % 10}" if job.report else "none" for job in jobs]
    figure = Figure(figsize=(11, 1.2 + 0.45 * len(jobs) + 0.25 * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(METRICS), sharey=True, squeeze=False)[0]
    for axis, (title, field) in zip(axes, METRICS.items(), strict=True):
        values = [(job.report or {}).get(field) for job in jobs]
        bars = axis.barh(places, [v or 0.0 for v in values], color=colors)
        axis.bar_label(bars, ["" if v is None else FORMATS[title].format(v) for v in values], padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
        axis.patch.set_visible(False)  # a failed job's message reaches over all metrics
        axis.spines[["top", "right"]].set_visible(False)
    for number in (n for n in places if jobs[n].state == "failed"):
        said = textwrap.fill(textwrap.shorten(f"failed, {jobs[number].reason}", 280), 140)
        shown = axes[0].text(0, number, said, va="center", fontsize=8, color="firebrick", parse_math=False)
        shown.set_in_layout(False)
    labels = [f"{n}: " + textwrap.fill(sweep.label(n), 40) for n in places]
    axes[0].set_yticks(places, labels, fontsize=8, parse_math=False)
    axes[0].invert_yaxis()
    keys = [Patch(color=f"C{number % 10}", label=where) for number, where in enumerate(kinds)]
    where = "where modules lived"
    figure.legend(handles=keys, loc="outside lower left", fontsize=8, frameon=False, title=where, alignment="left")
    figure.savefig(path, dpi=110)


def _log(sweep: Sweep, columns: list[str], rows: list[list[str]]) -> None:
    """Table and picture as a run of the sweep's group, with the logger of the first job that has Weights & Biases."""
    for job in sweep.jobs:
        saved = sweep.folder / job.folder / cli.SAVED
        node: Any = OmegaConf.load(saved).get("logger") if saved.is_file() else None
        if node and "wandb" in str(node.get("_target_")).lower():
            break
    else:
        return
    import wandb

    more = {"save_dir": str(sweep.folder), "name": f"{sweep.name} compared", "group": sweep.name, "job_type": "sweep"}
    logger = hydra.utils.instantiate(node, **more)
    logger.log_table("sweep", columns=columns, data=rows)
    logger.log_image("sweep picture", [str(sweep.folder / "sweep.png")])
    wandb.finish()
