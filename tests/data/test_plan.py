"""The step plan: every unit once, rows that add up, and edges that agree with a plain walk over the samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetero_strategy.data.plan import StepItems, StepMetadata, StepPlan, edge_blocks, expand, plan_step, slots


def array(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    samples = draw(st.integers(1, 10))
    sample, rows, start, tokens = [], [], [], []
    for s in range(samples):
        position = draw(st.integers(0, 3))
        for n in draw(st.lists(st.integers(1, 6), max_size=3)):
            sample.append(s)
            rows.append(n)
            start.append(position)
            position += n + draw(st.integers(0, 2))
        tokens.append(position + draw(st.integers(1, 4)))
    items = {"vision": StepItems(array(sample), array(rows), array(start))}
    labels = array([draw(st.integers(0, t)) for t in tokens])
    metadata = StepMetadata(0, 3, np.arange(samples) + 100, array(tokens), labels, items)
    multiple = draw(st.sampled_from([1, 2, 4]))
    plan = plan_step(
        metadata,
        {"vision": draw(st.integers(1, 5)), "llm": draw(st.integers(1, 4))},
        ("llm",),
        microbatches=draw(st.integers(1, 3)),
        row_multiple={"llm": multiple},
    )
    return plan, multiple


@given(plans())
def test_every_unit_once(made: tuple[StepPlan, int]) -> None:
    plan, _ = made
    for module, count in (("vision", len(plan.metadata.items["vision"].rows)), ("llm", len(plan.samples))):
        units = np.concatenate([mb.assignments[module].units for mb in plan.microbatches])
        assert sorted(units.tolist()) == list(range(count))


@given(plans())
def test_an_item_is_in_the_microbatch_of_its_sample(made: tuple[StepPlan, int]) -> None:
    plan, _ = made
    for mb in plan.microbatches:
        samples = plan.metadata.items["vision"].sample[mb.assignments["vision"].units]
        assert set(samples.tolist()) <= set(mb.assignments["llm"].units.tolist())


@given(plans())
def test_rows_are_aligned(made: tuple[StepPlan, int]) -> None:
    plan, multiple = made
    for mb in plan.microbatches:
        assignment = mb.assignments["llm"]
        bare = [int(assignment.rows_of(i).sum()) for i in range(len(assignment.offsets) - 1)]
        assert (assignment.totals() == bare + assignment.padding).all()
        if multiple > 1:
            assert (assignment.totals() % multiple == 0).all() and (assignment.totals() > 0).all()
            assert (assignment.padding <= multiple).all()
        else:
            assert not assignment.padding.any()


@given(plans())
def test_edges_agree_with_a_walk_over_the_samples(made: tuple[StepPlan, int]) -> None:
    plan, _ = made
    items = plan.metadata.items["vision"]
    for number, mb in enumerate(plan.microbatches):
        expected = {}
        for i in range(len(mb.assignments["llm"].offsets) - 1):
            position = 0
            for s in mb.assignments["llm"].of(i):
                for k in np.flatnonzero(items.sample == s):
                    expected[int(k)] = (i, position + int(items.start[k]), int(items.rows[k]))
                position += int(plan.metadata.tokens[s])
        where = {}
        for i in range(len(mb.assignments["vision"].offsets) - 1):
            position = 0
            for k in mb.assignments["vision"].of(i):
                where[i, position] = int(k)
                position += int(items.rows[k])
        blocks = edge_blocks(plan, number, "vision", "llm")
        found = {}
        for n in range(len(blocks.rows)):
            k = where[int(blocks.source_instance[n]), int(blocks.source_start[n])]
            found[k] = (int(blocks.target_instance[n]), int(blocks.target_start[n]), int(blocks.rows[n]))
        assert found == expected
        for i in range(len(mb.assignments["llm"].offsets) - 1):
            filled = slots(blocks, i)
            assert (np.diff(filled) > 0).all()
            assert len(filled) == sum(n for j, _, n in expected.values() if j == i)


def test_expand() -> None:
    assert expand(array([5, 0, 9]), array([2, 3, 0])).tolist() == [5, 6, 0, 1, 2]
    assert expand(array([]), array([])).tolist() == []
