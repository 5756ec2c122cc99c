"""Balance that leaves items on the node where they are, unless balance itself demands that they move."""

from __future__ import annotations

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance.greedy import deal, whole
from hetero_strategy.plan.nodes.level import even_out, narrow, spread
from hetero_strategy.plan.nodes.propose import place_items
from hetero_strategy.plan.nodes.slots import cell_of

_SCATTER = 40503
"""Odd, near 2^16 divided by the golden ratio: neighbouring item numbers come far apart when multiplied by it."""

_FEW = 16
"""Items per slot up to which the plain balance, its batches permuted, may let less leave: it is looked at too."""

_LAST = 64
"""Items among which the one is chosen that completes what leaves a node."""


def balance_near_home(
    weights: np.ndarray, home: np.ndarray, slot_node: np.ndarray, *, tolerance: float = 0.002
) -> np.ndarray:
    """Slot of each item, such that slots are level and few items leave their node.

    Permuting whole balanced batches (OrchMLLM section 5.2.2) can save little where each batch has items from
    everywhere. Here only what a node has above its part of the total leaves it, to nodes which have less; then each
    node levels its own slots. A load is at most ``1 + tolerance`` times the least that any balance must reach; or,
    where that is not found (few items, or large ones), what the longest-processing-time rule reaches over all slots.

    Args:
        weights: of each item, additive (padded batches have no such cost), float64 ``[n]``, not negative.
        home: node of each item, int64 ``[n]``; one without slots, as -1, lets the item go anywhere.
        slot_node: node of each slot, int64 ``[slots]``. Slots are equally fast.
        tolerance: how much of the largest load may be given for what stays.

    Returns:
        Slot of each item, int64 ``[n]``.

    Raises:
        ConfigError: no slots, a negative tolerance, weights that are negative or not finite, or lengths that differ.
    """
    weights = np.asarray(weights, dtype=np.float64)
    _check(weights, home, slot_node, tolerance)
    nodes, of_slot = np.unique(slot_node, return_inverse=True)
    cell = cell_of(home, nodes)
    lowest = _lowest(weights, len(slot_node))
    near, largest = _near(weights, cell, of_slot, lowest, tolerance)
    if largest <= lowest * (1.0 + tolerance) and len(weights) > _FEW * len(slot_node):
        return near
    plain = _plain(weights, cell, nodes, slot_node)
    reached = float(np.bincount(plain, weights, len(slot_node)).max())
    if largest > reached * (1.0 + tolerance):
        near, largest = _near(weights, cell, of_slot, reached, tolerance)
    crossing = [float(weights[(cell >= 0) & (cell != of_slot[slot])].sum()) for slot in (near, plain)]
    return near if largest <= reached * (1.0 + tolerance) and crossing[0] <= crossing[1] else plain


def _near(
    weights: np.ndarray, cell: np.ndarray, of_slot: np.ndarray, lowest: float, tolerance: float
) -> tuple[np.ndarray, float]:
    """Slot of each item, and the largest load: meant to be at most ``lowest * (1 + tolerance)``, but not assured."""
    slots = np.bincount(of_slot)
    cell = _settle(weights, cell, slots, lowest * (1.0 + tolerance / 2))
    numbers = np.argsort(of_slot, kind="stable")  # slots by cell
    first = ragged.starts(slots)
    size = (np.arange(int(slots.max()))[None, :] < slots[:, None]).astype(np.float64)
    slot = numbers[first[cell] + spread(weights, cell, np.zeros(size.shape), size)]
    limit = lowest * (1.0 + tolerance)
    load = np.bincount(slot, weights, len(of_slot))
    for group in (of_slot, np.zeros_like(of_slot)):  # inside nodes, then, where that does not do, across them
        if load.max() > limit:
            slot = even_out(weights, slot, load, group, limit)
            load = np.bincount(slot, weights, len(of_slot))
    return slot, float(load.max())


