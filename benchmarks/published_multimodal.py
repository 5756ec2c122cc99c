"""Speed-ups that DistTrain and OrchMLLM print over their baselines, predicted with the planner's model of devices.

Both print ranges over several models, whose bars have no numbers. An error is against the printed number or, where it
is a range, against its nearer end, also inside of it.

  disttrain   section 7.1: 1920 samples of LAION on at most 1296 A800. Megatron-LM: tp 8, the language model in 1, 2 or
              10 pipeline stages, encoder and generator in one of their own before and after it, a replica on each GPU
              of 8 for every instance; theirs share the pictures of a sample, here of the microbatch. MMScale: the
              fastest of the planner's proposals with ranks of its own for every module, which are those of its convex
              problem; balanced and ordered. 1F1B, states sharded. Megatron-LM's GPUs are not printed, beyond
              "a similar number": as many as fit, which are fewer than MMScale's, so a second row is per GPU. MFU of 72B
              counts three forwards and no padding; the paper's is of 1172 GPUs.
  orchmllm    section 8.1: 2560 H100, FSDP in groups of 256, one microbatch of 80, 60 or 30 samples on each, balanced;
              and of 65, 40 or 15, as drawn. Megatron-LM: tp 8 (4 and 2 where heads do not divide), pipelines of 2, 4
              and 10 ranks whose first one has both encoders, the language model's blocks dealt out evenly; global
              batches of 5120, 5120 and 2560 samples. Its microbatches are not printed: two for each pipeline rank,
              alike for all models, after a first look: with one the three came out at 0.80, within the range and at
              1.05 of it, with four within it, at 1.12 and at 1.93 (before narrow matmuls lost anything). MFU counts
              three forwards and no padding.

NVIDIA's heterogeneous parallelism (+49.3% where colocated, +13.0% where not) is in ``benchmarks.heterogeneous_gain``,
with models and clusters of ours: its own are not in the abstract, which is all that was at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.planner import paper
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.cluster import Cluster
from hetero_strategy.planner.evaluate import Candidate, Evaluator
from hetero_strategy.planner.hardware import DEVICES, cluster
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.short import first_samples
from hetero_strategy.planner.space import divisors

AS_DRAWN = BalanceConfig(policy="none", rearrange="none", reorder="none")
ITEMS_SPREAD = BalanceConfig(policy={"llm": "none"}, rearrange="none", reorder="none")
BALANCED = BalanceConfig()
DISTTRAIN = {"mllm_9b": (1, 1.7, 2.2), "mllm_15b": (2, 1.7, 2.2), "mllm_72b": (10, 1.3, 1.3)}
"""Model -> pipeline stages of Megatron-LM's language model, and the range of speed-ups."""
DISTTRAIN_MFU = {"mllm_72b": 0.547}
"""Model -> as printed, on 1172 GPUs."""
ORCHMLLM = {"mllm_10b": (80, 65, 2, 5120), "mllm_18b": (60, 40, 4, 5120), "mllm_84b": (30, 15, 10, 2560)}
"""Model -> samples on each GPU, balanced and not; Megatron-LM's pipeline ranks and samples of a step."""
OVER_DRAWN, OVER_MEGATRON, MFU = (1.4, 1.9), (3.1, 4.2), (0.416, 0.416)
RANKS, GROUP = 2560, 256
DATA, MICROBATCHES = "only means of its data are printed", "Megatron-LM's microbatches are not printed"
PER_STAGE = 2
"""Megatron-LM's microbatches for each of its pipeline's ranks."""
TRIED = 12
"""Of the proposals with ranks of its own for every module, the most promising, which are simulated."""

Row = tuple[str, str, float, float, str]
"""Name, unit, printed, predicted, why."""


def step(
    shape: ModelShape, on: Cluster, batch: StepMetadata, balance: BalanceConfig, layouts: Mapping[str, ModuleLayout],
    microbatches: int, reshard: str = "never",
) -> float:  # fmt: skip
    """Seconds."""
    evaluator = Evaluator(shape, on, [batch], balance=balance)
    return evaluator.seconds(Candidate(layouts, microbatches, "1f1b", reshard_after_forward=reshard, fill="none"))


