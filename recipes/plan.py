"""Choose layouts for a model, data and a cluster: `python -m recipes.plan`; `--help` lists the choices.

A table of candidates, why the best wins and what limits it, its timeline, and a layout file that `recipes.train` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hetero_strategy.errors import ConfigError, HeteroError, check_types
from hetero_strategy.layout.spec import place
from hetero_strategy.loading.steps import check_counts
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.monitor.draw import draw_timelines
from hetero_strategy.monitor.timeline import from_simulation
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.parallelize.transforms import read_transforms, recomputed
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.evaluate import Placed, Step
from hetero_strategy.planner.explain import Explanation, Unfilled, explain, unfilled
from hetero_strategy.planner.ranking import Answer, Ranked
from hetero_strategy.planner.search import Planner
from hetero_strategy.profiling.activations import DTYPES
from hetero_strategy.profiling.cache import memory_model, profile_on
from hetero_strategy.profiling.memory import KINDS, Memory, MemoryModel
from hetero_strategy.runtime.memory import size
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.cluster import Cluster
from hetero_strategy.simulator.cost_model import MIXED, CostModel, Precision
from hetero_strategy.simulator.from_run import Measured
from hetero_strategy.simulator.stage_times import ModuleSeconds
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.strategy.blueprint import Options, beside_kept
from hetero_strategy.strategy.dry_run import dry_run
from hetero_strategy.strategy.refusals import check_planned_schedule
from recipes import build, cli, terminal
from recipes.dry_run import report
from recipes.layout_file import train_with, write_layout
from recipes.printed import parameters
from recipes.terminal import seconds

SHOWN = 8
MOST_RANKS = 64
"""Most ranks that the timeline shows, spread evenly over all."""
TP = (1, 2, 4, 8)
"""Degrees of tensor parallelism that a profile measures, from which other degrees are extrapolated."""
OWN_FIELDS = ("cluster", "batches", "simulations", "microbatches", "expert_load", "run", "profile", "dry_run")
"""Fields of conf/plan.yaml besides those of a training run."""
RANKS = ("trainer.devices", "trainer.num_nodes")
"""Fields of a run that a plan for another cluster replaces."""
PRECISIONS = {"bf16-mixed": MIXED, "16-mixed": MIXED, "32-true": Precision(4, 4), "64-true": Precision(8, 8)}


def plan(cfg: DictConfig) -> None:
    """Plan, print the answer and write the layout file."""
    ran = None
    refuse_what_plans_choose()
    if cfg.run:
        ran = Measured.read(cli.folder_of(cfg.run) / "measured.json")
        cfg = cli.saved_configuration(cfg, cfg.run)
    build.check_configuration(cfg, *OWN_FIELDS)
    console = terminal.console()
    if not console.is_terminal:  # which shows no progress bar
        first = "measuring blocks, then " if cfg.profile else ""
        console.print(f"planning    {first}simulating candidates; this may take minutes", soft_wrap=True)
    if "module" in cfg.data:
        build.write_data(cfg)
    make_model = build.model_maker(cfg)
    batches, microbatches, balance = sampled(cfg)
    with torch.device("meta"):
        model = make_model()
    storage = stored(cfg, model)
    shape, cluster = spec_of(model), hydra.utils.instantiate(cfg.cluster)
    measured: Mapping[str, ModuleSeconds] = {}
    if cfg.profile:
        measured, cluster = profiled(model, batches, cluster, precision(cfg), console)
    elif ran is not None:
        measured = ran.modules(shape, cluster, precision(cfg))
    load = float(cfg.expert_load or (1.0 if ran is None else ran.expert_load))
    planner = Planner(
        CostModel(shape, cluster, precision=precision(cfg), measured=measured, expert_load=load),
        batches,
        microbatches=microbatches,
        balance=balance,
        simulations=int(cfg.simulations),
        options=run_options(cfg, model, storage),
    )
    given, device = planner.estimates.options, cluster.device.name
    options: Any = {"accumulates": given.accumulated > 1}
    memory = cache(lambda: memory_model(model.train(), shape, device, precision(cfg), given.transforms, **options))
    answer = search(planner, console, memory)
    assert answer.best.memory is not None
    evaluator, step = planner.evaluator, planner.evaluator.shown(planner.evaluator.place(answer.best.candidate))
    folder = cli.run_folder()
    tokens = sum(int(b.tokens.sum()) for b in batches) / len(batches)
    rigid = planner.rigid()
    console.print(candidates(answer, planner, tokens, rigid))
    console.print(modules(step.placed, planner))
    if ran is not None:
        console.print(as_it_ran(ran, cfg, answer, planner), soft_wrap=True)
    found, before = explain(evaluator, step), unfilled(evaluator, step)
    filled = bubbles(found, before)
    why = reasons(answer, found, tokens, step.plan.microbatches, times_from(cfg, cluster), rigid)
    for line in (*why, *filled, *needs(answer, cluster)):
        console.print(line, soft_wrap=True)
    console.print(kept(answer.best.memory))
    file = folder / "layout" / "planned.yaml"
    command = train_command(cfg, file, answer, cluster)
    write_layout(file, step.placed, said(answer, planner), command)
    timeline = from_simulation(step.simulation, MOST_RANKS, before and before.filling)
    draw_timelines(folder / "timeline.png", timeline, title=said(answer, planner))
    console.print(f"pictures    {cli.near(folder / 'timeline.png')}")
    console.print(f"layout      {cli.near(file)}")
    if cfg.dry_run:
        build_all(model, step, planner, storage, console)
    if command is not None:
        console.print(f"train       {command}", soft_wrap=True)


def train_command(cfg: DictConfig, file: Path, answer: Answer, cluster: Cluster) -> str | None:
    """Return the command that trains with the layout file; None for data that are statistics alone."""
    if "module" not in cfg.data:
        return None
    run = cli.folder_of(cfg.run) if cfg.run else None
    return train_with(file, answer.best.candidate.microbatches, own=(*OWN_FIELDS, *RANKS), run=run, nodes=cluster.nodes)


def as_it_ran(ran: Measured, cfg: DictConfig, answer: Answer, planner: Planner) -> str:
    """Return the line on the time of the run's own layouts, on the cluster of the plan."""
    count, said, asked = ran.microbatches, cfg.strategy, planner.estimates.options
    pieces = dict(said.pieces or {})
    config = ScheduleConfig(said.schedule, {}, said.reshard_after_forward, said.fill, pieces)
    given = Candidate.of_run(config, ran.layouts, count, asked.transforms)
    evaluator = planner.evaluator
    bounds = ScheduleConfig(max_in_flight=said.max_in_flight or {})
    try:  # as it was scheduled, whatever is asked of plans
        took = evaluator.on(cluster=evaluator.cluster, asked=bounds).seconds(given)
    except HeteroError as error:
        return f"as it ran   not on this cluster: {error}"
    return f"as it ran   {seconds(took)} predicted, {took / answer.best.seconds:.2f} times the best"


