"""The benchmark of microbatch orders: its bound holds, and a tiny run says what it should."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reordering


@pytest.mark.parametrize("workload", reordering.SAMPLES)
@pytest.mark.parametrize(("ranks", "vpp"), [(2, 1), (4, 1), (4, 2)])
def test_no_order_takes_less_than_the_bound(workload: str, ranks: int, vpp: int) -> None:
    one = reordering.case(workload, ranks, vpp, 4, 3)
    best = one.seconds(np.array(list(permutations(range(4))))).min()
    assert one.bound() <= best * (1 + 1e-12) < 3 * one.bound()


def test_the_bound_is_reached_by_equal_microbatches() -> None:
    one = reordering.case("lognormal", 4, 1, 6, 0)
    equal = one._replace(forward={m: np.ones(6) for m in one.forward})
    assert equal.bound() == equal.seconds(np.arange(6)[None])[0] == 3.0 * (6 + 3)


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reordering.json"
    sizes = f"--seeds 2 --ranks 4 --microbatches 8 --workloads lognormal laion --json {file}"
    reordering.main(sizes.split())
    assert "ours / random" in capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert len(results["orders"]) == 4
    assert results["summary"]["worse"] == results["summary"]["below_bound"] == 0
    for line in results["orders"]:
        assert 1 <= line["over_bound"]["ours"] <= line["over_bound"]["disttrain"]
        assert line["bubble"]["bound"] <= line["bubble"]["ours"] < line["bubble"]["random"]
