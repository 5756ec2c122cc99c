"""What trains where decides which backward a layer has."""

from __future__ import annotations

import pytest

from hetero_strategy.model.spec import LayerCost, Passes, costs

FROZEN, TRAINED = LayerCost(2.0, trains=False), LayerCost(2.0, trains=True)


def times(passes: Passes) -> list[tuple[float, float, float, float]]:
    return list(zip(passes.forward, passes.input, passes.weight, passes.backward, strict=True))


@pytest.mark.parametrize(
    ("layer", "upstream", "expected"),
    [
        (LayerCost(2.0, False), False, (2, 0, 0, 0)),
        (LayerCost(2.0, False, True), False, (2, 0, 0, 0)),
        (LayerCost(2.0, False), True, (2, 2, 0, 2)),
        (LayerCost(2.0, False, True), True, (2, 4, 0, 4)),
        (LayerCost(2.0, True), False, (2, 0, 2, 2)),
        (LayerCost(2.0, True, True), False, (2, 0, 4, 4)),
        (LayerCost(2.0, True), True, (2, 2, 2, 4)),
        (LayerCost(2.0, True, True), True, (2, 4, 2, 6)),
        (LayerCost(2.0, True, weight=1.0), True, (2, 2, 1, 3)),
        (LayerCost(2.0, True, True, weight=1.0), True, (2, 4, 1, 5)),
    ],
)
def test_rules(layer: LayerCost, upstream: bool, expected: tuple[float, ...]) -> None:
    assert times(costs([layer], upstream)) == [expected]


def test_what_trains_makes_everything_after_it_pass_gradients_on() -> None:
    """Frozen encoder, projector, frozen LLM: no backward, weights only, input gradients only."""
    assert times(costs([FROZEN, FROZEN, TRAINED, FROZEN, TRAINED], upstream_trains=False)) == [
        (2, 0, 0, 0),
        (2, 0, 0, 0),
        (2, 0, 2, 2),
        (2, 2, 0, 2),
        (2, 2, 2, 4),
    ]


def test_measured_times_of_cornstarch_figure_3() -> None:
    """CLIP, projector and Mistral-7b with recompute: (forward, backward) in ms, all trained and both frozen."""
    trained = costs([LayerCost(67.94, True, True), LayerCost(3.75, True), LayerCost(400.87, True, True)], True).backward
    assert trained[[0, 2]] == pytest.approx([205.09, 1184.65], rel=0.03)
    frozen = costs([LayerCost(67.89, False, True), LayerCost(3.74, True), LayerCost(397.11, False, False)], False)
    assert frozen.backward[0] == 0  # 0.01 measured
    # The paper's own rule, 1 x forward, leaves out recompute; 530.67 lies between one and two forwards.
    assert frozen.backward[2] < 530.67 < 2 * frozen.backward[2]
