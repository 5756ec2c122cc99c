"""Folders as people have them on their discs: Hugging Face models and tokenizers, with tiny sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LLAMA_3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
)
"""Special tokens of Llama 3, the first ten of 256."""
QWEN_3 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
"""Special tokens of Qwen 3, some of them."""


def tokenizer(folder: Path, specials: Sequence[str], **said: Any) -> Path:
    """A byte-level BPE tokenizer without merges, and what its ``tokenizer_config.json`` says, if anything."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    made.save(str(folder / "tokenizer.json"))
    if said:
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder / "tokenizer.json"


def models_of_readme(folder: Path) -> None:
    """``siglip2-so400m``, ``whisper-large-v3`` and ``llama-3-8b`` with the structure of the real ones."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Siglip2Config,
        Siglip2Model,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"patch_size": 16, "num_patches": 256}
    text = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = Siglip2Model(
        Siglip2Config(vision_config=vision, text_config=text | {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0})
    )
    whole.save_pretrained(folder / "siglip2-so400m")
    fields = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    fields |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "vocab_size": 30}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    audio = WhisperConfig(num_mel_bins=128, **fields, **special)
    WhisperForConditionalGeneration(audio).save_pretrained(folder / "whisper-large-v3")
    said = {"bos_token": LLAMA_3[0], "eos_token": LLAMA_3[1]}
    tokenizer(folder / "llama-3-8b", LLAMA_3, **said)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    llama = LlamaConfig(vocab_size=256 + len(LLAMA_3), **sizes, rope_parameters=rope, initializer_range=0.1)
    LlamaForCausalLM(llama).save_pretrained(folder / "llama-3-8b")
