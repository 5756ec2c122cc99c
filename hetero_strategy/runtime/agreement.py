"""Whether all ranks run the same step plan, and whether one of them was told to stop.

Both are seen in every step, at no exchange of their own, once the step has run. Plans whose sizes differ too may not
come that far: messages that do not fit end or block a backend. So plans are also compared before steps 1, 2, 4, 8, ...,
for what differs between ranks differs soon.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hetero_strategy.errors import DataError
from hetero_strategy.plan.step_plan import StepPlan

PATIENCE = 2.0
"""Seconds that a rank whose exchange failed waits for the others to say which plan they had."""
DIGITS = 16
"""Bits of a digit: sums of squares over a million ranks are exact in fp64."""
MOST_RANKS = 1 << 20


@dataclass
class Stop:
    """Ranks are told to stop one by one, and do so together, after the same step."""

    asked: bool = False
    """Whether this process was told."""
    agreed: bool = False
    """Whether any was; all ranks have it from the end of the same step on."""
    tell: Callable[[], None] | None = None
    """Called then."""
    may: Callable[[], bool] | None = None
    """Whether the run may end after this step: the same answer on all ranks. None: it may."""
    requeue: bool = False
    """Whether this process was told that its job will be queued again."""
    requeue_agreed: bool = False
    """Whether any was; as :attr:`agreed`."""


class Agreement:
    """Two digits of the plan's digest and their squares ride on a sum over all ranks. Where a digit is the same on all
    of them, and only there, the sum of squares times the number of ranks is the square of the sum. So do the
    numbers of ranks that were told to stop, and to save because the job is queued again.
    """

    SUMMANDS = 5

    def __init__(self) -> None:
        self.stop = Stop()
        self._pending: deque[tuple[StepPlan, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._steps = 0

    def before(self, plan: StepPlan, device: torch.device) -> None:
        """A collective of its own, before a few steps.

        Raises:
            DataError: ranks have different plans.
        """
        self._steps += 1
        if self._steps.bit_count() > 1:
            return
        most = torch.full((2,), plan.digest >> 2, device=device)
        most[1].neg_()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most[0] != -most[1]:
            raise different(plan)

    def write(self, plan: StepPlan, into: torch.Tensor) -> None:
        """This rank's summands of a step, into fp64 ``[SUMMANDS]``."""
        low, high = (plan.digest >> DIGITS * place & (1 << DIGITS) - 1 for place in (0, 1))
        told = int(self.stop.asked) + MOST_RANKS * int(self.stop.requeue)
        for place, value in enumerate((low, low * low, high, high * high, told)):
            into[place].fill_(value)

    def note(self, plan: StepPlan, sums: torch.Tensor) -> None:
        """Keep the sums over all ranks until they can be read without waiting for the device."""
        if sums.device.type != "cuda":
            self._pending.append((plan, sums, None))
            return
        host = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append((plan, host, arrived))

    def wait(self) -> None:
        """For all ranks to have run what was noted: once, not in every step."""
        for *_, arrived in self._pending:
            if arrived is not None:
                arrived.synchronize()

    def check(self) -> None:
        """Look at this step's sums on the host, on a GPU at those of the step before: at the same step on all ranks.

        Raises:
            DataError: ranks had different plans.
        """
        while self._pending and (self._pending[0][2] is None or len(self._pending) > 1):
            plan, sums, arrived = self._pending.popleft()
            if arrived is not None:
                arrived.synchronize()
            low, low_squares, high, high_squares, told = map(int, sums.tolist())
            requeues, stops = divmod(told, MOST_RANKS)
            for total, squares in ((low, low_squares), (high, high_squares)):
                if squares * dist.get_world_size() != total**2:
                    raise different(plan)
            self.stop.requeue_agreed |= requeues > 0
            if stops and not self.stop.agreed and (self.stop.may is None or self.stop.may()):
                self.stop.agreed = True
                if self.stop.tell is not None:
                    self.stop.tell()


def said(name: str, mine: str, patience: float = PATIENCE) -> dict[int, str]:
    """Exchange a text by the store, where no collective works: by rank, of those that say theirs in time."""
    store, found = _get_default_store(), {dist.get_rank(): mine}
    name = f"hetero_strategy/{name}"
    try:
        store.set(f"{name}/{dist.get_rank()}", mine)
        end = time.monotonic() + patience
        while len(found) < dist.get_world_size() and time.monotonic() < end:
            for rank in set(range(dist.get_world_size())) - set(found):
                if store.check([f"{name}/{rank}"]):
                    found[rank] = store.get(f"{name}/{rank}").decode()
            time.sleep(0.05)
    except RuntimeError:  # the store went with its rank
        pass
    return dict(sorted(found.items()))


def plans_differ(plan: StepPlan) -> bool:
    """After an exchange failed: whether the ranks that failed too had another plan."""
    found = said(f"plan/{plan.metadata.epoch}/{plan.metadata.step}", str(plan.digest))
    return len(set(found.values())) > 1


def different(plan: StepPlan) -> DataError:
    """Make the error of ranks with different plans: for one step, or because they run different steps."""
    step = f"step {plan.metadata.step} of epoch {plan.metadata.epoch}"
    found = said("step", f"{'training' if torch.is_grad_enabled() else 'evaluation'} {step}")
    if len(set(found.values())) > 1:
        return DataError(
            f"ranks run different steps: {', '.join(f'rank {rank} {where}' for rank, where in found.items())}; some of"
            " them went another way, as with trainer.should_stop = True on one rank alone; decide from what all ranks"
            " have, such as out.loss, or ask trainer.strategy.reduce_boolean_decision"
        )
    return DataError(
        f"ranks made different plans for {step}: all of them must have the same data files, options and versions of"
        " this library and numpy, and schedules and balance policies of one's own must not draw random numbers; compare"
        " the nodes"
    )
