"""Random numbers inside modules (dropout, stochastic depth, noise) follow from what is computed, not from where.

The process's default generators are seeded anew for every microbatch of a module, and before and after each of its
blocks, so it does not matter which ranks hold a module, how it is cut into stages, what else a rank computes, or in
which order. NumPy's and Python's own, of which transformers draws masks of spectrograms, are seeded for every
microbatch alone, before its forward and before its backward, and only where a module's code could draw of them. Ranks
of a tensor-parallel instance draw the same numbers where they hold the same rows, and other ones where each holds a
part, as Megatron's RNG tracker does (Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn


class RandomNumbers:
    """The random numbers of one module; before and after each of its ``blocks`` the generators are seeded anew.

    Args:
        others: whether NumPy's and Python's generators are seeded too, see :func:`draws_others`.
    """

    def __init__(self, seed: int, name: str, blocks: Mapping[str, nn.Module], *, others: bool = False) -> None:
        self._module = number_of(f"{seed} {name}")
        self._seeds_others = others
        self._microbatch: int | None = None
        self._shard = 0
        self._device: torch.device | None = None
        self._generators: list[torch.Generator] = []
        self._aside: list[torch.Tensor] = []
        self._watched = self._drew = False
        self._seeded: list[torch.Tensor] = []
        self._others: tuple[Any, ...] | None = None
        for fqn, block in blocks.items():
            block.register_forward_pre_hook(partial(_seed, self, number_of(fqn)))
            block.register_forward_hook(partial(_seed, self, number_of(f"after {fqn}")))

    def start(
        self,
        metadata: Any,
        call: int,
        microbatch: int,
        instance: int,
        shard: int,
        device: torch.device,
        *,
        rows_of: int,
    ) -> int:
        """Seed the generators for a microbatch, before its forward.

        Args:
            metadata: the step plan's metadata, of which epoch and step are read.
            call: how often the model was called with this very batch before.
            microbatch: number among the module's microbatches.
            instance: data-parallel coordinate.
            shard: coordinate among the instance's ranks.
            device: where the module lives.
            rows_of: which part of the instance's rows this rank has; 0 where every rank has them all.

        Returns:
            What :meth:`again` takes.
        """
        if device != self._device:
            self._device, self._generators = device, generators(device)
        self._shard = shard
        seed = _hashed(_SEVEN.pack(self._module, metadata.epoch, metadata.step, call, microbatch, instance, rows_of))
        self.again(seed)
        return seed

    def again(self, seed: int) -> None:
        """Seed the generators for a microbatch as before, before its backward, which may run forward again."""
        self._microbatch, self._aside = seed, []
        self._drew, self._seeded = False, []
        if self._seeds_others:
            np.random.seed(seed & 0xFFFFFFFF)
            random.seed(seed)
            self._others = _others() if self._watched else None
        self.seed(0)

    def seed(self, position: int) -> None:
        """Continue with the numbers that belong to this position in the module, see :func:`number_of`."""
        if self._microbatch is None:
            return
        self._look()
        for generator in self._generators:
            generator.manual_seed(self._microbatch ^ position)
        if self._watched:
            self._seeded = [generator.get_state() for generator in self._generators]

    def stop(self) -> None:
        """Leave the generators alone until the next microbatch starts."""
        self._microbatch = None

    def watch(self) -> None:
        """Look from now on whether numbers are drawn."""
        self._watched = True

    def drew(self) -> bool:
        """Whether the microbatch has drawn any number so far, where that is watched."""
        self._look()
        return self._drew

    def _look(self) -> None:
        for generator, state in zip(self._generators, self._seeded, strict=False):
            self._drew |= not torch.equal(generator.get_state(), state)
        self._drew |= self._others is not None and self._others != _others()

    def part(self, position: str) -> None:
        """Until :meth:`join`, use numbers of this rank alone: each tensor-parallel rank has other columns."""
        if self._microbatch is not None and not self._aside:
            self._aside = [generator.get_state() for generator in self._generators]
            self.seed(number_of(f"{position} {self._shard}"))

    def join(self) -> None:
        """Continue with the numbers that all ranks with the same rows share, where :meth:`part` left them."""
        for generator, state in zip(self._generators, self._aside, strict=False):
            generator.set_state(state)
        self._aside = []


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the process's own random state afterwards."""
    states = [(generator, generator.get_state()) for generator in generators(device)]
    others = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(others[0])
        random.setstate(others[1])
        for generator, state in states:
            generator.set_state(state)


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators of the host and of a device; using their states does not wait for the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def draws_others(module: nn.Module) -> bool:
    """Whether the code of any part of a module could draw from NumPy or Python: its file imports one of them."""
    files = {type(part).__module__ for part in module.modules()}
    named = (vars(sys.modules[f]) for f in files if not f.startswith("hetero_strategy.") and f in sys.modules)
    held = (names.get(name) for names in named for name in ("np", "numpy", "random"))
    return any(one is known for one in held for known in (np, np.random, random))


def _others() -> tuple[Any, ...]:
    """How far NumPy's and Python's generators are: no number is drawn without a change."""
    state: Any = np.random.get_state()
    return state[0], state[1].tobytes(), *state[2:], random.getstate()


def number_of(position: str) -> int:
    """64 bits that stand for a position in a module."""
    return _hashed(position.encode())


_SEVEN = struct.Struct("<Q6q")


def _hashed(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _seed(numbers: RandomNumbers, position: int, *_: Any) -> None:
    numbers.seed(position)
