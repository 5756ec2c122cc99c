"""Rows across edges on real processes: transfers of several microbatches, and the autograd exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero_strategy.boundary.route import Route, RowIndex, Side, Transfer, route
from hetero_strategy.boundary.transport import Boundary, Channel, Transport, cross, exchange
from hetero_strategy.plan.step_plan import EdgeBlocks
from hetero_strategy.testing import Pool

WIDTH = 3
CPU = torch.device("cpu")


def array(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


BLOCKS = EdgeBlocks(array(0, 1, 0), array(2, 0, 0), array(0, 0, 0), array(0, 4, 9), array(3, 4, 2))
"""Two instances of 5 and 4 rows fill 9 of the 12 rows of one instance."""
SOURCE = Side(np.array([[0], [1]]), array(5, 4))
TARGETS = {"one rank": Side(np.array([[2]]), array(12)), "replicas": Side(np.array([[1, 2]]), array(12))}
"""Of the replicas one has a source's rows already; what comes from the other source enters in halves, then crosses over
(second hop)."""


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float64))


def source_rows(rank: int, seed: int = 0) -> torch.Tensor:
    return values((5, 4, 0)[rank], WIDTH, seed=10 * seed + rank)


def arrived(rank: int, target: str, seed: int = 0) -> torch.Tensor:
    """What a rank must get, written from the blocks by hand."""
    if rank not in TARGETS[target].instances:
        return torch.zeros(0, WIDTH, dtype=torch.float64)
    first, second = source_rows(0, seed), source_rows(1, seed)
    return torch.cat([first[2:5], second, first[:2]])


def channel(tag: int = 0, dtype: torch.dtype = torch.float64) -> Channel:
    return Channel(dist.group.WORLD, dist.group.WORLD, tag, WIDTH, dtype, CPU)


def transport(*transfers: Transfer[np.ndarray], over: Channel) -> Transport:
    index = RowIndex()
    packed = [(over, index.pack(transfer)) for transfer in transfers]
    return Transport(packed, torch.from_numpy(index.array()))


def routed(rank: int, target: str) -> Route:
    return route(BLOCKS, SOURCE, TARGETS[target], rank)


def autograd(rank: int, world: int, target: str) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Rows and gradients of two exchanges, the second backward first."""
    x = [source_rows(rank, seed).requires_grad_() for seed in (0, 1)]
    boundary = Boundary(routed(rank, target), channel(0), channel(1))
    y = [exchange(one * 2, boundary) for one in x]
    for seed in (1, 0):
        y[seed].backward(gradient(rank, target, seed))
    return [(rows.detach(), leaf.grad) for rows, leaf in zip(y, x, strict=True)]


def gradient(rank: int, target: str, seed: int) -> torch.Tensor:
    """Replicas have equal gradients."""
    return values(len(arrived(rank, target)), WIDTH, seed=77 + seed)


@pytest.mark.parametrize("target", TARGETS)
def test_exchange_moves_rows_and_gradients(pool: Pool, target: str) -> None:
    for rank, steps in enumerate(pool.run(3, autograd, target)):
        for seed, (rows, grad) in enumerate(steps):
            assert torch.equal(rows, 2 * arrived(rank, target, seed))
            g = gradient(2, target, seed)  # a row's gradient comes once, however many replicas have it
            expected = [torch.cat([g[7:9], g[0:3]]), g[3:7], torch.zeros(0, WIDTH)][rank]
            assert torch.equal(grad, 2 * expected)


