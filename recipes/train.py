"""Train a multimodal LLM, every module in its own layout: `python -m recipes.train`; `--help` lists the choices.

The whole recipe, from top to bottom: data, model, Trainer with HeteroStrategy, fit, report.
"""

from __future__ import annotations

from pathlib import Path

import hydra
import lightning as L
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from omegaconf import DictConfig, OmegaConf

from hetero_strategy.layout.placement import Placement
from hetero_strategy.monitor import (
    BalanceMonitor,
    LogConfiguration,
    MemoryMonitor,
    ProfileMonitor,
    ThroughputMonitor,
    TimelineMonitor,
)
from hetero_strategy.strategy import HeteroStrategy
from recipes import build, cli, finished
from recipes.lit import LastCheckpoint, LitMultimodal, MovableCheckpoint
from recipes.printed import print_over, print_report, print_start
from recipes.report import Readback, evaluate_checkpoint, write_report
from recipes.terminal import GoesOn, ProgressBar


def train(cfg: DictConfig) -> None:
    """One run: what hydra composed, or what a stopped run was made of."""
    resume = cfg.resume
    if resume:
        cfg = cli.saved_configuration(cfg, resume)
    checkpoint = cli.last_checkpoint(resume) if resume else None
    build.check_configuration(cfg)
    folder = cli.run_folder()
    checkpoint = cli.saved_before(folder) or checkpoint
    if resume and (said := finished.over(cfg, folder, checkpoint)):
        print_over(said)
        return

    # All that a person can get wrong is found here, in the first process, before it starts the others.
    placed = build.placement(cfg)
    build.write_data(cfg)
    make_model = build.model_maker(cfg)
    data = build.datamodule(cfg, make_model)
    build.check_model(make_model, data, placed)
    build.check_monitor(cfg, data)
    build.check_epoch(data)
    if resume:
        cli.save_configuration(cfg, folder)

    L.seed_everything(cfg.seed, verbose=False)
    module = LitMultimodal(make_model, cfg.optimizer)
    readback = Readback(cfg.report.examples, build.judge(cfg))
    given = "auto" if cfg.layout == "auto" else placed.layouts
    strategy = build.call("strategy", cfg.strategy, HeteroStrategy, layouts=given)
    trainer = build.trainer(
        cfg,
        placed,
        default_root_dir=folder,
        strategy=strategy,
        logger=hydra.utils.instantiate(cfg.logger) if cfg.logger else False,
        callbacks=[*callbacks(cfg, placed), readback, *([GoesOn()] if resume or checkpoint else [])],
        enable_progress_bar=cfg.monitor.progress_bar,
    )
    print_start(None if cfg.layout == "auto" else placed, folder, checkpoint, finished.short(cfg))
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    placed = strategy.placement or placed

    kept = to_report(trainer, checkpoint)
    split = evaluate_checkpoint(trainer, module, data, kept or None)
    seconds = float(cfg.report.plan_seconds)
    report = write_report(folder, trainer, module, placed, readback, checkpoint=kept, split=split, plan_seconds=seconds)
    print_report(report, folder)


def to_report(trainer: L.Trainer, resumed: Path | None) -> str:
    """The checkpoint that the report names and evaluates: the best, else the last, else what a run that was over went
    on from; empty for a run of no steps. Where Lightning gets no path it may load what SLURM's signal made it save.
    """
    best, last = (callback.best_model_path for callback in trainer.checkpoint_callbacks)
    return best or last or str(resumed or "")


def callbacks(cfg: DictConfig, placed: Placement) -> list[Callback]:
    """Checkpoints to keep and to go on from; what is watched of a run; what loggers get; progress bar."""
    place = cli.run_folder() / "checkpoints"
    shared = {"dirpath": place, "enable_version_counter": False, "save_on_train_epoch_end": False}
    every = int(cfg.checkpoint.every_n_steps)
    made: list[Callback] = [
        ThroughputMonitor(cfg.monitor.every_n_steps, cfg.monitor.peak_flops),
        BalanceMonitor(cli.run_folder(), cfg.monitor.every_n_steps),
        TimelineMonitor(cli.run_folder()),
        MovableCheckpoint(filename="best", monitor=cfg.checkpoint.monitor, mode=build.mode(cfg), **shared),
        LastCheckpoint(filename="last", every_n_train_steps=every, save_on_exception=True, **shared),
    ]
    if cfg.monitor.memory:
        made.append(MemoryMonitor())
    if profile := cfg.monitor.profile:
        options = OmegaConf.create() if profile is True else profile
        made.append(build.call("monitor.profile", options, ProfileMonitor, folder=cli.run_folder() / "profile"))
    if cfg.logger:
        where: object = {module: f"{ranks} {degrees}" for module, ranks, degrees in placed.table()}
        where = "auto" if cfg.layout == "auto" else where
        found = {"configuration": OmegaConf.to_container(cfg, resolve=True), "layouts": where}
        made += [LearningRateMonitor("step"), LogConfiguration({**found, "processes": placed.world_size})]
    made += [ProgressBar()] if cfg.monitor.progress_bar else []
    return made


@hydra.main(version_base=None, config_path=cli.CONF, config_name="config")
@cli.one_message
def main(cfg: DictConfig) -> None:
    """Entry point."""
    train(cfg)


if __name__ == "__main__":
    cli.start(main)
