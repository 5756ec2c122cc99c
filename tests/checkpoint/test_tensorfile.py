from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetero_strategy.checkpoint import tensorfile
from hetero_strategy.checkpoint.tensorfile import Entry, TensorReader, write_tensors
from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.hf_folder import DTYPES
from tests.checkpoint.helpers import flip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def test_tensor_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(DTYPES.values())}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "odd": torch.ones(3, dtype=torch.bool)}
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    stored = write_tensors(tmp_path / "f", [Entry.of(name, tensor) for name, tensor in tensors.items()])
    assert stored.nbytes == (tmp_path / "f").stat().st_size
    found = load_file(tmp_path / "f")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8) if tensor.ndim else found[name], bits(tensor)), name
    with TensorReader(tmp_path, {"f": stored}) as reader:
        assert reader.read("f", "turned", (1, 0), (2, 1)).tolist() == [[1.0], [2.0]]
        assert reader.read("f", "scalar").item() == 2.5
        with pytest.raises(CheckpointError, match="no file of the checkpoint"):
            reader.read("g", "scalar")


def test_a_slice_is_checked_by_the_blocks_it_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorfile, "BLOCK", 16)
    tensors = {"before": torch.arange(5, dtype=torch.int16), "t": torch.arange(60.0).reshape(5, 3, 4)}
    stored = write_tensors(tmp_path / "f", [Entry.of(name, tensor) for name, tensor in tensors.items()])
    assert len(stored.checksums) == 1 + 240 // 16 + 1
    size = (tmp_path / "f").stat().st_size
    start = size - 10 - 240  # wide dtypes lie first
    draw = random.Random(1)
    noticed = 0
    for at in range(start, size - 10):
        flip(tmp_path / "f", at)
        for _ in range(5):
            offsets = tuple(draw.randrange(n) for n in (5, 3, 4))
            sizes = tuple(draw.randint(1, n - o) for o, n in zip(offsets, (5, 3, 4), strict=True))
            window = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            touched = torch.arange(60).reshape(5, 3, 4)[window]
            with TensorReader(tmp_path, {"f": stored}) as reader:
                assert reader.read("f", "before").tolist() == list(range(5))
                try:
                    assert torch.equal(reader.read("f", "t", offsets, sizes), tensors["t"][window])
                    assert (at - start) // 4 not in touched
                except CheckpointError as fault:
                    assert f"{tmp_path / 'f'} is damaged" in str(fault) and "of 't'" in str(fault)
                    block = (at - start) // 16 * 4
                    assert touched.min() < block + 4 and touched.max() >= block
                    noticed += 1
        flip(tmp_path / "f", at)
    assert 300 < noticed < 900
