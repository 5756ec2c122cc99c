"""Which instance computes which items of a batch that is already drawn (post-balancing).

Pure and deterministic: ties are broken by item and bin number, so all ranks find the same assignment. Sources:
OrchMLLM (arXiv:2503.23830) section 5.1 and appendix A, DistTrain (arXiv:2408.04275) section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance.auto import automatic, greedy
from hetero_strategy.plan.balance.cost import Cost, Speeds, fit_cost, loads
from hetero_strategy.plan.balance.greedy import descending, whole
from hetero_strategy.plan.balance.limits import OverLimit, fits, keep_limit

__all__ = ["POLICIES", "Cost", "OverLimit", "balance", "fit_cost", "loads", "register_policy"]

Policy = Callable[[Int64[np.ndarray, "items"], int, Cost, Speeds], Int64[np.ndarray, "items"]]
"""(Lengths, longest first; number of bins; what a bin costs; speeds of bins) -> bin of each item. It has to be a
function of these alone, for all ranks must find the same."""
POLICIES: dict[str, Policy | None] = {}
"""By name; None: item ``k`` goes to bin ``k`` modulo bins, whatever it costs."""


def register_policy(name: str, policy: Policy | None) -> None:
    """Make a policy known by its name, in every process that makes plans.

    Raises:
        ConfigError: the name is taken by another one.
    """
    if POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"balance: policy {name!r} is known already; choose another name")


def _longest_first(lengths: np.ndarray, bins: int, cost: Cost, speeds: np.ndarray | None) -> np.ndarray:
    """Each item, longest first, to the least loaded bin (OrchMLLM algorithm 1), by costs without padding."""
    return greedy(whole(cost.alone(lengths), bins), bins, speeds)


register_policy("auto", automatic)  # greedy and exchanges, or the shortest runs where items are padded
register_policy("lpt", _longest_first)
register_policy("round_robin", None)  # as sampled


def balance(
    lengths: Int64[np.ndarray, "items"],
    bins: int,
    cost: Cost,
    *,
    policy: str = "auto",
    speeds: Speeds = None,
    limit: int | None = None,
) -> Int64[np.ndarray, "items"]:
    """Find the bin of each item so that the largest ``load / speed`` is small.

    Where the policy's assignment breaks the limit, the best one found that keeps it takes its place
    (:func:`~hetero_strategy.plan.balance.limits.keep_limit`), whatever the policy.

    Args:
        lengths: rows of each item inside the module, at least 0.
        bins: number of instances, of microbatches, or of both multiplied.
        policy: a name in :data:`POLICIES`.
        limit: most rows that a bin may hold (memory); None: any.

    Raises:
        ConfigError: no assignment was found that keeps the limit (:class:`OverLimit`), or a policy gave none.
    """
    if speeds is not None and not np.ptp(speeds):
        speeds = None
    if limit is not None and len(lengths):
        _check_limit(lengths, bins, limit)
    bin_of = _assigned(lengths, bins, cost, policy, speeds)
    if limit is None or not len(lengths) or fits(bin_of, bins, lengths, limit):
        return bin_of
    within_limit = keep_limit(lengths, bins, cost, speeds, limit)
    if within_limit is None:
        raise OverLimit(
            f"balance: no assignment of {len(lengths)} items with {int(lengths.sum())} rows in all to {bins} bins was "
            f"found with at most limit={limit} in each; raise the limit or give more bins (microbatches)."
        )
    return within_limit


def _assigned(lengths: np.ndarray, bins: int, cost: Cost, policy: str, speeds: np.ndarray | None) -> np.ndarray:
    if policy not in POLICIES:
        raise ConfigError(
            f"balance: no policy {policy!r} was registered in this process, which makes plans; call register_policy"
            " where all processes do, at the top of the script or of a module that it imports and not below"
            " if __name__ == '__main__': workers that are spawned, and actors of Ray, run nothing of that"
        )
    assign = POLICIES[policy]
    if assign is None:
        return np.arange(len(lengths), dtype=np.int64) % bins
    order = descending(lengths)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    given = np.asarray(assign(lengths[order], bins, cost, speeds))
    whole_numbers = given.shape == order.shape and (given.dtype.kind in "iu" or not given.size)
    if not whole_numbers or np.any((given < 0) | (given >= bins)):
        raise ConfigError(
            f"balance: policy {policy!r} gave {given.dtype} {list(given.shape)} for {len(order)} units and {bins} bins;"
            f" it has to give the bin of each unit, integers from 0 to {bins - 1}"
        )
    bin_of[order] = given
    return bin_of


def _check_limit(lengths: np.ndarray, bins: int, limit: int) -> None:
    longest, total = int(lengths.max()), int(lengths.sum())
    if longest > limit:
        raise OverLimit(
            f"balance: item {int(lengths.argmax())} has {longest} rows and no bin may hold more than limit={limit}; "
            "raise the limit or leave the item out."
        )
    if total > limit * bins:
        raise OverLimit(
            f"balance: {total} rows do not fit into {bins} bins of limit={limit}; give at least {-(-total // limit)} "
            "bins (microbatches) or raise the limit."
        )
