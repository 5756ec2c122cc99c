"""What the strategy needs of any module: structure, tensor parallelism, initial values, FLOPs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.layout.row_sharding import RowSharding, sharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.hf_folder import HFWeights
from hetero_strategy.model.inputs import RawRows
from hetero_strategy.model.kind import ModuleKind
from hetero_strategy.model.named_parts import container, tp_faults
from hetero_strategy.model.random_numbers import RandomNumbers
from hetero_strategy.model.without_values import on_meta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from hetero_strategy.data.media import Media


NO_ROWS: Mapping[Hashable, Tensor] = MappingProxyType({})
"""The ``rows`` argument of a module that no edge brings rows to."""


class Adapter(nn.Module):
    """A module that can be put on a mesh, initialised unit by unit and counted. The defaults suit plain modules.

    Constructors of subclasses run on the meta device; :mod:`hetero_strategy.model.materialize` gives their parameters
    values, which follow from the model's seed. Modules that were made outside a constructor keep theirs.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.block_list == "blocks":
            raise ModelError(f"{cls.__name__}: blocks is a method; name the list of blocks otherwise, such as layers")
        if "__init__" in cls.__dict__:
            cls.__init__ = on_meta(cls.__init__)  # type: ignore[method-assign]

    block_list: str = ""
    """FQN of the ModuleList or ModuleDict that holds the repeated blocks; empty where the module has none."""
    before_blocks: tuple[str, ...] = ()
    """FQNs of the parts that run before the blocks; :meth:`prune` sets them to None."""
    after_blocks: tuple[str, ...] = ()
    """FQNs of the parts that run after the blocks; :meth:`prune` sets them to None."""
    tp_columns: tuple[str, ...] = ()
    """Names inside a block of the linear maps whose outputs tensor parallelism splits; none: it is not possible."""
    tp_rows: tuple[str, ...] = ()
    """Names inside a block of the linear maps that follow those, whose inputs it splits."""
    tp_compiles: bool = False
    """Whether torch can compile its blocks for any number of rows where tensor parallelism splits them."""
    context_parallel: bool = False
    """Whether it can be given a part of its rows, where these meet each other in ``packed_attention`` alone."""
    context_group: str = ""
    """Name of the process group of the ranks that have the other parts."""
    context_width: int = 0
    """Numbers per row that each of its blocks gathers over these ranks, keys and values; 0: plans count nothing."""
    compiled_by: str | None = None
    """Backend of ``torch.compile`` that the blocks are compiled by; what a stage does besides may be, too."""
    tp_chunks: int = 1
    """Chunks whose collectives run beside matmuls where tensor parallelism splits its blocks; set before
    :meth:`apply_tp`, see :attr:`ModuleLayout.tp_chunks`."""
    width: int
    """Size of the rows this module exchanges at its edges."""
    hidden_width: int
    """Size of the rows between its blocks, which one pipeline stage gives to the next."""
    vocab_size: int | None = None
    """Token ids that its embedding and head, which tensor parallelism cuts, have rows for; None: it does not say."""
    max_item_rows: int | None = None
    """Most rows inside it of an item that its positions reach; None: any number."""
    checkpoint: str | Path | None = None
    """Local Hugging Face folder that the initial values come from."""
    processor: Media | RawRows | None = None
    """How files become what it reads or is to make: a processor, or what its weights say of one. Language models have
    none."""
    name: str = ""
    """The module's name in its :class:`MultimodalModel`."""
    kind: ModuleKind
    """What sets it apart from modules of other kinds; parts of modules, such as backbones, have none."""
    first_stage: bool = True
    """Whether it holds what comes before the blocks; later pipeline stages do not and take rows instead."""
    last_stage: bool = True
    """Whether it holds what comes after the blocks; earlier pipeline stages do not and give rows instead."""
    compute_dtype: torch.dtype | None = None
    """What the strategy lets it compute in; None: its parameters' dtype is all there is."""
    float8: str | None = None
    """Recipe by which its blocks multiply in float8; None: they do not. See ``HeteroStrategy(float8=...)``."""
    random_numbers: RandomNumbers | None = None
    """The random numbers drawn inside this module; set by its :class:`MultimodalModel`."""
    packed_equals_alone: bool = False
    """Whether two packed units were found to give the rows that each gives alone, or nobody is to look; see
    :func:`~hetero_strategy.model.packed_alone.check_packed_alone`."""

    # ---- structure -------------------------------------------------------------------------------------------------

    def blocks(self) -> dict[str, nn.Module]:
        """Return the repeated transformer blocks by FQN: the units of FSDP, recompute and initialisation."""
        if not self.block_list:
            return {}
        held = container(self, self.block_list)._modules
        return {f"{self.block_list}.{key}": block for key, block in held.items() if block is not None}

    def recomputed_parts(self) -> list[nn.Module]:
        """Return parts whose forward runs again in every backward."""
        return []

    def around_blocks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the FQNs of the parts that run before the blocks, and of those that run after them."""
        return self.before_blocks, self.after_blocks

    def prune(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        """Remove these blocks (by FQN) and what comes ``before`` or ``after`` all blocks; all other names stay."""
        if not self.block_list:
            raise NotImplementedError(f"{type(self).__name__} cannot be cut into stages")
        container = self.get_submodule(self.block_list)
        for fqn in blocks:
            key = fqn.rpartition(".")[2]
            if isinstance(container, nn.ModuleDict):
                del container[key]
            else:
                container._modules[key] = None  # deleting it would renumber the blocks after it
        for fqn in (*self.before_blocks * before, *self.after_blocks * after):
            owner, _, key = fqn.rpartition(".")
            setattr(self.get_submodule(owner), key, None)  # a module, or a bare parameter or buffer

    def stage(self, blocks: Collection[str], *, first: bool, last: bool) -> Adapter:
        """Return a module that runs a part of this one: some blocks and, at the ends, what lies around them.

        It shares blocks and all other parts with this module, so sharding, values and hooks given to one are given to
        both. Only the modules around the blocks are its own, with buffers of their own.

        Args:
            blocks: FQNs in :meth:`blocks`, at least one; they run in this module's order.
            first: whether the stage holds what comes before the blocks.
            last: whether the stage holds what comes after the blocks.

        Raises:
            ModelError: a block does not exist, or this module has none.
        """
        fqns = list(self.blocks())
        if not fqns:
            raise ModelError(f"{type(self).__name__} has no blocks: it cannot be cut into stages; set pp=1")
        if unknown := set(blocks) - set(fqns):
            raise ModelError(f"{type(self).__name__} has no block {sorted(unknown)}: it has {fqns}")
        self.meta_copy()  # a stage shares it: it is initialised and counted by the whole module
        around = {".".join(fqn.split(".")[:depth]) for fqn in fqns for depth in range(fqn.count(".") + 1)}
        pairs: list[tuple[nn.Module, nn.Module]] = []
        stage = _clone(self, "", around, pairs)
        stage.prune([fqn for fqn in fqns if fqn not in set(blocks)], before=not first, after=not last)
        stage.first_stage, stage.last_stage = first, last
        stage.release_initial_values()
        stage.register_forward_pre_hook(lambda *_: _follow_training_mode(pairs))
        return stage

    def tied_weight(self) -> tuple[str, str] | None:
        """Return the two FQNs of a parameter held both before and after the blocks, or None if there is none."""
        return None

    def global_name(self, fqn: str) -> str:
        """Return a stage parameter's name in the whole module; a tied one goes by the name it has before the blocks."""
        tied = self.tied_weight()
        return tied[0] if tied is not None and fqn == tied[1] else fqn

    def meta_copy(self) -> Adapter:
        """Return this module on the meta device as it was before anything was parallelised; it costs no memory.

        The copy is made on the first call, which must come before the module is changed.
        """
        if "_meta_copy" not in self.__dict__:
            # Values that are already real (a ready backbone) are initial values: remembered, not copied.
            named = [*self.named_parameters(), *self.named_buffers()]
            values = {fqn: tensor.detach() for fqn, tensor in named if not tensor.is_meta}
            object.__setattr__(self, "_initial_values", values)
            memo: dict[int, Any] = {}
            for tensor in [*self.parameters(), *self.buffers()]:
                empty = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            duplicate = copy.deepcopy(self, memo)
            # Not through nn.Module: the copy is no submodule and appears in no state dict.
            for owner in (duplicate, self):
                object.__setattr__(owner, "_meta_copy", duplicate)
        return self.__dict__["_meta_copy"]

    def initial_values(self) -> dict[str, Tensor]:
        """Return, by FQN, the values that tensors had when the module was made (a ready backbone); memory is shared."""
        self.meta_copy()
        return self.__dict__["_initial_values"]

    def release_initial_values(self) -> None:
        """Free :meth:`initial_values`, once every rank that needs the values has its part."""
        object.__setattr__(self, "_initial_values", {})

    # ---- tensor parallelism ----------------------------------------------------------------------------------------

    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        """Return FQN (globs allowed) -> torch ParallelStyle, or None if this module cannot be tensor parallel."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        if not self.tp_columns:
            return None
        plan: dict[str, ParallelStyle] = {f"{self.block_list}.*.{name}": ColwiseParallel() for name in self.tp_columns}
        return plan | {f"{self.block_list}.*.{name}": RowwiseParallel() for name in self.tp_rows}

    def check_tp(self, tp: int) -> list[str]:
        """Return faults such as "heads 6 not divisible by tp 4"; empty if the module can be split ``tp`` ways."""
        return []

    def tp_faults(self, tp: int) -> list[str]:
        """Return why the module, as built, cannot be split ``tp`` ways: parts that its plan names and it lacks, sizes
        that do not divide, and what :meth:`check_tp` says; empty if it can.
        """
        said = self.check_tp(tp)  # zoo modules say the same of their heads, in other words
        return said or tp_faults(self, self.tp_plan() or {}, self.blocks(), tp)

    def apply_tp(self, mesh: DeviceMesh) -> None:
        """Shard this module over a one-dimensional tensor-parallel mesh.

        Raises:
            ModelError: the module has no plan, or :meth:`check_tp` finds faults.
        """
        from torch.distributed.tensor.parallel import parallelize_module

        plan = self.tp_plan()
        if plan is None:
            raise ModelError(f"{type(self).__name__} has no tensor-parallel plan: set tp=1 for it (tp={mesh.size()})")
        if faults := self.check_tp(mesh.size()):
            raise ModelError(f"{type(self).__name__}: {'; '.join(faults)}")
        parallelize_module(self, mesh, self.in_chunks(plan))
        if self.random_numbers is not None:
            _separate_random_numbers(self, plan, self.random_numbers)
        self.after_tp(mesh.size())

    def in_chunks(self, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
        """Return a plan of :func:`parallelize_module` that does as :attr:`tp_chunks` says."""
        from hetero_strategy.model.chunked_linear import chunked

        return plan if self.tp_chunks == 1 else chunked(plan, self.tp_chunks)

    def row_sharding(self, layout: ModuleLayout) -> RowSharding:
        """Return how rows at the edges and between stages lie on an instance's ranks in this layout; as they are after
        :meth:`apply_tp`. By default every tensor-parallel rank has all that the context-parallel one has.
        """
        return sharding(layout.cp)

    def after_tp(self, tp: int) -> None:
        """Adjust what a plan cannot express, such as a stored number of heads."""

    # ---- values ----------------------------------------------------------------------------------------------------

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Fill a real fp32 CPU copy of one unit in place with its initial values.

        Args:
            prefix: FQN of the block, or "" for the rest of the module (its blocks replaced by ``nn.Identity``).
            unit: the copy; the caller reports whatever stays untouched as a ModelError. Parameters that a folder holds
                may be on the meta device.
        """
        initialize_plain(unit)

    def hf_weights(self) -> HFWeights | None:
        """Return how the parameters are stored in a Hugging Face folder, or None if there is no such model."""
        return None

    # ---- cost ------------------------------------------------------------------------------------------------------

    def flops(self, packing_lengths: np.ndarray) -> float:
        """Count the forward FLOPs of sequences of these lengths: two per multiply-add in matmuls and attention."""
        before, blocks, after = self.part_flops(packing_lengths)
        return before + float(np.sum(blocks)) + after

    def flops_by_part(self, packing_lengths: np.ndarray) -> dict[str, float]:
        """Return the :meth:`flops` of parts that may be frozen apart, by FQN in forward order; "" is the whole."""
        return {"": float(self.flops(packing_lengths))}

    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        """Return the :meth:`flops` before the blocks, of each block (float64 ``[blocks]``), and after them."""
        rows = int(np.sum(packing_lengths))
        whole, blocks = self.meta_copy()._linear_flops
        return float((whole - blocks.sum()) * rows), blocks * rows, 0.0

    @functools.cached_property
    def _linear_flops(self) -> tuple[int, np.ndarray]:
        """:func:`linear_flops` of a meta copy and of each of its blocks, counted once."""
        blocks = [linear_flops(block) for block in self.blocks().values()]
        return linear_flops(self), np.array(blocks, dtype=np.float64)

    def stage_flops(self, packing_lengths: np.ndarray, split: Sequence[int]) -> np.ndarray:
        """Return the :meth:`flops` of each stage, float64 ``[stages]``, where ``split`` is the blocks of each."""
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
        # Casts (``.bfloat16()``) leave tables of positions alone: rounding them breaks rotary embeddings silently.
        tables = list(_position_tables(self))
        for owner, name, _ in tables:
            owner._buffers[name] = None
        super()._apply(fn, recurse)
        for owner, name, table in tables:
            device = fn(torch.empty(0, device=table.device)).device
            owner._buffers[name] = torch.empty_like(table, device=device) if table.is_meta else table.to(device)
        return self


