"""Memory of steps against closed forms, and what layouts and recompute must change of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import MESSAGE_CTAS
from hetero_strategy.layout.row_sharding import REPLICATED, two_chunks
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.context import Context, in_context
from hetero_strategy.model.inputs import IGNORE, Packing, SequenceInputs
from hetero_strategy.model.read_spec import active_parameters, spec_of_module
from hetero_strategy.model.spec import ModelSpec, ModuleSpec
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.transform import Site
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator, Step
from hetero_strategy.profiling.activations import _Module, activations_of, ways_of
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.profiling.memory import CPU, CUDA, KINDS, Allocator, Memory, MemoryModel, communicators
from hetero_strategy.profiling.memory_changes import Changes
from hetero_strategy.profiling.stage_memory import (
    FEATURES,
    KEYS,
    Activations,
    BlockBytes,
    Head,
    HeadBytes,
    StageBytes,
    features,
    features_in_context,
    stage_bytes,
    stage_needs,
)
from hetero_strategy.runtime.connect import RECEIVING, SENDING
from hetero_strategy.simulator.balance_context import ROW_ALIGNMENT
from hetero_strategy.simulator.cluster import Cluster, Device, Links
from hetero_strategy.simulator.cost_model import MIXED, CostModel, Precision
from hetero_strategy.testing import ragged_step
from hetero_strategy.testing.setting import mixture
from hetero_strategy.zoo import titan_llama

WIDTH, PER_BLOCK, AROUND, INSIDE, BETWEEN, WHOLE, PEAK = 8, 1000, 300, 60.0, 24.0, 16.0, 150.0
FP32 = Precision(4, 4)
FLASH = Allocator()


def module(blocks: int, *, samplewise: bool) -> ModuleSpec:
    """Equal blocks that train, with as many parameters before them as after them; half of a block's are divided."""
    stored = np.zeros((blocks, 2, 2, 2), np.int64)
    stored[:, 0, 1] = PER_BLOCK // 2
    stored[0, 1, 1, 0] += AROUND
    stored[-1, 1, 1, 0] += AROUND
    total = stored.sum(axis=(1, 2, 3))
    ones = np.ones(blocks)
    return ModuleSpec(
        per_row=1e6 * ones, per_pair=0 * ones, parameters=total, trained=total, trained_share=ones, has_blocks=True,
        width=WIDTH, edge_width=WIDTH, tp=(1, 2), row_shardings=dict.fromkeys((1, 2), REPLICATED),
        samplewise=samplewise, stored=stored, largest=np.full(blocks, 200), buffers=0, moved=0 * ones,
    )  # fmt: skip


def bytes_of(blocks: int) -> BlockBytes:
    rows = np.zeros((5, blocks, len(FEATURES)))
    rows[:, :, 0] = np.array([INSIDE, BETWEEN, WHOLE, PEAK, 2 * PEAK])[:, None]
    kept = np.concatenate([rows[:3], np.zeros_like(rows[:1])])
    return BlockBytes(kept, 0.0, rows[3], rows[4], 1.5 * rows[:3].sum(axis=0))


def activations(blocks: int) -> Activations:
    zeros, made = np.zeros((4, blocks, len(FEATURES))), bytes_of(blocks)
    none = BlockBytes(zeros, 4.0 * WIDTH, made.forward, made.backward, zeros[0])
    return Activations({"": bytes_of(blocks), "recompute=all": none}, 4.0 * WIDTH, None, 0.0)


SHAPE = ModelSpec({"vision": module(4, samplewise=False), "llm": module(4, samplewise=True)}, (("vision", "llm"),))
TEXT = ModelSpec({"llm": module(4, samplewise=True)}, ())
OF = {"vision": activations(4), "llm": activations(4)}


def equal(samples: int, rows: int) -> StepMetadata:
    """Samples of text, all of a length."""
    return ragged_step(0, samples, {}, text=(rows, rows))


def memory(
    candidate: Candidate,
    metadata: StepMetadata,
    shape: ModelSpec = TEXT,
    precision: Precision = FP32,
    allocator: Allocator = FLASH,
    of: Mapping[str, Activations] | None = None,
) -> Memory:
    """Of a step."""
    predicted, step = model_and_step(candidate, metadata, shape, precision, allocator, of)
    return step.memory(predicted)


