"""Put one module on its mesh from outside: stages, transforms, tensor parallelism, more transforms, FSDP2, values and
copies.

The module is built on the meta device, and the parts that this rank does not own stay there. Of the rest only this
rank's shards are ever allocated: initial values are made one block at a time and each rank keeps its part, so the
weights are the same for every layout. From a Hugging Face folder a rank reads only its shards; all ``dp_replicate``
copies of a shard read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._random import manual_seed
from torch.nn.utils.parametrizations import _SpectralNorm

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout.row_sharding import sharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.hf_folder import Selection
from hetero_strategy.model.materialize import initial_units
from hetero_strategy.model.random_numbers import random_state_kept
from hetero_strategy.model.read_spec import in_no_stage
from hetero_strategy.model.token_loss import chunk_sizes
from hetero_strategy.parallelize.copies import compute_with_copies
from hetero_strategy.parallelize.divide_rows import divide_rows
from hetero_strategy.parallelize.experts import divide_experts, expert_faults
from hetero_strategy.parallelize.fsdp import apply_fsdp, compute_in
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.storage import FP32, Storage, Traits, check_traits, restore_traits
from hetero_strategy.parallelize.transform import Site, Transform
from hetero_strategy.parallelize.transforms import in_order


def parallelize(
    name: str,
    module: Adapter,
    layout: ModuleLayout,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    seed: int,
    experts: DeviceMesh | None = None,
    transforms: Mapping[str, Transform] = MappingProxyType({}),
    split: Sequence[int] = (),
    pp_rank: int = 0,
    storage: Storage = FP32,
    copies: bool = True,
) -> dict[int, Adapter]:
    """Put this rank's stages of ``module`` on its mesh, in place. Call on the module's ranks only.

    Gradients are sums over the data-parallel and the context-parallel ranks, for a loss that is divided by the number
    of all their loss tokens; a mean of ranks, or a division by a rank's own tokens, would be another gradient. Code
    that runs stages without the strategy gives each rank its instance's inputs, and for a language model with ``cp``
    its own part of these (``in_context`` of ``model.context``). It sets ``context_group`` of each stage to the name of
    the group of the ranks that have the other parts (``GroupRegistry.context``). If all of these ranks take whole
    tokens, each counts all rows, and gradients are ``cp`` times too large. After the last backward
    ``gradients.settle`` ends the step.

    Args:
        module: the whole module on the meta device. Afterwards it holds the tensors of this rank's stages under its own
            names; all other tensors stay on meta.
        layout: resolved layout of the module.
        mesh: mesh of this rank's pipeline slice, with ``dp_shard``, on which context-parallel ranks lie too, and with
            each of the axes ``dp_replicate, tp`` that is above 1; not read without FSDP2 and tensor parallelism.
        experts: mesh of its experts (``GroupRegistry.experts``); not read with ``ep=1``.
        device: device of the tensors; on meta they have no values.
        transforms: changes of its stages by name.
        split: number of blocks of each stage; not read without a pipeline.
        pp_rank: this rank's pipeline coordinate.
        storage: dtypes of the module's tensors.
        copies: whether a stage on this rank alone may compute with copies of its weights, which live as long as a step;
            else FSDP2 gathers them.

    Returns:
        This rank's stages by number; ``{0: module}`` without a pipeline.

    Raises:
        ModelError: a trait of a parameter has changed, see :func:`check_traits`.
    """
    module.meta_copy()  # the module as it was, for initialisation and counting
    traits = {fqn: Traits.of(parameter) for fqn, parameter in module.named_parameters()}
    with _ties_kept([module]):
        module.to("meta")  # parts with given values get them back in shards
    traits = storage.store(name, module, traits)
    kept, blocks = storage.kept(name, module), list(module.blocks())
    assert layout.pipeline.stages in (1, len(split)), f"split {split} of {layout.pipeline.stages} stages"
    stages = cut(module, split, layout.pipeline.stages_of(pp_rank))
    site, ordered = Site(name, layout, device, blocks, kept), in_order(transforms.values(), layout.tp)
    copied: list[Adapter] = []
    for transform in ordered:
        if transform.before_tp:
            transform.apply([*stages.values()], site)
    for stage in stages.values():
        stage.compute_dtype = storage.compute
        if layout.cp > 1 and not module.kind.samplewise:
            assert mesh is not None
            divide_rows(stage, mesh["dp_shard"].get_local_rank() % layout.cp, layout.cp)
        if layout.ep > 1:
            assert experts is not None
            divide_experts(stage, experts)
        if layout.tp > 1:
            assert mesh is not None
            _split(stage, mesh["tp"], device)
            restore_traits(traits, stage.global_parameters())  # before FSDP, which sorts parameters by what trains
    for transform in ordered:
        if not transform.before_tp:
            transform.apply([*stages.values()], site)
    for stage in stages.values():
        stage_parts = {id(part) for part in stage.modules()}
        precise = [layer for layer in kept if id(layer) in stage_parts]
        if copies and storage.copies(stage.parameters(), layout) and not precise:
            copied.append(stage)
        elif layout.is_sharded or storage.casts(stage.parameters()):
            assert mesh is not None
            axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
            apply_fsdp(stage, mesh[axes], storage, precise, experts)
        else:
            compute_in(storage, precise)
    with _ties_kept(stages.values()):
        for stage in stages.values():
            stage.to_empty(device=device)
    for stage in stages.values():
        restore_traits(traits, stage.global_parameters())
        check_traits(name, traits, stage.global_parameters())
        if device.type == "meta":
            continue
        wanted: dict[str, Selection] = {fqn: {} for fqn, _ in stage.named_buffers()}
        wanted |= {fqn: _shard_of(parameter) for fqn, parameter in stage.global_parameters().items()}
        places = {fqn: local(parameter.detach()) for fqn, parameter in stage.global_parameters().items()}
        fill(stage, initial_units(name, module, seed, wanted, places))
    for stage in copied:
        compute_with_copies(stage, storage.compute)
    _adopt(module, stages)
    return stages


def _split(stage: Adapter, mesh: DeviceMesh, device: torch.device) -> None:
    """Put a stage on its tensor-parallel mesh."""
    with _ties_kept([stage]):
        stage.apply_tp(mesh)
    if device.type == "cuda":  # else DTensor's first random operator would be a collective of the whole world
        with random_state_kept(device):
            manual_seed(0, mesh)


def cut(module: Adapter, split: Sequence[int], numbers: Iterable[int]) -> dict[int, Adapter]:
    """Make the stages of these numbers of a whole module; ``split``: number of blocks of each stage.

    With fewer than two entries there is no pipeline, and the only stage is the module itself.
    """
    if len(split) < 2:
        return {0: module}
    blocks = list(module.blocks())
    assert sum(split) == len(blocks), f"split {split} of {len(blocks)} blocks"
    stages = {}
    for number in numbers:
        before = sum(split[:number])
        own_blocks = blocks[before : before + split[number]]
        stages[number] = module.stage(own_blocks, first=number == 0, last=number == len(split) - 1)
    return stages


def _adopt(module: Adapter, stages: Mapping[int, Adapter]) -> None:
    """Let the whole module hold the tensors of its stages on this rank, under its own names.

    Most are in parts that it shares with the stages. The rest are tensors of the modules around the blocks, and a
    weight that two stages share, both of whose names are bound to this rank's copy.
    """
    tied = module.tied_weight() or ()
    for stage in stages.values():
        if stage is module:
            continue
        for fqn, buffer in stage.named_buffers(remove_duplicate=False):
            owner, key = _holder(module, fqn)
            owner._buffers[key] = buffer
        for fqn, parameter in stage.named_parameters(remove_duplicate=False):
            for name in tied if fqn in tied else (fqn,):
                owner, key = _holder(module, name)
                owner._parameters[key] = parameter


@contextmanager
def _ties_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep shared parameters shared through ``to`` and ``to_empty``, which would make one for each of their holders."""
    holders: dict[int, dict[tuple[int, str], nn.Module]] = {}
    for module in modules:
        for owner in module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    holders.setdefault(id(parameter), {})[(id(owner), key)] = owner
    yield
    for shared in holders.values():
        (first, *others) = [(owner, key) for (_, key), owner in shared.items()]
        for owner, key in others:
            owner._parameters[key] = first[0]._parameters[first[1]]


