"""Whole steps with rows that plans deal to context-parallel ranks: every gradient is that of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hetero_strategy.errors import DataError
from hetero_strategy.layout.row_sharding import RowOrder
from hetero_strategy.model import key_exchange
from hetero_strategy.plan.step_plan import edge_blocks, slots
from hetero_strategy.testing import Pool
from tests.distributed.exact import Given, compare, expected, on, run_together, setting_of
from tests.distributed.stepping import SAMPLES, OnRank, Run, Setting, Stepped, steps_on_rank

pytestmark = pytest.mark.distributed

RULES = ("causal", "items_alone", "items beyond a window", "words", "prefix")
OVER = ("tp", "1f1b", "zb_h1", "dp", "FSDP")
"""Ways that need twice as many ranks."""


def setting_with(folders: dict[bool, str], cp: int, way: str, **of_llm: Any) -> Setting:
    """Encoders of their own beside a language model whose rows are dealt."""
    more = {"tp": {"tp": 2}, "1f1b": {"pp": 2}, "zb_h1": {"pp": 2}, "dp": {"dp_replicate": 2, "dp_shard": 1}}
    degrees = more.get(way, {"dp_shard": 2} if way == "FSDP" else {})
    world = cp * max(degrees.values(), default=1)
    llm = on(*range(world), cp=cp, **({"dp_shard": 1} | degrees | of_llm))
    layouts = {"vision": on(0, 1), "audio": on(world - 1), "llm": llm}
    schedule = "zb_h1" if way == "zb_h1" else "1f1b"
    transforms = {"recompute": {"recompute": "all"}, "compile": {"compile": "aot_eager"}}
    options = {"transforms": {"llm": transforms[way]}} if way in transforms else {}
    return setting_of(folders, layouts, schedule, **options)


def in_groups(rank: int, world: int, *given: Any) -> Run:
    """Steps in which keys travel head by head."""
    with patch.object(key_exchange, "LEAST", 0):
        return steps_on_rank(rank, world, *given)


def check(
    pool: Pool, settings: Sequence[Setting], microbatches: int = 2, run: Callable[..., Run] = steps_on_rank
) -> list[Stepped]:
    """Compare all settings of one world with one process, and return the steps of the first rank."""
    given: dict[str, Given] = {str(k): (one, expected(one), (microbatches,), 0) for k, one in enumerate(settings)}
    found = run_together(pool, given, run)
    for name, (_, wanted, *_) in given.items():
        compare(wanted, found[name], name)
    return [step for runs in found.values() for step in runs[0].steps]


def pieces(step: Stepped) -> int:
    """Count the pieces of a plan."""
    return sum(len(one.order.start) for one in step.plan.assignments["llm"] if one.order is not None)


@pytest.mark.parametrize("ways", [("alone", "recompute"), OVER], ids=str)
def test_gradients_are_those_of_one_process(pool: Pool, folders: dict[bool, str], ways: tuple[str, ...]) -> None:
    steps = check(pool, [setting_with(folders, 2, way) for way in ways])
    assert all(pieces(step) > 2 for step in steps)


@pytest.mark.full
@pytest.mark.parametrize(("ways", "cp"), [(("alone", "recompute", "compile"), 3), (OVER, 4)], ids=str)
def test_more_ranks_have_rules_too(pool: Pool, folders: dict[bool, str], ways: tuple[str, ...], cp: int) -> None:
    """Each way with a rule for three ranks and another for four."""
    rules = islice(cycle(RULES), 2 * (cp - 3), None)
    settings = [
        replace(setting_with(folders, cp, way), attention={"llm": rule}) for way, rule in zip(ways, rules, strict=False)
    ]
    assert all(pieces(step) > cp for step in check(pool, settings))


@pytest.mark.parametrize(
    "ways",
    [
        {"recompute": "items beyond a window", "alone": "items_alone"},
        pytest.param({"compile": "causal"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_keys_travel_head_by_head(pool: Pool, folders: dict[bool, str], ways: dict[str, str]) -> None:
    """By rules, and around compiled code."""
    settings = [replace(setting_with(folders, 2, way), attention={"llm": rule}) for way, rule in ways.items()]
    check(pool, settings, run=in_groups)


def test_instances_without_samples_and_with_few_rows_take_part(pool: Pool, folders: dict[bool, str]) -> None:
    """A sample a microbatch: one of two instances has alignment rows alone, fewer than a block of each rank."""
    (step,) = check(pool, [setting_with(folders, 2, "dp")], SAMPLES)
    counts = [np.diff(one.offsets).tolist() for one in step.plan.assignments["llm"]]
    assert all(sorted(of) == [0, 1] for of in counts)
    assert all(one.order is not None and one.totals().min() == 4 for one in step.plan.assignments["llm"])


@pytest.mark.parametrize("order", ["zigzag", "blocks"])
def test_other_orders_give_the_same(pool: Pool, folders: dict[bool, str], order: str) -> None:
    check(pool, [setting_with(folders, 2, "alone", cp_order=order)])


def test_a_piece_that_one_rank_deals_otherwise_is_refused(pool: Pool, folders: dict[bool, str]) -> None:
    """Control: as all ranks deal it, the step runs."""
    setting = setting_with(folders, 2, "alone")
    assert pool.run(2, refusal, setting, True) == ["", ""]
    assert all("different plans" in found for found in pool.run(2, refusal, setting, False))


def refusal(rank: int, world: int, setting: Setting, right: bool) -> str:
    """Why a step is refused in which rank 1 swaps the ranks of two rows of text, or nothing."""
    made = OnRank(rank, world, setting)
    batch = made.steps(setting, 2)[0]
    if rank == 1 and not right:
        plan, (first, *rest) = batch.plan, batch.plan.assignments["llm"]
        assert first.order is not None
        fed = [
            (name, source) for name in ("vision", "audio") for source, target in plan.feeds(name, "llm") if not target
        ]
        media = [slots(edge_blocks(plan, name, source, "llm", 0), 0) for name, source in fed]
        text = [np.setdiff1d(rows, np.concatenate(media))[0] for rows in first.dealt(0, 2)]
        rows = np.arange(int(first.totals(inner=True)[0]))
        place = first.order.places(0, rows)
        place[text] = place[text[::-1]]
        first = replace(first, order=RowOrder(np.zeros(1, np.int64), rows, place))
        batch.plan = replace(batch.plan, assignments={**batch.plan.assignments, "llm": (first, *rest)})
    try:
        made.executor.run(batch, train=True)
    except DataError as error:
        return str(error)
    return ""
