"""Test or validate a training run's checkpoint in any layout: `python -m recipes.evaluate run=<folder>`."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig, OmegaConf

from hetero_strategy.errors import ConfigError
from recipes import build, cli
from recipes.lit import LitMultimodal, LogConfiguration
from recipes.printed import print_report
from recipes.report import Readback, evaluate_checkpoint, save, summarize
from recipes.terminal import ProgressBar


def evaluate(cfg: DictConfig) -> None:
    """Evaluate one checkpoint; print the report and write it to this command's own folder and to the run's logger."""
    run = cfg.run
    if not run:
        raise ConfigError("run is missing: python -m recipes.evaluate run=outputs/<date>/<time>")
    cfg = cli.saved_configuration(cfg, run)
    checkpoint = cli.checkpoint_of(run, "best", "last")
    build.check_configuration(cfg, "run", "split")
    folder = cli.run_folder()

    placed = build.placement(cfg)
    build.write_data(cfg)
    make_model = build.model_maker(cfg)
    data = build.datamodule(cfg, make_model)
    read_whole = build.check_model(make_model, data, placed)

    module = LitMultimodal(make_model, cfg.optimizer)
    readback = Readback(cfg.report.examples, build.judge(cfg))
    configuration = {"configuration": OmegaConf.to_container(cfg, resolve=True), "checkpoint": str(checkpoint)}
    trainer = build.trainer(
        cfg,
        placed,
        default_root_dir=folder,
        strategy=build.strategy(cfg, placed.layouts),
        logger=hydra.utils.instantiate(cfg.logger) if cfg.logger else False,
        callbacks=[readback, LogConfiguration(configuration), *([ProgressBar()] if cfg.monitor.progress_bar else [])],
        enable_progress_bar=cfg.monitor.progress_bar,
        enable_checkpointing=False,
    )
    split = evaluate_checkpoint(trainer, module, data, checkpoint, cfg.split)
    report = summarize(trainer, module, placed, readback, str(checkpoint), split) | {"read_whole": read_whole}
    save(report, folder / "report.json", readback)
    print_report(report, folder)


@hydra.main(version_base=None, config_path=cli.CONF, config_name="evaluate")
@cli.one_message
def main(cfg: DictConfig) -> None:
    """Entry point."""
    evaluate(cfg)


if __name__ == "__main__":
    cli.start(main, "outputs/evaluate")