def profiled(
    model: MultimodalModel, batches: Sequence[StepMetadata], cluster: Cluster, precision: Precision, console: Console
) -> tuple[Mapping[str, ModuleSeconds], Cluster]:
    """Measure all blocks; return their seconds, and the cluster with measured links; see :func:`profile_on`."""
    with console.status(Text("profile")) as status:

        def tell(done: int, total: int, what: str) -> None:
            status.update(Text(f"profile {done + 1} of {total}: {what}"))

        found, cluster = profile_on(cluster, model.train(), batches, DTYPES[precision.compute], tp=TP, progress=tell)
    fits = ", ".join(f"{module} {fit.median:.1%} (worst {fit.worst:.0%})" for module, fit in found.fits.items())
    console.print(f"profile     lines are off from what was measured by: {fits}", soft_wrap=True)
    return found.modules, cluster


def build_all(model: MultimodalModel, step: Step, planner: Planner, storage: Storage, console: Console) -> None:
    """Build the plan for all its ranks in this process, and print the result."""
    cluster, placed = planner.evaluator.cluster, step.placed
    with console.status(Text("dry run")) as status:
        found = dry_run(
            model,
            placed.scheduling.uncut(placed.placement.layouts),
            [step.plan.metadata],
            world_size=cluster.ranks,
            ranks_per_node=cluster.ranks_per_node,
            microbatches=step.plan.microbatches,
            options=Options(placed.scheduling, placed.candidate.transforms, storage),
            balance=planner.balance,
            microbatch_rows=planner.estimates.options.microbatch_rows,
            memory=cluster.device.memory,
            progress=lambda what: status.update(Text(f"dry run: {what}")),
        )
    report(found)


