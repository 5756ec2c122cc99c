"""Bytes of activations of a model's blocks, measured on the real modules over fake tensors: no memory, no device.

A block's forward and backward run at full size in their compute dtype, on tensors that have shapes alone
(``FakeTensorMode``), while memory is counted as operators make and free it. A block's memory grows with its rows, and
in context parallelism with the other :data:`FEATURES` of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLM
from hetero_strategy.model.inputs import Packing, SequenceInputs, tensors_of
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import KEPT
from hetero_strategy.model.tensor_parallel import begins_columns, divided_along, ends_columns, style_of
from hetero_strategy.parallelize.transform import Site, Transform
from hetero_strategy.parallelize.transforms import choices, label, way
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.profiling.stage_memory import FEATURES, Activations, BlockBytes, Head, HeadBytes
from hetero_strategy.runtime import backward
from hetero_strategy.runtime.actions import Output

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Data type by bytes of a number."""
ROWS = 2**18
"""Rows of the measured packing: so many that weights and their gradients are negligible beside activations."""


Ways = Mapping[str, tuple[Transform, ...]]
"""Label of a block's changes -> changes, see :func:`hetero_strategy.parallelize.transforms.way`."""


def ways_of(blocks: int, transforms: Mapping[str, Transform]) -> Ways:
    """Return all ways in which a module's blocks keep activations, with the transforms that a user gave it and with
    those that a plan may add.
    """
    changed = [{**{each.name: each for each in more}, **transforms} for more in choices(blocks).values()]
    ways = [way(of, i, moved=moved) for of in changed for i in range(blocks) for moved in (False, True)]
    return {"": (), **{label(one): one for one in sorted(ways, key=label)}}


def activations_of(
    model: MultimodalModel,
    dtype: torch.dtype = torch.bfloat16,
    *,
    ways: Mapping[str, Ways] = MappingProxyType({}),
) -> dict[str, Activations]:
    """Measure the activations of all modules.

    Args:
        model: model as built, before anything is parallelised, in training mode; on the meta device it costs no memory.
        dtype: data type of rows and of weights that compute.
        ways: ways to measure by module; default: those that a plan may choose.
    """
    activations = {}
    for name, fed in spec_of(model).fed_by_trainable().items():
        module = model.modules_by_name[name]
        of = ways[name] if name in ways else ways_of(len(module.blocks()), {})
        activations[name] = _Module(module, fed, dtype).measured(of)
    return activations


