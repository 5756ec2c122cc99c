"""Make the initial values of parameters and buffers: unit by unit, seeded, and the same for every layout.

A unit is one block, or the rest of a module. Its values depend only on (seed, module name, unit FQN) and are computed
in fp32 on the CPU, so any rank can make any unit and cut its shard from it. From a Hugging Face folder a rank reads
only its shards.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.hf_folder import Selection, TensorFolder, select
from hetero_strategy.model.hf_sources import match
from hetero_strategy.model.unread import Converted, Unread

SLICE = 16 << 20
"""Most bytes of a large parameter that are read at once."""
NO_PLACES: Mapping[str, Tensor] = MappingProxyType({})
CHANGED = (
    "module '{name}': {fqn} was added or given another shape after its model was made, so nothing gives it values;"
    " change the module before MultimodalModel(...) is given it"
)


def initial_units(
    name: str,
    adapter: Adapter,
    seed: int,
    wanted: Mapping[str, Selection] | None = None,
    places: Mapping[str, Tensor] = NO_PLACES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer once: (FQN inside the adapter, wanted part on the CPU in the parameter's dtype).

    Values come from the adapter's Hugging Face folder, if there is one, and from the extra tensors of an export.
    Tensors that such a folder never has (projector, tables of positions), and all tensors of other adapters, are
    initialised. Tensors that were real when the adapter was made (a ready backbone) keep their values. Only one unit is
    in memory at a time.

    Args:
        wanted: FQN -> its part to yield, ``{}`` for the whole. Only these parts are read from a folder. None: every
            whole tensor.
        places: FQN -> tensor that a part from a folder is written to, some rows at a time, instead of being yielded.
    """
    folder = None if adapter.checkpoint is None else TensorFolder(adapter.checkpoint)
    dtypes = {fqn: tensor.dtype for fqn, tensor in _tensors(adapter.meta_copy())}
    parameters = {fqn for fqn, _ in adapter.meta_copy().named_parameters()}
    with folder or nullcontext():
        sources: dict[str, Unread] = {}
        if folder is not None:
            sources = _sources(name, adapter, folder)
        for prefix, fqns in unit_tensors(adapter).items():
            parts = {fqn: {} if wanted is None else wanted[fqn] for fqn in fqns if wanted is None or fqn in wanted}
            if any(fqn not in sources for fqn in parts):
                # Missing buffers alone do not need other tensors of their unit; missing parameters depend on the random
                # numbers of earlier ones.
                missing = [fqn for fqn in fqns if fqn not in sources]
                drawn = missing if parameters.isdisjoint(missing) else fqns
                initialized = _initialized(name, adapter, seed, prefix, drawn, sources)
                values = ((fqn, value) for fqn, value in initialized if fqn in parts and fqn not in sources)
                yield from ((fqn, select(value, parts[fqn])) for fqn, value in values)
            for fqn, part in parts.items():
                if fqn in sources and fqn in places:
                    _read_into(places[fqn], sources[fqn], part, dtypes[fqn])
                elif fqn in sources:
                    yield fqn, sources[fqn].read(part).to(dtypes[fqn])


def check_folders(modules: Mapping[str, Adapter]) -> dict[str, int]:
    """Refuse folders that do not hold the tensors of their modules, as :func:`initial_units` does on every rank.

    Returns:
        Module -> number of its tensors that ranks read whole, as transformers converts them by more than moving slices.
    """
    whole: dict[str, int] = {}
    for name, adapter in modules.items():
        if adapter.checkpoint is not None:
            with TensorFolder(adapter.checkpoint) as folder:
                sources = _sources(name, adapter, folder)
            whole[name] = sum(isinstance(source, Converted) for source in sources.values())
    return {name: count for name, count in whole.items() if count}


def _sources(name: str, adapter: Adapter, folder: TensorFolder) -> dict[str, Unread]:
    shapes = {fqn: tensor.shape for fqn, tensor in _tensors(adapter.meta_copy())}
    return match(name, adapter.hf_weights(), folder, shapes)


