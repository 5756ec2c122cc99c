"""Context parallelism by heads: rows are exchanged for heads around attention, in language models and in encoders, and
every gradient is that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hetero_strategy.errors import ModelError
from hetero_strategy.mask import BidirectionalItems, ItemsAlone, MaskRule, Prefix, Spans, by_window
from hetero_strategy.model import head_exchange
from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.context import in_context
from hetero_strategy.model.head_exchange import HeadExchange
from hetero_strategy.model.inputs import Packing, SequenceInputs
from hetero_strategy.testing import Pool
from tests.distributed.exact import EXACT, NOTICED, expected, on, setting_of
from tests.distributed.stepping import SAMPLES, Reference, Setting, steps_on_rank
from tests.distributed.test_dealt_rows import check

pytestmark = pytest.mark.distributed

LENGTHS = [5, 0, 7, 12]
RULES: tuple[MaskRule | None, ...] = (None, ItemsAlone(), BidirectionalItems(window=3), Prefix())
HEADS = ((6, 6), (6, 2), (6, 3), (12, 4), (6, 1))
"""Query heads and key heads."""


def packing_by(rule: MaskRule | None, lengths: Sequence[int] = LENGTHS) -> Packing:
    spans = Spans(*(np.array(x) for x in ([0, 2, 3], [1, 0, 2], [3, 7, 8], ["vision"] * 3)), np.array([2, 0, 0, 11]))
    packing = Packing.of(np.array(lengths))
    rules = {} if rule is None else by_window(rule, [None])
    packing.masks = {
        window: torch.from_numpy(one.slices(packing.lengths, spans).intervals()) for window, one in rules.items()
    }
    return packing


def worst_errors(rank: int, world: int) -> dict[str, float]:
    """Largest error of a result or gradient of this rank, by case; and sent numbers less those of the least."""
    sent: list[int] = []
    all_to_all = head_exchange.all_to_all

    def counted(parts: Tensor, *where: Any) -> Tensor:
        sent.append(parts.numel() * (world - 1) // world)
        return all_to_all(parts, *where)

    head_exchange.all_to_all = counted
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    found = {}
    cases: list[tuple[Any, ...]] = [(rule, heads, True) for rule in RULES for heads in HEADS]
    for rule, (heads, key_heads), causal in [*cases, (None, (6, 2), False), (None, (6, 6), False)]:
        torch.manual_seed(0)
        packing, options = packing_by(rule), {"causal": causal, "softcap": 3.0 if rule is None else None}
        rows = [
            torch.randn(1, 24, count, width, dtype=torch.float64).transpose(1, 2).requires_grad_()
            for count, width in ((heads, 6), (key_heads, 6), (key_heads, 6))
        ]
        sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True)
        expected = packed_attention(*rows, packing, sinks=sinks, **options)
        weight = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, [*rows, sinks], weight)
        ids = torch.arange(24)
        dealt = np.arange(24).reshape(world, -1)
        own = in_context(SequenceInputs(ids, ids, packing), rank, dealt, by_heads=True).packing
        assert isinstance(own.context, HeadExchange)
        own.context.group = group
        mine, part = slice(*dealt[rank][[0, -1]] + [0, 1]), [x.detach() for x in rows]
        part = [x[:, :, mine].requires_grad_() for x in part]
        sent.clear()
        out = packed_attention(*part, own, sinks=sinks, **options)
        if key_heads % world == 0:
            numbers = sum(x.numel() for x in (*part, out)) * (world - 1) / world
            found[f"bytes {heads} {key_heads}"] = abs(sum(sent) - numbers)
        made = [*torch.autograd.grad(out, [*part, sinks], weight[:, :, mine])]
        dist.all_reduce(made[-1])
        errors = [x - y[:, :, mine] for x, y in zip((out, *made[:3]), (expected, *wanted[:3]), strict=True)]
        found[f"{rule} {heads} {key_heads} {causal}"] = max(
            float(e.abs().max()) for e in (*errors, made[3] - wanted[3])
        )
    with pytest.raises(ModelError, match=f"5 heads on a rank cannot be divided over cp={world} ranks"):
        packed_attention(*(torch.zeros(1, 5, 24 // world, 6) for _ in range(3)), own, causal=True)
    return found


@pytest.mark.parametrize("cp", [2, 3])
def test_attention_with_any_mask_and_heads_is_that_of_all_rows(pool: Pool, cp: int) -> None:
    """Key heads are repeated where ranks are more; the exchange sends the least: all but a rank's own share."""
    for found in pool.run(cp, worst_errors):
        assert len(found) > len(RULES) * len(HEADS)
        assert not {case: error for case, error in found.items() if not error < 1e-12}


