"""Any transformers tower for pictures or sound by its folder, and a projector to the width of a language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ModelError, check_sizes
from hetero_strategy.model.encoder import Encoder, Projector
from hetero_strategy.model.hf_folder import PROCESSOR
from hetero_strategy.model.inputs import EncoderInputs
from hetero_strategy.zoo.hf import check_folder
from hetero_strategy.zoo.hf_clip_tower import VALUES, ClipTower
from hetero_strategy.zoo.hf_grid_tower import GridTower
from hetero_strategy.zoo.hf_tile_tower import TileTower
from hetero_strategy.zoo.hf_tower import HFTower

if TYPE_CHECKING:
    from hetero_strategy.data.hf_processor import HFProcessor


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
    media: str | None = None,
    layer: int | None = None,
    projector: str | nn.Module = "mlp",
    merge: int = 2,
    before: Callable[[EncoderInputs], EncoderInputs] | None = None,
    after: Callable[[Tensor, EncoderInputs], Tensor] | None = None,
    processor: Any = None,
) -> Encoder:
    """Build the tower of any transformers folder and a projector.

    Args:
        checkpoint: local folder of a model of pictures or sound, or of a model that has one.
        out_width: width of the rows of the language model.
        media: "image" or "audio", of a model that has towers for both.
        layer: number of the wanted state as in transformers' ``hidden_states``; -1: the output behind the final norm.
            None: -2, as LLaVA does; -1 for sound, and for a tower that merges its own patches, such as Qwen2.5-VL's.
        projector: "mlp" (norm, two linear maps), "linear", "merge" (norm of each row, ``merge`` x ``merge`` rows
            joined, two linear maps, as Qwen2-VL has), "shuffle" (rows joined, norm, two linear maps, as InternVL's
            pixel shuffle), or a module that maps rows ``[R, width]``.
        merge: side of the square of rows that "merge" and "shuffle" join; of sound, the number of rows.
        before, after: functions around the encoder, as in :class:`Encoder`.
        processor: processor of files; default: transformers' own of the folder, if it has a preprocessor_config.json.

    Raises:
        ModelError: transformers has no such model, or its tower cannot be run.
    """
    check_sizes("hf_encoder", out_width=out_width, merge=merge)
    kinds = ("mlp", "linear", "merge", "shuffle")
    if not isinstance(projector, nn.Module) and projector not in kinds:
        raise ModelError(f"hf_encoder: projector={projector!r}; use {', '.join(map(repr, kinds))} or a module")
    tower, media = tower_of(checkpoint, media)
    ragged = "grid_thw" in inspect.signature(tower.forward).parameters
    if layer not in (None, -1) and ragged:
        raise ModelError(
            f"hf_encoder: layer={layer}, but {type(tower).__name__} merges its patches behind its blocks; use layer=-1"
        )
    joins = merge if projector in ("merge", "shuffle") else 1
    tower_class = ClipTower if media == "audio" else GridTower if ragged else TileTower
    layer = (-2 if tower_class is TileTower else -1) if layer is None else layer
    options: dict[str, Any] = {"layer": layer, "merge": joins, "checkpoint": checkpoint}
    if processor is None and any((Path(checkpoint) / name).is_file() for name in (PROCESSOR, "processor_config.json")):
        backbone, processor = _with_processor(tower_class, tower, media, options)
    else:
        backbone = tower_class(tower, **options)
    width = backbone.width
    with torch.device("meta"):
        if projector == "mlp" or projector == "shuffle":
            projector = Projector(width, out_width)
        elif projector == "linear":
            projector = nn.Linear(width, out_width)
        elif projector == "merge":
            projector = Merger(width // backbone.joined_rows, backbone.joined_rows, out_width)
    assert isinstance(projector, nn.Module)
    return Encoder(backbone, projector, width=out_width, before=before, after=after, processor=processor)


def _with_processor(
    made: type[HFTower], tower: Any, media: Literal["image", "audio"], options: dict[str, Any]
) -> tuple[HFTower, HFProcessor]:
    """Build a backbone for what the processor of its folder makes, and this processor."""
    from hetero_strategy.data.hf_processor import HFProcessor

    folder, joins = str(options["checkpoint"]), options["merge"]
    own = HFProcessor(folder, media, media)
    if made is TileTower:
        options = {**options, "pixels": own.tile[1:]}
    backbone = made(tower, **options)
    backbone.runs_vary = isinstance(backbone, TileTower) and not backbone.is_whole(own.feature)
    if made is TileTower and backbone.runs_vary and joins > 1:
        raise ModelError(
            f"hf_encoder: the processor of {folder} makes pictures of many sizes, whose patches cannot all be joined by"
            f" {joins}; take projector='mlp' or 'linear', or set one size and do_center_crop in its {PROCESSOR}"
        )
    edge, inner = backbone.rows_of_folder()
    return backbone, replace(own, output_rows=edge, packing_rows=inner)


def tower_of(checkpoint: str | Path, media: str | None) -> tuple[Any, Literal["image", "audio"]]:
    """Return the tower of a folder's model, without values, and the kind of its media.

    Raises:
        ModelError: the folder needs code of its own, is quantised, transformers makes no model of it, or it has towers
            for pictures and sound and ``media`` is None.
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
    parts = [part for part in whole.modules() if isinstance(part, transformers.PreTrainedModel)]
    takes = {part: [*inspect.signature(part.forward).parameters] for part in parts}
    section = getattr(config, "vision_config", None)
    pictures = [part for part in parts if isinstance(part.config, type(section or config))]
    clips = [part for part in parts if takes[part][0] in VALUES]
    towers_by_kind: dict[str, list[Any]] = {
        "image": [part for part in pictures if {"pixel_values", "grid_thw"} & {*takes[part]}][:1],
        "audio": clips[-1:],  # the innermost: an encoder in an encoder-decoder
    }
    kinds = [kind for kind, towers in towers_by_kind.items() if towers and media in (None, kind)]
    if len(kinds) != 1:
        wanted = {"image": "pictures", "audio": "sound"}.get(str(media), "pictures or sound")
        reason = f"in which no part turns {wanted} into rows; take a folder with such a part"
        if kinds:
            reason = "which has towers for both; say media='image' or media='audio'"
        raise ModelError(f"hf_encoder: {checkpoint} is a {type(whole).__name__}, {reason}")
    return towers_by_kind[kinds[0]][0], kinds[0]  # type: ignore[return-value]
