"""Balance: which instance computes which items of a batch that is already drawn (post-balancing).

Pure and deterministic: ties are broken by item and bin number, so all ranks find the same assignment. Costs are in
seconds if they were fitted (:func:`fit_cost`), otherwise in the unit of the coefficients. Sources: OrchMLLM
(arXiv:2503.23830) section 5.1 and appendix A, DistTrain (arXiv:2408.04275) section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64, Num
from scipy.optimize import nnls

from hetero_strategy.errors import ConfigError, register
from hetero_strategy.plan.greedy import deal, descending, exchange, whole

Policy = Callable[[Int64[np.ndarray, "items"], int, "Cost"], Int64[np.ndarray, "items"]]
"""(Lengths, longest first; number of bins; cost of a bin) -> bin of each item. It must be a function of these alone,
because all ranks must find the same assignment."""
POLICIES: dict[str, Policy | None] = {}
"""Policies by name; None: item ``k`` goes to bin ``k`` modulo bins, whatever it costs."""

DEEP = 256
"""Items per bin up to which the largest items enter a bound; further down the mean is as good."""
NEAR = 5e-4
"""Relative distance from the lower bound at which exchanging ends."""
BLENDS = 8
"""Bisections of the share that sizes have in the weights."""


@dataclass(frozen=True)
class Cost:
    """The time of one module over items with lengths l (rows inside the module): ``sum(fixed + linear * l + quadratic *
    l^2)``.

    It is OrchMLLM's form (equation 1) with a constant part per item added. Items of a microbatch lie end to end, so
    nothing is padded. If rows of samples do not see all earlier rows, the squares are those of
    :meth:`~hetero_strategy.plan.masks.AttentionRules.squares`.

    Raises:
        ConfigError: a coefficient is negative or not finite.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "fixed"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ConfigError(f"Cost: {name}={value} is no time per row; give a finite number >= 0.")

    def alone(
        self, lengths: Num[np.ndarray, "items"], squares: Float64[np.ndarray, "items"] | None = None
    ) -> Float64[np.ndarray, "items"]:
        """Return the cost of each item in a batch of its own.

        Args:
            squares: squares of the items' masks; None: those of their lengths, with which costs grow.
        """
        rows = np.asarray(lengths, dtype=np.float64)
        if squares is not None:
            costs = rows * self.linear + squares * self.quadratic
        elif self.quadratic:
            costs = rows * self.quadratic
            costs += self.linear
            costs *= rows
        else:
            costs = rows * self.linear
        if self.fixed:
            costs += self.fixed
        return costs


def loads(
    lengths: Int64[np.ndarray, "items"],
    bin_of: Int64[np.ndarray, "items"],
    bins: int,
    cost: Cost,
    squares: Float64[np.ndarray, "items"] | None = None,
) -> Float64[np.ndarray, "bins"]:
    """Return the cost of every bin, from the rows and the bin of each item; 0 for a bin without items.

    Args:
        squares: see :meth:`Cost.alone`.
    """
    costs = np.bincount(bin_of, weights=cost.alone(lengths, squares), minlength=bins)
    return costs.astype(np.float64, copy=False)  # of no items bincount gives whole numbers


