"""Configurations without processes: every choice composes, fits its model, and refuses what nothing reads."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import lightning as L
import numpy as np
import pytest
import torch
from hydra.errors import HydraException, InstantiationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig, OmegaConf

from hetero_strategy.data.media import AudioProcessor, ImageProcessor
from hetero_strategy.data.targets import ImageTarget
from hetero_strategy.errors import ConfigError, DataError, HeteroError, LayoutError
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model import Encoder, MultimodalModel, Projector
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.zoo import hf_llama
from recipes import build, cli
from recipes.drawings import DigitJudge
from recipes.hints import explained
from recipes.lit import LitMultimodal
from recipes.plan import OWN_FIELDS, allowed, sampled, stored
from recipes.train import callbacks
from tests.model.helpers import LLAMA
from tests.recipes.conftest import data_at

LAYOUTS = sorted(path.stem for path in Path(cli.CONF, "layout").glob("*.yaml"))
EXPERIMENTS = {"digits_draw": "digits_draw"}
"""Layout -> the experiment whose modules it places, where that is not digits."""


def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(cli.CONF, version_base=None):
        return hydra.compose("config", overrides=list(overrides))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_fit_their_model(layout: str) -> None:
    cfg = compose(f"experiment={EXPERIMENTS.get(layout, 'digits')}", f"layout={layout}")
    build.check_configuration(cfg)
    placed = build.placement(cfg)
    assert list(placed.layouts) == list(cfg.model.modules)
    assert set(range(placed.world_size)) == {rank for layout in placed.layouts.values() for rank in layout.ranks}
    with build.torch.device("meta"):
        cfg.model.modules.llm.vocab_size = 101
        modules = hydra.utils.instantiate(cfg.model).modules_by_name
    build.check_all(modules, dict(placed.layouts))


def test_the_default_is_heterogeneous() -> None:
    placed = build.placement(compose())
    layouts = placed.layouts.values()
    assert placed.world_size == 4
    assert len({layout.ranks for layout in layouts}) == 3
    assert len({tuple(layout.degrees().items()) for layout in layouts}) == 3
    assert any(layout.dp_shard > 1 for layout in layouts) and any(layout.dp_replicate > 1 for layout in layouts)


def test_command_line_beats_the_experiment() -> None:
    cfg = compose("layout=tp", "layout.vision.dp_replicate=2", "layout.vision.tp=2", "trainer.max_steps=7")
    assert build.placement(cfg).layouts["vision"].tp == 2 and cfg.trainer.max_steps == 7
    assert compose("logger=wandb").logger.offline is True
    assert compose("experiment=none", "logger=none").trainer.accelerator == "auto"


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("+trainer.max_stepz=3", "trainer: no field 'max_stepz'; did you mean max_steps?"),
        ("+optimizer.lrr=1", "optimizer: no field 'lrr'; did you mean lr?"),
        (
            "+data.module.global_batchsize=3",
            "no field 'global_batchsize'; did you mean global_batch_size?",
        ),
        ("+data.write.seeds=3", "data.write: no field 'seeds'; did you mean seed?"),
        (
            "+data.module.processors.vision={_target_:hetero_strategy.data.media.ImageProcessor,patch:3}",
            "data.module.processors.vision: no field 'patch'",
        ),
        ("+model.frozen=[llm]", "model: no field 'frozen'; did you mean freeze?"),
        ("+strategy.recomputes=[llm]", "strategy: no field 'recomputes'; did you mean recompute?"),
        ("+checkpoint.every=1", "checkpoint: no field 'every'"),
        ("+monitor.steps=1", "monitor: no field 'steps'"),
        ("+report.example=1", "report: no field 'example'; did you mean examples?"),
        ("+model.loss_weight={llm: 1}", "model: no field 'loss_weight'; did you mean loss_weights?"),
        ("+data.module.encoder_microbatch_row={vision: 9}", "did you mean encoder_microbatch_rows?"),
        ("+layouts.llm=1", "configuration: no field 'layouts'; did you mean layout?"),
    ],
)
def test_a_misspelt_field_is_named(field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        build.check_configuration(compose(field))
    assert hint in str(error.value)


def test_what_the_recipe_makes_itself_is_not_to_give() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.callbacks: the recipe makes its own"):
        build.call("trainer", compose("+trainer.callbacks=[x]").trainer, L.Trainer, callbacks=[])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=abc", "seed=abc; give a whole number from 0 to"),
        ("seed=null", "seed=null; give a whole number"),
        ("seed=-1", "seed=-1; give a whole number"),
        ("optimizer.lr=fast", "optimizer.lr=fast; give a number"),
        ("optimizer.lr=null", "optimizer.lr=null; give a number"),
        ("optimizer.lr=nan", "optimizer.lr=nan; give a number"),
        ("optimizer.lr=true", "optimizer.lr=True; give a number"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]; give two numbers"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas=[0.9, 1.0]; give two numbers"),
        ("optimizer.betas=0.9", "optimizer.betas=0.9; give two numbers"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1; give a number"),
        ("optimizer.warmup_steps=-3", "optimizer.warmup_steps=-3; give a number of steps, at least 0"),
        ("optimizer.final_lr=null", "optimizer.final_lr=null; give a share of lr"),
        ("checkpoint.every_n_steps=0", "checkpoint.every_n_steps=0; give a whole number of steps, at least 1"),
        ("checkpoint.mode=up", "checkpoint.mode=up; give max (the more the better), min or auto"),
        ("monitor.every_n_steps=few", "monitor.every_n_steps=few; give a whole number of steps"),
        ("report.examples=-1", "report.examples=-1; give a whole number of samples, at least 0"),
        ("report.plan_seconds=-1", "report.plan_seconds=-1; give a number of seconds"),
        ("+strategy.start_method=fork", "strategy.start_method=fork; give popen: processes of the others end"),
        ("trainer.num_nodes=0", "trainer.num_nodes=0; give a whole number of nodes"),
        ("trainer.precision=fp7", "trainer.precision=fp7; give one of 32-true, bf16-mixed"),
        ("trainer.max_steps=abc", "trainer.max_steps=abc; give a whole number of steps, or -1: no limit"),
        ("trainer.max_epochs=-2", "trainer.max_epochs=-2; give a whole number of epochs"),
        ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0; give a whole number of batches"),
        ("trainer.gradient_clip_val=abc", "trainer.gradient_clip_val=abc; give a norm"),
        ("trainer.val_check_interval=0", "trainer.val_check_interval=0; give a whole number of batches, at least 1"),
        ("trainer.val_check_interval=1.5", "trainer.val_check_interval=1.5; give a whole number of batches"),
        ("trainer.val_check_interval=true", "trainer.val_check_interval=True; give a whole number of batches"),
        ("monitor.peak_flops=0", "monitor.peak_flops=0; give operations per second of a device, above 0"),
    ],
)
def test_a_value_that_cannot_be_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build.check_configuration(compose(override))
    assert str(error.value).startswith(message)


def test_numbers_of_a_plan_that_cannot_be_are_named() -> None:
    with hydra.initialize_config_dir(cli.CONF, version_base=None):
        cfg = hydra.compose("plan", overrides=["experiment=none", "model=vlm", "data=laion_1024"])
    build.check_configuration(cfg, *OWN_FIELDS)
    for field in ("microbatches", "batches", "simulations", "data.microbatches", "data.global_batch"):
        for value in (0, -1, 1.5, "few"):
            changed = OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{field}={value}"]))
            with pytest.raises(ConfigError, match=rf"^{field}={value}; give a whole number"):
                build.check_configuration(changed, *OWN_FIELDS)
    with pytest.raises(ConfigError, match=r"^one_more_node=-1; give a number of seconds"):
        build.check_configuration(OmegaConf.merge(cfg, {"one_more_node": -1}), *OWN_FIELDS)


def test_a_plan_keeps_to_layers_in_fp32() -> None:
    """The last norm runs once for each chunk of rows, so a run refuses to gather it with every microbatch."""
    with torch.device("meta"):
        model = MultimodalModel({"llm": hf_llama(**LLAMA)})
    with hydra.initialize_config_dir(cli.CONF, version_base=None):
        kept = ["trainer.precision=bf16-mixed", "strategy.keep_fp32=['llm.*norm*']"]
        cfg = hydra.compose("plan", overrides=kept)
        wrong = hydra.compose("plan", overrides=[*kept[:1], "strategy.keep_fp32=['lm.*']"])
    found = allowed(cfg, model, stored(cfg, model))
    assert (found.asked.reshard_after_forward, found.given.reshard_after_forward) == ("never", "never")
    with pytest.raises(ConfigError, match=r"keep_fp32 names 'lm\.\*', but no parameter is called so"):
        stored(wrong, model)


@pytest.mark.parametrize(("data", "size"), [("laion_1024", "data.global_batch"), ("digits", "global_batch_size")])
def test_a_plan_has_no_more_microbatches_than_samples(monkeypatch: pytest.MonkeyPatch, data: str, size: str) -> None:
    """The run would refuse them, once all candidates had been simulated."""
    monkeypatch.setattr(build, "model_maker", lambda _: None)
    monkeypatch.setattr(build, "datamodule", lambda *_: SimpleNamespace(global_batch_size=1920))
    with hydra.initialize_config_dir(cli.CONF, version_base=None):
        cfg = hydra.compose("plan", overrides=[f"data={data}", "experiment=none", "microbatches=1921"])
    with pytest.raises(ConfigError, match=f"microbatches is 1921 but {size} is 1920"):
        sampled(cfg)


@pytest.mark.parametrize(
    "override",
    [
        *("trainer.max_steps=-1", "trainer.max_epochs=null", "trainer.gradient_clip_val=null"),
        *("trainer.precision=32", "trainer.precision=bf16-true", "trainer.precision=null"),
        *("trainer.val_check_interval=null", "trainer.val_check_interval='00:01:00:00'"),
        *("optimizer.lr=0", "optimizer.warmup_steps=0", "optimizer.lr=${optimizer.final_lr}", "report.examples=0"),
        *("report.examples={_target_:builtins.len,obj:[]}", "checkpoint.monitor=null"),
        *("~trainer.precision", "~optimizer.betas"),
    ],
)
def test_values_that_can_be_pass(override: str) -> None:
    build.check_configuration(compose(override))


def test_a_share_of_an_epoch_is_of_a_run_that_counts_epochs() -> None:
    share = "trainer.val_check_interval=0.5"
    build.check_configuration(compose(share, "trainer.check_val_every_n_epoch=1"))
    with pytest.raises(
        ConfigError, match=r"interval=0.5 is a share of an epoch; give trainer.check_val_every_n_epoch=1"
    ):
        build.check_configuration(compose(share))


@pytest.mark.parametrize("config", ["config", "evaluate", "plan"])
def test_help_lists_what_can_be_chosen(config: str) -> None:
    with hydra.initialize_config_dir(cli.CONF, version_base=None):
        said = hydra.compose(config, return_hydra_config=True).hydra.help.template.splitlines()
    groups = {line.partition(": ")[0]: line.partition(": ")[2].split(", ") for line in said if ": " in line}
    plans = config == "plan"
    assert {"cluster", "sweep", "fields", "layout"} & set(groups) == ({"cluster"} if plans else {"layout"})
    assert ("laion" in groups["data"], "laion_1024" in groups["data"]) == (plans, plans)
    assert {"digits", "manifest"} <= set(groups["data"]) and "vlm" in groups["model"]


@pytest.mark.parametrize("config", ["config", "evaluate", "plan"])
@pytest.mark.parametrize("experiment", sorted(path.stem for path in Path(cli.CONF, "experiment").glob("*.yaml")))
def test_every_experiment_passes(config: str, experiment: str) -> None:
    with hydra.initialize_config_dir(cli.CONF, version_base=None):
        cfg = hydra.compose(config, overrides=[f"experiment={experiment}"])
    build.check_configuration(cfg, *(set(cfg) - set(build.FIELDS)))


@pytest.mark.parametrize("option", ["max_in_flight", "pieces", "prefetch"])
@pytest.mark.parametrize("given", [3, ["llm"], {"llm": "abc"}, {"llm": 1.5}, {"llm": True}, {"llm": 0}])
def test_numbers_of_modules_that_cannot_be(option: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"HeteroStrategy: {option}=.*; give a whole number of at least 1 for each"):
        HeteroStrategy(**{option: given})


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("islands", "abc", "islands='abc'; give a whole number of at least 1"),
        ("islands", 0, "islands=0; give a whole number of at least 1"),
        ("async_checkpoint", "no", "async_checkpoint='no'; give True or False"),
        ("verify_checkpoints", "no", "verify_checkpoints='no'; give True or False"),
        ("async_tp", None, "async_tp=None; give True or False"),
        ("start_method", "threads", "start_method='threads'; give one of popen, fork, spawn"),
        ("process_group_backend", "glo", "process_group_backend='glo'; give a backend that torch knows"),
        ("process_group_backend", "cpu:gloo,cuda:ncl", "process_group_backend='cpu:gloo,cuda:ncl'; give"),
        ("cache", 3, "cache=3; give a folder for each module"),
        ("cache", {"vision": None}, "cache={'vision': None}; give a folder for each module"),
        ("keep_fp32", 3, "keep_fp32=3; give a list of names"),
        ("recompute", 3, r"recompute=3; give a list of modules, such as recompute=\['llm'\]"),
        ("compile", "llm", "compile='llm' is one string; give a list of modules"),
    ],
)
def test_options_of_another_kind(option: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"HeteroStrategy: {message}"):
        HeteroStrategy(**{option: given})


@pytest.mark.parametrize("part", ["optimizer", "checkpoint", "monitor", "report", "strategy", "trainer"])
def test_a_part_of_the_configuration_that_is_taken_out(part: str) -> None:
    cfg = compose()
    cfg[part] = None
    with pytest.raises(ConfigError, match=f"{part}=null; give its fields, which --help lists"):
        build.check_configuration(cfg)


@pytest.mark.parametrize("option", ["timeout", "step_timeout"])
@pytest.mark.parametrize("given", [-1, 0, float("nan"), float("inf"), "soon", timedelta(0)])
def test_time_limits_that_cannot_be(option: str, given: object) -> None:
    with pytest.raises(ConfigError, match=f"HeteroStrategy: {option}=.*; give a number of minutes above 0"):
        HeteroStrategy(**{option: given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.module.global_batch_size=0", "global_batch_size is 0; use at least 1"),
        ("data.module.global_batch_size=null", "global_batch_size is None; use at least 1"),
        ("data.module.eval_batch_size=many", "eval_batch_size is many; use at least 1"),
        ("data.module.microbatches=0", "microbatches is 0; use at least 1"),
        ("data.module.microbatches=100", "microbatches is 100 but global_batch_size is 32: .* use at most 32"),
        ("data.module.eval_microbatches=101", "eval_microbatches is 101 but eval_batch_size is 100: .* at most 100"),
    ],
)
def test_batches_that_cannot_be(small: Path, override: str, message: str) -> None:
    cfg = compose(*data_at(small), override)
    with pytest.raises(InstantiationException, match=message):
        build.datamodule(cfg, build.model_maker(cfg))


def test_a_training_set_without_a_whole_batch_is_refused_before_processes_start(small: Path) -> None:
    cfg = compose(*data_at(small), "data.module.global_batch_size=1000")
    with pytest.raises(ConfigError, match="drop_last with global_batch_size 1000 leaves nothing of"):
        build.check_epoch(build.datamodule(cfg, build.model_maker(cfg)))


def test_the_best_checkpoint_is_chosen_by_what_is_logged(small: Path, small_drawings: Path) -> None:
    cfg = compose(*data_at(small))
    data = build.datamodule(cfg, build.model_maker(cfg))
    for monitor in ("val/exact_match", "train/loss", None):
        cfg.checkpoint.monitor = monitor
        build.check_monitor(cfg, data)
    for monitor in ("val/nothing", "val/loss_llm", "tokens/s"):
        cfg.checkpoint.monitor = monitor
        with pytest.raises(ConfigError, match=f"checkpoint.monitor={monitor}; give one of val/loss, val/exact_match,"):
            build.check_monitor(cfg, data)
    build.check_monitor(*drawing(small_drawings, "checkpoint.monitor=val/loss_draw"))


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ((), "max"),
        (("checkpoint.monitor=val/loss",), "min"),
        (("checkpoint.monitor=train/loss_llm",), "min"),
        (("checkpoint.monitor=train/accuracy",), "max"),
        (("checkpoint.monitor=val/loss", "checkpoint.mode=max"), "max"),
        (("checkpoint.mode=min",), "min"),
        (("checkpoint.monitor=null",), "max"),
        (("experiment=digits_draw",), "min"),
        (("experiment=none", "trainer.accelerator=cpu"), "min"),
    ],
)
def test_the_best_loss_is_the_least(overrides: tuple[str, ...], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose("logger=none", *overrides)
    monkeypatch.setattr(cli, "run_folder", lambda: Path("run"))
    best = next(c for c in callbacks(cfg, build.placement(cfg)) if isinstance(c, ModelCheckpoint))
    assert (best.monitor, best.mode) == (cfg.checkpoint.monitor, mode)


@pytest.mark.parametrize(
    "override", ["trainer.accelerator=abacus", "trainer.limit_val_batches=-3", "trainer.val_check_interval=0.5"]
)
def test_what_lightning_refuses_is_one_message(override: str) -> None:
    cfg = compose(override)
    with pytest.raises(ConfigError, match="^trainer: .*" + override.split("=")[0].split(".")[1]):
        build.trainer(cfg, build.placement(compose("layout=single")), logger=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout.llm.ranks=[0,0,1,2]", "ranks repeats [0]"),
        ("layout.llm.dp_replicate=4", "dp_replicate 4 x tp 2 = 8 but ranks has 4"),
        ("+layout.llm.tpp=2", "unknown field tpp"),
        ("trainer.devices=3", "do not exist in a world of 3"),
        ("trainer.devices=auto", "trainer.devices=auto"),
        ("layout.llm.vpp=2", "vpp=2 with pp=1"),
    ],
)
def test_layouts_that_cannot_be(override: str, message: str) -> None:
    with pytest.raises(HeteroError, match=message.replace("[", r"\[").replace("]", r"\]")):
        build.placement(compose("layout.llm.tp=2", override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout.llm={ranks:[2,3],pp:2,vp:4}", "layout.llm: no field 'vp'; did you mean vpp?"),
        ("layout.lm.pp=2", "layout: no field 'lm'; did you mean llm?"),
        (
            "data.module.train=a/split=b (1)/c.json",
            "data.module.train=a/split=b (1)/c.json: hydra cannot read this; paths with = ( ) ~ and the like need"
            " quotes: 'data.module.train=\"a/split=b (1)/c.json\"'",
        ),
    ],
)
def test_a_key_that_hydra_refuses_is_named(override: str, message: str) -> None:
    with pytest.raises(HydraException) as error:
        compose(override)
    assert explained(error.value, cli.CONF, [], None) == message


@pytest.mark.parametrize(
    ("program", "arguments", "saved", "message"),
    [
        ("train", ("experiment=digits_draw", "layout.draw.ppp=2"), (), "layout.draw: no field 'ppp'; did you mean pp?"),
        ("plan", ("cluster.nodez=2",), (), "cluster: no field 'nodez'; did you mean nodes?"),
        ("train", ("layout=single,colocated", "trainer.max_stepz=2"), (), "trainer: no field 'max_stepz'; did you"),
        ("train", ("data=elsewhere", "trainer.max_stepz=2"), (), "trainer: no field 'max_stepz'; did you mean"),
        ("train", ("resume=r", "layout.draw.ppp=2"), ("experiment=digits_draw",), "layout.draw: no field 'ppp'; did"),
        ("train", ("resume=r", "layout.draw.pp=2"), ("experiment=digits_draw",), "layout.draw.pp: the run has this"),
    ],
)
def test_a_key_is_named_by_what_the_command_line_changes(
    program: str, arguments: tuple[str, ...], saved: tuple[str, ...], message: str
) -> None:
    config = "plan" if program == "plan" else "config"
    with pytest.raises(HydraException) as error, hydra.initialize_config_dir(cli.CONF, version_base=None):
        hydra.compose(config, overrides=[a for a in arguments if "," not in a and "elsewhere" not in a])
    words = [f"recipes/{program}.py", *arguments]
    assert explained(error.value, cli.CONF, words, compose(*saved) if saved else None).startswith(message)


def test_a_module_can_be_left_out_of_the_layouts_by_name() -> None:
    placed = build.placement(compose("layout.audio=null"))
    assert list(placed.layouts) == ["vision", "llm"]
    with pytest.raises(LayoutError, match="without a layout"):
        with build.torch.device("meta"):
            cfg = compose("model.modules.llm.vocab_size=101")
            modules = hydra.utils.instantiate(cfg.model).modules_by_name
        build.check_all(modules, dict(placed.layouts))


@pytest.mark.parametrize("field", ["audio", "speech"])
def test_one_setting_takes_a_module_out(
    small: Path, tmp_path: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for split in ("train", "val", "test"):
        text = (small / f"{split}.json").read_text()
        (tmp_path / f"{split}.json").write_text(
            text.replace('"audio":', f'"{field}":').replace("<audio>", f"<{field}>")
        )
    read = (f"data.module.media_folder={small}", f"+data.module.processors.audio.field={field}")
    cfg = compose(*data_at(small), "model.modules.audio=null", *read)
    for split in ("train", "val", "test"):
        cfg.data.module[split] = str(tmp_path / f"{split}.json")
    build.check_configuration(cfg)
    placed = build.placement(cfg)
    make = build.model_maker(cfg)
    data = build.datamodule(cfg, make)
    build.check_model(make, data, placed)
    assert list(placed.layouts) == ["vision", "llm"] and data.modules == ("vision", "llm")
    heard = {
        split: sum("audio" in s for s in json.loads((small / f"{split}.json").read_text())) for split in data.indices
    }
    assert heard["train"] and {split: index.left_out for split, index in data.indices.items()} == heard
    said = f"train: {heard['train']} of 48 samples are left out, as they hold audio"
    assert [one.startswith(said) for one in caplog.messages if one.startswith("train: ")] == [True]


def test_processes_of_torchrun_meet_before_the_first_one_indexes(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    cfg = compose(*data_at(small), "model.modules.audio=null", "trainer.accelerator=cpu")
    make = build.model_maker(cfg)
    data = build.datamodule(cfg, make)
    assert not data.indices
    trainer = build.trainer(cfg, build.placement(compose("layout=single")), callbacks=[], logger=False)
    (indexed,) = (callback for callback in trainer.callbacks if isinstance(callback, build.Indexed))
    fitting: Any = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
    data.trainer = fitting
    data.prepare_data()
    assert {*data.indices} == {"train", "val", "test"}, "what is tested after training is looked at before it"
    fitted: Any = SimpleNamespace(datamodule=data, is_global_zero=True)
    for stage in ("fit", "validate"):
        indexed.setup(fitted, LitMultimodal(make, {}), stage)
    said = [message.partition(": ")[0] for message in caplog.messages]
    assert said.count("train") == said.count("test") == 1
    data.processors["vision"] = ImageProcessor(patch_size=8, channels=1)
    data.indices.clear()
    data.prepare_data()
    with pytest.raises(DataError, match="use the same merge or stack in both"):
        indexed.setup(fitted, LitMultimodal(make, {}), "fit")


def test_data_is_waited_for_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            (tmp_path / "data").mkdir()

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 1200.0 * len(slept))
    monkeypatch.setattr(build, "time", clock)
    monkeypatch.setenv("RANK", "3")
    build._wait_for(tmp_path / "data")
    assert len(slept) == 5
    assert f"rank 3 has waited 20 min for rank 0 to write {tmp_path / 'data'}" in caplog.text


def test_nobody_waits_for_data_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun leaves the other processes alone when one fails."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)

    def full(node: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(build.hydra.utils, "instantiate", full)
    cfg = compose(f"data.write.folder={tmp_path}/new/data")
    with pytest.raises(OSError):
        build.write_data(cfg)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(build.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(DataError, match="data: rank 0 could not write the data; its own message tells why"):
        build.write_data(cfg)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not build._failed(tmp_path / "new" / "data").exists(), "a job that is queued again is another attempt"


def test_a_generator_taken_out_leaves_what_is_read(small_drawings: Path) -> None:
    cfg, data = drawing(
        small_drawings, "model.modules.draw=null", "layout.draw=null", "layout.llm.pp=1", "layout.llm.ranks=[1]"
    )
    assert data.modules == ("vision", "llm") and data.indices["train"].left_out > 0
    build.check_model(build.model_maker(cfg), data, build.placement(cfg))


def test_a_run_folder_is_found_from_its_checkpoints(tmp_path: Path) -> None:
    place = tmp_path / "run" / "checkpoints" / "last.ckpt"
    place.mkdir(parents=True)
    (tmp_path / "run" / ".hydra").mkdir()
    OmegaConf.save({"a": 1}, tmp_path / "run" / cli.SAVED)
    assert cli.folder_of(place) == tmp_path / "run" == cli.folder_of(tmp_path / "run")
    assert cli.checkpoint_of(tmp_path / "run", "best", "last") == place == cli.checkpoint_of(place, "best")
    arguments = cli.with_run_folder([f"resume={place}"])
    assert f'hydra.run.dir="{tmp_path / "run"}"' in arguments and "hydra.output_subdir=null" in arguments
    with pytest.raises(ConfigError, match="not a run folder"):
        cli.folder_of(tmp_path)
    with pytest.raises(HeteroError, match="no checkpoint"):
        cli.checkpoint_of(tmp_path / "run", "best")


OLDER = """
strategy: {timeout_minutes: 7}
logger: {_target_: hetero_strategy.monitor.csv_logger}
model:
  modules:
    vision: {_target_: hetero_strategy.model.siglip2_encoder}
    audio: {_target_: hetero_strategy.model.whisper_encoder}
