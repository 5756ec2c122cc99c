"""An encoder: any backbone that turns items into rows, and a projector to the width of its consumers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hetero_strategy.errors import DataError
from hetero_strategy.model.adapter import Adapter, initialize_plain, linear_flops
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
    """An adapter that takes :class:`EncoderInputs` and gives rows ``[sum(rows), width]``."""

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
        before: called with the inputs, returns inputs.
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
        self.checkpoint = getattr(self.backbone, "checkpoint", None)

    def forward(self, inputs: EncoderInputs) -> Tensor:
        """Rows ``[sum(inputs.rows), width]`` of all items, in the items' order."""
        if self.before is not None:
            inputs = self.before(inputs)
        rows: Tensor = self.projector(self.backbone(inputs))
        expected = int(inputs.rows.sum())
        if len(rows) != expected:
            raise DataError(
                f"{type(self.backbone).__name__} made {len(rows)} rows but inputs.rows sum to {expected}: "
                "the data's row rule (merge, stack) must match the encoder's"
            )
        return rows if self.after is None else self.after(rows, inputs)

    def blocks(self) -> dict[str, nn.Module]:
        """The backbone's blocks."""
        if not isinstance(self.backbone, Adapter):
            return {}
        return {f"backbone.{fqn}": block for fqn, block in self.backbone.blocks().items()}

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

    def export_config(self) -> dict[str, Any] | None:
        """The backbone's config.json."""
        return self.backbone.export_config() if isinstance(self.backbone, Adapter) else None

    def export_prefixes(self) -> tuple[str, ...]:
        """The backbone's."""
        return self.backbone.export_prefixes() if isinstance(self.backbone, Adapter) else ("",)

    def unused_export(self, name: str) -> bool:
        """The backbone's."""
        return isinstance(self.backbone, Adapter) and self.backbone.unused_export(name)

    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Rows the edge carries for items of these sizes, int64 ``[n]``; needs a :class:`Backbone`."""
        return self._sized().output_rows(sizes)

    def packing_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Rows the backbone's transformer sees for items of these sizes, int64 ``[n]``; needs a :class:`Backbone`."""
        return self._sized().packing_rows(sizes)

    def flops(self, packing_lengths: np.ndarray) -> float:
        """Backbone and projector."""
        if not isinstance(self.backbone, Backbone):
            return super().flops(packing_lengths)
        projector = linear_flops(self.projector) * self.backbone.projected_rows(packing_lengths)
        return self.backbone.flops(packing_lengths) + projector

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
