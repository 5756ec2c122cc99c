"""Bytes of activations of a model's blocks, measured on the real modules over fake tensors: no memory, no device.

A block's forward and backward run at full size in the dtype that they compute in, with tensors that have shapes alone
(``FakeTensorMode``), while memory is counted as operators make and free it. What a block needs grows with the
:data:`FEATURES` of what it is given, so a few packings tell all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.encoder import Backbone, Encoder
from hetero_strategy.model.generator import Generator, GeneratorInputs
from hetero_strategy.model.inputs import (
    IGNORE,
    EncoderInputs,
    ImagePatches,
    MelFrames,
    Packing,
    SequenceInputs,
    tensors_of,
)
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.parallelize.offload import HostMemory, SavedBlock, apply_offload
from hetero_strategy.parallelize.recompute import Recompute, apply_recompute
from hetero_strategy.planner.activations import FEATURES, KEYS, Activations, BlockBytes, Head, HeadBytes, features
from hetero_strategy.planner.layers import fed_by_trainable
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.runtime import backward
from hetero_strategy.runtime.local_stage import Output

MATMULS = "all but matmuls"
WAYS = {"kept": None, "all": Recompute(), MATMULS: Recompute(keeps_matmuls=True)}
"""What a block may run again in backward."""
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""By bytes of a number."""
ROWS = 2**18
"""Of the packings that are measured: so many that weights and their gradients are nothing beside activations."""


def activations_of(
    model: MultimodalModel, dtype: torch.dtype = torch.bfloat16, *, buckets: bool = False, ways: Collection[str] = WAYS
) -> dict[str, Activations]:
    """Measure the activations of all modules.

    Args:
        model: as built, before anything is parallelised, in training mode; on the meta device it costs no memory.
        dtype: of rows and of weights that compute.
        buckets: whether attention runs on padded buckets, as it does but on CUDA in half precision.
        ways: those of :data:`WAYS` that are asked for.
    """
    fed = fed_by_trainable(*trainable(model))
    return {name: _Module(model.modules_by_name[name], fed[name], dtype, buckets).measured(ways) for name in fed}


def trainable(model: MultimodalModel) -> tuple[dict[str, bool], list[tuple[str, str]]]:
    """Which modules have something that trains, in topological order, and the edges between them."""
    trains = {
        name: any(p.requires_grad for p in model.modules_by_name[name].parameters()) for name in model.topological()
    }
    return trains, [(edge.source, edge.target) for edge in model.edges]


