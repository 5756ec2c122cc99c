"""Tensor-parallel linear maps cut into chunks of rows, on a group of one rank: what a cut costs where it hides nothing.

A group of one exchanges nothing, so all that chunks take beyond the block without tensor parallelism is what smaller
matmuls, more launches and copies of rows cost. On more ranks collectives hide behind the other chunks' matmuls.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.gpu.table import Line
from benchmarks.measuring import seconds_in_turns
from benchmarks.tp_overlap import backward
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import Adapter, Packing
from hetero_strategy.model.chunked_linear import chunked
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.zoo import titan_llama

SIZES = {"full": (4096, 32, 8192), "tiny": (32, 2, 16)}
"""Width of a Llama's block, its heads, rows of a microbatch."""
CHUNKS = (1, 2, 4, 8)


def check(device: torch.device, size: str) -> Iterator[Line]:
    """Forward and backward of a block in bf16, beside one that no tensor parallelism has split.

    Raises:
        RuntimeError: their gradients differ.
    """
    width, heads, count = SIZES[size]
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("tp",))["tp"]
    rows = torch.randn(count, width, device=device, dtype=torch.bfloat16)
    packing = Packing.of([count // 2, count // 2]).to(device)  # type: ignore[arg-type]
    runs = {
        number: partial(backward, block(width, heads, number, mesh, device), rows, packing) for number in (0, *CHUNKS)
    }
    right = runs[0]()
    apart = {number: float((run() - right).float().norm() / right.float().norm()) for number, run in runs.items()}
    if not all(off < 0.01 for off in apart.values()):
        raise RuntimeError(f"gradients are off by {apart}, by number of chunks: they did not do the same work")
    seconds = seconds_in_turns(
        {str(number): run for number, run in runs.items()}, device, 15, warm_up=2.0 if size == "full" else 0.0
    )
    times = {int(name): 1e3 * statistics.median(each) for name, each in seconds.items()}
    for number in CHUNKS:
        what = "in whole" if number == 1 else f"in {number} chunks"
        note = f"width {width}, {count} rows, gradient differs by {apart[number]:.0e}"
        yield Line(f"block {what}", times[number], "ms", "not split", times[0], note=note)


def block(width: int, heads: int, chunks: int, mesh: DeviceMesh | None, device: torch.device) -> Adapter:
    """One block with random weights; with 0 chunks it is as it comes."""
    whole = titan_llama(vocab_size=64, dim=width, n_layers=1, n_heads=heads, max_seq_len=8192)
    module = parallelize("llm", whole, ModuleLayout(1).resolved(), None, device, seed=0)[0]
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    if mesh is not None and chunks:
        module.tp_chunks = max(chunks, 2)
        if chunks == 1:  # which a layout would not ask for
            module.in_chunks = partial(chunked, chunks=1)
        module.apply_tp(mesh)
    return module