def model_and_step(
    candidate: Candidate,
    metadata: StepMetadata,
    shape: ModelSpec,
    precision: Precision,
    allocator: Allocator,
    of: Mapping[str, Activations] | None = None,
) -> tuple[MemoryModel, Step]:
    world = max(r for layout in candidate.layouts.values() for r in layout.ranks) + 1
    links = Links(1e-6, 1e9)
    cluster = Cluster(Device("any", 1e9, 1e9, 1e9, 1.0, 1.0), 1, world, links, links)
    evaluator = Evaluator(CostModel(shape, cluster, precision=precision), [metadata])
    return MemoryModel(shape, of or OF, precision, allocator), evaluator.step(evaluator.place(candidate))


def over_time(predicted: MemoryModel, step: Step) -> tuple[Memory, list[np.ndarray]]:
    """Of a step, and the bytes alive on each rank from place to place of its actions, the margin left out."""
    with patch.object(Changes, "at_peak", autospec=True, side_effect=Changes.at_peak) as looked:
        found = step.memory(predicted)
    changes: Changes = looked.call_args.args[0]
    ranks, _, alive = changes._alive
    return found, [alive[ranks == alike] for alike in changes._alike]


def least(predicted: MemoryModel, step: Step) -> np.ndarray:
    """Bytes that every rank needs whatever the batch: parameters, optimizer states, and of one stage the weights and
    gradients while they are whole.
    """
    placed, allocator = step.placed, predicted.allocator
    fixed, most = np.zeros((2, placed.placement.world_size))
    for stage_id, stage in placed.graph.stages.items():
        size, ranks = predicted._sizes(placed.placement.layouts, placed.graph, stage_id), stage.grid.ravel()
        fixed[ranks] += size.masters + size.optimizer
        most[ranks] = np.maximum(most[ranks], size.gathered.sum() * size.once + size.summed.sum() * stage.trains)
    return (fixed + most) * (1 + allocator.margin) + allocator.communicator * communicators(placed.placement, ())


def of_kind(found: Memory, kind: str) -> list[float]:
    return found.bytes[KINDS.index(kind)].tolist()


def test_one_rank_in_closed_form() -> None:
    """Two microbatches of 3 samples, one after the other: the last backward is the peak, with all gradients."""
    found = memory(Candidate({"llm": ModuleLayout((0,))}, 2), equal(6, 10))
    parameters, rows = 4 * (4 * PER_BLOCK + 2 * AROUND), 30
    assert of_kind(found, "masters") == [parameters] and of_kind(found, "optimizer") == [2 * parameters]
    assert of_kind(found, "gradients") == [parameters]
    kept = rows * (INSIDE + BETWEEN + WHOLE)
    assert of_kind(found, "activations") == [4 * kept]
    # Backward of the last block: its own most, the gradient of its rows where a head made it, one new gradient.
    assert of_kind(found, "moment") == [rows * (2 * PEAK + 4 * WIDTH) - kept + 4 * 200]
    assert found.peak.tolist() == [4 * parameters + 4 * kept + rows * (2 * PEAK + 4 * WIDTH) - kept + 4 * 200]


def test_gradients_of_batches_before_are_there_throughout() -> None:
    """Of the layout above, in which all new gradients are there at the peak, too."""
    candidate = Candidate({"llm": ModuleLayout((0,))}, 2)
    predicted, step = model_and_step(candidate, equal(6, 10), TEXT, FP32, FLASH)
    once, found = (step.memory(replace(predicted, accumulates=earlier)) for earlier in (False, True))
    parameters = of_kind(once, "masters")[0]
    assert of_kind(found, "gradients") == [2 * parameters] and found.peak - once.peak == [parameters]


def test_stages_hold_as_many_microbatches_as_their_schedule() -> None:
    kept = 10 * 2 * (INSIDE + BETWEEN + WHOLE)
    for schedule, in_flight in (("gpipe", (6, 6)), ("1f1b", (2, 1))):
        found = memory(Candidate({"llm": ModuleLayout((0, 1), pp=2)}, 6, schedule), equal(6, 10))
        assert of_kind(found, "activations") == [n * kept for n in in_flight]


