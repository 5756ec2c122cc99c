"""Time to build a large run without its ranks, and what each of its ranks joins and sends.

Two models on 1,296, 2,560 and 10,240 ranks: a vision encoder of SigLIP 2's so400m size, on the ranks of the language
model or on ranks of its own (``apart``), and a Llama of width 8192 with 80 or 96 layers, in bf16-mixed. One batch is
planned, scheduled and compiled; the ranks at the ends of every lane are built on the meta device and checked
(``hetero_strategy.strategy.dry_run``).

  built      ranks that were built, of all
  seconds    of the machine's clock; processor: of this process
  GiB        most memory of this process, over all settings so far
  largest    GiB of the rank that holds most, without activations inside stages
  shards     the same parameters on the ranks that share the model, as a part of the model: 1 where nothing is missing
             or held twice. Ranks of a lane that were not built count as the mean of those that were
  groups     process groups that a rank is in; at most, as the next two
  connect    messages of one number before the first step, to each rank to which it may send rows or gradients
  messages   sent along edges and between stages in a step
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import Options, option, program, report
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.plan.step_plan import StepMetadata
from hetero_strategy.schedule.compile import StepProgram
from hetero_strategy.strategy.blueprint import Options as RunOptions
from hetero_strategy.strategy.dry_run import BuiltRank, DryRun, dry_run
from hetero_strategy.testing import ragged_step
from hetero_strategy.zoo import siglip2_encoder, titan_llama

MIXED = Storage(torch.bfloat16, torch.float32)
NODE, MICROBATCHES = 8, 16
GIB = 2**30


@dataclass(frozen=True)
class LargeRun:
    """A model and where it lives."""

    ranks: int
    layers: int
    pp: int
    apart: int = 0
    """Ranks of the encoder's own; 0: it is on all of them."""
    dim: int = 8192
    tp: int = 8
    encoder: tuple[int, int] = (1152, 27)
    """Width and layers."""

    @property
    def instances(self) -> int:
        return (self.ranks - self.apart) // (self.pp * self.tp)

    def layouts(self) -> dict[str, ModuleLayout]:
        llm = ModuleLayout(range(self.ranks - self.apart), pp=self.pp, tp=self.tp)
        ranks = range(self.ranks - self.apart, self.ranks) if self.apart else range(self.ranks)
        return {"vision": ModuleLayout(ranks, dp_replicate=-1, dp_shard=NODE), "llm": llm}

    def model(self) -> MultimodalModel:
        """On the meta device."""
        width, layers = self.encoder
        with torch.device("meta"):
            vision = siglip2_encoder(
                out_width=self.dim, merge=2, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
                num_attention_heads=16, num_channels=3, patch_size=14, num_patches=4096,
            )  # fmt: skip
            llm = titan_llama(
                vocab_size=128256, dim=self.dim, n_layers=self.layers, n_heads=self.dim // 128, n_kv_heads=8,
                multiple_of=4096, ffn_dim_multiplier=1.3, max_seq_len=8192,
            )  # fmt: skip
            return MultimodalModel({"vision": vision, "llm": llm}, seed=7)

    def batch(self) -> StepMetadata:
        """Some pictures and some text in every sample."""
        pictures = {"vision": lambda rng, n: rng.integers(8, 24, n) ** 2}
        return ragged_step(0, 2 * MICROBATCHES * self.instances, pictures, items=(1, 3), text=(256, 4096))


RUNS = (
    LargeRun(1296, 80, 9),
    LargeRun(1296, 80, 10, apart=16),
    LargeRun(2560, 96, 8),
    LargeRun(2560, 96, 8, apart=256),
    LargeRun(10240, 96, 8),
)


def shards(run: LargeRun, found: DryRun) -> float:
    """Parameters of all ranks but copies, over those of the model."""
    lanes: dict[int, list[BuiltRank]] = {}
    for one in found.ranks:
        lanes.setdefault(one.lane, []).append(one)
    whole = {name: sum(p.nbytes for p in module.parameters()) for name, module in run.model().modules_by_name.items()}
    replicas = found.plan.layouts["vision"].dp_replicate
    there = sum(sum(one.bytes["parameters"] for one in lane) / len(lane) * lane[0].alike for lane in lanes.values())
    return there / (whole["llm"] + replicas * whole["vision"])


def measure(run: LargeRun) -> dict[str, Any]:
    """One dry run."""
    began, used = time.perf_counter(), time.process_time()
    found = dry_run(
        run.model(), run.layouts(), [run.batch()], world_size=run.ranks, ranks_per_node=NODE,
        microbatches=MICROBATCHES, options=RunOptions(storage=MIXED), memory=80 * GIB,
    )  # fmt: skip
    return {
        "ranks": run.ranks,
        "parameters": sum(p.numel() for p in run.model().parameters()),
        "stages": len(found.plan.graph.stages),
        "apart": run.apart,
        "built": len(found.ranks),
        "seconds": time.perf_counter() - began,
        "processor": time.process_time() - used,
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "largest": max(one.total for one in found.ranks) / GIB,
        "shards": shards(run, found),
        "groups": max(one.groups for one in found.ranks),
        "connect": max(one.connections for one in found.ranks),
        "messages": max(_messages(program) for one in found.ranks for program in one.programs),
        "faults": len(found.faults),
    }


def _messages(program: StepProgram) -> int:
    """Count what a rank sends in a step."""
    return sum(len(hop.sends) for t in program.transfers for hop in (t.transfer.first, t.transfer.second))


@program(option("--ranks", type=int, nargs="+", help="only the runs of so many ranks"))
def main(given: Options) -> list[dict[str, Any]]:
    """Print the table."""
    found = [measure(run) for run in RUNS if given.ranks is None or run.ranks in given.ranks]
    rows = [[f"{x:,}" if isinstance(x, int) else round(x, 3) for x in one.values()] for one in found]
    report("building large runs without their ranks", tuple(found[0]), rows)
    return found


if __name__ == "__main__":
    main()
