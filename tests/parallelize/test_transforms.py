"""Transforms: how they are named, in which order they are applied, and one of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import pytest
import torch

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize import transforms as table
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.compile import Compile
from hetero_strategy.parallelize.float8 import Float8
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.transform import Site, Transform
from hetero_strategy.parallelize.transforms import faults, in_order, merged, read_transforms, settings
from hetero_strategy.zoo import titan_llama
from tests.model.helpers import TITAN

WAYS: dict[str, dict[str, Transform]] = {
    "recompute": {
        "all": Recompute(),
        "every 3": Recompute(3),
        "all but matmuls": Recompute(keeps_matmuls=True),
        "whole": Recompute(whole=True),
    },
    "offload": {"all": Offload(), "every 2": Offload(2)},
    "compile": {"inductor": Compile(), "eager": Compile("eager")},
    "float8": {"rowwise": Float8(), "rowwise_with_gw_hp, emulated": Float8("rowwise_with_gw_hp", emulated=True)},
}


@pytest.mark.parametrize("name", WAYS)
def test_a_setting_makes_a_transform_and_is_made_of_it(name: str) -> None:
    for setting, transform in WAYS[name].items():
        named = {"llm": {name: setting}}
        assert read_transforms(named) == read_transforms({"llm": [transform]}) == {"llm": {name: transform}}
        assert settings(read_transforms(named)) == named


def test_no_setting_is_no_transform() -> None:
    assert read_transforms(None) == read_transforms({}) == read_transforms({"llm": None}) == {}
    assert read_transforms({"llm": {"recompute": None}, "vision": []}) == {}


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (["llm"], r"transforms=\['llm'\]; give the transforms of each module"),
        ({"llm": "recompute"}, "transforms of 'llm' are 'recompute'; give a list of transforms"),
        ({"llm": [Recompute]}, "transforms of 'llm' are .*; give a list of transforms"),
        ({"llm": [Recompute(), Recompute(2)]}, "give each kind once"),
        ({"llm": {"recomputes": "all"}}, "have no 'recomputes'; did you mean recompute"),
        ({"llm": {"recompute": "every 0"}}, "recompute of 'llm' is 'every 0'; use one of: all, every 2"),
        ({"llm": {"recompute": "every two"}}, "recompute of 'llm' is 'every two'; use one of: all, every 2"),
        ({"llm": {"recompute": True}}, "recompute of 'llm' is True; use one of: all, every 2"),
        ({"llm": {"recompute": 2}}, "recompute of 'llm' is 2; use one of: all, every 2"),
        ({"llm": {"offload": "whole"}}, "offload of 'llm' is 'whole'; use one of: all, every 2"),
        ({"llm": {"compile": "fast"}}, "compile of 'llm' is 'fast'; use one of: inductor, aot_eager, eager"),
        ({"llm": {"compile": True}}, "compile of 'llm' is True; use one of: inductor"),
        ({"llm": {"float8": "tensorwise"}}, "float8 of 'llm' is 'tensorwise'; use one of: 'rowwise'.*, emulated'"),
    ],
)
def test_other_settings_are_refused(transforms: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_transforms(transforms)


def test_of_two_of_a_kind_the_first_stays() -> None:
    first, second = (read_transforms({"llm": {"recompute": way}}) for way in ("all", "whole"))
    assert merged(first, second) == first
    assert [*merged(first, read_transforms({"llm": {"offload": "all"}}))["llm"]] == ["offload", "recompute"]


def test_recompute_runs_a_share_of_the_forward_again() -> None:
    third = [Recompute(3).recomputed(blocks)[0] for blocks in (0, 1, 2, 3, 4, 7, 9)]
    assert third == [1, 1, 1 / 2, 1 / 3, 2 / 4, 3 / 7, 1 / 3]
    assert Recompute(keeps_matmuls=True).recomputed(4) == (0, 0) and Recompute(whole=True).recomputed(4) == (1, 1)
    assert table.recomputed({"offload": Offload()}, 4) == (0, 0)


def test_the_order_of_application() -> None:
    """With tensor parallelism torch cannot compile a checkpoint."""
    every = [Offload(), Compile(), Recompute(), Float8()]
    assert in_order(every, 1) == [Float8(), Recompute(), Compile(), Offload()]
    assert in_order(every, 2) == [Float8(), Compile(), Recompute(), Offload()]


@dataclass(frozen=True)
class Facts:
    has_blocks: bool = True
    tp_compiles: bool = True


@pytest.mark.parametrize("how", [Recompute(whole=True), Recompute(keeps_matmuls=True)], ids=["whole", "matmuls"])
def test_a_recompute_from_which_nothing_can_move_is_refused(how: Recompute) -> None:
    one, of = ModuleLayout(1), {"recompute": how, "offload": Offload()}
    (fault,) = faults("llm", Facts(), one, of)
    assert fault.startswith(f"offload of 'llm' with recompute='{how.setting}', which keeps")
    assert not faults("llm", Facts(), one, {**of, "recompute": Recompute(2)})


def test_compiled_tensor_parallel_blocks_are_not_recomputed_from_the_host() -> None:
    """A block that runs again would be given a tensor that torch compiles other code for."""
    two, of = ModuleLayout(2, tp=2), {"offload": Offload(), "compile": Compile()}
    (fault,) = faults("llm", Facts(), two, {**of, "recompute": Recompute()})
    assert "with compile and tp=2 compares" in fault and "leave recompute or compile out" in fault
    assert not faults("llm", Facts(), two, of)


@dataclass(frozen=True)
class Half(Transform):
    """Blocks whose output is halved."""

    name: ClassVar[str] = "half"
    settings: ClassVar[str] = "yes"

    @classmethod
    def of(cls, setting: object) -> Self | None:
        return cls() if setting == "yes" else None

    @property
    def setting(self) -> str:
        return "yes"

    def on_block(self, number: int) -> Transform:
        return self

    def apply(self, stages: Sequence[Adapter], site: Site) -> None:
        for stage in stages:
            for block in stage.blocks().values():
                block.register_forward_hook(lambda *args: args[-1] / 2)


def test_an_own_transform_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ORDER", [*table.ORDER])
    with pytest.raises(ConfigError, match="transforms of 'llm' have no 'half'"):
        read_transforms({"llm": {"half": "yes"}})
    table.register_transform(Half)
    how, module = read_transforms({"llm": {"half": "yes", "recompute": "all"}})["llm"], titan_llama(**TITAN)
    parallelize("llm", module, ModuleLayout(1).resolved(), None, torch.device("cpu"), seed=1, transforms=how)
    assert all(block._forward_hooks for block in module.blocks().values())
    monkeypatch.setattr(table, "ORDER", table.ORDER[:-1])  # a process that unpickled the strategy has registered none
    assert in_order([Half(), Recompute()], tp=1) == [Recompute(), Half()]
    monkeypatch.setattr(table, "ORDER", table.ORDER[:-1])
    assert table.way({"half": Half(), "recompute": Recompute(2)}, 0) == (Recompute(), Half())
    with pytest.raises(ConfigError, match="transform 'half' is known already"):
        table.register_transform(type("Other", (Half,), {}))
