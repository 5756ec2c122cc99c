"""What ``benchmarks.scale`` counts for a small world is what four processes make and send."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks import scale
from benchmarks.pipelines import Setting, assembled
from hetero_strategy.checkpoint.inventory import Inventory
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.runtime.connect import connections
from tests.distributed.harness import Pool


class Counted:
    """Wraps what sends, and counts it."""

    def __init__(self, rank: int) -> None:
        self.found = Counter({"groups groups": 1})  # the world
        self.phase, self.rank = "connect", rank
        self.real = {name: getattr(dist, name) for name in ("new_group", "batch_isend_irecv", "all_reduce")}
        self.real |= {name: getattr(dist, name) for name in ("all_gather_object", "broadcast_object_list")}
        self.real |= {name: getattr(dist, name) for name in ("all_gather_single", "reduce_scatter_single")}

    def new_group(self, ranks: Any = None, **options: Any) -> Any:
        self.found["groups groups"] += ranks is None or self.rank in ranks
        return self.real["new_group"](ranks, **options)

    def batch_isend_irecv(self, ops: list[dist.P2POp]) -> Any:
        sent = [op.tensor.nbytes for op in ops if op.op is dist.isend]
        if self.phase == "connect":
            self.found["connect messages"] += len(sent)
        else:
            self.found["rows messages"] += len(sent)
            self.found["rows bytes"] += sum(sent)
        return self.real["batch_isend_irecv"](ops)

    def all_reduce(self, tensor: torch.Tensor, *rest: Any, group: Any = None, **options: Any) -> Any:
        if self.phase == "step" and group is not None:
            self.found["reductions bytes"] += tensor.nbytes
        return self.real["all_reduce"](tensor, *rest, group=group, **options)

    def all_gather_single(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        self.found["gathers bytes"] += input_tensor.nbytes
        return self.real["all_gather_single"](output_tensor, input_tensor, **options)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
        self.found["reductions bytes"] += input.nbytes
        return self.real["reduce_scatter_single"](output, input, **options)

    def all_gather_object(self, everyone: list[Any], obj: Any, **options: Any) -> Any:
        if self.phase == "checkpoint":
            self.found["plan bytes"] += len(pickle.dumps(obj))
        return self.real["all_gather_object"](everyone, obj, **options)

    def broadcast_object_list(self, objects: list[Any], src: int, **options: Any) -> Any:
        if self.rank == src and objects[0] is not None and isinstance(objects[0][0], Inventory):
            self.found["inventory bytes"] += len(pickle.dumps(objects[0]))
        return self.real["broadcast_object_list"](objects, src, **options)


def really(rank: int, world: int, chosen: Setting, path: str) -> dict[str, int]:
    """The same figures of a rank that starts, runs a step and saves."""
    counted = Counted(rank)
    with patch.multiple(dist, **{name: getattr(counted, name) for name in counted.real}):
        made = assembled(chosen, rank)
        counted.phase = "step"
        made.executor.run(chosen.batch(0, rank), train=True)
        counted.phase = "checkpoint"
        owned = dict.fromkeys(p for stage in made.executor.stages.values() for p in stage.parameters())
        optimizer = torch.optim.AdamW(owned, foreach=False)
        optimizer.step()
        for _ in range(2):  # the second sends no plan
            tensors = {
                "state_dict": made.state.model_tensors(),
                "optimizer_states": [made.state.optimizer_state(optimizer)],
            }
            made.state.save(tensors, path)
    weights = sum(local(p).numel() * 4 for p in owned)
    return (
        dict.fromkeys((f"{what} {number}" for _, what, number in scale.PER_RANK), 0)
        | {"weights bytes": weights}
        | counted.found
    )


@pytest.mark.distributed
def test_what_is_counted_is_what_is_sent(pool: Pool, tmp_path: Path) -> None:
    chosen = scale.setting(4, pp=2, tp=1, encoder=(32, 1), llm=(64, 2))
    ranks = pool.run(4, really, chosen, str(tmp_path / "c"), timeout=120)
    graph, step, sets = chosen.blueprint.graph, chosen.plan(0), scale.groups(chosen, "cpu")
    with patch.object(scale, "COMPUTE", torch.float32):
        for rank, found in enumerate(ranks):
            counted = scale.of_rank(chosen, rank, sets, step)
            inventory = found.pop("inventory bytes")
            if rank % 2 == 0:  # the first of its stage; pickle writes what is one object once
                assert counted["inventory bytes"] == pytest.approx(inventory, rel=0.01)
            else:
                assert inventory == 0
            del counted["inventory bytes"]
            assert counted == found, rank
    assert connections(graph) == sum(rank["connect messages"] for rank in ranks)