def in_order(rank: int, world: int, target: str, calls: str, adds: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two microbatches of one channel; G gives, S starts, T takes, digits say which microbatch."""
    transfer = routed(rank, target).forward
    made = transport(transfer, transfer, over=channel())
    found = {}
    for call, numbers in (part.split(":") for part in calls.split()):
        for number in map(int, numbers):
            if call == "G":
                made.give(number, source_rows(rank, number))
            if call == "T":
                base = torch.ones(transfer.outputs, WIDTH, dtype=torch.float64)
                found[number] = made.take(number, base if adds else None)
                assert not adds or found[number] is base
        if call == "S":
            made.start([[*map(int, numbers)]])
    made.drain()
    assert not (made._given or made._arriving or made._sent), "buffers of a transfer that is over are kept"
    return found[0], found[1]


@pytest.mark.parametrize("adds", [False, True], ids=["new rows", "added rows"])
@pytest.mark.parametrize("calls", ["G:0 S:0 T:0 G:1 S:1 T:1", "G:01 S:0 S:1 T:01", "G:01 S:01 T:10"])
@pytest.mark.parametrize("target", TARGETS)
def test_transfers_one_by_one_and_together(pool: Pool, target: str, calls: str, adds: bool) -> None:
    for rank, rows in enumerate(pool.run(3, in_order, target, calls, adds)):
        for seed in (0, 1):
            assert torch.equal(rows[seed], arrived(rank, target, seed) + adds)


def two_directions(rank: int, world: int) -> dict[str, Any]:
    """Both ranks are on both sides and swap their rows; then an edge whose target has rows that nothing fills."""
    blocks = EdgeBlocks(array(1, 0), array(0, 0), array(0, 1), array(0, 0), array(2, 3))
    one = np.array([[0], [1]])
    swap = route(blocks, Side(one, array(3, 2)), Side(one, array(2, 3)), rank)
    mine = values(3 - rank, WIDTH, seed=rank)
    return {
        "swapped": cross(swap.forward, channel(), mine),
        "back": cross(swap.backward, channel(1), values(2 + rank, WIDTH, seed=1 - rank)),
        "narrow": cross(swap.forward, channel(2, torch.float32), mine).dtype,
    }


def test_ranks_of_both_sides(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(2, two_directions)):
        assert torch.equal(found["swapped"], values(2 + rank, WIDTH, seed=1 - rank))
        assert torch.equal(found["back"], values(3 - rank, WIDTH, seed=rank))
        assert found["narrow"] == torch.float32  # as the channel says, whatever the module makes


def staying() -> Route:
    blocks = EdgeBlocks(array(0), array(0), array(0), array(3), array(4))
    side = Side(np.array([[0]]), array(4))
    return route(blocks, side, Side(np.array([[0]]), array(9)), 0)


def here() -> Channel:
    return Channel(None, None, 0, WIDTH, torch.float64, CPU)


def test_rows_that_stay_are_not_copied() -> None:
    rows, base = values(4, WIDTH), torch.ones(4, WIDTH, dtype=torch.float64)
    made = transport(staying().forward, staying().forward, over=here())
    made.give(0, rows)
    made.give(1, rows)
    assert made.take(0).data_ptr() == rows.data_ptr()
    assert made.take(1, base) is base and torch.equal(base, rows + 1)
    assert torch.equal(rows, values(4, WIDTH)), "what was sent is not changed"


def test_exchange_of_rows_that_stay() -> None:
    rows = values(4, WIDTH).requires_grad_()
    moved = exchange(rows, Boundary(staying(), here(), here()))
    assert moved.data_ptr() == rows.data_ptr() and moved is not rows
    (moved * values(4, WIDTH, seed=1)).sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, values(4, WIDTH, seed=1))
    with pytest.raises(RuntimeError, match="modified inplace"):
        exchange(rows, Boundary(staying(), here(), here())).mul_(2)


def test_a_rank_whose_rows_need_no_gradient_takes_part_in_backward() -> None:
    """Or those that send and receive its gradients would wait; unless nobody's come back."""
    rows = values(4, WIDTH)
    assert exchange(rows, Boundary(staying(), here(), here())).requires_grad
    assert not exchange(rows.clone().requires_grad_(), Boundary(staying(), here(), None)).requires_grad
    with torch.no_grad():
        assert not exchange(rows, Boundary(staying(), here(), here())).requires_grad


def test_second_derivatives_are_refused() -> None:
    rows = values(4, WIDTH).requires_grad_()
    moved = exchange(rows, Boundary(staying(), here(), here()))
    (first,) = torch.autograd.grad(moved.pow(3).sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_rows_that_nobody_fills_are_zero() -> None:
    """A gradient of source rows that this microbatch of the target does not read."""
    blocks = EdgeBlocks(array(0), array(1), array(0), array(0), array(2))
    one = np.array([[0]])
    made = route(blocks, Side(one, array(4)), Side(one, array(2)), 0)
    gradient = cross(made.backward, here(), torch.ones(2, WIDTH, dtype=torch.float64))
    assert gradient.sum(1).tolist() == [0, WIDTH, WIDTH, 0]


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(RuntimeError, match="4 rows on this rank, the module made 5"):
        transport(staying().forward, over=here()).give(0, values(5, WIDTH))
