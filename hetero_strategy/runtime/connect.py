"""The connect phase: every pair of ranks that may ever exchange rows meets at start, never first in a step.

NCCL connects two ranks of a group at their first message, and holds up both hosts until both are there. Here they meet
in rounds, as in a tournament: in each round a rank meets at most one other, and all ranks go through the rounds of all
groups in one order.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int64

from hetero_strategy.boundary.pairs import Meetings, components
from hetero_strategy.boundary.transport import Channel
from hetero_strategy.layout.placement import Placement
from hetero_strategy.layout.registry import MESSAGE_CTAS, context_sets, rank_sets
from hetero_strategy.schedule.action import StageGraph

MANY = 512
"""Partners of a rank from which it says how to have fewer: each is memory and connections of the backend."""
SENDING, RECEIVING = 2 * 2**20, 10 * 2**20
"""Bytes that NCCL keeps for a channel to a rank, and for one from a rank: buffers of all its protocols (LL 0.5, LL128
4.7, SIMPLE 4 MiB), in pages of 2 MiB (``transport/p2p.cc``, NCCL 2.28)."""
BETWEEN_NODES = 32 * 2**20
"""Bytes that a communicator keeps for all messages to and from other nodes, about."""
log = logging.getLogger(__name__)


def connect(graph: StageGraph, channels: Mapping[tuple[int, bool], Channel], rank: int) -> None:
    """Let this rank meet all it may ever exchange rows with; a collective over the world.

    Args:
        graph: of all stages.
        channels: of this rank, by number of the stage edge, and whether gradients travel.
        rank: global rank.
    """
    partners: set[int] = set()
    for number in range(len(graph.edges)):
        for back, meetings in meetings_of(graph, number).items():
            if (channel := channels.get((number, back))) is None:
                continue
            for wire, met in zip(channel.hops, meetings, strict=True):
                if wire.group is not None:
                    partners |= _meet(wire.group, wire.tag, met, rank, channel.device)
    if rank == 0 and len(partners) > MANY:
        log.warning(
            "rank 0 exchanges rows with %d others, since balancing may send them between any two instances;"
            " HeteroStrategy(islands=...) bounds whom a rank meets",
            len(partners),
        )


def connections(graph: StageGraph) -> int:
    """Pairs of a rank and one to which it may send in the whole world; hops, directions and edges counted apart."""
    ways = [meetings for number in range(len(graph.edges)) for meetings in meetings_of(graph, number).values()]
    return sum(meetings.count for meetings in chain.from_iterable(ways))


def channel_sets(graph: StageGraph, number: int) -> dict[bool, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Rank sets in which an edge's rows travel (False), and their gradients where there are any (True), in each hop.

    Edges between cohorts of the same two stages share them. A set has no more ranks than may meet, since NCCL has fewer
    channels between two ranks of a wider group. A hop in which no two ranks meet has no sets: rows that stay where they
    are, and the second one of a stage whose ranks have no row in common.
    """
    alike = [meetings_of(graph, n) for n, first in enumerate(graph.firsts) if first == graph.firsts[number]]
    first, second = ({back: components(ways[back][hop] for ways in alike) for back in alike[0]} for hop in (0, 1))
    return {back: (first[back], second[back]) for back in alike[0]}


def process_groups(
    placement: Placement, graph: StageGraph, owners: Iterable[tuple[int, ...]], device_type: str
) -> dict[str, list[tuple[int, ...]]]:
    """Predict the process groups of a run: what they are for -> the ranks of each. Pure.

    On CUDA those of modules and edges are NCCL's, of which each costs every member memory, but for those of one rank.
    Sets without a common rank are created at once, see :func:`~hetero_strategy.layout.registry.disjoint`.

    Args:
        owners: pairs that share a weight, see :func:`~hetero_strategy.parallelize.tied.tied_rank_sets`.
        device_type: ``"cuda"``, where each channel is a new group, or ``"cpu"``, where those of one rank set share it.

    Returns:
        ``modules``: the world, axes of meshes, context-parallel ranks, the owners of shared weights, each rank alone;
        ``edges``: channels that do not share a group of modules; ``host``: those of all ranks for checkpoints and for
        loading.
    """
    everyone = tuple(range(placement.world_size))
    alone = [(rank,) for rank in everyone]
    sets = [ranks for ranks in rank_sets(placement, owners) if len(ranks) > 1]
    modules = list(dict.fromkeys([everyone, *sets, *alone]))
    ways = [hops for number in sorted({*graph.firsts}) for hops in channel_sets(graph, number).values()]
    edges = [ranks for hops in ways for ranks in chain.from_iterable(hops)]
    if device_type != "cuda":
        edges = [ranks for ranks in dict.fromkeys(edges) if ranks not in set(modules)]
    return {"modules": modules + context_sets(placement), "edges": edges, "host": [everyone, everyone]}


