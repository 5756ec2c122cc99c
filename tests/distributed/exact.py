"""How steps of ``stepping`` are compared with one process, in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.distributed.stepping import Reference, Run, Setting, reference

EXACT = 1e-10
"""Relative error of a loss, and of any parameter's gradient in the 2-norm."""
NOTICED = 1e-3
"""The same where something is broken."""

_references: dict[tuple[Any, ...], Reference] = {}


def on(*ranks: int, **degrees: Any) -> dict[str, Any]:
    """A layout."""
    return {"ranks": list(ranks), **degrees}


def setting_of(
    folders: Mapping[bool, str], layouts: Mapping[str, Mapping[str, Any]], order: str, **options: Any
) -> Setting:
    """Modules with pipeline ranks get the stages that the order needs, and a layer more than it needs."""
    stages = {"interleaved_1f1b": {"vpp": 2}, "zbv": {"vpp": 2, "pp_style": "v"}}.get(order, {})
    given = {name: {**one, **(stages if one.get("pp", 1) > 1 else {})} for name, one in layouts.items()}
    layers = {f"{n}_layers": one["pp"] * one.get("vpp", 1) + 1 for n, one in given.items() if one.get("pp", 1) > 1}
    return Setting(folders["draw" in layouts], given, order, **{**layers, **options})


def expected(setting: Setting) -> Reference:
    """One process, once for each model: the microbatches do not matter, as a test says."""
    key = setting.model_key()
    if key not in _references:
        _references[key] = reference(setting, 2)
    return _references[key]


def compare(wanted: Reference, runs: Sequence[Run]) -> None:
    """One plan and schedule, losses on every rank, gradients wherever they are owned, and what the stages held; damage
    is noticed.
    """
    for steps in zip(*(run.steps for run in runs), strict=True):
        assert set().union(*(step.errors for step in steps)) == set(wanted.gradients)
        assert len({step.lanes for step in steps}) == len({step.plan.digest() for step in steps}) == 1
        for rank, step in enumerate(steps):
            for name, error in step.errors.items():
                assert error <= EXACT, f"{name} on rank {rank}"
            assert step.losses == pytest.approx(wanted.losses, rel=EXACT)
            assert step.peaks == step.in_flight, f"rank {rank}"
    for damage in runs[0].damaged:
        worst = max(error for run in runs for error in run.damaged[damage].values())
        assert worst > NOTICED, f"{damage} went unnoticed"
