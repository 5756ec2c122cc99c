"""Balance that leaves items on the node where they are, unless balance itself demands that they move."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from hetero_strategy import ragged
from hetero_strategy.plan.balance.greedy import deal, exchange, whole
from hetero_strategy.plan.nodes.level import heavy_first, spread
from hetero_strategy.plan.nodes.propose import place_items
from hetero_strategy.plan.nodes.slots import cell_of

TOLERANCE = 0.002
"""How far the largest load may rise so that more items stay."""

_SCATTER = 40503
"""Odd, near 2^16 divided by the golden ratio: neighbouring item numbers come far apart when multiplied by it."""

_FEW = 16
"""Items per slot up to which permuting the batches of a plain balance is tried too, as less may leave then."""

_LAST = 64
"""Items among which the last one that leaves a node is chosen."""


def balance_near_home(
    weights: Float64[np.ndarray, "items"], home: Int64[np.ndarray, "items"], slot_node: Int64[np.ndarray, "slots"]
) -> Int64[np.ndarray, "items"]:
    """Find the slot of each item, so that slots are level and few items leave their node.

    Permuting whole balanced batches (OrchMLLM section 5.2.2) saves little where each batch has items from everywhere.
    Here only what a node has above its part of the total leaves it, for nodes that have less; then each node levels its
    own slots. The largest load is at most ``1 + TOLERANCE`` times the least that any balance must reach or, where that
    is not found (few items, or large ones), times what the longest-processing-time rule reaches over all slots.

    Args:
        weights: additive costs (padded batches have none), not negative.
        home: node of each item. An item whose node has no slots, such as -1, may go anywhere.
        slot_node: node of each slot. Slots are equally fast.
    """
    nodes, of_slot = np.unique(slot_node, return_inverse=True)
    cell = cell_of(home, nodes)
    lowest = _lowest(weights, len(slot_node))
    near, largest = _near(weights, cell, of_slot, lowest)
    if largest <= lowest * (1.0 + TOLERANCE) and len(weights) > _FEW * len(slot_node):
        return near
    plain = _plain(weights, cell, nodes, slot_node)
    reached = float(np.bincount(plain, weights, len(slot_node)).max())
    if largest > reached * (1.0 + TOLERANCE):
        near, largest = _near(weights, cell, of_slot, reached)
    crossing = [float(weights[(cell >= 0) & (cell != of_slot[slot])].sum()) for slot in (near, plain)]
    return near if largest <= reached * (1.0 + TOLERANCE) and crossing[0] <= crossing[1] else plain


def _near(weights: np.ndarray, cell: np.ndarray, of_slot: np.ndarray, lowest: float) -> tuple[np.ndarray, float]:
    """Slot of each item, and the largest load, which is meant to be at most ``lowest * (1 + TOLERANCE)``."""
    slots = np.bincount(of_slot)
    cell = _settle(weights, cell, slots, lowest * (1.0 + TOLERANCE / 2))
    numbers, first = ragged.group_by(of_slot, len(slots))  # slots by cell
    size = (np.arange(int(slots.max()))[None, :] < slots[:, None]).astype(np.float64)
    slot = numbers[first[cell] + spread(weights, cell, np.zeros(size.shape), size)]
    limit = lowest * (1.0 + TOLERANCE)
    load = np.bincount(slot, weights, len(of_slot))
    for group in (of_slot, None):  # inside nodes and then, if that is not enough, across them
        if load.max() > limit:
            falling = heavy_first(weights, np.zeros(len(weights), dtype=np.int64))
            slot[falling] = exchange(weights[falling], slot[falling], np.ones(len(of_slot)), limit, group)
            load = np.bincount(slot, weights, len(of_slot))
    return slot, float(load.max())


def _lowest(weights: np.ndarray, slots: int) -> float:
    """A bound of the largest load from the mean, the heaviest item, and two of the ``slots + 1`` heaviest items."""
    lowest = max(float(weights.sum()) / slots, float(weights.max(initial=0.0)))
    if len(weights) > slots and 2 * float(weights.max()) > lowest:
        heavy = np.partition(weights, len(weights) - slots - 1)[len(weights) - slots - 1 :]
        lowest = max(lowest, float(np.partition(heavy, 1)[:2].sum()))
    return lowest


def _settle(weights: np.ndarray, cell: np.ndarray, slots: np.ndarray, limit: float) -> np.ndarray:
    """Cell of each item: its home's, except for items without a home and what a cell has above ``limit`` per slot."""
    count, room = len(slots), slots * limit
    homed = np.flatnonzero(cell >= 0)
    load = np.bincount(cell[homed], weights[homed], count)
    over = load - room
    moving = cell < 0
    crowded = np.flatnonzero(over > 0)
    if len(crowded):
        # In a scattered order, so that no instance of a node sends most of what leaves it.
        items = homed[over[cell[homed]] > 0]
        items = items[np.argsort(((items * _SCATTER) & 0xFFFF).astype(np.uint16), kind="stable")]
        items = items[ragged.argsort_small(cell[items])]
        owner = (np.cumsum(over > 0) - 1)[cell[items]]  # which of the crowded cells
        running = np.cumsum(weights[items])
        begin = np.searchsorted(owner, np.arange(len(crowded)))
        within = running - (running - weights[items])[begin][owner]
        leaves = within <= over[crowded][owner]
        moving[items[leaves]] = True
        number = np.bincount(owner[leaves], minlength=len(crowded))
        rest = over[crowded] - np.bincount(owner[leaves], weights[items[leaves]], len(crowded))
        near = ~leaves & (np.arange(len(items)) < (begin + number + _LAST)[owner])
        moving[_last(weights, items[near], owner[near], rest)] = True
        load = np.bincount(cell[~moving], weights[~moving], count)
    pool = np.flatnonzero(moving)
    if not len(pool):
        return cell
    settled = cell.copy()
    together = np.zeros(len(pool), dtype=np.int64)
    settled[pool] = spread(weights[pool], together, load[None, :], slots[None, :].astype(np.float64))
    return settled


def _last(weights: np.ndarray, items: np.ndarray, group: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The lightest item of each group that weighs at least ``rest``; none where no item does or ``rest <= 0``."""
    enough = (weights[items] >= rest[group]) & (rest[group] > 0)
    items, group = items[enough], group[enough]
    order = np.lexsort((items, weights[items], group))
    return np.asarray(items[order][np.unique(group[order], return_index=True)[1]])


def _plain(weights: np.ndarray, cell: np.ndarray, nodes: np.ndarray, slot_node: np.ndarray) -> np.ndarray:
    """Slot of each item by the longest-processing-time rule, whole batches on the nodes that hold most of them."""
    units = whole(weights, len(slot_node))
    order = np.argsort(-units, kind="stable")
    batch = np.empty(len(weights), dtype=np.int64)
    batch[order], _ = deal(units[order], len(slot_node))
    homed = np.flatnonzero(cell >= 0)
    return place_items(weights[homed], cell[homed], batch[homed], nodes, slot_node)[batch]
