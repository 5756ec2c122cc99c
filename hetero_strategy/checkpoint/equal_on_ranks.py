"""Refuses what a checkpoint would hold of one rank for all, where ranks have different things."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hetero_strategy.checkpoint.all_or_none import AllOrNone
from hetero_strategy.errors import CheckpointError


def refuse_parts(found: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse a state that has parts of tensors under names that no layout knows, or no tensor under one that it does.

    Raises:
        CheckpointError: with the name.
    """
    for name, value in found.items():
        if name in known and not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"checkpoint: state_dict() has a {type(value).__name__} in the place of parameter or buffer {name!r};"
                " a checkpoint holds tensors under their own names: leave it as it is, or out"
            )
        if name not in known and isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.is_meta):
            raise CheckpointError(
                f"checkpoint: state_dict() has {name!r}, a tensor of which ranks have parts, under a name that the"
                " module does not have, so that no other layout could load it; leave names as they are, and rename"
                " in an export or in load_state_dict()"
            )


def refuse_apart(team: AllOrNone, states: Mapping[str, object]) -> None:
    """Refuse states whose tensors are not the same on all ranks, such as averages of the weights that a rank owns:
    rank 0's are saved, and all ranks would get those back. Single numbers are left out: ranks may round a score apart.
    """
    if team.size == 1:
        return
    digests = {name: digest for name, state in states.items() if (digest := _digest(state)) is not None}
    if not team.anywhere([bool(digests)])[0]:
        return
    first = team.from_one(lambda: digests)
    names = sorted(first)
    apart = team.anywhere([digests.get(name) != first[name] for name in names] + [digests.keys() != first.keys()])
    if any(apart):
        which = [name for name, differs in zip([*names, "one that is not on all ranks"], apart, strict=True) if differs]
        raise CheckpointError(
            f"checkpoint: tensors in the state of {', '.join(which)} differ between ranks, and rank 0's are kept for"
            " all; leave them out of its state_dict() or on_save_checkpoint(), or keep them the same on all ranks"
        )


def _digest(state: object) -> int | None:
    """Of all tensors of several numbers in a state; None if it has none."""
    leaves = (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor))
    strided = (leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_meta)  # others have no form
    tensors, digest = [leaf for leaf in strided if leaf.numel() > 1], 0
    for tensor in tensors:
        digest = zlib.crc32(repr((tensor.dtype, tensor.shape)).encode(), digest)
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
        digest = zlib.crc32(plain.view(torch.uint8).numpy().data, digest)
    return digest if tensors else None
