"""The flow decoder alone: what it computes, in parts and with nothing to compute."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model import GeneratorInputs, GeneratorOutput, Packing
from hetero_strategy.zoo import flow_decoder
from hetero_strategy.zoo.flow import positions
from tests.model.helpers import ready

FLOW = {"width": 16, "patch_size": 2, "channels": 1, "dim": 8, "n_layers": 3, "n_heads": 2, "sample_steps": 3}


def items(grids, conditions, seed=0, slots=None):
    """Items of these grids and numbers of condition rows, fed by one source unless ``slots`` says otherwise."""
    grids = np.array(grids, dtype=np.int64).reshape(-1, 2)
    conditions = np.array(conditions, dtype=np.int64)
    patches = grids.prod(1)
    lengths = patches + conditions
    starts = np.cumsum(lengths) - lengths
    places = [start + k for start, count in zip(starts, conditions, strict=True) for k in range(count)]
    generator = torch.Generator().manual_seed(seed)
    return GeneratorInputs(
        values=torch.randn(int(patches.sum()), 4, generator=generator),
        noise=torch.randn(int(patches.sum()), 4, generator=generator),
        time=torch.rand(len(grids), generator=generator),
        sizes=grids,
        rows=conditions,
        packing=Packing.of(lengths),
        slots=slots or {("llm", 0): torch.tensor(places, dtype=torch.long)},
    )


def conditions_of(inputs, seed=5):
    count = int(inputs.rows.sum())
    rows = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {("llm", 0): rows.requires_grad_()}


@pytest.fixture
def decoder():
    return ready(flow_decoder(**FLOW))


def one(inputs, place):
    """The inputs of one item alone."""
    before = np.concatenate([[0], np.cumsum(inputs.target_rows)])
    rows = slice(before[place], before[place + 1])
    count = int(inputs.rows[place])
    return GeneratorInputs(
        inputs.values[rows],
        inputs.noise[rows],
        inputs.time[place : place + 1],
        inputs.sizes[place : place + 1],
        inputs.rows[place : place + 1],
        Packing.of(inputs.packing.lengths[place : place + 1]),
        slots={("llm", 0): torch.arange(count)},
    )


def test_items_together_equal_items_alone(decoder):
    inputs = items([(2, 3), (1, 2), (3, 3)], [2, 1, 3])
    rows = conditions_of(inputs)
    loss = decoder(inputs, rows).loss_sum
    parts = [
        decoder(one(inputs, place), {("llm", 0): part}).loss_sum
        for place, part in enumerate(rows["llm", 0].split(inputs.rows.tolist()))
    ]
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, sum(parts), rtol=1e-12, atol=0)
    trained = [*decoder.parameters(), rows["llm", 0]]
    for a, b in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(sum(parts), trained), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert a.abs().max() > 0  # from the first step, everything learns


def test_what_is_drawn_is_integrated_from_time_0_on(decoder, monkeypatch):
    """With velocities that are the time, Euler's three steps are at 0, 1/3 and 2/3."""
    inputs = items([(2, 2)], [1])
    monkeypatch.setattr(decoder, "_velocity", lambda hidden, now: now.time.expand(4, 4))
    (conditions,) = conditions_of(inputs).values()
    drawn = decoder.draw(inputs, conditions, torch.zeros(1, dtype=torch.long))
    torch.testing.assert_close(drawn, inputs.noise.double() + (0 + 1 / 3 + 2 / 3) / 3)


def test_the_loss_is_that_of_the_velocity(decoder):
    """Written again: with the network's prediction held, the loss is the squared distance to data - noise."""
    inputs = items([(2, 2)], [1])
    rows = conditions_of(inputs)
    seen = []
    decoder.patch_out.register_forward_hook(lambda module, given, made: seen.append(made))
    entered = []
    decoder.patch_in.register_forward_hook(lambda module, given, made: entered.append(given[0]))
    loss = decoder(inputs, rows).loss_sum
    t = inputs.time.double()[0]
    values, noise = inputs.values.double(), inputs.noise.double()
    torch.testing.assert_close(entered[0], t * values + (1 - t) * noise, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, ((seen[0] - (values - noise)) ** 2).sum(), rtol=1e-12, atol=0)


