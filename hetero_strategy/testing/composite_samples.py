"""Samples of text with pictures and sounds for tiny composites, and transformers' own logits of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hetero_strategy.model import MultimodalModel

STATE = ("qwen3_5", "qwen3_5_moe")
"""Families in which positions matter in layers without a state alone."""
GRIDS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni_thinker", *STATE),
    *("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "exaone4_5"),
)
"""Families whose patches lie end to end."""
SEVERAL = ("llava_next", "llava_onevision")
"""Families that cut a picture into tiles."""
TILES = (
    *("llava", "vipllava", "internvl", "gemma3", "paligemma", "aya_vision", "cohere2_vision", "got_ocr2"),
    "deepseek_vl",
)
BATCHED = ("idefics3", "smolvlm")
MANY = ("mistral3", "lighton_ocr")
"""Families with tiles of many sizes."""
SOUNDS = ("voxtral",)
COMPOSITES = (*GRIDS, *SEVERAL, *TILES, *BATCHED, *MANY, *SOUNDS)
"""Families that tiny samples are known for."""
Media = tuple[list[tuple[int, int]], list[int]]
"""Sizes of the pictures of a sample, in patches where a family takes any size, and frames of its sounds."""


@dataclass
class MediaSample:
    """A sample of text with media, as transformers takes it and as encoders here do."""

    ids: Tensor
    items: dict[str, DrawnItems]

    @property
    def given(self) -> dict[str, Tensor]:
        """Return the arguments of transformers' forward."""
        return {name: value for items in self.items.values() for name, value in items.given.items()}


