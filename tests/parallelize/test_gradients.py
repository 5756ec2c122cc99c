"""Gradients as plain lists of tensors."""

from __future__ import annotations

import torch

from hetero_strategy.parallelize.gradients import scale


def test_gradients_of_every_dtype_are_scaled_and_no_gradients_are_none() -> None:
    grads = [torch.full((2,), 3.0), torch.full((3,), 5.0, dtype=torch.bfloat16), torch.full((1,), 7.0)]
    scale(grads, torch.tensor(0.5))
    assert [g.tolist() for g in grads] == [[1.5] * 2, [2.5] * 3, [3.5]]
    scale([], torch.tensor(0.5))  # of a rank on which nothing trains
