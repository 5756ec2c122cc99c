"""Time and memory of parts of a step beside what they replace, on one process in fp32; medians of rounds in turns.

The first table is the head and the loss of a language model by the share of rows that have a label: forward and
backward to rows and weights, 2048 rows of width 256 and a vocabulary of 8192. Peak is what operators allocate at most
besides rows and weights, gradients included.

  whole    logits of every row, then torch's cross entropy, as transformers' models do it
  ours     logits of labelled rows alone, an eighth of all rows at a time, made again in backward

The second table is a step of AdamW over 300 parameters, half of them DTensors (as FSDP2 and tensor parallelism leave
them), small (64 x 64) and larger (512 x 512).

  loop     torch's own way where kinds are mixed: parameter by parameter, through DTensor's dispatch
  ours     the same optimizer, which steps on this rank's shards
  fused    torch's fused AdamW over plain tensors of the same sizes: the bound
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.common import Options, option, program, report
from benchmarks.measuring import CPU, peak_bytes, seconds_in_turns
from hetero_strategy.model.inputs import IGNORE, Packing, SequenceInputs
from hetero_strategy.parallelize.optimizer import choose_kernels
from hetero_strategy.zoo import titan_llama

SHARES = (0.05, 0.25, 1.0)
WAYS = ("loop", "ours", "fused")


def head(
    rows: int,
    vocabulary: int,
    dim: int,
    share: float,
    rounds: int,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    warm_up: float = 0.0,
) -> dict[str, Any]:
    """Return the peak in bytes, the seconds and the loss of both ways; ``warm_up`` is in seconds."""
    llm = titan_llama(vocab_size=vocabulary, dim=dim, n_layers=1, n_heads=8).to_empty(device=device)
    llm.head_rows = min(llm.head_rows, rows // 8)
    with torch.no_grad():
        for parameter in llm.parameters():
            parameter.normal_(std=0.02)
    llm.to(dtype)
    numbers = torch.Generator().manual_seed(0)
    labels = torch.randint(0, vocabulary, (rows,), generator=numbers)
    labels[torch.rand(rows, generator=numbers) >= share] = IGNORE
    inputs = SequenceInputs(labels.clamp(0), labels, Packing.of([rows])).to(device)  # type: ignore[arg-type]
    hidden = torch.randn(rows, dim, generator=numbers).to(device, dtype).requires_grad_()

    def whole() -> torch.Tensor:
        logits = llm.head(hidden).float()
        return F.cross_entropy(logits, inputs.labels, ignore_index=IGNORE, reduction="sum")

    def once(loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        hidden.grad = None
        llm.zero_grad(set_to_none=True)
        return loss.detach()

    runs = {"whole": partial(once, whole), "ours": partial(once, lambda: llm.score(hidden, inputs).loss_sum)}
    found = {name: {"loss": float(run()), "peak": peak_bytes(run, device)} for name, run in runs.items()}
    seconds = seconds_in_turns(runs, device, rounds, warm_up=warm_up)
    return {name: {**found[name], "seconds": statistics.median(seconds[name])} for name in runs}


def parameters(size: int, count: int, device: torch.device, *, mixed: bool) -> list[nn.Parameter]:
    """Return parameters with gradients; ``mixed``: every other one is sharded."""
    mesh = init_device_mesh(device.type, (1,))
    made = []
    for number in range(count):
        tensor = torch.randn(size, size, device=device)
        whole = distribute_tensor(tensor, mesh, [Shard(0)]) if mixed and number % 2 else tensor
        made.append(nn.Parameter(whole))
        made[-1].grad = torch.ones_like(whole)
    return made


def optimizer(size: int, count: int, rounds: int, device: torch.device = CPU, warm_up: float = 0.0) -> dict[str, float]:
    """Return the median milliseconds of a step, by way; in a process group of one."""
    steps = {}
    for way in WAYS:
        own = parameters(size, count, device, mixed=way != "fused")
        kernels: dict[str, Any] = {} if way == "ours" else {"foreach": False, "fused": way == "fused"}
        adamw = torch.optim.AdamW(own, lr=1e-3, **kernels)
        if way == "ours":
            choose_kernels([adamw], {}, lambda decision: decision)
        steps[way] = adamw.step
    seconds = seconds_in_turns(steps, device, rounds, warm_up=warm_up)
    return {way: 1e3 * statistics.median(times) for way, times in seconds.items()}


def optimizer_on_rank(rank: int, world: int, *sizes: int) -> dict[str, float]:
    """Measure in a process."""
    return optimizer(*sizes)


@program(
    option("--rows", type=int, default=2048, help="of the head (default 2048)"),
    option("--vocabulary", type=int, default=8192, help="of the head (default 8192)"),
    option("--dim", type=int, default=256, help="of the head (default 256)"),
    option("--count", type=int, default=300, help="parameters of the optimizer (default 300)"),
    option("--sizes", type=int, nargs="+", default=[64, 512], help="sides of parameters (default 64 512)"),
    option("--rounds", type=int, default=9, help="of which the median is taken (default 9)"),
)
def main(given: Options) -> dict[str, Any]:
    """Print both tables."""
    heads, table = {}, []
    for share in SHARES:
        found = heads[f"{share:.0%}"] = head(given.rows, given.vocabulary, given.dim, share, given.rounds)
        ours, whole = found["ours"], found["whole"]
        table.append([f"{share:.0%}", *(f"{x['peak'] / 1e6:.0f}" for x in (whole, ours)), ours["peak"] / whole["peak"],
                      whole["seconds"], ours["seconds"], ours["seconds"] / whole["seconds"],
                      f"{abs(ours['loss'] / whole['loss'] - 1):.0e}"])  # fmt: skip
    columns = ["labelled", "whole MB", "ours MB", "ratio", "whole s", "ours s", "ratio", "losses differ by"]
    report("Head and loss, forward and backward", columns, table)
    optimizers, table = {}, []
    for size in given.sizes:
        (took,) = given.pool.run(1, optimizer_on_rank, size, given.count, given.rounds, timeout=300)
        optimizers[str(size)] = took
        table.append([f"{size} x {size}", *(f"{took[way]:.1f}" for way in WAYS), took["ours"] / took["fused"]])
    report("AdamW over sharded and plain parameters, ms", ("size", *WAYS, "ours / fused"), table)
    return {"head": heads, "optimizer": optimizers}


if __name__ == "__main__":
    main()
