"""Placement of balanced items near the samples they belong to, as bytes between nodes are the slow ones. Pure.

Balance decides which items share an instance, but not the number of that instance:

* :func:`balance_near_home` balances so that only the surplus of a node leaves it. Batches change, loads hardly.
* :func:`place_batches` permutes whole balanced batches over the slots. No load changes.

Nodes that have slots are numbered 0, 1, ... in here, while the node numbers of callers may have gaps. Node -1 has none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Int64, Num

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError, register
from hetero_strategy.plan.greedy import deal, exchange, whole

Rearrangement = Callable[
    [
        Num[np.ndarray, "items"],
        Int64[np.ndarray, "items"],
        Int64[np.ndarray, "items"],
        Int64[np.ndarray, "sources"],
        Int64[np.ndarray, "slots"],
    ],
    Int64[np.ndarray, "slots"],
]
"""Permutes balanced batches over slots (the instances of a module), with the arguments of :func:`place_batches`."""
REARRANGEMENTS: dict[str, Rearrangement | None] = {"home": None, "none": None}
"""Rearrangements by name; ``home`` and ``none`` are built in."""

TOLERANCE = 0.002
"""Share by which the largest load may rise so that more items stay."""

_SCATTER = 40503
"""An odd number near 2^16 divided by the golden ratio: products with it scatter neighbouring item numbers."""

_FEW = 16
"""Items per slot up to which a plain balance is also tried and its batches placed, as less may then leave nodes."""

_LAST = 64
"""Items among which the last one that leaves a node is chosen."""

_CUTS = (0.3, 0.55, 0.75, 0.88, 0.96, 1.0)
"""Parts of a group's items, heavy to light, that are dealt together: each levels what the one before left uneven."""

_SINGLE = 24
"""Most items of a group that are dealt one by one: each costs some numpy calls."""


def register_rearrangement(name: str, rearrangement: Rearrangement) -> None:
    """Make a rearrangement known by its name to ``BalanceConfig(rearrange=name)``.

    Raises:
        ConfigError: another rearrangement has this name.
    """
    register(REARRANGEMENTS, name, rearrangement, "balance: rearrangement", ConfigError)


def balance_near_home(
    weights: Float64[np.ndarray, "items"], home: Int64[np.ndarray, "items"], slot_node: Int64[np.ndarray, "slots"]
) -> Int64[np.ndarray, "items"]:
    """Find the slot of each item, so that slots are level and few items leave their node.

    Permuting whole balanced batches saves little if each batch has items from everywhere. Here only a node's surplus
    over its part of the total leaves it, for nodes that have less; then each node levels its own slots. The largest
    load is at most ``1 + TOLERANCE`` times the least that any balance must reach. If no such balance is found (few
    items, or large ones), it is at most that many times the largest load of the longest-processing-time rule over all
    slots.

    Args:
        weights: costs, not negative.
        home: node of each item. An item whose node has no slots, such as -1, may go anywhere.
        slot_node: node of each slot.
    """
    nodes, node_of_slot = np.unique(slot_node, return_inverse=True)
    node = number_nodes(home, nodes)
    lowest = _lowest(weights, len(slot_node))
    near, largest = _near(weights, node, node_of_slot, lowest)
    if largest <= lowest * (1.0 + TOLERANCE) and len(weights) > _FEW * len(slot_node):
        return near
    plain = _plain(weights, node, node_of_slot)
    plain_largest = float(np.bincount(plain, weights, len(slot_node)).max())
    if largest > plain_largest * (1.0 + TOLERANCE):
        near, largest = _near(weights, node, node_of_slot, plain_largest)
    crossing = [float(weights[(node >= 0) & (node != node_of_slot[slot])].sum()) for slot in (near, plain)]
    return near if largest <= plain_largest * (1.0 + TOLERANCE) and crossing[0] <= crossing[1] else plain


