"""A checkpoint of one pipeline loads into any other, bit for bit, shared weights and optimizer state included."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten

from hetero_strategy.checkpoint.folder import describe
from hetero_strategy.checkpoint.optimizer_state import room_for_states
from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import CheckpointError
from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.materialize import materialize
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.strategy.assembly import _take_parts
from hetero_strategy.testing import Pool
from tests.parallelize.pieces import MAKE, even_split

ONE: dict[str, Any] = {"ranks": 1, "dp_shard": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 dp2": {"ranks": 4, "pp": 2, "dp_shard": 2, "split": [3, 1]},
    "pp2 v tp2": {"ranks": 4, "pp": 2, "tp": 2, "vpp": 2, "pp_style": "v"},
    "dp3": {"ranks": 3, "dp_shard": 3},
    "pp3": {"ranks": 3, "pp": 3},
    "one": ONE,
}


class Factored(torch.optim.Optimizer):
    """Its state is a row of a matrix, as Adafactor's is: of another shape than the parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.dim() == 2:
                row = p.grad.square().mean(dim=0)
                if isinstance(row, DTensor):
                    row = row.redistribute(placements=[Replicate()] * row.device_mesh.ndim)
                state = self.state[p]
                state["row"] = state["row"].add_(row) if "row" in state else row
                p.sub_(0.1 * p.grad * torch.rsqrt(state["row"] + 1))


def _state(
    rank: int, world: int, kind: str, config: dict[str, Any], seed: int, factored: bool = False
) -> tuple[Adapter, TrainingState, Any]:
    layout = ModuleLayout.from_config("m", config).resolved()
    module = MAKE[kind]()
    placement = place({"m": layout}, world)
    registry = GroupRegistry(placement, [], "cpu")
    where = placement.coordinate("m", rank)
    if where is not None:
        split = layout.split or even_split(len(module.blocks()), layout.pipeline.stages)
        device = torch.device("cpu")
        parallelize("m", module, layout, registry.mesh("m"), device, seed=seed, split=split, pp_rank=where.pp)
    optimizer = _optimizer(module, factored)
    return module, TrainingState("model", {"m": module}, group=registry.background), optimizer


def _optimizer(module: Adapter, factored: bool) -> torch.optim.Optimizer:
    return Factored(module.parameters()) if factored else torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)


