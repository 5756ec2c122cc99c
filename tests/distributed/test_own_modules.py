"""A person's own backbone under the strategy: what is right in it stays right, what cannot be is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hetero_strategy.errors import ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import Backbone, Encoder, EncoderInputs, MultimodalModel, Projector
from hetero_strategy.parallelize.apply import check
from hetero_strategy.parallelize.take_part import _Runs
from hetero_strategy.runtime.warm_up import check_packing
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed import scenario, stepping
from tests.distributed.exact import compare, on, setting_of
from tests.distributed.exact import expected as expected_of
from tests.distributed.scenario import WIDTH, Job, Lit, Result, data, worst_gradient
from tests.distributed.test_ready_backbone import Flat, merged
from tests.model.test_packed_alone import Language


class Early(Flat):
    """Returns at once where there is nothing to do: its parameters get no gradient there."""

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        return super().forward(inputs) if len(inputs.sizes) else self.first.weight.new_zeros(0, 24)


class Branches(Flat):
    """Maps items of an odd number of rows otherwise than others: a microbatch may use one of two equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.more = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        rows = super().forward(inputs)
        items = rows.split(inputs.rows.tolist())
        made = [(self.one if len(item) % 2 else self.more)(item) for item in items]
        return torch.cat([rows.new_zeros(0, 24), *made])


