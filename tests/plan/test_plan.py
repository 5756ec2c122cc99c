"""The step plan: every unit once, rows that add up, and edges that agree with a plain walk over the samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_strategy import ragged
from hetero_strategy.plan.packing import regroup
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import ModuleLoad, StepItems, StepMetadata, StepPlan, edge_blocks, slots


def array(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


EDGES = (("vision", "llm"), ("llm", "draw"))
Plans = tuple[StepPlan, int, dict[str, int]]


@st.composite
def plans(draw: st.DrawFn) -> Plans:
    """(plan, row multiple of the language model, rows per microbatch of modules with microbatches of their own)."""
    samples = draw(st.integers(1, 10))
    made: dict[str, list[tuple[int, int, int, int]]] = {"vision": [], "draw": []}
    tokens = []
    for s in range(samples):
        position = draw(st.integers(0, 3))
        for module, n in draw(st.lists(st.tuples(st.sampled_from(["vision", "draw"]), st.integers(1, 6)), max_size=4)):
            inside = n + draw(st.integers(0, 9))
            made[module].append((s, n, position, inside))
            position += n + draw(st.integers(0, 2))
        tokens.append(position + draw(st.integers(1, 4)))
    items = {}
    for module, rows in made.items():
        columns = np.asarray(rows, dtype=np.int64).reshape(-1, 4).T
        targets = (columns[3] - columns[1]) * 4 if module == "draw" else None
        items[module] = StepItems(*columns, targets=targets)
    labels = array([draw(st.integers(0, t)) for t in tokens])
    metadata = StepMetadata(0, 3, np.arange(samples) + 100, array(tokens), labels, items)
    multiple = draw(st.sampled_from([1, 2, 4]))
    own = draw(st.dictionaries(st.sampled_from(["vision", "draw"]), st.integers(1, 30)))
    plan = plan_step(
        metadata,
        {"vision": draw(st.integers(1, 5)), "llm": draw(st.integers(1, 4)), "draw": draw(st.integers(1, 3))},
        ("llm",),
        microbatches=draw(st.integers(1, 3)),
        row_multiple={"llm": multiple},
        microbatch_rows=own,
    )
    return plan, multiple, own


@pytest.mark.full
@given(plans())
def test_every_unit_once(made: Plans) -> None:
    plan, _, _ = made
    counts = {name: len(items.edge_rows) for name, items in plan.metadata.items.items()}
    for module, count in {**counts, "llm": len(plan.samples)}.items():
        units = np.concatenate([assignment.units for assignment in plan.assignments[module]])
        assert sorted(units.tolist()) == list(range(count))


@pytest.mark.parametrize(("tokens", "alike"), [([5, 5, 5], True), ([5, 5, 6], False), ([5], False)])
def test_units_are_alike_where_all_of_the_step_have_the_same_rows(tokens: list[int], alike: bool) -> None:
    pictures = StepItems(*(array(column) for column in ([0, 0], [4, 4], [0, 0], [4, 4])))
    count = array(tokens)
    metadata = StepMetadata(0, 0, np.arange(len(tokens)), count, count - 1, {"vision": pictures})
    plan = plan_step(metadata, {"vision": 2, "llm": 2}, ("llm",), microbatches=2)
    assert plan.alike("llm") is alike and plan.alike("vision")


def test_alignment_rows_are_the_fewest_that_leave_no_instance_without_rows() -> None:
    tokens = array([3, 4, 5])
    metadata = StepMetadata(0, 0, np.arange(3), tokens, tokens, {})
    (assignment,) = plan_step(metadata, {"llm": 4}, ("llm",), microbatches=1, row_multiple={"llm": 4}).assignments[
        "llm"
    ]
    assert dict(zip(assignment.totals(inner=True) - assignment.padding, assignment.padding, strict=True)) == {
        3: 1, 4: 0, 5: 3, 0: 4,
    }  # fmt: skip


def test_plans_that_differ_in_anything_have_other_digests() -> None:
    tokens = array([3, 4, 5])
    items = StepItems(array([1]), array([2]), array([1]), array([2]))
    metadata = StepMetadata(0, 0, np.arange(3), tokens, tokens - 1, {"vision": items}, prompts=array([1, 2, 3]))
    plan = plan_step(metadata, {"llm": 2}, ("llm",), microbatches=1, row_multiple={"llm": 2})
    plan = replace(plan, loads={"llm": ModuleLoad(np.ones((1, 2)), np.ones((1, 2)))})
    (assignment,) = plan.assignments["llm"]
    load = plan.loads["llm"]
    others = [
        replace(plan, metadata=replace(metadata, **{name: getattr(metadata, name) + 1}))
        for name in ("samples", "labels", "prompts")
    ]
    moved = replace(metadata, items={"vision": replace(items, start=items.start + 1)})
    others.append(replace(plan, metadata=moved))
    squares = assignment.inner_rows.astype(np.float64)
    others.append(replace(plan, assignments={"llm": (replace(assignment, squares=squares),)}))
    for name in ("units", "edge_rows", "inner_rows", "offsets", "padding"):
        changed = replace(assignment, **{name: getattr(assignment, name) + 1})
        others.append(replace(plan, assignments={"llm": (changed,)}))
    others.append(replace(plan, loads={"llm": replace(load, after=load.after + 1)}))
    assert replace(plan).digest == plan.digest and len({plan.digest, *(other.digest for other in others)}) == 12


@pytest.mark.full
@given(plans())
def test_an_item_is_in_the_microbatch_of_its_sample_unless_its_module_has_its_own(made: Plans) -> None:
    plan, _, own = made
    step_microbatch = np.arange(len(plan.samples)) % plan.microbatches
    for module, items in plan.metadata.items.items():
        assignments = plan.assignments[module]
        for number, assignment in enumerate(assignments):
            of_step = step_microbatch[items.sample[assignment.units]]
            if module not in own:
                assert set(of_step.tolist()) <= {number}
            if len(assignment.units):
                assert (of_step.min(), of_step.max()) == (assignment.first, assignment.last)
        used = [(a.first, a.last) for a in assignments if len(a.units)]
        assert used == sorted(used)  # in the order in which the step's microbatches need them
        assert module in own or len(assignments) == plan.microbatches


@pytest.mark.full
@given(plans())
def test_rows_are_aligned(made: Plans) -> None:
    plan, multiple, _ = made
    for assignment in plan.assignments["llm"]:
        bare = [int(assignment.edge_rows_of(i).sum()) for i in range(len(assignment.offsets) - 1)]
        assert (assignment.totals() == bare + assignment.padding).all()
        if multiple > 1:
            assert (assignment.totals() % multiple == 0).all() and (assignment.totals() > 0).all()
            assert (assignment.padding <= multiple).all()
        else:
            assert not assignment.padding.any()


def laid_out(plan: StepPlan, module: str, number: int, instance: int) -> list[tuple[str, int, int]]:
    """Who every row of an instance is, by a plain walk: an item's rows by ("vision" or "draw", item, row), any other
    row by ("own", unit, row). An item's first rows inside a generator are those that the language model gives."""
    found: list[tuple[str, int, int]] = []
    assignment = plan.assignments[module][number]
    for unit in assignment.of(instance).tolist():
        if module == "llm":
            tokens = [("own", unit, row) for row in range(int(plan.metadata.tokens[unit]))]
            for name, items in plan.metadata.items.items():
                for item in np.flatnonzero(items.sample == unit).tolist():
                    for row in range(int(items.edge_rows[item])):
                        tokens[int(items.start[item]) + row] = (name, item, row)
            found += tokens
        else:
            items = plan.metadata.items[module]
            crossing, inside = int(items.edge_rows[unit]), int(items.inner_rows[unit])
            rows = crossing if module == "vision" else inside
            found += [(module if row < crossing else "own", unit, row) for row in range(rows)]
    return found


