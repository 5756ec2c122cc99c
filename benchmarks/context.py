"""Context parallelism for long sequences: which rows each rank has, and memory and time of a step.

Rows: drawn masks of three kinds (Cornstarch, arXiv:2503.11367, section 4.3, whose generator is not published) on 8
ranks: encoder outputs before the text (EP), among the text (EE), and several such sequences packed (MP). Pairs of a row
and a key that it sees are those of the rank that has most over the mean; rows likewise. Attention alone costs. Beside
ours (``cp_order="auto"``): one contiguous part a rank (ring), two chunks a rank (zigzag), blocks of 128 rows at random,
and Cornstarch's blocks to the rank with least pairs (LPT).

Packed documents of log-normal lengths (median 2,000 tokens): also the keys that ranks lack, over those of an
all-gather, and the time of the busiest rank over that of even ranks without travel, for a language model of Llama 3
8B's sizes on devices of 5e14 FLOP/s with links of 200 GB/s.

Steps: a language model of four blocks, each microbatch one sequence, on one rank and on two gloo processes with
context, tensor and data parallelism, which takes two sequences at once. Seconds are medians of steps in turns;
processor is the processor time of the rank that takes most, which other programs change less. Allocated is all memory
of tensors that a step makes, at its most, on the rank that has most.
"""

from __future__ import annotations

import heapq
import statistics
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Options, option, program, report
from benchmarks.pipelines import Turn, run_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.mask import Causal, ItemsAlone, MaskRule, Slices, Spans
from hetero_strategy.plan.deal_rows import RankPieces, RowCost, deal_rows, pairs_and_keys
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.testing import Setting

