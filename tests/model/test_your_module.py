"""The modules of docs/your_module.md do what the page says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.model import MultimodalModel, Packing, SequenceInputs
from tests.model.helpers import images, ready

PAGE = Path(__file__).parents[2] / "docs" / "your_module.md"


@pytest.fixture
def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("name", ["simple", "vision"])
def test_encoders_take_any_number_of_items(page: dict[str, Any], name: str) -> None:
    encoder = ready(page[name])
    inputs = images([(2, 3), (1, 4)], patch=4)
    rows = encoder(inputs)
    assert rows.shape == (10, 32)
    assert torch.allclose(rows[:6], encoder(images([(2, 3)], patch=4)))  # the other item is not seen
    encoder(images([], patch=4)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in encoder.parameters())


def in_stages(module: Any, inputs: Any, cuts: tuple[int, ...]) -> Any:
    fqns, rows, first = list(module.blocks()), None, 0
    for number in cuts:
        last = first + number == len(fqns)
        part = module.stage(fqns[first : first + number], first=not first, last=last)
        rows, first = part(inputs, {}, rows), first + number
    return rows


def test_they_can_be_cut_into_stages(page: dict[str, Any]) -> None:
    vision, llm = ready(page["vision"]), ready(page["llm"])
    inputs, text = images([(2, 3), (1, 4)], patch=4), tokens(3, 5)
    assert torch.equal(in_stages(vision, inputs, (1, 2, 1)), vision(inputs))
    assert torch.equal(in_stages(llm, text, (1, 1)).loss_sum, llm(text).loss_sum)


def tokens(*lengths: int) -> SequenceInputs:
    ids = torch.arange(sum(lengths)) % 100
    return SequenceInputs(ids, (ids + 1) % 100, Packing.of(np.array(lengths)))


def test_sequences_do_not_see_each_other(page: dict[str, Any]) -> None:
    llm = ready(page["llm"])
    both, first = (llm(tokens(*lengths), keep_logits=True) for lengths in ((3, 5), (3,)))
    assert torch.allclose(both.logits[:3], first.logits)
    assert torch.isfinite(both.loss_sum)


def test_they_make_a_model(page: dict[str, Any]) -> None:
    model = MultimodalModel({"vision": page["vision"], "llm": page["llm"]})
    assert [(edge.source, edge.target) for edge in model.edges] == [("vision", "llm")]
    assert page["vision"].tp_plan() and page["llm"].flops(np.array([4])) > 0
