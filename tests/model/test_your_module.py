"""The modules of docs/your_module.md and of the examples that it names do what the page says of them."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetero_strategy.data.processors import processors_of
from hetero_strategy.errors import ConfigError, LayoutError, ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model import MultimodalModel, Packing, SequenceInputs
from hetero_strategy.model.kind import InstanceUnits
from hetero_strategy.parallelize.apply import check_all
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, edge_blocks
from hetero_strategy.plan.step_plan import slots as rows_filled
from hetero_strategy.zoo.siglip2 import merge_order
from tests.model.helpers import images, ready

PAGE = Path(__file__).parents[2] / "docs" / "your_module.md"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names of the page, which quotes parts of the examples, and of the examples."""
    monkeypatch.syspath_prepend(EXAMPLES)
    own: dict[str, Any] = {}
    for name in ("own_encoder", "own_kind", "own_processor"):
        own |= runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="page")
    names = dict(own)
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    names |= own
    encoder, projector = own["Encoder"], own["Projector"]
    names["vision"] = encoder(own["PatchTransformer"], projector(64, 32), processor=names["patches"])
    names["sensor"] = encoder(own["SeriesMLP"], projector(64, 32), processor=own["Series"]())
    names["match"] = own["Match"]()
    return names


@pytest.mark.parametrize("name", ["simple", "vision"])
def test_encoders_take_any_number_of_items(page: dict[str, Any], name: str) -> None:
    encoder = ready(page[name])
    inputs = images([(2, 3), (1, 4)], patch=4)
    rows = encoder(inputs)
    assert rows.shape == (10, 32)
    assert torch.allclose(rows[:6], encoder(images([(2, 3)], patch=4)))  # the other item is not seen
    encoder(images([], patch=4)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in encoder.parameters())


@pytest.mark.parametrize("lengths", [[3, 5, 1], [4], []])
def test_a_convolution_stays_inside_items(page: dict[str, Any], lengths: list[int]) -> None:
    made = page["ItemConvolution"](width=8)
    rows = torch.randn(sum(lengths), 8, generator=torch.Generator().manual_seed(0))
    wanted = torch.cat([rows.new_zeros(0, 8), *(made.conv(part.T[None])[0].T for part in rows.split(lengths))])
    torch.testing.assert_close(made(rows, Packing.of(np.array(lengths, np.int64))), wanted)


@pytest.mark.parametrize("sizes", [[(2, 4), (4, 6)], []])
def test_neighbours_are_merged_as_ready_encoders_do(page: dict[str, Any], sizes: list[tuple[int, int]]) -> None:
    inputs = images(sizes, merge=2, patch=4)
    wanted = inputs.values[torch.from_numpy(merge_order(inputs.sizes, 2))].reshape(-1, 4 * 48)
    assert torch.equal(page["merged"](inputs.values, inputs.sizes), wanted) and len(wanted) == inputs.rows.sum()


def in_stages(module: Any, inputs: Any, cuts: tuple[int, ...]) -> Any:
    fqns, rows, first = list(module.blocks()), None, 0
    for number in cuts:
        last = first + number == len(fqns)
        part = module.stage(fqns[first : first + number], first=not first, last=last)
        rows, first = part(inputs, {}, rows), first + number
    return rows


def test_they_can_be_cut_into_stages(page: dict[str, Any]) -> None:
    vision, llm = ready(page["vision"]), ready(page["llm"])
    inputs, text = images([(2, 3), (1, 4)], patch=4), tokens(3, 5)
    assert torch.equal(in_stages(vision, inputs, (1, 2, 1)), vision(inputs))
    assert torch.equal(in_stages(llm, text, (1, 1)).loss_sum, llm(text).loss_sum)


def tokens(*lengths: int) -> SequenceInputs:
    ids = torch.arange(sum(lengths)) % 100
    return SequenceInputs(ids, (ids + 1) % 100, Packing.of(np.array(lengths)))


def test_parts_that_it_names_and_lacks_are_refused(page: dict[str, Any]) -> None:
    backbone, encoder = page["PatchTransformer"], page["Encoder"]

    def said(made: Callable[[], nn.Module], width: int, tp: int) -> str:
        modules = {"vision": encoder(made, page["Projector"](width, 32))}
        with pytest.raises(LayoutError) as error:
            check_all(modules, {"vision": ModuleLayout(ranks=tp, tp=tp).resolved()})
        return str(error.value)

    text = said(type("Mistyped", (backbone,), {"tp_columns": ("q", "k", "v", "upp")}), 64, 2)
    assert "layout of 'vision': tp=2, but it has no part backbone.layers.*.upp" in text
    assert "the linear layers of its blocks are q, k, v, o, up, down" in text
    text = said(lambda: backbone(width=48), 48, 5)
    assert "48 outputs of q not divisible by tp 5; set tp=4 or 6" in text
    assert "192 inputs of down not divisible by tp 5; set tp=4 or 6" in text
    wrapped = backbone(width=64)
    for layer in wrapped.layers:
        layer.q = nn.Sequential(layer.q)
    text = said(lambda: wrapped, 64, 2)
    assert "layers.0.q is a Sequential and no nn.Linear or nn.Embedding" in text and "tp_columns" in text
    check_all({"vision": page["vision"]}, {"vision": ModuleLayout(ranks=2, tp=2).resolved()})
    with pytest.raises(ModelError, match=r"Wrong: block_list = 'layer', but .* its lists of parts are layers"):
        type("Wrong", (backbone,), {"block_list": "layer"})().blocks()


