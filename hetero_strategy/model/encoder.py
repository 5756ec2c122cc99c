"""An encoder: any backbone that turns items into rows, and a projector to the width of what it feeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hetero_strategy.errors import DataError
from hetero_strategy.model.adapter import NO_ROWS, Adapter, given_rows, initialize_plain, linear_flops
from hetero_strategy.model.inputs import EncoderInputs

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class Projector(nn.Module):
    """LayerNorm, Linear, GELU, Linear: rows ``[R, in_dim]`` -> ``[R, out_dim]``."""

    def __init__(self, in_dim: int, out_dim: int, hidden: int | None = None) -> None:
        super().__init__()
        self.out_dim = out_dim
        with torch.device("meta"):
            self.norm = nn.LayerNorm(in_dim)
            self.up = nn.Linear(in_dim, hidden or out_dim)
            self.act = nn.GELU()
            self.down = nn.Linear(hidden or out_dim, out_dim)

    def forward(self, rows: Tensor) -> Tensor:
        """Project rows."""
        projected: Tensor = self.down(self.act(self.up(self.norm(rows))))
        return projected


class Backbone(Adapter):
    """An adapter that takes :class:`EncoderInputs` and gives rows ``[sum(rows), width]``.

    A subclass provides :meth:`embed`, :meth:`transform` and :meth:`finish`; inner rows are ``[sum(packing), hidden]``.
    """

    def embed(self, inputs: EncoderInputs) -> Tensor:
        """Raw values -> rows ``[sum(packing), hidden_width]``."""
        raise NotImplementedError

    def transform(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """Rows through the blocks that are here. Only sizes, rows and packing of the inputs may be read."""
        raise NotImplementedError

    def finish(self, rows: Tensor, inputs: EncoderInputs) -> Tensor:
        """Rows after the last block -> output rows ``[sum(rows), width]``. Reads as :meth:`transform` does."""
        raise NotImplementedError

    def forward(self, inputs: EncoderInputs, hidden: Tensor | None = None) -> Tensor:
        """All that is here, from the values or from the previous stage's rows."""
        rows = self.embed(inputs) if self.first_stage else given_rows(hidden)
        rows = self.transform(rows, inputs)
        return self.finish(rows, inputs) if self.last_stage else rows

    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Rows it makes of items of these sizes, int64 ``[n]``."""
        raise NotImplementedError

    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Rows its transformer sees for items of these sizes, int64 ``[n]``."""
        raise NotImplementedError

    def projected_rows(self, packing_lengths: np.ndarray) -> int:
        """Output rows of items whose transformer rows are ``packing_lengths``, summed."""
        return int(np.sum(packing_lengths))


