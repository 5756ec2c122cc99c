"""Messages of one channel start in one order on both ends, whoever runs ahead."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from hetero_strategy.boundary.exchange import Channel, Crossing, Format, InFlight
from hetero_strategy.boundary.line import Line, Pair
from hetero_strategy.boundary.route import Hop, Transfer
from tests.distributed.harness import Pool

NONE = np.zeros(0, dtype=np.int64)
ROWS: dict[Pair, tuple[int, int]] = {(0, 0): (0, 3), (1, 1): (4, 5), (2, 2): (0, 2), (3, 3): (6, 0)}
"""How many rows each of two ranks sends to the other."""


def transfer(pair: Pair, rank: int) -> Transfer:
    away, coming = (ROWS[pair][r] for r in (rank, 1 - rank))
    sends = ((1 - rank, np.arange(away)),) if away else ()
    receives = ((1 - rank, np.arange(coming)),) if coming else ()
    return Transfer(away, coming, (NONE, NONE), Hop(sends, receives), Hop())


def everything_sent_before_anything_is_read(rank: int, world: int) -> list[list[float]]:
    in_flight, form = InFlight(), Format(1, torch.float32, torch.device("cpu"))
    channel = Channel(dist.group.WORLD, dist.group.WORLD, 0, in_flight)
    line = Line(list(ROWS), lambda pair: Crossing(transfer(pair, rank), channel, form))
    line.post((2, 2))  # ahead of time, and before this rank's own sends of (1, 1): it has to wait for those
    for pair in ROWS:
        away = ROWS[pair][rank]
        line.send(pair, torch.arange(away, dtype=torch.float32)[:, None] + 100 * rank + 10 * pair[0])
    found = [line.receive(pair)[:, 0].tolist() for pair in ROWS]
    line.settle((3, 3))
    in_flight.drain()
    return found


def test_rows_of_each_pair_arrive(pool: Pool) -> None:
    ranks = pool.run(2, everything_sent_before_anything_is_read, timeout=30)
    for rank, found in enumerate(ranks):
        for pair, rows in zip(ROWS, found, strict=True):
            expected = [100.0 * (1 - rank) + 10 * pair[0] + i for i in range(ROWS[pair][1 - rank])]
            assert rows == expected, (rank, pair)
