"""Batches of one epoch after another, ahead of need and resumable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from hetero_strategy.data.batch import Batch
from hetero_strategy.data.steps import StepDataset
from hetero_strategy.errors import CheckpointError


class StepLoader:
    """Batches of one epoch after another, resumable in the middle of an epoch.

    It is not a torch ``DataLoader``, so Lightning injects no distributed sampler and rebuilds nothing. Lightning calls
    ``sampler.set_epoch`` at the start of every epoch and saves :meth:`state_dict` with the fit loop. Iteration is lazy:
    the epoch and the place are read when the first batch is asked for, because Lightning calls ``iter`` before it sets
    the epoch. The process's random state is not touched.
    """

    def __init__(
        self, steps: StepDataset, *, num_workers: int = 0, prefetch_factor: int = 2, pin_memory: bool = False
    ) -> None:
        self.steps = steps
        self.epoch = 0
        self.consumed = 0
        """Steps of this epoch handed out, not counting prefetched ones."""
        self._resume_at = 0
        self._places = _Places()
        self._settings: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        if num_workers:
            self._settings |= {"prefetch_factor": prefetch_factor, "persistent_workers": True}
        self._torch_loader: DataLoader[Batch] | None = None
        self.batch_sampler = None  # Lightning reads it wherever it finds a sampler
        self.sampler: Sampler[int] = _ShuffledEpochs(self) if steps.shuffle else _OrderedEpochs(self)

    def __len__(self) -> int:
        return len(self.steps)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the place restored by `load_state_dict` survives in its own epoch."""
        if epoch != self.epoch:
            self.epoch, self.consumed, self._resume_at = epoch, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        if self._torch_loader is None:
            # An own generator: torch would otherwise draw a seed from the process's random state at every epoch.
            self._torch_loader = DataLoader(
                self.steps, batch_size=None, sampler=self._places, generator=torch.Generator(), **self._settings
            )
        first, self._resume_at = self._resume_at, 0
        self.consumed = first
        self._places.epoch, self._places.steps = self.epoch, range(first, len(self))
        for number, batch in enumerate(self._torch_loader, first + 1):
            self.consumed = number
            yield batch

    def close(self) -> None:
        """Stop the workers; the next iteration starts new ones."""
        self._torch_loader = None

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, and what must not change for that to have a meaning."""
        return {"epoch": self.epoch, "consumed": self.consumed, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: in the middle of an epoch, and the data set or the order is another one.
        """
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        if 0 < consumed < int(state["steps"]):
            now = self._identity()
            changed = [f"{name} was {state[name]}, is {now[name]}" for name in now if state[name] != now[name]]
            if changed:
                raise CheckpointError(
                    f"cannot resume in the middle of epoch {epoch}, after {consumed} of {state['steps']} steps:"
                    f" {'; '.join(changed)}; use the old values or a checkpoint from the end of an epoch"
                )
        self.epoch, self.consumed, self._resume_at = epoch, consumed, consumed

    def _identity(self) -> dict[str, Any]:
        steps = self.steps
        return {
            "steps": len(self),
            "samples": len(steps.index),
            "global_batch_size": steps.global_batch_size,
            "seed": steps.seed,
            "shuffle": steps.shuffle,
            "data": steps.index.content,
        }


class _Places(Sampler[tuple[int, int]]):
    """(epoch, step) of the batches to load; workers get the epoch with each step, so they can live on over epochs."""

    def __init__(self) -> None:
        self.epoch = 0
        self.steps = range(0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.epoch
        return iter([(epoch, step) for step in self.steps])

    def __len__(self) -> int:
        return len(self.steps)


class _ShuffledEpochs(Sampler[int]):
    """What Lightning finds as the loader's sampler: passes the epoch on."""

    def __init__(self, loader: StepLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._loader)))

    def __len__(self) -> int:
        return len(self._loader)


class _OrderedEpochs(SequentialSampler):
    """The same for a fixed order: Lightning recognises unshuffled data by this base class."""

    def __init__(self, loader: StepLoader) -> None:
        super().__init__(range(len(loader)))
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)
