"""What a module of a person's own says of its parts by name, compared with the parts that it has."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from hetero_strategy.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def container(module: nn.Module, block_list: str) -> nn.Module:
    """Return the list of a module's blocks.

    Raises:
        ModelError: the module has no part of this name.
    """
    try:
        return module.get_submodule(block_list)
    except AttributeError:
        lists = [n for n, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.ModuleDict))]
        raise ModelError(
            f"{type(module).__name__}: block_list = {block_list!r}, but it has no part of that name; its lists of parts"
            f" are {', '.join(lists) or 'none'}"
        ) from None


def tp_faults(
    module: nn.Module, plan: Mapping[str, ParallelStyle], blocks: Mapping[str, nn.Module], tp: int
) -> list[str]:
    """Return what a plan of tensor parallelism names and the module lacks, and layers of its blocks that do not divide.

    Args:
        plan: FQNs (globs allowed) of layers -> how they are split.
        blocks: the module's blocks by FQN.
        tp: number of ranks that share each layer.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    linear = {
        fqn.removeprefix(f"{block}."): part
        for block in blocks
        for fqn, part in module.named_modules()
        if fqn.startswith(f"{block}.") and isinstance(part, nn.Linear)
    }
    parts, faults = dict(module.named_modules()), []
    for pattern, style in plan.items():
        named = [fqn for fqn in parts if fnmatchcase(fqn, pattern)]
        cut = [fqn for fqn in named if type(style) in (ColwiseParallel, RowwiseParallel)]
        cut = [fqn for fqn in cut if fqn.count(".") == pattern.count(".")]  # as torch matches them
        if other := [fqn for fqn in cut if not isinstance(parts[fqn], (nn.Linear, nn.Embedding))]:
            faults.append(
                f"tp={tp}, but {other[0]} is a {type(parts[other[0]]).__name__} and no nn.Linear or nn.Embedding, which"
                " alone can be split so; name the linear layers in it in tp_columns and tp_rows, or set tp=1"
            )
        if not named:
            faults.append(
                f"tp={tp}, but it has no part {pattern}, which tp_columns, tp_rows or tp_plan() names; the linear"
                f" layers of its blocks are {', '.join(linear) or 'none'}"
            )
        for name, layer in linear.items():
            if not any(fnmatchcase(f"{block}.{name}", pattern) for block in blocks):
                continue
            if isinstance(style, ColwiseParallel) and layer.out_features % tp:
                faults.append(f"{layer.out_features} outputs of {name} not divisible by tp {tp}")
            if isinstance(style, RowwiseParallel) and layer.in_features % tp:
                faults.append(f"{layer.in_features} inputs of {name} not divisible by tp {tp}")
    return faults
