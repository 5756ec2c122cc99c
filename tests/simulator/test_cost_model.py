"""Seconds of actions against hand-computed cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.row_sharding import REPLICATED
from hetero_strategy.model.read_spec import trained_share
from hetero_strategy.model.spec import ModuleSpec
from hetero_strategy.simulator.cluster import Cluster, Device, Links, OwnWork, Sharding
from hetero_strategy.simulator.cost_model import Overlap, Precision, exposed, module_times
from hetero_strategy.simulator.stage_times import KeyTravel, Line, StageTimes
from hetero_strategy.testing import plans

DEVICE = Device("toy", flops=1000.0, memory=1e9, memory_bandwidth=100.0, matmul=0.5, attention=0.25, launch=0.125)
CLUSTER = Cluster(DEVICE, 2, 2, Links(0.5, 64.0), Links(1.0, 32.0))


def shape(trained: tuple[bool, ...] = (True, True), **changes: Any) -> ModuleSpec:
    """Blocks of 10 FLOPs per row, 2 per pair, 8 parameters, 50 numbers per row between matmuls, rows of 4 numbers."""
    n = len(trained)
    share = np.array(trained, np.float64)
    made = ModuleSpec(
        per_row=np.full(n, 10.0), per_pair=np.full(n, 2.0), parameters=np.full(n, 8), trained=(8 * share).astype(int),
        trained_share=share, has_blocks=True, width=4, edge_width=4, tp=(1, 2),
        row_shardings=dict.fromkeys((1, 2), REPLICATED), samplewise=True, moved=np.full(n, 50.0),
        stored=np.zeros((n, 2, 2, 2), np.int64), largest=np.zeros(n, np.int64), buffers=0,
    )  # fmt: skip
    return replace(made, **changes)


def times(
    shape: ModuleSpec, ranks: int = 1, split: tuple[int, ...] = (2,), fed: bool = True, **options: Any
) -> list[StageTimes]:
    degrees = {name: options.pop(name) for name in ("tp", "pp", "cp", "ep", "dp_replicate") if name in options}
    layout = ModuleLayout(ranks, split=split, cp_form=options.pop("form", None), **degrees).resolved()
    return module_times(shape, layout, CLUSTER, fed=fed, **options)


LAUNCH, MATMUL, ATTENTION, MOVED = 0.125, 10 / 500, 2 / 250, 50 * 2 / 100


def test_forward_and_both_halves_of_backward_by_hand() -> None:
    (stage,) = times(shape())
    assert stage.forward == pytest.approx((2 * LAUNCH, 2 * (MATMUL + MOVED), 2 * ATTENTION))
    assert stage.input == pytest.approx((2 * LAUNCH, 2 * (MATMUL + 1.5 * MOVED), 2 * 2.5 * ATTENTION))
    assert stage.weight == pytest.approx((2 * LAUNCH, 2 * MATMUL, 0.0))
    rows, squares = np.array([3.0, 0.0]), np.array([9.0, 0.0])
    forward = 2 * (LAUNCH + 3 * (MATMUL + MOVED) + 9 * ATTENTION)
    assert stage.seconds("F", rows, squares) == pytest.approx([forward, 0.0])
    parts = stage.seconds("I", rows, squares) + stage.seconds("W", rows, squares)
    assert stage.seconds("B", rows, squares) == pytest.approx(parts)


def test_a_frozen_module_has_no_weight_gradient_and_passes_on_that_of_its_rows() -> None:
    (frozen,), (trained,) = times(shape((False, False))), times(shape())
    assert frozen.weight == (0.0, 0.0, 0.0)
    assert frozen.input == trained.input
    assert frozen.forward == trained.forward
    assert frozen.after == 0.0


def test_a_frozen_module_that_nothing_trainable_feeds_has_no_backward() -> None:
    (stage,) = times(shape((False, False)), fed=False, recomputed=1.0)
    assert stage.input == stage.weight == (0.0, 0.0, 0.0)


def test_the_first_trained_block_needs_no_gradient_of_its_rows_but_those_inside() -> None:
    (stage,) = times(shape((False, True)), fed=False)
    assert stage.input == (0.0, 0.0, 0.0)
    assert stage.weight == pytest.approx((LAUNCH, MATMUL + 1.5 * MOVED, 2.5 * ATTENTION))


def test_what_trains_beside_frozen_matmuls_has_a_backward() -> None:
    """Norms, of which the first block's are reached through its matmuls; and the block before passes nothing on."""
    none, norms = np.zeros(3), np.array([0, 2, 2])
    (stage,) = times(replace(shape((True,) * 3, trained_share=none), trained=norms), fed=False, split=(3,))
    assert stage.input == pytest.approx((LAUNCH, MATMUL + 1.5 * MOVED, 2.5 * ATTENTION))
    assert stage.weight == pytest.approx((2 * LAUNCH, MATMUL + 1.5 * MOVED, 2.5 * ATTENTION))
    (fed,) = times(replace(shape(trained_share=none[:2]), trained=norms[1:]))
    assert fed.weight == (2 * LAUNCH, 0.0, 0.0)