def test_every_other_block_in_host_memory_is_counted_from_the_first_of_the_module() -> None:
    blocks = OF["llm"].blocks[""]
    of = {"llm": replace(OF["llm"], blocks={"": blocks, "offload=all": replace(blocks, kept=blocks.kept / 4)})}
    candidate = Candidate({"llm": ModuleLayout((0, 1), pp=2, split=(1, 3))}, 2, transforms={"llm": [Offload(2)]})
    found = memory(candidate, equal(6, 10), of=of)
    each = 30 * (INSIDE + BETWEEN + WHOLE)  # of a microbatch in a block
    assert [(one.host, one.device) for one in found.kept] == [(0.75 * each, 0.25 * each), (0.75 * each, 2.25 * each)]


def test_every_other_block_that_runs_again_is_counted_from_the_first_of_the_module() -> None:
    candidate = Candidate({"llm": ModuleLayout((0, 1), pp=2, split=(1, 3))}, 2, transforms={"llm": [Recompute(2)]})
    kept = 30 * (INSIDE + BETWEEN + WHOLE)  # of a microbatch in a block that does not
    rows = 30 * 4 * WIDTH
    assert [one.device for one in memory(candidate, equal(6, 10)).kept] == [0, 2 * kept + rows]


class Hooked(Recompute):
    """A transform that hooks blocks, too."""

    def apply(self, stages: Sequence[Adapter], site: Site) -> None:
        super().apply(stages, site)
        for block in stages[0].blocks().values():
            block.register_forward_hook(lambda *_: None)


def test_a_model_is_as_before_after_its_activations_were_measured() -> None:
    llm = titan_llama(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, max_seq_len=128)
    model = MultimodalModel({"llm": llm})
    before = [{key: id(value) for key, value in vars(part).items()} for part in model.modules()]
    hooks = [[*part._forward_hooks] for part in model.modules()]
    activations_of(model, ways={"llm": ways_of(2, {"recompute": Recompute(2), "offload": Offload()})})
    activations_of(model, ways={"llm": {"": (), "recompute=all": (Hooked(),)}})
    assert [{key: id(value) for key, value in vars(part).items()} for part in model.modules()] == before
    assert [[*part._forward_hooks] for part in model.modules()] == hooks
    copy.deepcopy(model)


def test_transforms_that_were_not_measured_are_refused_by_name() -> None:
    candidate = Candidate({"llm": ModuleLayout((0,))}, 2, transforms={"llm": [Recompute(), Offload(2)]})
    message = r"memory of 'llm': activations of blocks with 'recompute=all, offload=all' were not measured; give its"
    with pytest.raises(
        ConfigError, match=message + r" transforms {'recompute': 'all', 'offload': 'every 2'} to memory_m"
    ):
        memory(candidate, equal(6, 10))


def test_what_stays_after_a_step() -> None:
    """All else that came has gone."""
    layouts = {"vision": ModuleLayout((0, 1)), "llm": ModuleLayout((0, 1, 2), pp=3, split=(1, 1, 2))}
    metadata = ragged_step(3, 8, {"vision": lambda rng, n: rng.integers(4, 9, n)}, text=(5, 20))
    for schedule, precision in (("1f1b", FP32), ("zb_h1", MIXED)):
        for allocator in (CPU, CUDA):
            candidate = Candidate(layouts, 4, schedule)
            found, alive = over_time(*model_and_step(candidate, metadata, SHAPE, precision, allocator))
            owned = found.bytes[:2].sum(axis=0)
            for rank in range(3):
                assert alive[rank].min() >= owned[rank] - 1e-6
                assert alive[rank].max() == pytest.approx(found.bytes[:-1, rank].sum())
                assert alive[rank][-1] == pytest.approx(owned[rank] * 4 / 3)  # and the gradients' shards