def _train(module: Adapter, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        if not parameter.is_meta and parameter.requires_grad:
            parameter.grad = parameter.detach() * 2 + 1
    optimizer.step()


def save(rank: int, world: int, kind: str, config: dict[str, Any], path: str, factored: bool = False) -> list[str]:
    module, state, optimizer = _state(rank, world, kind, config, 3, factored)
    _train(module, optimizer)
    tensors = state.model_tensors()
    state.save({"state_dict": tensors, "optimizer_states": [state.optimizer_state(optimizer)]}, Path(path))
    return sorted(tensors)


def load(rank: int, world: int, kind: str, config: dict[str, Any], path: str) -> list[dict[str, np.ndarray]]:
    module, state, optimizer = _state(rank, world, kind, config, seed=8)
    _load(state, Path(path), optimizer)
    found = _everything(module, optimizer)
    for value in (*module.parameters(), *(x for of in optimizer.state.values() for x in of.values())):
        value.detach().zero_()
    _load_renamed(module, optimizer, state, Path(path))
    return [found, _everything(module, optimizer)]


def _load_renamed(module: Adapter, optimizer: torch.optim.Optimizer, state: TrainingState, path: Path) -> None:
    """As on_load_checkpoint and load_state_dict of a LightningModule that calls its model otherwise now."""
    holder = nn.Module()
    holder.add_module("net", nn.ModuleDict({"m": module}))
    holder.net.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[union-attr]
    renamed = TrainingState("net", {"m": module}, group=state._group)
    checkpoint = renamed.load(path, [optimizer], in_place=False)
    holder.load_state_dict({_renamed(name): value for name, value in checkpoint["state_dict"].items()})
    for of in checkpoint["optimizer_states"]:
        of["state"] = {_renamed(name): value for name, value in of["state"].items()}
    renamed.load_optimizers([optimizer], checkpoint["optimizer_states"], str(path))


def _renamed(name: str) -> str:
    return name.replace("model.", "net.", 1)


def _load(state: TrainingState, path: Path, optimizer: torch.optim.Optimizer) -> None:
    checkpoint = state.load(path, [optimizer])
    state.load_optimizers([optimizer], checkpoint["optimizer_states"], str(path))


def go_on(rank: int, world: int, config: dict[str, Any], path: str) -> dict[str, np.ndarray]:
    module, state, optimizer = _state(rank, world, "titan", config, 8, factored=True)
    _load(state, Path(path), optimizer)
    _train(module, optimizer)
    return _everything(module, optimizer)


def _everything(module: Adapter, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in module.named_parameters():
        if not parameter.is_meta:
            found[name] = _full(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = _full(value)
    return found


def _full(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().numpy()


@pytest.mark.full_cases(
    "tied-pp2 dp2-dp3", "tied-pp3-pp2 v tp2", "titan-pp2 dp2-pp2 v tp2", "whisper-pp2 v tp2-pp2 dp2"
)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("titan", "pp2 dp2", "pp2 v tp2"),
        ("titan", "one", "pp3"),
        ("tied", "pp2 dp2", "dp3"),
        ("tied", "dp3", "pp3"),
        ("tied", "pp3", "pp2 v tp2"),
        ("whisper", "pp2 v tp2", "pp2 dp2"),
    ],
)
def test_checkpoints_move_between_pipelines(pool: Pool, tmp_path: Path, kind: str, saved: str, loaded: str) -> None:
    module = MAKE[kind]()
    materialize(module, 3, name="m")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
    _train(module, optimizer)
    expected = _everything(module, optimizer)
    path = str(tmp_path / "checkpoint.ckpt")
    names = pool.run(LAYOUTS[saved]["ranks"], save, kind, LAYOUTS[saved], path)
    assert set().union(*names) == {f"model.m.{n}" for n in module.state_dict()}
    results = pool.run(LAYOUTS[loaded]["ranks"], load, kind, LAYOUTS[loaded], path)
    for found in itertools.chain.from_iterable(results):
        for name, value in found.items():
            assert np.array_equal(value, expected[name]), name
    for found in zip(*results, strict=True):
        assert set().union(*found) == expected.keys()


@pytest.mark.full
@pytest.mark.distributed
def test_states_of_another_shape_than_their_parameter_go_on(pool: Pool, tmp_path: Path) -> None:
    module = MAKE["titan"]()
    materialize(module, 3, name="m")
    optimizer = _optimizer(module, factored=True)
    _train(module, optimizer)
    _train(module, optimizer)
    expected = _everything(module, optimizer)
    path = str(tmp_path / "checkpoint.ckpt")
    pool.run(3, save, "titan", LAYOUTS["dp3"], path, True)
    for found in pool.run(4, go_on, LAYOUTS["pp2 dp2"], path):
        for name, value in found.items():
            assert np.allclose(value, expected[name], rtol=1e-5, atol=1e-6), name


def test_what_is_loaded_takes_the_place_of_what_an_optimizer_had(tmp_path: Path) -> None:
    """But not of the kernels that it runs."""
    module = MAKE["titan"]()
    materialize(module, 3, name="m")
    state, optimizer = TrainingState("model", {"m": module}, group=None), _optimizer(module, factored=False)
    first = next(module.parameters()).requires_grad_(False)
    _train(module, optimizer)
    path = tmp_path / "checkpoint.ckpt"
    state.save({"state_dict": state.model_tensors(), "optimizer_states": [state.optimizer_state(optimizer)]}, path)
    other = torch.optim.AdamW(module.parameters(), lr=0.5, foreach=True)
    first.requires_grad_()
    _train(module, other)
    assert first in other.state
    loaded = state.load(path, [other])
    state.load_optimizers([other], loaded["optimizer_states"], str(path))
    assert other.state.keys() == {*module.parameters()} - {first}
    (group,) = other.param_groups
    assert group["lr"] == 0.1 and group["foreach"] is True


class Odd(torch.optim.Optimizer):
    """Its state is of everything but plain tensors."""

    more: dict[Any, Any] = {}

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            factors = [torch.full((n,), n + 0.5, dtype=torch.float64) for n in p.shape]
            self.state[p] = {
                "step": 7, "large": 1 << 60, "share": 0.1, "warm": True, "nothing": None, "empty": [], "none": (),
                "factors": factors, "pairs": ((3, factors[0]), [None, [p.detach() * 2] * 11]), **self.more,
            }  # fmt: skip


def test_numbers_and_lists_in_the_state_of_an_optimizer_come_back_as_they_were(tmp_path: Path) -> None:
    states = []
    for seed in (3, 8):
        module = MAKE["titan"]()
        materialize(module, seed, name="m")
        optimizer, state = Odd(module.parameters()), TrainingState("model", {"m": module}, group=None)
        if seed == 3:
            optimizer.step()
            checkpoint = {"state_dict": state.model_tensors(), "optimizer_states": [state.optimizer_state(optimizer)]}
            state.save(checkpoint, tmp_path / "c")
        else:
            _load(state, tmp_path / "c", optimizer)
        states.append([tree_flatten(dict(sorted(of.items()))) for of in optimizer.state.values()])
    for (expected, shape), (found, as_found) in zip(*states, strict=True):
        assert shape == as_found and [*map(type, expected)] == [*map(type, found)]
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class Subclass(torch.Tensor):
    """Of plain memory, but its class means something."""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"shards": {"a": 1}}, "optimizer 0 has a state 'shards' of model.m.* which is or holds a dict"),
        ({"several": [1, "two"]}, "optimizer 0 has a state 'several' of model.m.* which is or holds a str"),
        ({"narrow": torch.ones(2).as_subclass(Subclass)}, "'narrow' of model.m.* which is a Subclass"),
        ({"a.b": 1}, "'a.b' of model.m.* whose name is no plain word"),
    ],
)
def test_states_of_an_optimizer_without_a_form_are_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    module = MAKE["titan"]()
    materialize(module, 3, name="m")
    optimizer, state = Odd(module.parameters()), TrainingState("model", {"m": module}, group=None)
    optimizer.more = more
    optimizer.step()
    with pytest.raises(CheckpointError, match=said):
        state.save({"state_dict": {}, "optimizer_states": [state.optimizer_state(optimizer)]}, tmp_path / "c")
    optimizer.state.clear()
    optimizer.state["together"] = 5  # type: ignore[index]
    with pytest.raises(CheckpointError, match="optimizer 0 has a state 'together' which is of no parameter"):
        state.save({"state_dict": {}, "optimizer_states": [state.optimizer_state(optimizer)]}, tmp_path / "c")


