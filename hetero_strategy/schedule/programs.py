"""Programs of one module on one of its pipeline ranks: the order of its work, whenever each part may run. Pure.

A program is a list of (kind, stage, place): kind ``FORWARD``, ``BACKWARD`` (B, or I where split) or ``WEIGHT``; place
counts the module's microbatches of the step. Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et
al. 2021a); interleaved 1F1B (Narayanan et al. 2021b, as in Megatron-LM and torch.distributed.pipelining); ZBV (Qi et
al. 2024, as in torch.distributed.pipelining's ScheduleZBVZeroBubble).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from hetero_strategy.errors import ScheduleError
from hetero_strategy.layout.spec import Pipeline

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
Op = tuple[int, int, int]
"""(kind, stage, place of the microbatch)."""
RankProgram = tuple[Op, ...]


def paired(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], leads: Sequence[int]
) -> RankProgram:
    """Merge forwards and backwards, each in its own order; before backward ``k`` come ``leads[k]`` forwards.

    Args:
        forwards, backwards: (stage, place).
        leads: one number for each backward, not falling.
    """
    program: list[Op] = []
    done = 0
    for (stage, place), lead in zip(backwards, leads, strict=True):
        program += [(FORWARD, *f) for f in forwards[done:lead]]
        done = max(done, lead)
        program.append((BACKWARD, stage, place))
    return (*program, *((FORWARD, *f) for f in forwards[done:]))


def one_forward_one_backward(stage: int, leads: Sequence[int]) -> RankProgram:
    """Order one stage on a rank; ``leads[j]`` forwards come before the backward of microbatch ``j``."""
    units = [(stage, j) for j in range(len(leads))]
    return paired(units, units, leads)


@lru_cache(256)
def gpipe(stages: tuple[int, ...], count: int) -> RankProgram:
    """Order all forwards, stage after stage, then all backwards."""
    forwards = tuple((FORWARD, s, j) for s in stages for j in range(count))
    return forwards + tuple((BACKWARD, s, j) for s in reversed(stages) for j in range(count))


@lru_cache(256)
def forwards(pipeline: Pipeline, rank: int, count: int) -> RankProgram:
    """Order forwards alone."""
    if pipeline.style != "v":
        sizes = _groupings(pipeline.pp, count)[-1] if pipeline.style == "loop" else [1] * count
        return tuple((FORWARD, *f) for f in _grouped(pipeline.stages_of(rank), sizes))
    # A forward of stage s cannot start before time s + j: sort by that time, the later stage first.
    units = sorted((s + j, -s, s, j) for s in pipeline.stages_of(rank) for j in range(count))
    return tuple((FORWARD, s, j) for _, _, s, j in units)


def _grouped(stages: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Order groups of microbatches, each through all these stages."""
    starts = [0, *accumulate(sizes)]
    return [(stage, j) for a, b in pairwise(starts) for stage in stages for j in range(a, b)]


def _groupings(pp: int, count: int) -> list[list[int]]:
    """Return group sizes worth a try: ``pp`` each if that divides, else a smaller last group, or equal larger ones."""
    full, rest = divmod(count, pp)
    if not rest or not full:
        return [[pp] * full or [count]]
    larger, longer = divmod(count, full)
    return [[pp] * full + [rest], [larger + 1] * longer + [larger] * (full - longer)]


@lru_cache(64)
def interleaved(pipeline: Pipeline, count: int, more: int, needs: tuple[int, ...]) -> tuple[RankProgram, ...]:
    """Order by interleaved 1F1B, one program per pipeline rank.

    Args:
        pipeline: pipeline in loop style.
        count: number of microbatches; if ``pp`` does not divide it, the grouping that takes less time is used.
        more: number of forwards added to every warm-up, for stages of other modules that follow.
        needs: number of forwards of the last stage that must come before each of its backwards.

    Warm-ups are ``2 (pp - rank - 1) + (vpp - 1) group + more`` forwards, or more if ``needs`` asks for it.
    """
    pp, last = pipeline.pp, pipeline.stages - 1
    total = count * pipeline.vpp
    tried: list[tuple[int, tuple[RankProgram, ...]]] = []
    for sizes in _groupings(pp, count):
        order = [_grouped(pipeline.stages_of(r), sizes) for r in range(pp)]
        back = [_grouped(pipeline.stages_of(r)[::-1], sizes) for r in range(pp)]
        at = {f: i for i, f in enumerate(order[-1])}
        base = (pipeline.vpp - 1) * sizes[0] + more
        for k, (stage, j) in enumerate(back[-1]):
            if stage == last:
                base = max(base, at[stage, needs[j] - 1] - k)
        leads = [[min(total, base + 2 * (pp - r - 1) + k + 1) for k in range(total)] for r in range(pp)]
        programs = tuple(map(paired, order, back, leads))
        time = duration(pipeline, programs)
        if time is not None:  # groups of unequal size may wait for each other in a circle
            tried.append((time, programs))
    return min(tried, key=lambda pair: pair[0])[1]


@lru_cache(64)
def zbv(pipeline: Pipeline, count: int, more: int, needs: tuple[int, ...]) -> tuple[RankProgram, ...]:
    """Order by ZBV, one program per pipeline rank: two stages on each, the first and the last stage on rank 0.

    Args:
        pipeline: pipeline in v style with two stages per rank.
        count: number of microbatches.
        more, needs: see :func:`interleaved`.
    """
    pp, last = pipeline.pp, pipeline.stages - 1
    programs = tuple(
        tuple((kind, (rank, 2 * pp - 1 - rank)[chunk], j) for kind, chunk, j in _zbv(pp, rank, count) if j < count)
        for rank in range(pp)
    )
    more = max(more, missing(programs[0], last, needs))
    return tuple(sooner(p, more) for p in programs) if more else programs


