"""Small models of the digits data, and what is said of reading it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hetero_strategy.data.media import AudioProcessor, ImageProcessor, ImageTarget
from hetero_strategy.model import CausalLM, Encoder, Generator, ModuleKind, MultimodalModel
from hetero_strategy.model.kind import Processor, TargetProcessor
from hetero_strategy.zoo import flow_decoder, hf_llama, siglip2_encoder, whisper_encoder

WIDTH = 16
READING: dict[str, Any] = {"vision": {"max_patches": 128}, "audio": {"sampling_rate": 8000, "max_seconds": 4.0}}
DRAWING: dict[str, Any] = {"vision": {"max_patches": 128}, "draw": {"rows": 2, "max_patches": 16}}


def reader() -> MultimodalModel:
    """Of pictures and recordings."""
    audio = whisper_encoder(
        out_width=WIDTH, d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, num_mel_bins=40
    )
    return MultimodalModel({"vision": _vision(), "audio": audio, "llm": _llm()})


def drawer() -> MultimodalModel:
    """Of pictures, which it reads and draws."""
    draw = flow_decoder(width=WIDTH, patch_size=2, channels=1, dim=16, n_layers=1)
    return MultimodalModel({"vision": _vision(), "llm": _llm(), "draw": draw})


KINDS: dict[str, ModuleKind] = {"vision": Encoder.kind, "audio": Encoder.kind, "draw": Generator.kind}


def kinds_of(modules: Iterable[str]) -> dict[str, ModuleKind]:
    """By name; all others are language models."""
    return {name: KINDS.get(name, CausalLM.kind) for name in modules}


def _vision() -> Encoder:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return siglip2_encoder(out_width=WIDTH, merge=2, patch_size=8, num_channels=1, num_patches=16, **sizes)


def _llm() -> Any:
    sizes = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return hf_llama(vocab_size=512, hidden_size=WIDTH, **sizes)


def digit_processors() -> dict[str, Processor]:
    """Processors that suit this data: at most 6 rows for an image and 24 for a recording."""
    return {
        "vision": ImageProcessor(patch_size=8, merge=2, channels=1, max_patches=128, mean=0.5, std=0.5),
        "audio": AudioProcessor(sampling_rate=8000, n_mels=40, hop_length=160, n_fft=400, max_seconds=4.0),
    }


def draw_processors() -> dict[str, Processor | TargetProcessor]:
    """Processors that suit the data set to draw: 16 patches for a drawing."""
    return {
        "vision": ImageProcessor(patch_size=8, merge=2, channels=1, max_patches=128, mean=0.5, std=0.5),
        "draw": ImageTarget(rows=2, patch_size=2, channels=1, max_patches=16, mean=0.5, std=0.5),
    }
