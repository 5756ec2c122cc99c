"""Expert parallelism: divide a stage's experts over ranks, and shard each rank's experts over the ranks that have the
same ones.

Parameters of experts lie on a mesh of their own, ``(dp_replicate, efsdp, ep)``, over the ranks of the module's mesh.
Each is divided by expert over ``ep``; FSDP2 then shards each rank's part over ``efsdp``, in a unit of its own, and sums
gradients over ``efsdp`` and ``dp_replicate``. Their scale is 1: a row's gradient reaches its expert on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from hetero_strategy.layout.spec import ModuleLayout, divisors
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.experts import Exchange
from hetero_strategy.model.read_spec import expert_sizes
from hetero_strategy.model.tensor_parallel import LocalWeights


class SlicedRows(ParallelStyle):
    """A style of a module whose rows all ranks have, and of which each rank computes a slice."""

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rows: list[int] = []

        def begin(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            rows[:] = [len(given[0])]  # a recompute may end inside the module, before its end
            return tree_map_only(Tensor, lambda whole: own_slice(whole, device_mesh), (given, named))

        def end(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            shape, stride = torch.Size((rows[0], out.shape[1])), (out.shape[1], 1)
            parts = DTensor.from_local(
                out.contiguous(), device_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
            return parts.full_tensor()

        module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(end)
        return module


def own_slice(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's slice of rows ``[T, ...]`` that all ranks have; their gradient is gathered on all ranks."""
    rows = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return rows.redistribute(placements=[Shard(0)]).to_local()


def divide_experts(stage: Adapter, mesh: DeviceMesh) -> None:
    """Divide the experts of a stage over the ``ep`` axis of their mesh, before tensor parallelism and FSDP2."""
    group = mesh["ep"].get_group()
    for fqn in stage.experts():
        part: Any = stage.get_submodule(fqn)
        LocalWeights({name: Shard(0) for name, _ in part.named_parameters()})._apply(part, mesh["ep"])
        part.exchange = Exchange(group.group_name, group.size())
    stage.tp_styles_instead = dict.fromkeys(stage.experts(), SlicedRows())


def shard_experts(
    stage: Adapter, mesh: DeviceMesh, policy: Callable[[nn.Module], MixedPrecisionPolicy]
) -> set[nn.Parameter]:
    """Shard the divided experts of a stage by FSDP2, each layer's in a unit of its own.

    Args:
        policy: function of a layer's experts that returns their dtypes.

    Returns:
        Frozen parameters that one rank alone has, which stay outside of FSDP.
    """
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "ep")
    shards, size, outside = mesh["efsdp"].size(), mesh["ep"].size(), set[nn.Parameter]()

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(int(parameter.shape[0] // size % shards > 0))

    for fqn in stage.experts():
        part = stage.get_submodule(fqn)
        frozen = {p for p in part.parameters() if shards == 1 and not p.requires_grad}
        outside |= frozen
        if any(p not in frozen for p in part.parameters()):
            fully_shard(
                part, mesh=mesh[axes], mp_policy=policy(part), shard_placement_fn=placement, ignored_params=frozen
            )
    return outside


def expert_faults(module: Adapter, layout: ModuleLayout) -> Iterator[str]:
    """Yield why a module's experts cannot be divided as its layout says."""
    if layout.tp * layout.ep == 1:
        return
    adapted = [fqn for fqn, _ in module.named_modules() if fqn.endswith("experts.base_layer")]  # peft's name
    if adapted:
        yield (
            f"ep={layout.ep} and tp={layout.tp} divide {adapted[0]}, but not the adapters of its experts; set ep=1 and"
            " tp=1, or leave experts out of target_parameters and target_modules"
        )
    if layout.ep == 1:
        return
    if not module.experts():
        yield (
            f"ep={layout.ep}, but {type(module).__name__} has no experts whose weights are stacks, one matrix for each;"
            " set ep=1"
        )
    for (count, *sizes), fqn in expert_sizes(module).items():
        if count % layout.ep:
            yield f"ep={layout.ep} does not divide the {count} experts of {fqn}; {_nearest(count, layout)}"
            continue
        here, shards = count // layout.ep, layout.expert_shards
        if here % shards and any(size % shards for size in sizes):
            yield (
                f"ep={layout.ep} leaves {here} experts of {fqn} to {shards} ranks, which can divide neither them nor"
                f" their sizes {', '.join(map(str, sizes))}; {_nearest(count, layout)}"
            )


def _nearest(experts: int, layout: ModuleLayout) -> str:
    """Return the fix: the degrees that divide the experts, and the ranks."""
    possible = [n for n in divisors(gcd(layout.shards * layout.tp, experts)) if n != layout.ep]
    return f"set ep={' or '.join(map(str, possible))}"
