"""What the strategy needs of any module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hetero_strategy.errors import ModelError
from hetero_strategy.model.random_numbers import RandomNumbers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


_WITHOUT_VALUES: ContextVar[bool] = ContextVar("without_values", default=False)


@contextmanager
def models_without_values() -> Iterator[None]:
    """Models made inside stay on the meta device; everything else, even beside them, gets its values."""
    token = _WITHOUT_VALUES.set(True)
    try:
        yield
    finally:
        _WITHOUT_VALUES.reset(token)


def made_without_values() -> bool:
    """Whether a model that is made now stays on the meta device."""
    return _WITHOUT_VALUES.get() or torch.get_default_device().type == "meta"


def _on_meta_where_asked(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        with torch.device("meta") if _WITHOUT_VALUES.get() else nullcontext():
            init(*args, **kwargs)

    return wrapped


NO_ROWS: Mapping[Hashable, Tensor] = MappingProxyType({})
"""What a module is given where no edge brings it rows."""


class Adapter(nn.Module):
    """A module that can be put on a mesh, initialised unit by unit and counted. The defaults suit plain modules.

    Subclasses build their parameters on the meta device; ``model.init`` gives them values. Inside
    :func:`models_without_values` their constructors run on it in any case.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = _on_meta_where_asked(cls.__init__)  # type: ignore[method-assign]

    sequence_parallel: bool = False
    """After :meth:`apply_tp` with tp > 1 the rows of this module are sharded over tp ranks (else replicated)."""
    width: int
    """Size of the rows this module exchanges at its edges."""
    hidden_width: int
    """Size of the rows between its blocks, which one pipeline stage gives to the next."""
    checkpoint: str | None = None
    """Local Hugging Face folder that the initial values come from."""
    name: str = ""
    """In the model that it is part of."""
    has_loss: bool = False
    """Its last stage gives a loss."""
    first_stage: bool = True
    """Holds what comes before the blocks; false in the later stages of a pipeline, which take rows instead."""
    last_stage: bool = True
    """Holds what comes after the blocks; false in the earlier stages of a pipeline, which give rows instead."""
    random_numbers: RandomNumbers | None = None
    """Of this module in its model."""

    # ---- structure -------------------------------------------------------------------------------------------------

    def blocks(self) -> dict[str, nn.Module]:
        """FQN -> repeated transformer block: the unit of FSDP, recompute and initialisation."""
        return {}

    def stage(self, blocks: Collection[str], *, first: bool, last: bool) -> Adapter:
        """A module that runs a part of this one: some blocks and, at the ends, what lies around them.

        It shares blocks and all other parts with this module, so what is done to them is done to both: sharding,
        values, hooks. Only the modules around the blocks are its own, with buffers of their own.

        Args:
            blocks: FQNs in :meth:`blocks`, at least one; they run in this module's order.
            first: with what comes before the blocks.
            last: with what comes after the blocks.

        Raises:
            ModelError: a block does not exist, or this module has none.
        """
        mine = self.blocks()
        if not mine:
            raise ModelError(f"{type(self).__name__} has no blocks: it cannot be cut into stages; set pp=1")
        if unknown := set(blocks) - set(mine):
            raise ModelError(f"{type(self).__name__} has no block {sorted(unknown)}: it has {list(mine)}")
        self.twin()  # what a stage is initialised and counted by is the whole module
        around = {".".join(fqn.split(".")[:depth]) for fqn in mine for depth in range(fqn.count(".") + 1)}
        pairs: list[tuple[nn.Module, nn.Module]] = []
        stage = _clone(self, "", around, pairs)
        stage.drop([fqn for fqn in mine if fqn not in set(blocks)], before=not first, after=not last)
        stage.first_stage, stage.last_stage = first, last
        object.__setattr__(stage, "_given", {})
        stage.register_forward_pre_hook(lambda *_: _follow(pairs))
        return stage

    def drop(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        """Remove these blocks (by FQN) and what comes ``before`` or ``after`` all blocks; all other names stay."""
        raise NotImplementedError(f"{type(self).__name__} cannot be cut into stages")

    def tied_weight(self) -> tuple[str, str] | None:
        """FQNs under which one parameter is held before and after the blocks; None: there is no such parameter."""
        return None

    def global_name(self, fqn: str) -> str:
        """Name in the whole module of a parameter of this stage: a shared one has its first."""
        tied = self.tied_weight()
        return tied[0] if tied is not None and fqn == tied[1] else fqn

    def twin(self) -> Adapter:
        """The same module on the meta device as it was before anything was parallelised; costs no memory.

        Made on the first call, which must come before the module is changed.
        """
        if "_twin" not in self.__dict__:
            # Values that are already real (a ready backbone) are initial values: remembered, not copied.
            named = [*self.named_parameters(), *self.named_buffers()]
            given = {fqn: tensor.detach() for fqn, tensor in named if not tensor.is_meta}
            object.__setattr__(self, "_given", given)
            memo: dict[int, Any] = {}
            for tensor in [*self.parameters(), *self.buffers()]:
                empty = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            twin = copy.deepcopy(self, memo)
            object.__setattr__(twin, "_twin", twin)
            # Not through nn.Module: the twin is no submodule and appears in no state dict.
            object.__setattr__(self, "_twin", twin)
        made: Adapter = self.__dict__["_twin"]
        return made

    def given(self) -> dict[str, Tensor]:
        """Values that parameters and buffers had when the module was made (a ready backbone), by FQN; shared memory."""
        self.twin()
        given: dict[str, Tensor] = self.__dict__["_given"]
        return given

    def forget_given(self) -> None:
        """Let :meth:`given` go, once every rank that needs the values has its part."""
        object.__setattr__(self, "_given", {})

    # ---- tensor parallelism ----------------------------------------------------------------------------------------

    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        """FQN (globs allowed) -> torch ParallelStyle; None: this module cannot be tensor parallel."""
        return None

    def check_tp(self, tp: int) -> list[str]:
        """Faults such as "heads 6 not divisible by tp 4"; empty: fine."""
        return []

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
        parallelize_module(self, mesh, plan)
        if self.random_numbers is not None:
            _part_random_numbers(self, plan, self.random_numbers)
        self.after_tp(mesh.size())

    def after_tp(self, tp: int) -> None:
        """Mend what a plan cannot say, such as a stored number of heads."""

    # ---- values ----------------------------------------------------------------------------------------------------

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Fill a real fp32 CPU copy of one unit in place with its initial values.

        Args:
            prefix: FQN of the block, or "" for the rest of the module (its blocks replaced by ``nn.Identity``).
            unit: the copy; what stays untouched is reported as a ModelError by the caller.
        """
        initialize_plain(unit)

    def export_names(self) -> dict[str, str]:
        """Our FQN of each parameter -> its name in this module's own Hugging Face folder; empty: it has none."""
        return {}

    def export_config(self) -> dict[str, Any] | None:
        """What config.json of that folder holds; None: it has none."""
        return None

    def paired_heads(self) -> dict[str, int]:
        """FQN -> heads, of projections whose rows lie as rotary embeddings of neighbouring numbers want them.

        Hugging Face's rotate halves, so its folders hold these rows in another order (``model.checkpoint``).
        """
        return {}

    def unused_export(self, name: str) -> bool:
        """Whether a tensor of a Hugging Face folder is rightly left out by this module."""
        return False

    def export_prefixes(self) -> tuple[str, ...]:
        """What may stand before the names of :meth:`export_names` in a folder that holds more than this module."""
        return ("",)

    # ---- cost ------------------------------------------------------------------------------------------------------

    def flops(self, packing_lengths: np.ndarray) -> float:
        """Forward FLOPs for sequences of these lengths: two per multiply-add of every matmul and of attention."""
        before, blocks, after = self.part_flops(packing_lengths)
        return before + float(np.sum(blocks)) + after

    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        """:meth:`flops` before the blocks, of each block (float64 ``[blocks]``), and after them."""
        rows = int(np.sum(packing_lengths))
        blocks = block_linear_flops(self) * rows
        return float(linear_flops(self.twin()) * rows - blocks.sum()), blocks, 0.0

    def stage_flops(self, packing_lengths: np.ndarray, split: Sequence[int]) -> np.ndarray:
        """:meth:`flops` of each stage, float64 ``[stages]``.

        Args:
            packing_lengths: of the sequences.
            split: blocks of each stage.
        """
        before, blocks, after = self.part_flops(packing_lengths)
        ends = np.cumsum(split)
        assert ends[-1] == len(blocks), f"split {split} of {len(blocks)} blocks"
        stages = np.array([blocks[end - n : end].sum() for n, end in zip(split, ends, strict=True)], dtype=np.float64)
        stages[0] += before
        stages[-1] += after
        return stages

    # ---- dtype -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Adapter:
        """Casts (``.bfloat16()``) leave tables of positions alone: rounding them breaks rotary embeddings silently."""
        tables = list(position_tables(self))
        for owner, name, _ in tables:
            owner._buffers[name] = None
        super()._apply(fn, recurse)
        for owner, name, table in tables:
            device = fn(torch.empty(0, device=table.device)).device
            owner._buffers[name] = torch.empty_like(table, device=device) if table.is_meta else table.to(device)
        return self


def _clone(module: nn.Module, fqn: str, around: Collection[str], pairs: list[tuple[nn.Module, nn.Module]]) -> Any:
    """Copies of a module and of its descendants named in ``around``, listed in ``pairs``; everything else is shared."""
    copied = module.__new__(type(module))
    for key, value in module.__dict__.items():
        copied.__dict__[key] = copy.copy(value) if isinstance(value, (dict, set)) else value
    pairs.append((module, copied))
    for name, child in module._modules.items():
        path = f"{fqn}.{name}" if fqn else name
        if child is not None and path in around:
            copied._modules[name] = _clone(child, path, around, pairs)
    return copied


def _follow(pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    """Copies are in training mode where their originals are: Lightning sets modes without ``train()``, and it does not
    know the copies.
    """
    for original, copied in pairs:
        copied.training = original.training


def _part_random_numbers(module: nn.Module, plan: Mapping[str, ParallelStyle], numbers: RandomNumbers) -> None:
    """Between a columnwise and the next rowwise layer every rank has columns, and random numbers, of its own."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for fqn, part in module.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatchcase(fqn, pattern)), None)
        if isinstance(style, ColwiseParallel):
            part.register_forward_hook(lambda *_, place=fqn: numbers.part(place))
        elif isinstance(style, RowwiseParallel):
            part.register_forward_pre_hook(lambda *_: numbers.join())


def given_rows(hidden: Tensor | None) -> Tensor:
    """The previous stage's rows. Raises ValueError where they are missing."""
    if hidden is None:
        raise ValueError("a pipeline stage that is not the first needs the previous stage's rows")
    return hidden


def position_tables(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Non-persistent floating or complex buffers: (owner, name, value)."""
    for owner in module.modules():
        for name, value in owner._buffers.items():
            if value is None or name not in owner._non_persistent_buffers_set:
                continue
            if value.is_floating_point() or value.is_complex():
                yield owner, name, value


def initialize_plain(unit: nn.Module) -> None:
    """Every submodule's own ``reset_parameters``, children first."""
    for module in reversed(list(unit.modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()


def linear_flops(module: nn.Module) -> int:
    """FLOPs per row of all linear maps inside ``module``."""
    return sum(2 * linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def block_linear_flops(module: Adapter) -> np.ndarray:
    """:func:`linear_flops` of each block, float64 ``[blocks]``."""
    return np.array([linear_flops(block) for block in module.twin().blocks().values()], dtype=np.float64)


def held_blocks(container: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """FQN -> block of a ModuleList or ModuleDict, without those that :func:`drop_blocks` removed."""
    return {f"{prefix}.{key}": block for key, block in container._modules.items() if block is not None}


def drop_blocks(container: nn.Module, fqns: Collection[str]) -> None:
    """Remove blocks of a ModuleList or ModuleDict; the numbers of the others stay."""
    for fqn in fqns:
        container._modules[fqn.rsplit(".", 1)[-1]] = None


def divisible(tp: int, **sizes: int) -> list[str]:
    """Faults of sizes that tensor parallelism has to divide."""
    return [f"{name.replace('_', ' ')} {size} not divisible by tp {tp}" for name, size in sizes.items() if size % tp]
