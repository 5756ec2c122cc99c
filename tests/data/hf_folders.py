"""Folders of transformers' processors with a tokenizer, at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.stock import tokenizer

SPECIALS = (
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<|image_pad|>", "<|video_pad|>"),
    *("<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<IMG_CONTEXT>", "<img>", "</img>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"),
    *("<end_of_utterance>", "<|image|>", "<|video|>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
    *("TILE", "TILE_GLOBAL", "<start_of_turn>", "<end_of_turn>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<imgpad>"),
    *("<|START_OF_IMG_LINE|>",),
)


class Family(NamedTuple):
    images: str
    """Class of the image processor."""
    fields: dict[str, Any]
    texts: str | None = None
    """Class of the processor of texts with images."""
    options: dict[str, Any] | None = None
    named: dict[str, str] | None = None
    """Tokens of the tokenizer by the names that the processor reads."""
    needs: str | None = None
    """Package without which transformers does not have the processor."""


_QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_SMALL = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
_GRID = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]}
_TILES = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6}
_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 40}
FAMILIES = {
    "clip": Family("CLIPImageProcessor", _SMALL),
    "siglip": Family("SiglipImageProcessor", {"size": {"height": 56, "width": 56}}),
    "siglip2": Family("Siglip2ImageProcessor", {"max_num_patches": 40}),
    "llava": Family("CLIPImageProcessor", _SMALL, "LlavaProcessor", _LLAVA),
    "llava_next": Family("LlavaNextImageProcessor", _SMALL | _GRID, "LlavaNextProcessor", _LLAVA),
    "llava_onevision": Family(
        "LlavaOnevisionImageProcessor", {"size": {"height": 56, "width": 56}} | _GRID, "LlavaOnevisionProcessor",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_5_vl": Family("Qwen2VLImageProcessor", _PIXELS, "Qwen2_5_VLProcessor", {}, _QWEN),
    "qwen3_vl": Family("Qwen2VLImageProcessor", _PIXELS | {"patch_size": 16}, "Qwen3VLProcessor", {}, _QWEN),
    "glm4v": Family(
        "Glm4vImageProcessor", {"size": {"shortest_edge": 3136, "longest_edge": 31360}}, "Glm4vProcessor", {},
        {"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "internvl": Family("GotOcr2ImageProcessor", _TILES, "InternVLProcessor", {"image_seq_length": 4}),
    "gemma3": Family(
        "Gemma3ImageProcessor", {"size": {"height": 56, "width": 56}}, "Gemma3Processor", {"image_seq_length": 4},
        {"image_token": "<image_soft_token>"},
    ),
    "idefics3": Family(
        "Idefics3ImageProcessor", {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}},
        "Idefics3Processor", {"image_seq_len": 4},
    ),
    "paligemma": Family(
        "SiglipImageProcessor", {"size": {"height": 56, "width": 56}, "image_seq_length": 16}, "PaliGemmaProcessor", {}
    ),
    "pixtral": Family(
        "PixtralImageProcessor", {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        "PixtralProcessor", {"patch_size": 14}, needs="torchvision",
    ),
    "smolvlm": Family(
        "SmolVLMImageProcessor", {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}},
        "SmolVLMProcessor", {"image_seq_len": 4}, needs="num2words",
    ),
    "got_ocr2": Family(
        "GotOcr2ImageProcessor", {"size": {"height": 56, "width": 56}}, "GotOcr2Processor", {},
        {"image_token": "<imgpad>"},
    ),
    "cohere2_vision": Family(
        "Cohere2VisionImageProcessor", {"size": {"height": 56, "width": 56}, "max_patches": 6, "patch_size": 2},
        "Cohere2VisionProcessor", {},
        {"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"}
        | {"img_line_break_token": "<|START_OF_IMG_LINE|>"}, needs="torchvision",
    ),
    "aya_vision": Family("GotOcr2ImageProcessor", _TILES, "AyaVisionProcessor", {"patch_size": 14, "img_size": 56}),
}  # fmt: skip
NAMED = {
    "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>", "video_token": "<video>",
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "start_image_token": "<img>",
    "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
}  # fmt: skip


def made(folder: Path, name: str, **config: Any) -> Path:
    """A folder with the processor of a family, and with ``config`` as its config.json."""
    family, folder = FAMILIES[name], folder / name
    folder.mkdir(exist_ok=True)
    content: dict[str, Any] = {"image_processor_type": family.images, **family.fields}
    if family.texts is not None:
        rest = {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": family.texts}
        extra = NAMED | (family.named or {})
        tokenizer(
            folder, SPECIALS, **rest, **{name: extra[name] for name in list(NAMED)[:3]}, extra_special_tokens=extra
        )
        content["processor_class"] = family.texts
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": family.texts, **(family.options or {})})
        )
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
