"""Does it pay to cut rows into chunks whose tensor-parallel collectives run beside the next chunk's matmul?

Forward and backward of a transformer block, fp32, on gloo processes of one thread each; the plain plan and chunks take
turns. One chunk is the same code without a cut: it calls torch past DTensor, linear maps that take the same rows share
one sum of their gradients, and gradients of weights are computed beside collectives. What chunks are worth is the
difference from that line. Seconds are medians of rank 0, bytes those of the rows that collectives sum or gather.

With ``--link`` no collective of chunks ends before its bytes could have gone over a link of that bandwidth, one after
another, which takes no processor, as on a GPU and unlike gloo. ``waited`` is how long a step waits for the link beside
what its bytes take there: the difference is hidden.

  titan      torchtitan's Llama: ranks have parts of the rows between layers (sequence parallelism)
  hf_llama   transformers' Llama: every rank has all rows
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import arguments, report, write_json
from benchmarks.counting import Operations
from benchmarks.measuring import CPU, seconds_in_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import chunked_linear
from hetero_strategy.model.inputs import Packing
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.zoo import hf_llama, titan_llama
from tests.distributed.harness import Pool

SCATTER_OR_GATHER = ("reduce_scatter_tensor", "all_gather_into_tensor")
SIZES = {"small": (256, 512), "large": (768, 2048)}
"""Width, and rows of a microbatch."""
MODELS: dict[str, Callable[[int], Any]] = {
    "titan": lambda width: titan_llama(vocab_size=64, dim=width, n_layers=1, n_heads=8),
    "hf_llama": lambda width: hf_llama(
        vocab_size=64, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=1, num_attention_heads=8
    ),
}


def backward(module: Any, rows: Tensor, packing: Packing, *logs: Operations) -> Tensor:
    """Forward and backward of the blocks, each inside one of two logs where given; the gradient of the rows."""
    leaf = rows.clone().requires_grad_()
    forward_log, backward_log = logs or (nullcontext(), nullcontext())
    with forward_log:
        out = module.transform(leaf, packing)
    with backward_log:
        out.backward(torch.ones_like(out))
    module.zero_grad(set_to_none=True)
    assert leaf.grad is not None
    return leaf.grad


class Link:
    """Stands in for torch.distributed: each collective ends when its rows could have gone over a link."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth, self.free, self.waited = bandwidth, 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        return partial(self.start, found) if name in ("all_reduce", *SCATTER_OR_GATHER) else found

    def start(self, collective: Callable[..., Any], tensor: Tensor, *rest: Tensor, **how: Any) -> Any:
        work = collective(tensor, *rest, **how)
        self.free = max(self.free, time.perf_counter()) + max(t.nbytes for t in (tensor, *rest)) / self.bandwidth
        return SimpleNamespace(wait=partial(self.wait, work, self.free))

    def wait(self, work: Any, end: float) -> None:
        work.wait()
        rest = max(0.0, end - time.perf_counter())
        time.sleep(rest)
        self.waited += rest

    def waits(self, run: Callable[[], Any], waited: list[float]) -> None:
        """Run, and note how long that waited."""
        before = self.waited
        run()
        waited.append(self.waited - before)


def measure(
    rank: int, world: int, kind: str, size: tuple[int, int], chunks: Sequence[int], rounds: int, link: float | None
) -> dict[int, dict[str, Any]]:
    """By number of chunks, 0 for the plain plan: seconds, collectives and bytes of forward and backward, and how far
    the gradient is off.
    """
    (width, count), mesh = size, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    modules = {}
    for number in (0, *chunks):
        module = MODELS[kind](width)
        if number == 1:  # which a layout would not ask for
            module.in_chunks = partial(chunked_linear.chunked, chunks=1)
        layout = ModuleLayout(world, tp=world, tp_chunks=1 if number == 0 else max(number, 2)).resolved()
        modules[number] = parallelize("llm", module, layout, mesh, CPU, seed=1)[0]
    packing = Packing.of([count // 2, count // 2])  # type: ignore[arg-type]
    parts = modules[0].row_sharding(layout).parts
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(0)).chunk(parts)[rank % parts]
    found: dict[int, dict[str, Any]] = {}
    for number, module in modules.items():
        logs = Operations(), Operations()
        gradient = backward(module, rows, packing, *logs)
        found[number] = {
            "collectives": [log.collectives for log in logs],
            "bytes": [sum(log.bytes.values()) for log in logs],
            "gradient": gradient,
        }
    for line in found.values():
        line["off"] = float((line["gradient"] - found[0]["gradient"]).norm() / found[0]["gradient"].norm())
    for line in found.values():
        del line["gradient"]
    runs = {str(number): partial(backward, module, rows, packing) for number, module in modules.items()}
    waited: dict[str, list[float]] = {name: [] for name in runs}
    if link is not None:
        chunked_linear.dist = late = Link(link * 1e9)  # type: ignore[attr-defined]
        runs = {name: partial(late.waits, run, waited[name]) for name, run in runs.items() if name != "0"}
    for name, seconds in seconds_in_turns(runs, CPU, rounds).items():
        found[int(name)]["seconds"] = statistics.median(seconds)
        found[int(name)]["waited"] = statistics.median(waited[name][1:] or [0.0])
    return {number: line for number, line in found.items() if "seconds" in line}


def main(argv: Sequence[str] | None = None, pool: Pool | None = None) -> dict[str, Any]:
    """Print the table; returns its figures by line.

    Args:
        argv: the command line.
        pool: starts the processes.
    """
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="*", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--scale", type=float, default=1.0, help="of widths and rows (default 1)")
    parser.add_argument("--tp", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--chunks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--link", type=float, help="GB/s that collectives of chunks seem to have")
    given = parser.parse_args(argv)
    table, figures = [], {}
    for kind, tp, name in itertools.product(MODELS, given.tp, given.sizes):
        size = tuple(int(number * given.scale) for number in SIZES[name])
        runs = (pool or Pool()).run(tp, measure, kind, size, given.chunks, given.rounds, given.link, timeout=600)
        first = next(iter(runs[0].values()))
        for chunks, line in runs[0].items():
            key = f"{kind}, tp {tp}, {name}, {'plain' if chunks == 0 else f'{chunks} chunk' + 's' * (chunks > 1)}"
            figures[key] = {**line, "ratio": line["seconds"] / first["seconds"]}
            counts = ("; ".join(f"{n} {what}" for what, n in way.items()) for way in line["collectives"])
            megabytes = " + ".join(f"{size / 1e6:.1f}" for size in line["bytes"])
            link = sum(line["bytes"]) / (1e9 * given.link) if given.link else 0.0
            waits = f"{line['waited']:.3f} of {link:.3f}" if link else "-"
            table.append([key, line["seconds"], figures[key]["ratio"], waits, *counts, megabytes, f"{line['off']:.0e}"])
    columns = ("", "s", "ratio", "waited s", "forward", "backward", "MB", "gradient off by")
    report("tp_overlap", "A block forward and backward, in chunks, over the first line", columns, table)
    write_json(given.json, "tp_overlap", "cpu", {k: v for k, v in vars(given).items() if k != "json"}, figures)
    return figures


if __name__ == "__main__":
    main()
