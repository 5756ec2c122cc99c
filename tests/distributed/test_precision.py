"""Every precision trains as in one process; a loss scale is one for all ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from hetero_strategy.loading.batch import Batch
from hetero_strategy.model import EncoderInputs
from hetero_strategy.strategy.precision import SyncedGradScaler
from hetero_strategy.testing import Pool
from tests.distributed.probe import APART, PAIR, Case, Probe, Seen, both, observe
from tests.distributed.scenario import Job


class Overflow(Probe):
    """At step 2 one gradient, which exists on one rank only, overflows."""

    def on_after_backward(self) -> None:
        if len(self.losses) == 3:
            gradient = next(p.grad for n, p in self.named_parameters() if ".audio." in n and p.dim() > 1)
            if gradient is not None:
                gradient.view(-1)[0] = math.inf


def precision(folder: Path) -> dict[str, Case]:
    job = Job(str(folder), steps=4, batch=8, capture=False)
    high = {"init_scale": 2.0**26, "backoff_factor": 0.25, "growth_interval": 3}
    fine = {"init_scale": 1024.0, "growth_interval": 3}
    clip = {"gradient_clip_val": 0.5}
    return {
        "32-true": Case(job, trainer=clip),
        "bf16-mixed": Case(replace(job, precision="bf16-mixed"), optimizer="adamw", trainer=clip),
        "64-true": Case(replace(job, precision="64-true"), optimizer="adamw"),
        "16-mixed": Case(job, scaler=fine, trainer=clip | {"accumulate_grad_batches": 2}),
        "16-mixed, fused": Case(job, optimizer="adamw fused", scaler=fine),
        "16-mixed, scale too high": Case(replace(job, steps=8), scaler=high),
        "16-mixed, overflow on one rank": Case(job, lit=Overflow, scaler=fine),
        "16-mixed, off": Case(job, scaler={"enabled": False}),
    }


CHOSEN = ("bf16-mixed", "64-true", "16-mixed, scale too high", "16-mixed, overflow on one rank")


def check_precision(runs: dict[str, tuple[Seen, list[Seen]]]) -> None:
    tolerances = {"64-true": 1e-12, "32-true": 1e-5}
    for name, (expected, found) in runs.items():
        for seen in found:
            assert len(seen.losses) == len(expected.losses), name
            tolerance = tolerances.get(name, 2e-3)
            assert seen.losses == pytest.approx(expected.losses, rel=tolerance), name
            assert seen.scales == expected.scales, name
            assert seen.rates == expected.rates, name
            assert seen.norms == pytest.approx(expected.norms, rel=1e-2, nan_ok=True), name


@pytest.mark.full
def test_other_precisions_are_as_in_one_process(pool: Pool, scenario_data: Path) -> None:
    others = {name: case for name, case in precision(scenario_data).items() if name not in CHOSEN}
    check_precision(both(pool, others, APART, 3))


@pytest.mark.full
def test_precision_is_as_in_one_process(pool: Pool, scenario_data: Path) -> None:
    cases = precision(scenario_data)
    runs = both(pool, {name: cases[name] for name in CHOSEN}, APART, 3)
    check_precision(runs)
    backoffs = runs["16-mixed, scale too high"][0].scales
    kept = [a == b for a, b in pairwise(backoffs)]
    assert backoffs[0] < 2.0**26 and any(kept), "no overflow, or nothing but overflows"
    assert runs["16-mixed, overflow on one rank"][0].scales == [1024.0, 1024.0, 512.0, 512.0]
    half, full = runs["bf16-mixed"][1][0].losses, runs["64-true"][1][0].losses
    assert half != pytest.approx(full, rel=1e-6), "bf16 was not used"


def scaled_on_rank(rank: int, world: int) -> list[tuple[float, float]]:
    """Weight and loss scale after each of two steps, in the second of which the last rank's gradient overflows."""
    weight, found = torch.nn.Parameter(torch.ones(1)), []
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), SyncedGradScaler("cpu", init_scale=8.0)
    for overflows in (False, rank == world - 1):
        weight.grad = scaler.scale_tensor(weight.device) * torch.full((1,), math.inf if overflows else 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append((float(weight.detach()), scaler.get_scale()))
    return found


def test_an_overflow_on_one_rank_skips_the_step_of_all(pool: Pool) -> None:
    assert pool.run(2, scaled_on_rank) == [[(0.0, 8.0), (0.0, 4.0)]] * 2


def resumed(rank: int, world: int, scenario_data: str, path: str) -> dict[str, Any]:
    job = Job(scenario_data, steps=6, batch=8, capture=False)
    options = {"init_scale": 256.0, "growth_interval": 2}
    case = Case(job, PAIR, scaler=options, trainer={"limit_train_batches": 9})
    straight = observe(case)
    saving = ModelCheckpoint(path, "half", every_n_train_steps=3)
    half = {**case.trainer, "callbacks": [saving], "enable_checkpointing": True}
    observe(replace(case, job=replace(job, steps=3), trainer=half))
    again = observe(replace(case, scaler={**options, "init_scale": 8.0}, load=f"{path}/half.ckpt"))
    return {"straight": straight, "again": again}


@pytest.mark.full
def test_the_loss_scale_survives_a_checkpoint(pool: Pool, scenario_data: Path, tmp_path: Path) -> None:
    for result in pool.run(2, resumed, str(scenario_data), str(tmp_path), group=False):
        straight, again = result["straight"], result["again"]
        assert straight.scales == [256.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]
        assert again.scales == straight.scales[3:]
        assert again.samples == straight.samples[3:]
        assert again.losses == pytest.approx(straight.losses[3:], rel=1e-6)


class Payload(Callback):
    """Dtypes of the payload of a training batch, and its bytes."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[torch.dtype, int]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        for name, made in batch.inputs.items():
            values = [x.values for x in made if isinstance(x, EncoderInputs)]
            if values:
                self.seen[name] = (values[0].dtype, sum(x.nbytes for x in values))


def payload_on_rank(rank: int, world: int, scenario_data: str) -> dict[str, dict[str, tuple[torch.dtype, int]]]:
    seen = {}
    for precision in ("32-true", "bf16-mixed", "64-true"):
        noting = Payload()
        job = Job(scenario_data, steps=1, batch=8, capture=False, precision=precision)
        observe(Case(job, PAIR, trainer={"callbacks": [noting]}))
        seen[precision] = noting.seen
    return seen


def test_payload_comes_in_the_dtype_of_compute(pool: Pool, scenario_data: Path) -> None:
    """Sound; images come as pixels, a byte each."""
    for seen in pool.run(2, payload_on_rank, str(scenario_data), group=False):
        assert seen["64-true"] == seen["32-true"] != {}
        for name, (dtype, size) in seen["32-true"].items():
            if name == "vision":
                assert (dtype, size) == seen["bf16-mixed"][name] and dtype == torch.uint8
            else:
                assert dtype == torch.float32 and seen["bf16-mixed"][name] == (torch.bfloat16, size // 2)
