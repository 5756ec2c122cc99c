"""A fixed number of settings drawn at random, and that the program that draws them can fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_strategy.schedule.policies import schedules
from hetero_strategy.testing import Pool
from tests.distributed.exact import on
from tests.distributed.stepping import ATTENTION, Setting
from tests.fuzz.drawn_settings import FOCUS, MIXTURES, RECOMPUTES, Data, draw
from tests.fuzz.settings import data_folder, line, main, masked, of_line, run, run_all, shrunk
from tests.fuzz.smaller_settings import smaller

DRAWN = ((6, 1, "", ""), (8, 2, "ep", "everything"))
"""Settings, the seed that draws them, a degree that all of them have, and messages that hold up their hosts."""


@pytest.fixture(scope="module")
def data() -> Iterator[dict[bool, Data]]:
    with data_folder(None) as made:
        yield made


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("count", "seed", "degree", "held_up"), DRAWN)
def test_settings_drawn_at_random(
    pool: Pool, data: dict[bool, Data], count: int, seed: int, degree: str, held_up: str
) -> None:
    found = run_all(pool, data, count, seed, timeout=240, degree=degree, held_up=held_up)
    assert not [f.text for f in found if f.fails]
    assert sum(f.kind == "right" for f in found) >= 0.7 * count  # others are refused


@pytest.mark.full
@pytest.mark.distributed
def test_a_fault_is_found_and_made_small(pool: Pool, data: dict[bool, Data]) -> None:
    """With the gradients of the first edge halved."""
    layouts = {"vision": on(0, 2), "llm": on(1, 2, pp=2)}
    setting = Setting(
        data[False].folder, layouts, "zb_h1", transforms={"llm": {"recompute": "all"}}, batches=((0, 1, 2, 3),)
    )
    wrong = run(pool, setting, damage="backward:0")
    assert wrong.kind == "wrong" and "gradient of vision." in wrong.text
    assert run(pool, setting).kind == run(pool, setting, held_up="receive").kind == "right"
    small = shrunk(wrong, lambda s: run(pool, s, damage="backward:0"), 6).setting
    assert len(small.batches[0]) < 4 and small != setting
    assert of_line(line(small), data) == small


@pytest.mark.distributed
def test_a_refusal_is_counted(pool: Pool, data: dict[bool, Data], capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting(data[False].folder, {"llm": on(0, 1, pp=2)}, "zbv", batches=((0,),), microbatches=1)
    results = main(["--setting", line(setting)], pool)
    assert list(results["refused"].values()) == [1] and "vpp=#" in next(iter(results["refused"]))
    assert "refused: zbv needs a module" in capsys.readouterr().out


def test_draws_are_their_numbers_and_cover_everything(data: dict[bool, Data]) -> None:
    drawn = [draw(7, number, data) for number in range(600)]
    assert drawn == [draw(7, number, data) for number in range(600)]
    assert {s.modules for s in drawn} >= {("vision", "audio", "llm"), ("vision", "llm", "draw"), ("llm",)}
    assert any(set(s.language_models) == {"llm", "caption"} for s in drawn) and any(s.edges for s in drawn)
    assert {s.schedule for s in drawn} == {"auto", *schedules()} - {"eager_1f1b"}  # of a test
    assert {s.lm for s in drawn} == {"titan", "hf_llama", "hf_qwen3", *MIXTURES}
    assert {s.tied for s in drawn} == {True, False}
    assert any("llm.router" in s.freeze for s in drawn)
    assert not any({"llm", "caption"} & {*s.unused} for s in drawn if s.lm == "balanced")
    assert {layout.get("ep", 1) for s in drawn for layout in s.layouts.values()} == {1, 2, 4}
    assert {s.reshard_after_forward for s in drawn} == {"auto", "never", "always"}
    layouts = [layout for s in drawn for layout in s.layouts.values()]
    for field in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "vpp", "split", "pp_style"):
        assert sum(field in layout for layout in layouts) > 10
    assert {layout.get("cp", 1) for layout in layouts} >= {1, 2, 3, 4}
    assert {rule for s in drawn for rule in s.attention.values()} == {*ATTENTION}
    assert any(-1 in layout.values() for layout in layouts) and {s.world for s in drawn} >= {1, 2, 3, 4, 6, 8}
    again = {(name, way, s.precision != "64-true") for s in drawn for name, way in s.chosen("recompute").items()}
    assert again >= {(name, way, True) for name in FOCUS for way in RECOMPUTES}
    for transform in ("recompute", "offload", "tp_chunks"):
        assert sum(bool(s.chosen(transform)) for s in drawn) > 30
    for option in ("freeze", "max_in_flight", "tokens", "balance", "unused"):
        assert sum(bool(getattr(s, option)) for s in drawn) > 30
    keys = set().union(*(s.balance or {} for s in drawn))
    assert keys == {"policy", "costs", "budget", "rearrange", "reorder"}
    text = {sample for d in data.values() for sample in d.kinds.get((), ())}
    assert any(set(batch) <= text for s in drawn for batch in s.batches), "no batch of text alone"
    assert len({len(s.batches) for s in drawn}) == 3 and None in {s.microbatches for s in drawn}
    for setting in drawn[:100]:
        assert of_line(line(setting), data) == setting
        assert all(len(line(less)) < len(line(setting)) + 200 for less in smaller(setting))


def test_a_sharded_generator_draws_in_evaluation_between_steps(pool: Pool, data: dict[bool, Data]) -> None:
    """Its blocks run once in a forward of training and once more for every step of drawing."""
    layouts = {"vision": on(0), "llm": on(0, 1), "draw": on(0, 1, dp_shard=2)}
    setting = Setting(data[True].folder, layouts, reshard_after_forward="always", batches=((0, 1, 2, 3, 4, 5),))
    assert run(pool, setting).kind == "right"


def test_smaller_settings_end(data: dict[bool, Data]) -> None:
    """Taking the first smaller one again and again leads to one that cannot be made smaller."""
    for number in range(50):
        setting, seen = draw(3, number, data), set()
        while setting is not None and line(setting) not in seen:
            seen.add(line(setting))
            setting = next((s for s in smaller(setting) if line(s) not in seen), None)
        assert len(seen) < 100
        assert setting is None


def test_an_unknown_degree_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--degree", "foo"])
    assert "choose from" in capsys.readouterr().err


def test_messages_are_counted_without_numbers() -> None:
    assert masked("tp=4 of 2.5") == masked("tp=2 of 30") == "tp=# of #"
