"""A rank that runs out of memory says what holds it, and all ranks end."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from hetero_strategy.runtime.memory import size
from hetero_strategy.schedule.action import StageId
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed.probe import PIPELINED
from tests.distributed.scenario import WIDTH, Job, build, data

STAGE, STEP, MICROBATCH, MICROBATCHES = StageId("llm", 1), 1, 2, 4


class RunsOut(L.Callback):
    """Lets a layer of the stage run out of memory in one microbatch of the second step."""

    def __init__(self) -> None:
        self.forwards, self.since = 0, 0.0

    def on_train_start(self, trainer: Any, module: L.LightningModule) -> None:
        stage = trainer.strategy.executor.stages.get(STAGE)
        if stage is not None:
            list(stage.blocks().values())[-1].register_forward_hook(self.forward)

    def forward(self, *_: Any) -> None:
        self.forwards += torch.is_grad_enabled()  # before the first step, too, blocks run, on two units
        if self.forwards == STEP * MICROBATCHES + MICROBATCH + 1:
            self.since = time.monotonic()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def said(rank: int, world: int, job: Job, folder: str) -> None:
    """Write what a rank says at its end, what the failed stage has in bytes, and when (the cause on its own rank); then
    end, and with it all connections to the rank.
    """
    runs_out = RunsOut()
    trainer, module, loaded = build(job)
    trainer.callbacks.append(runs_out)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module, datamodule=loaded)
    text, known = "".join(traceback.format_exception(caught.value)), dict[str, int]()
    if rank == 1:
        executor = trainer.strategy.executor  # type: ignore[attr-defined]
        parameters, made = executor.local[STAGE].parameters, executor.running.gradients
        known["parameters"] = sum(4 * p.numel() for p in parameters)
        known["optimizer states"] = sum(8 * p.numel() + 4 for p in parameters)
        known["gradients"] = sum(4 * p.numel() for p in parameters if made.get(id(p)) is not None)
        totals = [a.totals(inner=True)[0] for a in executor.running.plan.assignments["llm"]]
        known |= {f"microbatch {m}": int(rows) * WIDTH * 4 for m, rows in enumerate(totals)}
    told = text, known, runs_out.since or time.monotonic()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))
    os._exit(1)


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "held"), [("gpipe", [0, 1]), ("1f1b", [])])
def test_a_rank_without_memory_says_what_holds_it(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, held: list[int]
) -> None:
    job = Job(str(data(tmp_path / "data")), PIPELINED, 3, microbatches=MICROBATCHES, strategy={"schedule": schedule})
    monkeypatch.setattr("hetero_strategy.testing.worlds.GRACE", 30.0)
    with pytest.raises(WorkerError, match="rank 1 of 2 died with exit code 1"):
        pool.run(2, said, job, str(tmp_path), group=False)
    ends = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    (other, _, end), (text, known, since) = ends
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in text
    assert "rank 1 ran out of memory in F of module 'llm', stage 1, microbatch 2\n" in text
    holds = "module 'llm', stage 1 holds activations of microbatches"
    assert (f"{holds} {held}" in text) if held else (holds not in text)
    lines = dict(reversed(found) for found in re.findall(r"^ *([0-9.]+ [KMG]iB)  (.*)$", text, re.M))
    for what in ("parameters", "optimizer states", *(["gradients"] if known["gradients"] else [])):
        assert lines[f"{what} of module 'llm', stage 1"] == size(known[what]), text
    assert bool(known["gradients"]) == (schedule == "1f1b"), "two microbatches have come back"
    for microbatch in held:
        rows = f"rows into module 'llm', stage 1, microbatch {microbatch}"
        assert lines[rows] == size(known[f"microbatch {microbatch}"]), text
    assert "rank 1 ended the run with this" in text and "rank 0 lost another rank" in other
    assert end - since < 30