class Encoder(Adapter):
    """A backbone and a projector.

    Args:
        backbone: called with :class:`EncoderInputs`, gives rows ``[sum(rows), in_dim]``; a :class:`Backbone`, any
            ``nn.Module``, or a function without arguments that makes one (then it is built on the meta device and
            initialised like everything else; the values of a ready module with real parameters are kept).
        projector: rows ``[R, in_dim]`` -> ``[R, out_dim]``.
        width: ``out_dim``; taken from ``projector.out_dim`` or its last Linear by default.
        before: called with the inputs where their values are, returns inputs with the same sizes, rows and packing.
        after: called with the projected rows and the inputs, returns rows.
    """

    def __init__(
        self,
        backbone: nn.Module | Callable[[], nn.Module],
        projector: nn.Module | Callable[[], nn.Module],
        *,
        width: int | None = None,
        before: Callable[[EncoderInputs], EncoderInputs] | None = None,
        after: Callable[[Tensor, EncoderInputs], Tensor] | None = None,
    ) -> None:
        super().__init__()
        with torch.device("meta"):
            self.backbone = backbone if isinstance(backbone, nn.Module) else backbone()
            self.projector = projector if isinstance(projector, nn.Module) else projector()
        self.before = before
        self.after = after
        self.width = width if width is not None else _out_width(self.projector)
        self.hidden_width = self.backbone.hidden_width if isinstance(self.backbone, Backbone) else self.width
        self.checkpoint = getattr(self.backbone, "checkpoint", None)

    def forward(
        self, inputs: EncoderInputs, rows: Mapping[Hashable, Tensor] = NO_ROWS, hidden: Tensor | None = None
    ) -> Tensor:
        """Rows ``[sum(inputs.rows), width]`` of all items, in the items' order.

        Args:
            inputs: items; a stage that is not the first reads sizes, rows and packing alone.
            rows: of other modules: an encoder takes none.
            hidden: rows ``[sum(packing), hidden_width]`` of the previous stage, where this is not the first.

        Returns:
            The rows, or those for the next stage where this is not the last.

        Raises:
            DataError: rows of other modules, or the backbone makes another number of rows than planned.
        """
        if rows:
            raise DataError(f"an encoder takes no rows of other modules, got those of {sorted(map(str, rows))}")
        if self.before is not None and self.first_stage:
            inputs = self.before(inputs)
        inner: Tensor
        inner = self.backbone(inputs, hidden) if isinstance(self.backbone, Backbone) else self.backbone(inputs)
        if not self.last_stage:
            return inner
        made: Tensor = self.projector(inner)
        if len(made) != int(inputs.rows.sum()):
            raise DataError(self._miscounted(len(made), inputs))
        return made if self.after is None else self.after(made, inputs)

    def _miscounted(self, made: int, inputs: EncoderInputs) -> str:
        items = [f"{tuple(size)} -> {rows}" for size, rows in zip(inputs.sizes.tolist(), inputs.rows, strict=True)]
        shown = ", ".join(items[:8]) + (f", ... ({len(items)} items)" if len(items) > 8 else "")
        return (
            f"module '{self.name}': {type(self.backbone).__name__} made {made} rows but the data plans"
            f" {int(inputs.rows.sum())} (size -> rows of each item: {shown or 'no items'}); let the backbone make as"
            " many rows of an item as its processor says (patch_size, merge, stack)"
        )

    def blocks(self) -> dict[str, nn.Module]:
        """The backbone's blocks."""
        if not isinstance(self.backbone, Adapter):
            return {}
        return {f"backbone.{fqn}": block for fqn, block in self.backbone.blocks().items()}

    def drop(self, blocks: Collection[str], *, before: bool, after: bool) -> None:
        """The backbone's parts; the projector comes after the blocks."""
        backbone = self._sized()
        backbone.drop([fqn.removeprefix("backbone.") for fqn in blocks], before=before, after=after)
        backbone.first_stage, backbone.last_stage = not before, not after
        if after:
            self.projector = None  # type: ignore[assignment]

    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        """The backbone's plan; the projector stays replicated."""
        plan = self.backbone.tp_plan() if isinstance(self.backbone, Adapter) else None
        return None if plan is None else {f"backbone.{fqn}": style for fqn, style in plan.items()}

    def check_tp(self, tp: int) -> list[str]:
        """The backbone's faults."""
        return self.backbone.check_tp(tp) if isinstance(self.backbone, Adapter) else []

    def after_tp(self, tp: int) -> None:
        """The backbone's mending."""
        if isinstance(self.backbone, Adapter):
            self.backbone.after_tp(tp)

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Backbone by its own rules, projector by ``reset_parameters``."""
        if prefix and isinstance(self.backbone, Adapter):
            self.backbone.initialize(prefix.removeprefix("backbone."), unit)
            return
        for name, part in unit.named_children():
            if name == "backbone" and isinstance(self.backbone, Adapter):
                self.backbone.initialize("", part)
            else:
                initialize_plain(part)

    def export_names(self) -> dict[str, str]:
        """The backbone's names; the projector has no Hugging Face home."""
        names = self.backbone.export_names() if isinstance(self.backbone, Adapter) else {}
        return {f"backbone.{fqn}": name for fqn, name in names.items()}

    def paired_heads(self) -> dict[str, int]:
        """The backbone's."""
        heads = self.backbone.paired_heads() if isinstance(self.backbone, Adapter) else {}
        return {f"backbone.{fqn}": n for fqn, n in heads.items()}

    def export_config(self) -> dict[str, Any] | None:
        """The backbone's config.json."""
        return self.backbone.export_config() if isinstance(self.backbone, Adapter) else None

    def export_prefixes(self) -> tuple[str, ...]:
        """The backbone's."""
        return self.backbone.export_prefixes() if isinstance(self.backbone, Adapter) else ("",)

    def unused_export(self, name: str) -> bool:
        """The backbone's."""
        return isinstance(self.backbone, Adapter) and self.backbone.unused_export(name)

    @property
    def sized(self) -> bool:
        """Whether it says how many rows it makes of an item: a :class:`Backbone` does, any other module shows it only
        when it runs.
        """
        return isinstance(self.backbone, Backbone)

    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Rows the edge carries for items of these sizes, int64 ``[n]``; needs :attr:`sized`."""
        return self._sized().output_rows(sizes)

    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Rows the backbone's transformer sees for items of these sizes, int64 ``[n]``; needs :attr:`sized`."""
        return self._sized().packing_rows(sizes)

    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        """The backbone's parts, and the projector after them."""
        if not isinstance(self.backbone, Backbone):
            return super().part_flops(packing_lengths)
        before, blocks, after = self.backbone.part_flops(packing_lengths)
        twin: Any = self.twin()
        projector = linear_flops(twin.projector) * self.backbone.projected_rows(packing_lengths)
        return before, blocks, after + projector

    def _sized(self) -> Backbone:
        if not isinstance(self.backbone, Backbone):
            raise NotImplementedError(f"{type(self.backbone).__name__} does not say how many rows it makes of an item")
        return self.backbone


def _out_width(projector: nn.Module) -> int:
    if isinstance(width := getattr(projector, "out_dim", None), int):
        return width
    linears = [module for module in projector.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise DataError("Encoder: width cannot be read from the projector: pass width=")
    return linears[-1].out_features
