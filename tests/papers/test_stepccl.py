"""Linear maps in chunks: what they compute, which collectives they run, and beside what."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from hetero_strategy.errors import ConfigError, ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.spec import place
from hetero_strategy.model import MultimodalModel
from hetero_strategy.papers import stepccl
from hetero_strategy.papers.stepccl import chunked
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.transforms import read_transforms
from hetero_strategy.runtime import backward
from hetero_strategy.strategy.blueprint import Options, checked_blueprint
from hetero_strategy.testing import Operations, Pool, WorkerError
from hetero_strategy.zoo import titan_llama
from hetero_strategy.zoo.titan import TitanLlama
from tests.distributed.exact import compare as compare_steps
from tests.distributed.exact import expected, on, setting_of
from tests.distributed.scenario import Job, Result, data, train, train_on_rank, worst_gradient, worst_loss
from tests.distributed.stepping import Reference, Run, Setting, by_module, steps_on_rank
from tests.distributed.test_offload import check_moved, moved_on_rank
from tests.model.helpers import TITAN
from tests.parallelize.pieces import MAKE, Piece, run_all, worst

WIDTH = 6
REDUCE, SCATTER, GATHER = "all-reduce", "reduce-scatter", "all-gather"


class Net(nn.Module):
    """Two maps that share their input, as a gated feed-forward network has them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 8, bias), nn.Linear(WIDTH, 8, bias)
        self.down = nn.Linear(8, WIDTH, bias)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(rows)) * self.up(rows))


@dataclass(frozen=True)
class Case:
    rows: int
    chunks: int = 3
    sharded: bool = False
    bias: bool = True
    halves: bool = False
    recompute: bool = False
    frozen: str = ""
    """``rows``, or parameters whose names begin so."""
    damage: bool = False
    strict: bool = False
    """Memory that nobody has written is NaN."""


def make(mesh: DeviceMesh | None, case: Case, chunks: int) -> nn.Module:
    torch.manual_seed(0)
    net = Net(case.bias).double()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not (case.frozen and name.startswith(case.frozen)))
    if mesh is None:
        return net
    rows = Shard(1) if case.sharded else Replicate()
    down = RowwiseParallel(output_layouts=rows)
    if chunks == 1 and case.sharded:  # as torchtitan: gathered once for both
        into = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = {"": into, "gate": ColwiseParallel(), "up": ColwiseParallel(), "down": down}
        return parallelize_module(net, mesh, plan)
    plan = {"gate": ColwiseParallel(input_layouts=rows), "up": ColwiseParallel(input_layouts=rows), "down": down}
    return parallelize_module(net, mesh, chunked(plan, chunks) if chunks > 1 else plan)


def step(net: nn.Module, case: Case, rank: int, world: int) -> tuple[Tensor, Any, dict[str, Tensor], list[Operations]]:
    """Result, gradients of rows and parameters, and logs of forward, backward (or I) and W."""
    torch.manual_seed(1)
    rows, seed = torch.randn(2, 1, case.rows, WIDTH, dtype=torch.float64)
    if case.sharded and world > 1:
        rows, seed = (t.chunk(world, dim=1)[rank].contiguous() for t in (rows, seed))
    leaf = rows.clone().requires_grad_(case.frozen != "rows")
    logs = [Operations(), Operations(), Operations()]
    with logs[0]:
        out = checkpoint(net, leaf, use_reentrant=False) if case.recompute else net(leaf)
    roots, weights = [(get_gradient_edge(out), seed)], [p for p in net.parameters() if p.requires_grad]
    if case.halves:
        with logs[1]:
            later = backward.inputs_first(roots, [leaf], weights)
        assert case.frozen or all(p.grad is None for p in weights)
        with logs[2]:
            later()
    else:
        with logs[1]:
            backward.whole(roots)
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    full = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return out.detach(), leaf.grad, full, logs