def test_what_becomes_of_parameters_in_closed_form() -> None:
    """Of four blocks, of which the first is frozen, and of what lies around them."""
    stored = module(4, samplewise=True).stored.copy()
    stored[0, 0] = stored[0, 0, ::-1].copy()
    shape = replace(module(4, samplewise=True), stored=stored, buffers=77, moved=np.zeros(4))
    trained = np.array([0, *[PER_BLOCK] * 3, 2 * AROUND])
    frozen, total = np.array([PER_BLOCK, 0, 0, 0, 0]), int(trained.sum())

    def of(once: bool, precision: Precision = MIXED, **degrees: Any) -> StageBytes:
        ranks = int(np.prod([*degrees.values()]))
        return stage_bytes(shape, ModuleLayout(range(ranks), **degrees).resolved(), 0, 4, once, precision)

    shards, replicas = of(False, dp_shard=2), of(False, dp_replicate=2)
    assert shards.masters == (4 * total + 2 * PER_BLOCK) / 2 + 77
    assert shards.gathered.tolist() == (2 * (trained + frozen)).tolist()
    assert replicas.gathered.tolist() == (2 * trained).tolist(), "over one rank only what trains is cast"
    assert shards.summed.tolist() == (2 * trained).tolist()
    once = of(True, dp_shard=2)
    assert once.summed.tolist() == (4 * trained).tolist() and once.reduce == max(4 * trained) + 4 * total / 2
    assert shards.beside_forward().tolist() == (2 * 2 * (trained + frozen))[:-1].tolist(), "weights and their buffer"
    assert not once.beside_forward().any()
    assert [one.bucket for one in (of(True, FP32, dp_replicate=2), replicas, shards)] == [4 * total, 0, 0]


@pytest.mark.parametrize(("degrees", "ep"), [({}, 2), ({}, 4), ({"tp": 2}, 4), ({"dp_replicate": 2}, 2)])
def test_experts_are_held_by_all_ranks_that_share_them(degrees: dict[str, int], ep: int) -> None:
    """A rank holds E / (ep x efsdp) experts of a layer, and gathers E / ep."""
    with torch.device("meta"):
        shape = spec_of_module(module := mixture(64, 2, 8))
    layout, matrices = ModuleLayout((0, 1, 2, 3), ep=ep, **degrees).resolved(), 3 * 64 * 64
    assert shape.experts is not None and shape.experts.held(0, 2) == (2 * 8 * matrices, 2 * 8 * matrices)
    assert shape.active == active_parameters(module) == shape.parameters.sum() - 2 * 6 * matrices
    found, plain = (stage_bytes(shape, x, 0, 2, False, Precision(2, 4)) for x in (layout, replace(layout, ep=1)))
    shared = 2 * 8 * matrices / (layout.shards * layout.tp)
    assert found.masters == plain.masters and found.optimizer == plain.optimizer >= 2 * 4 * shared
    assert plain.gathered[0] - found.gathered[0] == 2 * 8 * matrices * (1 / layout.tp - 1 / ep)
    assert shape.experts.can_be_divided(ep, layout.expert_shards) and not shape.experts.can_be_divided(3, 1)


def test_shards_divide_states_and_recompute_leaves_rows() -> None:
    alone = memory(Candidate({"llm": ModuleLayout((0,))}, 2), equal(6, 10))
    shards = memory(Candidate({"llm": ModuleLayout((0, 1))}, 2, reshard_after_forward="never"), equal(6, 10))
    for kind in ("masters", "optimizer"):
        assert of_kind(shards, kind) == [x / 2 for x in of_kind(alone, kind) * 2]
    assert of_kind(shards, "gathered") == of_kind(alone, "masters") * 2
    again = {"llm": [Recompute()]}
    less = memory(Candidate({"llm": ModuleLayout((0,))}, 2, transforms=again), equal(6, 10))
    assert of_kind(less, "activations") == [30 * 3 * 4 * WIDTH]  # inputs of all blocks but the first
    assert less.peak[0] < alone.peak[0]


def test_a_stage_recomputed_whole_keeps_nothing_until_a_backward_that_needs_what_it_ever_did() -> None:
    """With a head whose backward is the most of all."""
    head = Head(5, HeadBytes(7.0, 7.0), HeadBytes(70.0, 70.0), HeadBytes(1e5, 1e5))
    layout = ModuleLayout((0,)).resolved("llm")
    sizes = stage_bytes(TEXT.modules["llm"], layout, 0, 4, True, FP32)
    rows, labelled = 10 * np.eye(1, len(FEATURES))[None], np.array([[9]])
    plain, whole = (
        stage_needs(replace(activations(4), head=head), layout, 1, how, sizes, (0, 4), rows, labelled)
        for how in ({}, {"recompute": Recompute(whole=True)})
    )
    assert plain.kept == 10 * 4 * (INSIDE + BETWEEN + WHOLE) + 9 * 7 and whole.kept == 0
    assert plain.first == 10 * 4 * (INSIDE + BETWEEN + WHOLE) + 9 * 1e5
    assert whole.first == plain.first and whole.again == plain.again
    assert 10 * PEAK <= whole.forward < plain.forward


