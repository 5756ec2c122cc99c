"""First values of parameters and buffers: unit by unit, seeded, and the same for every layout.

A unit is one block, or the rest of a module. Its values depend on (seed, module name, unit FQN) alone and are computed
in fp32 on the CPU, so any rank can make any unit and cut its shard from it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.hf_folder import TensorFolder, halves_to_pairs


def initial_units(
    name: str, adapter: Adapter, seed: int, wanted: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """First values from the adapter's checkpoint folder where it has one, else from its initialisation.

    Args:
        name: of the module in the model.
        adapter: whole.
        seed: of the initialisation.
        wanted: FQNs; units without any of them are not made. None: all.
    """
    if adapter.checkpoint is None:
        return initialize_units(name, adapter, seed, wanted)
    return pretrained_units(name, adapter, seed, wanted=wanted)


def initialize_units(
    name: str, adapter: Adapter, seed: int, wanted: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once: (FQN inside the adapter, full tensor on the CPU in the parameter's dtype).

    Memory is one unit. Tensors that were real when the adapter was made (a ready backbone) are given as they were.
    Arguments as :func:`initial_units`.

    Raises:
        ModelError: a parameter or buffer that nothing initialises.
    """
    for prefix, fqns in _wanted_units(adapter, wanted):
        yield from _initialized(name, adapter, seed, prefix, fqns)


