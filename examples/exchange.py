"""Rows from an encoder's layout to a language model's, and their gradients back; no Lightning.

torchrun --nproc-per-node 3 examples/exchange.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hetero_strategy.boundary import Boundary, Channel, Side, exchange, route
from hetero_strategy.plan.step_plan import EdgeBlocks

WIDTH = 8
ENCODER = np.array([[0], [1]])  # two data-parallel instances of one rank each
LLM = np.array([[1, 2]])  # one instance of two tensor-parallel ranks; rank 1 has both modules


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Instance 0 encodes two images (3 and 2 rows), instance 1 one image (4 rows). The sequence has 12 rows, and the
    # images fill 9 of them: one column per image says where it comes from and where it goes.
    images = EdgeBlocks(
        source_instance=np.array([0, 1, 0]),
        source_start=np.array([2, 0, 0]),
        target_instance=np.array([0, 0, 0]),
        target_start=np.array([0, 4, 9]),
        rows=np.array([3, 4, 2]),
    )
    source, target = Side(ENCODER, totals=np.array([5, 4])), Side(LLM, totals=np.array([12]))
    world, cpu = dist.group.WORLD, torch.device("cpu")
    there, back = (Channel(world, world, tag, WIDTH, torch.float32, cpu) for tag in (0, 1))
    boundary = Boundary(route(images, source, target, rank), there, back)

    encoder, llm = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)  # replicas start with equal values
    for parameter in (*encoder.parameters(), *llm.parameters()):
        nn.init.constant_(parameter, 0.1)
    patches = torch.full(((5, 4, 0)[rank], 4), float(rank + 1))
    rows = exchange(encoder(patches), boundary)  # [9, WIDTH] on ranks 1 and 2, [0, WIDTH] on rank 0
    loss = llm(rows).sum()  # every replica computes the same loss; a row's gradient comes back once
    loss.backward()
    print(f"rank {rank}: {len(patches)} patches, {len(rows)} rows, encoder's gradient {encoder.bias.grad.sum():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
