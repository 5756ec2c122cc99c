"""Mixed precision by storage: what is kept in which dtype, what autograd keeps, what gathers move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hetero_strategy.boundary import transport
from hetero_strategy.model import MultimodalModel
from hetero_strategy.parallelize.copies import copies_of
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.runtime.executor import RunningStep
from hetero_strategy.testing import Pool
from hetero_strategy.testing.setting import in_dtype
from tests.distributed import stepping
from tests.distributed.exact import NOTICED, on
from tests.distributed.stepping import OnRank, Setting, data, reference, steps_of

MIXED = Storage(torch.bfloat16, torch.float32)
KEPT = "llm.model.layers.0.attention.wo.weight"
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""Function of torch.distributed that FSDP2 calls; newer versions of torch renamed it."""


def gradients_on_rank(rank: int, world: int, setting: Setting, keep: tuple[str, ...]) -> dict[str, Any]:
    """Of one microbatch on one rank; and what is kept in which dtype."""
    stepping.PRECISIONS["kept"] = replace(MIXED, keep=keep)
    made = OnRank(rank, world, replace(setting, precision="kept"))
    made.executor.run(made.steps(setting, 1)[0], train=True)
    gradients = {n: local(p.grad) for n, p in made.owned.items() if p.grad is not None}
    dtypes = {n: p.dtype for n, p in made.owned.items()}
    sharded = {n for n, p in made.owned.items() if isinstance(p, DTensor)}
    stages = {n.module: stage for n, stage in made.executor.stages.items()}
    wrapped = {name for name, stage in stages.items() if isinstance(stage, FSDPModule)}
    copied = {name for name, stage in stages.items() if copies_of(stage) is not None}
    found = {"gradients": gradients, "dtypes": dtypes, "sharded": sharded, "wrapped": wrapped, "copied": copied}
    for way in ("a step", "an evaluation", "a step that fails"):
        if way == "an evaluation":
            made.evaluate(setting)
        elif way == "a step that fails":
            with pytest.raises(TypeError), patch.object(RunningStep, "_backward", None):
                made.executor.run(made.steps(setting, 1)[0], train=True)
        now = {f"{n}.{fqn}": p for n, m in made.executor.modules.items() for fqn, p in m.named_parameters()}
        if stages.keys() == copied | {"audio"}:
            assert all(now[name] is p for name, p in made.owned.items()), f"copies stayed in layers after {way}"
    return found


@pytest.mark.full
def test_frozen_layers_may_compute_in_fp32_too(pool: Pool, tmp_path: Path) -> None:
    """Where nothing wraps them, as nothing shards them: their rows are cast to fp32 and back."""
    names = ("vision", "audio", "llm")
    setting = Setting(
        data(tmp_path), {n: on(0) for n in names}, freeze=("llm",), precision="bf16-mixed", microbatches=1
    )
    (kept,), (plain,) = (pool.run(1, gradients_on_rank, setting, keep) for keep in ((KEPT,), ()))
    assert "llm" not in kept["wrapped"]
    assert (kept["dtypes"][KEPT], plain["dtypes"][KEPT]) == (torch.float32, torch.bfloat16)
    for name, gradient in kept["gradients"].items():
        other = plain["gradients"][name]
        assert (gradient - other).norm() < 0.1 * other.norm() + 1e-6, name
    assert any(not torch.equal(gradient, plain["gradients"][name]) for name, gradient in kept["gradients"].items())


@pytest.mark.parametrize("reshard", ["auto", "always"])
def test_gradients_are_those_of_half_precision_weights_bit_by_bit(pool: Pool, tmp_path: Path, reshard: str) -> None:
    """A plain model whose fp32 weights were rounded to bf16, which knows nothing of masters, copies and FSDP2."""
    freeze = ("vision.backbone", "audio")
    setting = Setting(data(tmp_path), {n: on(0) for n in ("vision", "audio", "llm")}, freeze=freeze)
    setting = replace(setting, precision="bf16-mixed", microbatches=1, reshard_after_forward=reshard)
    wanted = reference(setting, 1).gradients
    (made,) = pool.run(1, gradients_on_rank, setting, ())
    assert set(made["gradients"]) == set(wanted)
    for name, gradient in made["gradients"].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, wanted[name].float()), name
    frozen = {name for name in made["dtypes"] if name.startswith(freeze)}
    assert {made["dtypes"][name] for name in frozen} == {torch.bfloat16}
    assert {made["dtypes"][name] for name in set(made["dtypes"]) - frozen} == {torch.float32}
    trained = {"vision", "llm"}
    assert (made["copied"], made["wrapped"]) == ((set(), trained) if reshard == "always" else (trained, set()))
    assert not made["sharded"] & frozen, "what is frozen is not copied"


@pytest.mark.full
def test_a_parameter_may_be_kept_in_fp32(pool: Pool, tmp_path: Path) -> None:
    """Its layer computes in fp32, as a plain model does whose layer casts its rows to and fro."""
    setting = replace(Setting(data(tmp_path), {"llm": on(0)}, microbatches=1), precision="bf16-mixed")
    with in_dtype(torch.float32):
        model: MultimodalModel = stepping._model(setting).to(torch.bfloat16)
        precise = stepping._model(setting).get_parameter(KEPT)
        layer = model.get_submodule(KEPT.removesuffix(".weight"))
        layer.weight = torch.nn.Parameter(precise.detach().float())
        layer.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
        layer.register_forward_hook(lambda _, args, out: out.to(torch.bfloat16))
        model(steps_of(setting, 1, stepping.RankView.whole(setting.modules))[0]).loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    (made,) = pool.run(1, gradients_on_rank, setting, (KEPT,))
    (plain,) = pool.run(1, gradients_on_rank, setting, ())
    for name, gradient in made["gradients"].items():
        assert torch.equal(gradient, wanted[name].float()), name
    assert not torch.equal(made["gradients"][KEPT], plain["gradients"][KEPT])
    assert not torch.equal(made["gradients"][KEPT], made["gradients"][KEPT].to(torch.bfloat16).float())