class Cut(Backbone):
    """Its blocks run, but without items nothing that it returns follows from them."""

    block_list, before_blocks = "layers", ("first",)
    width = hidden_width = 24

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(256, 24), nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def embed(self, inputs: EncoderInputs) -> torch.Tensor:
        return self.first(merged(inputs).to(self.first.weight.dtype))

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        for block in self.blocks().values():
            rows = rows + block(rows)
        return rows

    def finish(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        return torch.cat([rows.new_zeros(0, 24), *rows.split(inputs.rows.tolist())])


class CutBefore(Cut):
    """Its rows are joined before the blocks: without items these take rows that follow from nothing."""

    def embed(self, inputs: EncoderInputs) -> torch.Tensor:
        rows = super().embed(inputs)
        return torch.cat([rows.new_zeros(0, 24), *rows.split(inputs.rows.tolist())])

    def finish(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        return rows


class InVain(Cut):
    """Gives the rows before its last block, as LLaVA does: no loss reaches the parameters of that block."""

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        *used, last = self.blocks().values()
        for block in used:
            rows = rows + block(rows)
        last(rows)
        return rows


class Looped(Cut):
    """Its blocks run once per picture."""

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        items = [super(Looped, self).transform(item, inputs) for item in rows.split(inputs.rows.tolist())]
        return torch.cat([rows.new_zeros(0, 24), *items])


class Bare(CutBefore):
    """What its last block makes is what the encoder gives: there is no projector."""

    width = hidden_width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def embed(self, inputs: EncoderInputs) -> torch.Tensor:
        return self.first(merged(inputs).to(self.first.weight.dtype))

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        for block in self.blocks().values():
            rows = block(rows)
        return torch.cat([rows.new_zeros(0, WIDTH)]) if not len(rows) else rows


class Loose(Cut):
    """A parameter that is in no block, and neither before nor after all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(24))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def finish(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        return super().finish(rows * self.gain, inputs)


class Named(Loose):
    """The same where it is said to come after them."""

    after_blocks = ("gain",)


class Skipping(Cut):
    """Blocks run only where there is something for them to do."""

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        return super().transform(rows, inputs) if len(rows) else rows


class Counting(Flat):
    """Training changes what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def reset_parameters(self) -> None:
        self.seen.zero_()  # type: ignore[operator]

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        self.seen += 1  # type: ignore[operator]
        return super().forward(inputs)


class Normed(Flat):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)


class Mixing(Backbone):
    """Its last block adds half of the row before to each, whosever that is."""

    block_list, before_blocks, after_blocks = "layers", ("first",), ("last",)
    tp_columns, tp_rows = ("0",), ("1",)
    width = hidden_width = 24

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 24), nn.Linear(96, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)) for _ in range(2))

    def embed(self, inputs: EncoderInputs) -> torch.Tensor:
        return self.first(inputs.values.to(self.first.weight.dtype))

    def transform(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        for name, block in self.blocks().items():
            rows = rows + block(rows)
            rows = rows + rows.roll(1, 0) / 2 if name == "layers.1" else rows
        return rows

    def finish(self, rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        return self.last(rows.reshape(-1, 96))


class Own(Lit):
    kind: type[nn.Module] = Early

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            assert self.model is not None
            modules: dict[str, Any] = dict(self.model.modules_by_name)
            bare = self.kind is Bare
            modules["vision"] = Encoder(self.kind, nn.Identity() if bare else Projector(24, WIDTH), width=WIDTH)
            self.model = MultimodalModel(modules, seed=11)


def fit(job: Job, kind: type[nn.Module]) -> Result:
    trainer, module, datamodule = scenario.build(job)
    module = Own(job, module.vocabulary)
    module.kind = kind
    trainer.fit(module, datamodule=datamodule)
    return Result([float(x) for x in module.losses], module.gradients, [], {}, {})


def on_rank(
    rank: int, world: int, job: Job, kinds: list[type[nn.Module]], refused: list[type[nn.Module]]
) -> tuple[list[Result], list[str]]:
    found = [fit(job, kind) for kind in kinds]
    messages = []
    for kind in refused:
        with pytest.raises(ModelError) as error:
            fit(job, kind)
        messages.append(str(error.value))
    return found, messages


REPLICATED, SHARDED = {"ranks": [0, 1], "dp_replicate": 2, "dp_shard": 1}, {"ranks": [0, 1], "dp_shard": 2}
PIPELINE, AUDIO = {"ranks": [0, 1], "pp": 2}, {"ranks": [0]}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "replicated": (REPLICATED, REPLICATED, "auto"),
    "sharded": (SHARDED, SHARDED, "auto"),
    "sharded once a step": (SHARDED, SHARDED, "never"),
    "before a pipeline": (SHARDED, {"ranks": [2, 3], "pp": 2}, "auto"),
}
"""Of encoders and the language model, and ``reshard_after_forward``."""


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_backbones(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Two samples a microbatch: some instance often has no picture, and of some parameters no gradient."""
    encoders, llm, reshard = LAYOUTS[layout]
    plain = Job(str(data(tmp_path)), steps=3, batch=8, microbatches=4, precision="64-true")
    job = replace(plain, strategy={"reshard_after_forward": reshard}).on(vision=encoders, audio=AUDIO, llm=llm)
    kinds = [Early, Branches, Cut, CutBefore, Bare, InVain]
    world = 1 + max(max(one["ranks"]) for one in (encoders, llm))
    refused = [Counting] if llm == encoders == SHARDED or "dp_replicate" in llm else []
    ranks = pool.run(world, on_rank, job, kinds, refused, group=False, timeout=300)
    for number, kind in enumerate(kinds):
        expected = fit(plain, kind)
        worst, where = worst_gradient(expected, [found[number] for found, _ in ranks])
        assert worst < 1e-10, (kind, where)
        for found, _ in ranks:
            assert found[number].losses == pytest.approx(expected.losses, rel=1e-10)
    for _, messages in ranks:
        assert all("buffer 'vision.backbone.seen'" in one and "evaluation mode" in one for one in messages)


@pytest.mark.full
def test_parts_that_run_as_often_as_a_rank_likes_where_gradients_are_summed_once(pool: Pool, tmp_path: Path) -> None:
    """In fp64 blocks that run once per picture; in mixed precision weights that get no gradient beside some that do."""
    plain = Job(str(data(tmp_path)), steps=3, batch=8, microbatches=2, precision="64-true")
    job = replace(plain, strategy={"reshard_after_forward": "never"}).on(vision=SHARDED, audio=AUDIO, llm=SHARDED)
    for precision, kind, bound in (("64-true", Looped, 1e-10), ("bf16-mixed", Branches, 0.05)):
        expected = fit(replace(plain, precision=precision), kind)
        ranks = pool.run(2, on_rank, replace(job, precision=precision), [kind], [], group=False, timeout=120)
        worst, where = worst_gradient(expected, [found for (found,), _ in ranks])
        assert worst < bound, (kind, where)


def test_rows_joined_item_by_item_where_a_rank_has_none(pool: Pool, tmp_path: Path) -> None:
    """Blocks that compute one row in place of none (Whisper's) are not joined to what follows from nothing, and a
    backward of tensor-parallel blocks without rows has gradients.
    """
    layouts = {"vision": on(0, 1, 2, 3, dp_shard=2, tp=2), "audio": on(0, 1, dp_shard=2), "llm": on(0)}
    folders = {False: stepping.data(tmp_path, draws=False)}
    setting = setting_of(folders, layouts, "1f1b", per_item=("vision", "audio"))
    wanted = expected_of(setting)
    compare(wanted, pool.run(4, stepping.steps_on_rank, setting, wanted, (4, 9), timeout=120))


@pytest.mark.full
def test_blocks_that_do_not_run_as_often_where_their_weights_are_gathered_are_refused(
    pool: Pool, tmp_path: Path
) -> None:
    """Once per picture, of which one rank has one and the other two: both say so. Where a block does not run at all the
    other rank would wait for this one; its own message, of a lost rank, comes later than the cause's.
    """
    folder = data(tmp_path)
    pictures = [sample for sample in json.loads((folder / "train.json").read_text()) if "image" in sample]
    (folder / "three.json").write_text(json.dumps(pictures[:3]))
    job = Job(str(folder), steps=3, batch=2, microbatches=1, precision="64-true")
    both = {"ranks": [0, 1], "dp_shard": 2}
    with pytest.raises(WorkerError, match=r"module 'vision': backbone.layers.0 did not run in a microbatch"):
        pool.run(2, refused, job.on(vision=both, audio=both, llm=both), group=False, timeout=120)


def refused(rank: int, world: int, job: Job) -> None:
    three = replace(job, batch=3, manifest="three.json", val="three.json", shuffle=False)
    for call in ("fit", "validate"):
        trainer, module, datamodule = scenario.build(three)
        module = Own(three, module.vocabulary)
        module.kind = Looped
        with pytest.raises(
            ModelError, match=r"layers.0 runs 2 times or more in a .* ranks \[\d\], and 1 on ranks \[\d\]"
        ):
            getattr(trainer, call)(module, datamodule=datamodule)
    fit(job, Skipping)


def test_a_block_runs_as_often_in_each_microbatch_as_in_the_first() -> None:
    """Of a kind: with gradients or without, in training or in evaluation, where a generator draws. What runs again in a
    backward is not counted.
    """
    stage: Any = SimpleNamespace(name="vision", training=True)
    mesh: Any = SimpleNamespace(ndim=0, device_type="cpu")
    runs, block = _Runs(stage, ["block"], mesh), nn.Identity()

    def forward(times: int) -> None:
        runs.begin(True)
        for _ in range(times):
            runs.count("block", block, ())
        runs.end()

    for times in (2, 2):
        forward(times)
        runs.count("block", block, ())
    with torch.no_grad():
        forward(1)
        stage.training = False
        forward(3)
    stage.training = True
    with pytest.raises(
        ModelError, match="'vision': block runs 3 times or more in a microbatch, and ran 2 in the first"
    ):
        forward(3)
    with pytest.raises(ModelError, match=r"block ran 1 times in a .* let each block run once for all items"):
        forward(1)


def test_batch_statistics_are_refused_unless_they_are_frozen() -> None:
    module, layout = Encoder(Normed, Projector(24, WIDTH)), ModuleLayout.from_config("vision", {"ranks": [0]})
    (fault,) = check("vision", module, layout)
    assert fault.startswith("module 'vision': backbone.norm is a BatchNorm1d in training mode") and "GroupNorm" in fault
    module.get_submodule("backbone.norm").eval()
    assert not check("vision", module, layout)


def test_a_parameter_that_no_stage_has_is_refused_in_a_pipeline() -> None:
    module, layout = Encoder(Loose, Projector(24, WIDTH)), ModuleLayout.from_config("vision", PIPELINE)
    (fault,) = check("vision", module, layout.resolved("vision"))
    assert "'backbone.gain' of Encoder is in no block" in fault and "after_blocks" in fault
    named = Named()
    assert not check("vision", Encoder(named, Projector(24, WIDTH)), layout.resolved("vision"))
    first, last = (named.stage([f"layers.{i}"], first=i == 0, last=i == 2) for i in (0, 2))
    assert first.gain is None and last.gain is named.gain and last.first is None


ACROSS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "sharded": (SHARDED, SHARDED, ["module 'vision': two items", "module 'vision': two items"]),
    "tensor parallel": (
        {"ranks": [0, 1], "tp": 2},
        AUDIO,
        ["module 'vision': two items", "module 'vision': two items"],
    ),
    "pipelined": (PIPELINE, AUDIO, ["", "module 'vision', stage 1: two items"]),
    "a language model": (AUDIO, SHARDED, ["module 'llm': two samples", "module 'llm': two samples"]),
}
"""Layouts of the encoder and of the language model, and what each rank says."""


def test_packed_rows_that_see_each_other_are_refused(pool: Pool, folders: dict[bool, str]) -> None:
    for rank, said in enumerate(pool.run(2, compared, folders[False], timeout=120)):
        for (name, (*_, wanted)), text in zip(ACROSS.items(), said, strict=True):
            assert text.startswith(wanted[rank]) and bool(text) == bool(wanted[rank]), (name, rank, text)
            assert not text or "of its size, above 1.5e-08 (float64)" in text


def compared(rank: int, world: int, folder: str) -> list[str]:
    said = []
    for name, (vision, llm, _) in ACROSS.items():
        setting = stepping.Setting(folder, {"vision": vision, "llm": llm})
        modules: dict[str, Any] = dict(stepping.empty_model(setting).modules_by_name)
        with torch.device("meta"):
            if name == "a language model":
                modules["llm"] = Language(attends=True, width=WIDTH, vocabulary=modules["llm"].vocab_size)
            else:
                modules["vision"] = Encoder(Mixing, Projector(24, WIDTH))
            model = MultimodalModel(modules, setting.flows(), seed=11).double()
        made = stepping.assembled(setting, rank, world, model=model)
        share = stepping.share_of(stepping.placed(setting, world), setting, rank)
        try:
            check_packing(
                made.executor, stepping.steps_of(setting, 1, share, made.plan.context(setting.ranks_per_node))[0]
            )
            said.append("")
        except ModelError as error:
            said.append(str(error))
        dist.barrier()
    return said