def test_frozen_blocks_need_their_rows_which_none_keeps() -> None:
    """The first block's came from another stage, or it makes them itself."""
    layout, none = ModuleLayout((0,)).resolved("llm"), np.zeros((4, len(FEATURES)))
    frozen = BlockBytes(np.zeros((4, *none.shape)), 0.0, bytes_of(4).forward, none, none)
    of, rows = Activations({"": frozen}, 4.0 * WIDTH, None, 0.0), 10 * np.eye(1, len(FEATURES))[None]
    for blocks, between in (((1, 2), 0), ((1, 3), 4 * WIDTH)):
        sizes = stage_bytes(TEXT.modules["llm"], layout, *blocks, True, FP32)
        assert stage_needs(of, layout, 1, {}, sizes, blocks, rows, None).forward == 10 * (PEAK + between)
    trains = stage_needs(activations(4), layout, 1, {}, sizes, (1, 3), rows, None)
    assert trains.forward == 10 * (INSIDE + BETWEEN + WHOLE + PEAK)  # kept, its input with it


def test_tensor_parallelism_divides_what_is_inside_its_columns() -> None:
    alone = memory(Candidate({"llm": ModuleLayout((0,))}, 2), equal(6, 10))
    split = memory(Candidate({"llm": ModuleLayout((0, 1), tp=2)}, 2), equal(6, 10))
    divided = 4 * 4 * PER_BLOCK // 2
    assert of_kind(split, "masters") == [of_kind(alone, "masters")[0] - divided / 2] * 2
    filled = 2 * ROW_ALIGNMENT  # rows, of which 30 are those of samples
    assert of_kind(split, "activations") == [4 * filled * (INSIDE / 2 + BETWEEN + WHOLE)] * 2
    parts = bytes_of(4).on(2, 2)
    assert parts.kept[:, 0, 0].tolist() == [INSIDE / 2, BETWEEN / 2, WHOLE, 0.0]


def test_context_parallelism_divides_rows_but_not_keys_and_shards_parameters() -> None:
    made, of = bytes_of(4), activations(4)
    made.kept[0, :, KEYS], made.forward[:, KEYS] = 5.0, 5.0
    known = {"llm": replace(of, blocks={"": made})}
    alone = memory(Candidate({"llm": ModuleLayout((0,))}, 1), equal(1, 40), of=known)
    for reshard in ("never", "always"):  # as of shards
        layouts = ({"llm": ModuleLayout((0, 1), **degrees)} for degrees in ({"cp": 2}, {"dp_shard": 2}))
        both, shards = (
            memory(Candidate(x, 1, reshard_after_forward=reshard), equal(n, 40), of=known)
            for x, n in zip(layouts, (1, 2), strict=True)
        )
        for kind in ("masters", "optimizer"):
            assert of_kind(both, kind) == of_kind(shards, kind) == [x / 2 for x in of_kind(alone, kind) * 2]
        seen = 50  # up to the ends of chunks of 10 rows there are 10 and 40 on one rank, 20 and 30 on the other
        kept = 4 * (20 * (INSIDE + BETWEEN + WHOLE) + seen * 5.0)
        assert [x.device for x in both.kept] == [kept] and shards.kept == alone.kept
    heads = memory(Candidate({"llm": ModuleLayout((0, 1), cp=2, cp_form="heads")}, 1), equal(1, 40), of=known)
    assert [x.device for x in heads.kept] == [4 * 20 * (INSIDE + BETWEEN + WHOLE)]


def test_keys_of_a_rank_are_those_of_sequences_up_to_its_chunks() -> None:
    """Against what ranks are given."""
    for lengths, cp in (((40,), 2), ((12,), 3), ((5, 9, 2, 16), 2), ((8, 8, 8, 8), 2), ((7, 0, 1), 1), ((3, 21), 4)):
        packing = Packing.of(np.array(lengths))
        ids = torch.zeros(packing.rows, dtype=torch.int64)
        inputs = SequenceInputs(ids, ids, packing)
        contexts = [in_context(inputs, part, two_chunks(packing.rows, cp)).packing.context for part in range(cp)]
        seen = max(len(context.keys_of(None).of_segments) for context in contexts if isinstance(context, Context))
        assert features_in_context(np.array(lengths), cp).tolist() == [sum(lengths) / cp, seen]


