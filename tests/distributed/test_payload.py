"""How many microbatches' inputs are where they are computed with, in real steps that copy them as for a device."""

from __future__ import annotations

import weakref
from collections import defaultdict
from itertools import chain
from typing import NamedTuple

import pytest
import torch

from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.inputs import ModuleInputs, tensors_of
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.runtime.payload import AHEAD, Moving
from hetero_strategy.testing import Pool, Setting

ROW = (0, 1, 2, 3)
SIZES = {"vision": (32, 2), "llm": (32, 4), "freeze": ("vision",), "microbatches": 6}
SETTINGS = {
    "colocated": Setting("", {"vision": ModuleLayout((0, 1)), "llm": ModuleLayout((0, 1))}, **SIZES),
    "two chunks": Setting(
        "", {"vision": ModuleLayout((0, 1)), "llm": ModuleLayout((0, 1), pp=2, vpp=2)}, "interleaved_1f1b", **SIZES
    ),
    "in bubbles": Setting("", {"vision": ModuleLayout(ROW), "llm": ModuleLayout(ROW, pp=4)}, fill="fine", **SIZES),
}  # fmt: skip


class Counted:
    """Copies inputs, and counts the microbatches of which any copy is alive."""

    def __init__(self) -> None:
        self.copied: dict[str, list[set[int]]] = defaultdict(list)
        """By kind of inputs: of every microbatch, which of its tensors are alive."""
        self.most: dict[str, int] = defaultdict(int)

    def alive(self, kind: str) -> int:
        return sum(map(bool, self.copied[kind]))

    def start(self, inputs: ModuleInputs) -> Moving:
        moved, kind, alive = inputs.each(torch.Tensor.clone), type(inputs).__name__, set[int]()
        self.copied[kind].append(alive)
        for tensor in tensors_of(moved):
            if tensor.numel():
                alive.add(key := tensor.untyped_storage()._cdata)
                weakref.finalize(tensor.untyped_storage(), alive.discard, key)
        self.most[kind] = max(self.most[kind], self.alive(kind))
        self.most["all"] = max(self.most["all"], sum(map(self.alive, self.copied)))
        return Moving(moved)

    def finish(self, moving: Moving) -> ModuleInputs:
        return moving.inputs


class Seen(NamedTuple):
    most: dict[str, int]
    """Microbatches whose copies are alive at once, by kind of inputs."""
    copied: int
    pictures: int
    """Microbatches in which this rank's instance has any."""
    after: int
    """Alive after the step."""
    equal: bool
    """Gradients are those of a step that copies nothing, bit by bit."""


def steps_on_rank(rank: int, world: int, setting: Setting, damage: bool) -> dict[bool, Seen]:
    """By whether the step trains."""
    made = setting.assembled(rank)
    owned = [p for one in made.owned.values() if (p := one.parameter).requires_grad]
    batch = setting.batch(0, rank)
    forgotten: list[ModuleInputs] = []

    def run(train: bool) -> list[torch.Tensor]:
        for p in owned:
            p.grad = None
        made.executor.run(batch, train=train)
        return [local(p.grad).clone() for p in owned if p.grad is not None]

    plain = {train: run(train) for train in (False, True)}
    pictures = sum(one is not None and len(one.packing.lengths) > 0 for one in batch.inputs["vision"])  # type: ignore[attr-defined]
    seen = {}
    for train in (False, True):
        counted = made.executor.copies = Counted()
        if damage:
            counted.finish = lambda moving: forgotten.append(moving.inputs) or moving.inputs  # type: ignore[assignment, func-returns-value]
        gradients = run(train)
        copied = chain.from_iterable(counted.copied.values())
        after = sum(map(counted.alive, counted.copied))
        equal = len(gradients) == len(plain[train]) and all(map(torch.equal, gradients, plain[train]))
        seen[train] = Seen(dict(counted.most), len(list(copied)), pictures, after, equal)
    return seen


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_a_device_has_the_inputs_of_this_microbatch_and_of_the_next(pool: Pool, name: str) -> None:
    setting = SETTINGS[name]
    for seen in pool.run(setting.world, steps_on_rank, setting, False, timeout=240):
        for train, (most, copied, pictures, after, equal) in seen.items():
            assert equal and not after
            # Text of all microbatches; pictures too, or, where instances act on their own, of those that have any.
            assert copied == setting.microbatches + (pictures if setting.fill == "fine" else setting.microbatches)
            assert most.get("EncoderInputs", 0) <= 1 + AHEAD  # as it is frozen, backward needs none of them
            if name == "colocated" and not train:  # else backward does, or one chunk's wait for the other's turn
                assert most["all"] == 1 + AHEAD


@pytest.mark.full
def test_inputs_that_somebody_holds_are_noticed(pool: Pool) -> None:
    setting = SETTINGS["colocated"]
    for seen in pool.run(setting.world, steps_on_rank, setting, True, timeout=240):
        assert all(one.most["all"] > 1 + AHEAD and one.after for one in seen.values())
