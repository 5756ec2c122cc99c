"""Boxes of a whole tensor that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class Box:
    """A box of a tensor, and where it begins in the part of the rank that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: tuple[int, ...]

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of its rank's part."""
        return part[tuple(slice(begin, begin + size) for begin, size in zip(self.start, self.sizes, strict=True))]


def boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Box]:
    """Return the boxes of a tensor at a coordinate of its mesh: one, unless joined matrices are divided each.

    Example: the second of two ranks with ``_StridedShard(0, split_factor=2)`` of 8 rows, which are two joined matrices
    of 4, holds rows 2 and 3, and 6 and 7: boxes at 2 and 6, which begin at 0 and 2 in its part.
    """
    sizes, offsets = _compute_local_shape_and_global_offset(
        torch.Size(shape), tuple(mesh_shape), list(coordinate), placements
    )
    runs = [[(offset, size, 0)] for offset, size in zip(offsets, sizes, strict=True)]
    for dim in {placement.dim for placement in placements if isinstance(placement, _StridedShard)}:
        if 0 not in sizes and _has_gaps(dim, mesh_shape, placements):
            runs[dim] = _runs(shape[dim], dim, mesh_shape, coordinate, placements)
    return [Box(*zip(*sides, strict=True)) if sides else Box((), (), ()) for sides in product(*runs)]


def boxes_of(tensor: torch.Tensor) -> list[Box]:
    """Return the boxes of a tensor that this rank holds; of a plain one, all of it."""
    if not isinstance(tensor, DTensor):
        return boxes(tensor.shape, (), (), ())
    mesh = tensor.device_mesh
    return boxes(tensor.shape, mesh.shape, mesh.get_coordinate() or (), tensor.placements)


def _has_gaps(dim: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Return whether later axes of the mesh leave gaps between a rank's rows; FSDP's own strides close them."""
    axes = [(axis, p) for axis, p in enumerate(placements) if getattr(p, "dim", None) == dim]
    first, strided = next((axis, p) for axis, p in axes if isinstance(p, _StridedShard))
    return strided.split_factor != prod(mesh_shape[axis] for axis, _ in axes if axis > first)


def _runs(
    size: int, dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[int, int, int]]:
    """Return offset, size and start in the rank's part of each run of neighbours along a dimension."""
    indices = torch.arange(size).view([1] * dim + [-1])
    for placement, ranks, place in zip(placements, mesh_shape, coordinate, strict=True):
        if getattr(placement, "dim", None) == dim:
            split: list[torch.Tensor] = placement._split_tensor(indices, ranks, with_padding=False, contiguous=False)[0]  # type: ignore[attr-defined]
            indices = split[place]
    indices = indices.flatten()
    breaks = [0, *((indices.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(indices)]
    return [(int(indices[begin]), end - begin, begin) for begin, end in pairwise(breaks)]
