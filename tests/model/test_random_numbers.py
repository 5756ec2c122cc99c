"""Random numbers inside modules follow from what is computed; see also the parity of steps with dropout."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import Wav2Vec2Config, Wav2Vec2Model

from hetero_strategy.model.random_numbers import (
    RandomNumbers,
    Seeding,
    draws_others,
    random_state_kept,
    separate_columns,
)
from hetero_strategy.zoo import hf_llama
from tests.model.helpers import LLAMA

CPU = torch.device("cpu")


class Noisy(nn.Module):
    count = 4

    def forward(self) -> torch.Tensor:
        return torch.rand(self.count)


def drawn(
    blocks: tuple[str, ...] = ("0", "1"), seed: int = 1, name: str = "vision", part_of_rows: int = 0, **other: Any
) -> list[list[float]]:
    """What a module of blocks draws in one microbatch: before, in and after each of those that are here."""
    made = {fqn: Noisy() for fqn in ("0", "1")}
    numbers = RandomNumbers(seed, name, made)
    numbers.part_of_rows = part_of_rows
    given = {"epoch": 0, "step": 0, "call": 0, "microbatch": 0, "instance": 0, "shard": 0, "rows_of": 0} | other
    metadata = SimpleNamespace(epoch=given.pop("epoch"), step=given.pop("step"))
    torch.rand(3)  # whatever this rank drew before
    numbers.start(metadata, device=CPU, **given)
    found = []
    for fqn in blocks:
        found += [made[fqn]().tolist(), torch.rand(4).tolist()]
    return found


def test_numbers_are_those_of_the_place_and_not_of_the_rank() -> None:
    assert drawn() == drawn() and drawn(("0",)) + drawn(("1",)) == drawn()
    everything = [number for place in drawn() for number in place]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize(
    "other",
    [{"seed": 2}, {"name": "llm"}, {"epoch": 1}, {"step": 1}, {"call": 1}, {"microbatch": 1}, {"instance": 1}],
    ids=str,
)
def test_other_numbers_for_anything_else(other: dict[str, Any]) -> None:
    assert not {tuple(place) for place in drawn()} & {tuple(place) for place in drawn(**other)}


def test_what_follows_a_block_draws_the_same_however_many_numbers_the_block_drew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is compiled, or that an evaluation leaves without dropout, draws others or none."""
    expected = drawn()[1::2]
    monkeypatch.setattr(Noisy, "count", 7)
    assert drawn()[1::2] == expected


def test_tensor_parallel_ranks_share_the_numbers_of_rows_they_share() -> None:
    assert drawn(shard=1) == drawn() != drawn(shard=1, rows_of=1)


def test_blocks_that_run_on_a_part_of_the_rows_draw_numbers_of_their_own_and_all_else_shares_them() -> None:
    whole, part, last = (drawn(part_of_rows=number) for number in range(3))
    assert whole[1::2] == part[1::2] == last[1::2]  # behind blocks all ranks have all rows
    assert not {tuple(x) for x in whole[::2]} & {tuple(x) for x in part[::2]}
    assert not {tuple(x) for x in last[::2]} & {tuple(x) for x in part[::2]}


def test_columns_have_numbers_of_their_own_and_rows_go_on_after_them() -> None:
    def through(shard: int, width: int) -> list[list[float]]:
        numbers = RandomNumbers(1, "llm", {})
        numbers.start(SimpleNamespace(epoch=0, step=0), 0, 0, 0, shard, CPU, rows_of=0)
        found = [torch.rand(3).tolist()]
        numbers.part("q")
        numbers.part("k")  # one region
        found.append(torch.rand(width)[:3].tolist())
        numbers.join()
        return [*found, torch.rand(3).tolist()]

    (before, inside, after), other = through(0, 4), through(1, 7)
    assert before == other[0] and after == other[2] and inside != other[1] and inside != after


def test_layers_cut_in_columns_begin_the_numbers_of_a_rank_and_one_cut_in_rows_ends_them() -> None:
    plan = {"*.q": ColwiseParallel(), "*.k": ColwiseParallel(), "*.o": RowwiseParallel()}

    def through(shard: int) -> list[list[float]]:
        block = nn.ModuleDict({"0": nn.ModuleDict({name: nn.Linear(2, 2) for name in ("norm", "q", "k", "o")})})
        numbers = RandomNumbers(1, "llm", {})
        separate_columns(block, plan, numbers)
        numbers.start(SimpleNamespace(epoch=0, step=0), 0, 0, 0, shard, CPU, rows_of=0)
        found = []
        for layer in block["0"].values():
            layer(torch.ones(1, 2))
            found.append(torch.rand(3).tolist())
        return found

    assert [one == other for one, other in zip(through(0), through(1), strict=True)] == [True, False, False, True]