def _holder(module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    path, _, key = fqn.rpartition(".")
    return module.get_submodule(path), key


def check(name: str, module: Adapter, layout: ModuleLayout) -> list[str]:
    """Return the faults of a layout for this very module; empty if it fits. Pure."""
    faults = [f"layout of '{name}': {fault}" for fault in _stage_faults(module, layout)]
    faults += [
        f"module '{name}': {fqn} is a {type(layer).__name__} in training mode, whose statistics are those of one"
        " instance's microbatch; use a GroupNorm or LayerNorm, or, for a frozen one, call its eval() in"
        " configure_model()"
        for fqn, layer in module.named_modules()
        if layer.training and _has_statistics(layer)
    ]
    if layout.cp > 1:
        faults += [f"layout of '{name}': {fault}" for fault in _context_faults(module, layout)]
    faults += [f"layout of '{name}': {fault}" for fault in expert_faults(module, layout)]
    if layout.tp == 1:
        return faults
    if module.tp_plan() is None:
        no_plan = [f"tp={layout.tp}, but {type(module).__name__} has no tensor-parallel plan; set tp=1"]
        return faults + [f"layout of '{name}': {fault}" for fault in module.check_tp(layout.tp) or no_plan]
    if module.vocab_size is not None and not _shards_fit(module.vocab_size, layout.tp, layout.shards):
        size, tp, axes = module.vocab_size, layout.tp, "dp_shard" if layout.cp == 1 else "dp_shard x cp"
        faults.append(
            f"layout of '{name}': vocab_size={size} in tp={tp} parts that differ, each of which FSDP2 cuts in"
            f" {axes}={layout.shards} otherwise than their DTensor says; set vocab_size={-(-size // tp) * tp} or"
            f" {axes}=2"
        )
    return faults + [f"layout of '{name}': {fault}" for fault in module.tp_faults(layout.tp, layout.ep)]


def _context_faults(module: Adapter, layout: ModuleLayout) -> list[str]:
    """Return the faults of context parallelism for this very module."""
    cp, tp, kind, heads = layout.cp, layout.tp, type(module).__name__, module.attention_heads
    by_heads = layout.cp_form == "heads" or not module.kind.samplewise
    if not module.context_parallel:
        return [
            f"cp={cp}, but {kind} is not made for a part of its rows; set cp=1, or context_parallel = True in a"
            " language model or backbone whose rows meet in packed_attention alone"
        ]
    if layout.cp_form == "keys" and by_heads:
        return [f"cp_form='keys', but rows of {kind} see later rows; set cp_form='heads', or leave it out"]
    if by_heads and not heads:
        return [f"cp_form='heads', but {kind} says no attention_heads; set it to the heads of a block"]
    if by_heads and heads % layout.neighbours:
        fits = [n for n in range(1, cp) if heads % (n * tp) == 0]
        keys = ", or cp_form='keys'" if module.kind.samplewise else ""
        return [
            f"cp_form='heads' divides {heads} heads over tp {tp} x cp {cp} = {layout.neighbours} ranks; set"
            f" {f'cp={fits[-1]}' if fits else 'another tp'}{keys}"
        ]
    lie = module.row_sharding(layout)
    if module.kind.samplewise and lie != sharding(cp, max(1, lie.parts // cp)):
        return [
            f"cp={cp}, but row_sharding(layout) of {kind} is {lie}; let it return sharding(layout.cp) of"
            " hetero_strategy.layout.row_sharding, or sharding(layout.cp, layout.tp)"
        ]
    return []


def _shards_fit(size: int, tp: int, dp_shard: int) -> bool:
    """Return whether FSDP2's parts of a dimension that tensor parallelism has cut are those of its DTensor.

    FSDP2 cuts each part alone, DTensor the sum of all parts of a ``dp_shard`` rank.
    """
    cut = [chunk_sizes(part, dp_shard) for part in chunk_sizes(size, tp)]
    return all(list(parts) == chunk_sizes(sum(parts), tp) for parts in zip(*cut, strict=True))


def _has_statistics(layer: nn.Module) -> bool:
    """Return whether a layer's output depends on the rest of the batch, or training changes its buffers."""
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return layer.track_running_stats
    return isinstance(layer, (nn.modules.batchnorm._BatchNorm, _SpectralNorm))


def _stage_faults(module: Adapter, layout: ModuleLayout) -> list[str]:
    pipeline, kind, blocks = layout.pipeline, type(module).__name__, len(module.blocks())
    faults = []
    if not blocks and (pipeline.stages > 1 or layout.split not in (None, (0,))):
        return [f"pp={layout.pp}, but {kind} has no blocks to cut it by; set pp=1 and leave split out"]
    if pipeline.stages > max(blocks, 1):
        faults.append(
            f"pp {layout.pp} x vpp {layout.vpp} = {pipeline.stages} stages, but {kind} has {blocks} blocks; lower them"
        )
    if layout.split is not None and sum(layout.split) != blocks:
        faults.append(
            f"split={list(layout.split)} sums to {sum(layout.split)}, but {kind} has {blocks} blocks; give all of them"
        )
    first = module.first_blocks
    if layout.split is not None and len(layout.split) > 1 and layout.split[0] < first <= blocks:
        faults.append(
            f"split={list(layout.split)}, but the first {first} blocks of {kind} take rows of other modules; give the"
            f" first stage at least {first}"
        )
    elif layout.split is None and blocks - first + 1 < pipeline.stages <= blocks:
        faults.append(
            f"pp {layout.pp} x vpp {layout.vpp} = {pipeline.stages} stages, but the first {first} of {blocks} blocks of"
            f" {kind} take rows of other modules in one stage; use {max(1, blocks - first + 1)} stages or fewer"
        )
    if pipeline.stages > 1 and (loose := in_no_stage(module)):
        faults.append(
            f"pp={layout.pp}, but '{loose[0]}' of {kind} is in no block, and neither before nor after all blocks, so"
            " every stage would train a copy of its own; name it, or what holds it, in before_blocks or after_blocks"
        )
    turns = pipeline.stages > 1 and pipeline.rank_of(0) == pipeline.rank_of(pipeline.stages - 1)
    if turns and layout.dp * layout.cp > 1 and module.tied_weight() is not None:
        degrees = " ".join(f"{axis}={getattr(layout, axis)}" for axis in ("dp_replicate", "dp_shard", "cp"))
        faults.append(
            f"pp_style='v' with {degrees}: the first and the last stage of {kind} share a weight on one rank and would"
            " reduce its gradient twice; set pp_style='loop', or tie_word_embeddings=false"
        )
    return faults


def check_all(modules: dict[str, Adapter], layouts: dict[str, ModuleLayout]) -> None:
    """Refuse layouts that do not fit the modules, with all faults at once."""
    faults = [f"the model has a module '{n}' without a layout; add layouts['{n}']" for n in modules if n not in layouts]
    faults += [
        f"layouts names '{n}', but the model's modules are {', '.join(modules)}; remove or rename it"
        for n in layouts
        if n not in modules
    ]
    faults += [f for n, m in modules.items() if n in layouts for f in check(n, m, layouts[n])]
    if faults:
        raise LayoutError("\n".join(faults))


@torch.no_grad()
def fill(stage: Adapter, values: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write values into a stage's buffers, and into this rank's shards of its parameters.

    Complex and integer buffers keep the dtype of their values, whatever the precision plugin made of the module.
    ``values`` are pairs of a name in the whole module and this rank's part of that tensor.
    """
    parameters = stage.global_parameters()
    buffers = dict(stage.named_buffers())
    for fqn, value in values:
        if fqn in parameters:
            local(parameters[fqn]).copy_(value)
        else:
            path, _, leaf = fqn.rpartition(".")
            dtype = buffers[fqn].dtype if value.is_floating_point() else value.dtype
            stage.get_submodule(path)._buffers[leaf] = value.to(buffers[fqn].device, dtype)


def _shard_of(tensor: torch.Tensor) -> Selection:
    """Return the part of a tensor that this rank keeps: DTensor's shard of the indices along each sharded dimension."""
    if not isinstance(tensor, DTensor):
        return {}
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    kept = {}
    for dim in {dim for dim in dims if dim is not None}:
        index = torch.arange(tensor.shape[dim]).view([-1 if d == dim else 1 for d in range(tensor.ndim)])
        alone = [p if d == dim else Replicate() for p, d in zip(tensor.placements, dims, strict=True)]
        shard = distribute_tensor(index, tensor.device_mesh, alone, src_data_rank=None)
        kept[dim] = shard.to_local().flatten().cpu()
    return kept