def message_buffers(graph: StageGraph, world_size: int, ranks_per_node: int = 8) -> Int64[np.ndarray, "ranks"]:
    """Bytes of NCCL's buffers for messages on every rank: on a node for each channel to and from each partner, to other
    nodes in a pool of the communicator. Pure.
    """
    bytes_ = np.zeros(world_size, dtype=np.int64)
    for number in sorted({*graph.firsts}):
        alike = [meetings_of(graph, n) for n, first in enumerate(graph.firsts) if first == graph.firsts[number]]
        for back, hops in channel_sets(graph, number).items():
            for hop, sets in enumerate(hops):
                ways = [way[back][hop] for way in alike]
                (to, far), (of, beyond) = (_near(each, ranks_per_node) for each in (ways, [w.back for w in ways]))
                for ranks in sets:
                    channels = _channels_per_peer(len(ranks), one_node=len({r // ranks_per_node for r in ranks}) == 1)
                    for rank in ranks:
                        bytes_[rank] += channels * (len(to[rank]) * SENDING + len(of[rank]) * RECEIVING)
                        bytes_[rank] += BETWEEN_NODES * (rank in far or rank in beyond)
    return bytes_


def _near(ways: Iterable[Meetings], ranks_per_node: int) -> tuple[dict[int, set[int]], set[int]]:
    """Return the other ranks of its node to which each rank may send, and the ranks that may send to other nodes."""
    near, far = defaultdict[int, set[int]](set), set[int]()
    for way in ways:
        for sources, targets in zip(way.sources.tolist(), way.targets.tolist(), strict=True):
            nodes: dict[int, set[int]] = {}
            for rank in targets:
                nodes.setdefault(rank // ranks_per_node, set()).add(rank)
            for rank in sources:
                own = nodes.get(rank // ranks_per_node, set())
                near[rank] |= own - {rank}
                if len(nodes) > bool(own):
                    far.add(rank)
    return near, far


def _channels_per_peer(ranks: int, *, one_node: bool) -> int:
    """Channels between two ranks of a group for messages (``graph/paths.cc``, NCCL 2.29)."""
    channels = MESSAGE_CTAS
    while not one_node and channels > 1 and channels * -(-ranks // 8) > MESSAGE_CTAS:
        channels //= 2
    return channels


def most_groups(made: Mapping[str, Sequence[tuple[int, ...]]]) -> dict[str, int]:
    """Count the groups of the rank that is in most of them, by what they are for, see :func:`process_groups`."""
    joined = {kind: Counter(chain.from_iterable(sets)) for kind, sets in made.items()}
    ((rank, _),) = sum(joined.values(), Counter()).most_common(1)
    return {kind: count[rank] for kind, count in joined.items()}


def meetings_of(graph: StageGraph, number: int) -> dict[bool, tuple[Meetings, Meetings]]:
    """Of an edge, for its rows (False) and their gradients where there are any (True): who meets in the first hop, and
    in the second one, among the ranks that get the same rows.

    Between stages of a module rows keep their instance and their part of it. Between modules any instance may send to
    any other of its island: balancing decides that anew in every step.
    """
    source, target = (graph.stages[stage] for stage in graph.edges[number])
    if len({stage.module for stage in graph.edges[number]}) == 1:
        lie = source.row_sharding
        first = Meetings(lie.rank_sets(source.grid), lie.rank_sets(target.grid))
    else:
        first = Meetings(source.of_islands, target.of_islands)
    there, back = (stage.row_sharding.rank_sets(stage.grid) for stage in (target, source))
    rows, gradients = (first, Meetings(there, there)), (first.back, Meetings(back, back))
    return {False: rows, True: gradients} if source.backward else {False: rows}


def _meet(group: dist.ProcessGroup, tag: int, meetings: Meetings, rank: int, device: torch.device) -> set[int]:
    """One message to each rank to which this one may send, and from each that may send to it; returns all these."""
    to, of = meetings.peers(rank), meetings.back.peers(rank)
    for partner in rounds(meetings.ranks, rank):
        if ways := [way for way, there in ((dist.isend, to), (dist.irecv, of)) if partner in there]:
            ops = [dist.P2POp(way, torch.zeros(1, device=device), partner, group, tag) for way in ways]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
    return to | of


def rounds(ranks: Sequence[int], rank: int) -> Iterator[int]:
    """Whom a rank meets, round by round (circle method): in no round two ranks are meant to meet the same one."""
    places = [*ranks, -1] if len(ranks) % 2 else [*ranks]
    if rank not in places:
        return
    turning, me = len(places) - 1, places.index(rank)
    for number in range(turning):
        # The last place stays; of the others those meet whose places add up to twice the round.
        other = (2 * number - me) % turning if me < turning else number
        if me < turning and other == me:
            other = turning
        if places[other] >= 0:
            yield places[other]
