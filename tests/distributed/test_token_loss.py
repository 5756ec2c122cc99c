"""Cross entropy where the vocabulary is split over ranks: the same as over whole logits, which never exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.model.token_loss import token_loss
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.testing import Pool
from tests.model.helpers import LLAMA, tokens
from tests.parallelize.pieces import MAKE


def split_on_rank(rank: int, world: int, rows: int, vocabulary: int, backend: str | None) -> dict[str, Any]:
    """Loss, tokens and gradient of random logits, whole and split; two tokens are equally likely in the first row."""
    mesh = init_device_mesh("cpu", (world,))
    numbers = torch.Generator().manual_seed(rows)
    logits = 30 * torch.randn(rows, vocabulary, dtype=torch.float64, generator=numbers)
    if rows:
        logits[0, 1] = logits[0, vocabulary - 1] = 200.0
        logits[1, vocabulary // 2 :], logits[1, 0] = -torch.inf, 3.0  # some ranks' whole part of a row
    labels = torch.randint(0, vocabulary, (rows,), generator=numbers)
    labels[1:2] = 0
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, reduction="sum")
    (3 * expected).backward()
    leaf = distribute_tensor(logits, mesh, [Shard(1)]).detach().requires_grad_()
    loss, likeliest = token_loss(leaf, labels, backend)
    (3 * loss).backward()
    assert isinstance(leaf.grad, DTensor)
    return {
        "loss": (float(loss.detach()), float(expected.detach())),
        "likeliest": (likeliest, logits.argmax(-1)),
        "gradient": (leaf.grad.full_tensor(), whole.grad),
        "kept": leaf.to_local().shape[1],
    }


@pytest.mark.full_cases("5-12-aot_eager")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(("rows", "vocabulary"), [(5, 12), (4, 7), (0, 6)])
def test_split_logits(pool: Pool, rows: int, vocabulary: int, backend: str | None) -> None:
    ranks = pool.run(3, split_on_rank, rows, vocabulary, backend)
    for result in ranks:
        assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-12)
        assert torch.equal(*result["likeliest"])
        torch.testing.assert_close(*result["gradient"], rtol=1e-12, atol=1e-13)
    assert sum(result["kept"] for result in ranks) == vocabulary


def heads_on_rank(rank: int, world: int) -> dict[str, list[int]]:
    """By language model: columns of all logits that its head makes here."""
    layout = place({"m": ModuleLayout(ranks=tuple(range(world)), tp=world)}, world)
    registry = GroupRegistry(layout, [], "cpu")
    seen = {}
    for kind in ("titan", "hf_llama", "tied", "hf_qwen3"):
        with torch.device("meta"):
            module = MAKE[kind]()
        device = torch.device("cpu")
        stage: Any = parallelize("m", module, layout.layouts["m"], registry.mesh("m"), device, seed=1)[0]
        columns: list[int] = []
        head = stage.head

        def watched(rows: torch.Tensor, head: Any = head, columns: list[int] = columns) -> torch.Tensor:
            logits = head(rows)
            columns.append(logits.to_local().shape[-1])
            return logits

        stage.head = watched
        stage(tokens([3, 5])).loss_sum.backward()
        nothing = stage(tokens([3, 5], label_share=0.0))
        nothing.loss_sum.backward()
        assert float(nothing.loss_sum.detach()) == 0 and not len(nothing.predicted)
        seen[kind] = columns
    return seen


@pytest.mark.full
def test_no_rank_has_whole_logits(pool: Pool) -> None:
    for seen in pool.run(2, heads_on_rank):
        for kind, columns in seen.items():
            assert columns and set(columns) == {LLAMA["vocab_size"] // 2}, kind
