"""Run a step when ``model(batch)`` is called, and hand Lightning losses whose backward merges the gradients.

The schedule runs forward and backward together, inside ``training_step``. Lightning calls ``zero_grad`` after that, and
then ``loss.backward()``. So the step's gradients are kept aside, and the losses lead to a function whose backward adds
``g * kept`` to ``p.grad``. ``g`` holds every factor that the user, gradient accumulation or a loss scaler applied to
the loss.

Several losses may come back with factors of their own (``out.losses["llm"] + 0.1 * out.losses["draw"]``). The schedule
runs with the factors of the step before; if they differ this time, it runs once more with the right ones.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from hetero_strategy.errors import ConfigError, ModelError
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model.combine import ModelOutput, StepSums
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.gradients import accumulate, scale
from hetero_strategy.runtime.agreement import different, plans_differ
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.runtime.warm_up import check_packing, warm_up

EVERY = 50
"""Training steps between two collections of garbage; most memory is freed without them."""


class StepRunner:
    """A runner of batches for a :class:`MultimodalModel`; attach it with ``model.attach``.

    Args:
        executor: executor of this rank.
        parameters: parameters that this rank owns.
        seed_scale: returns the loss scale (fp16) as a scalar tensor, or None.
        training: returns whether the model is in training mode.
        about_to_zero: returns whether the existing gradients are zeroed anyway once the step has run.
        precision: returns the context in which the model computes, also when a step runs once more.
    """

    def __init__(
        self,
        executor: Executor,
        parameters: Sequence[nn.Parameter],
        seed_scale: Callable[[], torch.Tensor | None],
        training: Callable[[], bool],
        about_to_zero: Callable[[], bool],
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.executor = executor
        self._all = [p for module in executor.modules.values() for p in module.parameters()]
        self._trainable = [p.requires_grad for p in self._all]
        self._parameters = [p for p in parameters if p.requires_grad]
        self._seed_scale = seed_scale
        self._training = training
        self._about_to_zero = about_to_zero
        self._precision = precision
        self._upstream = _upstream(executor)
        self._module_of = {id(p): n.module for n, own in executor.local.items() for p in own.parameters}
        self._watched, self._warm = True, set[bool]()
        self.after_first: Callable[[], None] = lambda: None
        """Callback, called once when all ranks have run the first step of training."""
        self.garbage = GarbageCollection()
        self._expected: dict[int, Factors] = {}
        """Factors of the losses the last time, by number of the model's call with one batch."""

    def __call__(self, batch: Batch, *, call: int = 0, keep_logits: bool = False) -> ModelOutput:
        """Run one global batch; a collective over the world."""
        if not isinstance(batch, Batch):
            raise ConfigError(
                f"model(batch) got a {type(batch).__name__}: under HeteroStrategy a batch has a step plan, which says"
                " what each rank computes; train with MultimodalDataModule"
            )
        if keep_logits:
            raise ConfigError(
                "keep_logits: under HeteroStrategy logits live on the ranks of the module that made them, for a moment;"
                " use out.predictions, or strategy='auto' on one device"
            )
        plan = batch.plan
        self.executor.agreement.before(plan, self.executor.device)
        try:
            outcome, (loss, *shares) = self._run(batch, call)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # from an exchange: sizes that do not fit are the first sign of different plans
            if dist.get_world_size() > 1 and plans_differ(plan):
                raise different(plan) from error
            raise
        return outcome.output(loss, dict(zip(outcome.losses, shares, strict=True)))

    def _run(self, batch: Batch, call: int) -> tuple[StepSums, Sequence[torch.Tensor]]:
        if self._training() and torch.is_grad_enabled():
            return self._train(batch, call)
        with torch.no_grad():
            self._warm_up(batch, train=False)
            outcome = self.executor.run(batch, train=False, call=call)
        return outcome, _total_and_shares(self._shares(outcome))

    def _warm_up(self, batch: Batch, *, train: bool) -> None:
        """Check packing and warm up before the first step of its kind."""
        check_packing(self.executor, batch)
        if self.executor.warms_up and train not in self._warm:
            self._warm.add(train)
            warm_up(self.executor, batch, train=train)

    def _train(self, batch: Batch, call: int) -> tuple[StepSums, Sequence[torch.Tensor]]:
        if [p.requires_grad for p in self._all] != self._trainable:  # seen on every rank, whoever owns it
            raise ConfigError(
                "requires_grad of a parameter was changed after the model was placed; say what trains with"
                " MultimodalModel(freeze=...); with several optimizers leave out toggle_optimizer(), and zero the"
                " gradients of each before its backward"
            )
        if self._watched:
            _refuse_hooks(self.executor.modules)
        self.garbage.step()
        buffers = self._buffers() if self._watched else {}
        self._warm_up(batch, train=True)
        # The scale may change before backward is called, so keep the one that was used.
        scaled = self._seed_scale()
        gradients = _StepGradients(self, batch, call, None if scaled is None else scaled.clone())
        # Halves the memory for gradients during the schedule if nobody needs the old ones.
        outcome = gradients.run(self._expected.get(call, {}), drop=self._about_to_zero())
        if self._watched and (changed := [n for n, state in self._buffers().items() if state != buffers[n]]):
            raise ModelError(
                f"training changes the buffer '{changed[0]}' ({len(changed)} in all) of a module: every instance would"
                " have values of its own, and one process others; use layers without such state, or put them in"
                " evaluation mode in configure_model()"
            )
        if self._watched:
            self._watched = False
            self.executor.agreement.wait()  # others may still compile: a GPU's host does not wait for them by itself
            self.after_first()
        shares = self._shares(outcome)
        return outcome, _Losses.apply(torch.zeros_like(shares, requires_grad=True), shares, gradients)

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Return the identity of each buffer, and how often it was written to, by name."""
        return {
            f"{node.module}.{fqn}": (id(buffer), buffer._version)
            for node, stage in self.executor.stages.items()
            for fqn, buffer in stage.named_buffers()
        }

    def _shares(self, outcome: StepSums) -> torch.Tensor:
        """Return each module's share of the loss, ``[modules with a loss]``."""
        shares = torch.stack([self.executor.weights[n] * x for n, x in outcome.losses.items()])
        return shares if self.executor.exact else shares.float()