class _Module:
    """Measures one module."""

    def __init__(self, module: Adapter, fed: bool, dtype: torch.dtype, buckets: bool) -> None:
        self.module, self.fed, self.dtype = module, fed, dtype
        self.row = (module.hidden_width if module.blocks() else module.width) * dtype.itemsize
        self.packings = list(_packings(module))[: None if buckets else 1]
        self.known: dict[Any, np.ndarray] = {}
        self.of_attention: dict[Any, np.ndarray] = {}

    def measured(self, ways: Collection[str]) -> Activations:
        fqns = list(self.module.blocks())
        with FakeTensorMode():
            known = inputs_of(self.module, self.packings[0])
        if known is None:
            return self._by_formula()
        flows = self.fed
        blocks: dict[str, list[np.ndarray]] = {way: [] for way in (ways if fqns else ("kept",))}
        for i in range(max(1, len(fqns))):
            stage = self._stage(fqns[i : i + 1], first=i == 0, last=i >= len(fqns) - 1)
            for way, found in blocks.items():
                found.append(self._block(stage, flows, way))
            flows = flows or any(p.requires_grad for p in stage.parameters())
        later = {way: self._later(fqns, way) if flows and len(fqns) > 1 else (0.0, 0.0) for way in blocks}
        made = {way: _block_bytes(np.stack(found), *later[way]) for way, found in blocks.items()}
        payload = sum(t.nbytes for t in tensors_of(known)) / known.packing.rows
        return Activations(made, self.row, self._head(fqns), payload)

    def _by_formula(self) -> Activations:
        """Of Korthikanti et al. (arXiv:2205.05198, section 4.1) with flash attention: 34 bytes of each number of a row
        at 2 bytes a number; backward needs the gradients of one layer's widest part, of 8, besides.
        """
        blocks = max(1, len(self.module.blocks()))
        flows = self.fed or any(p.requires_grad for p in self.module.parameters())
        quantities = np.zeros((blocks, 9, len(FEATURES)))
        quantities[:, :6, 0] = np.array([24 * flows, 10 * flows, 0, 34, 42 * flows, 60 * flows]) / 2 * self.row
        again = quantities.copy()
        again[:, :3] = 0
        made = {way: _block_bytes(again if way == "all" else quantities, way == "all" and self.row) for way in WAYS}
        return Activations(made, self.row, None, 0.0)

    def _stage(self, fqns: Sequence[str], *, first: bool, last: bool) -> Adapter:
        return self.module.stage(fqns, first=first, last=last) if fqns else self.module

    def _block(self, stage: Adapter, flows: bool, way: str) -> Float64[np.ndarray, "quantities features"]:
        """Quantities of a block, in the order of :class:`BlockBytes`; blocks of the same sizes are measured once."""
        sizes = tuple(
            (tuple(p.shape), p.requires_grad) for block in stage.blocks().values() for p in block.parameters()
        )
        attention = (flows, way, sizes)
        key = (stage.first_stage, stage.last_stage, *attention)
        if key not in self.known:
            packings = self.packings[:1] if attention in self.of_attention else self.packings
            measured = [self._quantities(stage, lengths, flows, way) for lengths in packings]
            given, made = np.stack([x for x, _ in measured]), np.array([y for _, y in measured])
            found = np.zeros((made.shape[1], len(FEATURES)))
            found[:, 0] = made[0] / given[0, 0]
            if len(packings) > 1:
                self.of_attention[attention] = _fitted(
                    given[1:, 1:KEYS], made[1:] - np.outer(given[1:, 0], found[:, 0])
                )
            found[:, 1:KEYS] = self.of_attention.get(attention, 0.0)
            found[:, KEYS:] = self._in_context(flows, way)
            self.known[key] = found
        return self.known[key]

    def _in_context(self, flows: bool, way: str) -> Float64[np.ndarray, "quantities context"]:
        """What context parallelism adds, by what it does: keys and values that are seen are copies of those that are
        gathered, and there are gradients of both. A mask is made of numbers.
        """
        found, width = np.zeros((9, len(FEATURES) - KEYS)), self.module.context_width
        found[3:5] = [[width, width, 1], [2 * width * flows, width * flows, flows]]
        found[0, 0], found[2, 2] = np.array([width, 1]) * (flows and way == "kept")
        return found * self.dtype.itemsize

    def _later(self, fqns: Sequence[str], way: str) -> tuple[float, float]:
        """How many bytes a row more a block keeps that is not the first of a stage: its input, where it needs it, less
        what it has in common with those before it, such as tables of positions; and of that what stays on the device
        where blocks are in host memory.
        """
        stages = [self._stage(part, first=False, last=False) for part in (fqns[:1], fqns[:2])]
        found = [self._quantities(stage, self.packings[0], True, way) for stage in stages]
        one, two = (np.array([sum(x[:3]), sum(x[6:])]) / given[0] for given, x in found)
        all_, stays = two - 2 * one
        return float(all_), float(stays)

    def _quantities(
        self, stage: Adapter, lengths: np.ndarray, flows: bool, way: str
    ) -> tuple[Float64[np.ndarray, "features"], list[float]]:
        """Features of a packing, and what a stage needs for it."""
        with FakeTensorMode(), ExitStack() as undo:
            inputs = inputs_of(self.module, lengths)
            assert inputs is not None
            hidden, rows = None, {}
            if not stage.first_stage:
                hidden = torch.empty(inputs.packing.rows, self.module.hidden_width, dtype=self.dtype)
            elif isinstance(inputs, GeneratorInputs):
                rows = {"": torch.empty(int(inputs.rows.sum()), self.module.width, dtype=self.dtype)}
            leaves = [leaf.requires_grad_(flows) for leaf in (hidden, *rows.values()) if leaf is not None]
            how = WAYS[way]
            for block in stage.blocks().values():
                undo.callback(vars(block).update, dict(vars(block)))
                undo.callback(vars(block).clear)
            if how is not None:
                apply_recompute(stage.blocks().values(), how)
            stage.compute_dtype = self.dtype
            counted = undo.enter_context(_Counted(self.module, stage))

            def work(weights: list[Tensor]) -> list[float]:
                run = partial(stage, inputs, rows, hidden)
                found = _whole(run, counted, bool(weights) or flows)
                split = flows and weights and how is None
                found.append(_halves(run, counted, leaves, weights) if split else found[-1])
                apply_offload(stage, stage.blocks().values(), _Nowhere(torch.device("cpu")))
                return found + (_stays(run, counted) if weights or flows else [0.0] * 3)

            return features(inputs.packing), _Fake(stage, self.dtype).do(work)

    def _head(self, fqns: Sequence[str]) -> Head | None:
        if not isinstance(self.module, CausalLM):
            return None
        stage = self._stage(fqns[-1:], first=False, last=True)
        chunk = self.module.head_rows
        counts = (chunk // 2, chunk, 2 * chunk)
        less, all_, more = (np.array(self._of_head(stage, n)) for n in counts)
        first, above = (all_ - less) / (chunk - counts[0]), (more - all_) / chunk
        return Head(chunk, *(HeadBytes(float(a), float(b)) for a, b in zip(first, above, strict=True)))

    def _of_head(self, stage: Adapter, count: int) -> list[float]:
        assert isinstance(stage, CausalLM)
        with FakeTensorMode(), _Counted(self.module, stage) as counted:
            ids = torch.zeros(count, dtype=torch.int64)
            inputs = SequenceInputs(ids, ids, Packing.of(np.array([count])), labelled=ids)
            rows = torch.empty(count, self.module.width, dtype=self.dtype, requires_grad=True)
            work = partial(_whole, partial(stage.score, rows, inputs), counted, True)
            inside, between, whole, forward, back = _Fake(stage, self.dtype, learns=False).do(lambda _: work())
        return [inside + between + whole, forward, back]


class _Fake(nn.Module):
    """Gives a module fake weights in ``dtype`` while something is done, backward included."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, learns: bool = True) -> None:
        super().__init__()
        self.module, self.dtype, self.learns = module, dtype, learns

    def do(self, work: Callable[[list[Tensor]], list[float]]) -> list[float]:
        """What ``work`` makes of the weights that train."""
        made = {fqn: torch.empty(b.shape, dtype=b.dtype) for fqn, b in self.named_buffers()}
        for fqn, p in self.named_parameters():
            made[fqn] = torch.empty(p.shape, dtype=self.dtype, requires_grad=p.requires_grad and self.learns)
        learnt = [w for w in made.values() if w.requires_grad]
        return torch.func.functional_call(self, made, (partial(work, learnt),))

    @override
    def forward(self, work: Callable[[], list[float]]) -> list[float]:
        return work()


def _whole(run: Callable[[], Any], counted: _Counted, trains: bool) -> list[float]:
    """What is kept, by kind, and the most in forward and in backward."""
    start = counted.reset()
    with torch.set_grad_enabled(trains):
        roots = _roots(run())
    forward = counted.most - start
    if not trains:
        return [0.0, 0.0, 0.0, forward, 0.0]
    kept = counted.by_kind()
    gradients = [root.filled(1.0, torch.device("cpu")) for root in roots]
    own = sum(g.nbytes for g in gradients)
    counted.reset()
    backward.whole([(root.edge, g) for root, g in zip(roots, gradients, strict=True)])
    return [*kept, forward, counted.most - start - own]


def _stays(run: Callable[[], Any], counted: _Counted) -> list[float]:
    """What is kept on the device, by kind, where blocks have the rest in host memory."""
    counted.reset()
    roots = _roots(run())
    found = counted.by_kind()
    roots.clear()
    return found


class _Nowhere(HostMemory):
    """Lets go what leaves: it is the memory of no other device."""

    @override
    def leave(self, block: SavedBlock) -> None:
        for memory in block.alive():
            memory.tensor = torch.empty(0)


def _halves(run: Callable[[], Any], counted: _Counted, leaves: Sequence[Tensor], weights: list[Any]) -> float:
    """What is kept between the halves of a backward, without the gradients of the leaves."""
    start = counted.reset()
    roots = [(root.edge, root.filled(1.0, torch.device("cpu"))) for root in _roots(run())]
    later = backward.inputs_first(roots, leaves, weights)
    for leaf in leaves:
        leaf.grad = None
    kept = counted.now - start
    later()
    return float(kept)


def _roots(out: Any) -> list[Output]:
    out = out if isinstance(out, Tensor) else out.loss_sum
    return [Output.of(out)] if out.requires_grad else []


class _Counted(Allocations):
    """Knows of all memory how tensor parallelism divides it: see :attr:`BlockBytes.kept`."""

    def __init__(self, module: Adapter, stage: nn.Module) -> None:
        super().__init__()
        self._inside: set[int] = set()
        self._whole: set[int] = set()
        plan = (module.tp_plan() or Adapter.tp_plan(module)) or {}
        self._hooks: list[Any] = []
        for fqn, part in stage.named_modules():
            style = next((style for pattern, style in plan.items() if fnmatchcase(fqn, pattern)), None)
            if isinstance(style, ColwiseParallel):
                self._hooks.append(part.register_forward_hook(self._columns))
            elif isinstance(style, RowwiseParallel):
                self._hooks.append(part.register_forward_hook(self._joined))

    @override
    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> int:
        """Forget the most; bytes that are counted now."""
        self.most = self.now
        return self.now

    def by_kind(self) -> list[float]:
        """Bytes inside columns, between them, and of inputs of columns."""
        kinds = [0.0, 0.0, 0.0]
        for key, size in self._sizes.items():
            kinds[0 if key in self._inside else 2 if key in self._whole else 1] += size
        return kinds

    @override
    def _made(self, key: int, given: Iterable[int]) -> None:
        if not self._inside.isdisjoint(given):
            self._inside.add(key)

    @override
    def _freed(self, key: int) -> None:
        super()._freed(key)
        self._inside.discard(key)
        self._whole.discard(key)

    def _columns(self, part: nn.Module, given: Any, made: Any) -> None:
        self._whole |= _keys(given) - self._inside
        self._inside |= _keys(made)

    def _joined(self, part: nn.Module, given: Any, made: Any) -> None:
        self._inside -= _keys(made)


def _keys(values: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(values) if isinstance(x, Tensor)}


def _block_bytes(
    quantities: Float64[np.ndarray, "blocks quantities features"], later: float, stays_later: float = 0.0
) -> BlockBytes:
    """Of quantities in the order of the fields."""
    kept, stays = (quantities[:, part].swapaxes(0, 1) for part in (slice(3), slice(6, 9)))
    return BlockBytes(kept, later, quantities[:, 3], quantities[:, 4], quantities[:, 5], stays, stays_later)


def _fitted(
    given: Float64[np.ndarray, "packings _features"], measured: Float64[np.ndarray, "packings quantities"]
) -> Any:
    """Bytes per feature, ``[quantities, features]``."""
    scale = np.maximum(given.max(axis=0), 1.0)
    found: np.ndarray = np.linalg.lstsq(given / scale, measured, rcond=None)[0] / scale[:, None]
    return found.T


def _packings(module: Adapter) -> Iterator[np.ndarray]:
    """Lengths of packings that tell :data:`FEATURES` apart: unmoved, moved, and two with other shares of padding."""
    for lengths in ((4,), (4, 2), (4, 3), (8, 6)):
        yield np.resize(np.array(lengths) * unit_of(module), ROWS // (unit_of(module) * max(lengths)))


def unit_of(module: Adapter) -> int:
    """What lengths are multiples of: rows of two by two cells of the patches that are merged."""
    patches = getattr(module.backbone, "processor", None) if isinstance(module, Encoder) else None
    return 4 * patches.merge**2 if isinstance(patches, ImagePatches) else 16


def inputs_of(module: Adapter, lengths: np.ndarray) -> EncoderInputs | GeneratorInputs | SequenceInputs | None:
    """What a module takes with units of these lengths, multiples of :func:`unit_of`; None where that is not known."""
    packing, rows = Packing.of(lengths), int(lengths.sum())
    if isinstance(module, CausalLM):
        ids = torch.zeros(rows, dtype=torch.int64)
        return SequenceInputs(ids, torch.full_like(ids, IGNORE), packing, labelled=ids[:0])
    if isinstance(module, Generator):
        shape = (rows - len(lengths), module.feature)
        ones = np.ones_like(lengths)
        slots: dict[Any, Tensor] = {"": packing.offsets[:-1].to(torch.int64)}
        sizes = np.stack([ones, lengths - 1], axis=1)
        values = torch.empty(shape)
        return GeneratorInputs(values, values.clone(), torch.empty(len(lengths)), sizes, ones, packing, slots=slots)
    if isinstance(module, Encoder) and isinstance(module.backbone, Backbone):
        given = module.backbone.processor
        if isinstance(given, MelFrames):
            sizes, shape = 2 * lengths[:, None], (2 * rows, given.n_mels)
        elif isinstance(given, ImagePatches):
            side = 2 * given.merge
            sizes = np.stack([np.full_like(lengths, side), lengths // side], axis=1)
            shape = (rows, given.channels * given.patch_size**2)
        else:
            return None
        return EncoderInputs(torch.empty(shape), sizes, module.backbone.output_rows(sizes), packing)
    return None