data:
  module:
    language_models: [llm]
    processors:
      vision:
        _target_: hetero_strategy.data.media.ImageProcessor
        patch_size: 8
        merge: 2
        channels: 1
        max_patches: 128
        mean: 0.5
        std: 0.5
      audio:
        _target_: hetero_strategy.data.media.AudioProcessor
        sampling_rate: 8000
        n_mels: 40
        stack: 4
        max_seconds: 4.0
"""
"""What runs of before said of model, data, strategy and logger besides what is said today."""


def goes_on(monkeypatch: pytest.MonkeyPatch, folder: Path, saved: DictConfig, *overrides: str) -> DictConfig:
    """The configuration of a stopped run with what this command line says."""
    (folder / ".hydra").mkdir(exist_ok=True)
    OmegaConf.save(saved, folder / cli.SAVED)
    asked = SimpleNamespace(overrides=SimpleNamespace(task=[*overrides]))
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: asked)
    return cli.saved_configuration(compose(*overrides), folder)


def test_a_run_that_goes_on_in_other_layouts_is_scheduled_for_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said of the layouts of before is gone; what holds for any layout stays."""
    before = compose(
        "layout=pipelined", "strategy.schedule=zb_h1", "strategy.fill=fine", "strategy.pieces={vision: 2}",
        "strategy.recompute=[llm]",
    )  # fmt: skip
    found = goes_on(monkeypatch, tmp_path, before, "layout=single", "strategy.recompute={llm: every 2}").strategy
    assert (found.schedule, found.fill, found.pieces, found.recompute) == ("auto", "auto", None, {"llm": "every 2"})
    found = goes_on(monkeypatch, tmp_path, before, "layout=single").strategy
    assert (found.schedule, found.recompute) == ("auto", ["llm"])
    found = goes_on(monkeypatch, tmp_path, before, "strategy.schedule=1f1b", "layout=colocated").strategy
    assert found.schedule == "1f1b"
    arguments = cli.of_no_experiment([f"resume={tmp_path}", "trainer=default"])
    assert cli.of_no_experiment(arguments) == arguments
    for others in (["trainer=default"], ["resume=null"], ["run="]):
        assert cli.of_no_experiment(others) == others
    found = goes_on(monkeypatch, tmp_path, before, *arguments)
    assert before.trainer.accelerator == "cpu" and found.trainer.accelerator == "auto" and "experiment" not in found
    with pytest.raises(ConfigError, match=r"experiment: .* has its configuration; name the fields to change"):
        goes_on(monkeypatch, tmp_path, before, "experiment=none")
    found = goes_on(monkeypatch, tmp_path, before, "+model/encoder@model.modules.vision=vit_3b")
    assert found.model.modules.vision.hidden_size > before.model.modules.vision.hidden_size
    assert "encoder" not in found.model
    draws = goes_on(monkeypatch, tmp_path, compose("experiment=digits_draw"), "++layout.draw.tp=2")
    assert draws.layout.draw.tp == 2 and "llm" in draws.layout
    found = goes_on(monkeypatch, tmp_path, before, "strategy.recompute=null").strategy
    assert (found.schedule, found.fill, found.recompute) == ("zb_h1", "fine", None)