Factors = Mapping[str, float | None]
"""Module with a loss -> factor of its loss; 1 if it is not named, None if its loss is not used."""


class _StepGradients:
    """The gradients of one step, kept aside until a backward asks for them."""

    def __init__(self, runner: StepRunner, batch: Batch, call: int, scaled: torch.Tensor | None) -> None:
        self._runner, self._batch, self._call, self._scaled = runner, batch, call, scaled
        self._parameters = runner._parameters
        self._made: list[torch.Tensor | None] | None = None
        self._factors: Factors = {}
        self._names: list[str] = []
        self._versions = [p._version for p in self._parameters]

    def run(self, factors: Factors, *, drop: bool = False) -> StepSums:
        """Run the schedule and keep the gradients of the parameters.

        Args:
            factors: factors of the losses.
            drop: whether nobody needs the existing gradients.
        """
        before = [None if drop else p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._factors = factors
        seeds: dict[str, float | torch.Tensor | None] = dict(factors)
        if self._scaled is not None:
            used = {n: factors.get(n, 1.0) for n in self._runner.executor.weights}
            seeds = {n: None if x is None else self._scaled * x for n, x in used.items()}
        try:
            outcome = self._runner.executor.run(self._batch, train=True, factors=seeds, call=self._call)
            self._names = list(outcome.losses)
            self._made = [p.grad for p in self._parameters]
        except BaseException:
            for stage in self._runner.executor.stages.values():
                fsdp.forget(stage)
            if (step := self._runner.executor.running) is not None:
                step.gradients = {id(p): p.grad for p in self._parameters}
            raise
        finally:  # also for a user who continues after an error
            for p, gradient in zip(self._parameters, before, strict=True):
                p.grad = gradient
        return outcome

    def merge(self, total: torch.Tensor | None, shares: Sequence[torch.Tensor | None]) -> None:
        """Add to ``p.grad`` what one process would.

        Args:
            total: gradient with respect to the whole loss; None if the whole loss was not used.
            shares: gradient with respect to each module's share; None if the share was not used.
        """
        used = [n for n, g in zip(self._names, shares, strict=True) if total is not None or g is not None]
        if total is not None and not self._factors and all(g is None for g in shares):
            factor = total  # the usual case: nothing is read from the device
        else:
            factor = self._matched(total, shares)
        if self._made is None:  # a second backward, with retain_graph=True
            self._again(self._factors)
        assert self._made is not None
        kept, self._made = self._made, None
        # The loss of a module that had no unit in this step is a constant.
        worked = [n for n in used if not all(a.idle for a in self._batch.plan.assignments[n])]
        reached = set[str]().union(*(self._runner._upstream[n] for n in worked))
        # Like torch, add no gradient to a leaf that was frozen after the forward, such as by toggle_optimizer().
        new = [
            (p, gradient)
            for p, gradient in zip(self._parameters, kept, strict=True)
            if gradient is not None and p.requires_grad and self._runner._module_of[id(p)] in reached
        ]
        kept.clear()
        if not new:
            return
        scale([gradient for _, gradient in new], factor if self._scaled is None else factor / self._scaled)
        add = [(p, gradient) for p, gradient in new if p.grad is not None]
        accumulate([p.grad for p, _ in add], [gradient for _, gradient in add])  # type: ignore[misc]
        for p, gradient in new:
            if p.grad is None:
                p.grad = gradient

    def _matched(self, total: torch.Tensor | None, shares: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the factor of the gradients, after running again if the step used other factors. Reads from the
        device.
        """
        present = next(g for g in (total, *shares) if g is not None)
        zero = torch.zeros_like(present)
        wanted = torch.stack([(zero if total is None else total) + (zero if g is None else g) for g in shares])
        values = [float(x) for x in wanted.tolist()]
        largest = max(range(len(values)), key=lambda i: abs(values[i]))
        factors: dict[str, float | None] = {}
        if values[largest]:
            factors = {n: x / values[largest] for n, x in zip(self._names, values, strict=True)}
        factors |= {n: None for n, g in zip(self._names, shares, strict=True) if total is None and g is None}
        if all(x is None or math.isfinite(x) for x in factors.values()):  # else the next step would be spoilt too
            self._runner._expected[self._call] = {} if all(x == 1 for x in factors.values()) else factors
        if any(_differ(self._factors.get(n, 1.0), x) for n, x in factors.items()):
            self._made = None
            self._again(factors)
        return wanted[largest]

    def _again(self, factors: Factors) -> None:
        if [p._version for p in self._parameters] != self._versions:
            raise RuntimeError(
                "the step's gradients have to be computed again for these factors of out.losses, but parameters have"
                " changed since; call backward before the optimizer steps"
            )
        frozen = [p for p in self._parameters if not p.requires_grad]  # since the forward
        try:
            for p in frozen:
                p.requires_grad_()
            with torch.enable_grad(), self._runner._precision():
                self.run(factors)
        finally:
            for p in frozen:
                p.requires_grad_(False)


def _differ(one: float | None, other: float | None) -> bool:
    return one is not other if one is None or other is None else not abs(one - other) <= 1e-12


class _Losses(torch.autograd.Function):
    """A function of the step's loss and every module's share of it."""

    @staticmethod
    def forward(ctx, start: torch.Tensor, shares: torch.Tensor, gradients: _StepGradients):  # type: ignore[no-untyped-def]
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(start)  # torch refuses a second backward without retain_graph=True
        return _total_and_shares(shares)

    @staticmethod
    @once_differentiable
    def backward(ctx, total, *shares):  # type: ignore[no-untyped-def]
        assert ctx.saved_tensors
        ctx.gradients.merge(total, shares)
        return None, None, None


def _total_and_shares(shares: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (shares.sum(), *(share.clone() for share in shares))


def _refuse_hooks(modules: Mapping[str, nn.Module]) -> None:
    """Refuse gradient hooks: they would see gradients of one microbatch or one rank, or none."""
    for module, name, parameter in ((m, *named) for m, own in modules.items() for named in own.named_parameters()):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"parameter '{name}' of module '{module}' has a hook for its gradient, which sees microbatches and"
                " ranks apart, or nothing; read or change p.grad in on_after_backward or on_before_optimizer_step"
            )


def _upstream(executor: Executor) -> dict[str, set[str]]:
    """Return module -> itself and the modules whose rows reach it."""
    edges = {(s.module, t.module) for s, t in executor.compiler.graph.edges}
    upstream = {node.module: {node.module} for node in executor.compiler.graph.stages}
    for _ in upstream:
        for source, target in edges:
            upstream[target] |= upstream[source]
    return upstream


class GarbageCollection:
    """A switch that keeps Python from collecting by itself from the first :meth:`step` until :meth:`stop`.

    Left to itself, Python collects garbage on single ranks at different moments, and all other ranks wait each time
    (torchtitan does this too, ``tools/utils.py``).
    """

    def __init__(self) -> None:
        self._steps = 0
        self._stopped = False

    def step(self) -> None:
        """Collect if it is due, without long-lived objects; called before a training step."""
        if not self._steps and gc.isenabled():
            self._stopped = True
            gc.disable()
            gc.collect()
        elif self._steps % EVERY == 0:
            gc.collect(1)
        self._steps += 1

    def stop(self) -> None:
        """Let Python collect by itself again."""
        if self._stopped:
            gc.enable()
        self._steps, self._stopped = 0, False
