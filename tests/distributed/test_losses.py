"""Any expression of a step's losses gives the gradients that one process gives, and no others, fp64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.steps import RankView
from hetero_strategy.model import ModelOutput, MultimodalModel
from hetero_strategy.parallelize.gradients import local, settle
from hetero_strategy.plan.packing import deal
from hetero_strategy.runtime import actions
from hetero_strategy.runtime.step import StepRunner
from hetero_strategy.testing import Pool
from tests.distributed.exact import EXACT, NOTICED, on
from tests.distributed.stepping import (
    SAMPLES,
    Reference,
    Setting,
    assembled,
    data,
    data_of,
    empty_model,
    fp64,
    model_of,
    placed,
    share_of,
    steps_of,
)

Call = Callable[[], ModelOutput]

LAYOUTS = {"vision": on(0), "draw": on(1), "llm": on(0, 1, pp=2)}
"""Not in the order of rows, in which losses are named all the same."""
SHARDED = {"vision": on(0), "llm": on(0, 1, dp_shard=2), "draw": on(0, 1, dp_shard=2)}
"""Weights are gathered with every microbatch."""
WEIGHTS = torch.tensor([1.0, 0.1], dtype=torch.float64)
DROPOUT = {"attention_dropout": 0.3}
"""A step that is run once more draws the same random numbers."""


def one_after_another(call: Call) -> None:
    losses = call().losses
    losses["llm"].backward(retain_graph=True)
    (0.5 * losses["draw"]).backward()


def with_teacher(call: Call) -> None:
    with torch.no_grad():
        teacher = call()
    (call().loss * teacher.losses["llm"]).backward()


def two_calls(call: Call) -> None:
    first, second = call(), call()
    (first.loss + 0.5 * second.losses["llm"] + 2.0 * second.losses["draw"]).backward()


def written(loss: Callable[[ModelOutput], torch.Tensor]) -> Callable[[Call], None]:
    return lambda call: loss(call()).backward()


FORMS: dict[str, tuple[Callable[[Call], None], int]] = {
    "loss": (written(lambda out: out.loss), 1),
    "factor": (written(lambda out: 0.25 * out.loss), 1),
    "sum of shares": (written(lambda out: sum(out.losses.values(), torch.zeros(()))), 1),
    "weights by module": (written(lambda out: out.losses["llm"] + 0.1 * out.losses["draw"]), 2),
    "weights by place": (written(lambda out: torch.stack([*out.losses.values()]) @ WEIGHTS), 1),
    "the same weights again": (written(lambda out: 2 * out.losses["llm"] + 0.2 * out.losses["draw"]), 1),
    "loss and a share": (written(lambda out: out.loss + 3.0 * out.losses["llm"]), 2),
    "square": (written(lambda out: out.loss**2), 2),
    "exp": (written(lambda out: torch.exp(0.1 * out.loss)), 1),
    "product": (written(lambda out: out.losses["llm"] * out.losses["draw"]), 2),
    "one share": (written(lambda out: out.losses["draw"]), 2),
    "nothing but the language model": (written(lambda out: out.losses["llm"].log()), 2),
    "teacher": (with_teacher, 2),
    "two calls": (two_calls, 4),
    "one after another": (one_after_another, 3),
}
"""What a person writes, and how many times the schedule runs for it."""


def gradients(model: MultimodalModel, batch: Batch, form: str) -> dict[str, torch.Tensor]:
    model._called = ()
    FORMS[form][0](lambda: model(batch))
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        p.grad = None
    return found


def alone(setting: Setting) -> dict[str, Reference]:
    with fp64():
        vocabulary = data_of(setting.folder, True).tokenizer.vocab_size
        model = model_of(setting, vocabulary).double()
        batch: Any = steps_of(setting, 2, RankView.whole(setting.modules))[0]
        return {form: Reference({}, gradients(model, batch, form)) for form in FORMS}


def on_rank(rank: int, world: int, setting: Setting) -> tuple[dict[str, Any], dict[str, int], list[str]]:
    """Gradients and runs of every form, and what wrong uses raise."""
    model = empty_model(setting)
    made = assembled(setting, rank, world, model=model)
    runs, run = [0], made.executor.run

    def counting(*args: Any, **options: Any) -> Any:
        runs[0] += 1
        return run(*args, **options)

    made.executor.run = counting  # type: ignore[method-assign]
    model.attach(
        StepRunner(made.executor, [o.parameter for o in made.owned.values()], lambda: None, lambda: True, lambda: False)
    )
    batch = steps_of(setting, 2, share_of(placed(setting, world), setting, rank))[0]
    found, counts = {}, {}
    assert list(model(batch).losses) == list(model(batch).metrics) == ["llm", "draw"]
    for form in FORMS:
        before = runs[0]
        found[form] = gradients(model, batch, form)
        counts[form] = runs[0] - before
    raised = []
    loss = model(batch).loss
    loss.backward()
    with pytest.raises(RuntimeError) as twice:
        loss.backward()
    raised.append(str(twice.value))
    out = model(batch)
    with torch.no_grad():
        for owned in made.owned.values():
            owned.parameter.mul_(1.01)
    with pytest.raises(RuntimeError) as changed:
        (out.losses["llm"] + 7 * out.losses["draw"]).backward()
    raised.append(str(changed.value))
    return found, counts, raised


def stepped(model: MultimodalModel, batch: Batch) -> list[dict[str, float]]:
    """Losses of four batches, of which every other one leaves out the drawings; a step after every second one."""
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.device.type != "meta"], 0.1), []
    for number in range(4):
        model._called = ()
        out = model(batch)
        (out.losses["llm"] if number % 2 else out.loss).backward()
        losses.append({name: float(loss.detach()) for name, loss in out.losses.items()})
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def stepped_on_rank(rank: int, world: int, setting: Setting) -> list[dict[str, float]]:
    model = empty_model(setting)
    made = assembled(setting, rank, world, model=model)
    owned = [o.parameter for o in made.owned.values()]
    model.attach(StepRunner(made.executor, owned, lambda: None, lambda: True, lambda: False))
    batch = steps_of(setting, 2, share_of(placed(setting, world), setting, rank))[0]
    return stepped(model, batch)


def test_weights_of_a_module_whose_loss_is_left_out_are_those_of_the_next_step(pool: Pool, tmp_path: Path) -> None:
    setting = Setting(data(tmp_path, draws=True), SHARDED, lm="hf_llama")
    with fp64():
        model = model_of(setting, data_of(setting.folder, True).tokenizer.vocab_size).double()
        batch: Any = steps_of(setting, 2, RankView.whole(setting.modules))[0]
        expected = stepped(model, batch)
    assert expected[2]["draw"] != pytest.approx(expected[0]["draw"], rel=NOTICED)
    for losses in pool.run(2, stepped_on_rank, setting):
        for found, wanted in zip(losses, expected, strict=True):
            assert found == pytest.approx(wanted, rel=EXACT)


APART = {"vision": on(0, 1, dp_replicate=2, dp_shard=1), "draw": on(0, 1, dp_shard=2), "llm": on(0, 1, cp=2)}
"""Replicas, shards and context parallelism, on all of which every parameter is on both ranks."""


ROUNDED = 1e-7


def partly(model: MultimodalModel, batches: list[Batch]) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients where a step leaves something out: those that no loss reaches are not there."""
    batch, without_drawings = batches
    first, every = deal(len(batch), 2, 2).instance == 0, np.ones(len(batch), bool)
    vision = list(model.modules_by_name["vision"].parameters())
    found = {}

    def of(case: str, loss: torch.Tensor, *, freeze: bool = False) -> None:
        for p in vision:
            p.requires_grad_(not freeze)
        loss.backward()
        for p in vision:
            p.requires_grad_()
        found[case] = {"": loss.detach().clone()}
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[case][name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
            p.grad = None

    of("whole", model(batch).loss)
    of("one share", model(batch).losses["draw"])
    of("nothing drawn", model(without_drawings).losses["draw"])
    of("all of the first of two instances dropped", model(batch.without(first)).loss)
    of("all dropped", model(batch.without(every)).loss)
    of("frozen since the forward", model(batch).loss, freeze=True)
    losses = model(batch).losses
    of("frozen, then run again", losses["llm"] + 7 * losses["draw"], freeze=True)
    return found


def settle_rounded(rank: int, parameters: Iterable[torch.nn.Parameter], *given: Any) -> Callable[[], None]:
    """As where each rank's kernels add in an order of their own."""
    parameters = list(parameters)
    for p in parameters:
        if p.grad is not None:
            local(p.grad).mul_(1 + ROUNDED * rank)
    return settle(parameters, *given)


def partly_on_rank(rank: int, world: int, settings: list[Setting]) -> list[dict[str, dict[str, torch.Tensor]]]:
    found = []
    for setting in settings:
        model = empty_model(setting)
        made = assembled(setting, rank, world, model=model)
        owned = [o.parameter for o in made.owned.values()]
        model.attach(StepRunner(made.executor, owned, lambda: None, lambda: True, lambda: False))
        steps = steps_of(setting, 2, share_of(placed(setting, world), setting, rank))
        split = any("tp" in layout for layout in setting.layouts.values())
        with patch.object(actions, "settle", partial(settle_rounded, rank)) if split else nullcontext():
            found.append(partly(model, [steps[0], steps[0, 1]]))
    return found


def test_parameters_that_no_loss_reaches_have_no_gradient_on_any_layout(pool: Pool, tmp_path: Path) -> None:
    folder = data(tmp_path, draws=True)
    drawn = [bool(sample.get("draw")) for sample in json.loads((Path(folder) / "train.json").read_text())]
    batches = (tuple(range(SAMPLES)), tuple(number for number, draws in enumerate(drawn) if not draws))
    plain = Setting(folder, APART, lm="hf_llama", batches=batches, unused=("vision", "draw", "llm"))
    with fp64():
        model = model_of(plain, data_of(folder, True).tokenizer.vocab_size).double()
        steps = steps_of(plain, 2, RankView.whole(plain.modules))
        expected = partly(model, [steps[0], steps[0, 1]])
    names = {name for name, _ in model.named_parameters()}
    assert set(expected["nothing drawn"]) == {""} and expected["all dropped"][""] == 0
    assert "llm.model.lm_head.weight" in expected["whole"].keys() - expected["one share"].keys()
    for module, block in (("vision", "layers.1"), ("llm", "layers.3"), ("draw", "layers.1")):
        assert not [n for n in expected["whole"] if n.startswith(module) and block in n] and block in " ".join(names)
    settings = [replace(plain, reshard_after_forward="always")]
    settings.append(replace(plain, layouts={**APART, "llm": on(0, 1, dp_shard=2)}, reshard_after_forward="never"))
    settings.append(replace(plain, layouts=dict.fromkeys(APART, on(0, 1, tp=2))))
    ranks = pool.run(2, partly_on_rank, settings)
    for one, other, bound in zip(*ranks, (EXACT, EXACT, ROUNDED), strict=True):
        for case, gradients in expected.items():
            assert set(one[case]) == set(other[case]) == set(gradients), case
            for name, gradient in gradients.items():
                assert torch.equal(one[case][name], other[case][name]), (case, name)
                apart = float((one[case][name] - gradient).norm())
                assert apart <= bound * (1 + float(gradient.norm())), (case, name)


@pytest.mark.full
def test_losses_in_any_expression(pool: Pool, tmp_path: Path) -> None:
    setting = Setting(data(tmp_path, draws=True), LAYOUTS, dropout=DROPOUT, lm="hf_llama")
    references = alone(setting)
    plain = Setting(setting.folder, LAYOUTS, lm="hf_llama")
    assert max(alone(plain)["loss"].errors(references["loss"].gradients).values()) > NOTICED
    ranks = pool.run(2, on_rank, setting, timeout=240)
    for form, expected in references.items():
        assert set().union(*(found[form] for found, *_ in ranks)) == set(expected.gradients), form
        for found, counts, _ in ranks:
            for name, error in expected.errors(found[form]).items():
                assert error <= EXACT, f"{form}: {name}"
            assert counts[form] == FORMS[form][1], form
    for *_, (twice, changed) in ranks:
        assert "a second time" in twice and "parameters have changed since" in changed
