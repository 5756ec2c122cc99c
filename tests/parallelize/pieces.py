"""One module's stages on real ranks, each fed with the rows and gradient rows of a one-process run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.materialize import materialize
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.apply import check_all, cut, parallelize
from hetero_strategy.parallelize.gradients import find_tied, global_norm, owned_parameters, settle, tied_rank_sets
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.parallelize.transforms import read_transforms
from hetero_strategy.runtime import backward
from hetero_strategy.zoo import hf_llama, hf_qwen3, siglip2_encoder, titan_llama, whisper_encoder
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from tests.model.helpers import LLAMA, TITAN, VIT, WHISPER, clips, images, tokens

EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MAKE = {
    "titan": lambda: titan_llama(**TITAN | {"n_layers": 4}),
    "hf_llama": lambda: hf_llama(**LLAMA | {"num_hidden_layers": 4}),
    "tied": lambda: hf_llama(**LLAMA | {"num_hidden_layers": 4}, tie_word_embeddings=True),
    "hf_qwen3": lambda: hf_qwen3(**LLAMA | {"num_hidden_layers": 4}, head_dim=8),
    "hf_moe": lambda: hf_causal_lm(model_type="qwen3_moe", **LLAMA | EXPERTS),
    "siglip2": lambda: siglip2_encoder(out_width=8, merge=2, **VIT | {"num_hidden_layers": 4}),
    "whisper": lambda: whisper_encoder(out_width=8, stack=2, **WHISPER | {"encoder_layers": 4}),
}


GRIDS = [[(2, 4), (2, 2)], [(4, 4)], [], [(2, 2)]]
FRAMES = [[7, 4], [12], [], [9, 3]]
TEXTS = [[3, 5], [4, 2, 2], [], [6]]


def even_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, as equal as can be; the first stages have one more."""
    each, more = divmod(blocks, stages)
    return tuple(each + (stage < more) for stage in range(stages))


@dataclass(frozen=True)
class Piece:
    """What runs: a kind of module in a layout, and how."""

    kind: str
    layout: dict[str, Any]
    mode: str = "once"
    """``once``: gather, all microbatches, reduce; ``each``: FSDP by itself."""
    halves: bool = False
    """I, then W."""
    transforms: Mapping[str, str | int] = field(default_factory=dict)
    microbatches: int = 2
    ahead: int = 1
    """Microbatches whose forward runs before the first backward; then they take turns (1F1B)."""
    forget: str = ""
    """Damage: ``reduce`` leaves FSDP's reduction out in a way that hangs nobody; ``tied`` the sum over owners."""
    frozen: bool = False
    """Nothing trains in the blocks."""


def inputs_of(kind: str, number: int) -> Any:
    """Of one (instance, microbatch); every third has no rows, where the module allows it."""
    if kind == "siglip2":
        return images(GRIDS[number % 4], merge=2, seed=number)
    if kind == "whisper":
        return clips(FRAMES[number % 4], stack=2, seed=number)
    lengths = TEXTS[number % 4] if kind != "titan" else [[3, 5], [4, 2, 2]][number % 2]
    return tokens(lengths, seed=number)