def place_batches(
    size: Num[np.ndarray, "items"],
    source: Int64[np.ndarray, "items"],
    batch: Int64[np.ndarray, "items"],
    source_node: Int64[np.ndarray, "sources"],
    slot_node: Int64[np.ndarray, "slots"],
) -> Int64[np.ndarray, "slots"]:
    """Choose a slot for each balanced batch, so that few rows leave the node of their source.

    Batches propose to nodes in rounds (:func:`propose`). The result sends no more in total than batch ``b`` on slot
    ``b``. With two slots on each of two nodes, batches 0 and 2 go to the second node, where their rows are:

    >>> node = np.array([0, 0, 1, 1])
    >>> place_batches(np.array([9, 5, 6, 8]), np.array([2, 0, 3, 1]), np.arange(4), node, node)
    array([2, 0, 3, 1])

    Args:
        size: rows or bytes of each item.
        source: instance at the other end of the edge that has the item's sample.
        batch: balanced batch of each item. There are as many batches as slots.
        source_node: node of each source.
        slot_node: node of each slot.
    """
    nodes, node_of_slot = np.unique(slot_node, return_inverse=True)
    node = number_nodes(source_node, nodes)[source]
    homed = node >= 0
    key, shape = batch[homed] * len(nodes) + node[homed], (len(slot_node), len(nodes))
    gains = np.bincount(key, size[homed], len(slot_node) * len(nodes)).reshape(shape)
    slot_of = np.arange(len(slot_node))
    chosen = propose(gains, np.bincount(node_of_slot, minlength=len(nodes)))
    if gains[slot_of, chosen].sum() > gains[slot_of, node_of_slot].sum():
        slot_of[ragged.argsort_small(chosen)] = ragged.argsort_small(node_of_slot)
    return slot_of


def propose(gains: Num[np.ndarray, "batches nodes"], room: Int64[np.ndarray, "nodes"]) -> Int64[np.ndarray, "batches"]:
    """Choose the node of each batch by rounds of proposals, from what the batch gains on each node.

    Every batch proposes to the node with room on which it gains most, and every node accepts the batches that gain most
    there. A batch that gains nothing on any node with room waits until the other batches are placed, and takes a slot
    that is left.

    Args:
        room: number of batches that each node takes.
    """
    node, room = np.full(len(gains), -1, dtype=np.int64), room.copy()
    waiting, gain = np.arange(len(gains)), gains
    while len(waiting):
        best = np.argmax(gain, axis=1)
        value = gain[np.arange(len(gain)), best]
        order = np.lexsort((-value, best))
        order = order[value[order] > 0]
        wanted = best[order]
        rank = np.arange(len(wanted)) - np.searchsorted(wanted, wanted)  # among equal wishes
        accepted = rank < room[wanted]
        node[waiting[order[accepted]]] = wanted[accepted]
        room -= np.bincount(wanted[accepted], minlength=len(room))
        refused = np.sort(order[~accepted])
        waiting, gain = waiting[refused], np.where(room > 0, gain[refused], 0.0)
    node[node < 0] = np.repeat(np.arange(len(room)), room)
    return node


def number_nodes(node: Int64[np.ndarray, "sources"], nodes: Int64[np.ndarray, "nodes"]) -> Int64[np.ndarray, "sources"]:
    """Return the position of each node number in ``nodes`` (ascending), or -1 if it is not among them."""
    if len(node) and nodes[0] >= 0 and nodes[-1] < 16 * len(nodes) + 64:  # a table is ten times faster than a search
        table = np.full(int(nodes[-1]) + 3, -1, dtype=np.int64)  # one entry more on either side, for numbers outside
        table[nodes + 1] = np.arange(len(nodes))
        return table[np.clip(node, -1, nodes[-1] + 1) + 1]
    position = np.minimum(np.searchsorted(nodes, node), len(nodes) - 1)
    return np.where(nodes[position] == node, position, -1)


def _near(weights: np.ndarray, node: np.ndarray, node_of_slot: np.ndarray, lowest: float) -> tuple[np.ndarray, float]:
    """Find the slot of each item, and the largest load, which is meant to be at most ``lowest * (1 + TOLERANCE)``."""
    slots = np.bincount(node_of_slot)
    node = _settle(weights, node, slots, lowest * (1.0 + TOLERANCE / 2))
    numbers, first = ragged.group_by(node_of_slot, len(slots))  # slots by node
    size = (np.arange(int(slots.max()))[None, :] < slots[:, None]).astype(np.float64)
    slot = numbers[first[node] + _spread(weights, node, np.zeros(size.shape), size)]
    limit = lowest * (1.0 + TOLERANCE)
    load = np.bincount(slot, weights, len(node_of_slot))
    for group in (node_of_slot, None):  # inside nodes and then, if that is not enough, across them
        if load.max() > limit:
            falling = heavy_first(weights, np.zeros(len(weights), dtype=np.int64))
            slot[falling] = exchange(weights[falling], slot[falling], len(node_of_slot), limit, group)
            load = np.bincount(slot, weights, len(node_of_slot))
    return slot, float(load.max())