def test_matmuls_are_those_of_all_matrices_but_embeddings() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3, 4))

    parts = [nn.Conv1d(3, 4, 2), Experts(), nn.Linear(4, 6), nn.Embedding(50, 4), nn.LayerNorm(4)]  # 24 weights of each
    assert trained_share(nn.Sequential(*parts)) == 1.0
    parts[2].requires_grad_(False)
    assert trained_share(nn.Sequential(*parts)) == pytest.approx(2 / 3)
    assert trained_share(nn.Sequential(*parts[2:])) == trained_share(parts[3]) == 0.0


def test_a_recomputed_forward_is_added_where_there_is_a_backward() -> None:
    (plain,), (half,) = times(shape()), times(shape(), recomputed=0.5)
    assert half.input == pytest.approx(plain.input.plus(plain.forward, 0.5))
    assert half.weight == plain.weight
    (last,) = times(shape((False, True)), fed=False, recomputed=1.0)
    block = Line(LAUNCH, MATMUL + MOVED, ATTENTION)
    assert last.weight == pytest.approx(Line(LAUNCH, MATMUL + 1.5 * MOVED, 2.5 * ATTENTION).plus(block))


def test_rows_travel_to_the_ranks_of_their_experts_and_back() -> None:
    """Two exchanges of two choices a row in forward and in backward; half of the rows leave their node."""
    blocks = plans.module(2, 64, samplewise=True, experts=8)
    (whole,), (divided,), (uneven,), (again,) = (
        times(blocks, 4, ep=ep, expert_load=load, recomputed=recomputed)
        for ep, load, recomputed in ((1, 1.0, 0.0), (4, 1.0, 0.0), (4, 2.0, 0.0), (4, 1.0, 1.0))
    )
    size = 2 * 64 * 2
    travel = Line(2 * 2 * 1.0, 2 * 2 * size / 4 * (1 / 64 + 2 / 32), 0.0)
    assert divided.forward == pytest.approx(whole.forward.plus(travel))
    assert divided.input == pytest.approx(whole.input.plus(travel))
    assert divided.weight == whole.weight
    assert again.input == pytest.approx(divided.input.plus(divided.forward))
    products = 2 * 16.0 * 64 * 64 / 500
    assert uneven.forward.per_row == pytest.approx(divided.forward.per_row + travel.per_row + products)
    assert divided.gather < whole.gather and divided.reduce < whole.reduce
    assert divided.after == whole.after


def test_tensor_parallel_ranks_share_work_and_exchange_rows() -> None:
    (stage,) = times(shape(), 2, tp=2)
    wait, bytes_ = 0.5, 2 * 4 / 2 / 64.0  # one hop; half of rows of 4 numbers of 2 bytes
    expected = Line(LAUNCH + 4 * wait, (MATMUL + MOVED) / 2 + 4 * bytes_, ATTENTION / 2)
    assert stage.forward == pytest.approx(expected.plus(expected))
    beside = times(shape(), 2, tp=2, overlap=Overlap(tp=True))[0]
    assert beside.forward.fixed == stage.forward.fixed
    assert beside.forward.per_row == pytest.approx(2 * ((MATMUL + MOVED) / 2 + exposed(4 * bytes_, MATMUL / 2, 2)))
    assert beside.forward.per_row < stage.forward.per_row


