"""An encoder: any backbone that turns items into rows, and a projector to the width of what it feeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import DataError, check_sizes
from hetero_strategy.model.adapter import NO_ROWS, Adapter, initialize_plain, linear_flops, previous_rows
from hetero_strategy.model.hf_folder import HFWeights
from hetero_strategy.model.inputs import CachedRows, EncoderInputs, Packing
from hetero_strategy.model.kind import ModuleKind
from hetero_strategy.model.random_numbers import number_of

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from hetero_strategy.data.media import Processor
    from hetero_strategy.loading.payload import InstanceUnits


class Projector(nn.Module):
    """LayerNorm, Linear, GELU, Linear: rows ``[R, in_dim]`` -> ``[R, out_dim]``."""

    def __init__(self, in_dim: int, out_dim: int, hidden: int | None = None) -> None:
        super().__init__()
        check_sizes(type(self).__name__, in_dim=in_dim, out_dim=out_dim, hidden=1 if hidden is None else hidden)
        self.out_dim = out_dim
        with torch.device("meta"):
            self.norm = nn.LayerNorm(in_dim)
            self.up = nn.Linear(in_dim, hidden or out_dim)
            self.act = nn.GELU()
            self.down = nn.Linear(hidden or out_dim, out_dim)

    @override
    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(rows))))


class Backbone(Adapter):
    """Base of transformer backbones, which turn :class:`EncoderInputs` into rows ``[sum(rows), width]``."""

    def embed(self, inputs: EncoderInputs) -> Tensor:
        """Turn raw values into rows ``[sum(packing), hidden_width]``."""
        raise NotImplementedError

    def transform(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """Run the blocks that this stage holds; only sizes, rows and packing of the inputs may be read."""
        raise NotImplementedError

    def finish(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """Turn the last block's rows into ``[sum(rows), width]``; only sizes, rows and packing may be read."""
        raise NotImplementedError

    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return how many rows it makes of each item of these sizes, int64 ``[n]``."""
        raise NotImplementedError

    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return how many rows its transformer sees of each item of these sizes, int64 ``[n]``."""
        raise NotImplementedError

    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        """Return the number of output rows of items whose transformer rows are ``packing_lengths``."""
        return int(np.sum(packing_lengths))

    @override
    def forward(self, inputs: EncoderInputs, hidden: Tensor | None = None) -> Tensor:
        """Run what this stage holds, from the inputs' values or from the previous stage's rows."""
        # No name holds what the first block takes: where nothing trains, it goes when that block has run.
        rows = self.transform(self.embed(inputs) if self.first_stage else previous_rows(hidden), inputs)
        return self.finish(rows, inputs) if self.last_stage else rows


class EncoderKind(ModuleKind):
    """Units are items; they become rows, and there is no loss."""

    name = "Encoder"
    has_loss = False

    @override
    def inputs(self, units: InstanceUnits) -> EncoderInputs:
        items, processor = units.content.items(units.module, units.numbers), units.processor
        if not units.first:
            empty = torch.zeros(0, processor.feature, dtype=torch.float32)
            return EncoderInputs(empty, items.sizes, items.rows, Packing.of(units.inner_rows))
        if units.cache is not None:
            return units.cache.inputs(units, items)
        return processor.collate(units.content.values(units.module, units.numbers), items.sizes, items.rows)


class Keeper(Protocol):
    """Takes the rows of a frozen backbone to where they are kept."""

    always: bool
    """Whether the backbone runs even where nothing was missed, as its weights are gathered when it runs."""

    def __call__(self, computed: Tensor | None, cached: CachedRows) -> None:
        """Take note of one microbatch.

        Args:
            computed: rows of the missed items, end to end; None where nothing was computed.
            cached: what was found and what was missed.
        """


PROJECTOR = number_of("projector")
"""Where its random numbers begin."""
_PLAIN = Adapter()
"""Stands for a backbone that is no adapter: it has the defaults."""