@pytest.mark.full
@pytest.mark.parametrize("reshard", ["auto", "never"])
def test_activations_leave_beside_a_layer_in_fp32(pool: Pool, tmp_path: Path, reshard: str) -> None:
    """The layer is gathered and freed by itself, later and earlier than the block in which it lies."""
    setting = Setting(data(tmp_path), {"llm": on(0, 1, dp_shard=2)}, microbatches=1, reshard_after_forward=reshard)
    kept = ("llm.*.attention.wo.weight",)
    ranks = [pool.run(2, gradients_on_rank, setting.plus(offload=way), kept) for way in ({}, {"llm": "all"})]
    for stayed, left in zip(*ranks, strict=True):
        assert left["gradients"].keys() == stayed["gradients"].keys()
        for name, gradient in left["gradients"].items():
            assert torch.equal(gradient, stayed["gradients"][name]), name


@pytest.mark.full_cases("1f1b-layouts1", "1f1b-layouts2")
@pytest.mark.parametrize("layouts", [
    {"vision": on(0, 1), "llm": on(0, 1, pp=2)},
    {"vision": on(0), "llm": on(1, 2, tp=2)},
    {"vision": on(0, 1, 2), "llm": on(0, 1, 2, 3, dp_shard=2, dp_replicate=2)},
])  # fmt: skip
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.full)])
def test_masters_of_more_digits_than_weights(pool: Pool, tmp_path: Path, layouts: Any, schedule: str) -> None:
    """fp64 masters and fp32 weights: gradients are those of fp32 to six digits, whatever gathers and halves do."""
    setting = Setting(data(tmp_path), layouts, schedule, freeze=("vision.backbone",), precision="32-mixed")
    assert setting.storage == Storage(torch.float32, torch.float64)
    expected = reference(setting, 1)
    runs = pool.run(setting.world, stepping.steps_on_rank, setting, expected, [4], 4)
    assert max(max(run.steps[0].errors.values(), default=0.0) for run in runs) < 1e-4
    for damage in runs[0].damaged:
        assert max(max(run.damaged[damage].values(), default=0.0) for run in runs) > NOTICED, damage


def sums_on_rank(rank: int, world: int, settings: list[Setting]) -> list[dict[str, torch.Tensor]]:
    """Gradients of a step of 8 microbatches in each setting."""
    found = []
    for setting in settings:
        made = OnRank(rank, world, setting)
        made.executor.run(made.steps(setting, 8)[0], train=True)
        found.append({n: local(p.grad) for n, p in made.owned.items() if p.grad is not None})
    return found


@pytest.mark.full
def test_microbatches_are_added_up_in_fp32_whatever_the_backward(pool: Pool, tmp_path: Path) -> None:
    """Divided in two or not, a microbatch has the same gradient in bf16: sums that differ were not made in fp32."""
    one = Setting(data(tmp_path), {}, "1f1b", llm_layers=2, precision="bf16-mixed")
    layouts: list[Any] = [{"llm": on(0, 1, pp=2)}, {"vision": on(0), "llm": on(0, 1, dp_shard=2)}]
    settings = [replace(one, layouts=each) for each in layouts]
    divided = [replace(setting, schedule="zb_h1") for setting in settings]
    for sums in pool.run(2, sums_on_rank, [*settings, *divided]):
        for whole, halves in zip(sums[:2], sums[2:], strict=True):
            assert whole and set(whole) == set(halves)
            for name, gradient in whole.items():
                assert float((gradient - halves[name]).norm()) <= 1e-5 * float(gradient.norm()), name


def bytes_on_rank(rank: int, world: int, settings: list[Setting]) -> list[dict[str, int]]:
    """Bytes that this rank gives to all-gathers and sends to other ranks in a step of each setting."""
    found = []
    gather, start = getattr(dist, ALL_GATHER), transport.start_messages
    for setting in settings:
        made, moved = OnRank(rank, world, setting), {"gathered": 0, "sent": 0}

        def gathering(output: torch.Tensor, part: torch.Tensor, *args: Any, moved: Any = moved, **options: Any) -> Any:
            moved["gathered"] += part.nbytes
            return gather(output, part, *args, **options)

        def sending(wire: Any, messages: Any, *, moved: Any = moved) -> Any:
            moved["sent"] += sum(message.tensor.nbytes for message in messages if message.sends)
            return start(wire, messages)

        with patch.object(dist, ALL_GATHER, gathering), patch.object(transport, "start_messages", sending):
            made.executor.run(made.steps(setting, 2)[0], train=True)
        found.append(moved)
    return found


@pytest.mark.full
def test_gathers_and_messages_of_mixed_precision_have_half_the_bytes(pool: Pool, tmp_path: Path) -> None:
    layouts = {"vision": on(0), "llm": on(0, 1, dp_shard=2)}
    settings = [Setting(data(tmp_path), layouts, precision=name) for name in ("bf16-mixed", "32-true")]
    for mixed, whole in pool.run(2, bytes_on_rank, settings):
        assert all(mixed.values()), "each rank gathers, and sends rows or their gradients"
        assert {name: 2 * count for name, count in mixed.items()} == whole
