"""Checks of one GPU, each with a peer or a bound beside it, in one process where they can be: under 15 minutes.

  step       an LLM of 1.1B parameters with a vision encoder of 0.4B, bf16-mixed, eager and compiled: beside a loop by
             hand over the same modules; launches of a step, host syncs in it, recompilations
  llm        the LLM alone, beside torchtitan's own Transformer with dense causal attention
  attention  packed rows of mixed lengths by the flash kernel and in buckets, beside dense attention
  head       head and loss by the share of labelled rows, beside whole logits
  optimizer  AdamW over sharded and plain parameters, beside fused AdamW over plain ones
  copies     the part of copies to the device that a step hides
  chunks     a block whose tensor-parallel linear maps are cut into chunks of rows, beside one in whole
  streams    an encoder on a stream of lower priority, beside a language model that waits as for collectives
  job        the default job of recipes.train on the device; its checkpoint on the CPU and back
  overhead   benchmarks.step_overhead

A check that fails or that this machine cannot do says so, and the others go on. The JSON file is written after each of
them. --device cpu --size tiny runs the same code in a minute; figures that need CUDA are left out there.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import arguments, report, write_json
from benchmarks.gpu import attention, chunks, copies, head, job, optimizer, overhead, step, streams
from benchmarks.gpu.table import Line, Skipped

CHECKS: dict[str, Callable[[torch.device, str], Iterator[Line]]] = {
    "attention": attention.check,
    "head": head.check,
    "optimizer": optimizer.check,
    "copies": copies.check,
    "chunks": chunks.check,
    "streams": streams.check,
    "step": step.check,
    "llm": step.check_llm,
    "overhead": overhead.check,
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
    report(name, f"{name}, {found['seconds']:.0f} s", columns, rows)
    for key in ("skipped", "failed"):
        if key in found:
            print(f"{name} {key}: {found[key]}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the checks, print a table of each; returns what each found."""
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    sizes = "quick: the full ones, but 6 steps after 4 others in place of 16 after 10 (default: full)"
    parser.add_argument("--size", choices=("full", "quick", "tiny"), default="full", help=sizes)
    parser.add_argument("--only", default=",".join(CHECKS), help="names with commas between (default: all)")
    given = parser.parse_args(argv)
    names = given.only.split(",")
    if unknown := set(names) - set(CHECKS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: no such check; there are {', '.join(CHECKS)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device here; --device cpu --size tiny runs the same code")
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    results: dict[str, Any] = {}
    try:
        for name in names:
            longer = given.size == "quick" and name not in ("step", "llm")
            results[name] = run(name, device, "full" if longer else given.size)
            write_json(given.json, "gpu", given.device, {"size": given.size, "only": given.only}, results)
    finally:
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    sys.exit(any("failed" in found for found in main().values()))