def _zbv(pp: int, rank: int, count: int) -> list[Op]:
    """Return (kind, chunk, place); some places lie beyond ``count``."""
    count = max(2 * pp - 1, count)  # at least enough to fill the pipeline
    done = [[0, 0, 0], [0, 0, 0]]
    ops: list[Op] = []

    def add(chunk: int, *kinds: int) -> None:
        for kind in kinds:
            ops.append((kind, chunk, done[chunk][kind]))
            done[chunk][kind] += 1

    for _ in range(2 * (pp - rank) - 1):
        add(0, FORWARD)
    for _ in range(rank):
        add(1, FORWARD)
        add(0, FORWARD)
    for _ in range(pp - rank):
        add(1, FORWARD, BACKWARD, WEIGHT)
    while done[1][FORWARD] < done[0][FORWARD] or done[0][FORWARD] < count:
        if done[0][FORWARD] < count:
            add(0, FORWARD)
        add(0, BACKWARD, WEIGHT)
        add(1, FORWARD, BACKWARD, WEIGHT)
    for _ in range(rank):
        add(0, BACKWARD)
        add(1, BACKWARD)
    for _ in range(pp - rank):
        add(0, BACKWARD, WEIGHT)
    for chunk in (1, 0):
        while done[chunk][WEIGHT] < done[chunk][BACKWARD]:
            add(chunk, WEIGHT)
    return ops


def duration(pipeline: Pipeline, programs: Sequence[RankProgram]) -> int | None:
    """Return the time of one module's programs alone, with forwards of 1 and backwards of 2; None if they never end."""
    ends: dict[Op, int] = {}
    heads = [0] * len(programs)
    free = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for r, program in enumerate(programs):
            while heads[r] < len(program):
                op = kind, stage, j = program[heads[r]]
                neighbour = stage - 1 if kind == FORWARD else stage + 1
                start = free[r]
                if kind != WEIGHT and 0 <= neighbour < pipeline.stages:
                    ready = ends.get((kind, neighbour, j))
                    if ready is None:
                        break
                    start = max(start, ready)
                ends[op] = free[r] = start + (1 if kind == FORWARD else 2)
                heads[r] += 1
                moved = True
    return max(free) if all(h == len(p) for h, p in zip(heads, programs, strict=True)) else None


def virtual(pipeline: Pipeline, count: int, more: int, needs: tuple[int, ...]) -> tuple[RankProgram, ...]:
    """Call :func:`zbv` or :func:`interleaved`, by the pipeline's style."""
    return (zbv if pipeline.style == "v" else interleaved)(pipeline, count, more, needs)


@lru_cache(64)
def windowed(pipeline: Pipeline, needs: tuple[int, ...], bound: int, module: str) -> tuple[RankProgram, ...]:
    """Call :func:`virtual` for ``bound`` microbatches at a time, as often as needed."""
    count = len(needs)
    joined: list[list[Op]] = [[] for _ in range(pipeline.pp)]
    for start in range(0, count, bound):
        size = min(bound, count - start)
        inner = tuple(n - start for n in needs[start : start + size])
        if inner[-1] > size:
            name = "zbv" if pipeline.style == "v" else "interleaved_1f1b"
            raise ScheduleError(
                f"{name} with max_in_flight {bound} of {module} runs {bound} microbatches at a time, but the modules "
                f"after it need {inner[-1]} at once: raise it to a multiple of what they group"
            )
        for ops, program in zip(joined, virtual(pipeline, size, 0, inner), strict=True):
            ops += [(kind, stage, start + j) for kind, stage, j in program]
    return tuple(map(tuple, joined))


def leads_of(program: RankProgram, stage: int) -> list[int]:
    """Count the forwards of a stage before each of its backwards, in order."""
    leads, done = [], 0
    for kind, s, _ in program:
        if s == stage:
            if kind == FORWARD:
                done += 1
            elif kind == BACKWARD:
                leads.append(done)
    return leads


def held(program: Sequence[Op]) -> int:
    """Return the most microbatches that one stage holds, from F until W, or B in a program without W."""
    closing = WEIGHT if any(kind == WEIGHT for kind, _, _ in program) else BACKWARD
    now: dict[int, int] = {}
    most = 0
    for kind, stage, _ in program:
        if kind == FORWARD:
            now[stage] = now.get(stage, 0) + 1
            most = max(most, now[stage])
        elif kind == closing:
            now[stage] -= 1
    return most


def missing(program: RankProgram, last: int, needs: Sequence[int]) -> int:
    """Return by how many forwards a rank is late, if ``needs[j]`` must come before backward ``j`` of stage ``last``."""
    forwards = [op[1:] for op in program if op[0] == FORWARD]
    seen = late = 0
    for kind, stage, j in program:
        if kind == FORWARD:
            seen += 1
        elif kind == BACKWARD and stage == last:
            late = max(late, forwards.index((last, needs[j] - 1)) + 1 - seen)
    return late


def sooner(program: RankProgram, by: int) -> RankProgram:
    """Move every forward ``by`` forwards earlier, if there are so many before it."""
    forwards = [op for op in program if op[0] == FORWARD]
    ops: list[Op] = []
    seen = placed = 0
    for op in program:
        if op[0] == FORWARD:
            seen += 1
        else:
            ops += forwards[placed : seen + by]
            placed = max(placed, min(len(forwards), seen + by))
            ops.append(op)
    return (*ops, *forwards[placed:])