def test_folders_and_ranks_under_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is queued again goes on from its newest checkpoint; two steps of a job, and a shell, share none."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))] + ["RANK", "LOCAL_RANK"]:
        monkeypatch.delenv(name, raising=False)
    newest = tmp_path / "checkpoints" / "last.ckpt"
    older = tmp_path / "hpc_ckpt_1.ckpt"
    for folder in (older, newest):
        folder.mkdir(parents=True)
    os.utime(older, (1, 1))

    def under(**env: str) -> tuple[str, int, Path | None]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return cli._agreed("out", ()), cli.rank(), cli.saved_before(tmp_path)

    by_time = re.compile(r"out/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")
    batch = under(SLURM_JOB_ID="7", SLURM_JOB_NAME="train")
    assert by_time.fullmatch(batch[0]) and batch[1:] == (0, None)
    assert under(SLURM_PROCID="3", SLURM_STEP_ID="0") == ("out/slurm-7", 3, None)
    assert under(SLURM_RESTART_COUNT="1") == ("out/slurm-7", 3, newest)
    assert under(SLURM_STEP_ID="2")[0] == "out/slurm-7.2"
    shell = under(SLURM_JOB_NAME="bash", SLURM_PROCID="0", LOCAL_RANK="2")
    assert by_time.fullmatch(shell[0]) and shell[1:] == (2, None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "5")
    assert not cli.srun() and cli.rank() == 5