def additive_bound(falling: Num[np.ndarray, "items"], bins: int) -> float:
    """Return a lower bound of the largest sum of costs of any assignment of items of falling cost.

    The bound is the largest of the mean and, for every k, the k + 1 least of the k * bins + 1 largest items, because
    some bin has k + 1 of these.
    """
    n = len(falling)
    if not n:
        return 0.0
    least = float(falling.sum()) / bins
    for more in range(min((n - 1) // bins, DEEP) + 1):
        last = more * bins + 1
        least = max(least, float(falling[last - more - 1 : last].sum()))
    return least


def fit_cost(
    batches: Sequence[Num[np.ndarray, "_items"]],
    seconds: Sequence[float] | Float64[np.ndarray, "batches"],
    squares: Sequence[Float64[np.ndarray, "_items"]] | None = None,
) -> Cost:
    """Fit a cost to measured times by non-negative least squares of the relative errors.

    Args:
        batches: rows of each item, one array per measured batch; empty batches are left out.
        seconds: time of each batch.
        squares: squares of the items' masks in each batch, see :meth:`Cost.alone`; None: those of their rows.

    Raises:
        ConfigError: there is not one time per batch, no batch has an item, or a time is not above 0.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if len(times) != len(batches):
        raise ConfigError(f"fit_cost: {len(batches)} batches but {len(times)} times; give one time per batch.")
    filled = [i for i, batch in enumerate(batches) if len(batch)]
    times = times[filled]
    if not len(times) or not np.all(np.isfinite(times) & (times > 0)):
        raise ConfigError(
            f"fit_cost: {len(times)} batches with items, shortest time {times.min(initial=np.inf)} s; "
            "give at least one batch with an item, and times above 0."
        )
    rows = [np.asarray(batches[i], dtype=np.float64) for i in filled]
    own = [r * r for r in rows] if squares is None else [squares[i] for i in filled]
    terms = np.array([(len(r), r.sum(), s.sum()) for r, s in zip(rows, own, strict=True)])
    scaled = terms / times[:, None]
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1.0
    fixed, linear, quadratic = nnls(scaled / size, np.ones(len(times)))[0] / size
    return Cost(float(linear), float(quadratic), float(fixed))


class OverLimit(ConfigError):
    """An error: no assignment was found that keeps a limit; more bins may help."""


def register_policy(name: str, policy: Policy | None) -> None:
    """Make a policy known by its name to ``BalanceConfig(policy=name)``; call it in every process that makes plans.

    Raises:
        ConfigError: another policy has this name.
    """
    register(POLICIES, name, policy, "balance: policy", ConfigError)


def automatic(falling: Int64[np.ndarray, "items"], bins: int, cost: Cost) -> Int64[np.ndarray, "items"]:
    """Deal greedily by the exact cost, then exchange items if the result is not near the bound.

    The cost of a bin is the sum of its items' costs, squares included, so there is no second quantity
    to weigh as in OrchMLLM's algorithm 4.
    """
    return _even(cost.alone(falling), bins)


def _even(falling: np.ndarray, bins: int) -> np.ndarray:
    """Assign items of falling cost as :func:`automatic` does."""
    weights = whole(falling, bins)
    bin_of, load = deal(weights, bins)
    largest = float(load.max())
    if largest <= float(weights.sum()) / bins * (1 + NEAR):
        return bin_of
    near = additive_bound(weights, bins) * (1 + NEAR)
    return bin_of if largest <= near else exchange(weights, bin_of, bins, near)


def _longest_first(lengths: np.ndarray, bins: int, cost: Cost) -> np.ndarray:
    """Give each item, longest first, to the least loaded bin (OrchMLLM algorithm 1)."""
    return deal(whole(cost.alone(lengths), bins), bins)[0]


register_policy("auto", automatic)
register_policy("lpt", _longest_first)
register_policy("round_robin", None)  # as sampled


def balance(
    lengths: Int64[np.ndarray, "items"],
    bins: int,
    cost: Cost,
    *,
    policy: str = "auto",
    limit: int | None = None,
    squares: Float64[np.ndarray, "items"] | None = None,
) -> Int64[np.ndarray, "items"]:
    """Find the bin of each item so that the largest load is small.

    If the assignment of any policy breaks the limit, the items are dealt greedily by a blend of cost and rows, with the
    least share of rows that keeps the limit, or by first-fit decreasing if no blend keeps it.

    Args:
        lengths: rows of each item inside the module, at least 0.
        bins: number of instances, of microbatches, or of both multiplied.
        policy: a name in :data:`POLICIES`.
        limit: most rows that a bin may hold (memory); None: any.
        squares: see :meth:`Cost.alone`; only ``auto`` looks at them.

    Raises:
        ConfigError: no assignment was found that keeps the limit (:class:`OverLimit`), or a policy returned none.
    """
    if limit is not None and len(lengths):
        _check_limit(lengths, bins, limit)
    bin_of = _assigned(lengths, bins, cost, policy, squares)
    if limit is None or not len(lengths) or fits(bin_of, bins, lengths, limit):
        return bin_of
    within_limit = _blend(lengths, bins, cost.alone(lengths, squares), limit)
    if within_limit is None:
        within_limit = _first_fit(lengths, bins, limit)
    if within_limit is None:
        raise OverLimit(
            f"balance: no assignment of {len(lengths)} items with {int(lengths.sum())} rows in all to {bins} bins was "
            f"found with at most limit={limit} in each; raise the limit or give more bins (microbatches)."
        )
    return within_limit


def _assigned(lengths: np.ndarray, bins: int, cost: Cost, policy: str, squares: np.ndarray | None) -> np.ndarray:
    if policy not in POLICIES:
        raise ConfigError(
            f"balance: no policy {policy!r} was registered in this process, which makes plans; call register_policy"
            " where all processes do, at the top of the script or of a module that it imports and not below"
            " if __name__ == '__main__': workers that are spawned, and actors of Ray, run nothing of that"
        )
    assign = POLICIES[policy]
    if assign is None:
        return np.arange(len(lengths), dtype=np.int64) % bins
    bin_of = np.empty(len(lengths), dtype=np.int64)
    if squares is not None and policy == "auto":
        costs = cost.alone(lengths, squares)
        order = np.argsort(-costs, kind="stable")
        bin_of[order] = _even(costs[order], bins)
        return bin_of
    order = descending(lengths)
    assigned = np.asarray(assign(lengths[order], bins, cost))
    whole_numbers = assigned.shape == order.shape and (assigned.dtype.kind in "iu" or not assigned.size)
    if not whole_numbers or np.any((assigned < 0) | (assigned >= bins)):
        raise ConfigError(
            f"balance: policy {policy!r} gave {assigned.dtype} {list(assigned.shape)} for {len(order)} units and"
            f" {bins} bins; it has to give the bin of each unit, integers from 0 to {bins - 1}"
        )
    bin_of[order] = assigned
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


def fits(bin_of: Int64[np.ndarray, "items"], bins: int, lengths: Int64[np.ndarray, "items"], limit: int) -> bool:
    """Tell whether no bin holds more than the limit."""
    return bool(np.bincount(bin_of, weights=lengths, minlength=bins).max() <= limit)


def _blend(lengths: np.ndarray, bins: int, alone: np.ndarray, limit: int) -> np.ndarray | None:
    """Deal greedily by (1 - share) x cost + share x rows, both of mean 1, with the least share that keeps the limit."""
    alone = alone / (alone.mean() or 1.0)
    rows = lengths / (lengths.mean() or 1.0)

    def assigned(share: float) -> np.ndarray | None:
        weights = whole((1 - share) * alone + share * rows, bins)
        order = np.argsort(-weights, kind="stable")
        dealt = deal(weights[order], bins)[0]
        if share == 1:  # only the limit counts
            dealt = exchange(lengths[order], dealt, bins, limit)
        bin_of = np.empty_like(dealt)
        bin_of[order] = dealt
        return bin_of if fits(bin_of, bins, lengths, limit) else None

    within_limit = assigned(1.0)
    if within_limit is None:
        return None
    low, high = 0.0, 1.0
    for _ in range(BLENDS):
        middle = (low + high) / 2
        bin_of = assigned(middle)
        if bin_of is None:
            low = middle
        else:
            within_limit, high = bin_of, middle
    return within_limit


def _first_fit(lengths: np.ndarray, bins: int, limit: int) -> np.ndarray | None:
    """Fill bins by first-fit decreasing, runs of items at a time; needs at most 11/9 of the fewest bins, plus one."""
    left = descending(lengths)
    less = -lengths[left]  # rising, to be searched
    bin_of = np.empty(len(lengths), dtype=np.int64)
    width = 4 * len(lengths) // bins + 16
    for number in range(bins):
        room, position, chosen = limit, 0, [np.zeros(0, dtype=np.int64)]
        while True:
            position += int(np.searchsorted(less[position:], -room))  # first item that fits
            ahead = np.cumsum(less[position : position + width])
            count = int(np.searchsorted(-ahead, room, side="right"))
            if not count:
                break
            chosen.append(np.arange(position, position + count))
            room += int(ahead[count - 1])
            position += count
        positions = np.concatenate(chosen)
        bin_of[left[positions]] = number
        left, less = np.delete(left, positions), np.delete(less, positions)
    return bin_of if not len(left) else None
