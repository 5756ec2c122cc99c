"""Divide parameters, and columns of rows between two layers, by tensor-parallel plans.

torch has styles of linear maps and embeddings. :class:`LocalWeights` and :class:`SharedColumns` are for other modules.
Ranks add gradients up where a weight or a row is used, or once a step (``parallelize.gradients``), never in a hook on
an accumulated gradient, which would count the first of two microbatches twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from hetero_strategy.layout.spec import divisors

Plan = Mapping[str, ParallelStyle]


@dataclass(eq=False)
class LocalWeights(ParallelStyle):
    """A style of a module that computes with plain tensors: this rank's parts of its parameters.

    Args:
        placements: placement of each parameter by name. A replicated one serves all columns of the rows, of which each
            rank has some, so the ranks' gradients are summands. Parameters without a placement stay as they are, and
            some modules lack one that others have.
        whole_rows: whether all ranks give the module the same rows, so that the ranks' gradients of these are summands.
        summands: whether the ranks' results are summands of the output.
    """

    placements: Mapping[str, Placement]
    whole_rows: bool = False
    summands: bool = False

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weights = {name: weight for name in self.placements if (weight := module._parameters.get(name)) is not None}
        for name, weight in weights.items():
            placement = self.placements[name]
            part = distribute_tensor(weight.detach(), device_mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, weight.requires_grad))
        lent: list[dict[str, nn.Parameter | None]] = []

        def lend(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            own = {name: part._parameters[name] for name in weights}
            lent.append(own)
            part._parameters.update({name: _own_part(weight) for name, weight in own.items()})
            enter = self.whole_rows
            return tree_map_only(Tensor, lambda x: gradients_summed(x, device_mesh), (given, named)) if enter else None

        def take_back(part: nn.Module, _: Any, out: Any) -> Any:
            part._parameters.update(lent.pop())
            return tree_map_only(Tensor, lambda x: _summed(x, device_mesh), out) if self.summands else None

        module.register_forward_pre_hook(lend, with_kwargs=True)
        module.register_forward_hook(take_back, always_call=True)
        return module


@dataclass(eq=False)
class SharedColumns(ParallelStyle):
    """A style of a whole layer whose last ``width`` columns each rank uses for its own heads alone."""

    width: int

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(_: nn.Module, __: Any, rows: Tensor) -> Tensor:
            own, shared = rows.split([rows.shape[-1] - self.width, self.width], dim=-1)
            return torch.cat([own, gradients_summed(shared, device_mesh)], dim=-1)

        module.register_forward_hook(share)
        return module


def _own_part(weight: Any) -> Any:
    """Return this rank's part of a parameter; of a whole one, with gradients that are summands."""
    if not isinstance(weight, DTensor):
        return weight
    whole = weight.placements[0].is_replicate()
    return weight.to_local(grad_placements=[Partial()] if whole else None)


