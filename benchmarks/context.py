"""Context parallelism for long sequences: evenness of its work, and memory and time of a step.

Evenness: pairs of a row and a key that it sees, of the rank that has most over the mean of all ranks. Context
parallelism gives each rank two chunks of the rows; beside it one chunk each, as ranks of sequence parallelism have.
Packings of 32,768 rows: one sequence, eight equal ones, and documents of log-normal lengths (median 1,000 tokens).

Steps: a language model of four blocks, each microbatch one sequence, on one rank and on two gloo processes with
context, tensor and data parallelism, which takes two sequences at once. Seconds are medians of steps in turns;
allocated is all memory of tensors that a step makes, at its most, on the rank that has most.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.common import Options, option, program, report
from benchmarks.pipelines import Turn, run_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.context import in_context
from hetero_strategy.model.inputs import Packing, SequenceInputs
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.testing import Setting

ROWS, SAMPLES = 32768, 4
LAYOUTS = {
    "one rank": (ModuleLayout((0,)), SAMPLES),
    "cp 2": (ModuleLayout((0, 1), cp=2), SAMPLES),
    "tp 2": (ModuleLayout((0, 1), tp=2), SAMPLES),
    "dp_shard 2": (ModuleLayout((0, 1), dp_shard=2), SAMPLES // 2),
}
"""Layout, and microbatches of a step."""


def packings(rows: int) -> dict[str, np.ndarray]:
    """Lengths of sequences that fill so many rows."""
    drawn = np.maximum(1, np.random.default_rng(0).lognormal(np.log(1000), 1.2, rows // 100).astype(np.int64))
    documents = drawn[: int(np.searchsorted(np.cumsum(drawn), rows))]
    documents = np.append(documents, rows - documents.sum())
    return {"one sequence": np.array([rows]), "eight": np.full(8, rows // 8), "documents": documents[documents > 0]}


def evenness(lengths: np.ndarray, ranks: int) -> tuple[float, float]:
    """Most pairs of a rank over the mean: with two chunks each, and with one."""
    packing = Packing.of(lengths)
    ids = torch.zeros(packing.rows, dtype=torch.int64)
    inputs = SequenceInputs(ids, ids, packing)
    two = [int((in_context(inputs, rank, ranks).packing.positions + 1).sum()) for rank in range(ranks)]
    one = [int((part + 1).sum()) for part in packing.positions.chunk(ranks)]
    return max(two) / float(np.mean(two)), max(one) / float(np.mean(one))


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
    option("--dim", type=int, default=256, help="width of the model"),
    option("--tokens", type=int, default=2048, help="of a sequence"),
    option("--rounds", type=int, default=7, help="steps of each layout that are measured"),
)
def main(chosen: Options) -> Any:
    """Print the tables; returns their figures."""
    even = {name: {ranks: evenness(lengths, ranks) for ranks in (2, 4, 8)} for name, lengths in packings(ROWS).items()}
    table = [[n, ranks, f"{a:.3f}", f"{b:.3f}"] for n, of in even.items() for ranks, (a, b) in of.items()]
    report("most pairs / mean", ("rows", "ranks", "two chunks", "one chunk"), table)
    steps: dict[str, dict[str, float]] = {}
    settings = {name: setting_of(name, chosen.dim, chosen.tokens) for name in LAYOUTS}
    for world in (1, 2):
        names = [name for name, setting in settings.items() if setting.world == world]
        turns = [Turn(settings[name], model=i) for i, name in enumerate(names)]
        ran = chosen.pool.run(world, run_turns, turns, 1, chosen.rounds, timeout=900)
        for turn, name in enumerate(names):
            held = chosen.pool.run(world, allocated, settings[name], timeout=300)
            seconds = statistics.median(
                max(step.end for step in of_ranks) - min(step.begin for step in of_ranks)
                for of_ranks in zip(*ran, strict=True)
                if of_ranks[0].turn == turn
            )
            steps[name] = {"seconds": seconds, "allocated": max(held)}
    alone = steps["one rank"]
    lines = [
        [name, f"{one['seconds']:.2f}", *(f"{one[k] / alone[k]:.3f}" for k in ("seconds", "allocated"))]
        for name, one in steps.items()
    ]
    columns = ("layout", "seconds", "of one rank's", "allocated, of one rank's")
    report(f"a step of {SAMPLES} sequences of {chosen.tokens} tokens", columns, lines)
    return {"evenness": even, "steps": steps}


if __name__ == "__main__":
    main()