def test_context_parallel_ranks_share_rows_and_receive_keys_in_forward_and_twice_in_backward() -> None:
    """Over the links between them, from a rank of the other node; a forward that runs again receives them again."""
    (alone,), (stage,) = times(shape(), 2, tp=2), times(shape(keys=6), 4, tp=2, cp=2)
    rows = Line(LAUNCH + 4 * 0.5, alone.forward.per_row / 2 / 2, ATTENTION / 4)
    assert stage.forward == pytest.approx(rows.plus(rows))
    assert stage.backward.per_row == pytest.approx(alone.backward.per_row / 2)
    assert stage.keys == pytest.approx((2, 4, 0, 1.0, 3 * 2 / 32.0, 4))
    (again,), (first,) = times(shape(keys=6), 4, tp=2, cp=2, recomputed=1.0), times(shape(keys=6), 2, cp=2, fed=False)
    assert again.keys is not None and again.keys.input == 6
    assert first.keys is not None and (first.keys.input, first.keys.weight) == (2, 2), "inside a block the first one's"
    (cores,) = module_times(
        shape(keys=6), ModuleLayout(2, cp=2, split=(2,)).resolved(), replace(CLUSTER, cores_per_node=1), fed=True
    )
    assert cores.keys is not None and cores.keys.groups == 1


def test_attention_hides_the_keys_of_all_groups_of_heads_but_one() -> None:
    """Group by group: the keys of one arrive, then those of the next during its attention."""
    travel = KeyTravel(1, 2, 0, 0.5, 4.0, 4)
    keys, attention = np.array([[3.0, 1.0], [0.0, 0.0]]), np.array([[2.0, 40.0], [5.0, 6.0]])
    for kind, exchanges in (("F", 1), ("B", 2), ("W", 0)):
        of = zip(exchanges * 4.0 * keys / 4, attention / 4, strict=True)
        expected = [x + 3 * np.maximum(x, a) + a - 4 * a + exchanges * 0.5 * (x.max() > 0) for x, a in of]
        assert travel.exposed(kind, keys, attention) == pytest.approx(np.array(expected))  # type: ignore[arg-type]


def test_ranks_of_heads_exchange_rows_and_no_keys() -> None:
    """Queries, keys, values and results of half of each rank's rows, which are half of all."""
    (stage,), (plain,) = times(shape(keys=6), 2, cp=2, form="heads"), times(shape(), 2, cp=2)
    travel = Line(2 * 2 * 0.5, 2 * (2 * 4 + 6) * 2 / 2 / 2 / 64.0, 0.0)
    assert stage.keys is None and stage.forward == pytest.approx(plain.forward.plus(travel))
    assert stage.input == pytest.approx(plain.input.plus(travel))
    (wide,) = times(shape(keys=6, queries=8), 2, cp=2, form="heads")
    assert wide.forward.per_row - stage.forward.per_row == pytest.approx(2 * 2 * (8 - 4) * 2 / 2 / 2 / 64.0)
    slow = replace(CLUSTER, collectives={"all-gather": Links(2 * 0.5, 64.0 / 2)})
    assert slow.exchange(8.0, 2) == 2 * CLUSTER.exchange(8.0, 2)


def test_context_parallel_ranks_are_shards() -> None:
    for once in (True, False):
        of = [times(shape(), 4, once=once, **degrees)[0] for degrees in ({}, {"cp": 2}, {"cp": 4})]
        assert len({(x.gather, x.reduce, x.after) for x in of}) == 1


def test_collectives_in_pieces_wait_for_one_of_them_at_least() -> None:
    assert exposed(2.0, 10.0, 4) == pytest.approx(0.5)
    assert exposed(10.0, 2.0, 4) == pytest.approx(8.5)
    assert exposed(0.0, 2.0, 4) == 0.0


def test_shards_are_gathered_and_gradients_reduced() -> None:
    (stage,) = times(shape(), 4)  # dp_shard = 4 over two nodes; 16 parameters in two blocks
    hops, bandwidth = 2 * 2 * 1.0, 64.0
    assert stage.gather == pytest.approx(hops + 16 * 2 * 3 / 4 / bandwidth)
    assert stage.reduce == pytest.approx(hops + 16 * 4 * 3 / 4 / bandwidth)
    assert stage.after == pytest.approx(16 / 4 * 28 / 100.0)
    none = np.zeros(4)
    assert stage.seconds("UNSHARD", none, none) == pytest.approx([stage.gather] * 4)
    assert stage.seconds("REDUCE", none, none) == pytest.approx([stage.reduce] * 4)