def _lowest(weights: np.ndarray, slots: int) -> float:
    """Return a lower bound of the largest load.

    It is the largest of the mean, the heaviest item, and the sum of the two least of the ``slots + 1`` heaviest items.
    """
    lowest = max(float(weights.sum()) / slots, float(weights.max(initial=0.0)))
    if len(weights) > slots and 2 * float(weights.max()) > lowest:
        heavy = np.partition(weights, len(weights) - slots - 1)[len(weights) - slots - 1 :]
        lowest = max(lowest, float(np.partition(heavy, 1)[:2].sum()))
    return lowest


def _settle(weights: np.ndarray, node: np.ndarray, slots: np.ndarray, limit: float) -> np.ndarray:
    """Choose the node of each item: its home, unless it has none or belongs to the surplus over ``limit`` a slot."""
    count, room = len(slots), slots * limit
    homed = np.flatnonzero(node >= 0)
    load = np.bincount(node[homed], weights[homed], count)
    over = load - room
    moving = node < 0
    crowded = np.flatnonzero(over > 0)
    if len(crowded):
        # In a scattered order, so that no instance of a node sends most of what leaves it.
        items = homed[over[node[homed]] > 0]
        items = items[np.argsort(((items * _SCATTER) & 0xFFFF).astype(np.uint16), kind="stable")]
        items = items[ragged.argsort_small(node[items])]
        owner = (np.cumsum(over > 0) - 1)[node[items]]  # which of the crowded nodes
        running = np.cumsum(weights[items])
        begin = np.searchsorted(owner, np.arange(len(crowded)))
        within = running - (running - weights[items])[begin][owner]
        leaves = within <= over[crowded][owner]
        moving[items[leaves]] = True
        number = np.bincount(owner[leaves], minlength=len(crowded))
        rest = over[crowded] - np.bincount(owner[leaves], weights[items[leaves]], len(crowded))
        near = ~leaves & (np.arange(len(items)) < (begin + number + _LAST)[owner])
        moving[_last(weights, items[near], owner[near], rest)] = True
        load = np.bincount(node[~moving], weights[~moving], count)
    pool = np.flatnonzero(moving)
    if not len(pool):
        return node
    settled = node.copy()
    together = np.zeros(len(pool), dtype=np.int64)
    settled[pool] = _spread(weights[pool], together, load[None, :], slots[None, :].astype(np.float64))
    return settled