def test_an_older_run_goes_on(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said more than once what the model says, the time limit by another name, and nothing of checksums."""
    cfg = compose(*data_at(small))
    now = build.datamodule(cfg, build.model_maker(cfg))
    older = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(cfg)), OmegaConf.create(OLDER))
    del older.strategy.timeout, older.strategy.verify_checkpoints
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(older, tmp_path / cli.SAVED)
    asked = SimpleNamespace(overrides=SimpleNamespace(task=["strategy.schedule=gpipe"]))
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: asked)
    saved = cli.saved_configuration(compose("strategy.schedule=gpipe"), tmp_path)
    build.check_configuration(saved)
    data = build.datamodule(saved, build.model_maker(saved))
    assert data.processors == now.processors and data.modules == now.modules == ("vision", "audio", "llm")
    assert {index.folder for index in data.indices.values()} == {index.folder for index in now.indices.values()}
    assert saved.model == cfg.model and saved.logger._target_ == cfg.logger._target_
    assert dict(saved.strategy) == dict(compose().strategy) | {"timeout": 7, "schedule": "gpipe"}
    made = build.call("strategy", saved.strategy, HeteroStrategy, layouts=build.placement(saved).layouts)
    assert made._timeout == timedelta(minutes=7)


DRAW = ("experiment=digits_draw", "data.write=null", "report.judge.seed=0")


def drawing(folder: Path, *overrides: str) -> tuple[DictConfig, MultimodalDataModule]:
    """Configuration and data of a small experiment that draws."""
    cfg = compose(*DRAW, *data_at(folder)[1:], *overrides)
    build.check_configuration(cfg)
    return cfg, build.datamodule(cfg, build.model_maker(cfg))


def test_the_drawing_experiment_fits_together(small_drawings: Path) -> None:
    cfg, data = drawing(small_drawings)
    assert set(data.processors) == {"vision", "draw"} and data.edges == (("vision", "llm"), ("llm", "draw"))
    assert set(cfg.layout) == {"vision", "llm", "draw"} and cfg.checkpoint.monitor == "val/loss"
    make = build.model_maker(cfg)
    placed = build.placement(compose(*DRAW, "layout.llm.pp=1", "layout.llm.ranks=[1]", "layout.draw.ranks=[2]"))
    build.check_model(make, data, placed)
    with torch.device("meta"):
        model = make()
    assert [(edge.source, edge.target) for edge in model.edges] == list(data.edges)
    assert model.loss_weights == {"llm": 1.0, "draw": 1.0}
    assert isinstance(build.judge(cfg), DigitJudge) and build.judge(compose()) is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "+data.module.processors.draw={_target_:hetero_strategy.data.targets.ImageTarget,patch_size:4,channels:1}",
            "draw gives target rows of 16 numbers but model.modules.draw draws rows of 4",
        ),
        (
            "+data.module.processors.vision={_target_:hetero_strategy.data.media.ImageProcessor,patch_size:8,channels:1}",
            "use the same merge or stack in both",
        ),
    ],
)
def test_drawing_configurations_that_cannot_be(small_drawings: Path, override: str, message: str) -> None:
    cfg, data = drawing(small_drawings, override)
    placed = build.placement(compose(*DRAW, "layout.llm.pp=1", "layout.llm.ranks=[1]", "layout.draw.ranks=[2]"))
    with pytest.raises(HeteroError, match=message):
        build.check_model(build.model_maker(cfg), data, placed)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+model.loss_weights.vision=1", "loss_weights: .*vision.* has no loss"),
        ("model.modules.draw.width=64", "llm -> draw: source rows have width 128, the target takes 64"),
        ("model.modules.draw.dim=98", "flow_decoder: dim 98 must be a multiple"),
    ],
)
def test_drawing_models_that_cannot_be(small_drawings: Path, override: str, message: str) -> None:
    with pytest.raises(InstantiationException, match=message):
        drawing(small_drawings, override)


def test_what_the_model_says_is_said_there_alone(small: Path, small_drawings: Path) -> None:
    """A size that is changed in the model changes the processor; what the model leaves open is the data's."""
    cfg = compose(*data_at(small), "model.modules.vision.patch_size=4", "model.modules.audio.stack=2")
    processors = build.datamodule(cfg, build.model_maker(cfg)).processors
    assert processors["vision"] == ImageProcessor(patch_size=4, merge=2, channels=1, max_patches=128)
    assert processors["audio"] == AudioProcessor(sampling_rate=8000, n_mels=40, stack=2, max_seconds=4.0)
    cfg, data = drawing(small_drawings, "model.modules.draw.patch_size=4", "data.module.processors.draw.rows=3")
    assert data.processors["draw"] == ImageTarget(rows=3, patch_size=4, channels=1, max_patches=16)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+data.module.processors.vision.patch_size=4", "processors.vision: patch_size is 4, but the module has 8"),
        ("+data.module.processors.vision.merge=1", "processors.vision: merge is 1, but the module has 2"),
        ("+data.module.processors.audio.hop=3", "processors.audio: no field 'hop'; the fields are .*hop_length"),
        ("+data.module.processors.eyes.max_patches=3", "processors names 'eyes', but .* are vision, audio"),
        (
            "+data.module.processors.vision={_target_:hetero_strategy.data.targets.ImageTarget}",
            "processors.vision is a ImageTarget, but the module is a Encoder",
        ),
    ],
)
def test_processors_that_cannot_be(small: Path, override: str, message: str) -> None:
    cfg = compose(*data_at(small), override)
    with pytest.raises(InstantiationException, match=message):
        build.datamodule(cfg, build.model_maker(cfg))


