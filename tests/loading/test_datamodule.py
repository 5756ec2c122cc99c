from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from hetero_strategy.errors import ConfigError, DataError, HeteroError
from hetero_strategy.layout.spec import ModuleLayout, place
from hetero_strategy.loading import datamodule
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.context import TrainingContext
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.options import IndexOptions, TokenizerOptions, Workers
from hetero_strategy.model import MultimodalModel
from tests.manifests import write_manifest
from tests.small_models import DRAWING, READING, drawer, reader

READER: dict[str, Any] = {"model": reader, "processors": READING}


def data(digits: Path, **options: Any) -> MultimodalDataModule:
    options = {"tokenizer": digits, "global_batch_size": 16, "microbatches": 2, "seed": 1, **READER, **options}
    return MultimodalDataModule(digits / "train.json", digits / "val.json", **options)


class Recorder(L.LightningModule):
    """Learns nothing; remembers which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, int, list[int]]] = []
        self.validated: list[tuple[int, int, list[int]]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch.plan.metadata.epoch, batch.plan.metadata.step, batch.plan.samples.tolist()))
        assert batch_idx == batch.plan.metadata.step
        return self.weight.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.append((batch.plan.metadata.epoch, batch.plan.metadata.step, batch.plan.samples.tolist()))

    def predict_step(self, batch: Batch, batch_idx: int) -> list[int]:
        return batch.plan.samples.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder: Path, **options: Any) -> L.Trainer:
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "enable_checkpointing": "callbacks" in options, "default_root_dir": folder}
    return L.Trainer(**{**quiet, **options})


def fit(folder: Path, module: MultimodalDataModule, resume: Path | None = None, **options: Any) -> Recorder:
    model = Recorder()
    trainer(folder, **options).fit(
        model, datamodule=module, ckpt_path=resume, weights_only=None if resume is None else False
    )
    return model


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("workers.count", ("auto", None, 1.5, True, -1), "give a whole number of processes, 0: none"),
        ("workers.prefetch", (None, "2", 1.5, 0), "give a whole number of steps, at least 1"),
        ("max_skipped", ("3", 1.5, -1), "give a whole number of samples or None"),
        ("index.max_tokens", ("9", 0, 1.5), "give a whole number of tokens, at least 1, or None"),
        ("seed", (-1, None, 1.5, "7"), "give a whole number, at least 0"),
        ("shuffle", ("no", None), "give True or False"),
        ("drop_last", ("no",), "give True or False"),
        ("workers.pin_memory", ("no",), "give True or False or None"),
        ("workers.engine", ("spark", None), "give one of local, ray"),
        ("on_error", ("ignore",), "give one of stop, skip"),
        ("index.verify", ("yes", True), "give one of auto, header, decode"),
        ("payload", ("all-to-all",), "give one of fetch, all_to_all"),
        ("index.media_folder", (5,), "give a folder or None"),
        ("index.cache_folder", (["a"],), "give a folder or None"),
        ("index.leave_out", (None, 5, [3]), "give a media field or a list of them"),
        ("processors", (["vision"],), "give fields of them by module, such as"),
        ("tokenizer.placeholders", (["draw"],), "give a token by media field, such as"),
        ("workers", (4, None), "give a Workers or its fields: count, prefetch, pin_memory, engine"),
        ("index", ("folder",), "give a IndexOptions or its fields: media_folder"),
        ("encoder_microbatch_rows", (9, ["vision"], "equal"), "give rows by module, such as"),
        ("tokenizer", (None, 3), "give a tokenizer.json, or the folder it lies in"),
    ],
)
def test_an_option_that_cannot_be_is_named(option: str, values: tuple[Any, ...], message: str) -> None:
    group, _, field = option.partition(".")
    for value in values:
        fields = {field: value, **({"path": "-"} if group == "tokenizer" else {})} if field else value
        with pytest.raises(ConfigError, match=re.escape(f"{field or option}={value!r}; {message}")):
            MultimodalDataModule(**{"tokenizer": "-", "global_batch_size": 16, **READER, group: fields})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer={'bos': None} lacks the field 'path'"):
        MultimodalDataModule(tokenizer={"bos": None}, global_batch_size=16, **READER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tokenizer": {"placeholders": {"imgae": "<image>"}}},
            "placeholders names 'imgae', which is no media field; did you mean",
        ),
        (
            {"tokenizer": {"placeholders": {"scan": "<image>"}}},
            "placeholders names 'scan', .* the fields are image, audio, video",
        ),
        ({"tokenizer": {"placeholders": {"image": "<nope>"}}}, "no token '<nope>' .*'image'"),
        ({"index": {"leave_out": ["audoi"]}}, "leave_out names 'audoi', which is no media field; did you mean audio"),
        (
            {"index": {"leave_out": ["vision"]}},
            "leave_out names 'vision', which is no media field; module 'vision' reads image",
        ),
        ({"workers": {"engine": "ray"}}, "engine='ray' with workers.count=0"),
        ({"workers": {"num": 4}}, "workers has no field 'num'; the fields are count, prefetch, pin_memory, engine"),
        ({"tokenizer": {"boss": None}}, "tokenizer has no field 'boss'; did you mean bos"),
        ({"global_batch_size": True}, "global_batch_size is True"),
        ({"microbatches": True}, "microbatches is True; use a number or 'auto'"),
    ],
)
def test_what_would_fail_later_or_mean_nothing_is_refused_at_once(
    digits: Path, options: dict[str, Any], message: str
) -> None:
    if "tokenizer" in options:
        options = {"tokenizer": {"path": digits, **options["tokenizer"]}}
    with pytest.raises(ConfigError, match=message):
        data(digits, **options)
    for others in (("scan", "drawing"), ("video", "videos")):  # a manifest may have them
        assert data(digits, index=IndexOptions(leave_out=others)).index_options.leave_out == others


@pytest.mark.parametrize("rows", [None, 4.5, True, 0, "some"])
def test_microbatch_rows_that_cannot_be_are_named(rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"encoder_microbatch_rows of 'vision' is .*; use a number of"):
        MultimodalDataModule(tokenizer="-", global_batch_size=16, **READER, encoder_microbatch_rows={"vision": rows})


@pytest.mark.full_cases("2-0", "4-0", "6-0")
@pytest.mark.parametrize(("stop_at", "workers"), [(2, 0), (4, 0), (6, 0), (6, 2)])
def test_resume_is_exact(digits: Path, tmp_path: Path, stop_at: int, workers: int) -> None:
    """4 steps per epoch; checkpoints in the middle and at the end of an epoch, with validation inside the epoch."""
    options = {"max_epochs": 3, "val_check_interval": 2}
    whole = fit(tmp_path, data(digits, workers=Workers(workers)), **options)
    assert [(epoch, step) for epoch, step, _ in whole.seen] == [(e, s) for e in range(3) for s in range(4)]
    assert len({tuple(samples) for *_, samples in whole.seen}) == 12
    assert whole.validated[0][1:] == (0, list(range(16)))
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    saved = fit(tmp_path, data(digits, workers=Workers(workers)), **options, callbacks=[saver])
    assert saved.seen == whole.seen
    rest = fit(tmp_path, data(digits, workers=Workers(workers)), tmp_path / f"step={stop_at}.ckpt", **options)
    assert rest.seen == whole.seen[stop_at:]


def test_resume_after_an_epoch_end_and_under_a_limit(digits: Path, tmp_path: Path) -> None:
    options = {"max_epochs": 3, "limit_train_batches": 3}
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = fit(tmp_path, data(digits), **options, callbacks=[saver])
    assert [(epoch, step) for epoch, step, _ in whole.seen] == [(e, s) for e in range(3) for s in range(3)]
    assert fit(tmp_path, data(digits), tmp_path / "epoch=0.ckpt", **options).seen == whole.seen[3:]


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("limit", [None, 3])
def test_resume_after_an_epoch_end_of_a_run_of_so_many_steps(
    digits: Path, tmp_path: Path, validated: bool, limit: int | None
) -> None:
    options: dict[str, Any] = {"max_steps": 10, "limit_train_batches": limit}
    if not validated:
        options["limit_val_batches"] = 0
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = fit(tmp_path, data(digits), **options, callbacks=[saver])
    each = limit or 4
    assert [(epoch, step) for epoch, step, _ in whole.seen] == [divmod(n, each) for n in range(10)]
    for epoch in range(2):
        rest = fit(tmp_path, data(digits), tmp_path / f"epoch={epoch}.ckpt", **options)
        assert rest.seen == whole.seen[(epoch + 1) * each :]


def test_a_run_that_ended_within_an_epoch_goes_on_there(digits: Path, tmp_path: Path) -> None:
    """Lightning goes through that epoch's end, in which its ModelCheckpoint saves by default, and counts it as done."""
    options: dict[str, Any] = {"limit_val_batches": 0}
    whole = fit(tmp_path, data(digits), max_steps=10, **options)
    first = trainer(tmp_path, max_steps=6, **options, callbacks=[ModelCheckpoint(tmp_path, filename="{step}")])
    first.fit(Recorder(), datamodule=data(digits))
    first.save_checkpoint(tmp_path / "by_hand.ckpt")
    for saved in ("step=6", "by_hand"):
        rest = fit(tmp_path, data(digits), tmp_path / f"{saved}.ckpt", max_steps=10, **options)
        assert rest.seen == whole.seen[6:], saved


