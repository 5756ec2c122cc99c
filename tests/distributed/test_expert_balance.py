"""Steps of training whose experts are kept in balance: the same counts, losses and biases in every layout."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from hetero_strategy.checkpoint import Checkpointer, load
from hetero_strategy.loading.steps import RankView
from hetero_strategy.model.routing import StepRouting, Tally, note_choices
from hetero_strategy.parallelize.optimizer import choose_kernels
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.testing import Pool
from tests.distributed.exact import on, setting_of
from tests.distributed.probe import PIPELINED, Case, Probe, ranked
from tests.distributed.scenario import Job
from tests.distributed.stepping import OnRank, Setting, _model, fp64, steps_of

STEPS, BIAS = 5, "model.llm.model.model.layers.0.mlp.e_score_correction_bias"
Layout = tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "dp 1": ("1f1b", (0,), {}, {}),
    "dp 2": ("1f1b", (0, 1), {}, {}),
    "dp 4": ("1f1b", (0, 1, 2, 3), {}, {}),
    "ep 2": ("1f1b", (0, 1, 2, 3), {"ep": 2}, {"transforms": {"llm": {"recompute": "all"}}}),
    "ep 4": ("1f1b", (0, 1, 2, 3), {"ep": 4, "tp": 2}, {}),
    "cp 2": ("1f1b", (0, 1, 2, 3), {"cp": 2}, {}),
    "pp 2": ("zbv", (0, 1, 2, 3), {"pp": 2, "ep": 2}, {"transforms": {"llm": {"recompute": "whole"}}}),
    "pp 2, tp 2": ("zb_h1", (0, 1, 2, 3), {"pp": 2, "tp": 2}, {"llm_layers": 5}),
    "pp 2, cp 2": ("interleaved_1f1b", (0, 1, 2, 3), {"pp": 2, "cp": 2}, {}),
}
FEW = ("dp 4", "pp 2")


@dataclass
class Balanced:
    """Steps of one layout."""

    rows: list[Tensor]
    """int64 ``[layers, experts]`` of each step."""
    losses: list[float]
    bias: Tensor | None
    """Bias of the first layer after the last step, on ranks that have it."""


def setting(folders: dict[bool, str], name: str) -> Setting:
    schedule, ranks, degrees, options = LAYOUTS[name]
    layouts = {"vision": on(0, 1), "llm": on(*ranks, **degrees)}
    layers = {"llm_layers": 5}  # as many as four stages take
    return setting_of(folders, layouts, schedule, **{"lm": "biased", **options}, **({} if "pp" in degrees else layers))


def alone(given: Setting) -> Balanced:
    """Take the steps in one process."""
    with fp64():
        model = _model(given).train()
        optimizer, steps = torch.optim.SGD(model.parameters(), 0.1), Balanced([], [], None)
        for _ in range(STEPS):
            out = model(steps_of(given, 2, RankView.whole(given.modules))[0])
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            steps.rows.append(out.expert_rows["llm"])
            steps.losses.append(float(out.balance_losses["llm"]))
    steps.bias = dict(model.named_buffers())[BIAS.removeprefix("model.")]
    return steps


def on_rank(rank: int, world: int, settings: list[Setting], target: str, left_out: bool) -> list[Balanced]:
    """Take the steps in each layout, the last of which continues with the biases of the one before."""
    found, add = [], StepRouting.add

    def without(step: StepRouting, microbatch: int, tally: Tally, *, last: bool = True) -> None:
        if rank == 1:
            tally.likeliest.zero_()
        add(step, microbatch, tally, last=last)

    for given in settings:
        made, steps = OnRank(rank, world, given), Balanced([], [], None)
        executor, llm = made.executor, made.executor.modules["llm"]
        optimizer = torch.optim.SGD([p for m in executor.modules.values() for p in m.parameters()], 0.1)
        choose_kernels([optimizer], {}, lambda decision: decision)  # as the strategy does
        batch = made.steps(given, 2)[0]
        made.warm_up(batch)
        for _ in range(STEPS):
            with patch.object(StepRouting, "add", without) if left_out else nullcontext():
                outcome = executor.run(batch, train=True)
            note_choices(llm, outcome.expert_rows["llm"])
            optimizer.step()
            optimizer.zero_grad()
            steps.rows.append(executor.expert_rows["llm"])
            steps.losses.append(float(outcome.routed["llm"][1]))
        tensors = made.made.state.model_tensors()
        steps.bias = tensors[BIAS].clone() if BIAS in tensors else None
        found.append(steps)
        Checkpointer().save(tensors, {}, f"{target}/{len(found)}")
    resumed = OnRank(rank, world, settings[0]).made.state.model_tensors()
    assert not load(resumed, f"{target}/{len(found)}").missing
    found.append(Balanced([], [], resumed.get(BIAS)))
    return found


@pytest.mark.parametrize("names", [FEW, pytest.param([n for n in LAYOUTS if n not in FEW], marks=pytest.mark.full)])
def test_counts_losses_and_biases_are_those_of_one_process(
    pool: Pool, folders: dict[bool, str], tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Layers that run again in backward count once. A checkpoint moves biases to another layout."""
    wanted = alone(setting(folders, names[0]))
    assert wanted.bias is not None and len({*wanted.bias.tolist()}) > 1
    for runs in pool.run(4, on_rank, [setting(folders, name) for name in names], str(tmp_path), False, timeout=300):
        for name, steps in zip((*names, "resumed"), runs, strict=True):
            assert all(torch.equal(*pair) for pair in zip(steps.rows, wanted.rows, strict=False)), name
            assert steps.losses == pytest.approx(wanted.losses[: len(steps.losses)], rel=1e-12), name
            assert steps.bias is None or torch.equal(steps.bias, wanted.bias), name
    assert all(len(steps.rows) == STEPS for steps in runs[:-1])


