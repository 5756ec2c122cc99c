"""``benchmarks.gpu`` runs on the CPU at a tiny size, but for what needs a CUDA device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import attention, copies, job, step, table
from benchmarks.gpu.table import Line
from benchmarks.predicted_memory import Cloned
from hetero_strategy.checkpoint import Checkpointer
from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.inputs import Packing

TINY = ["--device", "cpu", "--size", "tiny"]
CPU = torch.device("cpu")


def _on_rank(rank: int, world: int, only: str, file: str) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        for environment in (os.environ, table.ENVIRONMENT):
            environment.pop(name, None)
    return gpu.main([*TINY, "--only", *only.split(","), "--json", file])


def run(pool: Any, only: str, file: Path, timeout: float = 170) -> dict[str, dict[str, Any]]:
    """What the checks found, each as lines by what they say."""
    (found,) = pool.run(1, _on_rank, only, str(file), group=False, timeout=timeout)
    document = json.loads(file.read_text())
    assert document["benchmark"] == "gpu" and document["results"] == json.loads(json.dumps(found))
    assert not [one["failed"] for one in found.values() if "failed" in one]
    return {name: {line["what"]: line for line in one["lines"]} for name, one in found.items()}


@pytest.mark.distributed
def test_checks_of_kernels(pool: Any, tmp_path: Path) -> None:
    found = run(pool, "attention,head,optimizer,copies", tmp_path / "gpu.json")
    assert found["attention"]["blocks, time"]["theirs"] > 0
    assert found["attention"]["flash, time"]["note"] == "it needs a CUDA device"
    assert 0 < found["head"]["5% labelled, peak memory"]["ours"] < found["head"]["5% labelled, peak memory"]["theirs"]
    assert len(found["optimizer"]) == 1 and not found["copies"]
    assert "CUDA" in json.loads((tmp_path / "gpu.json").read_text())["results"]["copies"]["skipped"]


@pytest.mark.full
@pytest.mark.distributed
def test_checks_of_steps(pool: Any, tmp_path: Path) -> None:
    found = run(pool, "step,llm", tmp_path / "gpu.json")
    for name, peer in (("step", "by hand"), ("llm", "torchtitan")):
        for how in ("eager", "compiled"):
            speed = found[name][f"{how}: tokens per second"]
            assert speed["ours"] > 0 and speed["theirs"] > 0 and speed["peer"] == peer
            assert found[name][f"{how}: recompilations"]["ours"] == 0
        for whose in ("ours", peer):
            assert found[name][f"compiled blocks of {whose}: tokens per second"]["theirs"] > 0
        assert found[name]["eager: peak memory"]["note"] == "it needs a CUDA device"


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(630)
def test_checks_that_are_processes(pool: Any, tmp_path: Path) -> None:
    found = run(pool, "overhead,job", tmp_path / "gpu.json", timeout=600)
    assert found["overhead"]["step"]["theirs"] > 0
    assert found["job"]["tensors of its checkpoint that changed"]["ours"] == 0
    assert "4 steps" in found["job"]["exact match"]["note"]


def test_a_check_that_fails_keeps_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(device: torch.device, size: str) -> Iterator[Line]:
        yield Line("a figure", 1.0, "ms", "a peer", 2.0)
        raise ValueError("no memory [left]")

    monkeypatch.setitem(gpu.CHECKS, "head", check)
    found = gpu.run("head", CPU, "tiny")
    assert found["lines"][0]["what"] == "a figure" and "no memory [left]" in found["failed"]
    assert "0.500" in (shown := capsys.readouterr().out) and "no memory [left]" in shown
    with pytest.raises(SystemExit):
        gpu.main([*TINY, "--only", "head", "tail"])


def test_lengths_fill_the_rows_and_dense_attention_is_the_same() -> None:
    for size in attention.SIZES.values():
        rows, shortest, longest, *_ = size
        lengths = attention.mixed_lengths(rows, shortest, longest)
        assert lengths.sum() == rows and lengths.max() == longest and lengths.min() >= shortest and len(lengths) > 3
    packing = Packing.of(np.array([4, 9, 2]))
    given = [torch.randn(1, 2, 15, 8, dtype=torch.float64) for _ in range(3)]
    torch.testing.assert_close(attention.dense(*given, packing), packed_attention(*given, packing, causal=True))


def test_batches_of_a_step_have_the_rows_they_are_said_to_have() -> None:
    size = step.SIZES["full"]
    plans = [step.batches_of(size, alone=alone, count=1)[0].plan for alone in (False, True)]
    for plan in plans:
        for assignment in plan.assignments["llm"]:
            assert 12_000 < assignment.edge_rows.sum() < 20_000
    assert {int(n) for a in plans[1].assignments["llm"] for n in a.edge_rows} == {size.length}


def test_flops_count_what_the_encoder_sees() -> None:
    """Patches, of which ``merge * merge`` become a row of the language model."""
    size = step.SIZES["tiny"]
    batches = step.batches_of(size, alone=False)
    model = step.model_of(size, alone=False).modules_by_name
    expected = 0.0
    for batch in batches:
        for pictures, text in zip(*(batch.plan.assignments[name] for name in ("vision", "llm")), strict=True):
            expected += 3 * model["vision"].flops(4 * pictures.edge_rows) + 3 * model["llm"].flops(text.edge_rows)
    assert step.Work.of(size, batches, alone=False).flops == pytest.approx(expected / len(batches))


def test_copies_without_a_device() -> None:
    lines = {line.what: line for line in copies.measure(CPU, "tiny", Cloned())}
    assert lines["step whose inputs arrive"].ratio and lines["copies hidden"].goal == "50 %"


def test_a_tensor_that_changes_on_its_way_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpointer().save({"model.a": torch.randn(3), "model.b": torch.arange(4)}, {}, tmp_path / "first")
    assert job.round_trip(tmp_path / "first", tmp_path / "back", CPU) == (2, 0)
    original = job.load

    def load(tensors: dict[str, torch.Tensor], path: Path) -> None:
        original(tensors, path)
        if path.name == "back":
            tensors["model.b"][1] += 1

    monkeypatch.setattr(job, "load", load)
    assert job.round_trip(tmp_path / "first", tmp_path / "back", CPU) == (2, 1)


def test_loops_that_do_other_work_are_noticed() -> None:
    step._same_work([torch.tensor(3.0)], [torch.tensor(3.001)])
    with pytest.raises(RuntimeError, match="did not do the same work"):
        step._same_work([torch.tensor(3.0)], [torch.tensor(3.1)])
