"""When nobody needs the gradients of the step before any more, so that the next step need not hold both."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden


def about_to_zero_gradients(module: LightningModule | None) -> bool:
    """Whether Lightning zeroes the gradients before the backward of the step that runs, and nobody looks before.

    Not where the model runs once more in a hook: a window of accumulation may still add to them.
    """
    if module is None or not module.automatic_optimization or is_overridden("optimizer_zero_grad", module):
        return False
    trainer = module.trainer
    if not trainer.training or module._current_fx_name != "training_step":
        return False
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(is_overridden("on_before_zero_grad", one) for one in (module, *callbacks)):
        return False
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