def _clone(module: nn.Module, fqn: str, around: Collection[str], pairs: list[tuple[nn.Module, nn.Module]]) -> Any:
    """Copy a module and its descendants named in ``around``, adding (original, copy) to ``pairs``; share all else."""
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
    # Lightning sets training modes without ``train()``, and it does not know the copies. Past ``nn.Module``'s
    # ``__setattr__``, which takes its time and runs here before every forward.
    for original, duplicate in pairs:
        duplicate.__dict__["training"] = original.training


def _separate_random_numbers(module: nn.Module, plan: Mapping[str, ParallelStyle], numbers: RandomNumbers) -> None:
    """Give every rank random numbers of its own from a columnwise layer to the next rowwise one, as its columns are."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for fqn, part in module.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatchcase(fqn, pattern)), None)
        if isinstance(style, ColwiseParallel):
            part.register_forward_hook(functools.partial(_part, numbers, fqn))
        elif isinstance(style, RowwiseParallel):
            part.register_forward_pre_hook(functools.partial(_join, numbers))


# Compiled code draws its numbers from the state that its block begins with.


def _part(numbers: RandomNumbers, fqn: str, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        numbers.part(fqn)


def _join(numbers: RandomNumbers, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        numbers.join()


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


def linear_flops(module: nn.Module) -> int:
    """Count the FLOPs per row of all linear maps inside ``module``."""
    return sum(2 * linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def block_linear_flops(module: Adapter) -> np.ndarray:
    """Return the :func:`linear_flops` of each block, float64 ``[blocks]``."""
    return module.meta_copy()._linear_flops[1]


def divisible(tp: int, **sizes: int) -> list[str]:
    """Return a fault for each size that ``tp`` does not divide."""
    return [f"{name.replace('_', ' ')} {size} not divisible by tp {tp}" for name, size in sizes.items() if size % tp]