SAMPLES = 4
RANKS, BLOCK = 8, 128
KINDS = ("EP", "EE", "MP")
WAYS = ("ours", "ring", "zigzag", "random", "LPT")
ATTENTION = RowCost(0.0, 1.0, 0.0)
LLAMA = RowCost(1.4e10, 4 * 4096 * 32.0, 2 * 2 * 1024 * 32 * 5e14 / 200e9)
"""FLOPs of a row, a pair and a key of Llama 3 8B: 7e9 weights, scores and sums of 4,096 numbers in 32 layers, and keys
and values of 1,024 numbers of 2 bytes each."""
LAYOUTS = {
    "one rank": (ModuleLayout((0,)), SAMPLES),
    "cp 2": (ModuleLayout((0, 1), cp=2), SAMPLES),
    "tp 2": (ModuleLayout((0, 1), tp=2), SAMPLES),
    "dp_shard 2": (ModuleLayout((0, 1), dp_shard=2), SAMPLES // 2),
}
"""Layout, and microbatches of a step."""


def items_in(rows: int, first: int, count: int | None, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Draw (position, rows) of the items of a sequence: ``count`` before its text, or among it from ``first`` on."""
    if count is not None:
        sizes = (rng.uniform(0.05, 0.25, count) * rows).astype(int)
        return list(zip((np.cumsum(sizes) - sizes).tolist(), sizes.tolist(), strict=True))
    sizes = np.clip(rng.lognormal(np.log(1500), 0.8, rows // 64), 64, rows // 3).astype(int)
    sizes = sizes[: max(1, int(np.searchsorted(np.cumsum(sizes), rng.uniform(0.3, 0.7) * rows)))]
    gaps = np.sort(rng.integers(0, rows - sizes.sum() + 1, len(sizes)))
    return list(zip((first + gaps + np.cumsum(sizes) - sizes).tolist(), sizes.tolist(), strict=True))


def documents(rows: int, median: float, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Draw lengths of sequences that fill so many rows."""
    drawn = np.clip(rng.lognormal(np.log(median), sigma, rows // 16), 16, rows).astype(np.int64)
    ends = np.minimum(np.cumsum(drawn), rows)
    return np.diff(np.append(0, ends[: int(np.searchsorted(ends, rows)) + 1]))


def rule_of(kind: str, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, MaskRule, Spans]:
    """Draw the lengths of sequences, their rule and their items."""
    if kind == "documents":
        return documents(rows, 2000, 1.0, rng), Causal(), Spans.none()
    lengths = documents(rows, rows / 6, 0.7, rng) if kind == "MP" else np.array([rows])
    count = int(rng.integers(1, 4)) if kind == "EP" else None
    drawn = [(n, *item) for n, size in enumerate(lengths) if size > 256 for item in items_in(size, 0, count, rng)]
    columns = np.array(drawn, np.int64).reshape(-1, 3).T
    return lengths, ItemsAlone(), Spans(*columns, np.full(len(drawn), "vision"))


def mask_of(kind: str, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, Slices]:
    """Draw the lengths of sequences and their mask."""
    lengths, rule, spans = rule_of(kind, rows, rng)
    return lengths, rule.slices(lengths, spans)


def by_blocks(kind: str, mask: Slices, rng: np.random.Generator) -> RankPieces:
    """Deal blocks of 128 rows as peers do: in order, at random, or by falling pairs to the least loaded rank."""
    count = -(-mask.total // BLOCK)
    start = np.arange(count) * BLOCK
    if kind == "ring":
        rank = np.arange(count) * RANKS // count
    elif kind == "random":
        rank = rng.permutation(np.arange(count) % RANKS)
    else:
        work, rank = mask.work(np.append(start, mask.total)), np.empty(count, np.int64)
        heap = [(0, r) for r in range(RANKS)]
        for block in np.argsort(-work, kind="stable").tolist():
            load, rank[block] = heap[0]
            heapq.heapreplace(heap, (load + int(work[block]), heap[0][1]))
    return RankPieces(start, rank)


class Evenness(NamedTuple):
    """How even ranks are, of one mask."""

    pairs: float
    rows: float
    keys: float
    time: float


def evenness(way: str, lengths: np.ndarray, mask: Slices, cost: RowCost, rng: np.random.Generator) -> Evenness:
    """Deal the rows of one mask and compare the ranks."""
    order: Any = {"ours": "auto", "zigzag": "zigzag"}.get(way)
    pieces = by_blocks(way, mask, rng) if order is None else deal_rows(lengths, mask, RANKS, cost, order)
    pairs, _ = pairs_and_keys(pieces, mask, RANKS)
    rows = np.bincount(pieces.rank, np.diff(np.append(pieces.start, mask.total)), RANKS)
    keys = pairs_and_keys(pieces, mask, RANKS)[1] + mask.total / RANKS - rows  # of unequal rows, too
    seconds = cost.of(rows, pairs, keys)
    even = (cost.row * mask.total + cost.pair * pairs.sum()) / RANKS
    ratios = pairs.max() / pairs.mean(), rows.max() / rows.mean(), keys.sum() / (mask.total * (RANKS - 1))
    return Evenness(*ratios, seconds.max() / even)


def compared(kind: str, rows: int, masks: int, cost: RowCost) -> dict[str, list[Evenness]]:
    """Draw masks of one kind and deal each of them in every way."""
    found: dict[str, list[Evenness]] = {way: [] for way in WAYS}
    rng = np.random.default_rng(rows)
    for _ in range(masks):
        lengths, mask = mask_of(kind, rows, rng)
        for way, ratios in found.items():
            ratios.append(evenness(way, lengths, mask, cost, rng))
    return found


def setting_of(name: str, dim: int, tokens: int) -> Setting:
    """Text alone."""
    layout, count = LAYOUTS[name]
    return Setting(name, {"llm": layout}, llm=(dim, 4), samples=SAMPLES, microbatches=count, text=(tokens, tokens))


def allocated(rank: int, world: int, setting: Setting) -> int:
    """Bytes that a step makes, at its most, after a first one."""
    made, batch = setting.assembled(rank), setting.batch(0, rank)
    for _ in range(2):
        for owned in made.owned.values():
            owned.parameter.grad = None
        with Allocations() as allocations:
            made.executor.run(batch, train=True)
    return allocations.most


@program(
    option("--masks", type=int, default=50, help="drawn of each kind and length"),
    option("--dim", type=int, default=256, help="width of the model"),
    option("--tokens", type=int, default=2048, help="of a sequence"),
    option("--rounds", type=int, default=7, help="steps of each layout that are measured"),
)
def main(chosen: Options) -> Any:
    """Print the tables; returns their figures."""
    even = {f"{kind} {k}k": compared(kind, k << 10, chosen.masks, ATTENTION) for kind in KINDS for k in (16, 32, 64)}
    table = [
        [name, *(f"{np.mean([x.pairs for x in of]):.3f} ({max(x.pairs for x in of):.3f})" for of in ways.values())]
        + [f"{max(x.rows for x in ways[way]):.2f}" for way in ("ours", "LPT")]
        for name, ways in even.items()
    ]
    columns = ("masks", *WAYS, "rows, ours", "rows, LPT")
    report(f"most pairs / mean of {RANKS} ranks: mean (worst) of {chosen.masks} masks", columns, table)
    packed = compared("documents", 1 << 16, chosen.masks, LLAMA)
    table = [
        [way, *(f"{np.mean(x):.3f} ({np.max(x):.3f})" for x in zip(*ratios, strict=True))]
        for way, ratios in packed.items()
    ]
    report("packed documents, 64k rows", ("rows by", "pairs", "rows", "keys", "time"), table)
    steps: dict[str, dict[str, float]] = {}
    settings = {name: setting_of(name, chosen.dim, chosen.tokens) for name in LAYOUTS}
    for world in (1, 2):
        names = [name for name, setting in settings.items() if setting.world == world]
        turns = [Turn(settings[name], model=i) for i, name in enumerate(names)]
        ran = chosen.pool.run(world, run_turns, turns, 1, chosen.rounds, timeout=900)
        for turn, name in enumerate(names):
            held = chosen.pool.run(world, allocated, settings[name], timeout=300)
            own = [of_ranks for of_ranks in zip(*ran, strict=True) if of_ranks[0].turn == turn]
            seconds = [max(step.end for step in of) - min(step.begin for step in of) for of in own]
            processor = [max(step.cpu for step in of) for of in own]
            medians = {"seconds": statistics.median(seconds), "processor": statistics.median(processor)}
            steps[name] = {**medians, "allocated": max(held)}
    alone = steps["one rank"]
    lines = [
        [name, f"{one['seconds']:.2f}", *(f"{one[k] / alone[k]:.3f}" for k in alone)] for name, one in steps.items()
    ]
    columns = ("layout", "seconds", "of one rank's", "processor, of one rank's", "allocated, of one rank's")
    report(f"a step of {SAMPLES} sequences of {chosen.tokens} tokens", columns, lines)
    return {"evenness": even, "documents": packed, "steps": steps}


if __name__ == "__main__":
    main()
