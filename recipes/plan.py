"""Choose layouts for a model, data and a cluster: `python -m recipes.plan`; `--help` lists the choices.

A table of candidates, why the best wins and what limits it, its timeline, and a layout file that `recipes.train` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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

from hetero_strategy.errors import ConfigError, HeteroError, LayoutError
from hetero_strategy.layout.placement import place
from hetero_strategy.loading.steps import check_counts
from hetero_strategy.model import MultimodalModel
from hetero_strategy.monitor.timeline import from_simulation
from hetero_strategy.monitor.timeline_draw import draw
from hetero_strategy.parallelize.compile import compiles
from hetero_strategy.parallelize.offload import offloads
from hetero_strategy.parallelize.recompute import recomputes
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.answer import Answer, Ranked
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.evaluate import Candidate, Evaluator, Placed, Step
from hetero_strategy.planner.explain import Explanation, Unfilled, beside_collectives, explain, unfilled
from hetero_strategy.planner.from_run import Measured
from hetero_strategy.planner.given import Given, check_schedule
from hetero_strategy.planner.memory import KINDS, Memory, MemoryModel
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.shape import shape_of
from hetero_strategy.planner.times import MIXED, ModuleSeconds, Precision
from hetero_strategy.planner.variants import Allowed
from hetero_strategy.profiling.activations import DTYPES
from hetero_strategy.profiling.cache import memory_model, profile_on
from hetero_strategy.runtime.memory import size
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.strategy.blueprint import beside_kept
from hetero_strategy.strategy.dry_run import dry_run
from hetero_strategy.strategy.precision import kept as kept_fp32
from recipes import build, cli, terminal
from recipes.dry_run import report
from recipes.layout_file import train_with, write_layout
from recipes.terminal import seconds

SHOWN = 8
AGAIN = 4
"""Candidates simulated for one more node, besides some of every partition."""
MOST_RANKS = 64
"""Ranks of the timeline, spread over all."""
TP = (1, 2, 4, 8)
"""Degrees of tensor parallelism that a profile measures; others follow from these."""
OWN_FIELDS = ("cluster", "batches", "simulations", "microbatches", "one_more_node", "run", "profile", "dry_run")
"""Of conf/plan.yaml, besides those of a training run."""
RANKS = ("trainer.devices", "trainer.num_nodes")
"""Of a run, which a plan for another cluster does not keep."""
PRECISIONS = {"bf16-mixed": MIXED, "16-mixed": MIXED, "32-true": Precision(4, 4), "64-true": Precision(8, 8)}


def plan(cfg: DictConfig) -> None:
    """Plan, print, write."""
    ran = None
    refuse_what_plans_choose()
    if cfg.run:
        ran = Measured.read(cli.folder_of(cfg.run) / "measured.json")
        cfg = cli.saved_configuration(cfg, cfg.run)
    build.check_configuration(cfg, *OWN_FIELDS)
    console = terminal.console()
    if not console.is_terminal:  # where no bar shows that it goes on
        first = "measuring blocks, then " if cfg.profile else ""
        console.print(f"planning    {first}simulating candidates; this may take minutes", soft_wrap=True)
    if "module" in cfg.data:
        build.write_data(cfg)
    make_model = build.model_maker(cfg)
    batches, microbatches, balance = sampled(cfg)
    with torch.device("meta"):
        model = make_model()
    storage = stored(cfg, model)
    shape, cluster = shape_of(model), hydra.utils.instantiate(cfg.cluster)
    measured: Mapping[str, ModuleSeconds] = {}
    if cfg.profile:
        measured, cluster = profiled(model, batches, cluster, precision(cfg), console)
    elif ran is not None:
        measured = ran.modules(shape, cluster, precision(cfg))
    planner = Planner(
        shape,
        cluster,
        batches,
        microbatches=microbatches,
        balance=balance,
        precision=precision(cfg),
        simulations=int(cfg.simulations),
        measured=measured,
        allowed=allowed(cfg, model, storage),
    )
    memory = cache(lambda: memory_model(model.train(), shape, cluster, precision(cfg), planner.estimates.given))
    answer = search(planner, console, memory)
    assert answer.best.memory is not None
    evaluator, step = planner.evaluator, planner.evaluator.shown(answer.best.memory.step.placed)
    folder = cli.run_folder()
    tokens = sum(int(b.tokens.sum()) for b in batches) / len(batches)
    rigid = planner.rigid()
    console.print(candidates(answer, planner, tokens, rigid))
    console.print(modules(step.placed, planner))
    if ran is not None:
        console.print(as_it_ran(ran, cfg, answer, planner), soft_wrap=True)
    found, before = explain(evaluator, step), unfilled(evaluator, step)
    filled = (*bubbles(found, before), *beside(evaluator, step))
    why = reasons(answer, found, tokens, step.plan.microbatches, times_from(cfg, cluster), rigid)
    for line in (*why, *filled, *needs(answer, cluster)):
        console.print(line, soft_wrap=True)
    for line in one_more_node(planner, answer, tokens, memory, console, float(cfg.one_more_node)):
        console.print(line, soft_wrap=True)
    console.print(kept(answer.best.memory))
    file = folder / "layout" / "planned.yaml"
    command = train_command(cfg, file, answer, cluster)
    write_layout(file, step.placed, said(answer, planner), command)
    timeline = from_simulation(step.simulation, MOST_RANKS, before and before.filling)
    draw(folder / "timeline.png", timeline, title=said(answer, planner))
    console.print(f"pictures    {cli.near(folder / 'timeline.png')}")
    console.print(f"layout      {cli.near(file)}")
    if cfg.dry_run:
        build_all(model, step, planner, storage, console)
    if command is not None:
        console.print(f"train       {command}", soft_wrap=True)


def train_command(cfg: DictConfig, file: Path, answer: Answer, cluster: Cluster) -> str | None:
    """Trains in a file's layouts, as what was asked for; None where that says sizes of data in place of data."""
    if "module" not in cfg.data:
        return None
    nodes, run = sum(pool.nodes for pool in cluster.pools), cli.folder_of(cfg.run) if cfg.run else None
    return train_with(file, answer.best.candidate.microbatches, own=(*OWN_FIELDS, *RANKS), run=run, nodes=nodes)


