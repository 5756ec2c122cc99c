"""Whether all ranks run the same step plan.

It is seen in every step, at no exchange of its own, once the step has run. Plans whose sizes differ too may not come
that far: messages that do not fit end or block a backend. So plans are also compared before steps 1, 2, 4, 8, ..., for
what differs between ranks differs soon.
"""

from __future__ import annotations

import time
from collections import deque

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hetero_strategy.errors import DataError
from hetero_strategy.plan.step_plan import StepPlan

PATIENCE = 2.0
"""Seconds that a rank whose exchange failed waits for the others to say which plan they had."""
DIGITS = 16
"""Bits of a digit: sums of squares over a million ranks are exact in fp64."""


class Agreement:
    """Two digits of the plan's digest and their squares ride on a sum over all ranks. Where a digit is the same on all
    of them, and only there, the sum of squares times the number of ranks is the square of the sum.
    """

    def __init__(self) -> None:
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
        most = torch.tensor([plan.digest >> 2, -(plan.digest >> 2)], device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most[0] != -most[1]:
            raise different(plan)

    @staticmethod
    def write(plan: StepPlan, into: torch.Tensor) -> None:
        """This rank's summands.

        Args:
            plan: of the step.
            into: fp64 ``[2, 2]``: a row per digit.
        """
        for place in (0, 1):
            digit = plan.digest >> DIGITS * place & (1 << DIGITS) - 1
            into[place, 0].fill_(digit)
            into[place, 1].fill_(digit * digit)

    def note(self, plan: StepPlan, sums: torch.Tensor) -> None:
        """Keep the sums over all ranks until they can be read without waiting for the device."""
        if sums.device.type != "cuda":
            self._pending.append((plan, sums, None))
            return
        host = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append((plan, host, arrived))

    def check(self) -> None:
        """Look at what has arrived: on the host this step's sums, on a GPU those of a step before.

        Raises:
            DataError: ranks had different plans.
        """
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            plan, sums, _ = self._pending.popleft()
            for total, squares in sums.tolist():
                if int(squares) * dist.get_world_size() != int(total) ** 2:
                    raise different(plan)


def plans_differ(plan: StepPlan) -> bool:
    """After an exchange failed: whether the ranks that failed too had another plan. Each asks the store, for no
    collective works any more.
    """
    store, world = _get_default_store(), dist.get_world_size()
    name = f"hetero_strategy/plan/{plan.metadata.epoch}/{plan.metadata.step}"
    mine = str(plan.digest)
    try:
        store.set(f"{name}/{dist.get_rank()}", mine)
        end = time.monotonic() + PATIENCE
        missing = set(range(world))
        while missing and time.monotonic() < end:
            for rank in [r for r in missing if store.check([f"{name}/{r}"])]:
                if store.get(f"{name}/{rank}").decode() != mine:
                    return True
                missing.discard(rank)
            time.sleep(0.05)
    except RuntimeError:  # the store went with its rank
        pass
    return False


def different(plan: StepPlan) -> DataError:
    """What is said then."""
    return DataError(
        f"ranks made different plans for step {plan.metadata.step} of epoch {plan.metadata.epoch}: all of them"
        " must have the same data files, options and versions of this library and numpy; compare the nodes"
    )
