"""Count the rows that routers send to experts, and keep experts in balance: by a loss, or by biases without one.

The loss is that of Switch Transformers (arXiv:2101.03961, eq. 4-6) as transformers has it, over all layers together:
``E * sum_e f_e P_e``, with the share ``f`` of rows that visit an expert and its mean probability ``P``. Both are of all
instances' rows in a microbatch, and a step's loss is the mean over microbatches, weighted by their rows. In a pipeline
each stage adds its part of both sums and passes them on; the last stage sums the counts over instances, and they come
back with gradients.

Biases are those of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): they change which experts are chosen, and no weights.

Only real rows count: neither alignment rows nor those of skipped samples, nor the row of an instance without samples.

On ranks the gradient enters through the weights of experts' results, so a layer whose result no loss uses gets none; in
one process it gets one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hetero_strategy.model.inputs import host_index


@dataclass(eq=False)
class Routing:
    """The routers of a module in the order of its layers, and what balances their experts.

    Args:
        routers: FQN of each router. It returns logits ``[T, experts]``, weights ``[T, k]`` and experts ``[T, k]``.
        experts: number of experts in each layer.
        biases: FQN of the buffer that each router adds to its scores before it chooses.
        balance: coefficient of the loss; 0: there is none.
        bias_step: size of a bias's change in each optimizer step; 0: biases stay.
        normalized: whether routers return probabilities in place of logits.
    """

    routers: tuple[str, ...]
    experts: int
    biases: tuple[str, ...] = ()
    balance: float = 0.0
    bias_step: float = 0.0
    normalized: bool = False
    tally: Tally | None = None
    """Tally of the microbatch that runs now."""
    chosen: Tensor | None = None
    """int64 ``[layers, experts]``: rows of all ranks since the last optimizer step."""

    @property
    def size(self) -> int:
        """Return the number of experts of all layers."""
        return len(self.routers) * self.experts

    def forget(self) -> None:
        """Drop the rows since the last optimizer step: a loaded checkpoint begins a new one."""
        if self.chosen is not None:
            self.chosen.zero_()

    def labels(self, blocks: Iterable[str]) -> list[int | str]:
        """Return the number of each router's block among all blocks of the module, by their FQNs; where it has no block
        or shares it with another router, the router's FQN.
        """
        fqns = [*blocks]
        own = [next((n for n, fqn in enumerate(fqns) if name.startswith(f"{fqn}.")), name) for name in self.routers]
        return [name if own.count(label) > 1 else label for name, label in zip(self.routers, own, strict=True)]


@dataclass(eq=False)
class Tally:
    """The choices of routers in one microbatch on this rank."""

    units: int
    """Number of sequences; the rows of any further one are alignment."""
    rows: Tensor
    """int64 ``[layers, experts]``: rows that chose each expert."""
    likeliest: Tensor
    """fp64 ``[experts]``: rows that have the expert among their k most probable, before biases; of all layers so far,
    in this stage and the stages before it. Numbers of rows are exact up to 2^53."""
    probabilities: Tensor
    """fp64 ``[experts]``: sum over the same rows."""
    by_autograd: bool = False
    """Whether :attr:`probabilities` has a gradient; else backward adds :attr:`slope`."""
    again: bool = False
    """Whether the microbatch has run, so that layers run again for backward."""
    skipped: Tensor | None = None
    """int64: sequences whose rows do not count; None: all count."""
    real: Tensor | None = None
    """bool ``[T]``: whether each row counts."""
    slope: Tensor | None = None
    """``[experts]``: gradient of the loss with respect to :attr:`probabilities`; None: zero."""

    def sums(self) -> Tensor:
        """Return the row that the next stage takes, fp64 ``[1, 2 * experts]``."""
        return torch.cat([self.likeliest, self.probabilities])[None]

    def begin(self, sequence: Tensor, rows: int) -> None:
        """Note the sequence of each row, int64 ``[T]``, of which the first ``rows`` came in."""
        self.real = sequence < (self.units if rows else 0)
        if self.skipped is not None:
            self.real &= (sequence[:, None] != self.skipped).all(1)


@torch.compiler.disable
def count_choices(routing: Routing, number: int, router: nn.Module, inputs: Any, output: Any) -> Any:
    """Count one layer's choices, and lead the gradient of the balance loss into the router's logits."""
    tally = routing.tally
    if tally is None or tally.real is None or not isinstance(output, tuple) or len(output) != 3:
        return None
    logits, weights, chosen = output
    real = tally.real
    if not tally.again:
        tally.rows[number] += _histogram(chosen, real, routing.experts)
    if not routing.balance:
        return None
    if not tally.again:
        with torch.set_grad_enabled(tally.by_autograd and torch.is_grad_enabled()):
            probabilities = logits if routing.normalized else _softmax(logits)
            visits = probabilities.topk(chosen.shape[-1], dim=-1).indices
            tally.likeliest = tally.likeliest + _histogram(visits, real, routing.experts)
            tally.probabilities = tally.probabilities + (probabilities * real[:, None]).sum(0, dtype=torch.float64)
    if tally.by_autograd or not torch.is_grad_enabled():
        return None
    return logits, _Balanced.apply(weights, logits, real, tally, routing.normalized), chosen


def _softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)


def _histogram(chosen: Tensor, real: Tensor, experts: int) -> Tensor:
    """Count the real rows ``[T]`` of each expert among the choices ``[T, k]``, int64 ``[experts]``."""
    ones = real.to(torch.int64)[:, None].expand_as(chosen).reshape(-1)
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.reshape(-1).to(torch.int64), ones)


class _Balanced(torch.autograd.Function):
    """A function that returns weights as they are; its backward adds the gradient of the balance loss to their logits,
    or to probabilities.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, weights: Tensor, logits: Tensor, real: Tensor, tally: Tally, normalized: bool
    ):
        ctx.save_for_backward(logits, real)
        ctx.tally, ctx.normalized = tally, normalized
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        logits, real = ctx.saved_tensors
        slope = ctx.tally.slope
        if slope is None or not ctx.needs_input_grad[1]:
            return gradient, None, None, None, None
        if ctx.normalized:
            return gradient, slope.to(logits.dtype) * real[:, None], None, None, None
        probabilities = _softmax(logits)
        slope = slope.to(probabilities.dtype)
        centred = slope - (probabilities * slope).sum(-1, keepdim=True)
        return gradient, (probabilities * centred * real[:, None]).to(logits.dtype), None, None, None