def as_it_ran(ran: Measured, cfg: DictConfig, answer: Answer, planner: Planner) -> str:
    """What the run's own layouts would take on the cluster that was planned for."""
    count, said, asked = ran.microbatches, cfg.strategy, planner.estimates.given
    pieces = dict(said.pieces or {})
    early = dict(said.prefetch or {})
    options = said.schedule, asked.recompute, said.reshard_after_forward, said.fill, pieces, early, asked.offload
    given = Candidate(ran.layouts, count, *options, tp_bubbles=bool(said.tp_bubbles))
    given = replace(given, layouts=given.scheduling.uncut(ran.layouts))
    evaluator = planner.evaluator
    bounds = ScheduleConfig(max_in_flight=said.max_in_flight or {}, islands=said.islands)
    try:  # as it was scheduled, whatever is asked of plans
        took = evaluator.on(cluster=evaluator.cluster, asked=bounds).seconds(given)
    except HeteroError as error:
        return f"as it ran   not on this cluster: {error}"
    return f"as it ran   {seconds(took)} predicted, {took / answer.best.seconds:.2f} times the best"


def profiled(
    model: MultimodalModel, batches: Sequence[StepMetadata], cluster: Cluster, precision: Precision, console: Console
) -> tuple[Mapping[str, ModuleSeconds], Cluster]:
    """Seconds of all blocks, and the cluster with what else is measured; see :func:`profile_on`."""
    with console.status(Text("profile")) as status:

        def tell(done: int, total: int, what: str) -> None:
            status.update(Text(f"profile {done + 1} of {total}: {what}"))

        found, cluster = profile_on(cluster, model.train(), batches, DTYPES[precision.compute], tp=TP, progress=tell)
    fits = ", ".join(f"{module} {fit.median:.1%} (worst {fit.worst:.0%})" for module, fit in found.fits.items())
    console.print(f"profile     lines are off from what was measured by: {fits}", soft_wrap=True)
    return found.modules, cluster


