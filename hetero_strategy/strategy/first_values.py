"""Whether modules that came with values came with the same ones on all of their ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter

WORD = 8
"""Bytes."""


def check_first_values(
    modules: Mapping[str, Adapter], layouts: Mapping[str, ModuleLayout], device: torch.device
) -> None:
    """Refuse values that differ between ranks of a module, whose replicas would be trained apart. A collective over the
    world.

    Raises:
        ConfigError: naming the module and two of its ranks.
    """
    own = torch.tensor([digest(module) for module in modules.values()], device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    refuse_different(torch.stack(everyone).tolist(), modules, layouts)


def refuse_different(
    digests: Sequence[Sequence[int]], modules: Mapping[str, Adapter], layouts: Mapping[str, ModuleLayout]
) -> None:
    """Refuse digests (by rank, then in the order of the modules) that differ between ranks of a module."""
    for number, name in enumerate(modules):
        first, *rest = layouts[name].ranks
        other = next((rank for rank in rest if digests[rank][number] != digests[first][number]), None)
        if other is not None:
            raise ConfigError(
                f"HeteroStrategy: '{name}' was given with values that are not the same on ranks {first} and {other}:"
                " each process drew its own before the model was made. Make the ready module in configure_model(),"
                " where all ranks have the same random state, call seed_everything() before it is made, or load the"
                " same weights into it on all ranks"
            )


def digest(module: Adapter) -> int:
    """Tell values that a module was made with (:meth:`Adapter.initial_values`) from others, in 63 bits; tables that
    belong to no state dict, which are computed and not drawn, do not count.
    """
    lasting = module.meta_copy().state_dict().keys()
    values = {fqn: value for fqn, value in module.initial_values().items() if fqn in lasting}
    sums = [(fqn, tuple(value.shape), str(value.dtype), bit_sum(value)) for fqn, value in sorted(values.items())]
    return int.from_bytes(hashlib.blake2b(repr(sums).encode(), digest_size=8).digest(), "little") >> 1


def bit_sum(value: Tensor) -> int:
    """Sum a tensor's bytes, eight at a time as an integer: at the speed of memory, and the same for any threads."""
    flat = value.detach().reshape(-1)
    aligned = flat.storage_offset() * flat.itemsize % WORD == 0
    data = (flat if aligned else flat.clone()).view(torch.uint8)
    words, rest = data.split([len(data) // WORD * WORD, len(data) % WORD])
    return int(words.view(torch.int64).sum()) + int(rest.sum())