def test_conditions_times_and_places_matter(decoder):
    inputs = items([(2, 3), (2, 3)], [2, 2])
    rows = conditions_of(inputs)
    loss = decoder(inputs, rows).loss_sum
    for change in (
        {"slots": {("llm", 0): inputs.slots["llm", 0].roll(1)}},
        {"time": inputs.time.flip(0)},
        {"sizes": inputs.sizes[:, ::-1].copy()},
    ):
        other = GeneratorInputs(**{**vars(inputs), **change})
        assert abs(decoder(other, rows).loss_sum - loss) > 1e-6, change


def test_two_source_microbatches_fill_one(decoder):
    inputs = items([(2, 3), (1, 2)], [2, 1])
    rows = conditions_of(inputs)["llm", 0]
    split = GeneratorInputs(
        **{**vars(inputs), "slots": {("llm", 1): torch.tensor([0, 1]), ("llm", 0): torch.tensor([8])}}
    )
    whole = decoder(inputs, {("llm", 0): rows}).loss_sum
    parts = decoder(split, {("llm", 0): rows[2:], ("llm", 1): rows[:2]}).loss_sum
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=0)


@pytest.mark.parametrize("split", [(1, 2), (1, 1, 1)])
@pytest.mark.parametrize("grids", [[(2, 3), (1, 2)], []])
def test_a_chain_of_stages_is_the_whole(decoder, split, grids):
    inputs = items(grids, [2, 1][: len(grids)])
    rows = conditions_of(inputs) if grids else {}
    decoder(inputs, rows).loss_sum.backward()
    expected = {name: p.grad.clone() for name, p in decoder.named_parameters()}
    loss = decoder(inputs, rows).loss_sum
    decoder.zero_grad(set_to_none=True)
    names, first, hidden, stages = list(decoder.blocks()), 0, None, []
    for count in split:
        last = first + count == len(names)
        stages.append(decoder.stage(names[first : first + count], first=first == 0, last=last))
        # A stage that is neither first nor last has no targets to look at.
        bare = {"values": torch.zeros(0, 4), "noise": torch.zeros(0, 4)} if first and not last else {}
        given = GeneratorInputs(**{**vars(inputs), **bare})
        hidden = stages[-1](given, rows if first == 0 else {}, hidden)
        first += count
    assert torch.equal(hidden.loss_sum, loss)
    hidden.loss_sum.backward()
    assert {name: torch.equal(p.grad, expected[name]) for name, p in decoder.named_parameters()} == dict.fromkeys(
        expected, True
    )
    assert sorted(name for stage in stages for name, _ in stage.named_parameters()) == sorted(expected)
    assert stages[-1].eval()(inputs, {}, torch.zeros(inputs.packing.rows, 8).double()).drawn is None
    assert decoder.stage_flops(inputs.packing.lengths, split).sum() == pytest.approx(
        decoder.flops(inputs.packing.lengths)
    )


def test_nothing_to_draw_gives_zero_gradients(decoder):
    inputs = items(np.zeros((0, 2)), np.zeros(0))
    out = decoder(inputs, {})
    assert out.loss_sum == 0
    out.loss_sum.backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in decoder.parameters())
    assert decoder.eval()(inputs, {}).drawn.shape == (0, 4)


def test_drawing(decoder):
    inputs = items([(2, 3), (1, 2)], [2, 1])
    rows = conditions_of(inputs)
    assert decoder(inputs, rows).drawn is None
    out = decoder.eval()(inputs, rows)
    assert isinstance(out, GeneratorOutput) and not out.drawn.requires_grad
    blind = GeneratorInputs(**{**vars(inputs), "values": torch.zeros_like(inputs.values), "time": inputs.time.flip(0)})
    torch.testing.assert_close(decoder(blind, rows).drawn, out.drawn, rtol=0, atol=0)  # looks at neither
    other = {("llm", 0): rows["llm", 0].flip(0)}
    assert (decoder(inputs, other).drawn - out.drawn).abs().max() > 1e-6