def test_an_encoder_without_a_processor_is_named(small: Path) -> None:
    modules = {"eyes": Encoder(torch.nn.Identity, Projector(4, 8)), "llm": hf_llama(**LLAMA | {"hidden_size": 8})}
    with pytest.raises(ConfigError, match=r"module 'eyes' has no processor.*pass processor= to Encoder"):
        MultimodalDataModule(model=lambda: MultimodalModel(modules), tokenizer=small, global_batch_size=1)


def test_workers_import_what_a_run_imports(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they do not have its memory, as actors of Ray and spawned processes."""
    cfg = compose("imports=[colorsys]", *data_at(small))
    build.check_configuration(cfg)
    steps = pickle.dumps(build.datamodule(cfg, build.model_maker(cfg)).train_dataloader().steps)
    monkeypatch.delitem(sys.modules, "colorsys")
    pickle.loads(steps)
    assert "colorsys" in sys.modules


@pytest.mark.parametrize("side", [2, 1])
def test_any_module_is_an_encoder(small: Path, side: int) -> None:
    """It says nothing of its rows, so they are compared when it runs."""
    cfg = compose("data.module.global_batch_size=4", *data_at(small))
    own = {"_target_": "tests.recipes.own.own_encoder", "patch_size": 8, "out_width": 128, "side": side}
    OmegaConf.update(cfg, "model.modules.vision", own, merge=False, force_add=True)
    build.check_configuration(cfg)
    make = build.model_maker(cfg)
    data = build.datamodule(cfg, make)
    build.check_model(make, data, build.placement(cfg))
    assert data.processors["vision"] == ImageProcessor(patch_size=8, merge=2, channels=1, max_patches=128)
    model, batch = make(), next(iter(data.train_dataloader()))
    (given,) = batch.inputs["vision"]
    assert given is not None and len(given.rows)
    if side == 2:
        model(batch).loss.backward()
        assert model.vision.backbone.first.weight.grad.abs().sum() > 0
        return
    (height, width), rows = given.sizes[given.rows.argmin()].tolist(), given.rows.min()
    two = np.sort(given.rows)[:2].sum()  # which run before all others
    message = rf"module 'vision': Cells made {4 * two} rows but the data plans {two} .*"
    with pytest.raises(DataError, match=message + rf"\({height}, {width}\) -> {rows}.*patch_size, merge, stack"):
        model(batch)