def _lowest(weights: np.ndarray, slots: int) -> float:
    """No balance has a smaller largest load: the mean, the heaviest item, and two of the ``slots + 1`` heaviest."""
    lowest = max(float(weights.sum()) / slots, float(weights.max(initial=0.0)))
    if len(weights) > slots and 2 * float(weights.max()) > lowest:
        heavy = np.partition(weights, len(weights) - slots - 1)[len(weights) - slots - 1 :]
        lowest = max(lowest, float(np.partition(heavy, 1)[:2].sum()))
    return lowest


def _settle(weights: np.ndarray, cell: np.ndarray, slots: np.ndarray, limit: float) -> np.ndarray:
    """Cell of each item: its home's, except for items without one and what a cell has above ``limit`` per slot."""
    count, room = len(slots), slots * limit
    homed = np.flatnonzero(cell >= 0)
    load = np.bincount(cell[homed], weights[homed], count)
    over = load - room
    moving = cell < 0
    crowded = np.flatnonzero(over > 0)
    if len(crowded):
        # In a scattered order, so that no instance of a node sends most of what leaves it.
        mine = homed[over[cell[homed]] > 0]
        mine = mine[np.argsort(((mine * _SCATTER) & 0xFFFF).astype(np.uint16), kind="stable")]
        mine = mine[np.argsort(narrow(cell[mine]), kind="stable")]
        of = (np.cumsum(over > 0) - 1)[cell[mine]]
        running = np.cumsum(weights[mine])
        begin = np.searchsorted(of, np.arange(len(crowded)))
        within = running - (running - weights[mine])[begin][of]
        leaves = within <= over[crowded][of]
        moving[mine[leaves]] = True
        number = np.bincount(of[leaves], minlength=len(crowded))
        rest = over[crowded] - np.bincount(of[leaves], weights[mine[leaves]], len(crowded))
        near = ~leaves & (np.arange(len(mine)) < (begin + number + _LAST)[of])
        moving[_last(weights, mine[near], of[near], rest)] = True
        load = np.bincount(cell[~moving], weights[~moving], count)
    pool = np.flatnonzero(moving)
    if not len(pool):
        return cell
    settled = cell.copy()
    column = spread(
        weights[pool], np.zeros(len(pool), dtype=np.int64), load[None, :], slots[None, :].astype(np.float64)
    )
    settled[pool] = column
    return settled


def _last(weights: np.ndarray, items: np.ndarray, group: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Of each group's items, the lightest that weighs at least ``rest``; none where none does, or nothing is left."""
    enough = (weights[items] >= rest[group]) & (rest[group] > 0)
    items, group = items[enough], group[enough]
    order = np.lexsort((items, weights[items], group))
    items, group = items[order], group[order]
    first = np.ones(len(items), dtype=bool)
    first[1:] = group[1:] != group[:-1]
    chosen: np.ndarray = items[first]
    return chosen


def _plain(weights: np.ndarray, cell: np.ndarray, nodes: np.ndarray, slot_node: np.ndarray) -> np.ndarray:
    """The longest-processing-time rule over all slots, then whole batches to the nodes that hold most of them."""
    units = whole(weights, len(slot_node))
    order = np.argsort(-units, kind="stable")
    batch = np.empty(len(weights), dtype=np.int64)
    batch[order], _ = deal(units[order], len(slot_node))
    homed = np.flatnonzero(cell >= 0)
    return place_items(weights[homed], cell[homed], batch[homed], nodes, slot_node)[batch]


def _check(weights: np.ndarray, home: np.ndarray, slot_node: np.ndarray, tolerance: float) -> None:
    if len(home) != len(weights) or not len(slot_node):
        raise ConfigError(
            f"data.nodes: {len(weights)} weights, {len(home)} homes and {len(slot_node)} slots; "
            "give one home per weight and at least one slot"
        )
    if not tolerance >= 0:
        raise ConfigError(f"data.nodes: tolerance {tolerance} is negative; give 0 or more")
    if len(weights) and not (weights.min() >= 0 and np.isfinite(weights.max())):
        raise ConfigError(f"data.nodes: weights go from {weights.min()} to {weights.max()}; give finite ones from 0")