def test_a_rank_left_out_of_the_balance_is_noticed(pool: Pool, folders: dict[bool, str], tmp_path: Path) -> None:
    wanted = alone(setting(folders, "dp 2"))
    ((steps, _), *_) = pool.run(4, on_rank, [setting(folders, "dp 2")], str(tmp_path), True, timeout=200)
    assert abs(steps.losses[0] / wanted.losses[0] - 1) > 1e-2


@dataclass
class Noted:
    """One batch of a Trainer's run."""

    rows: Tensor
    """int64 ``[layers, experts]``."""
    losses: tuple[float, float]
    """The whole loss, and that on balance."""
    biases: dict[str, Tensor]
    """Biases that this rank has, after the batch, by name."""
    waiting: int
    """Rows that no optimizer step has used yet."""


class Fitted(Probe):
    """Notes each batch; of two optimizers by hand, that of routers steps after every second one."""

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__(case, vocabulary)
        self.automatic_optimization, self.noted = case.optimizer != "two", list[Noted]()

    def configure_optimizers(self) -> Any:
        parts: dict[bool, list[Any]] = {False: [], True: []}
        for name, p in self.named_parameters():
            parts[not self.automatic_optimization and name.endswith("gate.weight")].append(p)
        return [torch.optim.SGD(part, 0.1) for part in parts.values() if part]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(batch)
        losses = float(out.loss.detach()), float(out.balance_losses["llm"])
        self.noted.append(Noted(out.expert_rows["llm"], losses, {}, 0))
        if not self.automatic_optimization:
            others, routers = self.optimizers()
            others.zero_grad()
            self.manual_backward(out.loss)
            others.step()
            if batch_idx % 2:
                routers.step()
                routers.zero_grad()
        return out.loss

    def on_train_batch_end(self, *args: Any) -> None:
        found = {name: buffer.clone() for name, buffer in self.named_buffers() if not buffer.is_meta}
        self.noted[-1].biases = {name: bias for name, bias in found.items() if name.endswith("_bias")}
        self.noted[-1].waiting = int(self.model.llm.routing.chosen.sum())


def fitted(case: Case) -> list[Noted]:
    trainer, lit, data = ranked(case)
    data.balance = BalanceConfig.of("none")  # the same samples share a microbatch on any number of instances
    trainer.fit(lit, data, ckpt_path=case.load)
    assert isinstance(lit, Fitted)
    return lit.noted


def fitted_on_rank(rank: int, world: int, cases: list[Case]) -> list[list[Noted]]:
    return [fitted(case) for case in cases]


def changes(steps: list[Noted]) -> list[bool]:
    """Whether a batch changes biases, which are 0 at first."""
    before = [{name: torch.zeros_like(bias) for name, bias in steps[0].biases.items()}]
    before += [step.biases for step in steps[:-1]]
    return [
        any(not torch.equal(bias, old[name]) for name, bias in step.biases.items())
        for old, step in zip(before, steps, strict=True)
    ]


def test_biases_change_once_in_each_step_of_their_optimizer(pool: Pool, scenario_data: Path, tmp_path: Path) -> None:
    """Rows of all batches since the step before change them. None waits then, so a checkpoint of a step loses none."""
    job = Job(str(scenario_data), None, -1, 8, precision="64-true", lm="biased", capture=False, shuffle=False)
    windows = Case(job, lit=Fitted, trainer={"accumulate_grad_batches": 2, "limit_train_batches": 3, "max_epochs": 2})
    two = Case(job, lit=Fitted, optimizer="two", trainer={"limit_train_batches": 4, "max_epochs": 1})
    wanted = [fitted(windows), fitted(two)]
    (large,) = fitted(Case(replace(job, batch=16, steps=1), lit=Fitted))
    for steps, stepped in zip(wanted, ([1, 2, 4, 5], [1, 3]), strict=True):
        assert changes(steps) == [number in stepped for number in range(len(steps))]
        assert [not step.waiting for step in steps] == changes(steps)
        assert steps[0].waiting == steps[0].rows.sum()
    first, second, *_ = wanted[0]
    assert torch.equal(first.rows + second.rows, large.rows)
    assert all(torch.equal(bias, second.biases[name]) for name, bias in large.biases.items())
    experts: dict[str, Any] = {"vision": on(0), "audio": on(1), "llm": on(0, 1, ep=2)}
    cases = []
    for folder, layouts in ((tmp_path / "ep", experts), (tmp_path / "pp", PIPELINED)):
        saving = {"callbacks": [ModelCheckpoint(folder, "saved", every_n_train_steps=3)], "enable_checkpointing": True}
        saved = replace(windows, layouts=layouts, trainer=windows.trainer | saving)
        resumed = replace(windows, layouts=layouts, load=str(folder / "saved.ckpt"))
        cases += [saved, resumed, replace(two, layouts=layouts)]
    for runs in pool.run(2, fitted_on_rank, cases, timeout=200, group=False):
        for number, steps in enumerate(runs):
            whole = [wanted[0], wanted[0][5:], wanted[1]][number % 3]
            assert len(steps) == len(whole)
            for step, one in zip(steps, whole, strict=True):
                assert torch.equal(step.rows, one.rows) and step.waiting == one.waiting
                assert step.losses[0] == pytest.approx(one.losses[0], rel=1e-11)  # routers compute in fp32
                assert step.losses[1] == pytest.approx(one.losses[1], rel=1e-12)
                assert step.biases and all(torch.equal(bias, one.biases[name]) for name, bias in step.biases.items())
        assert [{*steps[0].biases} == {*wanted[0][0].biases} for steps in runs] == [True] * 3 + [False] * 3
