"""Actions as data: every piece of work once, after what it needs, and none that frozen or idle modules do not have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero_strategy.schedule.order import Action, graph, sequential

MODULES = ("vision", "audio", "llm", "caption")
EDGES = (("vision", "llm"), ("audio", "llm"), ("vision", "caption"))


def test_a_frozen_module_upstream_of_nothing_has_no_backward() -> None:
    trains = dict.fromkeys(MODULES, True)
    assert graph(MODULES, EDGES, {**trains, "vision": False}).backward == {"audio", "llm", "caption"}


def test_a_frozen_module_downstream_of_something_trainable_carries_gradients() -> None:
    trains = {"vision": True, "audio": False, "llm": False, "caption": False}
    assert graph(MODULES, EDGES, trains).backward == {"vision", "llm", "caption"}


def test_nothing_is_sent_back_to_a_frozen_encoder() -> None:
    trains = {"vision": False, "audio": True, "llm": True, "caption": True}
    active = {m: [0, 1] for m in MODULES}
    actions = sequential(graph(MODULES, EDGES, trains), active, 2, train=True)
    assert not [a for a in actions if a.kind == "XB" and a.node[0] == "vision"]
    assert Action("XF", ("vision", "llm"), 1) in actions
    assert Action("B", "vision", 0) not in actions


def test_evaluation_has_forwards_only() -> None:
    active = {m: [0] for m in MODULES}
    actions = sequential(graph(MODULES, EDGES, dict.fromkeys(MODULES, True)), active, 1, train=False)
    assert {a.kind for a in actions} == {"F", "XF"}


@given(st.data())
def test_each_once_and_after_what_it_needs(draws: st.DataObject) -> None:
    count = draws.draw(st.integers(1, 4))
    active = {m: sorted(draws.draw(st.sets(st.integers(0, count - 1)))) for m in MODULES}
    trains = {m: draws.draw(st.booleans()) for m in MODULES}
    made = graph(MODULES, EDGES, trains)
    actions = sequential(made, active, count, train=True)
    place = {a: i for i, a in enumerate(actions)}
    assert len(place) == len(actions)
    for mb in range(count):
        for module in MODULES:
            works = mb in active[module]
            assert (Action("F", module, mb) in place) == works
            assert (Action("B", module, mb) in place) == (works and module in made.backward)
        for edge in EDGES:
            source, target = edge
            crosses = mb in active[source] and mb in active[target]
            forward, backward = Action("XF", edge, mb), Action("XB", edge, mb)
            assert (forward in place) == crosses
            assert (backward in place) == (crosses and source in made.backward)
            if crosses:
                assert place[Action("F", source, mb)] < place[forward] < place[Action("F", target, mb)]
            if backward in place:
                assert place[Action("B", target, mb)] < place[backward] < place[Action("B", source, mb)]
