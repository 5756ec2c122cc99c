"""What the planners of three papers choose for one encoder and one language model, by their own rules.

DistTrain   (arXiv:2408.04275, section 4): every module has ranks and a pipeline of its own. Tensor and data
            parallelism are enumerated, ranks minimize the warm-up of all modules and the slowest stage times the other
            microbatches (equations 1 and 2), here by trying all of them, which no rounding of a convex program can
            beat. ZeRO-1, 1F1B.
Optimus     (arXiv:2408.03505, section 4): the language model's plan is the best for it alone; the encoder has its own
            on the same ranks, whose degrees divide those of the language model, and fills bubbles. All such plans are
            scheduled coarsely and finely, and the fastest is taken.
Cornstarch  (arXiv:2503.11367, algorithm 1): one pipeline per module, with the same tensor and data parallelism. For
            every number of the language model's stages the encoder has as few as keep within the time of one of these;
            of all the fastest is taken. 1F1B.

Optimus and Cornstarch judge by times of a step: here by the planner's own simulator, as it judges its own. On more than
``FEW`` ranks a module has part of a node or whole nodes. A module that does not fit otherwise has all its blocks
recomputed, of which the papers say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, product
from math import inf

import numpy as np

from benchmarks.all_plans import ENCODER, LANGUAGE_MODEL, MODULES
from hetero_strategy.errors import LayoutError, ScheduleError
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.evaluate import Candidate
from hetero_strategy.planner.search import Planner
from hetero_strategy.planner.space import Degrees, divisors

FEW = 16
"""Ranks up to which every number of ranks is tried for a module."""


def seed_plans(planner: Planner, microbatches: int | None, *, most: int | None = None) -> dict[str, float]:
    """Simulated seconds of what each planner chooses; infinite where nothing of its kind fits.

    Args:
        planner: knows model, cluster and batch, and simulates.
        microbatches: given; None: theirs, of one sample for every instance of the language model.
        most: candidates of one planner that are simulated, the most promising by its formula; None: all.
    """
    return {name: _fastest(planner, islice(seed(planner, microbatches), most)) for name, seed in SEEDS.items()}


def _disttrain(planner: Planner, microbatches: int | None) -> Iterator[Candidate]:
    estimates, ranks = planner.estimates, planner.evaluator.cluster.ranks
    encoders = list(_all_degrees(planner, ENCODER, _sizes(planner, ranks - 1)))

    @cache
    def fitting(count: int) -> tuple[Sequence[Degrees], np.ndarray]:
        """The encoder's degrees, and ranks, seconds of a microbatch and of one of its stages as rows."""
        fit = [e for e in (_fitting(planner, ENCODER, e, count) for e in encoders) if e]
        each = [estimates.work(ENCODER, e.tp, e.recomputed).total / (e.dp * count) for e in fit]
        return fit, np.array([(e.ranks, s, s / e.pp) for e, s in zip(fit, each, strict=True)]).reshape(-1, 3).T

    best, chosen = inf, None
    for degrees in _all_degrees(planner, LANGUAGE_MODEL, _sizes(planner, ranks - 1)):
        count = microbatches or _samples(planner) // degrees.dp
        llm = _fitting(planner, LANGUAGE_MODEL, degrees, count)
        if llm is None:
            continue
        fit, (taken, through, stage) = fitting(count)
        mine = estimates.work(LANGUAGE_MODEL, llm.tp, llm.recomputed).total / (llm.dp * count)
        seconds = through + mine + (count - 1) * np.maximum(stage, mine / llm.pp)
        seconds = np.where(taken + llm.ranks <= ranks, seconds, inf)
        if len(fit) and seconds.min() < best:
            best, chosen = seconds.min(), _apart(planner, fit[int(seconds.argmin())], llm, count)
    if chosen is not None:
        yield chosen


def _optimus(planner: Planner, microbatches: int | None) -> Iterator[Candidate]:
    estimates, ranks = planner.estimates, planner.evaluator.cluster.ranks
    best, chosen = inf, None
    for degrees in _all_degrees(planner, LANGUAGE_MODEL, [ranks]):
        count = microbatches or _samples(planner) // degrees.dp
        llm = _fitting(planner, LANGUAGE_MODEL, degrees, count)
        if llm is None:
            continue
        seconds = estimates.busy(LANGUAGE_MODEL, llm, count) * (count - 1) / count
        seconds += estimates.synchronized(LANGUAGE_MODEL, llm, count) + estimates.through(LANGUAGE_MODEL, llm, count)
        if seconds < best:
            best, chosen = seconds, (llm, count)
    if chosen is None:
        return
    llm, count = chosen
    encoders = _all_degrees(planner, ENCODER, [ranks])
    for encoder in sorted(encoders, key=lambda degrees: estimates.busy(ENCODER, degrees, count)):
        held = estimates.held(ENCODER, encoder) + estimates.bytes(LANGUAGE_MODEL, llm, count)
        if llm.pp % encoder.pp == 0 and llm.tp % encoder.tp == 0 and held <= estimates.memory:
            layouts = {ENCODER: encoder.layout(range(ranks)), LANGUAGE_MODEL: llm.layout(range(ranks))}
            again = _recompute(planner, {LANGUAGE_MODEL: llm})
            for fill in ("coarse", "fine") if llm.pp > 1 else ("none",):
                yield Candidate(layouts, count, "1f1b", again, reshard_after_forward="never", fill=fill)