def sampled(cfg: DictConfig) -> tuple[list[StepMetadata], int | None, BalanceConfig]:
    """Draw global batches of the data; return them with the given number of microbatches and the balance options.

    Raises:
        ConfigError: statistics without a global batch, or more microbatches than a global batch has samples.
    """
    count = int(cfg.batches)
    if "sample" in cfg.data:
        size, microbatches = int(cfg.data.global_batch), cfg.microbatches or cfg.data.microbatches
        check_counts(size, microbatches, "data.global_batch")
        batches = [
            hydra.utils.instantiate(cfg.data.sample, samples=size, seed=cfg.seed + i, _convert_="all").metadata()
            for i in range(count)
        ]
        return batches, microbatches, BalanceConfig()
    data = build.datamodule(cfg, build.model_maker(cfg))
    check_counts(data.global_batch_size, cfg.microbatches)
    return data.sampled_batches(count), cfg.microbatches or data.microbatches, data.balance


def refuse_what_plans_choose() -> None:
    """Refuse fields on the command line that a plan does not keep.

    Raises:
        ConfigError: the command line names such a field.
    """
    for override in cli.asked():
        name = override.lstrip("+~").partition("=")[0]
        if name.split(".")[0] == "layout":
            raise ConfigError(f"{name}: plans choose layouts; leave it out")
        if name in RANKS:
            raise ConfigError(f"{name}: plans are for all ranks of cluster; leave it out")


def run_options(cfg: DictConfig, model: MultimodalModel, storage: Storage) -> RunOptions:
    """Return the options that the plan has to keep. The schedule of a past run does not bind, as it was for other
    layouts.
    """
    said = cfg.strategy
    if cfg.run:
        here = {override.lstrip("+~").partition("=")[0].removeprefix("strategy.") for override in cli.asked()}
        usual: dict[str, Any] = {"schedule": "auto", "fill": "auto", "pieces": None}
        said = OmegaConf.merge(said, {option: value for option, value in usual.items() if option not in here})
    check_planned_schedule(said.schedule)
    asked = ScheduleConfig(
        said.schedule, said.max_in_flight or {}, said.reshard_after_forward, said.fill, said.pieces or {}
    )
    asked = beside_kept(asked, model, storage)
    rows = dict((cfg.data.module.get("encoder_microbatch_rows") if "module" in cfg.data else None) or {})
    transforms = read_transforms(build.fields(said)["transforms"])
    accumulated = int(cfg.trainer.get("accumulate_grad_batches") or 1)
    return RunOptions(transforms, accumulated, rows, asked)


def precision(cfg: DictConfig) -> Precision:
    """Return the bytes per number of ``trainer.precision``.

    Raises:
        ConfigError: there are no plans for this precision.
    """
    given = str(cfg.trainer.get("precision") or "32-true")
    if given not in PRECISIONS:
        raise ConfigError(f"trainer.precision={given}: plans are made for {', '.join(PRECISIONS)}")
    return PRECISIONS[given]


def stored(cfg: DictConfig, model: MultimodalModel) -> Storage:
    """Return the dtypes in which a run keeps parameters and computes."""
    numbers = precision(cfg)
    check_types("HeteroStrategy", HeteroStrategy.__init__, keep_fp32=cfg.strategy.keep_fp32)
    made = Storage(DTYPES[numbers.compute], DTYPES[numbers.master], tuple(cfg.strategy.keep_fp32 or ()))
    made.check(model.modules_by_name)
    return made