class StepRouting:
    """The routing of one module's rows in a step, on this rank.

    Args:
        routing: routers of the module.
        rows: rows of each microbatch on all ranks that count.
        into: fp64 ``[layers, experts]`` and fp64 scalar, to which choices and the loss are added.
        seed: factor of the module's loss, a number or a scalar tensor; None: it is not used.
        group: ranks of the last stage that have rows of their own, of all instances; None: this rank alone.
        skipped: whether rows of each of the module's units do not count, bool ``[units]``; None: all count.
    """

    def __init__(
        self,
        routing: Routing,
        rows: Sequence[int],
        into: tuple[Tensor, Tensor],
        *,
        seed: float | Tensor | None = 1.0,
        group: dist.ProcessGroup | None = None,
        skipped: np.ndarray | None = None,
    ) -> None:
        self.routing, self._rows, self._into = routing, rows, into
        self._seed, self._group, self._skipped = seed, group, skipped
        self._sums: dict[int, tuple[Tensor, Tensor, dist.Work | None]] = {}
        """Microbatch -> ``likeliest``, of all instances once the work is done, and own ``probabilities``."""

    def tally(self, units: np.ndarray, before: Tensor | None = None, *, by_autograd: bool = False) -> Tally:
        """Return a tally for a forward.

        Args:
            units: numbers of its sequences, int64 ``[n]``.
            before: :meth:`Tally.sums` of the stage before; None: this is the first stage.
            by_autograd: see :class:`Tally`.
        """
        routing, into = self.routing, self._into[0]
        rows = torch.zeros(len(routing.routers), routing.experts, dtype=torch.int64, device=into.device)
        if before is None:
            before = torch.zeros(2, routing.experts, dtype=torch.float64, device=into.device)
        likeliest, probabilities = before.view(2, -1)
        left_out = np.zeros(0, np.int64) if self._skipped is None else np.flatnonzero(self._skipped[units])
        skipped = host_index(left_out, rows) if len(left_out) else None
        return Tally(len(units), rows, likeliest, probabilities, by_autograd, skipped=skipped)

    def add(self, microbatch: int, tally: Tally, *, last: bool = True) -> None:
        """Add the choices of a forward; in the ``last`` stage start to sum a microbatch over instances."""
        self._into[0].add_(tally.rows)
        if not self.routing.balance or not last:
            return
        likeliest, probabilities = tally.likeliest, tally.probabilities
        work = None if self._group is None else dist.all_reduce(likeliest, group=self._group, async_op=True)
        self._sums[microbatch] = likeliest, probabilities, work

    def likeliest(self, microbatch: int) -> Tensor | None:
        """Return, in the last stage, the counts of all layers and instances, fp64 ``[1, experts]``; None: no loss."""
        if microbatch not in self._sums:
            return None
        likeliest, _, work = self._sums[microbatch]
        if work is not None:
            work.wait()
        return likeliest[None]

    def slope(self, microbatch: int, likeliest: Tensor | None) -> Tensor | None:
        """Return :attr:`Tally.slope` from the counts of all layers and instances."""
        if likeliest is None or self._seed is None:
            return None
        return likeliest[0] * (self._scale(microbatch) * self.routing.balance * self._seed)

    def finish(self) -> Tensor:
        """Add the loss of this rank's rows, in the last stage once all microbatches have run; return it times
        coefficient and seed.
        """
        loss = torch.zeros_like(self._into[1])
        for microbatch, (likeliest, probabilities, work) in self._sums.items():
            if work is not None:
                work.wait()
            loss = loss + (likeliest * probabilities).sum() * self._scale(microbatch)
        self._sums.clear()
        self._into[1].add_(loss.detach())
        return loss * (self.routing.balance * (0.0 if self._seed is None else self._seed))

    def _scale(self, microbatch: int) -> float:
        layers, own, all_rows = len(self.routing.routers), self._rows[microbatch], sum(self._rows)
        return self.routing.experts / max(1, layers**2 * own * all_rows)