def _saved(path: Path, optimizer: str, **state: torch.dtype) -> None:
    """A run's checkpoint in fp32, whose states of these names have these dtypes."""
    module = MAKE["titan"]()
    materialize(module, 3, name="m")
    made = getattr(torch.optim, optimizer)(module.parameters(), foreach=False)
    _train(module, made)
    for of in made.state.values():
        of.update({key: of[key].to(dtype) for key, dtype in state.items()})
    saving = TrainingState("model", {"m": module}, group=None)
    saving.save({"state_dict": saving.model_tensors(), "optimizer_states": [saving.optimizer_state(made)]}, path)


def _names(module: nn.Module) -> dict[int, str]:
    return {id(p): f"model.m.{fqn}" for fqn, p in module.named_parameters()}


def test_states_take_the_precision_of_their_parameter_unless_they_had_one_of_their_own(tmp_path: Path) -> None:
    _saved(tmp_path / "c", "AdamW", exp_avg_sq=torch.float64)
    module = MAKE["titan"]()
    materialize(module, 8, name="m")
    module.double()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    _load(TrainingState("model", {"m": module}, group=None), tmp_path / "c", optimizer)
    _train(module, optimizer)
    (dtypes,) = {tuple((k, v.dtype) for k, v in of.items()) for of in optimizer.state.values()}
    assert dict(dtypes) == {"step": torch.float32, "exp_avg": torch.float64, "exp_avg_sq": torch.float64}
    module.bfloat16()
    optimizer, stored = torch.optim.AdamW(module.parameters()), describe(tmp_path / "c").tensors
    empty = room_for_states(0, optimizer, stored, _names(module))
    (dtypes,) = {tuple((k, v.dtype) for k, v in of.items()) for of in empty.values()}
    assert dict(dtypes) == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float64}


def test_states_lie_beside_their_parameter_and_counters_where_kernels_read_them(tmp_path: Path) -> None:
    """The meta device stands for one that is not here."""
    _saved(tmp_path / "c", "Adafactor")
    module = MAKE["titan"]().to("meta")
    optimizer, stored = torch.optim.Adafactor(module.parameters()), describe(tmp_path / "c").tensors
    for fused, step in ((False, "cpu"), (True, "meta")):
        optimizer.param_groups[0]["fused"] = fused
        empty = room_for_states(0, optimizer, stored, _names(module))
        where = {key: value.device.type for of in empty.values() for key, value in of.items()}
        assert where == dict.fromkeys(("row_var", "col_var", "variance"), "meta") | {"step": step}


def test_what_is_loaded_takes_the_place_of_what_was(tmp_path: Path) -> None:
    """In an optimizer that has gone on: a parameter without a gradient before the save has no state again."""
    module = MAKE["titan"]()
    materialize(module, 3, name="m")
    optimizer, first = _optimizer(module, factored=False), next(module.parameters())
    state = TrainingState("model", {"m": module}, group=None)
    first.requires_grad_(False)
    _train(module, optimizer)
    saved = {"state_dict": state.model_tensors(), "optimizer_states": [state.optimizer_state(optimizer)]}
    state.save(saved, tmp_path / "c")
    expected = _everything(module, optimizer)
    first.requires_grad_()
    _train(module, optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    assert first in optimizer.state
    _load(state, tmp_path / "c", optimizer)
    assert first not in optimizer.state and optimizer.param_groups[0]["lr"] == 0.1
    found = _everything(module, optimizer)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


def test_random_numbers_go_on_where_they_were_saved(tmp_path: Path) -> None:
    """Those of the process, of which a person's own code draws."""

    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.random()), random.random()]

    state = TrainingState("model", {}, group=None)
    state.save({"state_dict": {}}, tmp_path / "c")
    expected = drawn()
    assert drawn() != expected
    state.load(tmp_path / "c", [])
    assert drawn() == expected