def _read_into(place: Tensor, source: Unread, part: Selection, dtype: torch.dtype) -> None:
    """Read a part in slices of at most :data:`SLICE` bytes, so that a large tensor is in memory once."""
    rows = len(place) if place.ndim and not isinstance(source, Converted) else 0
    step = max(1, rows * SLICE // max(1, place.nbytes))
    if step >= rows:
        place.copy_(source.read(part).to(dtype))
        return
    index = part.get(0, torch.arange(rows))
    for start in range(0, rows, step):
        slice_read = source.read({**part, 0: index[start : start + step]})
        place[start : start + step].copy_(slice_read.to(dtype))


def materialize(module: nn.Module, seed: int, *, name: str = "", device: torch.device | None = None) -> None:
    """Give every meta tensor of a ``MultimodalModel``, or of an :class:`Adapter` called ``name``, its first value.

    Values are on ``device``, by default torch's default device.
    """
    device = device or torch.get_default_device()
    if not isinstance(module, Adapter):
        for child, adapter in module.modules_by_name.items():  # type: ignore[union-attr, operator]
            materialize(adapter, seed, name=child, device=device)
        return
    module.meta_copy()
    holders = _holders(module)
    current = dict(_tensors(module))
    if changed := changed_since_made(module):
        raise ModelError(CHANGED.format(name=name or type(module).__name__, fqn=changed[0]))
    if not any(tensor.is_meta for tensor in current.values()):
        return
    for fqn, value in initial_units(name, module, seed):
        if fqn in current and current[fqn].is_meta:
            _replace(holders, current[fqn], value.to(device))


def changed_since_made(adapter: Adapter) -> list[str]:
    """Return parameters and buffers added or reshaped since the adapter was made: they would get no values."""
    now, then = ({(fqn, tensor.shape) for fqn, tensor in _tensors(a)} for a in (adapter, adapter.meta_copy()))
    return sorted({fqn for fqn, _ in now - then})


def unit_tensors(adapter: Adapter) -> dict[str, list[str]]:
    """Return unit prefix ("" for the rest) -> FQNs of its parameters and buffers; each FQN is in one unit."""
    original = adapter.meta_copy()
    units: dict[str, list[str]] = {prefix: [] for prefix in ["", *original.blocks()]}
    # Longest first, so that a parent does not claim its nested block.
    prefixes = sorted(original.blocks(), key=len, reverse=True)
    for fqn, _ in _tensors(original):
        units[next((prefix for prefix in prefixes if fqn.startswith(prefix + ".")), "")].append(fqn)
    return units


def _initialized(
    name: str, adapter: Adapter, seed: int, prefix: str, fqns: list[str], elsewhere: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one unit with their values from the adapter's making, or newly initialised.

    Initialisation may leave out tensors that get their values ``elsewhere``.
    """
    original = adapter.meta_copy()
    ready = adapter.initial_values()
    if all(fqn in ready for fqn in fqns):
        yield from ((fqn, ready[fqn].detach()) for fqn in fqns)
        return
    blocks = original.blocks()
    root = blocks[prefix] if prefix else original
    memo: dict[int, Any] = {} if prefix else {id(block): nn.Identity() for block in blocks.values()}
    digest = hashlib.sha256(f"{seed}/{name}/{prefix}".encode()).digest()
    with _fp32_cpu(int.from_bytes(digest[:8], "little") >> 1):
        unit = copy.deepcopy(root, memo)
        empty = _fill_with_nothing(unit, {fqn.removeprefix(f"{prefix}.") for fqn in fqns})
        adapter.initialize(prefix, unit)
    values = {f"{prefix}.{fqn}" if prefix else fqn: value for fqn, value in _tensors(unit)}
    untouched = {id(tensor) for tensor, version in empty if tensor._version == version and not tensor.any()}
    dtypes = {fqn: tensor.dtype for fqn, tensor in _tensors(original)}
    for fqn in fqns:
        if fqn in ready:
            yield fqn, ready[fqn].detach()
            continue
        value = values[fqn].detach()
        if (id(values[fqn]) in untouched or _is_nothing(value)) and fqn not in elsewhere:
            raise ModelError(
                f"{name}: nothing initialises {fqn} {tuple(value.shape)}: give its module a reset_parameters(), or "
                "pass a module with values"
            )
        yield fqn, value.to(dtypes[fqn])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, shared ones once, under their first name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


_Holders = dict[int, list[tuple[dict[str, Any], str]]]
"""Tensor ``id`` -> every (dictionary, key) that holds it, so that shared tensors stay shared."""


def _holders(module: nn.Module) -> _Holders:
    holders: _Holders = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    holders.setdefault(id(tensor), []).append((table, key))
    return holders


def _replace(holders: _Holders, tensor: Tensor, value: Tensor) -> Tensor:
    """Replace ``tensor`` everywhere by ``value``, with its attributes and as a parameter if it is one; return that."""
    new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    new.__dict__.update(vars(tensor))
    for table, key in holders[id(tensor)]:
        table[key] = new
    return new


def _fill_with_nothing(unit: nn.Module, fqns: Collection[str]) -> list[tuple[Tensor, int]]:
    """Give tensors of a unit real memory whose values show whether it was written: NaN, or the least integer.

    Returns:
        Tensors in which every value is plausible, such as masks, with their versions, which grow with each write.
    """
    holders, untold = _holders(unit), []
    for tensor in [tensor for fqn, tensor in _tensors(unit) if fqn in fqns]:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        filled = _replace(holders, tensor, torch.full(tensor.shape, _nothing(dtype), dtype=dtype))
        if dtype in _ALL_VALUES_MEAN and filled.numel() > 1:
            untold.append((filled, filled._version))
    return untold


_ALL_VALUES_MEAN = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def _nothing(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return 0 if dtype in _ALL_VALUES_MEAN else torch.iinfo(dtype).min


def _is_nothing(value: Tensor) -> bool:
    nothing = _nothing(value.dtype)
    return value.dtype not in _ALL_VALUES_MEAN and bool(
        (value.isnan() if nothing != nothing else value == nothing).any()
    )


@contextmanager
def _fp32_cpu(seed: int) -> Iterator[None]:
    """Compute in fp32 on the CPU with a separate generator; the process's random state stays untouched."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
