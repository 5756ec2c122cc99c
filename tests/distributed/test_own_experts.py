"""A language model of one's own with experts, as docs/your_module.md says, in expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy import CausalLM
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.experts import Exchange, routed
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.testing import FP64, Pool, Setting, differences, step
from hetero_strategy.testing.setting import VOCABULARY


class Experts(nn.Module):
    exchange: Exchange | None = None

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count, self.weight = count, nn.Parameter(torch.empty(count, width, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.2)

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return routed(rows, chosen, weights, self.count, self.compute, self.exchange)

    def compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        parts = rows.tensor_split(ends[:-1].long().cpu())
        return torch.cat([torch.tanh(part @ weight) for part, weight in zip(parts, self.weight, strict=True)])


class Block(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, count, bias=False), Experts(width, count)

    def forward(self, rows: Tensor) -> Tensor:
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return rows + self.experts(rows, chosen, weights)


class OwnMixture(CausalLM):
    block_list = "layers"
    before_blocks = ("tokens",)
    after_blocks = ("output",)

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.output = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.width, self.hidden_width, self.vocab_size = width, width, VOCABULARY

    @override
    def experts(self) -> dict[str, int]:
        return {f"{fqn}.experts": 4 for fqn in self.blocks()}

    @override
    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)

    @override
    def transform(self, hidden: Tensor, packing: Any) -> Tensor:
        for block in self.blocks().values():
            hidden = block(hidden)
        return hidden

    @override
    def head(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)


@dataclass(frozen=True)
class Own(Setting):
    @override
    def model(self, device: str = "meta") -> MultimodalModel:
        with torch.device(device):
            return MultimodalModel({"llm": OwnMixture()}, seed=7).train().double()


@pytest.mark.parametrize(("ranks", "degrees", "recompute"), [
    (2, {"ep": 2}, "all"), pytest.param(4, {"pp": 2, "ep": 2}, None, marks=pytest.mark.full),
])  # fmt: skip
def test_it_has_the_gradients_of_one_process(
    pool: Pool, ranks: int, degrees: dict[str, int], recompute: str | None
) -> None:
    transforms = {"llm": {"recompute": recompute}} if recompute else {}
    layouts = {"llm": ModuleLayout(ranks, **degrees)}
    setting = Own("own experts", layouts, storage=FP64, microbatches=2, transforms=transforms)
    assert not differences(setting.alone(), pool.run(ranks, step, setting))


def test_plans_know_its_experts() -> None:
    assert spec_of(Own("own experts", {"llm": ModuleLayout(1)}).model()).modules["llm"].experts is not None