def _last(weights: np.ndarray, items: np.ndarray, group: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Find the lightest item of each group that weighs at least ``rest``; none if no item does or ``rest <= 0``."""
    enough = (weights[items] >= rest[group]) & (rest[group] > 0)
    items, group = items[enough], group[enough]
    order = np.lexsort((items, weights[items], group))
    return np.asarray(items[order][np.unique(group[order], return_index=True)[1]])


def _plain(weights: np.ndarray, node: np.ndarray, node_of_slot: np.ndarray) -> np.ndarray:
    """Find the slot of each item by the longest-processing-time rule, whole batches near what they hold."""
    units = whole(weights, len(node_of_slot))
    order = np.argsort(-units, kind="stable")
    batch = np.empty(len(weights), dtype=np.int64)
    batch[order], _ = deal(units[order], len(node_of_slot))
    homed = np.flatnonzero(node >= 0)
    nodes = np.arange(int(node_of_slot.max()) + 1)
    return place_batches(weights[homed], node[homed], batch[homed], nodes, node_of_slot)[batch]


def _spread(
    weights: Float64[np.ndarray, "items"],
    group: Int64[np.ndarray, "items"],
    load: Num[np.ndarray, "groups width"],
    size: Float64[np.ndarray, "groups width"],
) -> Int64[np.ndarray, "items"]:
    """Find the column of each item's bin, among the bins of its group, so that ``load / size`` becomes level.

    The heaviest items go one by one to the lowest bin, all groups at once, as in LPT. The rest is dealt in parts, heavy
    to light, by :func:`_deal`. A bin is then off by at most half an item at each end, which the next part, with lighter
    items, corrects.

    Args:
        weights: weight of each item, not negative.
        load: present load of each bin.
        size: relative capacity of each bin; 0 fills the row of a group with fewer than ``width`` bins.
    """
    column = np.zeros(len(weights), dtype=np.int64)
    groups, width = load.shape
    if width == 1 or not len(weights):
        return column
    order = heavy_first(weights, group)
    count = np.bincount(group, minlength=groups)
    first = ragged.starts(count)
    load, rows = np.where(size > 0, load, np.inf), np.arange(groups)
    single = np.minimum(count, min(2 * width, _SINGLE))
    for turn in range(int(single.max())):
        taking = rows[single > turn]
        items = order[first[taking] + turn]
        lowest = np.argmin((load[taking] + weights[items][:, None]) / np.maximum(size[taking], 1e-300), axis=1)
        load[taking, lowest] += weights[items]
        column[items] = lowest
    begin = single
    for cut in _CUTS:
        end = np.maximum(begin, np.rint(count * cut).astype(np.int64))
        length = end - begin
        if length.any():
            items = order[ragged.expand(first + begin, length)]
            column[items], load = _deal(weights[items], length, load, size)
        begin = end
    return column


def _deal(weights: np.ndarray, length: np.ndarray, load: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill each group's bins with its items, ``length[g]`` of ``weights`` in a row, up to a common level.

    With loads 0 and 4 and three items of 2, the common level is (0 + 4 + 6) / 2 = 5: the first bin needs 5. The items'
    middles in their running sum are 1, 3 and 5, so the first two belong to it:

    >>> _deal(np.array([2.0, 2.0, 2.0]), np.array([3]), np.array([[0.0, 4.0]]), np.ones((1, 2)))
    (array([0, 0, 1]), array([[4., 6.]]))

    Returns:
        The column of each item's bin, int64 ``[n]``, and the loads afterwards, float64 ``[groups, width]``.
    """
    groups, width = load.shape
    running, ends = ragged.offsets(weights), ragged.offsets(length)
    height = load / np.maximum(size, 1e-300)
    order = np.argsort(height, axis=1, kind="stable")
    height = np.take_along_axis(height, order, axis=1)
    start, part = np.take_along_axis(load, order, axis=1), np.take_along_axis(size, order, axis=1)
    # Water level over the j lowest bins; the right j is the last whose own height lies below it.
    total = np.diff(running[ends])[:, None]
    real = part > 0
    level = (total + np.cumsum(np.where(real, start, 0.0), axis=1)) / np.maximum(np.cumsum(part, axis=1), 1e-300)
    last = np.maximum(np.sum(real & (level > height), axis=1) - 1, 0)[:, None]
    surface = np.take_along_axis(level, last, axis=1)
    need = np.where(real, np.maximum(0.0, part * surface - np.where(real, start, 0.0)), 0.0)
    # Cut the running sum where a bin has what it needs: an item belongs to the bin in which its middle lies.
    until = running[ends[:-1]][:, None] + np.cumsum(need, axis=1)
    cut = np.searchsorted(running[:-1] + weights / 2, until.ravel()).reshape(groups, width)
    cut = np.clip(cut, ends[:-1, None], ends[1:, None])
    cut = np.where(np.arange(width) >= last, ends[1:, None], cut)
    begins = np.concatenate([ends[:-1, None], cut[:, :-1]], axis=1)
    column = np.repeat(order.ravel(), (cut - begins).ravel())
    loads = np.empty_like(load)
    np.put_along_axis(loads, order, start + (running[cut] - running[begins]), axis=1)
    return column, loads


def heavy_first(weights: Float64[np.ndarray, "items"], group: Int64[np.ndarray, "items"]) -> Int64[np.ndarray, "items"]:
    """Sort items by group, heaviest first up to 1/65535 of the heaviest, ties by number."""
    top = float(weights.max(initial=0.0)) or 1.0
    light = np.uint16(65535) - (weights * (65535 / top)).astype(np.uint16)
    order = ragged.argsort_small(light)
    return order if group.max(initial=0) == 0 else order[ragged.argsort_small(group[order])]
