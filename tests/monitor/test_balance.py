"""`BalanceMonitor` over plans made by hand and a clock of known seconds; bytes that programs send."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger, WandbLogger
from matplotlib.collections import PolyCollection

from hetero_strategy.boundary.route import Hop, Rows, Transfer, least_rows
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.loading.batch import LoadTimes
from hetero_strategy.monitor import BalanceMonitor, ThroughputMonitor
from hetero_strategy.monitor.balance import BalanceSummary, Spread
from hetero_strategy.monitor.draw import SEPARATE, balance_figure
from hetero_strategy.plan.step_plan import ModuleLoad, edge_blocks
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.compile import RankTransfer, StepProgram, Traffic, compile_step, rows_on, sent
from tests.monitor.fakes import WAIT, Clock, Counted, CountedEncoder, Lit, Loader, Model, make_batch
from tests.monitor.fakes import Remember as Throughput
from tests.schedule.test_compile import planned

BEFORE = np.array([[1.0, 3.0], [5.0, 1.0]])
AFTER = np.array([[2.0, 2.0], [3.0, 3.0]])
"""[microbatches, instances]: over the step every instance has about the same, in every microbatch it has not."""


class Remember(Logger):
    name, version = "remember", 0

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith(("data/", "balance/")) for name in metrics):
            self.rows.append((step or 0, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Wandb(WandbLogger):
    """Keeps the pictures that it is given."""

    def __init__(self) -> None:
        self.images: dict[str, list[str]] = {}
        self.log_metrics = self.log_hyperparams = self.save = self.finalize = lambda *a, **k: None  # type: ignore[method-assign,assignment]

    name = version = save_dir = "wandb"  # type: ignore[assignment]

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        self.images[key] = images

    def after_save_checkpoint(self, *args: Any) -> None:
        pass


def loaded_batch(times: LoadTimes | None = None, loads: dict[str, ModuleLoad] | None = None, **more: Any) -> Any:
    plan = replace(make_batch().plan, loads={"llm": ModuleLoad(BEFORE, AFTER)} if loads is None else loads)
    return SimpleNamespace(plan=plan, times=times, **more)


def fit(
    folder: Path,
    batch: Any,
    *,
    steps: int = 4,
    every: int = 2,
    others: tuple[Any, ...] = (),
    clock: Clock | None = None,
    **options: Any,
) -> tuple[list[tuple[int, dict[str, float]]], BalanceMonitor]:
    clock, logger = clock or Clock(), Remember()
    monitor = BalanceMonitor(folder, every)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=[logger, *(x for x in others if isinstance(x, Logger))],
        callbacks=[monitor, *(x for x in others if isinstance(x, L.Callback))],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        log_every_n_steps=1,
        **(options or {"limit_val_batches": 0}),
    )
    model = Model(llm=Counted(1.0), vision=CountedEncoder())
    trainer.fit(Lit(clock, model), Loader(clock, batch), Loader(clock, batch))
    return logger.rows, monitor


def test_logs_of_known_loads_and_seconds(tmp_path: Path) -> None:
    rows, monitor = fit(tmp_path, loaded_batch(LoadTimes(plan=2 * WAIT, payload=3.0), skipped=1), steps=5)
    assert [step for step, _ in rows] == [1, 3, 4]
    for _, metrics in rows:
        assert metrics["balance/llm/imbalance_before"] == pytest.approx((3 + 5) / (2 + 3))
        assert metrics["balance/llm/imbalance_after"] == pytest.approx(1.0)
        assert metrics["data/plan_seconds"] == pytest.approx(2 * WAIT)
        assert metrics["data/payload_seconds"] == pytest.approx(3.0)
        assert metrics["data/plan_hidden_share"] == pytest.approx(0.5)  # half of it fits into the wait
        assert metrics["data/microbatches"] == 2
        assert not any(name.startswith("balance/bytes") for name in metrics)  # one device: no placement
        assert "data/wait_seconds" not in metrics  # ThroughputMonitor's
    assert [metrics["data/skipped_samples"] for _, metrics in rows] == [2, 2, 1]
    assert monitor.last is not None and monitor.last.steps == 5 and monitor.last.skipped_samples == 5
    assert monitor.last.wait_seconds == pytest.approx(4 * WAIT / 5)  # the first step's is not known


class LeavesOut(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.on_train_batch_start = lambda batch, number: -1 if trainer.current_epoch == 0 and number else None


def test_a_batch_that_a_hook_leaves_out_is_not_counted(tmp_path: Path) -> None:
    rows, monitor = fit(tmp_path, loaded_batch(skipped=1), steps=3, others=(LeavesOut(),))
    assert monitor.last is not None and monitor.last.steps == monitor.last.skipped_samples == 3
    assert [step for step, _ in rows] == [1, 2]


def test_a_wait_shorter_than_the_plan_hides_the_rest_and_a_longer_one_hides_nothing(tmp_path: Path) -> None:
    for plan, hidden in ((10 * WAIT, 0.9), (WAIT, 0.0), (WAIT / 2, 0.0)):
        rows, _ = fit(tmp_path, loaded_batch(LoadTimes(plan, 0.0)), steps=3, every=3)
        assert rows[0][1]["data/plan_hidden_share"] == pytest.approx(hidden)


def test_what_is_not_known_is_not_logged(tmp_path: Path) -> None:
    rows, monitor = fit(tmp_path, loaded_batch(loads={}), steps=2)
    assert set(rows[0][1]) == {"data/microbatches", "data/skipped_samples"}
    written = json.loads((tmp_path / "balance.json").read_text())
    assert written["modules"] == {} and written["plan_seconds"] is None and written["bytes_between_nodes"] is None
    assert not (tmp_path / "balance.png").exists()
    assert monitor.last is not None and monitor.last.spreads == {}


def test_validation_is_no_wait(tmp_path: Path) -> None:
    options = {"limit_val_batches": 1, "val_check_interval": 1, "limit_train_batches": 3}
    _, monitor = fit(tmp_path, loaded_batch(LoadTimes(1.0, 1.0)), steps=3, **options)
    assert monitor.last is not None and monitor.last.wait_seconds == pytest.approx(2 * WAIT / 3)


def test_the_two_monitors_measure_the_same_wait(tmp_path: Path) -> None:
    clock, logger = Clock(), Throughput()
    _, monitor = fit(
        tmp_path, loaded_batch(), steps=5, every=5, others=(ThroughputMonitor(5, clock=clock), logger), clock=clock
    )
    assert monitor.last is not None
    assert monitor.last.wait_seconds == pytest.approx(logger.rows[0][1]["throughput/data_wait_seconds"])
    assert monitor.last.wait_seconds > 0


def test_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BalanceMonitor, "_moved", lambda *_: None)
    monitor, batch, module = BalanceMonitor(), loaded_batch(LoadTimes(plan=1.0, payload=0.0)), cast(Any, None)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    seen = []
    for loader in (SimpleNamespace(waited=5.0), SimpleNamespace(waited=7.5), [1], SimpleNamespace(waited=9.0)):
        trainer: Any = SimpleNamespace(train_dataloader=loader, fit_loop=loop)  # of which the third does not say
        monitor.on_train_batch_start(trainer, module, batch, 0)
        monitor.on_train_batch_end(trainer, module, None, batch, 0)
        seen.append((monitor._total.wait, monitor._total.known))
    assert seen == [(0.0, 0.0), (2.5, 1.0), (2.5, 1.0), (2.5, 1.0)]


def test_leaves_a_file_and_a_picture(tmp_path: Path) -> None:
    wandb = Wandb()
    fit(tmp_path / "run", loaded_batch(), others=(wandb,))
    written = json.loads((tmp_path / "run" / "balance.json").read_text())["modules"]["llm"]
    assert written["instances"] == 2 and written["imbalance_before"] == pytest.approx(1.6)
    assert written["sorted_loads_before"] == [1.6, 0.4] and written["sorted_loads_after"] == [1.0, 1.0]
    assert written["slowest_saves"] == pytest.approx(1 - 5 / 8)
    assert (tmp_path / "run" / "balance.png").stat().st_size > 10_000
    assert wandb.images == {"balance": [str(tmp_path / "run" / "balance.png")]}


def test_spread_is_the_imbalance_of_all_microbatches() -> None:
    rng = np.random.default_rng(0)
    steps = [(rng.random((m, 7)), rng.random((m + 1, 7))) for m in (1, 3, 2)]  # before and after may differ in number
    spread = Spread.of(ModuleLoad(*steps[0]))
    for before, after in steps[1:]:
        spread = spread + Spread.of(ModuleLoad(before, after))
    for side, found in ((0, spread.imbalance_before), (1, spread.imbalance_after)):
        assert found == pytest.approx(ModuleLoad.imbalance(np.concatenate([step[side] for step in steps])))
    # Summed over steps instead, instances would look even: chance levels them, their waits do not come back.
    assert spread.imbalance_before > 1.2 > ModuleLoad.imbalance(np.concatenate([s[0] for s in steps]).sum(0)[None])
    assert (np.diff(spread.before) <= 0).all()
    idle = Spread.of(ModuleLoad(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])))
    assert not np.signbit([idle.before, idle.after]).any(), "an idle instance's load is no -0.0"


def test_bytes_between_stages_of_a_module_are_not_counted() -> None:
    nodes = [StageId("vision", 0), StageId("vision", 1), StageId("llm", 0)]
    none = (Rows(0, 0), Rows(0, 0))
    transfers = [RankTransfer(n, False, (0, 0), Transfer(4, 4, none, Hop(((3, Rows(0, 4)),)))) for n in (0, 1)]
    ready = SimpleNamespace(program=StepProgram(True, (), tuple(transfers)))
    graph = SimpleNamespace(edges=((nodes[0], nodes[1]), (nodes[1], nodes[2])))
    executor = SimpleNamespace(
        compiler=SimpleNamespace(graph=graph), row_bytes=[7, 5 * 2], rank=0, ready=lambda batch, train: ready
    )
    for per_node, expected in ((2, Traffic(0.0, 4 * 5 * 2.0)), (4, Traffic(4 * 5 * 2.0, 0.0))):
        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(executor=executor, num_processes=per_node))
        assert BalanceMonitor()._moved(trainer, loaded_batch()) == expected


def test_bytes_are_those_of_a_windows_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    monkeypatch.setattr(
        BalanceMonitor, "_moved", lambda self, trainer, batch: counted.append(batch) or Traffic(1.0, len(counted))
    )
    monitor, batch = BalanceMonitor(every_n_steps=2), loaded_batch()
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)),
        strategy=SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda x, reduce_op: x),
        loggers=[Remember()],
        train_dataloader=None,
        world_size=1,
    )
    module: Any = None
    for number in range(4):
        monitor.on_train_batch_start(trainer, module, batch, number)
        monitor.on_train_batch_end(trainer, module, None, batch, number)
    assert len(counted) == 2
    assert [row["balance/bytes_between_nodes"] for _, row in trainer.loggers[0].rows] == [1.0, 2.0]


@pytest.mark.parametrize("instances", [1, 2, SEPARATE, SEPARATE + 1, 2560])
def test_picture(instances: int) -> None:
    before = np.sort(np.random.default_rng(1).random(instances))[::-1] + 0.5
    after = np.full(instances, before.mean())
    spreads = {"vision": Spread(before, after), "llm": Spread(after, after)}
    picture = balance_figure(BalanceSummary(3, spreads, None, 0.0, None, None, None, 1.0, 0))
    assert len(picture.axes) == 4
    for axes, loads in zip(picture.axes, (before, after, after, after), strict=True):
        wait, work = (c for c in axes.collections if isinstance(c, PolyCollection))
        unit = float((before if "vision" in axes.get_title(loc="left") else after).mean())
        tops = np.concatenate([path.vertices for path in work.get_paths()])[:, 1]
        assert tops.max() == pytest.approx(loads.max() / unit)
        assert len(work.get_paths()) == (instances if instances <= SEPARATE else 1)
        assert axes.get_ylim()[1] > loads.max() / unit
        assert np.concatenate([path.vertices for path in wait.get_paths()])[:, 1].max() == pytest.approx(tops.max())
        assert len(axes.get_xticks()) <= 18
    assert f"max/mean {before.max() / before.mean():.2f}" in picture.axes[0].get_title(loc="right")
    assert f"vision {before.max() / before.mean():.2f} → 1.00" in picture.get_suptitle()
    picture.draw_without_rendering()


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"every_n_steps": 1.5}, {"every_n_steps": "2"}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        BalanceMonitor(**options)


def test_a_batch_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="list without a step plan"):
        fit(tmp_path, [1], steps=1)


LAYOUTS = {
    "apart": {"vision": ModuleLayout((0, 1)), "llm": ModuleLayout((2, 3))},
    "colocated": {"vision": ModuleLayout(range(4)), "llm": ModuleLayout(range(4), tp=2)},
    "replicas, pipeline": {"vision": ModuleLayout(range(4), tp=2), "llm": ModuleLayout((2, 3, 4, 5), pp=2, tp=2)},
    "generator": {"vision": ModuleLayout((0,)), "llm": ModuleLayout((1, 2)), "draw": ModuleLayout((0, 3))},
}


@pytest.mark.parametrize("frozen", [(), ("vision",)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_send_the_least_there_and_back_where_gradients_flow(name: str, frozen: tuple[str, ...]) -> None:
    plan, schedule, world = planned(LAYOUTS[name], "1f1b", 2, frozen=frozen)
    graph, row_bytes = schedule.graph, [2 + number for number in range(len(schedule.graph.edges))]
    programs = [compile_step(plan, schedule, rank) for rank in range(world)]
    edges = {n: edge for n, edge in enumerate(graph.edges) if edge[0].module != edge[1].module}
    expected = 0
    for number, (source, target) in edges.items():
        for p, t in plan.feeds(source.module, target.module):
            blocks = edge_blocks(plan, source.module, p, target.module, t)
            sides = (
                rows_on(graph.stages[node], plan.assignments[node.module][m].totals(inner=node == target))
                for node, m in ((source, p), (target, t))
            )
            one, other = sides
            ways = (False, True) if graph.stages[source].backward else (False,)
            expected += sum(least_rows(blocks, one, other, backward=way) for way in ways) * row_bytes[number]
    for ranks_per_node in (1, 2, world):
        each = [sent(rank, program, row_bytes, ranks_per_node, edges) for rank, program in enumerate(programs)]
        within, between = (sum(column) for column in zip(*each, strict=True))
        assert within + between == expected > 0
        assert (ranks_per_node > 1 or not within) and (ranks_per_node < world or not between)
        every = [sent(rank, program, row_bytes, ranks_per_node) for rank, program in enumerate(programs)]
        assert (sum(map(sum, every)) > expected) == (len(edges) < len(graph.edges))


def test_by_hand() -> None:
    """Rank 1 sends 3 rows of 10 bytes to rank 0 and 5 to rank 2, one of which it passes on; 7 rows of 2 bytes apart."""
    first, none = Hop(((0, Rows(0, 3)), (2, Rows(3, 5)))), (Rows(0, 0), Rows(0, 0))
    one = RankTransfer(0, False, (0, 0), Transfer(8, 8, none, first, Hop(((2, Rows(0, 1)),), ((0, Rows(0, 9)),))))
    other = RankTransfer(1, True, (0, 0), Transfer(7, 7, none, Hop(((0, Rows(0, 7)),))))
    program = StepProgram(True, (), (one, other))
    assert sent(1, program, [10, 2], 2) == Traffic(30.0 + 14.0, 60.0)
    assert sent(1, program, [10, 2], 2, {0}) == Traffic(30.0, 60.0)
    assert sent(1, program, [10, 2], 4, {0}) == Traffic(90.0, 0.0)
