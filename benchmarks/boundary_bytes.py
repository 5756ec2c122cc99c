"""Bytes that an edge moves between ranks: ours, the lower bound, and gather-then-slice.

For every pair of layouts, over one ragged global batch, forward and backward:

  ours    counted from the routes' sends
  bound   what any protocol must move: every missing (row, rank) once (derivation in hetero_strategy/boundary/route.py)
  peer    gather-then-slice, as Megatron-LM's MIMO does it (``benchmarks.peers.gather_then_slice``); a pair that
          Megatron refuses is marked *: the figure is what its method would move

With --run the pairs of at most 4 ranks also run on gloo processes, with the bytes handed to torch.distributed counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import Options, option, program, report
from benchmarks.peers.gather_then_slice import MIMO, Moved, refuses
from hetero_strategy.boundary import transport
from hetero_strategy.boundary.route import Side, least_rows, route
from hetero_strategy.boundary.transport import Channel, cross
from hetero_strategy.layout import ModuleLayout, Placement, place
from hetero_strategy.layout.row_sharding import RowSharding
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import EdgeBlocks, edge_blocks
from hetero_strategy.testing import Pool, ragged_step, rearranged

ASSIGNMENTS = ("aligned", "round_robin")
"""aligned: contiguous samples, and items on the instance of their sample, as Megatron has it. round_robin: items are
dealt out one by one, as when they are balanced over encoder instances; Megatron cannot do this."""
RUN_RANKS = 4


@dataclass(frozen=True)
class Pair:
    """Two layouts."""

    name: str
    source: ModuleLayout
    target: ModuleLayout
    sequence: bool = False
    """The target shards its rows over its tensor-parallel ranks."""

    @property
    def world(self) -> int:
        return max(*self.source.ranks, *self.target.ranks) + 1

    def placement(self) -> Placement:
        return place({"encoder": self.source, "llm": self.target}, self.world)


def _on(*ranks: int, tp: int = 1) -> ModuleLayout:
    return ModuleLayout(ranks=ranks, tp=tp)


PAIRS = (
    Pair("same ranks, dp4 -> dp4", _on(*range(4)), _on(*range(4))),
    Pair("same ranks, dp4 -> tp2*dp2", _on(*range(4)), _on(*range(4), tp=2)),
    Pair("same ranks, dp4 -> tp2*dp2 sp", _on(*range(4)), _on(*range(4), tp=2), True),
    Pair("same ranks, tp2*dp2 -> tp4", _on(*range(4), tp=2), _on(*range(4), tp=4)),
    Pair("same ranks, tp2*dp2 -> tp4 sp", _on(*range(4), tp=2), _on(*range(4), tp=4), True),
    Pair("same ranks, tp2 -> dp2", _on(0, 1, tp=2), _on(0, 1)),
    Pair("2 + 2 ranks, dp2 -> tp2", _on(0, 1), _on(2, 3, tp=2)),
    Pair("2 + 2 ranks, dp2 -> tp2 sp", _on(0, 1), _on(2, 3, tp=2), True),
    Pair("2 + 2 ranks, tp2 -> tp2 sp", _on(0, 1, tp=2), _on(2, 3, tp=2), True),
    Pair("2 + 1 ranks, tp2 -> tp1", _on(0, 1, tp=2), _on(2)),
    Pair("1 + 2 ranks, tp1 -> tp2", _on(0), _on(1, 2, tp=2)),
    Pair("1 + 2 ranks, tp1 -> tp2 sp", _on(0), _on(1, 2, tp=2), True),
    Pair("3 + 2 ranks, dp3 -> dp2", _on(0, 1, 2), _on(3, 4)),
    Pair("mixed 0-1 / 1-3, dp2 -> dp3", _on(0, 1), _on(1, 2, 3)),
    Pair("mixed 0-2 / 2-3, dp3 -> tp2 sp", _on(0, 1, 2), _on(2, 3, tp=2), True),
    Pair("8 + 8 ranks, dp8 -> tp8 sp", _on(*range(8)), _on(*range(8, 16), tp=8), True),
    Pair("8 + 64 ranks, dp8 -> tp4*dp16", _on(*range(8)), _on(*range(8, 72), tp=4)),
    Pair("8 + 64 ranks, dp8 -> tp4*dp16 sp", _on(*range(8)), _on(*range(8, 72), tp=4), True),
    Pair("8 + 64 ranks, tp2*dp4 -> tp8*dp8 sp", _on(*range(8), tp=2), _on(*range(8, 72), tp=8), True),
    Pair("same 64 ranks, dp64 -> tp8*dp8 sp", _on(*range(64)), _on(*range(64), tp=8), True),
)


@dataclass(frozen=True)
class Edge:
    """One pair with a workload."""

    pair: Pair
    blocks: EdgeBlocks
    source: Side
    target: Side


def edge_of(pair: Pair, assignment: str, samples: int, seed: int = 0) -> Edge:
    """A ragged global batch in one microbatch: 0 to 3 images of 16 to 256 rows per sample."""
    metadata = ragged_step(seed, samples, {"encoder": lambda rng, n: rng.integers(16, 257, n)})
    placement = pair.placement()
    instances, multiple = placement.instances(), {"llm": placement.layouts["llm"].tp} if pair.sequence else {}
    plan = plan_step(metadata, instances, ("llm",), row_multiple=multiple)
    if assignment == "aligned":
        aligned = {name: metadata.sample_of(name) * count // samples for name, count in instances.items()}
        plan = rearranged(plan, instances, aligned, multiple)
    layouts, assignments = placement.layouts, plan.assignments
    source = Side(layouts["encoder"].stage_grid(0), assignments["encoder"][0].totals())
    sharding = RowSharding(layouts["llm"].tp if pair.sequence else 1)
    target = Side(layouts["llm"].stage_grid(0), assignments["llm"][0].totals(), sharding)
    return Edge(pair, edge_blocks(plan, "encoder", 0, "llm", 0), source, target)


def planned(edge: Edge, row_bytes: int) -> dict[str, Any]:
    """Bytes of all three, without processes."""
    routes, seconds = [], []
    for rank in range(edge.pair.world):
        start = time.perf_counter()
        routes.append(route(edge.blocks, edge.source, edge.target, rank))
        seconds.append(time.perf_counter() - start)
    ours = Moved(sum(r.forward.rows_sent for r in routes), sum(r.backward.rows_sent for r in routes))
    bound = Moved(*(least_rows(edge.blocks, edge.source, edge.target, backward=b) for b in (False, True)))
    peer = MIMO(edge.blocks, edge.source, edge.target).rows()
    return {
        "pair": edge.pair.name,
        "ranks": edge.pair.world,
        "rows": int(edge.blocks.rows.sum()),
        "peer_refuses": refuses(edge.source, edge.target),
        "ours": ours.in_bytes(row_bytes),
        "bound": bound.in_bytes(row_bytes),
        "peer": peer.in_bytes(row_bytes),
        "ours_over_bound": ours.over(bound),
        "peer_over_bound": peer.over(bound),
        "plan_ms_per_rank": 1e3 * statistics.median(seconds),
    }


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """While it lasts, sends and broadcasts are counted: ``with counted() as total: ...; total()``.

    A broadcast counts ``nbytes`` for every other member, on its source: no algorithm moves fewer.
    """
    total = 0
    start, batch, broadcast = transport.start_messages, dist.batch_isend_irecv, dist.broadcast

    def sending(wire: transport.Wire, messages: Sequence[transport.WireMessage]) -> Any:
        nonlocal total
        total += sum(message.tensor.nbytes for message in messages if message.sends)
        return start(wire, messages)

    def sending_of_peers(ops: list[dist.P2POp]) -> Any:
        nonlocal total
        total += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return batch(ops)

    def broadcasting(tensor: torch.Tensor, src: int, group: Any = None, **kwargs: Any) -> Any:
        nonlocal total
        if dist.get_rank() == src:
            total += tensor.nbytes * (dist.get_world_size(group) - 1)
        return broadcast(tensor, src, group, **kwargs)

    transport.start_messages = sending  # type: ignore[assignment]
    dist.batch_isend_irecv, dist.broadcast = sending_of_peers, broadcasting
    try:
        yield lambda: total
    finally:
        transport.start_messages, dist.batch_isend_irecv, dist.broadcast = start, batch, broadcast


Who = Literal["ours", "peer"]
WHO: tuple[Who, Who] = ("ours", "peer")


def run_on_rank(rank: int, world: int, edge: Edge, width: int, rounds: int) -> dict[Who, dict[str, Any]]:
    """Both exchanges on one rank, in turns: rows and gradients checked against each other, bytes counted, timed."""
    ours = route(edge.blocks, edge.source, edge.target, rank)
    group, cpu = dist.group.WORLD, torch.device("cpu")
    there, back_again = (Channel(group, group, tag, width, torch.float32, cpu) for tag in (0, 1))
    peer = MIMO(edge.blocks, edge.source, edge.target).on_rank(rank)
    rows = tagged(edge.source, rank, width)
    grad = tagged(edge.target, rank, width)[peer.slots_here]

    def step(who: Who) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        dist.barrier()
        start = time.perf_counter()
        if who == "ours":
            out = cross(ours.forward, there, rows)
            middle = time.perf_counter()
            back = cross(ours.backward, back_again, grad)
        else:
            out = peer.forward(rows)
            middle = time.perf_counter()
            back = peer.backward(grad)
        return out, back, middle - start, time.perf_counter() - middle

    results: dict[Who, dict[str, Any]] = {}
    first = {}
    for who in WHO:
        with counted() as bytes_sent:
            first[who] = step(who)
        results[who] = {"bytes": bytes_sent(), "forward": [], "backward": []}
    for mine, theirs in zip(first["ours"][:2], first["peer"][:2], strict=True):
        if not torch.equal(mine, theirs):
            raise RuntimeError(f"{edge.pair.name}: rank {rank} got other rows from the two protocols")
    for _ in range(rounds):
        for who in WHO:
            *_, forward, backward = step(who)
            results[who]["forward"].append(forward)
            results[who]["backward"].append(backward)
    return results


def tagged(side: Side, rank: int, width: int) -> torch.Tensor:
    """Rows that say whose they are, equal on all replicas, ``[rows, width]``; none on a rank of another side."""
    where = np.argwhere(side.instances == rank)
    if not len(where):
        return torch.empty(0, width)
    instance, shard = (int(x) for x in where[0])
    rows = torch.arange(int(side.totals[instance]), dtype=torch.float32) + 2.0**18 * (instance + 1)
    if side.sharding.parts > 1:
        rows = rows.chunk(side.sharding.parts)[shard]
    return rows[:, None].repeat(1, width)


def run(edges: Sequence[Edge], width: int, rounds: int, pool: Pool) -> list[dict[str, Any]]:
    """Real exchanges on gloo; bytes are summed over ranks, times are of the slowest rank."""
    found = []
    for edge in edges:
        ranks = pool.run(edge.pair.world, run_on_rank, edge, width, rounds)
        one: dict[str, Any] = {"pair": edge.pair.name}
        for who in WHO:
            slowest = [np.max([r[who][way] for r in ranks], axis=0) for way in ("forward", "backward")]
            one[who] = {
                "bytes": sum(r[who]["bytes"] for r in ranks),
                "forward_ms": 1e3 * float(np.median(slowest[0])),
                "backward_ms": 1e3 * float(np.median(slowest[1])),
                "ms": 1e3 * float(np.median(slowest[0] + slowest[1])),
            }
        one["peer_over_ours_time"] = one["peer"]["ms"] / one["ours"]["ms"]
        found.append(one)
    return found


@program(
    option("--width", type=int, default=4096, help="of a row (default 4096, bf16)"),
    option("--samples", type=int, default=64, help="of the global batch (default 64)"),
    option("--assign", choices=ASSIGNMENTS, nargs="*", default=list(ASSIGNMENTS)),
    option("--pairs", default="", help="only pairs whose name contains this"),
    option("--run", action="store_true", help=f"also run pairs of at most {RUN_RANKS} ranks on gloo"),
    option("--run-width", type=int, default=1024, help="of a row in runs (default 1024, fp32)"),
    option("--rounds", type=int, default=20, help="timed rounds of a run (default 20)"),
)
def main(given: Options) -> Any:
    """Count, print, write."""
    pairs = [p for p in PAIRS if given.pairs in p.name]
    results: dict[str, Any] = {"planned": {}, "run": {}}
    for assignment in given.assign:
        edges = [edge_of(p, assignment, given.samples) for p in pairs]
        lines = [planned(e, 2 * given.width) for e in edges]
        results["planned"][assignment] = lines
        report(
            f"MB between ranks, one step, items {assignment}: {given.samples} samples, width {given.width}, bf16",
            ("", "bound fwd", "bwd", "ours fwd", "bwd", "peer fwd", "bwd", "ours / bound", "peer / bound", "plan ms"),
            [
                (
                    line["pair"] + (" *" if line["peer_refuses"] else ""),
                    *(f"{line[who][way] / 1e6:.1f}" for who in ("bound", "ours", "peer") for way in Moved._fields),
                    line["ours_over_bound"],
                    line["peer_over_bound"],
                    line["plan_ms_per_rank"],
                )
                for line in lines
            ],
            ["peer is gather-then-slice; * Megatron refuses the pair; – the bound is 0"],
        )
        if not given.run:
            continue
        small = [e for e in edges if e.pair.world <= RUN_RANKS]
        runs = run(small, given.run_width, given.rounds, given.pool)
        results["run"][assignment] = runs
        for e, one in zip(small, runs, strict=True):
            line = planned(e, 4 * given.run_width)
            for who in WHO:
                one[who]["planned_bytes"] = sum(line[who].values())
        report(
            f"run on gloo, items {assignment}: forward and backward, width {given.run_width}, fp32",
            ("", "ours MB", "as planned", "peer MB", "as planned", "ours ms", "peer ms", "peer / ours"),
            [
                (
                    one["pair"],
                    *(x for who in WHO for x in _counted(one[who])),
                    one["ours"]["ms"],
                    one["peer"]["ms"],
                    one["peer_over_ours_time"],
                )
                for one in runs
            ],
        )
    return results


def _counted(one: dict[str, Any]) -> tuple[str, str]:
    return f"{one['bytes'] / 1e6:.2f}", "yes" if one["bytes"] == one["planned_bytes"] else "NO"


if __name__ == "__main__":
    main()
