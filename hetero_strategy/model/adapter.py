"""``Adapter``: the strategy's interface to any module: structure, tensor parallelism, initial values, FLOPs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.layout.row_sharding import RowSharding, sharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.hf_folder import HFWeights
from hetero_strategy.model.inputs import RawRows
from hetero_strategy.model.kind import Media, ModuleKind
from hetero_strategy.model.random_numbers import RandomNumbers, separate_columns
from hetero_strategy.model.routing import Routing, biases_of
from hetero_strategy.model.tensor_parallel import by_part, matches, plan_faults
from hetero_strategy.model.without_values import on_meta

NO_ROWS: Mapping[Hashable, Tensor] = MappingProxyType({})
"""The ``rows`` argument of a module without incoming edges."""


class Adapter(nn.Module):
    """A module that can be put on a mesh, initialised unit by unit and counted. The defaults suit plain modules.

    Constructors of subclasses run on the meta device; :mod:`hetero_strategy.model.materialize` gives their parameters
    values from the model's seed. Modules made outside a constructor keep their values.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.block_list == "blocks":
            raise ModelError(f"{cls.__name__}: blocks is a method; name the list of blocks otherwise, such as layers")
        if "__init__" in cls.__dict__:
            cls.__init__ = on_meta(cls.__init__)  # type: ignore[method-assign]

    block_list: str = ""
    """FQN of the ModuleList or ModuleDict of the repeated blocks; empty if there are none."""
    before_blocks: tuple[str, ...] = ()
    """FQNs of the parts that run before the blocks; :meth:`prune` sets them to None."""
    after_blocks: tuple[str, ...] = ()
    """FQNs of the parts that run after the blocks; :meth:`prune` sets them to None."""
    first_blocks: int = 1
    """Number of blocks that the first pipeline stage has at least, because they take rows of other modules."""
    runs_vary: bool = False
    """Whether its blocks run more than once in some microbatches, such as once for each size. Ranks that gather
    weights for each run would wait for each other, so these are gathered once per step."""
    tp_columns: tuple[str, ...] = ()
    """Names in a block of linear maps whose outputs tensor parallelism splits; empty: no tensor parallelism."""
    tp_rows: tuple[str, ...] = ()
    """Names in a block of the linear maps that follow those of ``tp_columns``, whose inputs are split."""
    tp_compiles: bool = False
    """Whether torch can compile its blocks for any number of rows under tensor parallelism."""
    tp_styles_instead: Mapping[str, ParallelStyle] = MappingProxyType({})
    """Part -> style in place of the plan's: of experts that are divided by expert, not by columns."""
    context_parallel: bool = False
    """Whether it, or an encoder's blocks, can run on a part of its rows, because rows interact only in
    ``packed_attention``."""
    context_group: str = ""
    """Name of the process group of the ranks with the other parts of the rows."""
    context_width: int = 0
    """Numbers per row, keys and values, that each block sends to context-parallel ranks that lack them; 0: plans count
    none."""
    query_width: int = 0
    """Numbers per row of a block's queries, heads times their width, as many as its attention returns; 0:
    ``hidden_width``."""
    attention_heads: int = 0
    """Greatest common divisor of the blocks' numbers of heads, which context-parallel ranks divide; 0: unknown."""
    compiled_by: str | None = None
    """Backend of ``torch.compile`` for the blocks; other work of a stage may be compiled with it, too."""
    width: int
    """Width of the rows at the module's edges."""
    hidden_width: int
    """Width of the rows between its blocks, which one pipeline stage sends to the next."""
    vocab_size: int | None = None
    """Rows of its embedding and head, which tensor parallelism splits: the number of token ids; None: unknown."""
    max_item_rows: int | None = None
    """Most rows inside the module that positions allow for an item; None: any number."""
    checkpoint: str | Path | None = None
    """Local Hugging Face folder that the initial values come from."""
    processor: Media | RawRows | None = None
    """Processor of its files, or the fields that its weights fix; None for language models."""
    name: str = ""
    """The module's name in its :class:`MultimodalModel`."""
    kind: ModuleKind
    """Kind of the module; parts of modules, such as backbones, have none."""
    first_stage: bool = True
    """Whether it has the parts before the blocks; later pipeline stages do not and take rows instead."""
    last_stage: bool = True
    """Whether it has the parts after the blocks; earlier pipeline stages do not and return rows instead."""
    compute_dtype: torch.dtype | None = None
    """Dtype of its compute under the strategy; None: the parameters' dtype."""
    roundings: tuple[tuple[float, str], ...] = ()
    """Relative roundings of numbers in its blocks, beyond those of its dtypes, and their names."""
    random_numbers: RandomNumbers | None = None
    """The random numbers drawn inside this module; set by its :class:`MultimodalModel`."""
    routing: Routing | None = None
    """Routers of its experts; None: it has none that are known."""
    packed_equals_alone: bool = False
    """Whether the check that two packed units give the rows of each alone has passed or is off; see
    :func:`~hetero_strategy.model.packed_alone.check_packed_alone`."""

    # ---- structure -------------------------------------------------------------------------------------------------

    def blocks(self) -> dict[str, nn.Module]:
        """Return the repeated transformer blocks by FQN: the units of FSDP, recompute and initialisation."""
        if not self.block_list:
            return {}
        try:
            children = self.get_submodule(self.block_list)._modules
        except AttributeError:
            lists = [name for name, part in self.named_modules() if isinstance(part, nn.ModuleList | nn.ModuleDict)]
            raise ModelError(
                f"{type(self).__name__}: block_list = {self.block_list!r}, but it has no part of that name; its lists"
                f" of parts are {', '.join(lists) or 'none'}"
            ) from None
        return {f"{self.block_list}.{key}": block for key, block in children.items() if block is not None}

    @property
    def can_be_cut(self) -> bool:
        """Return whether :meth:`prune` works, so that :meth:`stage` does."""
        return bool(self.block_list) or type(self).prune is not Adapter.prune

    def recomputed_parts(self) -> list[nn.Module]:
        """Return parts whose forward runs again in every backward."""
        return []

    def around_blocks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the FQNs of the parts before the blocks, and of the parts after them."""
        return self.before_blocks, self.after_blocks

    def experts(self) -> dict[str, int]:
        """Return FQN -> number of experts of the parts whose parameters all have one entry for each expert in their
        first dimension. They compute by :func:`~hetero_strategy.model.experts.routed` with their attribute
        ``exchange``, which expert parallelism sets.
        """
        return {}

    def prune(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        """Remove these blocks (by FQN) and the parts ``before`` or ``after`` all blocks; all other names stay."""
        if not self.block_list:
            raise NotImplementedError(f"{type(self).__name__} cannot be cut into stages")
        container = self.get_submodule(self.block_list)
        for fqn in blocks:
            key = fqn.rpartition(".")[2]
            if isinstance(container, nn.ModuleDict):
                del container[key]
            else:
                container._modules[key] = None  # deletion would renumber later blocks
        for fqn in (*self.before_blocks * before, *self.after_blocks * after):
            owner, _, key = fqn.rpartition(".")
            setattr(self.get_submodule(owner), key, None)  # a module, or a bare parameter or buffer

    def stage(self, blocks: Collection[str], *, first: bool, last: bool) -> Adapter:
        """Return a module that runs a part of this one: some blocks and, at the ends, the parts around them.

        It shares blocks and other parts with this module, so sharding, values and hooks of one apply to both. Only the
        modules that contain these are separate copies, with separate buffers.

        Args:
            blocks: FQNs in :meth:`blocks`, at least one; they run in this module's order.
            first: whether the stage has the parts before the blocks.
            last: whether the stage has the parts after the blocks.

        Raises:
            ModelError: a block does not exist, or this module has none.
        """
        fqns = list(self.blocks())
        if not fqns:
            raise ModelError(f"{type(self).__name__} has no blocks: it cannot be cut into stages; set pp=1")
        if unknown := set(blocks) - set(fqns):
            raise ModelError(f"{type(self).__name__} has no block {sorted(unknown)}: it has {fqns}")
        self.meta_copy()  # shared with the stage, which is initialised and counted by the whole module
        parts = (*fqns, *chain(*self.around_blocks()))
        around = {".".join(fqn.split(".")[:depth]) for fqn in parts for depth in range(fqn.count(".") + 1)}
        pairs: list[tuple[nn.Module, nn.Module]] = []
        stage = _clone(self, "", around, pairs)
        stage.prune([fqn for fqn in fqns if fqn not in set(blocks)], before=not first, after=not last)
        stage.first_stage, stage.last_stage = first, last
        stage.release_initial_values()
        stage.register_forward_pre_hook(lambda *_: _follow_training_mode(pairs))
        return stage

    def tied_weight(self) -> tuple[str, str] | None:
        """Return the two FQNs of a parameter that is both before and after the blocks, or None if there is none."""
        return None

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Return a stage's parameters by their names in the whole module; a tied one has its name before the blocks."""
        first, last = self.tied_weight() or ("", "")
        return {first if fqn == last else fqn: parameter for fqn, parameter in self.named_parameters()}

    def meta_copy(self) -> Adapter:
        """Return this module on the meta device as it was before parallelisation; it costs no memory.

        The copy is made on the first call, which must come before the module is changed.
        """
        if "_meta_copy" not in self.__dict__:
            # Values that are already real (a ready backbone) are initial values: stored, not copied.
            named = [*self.named_parameters(), *self.named_buffers()]
            values = {fqn: tensor.detach() for fqn, tensor in named if not tensor.is_meta}
            object.__setattr__(self, "_initial_values", values)
            memo: dict[int, Any] = {}
            for tensor in [*self.parameters(), *self.buffers()]:
                empty = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            duplicate = copy.deepcopy(self, memo)
            # Bypass nn.Module: the copy is no submodule and is in no state dict.
            for owner in (duplicate, self):
                object.__setattr__(owner, "_meta_copy", duplicate)
        return self.__dict__["_meta_copy"]

    def initial_values(self) -> dict[str, Tensor]:
        """Return FQN -> values of tensors that were real when the module was made (a ready backbone), not copied."""
        self.meta_copy()
        return self.__dict__["_initial_values"]

    def release_initial_values(self) -> None:
        """Free :meth:`initial_values`, once every rank has its part of them."""
        object.__setattr__(self, "_initial_values", {})

    # ---- tensor parallelism ----------------------------------------------------------------------------------------

    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        """Return FQN (globs allowed) -> torch ParallelStyle, or None if this module cannot be tensor parallel."""
        if not self.tp_columns:
            return None
        plan: dict[str, ParallelStyle] = {f"{self.block_list}.*.{name}": ColwiseParallel() for name in self.tp_columns}
        return plan | {f"{self.block_list}.*.{name}": RowwiseParallel() for name in self.tp_rows}

    def check_tp(self, tp: int) -> list[str]:
        """Return faults such as "heads 6 not divisible by tp 4; set tp=3 or 6"; empty if ``tp`` ways are possible."""
        return []

    def tp_faults(self, tp: int, ep: int = 1) -> list[str]:
        """Return why the module, as built, cannot be split ``tp`` ways: missing parts of its plan, sizes that do not
        divide, and faults of :meth:`check_tp`; empty if it can. With ``ep``, experts are divided by expert instead.
        """
        if faults := self.check_tp(tp):  # zoo modules check heads
            return faults
        plan, apart = self.tp_plan() or {}, self.experts() if ep > 1 else {}
        plan = {name: style for name, style in plan.items() if not any(matches(name, fqn) for fqn in apart)}
        return plan_faults(self, [*self.blocks()], plan, tp)

    def apply_tp(self, mesh: DeviceMesh) -> None:
        """Shard this module over a one-dimensional tensor-parallel mesh."""
        plan = self.tp_plan()
        if faults := self.check_tp(mesh.size()):
            raise ModelError(f"{type(self).__name__}: {'; '.join(faults)}")
        if plan is None:
            raise ModelError(f"{type(self).__name__} has no tensor-parallel plan: set tp=1 for it (tp={mesh.size()})")
        parallelize_module(self, mesh, {**by_part(self.tp_styles(plan), self), **self.tp_styles_instead})
        if self.random_numbers is not None:
            separate_columns(self, plan, self.random_numbers)
        self.after_tp(mesh.size())

    def tp_styles(self, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
        """Return a plan of :func:`parallelize_module` as transforms change it; :meth:`apply_tp` uses the result."""
        return plan

    def row_sharding(self, layout: ModuleLayout) -> RowSharding:
        """Return how rows at edges and between stages are sharded over an instance's ranks after :meth:`apply_tp`. By
        default tensor-parallel ranks have all rows of their context-parallel rank.
        """
        return sharding(layout.cp)

    def after_tp(self, tp: int) -> None:
        """Adjust what a plan cannot express, such as a stored number of heads."""

    # ---- values ----------------------------------------------------------------------------------------------------

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Fill a real fp32 CPU copy of one unit in place with its initial values.

        Args:
            prefix: FQN of the block, or "" for the rest of the module (its blocks replaced by ``nn.Identity``).
            unit: copy to fill; the caller raises a ModelError for untouched tensors. Parameters from a folder may be on
                the meta device.
        """
        initialize_plain(unit)

    def hf_weights(self) -> HFWeights | None:
        """Return the map from parameters to a Hugging Face folder, or None if there is no such model."""
        return None

    # ---- cost ------------------------------------------------------------------------------------------------------

    example_unit: int = 16
    """The lengths of :meth:`example` are multiples of it."""

    def example(self, lengths: np.ndarray) -> Any:
        """Make inputs with units of these lengths, int64 ``[n]``, whose values do not matter, for measurements of time
        and memory; None: the module's inputs are unknown. With ``slots`` they need rows of other modules.
        """
        return None

    def measured(self) -> AbstractContextManager[Any]:
        """Return a context in which blocks run on tensors without values, and keep the memory that they keep else."""
        return nullcontext()

    def flops(self, packing_lengths: np.ndarray) -> float:
        """Count the forward FLOPs of sequences of these lengths: two per multiply-add in matmuls and attention."""
        before, blocks, after = self.part_flops(packing_lengths)
        return before + float(np.sum(blocks)) + after

    def flops_by_part(self, packing_lengths: np.ndarray) -> dict[str, float]:
        """Return FQN -> :meth:`flops` of parts that may be frozen separately, in forward order; "" is the whole."""
        return {"": float(self.flops(packing_lengths))}

    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        """Return the :meth:`flops` before the blocks, of each block (float64 ``[blocks]``), and after them."""
        rows = int(np.sum(packing_lengths))
        whole, blocks = self.meta_copy()._linear_flops
        return float((whole - blocks.sum()) * rows), blocks * rows, 0.0

    @functools.cached_property
    def _linear_flops(self) -> tuple[int, np.ndarray]:
        """Return :func:`linear_flops` of a meta copy and of each of its blocks, counted once."""
        blocks = [linear_flops(block, self.used_share) for block in self.blocks().values()]
        return linear_flops(self, self.used_share), np.array(blocks, dtype=np.float64)

    def used_share(self, layer: nn.Module, name: str) -> float:
        """Return the share of a layer's parameter that a matmul multiplies each row by: 1 for the weight of a linear
        map, experts of a row over all experts for a stack of their weights, 0 for other parameters.
        """
        return linear_share(layer, name)

    def stage_flops(self, packing_lengths: np.ndarray, split: Sequence[int]) -> np.ndarray:
        """Return the :meth:`flops` of each stage, float64 ``[stages]``; ``split`` is the number of blocks of each."""
        before, blocks, after = self.part_flops(packing_lengths)
        ends = np.cumsum(split)
        assert ends[-1] == len(blocks), f"split {split} of {len(blocks)} blocks"
        stages = np.array([blocks[end - n : end].sum() for n, end in zip(split, ends, strict=True)], dtype=np.float64)
        stages[0] += before
        stages[-1] += after
        return stages

    # ---- dtype -----------------------------------------------------------------------------------------------------

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Adapter:
        # Casts (``.bfloat16()``) skip position tables: rounding them breaks rotary embeddings silently. They skip
        # biases of routers, too, which change by less than a rounding.
        tables = [*_position_tables(self), *biases_of(self, self.routing)]
        for owner, name, _ in tables:
            owner._buffers[name] = None
        super()._apply(fn, recurse)
        for owner, name, table in tables:
            device = fn(torch.empty(0, device=table.device)).device
            owner._buffers[name] = torch.empty_like(table, device=device) if table.is_meta else table.to(device)
        return self


def _clone(module: nn.Module, fqn: str, around: Collection[str], pairs: list[tuple[nn.Module, nn.Module]]) -> Any:
    """Copy a module and its descendants named in ``around``, adding (original, copy) to ``pairs``; share the rest."""
    duplicate = module.__new__(type(module))
    for key, value in module.__dict__.items():
        duplicate.__dict__[key] = copy.copy(value) if isinstance(value, (dict, set)) else value
    pairs.append((module, duplicate))
    for name, child in module._modules.items():
        path = f"{fqn}.{name}" if fqn else name
        if child is not None and path in around:
            duplicate._modules[name] = _clone(child, path, around, pairs)
    return duplicate


def _follow_training_mode(pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    # Lightning sets training modes without ``train()``, and does not know the copies. Bypass ``nn.Module.__setattr__``,
    # which is slow and would run before every forward.
    for original, duplicate in pairs:
        duplicate.__dict__["training"] = original.training


def _position_tables(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield (owner, name, value) of non-persistent floating or complex buffers."""
    for owner in module.modules():
        for name, value in owner._buffers.items():
            if value is None or name not in owner._non_persistent_buffers_set:
                continue
            if value.is_floating_point() or value.is_complex():
                yield owner, name, value


def previous_rows(hidden: Tensor | None) -> Tensor:
    """Return the previous stage's rows; raise ValueError where they are missing."""
    if hidden is None:
        raise ValueError("a pipeline stage that is not the first needs the previous stage's rows")
    return hidden


def initialize_plain(unit: nn.Module) -> None:
    """Call every submodule's own ``reset_parameters``, children first."""
    for module in reversed(list(unit.modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()


def linear_share(layer: nn.Module, name: str) -> float:
    """Return :meth:`Adapter.used_share` of modules without experts."""
    return float(name == "weight" and isinstance(layer, nn.Linear))


def linear_flops(module: nn.Module, share: Callable[[nn.Module, str], float] = linear_share) -> int:
    """Count the FLOPs per row of all matmuls with parameters of ``module``; ``share``: :meth:`Adapter.used_share`."""
    named = ((layer, *pair) for layer in module.modules() for pair in layer.named_parameters(recurse=False))
    return int(sum(2 * weight.numel() * share(layer, name) for layer, name, weight in named))


def block_linear_flops(module: Adapter) -> np.ndarray:
    """Return the :func:`linear_flops` of each block, float64 ``[blocks]``."""
    return module.meta_copy()._linear_flops[1]