def test_what_shards_cost_a_rank_itself_comes_on_top_for_every_block_and_byte() -> None:
    device = replace(DEVICE, sharding=Sharding(OwnWork(0.25, 0.5), OwnWork(2.0, 0.125)))
    on = replace(CLUSTER, device=device)
    layout = ModuleLayout(4, split=(2,)).resolved()
    (plain,), (stage,) = (module_times(shape(), layout, cluster, fed=True) for cluster in (CLUSTER, on))
    assert stage.gather - plain.gather == pytest.approx(2 * 0.25 + 16 * 2 * 0.5)
    assert stage.reduce - plain.reduce == pytest.approx(2 * 2.0 + 16 * 4 * 0.125)
    (frozen,) = module_times(shape((False, False)), layout, on, fed=True)
    assert (frozen.gather, frozen.reduce) == (stage.gather, 0.0)
    whole = replace(layout, dp_shard=1, dp_replicate=4)
    assert module_times(shape(), whole, on, fed=True) == module_times(shape(), whole, CLUSTER, fed=True)


def test_replicas_sum_their_gradients_after_the_last_backward_or_in_reduce() -> None:
    (once,) = times(shape(), 4, dp_replicate=4)
    (every,) = times(shape(), 4, dp_replicate=4, once=False)
    summed = 2 * (2 * 1.0 + 16 * 4 * 3 / 4 / 64.0)
    assert once.gather == every.gather == 0.0
    assert once.reduce == pytest.approx(summed)
    assert every.reduce == 0.0
    assert every.after - once.after == pytest.approx(summed)
    (half,) = times(shape(), 4, dp_replicate=4, once=False, accumulated=2)
    assert every.after - half.after == pytest.approx(16 * 28 / 100.0 / 2), "the optimizer alone is shared out"


def test_gathers_of_every_microbatch_run_beside_its_compute() -> None:
    (stage,) = times(shape(), 4, once=False)
    few, many = np.array([1.0]), np.array([1e4])
    assert stage.seconds("F", few, few) == pytest.approx([stage.gather])
    assert stage.seconds("B", few, few) == pytest.approx([stage.gather + stage.reduce])
    assert stage.seconds("F", many, few) == pytest.approx(stage.forward.of(many, few))


def test_what_overlaps_takes_no_action_and_fsdp_is_as_it_was() -> None:
    (stage,) = times(shape(), 4, overlap=Overlap(dp=True))
    none = np.zeros(4)
    assert not stage.seconds("UNSHARD", none, none).any()
    assert not stage.seconds("REDUCE", none, none).any()
    every = [times(shape(), 4, once=False, overlap=Overlap(dp=dp)) for dp in ("apart", "block")]
    assert every[0] == every[1]


def test_stages_add_up_to_the_module() -> None:
    whole = times(shape((True,) * 4), split=(4,))[0]
    parts = times(shape((True,) * 4), 2, split=(1, 3), pp=2)
    for part in ("forward", "input", "weight"):
        assert getattr(parts[0], part).plus(getattr(parts[1], part)) == pytest.approx(getattr(whole, part))
    assert sum(p.after for p in parts) == pytest.approx(whole.after)


def test_bytes_follow_precision() -> None:
    (mixed,), (single,) = times(shape(), 4), times(shape(), 4, precision=Precision(4, 4))
    assert single.gather - 4.0 == pytest.approx(2 * (mixed.gather - 4.0))
    assert single.forward.per_row - 2 * MATMUL == pytest.approx(2 * (mixed.forward.per_row - 2 * MATMUL))
    assert single.reduce == mixed.reduce


@pytest.mark.parametrize("field", ["flops", "memory_bandwidth", "matmul", "attention"])
def test_a_better_device_is_faster_and_none_is_slower(field: str) -> None:
    device = replace(DEVICE, **{field: 2 * getattr(DEVICE, field)})
    better = replace(CLUSTER, device=device)
    layout = ModuleLayout(4, tp=2, split=(2,)).resolved()
    rows = np.array([64.0])
    old, new = (module_times(shape(), layout, where, fed=True)[0] for where in (CLUSTER, better))
    for kind in ("F", "I", "W", "B"):
        assert new.seconds(kind, rows, rows**2) <= old.seconds(kind, rows, rows**2)  # type: ignore[arg-type]
    assert new.seconds("F", rows, rows**2) < old.seconds("F", rows, rows**2)


def test_on_shared_cores_nothing_runs_beside_compute() -> None:
    rows, squares = np.array([3.0]), np.array([9.0])
    layout = ModuleLayout(2, dp_shard=2, split=(2,)).resolved()
    own, shared = (
        module_times(shape(), layout, replace(CLUSTER, cores_per_node=cores), fed=True, once=False)[0]
        for cores in (None, 2)
    )
    alone = own.forward.of(rows, squares)
    assert own.seconds("F", rows, squares) == pytest.approx(np.maximum(alone, own.gather))
    assert shared.seconds("F", rows, squares) == pytest.approx(alone + own.gather)
