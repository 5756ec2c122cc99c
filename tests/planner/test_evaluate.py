"""Steps of candidates have what those of a run have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.mask import ItemsAlone
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.deal_rows import Dealing
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.simulator.balance_context import ROW_ALIGNMENT, row_dealing
from hetero_strategy.simulator.cluster import Links
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.testing.plans import batch, cluster, model


@pytest.mark.parametrize("parts", [1, 4])
def test_rows_of_tensor_parallel_language_models_are_filled_up_as_in_a_run(parts: int) -> None:
    """Whether or not ranks have parts of them; those of encoders are not."""
    shape, data = model(), batch(16)
    llm = replace(shape.modules["llm"], row_shardings={1: REPLICATED, 2: REPLICATED, 4: RowSharding(parts)})
    shape = replace(shape, modules={**shape.modules, "llm": llm})
    evaluator = Evaluator(CostModel(shape, cluster(8)), [data])
    layouts = {"vision": ModuleLayout(range(8), tp=4), "llm": ModuleLayout(range(8), tp=4)}
    plan = evaluator.step(evaluator.place(Candidate(layouts, microbatches=4))).plan
    rows = {name: np.stack([a.totals(inner=True) for a in plan.assignments[name]]) for name in layouts}
    assert not (rows["llm"] % (4 * ROW_ALIGNMENT)).any()
    assert 0 < rows["llm"].sum() - data.tokens.sum() < rows["llm"].size * 4 * ROW_ALIGNMENT
    assert rows["vision"].sum() == data.items["vision"].inner_rows.sum()


def test_steps_that_are_simulated_alike_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas and shards of pipelines differ in what runs beside their actions; stages, schedules and data do not."""
    given = [batch(16, seed) for seed in range(2)]
    evaluator, made = Evaluator(CostModel(model(), cluster(8)), given), Mock(wraps=make_schedule)
    monkeypatch.setattr("hetero_strategy.planner.evaluate.make_schedule", made)
    ways = [ModuleLayout(8, pp=2, dp_replicate=4 // n, dp_shard=n) for n in (1, 2, 4)]
    candidates = [Candidate(dict.fromkeys(("vision", "llm"), way), n, fill="none") for way in ways for n in (2, 4)]
    found = [evaluator.seconds(candidate) for candidate in candidates]
    assert made.call_count == 4 and len({*found}) == len(found)
    for count, other in enumerate((replace(candidates[1], schedule="zb_h1"), replace(candidates[1], fill="fine")), 3):
        evaluator.seconds(other)
        assert made.call_count == 2 * count
    assert found == [Evaluator(CostModel(model(), cluster(8)), given).seconds(one) for one in candidates]


def test_steps_of_context_parallel_ranks_have_the_rows_that_a_run_deals(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action takes as long as its busiest rank; a batch is dealt once, whatever the encoder's layout."""
    dealt, orders = Mock(), Dealing.orders
    monkeypatch.setattr(Dealing, "orders", lambda *given: (dealt(), orders(*given))[1])
    shape, data = model((2, 128), (4, 256)), batch(8, rows=512, text=2048)
    llm = replace(shape.modules["llm"], keys=512, rules=((ItemsAlone(), np.ones(4, np.int64)),))
    shape = replace(shape, modules={**shape.modules, "llm": llm})
    evaluator = Evaluator(CostModel(shape, cluster(4, bandwidth=1e8)), [data], balance=BalanceConfig(reorder="none"))
    llm = ModuleLayout(4, cp=2, dp_shard=2)
    encoders = ModuleLayout(4, dp_shard=4), ModuleLayout(4, dp_replicate=4)
    both = [evaluator.place(Candidate({"vision": one, "llm": llm}, 2, fill="none")) for one in encoders]
    steps = [evaluator.step(placed) for placed in both]
    assert dealt.call_count == 1
    plan = both[0].plan_step(data, evaluator._balance, 4, microbatches=2)
    assert evaluator.simulated(both[0], plan).seconds == steps[0].seconds
    assert plan.digest == steps[0].plan.digest
    times, actions = both[0].times[StageId("llm", 0)], steps[0].simulation
    work = row_dealing(shape, both[0].layouts)["llm"].work(data, plan.assignments["llm"])
    assert work.keys.max() > 0 and times.keys is not None
    for action in (a for a in actions.start if a.node.module == "llm" and a.microbatch >= 0):
        rows = plan.assignments["llm"][action.microbatch].totals(inner=True)
        of_ranks = []
        for rank in range(2):
            squares, keys = (of[action.microbatch, :, rank, None] for of in work)
            of_ranks.append(times.seconds(action.kind, rows[:, None].astype(float), squares, keys)[:, 0])
        assert actions.seconds(action) == pytest.approx(np.max(of_ranks, axis=0), rel=1e-3)


def test_seconds_do_not_depend_on_what_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long steps, too, which are cut after fewer samples the more microbatches they have."""
    monkeypatch.setattr("hetero_strategy.planner.step_seconds.MOST_FORWARDS", 8)
    rng, shape = np.random.default_rng(0), model((2, 128), (4, 256))
    llms = [ModuleLayout(8, pp=2, dp_shard=4), ModuleLayout(8, pp=2, tp=2), ModuleLayout(8, pp=2, cp=2, dp_shard=2)]
    llms.append(replace(llms[0], vpp=2, pp_style="v"))
    encoders = [ModuleLayout(8, dp_shard=8), ModuleLayout(8, tp=2, dp_shard=2, dp_replicate=2), ModuleLayout(4)]

    def drawn() -> Candidate:
        llm = llms[rng.integers(len(llms))]
        return Candidate(
            {"vision": encoders[rng.integers(len(encoders))], "llm": llm},
            schedule="zbv" if llm.vpp > 1 else ("1f1b", "zb_h1")[rng.integers(2)],
            transforms={"llm": [Recompute(int(rng.integers(1, 3)))]},
            fill=("none", "fine", "decoupled")[rng.integers(3)],
        )

    candidates = [replace(one, microbatches=n) for one in (drawn() for _ in range(8)) for n in (4, 12, 24)]
    found = []
    for order in (range(len(candidates)), reversed(range(len(candidates)))):
        evaluator = Evaluator(CostModel(shape, cluster(8)), [batch(24)])
        found.append(dict(sorted((i, evaluator.seconds(candidates[i])) for i in order)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("ranks", "degrees", "shards", "replicas"),
    [
        (range(8, 12), {"dp_shard": 4}, 4, 1),
        (range(6, 10), {"dp_shard": 4}, 2, 1),
        (range(7, 11), {"dp_shard": 4}, 1, 1),
        (range(5, 13), {"tp": 2, "dp_shard": 4}, 1, 1),
        (range(16), {"tp": 2, "dp_shard": 8}, 4, 1),
        (range(16), {"dp_shard": 8, "dp_replicate": 2}, 8, 1),
        (range(5, 13), {"tp": 2, "dp_shard": 2, "cp": 2}, 1, 1),
        (range(16), {"dp_shard": 2, "cp": 4, "dp_replicate": 2}, 8, 1),
        (range(16), {"dp_shard": 2, "dp_replicate": 8}, 2, 4),
        ((0, 1, 8, 9), {"pp": 2, "dp_shard": 2}, 2, 1),
        ((0, 8, 9, 10), {"dp_shard": 4}, 1, 1),
    ],
)
def test_groups_are_as_slow_as_the_links_of_the_node_that_has_fewest_of_them(
    ranks: Sequence[int], degrees: dict[str, int], shards: int, replicas: int
) -> None:
    """Wherever their first rank lies; those inside a node wait for no other one."""
    layout = ModuleLayout(ranks, **degrees).resolved()
    two = cluster(16, 8)
    assert two.members(layout) == (shards, replicas)
    found = Evaluator(CostModel(model(), two), [batch(16)]).place(Candidate(dict.fromkeys(("vision", "llm"), layout)))
    (blocks, *_), shard = found.placement.layouts["llm"].split or (), layout.shards
    near, far = two.within, two.across
    links = near if shards == shard else Links(far.latency, min(near.bandwidth, shards * far.bandwidth))
    size = 2 * 12 * 512**2 / layout.tp * (shard - 1) / shard
    expected = blocks * (links.latency * np.log2(shard) + size / links.bandwidth)
    assert found.times[StageId("llm", 0)].gather == pytest.approx(expected)