def gradients_summed(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return rows that are the same on all ranks of a mesh; their gradient is the sum of the ranks' gradients."""
    if not rows.is_floating_point():
        return rows
    return DTensor.from_local(rows, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _summed(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    return (
        DTensor.from_local(rows, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    )


def matches(pattern: str, fqn: str) -> bool:
    """Return whether a name in a plan stands for a part; as in torch, a ``*`` stands for one name between dots."""
    return pattern.count(".") == fqn.count(".") and fnmatchcase(fqn, pattern)


def style_of(plan: Plan, fqn: str) -> ParallelStyle | None:
    """Return the style of a part of a module."""
    return next((style for pattern, style in plan.items() if matches(pattern, fqn)), None)


def by_part(plan: Plan, module: nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles of a module's parts by FQN: torch warns of names that only some blocks have."""
    styles = {fqn: style_of(plan, fqn) for fqn, _ in module.named_modules() if fqn}
    return {fqn: style for fqn, style in styles.items() if style is not None}


def begins_columns(style: ParallelStyle | None) -> bool:
    """Return whether each rank has some of the columns of a layer's output."""
    return isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),)


def ends_columns(style: ParallelStyle | None) -> bool:
    """Return whether each rank has some of the columns of a layer's input, and all of its output."""
    return isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),)


def divided_along(style: ParallelStyle | None, layer: nn.Module, name: str) -> int | None:
    """Return the dimension along which a style divides a parameter, or None if every rank has all of it.

    Args:
        style: style of the layer.
        layer: module that has the parameter.
        name: name of the parameter in the layer.
    """
    embeds = isinstance(layer, nn.Embedding)
    if isinstance(style, LocalWeights):
        return getattr(style.placements.get(name), "dim", None)
    if isinstance(style, ColwiseParallel):
        return int(embeds)
    if isinstance(style, RowwiseParallel) and name == "weight":
        return int(not embeds)
    return None


def plan_faults(module: nn.Module, blocks: Collection[str], plan: Plan, tp: int) -> list[str]:
    """Return parts that a plan names and a module lacks, and parameters of its blocks (FQNs) that do not divide."""
    parts, faults = dict(module.named_modules()), []
    for pattern, style in plan.items():
        named = [fqn for fqn in parts if matches(pattern, fqn)]
        cut = [fqn for fqn in named if type(style) in (ColwiseParallel, RowwiseParallel)]
        if other := [fqn for fqn in cut if not isinstance(parts[fqn], (nn.Linear, nn.Embedding))]:
            faults.append(
                f"tp={tp}, but {other[0]} is a {type(parts[other[0]]).__name__} and no nn.Linear or nn.Embedding, which"
                " alone can be split so; name the linear layers in it in tp_columns and tp_rows, or set tp=1"
            )
        if not named:
            linear = (fqn for fqn, part in parts.items() if isinstance(part, nn.Linear))
            inside = dict.fromkeys(_in_block(fqn, blocks) for fqn in linear)
            faults.append(
                f"tp={tp}, but it has no part {pattern}, which tp_columns, tp_rows or tp_plan() names; the linear"
                f" layers of its blocks are {', '.join(filter(None, inside)) or 'none'}"
            )
        for fqn in named:
            if name := _in_block(fqn, blocks):
                faults += _undivided(style, name, parts[fqn], tp)
    return [*dict.fromkeys(faults)]


def _in_block(fqn: str, blocks: Collection[str]) -> str:
    """Return the name of a part inside its block; "" for other parts."""
    return next((fqn.removeprefix(f"{block}.") for block in blocks if fqn.startswith(f"{block}.")), "")


def _undivided(style: ParallelStyle, name: str, layer: nn.Module, tp: int) -> Iterator[str]:
    for key, weight in layer.named_parameters(recurse=False):
        if (dim := divided_along(style, layer, key)) is None or (key == "bias" and isinstance(layer, nn.Linear)):
            continue
        joined = getattr(style.placements[key], "split_factor", 1) if isinstance(style, LocalWeights) else 1
        size, what = weight.shape[dim] // joined, f"numbers in dimension {dim} of {name}.{key}"
        if isinstance(layer, nn.Linear):
            what = f"{('outputs', 'inputs')[dim]} of {name}"
        if size % tp:
            yield f"{size} {what} not divisible by tp {tp}; {_nearest(tp, size)}"


def divisible(tp: int, **sizes: int) -> list[str]:
    """Return a fault for each size that ``tp`` does not divide, with the nearest degrees that divide all sizes."""
    return [
        f"{name.replace('_', ' ')} {size} not divisible by tp {tp}; {_nearest(tp, *sizes.values())}"
        for name, size in sizes.items()
        if size % tp
    ]


def _nearest(tp: int, *sizes: int) -> str:
    """Return the fix: the next smaller and the next larger degree that divide all sizes."""
    degrees = divisors(gcd(*sizes))
    nearest = [*[n for n in degrees if n < tp][-1:], *[n for n in degrees if n > tp][:1]]
    return f"set tp={' or '.join(map(str, nearest))}"
