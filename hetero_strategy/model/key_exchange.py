"""Attention to keys of other context-parallel ranks, which travel while other heads are attended and are not kept.

Key heads make groups. While one group is attended, the keys and values of the next travel, so that two groups are in
memory. Backward fetches them again, sends their gradients back, and adds these source by source in fp32, or in fp64 for
fp64 keys: sums have one order. What else attention keeps for backward is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from hetero_strategy.model.context import Context
from hetero_strategy.model.seen_keys import SeenKeys

GROUPS = 4
"""Most groups of key heads."""
LEAST = 1 << 20
"""Fewest bytes that a rank receives for a group, if there are several."""

Attend = Callable[..., Tensor]
"""A function of queries ``[1, heads, R, width]``, keys and values ``[1, kv_heads, K, width]`` and, if there are any,
sinks ``[heads]`` that returns ``[1, heads, R, width]``."""


@torch.compiler.disable
def attend_over_ranks(
    attend: Attend, context: Context, keys: SeenKeys, by_segments: bool, *rows: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Attend to the keys of all ranks that a rank's rows see; a collective, forward and backward.

    It runs outside of compiled code, because sizes come from the host.

    Args:
        attend: attention of some heads.
        context: the ranks.
        keys: the keys of the layer's window.
        by_segments: whether the keys of each segment follow each other, or each key is there once.
        rows: queries ``[1, heads, R, width]``, keys and values ``[1, kv_heads, R, width]`` of the rank's own rows.
        sinks: scores ``[heads]``.
    """
    rows = rows if sinks is None else (*rows, sinks)
    out: Tensor = _OverRanks.apply(attend, _Travel(context, keys, by_segments), torch.is_grad_enabled(), *rows)
    return out


class _Heads(NamedTuple):
    """A group of key heads, and the query heads that attend to them."""

    keys: slice
    queries: slice