def disttrain(models: Sequence[str] = tuple(DISTTRAIN)) -> Iterator[Row]:
    """Throughput of MMScale over Megatron-LM, of all and of each GPU, and its MFU."""
    for name in models:
        stages, low, high = DISTTRAIN[name]
        shape, batch = paper(name, "laion_1024" if name == "mllm_72b" else "laion")
        on = cluster("a800", 162, network="100g", within_bandwidth=150e9)
        samples = len(batch.samples)
        dp = max(d for d in divisors(samples) if 8 * d * (stages + 2) <= on.ranks)
        each, total = 8 * dp, 8 * dp * (stages + 2)
        rigid = {
            "vision": ModuleLayout(range(each), dp_shard=each),
            "llm": ModuleLayout(range(each, total - each), tp=8, pp=stages, dp_shard=dp),
            "draw": ModuleLayout(range(total - each, total), dp_shard=each),
        }
        theirs = step(shape, on, batch, ITEMS_SPREAD, rigid, samples // dp)
        proposals = Planner(shape, on, [batch]).proposer.proposals()
        apart = [p.candidate for p in proposals if len(p.partition) == len(shape.modules)][:TRIED]
        took = [step(shape, on, batch, BALANCED, one.layouts, one.microbatches, "auto") for one in apart]
        best = apart[int(np.argmin(took))]
        of = ", ".join(f"{n} {len(layout.ranks)}" for n, layout in best.layouts.items())
        used = len({rank for layout in best.layouts.values() for rank in layout.ranks})
        over, printed = theirs / min(took), (low, high)
        yield _row(f"MMScale over Megatron-LM, {name}", "times", printed, over, f"{used} over {total} GPUs; {of}")
        yield _row(f"the same per GPU, {name}", "times", printed, over * total / used, "theirs: a similar number")
        if name in DISTTRAIN_MFU:
            mfu = _mfu(shape, batch, min(took), used, "a800")
            printed = DISTTRAIN_MFU[name], DISTTRAIN_MFU[name]
            yield _row(f"MFU, {name}", "of 312", printed, mfu, f"{used} GPUs, theirs 1172")


def orchmllm(models: Sequence[str] = tuple(ORCHMLLM)) -> Iterator[Row]:
    """Throughput of OrchMLLM over itself without balance and over Megatron-LM, and its MFU."""
    on = cluster("h100", RANKS // 8)
    for name in models:
        many, few, stages, megatron = ORCHMLLM[name]
        shape, batch = paper(name, f"orch{name}")
        sharded = ModuleLayout(RANKS, dp_shard=GROUP, dp_replicate=RANKS // GROUP)
        layouts = dict.fromkeys(shape.modules, sharded)
        speeds = []
        for balance, each in ((BALANCED, many), (AS_DRAWN, few)):
            part = _first(batch, RANKS * each)
            took = step(shape, on, part, balance, layouts, 1, "auto")
            speeds.append(int(part.tokens.sum()) / took / RANKS)
            if balance is BALANCED:
                mfu = _mfu(shape, part, took, RANKS, "h100")
        tp = {n: max(d for d in (8, 4, 2, 1) if d in module.tp) for n, module in shape.modules.items()}
        dp = RANKS // (tp["llm"] * stages)
        first = tp["llm"] * dp
        around = {n: ModuleLayout(first, tp=d, dp_shard=first // d) for n, d in tp.items()}
        around["llm"] = ModuleLayout(RANKS, tp=tp["llm"], pp=stages, dp_shard=dp)
        part = _first(batch, megatron)
        took = step(shape, on, part, ITEMS_SPREAD, around, PER_STAGE * stages)
        over = speeds[0] / (int(part.tokens.sum()) / took / RANKS)
        yield _row(f"over OrchMLLM as drawn, {name}", "times", OVER_DRAWN, speeds[0] / speeds[1], DATA)
        yield _row(f"over Megatron-LM, {name}", "times", OVER_MEGATRON, over, MICROBATCHES)
        if name == "mllm_84b":
            yield _row(f"MFU, {name}", "of 989", MFU, mfu)


def _first(batch: StepMetadata, samples: int) -> StepMetadata:
    """A batch of so many samples."""
    assert samples <= len(batch.samples)
    return first_samples(batch, samples)


def _mfu(shape: ModelShape, batch: StepMetadata, seconds: float, ranks: int, device: str) -> float:
    """Return the share of the devices' peak that a forward and a backward of twice its work make use of."""
    flops = sum(3 * _forward(shape, batch, module) for module in shape.modules)
    return flops / (seconds * ranks * DEVICES[device].flops)


def _forward(shape: ModelShape, batch: StepMetadata, module: str) -> float:
    """FLOPs."""
    of = shape.modules[module]
    lengths = (batch.tokens if of.samplewise else batch.items[module].inner_rows).astype(np.float64)
    return float(of.per_row.sum() * lengths.sum() + of.per_pair.sum() * (lengths**2).sum())


def _row(name: str, unit: str, printed: tuple[float, float], predicted: float, why: str = "") -> Row:
    low, high = printed
    shown = f"{name} ({low:g} to {high:g})" if low < high else name
    return shown, unit, min(printed, key=lambda end: abs(predicted / end - 1)), predicted, why