def _cornstarch(planner: Planner, microbatches: int | None) -> Iterator[Candidate]:
    estimates, ranks, shape = planner.estimates, planner.evaluator.cluster.ranks, planner.evaluator.shape
    candidates: list[tuple[float, Candidate]] = []
    for llm in _all_degrees(planner, LANGUAGE_MODEL, _sizes(planner, ranks - 1)):
        if llm.tp not in shape.modules[ENCODER].tp:
            continue
        stage = estimates.work(LANGUAGE_MODEL, llm.tp).total * estimates.slowest_share(LANGUAGE_MODEL, llm.tp, llm.pp)
        work, most = estimates.work(ENCODER, llm.tp).total, shape.modules[ENCODER].blocks
        shares = {pp: estimates.slowest_share(ENCODER, llm.tp, pp) for pp in range(1, most + 1)}
        stages = next((pp for pp, share in shares.items() if work * share <= stage), most)
        count = microbatches or _samples(planner) // llm.dp
        encoder, fit = (
            _fitting(planner, name, way, count)
            for name, way in ((ENCODER, llm._replace(pp=stages)), (LANGUAGE_MODEL, llm))
        )
        if encoder and fit and fit.ranks + encoder.ranks <= ranks:
            slowest = max(stage, work * shares[stages]) / (llm.dp * count)
            candidates.append((slowest * (count + llm.pp + stages - 1), _apart(planner, encoder, fit, count)))
    for _, candidate in sorted(candidates, key=lambda pair: pair[0]):
        yield candidate


def _fitting(planner: Planner, name: str, degrees: Degrees, microbatches: int) -> Degrees | None:
    """Return the degrees, recomputed where the module does not fit otherwise; None: there is no way to."""
    estimates = planner.estimates
    for way in (degrees, degrees._replace(recomputed=1)) if microbatches >= 1 else ():
        allowed = estimates.given.allows(name, way.tp, way.recomputed)
        if allowed and estimates.bytes(name, way, microbatches) <= estimates.memory:
            return way
    return None


def _recompute(planner: Planner, ways: Mapping[str, Degrees]) -> dict[str, Recompute]:
    """Return how modules recompute that do."""
    again = {name: planner.estimates.given.recomputed(name, way.recomputed) for name, way in ways.items()}
    return {name: how for name, how in again.items() if how is not None}


def _apart(planner: Planner, encoder: Degrees, llm: Degrees, microbatches: int) -> Candidate:
    """On ranks of their own, the encoder's first."""
    end = encoder.ranks
    layouts = {ENCODER: encoder.layout(range(end)), LANGUAGE_MODEL: llm.layout(range(end, end + llm.ranks))}
    again = _recompute(planner, {ENCODER: encoder, LANGUAGE_MODEL: llm})
    return Candidate(layouts, microbatches, "1f1b", again, reshard_after_forward="never", fill="none")


def _sizes(planner: Planner, last: int) -> list[int]:
    """Return the numbers of ranks that a module may have."""
    cluster = planner.evaluator.cluster
    every, node = cluster.ranks <= FEW, cluster.ranks_per_node
    return [n for n in range(1, last + 1) if every or n < node or n % node == 0]


def _all_degrees(planner: Planner, name: str, sizes: Iterable[int]) -> Iterator[Degrees]:
    """All degrees on so many ranks, instances as shards, of which the global batch is a multiple."""
    module, samples = planner.evaluator.shape.modules[name], _samples(planner)
    for ranks, tp in product(sizes, module.tp):
        if ranks % tp == 0 and planner.evaluator.cluster.ranks_per_node % tp == 0:
            for pp in divisors(ranks // tp):
                dp = ranks // tp // pp
                if pp <= module.blocks and (samples % dp == 0 or name != LANGUAGE_MODEL):
                    yield Degrees(tp, pp, 1, dp, whole=True)


def _samples(planner: Planner) -> int:
    return len(planner.evaluator.batches[0].samples)


def _fastest(planner: Planner, candidates: Iterable[Candidate]) -> float:
    best = inf
    for candidate in candidates:
        assert tuple(candidate.layouts) == MODULES
        try:
            best = min(best, planner.evaluator.seconds(candidate))
        except (LayoutError, ScheduleError):  # such as fewer samples than microbatches
            continue
    return best


SEEDS = {"DistTrain": _disttrain, "Optimus": _optimus, "Cornstarch": _cornstarch}
