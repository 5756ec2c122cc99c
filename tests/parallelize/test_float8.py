"""Linear maps in float8: what is rounded, what stays as it is, and what is refused. Rounding is emulated here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hetero_strategy import errors
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.float8 import Float8, apply_float8
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.parallelize.transforms import read_transforms
from hetero_strategy.testing import Pool
from hetero_strategy.zoo import titan_llama
from tests.distributed.exact import on
from tests.distributed.scenario import Job, train
from tests.distributed.scenario import data as scenario_data
from tests.model.helpers import TITAN, tokens

CPU = torch.device("cpu")
CLASS = "Float8LinearOfAnyRows"
WAYS = ("rowwise, emulated", "rowwise_with_gw_hp, emulated")


def made(recipe: str | None, storage: Storage | None = None) -> Adapter:
    with torch.device("meta"):
        module = titan_llama(**TITAN)
    layout, how = ModuleLayout((0,)).resolved(), read_transforms({"llm": {"float8": recipe}}).get("llm", {})
    parallelize("llm", module, layout, None, CPU, seed=1, transforms=how, storage=storage or Storage())
    return module


def gradients(module: Adapter) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = module(tokens([40, 24, 7])).loss_sum
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", WAYS)
def test_products_are_rounded_a_little_and_parameters_are_the_same(recipe: str) -> None:
    rounded, plain = made(recipe), made(None)
    assert [(n, p.shape, p.dtype) for n, p in rounded.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in plain.named_parameters()
    ]
    assert all(torch.equal(a, b) for a, b in zip(rounded.parameters(), plain.parameters(), strict=True))
    (loss, found), (wanted, exact) = gradients(rounded), gradients(plain)
    assert 1e-7 < abs(loss / wanted - 1) < 1e-2
    for name, gradient in exact.items():
        assert 0 < torch.norm(found[name] - gradient) < 0.2 * torch.norm(gradient), name


def test_only_linear_maps_of_blocks_that_fit_are_rounded() -> None:
    module = made(WAYS[0])
    converted = {n for n, part in module.named_modules() if type(part).__name__ == CLASS}
    linear = {n: part for n, part in module.named_modules() if isinstance(part, nn.Linear)}
    fit = {n for n, part in linear.items() if part.in_features % 16 == part.out_features % 16 == 0}
    assert converted == {n for n in fit if ".layers." in n}
    assert {n for n in linear if ".layers." in n} - fit, "maps to few keys and values"
    assert {n for n in linear if ".layers." not in n}, "the head"
    block = next(iter(module.blocks().values()))
    odd, kept = nn.Linear(32, 24), nn.Linear(32, 32)
    block.odd, block.kept, block.fits = odd, kept, nn.Linear(32, 32)
    apply_float8(module, Float8(emulated=True), 1, [kept])
    assert block.odd is odd and block.kept is kept and type(block.fits).__name__ == CLASS
    block.halves = nn.Linear(32, 16)
    apply_float8(module, Float8(emulated=True), 2)
    assert type(block.halves) is nn.Linear, "of which each of two ranks would have 8"


@pytest.mark.parametrize(
    ("how", "tp", "message"),
    [
        (Float8(), 1, "needs GPUs of compute capability 8.9 .* here is cpu; .*'rowwise, emulated'"),
        (Float8(emulated=True), 64, "none of its blocks .* over tp=64, are multiples of 16"),
    ],
)
def test_what_cannot_be_is_refused(how: Float8, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"float8 of 'llm'.*{message}"):
        how.check("llm", titan_llama(**TITAN), ModuleLayout(tp, tp=tp).resolved(), torch.bfloat16, CPU)


def test_without_torchao_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    layout = ModuleLayout(1).resolved()
    with pytest.raises(ConfigError, match=r"needs torchao, which is not installed: .* 'hetero-strategy\[float8\]'"):
        Float8().check("llm", titan_llama(**TITAN), layout, torch.bfloat16, CPU)


def trained(rank: int, world: int, job: Job) -> list[float]:
    return train(job).losses


@pytest.mark.full  # a piece of it is in tests/distributed/test_pipeline_options.py
def test_a_run_in_float8_ends_near_one_without(pool: Pool, tmp_path: Path) -> None:
    """With tensor parallelism too, where a row's scale is that of each rank's part."""
    folder = str(scenario_data(tmp_path))
    layouts = {"vision": on(0, 1), "audio": on(0, 1), "llm": on(0, 1, tp=2)}
    strategy = {"transforms": {name: {"float8": WAYS[0]} for name in ("vision", "llm")}}
    plain, rounded = (
        pool.run(2, trained, Job(folder, layouts, 12, precision="32-true", strategy=s, capture=False))[0]
        for s in ({}, strategy)
    )
    assert len(plain) == len(rounded) == 12
    assert plain != rounded
    assert rounded == pytest.approx(plain, rel=0.02)
