"""A generator on real ranks: stages, tensor parallelism and FSDP against one process, as for the other modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pytest
import torch

from hetero_strategy.model import GeneratorInputs, GeneratorOutput
from hetero_strategy.testing import Pool
from hetero_strategy.zoo.flow import FlowDecoder
from tests.model.test_generator import items
from tests.parallelize import pieces
from tests.parallelize.pieces import Piece, worst

GRIDS = [[(2, 3), (1, 2)], [(3, 3)], [], [(2, 2), (1, 1), (1, 3)]]


class Fed(FlowDecoder):
    """Its conditions come from itself: the harness runs one module alone, without a language model."""

    def conditions(
        self, inputs: GeneratorInputs, rows: Mapping[Hashable, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = inputs.slots["llm", 0]
        generator = torch.Generator().manual_seed(len(places))
        return torch.randn(len(places), self.width, generator=generator, dtype=torch.float64), places


def on_rank(rank: int, world: int, piece: Piece) -> dict[str, Any]:
    """The harness for language models and encoders, taught what a generator is."""
    others, loss_of = pieces.inputs_of, pieces.loss_of
    pieces.MAKE["flow"] = lambda: Fed(width=16, feature=4, dim=8, n_layers=4, n_heads=2, ffn=24, steps=2)  # type: ignore[assignment, return-value]
    pieces.inputs_of = lambda kind, n: items(GRIDS[n % 4], [2, 1, 3][: len(GRIDS[n % 4])], n)
    pieces.loss_of = lambda out: out.loss_sum if isinstance(out, GeneratorOutput) else loss_of(out)
    try:
        return pieces.run(rank, world, piece)
    finally:
        pieces.inputs_of, pieces.loss_of = others, loss_of


@pytest.mark.full_cases("ranks2 pp2", "ranks4 pp2 dp_shard2_0", "ranks4 pp2 dp_shard2_1", "ranks4 pp2 tp2")
@pytest.mark.parametrize(
    "piece",
    [
        Piece("flow", {"ranks": 2, "pp": 2, "split": [1, 3]}, halves=True, microbatches=4),
        Piece("flow", {"ranks": 4, "pp": 2, "dp_shard": 2}, transforms={"recompute": "all"}, halves=True),
        Piece("flow", {"ranks": 4, "pp": 2, "dp_shard": 2}, mode="each"),
        Piece("flow", {"ranks": 4, "pp": 2, "tp": 2}),
        Piece("flow", {"ranks": 2, "pp": 1, "tp": 2}, halves=True, microbatches=3),
    ],
    ids=lambda piece: " ".join(f"{k}{v}" for k, v in piece.layout.items() if k != "split"),
)
def test_gradients_equal_those_of_one_process(pool: Pool, piece: Piece) -> None:
    results = pool.run(piece.layout["ranks"], on_rank, piece)
    assert worst(results) < 1e-10
    assert all(result["same"] for result in results)


@pytest.mark.full
def test_a_forgotten_reduction_is_seen(pool: Pool) -> None:
    piece = Piece("flow", {"ranks": 2, "pp": 1, "dp_shard": 2}, forget="reduce")
    assert worst(pool.run(2, on_rank, piece)) > 1e-3