class Waits(L.Callback):
    """Notes what waits until a batch were."""

    def __init__(self) -> None:
        self.until: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *given: Any) -> None:
        loader: Any = trainer.train_dataloader
        if trainer.global_step == 0:
            loader.waited += 100.0
        self.until.append(loader.waited)


def test_a_loader_made_again_goes_on_counting(digits: Path, tmp_path: Path) -> None:
    """Or the wait for its first batch would be less than none."""
    waits = Waits()
    monitored = {"callbacks": [waits], "enable_checkpointing": False}
    fit(tmp_path, data(digits), max_epochs=2, reload_dataloaders_every_n_epochs=1, **monitored)
    assert len(waits.until) == 8 and sorted(waits.until) == waits.until


def test_overfitting_repeats_the_same_batches(digits: Path, tmp_path: Path) -> None:
    seen = fit(tmp_path, data(digits), max_epochs=2, overfit_batches=2).seen
    assert [samples for *_, samples in seen] == [list(range(16)), list(range(16, 32))] * 2


def test_lightning_gets_numbers_of_samples_that_are_its_own(digits: Path) -> None:
    """A tensor of the epoch's order itself, which is read-only, made torch warn in every run."""
    module = data(digits)
    module.setup("fit")
    batch = next(iter(module.train_dataloader()))
    samples = batch.plan.samples.tolist()
    next(iter(batch)).zero_()
    assert batch.plan.samples.tolist() == samples != [0] * 16