@dataclass
class DrawnItems:
    """The pictures or sounds of a sample."""

    kind: str
    given: dict[str, Tensor]
    values: Tensor
    sizes: np.ndarray
    names: tuple[str, ...]
    """Names of the sizes."""
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Row of the sample where each item begins."""


ONE: Media = ([(4, 6)], [96])
TWO: Media = ([(8, 10), (4, 4)], [40, 75])
THREE: Media = ([(4, 4), (4, 6), (8, 10)], [96, 10, 60])
LEARNT = 3
"""Tokens at the end of each sample that are predicted."""
NONE: Media = ([], [])


def samples_of(model: Any, generator: torch.Generator, media: Sequence[Media] = (ONE, TWO, NONE)) -> list[MediaSample]:
    """Draw a sample with each of these media, of those kinds that the model takes."""
    samples = []
    for pictures, sounds in media:
        items = {}
        if hasattr(model.config, "vision_config"):
            items["vision"] = _pictures(model.config.model_type, pictures, generator)
        if hasattr(model.config, "audio_config"):
            items["audio"] = _sounds(model.config, sounds, generator)
        text = iter(torch.randint(3, 140, (40,), generator=generator).tolist())
        ids = [next(text) for _ in range(5)]
        for name, each in items.items():
            starts, ends = (getattr(model.config, f"{name}_{end}_token_id", None) for end in ("start", "end"))
            for count in _rows_of(model, each):
                ids.append(starts or next(text))
                each.rows.append(count)
                each.starts.append(len(ids))
                ids += [getattr(model.config, f"{each.kind}_token_id")] * count
                ids.append(ends or next(text))
        samples.append(MediaSample(torch.tensor([*ids, *(next(text) for _ in range(3))]), items))
    return samples


def _rows_of(model: Any, items: DrawnItems) -> list[int]:
    """Return the rows that transformers makes of each item."""
    if not items.given:
        return []
    with torch.no_grad():
        features = getattr(model.model, f"get_{items.kind}_features")(**items.given, return_dict=True).pooler_output
        if items.kind == "audio":  # of all items in one tensor
            lengths = items.given.get("feature_attention_mask")
            if lengths is None:
                return [len(features) // len(items.sizes)] * len(items.sizes)
            return model.model.audio_tower._get_feat_extract_output_lengths(lengths.sum(1))[1].tolist()
    counts = [len(part.reshape(-1, part.shape[-1])) for part in features]
    return counts if len(counts) == len(items.sizes) else [sum(counts) // len(items.sizes)] * len(items.sizes)


def _sounds(config: Any, sounds: list[int], generator: torch.Generator) -> DrawnItems:
    """Sounds of some frames, padded with zeros to 96."""
    values = torch.randn(len(sounds), 16, 96, generator=generator)
    frames = torch.tensor(sounds, dtype=torch.int64)
    arguments, sizes = {}, np.array([(1, 160 * count) for count in sounds], np.int64)
    names: tuple[str, ...] = ("raw_rows", "samples")
    if sounds:
        arguments["input_features"] = values
    if config.model_type != "voxtral":
        mask = torch.arange(96) < frames[:, None]
        values = values * mask[:, None]
        arguments = {"input_features": values, "feature_attention_mask": mask.long()} if sounds else {}
        sizes, names = np.insert(sizes.reshape(-1, 2), 2, sounds, axis=1), (*names, "feature_attention_mask")
    return DrawnItems("audio", arguments, values.flatten(1), sizes.reshape(-1, len(names)), names)


def _pictures(model_type: str, pictures: list[tuple[int, int]], generator: torch.Generator) -> DrawnItems:
    if model_type in GRIDS:
        sizes = np.array(pictures, np.int64).reshape(-1, 2)
        values = torch.randn(int(sizes.prod(1).sum()), 3 * 2 * 49, generator=generator)
        grids = torch.from_numpy(np.insert(sizes, 0, 1, axis=1))
        arguments = {"pixel_values": values, "image_grid_thw": grids} if pictures else {}
        return DrawnItems("image", arguments, values, sizes, ("grid_h", "grid_w"))
    if model_type in MANY:
        shapes = 7 * np.array(pictures, np.int64).reshape(-1, 2)
        each = [torch.randn(3, *shape, generator=generator) for shape in shapes.tolist()]
        arguments = {"pixel_values": _padded(each), "image_sizes": torch.from_numpy(shapes)} if pictures else {}
        values = torch.cat([torch.zeros(0, 3), *(one.flatten(1).T for one in each)])
        sizes = np.concatenate([shapes.prod(1)[:, None], shapes, shapes], axis=1)
        return DrawnItems(
            "image", arguments, values, sizes, ("raw_rows", "image_sizes[0]", "image_sizes[1]", "tile[0]", "tile[1]")
        )
    tiles = [3 if model_type in SEVERAL else 1] * len(pictures)
    pixels = torch.randn(sum(tiles), 3, 28, 28, generator=generator)
    sizes = np.array([[count, 28, 28 * (count - 1)] for count in tiles], np.int64).reshape(-1, 3)
    arguments = {"pixel_values": pixels} if pictures else {}
    if pictures and model_type in SEVERAL:
        stacked = pixels.unflatten(0, (len(pictures), 3))
        arguments = {"pixel_values": stacked, "image_sizes": torch.from_numpy(sizes[:, 1:])}
    if pictures and model_type in BATCHED:
        arguments = {"pixel_values": pixels[None]}
    names = ("image_sizes[0]", "image_sizes[1]") if model_type in SEVERAL else ("h", "w")
    return DrawnItems("image", arguments, pixels.flatten(1), sizes, ("tiles", *names))


def _padded(pictures: list[Tensor]) -> Tensor:
    most = torch.tensor([picture.shape for picture in pictures]).amax(0).tolist()
    padded = torch.zeros(len(pictures), *most)
    for place, picture in zip(padded, pictures, strict=True):
        place[:, : picture.shape[1], : picture.shape[2]] = picture
    return padded


class InDouble(TorchFunctionMode):
    """Computes in fp64 where code asks for fp32."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def in_double(model: Any, parts: MultimodalModel) -> Iterator[None]:
    """Compute with both in fp64."""
    model.double(), parts.double()
    llm: Any = parts.modules_by_name["llm"]
    with InDouble(), llm.measured():  # torch's operator of experts takes no fp64
        yield


def one_by_one(model: Any, samples: Sequence[MediaSample]) -> Tensor:
    """Return transformers' own logits, sample by sample."""
    base = inspect.signature(type(model.model).forward).parameters
    logits = []
    for sample in samples:
        types = (sample.ids == getattr(model.config, "image_token_id", -1)).int()[None]
        if model.config.model_type == "paligemma":  # of the rows that are predicted, which see no later ones
            types = (torch.arange(len(sample.ids)) >= len(sample.ids) - LEARNT).int()[None]
        extra = {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in base}
        extra["attention_mask"] = torch.ones_like(types)
        with torch.no_grad():
            logits.append(model(input_ids=sample.ids[None], use_cache=False, **sample.given, **extra).logits[0])
    return torch.cat(logits)


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference over the largest number wanted."""
    return float((found - wanted).abs().max() / wanted.abs().max())
