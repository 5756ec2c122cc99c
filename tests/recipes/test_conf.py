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
import numpy as np
import pytest
import torch
from hydra.errors import InstantiationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig, OmegaConf

from hetero_strategy.data.media import AudioProcessor, ImageProcessor, ImageTarget
from hetero_strategy.errors import ConfigError, DataError, HeteroError, LayoutError
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.model import Encoder, MultimodalModel, Projector
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.zoo import hf_llama
from recipes import build, cli
from recipes.drawings import DigitJudge
from recipes.lit import LitMultimodal
from recipes.plan import run_options, sampled, stored
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
        ("+checkpoint.every=1", "checkpoint: no field 'every'"),
        ("+monitor.steps=1", "monitor: no field 'steps'"),
        ("+report.example=1", "report: no field 'example'; did you mean examples?"),
        ("report=null", "report: None has no fields; it needs examples, judge"),
        ("+layouts.llm=1", "configuration: no field 'layouts'; did you mean layout?"),
        ("optimizer.lr=true", "optimizer: lr=True; give a number"),
        ("optimizer.betas=0.9", "optimizer: betas=0.9; give a list of numbers"),
        ("monitor.memory='no'", "monitor: memory='no'; give True or False"),
        ("checkpoint.every_n_steps=0", "checkpoint: every_n_steps=0; give a whole number of at least 1"),
        ("report.examples=many", "report: examples='many'; give a whole number"),
    ],
)
def test_a_field_that_nothing_reads_or_of_another_type_is_named(field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        build.check_configuration(compose(field))
    assert hint in str(error.value)


def test_a_plan_keeps_to_layers_in_fp32() -> None:
    """The last norm runs once for each chunk of rows, so a run refuses to gather it with every microbatch."""
    with torch.device("meta"):
        model = MultimodalModel({"llm": hf_llama(**LLAMA)})
    with hydra.initialize_config_dir(cli.CONF, version_base=None):
        kept = ["trainer.precision=bf16-mixed", "strategy.keep_fp32=['llm.*norm*']"]
        cfg = hydra.compose("plan", overrides=kept)
        wrong = hydra.compose("plan", overrides=[*kept[:1], "strategy.keep_fp32=['lm.*']"])
    assert run_options(cfg, model, stored(cfg, model)).schedule.reshard_after_forward == "never"
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


@pytest.mark.parametrize("option", ["max_in_flight", "pieces"])
@pytest.mark.parametrize("given", [3, ["llm"], {"llm": "abc"}, {"llm": 1.5}, {"llm": True}, {"llm": 0}])
def test_numbers_of_modules_that_cannot_be(option: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"HeteroStrategy: {option}=.*; give a whole number of at least 1 for each"):
        HeteroStrategy(**{option: given})


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("async_checkpoint", "no", "async_checkpoint='no'; give True or False"),
        ("verify_checkpoints", "no", "verify_checkpoints='no'; give True or False"),
        ("process_group_backend", "glo", "process_group_backend='glo'; give a backend that torch knows"),
        ("process_group_backend", "cpu:gloo,cuda:ncl", "process_group_backend='cpu:gloo,cuda:ncl'; give"),
        ("keep_fp32", 3, "keep_fp32=3; give a list of texts or None"),
        ("transforms", ["llm"], r"transforms=\['llm'\]; give the transforms of each module, such as"),
    ],
)
def test_options_of_another_kind(option: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"HeteroStrategy: {message}"):
        HeteroStrategy(**{option: given})


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
    "override",
    [
        "trainer.accelerator=abacus",
        "trainer.limit_val_batches=-3",
        "trainer.val_check_interval=0.5",
        "+trainer.steps=3",
    ],
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
    read = (f"data.module.index.media_folder={small}", f"+data.module.processors.audio.field={field}")
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
        "++strategy.transforms.llm.recompute=all",
    )  # fmt: skip
    said = cli.with_transforms(["strategy.transforms.llm.recompute=every 2"])
    found = goes_on(monkeypatch, tmp_path, before, "layout=single", *said).strategy
    assert (found.schedule, found.fill, found.pieces) == ("auto", "auto", None)
    assert found.transforms == {"llm": {"recompute": "every 2"}}
    found = goes_on(monkeypatch, tmp_path, before, "layout=single").strategy
    assert (found.schedule, found.transforms) == ("auto", {"llm": {"recompute": "all"}})
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
    found = goes_on(monkeypatch, tmp_path, before, "strategy.transforms=null").strategy
    assert (found.schedule, found.fill, found.transforms) == ("zb_h1", "fine", None)


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
            "+data.module.processors.draw={_target_:hetero_strategy.data.media.ImageTarget,patch_size:4,channels:1}",
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
            "+data.module.processors.vision={_target_:hetero_strategy.data.media.ImageTarget}",
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
