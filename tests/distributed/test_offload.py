"""Activations in host memory on several ranks: gradients of one process in fp64, bit by bit those of nothing moved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from hetero_strategy.parallelize.host_memory import SavedBlock, host_memory
from hetero_strategy.testing import Pool
from tests.distributed.exact import compare, expected, on, setting_of
from tests.distributed.stepping import OnRank, Reference, Run, Setting, Stepped

EVERYWHERE = {"vision": "all", "llm": "every 2"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an encoder before stages of 1f1b": ({"vision": on(0), "llm": on(0, 1, pp=2)}, {}),
    "recomputed": (
        {"vision": on(0, 1, pp=2), "llm": on(0, 1, pp=2)},
        {"recompute": {"vision": "all", "llm": "every 2"}},
    ),
    "tensor parallel": (
        {"vision": on(0, 1, tp=2), "llm": on(0, 1, 2, 3, pp=2, tp=2)},
        {"recompute": {"llm": "every 2"}},
    ),
    "sharded": ({"vision": on(0, 1), "llm": on(0, 1, 2, 3, pp=2)}, {}),
    "sharded, gathered always, frozen backbone": (
        {"vision": on(0, 1, 2, 3), "llm": on(0, 1, 2, 3, pp=2)},
        {"reshard_after_forward": "always", "freeze": ("vision.backbone",)},
    ),
    "replicated rows, tied": ({"vision": on(0), "llm": on(0, 1, tp=2)}, {"lm": "hf_llama", "tied": True}),
    "encoder in bubbles": ({"vision": on(0, 1), "llm": on(0, 1, pp=2)}, {"fill": "fine"}),
}


@dataclass(frozen=True)
class _Noted:
    """A reference that keeps what it is asked to compare."""

    reference: Reference
    gradients: list[dict[str, torch.Tensor]]

    def errors(self, gradients: dict[str, torch.Tensor]) -> dict[str, float]:
        local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in gradients.items()}
        self.gradients.append({name: gradient.clone() for name, gradient in local.items()})
        return self.reference.errors(gradients)


def moved_on_rank(
    rank: int, world: int, setting: Setting, wanted: Reference, others: tuple[str, ...]
) -> tuple[list[Run], bool, int, int]:
    """Steps with the setting's offload, first in its own schedule; whether that gives the bits of nothing moved; the
    most bytes that were on the host; and how many blocks began to come back only when their backward was there.
    """
    made: list[list[Stepped]] = []
    noted: list[list[dict[str, torch.Tensor]]] = []
    most = late = 0
    reach = SavedBlock.reach

    def reached(block: SavedBlock) -> None:
        nonlocal late
        late += not block._coming
        reach(block)

    stay = {module: {n: way for n, way in of.items() if n != "offload"} for module, of in setting.transforms.items()}
    for one in (setting, replace(setting, transforms=stay), *(replace(setting, schedule=other) for other in others)):
        torch._dynamo.reset()
        here, note = OnRank(rank, world, one), _Noted(wanted, [])
        with patch.object(SavedBlock, "reach", reached):
            made.append([here.step(note, number, one) for number in (2, 5)])  # type: ignore[arg-type]
        noted.append(note.gradients)
        hosts = [host for host in map(host_memory, here.executor.stages.values()) if host is not None]
        assert not any(host.bytes for host in hosts), "nothing stays there after a step"
        most += sum(host.most for host in hosts) if one is setting else 0
    same = all(
        a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
        for a, b in zip(noted[0], noted[1], strict=True)
    )
    return [Run(steps, {}) for steps in made], same, most, late


@pytest.mark.full_cases(
    "an encoder before stages of 1f1b",
    "encoder in bubbles",
    "replicated rows, tied",
    "sharded, gathered always, frozen backbone",
    "sharded",
    "tensor parallel",
)
@pytest.mark.parametrize("name", CASES)
def test_same_gradients(pool: Pool, folders: dict[bool, str], name: str) -> None:
    layouts, options = CASES[name]
    layers = {"llm_layers": 4, "vision_layers": 3} | {n: v for n, v in options.items() if n != "recompute"}
    setting = setting_of(folders, layouts, "1f1b", **layers)
    setting = setting.plus(offload=EVERYWHERE, recompute=options.get("recompute", {}))
    others = ("zb_h1", "gpipe") if "stages" in name else ()
    check_moved(setting, pool.run(setting.world, moved_on_rank, setting, expected(setting), others, timeout=400))


def check_moved(setting: Setting, ranks: list[tuple[list[Run], bool, int, int]]) -> None:
    """Compare what :func:`moved_on_rank` made on every rank with one process and with activations that stay."""
    wanted = expected(setting)
    runs, same, most, late = zip(*ranks, strict=True)
    for each in zip(*runs, strict=True):
        compare(wanted, each)
    assert all(same)
    assert any(most), "nothing was moved"
    assert not any(late), "a backward waits for what it needs first"