def pretrained_units(
    name: str, adapter: Adapter, seed: int, folder: str | None = None, wanted: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """As :func:`initialize_units`, with the values of a local Hugging Face folder; what it lacks by nature (projector,
    tables of positions) is initialised.

    Raises:
        ModelError: names are missing in the folder or unexpected, or a shape differs.
    """
    folder = folder or adapter.checkpoint
    if folder is None:
        raise ModelError(f"{name}: no checkpoint folder")
    twin = adapter.twin()
    dtypes = {fqn: tensor.dtype for fqn, tensor in _tensors(twin)}
    with TensorFolder(folder) as tensors:
        sources, heads = _match(name, adapter, tensors), adapter.paired_heads()
        for prefix, fqns in _wanted_units(adapter, wanted):
            remaining = [fqn for fqn in fqns if fqn not in sources]
            if remaining:
                initialized = _initialized(name, adapter, seed, prefix, fqns)
                yield from ((fqn, value) for fqn, value in initialized if fqn not in sources)
            for fqn in fqns:
                if fqn in sources and (wanted is None or fqn in wanted):
                    value = tensors.read(sources[fqn])
                    yield fqn, (halves_to_pairs(value, heads[fqn]) if fqn in heads else value).to(dtypes[fqn])


def _wanted_units(adapter: Adapter, wanted: Collection[str] | None) -> Iterator[tuple[str, list[str]]]:
    for prefix, fqns in unit_tensors(adapter).items():
        if wanted is None or any(fqn in wanted for fqn in fqns):
            yield prefix, fqns


def materialize(module: nn.Module, seed: int, *, name: str = "", device: torch.device | None = None) -> None:
    """Give every meta parameter and buffer of a ``MultimodalModel`` or one :class:`Adapter` its first value.

    Args:
        module: the model, or an adapter.
        seed: of the initialisation.
        name: the adapter's module name; the model knows its own.
        device: where the values go, torch's default device by default.
    """
    device = device or torch.get_default_device()
    if not isinstance(module, Adapter):
        for child, adapter in module.modules_by_name.items():  # type: ignore[union-attr, operator]
            materialize(adapter, seed, name=child, device=device)
        return
    module.twin()
    holders = _holders(module)
    current = dict(_tensors(module))
    if not any(tensor.is_meta for tensor in current.values()):
        return
    for fqn, value in initial_units(name, module, seed):
        tensor = current[fqn]
        if not tensor.is_meta:
            continue
        value = value.to(device)
        made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        made.__dict__.update(vars(tensor))
        for table, key in holders[id(tensor)]:
            table[key] = made


def unit_tensors(adapter: Adapter) -> dict[str, list[str]]:
    """Unit prefix ("" for the rest) -> FQNs of its parameters and buffers; each FQN is in one unit."""
    prefixes = sorted(adapter.twin().blocks(), key=len, reverse=True)
    units: dict[str, list[str]] = {prefix: [] for prefix in ["", *adapter.twin().blocks()]}
    for fqn, _ in _tensors(adapter.twin()):
        # Longest first, so that layers.1 does not claim layers.10 nor a parent its nested block.
        units[next((prefix for prefix in prefixes if fqn.startswith(prefix + ".")), "")].append(fqn)
    return units


def unit_seed(seed: int, name: str, prefix: str) -> int:
    """Seed of one unit's generator."""
    digest = hashlib.sha256(f"{seed}/{name}/{prefix}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _initialized(name: str, adapter: Adapter, seed: int, prefix: str, fqns: list[str]) -> Iterator[tuple[str, Tensor]]:
    twin = adapter.twin()
    given = adapter.given()
    if all(fqn in given for fqn in fqns):
        yield from ((fqn, given[fqn].detach()) for fqn in fqns)
        return
    blocks = twin.blocks()
    root = blocks[prefix] if prefix else twin
    memo: dict[int, Any] = {} if prefix else {id(block): nn.Identity() for block in blocks.values()}
    with _fp32_cpu(unit_seed(seed, name, prefix)):
        unit = copy.deepcopy(root, memo)
        _fill_with_nothing(unit)
        adapter.initialize(prefix, unit)
    values = {f"{prefix}.{fqn}" if prefix else fqn: value for fqn, value in _tensors(unit)}
    dtypes = {fqn: tensor.dtype for fqn, tensor in _tensors(twin)}
    for fqn in fqns:
        if fqn in given:
            yield fqn, given[fqn].detach()
            continue
        value = values[fqn].detach()
        if _is_nothing(value):
            raise ModelError(
                f"{name}: nothing initialises {fqn} {tuple(value.shape)}: give its module a reset_parameters(), or "
                "pass a module with values"
            )
        yield fqn, value.to(dtypes[fqn])


def _match(name: str, adapter: Adapter, tensors: TensorFolder) -> dict[str, str]:
    """Our FQN -> name in the folder."""
    wanted = adapter.export_names()
    if not wanted:
        raise ModelError(f"{name}: {type(adapter).__name__} cannot be loaded from a Hugging Face folder")
    have = tensors.names()
    prefix = max(adapter.export_prefixes(), key=lambda start: sum(start + theirs in have for theirs in wanted.values()))
    sources = {fqn: prefix + theirs for fqn, theirs in wanted.items()}
    if missing := [theirs for theirs in sources.values() if theirs not in have]:
        raise ModelError(f"{name}: {tensors.folder} lacks {len(missing)} tensors, such as {sorted(missing)[:3]}")
    extra = have - set(sources.values())
    if unexpected := sorted(theirs for theirs in extra if not adapter.unused_export(theirs)):
        raise ModelError(
            f"{name}: {tensors.folder} holds {len(unexpected)} tensors this model has no place for, such as "
            f"{unexpected[:3]}"
        )
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in _tensors(adapter.twin())}
    for fqn, theirs in sources.items():
        if tensors.shape(theirs) != shapes[fqn]:
            raise ModelError(
                f"{name}: {theirs} in {tensors.folder} has shape {tensors.shape(theirs)}, the model has {shapes[fqn]}: "
                "config.json and weights do not belong together"
            )
    return sources


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, shared ones once, under their first name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _holders(module: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Every place that holds a tensor, so that shared tensors stay shared."""
    holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    holders.setdefault(id(tensor), []).append((table, key))
    return holders


def _fill_with_nothing(unit: nn.Module) -> None:
    """Real memory that shows whether it was written: NaN, or the least integer."""
    holders = _holders(unit)
    for _, tensor in list(_tensors(unit)):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        if dtype == torch.bool:
            real = torch.zeros(tensor.shape, dtype=dtype)
        elif dtype.is_floating_point or dtype.is_complex:
            real = torch.full(tensor.shape, torch.nan, dtype=dtype)
        else:
            real = torch.full(tensor.shape, torch.iinfo(dtype).min, dtype=dtype)
        made = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
        for table, key in holders[id(tensor)]:
            table[key] = made


def _is_nothing(value: Tensor) -> bool:
    if value.dtype == torch.bool or value.numel() == 0:
        return False
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return bool((value == torch.iinfo(value.dtype).min).any())


@contextmanager
def _fp32_cpu(seed: int) -> Iterator[None]:
    """fp32 on the CPU from a generator of our own; the process's random state is untouched."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
