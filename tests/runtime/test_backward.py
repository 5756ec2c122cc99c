"""One stage's backward in two halves against autograd's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from hetero_strategy.runtime.backward import Roots, inputs_first, whole
from hetero_strategy.zoo import hf_llama
from tests.model.helpers import LLAMA, ready, tokens

Stage = Callable[..., Sequence[torch.Tensor]]


class Residual(nn.Module):
    """Two blocks whose inputs are used twice, then a view and a loss beside it."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, *rows: torch.Tensor) -> Sequence[torch.Tensor]:
        hidden = torch.cat(rows)
        hidden = hidden + torch.tanh(self.first(self.norm(hidden)))
        hidden = hidden + self.second(hidden).relu()
        return hidden[1:], hidden.square().sum()


class Recomputed(Residual):
    def forward(self, *rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return checkpoint(super().forward, *rows, use_reentrant=False)  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One weight in two places, and an input that reaches only one of them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor, later: torch.Tensor) -> Sequence[torch.Tensor]:
        hidden = self.linear(rows).sigmoid() + later
        return (self.linear(hidden),)


class Embedded(nn.Module):
    """A first stage: a weight that no input reaches."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(5, width)
        self.linear = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        words = self.table(torch.arange(len(rows)) % 5)
        return (self.linear(words * 2 + rows.flip(0)),)


class Tied(nn.Module):
    """A first and last stage in one, whose embedding is its head."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(5, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)))

    def forward(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        words = self.table(torch.arange(8) % 5)
        hidden = self.blocks(words.index_copy(0, torch.arange(len(rows)), rows))
        return hidden, (hidden @ self.table.weight.T).logsumexp(-1).sum()


class Added(nn.Module):
    """Weights that are added up before they are used, so that both have one gradient; as have rows and a table."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.weight, self.more = (nn.Parameter(torch.randn(width, width)) for _ in range(2))
        self.table, self.other = (nn.Parameter(torch.randn(6, width)) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        hidden = self.first(rows + self.table + self.other)
        return (nn.functional.linear(hidden, self.weight + self.more),)


class Overwrites(nn.Module):
    """A scale whose backward is somebody's own, and writes what it gives over what it got."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, weight):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(rows, weight)
            return rows * weight

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            rows, weight = ctx.saved_tensors
            of_weight = (gradient * rows).sum(0)
            return gradient.mul_(weight), of_weight

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(width, width), nn.Parameter(torch.randn(width))

    def forward(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return (torch.tanh(self.Scale.apply(self.linear(rows), self.weight)),)


def made(kind: type[nn.Module], inputs: int) -> tuple[nn.Module, list[torch.Tensor], list[nn.Parameter]]:
    torch.manual_seed(3)
    stage = kind().double()
    leaves = [torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(inputs)]
    return stage, leaves, list(stage.parameters())


def roots(stage: Stage, leaves: Sequence[torch.Tensor]) -> Roots:
    torch.manual_seed(4)
    return [(get_gradient_edge(out), torch.randn_like(out)) for out in stage(*leaves)]


CASES = [(Residual, 1), (Residual, 2), (Recomputed, 1), (Shared, 2), (Embedded, 1), (Tied, 1), (Overwrites, 1)]


@pytest.mark.parametrize(("kind", "inputs"), CASES)
def test_two_halves_are_the_whole(kind: type[nn.Module], inputs: int) -> None:
    stage, leaves, weights = made(kind, inputs)
    whole(roots(stage, leaves))
    expected = [x.grad for x in (*leaves, *weights)]
    stage, leaves, weights = made(kind, inputs)
    later = inputs_first(roots(stage, leaves), leaves, weights)
    early = weights[: {Shared: 2, Tied: 1}.get(kind, 0)]  # those in several places
    assert {id(w) for w in weights if w.grad is not None} == {id(w) for w in early}, "I makes no gradients of weights"
    for leaf, gradient in zip(leaves, expected, strict=False):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)
    later()
    for weight, gradient in zip(weights, expected[len(leaves) :], strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-12, atol=1e-12)


def test_weights_add_up_over_microbatches_in_any_order() -> None:
    stage, _, weights = made(Residual, 1)
    torch.manual_seed(5)
    given = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 7, 2)]
    for rows in given:
        whole(roots(stage, [rows.clone().requires_grad_()]))
    expected = [w.grad.clone() for w in weights if w.grad is not None]
    stage.zero_grad()
    leaves = [rows.clone().requires_grad_() for rows in given]
    waiting = [inputs_first(roots(stage, [leaf]), [leaf], weights) for leaf in leaves]
    for number in (1, 2, 0):
        waiting[number]()
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-12, atol=1e-12)