class _Travel(NamedTuple):
    """The ways of keys to this rank, and of their gradients back."""

    context: Context
    keys: SeenKeys
    by_segments: bool

    def groups(self, query: Tensor, key: Tensor, value: Tensor) -> list[_Heads]:
        """Divide the heads, on all ranks alike."""
        heads, shared = key.shape[1], query.shape[1] // key.shape[1]
        arriving = self.keys.most * heads * (key.shape[3] + value.shape[3]) * key.element_size()
        count = max(1, min(heads, GROUPS, arriving // max(LEAST, 1)))
        edges = [number * heads // count for number in range(count + 1)]
        return [_Heads(slice(a, b), slice(a * shared, b * shared)) for a, b in pairwise(edges)]

    def begin(self, key: Tensor, value: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Begin to send keys and values of some heads; return own rows ``[R, width]``, and those that will arrive."""
        own = torch.cat([rows[0, heads].transpose(0, 1).flatten(1) for rows in (key, value)], dim=1)
        keys = self.keys
        return own, self.context.send(own.index_select(0, keys.own), keys.sent, keys.received)

    def finish(self, own: Tensor, arriving: Tensor) -> Tensor:
        """Return the seen rows ``[K, width]``."""
        places = self.keys.of_segments if self.by_segments else self.keys.keys
        return torch.cat([own, self.context.arrived(arriving)]).index_select(0, places)

    def begin_back(self, gradient: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Begin to send gradients of the seen rows back; return those of ``rows`` own rows in the dtype of sums, and
        what will arrive.
        """
        keys, wide = self.keys, torch.promote_types(gradient.dtype, torch.float32)
        sums = wide if self.by_segments else gradient.dtype
        total = gradient.new_zeros(rows + sum(keys.received), gradient.shape[1], dtype=sums)
        if self.by_segments:
            for turn in keys.turns:
                total.index_add_(0, keys.of_segments[turn], gradient[turn].to(wide))
        else:
            total.index_copy_(0, keys.keys, gradient)
        return total[:rows].to(wide), self.context.send(total[rows:].to(gradient.dtype), keys.received, keys.sent)

    def finish_back(self, own: Tensor, arriving: Tensor) -> Tensor:
        """Return the gradients of own rows, summed over the ranks, in the dtype in which they travel."""
        arrived, keys = self.context.arrived(arriving), self.keys
        for places, part in zip(keys.own.split(keys.sent), arrived.split(keys.sent), strict=True):
            own.index_add_(0, places, part.to(own.dtype))
        return own.to(arrived.dtype)


class _Kept:
    """The tensors that attention of one group keeps for backward, without what travelled."""

    def __init__(self, travelled: Tensor) -> None:
        self.tensors: list[Tensor] = []
        self.strides: dict[int, tuple[int, ...]] = {}
        self.travelled: Tensor | None = travelled

    def pack(self, tensor: Tensor) -> Any:
        """Note a tensor and return its number, or the place of a view of what travelled."""
        assert self.travelled is not None
        if _share_memory(tensor, self.travelled):
            return tensor.shape, tensor.stride(), tensor.storage_offset()
        self.tensors.append(tensor.detach())
        return len(self.tensors) - 1

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor again."""
        if not isinstance(packed, int):
            assert self.travelled is not None
            return self.travelled.as_strided(*packed)
        tensor = self.tensors[packed]
        if packed in self.strides:
            return tensor.new_empty_strided(tensor.shape, self.strides[packed]).copy_(tensor)
        return tensor

    def keep_in(self, whole: Tensor, part: Tensor) -> None:
        """Keep a result of attention as a view of ``whole``, into which ``part`` was copied, and not twice."""
        turned = whole[0].transpose(0, 1), part[0].transpose(0, 1)
        for number, tensor in enumerate(self.tensors):
            if _share_memory(tensor, part):
                for view, of_part in ((whole, part), turned):
                    if _laid_out(tensor) == _laid_out(of_part):
                        self.tensors[number], self.strides[number] = view, tensor.stride()


def _laid_out(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


class _Graph(NamedTuple):
    """The autograd graph of attention of one group, which has numbers of tensors in place of tensors."""

    inputs: list[GradientEdge]
    output: GradientEdge
    kept: _Kept


class _Entrance(torch.autograd.Function):
    """Inputs of a graph that does not keep them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("gradients end at the edges of the graph")


def _recorded(attend: Attend, inputs: list[Tensor], needed: list[bool], travelled: Tensor) -> tuple[_Graph, Tensor]:
    """Attend and record the graph with gradients of the needed inputs."""
    kept = _Kept(travelled)
    with torch.enable_grad(), saved_tensors_hooks(kept.pack, kept.unpack):
        anchor = torch.empty(0, requires_grad=True)
        leaves = iter(_Entrance.apply(anchor, *(tensor for tensor, of in zip(inputs, needed, strict=True) if of)))
        inputs = [next(leaves) if of else tensor for tensor, of in zip(inputs, needed, strict=True)]
        out = attend(*inputs)
    edges = [get_gradient_edge(tensor) for tensor, of in zip(inputs, needed, strict=True) if of]
    kept.travelled = None
    return _Graph(edges, get_gradient_edge(out), kept), out.detach()


class _OverRanks(torch.autograd.Function):
    """Attention of a rank's rows, group by group."""

    @staticmethod
    def forward(ctx: Any, attend: Attend, travel: _Travel, trains: bool, *rows: Tensor) -> Tensor:
        query, key, value, *sinks = rows
        groups = travel.groups(query, key, value)
        query_needs, *keys_need = ctx.needs_input_grad[3:6]
        ctx.needed = [query_needs, any(keys_need), any(keys_need), *ctx.needs_input_grad[6:]]
        ctx.travel, ctx.groups, ctx.graphs = travel, groups, []
        whole, arriving = None, travel.begin(key, value, groups[0].keys)
        for number, heads in enumerate(groups):
            seen = travel.finish(*arriving)
            if number + 1 < len(groups):
                arriving = travel.begin(key, value, groups[number + 1].keys)
            inputs = [query[:, heads.queries], *_heads_of(seen, key, value), *(x[heads.queries] for x in sinks)]
            if trains and any(ctx.needed):
                graph, out = _recorded(attend, inputs, ctx.needed, seen)
                ctx.graphs.append(graph)
            else:
                out = attend(*inputs)
            if len(groups) == 1:
                whole = out
                continue
            if whole is None:  # row by row, as projections want it
                whole = out.new_empty(1, out.shape[2], query.shape[1], out.shape[3]).transpose(1, 2)
            whole[:, heads.queries] = out
            for graph in ctx.graphs[number:]:
                graph.kept.keep_in(whole[:, heads.queries], out)
        kept = [graph.kept.tensors for graph in ctx.graphs]
        ctx.counts = [len(tensors) for tensors in kept]
        ctx.save_for_backward(key, value, *(tensor for tensors in kept for tensor in tensors))
        for tensors in kept:
            tensors.clear()
        assert whole is not None
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        key, value, *kept = ctx.saved_tensors  # once: a checkpoint makes them again each time
        travel, groups, needed = ctx.travel, ctx.groups, ctx.needed
        gradients_of: list[list[Tensor]] = [[] for _ in needed]
        own = list[Tensor]()
        arriving, returning = travel.begin(key, value, groups[0].keys), None
        for number, (heads, graph, count) in enumerate(zip(groups, ctx.graphs, ctx.counts, strict=True)):
            seen = travel.finish(*arriving)
            if number + 1 < len(groups):
                arriving = travel.begin(key, value, groups[number + 1].keys)
            graph.kept.tensors, kept, graph.kept.travelled = kept[:count], kept[count:], seen
            of_group = iter(
                torch.autograd.grad([graph.output], graph.inputs, [gradients[0][:, heads.queries]], retain_graph=True)
            )
            graph.kept.tensors, graph.kept.travelled = [], None
            for parts, of in zip(gradients_of, needed, strict=True):
                parts += [next(of_group)] if of else []
            if returning is not None:
                own.append(travel.finish_back(*returning))
            if needed[1]:
                of_seen = torch.cat([gradients_of[n].pop()[0].transpose(0, 1).flatten(1) for n in (1, 2)], dim=1)
                returning = travel.begin_back(of_seen, key.shape[2])
        if returning is not None:
            own.append(travel.finish_back(*returning))
        for part in own:
            for parts, tensor in zip(gradients_of[1:3], _heads_of(part, key, value), strict=True):
                parts.append(tensor)
        by_input = zip(gradients_of, needed, strict=True)
        return None, None, None, *(_joined(parts) if of else None for parts, of in by_input)


def _heads_of(rows: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return keys and values ``[1, kv_heads, K, width]`` of some heads: views of rows ``[K, heads * widths]``."""
    count = rows.shape[1] // (key.shape[3] + value.shape[3])
    parts = rows.split([count * key.shape[3], count * value.shape[3]], dim=1)
    return [part.unflatten(1, (count, -1)).transpose(0, 1)[None] for part in parts]


def _joined(parts: list[Tensor]) -> Tensor:
    """Join heads ``[1, heads, R, width]``, row by row, or sinks ``[heads]``."""
    if len(parts) == 1 or parts[0].ndim == 1:
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    return torch.cat([part[0].transpose(0, 1) for part in parts], dim=1).transpose(0, 1)[None]