class Encoder(Adapter):
    """A backbone and a projector.

    Args:
        backbone: called with :class:`EncoderInputs`, gives rows ``[sum(rows), in_dim]``; a :class:`Backbone`, any
            ``nn.Module``, or a function without arguments that makes one (then it is built on the meta device and
            initialised like everything else; the values of a ready module with real parameters are kept).
        projector: rows ``[R, in_dim]`` -> ``[R, out_dim]``.
        width: ``out_dim``; taken from ``projector.out_dim`` or its last Linear by default.
        before: called with the inputs on the device, returns inputs with the same sizes, rows and packing.
        after: called with the projected rows and the inputs without their values, returns rows.
        processor: makes the inputs of files; by default what the backbone's own :attr:`processor` says.
    """

    kind = EncoderKind()
    keeper: Keeper | None = None
    """What takes the backbone's rows, where a strategy keeps them."""

    def __init__(
        self,
        backbone: nn.Module | Callable[[], nn.Module],
        projector: nn.Module | Callable[[], nn.Module],
        *,
        width: int | None = None,
        before: Callable[[EncoderInputs], EncoderInputs] | None = None,
        after: Callable[[Tensor, EncoderInputs], Tensor] | None = None,
        processor: Processor | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone if isinstance(backbone, nn.Module) else backbone()
        self.projector = projector if isinstance(projector, nn.Module) else projector()
        self.before = before
        self.after = after
        self.width = width if width is not None else _out_width(self.projector)
        self.hidden_width = self.backbone.hidden_width if isinstance(self.backbone, Backbone) else self.width
        self.checkpoint = self._adapter.checkpoint
        self.max_item_rows = self._adapter.max_item_rows
        self.processor = self._adapter.processor if processor is None else processor

    @override
    def forward(
        self, inputs: EncoderInputs, rows: Mapping[Hashable, Tensor] = NO_ROWS, hidden: Tensor | None = None
    ) -> Tensor:
        """Encode one microbatch.

        Args:
            inputs: the items; a stage that is not the first reads sizes, rows and packing alone.
            rows: must be empty, as no edge leads to an encoder.
            hidden: rows ``[sum(packing), hidden_width]`` of the previous stage, where this is not the first.

        Returns:
            Rows ``[sum(inputs.rows), width]`` in the items' order, or rows for the next stage.

        Raises:
            DataError: rows of other modules, or the backbone makes something else than rows ``[sum(rows), in_dim]``.
        """
        if rows:
            raise DataError(f"an encoder takes no rows of other modules, got those of {sorted(map(str, rows))}")
        inputs = inputs.as_numbers()
        if self.compute_dtype is not None:
            inputs = inputs.narrowed(self.compute_dtype)
        if self.before is not None and self.first_stage:
            inputs = self.before(inputs)
        inner: Tensor
        if inputs.cached is not None and self.first_stage:
            inner = self._completed(inputs, inputs.cached)
        else:
            inner = self.backbone(inputs, hidden) if isinstance(self.backbone, Backbone) else self.backbone(inputs)
        if not self.last_stage:
            return inner
        if self.random_numbers is not None:  # the projector's do not depend on which rows were found
            self.random_numbers.seed(PROJECTOR)
        try:
            projected: Tensor = self.projector(inner)
        except (RuntimeError, TypeError, AttributeError) as fault:
            if (said := self._misshapen(inner)) is None:
                raise
            raise DataError(said) from fault
        if len(projected) != int(inputs.rows.sum()):
            raise DataError(self._misshapen(inner) or self._miscounted(len(projected), inputs))
        if self.after is None:
            return projected
        # A later stage has no values, and one with a cache has some: what comes out must not depend on the layout.
        return self.after(projected, replace(inputs, values=inputs.values[:0], cached=None))

    def _completed(self, inputs: EncoderInputs, cached: CachedRows) -> Tensor:
        """Rows of all items, of which the backbone computes those that were not found."""
        missed = inputs if cached.missed is None else cached.missed
        computed: Tensor | None = None
        if len(missed.rows) or self.keeper is None or self.keeper.always:
            computed = self.backbone(missed)
        if self.keeper is not None:
            self.keeper(computed, cached)
        return cached.joined(computed)

    def _misshapen(self, rows: Any) -> str | None:
        """What is wrong with what the backbone gave the projector; None: nothing that is known here."""
        width = _in_width(self.projector)
        wanted = f"[rows, {width or 'width'}], which its projector takes"
        who = f"module '{self.name}': {type(self.backbone).__name__}"
        if not isinstance(rows, Tensor):
            return f"{who} gave a {type(rows).__name__}; let it return one tensor {wanted} (such as last_hidden_state)"
        if rows.ndim != 2 or rows.shape[1] != (width or rows.shape[1]):
            return f"{who} gave rows of shape {list(rows.shape)}; let it return {wanted}, or give another Projector"
        return None

    def _miscounted(self, count: int, inputs: EncoderInputs) -> str:
        items = [f"{tuple(size)} -> {rows}" for size, rows in zip(inputs.sizes.tolist(), inputs.rows, strict=True)]
        shown = ", ".join(items[:8]) + (f", ... ({len(items)} items)" if len(items) > 8 else "")
        return (
            f"module '{self.name}': {type(self.backbone).__name__} made {count} rows but the data plans"
            f" {int(inputs.rows.sum())} (size -> rows of each item: {shown or 'no items'}); let the backbone make as"
            " many rows of an item as its processor says (patch_size, merge, stack)"
        )

    # The projector is replicated, comes after the blocks and has no Hugging Face home: all else is the backbone's.

    @property
    def _adapter(self) -> Adapter:
        return self.backbone if isinstance(self.backbone, Adapter) else _PLAIN

    @override
    def blocks(self) -> dict[str, nn.Module]:
        return {f"backbone.{fqn}": block for fqn, block in self._adapter.blocks().items()}

    @override
    def around_blocks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        before, after = (tuple(f"backbone.{fqn}" for fqn in part) for part in self._adapter.around_blocks())
        return before, (*after, "projector")

    @override
    def prune(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        backbone = self.backbone
        assert isinstance(backbone, Backbone)
        backbone.prune([fqn.removeprefix("backbone.") for fqn in blocks], before=before, after=after)
        backbone.first_stage, backbone.last_stage = not before, not after
        if after:
            self.projector = None  # type: ignore[assignment]

    @override
    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        plan = self._adapter.tp_plan()
        return None if plan is None else {f"backbone.{fqn}": style for fqn, style in plan.items()}

    @override
    def check_tp(self, tp: int) -> list[str]:
        return self._adapter.check_tp(tp)

    @override
    def after_tp(self, tp: int) -> None:
        self._adapter.after_tp(tp)

    @override
    def initialize(self, prefix: str, unit: nn.Module) -> None:
        if prefix:
            self._adapter.initialize(prefix.removeprefix("backbone."), unit)
            return
        for name, part in unit.named_children():
            if name == "backbone":
                self._adapter.initialize("", part)
            else:
                initialize_plain(part)

    @override
    def hf_weights(self) -> HFWeights | None:
        weights = self._adapter.hf_weights()
        return None if weights is None else weights.below("backbone.")

    @override
    def flops_by_part(self, packing_lengths: np.ndarray) -> dict[str, float]:
        if not isinstance(self.backbone, Adapter):
            return super().flops_by_part(packing_lengths)
        backbone = float(self.backbone.flops(packing_lengths))
        return {"backbone": backbone, "projector": float(self.flops(packing_lengths)) - backbone}

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        if not isinstance(self.backbone, Backbone):
            return super().part_flops(packing_lengths)
        before, blocks, after = self.backbone.part_flops(packing_lengths)
        original: Any = self.meta_copy()
        projector = linear_flops(original.projector) * self.backbone.projected_rows(packing_lengths)
        return before, blocks, after + projector


def _in_width(projector: nn.Module) -> int | None:
    linears = [module for module in projector.modules() if isinstance(module, nn.Linear)]
    return linears[0].in_features if linears else None


def _out_width(projector: nn.Module) -> int:
    if isinstance(width := getattr(projector, "out_dim", None), int):
        return width
    linears = [module for module in projector.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise DataError("Encoder: width cannot be read from the projector: pass width=")
    return linears[-1].out_features
