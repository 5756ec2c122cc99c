"""Tiny models and hand-made batches."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from hetero_strategy.model import EncoderInputs, Packing, SequenceInputs
from hetero_strategy.model.hf_folder import TensorFolder
from hetero_strategy.model.materialize import materialize
from hetero_strategy.plan.step_plan import Assignment

VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 2,
    "num_patches": 16,
}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 6,
    "max_source_positions": 12,
}
LLAMA = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TITAN = {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 8, "max_seq_len": 64}


@contextmanager
def reads():
    """Collect the bytes of every read of a Hugging Face folder, as they are asked of safetensors."""
    found, opened = [], TensorFolder.opened

    def noted(tensor):
        found.append(tensor.nbytes)
        return tensor

    class Slice:
        def __init__(self, whole):
            self.whole, self.get_shape, self.get_dtype = whole, whole.get_shape, whole.get_dtype

        def __getitem__(self, at):
            return noted(self.whole[at])

    def counted(folder, file):
        handle = opened(folder, file)
        return SimpleNamespace(
            keys=handle.keys,
            get_tensor=lambda name: noted(handle.get_tensor(name)),
            get_slice=lambda name: Slice(handle.get_slice(name)),
        )

    with patch.object(TensorFolder, "opened", counted):
        yield found


def ready(adapter, seed=0, dtype=torch.float64, name="m"):
    materialize(adapter, seed, name=name)
    for parameter in adapter.parameters():  # biases and norms away from 0 and 1, where faults would hide
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return adapter.to(dtype).train()


def images(grids, merge=1, channels=3, patch=2, seed=0):
    grids = np.array(grids, dtype=np.int64).reshape(-1, 2)
    lengths = grids.prod(1)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(int(lengths.sum()), channels * patch * patch, generator=generator)
    return EncoderInputs(values, grids, lengths // merge**2, Packing.of(lengths))


def clips(frames, stack=1, mels=6, seed=0):
    frames = np.array(frames, dtype=np.int64).reshape(-1, 1)
    rows = -(-frames[:, 0] // 2)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(int(frames.sum()), mels, generator=generator)
    return EncoderInputs(values, frames, -(-rows // stack), Packing.of(rows))


def tokens(lengths, vocab=40, seed=0, slots=None, label_share=0.5, alignment=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = np.array(lengths, dtype=np.int64)
    total = int(lengths.sum())
    ids = torch.randint(0, vocab, (total + alignment,), generator=generator)
    labels = torch.randint(0, vocab, (total + alignment,), generator=generator)
    labels[torch.rand(total + alignment, generator=generator) > label_share] = -100
    labels[total:] = -100
    packing = Packing.of(np.append(lengths, alignment) if alignment else lengths)
    return SequenceInputs(ids, labels, packing, slots=slots or {})


@dataclass
class HandBatch:
    """A batch written by hand: per microbatch inputs (slots by source), units, and the row order of every edge."""

    given: list
    units: list
    labels: np.ndarray
    order: dict = field(default_factory=dict)
    """(microbatch, source, target) -> source row of each slot."""
    skipped: np.ndarray | None = None

    @property
    def inputs(self):
        names = {name: None for given in self.given for name in given}
        return {name: tuple(self._of(name, number) for number in range(len(self.given))) for name in names}

    @property
    def plan(self):
        names = {name: None for units in self.units for name in units}
        assignments = {name: tuple(self._computed(name, number) for number in range(len(self.units))) for name in names}
        return SimpleNamespace(
            assignments=assignments,
            metadata=SimpleNamespace(
                epoch=0, step=0, labels=self.labels, skipped=self.skipped, sample_of=lambda _: slice(None)
            ),
            normalizer=lambda name: max(1, int(self.labels.sum())),
            counted=lambda name: int(self.labels.sum()),
        )

    def local_rows(self, source, source_microbatch, target, target_microbatch):
        assert source_microbatch == target_microbatch
        return self.order.get((target_microbatch, source, target))

    def _computed(self, name, number):
        given, units = self.given[number].get(name), np.array(self.units[number].get(name, []), dtype=np.int64)
        units = units if given is not None else units[:0]
        inner = np.zeros(0, np.int64) if given is None else given.packing.lengths[: len(units)]
        bounds = np.array([0, len(units)])
        return Assignment(units, getattr(given, "rows", inner), inner, bounds, np.zeros(1, np.int64), number, number)

    def _of(self, name, number):
        given = self.given[number].get(name)
        if not isinstance(given, SequenceInputs):
            return given
        return replace(given, slots={(source, number): slots for source, slots in given.slots.items()})
