"""An ordinary training script, started in every way that a person may start it.

python train.py FOLDER [--devices 2] [--fail RANK STEP] [--kill RANK STEP] ...
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch
from lightning.pytorch.accelerators.cpu import CPUAccelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from hetero_strategy.errors import ConfigError
from hetero_strategy.strategy import HeteroStrategy
from tests.distributed.scenario import Job, Lit, datamodule

STEPS = 4


class Told(Callback):
    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        assert isinstance(module, Script), "told in a process that is no rank"
        Path(module.asked.folder, f"told{trainer.global_rank}").touch()


class Script(Lit):
    def __init__(self, job: Job, vocabulary: int, asked: argparse.Namespace) -> None:
        super().__init__(job, vocabulary)
        self.asked = asked

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Path(self.asked.folder, f"pid{self.global_rank}").write_text(str(os.getpid()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ended = False
        try:
            loss = self.step(batch, batch_idx)
            ended = True
            return loss
        finally:
            if not ended:
                Path(self.asked.folder, f"finally{self.global_rank}").touch()

    def step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        here = [str(self.global_rank), str(batch_idx)]
        if here in (self.asked.fail, self.asked.kill):
            Path(self.asked.folder, "fell").touch()
        if here == self.asked.fail:
            raise ConnectionError(f"rank {self.global_rank} has had enough: connection refused, broken pipe")
        if here == self.asked.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.asked.tell and here == self.asked.tell[1:]:
            Path(self.asked.folder, "fell").touch()
            os.kill(os.getpid(), signal.Signals[self.asked.tell[0]])
        if self.asked.sleep in (here, ["all", here[1]]):
            Path(self.asked.folder, "asleep").touch()
            time.sleep(600)
        return super().training_step(batch, batch_idx)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("digits")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--late", action="store_true", help="rank 1 fails after the run")
    parser.add_argument("--again", action="store_true", help="train anew in other layouts, then with one more process")
    parser.add_argument("--tell", nargs=3, help="a signal, the rank that gets it, and in which step")
    parser.add_argument("--wait", help="a rank whose teardown waits, as on a GPU that waits for messages")
    parser.add_argument("--step-timeout", type=float, help="minutes; all modules are on all ranks then")
    for what in ("--fail", "--kill", "--sleep"):
        parser.add_argument(what, nargs=2)
    asked = parser.parse_args()
    if asked.wait == os.environ.get("LOCAL_RANK", "0"):
        cast(Any, CPUAccelerator).teardown = lambda self: time.sleep(600)
    job = Job(asked.digits, steps=STEPS, batch=8, capture=False)
    dm = datamodule(job)
    world = asked.devices
    layouts = {"vision": {"ranks": [0]}, "audio": {"ranks": [world - 1]}, "llm": {"ranks": range(world)}}
    if asked.step_timeout:  # gloo's messages wait as long as its groups did at first
        layouts = {name: {"ranks": range(world)} for name in layouts}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=HeteroStrategy(layouts, step_timeout=asked.step_timeout),
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=asked.folder,
        callbacks=[
            ModelCheckpoint(asked.folder, save_on_exception=True, save_last=True, every_n_epochs=1000),
            Told(),
        ],
    )
    lit = Script(job, dm.tokenizer.vocab_size, asked)
    if asked.late:  # the thread that starts the other rank ends before that one does
        thread = threading.Thread(target=trainer.fit, args=(lit,), kwargs={"datamodule": dm})
        thread.start()
        thread.join()
    else:
        trainer.fit(lit, datamodule=dm)
    if trainer.is_global_zero:
        print(f"loss={float(trainer.callback_metrics['train/loss']):.7f}", flush=True)
    if asked.again:
        options: dict[str, Any] = {
            "accelerator": "cpu",
            "max_steps": STEPS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        again = L.Trainer(devices=world, strategy=HeteroStrategy(layouts | {"audio": {"ranks": [0]}}), **options)
        again.fit(Script(job, dm.tokenizer.vocab_size, asked), datamodule=datamodule(job))
        if again.is_global_zero:
            print(f"loss={float(again.callback_metrics['train/loss']):.7f}", flush=True)
        try:
            L.Trainer(devices=world + 1, strategy=HeteroStrategy(layouts), **options)
        except ConfigError as error:
            print(f"refused: {error}", flush=True)
    if asked.late and trainer.global_rank == 1:
        time.sleep(1)
        raise LookupError("rank 1 failed late")


if __name__ == "__main__":
    main()
