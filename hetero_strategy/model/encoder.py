"""An encoder: any backbone that turns items into rows, and a projector to the width of the target module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override

from hetero_strategy.errors import DataError, check_sizes
from hetero_strategy.layout.row_sharding import REPLICATED, RowSharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import NO_ROWS, Adapter, initialize_plain, linear_flops, previous_rows
from hetero_strategy.model.hf_folder import HFWeights
from hetero_strategy.model.inputs import EncoderInputs, ImagePatches, MelFrames, Packing
from hetero_strategy.model.kind import InstanceUnits, ModuleKind, Processor


class Projector(nn.Module):
    """A stack of LayerNorm, Linear, GELU, Linear: rows ``[R, in_dim]`` -> ``[R, out_dim]``."""

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
    """A base of transformer backbones, which turn :class:`EncoderInputs` into rows ``[sum(rows), width]``."""

    prepare: Callable[[EncoderInputs], EncoderInputs] | None = None
    """Function that a loader applies to inputs, to add tensors that follow from their sizes; it is pickled."""

    def embed(self, inputs: EncoderInputs) -> Tensor:
        """Turn raw values into rows ``[sum(packing), hidden_width]``."""
        raise NotImplementedError

    def transform(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """Run this stage's blocks; it may read only sizes, rows and packing of the inputs."""
        raise NotImplementedError

    def finish(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """Turn the last block's rows into ``[sum(rows), width]``; it may read only sizes, rows and packing."""
        raise NotImplementedError

    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the number of output rows of each item of these sizes, int64 ``[n]``."""
        raise NotImplementedError

    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the number of rows in the transformer of each item of these sizes, int64 ``[n]``."""
        raise NotImplementedError

    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        """Return the number of output rows of items whose transformer rows are ``packing_lengths``."""
        return int(np.sum(packing_lengths))

    @property
    @override
    def example_unit(self) -> int:  # type: ignore[override]
        return self.processor.example_unit if isinstance(self.processor, ImagePatches | MelFrames) else 16

    @override
    def example(self, lengths: np.ndarray) -> EncoderInputs | None:
        if not isinstance(self.processor, ImagePatches | MelFrames):
            return None
        sizes, shape = self.processor.example(lengths)
        return EncoderInputs(torch.empty(shape), sizes, self.output_rows(sizes), Packing.of(lengths))

    @override
    def forward(self, inputs: EncoderInputs, hidden: Tensor | None = None) -> Tensor:
        """Run this stage, from the inputs' values or from the previous stage's rows."""
        # No name holds the first block's input: without training it is freed once that block has run.
        rows = self.transform(self.embed(inputs) if self.first_stage else previous_rows(hidden), inputs)
        return self.finish(rows, inputs) if self.last_stage else rows


class EncoderKind(ModuleKind):
    """A kind for encoders: units are items, which become rows, without a loss."""

    name = "Encoder"
    has_loss = False

    def __init__(self, prepare: Callable[[EncoderInputs], EncoderInputs] | None = None) -> None:
        self._prepare = prepare

    @override
    def inputs(self, units: InstanceUnits) -> EncoderInputs:
        inputs = self._of_units(units)
        return inputs if self._prepare is None else self._prepare(inputs)

    def _of_units(self, units: InstanceUnits) -> EncoderInputs:
        items, processor = units.content.items(units.module, units.numbers), units.processor
        if not units.first:
            empty = torch.zeros(0, processor.feature, dtype=torch.float32)
            return EncoderInputs(empty, items.sizes, items.rows, Packing.of(units.inner_rows))
        return processor.collate(units.content.values(units.module, units.numbers), items.sizes, items.rows)


_PLAIN = Adapter()
"""Stand-in for a backbone that is no adapter: it has the defaults."""


class Encoder(Adapter):
    """A backbone and a projector.

    Args:
        backbone: map from :class:`EncoderInputs` to rows ``[sum(rows), in_dim]``; a :class:`Backbone`, any
            ``nn.Module``, or a function without arguments that makes one (built on the meta device and initialised like
            other modules). A ready module with real parameters keeps its values.
        projector: map from rows ``[R, in_dim]`` to ``[R, out_dim]``.
        width: ``out_dim``; default: ``projector.out_dim`` or that of its last Linear.
        before: function of the inputs on the device that returns inputs with the same sizes, rows and packing.
        after: function of the projected rows and the inputs without their values that returns rows.
        processor: processor of files; default: the backbone's :attr:`processor`.
    """

    kind = EncoderKind()

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
        if isinstance(self.backbone, Backbone) and self.backbone.prepare is not None:
            self.kind = EncoderKind(self.backbone.prepare)
        self.before = before
        self.after = after
        self.width = width if width is not None else _out_width(self.projector)
        self.hidden_width = self.backbone.hidden_width if isinstance(self.backbone, Backbone) else self.width
        self.checkpoint, self.runs_vary = self._adapter.checkpoint, self._adapter.runs_vary
        self.context_parallel, self.attention_heads = self._adapter.context_parallel, self._adapter.attention_heads
        self.max_item_rows = self._adapter.max_item_rows
        self.processor = self._adapter.processor if processor is None else processor

    @override
    def forward(
        self, inputs: EncoderInputs, rows: Mapping[Hashable, Tensor] = NO_ROWS, hidden: Tensor | None = None
    ) -> Tensor:
        """Encode one microbatch.

        Args:
            inputs: items; a stage that is not the first reads only sizes, rows and packing.
            rows: empty, because no edge leads to an encoder.
            hidden: rows ``[sum(packing), hidden_width]`` of the previous stage, unless this is the first.

        Returns:
            Rows ``[sum(inputs.rows), width]`` in the items' order, or rows for the next stage.

        Raises:
            DataError: there are rows of other modules, or the backbone makes another number of rows.
        """
        if rows:
            raise DataError(f"an encoder takes no rows of other modules, got those of {sorted(map(str, rows))}")
        inputs = inputs.as_numbers()
        if self.compute_dtype is not None:
            inputs = inputs.narrowed(self.compute_dtype)
        if self.before is not None and self.first_stage:
            inputs = self.before(inputs)
        inner: Tensor = self.backbone(inputs, hidden) if isinstance(self.backbone, Backbone) else self.backbone(inputs)
        if not self.last_stage:
            return inner
        if not isinstance(inner, Tensor) or inner.ndim != 2:
            shown = list(inner.shape) if isinstance(inner, Tensor) else f"a {type(inner).__name__}"
            raise DataError(
                f"module '{self.name}': {type(self.backbone).__name__} gave {shown}; let it return one tensor"
                " [rows, width] (such as last_hidden_state)"
            )
        projected: Tensor = self.projector(inner)
        if len(projected) != int(inputs.rows.sum()):
            raise DataError(self._miscounted(projected, inputs))
        if self.after is None:
            return projected
        # A later stage has no values: the result must not depend on the layout.
        return self.after(projected, replace(inputs, values=inputs.values[:0]))

    def _miscounted(self, projected: Tensor, inputs: EncoderInputs) -> str:
        items = [f"{tuple(size)} -> {rows}" for size, rows in zip(inputs.sizes.tolist(), inputs.rows, strict=True)]
        shown = ", ".join(items[:8]) + (f", ... ({len(items)} items)" if len(items) > 8 else "")
        return (
            f"module '{self.name}': {type(self.backbone).__name__} made {len(projected)} rows but the data plans"
            f" {int(inputs.rows.sum())} (size -> rows of each item: {shown or 'no items'}); let the backbone make as"
            " many rows of an item as its processor says (patch_size, merge, stack)"
        )

    # The projector is replicated, follows the blocks and has no Hugging Face weights; the rest is the backbone's.

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

    @property
    @override
    def can_be_cut(self) -> bool:
        return isinstance(self.backbone, Backbone) and self.backbone.can_be_cut

    @override
    def prune(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        backbone = self.backbone
        assert isinstance(backbone, Backbone)
        backbone.prune([fqn.removeprefix("backbone.") for fqn in blocks], before=before, after=after)
        backbone.first_stage, backbone.last_stage = not before, not after
        if after:
            self.projector = None  # type: ignore[assignment]

    @override
    def row_sharding(self, layout: ModuleLayout) -> RowSharding:
        """Return :data:`REPLICATED`: context-parallel ranks, too, have all rows at edges and between stages."""
        return REPLICATED

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
    def meta_copy(self) -> Adapter:
        if isinstance(self.backbone, Backbone) and "_meta_copy" not in self.__dict__:
            self.backbone.meta_copy()  # its own, for its rules: later it has shards
            self.backbone.release_initial_values()  # the encoder keeps them
        return super().meta_copy()

    @override
    def hf_weights(self) -> HFWeights | None:
        weights = self._adapter.hf_weights()
        return None if weights is None else weights.below("backbone.")

    @property
    @override
    def example_unit(self) -> int:  # type: ignore[override]
        return self._adapter.example_unit

    @override
    def example(self, lengths: np.ndarray) -> Any:
        return self._adapter.example(lengths)

    @override
    def measured(self) -> AbstractContextManager[Any]:
        return self._adapter.measured()

    @override
    def used_share(self, layer: nn.Module, name: str) -> float:
        return self._adapter.used_share(layer, name)

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


def _out_width(projector: nn.Module) -> int:
    if isinstance(width := getattr(projector, "out_dim", None), int):
        return width
    linears = [module for module in projector.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise DataError("Encoder: width cannot be read from the projector: pass width=")
    return linears[-1].out_features
