"""Random numbers inside modules (dropout, stochastic depth, noise) that do not depend on the layout.

The process's default generators are seeded for every microbatch of a module, and before and after each of its blocks,
so the ranks of a module, its stages, other work of a rank and the order of work do not matter. NumPy's and Python's
generators, from which transformers draws masks of spectrograms, are seeded only per microbatch, before its forward and
before its backward, and only if a module's code could use them. Ranks of a tensor-parallel instance draw the same
numbers for shared rows and different ones for parts of rows, like Megatron's RNG tracker (Korthikanti et al. 2022,
section 5).

If no code draws, nothing is seeded: see :class:`Seeding`.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hetero_strategy.model.tensor_parallel import Plan, begins_columns, ends_columns, style_of


class RandomNumbers:
    """The random numbers of one module; the generators are seeded before and after each of its ``blocks``.

    Args:
        others: whether NumPy's and Python's generators are seeded too, see :func:`draws_others`.
    """

    def __init__(self, seed: int, name: str, blocks: Mapping[str, nn.Module], *, others: bool = False) -> None:
        self._module = number_of(f"{seed} {name}")
        self.name, self.seeds_others = name, others
        self.watcher: AbstractContextManager[Any] = nullcontext()
        """Context manager around seeding, which checks what has been drawn before."""
        self._blocks, self._hooks = dict(blocks), list[RemovableHandle]()
        self._microbatch: int | None = None
        self._shard = 0
        self.part_of_rows = 0
        """Number of the part of the rows on which this rank's blocks run; all other code has all rows."""
        self._device: torch.device | None = None
        self._generators: list[torch.Generator] = []
        self._aside: list[torch.Tensor] = []
        self.rest(idle=False)

    def rest(self, *, idle: bool) -> None:
        """Stop seeding and remove the hooks from the blocks; or, if not ``idle``, start seeding again."""
        self._idle, self._microbatch = idle, None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for fqn, block in () if idle else self._blocks.items():
            self._hooks.append(block.register_forward_pre_hook(partial(_seed_block, self, number_of(fqn))))
            self._hooks.append(block.register_forward_hook(partial(_seed, self, number_of(f"after {fqn}"))))

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
            metadata: metadata of the step plan; epoch and step are read.
            call: number of earlier calls of the model with this batch.
            microbatch: number among the module's microbatches.
            instance: data-parallel coordinate.
            shard: coordinate among the instance's ranks.
            device: device of the module.
            rows_of: this rank's part of the instance's rows; 0 if every rank has all rows.

        Returns:
            The seed for :meth:`again`.
        """
        if self._idle:
            return 0
        if device != self._device:
            self._device, self._generators = device, generators(device)
        self._shard = shard
        seed = _hashed(_SEVEN.pack(self._module, metadata.epoch, metadata.step, call, microbatch, instance, rows_of))
        self.again(seed)
        return seed

    def again(self, seed: int) -> None:
        """Seed the generators for a microbatch as before, before its backward, which may run forward again."""
        if self._idle:
            return
        self._microbatch, self._aside = seed, []
        if self.seeds_others:
            with self.watcher:
                np.random.seed(seed & 0xFFFFFFFF)
                random.seed(seed)
        self.seed(0)

    def seed(self, position: int) -> None:
        """Continue with the numbers of this position in the module, see :func:`number_of`."""
        if self._microbatch is None:
            return
        with self.watcher:
            for generator in self._generators:
                generator.manual_seed(self._microbatch ^ position)

    def stop(self) -> None:
        """Leave the generators alone until the next microbatch starts."""
        self._microbatch = None

    def part(self, position: str) -> None:
        """Use numbers of this rank alone until :meth:`join`: each tensor-parallel rank has other columns."""
        if self._microbatch is not None and not self._aside:
            self._aside = [generator.get_state() for generator in self._generators]
            self.seed(number_of(f"{position} {self._shard}"))

    def join(self) -> None:
        """Continue with the numbers shared by all ranks with the same rows, from where :meth:`part` left them."""
        if not self._aside:
            return
        with self.watcher:
            for generator, state in zip(self._generators, self._aside, strict=False):
                generator.set_state(state)
        self._aside = []


class Seeding:
    """A switch that seeds the modules of a rank only if any of them draws.

    Modules are seeded until a training step in which each had rows draws nothing. If a later step draws, for example
    because dropout is raised from 0, it warns, and modules are seeded permanently.
    """

    def __init__(self, modules: Collection[RandomNumbers]) -> None:
        self._modules = modules
        self.others = any(module.seeds_others for module in modules)
        """Whether NumPy's and Python's generators are seeded."""
        self.idle = self._drew = False
        """Whether no module is seeded, as none draws."""
        self._generators: list[torch.Generator] = []
        self._state: list[Any] = []

    @contextmanager
    def step(self, number: int, device: torch.device, *, complete: bool) -> Iterator[None]:
        """Check whether the actions of a step draw.

        Args:
            number: number of the step, the same on all ranks.
            complete: whether the step trains, and each module has rows on this rank.
        """
        if self._drew:
            yield
            return
        self._generators = generators(device)
        for generator in self._generators if self.idle else ():  # ranks of an instance must draw the same
            generator.manual_seed(number)
        self._state = self._now()
        for module in self._modules:
            module.watcher = self
        try:
            yield
        finally:
            for module in self._modules:
                module.watcher = nullcontext()
        self._drew |= self._state != self._now()
        if self.idle and self._drew:
            warnings.warn(
                f"step {number} drew random numbers in {', '.join(sorted(module.name for module in self._modules))}"
                " on a rank that drew none before: those of this step depend on the layout, and tensor-parallel ranks"
                " may differ in them; from the next step on all is as if it had drawn from the first one",
                stacklevel=2,
            )
        idle = not self._drew and (self.idle or complete)
        for module in self._modules:
            if idle != self.idle:
                module.rest(idle=idle)
        self.idle = idle

    def __enter__(self) -> None:
        """Record whether anything has drawn since the last seeding."""
        self._drew |= self._state != self._now()

    def __exit__(self, *_: object) -> None:
        self._state = self._now()

    def _now(self) -> list[Any]:
        states: list[Any] = [generator.get_state().numpy().tobytes() for generator in self._generators]
        return [*states, _others()] if self.others else states


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
    """Return the default generators of the host and of a device; reading their states does not wait for the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def draws_others(module: nn.Module) -> bool:
    """Return whether any part's code could draw from NumPy or Python: its file imports one of them."""
    files = {type(part).__module__ for part in module.modules()}
    named = (vars(sys.modules[f]) for f in files if not f.startswith("hetero_strategy.") and f in sys.modules)
    imported = (names.get(name) for names in named for name in ("np", "numpy", "random"))
    return any(one is known for one in imported for known in (np, np.random, random))