def search(
    planner: Planner,
    console: Console,
    memory: Callable[[], MemoryModel],
) -> Answer:
    """Plan with a bar of progress."""
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def advance(done: int, total: int, best: float) -> None:
            progress.update(task, completed=done, total=total, description=f"best {seconds(best)}")

        def measured() -> MemoryModel:
            progress.update(task, description="activations of all modules' blocks, on tensors without values")
            return memory()

        return planner.plan(advance, measured)


def candidates(answer: Answer, planner: Planner, tokens: float, rigid: Ranked | None = None) -> Table:
    """Return a table of the best candidates, the best with one layout for all modules, and Megatron-LM's usual layout.
    Candidates that would give equal rows share one.
    """
    title = f"{answer.considered} candidates fit on {planner.evaluator.cluster}"
    table = Table(title=f"{title}, {len(answer.ranked)} simulated", title_justify="left")
    for column in ("", "step", "tokens/s", "microbatches", "schedule", *planner.evaluator.shape.modules):
        table.add_column(column, overflow="fold")
    rows, alike = dict[tuple[str, ...], None](), answer.homogeneous()
    for ranked in answer.ranked:
        if len(rows) < SHOWN:
            rows.setdefault(row(ranked, planner, tokens))
    marks = ("best", answer.best), ("one layout", alike), ("Megatron's usual", rigid)
    marked = [(mark, row(it, planner, tokens)) for mark, it in marks if it]
    for cells in dict.fromkeys([*rows, *(cells for _, cells in marked)]):
        table.add_row(" ".join(mark for mark, its in marked if its == cells), *cells)
    return table


def row(ranked: Ranked, planner: Planner, tokens: float) -> tuple[str, ...]:
    """Return the cells of one candidate."""
    placed = planner.evaluator.place(ranked.candidate)
    table = place(ranked.candidate.layouts, planner.evaluator.cluster.ranks).table()
    where = {module: f"{ranks}\n{degrees}" for module, ranks, degrees in table}
    again = {n for n, of in ranked.candidate.transforms.items() if any(recomputed(of, 1))}
    return (
        seconds(ranked.seconds), f"{tokens / ranked.seconds:,.0f}", str(ranked.candidate.microbatches),
        how_it_runs(placed), *(text + ("\nrecomputed" if m in again else "") for m, text in where.items()),
    )  # fmt: skip


def how_it_runs(placed: Placed) -> str:
    """Return the schedule, and what of ``fill`` and ``pieces`` a plan asks for."""
    filled = [f"fill {placed.scheduling.fill}"] if placed.graph.filling and placed.scheduling.fills else []
    pieces = [f"{name} in {count} pieces" for name, count in placed.scheduling.pieces.items()]
    return "\n".join([placed.scheduling.schedule, *filled, *pieces])


def modules(placed: Placed, planner: Planner) -> Table:
    """Return a table of the ranks and the layout of every module of the best candidate."""
    table = Table(title="where each module lives", title_justify="left")
    for column in ("module", "ranks", "layout", "parameters", "rank-seconds of work a step"):
        table.add_column(column)
    for name, ranks, degrees in placed.placement.table():
        shape, work = planner.evaluator.shape.modules[name], planner.estimates.work(name, 1)
        whole = work.total + work.fixed * placed.candidate.microbatches
        table.add_row(name, ranks, degrees, parameters(shape.held(0, shape.blocks)[0], shape.active), f"{whole:,.3g}")
    return table


def times_from(cfg: DictConfig, cluster: Cluster) -> str:
    """Return the source of predicted seconds, with a hint to measure on a CPU."""
    if cfg.profile or cfg.run:
        return "from measured times"
    cpu = cluster.device.name == "cpu"
    return "by formula" + "; profile=true measures blocks on this machine, of which the formula knows little" * cpu


