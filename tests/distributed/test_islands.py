"""Islands as a Trainer's option: training is that of one process, and no row leaves its island."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.step_plan import edge_blocks
from hetero_strategy.runtime import connect
from hetero_strategy.strategy import HeteroStrategy
from tests.distributed.exact import on
from tests.distributed.harness import Pool
from tests.distributed.scenario import Job, build, data, train

LAYOUTS = {"vision": on(0, 1, 2, 3), "audio": on(1, 3), "llm": on(0, 1, 2, 3, pp=2)}


class Crossings(L.Callback):
    """Runs of rows, all and those between islands, as a step's plan says."""

    def __init__(self) -> None:
        self.all = self.between = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        islands = {"vision": [0, 1, 0, 1], "audio": [0, 1], "llm": [0, 1]}
        for source in ("vision", "audio"):
            for one, other in batch.plan.feeds(source, "llm"):
                runs = edge_blocks(batch.plan, source, one, "llm", other)
                ends = np.array(islands[source])[runs.source_instance], np.array(islands["llm"])[runs.target_instance]
                self.all, self.between = self.all + len(runs.rows), self.between + int((ends[0] != ends[1]).sum())


def trained(rank: int, world: int, job: Job) -> tuple[list[float], int, int, list[str]]:
    crossings, said = Crossings(), []
    connect.MANY = 2  # of the three others that rank 0 meets where there is one island
    connect.log.addFilter(lambda record: said.append(record.getMessage()) or True)
    trainer, module, dm = build(replace(job, trainer={**job.trainer, "callbacks": [crossings]}))
    trainer.fit(module, datamodule=dm)
    return [float(x) for x in module.losses], crossings.all, crossings.between, said


def test_training_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    job = Job(str(data(tmp_path)), steps=4, precision="64-true", capture=False)
    wanted = train(job).losses
    for islands in (1, 2):
        job = replace(job, layouts=LAYOUTS, strategy={"islands": islands})
        ranks = pool.run(4, trained, job, timeout=240)
        assert [len(said) for *_, said in ranks] == [islands == 1, 0, 0, 0]
        for losses, runs, between, _ in ranks:
            assert losses == pytest.approx(wanted, rel=1e-10)
            assert runs > 20 and (between == 0) == (islands == 2)


def test_islands_that_divide_nothing_are_refused_before_processes_start() -> None:
    with pytest.raises(ConfigError, match=r"islands=3 does not divide .*llm has 2; use 1 or another divisor of 2"):
        L.Trainer(
            accelerator="cpu", devices=4, strategy=HeteroStrategy(LAYOUTS, islands=3), logger=False, barebones=True
        )
