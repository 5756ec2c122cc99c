"""Stages on real ranks: gradients of every layout and way to run them equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from hetero_strategy.errors import LayoutError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.row_sharding import RowSharding
from hetero_strategy.model.materialize import materialize
from hetero_strategy.model.read_spec import spec_of_module
from hetero_strategy.parallelize.apply import check_all
from hetero_strategy.parallelize.gradients import local, tied_rank_sets
from hetero_strategy.testing import Pool
from hetero_strategy.zoo import titan_llama
from hetero_strategy.zoo.titan import TitanLlama
from tests.model.helpers import TITAN, VIT, WHISPER
from tests.parallelize.pieces import MAKE, Piece, evaluate_then_train, even_split, run, run_all, worst

PIPE = {"ranks": 2, "pp": 2, "split": [1, 3]}
FSDP = {"ranks": 4, "pp": 2, "dp_shard": 2, "split": [3, 1]}
HSDP = {"ranks": 4, "pp": 1, "dp_shard": 2, "dp_replicate": 2}
TP = {"ranks": 4, "pp": 2, "tp": 2}
AGAIN = {"recompute": "all"}
PIECES = [
    Piece("titan", PIPE),
    Piece("titan", FSDP, mode="each"),
    Piece("titan", FSDP, mode="each", microbatches=4, ahead=3),
    Piece("titan", FSDP, microbatches=3, ahead=2, halves=True, transforms=AGAIN),
    Piece("titan", {"ranks": 4, "pp": 1, "dp_shard": 2, "tp": 2}, halves=True),
    Piece("titan", HSDP, microbatches=3),
    Piece("titan", HSDP, mode="each", microbatches=3, ahead=2),
    Piece("siglip2", HSDP, mode="each", microbatches=4),
    Piece("titan", HSDP, mode="each", frozen=True),
    Piece("titan", {"ranks": 4, "pp": 2, "dp_shard": 2, "vpp": 2}),
    Piece("titan", FSDP, frozen=True),
    Piece("hf_qwen3", {"ranks": 2, "pp": 2, "vpp": 2, "pp_style": "v"}),
    Piece("hf_qwen3", TP, transforms=AGAIN),
    Piece("tied", {"ranks": 3, "pp": 3, "split": [1, 2, 1]}),
    Piece("tied", {"ranks": 2, "pp": 2, "vpp": 2, "pp_style": "v"}),
    Piece("tied", FSDP),
    Piece("tied", {"ranks": 4, "pp": 2, "dp_replicate": 2}),
    Piece("siglip2", FSDP, mode="each", transforms=AGAIN),
    Piece("whisper", FSDP),
    Piece("whisper", PIPE, halves=True, microbatches=4),
]
"""What goes wrong with fewer parts goes wrong in one of these too, or in tests/distributed/test_pipeline_options.py."""


def label(piece: Piece) -> str:
    layout = " ".join(f"{k}{v}" for k, v in piece.layout.items() if k not in ("ranks", "split"))
    flags = [*piece.transforms, *(n for n in ("halves", "frozen") if getattr(piece, n))]
    return " ".join([piece.kind, layout, piece.mode, *flags, *([f"ahead{piece.ahead}"] if piece.ahead > 1 else [])])


@pytest.fixture(scope="module")
def ran(pool: Pool) -> Callable[[Piece], list[dict[str, Any]]]:
    """Piece -> what every rank made of it; all pieces of one size in one world, which the first of them starts."""
    found: dict[str, list[dict[str, Any]]] = {}

    def of(piece: Piece) -> list[dict[str, Any]]:
        if repr(piece) not in found:
            size = piece.layout["ranks"]
            alike = [p for p in PIECES if p.layout["ranks"] == size]
            ranks = pool.run(size, run_all, alike, timeout=300)
            found.update(zip(map(repr, alike), map(list, zip(*ranks, strict=True)), strict=True))
        return found[repr(piece)]

    return of


@pytest.mark.full_cases(
    "tied pp3 once", "titan pp2 dp_shard2 each ahead3", "titan pp2 dp_shard2 each", "titan pp2 once"
)
@pytest.mark.distributed
@pytest.mark.parametrize("piece", PIECES, ids=label)
def test_gradients_equal_one_process(ran: Callable[[Piece], list[dict[str, Any]]], piece: Piece) -> None:
    results = ran(piece)
    assert worst(results) < 1e-11
    module = MAKE[piece.kind]()
    names = [n for n, _ in module.named_parameters()]
    materialize(module, 3, name="m")
    values = {n: p.detach().double().numpy() for n, p in module.named_parameters()}
    for result in results:
        assert result["names"] == names and result["same"]
        assert result["state"].keys() == module.state_dict().keys()
        assert result["owned"] == sorted(result["values"])
        assert result["norm"] < 1e-11
        for name, value in result["values"].items():
            assert np.array_equal(value, values[name]), name
    assert set().union(*(r["owned"] for r in results)) == set(names)
    if piece.layout.get("dp_replicate", 1) > 1 and piece.layout.get("dp_shard", 1) > 1:
        units = 1 if piece.frozen else 1 + len(module.blocks())
        assert results[0]["sums"] == {(2, piece.mode == "once"): units}, "replicas meet once a step"
    if piece.kind == "titan" and piece.layout.get("tp", 1) > 1 and piece.mode == "once" and not piece.frozen:
        stages = 1 + 4 if piece.layout.get("dp_shard", 1) > 1 else 1
        assert results[0]["sums"][2, True] <= stages, "norms of a unit, or of a stage, are summed at once"
    if piece.layout["pp"] > 1 and "pp_style" not in piece.layout:
        shared = set(results[0]["owned"]) & set(results[-1]["owned"])
        assert shared == ({"model.model.embed_tokens.weight"} if piece.kind == "tied" else set())


@pytest.mark.full_cases("titan-reduce")
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "damage"), [("titan", "reduce"), ("tied", "tied")])
def test_a_missing_reduction_is_noticed(pool: Pool, kind: str, damage: str) -> None:
    """Negative controls."""
    results = pool.run(4, run, Piece(kind, FSDP, forget=damage))
    wrong = {n for r in results for n, error in r["errors"].items() if error > 1e-3}
    if damage == "tied":
        assert wrong == {"model.model.embed_tokens.weight"}
    else:
        assert len(wrong) > 10


@pytest.mark.full_cases("each")
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["once", "each"])
def test_evaluation_leaves_shards_behind(pool: Pool, mode: str) -> None:
    for result, fine, _ in pool.run(2, evaluate_then_train, Piece("titan", {"ranks": 2, "dp_shard": 2, "pp": 1}, mode)):
        assert fine and worst([result]) < 1e-11


def faults(kind: str, **fields: Any) -> str:
    with pytest.raises(LayoutError) as raised:
        check_all({"llm": MAKE[kind]()}, {"llm": ModuleLayout(**fields).resolved()})
    return str(raised.value)


def test_layouts_that_do_not_fit_the_module_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = faults("titan", ranks=5, pp=5)
    assert "layout of 'llm': pp 5 x vpp 1 = 5 stages, but TitanLlama has 4 blocks" in text
    text = faults("titan", ranks=2, pp=2, split=[1, 2])
    assert "split=[1, 2] sums to 3, but TitanLlama has 4 blocks" in text
    with monkeypatch.context() as deep:
        deep.setattr(TitanLlama, "first_blocks", 3)
        text = faults("titan", ranks=2, pp=2, split=[2, 2])
        assert "split=[2, 2], but the first 3 blocks of TitanLlama take rows of other modules; give the first" in text
        assert "but the first 3 of 4 blocks of TitanLlama take rows" in faults("titan", ranks=3, pp=3)
        layout = {"llm": ModuleLayout(ranks=2, pp=2, split=[3, 1]).resolved()}
        check_all({"llm": MAKE["titan"]()}, layout)
        spec = spec_of_module(MAKE["titan"]())
        assert (spec.first_blocks, spec.most_stages) == (3, 2)
    text = faults("tied", ranks=4, pp=2, vpp=2, pp_style="v")
    assert "pp_style='v'" in text and "dp_shard=2" in text and "tie_word_embeddings=false" in text
    assert "dp_shard=1 cp=2: the first" in faults("tied", ranks=4, pp=2, cp=2, vpp=2, pp_style="v")
    check_all({"llm": MAKE["tied"]()}, {"llm": ModuleLayout(ranks=2, pp=2, vpp=2, pp_style="v").resolved()})
    check_all({"llm": MAKE["titan"]()}, {"llm": ModuleLayout(ranks=1, split=[4]).resolved()})


def test_context_parallelism_is_for_modules_that_are_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("titan", "tied"):
        check_all({"llm": MAKE[kind]()}, {"llm": ModuleLayout(ranks=4, cp=2, tp=2).resolved()})
    check_all({"llm": MAKE["titan"]()}, {"llm": ModuleLayout(ranks=4, cp=2, tp=2, cp_form="heads").resolved()})
    assert (
        "layout of 'llm': cp_form='heads' divides 4 heads over tp 2 x cp 4 = 8 ranks; set cp=2, or cp_form='keys'"
        in faults("titan", ranks=8, cp=4, tp=2, cp_form="heads")
    )
    with monkeypatch.context() as unknown:
        unknown.setattr(TitanLlama, "attention_heads", property(lambda _: 0, lambda *_: None), raising=False)
        wanted = "cp_form='heads', but TitanLlama says no attention_heads; set it to the heads of a block"
        assert wanted in faults("titan", ranks=2, cp=2, cp_form="heads")
    for kind, heads in (("siglip2", VIT["num_attention_heads"]), ("whisper", WHISPER["encoder_attention_heads"])):
        check_all({"llm": MAKE[kind]()}, {"llm": ModuleLayout(ranks=2, cp=2).resolved()})
        text = faults(kind, ranks=3 * heads, cp=3 * heads)
        assert f"divides {heads} heads over tp 1 x cp {3 * heads} = {3 * heads} ranks; set cp={heads}" in text
        assert "see later rows; set cp_form='heads'" in faults(kind, ranks=2, cp=2, cp_form="keys")
        monkeypatch.setattr(type(MAKE[kind]().backbone), "context_parallel", False)
        assert "cp=2, but Encoder is not made for a part of its rows; set cp=1" in faults(kind, ranks=2, cp=2)
    own = type("Own", (RowSharding,), {})
    monkeypatch.setattr(TitanLlama, "row_sharding", lambda _, layout: own(layout.tp))
    check_all({"llm": MAKE["titan"]()}, {"llm": ModuleLayout(ranks=2, tp=2).resolved()})  # a way of its own
    text = faults("titan", ranks=4, cp=2, tp=2)
    assert "cp=2, but row_sharding(layout) of TitanLlama is Own(parts=2, context=1); let it return sharding(" in text
    monkeypatch.setattr(TitanLlama, "context_parallel", False)
    assert "cp=2, but TitanLlama is not made for a part of its rows; set cp=1" in faults("titan", ranks=2, cp=2)


VOCABULARIES = range(30, 43)


def shards_on_rank(rank: int, world: int, tp: int) -> list[bool]:
    """Whether this rank's part of an embedding is what its DTensor says, by size of the vocabulary."""
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    found = []
    for size in VOCABULARIES:
        tokens = nn.Embedding(size, 2)
        parallelize_module(tokens, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
        fully_shard(tokens, mesh=mesh["dp_shard"])
        weight: Any = tokens.weight
        said = distribute_tensor(torch.empty(size, 2), weight.device_mesh, weight.placements, src_data_rank=None)
        found.append(local(weight).shape == local(said).shape)
    return found


@pytest.mark.distributed
def test_vocabularies_are_refused_that_fsdp_shards_otherwise_than_its_dtensors_say(pool: Pool) -> None:
    right = [all(each) for each in zip(*pool.run(6, shards_on_rank, 2), strict=True)]
    assert {True, False} == set(right)
    for size, fits in zip(VOCABULARIES, right, strict=True):
        model = {"llm": titan_llama(**TITAN | {"vocab_size": size})}
        layout = {"llm": ModuleLayout(ranks=6, tp=2, dp_shard=3).resolved()}
        if fits:
            check_all(model, layout)
        else:
            with pytest.raises(LayoutError, match=f"vocab_size={size} .* tp=2 .* dp_shard=3 .* vocab_size={size + 1}"):
                check_all(model, layout)


def test_even_splits_and_tied_pairs() -> None:
    assert even_split(7, 3) == (3, 2, 2) and even_split(4, 4) == (1, 1, 1, 1)
    modules = {"a": MAKE["titan"](), "b": MAKE["tied"]()}
    layout = ModuleLayout(ranks=[1, 2, 5, 7, 8, 9], pp=3, tp=2).resolved()
    assert tied_rank_sets(modules, {"a": layout, "b": layout}) == [(1, 8), (2, 9)]
    assert tied_rank_sets(modules, {"a": layout, "b": replace(layout, vpp=2, pp_style="v")}) == []
