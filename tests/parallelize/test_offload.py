"""Activations in host memory: the same gradients bit by bit, less on the device, and no weight among what moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize import host_memory as offload_room
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.host_memory import HostMemory, SavedBlock, host_memory
from hetero_strategy.parallelize.transforms import read_transforms
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.zoo import titan_llama
from tests.model.helpers import TITAN, tokens

LENGTHS = [40, 24]


def made(offload: str | None, recompute: str | None = None, compile: str | None = None) -> Adapter:
    module = titan_llama(**TITAN | {"n_layers": 4})
    layout = ModuleLayout.from_config("llm", {"ranks": [0]}).resolved()
    how = read_transforms({"llm": {"recompute": recompute, "offload": offload, "compile": compile}})
    parallelize("llm", module, layout, None, torch.device("cpu"), seed=1, transforms=how.get("llm", {}))
    return module


def gradients(module: Adapter) -> dict[str, Tensor]:
    for _ in range(2):
        module(tokens(LENGTHS)).loss_sum.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


WAYS = [(offload, again) for offload in ("all", "every 2") for again in (None, "all", "every 2")]
COMPILED = [("all", "every 2"), ("every 2", "all")]
"""Blocks that are recomputed or not while all are on the host, and that are on the host or not while all are."""


@pytest.mark.parametrize(
    ("offload", "recompute", "compile"),
    [
        *((*way, None) for way in WAYS),
        *(pytest.param(*way, "aot_eager", marks=pytest.mark.full) for way in COMPILED),
    ],
)
def test_gradients_are_the_same_bit_by_bit(offload: str, recompute: str | None, compile: str | None) -> None:
    module = made(offload, recompute, compile)
    wanted, found = gradients(made(None, recompute, compile)), gradients(module)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    host = host_memory(module)
    assert host is not None and host.most > 0 and host.bytes == 0, "what was on the host has not gone"
    torch._dynamo.reset()


def kept(offload: str | None, recompute: str | None = None) -> tuple[int, int]:
    """Bytes that a forward keeps on the device and on the host, made in the last of two."""
    module = made(offload, recompute)
    inputs = tokens(LENGTHS)
    module(inputs).loss_sum.backward()
    with Allocations() as counted:
        loss = module(inputs).loss_sum
    host = host_memory(module)
    found = counted.now, 0 if host is None else host.bytes
    loss.backward()
    return found


def test_what_is_on_the_host_is_not_on_the_device() -> None:
    for recompute in (None, "all"):
        whole, _ = kept(None, recompute)
        for offload in ("all", "every 2"):
            device, host = kept(offload, recompute)
            assert host > 0
            assert device + host == whole
    device, host = kept("all")
    assert host > 0.8 * (device + host), "most of what blocks keep moves"
    assert kept("every 2")[1] == pytest.approx(host / 2, rel=0.05)


def test_no_weight_nor_what_is_shared_ever_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages that leave are those of no parameter, of no buffer, and each leaves once per forward."""
    monkeypatch.setattr(offload_room, "SMALLEST", 0)  # weights of this model are small
    module = made("all")
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    left: list[int] = []
    leave = HostMemory.leave

    def noted(host: HostMemory, block: SavedBlock) -> None:
        left.extend(memory.tensor.untyped_storage().data_ptr() for memory in block.alive())
        leave(host, block)

    saved: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made_without = made(None)
        made_without(tokens(LENGTHS))
    assert saved & {p.data_ptr() for p in made_without.parameters()}, "autograd does save weights"
    monkeypatch.setattr(HostMemory, "leave", noted)
    loss = module(tokens(LENGTHS)).loss_sum
    assert left and not own.intersection(left)
    loss.backward()


def test_whole_numbers_and_what_others_hold_stay() -> None:
    """Rows of another stage wait for their gradient, and what a block is given besides rows is every block's."""
    host, block = HostMemory(torch.device("cpu")), torch.nn.Linear(64, 64)
    rows, shared = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)

    def forward(rows: Tensor, shared: Tensor) -> Tensor:
        return (block(rows) * shared).index_select(0, torch.arange(1024) % 64)

    offload_room._moved(host, block, forward, True, rows, shared).sum().backward()
    assert host.most == 0
    offload_room._moved(host, block, forward, True, rows * 1, shared).sum().backward()
    assert host.most == rows.nbytes


def test_weights_that_are_freed_until_the_backward_are_those_of_then() -> None:
    """As FSDP does with those of a layer that is a unit of its own."""
    host = HostMemory(torch.device("cpu"))
    rows, weight, values = torch.ones(64, 64, requires_grad=True), torch.zeros(64, 64), torch.randn(64, 64)
    with host.holding([], first=True):
        out = rows * weight
        weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(values.nbytes)
    weight.copy_(values)
    torch._C._autograd._unsafe_set_version_counter([weight], [0])
    out.sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, values)


def test_a_microbatch_brings_back_its_own_blocks_alone() -> None:
    module = made("all")
    losses = [module(tokens(LENGTHS)).loss_sum for _ in range(2)]
    host = host_memory(module)
    assert host is not None
    block, count = host.latest, 0
    while block is not None:
        block, count = block.before, count + 1
    assert count == 4 and len(losses) == 2


def test_blocks_come_back_one_ahead_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made("all")
    order: list[Any] = []
    come, leave, reach = HostMemory.come, HostMemory.leave, SavedBlock.reach
    blocks: list[SavedBlock] = []

    def left(host: HostMemory, block: SavedBlock) -> None:
        blocks.append(block)
        leave(host, block)

    def reached(block: SavedBlock) -> None:
        if not block._here:
            order.append(("runs", blocks.index(block)))
        reach(block)

    def comes(host: HostMemory, block: SavedBlock) -> None:
        order.append(("comes", blocks.index(block)))
        come(host, block)

    monkeypatch.setattr(HostMemory, "leave", left)
    monkeypatch.setattr(HostMemory, "come", comes)
    monkeypatch.setattr(SavedBlock, "reach", reached)
    loss = module(tokens(LENGTHS)).loss_sum
    host = host_memory(module)
    assert host is not None and host.latest is not None
    host.latest.start()
    loss.backward()
    expected = [("comes", 3)]
    for number in (3, 2, 1):
        expected += [("runs", number), ("comes", number - 1)]
    assert order == [*expected, ("runs", 0)]


def test_nothing_moves_without_a_backward() -> None:
    module = made("all")
    with torch.no_grad():
        module(tokens(LENGTHS))
    host = host_memory(module)
    assert host is not None and host.most == 0


def test_a_block_that_moved_nothing_does_not_part_those_around_it() -> None:
    host = HostMemory(torch.device("cpu"))
    rows = torch.randn(64, 64, requires_grad=True)
    with host.holding([], first=True):
        rows = rows.exp()
    moved = host.latest
    with host.holding([], first=False):
        rows = rows + 1
    assert host.latest is moved
    with host.holding([], first=False):
        rows = rows.exp()
    assert host.latest is not None and host.latest.before is moved
