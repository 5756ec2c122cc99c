"""Attention by rules: is it right, and what do masks, memory and time cost? In one process with one thread.

Right: drawn masks of all rules, of packed and one-row sequences, against masks written pair by pair. Counted are wrong
pairs of slices, wrong sums of work, and blocks of 16 x 16 pairs that flex_attention's mask misses. Attention and the
gradients of queries, keys, values and sinks in fp64, with shared key heads and in half of the draws with a soft cap and
sinks, differ at most by so much from dense attention; the differences are relative to the largest number above 1.

Masks of a whole length: causal; a window of 1,024; Gemma 3's windows, in which rows of images see later ones; encoder
outputs before the text (EP), among it (EE) and in several packed sequences (MP); packed documents. Making: the slices
of a rule, their intervals, and flex_attention's mask of blocks of 128 rows, beside torch's ``create_block_mask``, which
asks for every pair. Time of attention, fp32 with 2 heads of 64 numbers, in processor time: block by block as on CPU,
beside torch's dense attention with a mask of all pairs, and beside torch's compiled flex_attention, which has no
backward on CPU.

Memory: what a language model of one layer needs at its most in forward and backward of EE, in a process of its own.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.common import Options, option, program, report
from benchmarks.context import rule_of
from benchmarks.measuring import CPU, seconds_in_turns
from hetero_strategy.mask import BidirectionalItems, Causal, MaskRule, Slices
from hetero_strategy.model.attention import block_mask, packed_attention
from hetero_strategy.model.inputs import Packing, SequenceInputs
from hetero_strategy.testing.drawn_masks import DrawnMask, dense_attention
from hetero_strategy.zoo import titan_llama

KINDS = ("causal", "window", "Gemma 3", "EP", "EE", "MP", "documents")
WINDOW, HEADS, WIDTH = 1024, 2, 64


class Errors(NamedTuple):
    """Differences of one drawn mask."""

    pairs: int
    work: int
    blocks: int
    attention: float
    gradients: float


def name_of(rule: MaskRule) -> str:
    """Return the class of a rule and which fields it has set."""
    fields = {"window": "window", "whole_items": "whole items", "of": "one module"}
    return ", ".join([type(rule).__name__, *(text for name, text in fields.items() if getattr(rule, name, None))])


def compared(seed: int) -> tuple[str, Errors] | None:
    """Compare one drawn mask; None if it has no rows."""
    torch.manual_seed(seed)
    draw = DrawnMask(seed)
    rule, pairs = draw.case(seed)
    if not len(pairs):
        return None
    slices = rule.slices(draw.lengths, draw.spans)
    intervals = torch.from_numpy(slices.intervals())
    wrong_pairs = int((seen_in(intervals, len(pairs)).numpy() != pairs).sum())
    edges = np.append(np.arange(0, len(pairs), 7), len(pairs))
    work = np.add.reduceat(pairs.sum(1), edges[:-1])
    with patch("hetero_strategy.model.attention.BLOCK", 16), patch("hetero_strategy.model.block_attention.BLOCK", 16):
        blocks = block_mask(intervals, len(pairs)).to_dense()[0, 0].numpy() > 0
        any_pair = np.zeros((16 * len(blocks), 16 * len(blocks)), bool)
        any_pair[: len(pairs), : len(pairs)] = pairs
        any_pair = any_pair.reshape(len(blocks), 16, -1, 16).any((1, 3))
        errors = attention_errors(draw, intervals, pairs, options_of(seed))
    counts = wrong_pairs, int((slices.work(edges) != work).sum()), int((any_pair & ~blocks).sum())
    return name_of(rule), Errors(*counts, *errors)


def options_of(seed: int) -> dict[str, Any]:
    """Return a soft cap and sinks for every other round of the rules."""
    if seed // 11 % 2:
        return {}
    return {"softcap": 2.0, "sinks": torch.randn(4, dtype=torch.float64, requires_grad=True)}


def attention_errors(draw: DrawnMask, intervals: Tensor, pairs: np.ndarray, options: dict[str, Any]) -> list[float]:
    """Return the largest differences of attention and of its gradients."""
    rows = [torch.randn(1, n, len(pairs), 4, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    packing = Packing.of(draw.lengths)
    packing.masks = {None: intervals}
    ours = packed_attention(*rows, packing, causal=True, scale=0.3, **options)
    dense = dense_attention(*rows, torch.from_numpy(pairs), scale=0.3, **options)
    leaves, weight = [*rows, *(x for x in options.values() if isinstance(x, Tensor))], torch.randn_like(ours)
    both = (torch.autograd.grad(x, leaves, weight) for x in (ours, dense))
    gradients = max(difference(*each) for each in zip(*both, strict=True))
    return [difference(ours, dense), gradients]


def difference(ours: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number above 1."""
    return float(((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1)).detach())


def seen_in(intervals: Tensor, keys: int) -> Tensor:
    """Return whether each row sees each key, bool ``[T, keys]``."""
    numbers = torch.arange(keys)
    return ((numbers >= intervals[0][..., None]) & (numbers < intervals[1][..., None])).any(0)


def maker_of(kind: str, rows: int) -> Callable[[], Slices]:
    """Return what makes the mask of a kind."""
    drawn_as = "EE" if kind in KINDS[:3] else kind
    lengths, rule, spans = rule_of(drawn_as, rows, np.random.default_rng(rows))
    rule = {"causal": Causal(), "window": Causal(WINDOW), "Gemma 3": BidirectionalItems(window=WINDOW)}.get(kind, rule)
    return lambda: rule.slices(lengths, spans)


