"""Checks of one GPU, each with a peer or a bound beside it, in one process where they can be: under 15 minutes.

  step       an LLM of 1.1B parameters with a vision encoder of 0.4B, bf16-mixed, eager and compiled: beside a loop by
             hand over the same modules; launches of a step, host syncs in it, recompilations
  llm        the LLM alone, beside torchtitan's own Transformer with dense causal attention
  attention  packed rows of mixed lengths by the flash kernel and by blocks, beside dense attention
  head       head and loss by the share of labelled rows, beside whole logits
  optimizer  AdamW over sharded and plain parameters, beside fused AdamW over plain ones
  copies     the part of copies to the device that a step hides
  job        the default job of recipes.train on the device; its checkpoint on the CPU and back
  overhead   benchmarks.step_overhead

A check that fails or that this machine cannot do says so, and the others go on. The JSON file is written after each of
them. --device cpu --size tiny runs the same code in a minute; figures that need CUDA are left out there.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Options, option, program, report, write_json
from benchmarks.gpu import attention, copies, job, parts, step
from benchmarks.gpu.table import Line, Skipped

CHECKS: dict[str, Callable[[torch.device, str], Iterator[Line]]] = {
    "attention": attention.check,
    "head": parts.check_head,
    "optimizer": parts.check_optimizer,
    "copies": copies.check,
    "step": step.check,
    "llm": step.check_llm,
    "overhead": job.check_overhead,
    "job": job.check,
}
"""The short ones first."""


def run(name: str, device: torch.device, size: str) -> dict[str, Any]:
    """One check: its lines, the seconds it took, and why it ended early, if it did."""
    begin = time.perf_counter()
    lines: list[Line] = []
    found: dict[str, Any] = {}
    try:
        for line in CHECKS[name](device, size):
            lines.append(line)
    except Skipped as why:
        found["skipped"] = str(why)
    except Exception:  # whatever it is, the other checks have figures to give
        found["failed"] = traceback.format_exc()
    found |= {"seconds": time.perf_counter() - begin, "lines": [asdict(line) for line in lines]}
    rows = [(x.what, x.ours, x.unit, x.peer, x.theirs, x.ratio, x.goal, x.note) for x in lines]
    columns = ("", "ours", "", "beside", "theirs", "ours / theirs", "goal", "")
    report(f"{name}, {found['seconds']:.0f} s", columns, rows)
    for key in ("skipped", "failed"):
        if key in found:
            print(f"{name} {key}: {found[key]}", flush=True)
    return found


@program(
    option("--device", choices=("cuda", "cpu"), default="cuda"),
    option(
        "--size",
        choices=("full", "quick", "tiny"),
        default="full",
        help="quick: the full ones, but 6 steps after 4 others in place of 16 after 10 (default: full)",
    ),
    option("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="checks (default: all)"),
    threads=None,
)
def main(given: Options) -> dict[str, Any]:
    """Run the checks and print a table of each."""
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: no CUDA device here; --device cpu --size tiny runs the same code")
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    results: dict[str, Any] = {}
    try:
        for name in given.only:
            longer = given.size == "quick" and name not in ("step", "llm")
            results[name] = run(name, device, "full" if longer else given.size)
            if given.json is not None:
                write_json(given.json, "gpu", {"device": given.device, "size": given.size}, results)
    finally:
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    sys.exit(any("failed" in found for found in main().values()))
