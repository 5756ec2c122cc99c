"""Send rows to the experts that a router chose for them, and their results back; no row is dropped.

Experts may lie on several ranks, in order. Example of 2 ranks with 2 experts each, seen by rank 0 with 3 rows and one
choice for each::

    chosen 3 0 1  -> order 1 2 0: rows of experts 0 1 | 3, of which 2 stay and 1 is sent to rank 1
    arrived       -> rank 0's rows of experts 0 1, then rank 1's rows of experts 0 0 1: by expert 0 2 3 | 1 4

Every permutation has a gather for its backward, so gradients are sums in one order on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetero_strategy.model.all_to_all import all_to_all, start_all_to_all

Compute = Callable[[Tensor, Tensor], Tensor]
"""A function of rows ``[n, width]``, sorted by expert, and the end of each expert's rows, int32 ``[experts]``, that
returns the experts' results ``[n, width]``."""


@dataclass(frozen=True)
class Exchange:
    """The ranks among which a layer's experts are divided.

    Args:
        group: name of their process group, which carries nothing else.
        size: number of its ranks, above 1; it divides the number of experts.
    """

    group: str
    size: int


class ExpertRoute(NamedTuple):
    """The ways of one layer's rows in one microbatch."""

    order: Tensor
    """int64 ``[T * k]``: choices sorted by expert."""
    ends: Tensor
    """int32 ``[experts]``: ends of the rows of this rank's experts."""
    by_expert: Tensor | None = None
    """int64 ``[arrived]``: arrived rows sorted by expert; None: no rows travel."""
    sent: tuple[int, ...] = ()
    """Rows sent to each rank."""
    received: tuple[int, ...] = ()
    """Rows received from each rank."""


def routed(
    rows: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: int,
    compute: Compute,
    exchange: Exchange | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Return the weighted sum of each row's experts, ``[T, width]``.

    With an exchange it is a collective of its ranks, forward and backward, and one host sync.

    Args:
        rows: ``[T, width]``; T may differ between ranks, and be 0.
        chosen: numbers of each row's experts, int64 ``[T, k]``.
        weights: weights of their results, ``[T, k]``.
        experts: number of experts on all ranks.
        compute: the experts of this rank.
        exchange: the ranks that share the experts; None: this rank has all of them.
        meanwhile: a function that runs, with an exchange, once rows have started to travel; its backward runs while
            gradients travel.
    """
    if exchange is not None:
        return _routed_over_ranks(rows, chosen, weights, experts, compute, exchange, meanwhile)
    route = _route_here(chosen, experts)
    return combine(compute(dispatch(rows, route), route.ends), weights, route)


@torch.compiler.disable
def _routed_over_ranks(
    rows: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: int,
    compute: Compute,
    exchange: Exchange,
    meanwhile: Callable[[], None] | None,
) -> Tensor:
    """Compute :func:`routed` outside of compiled code, since sizes come from the host."""
    kept = _kept.get()
    route = next(kept.routes) if kept is not None and kept.again else _route_over_ranks(chosen, experts, exchange)
    if kept is not None and not kept.again:
        kept.noted.append(route)
    return combine(compute(dispatch(rows, route, exchange, meanwhile), route.ends), weights, route, exchange)


def dispatch(
    rows: Tensor,
    route: ExpertRoute,
    exchange: Exchange | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Return rows ``[n, width]`` of this rank's experts, sorted by expert, from rows ``[T, width]``."""
    spread = _Spread.apply(rows, route.order)
    if exchange is None or route.by_expert is None:
        return spread
    finish = start_all_to_all(spread, route.sent, route.received, exchange.group)
    del spread
    if meanwhile is not None:
        meanwhile()
    arrived = finish()
    del finish  # with the rows that were sent
    return _Permuted.apply(arrived, route.by_expert, _inverse(route.by_expert))


def combine(results: Tensor, weights: Tensor, route: ExpertRoute, exchange: Exchange | None = None) -> Tensor:
    """Return weighted sums ``[T, width]`` of results ``[n, width]``, which lie as :func:`dispatch` put their rows."""
    if exchange is not None and route.by_expert is not None:
        results = _Permuted.apply(results, _inverse(route.by_expert), route.by_expert)
        results = all_to_all(results, route.received, route.sent, exchange.group)
    own = _Permuted.apply(results, _inverse(route.order), route.order).unflatten(0, weights.shape)
    return (own * weights[..., None]).sum(1).to(results.dtype)


def _route_here(chosen: Tensor, experts: int) -> ExpertRoute:
    """Sort choices by expert; no host sync."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    numbers = torch.arange(experts, device=flat.device)
    return ExpertRoute(order, torch.searchsorted(flat[order], numbers, right=True, out_int32=True))


def _route_over_ranks(chosen: Tensor, experts: int, exchange: Exchange) -> ExpertRoute:
    """Sort choices by expert and exchange their numbers: a collective, and the one host sync of a layer."""
    order, ends = _route_here(chosen, experts)[:2]
    here = experts // exchange.size
    counts = ends.diff(prepend=ends.new_zeros(1))
    parts = (here,) * exchange.size
    arriving = all_to_all(counts, parts, parts, exchange.group).view(-1, here)
    both = torch.stack([counts.view(-1, here).sum(1), arriving.sum(1)])
    sent, received = both.tolist()  # host sync
    expert = torch.arange(here, device=order.device).repeat(exchange.size)
    expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))
    own_ends = arriving.sum(0).cumsum(0).to(torch.int32)
    return ExpertRoute(order, own_ends, expert.argsort(stable=True), tuple(sent), tuple(received))


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    return places.scatter_(0, order, torch.arange(len(order), device=order.device))


# ---- recompute ------------------------------------------------------------------------------------------------------


class _Kept:
    """The routes of one forward that runs again in backward."""

    def __init__(self) -> None:
        self.noted: list[ExpertRoute] = []
        self.routes: Iterator[ExpertRoute] = iter(())
        self.again = False


_kept: ContextVar[_Kept | None] = ContextVar("hetero_kept_routes", default=None)


def kept_routes() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a context for a forward and one for its recompute, which takes the routes of the first: rows go the same
    ways, and nothing is counted or waited for again. They are the ``context_fn`` of ``torch.utils.checkpoint``.
    """
    kept = _Kept()
    return _keeping(kept, False), _keeping(kept, True)


@contextmanager
def _keeping(kept: _Kept, again: bool) -> Iterator[None]:
    kept.again, kept.routes = again, iter(kept.noted)
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


# ---- functions with a backward --------------------------------------------------------------------------------------
# A result that no loss reaches has no gradient on any rank, so nothing travels, nor is any weight needed.


class _Spread(torch.autograd.Function):
    """Copies of rows ``[T, width]`` for their choices, in an order; the gradient of a row is the sum of its copies'."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        copies = len(order) // max(1, len(rows))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order)
        ctx.shape = len(rows), copies
        return rows.index_select(0, order // max(1, copies))

    @staticmethod
    def backward(ctx, gradient: Tensor | None):  # type: ignore[no-untyped-def]
        (order,) = ctx.saved_tensors
        if gradient is None:
            return None, None
        return gradient.index_select(0, _inverse(order)).unflatten(0, ctx.shape).sum(1), None


class _Permuted(torch.autograd.Function):
    """Rows in another order, with its inverse."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient: Tensor | None):  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return None if gradient is None else gradient.index_select(0, inverse), None, None
