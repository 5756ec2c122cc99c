"""Parts of tensors in a folder: the values are those of the whole tensor, and nothing else is read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hetero_strategy.errors import ModelError
from hetero_strategy.model.hf_folder import INDEX, SINGLE, TensorFolder
from tests.model.helpers import reads

WHOLE = torch.arange(7 * 5 * 3, dtype=torch.bfloat16).view(7, 5, 3)


@given(st.fixed_dictionaries({}, optional={d: st.lists(st.integers(0, n - 1)) for d, n in enumerate(WHOLE.shape)}))
def test_a_selection_reads_its_elements_in_its_order(wanted: dict[int, list[int]]) -> None:
    selection = {dim: torch.tensor(index, dtype=torch.int64).unique()[None].flip(1)[0] for dim, index in wanted.items()}
    expected = WHOLE
    for dim, index in selection.items():
        expected = expected.index_select(dim, index)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"t": WHOLE}, Path(folder) / "model.safetensors")
        with reads() as bytes_read, TensorFolder(folder) as opened:
            found = opened.read("t", selection)
        assert found.dtype == WHOLE.dtype and torch.equal(found, expected)
        assert sum(bytes_read) == expected.nbytes


def test_a_single_file_goes_before_shards(tmp_path: Path) -> None:
    for file, value in ((SINGLE, 1.0), ("shard.safetensors", 2.0)):
        save_file({"t": torch.full((2,), value)}, tmp_path / file)
    (tmp_path / INDEX).write_text('{"weight_map": {"t": "shard.safetensors"}}')
    for value in (1.0, 2.0):
        with TensorFolder(tmp_path) as opened:
            assert opened.read("t", {}).tolist() == [value] * 2
        (tmp_path / SINGLE).unlink(missing_ok=True)


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_a_damaged_index_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ModelError, match=rf"{INDEX} is not JSON"):
        TensorFolder(tmp_path)
