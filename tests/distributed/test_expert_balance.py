"""Steps of training whose experts are kept in balance: the same counts, losses and biases in every layout."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hetero_strategy.checkpoint import Checkpointer, load
from hetero_strategy.loading.steps import RankView
from hetero_strategy.model.routing import StepRouting, Tally, note_choices
from hetero_strategy.parallelize.optimizer import choose_kernels
from hetero_strategy.testing import Pool
from tests.distributed.exact import on, setting_of
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