def build_all(model: MultimodalModel, step: Step, planner: Planner, storage: Storage, console: Console) -> None:
    """Build the plan at its full number of ranks, without them, and print what that finds."""
    cluster, placed = planner.evaluator.cluster, step.placed
    with console.status(Text("dry run")) as status:
        found = dry_run(
            model,
            placed.scheduling.uncut(placed.placement.layouts),
            [step.plan.metadata],
            world_size=cluster.ranks,
            ranks_per_node=cluster.ranks_per_node,
            microbatches=step.plan.microbatches,
            scheduling=placed.scheduling,
            recompute=placed.candidate.recompute,
            offload=placed.candidate.offload,
            compile=planner.estimates.given.compile,
            balance=planner.balance,
            microbatch_rows=planner.estimates.given.microbatch_rows,
            storage=storage,
            memory=cluster.memory,
            progress=lambda what: status.update(Text(f"dry run: {what}")),
        )
    report(found)


def sampled(cfg: DictConfig) -> tuple[list[StepMetadata], int | None, BalanceConfig]:
    """Global batches of the data, the microbatches that are asked for, and how work is balanced.

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
    """Refuse on the command line what a plan would not keep to.

    Raises:
        ConfigError: naming it.
    """
    ranks = "plans are for all ranks of cluster"
    refused = {**dict.fromkeys(RANKS, ranks), "strategy.tp_bubbles": "plans do not choose it"}
    for override in cli.asked():
        name = override.lstrip("+~").partition("=")[0]
        why = "plans choose layouts" if name.split(".")[0] == "layout" else refused.get(name)
        if why is not None:
            raise ConfigError(f"{name}: {why}; leave it out")


def allowed(cfg: DictConfig, model: MultimodalModel, storage: Storage) -> Allowed:
    """What a run's other options leave to the plan, and keep it to. How a run was scheduled does not: its plans are for
    other layouts.
    """
    said = cfg.strategy
    if cfg.run:
        here = {override.lstrip("+~").partition("=")[0].removeprefix("strategy.") for override in cli.asked()}
        usual: dict[str, Any] = {"schedule": "auto", "fill": "auto", "pieces": None, "prefetch": None}
        said = OmegaConf.merge(said, {option: value for option, value in usual.items() if option not in here})
    payload = str(cfg.data.module.get("payload", "fetch")) if "module" in cfg.data else "fetch"
    check_schedule(said.schedule)
    asked = ScheduleConfig(
        said.schedule, said.max_in_flight or {}, said.reshard_after_forward, said.fill, said.pieces or {},
        said.prefetch or {}, said.islands,
    )  # fmt: skip
    asked = beside_kept(asked, model, storage)
    rows = dict((cfg.data.module.get("encoder_microbatch_rows") if "module" in cfg.data else None) or {})
    given = Given(
        recomputes(said.recompute), offloads(said.offload), compiles(said.compile),
        int(cfg.trainer.get("accumulate_grad_batches") or 1), asked.reshard_after_forward, [*(said.cache or ())],
        rows,
    )  # fmt: skip
    return Allowed.beside(asked, given, payload)


def precision(cfg: DictConfig) -> Precision:
    """Bytes of numbers in ``trainer.precision``.

    Raises:
        ConfigError: a precision that is not planned for.
    """
    given = str(cfg.trainer.get("precision") or "32-true")
    if given not in PRECISIONS:
        raise ConfigError(f"trainer.precision={given}: plans are made for {', '.join(PRECISIONS)}")
    return PRECISIONS[given]


def stored(cfg: DictConfig, model: MultimodalModel) -> Storage:
    """In which dtypes a run keeps parameters and computes."""
    numbers = precision(cfg)
    made = Storage(DTYPES[numbers.compute], DTYPES[numbers.master], kept_fp32(cfg.strategy.keep_fp32))
    made.check(model.modules_by_name)
    return made


def search(
    planner: Planner,
    console: Console,
    memory: Callable[[], MemoryModel],
    what: str = "simulating",
    limit: float = float("inf"),
) -> Answer:
    """Plan with a bar of progress, for so many seconds."""
    columns = (TextColumn(what, markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def advance(done: int, total: int, best: float) -> None:
            progress.update(task, completed=done, total=total, description=f"best {seconds(best)}")

        def measured() -> MemoryModel:
            progress.update(task, description="activations of all modules' blocks, on tensors without values")
            return memory()

        return planner.plan(advance, measured, limit)


def candidates(answer: Answer, planner: Planner, tokens: float, rigid: Ranked | None = None) -> Table:
    """The best that were simulated, once each where some differ in nothing that is shown, that with one layout, and
    Megatron-LM's usual one.
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
    """One candidate."""
    placed = planner.evaluator.place(ranked.candidate)
    table = place(ranked.candidate.layouts, planner.evaluator.cluster.ranks).table()
    where = {module: f"{ranks}\n{degrees}" for module, ranks, degrees in table}
    again = ranked.candidate.recompute
    return (
        seconds(ranked.seconds), f"{tokens / ranked.seconds:,.0f}", str(ranked.candidate.microbatches),
        how_it_runs(placed), *(text + ("\nrecomputed" if m in again else "") for m, text in where.items()),
    )  # fmt: skip