def test_communicators_buffers_of_messages_and_margin_are_reserved() -> None:
    candidate = Candidate({"llm": ModuleLayout((0, 1), pp=2)}, 2)
    allocator = Allocator(margin=0.1, communicator=1000, messages=True)
    plain, more = (memory(candidate, equal(6, 10), allocator=a) for a in (FLASH, allocator))
    edge = MESSAGE_CTAS * (SENDING + RECEIVING)  # rows one way, gradients the other
    assert more.peak.tolist() == pytest.approx((1.1 * plain.peak + 1000 + edge).tolist())  # the world


@st.composite
def candidates(draw: Any) -> Candidate:
    layouts = {}
    for name in ("vision", "llm"):
        ways: list[dict[str, int]] = [{}, {"pp": 2}, {"tp": 2}, {"dp_replicate": 2}, {"pp": 2, "vpp": 2}]
        degrees = draw(st.sampled_from(ways + [{"cp": 2}] * (name == "llm")))
        shard = draw(st.sampled_from([1, 2]))
        count = shard * int(np.prod([v for k, v in degrees.items() if k != "vpp"]))
        first = draw(st.integers(0, 4 - count))
        layouts[name] = ModuleLayout(tuple(range(first, first + count)), dp_shard=shard, **degrees)
    virtual = any(layout.vpp > 1 for layout in layouts.values())
    schedule = draw(st.sampled_from(["auto", "gpipe"] if virtual else ["auto", "gpipe", "1f1b", "zb_h1"]))
    reshard = draw(st.sampled_from(["auto", "never"] + ["always"] * (schedule != "zb_h1")))
    transforms = {n: [Recompute(draw(st.integers(1, 2)))] for n in layouts if draw(st.booleans())}
    return Candidate(layouts, draw(st.integers(1, 4)), schedule, transforms, reshard)


@pytest.mark.full
@settings(deadline=None, max_examples=60)
@given(candidates(), st.integers(0, 99), st.sampled_from([FP32, MIXED]), st.sampled_from([CPU, CUDA]))
def test_the_bound_is_never_above_the_peak(
    candidate: Candidate, seed: int, precision: Precision, allocator: Allocator
) -> None:
    metadata = ragged_step(seed, 6, {"vision": lambda rng, n: rng.integers(1, 9, n)}, items=(0, 2), text=(2, 20))
    predicted, step = model_and_step(candidate, metadata, SHAPE, precision, allocator)
    found, bound = step.memory(predicted), least(predicted, step)
    ranks = sorted({r for layout in candidate.layouts.values() for r in layout.ranks})
    assert (bound[ranks] <= found.peak[ranks] * (1 + 1e-9)).all()
    assert (bound[ranks] > 0).all() and (found.bytes >= -1e-6).all()


@pytest.mark.full_cases("ragged")
@pytest.mark.parametrize("lengths", [(40,), (40, 13, 39, 7)], ids=["one sequence", "ragged"])
def test_activations_are_those_of_real_blocks(lengths: tuple[int, ...]) -> None:
    """A block runs on real tensors, of which all memory is counted, with sizes that nothing was fitted on."""
    llm = titan_llama(vocab_size=64, dim=64, n_layers=3, n_heads=4, n_kv_heads=2, multiple_of=16, max_seq_len=128)
    found = _Module(llm, True, torch.float32).measured({"": ()}).blocks[""]
    stage = llm.stage(list(llm.blocks())[1:2], first=False, last=False)
    tensors = {n: torch.zeros(p.shape, requires_grad=True) for n, p in stage.named_parameters()}
    tensors |= {n: torch.zeros(b.shape, dtype=b.dtype) for n, b in stage.named_buffers()}
    packing = Packing.of(np.array(lengths))
    ids = torch.zeros(packing.rows, dtype=torch.int64)
    inputs = SequenceInputs(ids, torch.full_like(ids, IGNORE), packing, labelled=ids[:0])
    hidden = torch.zeros(packing.rows, 64, requires_grad=True)
    with Allocations() as counted:
        out = torch.func.functional_call(stage, tensors, (inputs, {}, hidden))
        forward, out = counted.most, out.sum()
        kept = counted.now
    wanted = features(packing.rows)
    assert found.kept[:, 1].sum(axis=0) @ wanted == pytest.approx(kept, rel=0.02)
    assert found.forward[1] @ wanted == pytest.approx(forward, rel=0.03)
