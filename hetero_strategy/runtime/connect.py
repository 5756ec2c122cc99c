"""The connect phase: every pair of ranks that may ever exchange rows connects at start, never first in a step.

NCCL connects two ranks of a group at their first message, and blocks both hosts until both have arrived. Here ranks
connect in rounds, as in a tournament: in each round a rank meets at most one other rank, and all ranks go through the
rounds of all groups in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Int64

from hetero_strategy.boundary import transport
from hetero_strategy.boundary.transport import Channel, Wire
from hetero_strategy.layout.registry import MESSAGE_CTAS, balance_sets, context_sets, exchange_sets, rank_sets
from hetero_strategy.layout.spec import Placement
from hetero_strategy.schedule.action import StageGraph

SENDING, RECEIVING = 2 * 2**20, 10 * 2**20
"""Bytes of NCCL's buffers for a channel to another rank, and for one from another rank: all its protocols (LL 0.5,
LL128 4.7, SIMPLE 4 MiB), in pages of 2 MiB (``transport/p2p.cc``, NCCL 2.28)."""
BETWEEN_NODES = 32 * 2**20
"""Approximate bytes that a communicator keeps for all messages to and from other nodes."""


@dataclass(frozen=True)
class Meetings:
    """The ranks that may meet: a rank in a row of ``sources`` may send to other ranks in that row of ``targets``.

    Sets of one side have no rank in common.
    """

    sources: Int64[np.ndarray, "sets ranks"]
    targets: Int64[np.ndarray, "sets other_ranks"]

    def __bool__(self) -> bool:
        """Return whether any two different ranks meet."""
        return self.sources.shape[1] > 1 or self.targets.shape[1] > 1 or bool((self.sources != self.targets).any())

    @property
    def ranks(self) -> list[int]:
        """Return all ranks of both sides, ascending."""
        return [int(rank) for rank in np.union1d(self.sources, self.targets)]

    @property
    def back(self) -> Meetings:
        """Return the meetings of the opposite direction."""
        return Meetings(self.targets, self.sources)

    def peers(self, rank: int) -> set[int]:
        """Return the ranks to which a rank may send."""
        return {int(other) for other in self.targets[(self.sources == rank).any(axis=1)].ravel()} - {rank}


def components(ways: Iterable[Meetings]) -> list[tuple[int, ...]]:
    """List the smallest sets of more than one rank such that no rank meets a rank of another set; ascending.

    Two stages of two ranks each that pass rows in pairs:
    sources ``[[0], [1]]``, targets ``[[2], [3]]`` -> ``[(0, 2), (1, 3)]``.
    """
    joined: dict[int, set[int]] = {}
    for way in ways:
        for sources, targets in zip(way.sources.tolist(), way.targets.tolist(), strict=True):
            ranks = {*sources, *targets}
            for rank in [*ranks]:
                ranks |= joined.get(rank, set())
            joined.update(dict.fromkeys(ranks, ranks))
    sets = {id(ranks): ranks for ranks in joined.values()}
    return sorted(tuple(sorted(ranks)) for ranks in sets.values() if len(ranks) > 1)


def connect(graph: StageGraph, channels: Mapping[tuple[int, bool], Channel], rank: int) -> None:
    """Connect this rank to every rank with which it may ever exchange rows; a collective over the world.

    Args:
        graph: all stages.
        channels: channels of this rank, by number of the stage edge and whether gradients travel.
        rank: global rank.
    """
    for number in range(len(graph.edges)):
        for back, meetings in meetings_of(graph, number).items():
            if (channel := channels.get((number, back))) is None:
                continue
            for wire, met in zip(channel.hops, meetings, strict=True):
                if wire.group is not None:
                    _meet(wire, met, rank, channel.device)


def channel_sets(graph: StageGraph, number: int) -> dict[bool, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Return the rank sets of each hop in which an edge's rows travel (False), and their gradients if there are any
    (True).

    Edges between cohorts of the same two stages share them. A set holds only ranks that may meet, since NCCL opens
    fewer channels between two ranks of a wider group. A hop in which no two ranks meet has no sets: rows stay on their
    ranks, or, in the second hop, the ranks of a stage have no row in common.
    """
    edges = _edge_meetings(graph, number)
    first, second = ({back: components(way[back][hop] for way in edges) for back in edges[0]} for hop in (0, 1))
    return {back: (first[back], second[back]) for back in edges[0]}


def _edge_meetings(graph: StageGraph, number: int) -> list[dict[bool, tuple[Meetings, Meetings]]]:
    """Return who meets on each edge between the same two stages as an edge's, of any cohorts."""
    return [meetings_of(graph, n) for n, first in enumerate(graph.firsts) if first == graph.firsts[number]]


