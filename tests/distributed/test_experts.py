"""Experts divided over ranks: results, gradients and messages of one layer, and whole steps against one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import AutoConfig, AutoModelForCausalLM
from typing_extensions import override

from hetero_strategy.checkpoint import EXPORT_KEY, Checkpointer, export, load
from hetero_strategy.checkpoint.exporting import export_record
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.layout.spec import place
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.experts import Exchange, kept_routes, routed
from hetero_strategy.model.hf_folder import SINGLE
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.parallelize import experts, fsdp
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.runtime.backward import inputs_first
from hetero_strategy.testing import Pool
from hetero_strategy.testing.composites import built, tiny
from hetero_strategy.zoo.hf_causal_lm import HFCausalLM, hf_causal_lm
from hetero_strategy.zoo.hf_shared_experts import SharedMeanwhile
from tests.distributed.exact import EXACT, Given, differences, expected, on, run_together, setting_of
from tests.model.helpers import reads, tokens
from tests.parallelize.pieces import MAKE, Piece, run_all, worst
from tests.zoo.families import TINY

EXPERTS, WIDTH, VISITS = 8, 6, 2
ROWS = (7, 0, 12, 1)
"""Rows of each rank."""


def drawn(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of a rank, their experts, of which the last has none, the weights, and gradients of the results."""
    draw, count = torch.Generator().manual_seed(rank), ROWS[rank]
    rows, gradient = torch.randn(2, count, WIDTH, generator=draw, dtype=torch.float64)
    chosen = torch.rand(count, EXPERTS - 1, generator=draw).topk(VISITS).indices
    return rows, chosen, torch.rand(count, VISITS, generator=draw, dtype=torch.float64), gradient


def matrices() -> Tensor:
    draw = torch.Generator().manual_seed(99)
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=draw, dtype=torch.float64)


