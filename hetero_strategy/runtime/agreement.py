"""Check that all ranks run the same step plan, let them stop together, and find parameters that no loss reached.

Every step does so with no exchange of its own, in the sum over all ranks at its end. Ranks whose plans differ in sizes
may not get that far: messages that do not fit abort or block a backend. So plans are also compared before steps 1, 2,
4, 8, ...: ranks that differ at all differ early.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from hetero_strategy.errors import DataError
from hetero_strategy.layout.spec import Placement
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.gradients import Reached
from hetero_strategy.plan.step_plan import StepPlan

PATIENCE = 2.0
"""Seconds that a rank whose exchange failed waits to read the plans of other ranks."""
DIGITS = 16
"""Bits of a digit: sums of squares over a million ranks are exact in fp64."""
MOST_RANKS = 1 << 20


@dataclass
class Stop:
    """A request to stop, made to single ranks and followed by all ranks after the same step."""

    asked: bool = False
    """Whether this process was asked to stop."""
    agreed: bool = False
    """Whether any process was asked to stop; all ranks set it at the end of the same step."""
    tell: Callable[[], None] | None = None
    """Callback for the moment when ``agreed`` is set."""
    may: Callable[[], bool] | None = None
    """Return whether the run may end after this step, the same on all ranks. None: it may."""
    requeue: bool = False
    """Whether this process was told that its job will be queued again."""
    requeue_agreed: bool = False
    """Whether any process was told so; set on all ranks together, like :attr:`agreed`."""


class Agreement:
    """A comparison of plans that rides on a sum over all ranks.

    Each rank adds two digits of its plan's digest, and their squares. A digit is the same on all ranks if and only if
    the sum of squares times the number of ranks is the square of the sum. The number of ranks that were told to stop,
    and of those told to save because the job is queued again, ride along.
    """

    SUMMANDS = 5

    def __init__(self) -> None:
        self.stop = Stop()
        self._pending: deque[tuple[StepPlan, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._steps = 0

    def before(self, plan: StepPlan, device: torch.device) -> None:
        """Compare plans before steps 1, 2, 4, 8, ... in a collective of its own."""
        self._steps += 1
        if self._steps.bit_count() > 1:
            return
        most = torch.full((2,), plan.digest >> 2, device=device)
        most[1].neg_()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most[0] != -most[1]:
            raise different(plan)

    def write(self, plan: StepPlan, into: torch.Tensor) -> None:
        """Write this rank's summands of a step into fp64 ``[SUMMANDS]``."""
        low, high = (plan.digest >> DIGITS * place & (1 << DIGITS) - 1 for place in (0, 1))
        signals = int(self.stop.asked) + MOST_RANKS * int(self.stop.requeue)
        for place, value in enumerate((low, low * low, high, high * high, signals)):
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
        """Wait until all ranks have run the noted steps; called once, not in every step."""
        for *_, arrived in self._pending:
            if arrived is not None:
                arrived.synchronize()

    def check(self) -> None:
        """Check the sums of this step, or on a GPU those of the step before; all ranks check the same step."""
        while self._pending and (self._pending[0][2] is None or len(self._pending) > 1):
            plan, sums, arrived = self._pending.popleft()
            if arrived is not None:
                arrived.synchronize()
            low, low_squares, high, high_squares, signals = map(int, sums.tolist())
            requeues, stops = divmod(signals, MOST_RANKS)
            for total, squares in ((low, low_squares), (high, high_squares)):
                if squares * dist.get_world_size() != total**2:
                    raise different(plan)
            self.stop.requeue_agreed |= requeues > 0
            if stops and not self.stop.agreed and (self.stop.may is None or self.stop.may()):
                self.stop.agreed = True
                if self.stop.tell is not None:
                    self.stop.tell()