def process_groups(
    placement: Placement, graph: StageGraph, owners: Iterable[tuple[int, ...]], device_type: str
) -> dict[str, list[tuple[int, ...]]]:
    """Predict the process groups of a run: purpose -> the ranks of each group. Pure.

    On CUDA the groups of modules and edges use NCCL, and each costs every member memory unless it has one rank only.
    Rank sets without a common rank are created at once, see :func:`~hetero_strategy.layout.registry.disjoint`.

    Args:
        owners: pairs that share a weight, see :func:`~hetero_strategy.parallelize.gradients.tied_rank_sets`.
        device_type: ``"cuda"``, where each channel is a new group, or ``"cpu"``, where channels of one rank set share
            it.

    Returns:
        ``modules``: the world, axes of meshes, the owners of shared weights, each rank alone, context-parallel ranks,
            ranks that exchange rows of experts, and ranks that sum choices of experts;
        ``edges``: channels that do not share a group of modules; ``host``: groups of all ranks for checkpoints and for
            loading.
    """
    everyone, modules = tuple(range(placement.world_size)), module_groups(placement, owners, graph.balanced)
    ways = [hops for number in sorted({*graph.firsts}) for hops in channel_sets(graph, number).values()]
    edges = [ranks for hops in ways for ranks in chain.from_iterable(hops)]
    if device_type != "cuda":
        edges = [ranks for ranks in dict.fromkeys(edges) if ranks not in set(modules)]
    return {"modules": modules, "edges": edges, "host": [everyone, everyone]}


def module_groups(
    placement: Placement, owners: Iterable[tuple[int, ...]], balanced: Collection[str]
) -> list[tuple[int, ...]]:
    """Predict the process groups of a run's modules, see :func:`process_groups`. Pure."""
    everyone = tuple(range(placement.world_size))
    sets = [ranks for ranks in rank_sets(placement, owners) if len(ranks) > 1]
    return [
        *dict.fromkeys([everyone, *sets, *((rank,) for rank in everyone)]),
        *context_sets(placement),
        *exchange_sets(placement),
        *balance_sets(placement, balanced),
    ]


def message_buffers(graph: StageGraph, world_size: int, ranks_per_node: int = 8) -> Int64[np.ndarray, "ranks"]:
    """Predict the bytes of NCCL's message buffers on every rank. Pure.

    On a node they are kept for each channel to and from each partner; to other nodes, in a pool of the communicator.
    """
    bytes_ = np.zeros(world_size, dtype=np.int64)
    for number in sorted({*graph.firsts}):
        edge_meetings = _edge_meetings(graph, number)
        for back in edge_meetings[0]:
            for hop in (0, 1):
                ways = [way[back][hop] for way in edge_meetings]
                (to, far), (of, beyond) = (_near(each, ranks_per_node) for each in (ways, [w.back for w in ways]))
                for ranks in components(ways):
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
    """Return the channels between two ranks of a group for messages (``graph/paths.cc``, NCCL 2.29)."""
    channels = MESSAGE_CTAS
    while not one_node and channels > 1 and channels * -(-ranks // 8) > MESSAGE_CTAS:
        channels //= 2
    return channels


def meetings_of(graph: StageGraph, number: int) -> dict[bool, tuple[Meetings, Meetings]]:
    """Return who meets on an edge in the first and in the second hop, for its rows (False) and gradients if any (True).

    The second hop is among ranks that get the same rows. Between stages of a module, rows keep their instance and their
    part of it. Between modules, any instance may send to any other: balancing decides that anew in every step.
    """
    source, target = (graph.stages[stage] for stage in graph.edges[number])
    if len({stage.module for stage in graph.edges[number]}) == 1:
        lie = source.row_sharding
        first = Meetings(lie.rank_sets(source.grid), lie.rank_sets(target.grid))
    else:
        first = Meetings(source.grid.reshape(1, -1), target.grid.reshape(1, -1))
    there, back = (stage.row_sharding.rank_sets(stage.grid) for stage in (target, source))
    rows, gradients = (first, Meetings(there, there)), (first.back, Meetings(back, back))
    return {False: rows, True: gradients} if source.backward else {False: rows}


def _meet(wire: Wire, meetings: Meetings, rank: int, device: torch.device) -> None:
    """Send one message to each rank to which this one may send, and receive one from each that may send to it."""
    to, of = meetings.peers(rank), meetings.back.peers(rank)
    for partner in rounds(meetings.ranks, rank):
        if ways := [sends for sends, there in ((True, to), (False, of)) if partner in there]:
            messages = [transport.WireMessage(sends, torch.zeros(1, device=device), partner) for sends in ways]
            for work in transport.start_messages(wire, messages):
                work.wait()


def rounds(ranks: Sequence[int], rank: int) -> Iterator[int]:
    """Yield the ranks that a rank meets, round by round (circle method): in no round do two ranks meet the same one."""
    places = [*ranks, -1] if len(ranks) % 2 else [*ranks]
    if rank not in places:
        return
    turning, me = len(places) - 1, places.index(rank)
    for number in range(turning):
        # The last place is fixed; two other places meet if their sum is twice the round.
        other = (2 * number - me) % turning if me < turning else number
        if me < turning and other == me:
            other = turning
        if places[other] >= 0:
            yield places[other]
