"""Any transformers vision tower by its folder, and a projector to the width of a language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ModelError, check_sizes
from hetero_strategy.model.encoder import Encoder, Projector
from hetero_strategy.model.hf_folder import PROCESSOR
from hetero_strategy.model.inputs import EncoderInputs
from hetero_strategy.zoo.hf import check_folder
from hetero_strategy.zoo.hf_grid_tower import GridTower
from hetero_strategy.zoo.hf_tile_tower import TileTower


class Merger(nn.Module):
    """A stack of LayerNorm of each joined row, Linear, GELU, Linear: ``[R, cells * width]`` to ``[R, out_dim]``."""

    def __init__(self, width: int, cells: int, out_dim: int) -> None:
        super().__init__()
        self.out_dim = out_dim
        with torch.device("meta"):
            self.norm = nn.LayerNorm(width)
            self.up, self.act, self.down = (
                nn.Linear(cells * width, cells * width),
                nn.GELU(),
                nn.Linear(cells * width, out_dim),
            )

    @override
    def forward(self, rows: Tensor) -> Tensor:
        single = rows.unflatten(1, (-1, self.norm.normalized_shape[0]))
        return self.down(self.act(self.up(self.norm(single).flatten(1))))


def hf_encoder(
    checkpoint: str | Path,
    out_width: int,
    *,
    layer: int | None = None,
    projector: str | nn.Module = "mlp",
    merge: int = 2,
    before: Callable[[EncoderInputs], EncoderInputs] | None = None,
    after: Callable[[Tensor, EncoderInputs], Tensor] | None = None,
    processor: Any = None,
) -> Encoder:
    """Build the vision tower of any transformers folder and a projector.

    Args:
        checkpoint: local folder of a vision model, or of a model that has one.
        out_width: width of the rows of the language model.
        layer: number of the wanted state as in transformers' ``hidden_states``; -1: the output behind the final norm.
            None: -1 for a tower that merges its own patches, such as Qwen2.5-VL's, and else -2, as LLaVA does.
        projector: "mlp" (norm, two linear maps), "linear", "merge" (norm of each row, ``merge`` x ``merge`` rows
            joined, two linear maps, as Qwen2-VL has), "shuffle" (rows joined, norm, two linear maps, as InternVL's
            pixel shuffle), or a module that maps rows ``[R, width]``.
        merge: side of the square of rows that "merge" and "shuffle" join.
        before, after: functions around the encoder, as in :class:`Encoder`.
        processor: processor of files; default: transformers' own of the folder, if it has a preprocessor_config.json.

    Raises:
        ModelError: transformers has no such model, or its tower cannot be run.
    """
    check_sizes("hf_encoder", out_width=out_width, merge=merge)
    kinds = ("mlp", "linear", "merge", "shuffle")
    if not isinstance(projector, nn.Module) and projector not in kinds:
        raise ModelError(f"hf_encoder: projector={projector!r}; use {', '.join(map(repr, kinds))} or a module")
    tower = vision_tower(checkpoint)
    ragged = "grid_thw" in inspect.signature(tower.forward).parameters
    if layer not in (None, -1) and ragged:
        raise ModelError(
            f"hf_encoder: layer={layer}, but {type(tower).__name__} merges its patches behind its blocks; use layer=-1"
        )
    joins = merge if projector in ("merge", "shuffle") else 1
    made = GridTower if ragged else TileTower
    backbone = made(tower, layer=(-1 if ragged else -2) if layer is None else layer, merge=joins, checkpoint=checkpoint)
    width = backbone.width
    with torch.device("meta"):
        if projector == "mlp" or projector == "shuffle":
            projector = Projector(width, out_width)
        elif projector == "linear":
            projector = nn.Linear(width, out_width)
        elif projector == "merge":
            projector = Merger(width // joins**2, joins**2, out_width)
    assert isinstance(projector, nn.Module)
    if processor is None and any((Path(checkpoint) / name).is_file() for name in (PROCESSOR, "processor_config.json")):
        from hetero_strategy.data.hf_processor import HFProcessor

        edge, inner = backbone.rows_of_folder()
        processor = HFProcessor(str(checkpoint), output_rows=edge, packing_rows=inner)
        backbone.runs_vary &= "tile" in processor.columns
    return Encoder(backbone, projector, width=out_width, before=before, after=after, processor=processor)


def vision_tower(checkpoint: str | Path) -> Any:
    """Return the vision tower of a folder's model, without values.

    Raises:
        ModelError: the folder needs code of its own, is quantised, or transformers makes no model of it.
    """
    import transformers

    check_folder("hf_encoder", checkpoint)
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        with torch.device("meta"):
            whole = transformers.AutoModel.from_config(config)
    except Exception as fault:  # transformers raises several kinds
        reason = " ".join(str(fault).split())
        raise ModelError(f"hf_encoder: transformers makes no model of {checkpoint}: {reason}") from None
    section = getattr(config, "vision_config", None)
    towers = [
        part
        for part in whole.modules()
        if isinstance(part, transformers.PreTrainedModel) and isinstance(part.config, type(section or config))
    ]
    if not towers or not {"pixel_values", "grid_thw"} & {*inspect.signature(towers[0].forward).parameters}:
        raise ModelError(
            f"hf_encoder: {checkpoint} is a {type(whole).__name__}, in which no part turns pictures into rows; take a"
            " folder with a vision model"
        )
    return towers[0]