@given(plans())
def test_rows_keep_who_they_are_across_edges(made: Plans) -> None:
    """Rows that carry who they are, moved by the plan alone, arrive where a plain walk expects them, each once."""
    plan, _, _ = made
    for source, target in EDGES:
        who = "vision" if source == "vision" else "draw"
        feeds = plan.feeds(source, target)
        for t, consumed in enumerate(plan.assignments[target]):
            expected, found = {}, {}
            for i in range(len(consumed.offsets) - 1):
                rows = laid_out(plan, target, t, i)
                expected |= {(i, place): row for place, row in enumerate(rows) if row[0] == who}
            for p, produced in enumerate(plan.assignments[source]):
                blocks = edge_blocks(plan, source, p, target, t)
                assert ((p, t) in feeds) == (len(blocks.rows) > 0)
                held = [laid_out(plan, source, p, i) for i in range(len(produced.offsets) - 1)]
                sources = ragged.expand(blocks.source_start, blocks.rows)
                targets = ragged.expand(blocks.target_start, blocks.rows)
                ends = np.repeat(np.stack([blocks.source_instance, blocks.target_instance]), blocks.rows, axis=1)
                for a, from_row, b, to_row in zip(ends[0], sources, ends[1], targets, strict=True):
                    assert (int(b), int(to_row)) not in found
                    found[int(b), int(to_row)] = held[int(a)][int(from_row)]
                for i in range(len(consumed.offsets) - 1):
                    filled = slots(blocks, i)
                    assert (np.diff(filled) > 0).all() and filled.tolist() == targets[ends[1] == i].tolist()
            assert found == expected


@pytest.mark.full
@given(plans())
def test_every_loss_has_its_own_normaliser(made: Plans) -> None:
    plan, _, _ = made
    drawn = plan.metadata.items["draw"].targets
    assert drawn is not None
    assert plan.normalizer("llm") == max(1, int(plan.metadata.labels.sum()))
    assert plan.normalizer("draw") == max(1, int(drawn.sum()))


def test_microbatches_are_joined_and_split() -> None:
    of_step, rows = array([0, 0, 1, 2, 2, 2, 2]), array([3, 3, 4, 10, 10, 10, 10])
    groups, count = regroup(of_step, rows, 3, budget=10)
    assert groups.tolist() == [0, 0, 0, 1, 2, 3, 4] and count == 5
    groups, count = regroup(of_step, rows, 3, budget=100)
    assert groups.tolist() == [0] * 7 and count == 1
    groups, count = regroup(of_step, rows, 3, budget=6)
    assert groups.tolist()[:3] == [0, 0, 1] and count == 6
    assert regroup(array([]), array([]), 2, budget=5)[1] == 1


def test_expand() -> None:
    assert ragged.expand(array([5, 0, 9]), array([2, 3, 0])).tolist() == [5, 6, 0, 1, 2]
    assert ragged.expand(array([]), array([])).tolist() == []