@pytest.mark.full
def test_a_decoder_learns_what_its_conditions_ask_for():
    """Two pictures, told apart by the condition row alone; the drawing is nearer to the one that was asked for."""
    decoder = ready(flow_decoder(**{**FLOW, "dim": 32, "n_layers": 2, "sample_steps": 8}), dtype=torch.float32)
    pictures = torch.stack([torch.eye(4), 1 - torch.eye(4)]) * 2 - 1  # [2, rows 4, feature 4]
    asked = torch.randn(2, 16)
    optimizer = torch.optim.AdamW(decoder.parameters(), 3e-3)
    for step in range(150):
        inputs = items([(2, 2)] * 16, [1] * 16, seed=step)
        which = torch.arange(16) % 2
        inputs = GeneratorInputs(**{**vars(inputs), "values": pictures[which].flatten(0, 1)})
        loss = decoder(inputs, {("llm", 0): asked[which]}).loss_sum / inputs.values.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    inputs = items([(2, 2)] * 8, [1] * 8, seed=999)
    which = torch.arange(8) % 2
    drawn = decoder.eval()(inputs, {("llm", 0): asked[which]}).drawn.unflatten(0, (8, 4))
    distance = (drawn[:, None] - pictures[None]).square().mean((2, 3))  # [8, 2]
    assert torch.equal(distance.argmin(1), which) and distance.min(1).values.mean() < 0.2


def test_misfits_are_refused(decoder):
    inputs = items([(2, 3)], [2])
    rows = conditions_of(inputs)
    with pytest.raises(DataError, match=r"gives 0 rows for 2 slots"):
        decoder(inputs, {})
    with pytest.raises(DataError, match=r"have no slots"):
        decoder(inputs, {**rows, ("other", 0): torch.zeros(1, 16)})
    bare = GeneratorInputs(**{**vars(inputs), "slots": {}})
    with pytest.raises(DataError, match=r"0 condition rows are given, but the items take 2"):
        decoder(bare, {})
    wide = GeneratorInputs(**{**vars(inputs), "values": torch.zeros(6, 5), "noise": torch.zeros(6, 5)})
    with pytest.raises(DataError, match=r"patch_size and channels must match"):
        decoder(wide, rows)
    for fields in ({"dim": 6}, {"n_heads": 3}, {"n_layers": 0}):
        with pytest.raises(ModelError, match="flow_decoder: "):
            flow_decoder(**{**FLOW, **fields})


def test_flops_count_what_runs(decoder):
    from torch.utils.flop_counter import FlopCounterMode

    inputs = items([(2, 3), (1, 2)], [2, 1])
    small = copy.deepcopy(decoder)
    with FlopCounterMode(display=False) as counter:
        small(inputs, {key: rows.detach() for key, rows in conditions_of(inputs).items()})
    counted = counter.get_total_flops()
    assert decoder.flops(inputs.packing.lengths) == pytest.approx(counted, rel=0.2)


def test_a_drawing_that_does_not_count_adds_nothing_to_the_loss(decoder):
    inputs = items([(2, 3), (1, 2)], [2, 1])
    rows = conditions_of(inputs)
    alone = decoder(one(inputs, 1), {("llm", 0): rows["llm", 0][2:]}).loss_sum
    silenced = dataclasses.replace(inputs, counted=torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(decoder(silenced, rows).loss_sum, alone, rtol=1e-12, atol=0)


def test_no_two_rows_of_an_item_have_one_position():
    table = positions(items([(2, 2)], [2]), 8, torch.zeros((), dtype=torch.float64))
    assert len(table) == 6 == len(table.unique(dim=0))


def test_targets_have_the_dtype_that_computes_whichever_weights_are_gathered(decoder) -> None:
    """Else recomputation, in which other weights are gathered than in the forward, would make other ones."""
    last = decoder.double().stage(["layers.2"], first=False, last=True)
    for dtype in (torch.float32, torch.float64):
        last.compute_dtype = dtype
        assert {x.dtype for x in last._targets(items([[2, 2]], [1]))} == {dtype}
