"""OrchMLLM's balancing of modules that pad their items (arXiv:2503.23830, section 5.1 and appendix A).

Modules of this library never pad. If your own module pads, import this file. It registers two names for
``BalanceConfig(policy=...)``; costs in reports still count each item's own rows:

* ``padded``: every item of a batch costs what the longest costs (algorithm 2).
* ``conv_transformer``: only attention is padded (algorithm 5).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from hetero_strategy.plan.balance import Cost, register_policy
from hetero_strategy.plan.greedy import deal


def padded(falling: Int64[np.ndarray, "items"], bins: int, cost: Cost | None = None) -> Int64[np.ndarray, "items"]:
    """Find the bin of each item by algorithm 2: the least bound on items x longest that ``bins`` batches keep.

    It is as printed but for two slips: the search starts with the longest item's bound, not the shortest's (which
    nothing might fit), and the batches belong to the bound found, not to the last one tried. Costs do not count.
    """
    n, rising = len(falling), np.ascontiguousarray(falling[::-1], dtype=np.int64).data

    def least_batches(bound: int) -> list[int] | None:
        """Return the starts of the batches; None if there are more than ``bins``."""
        starts: list[int] = []
        at = 0
        while at < n:
            if len(starts) == bins:
                return None
            starts.append(at)
            # items x last item's length grows with every item: bisect for the last that fits
            low, high = at + 1, n
            while low < high:
                middle = (low + high + 1) // 2
                if (middle - at) * rising[middle - 1] <= bound:
                    low = middle
                else:
                    high = middle - 1
            at = low
        return starts

    left = int(falling.max(initial=0))
    right = left * (n // bins + 1)
    while left < right:
        middle = (left + right) // 2
        if least_batches(middle) is not None:
            right = middle
        else:
            left = middle + 1
    starts = least_batches(right) or []
    return np.repeat(np.arange(len(starts)), np.diff([*starts, n]))[::-1]


def conv_transformer(
    falling: Int64[np.ndarray, "items"], bins: int, cost: Cost | None = None
) -> Int64[np.ndarray, "items"]:
    """Find the bin of each item by algorithm 5, for padded attention.

    Items enter a batch while (items + 1) x length is within the largest load of algorithm 1; the remaining items go to
    the batch with the least sum of lengths. The algorithm is as printed except for one slip: the first phase ends with
    ``bins`` batches, not one more. Costs do not count.
    """
    n, falling = len(falling), np.ascontiguousarray(falling, dtype=np.int64)
    bound = int(deal(falling, bins)[1].max(initial=0))
    counts, done = np.zeros(bins, dtype=np.int64), 0
    for batch in range(bins):
        first = done
        while done < n:
            # No later item is longer, so at least this many are within the bound; the first always stays.
            count = bound // int(falling[done]) if falling[done] else n - first
            if count <= done - first:
                break
            done = min(n, first + count)
        counts[batch] = done - first
    opened = np.repeat(np.arange(bins), counts)
    start = np.bincount(opened, weights=falling[:done], minlength=bins).astype(np.int64)
    return np.concatenate([opened, deal(falling[done:], bins, start)[0]])


register_policy("padded", padded)
register_policy("conv_transformer", conv_transformer)
