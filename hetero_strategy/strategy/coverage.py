"""Check that the ranks' parts make up whole tensors, so that their checkpoint holds the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hetero_strategy.checkpoint.folder import Piece
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.schedule.action import StageId


class Coverage:
    """A collection of the parts that sampled ranks of every stage have built.

    Args:
        whole: module -> all its tensors by name, before anything is parallelised.
        layouts: resolved layouts.
    """

    def __init__(self, whole: Mapping[str, Mapping[str, torch.Tensor]], layouts: Mapping[str, ModuleLayout]) -> None:
        self._whole, self._layouts = whole, layouts
        self._faults: list[tuple[StageId, str]] = []
        self._built: set[StageId] = set()
        self._there: set[str] = set()
        self._summed: dict[object, int] = {}

    def add(
        self,
        rank: int,
        stages: Sequence[StageId],
        tensors: Mapping[str, torch.Tensor],
        pieces: Mapping[str, Sequence[Piece]],
    ) -> None:
        """Add a rank's tensors by ``<module>.<fqn>``, and the pieces of them that it saves to a checkpoint."""
        self._built.update(stages)
        of = {stage.module: stage for stage in stages}
        for name, tensor in tensors.items():
            module, _, fqn = name.partition(".")
            self._there.add(name)
            shape, total = self._whole[module][fqn].shape, tensor.numel()
            here = sum(prod(piece.sizes) for piece in pieces.get(name, ()))
            if tensor.shape != shape:
                self._faults.append((of[module], f"{name} is {tuple(tensor.shape)} on rank {rank}, not {tuple(shape)}"))
            if isinstance(tensor, DTensor):
                if here != tensor.to_local().numel():
                    size = tensor.to_local().numel()
                    self._faults.append((of[module], f"rank {rank} holds {size} elements of {name} but saves {here}"))
                total = self._elements(tensor)
            if total != tensor.numel():
                message = f"the ranks of its mesh hold {total} of the {tensor.numel()} elements of {name}"
                self._faults.append((of[module], message))

    def faults(self) -> Iterator[tuple[StageId, str]]:
        """Yield tensors that no rank has or whose parts do not make them up; skip stages that were not built."""
        yield from dict.fromkeys(self._faults)
        for module, tensors in self._whole.items():
            stages = [StageId(module, number) for number in range(self._layouts[module].pipeline.stages)]
            if self._built.issuperset(stages):
                for fqn in tensors:
                    if f"{module}.{fqn}" not in self._there:
                        yield stages[0], f"{module}.{fqn} is on no rank"

    def _elements(self, tensor: DTensor) -> int:
        """Count the elements that all ranks of a tensor's mesh hold; copies count once."""
        key = (tensor.shape, tensor.device_mesh.shape, tensor.placements)
        if key not in self._summed:
            shapes = Counter({tensor.shape: 1})
            for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
                if isinstance(placement, (Shard, _StridedShard)):
                    shapes = _split(shapes, placement, size)
            self._summed[key] = sum(prod(shape) * count for shape, count in shapes.items())
        return self._summed[key]


def _split(shapes: Counter[torch.Size], placement: Shard | _StridedShard, ranks: int) -> Counter[torch.Size]:
    """Count the parts of each shape over all ranks."""
    parts: Counter[torch.Size] = Counter()
    for shape, count in shapes.items():
        whole = torch.empty(shape, device="meta")
        for part in placement._split_tensor(whole, ranks, with_padding=False, contiguous=False)[0]:
            parts[part.shape] += count
    return parts