@contextmanager
def counting(
    step: StepRouting | None,
    microbatch: int,
    units: np.ndarray,
    before: Tensor | None = None,
    *,
    last: bool = True,
    by_autograd: bool = False,
) -> Iterator[Tally | None]:
    """Count the choices of a forward in a tally, if there are routers; see :class:`StepRouting`."""
    if step is None:
        yield None
        return
    tally = step.tally(units, before, by_autograd=by_autograd)
    with running(step.routing, tally):
        yield tally
    tally.again = True
    step.add(microbatch, tally, last=last)


@contextmanager
def running(routing: Routing | None, tally: Tally | None) -> Iterator[None]:
    """Let routers use a microbatch's tally, in its forward or backward."""
    if routing is not None:
        routing.tally = tally
    try:
        yield
    finally:
        if routing is not None:
            routing.tally = None


# ---- biases ---------------------------------------------------------------------------------------------------------


def biases_of(module: nn.Module, routing: Routing | None) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield (owner, name, value) of the biases of routers that a stage has."""
    owners = dict(module.named_modules()) if routing is not None and routing.biases else {}
    for path, _, name in (fqn.rpartition(".") for fqn in (routing.biases if routing is not None else ())):
        if path in owners:
            yield owners[path], name, owners[path].get_buffer(name)


_waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules with counts since the last optimizer step."""
_hook: list[Any] = []


def note_choices(module: Any, rows: Tensor) -> None:
    """Keep the rows of all ranks that chose each expert, int64 ``[layers, experts]``, until the optimizer's step."""
    routing: Routing = module.routing
    if not (routing.bias_step and routing.biases):
        return
    routing.chosen = rows.clone() if routing.chosen is None else routing.chosen + rows
    _waiting.add(module)
    if not _hook:
        _hook.append(register_optimizer_step_post_hook(_after_step))


@torch.no_grad()
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Change the biases of routers whose weights an optimizer has changed: towards experts with too few rows."""
    if not _waiting:
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    changed = {id(getattr(p, "whole", p)) for p in trained}  # optimizers step on parts of sharded parameters
    for module in [*_waiting]:
        routing: Any = module.routing
        for number, (router, bias) in enumerate(zip(routing.routers, routing.biases, strict=True)):
            parameters = [*module.get_submodule(router).parameters()]
            steps = any(id(p) in changed for p in parameters)
            if not steps and any(p.requires_grad for p in parameters):
                continue  # another optimizer's
            path, _, name = bias.rpartition(".")
            buffer, rows = module.get_submodule(path).get_buffer(name), routing.chosen[number]
            if steps and not buffer.is_meta:  # else it is frozen, or another rank's
                sign = (rows.sum() - rows * routing.experts).sign()  # of mean - rows, in whole numbers
                buffer.add_(sign.to(buffer.dtype).view_as(buffer), alpha=routing.bias_step)
            rows.zero_()