def milliseconds(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median of each way."""
    seconds = seconds_in_turns(ways, CPU, rounds, clock=time.process_time)
    return {name: 1e3 * statistics.median(of) for name, of in seconds.items()}


def making(kind: str, rows: int, rounds: int) -> dict[str, float]:
    """Time the making of a mask."""
    make = maker_of(kind, rows)
    slices = make()
    intervals = torch.from_numpy(slices.intervals())
    ways: dict[str, Callable[[], Any]] = {
        "slices": make,
        "intervals": slices.intervals,
        "blocks": lambda: block_mask(intervals, rows),
    }
    return milliseconds(ways, rounds)


def attending(kind: str, rows: int, rounds: int, flex: Any) -> dict[str, float]:
    """Time attention, forward alone and with backward."""
    intervals = torch.from_numpy(maker_of(kind, rows)().intervals())
    packing, pairs, blocks = Packing.of(np.array([rows])), seen_in(intervals, rows), block_mask(intervals, rows)
    packing.masks = {None: intervals}
    given = [torch.randn(1, HEADS, rows, WIDTH, requires_grad=True) for _ in range(3)]
    plain, weight = [x.detach() for x in given], torch.randn(1, HEADS, rows, WIDTH)
    ours, dense = partial(packed_attention, packing=packing, causal=True), partial(masked, mask=pairs)
    ways: dict[str, Callable[[], Any]] = {"ours": lambda: ours(*plain), "dense": lambda: dense(*plain)}
    if flex is not None:
        ways["flex"] = lambda: flex(*plain, block_mask=blocks)
    for name, way in (("ours, both", ours), ("dense, both", dense)):
        ways[name] = lambda way=way: torch.autograd.grad(way(*given), given, weight)
    torch.testing.assert_close(ours(*plain), dense(*plain), rtol=1e-4, atol=1e-5)
    return milliseconds(ways, rounds) | {"share": float(pairs.float().mean())}


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend with a mask of all pairs."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def peak(rank: int, world: int, rows: int) -> float:
    """Return the MiB of this process that a step takes at its most, beyond those of a step of few rows."""
    llm = titan_llama(vocab_size=256, dim=64, n_layers=1, n_heads=2, max_seq_len=1 << 17).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in llm.parameters():
            parameter.normal_(std=0.02)
    llm.attend_by("items_alone")

    def step(count: int) -> None:
        packing, ids = Packing.of(np.array([count])), torch.randint(256, (count,))
        packing.masks = {None: torch.from_numpy(maker_of("EE", count)().intervals())}
        labels = torch.where(torch.arange(count) % 8 == 0, ids, -100)
        llm(SequenceInputs(ids, labels, packing)).loss_sum.backward()

    step(128)
    Path("/proc/self/clear_refs").write_text("5")  # the most from here on
    before = memory("VmRSS")
    step(rows)
    return (memory("VmHWM") - before) / 1024


def memory(field: str) -> int:
    """Return a field of this process's memory in KiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


@program(
    option("--masks", type=int, default=500, help="that are drawn and compared"),
    option("--rows", type=int, nargs="+", default=[2048, 4096, 8192], help="lengths at which attention is timed"),
    option("--long", type=int, default=1 << 16, help="rows of the longest mask, beside an eighth of them"),
    option("--rounds", type=int, default=3, help="calls of each way"),
    option("--no-flex", action="store_true", help="leave out torch's compiled flex_attention"),
)
def main(chosen: Options) -> Any:
    """Print the tables; returns their figures."""
    by_rule: dict[str, list[Errors]] = {}
    for name, errors in itertools.islice(filter(None, map(compared, itertools.count())), chosen.masks):
        by_rule.setdefault(name, []).append(errors)
    table = [
        [name, len(of), *map(sum, columns[:3]), *(f"{max(column):.1e}" for column in columns[3:])]
        for name, of in by_rule.items()
        if (columns := list(zip(*of, strict=True)))
    ]
    report(f"{chosen.masks} drawn masks", ("rule", "masks", *Errors._fields), table)
    sizes = (chosen.long // 8, chosen.long)
    made = {f"{kind}, {rows} rows": making(kind, rows, 5) for kind in KINDS for rows in sizes}
    table = [[name, *of.values()] for name, of in made.items()]
    report("making a mask, ms", ("mask", "slices", "intervals", "blocks"), table)
    torch_ms = milliseconds({"torch": partial(create_block_mask, causal, None, None, *[sizes[0]] * 2, CPU)}, 3)["torch"]
    print(f"torch's create_block_mask of a causal mask of {sizes[0]} rows: {torch_ms:.0f} ms")
    flex = None if chosen.no_flex else torch.compile(flex_attention, dynamic=True)
    times = {f"{k}, {rows}": attending(k, rows, chosen.rounds, flex) for rows in chosen.rows for k in KINDS}
    table = []
    for name, of in times.items():
        forward = of["share"], of["ours"], of["ours"] / of["dense"], of["ours"] / of["flex"] if flex else None
        table.append([name, *forward, of["ours, both"], of["ours, both"] / of["dense, both"]])
    columns = ("mask, rows", "pairs", "forward", "of dense", "of flex", "with backward", "of dense")
    report("attention, ms of the processor", columns, table)
    peaks = {rows: chosen.pool.run(1, peak, rows, group=False, timeout=3600)[0] for rows in sizes}
    few, many = peaks.values()
    report("memory, EE", ("rows", "MiB", "of fewest"), [[n, f"{x:.0f}", x / few] for n, x in peaks.items()])
    return {
        "drawn": by_rule,
        "making": made,
        "torch": torch_ms,
        "attention": times,
        "memory": peaks,
        "grows": many / few,
    }


def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """Let a row see itself and the rows before it."""
    return key <= row


if __name__ == "__main__":
    main()