def settings_of(folders: dict[bool, str]) -> list[Setting]:
    """Encoders and a language model that exchange heads, on four ranks; it has fewer key heads than ranks with tp."""
    llm, four = {"cp": 2, "cp_form": "heads"}, range(4)
    made = [
        setting_of(
            folders,
            {"vision": on(*four, cp=2, tp=2), "audio": on(*four, cp=4), "llm": on(*four, tp=2, **llm)},
            "1f1b",
            transforms={"audio": {"recompute": "all"}},
        ),
        setting_of(
            folders,
            {"vision": on(*four, cp=2, pp=2), "audio": on(*four, cp=2, dp_shard=2), "llm": on(*four, pp=2, **llm)},
            "zb_h1",
        ),
        setting_of(
            folders,
            {
                "vision": on(*four, cp=2, dp_replicate=2, dp_shard=1),
                "audio": on(1, 2, cp=2),
                "llm": on(*four, dp_shard=2, **llm),
            },
            "1f1b",
            transforms={"vision": {"recompute": "whole"}, "audio": {"compile": "aot_eager"}},
        ),
    ]
    return [replace(setting, kv_heads=2) for setting in made]


def test_modules_that_exchange_heads_have_the_gradients_of_one_process(pool: Pool, folders: dict[bool, str]) -> None:
    steps = check(pool, settings_of(folders))
    assert all(one.order is None for step in steps for of in step.plan.assignments.values() for one in of)


@pytest.mark.full
def test_language_models_of_hugging_face_have_the_gradients_of_one_process(
    pool: Pool, folders: dict[bool, str]
) -> None:
    """By a rule, and around compiled code; key heads are fewer than ranks."""
    layouts = {"vision": on(0, 1), "audio": on(2), "llm": on(0, 1, 2, cp=3, cp_form="heads")}
    setting = setting_of(folders, layouts, "1f1b", lm="hf_qwen3", heads=12, kv_heads=2)
    ruled = replace(setting, attention={"llm": "items_alone"})
    check(pool, [setting, ruled.plus(compile={"llm": "aot_eager"})])


def test_encoders_without_items_take_part(pool: Pool, folders: dict[bool, str]) -> None:
    """A sample a microbatch: many have no picture or no sound, and an instance of two has none at all."""
    (step,) = check(pool, settings_of(folders)[2:], SAMPLES)
    rows = [one.totals(inner=True).tolist() for one in step.plan.assignments["vision"]]
    assert [0, 0] in rows and any(min(of) == 0 < max(of) for of in rows)


def swapped(rank: int, world: int, setting: Setting, wanted: Reference, right: bool) -> dict[str, float]:
    """Largest error of a gradient by module where rank 1 swaps heads, and none if it does not."""
    to_heads = HeadExchange.to_heads

    def wrong(exchange: HeadExchange, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return to_heads(exchange, query.flip(1), key, value)

    if rank == 1 and not right:
        HeadExchange.to_heads = wrong  # type: ignore[method-assign]
    try:
        (step,) = steps_on_rank(rank, world, setting, wanted, (2,), 0).steps
    finally:
        HeadExchange.to_heads = to_heads  # type: ignore[method-assign]
    modules = {name.partition(".")[0] for name in step.errors}
    return {m: max(error for name, error in step.errors.items() if name.startswith(f"{m}.")) for m in modules}


def test_a_swapped_head_is_noticed(pool: Pool, folders: dict[bool, str]) -> None:
    layouts = {"vision": on(0, 1, cp=2), "llm": on(0, 1, cp=2, cp_form="heads")}
    setting = setting_of(folders, layouts, "1f1b")
    right, wrong = (pool.run(2, swapped, setting, expected(setting), way) for way in (True, False))
    assert max(error for found in right for error in found.values()) < EXACT
    assert all(max(found[name] for found in wrong) > NOTICED for name in layouts)
