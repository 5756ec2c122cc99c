"""Whatever a worker makes arrives as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_strategy.loading.transport import ALIGNMENT, pack, padded, unpack

TORCH = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.int32]
NUMPY = [np.float32, np.float64, np.int64, np.uint8, np.bool_]


def through(value: object) -> object:
    head, buffers = pack(value)
    block = bytearray(b"".join(bytes(b) + bytes(padded(b.nbytes) - b.nbytes) for b in buffers))
    assert len(block) % ALIGNMENT == 0
    return unpack(head, block, [b.nbytes for b in buffers])


LOOKS = ("plain", "turned", "part", "spread")
"""Whole, transposed, a slice, one row as many."""


@given(
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 4), max_size=3), st.sampled_from(LOOKS)), max_size=8)
)
def test_arrays_and_tensors_arrive_as_they_were(wanted: list[tuple[int, list[int], str]]) -> None:
    random = torch.Generator().manual_seed(len(wanted))
    sent: list[object] = []
    for kind, shape, look in wanted:
        drawn = torch.randint(0, 2, shape, generator=random)
        value: Any = drawn.to(TORCH[kind]) if kind < len(TORCH) else drawn.numpy().astype(NUMPY[kind - len(TORCH)])
        if look == "turned" and len(shape) == 2:
            value = value.T
        elif look == "part" and shape:
            value = value[1::2]
        elif look == "spread" and kind < len(TORCH) and shape:
            value = value[:1].expand(1 if len(value) else 0, *shape[1:]) if shape[0] % 2 else value.sum().expand(1)
        sent.append(value)
    got = through({"values": sent, "first": sent[:1]})
    assert isinstance(got, dict)
    assert len(got["values"]) == len(sent)
    for before, after in zip(sent, got["values"], strict=True):
        assert type(after) is type(before) and after.dtype == before.dtype and after.shape == before.shape
        assert (after == before).all()
        if isinstance(after, torch.Tensor):
            after.fill_(1)  # writable, and nobody's else
        else:
            after[...] = 1
    if sent:
        assert got["first"][0] is got["values"][0]  # one object stays one


def test_one_element_of_any_stride() -> None:
    got = through([torch.arange(3)[1].expand(1), torch.arange(6).reshape(2, 3)[:, 1:2][:1]])
    assert isinstance(got, list) and got[0].tolist() == [1] and got[1].tolist() == [[1]]


def test_numbers_are_not_pickled_but_lie_in_the_block() -> None:
    value = {"a": torch.zeros(1000), "b": np.zeros(1000), "c": "text"}
    head, buffers = pack(value)
    assert len(head) < 700 and sorted(b.nbytes for b in buffers) == [4000, 8000]


def test_a_gradient_or_a_strange_layout_is_left_to_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    got = through([sparse, torch.nn.Parameter(torch.ones(2))])
    assert isinstance(got, list) and got[0].is_sparse and got[0].to_dense().equal(torch.eye(3))
    assert isinstance(got[1], torch.nn.Parameter) and got[1].requires_grad
    with pytest.raises(Exception, match="pickle"):
        pack(lambda: None)