class _Module:
    """A measurement of one module."""

    def __init__(self, module: Adapter, fed: bool, dtype: torch.dtype) -> None:
        self.module, self.fed, self.dtype = module, fed, dtype
        self.row = (module.hidden_width if module.blocks() else module.width) * dtype.itemsize
        self.lengths = np.full(ROWS // (4 * module.example_unit), 4 * module.example_unit)
        self.known: dict[Any, np.ndarray] = {}

    def measured(self, ways: Ways) -> Activations:
        try:
            with FakeTensorMode():
                known = self.module.example(self.lengths)
            return self._by_formula(ways) if known is None else self._by_run(ways, known)
        except (DataDependentOutputException, DynamicOutputShapeException):  # such as experts that are looped over
            return self._by_formula(ways)

    def _by_run(self, ways: Ways, known: Any) -> Activations:
        fqns, flows = list(self.module.blocks()), self.fed
        measured: dict[str, list[np.ndarray]] = {name: [] for name in ways}
        for i in range(max(1, len(fqns))):
            stage = self._stage(fqns[i : i + 1], first=i == 0, last=i >= len(fqns) - 1)
            for name, changes in ways.items():
                measured[name].append(self._block(stage, flows, changes))
            flows = flows or any(p.requires_grad for p in stage.parameters())
        later = {name: self._later(fqns, of) if flows and len(fqns) > 1 else 0.0 for name, of in ways.items()}
        blocks = {name: _block_bytes(np.stack(quantities), later[name]) for name, quantities in measured.items()}
        payload = sum(t.nbytes for t in tensors_of(known)) / known.packing.rows
        return Activations(blocks, self.row, self._head(fqns), payload)

    def _by_formula(self, ways: Ways) -> Activations:
        """Predict the activations by :data:`KEPT`. Gradients of one layer's widest part come on top in backward, those
        of all matmuls between its halves.
        """
        flows = self.fed or any(p.requires_grad for p in self.module.parameters())
        blocks, numbers = {}, sum(KEPT)
        for name, changes in ways.items():
            moved, kept, row = any(each.moves for each in changes), np.array(KEPT), 0.0
            for each in changes:
                kept = each.kept(kept, 1)
            if changes:  # the input counts as `later`
                kept, row = kept * (not moved) - [0.0, not moved, 0.0, 0.0], self.row * (not moved)
            amounts = [*(flows * kept), numbers, flows * (numbers + 4), flows * (numbers + 13)]
            quantities = np.zeros((max(1, len(self.module.blocks())), len(amounts), len(FEATURES)))
            quantities[:, :, 0] = np.array(amounts) * self.row
            blocks[name] = _block_bytes(quantities, row)
        return Activations(blocks, self.row, None, 0.0)

    def _stage(self, fqns: Sequence[str], *, first: bool, last: bool) -> Adapter:
        return self.module.stage(fqns, first=first, last=last) if fqns else self.module

    def _block(
        self, stage: Adapter, flows: bool, changes: tuple[Transform, ...]
    ) -> Float64[np.ndarray, "quantities features"]:
        """Return the quantities of a block, in the order of :class:`BlockBytes`; equal blocks are measured once."""
        sizes = tuple(
            (tuple(p.shape), p.requires_grad) for block in stage.blocks().values() for p in block.parameters()
        )
        key = (stage.first_stage, stage.last_stage, flows, label(changes), sizes)
        if key not in self.known:
            per_row = np.array(self._quantities(stage, flows, changes)) / self.lengths.sum()
            self.known[key] = np.concatenate([per_row[:, None], self._in_context(flows)], axis=1)
        return self.known[key]

    def _in_context(self, flows: bool) -> Float64[np.ndarray, "quantities context"]:
        """Return the bytes that context parallelism adds for each key while a block runs: it and its gradients."""
        width = self.module.context_width * self.dtype.itemsize
        return np.array([0.0] * len(KEPT) + [width, 2 * width * flows, 0.0])[:, None]

    def _later(self, fqns: Sequence[str], changes: tuple[Transform, ...]) -> float:
        """Return the additional bytes per row of a block that is not the first of a stage: its input if it needs one,
        less what it shares with earlier blocks, such as tables of positions.
        """
        stages = [self._stage(part, first=False, last=False) for part in (fqns[:1], fqns[:2])]
        one, two = (sum(self._quantities(stage, True, changes)[:-3]) / self.lengths.sum() for stage in stages)
        return float(two - 2 * one)

    def _quantities(self, stage: Adapter, flows: bool, changes: tuple[Transform, ...]) -> list[float]:
        """Return the bytes that a stage needs for all rows."""
        with FakeTensorMode(), ExitStack() as undo:
            inputs = self.module.example(self.lengths)
            assert inputs is not None
            hidden, rows = None, {}
            if not stage.first_stage:
                hidden = torch.empty(inputs.packing.rows, self.module.hidden_width, dtype=self.dtype)
            else:
                slots = getattr(inputs, "slots", {})
                rows = {key: torch.empty(len(at), self.module.width, dtype=self.dtype) for key, at in slots.items()}
            leaves = [leaf.requires_grad_(flows) for leaf in (hidden, *rows.values()) if leaf is not None]
            for part in (part for block in stage.blocks().values() for part in block.modules()):
                entries = {key: copy(value) for key, value in vars(part).items() if isinstance(value, dict)}
                undo.callback(_restore, part, dict(vars(part)), entries)
            site = Site("", ModuleLayout((0,)), torch.device("meta"), list(stage.blocks()), ())
            for each in changes:
                each.apply([stage], site)
            stage.compute_dtype = self.dtype
            undo.enter_context(self.module.measured())
            counted = undo.enter_context(_Counted(self.module, stage))

            def work(weights: list[Tensor]) -> list[float]:
                run, trains = partial(stage, inputs, rows, hidden), bool(weights) or flows
                if any(each.moves for each in changes):  # what has left cannot go backward
                    stay = _stays(run, counted) if trains else [0.0] * len(KEPT)
                    return [*stay, 0.0, 0.0, 0.0]
                quantities, split = _whole(run, counted, trains), flows and weights and not changes
                return [*quantities, _halves(run, counted, leaves, weights) if split else quantities[-1]]

            return _Fake(stage, self.dtype).do(work)

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
            *kept, forward, back = _Fake(stage, self.dtype, learns=False).do(lambda _: work())
        return [sum(kept), forward, back]


class _Fake(nn.Module):
    """A module whose weights are fake ones in ``dtype`` while a function runs, backward included."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, learns: bool = True) -> None:
        super().__init__()
        self.module, self.dtype, self.learns = module, dtype, learns

    def do(self, work: Callable[[list[Tensor]], list[float]]) -> list[float]:
        """Run ``work`` on the weights that train, and return its result."""
        tensors = {fqn: torch.empty(b.shape, dtype=b.dtype) for fqn, b in self.named_buffers()}
        for fqn, p in self.named_parameters():
            tensors[fqn] = torch.empty(p.shape, dtype=self.dtype, requires_grad=p.requires_grad and self.learns)
        learnt = [w for w in tensors.values() if w.requires_grad]
        return torch.func.functional_call(self, tensors, (partial(work, learnt),))

    @override
    def forward(self, work: Callable[[], list[float]]) -> list[float]:
        return work()


def _restore(part: nn.Module, before: dict[str, Any], entries: dict[str, Any]) -> None:
    """Give a module its attributes back. Dicts of hooks stay the same objects, as handles of hooks refer to them."""
    for name, of in entries.items():
        before[name].clear()
        before[name].update(of)
    vars(part).clear()
    vars(part).update(before)


def _whole(run: Callable[[], Any], counted: _Counted, trains: bool) -> list[float]:
    """Measure the bytes kept, by kind, and the peaks of forward and of backward."""
    start = counted.reset()
    with torch.set_grad_enabled(trains):
        roots = _roots(run())
    forward = counted.most - start
    if not trains:
        return [0.0] * len(KEPT) + [forward, 0.0]
    kept = counted.by_kind()
    gradients = [root.filled(1.0, torch.device("cpu")) for root in roots]
    own = sum(g.nbytes for g in gradients)
    counted.reset()
    backward.whole([(root.edge, g) for root, g in zip(roots, gradients, strict=True)])
    return [*kept, forward, counted.most - start - own]


def _stays(run: Callable[[], Any], counted: _Counted) -> list[float]:
    """Measure the bytes kept on the device, by kind, while the rest is elsewhere."""
    counted.reset()
    roots = _roots(run())
    kept = counted.by_kind()
    roots.clear()
    return kept


def _halves(run: Callable[[], Any], counted: _Counted, leaves: Sequence[Tensor], weights: list[Any]) -> float:
    """Measure the bytes kept between the halves of a backward, without the gradients of the leaves."""
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
    return [root for root in (Output.of(out),) if root is not None]


class _Counted(Allocations):
    """A count of memory by the kinds of :data:`KEPT`.

    In experts, products of rows with a divided matrix begin columns, and products of columns with one end them.
    """

    def __init__(self, module: Adapter, stage: nn.Module) -> None:
        super().__init__()
        self._inside: set[int] = set()
        self._whole: set[int] = set()
        self._of_experts: set[int] = set()
        self._matrices: set[int] | None = None  # divided ones of the experts that run
        plan = (module.tp_plan() or Adapter.tp_plan(module)) or {}
        self._hooks: list[Any] = []
        for fqn, part in stage.named_modules():
            style = style_of(plan, fqn)
            if begins_columns(style):
                self._hooks.append(part.register_forward_hook(self._columns))
            elif ends_columns(style):
                self._hooks.append(part.register_forward_hook(self._joined))
            if fqn in module.experts():
                self._hooks.append(part.register_forward_pre_hook(partial(self._enter, style)))
                self._hooks.append(part.register_forward_hook(self._leave))

    @override
    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> int:
        """Reset the peak to the bytes counted now, and return these."""
        self.most = self.now
        return self.now

    def by_kind(self) -> list[float]:
        """Return the bytes of each kind."""
        kinds, apart = [0.0] * len(KEPT), {0: self._inside, 2: self._whole, 3: self._of_experts}
        for key, size in self._sizes.items():
            kinds[next((kind for kind, keys in apart.items() if key in keys), 1)] += size
        return kinds

    @override
    def _made(self, key: int, given: Iterable[int]) -> None:
        if self._inside.isdisjoint(given) != (self._matrices or set()).isdisjoint(given):
            self._inside.add(key)
        elif self._matrices is not None:
            self._of_experts.add(key)

    @override
    def _freed(self, key: int) -> None:
        super()._freed(key)
        for keys in (self._inside, self._whole, self._of_experts):
            keys.discard(key)

    def _columns(self, part: nn.Module, given: Any, made: Any) -> None:
        self._whole |= _keys(given) - self._inside
        self._inside |= _keys(made)

    def _joined(self, part: nn.Module, given: Any, made: Any) -> None:
        self._inside -= _keys(made)

    def _enter(self, style: ParallelStyle | None, part: nn.Module, given: Any) -> None:
        named = part.named_parameters()
        self._matrices = _keys([p for name, p in named if divided_along(style, part, name) is not None])

    def _leave(self, part: nn.Module, given: Any, made: Any) -> None:
        self._matrices = None
        self._of_experts -= _keys(made)


def _keys(values: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(values) if isinstance(x, Tensor)}


def _block_bytes(quantities: Float64[np.ndarray, "blocks quantities features"], later: float) -> BlockBytes:
    """Build :class:`BlockBytes` from quantities in the order of its fields."""
    *kept, forward, backward, halves = quantities.swapaxes(0, 1)
    return BlockBytes(np.stack(kept), later, forward, backward, halves)
