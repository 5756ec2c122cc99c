"""Properties of routes on random layouts and ragged counts: simulated with tagged rows, no processes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_strategy.boundary.route import Hop, Route, Side, Transfer, _share, least_rows, route, stage_route
from hetero_strategy.errors import LayoutError
from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.layout.row_sharding import RowOrder, RowSharding
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import EdgeBlocks, StepItems, StepMetadata, edge_blocks, slots
from hetero_strategy.testing import rearranged

WIDTH = 3


@dataclass(repr=False)
class Case:
    blocks: EdgeBlocks
    source: Side
    target: Side
    world: int
    routes: list[Route]
    dealt: list[np.ndarray] | None = None
    """Rows of each target instance, rank by rank of context parallelism."""

    def tags(self) -> dict[int, np.ndarray]:
        """Distinct values per (source instance, row), as every source rank holds them: [rows, WIDTH]."""
        held = {}
        for rank in range(self.world):
            where = np.argwhere(self.source.instances == rank)
            rows = int(self.source.totals[where[0][0]]) if len(where) else 0
            base = 1000.0 * (where[0][0] + 1) if len(where) else 0.0
            held[rank] = base + np.arange(rows)[:, None] + np.arange(WIDTH) / 8
        return held

    def expected(self, rank: int) -> np.ndarray:
        """Tagged rows a target rank needs, from the blocks alone (written without routes)."""
        where = np.argwhere(self.target.instances == rank)
        if not len(where):
            return np.zeros((0, WIDTH))
        instance, among = (int(x) for x in where[0])
        part = among // (self.target.instances.shape[1] // self.target.sharding.parts)
        per_part = int(self.target.totals[instance]) // self.target.sharding.parts
        places = np.argsort(self.dealt[instance]) if self.dealt else np.arange(self.target.totals[instance])
        found = []
        b = self.blocks
        for i in range(len(b.rows)):
            if b.target_instance[i] != instance:
                continue
            for k in range(b.rows[i]):
                position = b.target_start[i] + k
                if places[position] // max(per_part, 1) != part:
                    continue
                tag = 1000.0 * (b.source_instance[i] + 1) + b.source_start[i] + k
                found.append((position, tag + np.arange(WIDTH) / 8))
        found.sort(key=lambda pair: pair[0])
        return np.stack([row for _, row in found]) if found else np.zeros((0, WIDTH))


def run(transfers: list[Transfer], inputs: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """All ranks of one direction, with messages as arrays."""
    out = {r: np.full((t.outputs, WIDTH), np.nan) for r, t in enumerate(transfers)}
    writes = {r: np.zeros(t.outputs, dtype=int) for r, t in enumerate(transfers)}
    for r, t in enumerate(transfers):
        out[r][t.local[1]] = inputs[r][t.local[0]]
        np.add.at(writes[r], t.local[1], 1)
    for hop in ("first", "second"):
        mail = {}
        for r, t in enumerate(transfers):
            read = inputs[r] if hop == "first" else out[r]
            for peer, rows in getattr(t, hop).sends:
                assert peer != r and (r, peer) not in mail
                mail[r, peer] = read[rows].copy()
        for r, t in enumerate(transfers):
            for peer, rows in getattr(t, hop).receives:
                out[r][rows] = mail.pop((peer, r))
                np.add.at(writes[r], rows, 1)
        assert not mail, "a message nobody receives"
    for r, t in enumerate(transfers):
        assert (writes[r] <= 1).all(), "a row is written twice"
        assert t.is_complete == writes[r].all()
    return out


def deal(draw: st.DrawFn, totals: np.ndarray, parts: int) -> tuple[RowOrder, list[np.ndarray]]:
    """Deal any rows to some ranks, equally many each; return also the rows of each instance, rank by rank."""
    ranks = draw(st.sampled_from([d for d in range(1, parts + 1) if parts % d == 0]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    of_row = [rng.permutation(np.repeat(np.arange(ranks), total // ranks)) for total in totals]
    starts = [np.flatnonzero(np.diff(of, prepend=-1)) for of in of_row]
    pieces = np.array(list(map(len, starts)))
    rank = np.concatenate([of[start] for of, start in zip(of_row, starts, strict=True)])
    order = RowOrder.of(totals, pieces, np.concatenate(starts), rank)
    return order, [np.argsort(of, kind="stable") for of in of_row]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 16))

    def layout() -> ModuleLayout:
        count = draw(st.integers(1, world))
        ranks = draw(st.permutations(range(world)))[:count]
        tp = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
        rep = draw(st.sampled_from([d for d in range(1, count // tp + 1) if (count // tp) % d == 0]))
        return ModuleLayout(ranks=tuple(ranks), tp=tp, dp_replicate=rep)

    placement = place({"vision": layout(), "llm": layout()}, world)
    tp = placement.layouts["llm"].tp
    parts = draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]))
    samples = draw(st.integers(1, 8))
    counts = [draw(st.lists(st.integers(1, 9), max_size=4)) for _ in range(samples)]
    sample, rows, start, tokens = [], [], [], []
    for s, items in enumerate(counts):
        position = draw(st.integers(0, 3))
        for n in items:
            sample.append(s), rows.append(n), start.append(position)
            position += n + draw(st.integers(0, 2))
        tokens.append(position + 1)
    array = lambda values: np.asarray(values, dtype=np.int64)  # noqa: E731
    items = {"vision": StepItems(array(sample), array(rows), array(start), array(rows))}
    metadata = StepMetadata(0, 0, np.arange(samples), array(tokens), np.ones(samples, np.int64), items)

    instances, rng = placement.instances(), np.random.default_rng(draw(st.integers(0, 99)))
    shuffled = {name: rng.integers(0, n, len(metadata.sample_of(name))) for name, n in instances.items()}
    plan = plan_step(metadata, instances, ("llm",), microbatches=draw(st.integers(1, 2)))
    plan = rearranged(plan, instances, shuffled, {"llm": parts})
    assignments = {name: made[0] for name, made in plan.assignments.items()}
    source = Side(placement.layouts["vision"].stage_grid(0), assignments["vision"].totals())
    totals = assignments["llm"].totals()
    order, dealt = deal(draw, totals, parts)
    target = Side(placement.layouts["llm"].stage_grid(0), totals, RowSharding(parts), order)
    blocks = edge_blocks(plan, "vision", 0, "llm", 0)
    return Case(blocks, source, target, world, [route(blocks, source, target, r) for r in range(world)], dealt)


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(cases())
def test_every_row_arrives_once_where_it_belongs(case: Case) -> None:
    out = run([r.forward for r in case.routes], case.tags())
    for rank in range(case.world):
        np.testing.assert_array_equal(out[rank], case.expected(rank))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_backward_is_the_adjoint(case: Case, seed: int) -> None:
    """<forward(x), g> = <x, backward(g)>; replicas hold equal x and equal g, and each counts once."""
    rng = np.random.default_rng(seed)
    by_instance = {i: rng.integers(-9, 9, (int(t), WIDTH)).astype(float) for i, t in enumerate(case.source.totals)}
    x = {r: np.zeros((0, WIDTH)) for r in range(case.world)}
    for i, ranks in enumerate(case.source.instances):
        x |= {int(r): by_instance[i] for r in ranks}
    y = run([r.forward for r in case.routes], x)
    g, left = {r: np.zeros((0, WIDTH)) for r in range(case.world)}, 0.0
    for ranks in case.target.sharding.rank_sets(case.target.instances):
        shared = rng.integers(-9, 9, y[int(ranks[0])].shape).astype(float)
        g |= dict.fromkeys(map(int, ranks), shared)
        left += float((y[int(ranks[0])] * shared).sum())  # a replicated row counts once
    back = run([r.backward for r in case.routes], g)
    right = 0.0
    for i, ranks in enumerate(case.source.instances):
        for r in ranks:
            np.testing.assert_array_equal(back[int(r)], back[int(ranks[0])])  # every replica gets the same gradient
        right += float((by_instance[i] * back[int(ranks[0])]).sum())
    assert left == right


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(cases())
def test_bytes_equal_the_lower_bound(case: Case) -> None:
    for direction in ("forward", "backward"):
        transfers = [getattr(r, direction) for r in case.routes]
        needed = 0
        for rank in range(case.world):  # the bound once more, from each rank's own rows
            t = transfers[rank]
            needed += t.outputs - len(t.local[0])
        assert sum(t.rows_sent for t in transfers) == needed
        assert needed == least_rows(case.blocks, case.source, case.target, backward=direction == "backward")


@settings(max_examples=100, deadline=None)
@given(cases())
def test_rows_enter_a_replica_set_once(case: Case) -> None:
    """Rows that no member of a target instance has cross into it once."""
    if case.target.sharding.parts > 1:
        return
    for j, members in enumerate(case.target.instances):
        members = {int(r) for r in members}
        entered = sum(
            len(rows) for r in members for peer, rows in case.routes[r].forward.first.receives if peer not in members
        )
        b = case.blocks
        outside = [
            i
            for i in range(len(b.rows))
            if b.target_instance[i] == j and not members & {int(r) for r in case.source.instances[b.source_instance[i]]}
        ]
        assert entered == sum(int(b.rows[i]) for i in outside)


def test_a_damaged_route_is_noticed() -> None:
    """Negative control: a route planned for other blocks does not deliver the right rows."""
    array = lambda *v: np.asarray(v, dtype=np.int64)  # noqa: E731
    right = EdgeBlocks(array(0, 1), array(0, 0), array(0, 0), array(0, 2), array(2, 2))
    wrong = EdgeBlocks(array(1, 0), array(0, 0), array(0, 0), array(0, 2), array(2, 2))
    source, target = Side(np.array([[0], [1]]), array(2, 2)), Side(np.array([[2]]), array(4))
    case = Case(right, source, target, 3, [route(wrong, source, target, r) for r in range(3)])
    out = run([r.forward for r in case.routes], case.tags())
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(out[2], case.expected(2))


def test_colocated_equal_layout_moves_nothing() -> None:
    array = lambda *v: np.asarray(v, dtype=np.int64)  # noqa: E731
    blocks = EdgeBlocks(array(0, 1), array(0, 0), array(0, 1), array(3, 1), array(2, 5))
    both = np.array([[0, 1], [2, 3]])
    sides = Side(both, array(2, 5)), Side(both, array(9, 9))
    for rank in range(4):
        made = route(blocks, *sides, rank)
        assert made.forward.is_identity and made.backward.is_identity
        rows = slots(blocks, rank // 2)
        assert made.forward.outputs == len(rows)


@st.composite
def neighbours(draw: st.DrawFn) -> Case:
    """Two neighbouring stages of one pipelined module; the blocks say that each instance keeps its rows."""
    pp, dp, tp = draw(st.integers(2, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    world = pp * dp * tp + draw(st.integers(0, 2))
    ranks = draw(st.permutations(range(world)))[: pp * dp * tp]
    turns = draw(st.sampled_from([{}, {"vpp": 2}, {"vpp": 2, "pp_style": "v"}]))
    layout = ModuleLayout(ranks=tuple(ranks), pp=pp, tp=tp, **turns).resolved()
    parts = draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]))
    stage = draw(st.integers(0, layout.pipeline.stages - 2))
    totals = np.asarray([draw(st.integers(0, 5)) * parts for _ in range(dp)], dtype=np.int64)
    order, dealt = deal(draw, totals, parts)
    source, target = (
        Side(layout.stage_grid(number), totals, RowSharding(parts), order) for number in (stage, stage + 1)
    )
    every, zero = np.flatnonzero(totals), np.zeros(np.count_nonzero(totals), dtype=np.int64)
    blocks = EdgeBlocks(every, zero, every, zero, totals[every])
    return Case(blocks, source, target, world, [stage_route(source, target, r) for r in range(world)], dealt)


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(neighbours())
def test_rows_between_stages_keep_their_coordinate(case: Case) -> None:
    """Forward and back, as the blocks say, with no more messages than a route made of the blocks."""
    ways = {"forward": (case.source, case.target), "backward": (case.target, case.source)}
    for way, (holders, needers) in ways.items():
        here = Case(case.blocks, holders, needers, case.world, [], case.dealt)
        held = here.tags()
        for rank, (instance, among) in {int(r): w for w, r in np.ndenumerate(holders.instances)}.items():
            parts = holders.sharding.parts
            size, part = int(holders.totals[instance]) // parts, among // (holders.instances.shape[1] // parts)
            assert case.dealt is not None
            held[rank] = held[rank][case.dealt[instance][part * size : (part + 1) * size]]
        out = run([getattr(r, way) for r in case.routes], held)
        for rank in range(case.world):
            np.testing.assert_array_equal(out[rank], here.expected(rank))
        brute = [getattr(route(case.blocks, case.source, case.target, r), way) for r in range(case.world)]
        assert [getattr(r, way).rows_sent for r in case.routes] == [t.rows_sent for t in brute]
        assert [getattr(r, way).is_complete for r in case.routes] == [True] * case.world


def test_stages_on_one_rank_move_nothing() -> None:
    """The turn of a v: neighbouring stages of one rank."""
    layout = ModuleLayout(ranks=(0, 1), pp=2, vpp=2, pp_style="v").resolved()
    sides = [Side(layout.stage_grid(stage), np.asarray([4])) for stage in (1, 2)]
    assert stage_route(sides[0], sides[1], 1).forward.is_identity
    for side in (sides[0], Side(np.array([[0]]), np.asarray([4]))):
        assert not stage_route(side, sides[1], 0).forward.outputs


def test_rows_that_parts_do_not_share_out_evenly_are_refused() -> None:
    """The last of them would be taken for those of the next instance."""
    ranks, totals = np.array([[0, 1], [2, 3]]), np.array([4, 5])
    with pytest.raises(LayoutError, match="instance 1 has 5 rows, which is no multiple of 2;"):
        Side(ranks, totals, RowSharding(2))
    assert Side(ranks, totals).rows_on(3) == 5


def test_rows_that_ranks_share_out_go_to_the_rank_of_the_same_part() -> None:
    layout = ModuleLayout(ranks=(0, 1, 2, 3), pp=2, tp=2).resolved()
    source, target = (Side(layout.stage_grid(stage), np.asarray([4]), RowSharding(2)) for stage in (0, 1))
    for rank in range(4):
        made = stage_route(source, target, rank)
        gives, takes = (made.forward, made.backward) if rank < 2 else (made.backward, made.forward)
        assert [peer for peer, _ in (*gives.first.sends, *takes.first.receives)] == [(rank + 2) % 4] * 2


def test_a_transfer_is_complete_only_if_every_row_arrives() -> None:
    """Nothing reads the source's row 1, so no gradient comes for it. Rank 0 has another row by itself; rank 1 has none,
    and one of the replicas gets its rows in the second hop."""
    array = lambda *v: np.asarray(v, dtype=np.int64)  # noqa: E731
    blocks = EdgeBlocks(array(0, 0), array(0, 2), array(0, 1), array(0, 0), array(1, 1))
    source, target = Side(np.array([[0, 1]]), array(3)), Side(np.array([[0], [2]]), array(1, 1))
    routes = [route(blocks, source, target, rank) for rank in range(3)]
    assert [made.forward.is_complete for made in routes] == [True] * 3
    assert [made.backward.is_complete for made in routes] == [False, False, True]
    gradients = run([made.backward for made in routes], {r: np.full((int(r != 1), WIDTH), 1.0 + r) for r in range(3)})
    for rank in (0, 1):
        np.testing.assert_array_equal(gradients[rank][:, 0], [1.0, np.nan, 3.0])


def test_rows_in_another_order_are_not_the_input() -> None:
    order, turned = np.arange(3), np.array([2, 1, 0])
    assert Transfer(3, 3, (order, order)).is_identity
    for local in ((order, turned), (turned, order)):
        assert not Transfer(3, 3, local).is_identity
    assert not Transfer(3, 3, (order, order), Hop(sends=((1, order),))).is_identity


def test_replicas_take_turns_in_sending() -> None:
    """Of four instances that take two rows each from one of four ranks, and for the shares of one of two ranks."""
    array = lambda *v: np.asarray(v, dtype=np.int64)  # noqa: E731
    blocks = EdgeBlocks(array(0, 0, 0, 0), array(0, 2, 4, 6), array(0, 1, 2, 3), array(0, 0, 0, 0), array(2, 2, 2, 2))
    source, target = Side(np.array([[0, 1, 2, 3]]), array(8)), Side(np.array([[4], [5], [6], [7]]), array(2, 2, 2, 2))
    assert [route(blocks, source, target, rank).forward.rows_sent for rank in range(4)] == [2] * 4
    source, target = Side(np.array([[0, 1]]), array(8)), Side(np.array([[2, 3]]), array(8))
    assert [stage_route(source, target, rank).forward.rows_sent for rank in range(4)] == [4] * 4


def test_shares_are_those_of_array_split() -> None:
    for count in range(9):
        for parts in range(1, 5):
            split = np.array_split(np.arange(count), parts)
            share = _share(np.arange(count), np.full(count, count), np.full(count, parts))
            assert share.tolist() == [part for part, rows in enumerate(split) for _ in rows]