def loss_of(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()
    return out.loss_sum + 0.1 * out.hidden.square().sum()


def freeze(module: Adapter, piece: Piece) -> None:
    for block in module.blocks().values():
        block.requires_grad_(not piece.frozen)


def reference(piece: Piece, layout: ModuleLayout, split: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Gradients of a one-process run, and by (instance, microbatch) the rows into each stage and their gradients."""
    module = MAKE[piece.kind]()
    freeze(module, piece)
    materialize(module, 3, name="m")
    module.double().train()
    numbered = cut(module, split, range(layout.pipeline.stages))
    stages = [numbered[n] for n in sorted(numbered)]
    rows: dict[tuple[int, int], list[torch.Tensor | None]] = {}
    grads: dict[tuple[int, int], list[torch.Tensor | None]] = {}
    for instance in range(layout.dp):
        for mb in range(piece.microbatches):
            inputs, hidden, graphs = inputs_of(piece.kind, instance * piece.microbatches + mb), None, []
            for stage in stages:
                leaf = None if hidden is None else hidden.detach().requires_grad_()
                hidden = stage(inputs, {}, leaf)
                graphs.append((leaf, hidden))
            loss_of(hidden).backward()
            for (_, out), (leaf, _) in zip(graphs[-2::-1], graphs[:0:-1], strict=True):
                if out.requires_grad:
                    out.backward(leaf.grad)
            rows[instance, mb] = [None if leaf is None else leaf.detach() for leaf, _ in graphs]
            grads[instance, mb] = [leaf.grad for leaf, _ in graphs[1:]] + [None]
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    made = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
    return made, rows, grads


class Sums(TorchDispatchMode):
    """Counts all-reduces, by number of ranks and whether they come after the last backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[int, bool]] = Counter()
        self.over = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # comes again, with the tensors inside
            return NotImplemented
        if function is torch.ops.c10d.allreduce_.default:
            self.calls[dist.ProcessGroup.unbox(args[1]).size(), self.over] += 1
        elif function is torch.ops._c10d_functional.all_reduce.default:
            self.calls[_resolve_process_group(args[2]).size(), self.over] += 1
        return function(*args, **(kwargs or {}))


def run(rank: int, world: int, piece: Piece) -> dict[str, Any]:
    """Gradients of this rank's stages against the reference, and the sums over ranks that they take."""
    with Sums() as sums:
        return _run(rank, world, piece, sums)


def _run(rank: int, world: int, piece: Piece, sums: Sums) -> dict[str, Any]:
    layout = ModuleLayout.from_config("m", piece.layout).resolved()
    module = MAKE[piece.kind]()
    freeze(module, piece)
    module.double().train()
    check_all({"m": module}, {"m": layout})
    placement = place({"m": layout}, world)
    registry = GroupRegistry(placement, tied_rank_sets({"m": module}, {"m": layout}), "cpu")
    where = placement.coordinate("m", rank)
    if where is None:
        return {}
    split = layout.split or even_split(len(module.blocks()), layout.pipeline.stages)
    expected, rows, grads = reference(piece, layout, split)
    stages = parallelize(
        "m", module, layout, registry.mesh("m"), torch.device("cpu"),
        seed=3, experts=registry.experts("m"), transforms=read_transforms({"m": piece.transforms}).get("m", {}),
        split=split, pp_rank=where.pp, storage=Storage(torch.float64, torch.float64),
    )  # fmt: skip
    tied = find_tied({"m": module}, {"m": layout}, rank, registry.group)

    def mine(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or module.row_sharding(layout).parts == 1:
            return tensor
        return tensor.chunk(layout.tp)[where.shard].contiguous()

    values = {n: _full(p.detach()) for stage in stages.values() for n, p in stage.global_parameters().items()}
    for stage in stages.values():
        if layout.dp_shard > 1 and piece.mode == "once":
            fsdp.gather(stage)
    errors: list[float] = []
    for number, stage in sorted(stages.items(), reverse=True):
        live = {}
        turns = [("F", mb) for mb in range(min(piece.ahead, piece.microbatches))]
        for mb in range(piece.microbatches):
            turns.append(("B", mb))
            if mb + piece.ahead < piece.microbatches:
                turns.append(("F", mb + piece.ahead))
        for kind, mb in turns:
            key = (where.instance, mb)
            if kind == "F":
                leaf = mine(rows[key][number])
                leaf = None if leaf is None else leaf.clone().requires_grad_()
                out = stage(inputs_of(piece.kind, where.instance * piece.microbatches + mb), {}, leaf)
                live[mb] = leaf, loss_of(out) if stage.last_stage else out
                continue
            (leaf, root), grad = live.pop(mb), mine(grads[key][number])
            if layout.dp_shard > 1 and piece.mode == "each":
                fsdp.per_microbatch(stage, mb == piece.microbatches - 1, {})
            seed = torch.ones_like(root) if grad is None else grad
            weights = [p for p in stage.parameters() if p.requires_grad]
            roots = [(get_gradient_edge(root), seed)] if root.requires_grad else []
            del root
            if piece.halves:
                later = backward.inputs_first(roots, [leaf] if leaf is not None else [], weights)
                later()
            else:
                backward.whole(roots)
            if leaf is not None:
                errors.append(_error(leaf.grad, mine(grads[key][number - 1])))
    sums.over = True
    for stage in stages.values():
        if layout.dp_shard > 1 and piece.mode == "once":
            if piece.forget == "reduce":
                fsdp.release(stage)
            else:
                fsdp.reduce(stage, {})
                fsdp.finish(stage)
        replicas = None
        if layout.dp_replicate > 1 and layout.dp_shard == 1:
            mesh = registry.mesh("m")
            assert mesh is not None
            replicas = mesh.get_group("dp_replicate")
        settle((p for p in stage.parameters() if p.requires_grad), replicas, None, {})()
    counted = dict(sums.calls)
    if piece.forget != "tied":
        tied.settle(["m"], {})
    found = {}
    for stage in stages.values():
        for name, parameter in stage.global_parameters().items():
            if parameter.requires_grad:
                assert parameter.grad is not None or piece.forget, name
                got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found[name] = _error(_full(got), expected[name])
    owned = owned_parameters({"m": stages}, {"m": layout})
    norm = float(global_norm(list(owned.values()), torch.device("cpu")))
    return {
        "sums": counted,
        "errors": found,
        "rows": max(errors, default=0.0),
        "values": {n: v.numpy() for n, v in values.items()},
        "norm": abs(norm / float(torch.stack([g.norm() for g in expected.values()]).norm()) - 1),
        "names": [n for n, _ in module.named_parameters()],
        "state": {n: tuple(t.shape) for n, t in module.state_dict().items()},
        "owned": sorted(n for n, p in module.named_parameters() if not p.is_meta),
        "same": all(
            dict(module.named_parameters())[n] is p for s in stages.values() for n, p in s.global_parameters().items()
        ),
    }


def run_all(rank: int, world: int, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """One after another."""
    return [run(rank, world, piece) for piece in pieces]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _error(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    """Relative to the largest entry; some gradients, as of a key's bias, are zero but for rounding."""
    assert found is not None and wanted is not None and found.shape == wanted.shape
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-4) if wanted.numel() else 0.0


def worst(results: list[dict[str, Any]]) -> float:
    """Over ranks, parameters and gradient rows."""
    return float(np.max([max([*r["errors"].values(), r["rows"]]) for r in results if r]))


def evaluate_then_train(rank: int, world: int, piece: Piece) -> tuple[dict[str, Any], bool, int]:
    """Forwards without backward in both ways, and what is left behind; then as :func:`run`."""
    layout = ModuleLayout.from_config("m", piece.layout).resolved()
    module = MAKE[piece.kind]().double()
    registry = GroupRegistry(place({"m": layout}, world), [], "cpu")
    stage = parallelize("m", module, layout, registry.mesh("m"), torch.device("cpu"), seed=3)[0]
    before = [id(p) for p in module.parameters()]
    losses = []
    for gathered in (True, False, True):
        with torch.no_grad():
            if gathered:
                fsdp.gather(stage)
            losses += [float(loss_of(stage(inputs_of(piece.kind, number)))) for number in (0, 1)]
        fsdp.release(stage)
        fsdp.release(stage)
    sharded = all(isinstance(p, DTensor) for p in module.parameters())
    assert before == [id(p) for p in module.parameters()]
    whole = sum(part.numel() for part in stage.parameters())
    return run(rank, world, piece), sharded and losses[:2] == losses[2:4] == losses[4:], whole
