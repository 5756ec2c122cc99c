"""How one module is put on its mesh, from outside: stages, float8, tensor parallel, recompute, compile, offload, FSDP2,
values, copies. Where there is tensor parallelism, compile comes before recompute.

The module is built on the meta device and what this rank does not own stays there. Of the rest only this rank's shards
are ever allocated: initial values are made one block at a time and each rank keeps its part, so the weights are the
same for every layout. Of a Hugging Face folder a rank reads its shards alone; all ``dp_replicate`` copies of a shard
read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from hetero_strategy.model.chunked_linear import is_chunked
from hetero_strategy.model.hf_folder import Selection
from hetero_strategy.model.materialize import initial_units
from hetero_strategy.model.random_numbers import random_state_kept
from hetero_strategy.model.token_loss import chunk_sizes
from hetero_strategy.parallelize.compile import apply_compile
from hetero_strategy.parallelize.copies import compute_with_copies
from hetero_strategy.parallelize.float8 import apply_float8
from hetero_strategy.parallelize.fsdp import apply_fsdp, compute_in
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.offload import HostMemory, Offload, apply_offload
from hetero_strategy.parallelize.recompute import Recompute, apply_recompute
from hetero_strategy.parallelize.stages import adopt, cut, in_no_stage, owned_tensors, ties_kept
from hetero_strategy.parallelize.storage import FP32, Storage
from hetero_strategy.parallelize.traits import Traits, check_traits, restore_traits


def parallelize(
    name: str,
    module: Adapter,
    layout: ModuleLayout,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    seed: int,
    recompute: Recompute | None = None,
    offload: Offload | None = None,
    compile: str | None = None,
    split: Sequence[int] = (),
    pp_rank: int = 0,
    storage: Storage = FP32,
    copies: bool = True,
) -> dict[int, Adapter]:
    """Put this rank's stages of ``module`` on its mesh, in place. Call on the module's ranks only.

    Gradients are sums over the data-parallel and the context-parallel ranks, as of a loss that is divided by the number
    of all their loss tokens; a mean of ranks, or a division by a rank's own tokens, is another gradient. Code that runs
    stages without the strategy gives each rank its instance's inputs, and with ``cp`` its own part of these
    (``in_context`` of ``model.context``). It sets ``context_group`` of each stage to the name of the group of the ranks
    that have the other parts (``GroupRegistry.context``). If all of these ranks take whole inputs, each counts all
    rows, and gradients are ``cp`` times too large. After the last backward ``gradients.settle`` ends the step.

    Args:
        module: the whole module on the meta device. Afterwards it holds the tensors of this rank's stages under its own
            names; the others stay on meta.
        layout: its resolved layout.
        mesh: mesh of this rank's pipeline slice, with ``dp_shard``, on which context-parallel ranks lie too, and those
            of the axes ``dp_replicate, tp`` that are above 1; not read where neither FSDP2 nor tensor parallelism is
            applied.
        device: of its tensors; on meta they have no values.
        recompute: what runs again in backward instead of keeping its activations.
        offload: whose activations are in host memory between forward and backward.
        compile: backend that compiles its blocks and its loss; None: none does.
        split: blocks of each stage; not read without a pipeline.
        pp_rank: this rank's pipeline coordinate.
        storage: dtypes of its tensors.
        copies: a stage that this rank has for itself may compute with copies of its weights, which live as long as a
            step; else FSDP2 gathers them.

    Returns:
        This rank's stages by number; ``{0: module}`` without a pipeline.

    Raises:
        ModelError: a parameter is not what it was: see :func:`check_traits`.
        LayoutError: ``tp_chunks`` of a module that tensor parallelism splits in a way of its own.
    """
    module.meta_copy()  # the module as it was, for initialisation and counting
    traits = {fqn: Traits.of(parameter) for fqn, parameter in module.named_parameters()}
    with ties_kept([module]):
        module.to("meta")  # a part that came with values gets them back in shards
    traits = storage.store(name, module, traits)
    kept, blocks = storage.kept(name, module), list(module.blocks())
    assert layout.pipeline.stages in (1, len(split)), f"split {split} of {layout.pipeline.stages} stages"
    stages = cut(module, split, layout.pipeline.stages_of(pp_rank))
    host = None if offload is None else HostMemory(device)
    copied: list[Adapter] = []
    for stage in stages.values():
        stage.compute_dtype, stage.compiled_by = storage.compute, compile
        if module.float8 is not None:
            apply_float8(stage, module.float8, layout.tp, kept)
        if layout.tp > 1:
            assert mesh is not None
            _split(name, stage, mesh["tp"], layout.tp_chunks, device)
            restore_traits(traits, owned_tensors(stage))  # before FSDP, which sorts parameters by what trains
        compile_first = layout.tp > 1  # torch cannot compile a checkpoint around tensor-parallel layers
        if compile is not None and compile_first:
            apply_compile(stage.blocks().values(), compile)
        if recompute is not None:
            again = recompute.chosen(blocks)
            parts = [block for fqn, block in stage.blocks().items() if fqn in again]
            apply_recompute([stage] if recompute.whole else parts, recompute)
        if compile is not None and not compile_first:
            apply_compile(stage.blocks().values(), compile)
        if offload is not None and host is not None:
            away = offload.chosen(blocks)
            apply_offload(stage, [block for fqn, block in stage.blocks().items() if fqn in away], host)
        held = {id(part) for part in stage.modules()}
        precise = [layer for layer in kept if id(layer) in held]
        if copies and storage.copies(stage.parameters(), layout) and not precise:
            copied.append(stage)
        elif layout.shards > 1 or storage.casts(stage.parameters()):
            assert mesh is not None
            axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
            apply_fsdp(stage, mesh[axes], storage, precise)
        else:
            compute_in(storage, precise)
    with ties_kept(stages.values()):
        for stage in stages.values():
            stage.to_empty(device=device)
    for stage in stages.values():
        restore_traits(traits, owned_tensors(stage))
        check_traits(name, traits, owned_tensors(stage))
        if device.type == "meta":
            continue
        wanted: dict[str, Selection] = {fqn: {} for fqn, _ in stage.named_buffers()}
        wanted |= {fqn: _shard_of(parameter) for fqn, parameter in owned_tensors(stage).items()}
        fill(stage, initial_units(name, module, seed, wanted))
    for stage in copied:
        compute_with_copies(stage, storage.compute)
    adopt(module, stages)
    return stages


def _split(name: str, stage: Adapter, mesh: DeviceMesh, chunks: int, device: torch.device) -> None:
    """Put a stage on its tensor-parallel mesh."""
    stage.tp_chunks = chunks
    with ties_kept([stage]):
        stage.apply_tp(mesh)
    if chunks > 1 and not any(is_chunked(part) for part in stage.modules()):
        raise LayoutError(
            f"layout of '{name}': tp_chunks={chunks}, but {type(stage).__name__}.apply_tp cuts none of its linear maps;"
            " give in_chunks(plan) to parallelize_module there, or set tp_chunks=1"
        )
    if device.type == "cuda":  # else DTensor's first random operator would be a collective of the whole world
        with random_state_kept(device):
            manual_seed(0, mesh)


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
    if layout.cp > 1 and not module.context_parallel:
        faults.append(
            f"layout of '{name}': cp={layout.cp}, but {type(module).__name__} is not made for a part of its rows; set"
            " cp=1, or context_parallel = True in a language model whose rows meet in packed_attention alone"
        )
    elif layout.cp > 1 and (lie := module.row_sharding(layout)) != sharding(layout.cp, max(1, lie.parts // layout.cp)):
        faults.append(
            f"layout of '{name}': cp={layout.cp}, but row_sharding(layout) of {type(module).__name__} is {lie}; let it"
            " return sharding(layout.cp) of hetero_strategy.layout.row_sharding, or sharding(layout.cp, layout.tp)"
        )
    if layout.tp == 1:
        return faults
    if module.tp_plan() is None:
        kind = type(module).__name__
        return [*faults, f"layout of '{name}': tp={layout.tp}, but {kind} has no tensor-parallel plan; set tp=1"]
    if module.vocab_size is not None and not _shards_fit(module.vocab_size, layout.tp, layout.shards):
        size, tp, axes = module.vocab_size, layout.tp, "dp_shard" if layout.cp == 1 else "dp_shard x cp"
        faults.append(
            f"layout of '{name}': vocab_size={size} in tp={tp} parts that differ, each of which FSDP2 cuts in"
            f" {axes}={layout.shards} otherwise than their DTensor says; set vocab_size={-(-size // tp) * tp} or"
            f" {axes}=2"
        )
    return faults + [f"layout of '{name}': {fault}" for fault in module.tp_faults(layout.tp)]


def _shards_fit(size: int, tp: int, dp_shard: int) -> bool:
    """Whether FSDP2's parts of a dimension that tensor parallelism has cut are those of its DTensor: FSDP2 cuts each
    part alone, DTensor what all parts of a ``dp_shard`` rank come to.
    """
    cut = [chunk_sizes(part, dp_shard) for part in chunk_sizes(size, tp)]
    return all(list(parts) == chunk_sizes(sum(parts), tp) for parts in zip(*cut, strict=True))


def _has_statistics(layer: nn.Module) -> bool:
    """Whether the output of a layer depends on what else is in the batch, or training changes its buffers."""
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
    """Check the layouts of all modules.

    Raises:
        LayoutError: a module has no layout, a layout no module, or degrees do not divide a module; all faults at once.
    """
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
    """Write values into a stage's parameters, of each this rank's shard, and its buffers.

    Complex and integer buffers keep the dtype they are given, whatever the precision plugin made of the module.
    ``values`` are pairs of a name in the whole module and this rank's part of that tensor.
    """
    parameters = owned_tensors(stage)
    buffers = dict(stage.named_buffers())
    for fqn, value in values:
        if fqn in parameters:
            local(parameters[fqn]).copy_(value)
        else:
            path, _, leaf = fqn.rpartition(".")
            dtype = buffers[fqn].dtype if value.is_floating_point() else value.dtype
            stage.get_submodule(path)._buffers[leaf] = value.to(buffers[fqn].device, dtype)


def _shard_of(tensor: torch.Tensor) -> Selection:
    """Return which part of a tensor this rank keeps: what DTensor makes of the indices along each sharded dimension."""
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