def how_it_runs(placed: Placed) -> str:
    """Schedule, and what of ``fill`` and ``prefetch`` a plan asks for."""
    filled = [f"fill {placed.scheduling.fill}"] if placed.graph.filling and placed.scheduling.fills else []
    ahead = [f"{name} ahead" for name in placed.scheduling.prefetch]
    pieces = [f"{name} in {count} pieces" for name, count in placed.scheduling.pieces.items()]
    return "\n".join([placed.scheduling.schedule, *filled, *ahead, *pieces])


def modules(placed: Placed, planner: Planner) -> Table:
    """Who lives where in the best."""
    table = Table(title="where each module lives", title_justify="left")
    for column in ("module", "ranks", "device", "layout", "parameters", "rank-seconds of work a step"):
        table.add_column(column)
    for name, ranks, degrees in placed.placement.table():
        on = planner.estimates.on(placed.placement.layouts[name].ranks)
        devices = ", ".join(pool.device.name for pool in on.cluster.pools)
        shape, work = planner.evaluator.shape.modules[name], on.work(name, 1)
        parameters, _ = shape.held(0, shape.blocks)
        whole = work.total + work.fixed * placed.candidate.microbatches
        table.add_row(name, ranks, devices, degrees, f"{parameters:,}", f"{whole:,.3g}")
    return table


def times_from(cfg: DictConfig, cluster: Cluster) -> str:
    """What predicted seconds rest on; of a CPU a formula knows little."""
    if cfg.profile or cfg.run:
        return "from measured times"
    cpu = any(pool.device.name == "cpu" for pool in cluster.pools)
    return "by formula" + "; profile=true measures blocks on this machine, of which the formula knows little" * cpu


