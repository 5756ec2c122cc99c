"""Costs count the pairs of the real mask: a window as a window, items as they see each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero_strategy.mask import BidirectionalItems, Causal, Full, ItemsAlone, MaskRule
from hetero_strategy.model.read_spec import spec_of_module
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.plan.balance import Cost
from hetero_strategy.plan.masks import AttentionRules
from hetero_strategy.plan.plan_step import ResolvedBalance, plan_step
from hetero_strategy.plan.step_plan import ModuleLoad, StepItems, StepMetadata
from hetero_strategy.simulator.balance_context import attention_rules
from hetero_strategy.zoo.hf_causal_lm import hf_qwen3

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_window_layers": 0,
}  # fmt: skip
PER_PAIR = 2 * 4 * (6 + 6)
"""FLOPs of a pair in a layer: scores and sums of 4 heads of 6 numbers."""


def metadata_of(tokens: list[int], items: list[tuple[int, int, int]]) -> StepMetadata:
    """Samples with items (sample, first row, rows)."""
    sample, start, rows = np.array(items, np.int64).reshape(-1, 3).T
    lengths = np.array(tokens, np.int64)
    table = {"vision": StepItems(sample, rows, start, rows)}
    return StepMetadata(0, 0, np.arange(len(lengths)), lengths, lengths, table)


def dense(length: int, items: list[tuple[int, int]], kind: str, window: int | None) -> int:
    """Pairs of a sample by a loop over rows and keys."""
    item = np.full(length, -1)
    for number, (start, rows) in enumerate(items):
        item[start : start + rows] = number
    count = 0
    for q in range(length):
        for k in range(length):
            own = item[q] >= 0 and item[q] == item[k]
            back = k <= q and (window is None or q - k < window)
            if kind == "items_alone" and item[q] >= 0:
                count += own
            elif kind == "bidirectional_items":
                count += back or (own and (window is None or q - k < window))
            else:
                count += back
    return count


@pytest.mark.parametrize("kind", ["causal", "bidirectional_items"])
@pytest.mark.parametrize("window", [8, 100])
def test_predicted_flops_are_those_of_the_pairs(kind: str, window: int) -> None:
    """Five layers have a window, one has none, as in Gemma 3. Control: as if no layer had one."""
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    model = hf_qwen3(**SIZES, layer_types=layers, sliding_window=window, use_sliding_window=True)
    model.attend_by(kind)
    tokens, items = [150, 40, 3], [(0, 10, 60), (0, 90, 30), (1, 0, 20)]
    metadata, spec = metadata_of(tokens, items), spec_of_module(model)
    rules = attention_rules(ModelSpec({"vision": replace(spec, rules=()), "llm": spec}, (("vision", "llm"),)), "llm")
    assert rules is not None
    ones = np.ones(sum(tokens), np.int64)
    flops = (model.flops(ones) - 6 * PER_PAIR * len(ones)) / len(ones) * np.array(tokens)
    for n, length in enumerate(tokens):
        own = [(start, rows) for sample, start, rows in items if sample == n]
        for of_layer in [window] * 5 + [None]:
            flops[n] += PER_PAIR * dense(length, own, kind, of_layer)
    cost = Cost(float(spec.per_row.sum()), float(spec.per_pair.sum()))
    np.testing.assert_allclose(cost.alone(metadata.tokens, rules.squares(metadata)), flops, rtol=1e-12)
    assert abs(cost.alone(metadata.tokens)[0] / flops[0] - 1) > 0.03


@pytest.mark.parametrize(("rule", "kind"), [(ItemsAlone(), "items_alone"), (Causal(7), "causal")])
def test_squares_are_twice_the_pairs_less_the_rows(rule: MaskRule, kind: str) -> None:
    metadata = metadata_of([30, 12], [(0, 4, 9), (1, 0, 12)])
    squares = AttentionRules((rule, Causal()), (0.25, 0.75), ("vision",)).squares(metadata)
    for n, (length, items) in enumerate([(30, [(4, 9)]), (12, [(0, 12)])]):
        pairs = dense(length, items, kind, getattr(rule, "window", None))
        assert squares[n] == 0.25 * (2 * pairs - length) + 0.75 * length**2


def test_a_model_without_rules_counts_squares_of_lengths() -> None:
    spec = spec_of_module(hf_qwen3(**SIZES))
    assert attention_rules(ModelSpec({"llm": spec}, ()), "llm") is None
    alone = ModelSpec({"llm": replace(spec, rules=((Full(), np.ones(6, np.int64)),))}, ())
    found = attention_rules(alone, "llm")
    assert found is not None and found.squares(metadata_of([5], [])).tolist() == [2 * 25 - 5]


def test_microbatches_of_a_windowed_model_are_even_by_its_pairs() -> None:
    """Control: squares of lengths leave instances uneven."""
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(7, 0.9, 2048), 16, 6000).astype(int).tolist()
    metadata, cost = metadata_of(tokens, []), Cost(24e6, 4e4)
    rules = {"llm": AttentionRules((Causal(512), Causal()), (5 / 6, 1 / 6), ())}
    waits = []
    for known in (rules, {}):
        balancing = ResolvedBalance({"llm": "auto"}, {"llm": cost}, rules=known)
        plan = plan_step(metadata, {"llm": 32}, ["llm"], microbatches=4, balancing=balancing)
        squares = rules["llm"].squares(metadata)
        work = [
            np.bincount(a.instance(), cost.alone(a.inner_rows, squares[a.units]), 32) for a in plan.assignments["llm"]
        ]
        waits.append(ModuleLoad.imbalance(np.array(work)))
        if known:
            np.testing.assert_allclose(plan.loads["llm"].after, work)
    assert waits[0] < 1.005 and waits[1] > 1.03, waits


def test_items_of_a_rule_are_spread_by_their_pairs() -> None:
    metadata = metadata_of([100] * 8, [(n, 0, 90) for n in range(4)])
    rules = {"llm": AttentionRules((BidirectionalItems(),), (1.0,), ("vision",))}
    balancing = ResolvedBalance({"llm": "auto"}, {"llm": Cost(0.0, 1.0)}, rules=rules)
    plan = plan_step(metadata, {"llm": 4}, ["llm"], balancing=balancing)
    assert sorted(plan.assignments["llm"][0].units.reshape(4, 2).min(axis=1).tolist()) == [0, 1, 2, 3]