def _others() -> tuple[Any, ...]:
    """Return the states of NumPy's and Python's generators, which change with every number drawn."""
    state: Any = np.random.get_state()
    return state[0], state[1].tobytes(), *state[2:], random.getstate()


def number_of(position: str) -> int:
    """Return 64 bits that represent a position in a module."""
    return _hashed(position.encode())


_SEVEN = struct.Struct("<Q6q")


def _hashed(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _seed(numbers: RandomNumbers, position: int, *_: Any) -> None:
    numbers.seed(position)


def _seed_block(numbers: RandomNumbers, position: int, *_: Any) -> None:
    numbers.seed(position ^ number_of(f"part {numbers.part_of_rows}") if numbers.part_of_rows else position)


def separate_columns(module: nn.Module, plan: Plan, numbers: RandomNumbers) -> None:
    """Give each rank its own random numbers between a columnwise and the next rowwise layer, like its columns."""
    for fqn, part in module.named_modules():
        style = style_of(plan, fqn)
        if begins_columns(style):
            part.register_forward_hook(partial(_part, numbers, fqn))
        elif ends_columns(style):
            part.register_forward_pre_hook(partial(_join, numbers))


# Compiled code draws its numbers from the state at the start of its block.


def _part(numbers: RandomNumbers, fqn: str, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        numbers.part(fqn)


def _join(numbers: RandomNumbers, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        numbers.join()