def reasons(
    answer: Answer, found: Explanation, tokens: float, drawn: int, how: str, rigid: Ranked | None = None
) -> list[str]:
    """Why the best wins, and what limits it in a step of so many microbatches, which is drawn.

    Args:
        how: seconds were predicted.
        rigid: Megatron-LM's usual layout.
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
    """What encoders find to fill, and what is left."""
    if before is None:
        return []
    filling = before.filling
    steps = (("without", filling.alone, before.alone), ("in turns", before.in_turns, before.turns))
    lines = [f"filled      {filling}: {seconds(filling.work)} on a rank, of the step drawn"]
    for name, took, why in (*steps, ("filled", filling.step, found)):
        lines.append(f"  {name:<10}{seconds(took)}, wait: {shares({**why.bubbles, **why.collectives})}")
    return lines


def beside(evaluator: Evaluator, step: Step) -> list[str]:
    """What running encoders in bubbles of tensor parallelism, too, would gain."""
    found = beside_collectives(evaluator, step)
    if found is None:
        return []
    tp_bubbles, length = found
    given = ",".join(f"{name}:{share}" for name, share in tp_bubbles.items())
    took, option = f"{seconds(length)}, {length / step.seconds:.2f} of that", f"tp_bubbles={{{given}}}"
    return [f"beside      {took}, if encoders also run beside collectives of tensor parallelism: 'strategy.{option}'"]


def shares(values: Mapping[Any, float]) -> str:
    """Shares of the time for a person, without those that are next to nothing."""
    return ", ".join(f"{name} {share:.1%}" for name, share in values.items() if share >= 0.001) or "nothing"


def needs(answer: Answer, cluster: Cluster) -> list[str]:
    """What the rank that needs most memory needs it for."""
    memory = answer.best.memory
    if memory is None:
        return []
    rank = int((memory.peak / cluster.memory).argmax())
    parts = ", ".join(f"{kind} {size(n)}" for kind, n in zip(KINDS, memory.bytes[:, rank], strict=True) if n)
    whole = f"{size(memory.peak[rank])} of {size(cluster.memory[rank])}"
    left = f"; {len(answer.too_large)} faster candidates need too much" if answer.too_large else ""
    return [f"memory      {whole} on rank {rank}: {parts}{left}"]


def kept(memory: Memory) -> Table:
    """What every stage keeps from forward until backward."""
    table = Table(title="activations that stages keep, predicted", title_justify="left")
    for column in ("stage", "a microbatch", "in flight", "together", "recomputed", "in host memory"):
        table.add_column(column)
    for one in memory.kept():
        host = f"{one.offload}: {size(one.host)} a microbatch" if one.offload else ""
        sizes = size(one.device), str(one.in_flight), size(one.device * one.in_flight)
        table.add_row(str(one.stage), *sizes, one.recompute, host)
    return table


def one_more_node(
    planner: Planner, answer: Answer, tokens: float, memory: Callable[[], MemoryModel], console: Console, limit: float
) -> Iterator[str]:
    """What a node more of each pool would buy, and which modules would get its ranks; nothing is said of one node.

    Args:
        limit: seconds to simulate for each of them; 0: nothing is said.
    """
    pools, best = planner.evaluator.cluster.pools, answer.best
    if not limit or sum(pool.nodes for pool in pools) == 1:
        return
    for i, pool in enumerate(pools):
        node = f"node of {pool.ranks_per_node} x {pool.device.name}"
        try:
            found = search(planner.with_node(i, AGAIN), console, memory, f"one more {node}", limit).best
        except LayoutError:  # of the few that were simulated none fits
            found = best
        line = "nothing, of what was simulated"
        if found.seconds < best.seconds:
            now, then = ({n: len(layout.ranks) for n, layout in r.candidate.layouts.items()} for r in (best, found))
            moved = ", ".join(f"{n} {now[n]} -> {then[n]} ranks" for n in now if now[n] != then[n])
            faster = f"{tokens / found.seconds:,.0f} tokens/s, {best.seconds / found.seconds:.2f} times as fast"
            line = f"{seconds(found.seconds)} a step, {faster}; {moved or 'as many ranks for each module'}"
        yield f"one more    {node}: {line}"


def said(answer: Answer, planner: Planner) -> str:
    """What the layout file says of itself."""
    return f"planned for {planner.evaluator.cluster}: {seconds(answer.best.seconds)} a step predicted"


@hydra.main(version_base=None, config_path=cli.CONF, config_name="plan")
@cli.one_message
def main(cfg: DictConfig) -> None:
    """Entry point."""
    plan(cfg)


if __name__ == "__main__":
    cli.start(main, "outputs/plan")