def test_leaves_that_are_added_up_have_gradients_of_their_own() -> None:
    stage, leaves, weights = made(Added, 1)
    whole(roots(stage, leaves))
    expected = [x.grad for x in (*leaves, *weights)]
    stage, leaves, weights = made(Added, 1)
    inputs_first(roots(stage, leaves), leaves, weights)()
    gradients = [x.grad for x in (*leaves, *weights) if x.grad is not None]
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == len(expected) == 7
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)


def test_sums_over_ranks_that_are_to_come_stay_so() -> None:
    """Of two weights of a tensor-parallel module that are added up: no rank waits for another in a backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        placements = (Shard(0), Replicate(), Replicate())
        rows, *weights = (
            nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [one], run_check=False)) for one in placements
        )
        out = nn.functional.linear(rows, weights[0] + weights[1])
        with CommDebugMode() as said:
            inputs_first([(get_gradient_edge(out), torch.ones_like(out))], [rows], weights)()
        assert not said.get_total_counts()
        parts = [weight.grad.to_local() for weight in weights if isinstance(weight.grad, DTensor)]
        assert [weight.grad.placements for weight in weights] == [(Partial(),), (Partial(),)]  # type: ignore[union-attr]
        assert parts[0].data_ptr() != parts[1].data_ptr()
        torch.testing.assert_close(*parts, rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


def test_frozen_weights_get_no_gradient() -> None:
    stage, leaves, weights = made(Residual, 1)
    whole(roots(stage, leaves))
    expected = leaves[0].grad
    for frozen in (weights[:2], weights):
        stage, leaves, weights = made(Residual, 1)
        for weight in weights[: len(frozen)]:
            weight.requires_grad_(False)
        later = inputs_first(roots(stage, leaves), leaves, [w for w in weights if w.requires_grad])
        torch.testing.assert_close(leaves[0].grad, expected, rtol=1e-12, atol=1e-12)
        later()
        assert [w.grad is None for w in weights] == [i < len(frozen) for i in range(len(weights))]


def test_without_inputs_everything_is_for_later() -> None:
    """A microbatch of text in a first stage: nothing came in that trains."""
    stage, leaves, weights = made(Residual, 1)
    rows = leaves[0].detach()
    whole(roots(stage, [rows]))
    expected = [w.grad.clone() for w in weights if w.grad is not None]
    stage.zero_grad()
    later = inputs_first(roots(stage, [rows]), [], weights)
    assert all(w.grad is None for w in weights)
    later()
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)


def test_an_input_that_nothing_reads_gets_no_gradient() -> None:
    stage, leaves, weights = made(Residual, 1)
    unread = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    inputs_first(roots(stage, leaves), [*leaves, unread], weights)()
    assert unread.grad is None and leaves[0].grad is not None


def test_nothing_to_do() -> None:
    whole([])
    inputs_first([], [], [])()


def test_a_head_in_chunks_is_computed_again_once() -> None:
    """In I, which gives its weights their gradients too: in W each would have it computed once more."""
    whole_model = ready(hf_llama(**LLAMA))
    last = whole_model.stage([*whole_model.blocks()][-1:], first=False, last=True).double()
    calls = list[str]()
    last.model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    (head, *others), inputs = last.recomputed_parts(), tokens([5, 3])
    rows = torch.randn(8, last.hidden_width, dtype=torch.float64, requires_grad=True)
    weights = [p for p in last.parameters() if p.requires_grad]
    output = last(inputs, hidden=rows)
    later = inputs_first([(get_gradient_edge(output.loss_sum), torch.ones((), dtype=torch.float64))], [rows], weights,
                         last.recomputed_parts())  # fmt: skip
    assert len(calls) == 2 and all(p.grad is not None for part in (head, *others) for p in part.parameters())
    later()
    assert len(calls) == 2 and all(p.grad is not None for p in weights)
