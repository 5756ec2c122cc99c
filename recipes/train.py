"""Train a multimodal LLM, every module in its own layout: `python -m recipes.train`; `--help` lists the choices.

:func:`train` is the whole recipe, from top to bottom: data, model, Trainer with HeteroStrategy, fit, report.
"""

from __future__ import annotations

from pathlib import Path

import hydra
import lightning as L
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from omegaconf import DictConfig, OmegaConf

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import Placement
from hetero_strategy.monitor import (
    BalanceMonitor,
    MemoryMonitor,
    ProfileMonitor,
    ThroughputMonitor,
    TimelineMonitor,
)
from recipes import build, cli
from recipes.lit import LastCheckpoint, LitMultimodal, LogConfiguration, MovableCheckpoint
from recipes.printed import print_report, print_start
from recipes.report import Readback, evaluate_checkpoint, write_report
from recipes.terminal import GoesOn, ProgressBar


def train(cfg: DictConfig) -> None:
    """Train with the configuration that hydra composed or, to resume, with that of the stopped run."""
    resume = cfg.resume
    if resume:
        cfg = cli.saved_configuration(cfg, resume)
    checkpoint = cli.last_checkpoint(resume) if resume else None
    build.check_configuration(cfg)
    folder = cli.run_folder()
    checkpoint = cli.saved_before(folder) or checkpoint

    # Errors of the user are found here, in the first process, before it starts the other ranks.
    placed = build.placement(cfg)
    build.write_data(cfg)
    make_model = build.model_maker(cfg)
    data = build.datamodule(cfg, make_model)
    read_whole = build.check_model(make_model, data, placed)
    if resume:
        cli.save_configuration(cfg, folder)

    L.seed_everything(cfg.seed, verbose=False)
    module = LitMultimodal(make_model, cfg.optimizer)
    readback = Readback(cfg.report.examples, build.judge(cfg))
    strategy = build.strategy(cfg, "auto" if cfg.layout == "auto" else placed.layouts)
    trainer = build.trainer(
        cfg,
        placed,
        default_root_dir=folder,
        strategy=strategy,
        logger=hydra.utils.instantiate(cfg.logger) if cfg.logger else False,
        callbacks=[*callbacks(cfg, placed), readback, *([GoesOn()] if resume or checkpoint else [])],
        enable_progress_bar=cfg.monitor.progress_bar,
    )
    print_start(None if cfg.layout == "auto" else placed, folder, checkpoint)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    placed = strategy.placement or placed

    kept = to_report(trainer, checkpoint)
    split = evaluate_checkpoint(trainer, module, data, kept or None)
    report = write_report(
        folder, trainer, module, placed, readback, checkpoint=kept, split=split, read_whole=read_whole
    )
    print_report(report, folder)


def to_report(trainer: L.Trainer, resumed: Path | None) -> str:
    """Return the checkpoint that the report evaluates: the best, else the last, else the one that a finished run was
    resumed from; empty for a run of no steps. Without a path Lightning might load one that it saved on SLURM's signal.
    """
    best, last = (callback.best_model_path for callback in trainer.checkpoint_callbacks)
    return best or last or str(resumed or "")


def callbacks(cfg: DictConfig, placed: Placement) -> list[Callback]:
    """Make the callbacks: checkpoints, monitors, logging of the configuration, progress bar."""
    place = cli.run_folder() / "checkpoints"
    shared = {"dirpath": place, "enable_version_counter": False, "save_on_train_epoch_end": False}
    every = int(cfg.checkpoint.every_n_steps)
    chosen: list[Callback] = [
        ThroughputMonitor(cfg.monitor.every_n_steps, cfg.monitor.peak_flops),
        BalanceMonitor(cli.run_folder(), cfg.monitor.every_n_steps),
        TimelineMonitor(cli.run_folder()),
        MovableCheckpoint(filename="best", monitor=cfg.checkpoint.monitor, mode=build.mode(cfg), **shared),
        LastCheckpoint(filename="last", every_n_train_steps=every, save_on_exception=True, **shared),
    ]
    if cfg.monitor.memory:
        chosen.append(MemoryMonitor())
    if profile := cfg.monitor.profile:
        options = {} if profile is True else build.fields(profile)
        try:
            chosen.append(ProfileMonitor(cli.run_folder() / "profile", **options))
        except TypeError as error:
            raise ConfigError(f"monitor.profile: {error}") from error
    if cfg.logger:
        where: object = {module: f"{ranks} {degrees}" for module, ranks, degrees in placed.table()}
        where = "auto" if cfg.layout == "auto" else where
        configuration = {"configuration": OmegaConf.to_container(cfg, resolve=True), "layouts": where}
        chosen += [LearningRateMonitor("step"), LogConfiguration({**configuration, "processes": placed.world_size})]
    chosen += [ProgressBar()] if cfg.monitor.progress_bar else []
    return chosen


@hydra.main(version_base=None, config_path=cli.CONF, config_name="config")
@cli.one_message
def main(cfg: DictConfig) -> None:
    """Entry point."""
    train(cfg)


if __name__ == "__main__":
    cli.start(main)
