"""How long AdamW takes over sharded and plain parameters in one group, beside fused AdamW over as many plain ones.

300 parameters, half of them DTensors (as FSDP2 and tensor parallelism leave them), small (64 x 64) and larger
(512 x 512), on one process; medians of rounds in turns:

  loop     torch's own way where kinds are mixed: parameter by parameter, through DTensor's dispatch
  ours     the same optimizer, which steps on this rank's shards
  fused    torch's fused AdamW over plain tensors of the same sizes: the bound
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.common import arguments, report, write_json
from benchmarks.measuring import CPU, seconds_in_turns
from hetero_strategy.parallelize.optimizer import choose_kernels
from tests.distributed.harness import Pool

WAYS = ("loop", "ours", "fused")


def parameters(size: int, count: int, device: torch.device, *, mixed: bool) -> list[nn.Parameter]:
    """With gradients."""
    mesh = init_device_mesh(device.type, (1,))
    made = []
    for number in range(count):
        tensor = torch.randn(size, size, device=device)
        whole = distribute_tensor(tensor, mesh, [Shard(0)]) if mixed and number % 2 else tensor
        made.append(nn.Parameter(whole))
        made[-1].grad = torch.ones_like(whole)
    return made


def measure(size: int, count: int, rounds: int, device: torch.device = CPU, warm_up: float = 0.0) -> dict[str, float]:
    """Median milliseconds of a step, by way; in a process group of one."""
    steps = {}
    for way in WAYS:
        own = parameters(size, count, device, mixed=way != "fused")
        kernels: dict[str, Any] = {} if way == "ours" else {"foreach": False, "fused": way == "fused"}
        optimizer = torch.optim.AdamW(own, lr=1e-3, **kernels)
        if way == "ours":
            choose_kernels([optimizer], {}, lambda decision: decision)
        steps[way] = optimizer.step
    seconds = seconds_in_turns(steps, device, rounds, warm_up=warm_up)
    return {way: 1e3 * statistics.median(times) for way, times in seconds.items()}


def _on_rank(rank: int, world: int, *sizes: int) -> dict[str, float]:
    return measure(*sizes)


def main(argv: Sequence[str] | None = None, pool: Pool | None = None) -> dict[str, Any]:
    """Print the table; returns milliseconds by size and way."""
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=300, help="parameters")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(argv)
    pool = pool or Pool()
    table, figures = [], {}
    for size in given.sizes:
        (found,) = pool.run(1, _on_rank, size, given.count, given.rounds, timeout=300)
        figures[str(size)] = found
        table.append([f"{size} x {size}", *(f"{found[way]:.1f}" for way in WAYS), found["ours"] / found["fused"]])
    report("optimizer", "AdamW over sharded and plain parameters, ms", ("size", *WAYS, "ours / fused"), table)
    write_json(given.json, "optimizer", "cpu", {"count": given.count}, figures)
    return figures


if __name__ == "__main__":
    main()
