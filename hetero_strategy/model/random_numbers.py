"""Random numbers inside modules (dropout, stochastic depth, noise) follow from what is computed, not from where.

The process's default generators are seeded anew for every microbatch of a module, and before and after each of its
blocks, so it does not matter which ranks hold a module, how it is cut into stages, what else a rank computes, or in
which order. Ranks of a tensor-parallel instance draw the same numbers where they hold the same rows, and other ones
where each holds a part, as Megatron's RNG tracker does (Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


class RandomNumbers:
    """The random numbers of one module; before and after each of its ``blocks`` the generators are seeded anew."""

    def __init__(self, seed: int, name: str, blocks: Mapping[str, nn.Module]) -> None:
        self._name = (seed, name)
        self._key: tuple[Any, ...] | None = None
        self._shard = 0
        self._generators: list[torch.Generator] = []
        self._aside: list[torch.Tensor] = []
        for fqn, block in blocks.items():
            block.register_forward_pre_hook(partial(_seed, self, fqn))
            block.register_forward_hook(partial(_seed, self, f"after {fqn}"))

    def start(
        self,
        metadata: Any,
        call: int,
        microbatch: int,
        instance: int,
        shard: int,
        device: torch.device,
        *,
        rows_apart: bool,
    ) -> None:
        """Seed the generators for a microbatch, before its forward and its backward, which may run forward again.

        Args:
            metadata: the step plan's metadata, of which epoch and step are read.
            call: how often the model was called with this very batch before.
            microbatch: number among the module's microbatches.
            instance: data-parallel coordinate.
            shard: coordinate among the instance's ranks.
            device: where the module lives.
            rows_apart: whether each of the instance's ranks has other rows.
        """
        self._key = (*self._name, metadata.epoch, metadata.step, call, microbatch, instance, shard * rows_apart)
        self._shard, self._generators, self._aside = shard, generators(device), []
        self.seed("")

    def seed(self, *position: object) -> None:
        """Continue with the numbers that belong to this position in the module."""
        if self._key is not None:
            digest = hashlib.blake2b(repr((self._key, position)).encode(), digest_size=8).digest()
            for generator in self._generators:
                generator.manual_seed(int.from_bytes(digest))

    def part(self, position: str) -> None:
        """Until :meth:`join`, use numbers of this rank alone: each tensor-parallel rank has other columns."""
        if self._key is not None and not self._aside:
            self._aside = [generator.get_state() for generator in self._generators]
            self.seed(position, self._shard)

    def join(self) -> None:
        """Continue with the numbers that all of the instance's ranks share, where :meth:`part` left them."""
        for generator, state in zip(self._generators, self._aside, strict=False):
            generator.set_state(state)
        self._aside = []


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the process's own random state afterwards."""
    states = [(generator, generator.get_state()) for generator in generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators of the host and of a device; using their states does not wait for the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def _seed(numbers: RandomNumbers, position: str, *_: Any) -> None:
    numbers.seed(position)