@dataclass(frozen=True)
class Unreached:
    """A count, for every trained parameter, of the ranks that lacked its gradient in a step.

    Ranks that sum gradients contribute zeros if they have none, as no rank knows what other ranks have. If all ranks
    that hold a parameter lacked its gradient, no loss reached it. Its gradient becomes None as in one process, so that
    weight decay and moments of optimizers leave it alone.
    """

    holders: tuple[int, ...]
    """Number of ranks that sum the gradient of each parameter, in one order on all ranks."""
    places: Mapping[nn.Parameter, int]
    """Index of each parameter in ``holders``: this rank's own, and those that it knows by name only."""
    noted: Reached = field(default_factory=dict)
    """Parameters of the step in progress, and whether each had a gradient."""

    @staticmethod
    def of(modules: Mapping[str, Adapter], placement: Placement) -> Unreached:
        """Number the parameters of all modules, after placement; every rank knows all of them at least by name."""
        holders: list[int] = []
        places: dict[nn.Parameter, int] = {}
        for name, module in modules.items():
            layout = placement.layouts[name]
            pipeline, tied = layout.pipeline, module.tied_weight()
            apart = tied is not None and pipeline.rank_of(0) != pipeline.rank_of(pipeline.stages - 1)
            for fqn, parameter in module.named_parameters():
                if parameter.requires_grad:
                    places[parameter] = len(holders)
                    owners = 2 if apart and tied is not None and fqn in tied else 1  # of the first and the last stage
                    holders.append(len(layout.ranks) // layout.pp * owners)
        return Unreached(tuple(holders), places)

    def __len__(self) -> int:
        """Return how many numbers are summed."""
        return len(self.holders)

    def write(self, into: torch.Tensor) -> None:
        """Write 1 into zeros, fp64 ``[len(self)]``, for each gradient that this rank lacked; without any, write
        nothing.
        """
        if lacking := self._lacking():
            flags = torch.zeros(len(self), dtype=into.dtype)
            flags[list(lacking.values())] = 1
            into.copy_(flags)

    def drop(self, counts: torch.Tensor) -> None:
        """Set the gradients of parameters that no rank reached to None.

        A rank that lacked no gradient knows that all of its parameters were reached. Any other rank reads the sums,
        which waits for the device.
        """
        if lacking := self._lacking():
            lacking_ranks = counts.tolist()
            for parameter, place in lacking.items():
                if lacking_ranks[place] == self.holders[place]:
                    parameter.grad = None

    def _lacking(self) -> dict[nn.Parameter, int]:
        return {parameter: self.places[parameter] for parameter, had in self.noted.items() if not had}


def said(name: str, mine: str, patience: float = PATIENCE) -> dict[int, str]:
    """Exchange a text through the store, where no collective works; return, by rank, the texts that arrive in time."""
    store, texts = _get_default_store(), {dist.get_rank(): mine}
    name = f"hetero_strategy/{name}"
    try:
        store.set(f"{name}/{dist.get_rank()}", mine)
        end = time.monotonic() + patience
        while len(texts) < dist.get_world_size() and time.monotonic() < end:
            for rank in set(range(dist.get_world_size())) - set(texts):
                if store.check([f"{name}/{rank}"]):
                    texts[rank] = store.get(f"{name}/{rank}").decode()
            time.sleep(0.05)
    except RuntimeError:  # the rank that hosted the store has ended
        pass
    return dict(sorted(texts.items()))


def plans_differ(plan: StepPlan) -> bool:
    """Return whether ranks have different plans; called on the ranks on which an exchange failed."""
    digests = said(f"plan/{plan.metadata.epoch}/{plan.metadata.step}", str(plan.digest))
    return len(set(digests.values())) > 1


def different(plan: StepPlan) -> DataError:
    """Build the error for ranks whose plans for one step differ, or that run different steps."""
    step = f"step {plan.metadata.step} of epoch {plan.metadata.epoch}"
    steps = said("step", f"{'training' if torch.is_grad_enabled() else 'evaluation'} {step}")
    if len(set(steps.values())) > 1:
        return DataError(
            f"ranks run different steps: {', '.join(f'rank {rank} {where}' for rank, where in steps.items())}; some of"
            " them went another way, as with trainer.should_stop = True on one rank alone; decide from what all ranks"
            " have, such as out.loss, or ask trainer.strategy.reduce_boolean_decision"
        )
    return DataError(
        f"ranks made different plans for {step}: all of them must have the same data files, options and versions of"
        " this library and numpy, and your own schedules and balance policies must not draw random numbers; compare the"
        " nodes"
    )
