"""What ``model(batch)`` does under the strategy: run the step, hand Lightning a loss whose backward merges gradients.

The schedule runs forward and backward at once, inside ``training_step``. Lightning calls ``zero_grad`` after that and
``loss.backward()`` then; so the step's gradients are kept aside and the loss is a leaf-like tensor whose backward adds
``g * kept`` to ``p.grad``. Scaling of the loss by the person, by gradient accumulation or by a loss scaler arrives in
``g``. The loss must be used linearly, as any loss is that ends in ``backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hetero_strategy.data.batch import Batch
from hetero_strategy.data.plan import StepPlan
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.model.inputs import Ragged
from hetero_strategy.model.multimodal import ModelOutput
from hetero_strategy.parallelize.gradients import accumulate, scale
from hetero_strategy.schedule.executor import Executor
from hetero_strategy.schedule.outcome import Outcome


class StepRunner:
    """Runs batches for a :class:`MultimodalModel`; attach it with ``model.attach``.

    Args:
        executor: of this rank.
        parameters: that this rank owns.
        seed_scale: gives the loss scale (fp16) as a scalar tensor, or None.
        training: tells whether the model is in training mode.
        about_to_zero: tells whether the gradients of before are zeroed anyway once the step has run.
    """

    def __init__(
        self,
        executor: Executor,
        parameters: Sequence[nn.Parameter],
        seed_scale: Callable[[], torch.Tensor | None],
        training: Callable[[], bool],
        about_to_zero: Callable[[], bool],
    ) -> None:
        self.executor = executor
        self._all = [p for module in executor.wiring.modules.values() for p in module.parameters()]
        self._trainable = sum(p.requires_grad for p in self._all)
        self._parameters = [p for p in parameters if p.requires_grad]
        self._seed_scale = seed_scale
        self._training = training
        self._about_to_zero = about_to_zero
        self._steps = 0

    def __call__(self, batch: Batch, *, keep_logits: bool = False) -> ModelOutput:
        """One global batch; a collective over the world.

        Raises:
            DataError: ranks have different step plans; looked at in steps 1, 2, 4, 8, ...
            ConfigError: logits are asked for: they exist only on the ranks that computed them; or the batch is none
                of :class:`MultimodalDataModule`.
        """
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
        self._steps += 1
        if self._steps.bit_count() == 1:  # 1, 2, 4, 8, ...: what differs between ranks differs soon
            self._agree(plan)
        if self._training() and torch.is_grad_enabled():
            outcome, loss = self._train(batch)
        else:
            with torch.no_grad():
                outcome = self.executor.run(batch, train=False)
            loss = self._as_loss(self._total(outcome))
        offsets = np.concatenate([[0], np.cumsum(plan.metadata.labels)])
        labelled = max(1, int((plan.metadata.labels > 0).sum()))
        return ModelOutput(
            loss=loss,
            loss_tokens=plan.loss_tokens,
            accuracy=(outcome.correct.mean() / max(1, plan.loss_tokens)).float(),
            exact_match=(outcome.exact.mean() / labelled).float(),
            predictions=None if outcome.predicted is None else Ragged(outcome.predicted, offsets),
            losses={n: self._as_loss(self.executor.weights[n] * x) for n, x in outcome.losses.items()},
            drawn=outcome.drawn or None,
        )

    def _agree(self, plan: StepPlan) -> None:
        """Refuse ranks with different plans, whose messages would not fit together."""
        digest = plan.digest()
        most = torch.tensor([digest, -digest], device=self.executor.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most[0] != -most[1]:
            raise DataError(
                f"ranks made different plans for step {plan.metadata.step} of epoch {plan.metadata.epoch}: all of them"
                " must have the same data files, options and versions of this library and numpy; compare the nodes"
            )

    def _train(self, batch: Batch) -> tuple[Outcome, torch.Tensor]:
        if sum(p.requires_grad for p in self._all) != self._trainable:  # seen on every rank, whoever owns it
            raise ConfigError(
                "requires_grad of a parameter was changed after the model was placed; say what trains with"
                " MultimodalModel(freeze=...)"
            )
        # Half the memory for gradients while the schedule runs, where nobody wants the old ones.
        drop = self._about_to_zero()
        before = [None if drop else p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        factor = self._seed_scale()
        # The scale may change before backward is called; what was used is kept.
        factor = None if factor is None else factor.clone()
        outcome = self.executor.run(batch, train=True, seed_scale=factor)
        made = [p.grad for p in self._parameters]
        for p, grad in zip(self._parameters, before, strict=True):
            p.grad = grad

        def merge(g: torch.Tensor) -> None:
            new = [(p, grad) for p, grad in zip(self._parameters, made, strict=True) if grad is not None]
            made.clear()
            if not new:
                return
            scale([grad for _, grad in new], g if factor is None else g / factor)
            add = [(p, grad) for p, grad in new if p.grad is not None]
            accumulate([p.grad for p, _ in add], [grad for _, grad in add])  # type: ignore[misc]
            for p, grad in new:
                if p.grad is None:
                    p.grad = grad

        value = self._as_loss(self._total(outcome))
        return outcome, _Deferred.apply(torch.zeros_like(value, requires_grad=True), value, merge)

    def _total(self, outcome: Outcome) -> torch.Tensor:
        return torch.stack([self.executor.weights[n] * x for n, x in outcome.losses.items()]).sum()

    def _as_loss(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.executor.wiring.wire_dtype == torch.float64 else value.float()


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, start: torch.Tensor, value: torch.Tensor, merge):  # type: ignore[no-untyped-def]
        ctx.merge = merge
        return value.clone()

    @staticmethod
    def backward(ctx, g: torch.Tensor):  # type: ignore[no-untyped-def]
        merge, ctx.merge = ctx.merge, None
        if merge is None:
            raise RuntimeError("backward was called twice on the loss of one step")
        merge(g)
        return None, None, None