def test_other_stages(digits: Path, tmp_path: Path) -> None:
    module = data(digits, eval_batch_size=1)
    model = Recorder()
    trainer(tmp_path).validate(model, datamodule=module, verbose=False)
    assert len(model.validated) == 20 and set(module.indices) == {"val"}
    with pytest.raises(ConfigError, match="no test manifest"):
        module.test_dataloader()
    question = write_manifest(tmp_path, {"id": "x", "conversations": [{"from": "human", "value": "q"}]})
    for predict, samples in ((question, [0]), ([question, digits / "val.json", question], [*range(4)])):
        asked = MultimodalDataModule(predict=predict, tokenizer=digits, **READER, global_batch_size=4, microbatches=4)
        predicted: list[Any] = trainer(tmp_path).predict(model, datamodule=asked) or []
        assert predicted[0] == samples and len(asked.indices["predict"]) in (1, 22)
    no_val = MultimodalDataModule(digits / "train.json", tokenizer=digits, **READER, global_batch_size=30)
    assert len(fit(tmp_path, no_val, max_epochs=1).seen) == 2


def test_a_checkpoint_folder_is_explained_where_another_strategy_is_given_it(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    (folder / "checkpoint.json").touch()
    with pytest.raises(IsADirectoryError) as error:
        trainer(tmp_path).validate(Recorder(), datamodule=data(digits), ckpt_path=str(folder), verbose=False)
    assert error.value.__notes__ == [f"{folder} is a checkpoint of HeteroStrategy, which reads it with devices=1, too"]


def test_one_field_may_be_left_out_by_its_name_alone(digits: Path) -> None:
    """As it is typed on a command line: it is no list of letters, which no sample holds."""
    counts = []
    for given in ("audio", ["audio"]):
        module = data(digits, index={"leave_out": given})
        module.setup("validate")
        counts.append(module.indices["val"].left_out)
        assert not len(module.indices["val"].items["audio"].rows)
    assert counts[0] == counts[1] > 0


def test_microbatches_by_themselves_follow_from_a_budget_or_the_plan_of_layouts(digits: Path, tmp_path: Path) -> None:
    module = data(digits, microbatches="auto", eval_batch_size=3)
    with pytest.raises(ConfigError, match=r"microbatches=auto follows from a budget, but balance.budget has none for"):
        fit(tmp_path, module, max_epochs=1)
    module.trainer = placed(0, 1, llm=ModuleLayout((0,)), vision=ModuleLayout((0,)), audio=ModuleLayout((0,)))
    module.trainer.strategy.context = replace(module.trainer.strategy.context, microbatches=4)
    assert next(iter(module.train_dataloader())).plan.microbatches == 4
    assert next(iter(module.val_dataloader())).plan.microbatches == 3  # of as many samples


def limited(module: str = "llm", **limits: Any) -> MultimodalModel:
    model = reader()
    for name, most in limits.items():
        setattr(model.modules_by_name[module], name, most)
    return model


def two_readers() -> MultimodalModel:
    modules = {**reader().modules_by_name, "caption": reader().modules_by_name["llm"]}
    return MultimodalModel(modules, [(source, to) for source in ("vision", "audio") for to in ("llm", "caption")])


def test_what_a_budget_or_the_model_cannot_take_is_named_before_training(digits: Path, tmp_path: Path) -> None:
    whole = data(digits)
    whole.setup("fit")
    index = whole.indices["train"]
    tokens, images = np.diff(index.offsets), index.items["vision"]
    longest, largest = int(tokens.max()), int(images.inner_rows.max())
    clip = int(index.items["audio"].inner_rows.max())
    assert reader().modules_by_name["audio"].max_item_rows == 1500  # as Whisper's own tables
    own, more = whole.tokenizer.tokenizer, tmp_path / "tokenizer.json"
    own.add_special_tokens(["<pic>"])
    own.save(str(more))
    first = index.names[int(np.flatnonzero(tokens == longest)[0])]
    seen = index.names[int(images.sample[np.flatnonzero(images.inner_rows == largest)[0]])]
    named = rf"train\.json: {longest} in sample '{first}'.*: more rows than the {longest - 1} that balance.budget gives"
    refused: list[tuple[dict[str, Any], type[HeteroError], str]] = [
        (
            {"balance": {"budget": {"llm": longest - 1}}},
            ConfigError,
            named,
        ),
        (
            {"balance": {"budget": {"caption": longest - 1}}, "model": two_readers},
            ConfigError,
            f"{named} an instance of 'caption' in a microbatch",
        ),
        (
            {"balance": {"budget": {"vision": largest - 1}}},
            ConfigError,
            f"{largest} in sample '{seen}'.* 'vision' in a microbatch; raise it to at least {largest}",
        ),
        ({"model": lambda: limited(max_length=20)}, DataError, r"and \d+ more: .* than the 20 that 'llm' can take"),
        (
            {"model": lambda: limited(vocab_size=9)},
            ConfigError,
            rf"ids reach {index.largest_id}, but the embedding of 'llm' has 9 rows; .* at least {index.largest_id + 1}",
        ),
        (
            {
                "model": lambda: limited(vocab_size=own.token_to_id("<pic>")),
                "tokenizer": TokenizerOptions(more, placeholders={"image": "<pic>"}),
            },
            ConfigError,
            rf"id {own.token_to_id('<pic>')} only fills the rows of 'vision', as any other would: give"
            r" placeholders={'image': '<eos>'}",
        ),
        (
            {"model": lambda: limited("audio", max_item_rows=clip - 1)},
            DataError,
            rf"{clip} in sample .*: more rows than the {clip - 1} that 'audio' has positions for; .*more positions",
        ),
        (
            {"model": lambda: limited("audio", max_item_rows=clip - 1, checkpoint="whisper")},
            DataError,
            r"'audio' has positions for; cut these items, or leave them out$",
        ),
    ]
    for options, error, message in refused:
        with pytest.raises(error, match=message):
            trainer(tmp_path).fit(Recorder(), datamodule=data(digits, **options))
    just = {"llm": longest, "vision": largest}
    roomy = data(
        digits,
        microbatches="auto",
        balance={"budget": just},
        model=lambda: limited(max_length=longest, vocab_size=index.largest_id + 1),
    )
    assert fit(tmp_path, roomy, max_steps=1).seen


def placed(rank: int, world: int, **layouts: ModuleLayout) -> Any:
    strategy = SimpleNamespace(context=TrainingContext(place(layouts, world), row_multiple={"llm": 2}))
    return SimpleNamespace(
        strategy=strategy, global_rank=rank, world_size=world, num_nodes=1, state=None, overfit_batches=0
    )


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_node_that_sees_no_index_builds_one_once(
    digits: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    module, found = data(digits), list[set[str]]()

    class Barrier:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            found.append({*module.indices})

    monkeypatch.setattr(datamodule, "_InfiniteBarrier", Barrier)
    ranks = {name: ModuleLayout((0, 1)) for name in ("vision", "audio", "llm")}
    module.trainer = placed(local_rank, 2, **ranks)
    module.trainer.num_nodes, module.trainer.local_rank = 2, local_rank
    assert not module.prepare_data_per_node  # rank 0 alone prepares
    module.setup("fit")
    assert found == [{"train", "val"} if local_rank == 0 else set()]
    assert module.indices.keys() == {"train", "val"}


def test_prompts_of_an_earlier_index_are_asked_for_where_a_rule_needs_them(digits: Path, tmp_path: Path) -> None:
    ruled = reader()
    ruled.modules_by_name["llm"].attend_by("prefix")
    stored = IndexOptions(cache_folder=str(tmp_path))
    new = data(digits, index=stored)._index("train")
    assert new is not None and new.prompts is not None
    for sample in range(len(new)):
        learnt = new.loss[new.offsets[sample] : new.offsets[sample + 1]]
        assert new.prompts[sample] == next((i for i, x in enumerate(learnt) if x), len(learnt))
    (new.folder / "prompts.npy").unlink()
    old = data(digits, index=stored)._index("train")
    assert old is not None and old.prompts is None and old.content == new.content
    with pytest.raises(
        DataError, match=rf"train\.json: attention='prefix' of 'llm' .* delete {new.folder}, and the next"
    ):
        data(digits, model=ruled, index=stored)._index("train")
    shutil.rmtree(new.folder)
    again = data(digits, model=ruled, index=stored)._index("train")
    assert again is not None and again.content == old.content and np.array_equal(again.prompts, new.prompts)


def test_share_follows_the_placement(digits: Path) -> None:
    module = data(digits)
    layouts = {"vision": ModuleLayout((0, 1, 2)), "audio": ModuleLayout((2,)), "llm": ModuleLayout((0, 1, 2, 3), tp=2)}
    shares = []
    for rank in range(4):
        module.trainer = placed(rank, 4, **layouts)
        shares.append(module.share())
    assert shares[0].instances == {"vision": 3, "audio": 1, "llm": 2} and shares[0].row_multiple == {"llm": 2}
    assert [share.mine["vision"] for share in shares] == [0, 1, 2, None]
    assert [share.mine["audio"] for share in shares] == [None, None, 0, None]
    assert [share.mine["llm"] for share in shares] == [0, 0, 1, 1]
    batch = next(iter(module.train_dataloader()))
    assert set(batch.inputs) == {"llm"}


def drawing(folder: Path, **options: Any) -> MultimodalDataModule:
    options = {"global_batch_size": 16, "microbatches": 2, "seed": 1, "model": drawer, "processors": DRAWING, **options}
    return MultimodalDataModule(folder / "train.json", folder / "val.json", tokenizer=folder, **options)


def test_a_generator_follows_the_consumer(drawings: Path) -> None:
    module = drawing(drawings, encoder_microbatch_rows={"vision": 1000, "draw": 30})
    assert module.edges == (("vision", "llm"), ("llm", "draw")) and set(module.modules) == {"vision", "llm", "draw"}
    batch = next(iter(module.train_dataloader()))
    assert len(batch.inputs["llm"]) == 2 and len(batch.inputs["vision"]) == 1 and len(batch.inputs["draw"]) > 2
    fixed, changing = module.val_dataloader(), module.train_dataloader()
    assert isinstance(fixed, StepLoader) and fixed.steps.same_noise and not changing.steps.same_noise


def test_later_stages_read_less(drawings: Path) -> None:
    module = drawing(drawings)
    layouts = {
        "vision": ModuleLayout((0, 1), pp=2),
        "llm": ModuleLayout((0, 1, 2), pp=3),
        "draw": ModuleLayout((1, 2), pp=2, vpp=2, pp_style="v"),
    }
    found = []
    for rank in range(3):
        module.trainer = placed(rank, 3, **layouts)
        share = module.share()
        found.append((sorted(share.without_first), sorted(share.without_last), dict(share.mine)))
    assert found[0] == (["draw"], ["draw", "llm", "vision"], {"vision": 0, "llm": 0, "draw": None})
    assert found[1] == (["llm", "vision"], ["llm"], {"vision": 0, "llm": 0, "draw": 0})
    assert found[2] == (["draw", "llm", "vision"], ["draw", "vision"], {"vision": None, "llm": 0, "draw": 0})


def test_refusals(digits: Path) -> None:
    module = data(digits)
    plain = SimpleNamespace(strategy=SimpleNamespace(root_device=None), world_size=2, global_rank=0)
    module.trainer = plain  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"runs 2 processes .* use HeteroStrategy"):
        module.setup("fit")
    module.trainer = placed(0, 1, vision=ModuleLayout((0,)), llm=ModuleLayout((0,)))
    with pytest.raises(ConfigError, match="feeds vision, audio, llm but the layouts place vision, llm"):
        module.share()
    with pytest.raises(ConfigError, match="encoder_microbatch_rows names 'llm', which is none of vision, audio"):
        data(digits, encoder_microbatch_rows={"llm": 5})
    with pytest.raises(ConfigError, match="encoder_microbatch_rows of 'audio' is 0"):
        data(digits, encoder_microbatch_rows={"audio": 0})
    with pytest.raises(ConfigError, match=r"train is \[\]; give a manifest \(.json, .*\), or a list of manifests"):
        MultimodalDataModule([], tokenizer=digits, **READER, global_batch_size=4)
    with pytest.raises(ConfigError, match="model is a Linear; give the MultimodalModel that is trained"):
        data(digits, model=torch.nn.Linear(1, 1))