def test_a_backward_that_runs_forward_again_draws_what_the_forward_drew() -> None:
    """With other microbatches begun in between."""
    numbers, metadata = RandomNumbers(1, "llm", {}), SimpleNamespace(epoch=0, step=0)

    def drawn() -> list[list[float]]:
        found = [torch.rand(3).tolist()]
        numbers.part("q")
        found.append(torch.rand(3).tolist())
        numbers.join()
        return [*found, torch.rand(3).tolist()]

    first = numbers.start(metadata, 0, 0, 0, 1, CPU, rows_of=0)
    forward = drawn()
    numbers.start(metadata, 0, 1, 0, 1, CPU, rows_of=0)
    other = drawn()
    numbers.again(first)
    assert drawn() == forward != other


class Dropping(nn.Module):
    """Draws only once its rate is above 0, as torch's dropout does."""

    rate = 0.0

    def forward(self) -> torch.Tensor:
        return nn.functional.dropout(torch.ones(50), self.rate)


def test_what_draws_nothing_is_not_seeded_after_the_first_complete_step() -> None:
    torch.manual_seed(7)
    block = Dropping()
    numbers = RandomNumbers(1, "llm", {"0": block})
    seeding, found = Seeding([numbers]), []
    for complete in (False, True, True):
        with seeding.step(len(found), CPU, complete=complete):
            found.append(numbers.start(SimpleNamespace(epoch=0, step=0), 0, 0, 0, 0, CPU, rows_of=0))
            block()
            numbers.again(found[-1])
    assert found[0] == found[1] != 0 == found[2] and not block._forward_hooks and not block._forward_pre_hooks


@pytest.mark.parametrize("steps", [1, 3])
def test_a_module_that_draws_is_seeded_for_good_and_one_that_begins_to_says_so(steps: int) -> None:
    """From the next step on it draws what it would have drawn if it had begun with the first one."""
    block = Dropping()
    numbers = RandomNumbers(1, "llm", {"0": block})
    seeding = Seeding([numbers])

    def step(number: int) -> torch.Tensor:
        with seeding.step(number, CPU, complete=True):
            numbers.start(SimpleNamespace(epoch=0, step=number), 0, 0, 0, 0, CPU, rows_of=0)
            found: torch.Tensor = block()
        return found

    for number in range(1, steps):
        step(number)
    block.rate = 0.5
    with nullcontext() if steps == 1 else pytest.warns(UserWarning, match="step 8 drew random numbers in llm on a"):
        step(8)
    late = [step(number) for number in (9, 10)]
    numbers.start(SimpleNamespace(epoch=0, step=9), 0, 0, 0, 0, CPU, rows_of=0)
    assert torch.equal(block(), late[0]) and not torch.equal(*late)


@pytest.mark.parametrize("draw", [np.random.rand, random.random])
def test_what_draws_of_numpy_or_python_is_seeded_for_good(draw: Callable[[], float]) -> None:
    numbers = RandomNumbers(1, "audio", {}, others=True)
    seeding, seeds = Seeding([numbers]), []
    for number in range(4):
        with pytest.warns(UserWarning) if number == 2 else nullcontext(), seeding.step(number, CPU, complete=True):
            seeds.append(numbers.start(SimpleNamespace(epoch=0, step=0), 0, 0, 0, 0, CPU, rows_of=0))
            if number == 2:
                draw()
    assert seeds[0] == seeds[3] != 0 and seeds[1:3] == [0, 0]


def test_the_process_draws_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    np.random.seed(5)
    random.seed(5)
    with random_state_kept(CPU):
        drawn()
    assert torch.equal(torch.rand(4), expected)
    assert np.random.rand() == np.random.RandomState(5).rand() and random.random() == random.Random(5).random()


def test_what_numpy_and_python_draw_is_drawn_again_in_backward() -> None:
    """As masks of spectrograms in transformers, where a whole encoder runs again."""
    numbers = RandomNumbers(1, "audio", {}, others=True)

    def drew(microbatch: int) -> tuple[int, list[tuple[float, float]]]:
        seed = numbers.start(SimpleNamespace(epoch=0, step=0), 0, microbatch, 0, 0, CPU, rows_of=0)
        return seed, [(np.random.rand(), random.random())]

    (seed, first), (_, second) = drew(0), drew(1)
    numbers.again(seed)
    assert [(np.random.rand(), random.random())] == first != second


def test_other_generators_are_seeded_for_modules_whose_files_know_them() -> None:
    """It takes some 13 microseconds of every microbatch."""
    assert draws_others(nn.Sequential(nn.Linear(2, 2), Noisy()))  # this file imports both
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    assert draws_others(Wav2Vec2Model(Wav2Vec2Config(**small)))
    assert not draws_others(nn.Linear(2, 2)) and not draws_others(hf_llama(**LLAMA))