def reasons(
    answer: Answer, found: Explanation, tokens: float, drawn: int, how: str, rigid: Ranked | None = None
) -> list[str]:
    """Return the lines that say why the best candidate wins and what limits it.

    Args:
        drawn: number of microbatches in the step that was explained and drawn.
        how: source of the predicted seconds.
        rigid: the best of Megatron-LM's usual layouts.
    """
    best, alike = answer.best, answer.homogeneous()
    lines = [f"step        {seconds(best.seconds)} predicted, {tokens / best.seconds:,.0f} tokens/s ({how})"]
    if alike is not None:
        none = "one layout for all modules is as good: stay with it"
        lines.append(f"gain        {none if alike is best else f'{alike.seconds / best.seconds:.2f} times one layout'}")
    if rigid is not None:
        lines.append(f"            {rigid.seconds / best.seconds:.2f} over Megatron's usual layout, at its best")
    if drawn < (count := best.candidate.microbatches):
        lines.append(f"drawn       its first {drawn} of {count} microbatches: ranks, limit, rows, filled are of them")
    work = ", ".join(f"{name} {share:.0%}" for name, share in found.shares.items())
    lines.append(f"ranks       compute {work}; wait: {shares(found.bubbles)}; optimizer {found.optimizer:.1%}")
    lines.append(f"            of that waiting for collectives: {shares(found.collectives)}")
    lines.append(f"limit       {found.limit()}")
    moved = f"{size(found.within)} within nodes, {size(found.across)} between them"
    lines.append(f"rows        {moved}, received in the step drawn")
    return lines


def bubbles(found: Explanation, before: Unfilled | None) -> list[str]:
    """Return the lines on the bubbles that encoders fill."""
    if before is None:
        return []
    filling = before.filling
    steps = (("without", filling.alone, before.alone), ("in turns", before.in_turns, before.turns))
    lines = [f"filled      {filling}: {seconds(filling.work)} on a rank, of the step drawn"]
    for name, took, why in (*steps, ("filled", filling.step, found)):
        lines.append(f"  {name:<10}{seconds(took)}, wait: {shares({**why.bubbles, **why.collectives})}")
    return lines


def shares(values: Mapping[Any, float]) -> str:
    """Return shares of time as text, without shares below 0.1%."""
    return ", ".join(f"{name} {share:.1%}" for name, share in values.items() if share >= 0.001) or "nothing"


def needs(answer: Answer, cluster: Cluster) -> list[str]:
    """Return the line on the memory of the fullest rank."""
    memory = answer.best.memory
    if memory is None:
        return []
    rank = int(memory.peak.argmax())
    parts = ", ".join(f"{kind} {size(n)}" for kind, n in zip(KINDS, memory.bytes[:, rank], strict=True) if n)
    whole = f"{size(memory.peak[rank])} of {size(cluster.device.memory)}"
    left = f"; {len(answer.too_large)} faster candidates need too much" if answer.too_large else ""
    return [f"memory      {whole} on rank {rank}: {parts}{left}"]


def kept(memory: Memory) -> Table:
    """Return a table of the activations that every stage keeps from forward until backward."""
    table = Table(title="activations that stages keep, predicted", title_justify="left")
    for column in ("stage", "a microbatch", "in flight", "together", "in host memory", "transforms"):
        table.add_column(column)
    for one in memory.kept:
        sizes = size(one.device), str(one.in_flight), size(one.device * one.in_flight)
        transforms = ", ".join(f"{name}: {setting}" for name, setting in one.transforms.items())
        table.add_row(str(one.stage), *sizes, f"{size(one.host)} a microbatch" if one.host else "", transforms)
    return table


def said(answer: Answer, planner: Planner) -> str:
    """Return the first line of the layout file."""
    return f"planned for {planner.evaluator.cluster}: {seconds(answer.best.seconds)} a step predicted"


@hydra.main(version_base=None, config_path=cli.CONF, config_name="plan")
@cli.one_message
def main(cfg: DictConfig) -> None:
    """Entry point."""
    plan(cfg)


if __name__ == "__main__":
    cli.start(main, "outputs/plan")