def compare(rank: int, world: int, cases: list[Case]) -> list[Any]:
    """Of each case: worst error against one process, that of the forward against plain maps, and logs of both ways."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for case in cases:
        if case.damage:
            lose_a_chunk()
        torch.use_deterministic_algorithms(case.strict)
        out, rows, grads, logs = step(make(mesh, case, case.chunks), case, rank, world)
        torch.use_deterministic_algorithms(False)
        expected = step(make(None, case, 1), case, 0, 1)
        plain, *_, plainly = step(make(mesh, case, 1), case, rank, world)

        def mine(whole: Tensor, case: Case = case) -> Tensor:
            return whole.chunk(world, dim=1)[rank] if case.sharded else whole

        pairs = [(out, mine(expected[0])), *((grads[n], g) for n, g in expected[2].items())]
        if rows is not None:
            pairs.append((rows, mine(expected[1])))
        assert grads.keys() == expected[2].keys() and all(a.shape == b.shape for a, b in pairs)
        error = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)
        apart = float((out - plain).abs().max()) if out.numel() else 0.0
        found.append(
            (error, apart, *([(log.names, log.collectives, dict(log.bytes)) for log in way] for way in (logs, plainly)))
        )
    return found


def lose_a_chunk() -> None:
    """Damage: the second collective of every call does not run, on any rank."""
    reduce, calls = dist.all_reduce, iter(range(1000))

    class Done:
        def wait(self) -> None: ...

    def damaged(tensor: Tensor, **how: Any) -> Any:
        return Done() if next(calls) % 3 == 1 else reduce(tensor, **how)

    stepccl.dist.all_reduce = damaged  # type: ignore[attr-defined]


CASES = [
    Case(7),
    Case(7, bias=False, halves=True),
    Case(2),  # fewer rows than chunks
    Case(0),
    Case(1, halves=True),
    Case(9, frozen="rows"),
    Case(9, frozen="gate"),
    Case(9, frozen="down.weight"),
    Case(24, sharded=True),
    Case(20, chunks=4, sharded=True, halves=True, bias=False),
    Case(4, sharded=True),
    Case(0, sharded=True),
    Case(9, recompute=True),
    Case(8, sharded=True, recompute=True),
    Case(8, strict=True),
    Case(8, sharded=True, strict=True),
    Case(8, sharded=True, halves=True, strict=True),
    Case(24, sharded=True, frozen="rows"),
    Case(24, sharded=True, frozen="gate"),
]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_chunks_change_nothing(pool: Pool, world: int) -> None:
    for results in pool.run(world, compare, CASES):
        for case, (error, apart, *_) in zip(CASES, results, strict=True):
            assert error < 1e-14, case
            assert apart < 1e-15, case
    (((error, *_),), _) = pool.run(2, compare, [Case(7, damage=True)])
    assert error > 1e-3, "a lost chunk went unnoticed"


@pytest.mark.distributed
def test_collectives_and_bytes(pool: Pool) -> None:
    """Where ranks have parts of the rows, as many bytes as in the plain plan. Where each has all rows, fewer: maps that
    take the same rows sum their gradients once. A backward in halves runs each collective once."""
    cases = [Case(12), Case(12, halves=True), Case(24, sharded=True), Case(24, sharded=True, halves=True)]
    of_rows, both = 12 * WIDTH * 8, (GATHER, SCATTER)
    for results in pool.run(2, compare, cases):
        for case, (*_, mine, plain) in zip(cases, results, strict=True):
            if case.sharded:
                for _, counts, sizes in plain[:2]:
                    assert counts == dict.fromkeys(both, 1) and sizes == dict.fromkeys(both, 2 * of_rows)
                for _, counts, sizes in mine[:2]:
                    assert counts == dict.fromkeys(both, 3) and sizes == dict.fromkeys(both, 2 * of_rows)
            else:
                assert [counts for _, counts, _ in plain[:2]] == [{REDUCE: 1}, {REDUCE: 2}]
                assert [sizes for *_, sizes in plain[:2]] == [{REDUCE: of_rows}, {REDUCE: 2 * of_rows}]
                assert [counts for _, counts, _ in mine[:2]] == [{REDUCE: 3}] * 2
                assert [sizes for *_, sizes in mine[:2]] == [{REDUCE: of_rows}] * 2
            assert mine[2][0] == ["matmul"] * (3 * case.halves), "W is weights' gradients alone"
        assert len(results[0][2][1][0]) == len(results[1][2][1][0]) + 3, "I leaves these out"


@pytest.mark.distributed
def test_recompute_ends_before_the_last_collectives(pool: Pool) -> None:
    """What comes out of a block is not made again: as with the plain plan, its sum over ranks runs once."""
    for (*_, mine, plain), (*_, shards, plain_shards) in pool.run(
        2, compare, [Case(12, recompute=True), Case(24, sharded=True, recompute=True)]
    ):
        assert (mine[1][1], plain[1][1]) == ({REDUCE: 3}, {REDUCE: 2})
        assert (shards[1][1], plain_shards[1][1]) == ({GATHER: 6, SCATTER: 3}, {GATHER: 2, SCATTER: 1})


@pytest.mark.distributed
def test_collectives_start_between_matmuls(pool: Pool) -> None:
    """A chunk's collective starts before the next chunk is multiplied; the weight's gradient comes after the last."""
    whole, parts, one = Case(12), Case(24, sharded=True), "matmul"
    for (*_, mine, _), (*_, shards, _) in pool.run(2, compare, [whole, parts]):
        assert mine[0][0] == [one] * 2 + [one, REDUCE] * 3
        # Backward: of `down` rows and weight, of `up` both, of `gate` rows and at last its weight.
        assert mine[1][0] == [one] * 4 + [one, REDUCE] * 3 + [one]
        assert shards[0][0] == [GATHER] * 3 + [one] * 4 + [one, SCATTER] * 3
        assert shards[1][0] == [GATHER] * 3 + [one] * 6 + [one, SCATTER] * 3 + [one]


def leftovers(rank: int, world: int) -> int:
    """Tensors of as many rows as no parameter has, after steps with and without gradients."""
    mesh = init_device_mesh("cpu", (world,))
    case = Case(37)
    net = make(mesh, case, case.chunks)
    for _ in range(2):
        step(net, case, rank, world)
        with torch.no_grad():
            net(torch.randn(1, case.rows, WIDTH, dtype=torch.float64))
    found, end = 1, time.monotonic() + 10
    while found and time.monotonic() < end:  # gloo's threads drop what they sent a moment later
        gc.collect()
        found = sum(isinstance(o, Tensor) and 37 in o.shape for o in gc.get_objects())
    return found


@pytest.mark.distributed
def test_nothing_stays_behind(pool: Pool) -> None:
    assert pool.run(2, leftovers) == [0, 0]


def unusual(rank: int, world: int) -> tuple[list[bool], str]:
    """Which maps of an unusual plan are cut, and what one says whose rows are more than one matrix."""
    mesh = init_device_mesh("cpu", (world,))
    net = nn.ModuleDict({"head": nn.Linear(WIDTH, 8), "table": nn.Embedding(8, WIDTH), "up": nn.Linear(WIDTH, 8)})
    plan: dict[str, Any] = {"up": ColwiseParallel(input_layouts=Shard(1)), "table": RowwiseParallel()}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    with pytest.raises(ModelError) as raised:
        parallelize_module(net, mesh, chunked(plan, 2))["up"](torch.randn(2, 3, WIDTH))
    return ["forward" in vars(part) for part in net.values()], str(raised.value)


@pytest.mark.distributed
def test_maps_of_another_kind_stay_as_they_are(pool: Pool) -> None:
    for cut, message in pool.run(2, unusual):
        assert cut == [False, False, True]
        assert "ranks have parts of dimension 1 of rows [2, 3, 6]" in message and "leave tp_chunks out" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "eager"}, "does not go with compile, .*; leave one of them out"),
        ({"float8": "rowwise, emulated"}, "does not go with float8, .*; leave one of them out"),
        ({"recompute": "all but matmuls"}, "does not go with recompute='all but matmuls': .*; leave one of them out"),
        ({}, "is 2 with tp=1: nothing is exchanged; leave it out, or set tp above 1"),
    ],
)
def test_what_does_not_go_with_chunks_is_refused(options: dict[str, Any], message: str) -> None:
    layout = ModuleLayout(2, tp=2 if options else 1).resolved()
    transforms = read_transforms({"llm": {"tp_chunks": 2, **options}})
    with pytest.raises(ConfigError, match=f"tp_chunks of 'llm' {message}"):
        checked_blueprint(
            MultimodalModel({"llm": titan_llama(**TITAN)}), place({"llm": layout}, 2), Options(transforms=transforms)
        )


class OwnWay(TitanLlama):
    """Splits itself as it always did."""

    def apply_tp(self, mesh: DeviceMesh) -> None:
        del self.tp_styles
        super().apply_tp(mesh)


def split_in_an_own_way(rank: int, world: int) -> None:
    module, mesh = OwnWay(titan_llama(**TITAN).args), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    chunks = {"tp_chunks": stepccl.ChunkedTensorParallel(2)}
    parallelize("llm", module, ModuleLayout(2, tp=2).resolved(), mesh, torch.device("cpu"), seed=1, transforms=chunks)


@pytest.mark.distributed
def test_a_module_that_cuts_nothing_is_named(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"tp_chunks of 'llm': OwnWay.apply_tp cuts none") as raised:
        pool.run(2, split_in_an_own_way)
    assert raised.value.error == "ConfigError"


TP: dict[str, Any] = {"ranks": 4, "pp": 2, "tp": 2}
CHUNKS, AGAIN = {"tp_chunks": 3}, {"tp_chunks": 3, "recompute": "all"}
PIECES = [
    Piece("titan", TP, halves=True, microbatches=4, ahead=3, transforms=CHUNKS),
    Piece("titan", TP, frozen=True, transforms=CHUNKS),
    Piece("titan", {"ranks": 4, "pp": 1, "dp_shard": 2, "tp": 2}, mode="each", transforms=AGAIN),
    Piece("tied", TP, halves=True, transforms=CHUNKS),
    Piece("siglip2", TP, halves=True, transforms=CHUNKS),
    Piece("whisper", TP, transforms=AGAIN),
]


def pieces(rank: int, world: int) -> list[dict[str, Any]]:
    return run_all(rank, world, PIECES)


@pytest.mark.distributed
def test_gradients_of_stages_equal_one_process(pool: Pool) -> None:
    for piece, *results in zip(PIECES, *pool.run(4, pieces, timeout=300), strict=True):
        assert worst(results) < 1e-11, piece
        assert all(result["same"] and result["norm"] < 1e-11 for result in results), piece
        names = [name for name, _ in MAKE[piece.kind]().named_parameters()]
        assert set().union(*(result["owned"] for result in results)) == set(names), piece


def in_schedules(rank: int, world: int, settings: list[Setting], wanted: Reference) -> list[Run]:
    return [steps_on_rank(rank, world, setting, wanted, (1, 9)) for setting in settings]


def moved(rank: int, world: int, setting: Setting, wanted: Reference) -> Any:
    return moved_on_rank(rank, world, setting, wanted, ())


@pytest.mark.distributed
def test_gradients_of_pipelines_equal_one_process(pool: Pool, folders: dict[bool, str]) -> None:
    layouts = {"vision": on(0, 1, tp=2), "llm": on(0, 1, 2, 3, pp=2, tp=2)}
    chunks = {"vision": CHUNKS, "llm": {"tp_chunks": 2}}
    options: dict[str, Any] = {"llm_layers": 4, "vision_layers": 4, "transforms": chunks}
    settings = [setting_of(folders, layouts, schedule, **options) for schedule in ("zb_h1", "1f1b")]
    wanted = expected(settings[0])
    for runs in zip(*pool.run(4, in_schedules, settings, wanted, timeout=240), strict=True):
        compare_steps(wanted, runs)
    away = settings[1].plus(offload={"vision": "all", "llm": "every 2"}, recompute={"llm": "every 2"})
    check_moved(away, pool.run(4, moved, away, wanted, timeout=400))


def trained(rank: int, world: int, job: Job) -> Result:
    return train_on_rank(rank, world, job)


@pytest.mark.distributed
def test_a_run_equals_one_process(pool: Pool, tmp_path: Path) -> None:
    job = Job(str(data(tmp_path / "digits")), steps=3, precision="64-true")
    layouts = {"vision": on(0, 1, 2, 3, tp=2), "audio": on(0, 2, tp=2), "llm": on(0, 1, 2, 3, tp=4)}
    transforms = by_module(tp_chunks={"vision": 2, "audio": 3, "llm": 4})
    wanted = train(job)
    ranks = pool.run(4, trained, replace(job, layouts=layouts, strategy={"transforms": transforms}), timeout=300)
    error, where = worst_gradient(wanted, ranks)
    assert error <= 1e-10, where
    assert worst_loss(wanted, ranks) <= 1e-10