def test_a_processor_without_all_its_methods_is_refused(page: dict[str, Any]) -> None:
    kept = ("__init__", "field", "measure", "inner_rows", "check", "load", "opened")
    said = {name: vars(page["Series"])[name] for name in kept}
    encoder = page["Encoder"](page["PatchMLP"], page["Projector"](64, 32), processor=type("P", (), said)())
    message = "processor of module 'sensor': P lacks collate, settings, size_names"
    with pytest.raises(ConfigError, match=message):
        processors_of(MultimodalModel({"sensor": encoder, "llm": page["llm"]}), {})
    processors_of(MultimodalModel({"sensor": page["sensor"], "llm": page["llm"]}), {})


def test_sequences_do_not_see_each_other(page: dict[str, Any]) -> None:
    llm = ready(page["llm"])
    both, first = (llm(tokens(*lengths), keep_logits=True) for lengths in ((3, 5), (3,)))
    assert torch.allclose(both.logits[:3], first.logits)
    assert torch.isfinite(both.loss_sum)


def test_a_kind_of_its_own(page: dict[str, Any]) -> None:
    """Its loss is that of its units one by one, as each is planned."""
    modules = {name: ready(page[name], name=name) for name in ("vision", "llm", "match")}
    edges = [("vision", "llm"), ("vision", "match"), ("llm", "match")]
    model = MultimodalModel(modules, edges)
    assert model.with_loss() == ("llm", "match")
    pictures = StepItems(*(np.array(x) for x in ([0, 0, 2], [4, 1, 6], [1, 6, 0], [4, 1, 6])))
    metadata = StepMetadata(0, 0, np.arange(3), np.array([9, 3, 8]), np.array([8, 2, 7]), {"vision": pictures})
    table = page["Match"].kind.units(metadata, ["vision", "llm"])
    metadata = replace(metadata, items={**metadata.items, "match": table})
    plan = plan_step(metadata, dict.fromkeys(modules, 1), ("llm",))
    assert plan.normalizer("match") == 2 * (1 + page["NEGATIVES"]) and plan.feeds("llm", "match") == [(0, 0)]
    text = tokens(9, 3, 8)
    slots = {("vision", 0): torch.tensor([1, 2, 3, 4, 6, *range(12, 18)])}
    seen = images([(2, 2), (1, 1), (2, 3)], patch=4)
    given = InstanceUnits(
        module="match", numbers=np.arange(2), edge_rows=table.edge_rows, inner_rows=table.inner_rows,
        slots={
            (name, 0): torch.from_numpy(rows_filled(edge_blocks(plan, name, 0, "match", 0), 0))
            for name in ("vision", "llm")
        },
        first=True, last=True, seed=(0, 0), processor=None, content=None,  # type: ignore[arg-type]
    )  # fmt: skip
    inputs = page["Match"].kind.inputs(given)
    made = {"vision": (seen,), "llm": (replace(text, slots=slots),), "match": (inputs,)}
    out = model(Batch(plan, made))
    assert all(module.packed_equals_alone for module in modules.values())
    rows, head = modules["vision"](seen), modules["match"]
    hidden = modules["llm"](made["llm"][0], {("vision", 0): rows}).hidden
    total = torch.zeros((), dtype=torch.float64)
    for mine, whole in ((rows[:5], hidden[:9]), (rows[5:], hidden[12:])):
        means = head.norm(torch.stack([mine.mean(0), whole.mean(0)]))
        picture, written = head.picture(means[0]), head.text(means[1])
        scores = head.scale(torch.cat([(picture @ written)[None], head.negatives(picture)])[:, None])
        total = total - nn.functional.logsigmoid(scores[0, 0]) - nn.functional.logsigmoid(-scores[1:, 0]).sum()
    torch.testing.assert_close(out.losses["match"], total / plan.normalizer("match"), rtol=1e-12, atol=0)
    silent = Batch(plan, made).without(np.array([True, False, True]))
    assert model(silent).losses["match"] == 0 and silent.plan.normalizer("match") == 1


def test_they_make_a_model(page: dict[str, Any]) -> None:
    model = MultimodalModel({"vision": page["vision"], "llm": page["llm"]})
    assert [(edge.source, edge.target) for edge in model.edges] == [("vision", "llm")]
    assert page["vision"].tp_plan() and page["llm"].flops(np.array([4])) > 0