def multiply(weights: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The experts: a matrix each."""
    parts = rows.tensor_split(ends.tolist()[:-1])
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)]).tanh()


class Exchanges(TorchDispatchMode):
    """Notes the rows that go to each rank in every exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops._c10d_functional.all_to_all_single.default:
            self.sent.append(list(args[2]))
        return function(*args, **(kwargs or {}))


def layer_on_rank(
    rank: int,
    world: int,
    swapped: bool,
    contexts: Callable[[], Any] | None,
    halves: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """One layer, forward and backward: relative errors against one process in fp64, and exchanges."""
    world_group = dist.group.WORLD
    assert world_group is not None
    here = EXPERTS // world
    own = matrices()[rank * here : (rank + 1) * here]
    own = (own.flip(0) if swapped and rank == 1 else own).to(dtype, copy=True).requires_grad_()
    rows, chosen, weights, gradient = (x.to(dtype) if x.is_floating_point() else x for x in drawn(rank))
    rows.requires_grad_()
    weights.requires_grad_()
    exchange = Exchange(world_group.group_name, world)

    def layer(rows: Tensor, weights: Tensor) -> Tensor:
        return routed(rows, chosen, weights, EXPERTS, partial(multiply, own), exchange)

    with Exchanges() as exchanges:
        if contexts is None:
            out = layer(rows, weights)
        else:
            out = checkpoint(layer, rows, weights, use_reentrant=False, context_fn=contexts)
        if halves:
            later = inputs_first([(get_gradient_edge(out), gradient)], [rows, weights], [own])
        else:
            out.backward(gradient)
    if halves:
        with Exchanges() as of_weights:
            later()
        assert not of_weights.sent
    whole, errors = matrices().requires_grad_(), []
    for other in range(world):
        r, c, w, g = drawn(other)
        r.requires_grad_()
        w.requires_grad_()
        each = torch.stack([(r @ matrix).tanh() for matrix in whole], dim=1)
        result = (each.gather(1, c[..., None].expand(-1, -1, WIDTH)) * w[..., None]).sum(1)
        result.backward(g)
        if other == rank:
            errors += [(out, result), (rows.grad, r.grad), (weights.grad, w.grad)]
    assert whole.grad is not None and own.grad is not None
    errors.append((own.grad, whole.grad[rank * here : (rank + 1) * here]))
    relative = [float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in errors]
    elsewhere = int((chosen // here != rank).sum())
    return {"error": max(relative), "sent": exchanges.sent, "elsewhere": elsewhere}


def test_a_layer_is_that_of_one_process(pool: Pool) -> None:
    """One rank has no rows. Rows travel there and back, forward and backward, and their numbers once."""
    for found in pool.run(4, layer_on_rank, False, None, timeout=60):
        assert found["error"] < 1e-12
        counts, *ways = found["sent"]
        assert counts == [EXPERTS // 4] * 4 and len(ways) == 4


def test_a_layer_in_bf16_is_that_of_one_process(pool: Pool) -> None:
    """Up to roundings: choices of experts are fixed."""
    errors = [run["error"] for run in pool.run(4, layer_on_rank, False, None, False, torch.bfloat16, timeout=60)]
    assert 1e-4 < max(errors) < 2e-2


def test_rows_sent_are_those_whose_expert_is_elsewhere(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(4, layer_on_rank, False, None, timeout=60)):
        _, there, back, *backward = found["sent"]
        assert backward == [there, back] and there[rank] == back[rank]
        assert sum(there) - there[rank] == found["elsewhere"]


def test_the_half_backward_of_weights_exchanges_nothing(pool: Pool) -> None:
    for found in pool.run(4, layer_on_rank, False, None, True, timeout=60):
        assert found["error"] < 1e-12 and len(found["sent"]) == 3 + 2


def test_swapped_experts_are_noticed(pool: Pool) -> None:
    assert max(found["error"] for found in pool.run(4, layer_on_rank, True, None, timeout=60)) > 0.1


def test_numbers_of_rows_are_exchanged_once_with_recompute(pool: Pool) -> None:
    """Without the routes of the first forward they would be exchanged, and waited for, again."""
    for contexts, exchanges in ((kept_routes, 3 + 2 + 2), (noop_context_fn, 3 + 3 + 2)):
        for found in pool.run(4, layer_on_rank, False, contexts, timeout=60):
            assert found["error"] < 1e-12 and len(found["sent"]) == exchanges


STACKS = tuple(f"llm.model.model.layers.{n}.mlp.experts" for n in (0, 1))
Case = tuple[str, dict[str, Any], dict[str, Any]]
QUICK: dict[str, Case] = {
    "each": ("1f1b", {"ep": 4}, {"reshard_after_forward": "always"}),
    "tp 2, ep 4": ("1f1b", {"tp": 2, "ep": 4}, {}),
    "cp 2, ep 4": ("1f1b", {"cp": 2, "ep": 4}, {}),
    "zbv": ("zbv", {"pp": 2, "ep": 2}, {}),
    "replicas": ("1f1b", {"dp_replicate": 2, "ep": 2}, {}),
    "frozen embedding": ("zb_h1", {"pp": 2, "ep": 2}, {"freeze": ("llm.model.model.embed_tokens",)}),
    "all to one": ("1f1b", {"ep": 4}, {"lm": "all to one expert", "transforms": {"llm": {"recompute": "all"}}}),
    "fp32": ("1f1b", {"tp": 2, "ep": 2}, {"precision": "32-true"}),
    "balanced": ("zbv", {"pp": 2, "tp": 2, "ep": 2}, {"lm": "balanced", "transforms": {"llm": {"recompute": "all"}}}),
}
SCHEDULED: dict[str, Case] = {
    "1f1b": ("1f1b", {"pp": 2, "ep": 2}, {}),
    "zb_h1": ("zb_h1", {"pp": 2, "ep": 2}, {}),
    "interleaved": ("interleaved_1f1b", {"pp": 2, "ep": 2}, {}),
    "zb_h1, tp": ("zb_h1", {"pp": 2, "tp": 2, "ep": 2}, {}),
    "whole again": ("1f1b", {"pp": 2, "ep": 2}, {"transforms": {"llm": {"recompute": "whole"}}}),
    "again but matmuls": ("1f1b", {"ep": 2}, {"transforms": {"llm": {"recompute": "all but matmuls"}}}),
    "offloaded": ("1f1b", {"ep": 2}, {"transforms": {"llm": {"offload": "all"}}}),
    "compiled": ("1f1b", {"ep": 4}, {"transforms": {"llm": {"compile": "aot_eager"}}}),
}
PLACED: dict[str, Case] = {
    "ep 2": ("1f1b", {"ep": 2}, {}),
    "ep 2, once": ("1f1b", {"ep": 2}, {"reshard_after_forward": "never"}),
    "ep 4, once": ("1f1b", {"ep": 4}, {"reshard_after_forward": "never"}),
    "tp 2, ep 2": ("1f1b", {"tp": 2, "ep": 2}, {}),
    "tp 4, ep 2": ("1f1b", {"tp": 4, "ep": 2}, {}),
    "tp 4, ep 4": ("1f1b", {"tp": 4, "ep": 4}, {}),
    "cp 2, ep 2": ("1f1b", {"cp": 2, "ep": 2}, {}),
    "replicas, tp": ("1f1b", {"dp_replicate": 2, "tp": 2, "ep": 2}, {}),
}
CHANGED: dict[str, Case] = {
    "all frozen": ("1f1b", {"ep": 4}, {"freeze": ("llm",)}),
    "frozen router": ("1f1b", {"ep": 4}, {"freeze": ("llm.router",)}),
    "frozen experts": ("1f1b", {"ep": 4}, {"freeze": STACKS}),
    "shared": ("1f1b", {"ep": 2}, {"lm": "shared experts", "transforms": {"llm": {"recompute": "all but matmuls"}}}),
    "all to one, tp": ("1f1b", {"tp": 2, "ep": 4}, {"lm": "all to one expert"}),
    "fp32": ("1f1b", {"ep": 4}, {"precision": "32-true"}),
    "all to one, fp32": ("1f1b", {"ep": 4}, {"lm": "all to one expert", "precision": "32-true"}),
    "fp32, zb_h1": ("zb_h1", {"pp": 2, "ep": 2}, {"precision": "32-true"}),
    "cast": ("1f1b", {"ep": 2}, {"precision": "32-mixed"}),
    "cast, some kept": ("1f1b", {"ep": 2}, {"precision": "some kept"}),
    "cast, tp": ("1f1b", {"dp_replicate": 2, "tp": 2, "ep": 2}, {"precision": "32-mixed"}),
    "cast, frozen": ("1f1b", {"ep": 4}, {"precision": "32-mixed", "freeze": STACKS}),
}
BALANCED: dict[str, Case] = {
    name: (schedule, degrees, {"lm": "balanced", **options})
    for name, (schedule, degrees, options) in {
        "ep 1": ("1f1b", {}, {"reshard_after_forward": "always"}),
        "ep 4": ("1f1b", {"ep": 4}, {}),
        "tp 2": ("1f1b", {"tp": 2}, {}),
        "tp 2, ep 4": ("1f1b", {"tp": 2, "ep": 4}, {}),
        "cp 2, ep 4": ("1f1b", {"cp": 2, "ep": 4}, {}),
        "frozen": ("1f1b", {"ep": 4}, {"freeze": ("llm",)}),
        "frozen router": ("1f1b", {"ep": 2}, {"freeze": ("llm.router",)}),
        "compiled, again": ("1f1b", {"ep": 2}, {"transforms": {"llm": {"compile": "aot_eager", "recompute": "all"}}}),
        **{name: SCHEDULED[name] for name in ("zb_h1, tp", "interleaved", "whole again", "again but matmuls")},
        "offloaded": SCHEDULED["offloaded"],
    }.items()
}
"""Name -> schedule, degrees of the language model on four ranks, and more options of the setting."""


@pytest.mark.parametrize(
    "cases",
    [QUICK, *(pytest.param(cases, marks=pytest.mark.full) for cases in (SCHEDULED, PLACED, CHANGED, BALANCED))],
    ids=["quick", "schedules", "layouts", "changes", "balance"],
)  # fmt: skip
def test_steps_are_those_of_one_process(pool: Pool, folders: dict[bool, str], cases: dict[str, Case]) -> None:
    """Two microbatches with other numbers of rows on each instance, and three with an instance that has none. A loss on
    balance is one of each microbatch.
    """
    given: dict[str, Given] = {}
    for name, (schedule, degrees, options) in cases.items():
        layouts = {"vision": on(0, 1), "llm": on(0, 1, 2, 3, **degrees)}
        layers = {} if "pp" in degrees else {"llm_layers": 2}
        setting = setting_of(folders, layouts, schedule, **{"lm": "mixture", **layers, **options})
        given[name] = setting, expected(setting), [2] if setting.lm == "balanced" else [2, 3], 0
    found: dict[str, list[str]] = {}
    for name, runs in run_together(pool, given).items():
        bound = EXACT if given[name][0].precision == "64-true" else 1e-5
        steps = zip(*(run.steps for run in runs), strict=True)
        found[name] = [fault for step in steps for fault in differences(given[name][1], step, bound)]
    assert not any(found.values()), {name: faults[:3] for name, faults in found.items() if faults}


def own_slice_without_its_gather(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    return whole.tensor_split(mesh.size())[mesh.get_local_rank()]


def sliced_wrongly(rank: int, world: int, piece: Piece) -> list[dict[str, Any]]:
    with patch.object(experts, "own_slice", own_slice_without_its_gather):
        return run_all(rank, world, [piece])


def test_slices_of_rows_without_a_gather_in_backward_are_noticed(pool: Pool) -> None:
    piece = Piece("hf_moe", {"ranks": 2, "tp": 2, "ep": 2})
    for run, wrong in ((run_all, False), (sliced_wrongly, True)):
        found = pool.run(2, run, piece if wrong else [piece], timeout=60)
        assert (worst([results[0] for results in found]) > 1e-2) == wrong


def test_norm_and_values_are_those_of_one_process(pool: Pool) -> None:
    pieces = [
        Piece("hf_moe", {"ranks": 4, "dp_shard": 4, "ep": 2}),
        Piece("hf_moe", {"ranks": 4, "dp_shard": 2, "dp_replicate": 2, "ep": 2}, mode="each"),
        Piece("hf_moe", {"ranks": 4, "dp_shard": 4, "ep": 4}, halves=True),
    ]
    for results in zip(*pool.run(4, run_all, pieces, timeout=200), strict=True):
        assert worst(results) < 1e-10 and max(result["norm"] for result in results) < 1e-12
        for result in results:
            assert result["values"].keys() == results[0]["values"].keys()
            assert all((value == results[0]["values"][name]).all() for name, value in result["values"].items())


class InVain(HFCausalLM):
    """A language model whose blocks run in vain."""

    @override
    def transform(self, hidden: Tensor, inputs: SequenceInputs) -> Tensor:
        super().transform(hidden, inputs)
        return hidden


def in_vain_on_rank(rank: int, world: int) -> list[Any]:
    config = AutoConfig.for_model(**MIXTURE)
    MAKE["in vain"] = partial(InVain, AutoModelForCausalLM._model_mapping[type(config)], config)
    return run_all(rank, world, [Piece("in vain", {"ranks": 2, "ep": 2}, mode=mode) for mode in ("each", "once")])


def test_blocks_that_run_in_vain_hang_nobody(pool: Pool) -> None:
    for results in zip(*pool.run(2, in_vain_on_rank, timeout=60), strict=True):
        assert worst(results) < 1e-10


FEW = ("gpt_oss", "deepseek_v3", "qwen2_moe")
"""Biases of experts; shared experts and groups of them; shared experts that transformers runs first."""
MANY = (
    *("phimoe", "mixtral", "deepseek_v2", "olmoe", "glm4_moe", "granitemoe", "ernie4_5_moe"),
    *("minimax_m2", "dots1", "laguna", "qwen3_next", "granitemoehybrid", "minimax"),
)


def families_on_rank(rank: int, world: int, model_types: tuple[str, ...], layout: dict[str, Any]) -> list[Any]:
    MAKE.update({of: partial(hf_causal_lm, model_type=of, check=False, **TINY[of]) for of in model_types})
    return run_all(rank, world, [Piece(of, layout) for of in model_types])


@pytest.mark.filterwarnings("ignore:.* keep a state from row to row")
@pytest.mark.parametrize(("model_types", "layout"), [
    (FEW, {"ranks": 2, "ep": 2}),
    pytest.param(MANY, {"ranks": 2, "ep": 2}, marks=pytest.mark.full),
    pytest.param(("deepseek_v3", "mixtral", "olmoe"), {"ranks": 2, "tp": 2, "ep": 2}, marks=pytest.mark.full),
])  # fmt: skip
def test_gradients_of_families(pool: Pool, model_types: tuple[str, ...], layout: dict[str, Any]) -> None:
    """Their norms or routers compute in fp32."""
    found = zip(model_types, *pool.run(2, families_on_rank, model_types, layout, timeout=300), strict=True)
    errors = {of: worst([*results]) for of, *results in found}
    assert max(errors.values()) < 1e-5, errors


def one_stage(world: int, model_type: str, **transforms: Transform) -> Adapter:
    """A tiny mixture in place on this rank, whose experts all ranks share."""
    module = hf_causal_lm(model_type=model_type, check=False, **TINY[model_type]).train()
    layout = ModuleLayout(world, ep=world).resolved()
    registry = GroupRegistry(place({"m": layout}, world), [], "cpu")
    mesh, meshes = registry.mesh("m"), {"experts": registry.experts("m")}
    (stage,) = parallelize(
        "m", module, layout, mesh, torch.device("cpu"), seed=3, transforms=transforms, **meshes
    ).values()
    return stage


class Events(TorchDispatchMode):
    """Notes starts and ends of exchanges, and products with some weights."""

    def __init__(self, weights: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__()
        self.weights, self.noted = weights, ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "all_to_all_single":
            self.noted += "("
        elif name == "wait_tensor":
            self.noted += ")"
        elif name == "mm":
            self.noted += "x" * (not {x.data_ptr() for x in args}.isdisjoint({w.data_ptr() for w in self.weights()}))
        return function(*args, **(kwargs or {}))


def order_on_rank(rank: int, world: int, model_type: str, hidden: bool) -> list[str]:
    """Exchanges and products with weights of the first shared experts, in forward and in backward."""
    stage = one_stage(world, model_type)
    block: Any = next(part for part in stage.modules() if isinstance(part, SharedMeanwhile))
    if not hidden:
        block.__class__ = block.__class__.__bases__[1]
    shared, noted = block.get_submodule(block.order.shared[0]), []
    with Events(shared.parameters) as events:
        loss = stage(tokens([7, 4]), {}, None).loss_sum
        noted.append(events.noted)
        fsdp.per_microbatch(stage, True, {})
        events.noted = ""
        loss.backward()
    return [*noted, events.noted]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen2_moe"])
def test_shared_experts_run_while_rows_travel(pool: Pool, model_type: str) -> None:
    """Three products in forward, and three for gradients of rows in backward, which an exchange surrounds."""
    for hidden in (True, False):
        for forward, backward in pool.run(2, order_on_rank, model_type, hidden, timeout=60):
            assert ("(xxx)" in forward) == ("(xxx)" in backward) == hidden, (forward, backward)


def unfreed_on_rank(rank: int, world: int) -> set[str]:
    """Nodes of graphs, reachable from any tensor after a backward that recomputes, whose saved tensors are kept."""
    stage = one_stage(world, "deepseek_v3", recompute=Recompute())
    loss = stage(tokens([7, 4]), {}, None).loss_sum
    fsdp.per_microbatch(stage, True, {})
    loss.backward()
    nodes = [x.grad_fn for x in gc.get_objects() if type(x) is Tensor and x.grad_fn is not None]
    seen, unfreed = set(nodes), set[str]()
    while nodes:
        node = nodes.pop()
        with suppress(RuntimeError, AttributeError):  # freed, or it keeps nothing of this name
            unfreed.add(f"{node.name()}: {tuple(node._saved_self.shape)}")
        further = {later for later, _ in node.next_functions if later is not None} - seen
        seen |= further
        nodes += further
    return unfreed


def test_a_recompute_leaves_no_activations_behind(pool: Pool) -> None:
    """Experts are a unit of FSDP inside a recomputed block, whose recompute ends after them: shared experts follow."""
    assert pool.run(2, unfreed_on_rank, timeout=60) == [set(), set()]


def composite_on_rank(rank: int, world: int, folder: str) -> list[Any]:
    MAKE["composite"] = partial(hf_causal_lm, checkpoint=folder, part="llm")
    return run_all(rank, world, [Piece("composite", {"ranks": 2, "ep": 2})])


def test_the_language_model_of_a_composite(pool: Pool, tmp_path: Path) -> None:
    """Its experts are transposed in the folder."""
    folder_of("qwen3_vl_moe", 4, tmp_path)
    assert worst([results[0] for results in pool.run(2, composite_on_rank, str(tmp_path), timeout=60)]) < 1e-5


MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip


FAMILIES = ("qwen3_moe", "mixtral", "qwen3_vl_moe")


def folder_of(family: str, count: int, folder: Path) -> Any:
    """A model of transformers, and its folder, where a composite's experts are transposed, as published."""
    if family != "qwen3_vl_moe":
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**MIXTURE | {"model_type": family, "num_experts": count})
        )
        model.save_pretrained(folder)
        return model
    config = tiny(family)
    config.text_config.num_experts, config.text_config.moe_intermediate_size = count, 24
    model = built(config)
    model.save_pretrained(folder)
    stored = load_file(folder / SINGLE)
    save_file({n: t.mT.contiguous() if ".experts." in n else t for n, t in stored.items()}, folder / SINGLE)
    return model


def in_place(rank: int, world: int, ep: int, folder: Path) -> Adapter:
    """The language model of a folder, in place on this rank."""
    part = "llm" if folder.name == "qwen3_vl_moe" else None
    module = hf_causal_lm(checkpoint=folder, check=False, part=part)
    layout = ModuleLayout(world, ep=ep).resolved()
    registry = GroupRegistry(place({"m": layout}, world), [], "cpu")
    cpu, meshes = torch.device("cpu"), (registry.mesh("m"), registry.experts("m"))
    parallelize("m", module, layout, meshes[0], cpu, seed=3, experts=meshes[1])
    return module


def loaded_and_saved(rank: int, world: int, ep: int, folder: Path, source: Path | None, target: Path) -> Any:
    """Load a folder of transformers and double it, or load a checkpoint of it. Save it with moments that are squares of
    the parameters, and return the whole tensors, the bytes read of the folder, and those of experts here.
    """
    with reads() as found:
        module = in_place(rank, world, ep, folder)
    tensors = {f"model.m.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    held = sum(local(t).nbytes for name, t in tensors.items() if ".experts." in name)
    for tensor in tensors.values():
        local(tensor).mul_(0 if source else 2)
    tensors |= {f"optimizer.{name}": t.square() for name, t in tensors.items()}
    assert source is None or not load(tensors, source).missing
    Checkpointer().save(tensors, {EXPORT_KEY: export_record({"m.": module})}, target)
    full = {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}
    return full if rank == 0 else None, sum(found), held


def all_loaded_and_saved(rank: int, world: int, ep: int, given: list[tuple[Path, Path | None, Path]]) -> list[Any]:
    return [loaded_and_saved(rank, world, ep, *paths) for paths in given]


@pytest.mark.parametrize(("count", "degrees"), [(8, (4, 1, 2)), (6, (2, 2))])
def test_folders_are_read_in_parts_resumed_with_other_degrees_and_exported(
    pool: Pool, tmp_path: Path, count: int, degrees: tuple[int, ...]
) -> None:
    """transformers' folder -> ep 4 -> ep 1 -> ep 2 -> folder, bit by bit; each rank reads its experts and the rest
    alone. Two ranks share three experts by columns.
    """
    models = {family: folder_of(family, count, tmp_path / family) for family in FAMILIES}
    sources: list[Path | None] = [None, *(tmp_path / str(turn) for turn in range(len(degrees)))]
    for ep, source, target in zip(degrees, sources[:-1], sources[1:], strict=True):
        given = [(tmp_path / of, source and source / of, target / of) for of in FAMILIES]
        found = pool.run(4, all_loaded_and_saved, ep, given, timeout=120)
        for family, *ranks in zip(FAMILIES, *found, strict=True):
            trained = [(name, p.detach()) for name, p in models[family].named_parameters() if ".visual." not in name]
            expected = {f"model.m.model.{name}": 2 * p for name, p in trained}
            experts = sum(p.nbytes for name, p in trained if ".experts." in name)
            rest = sum(p.nbytes for _, p in trained) - experts
            expected |= {f"optimizer.{name}": p.square() for name, p in expected.items()}
            whole = ranks[0][0]
            assert whole.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in whole.items())
            for _, read, held in ranks:
                assert held == experts // 4 and 0 < read <= experts // 4 + rest
    for family, model in models.items():
        export(target / family, tmp_path / "out" / family, whole=True)
        origin, out = (load_file(folder / family / SINGLE) for folder in (tmp_path, tmp_path / "out"))
        assert {name: tensor.shape for name, tensor in out.items()} == {n: tensor.shape for n, tensor in origin.items()}
        again = type(model).from_pretrained(tmp_path / "out" / family).state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(again[name], tensor if ".visual." in name else 2 * tensor), name
