from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from hetero_strategy.strategy.many_ranks import about_to_zero_gradients


class Looks(L.Callback):
    def on_before_zero_grad(self, *given: Any) -> None: ...


class ZeroesItself(L.LightningModule):
    def optimizer_zero_grad(self, *given: Any) -> None: ...


def module_at(step: int, *, kind: type[L.LightningModule] = L.LightningModule, **changed: Any) -> L.LightningModule:
    """A module in the training step of a batch, of which two make one step of the optimizer."""
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=step))
    given = {"training": True, "callbacks": [L.Callback()], "accumulate_grad_batches": 2, "fit_loop": loop}
    module = kind()
    module._trainer = SimpleNamespace(**given | changed)  # type: ignore[assignment]
    module._current_fx_name = "training_step"
    return module


def test_gradients_of_the_step_before_go_early_in_the_first_batch_of_a_window_alone() -> None:
    assert [about_to_zero_gradients(module_at(step)) for step in range(4)] == [True, False, True, False]
    assert about_to_zero_gradients(module_at(1, accumulate_grad_batches=1))


@pytest.mark.parametrize(
    "changed", [{"callbacks": [Looks()]}, {"training": False}, {"kind": ZeroesItself}], ids=["looks", "val", "own"]
)
def test_they_stay_where_somebody_may_look(changed: dict[str, Any]) -> None:
    assert not about_to_zero_gradients(module_at(0, **changed))
