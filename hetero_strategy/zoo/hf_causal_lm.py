"""Language models of transformers by name: of a folder, of fields, or of a composite's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hetero_strategy.errors import ModelError
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.zoo.hf import check_folder, check_no_fields, make_config
from hetero_strategy.zoo.hf_check import checked
from hetero_strategy.zoo.hf_composed import HFComposedLM, composite_class, decoder_path, sections, whole_of
from hetero_strategy.zoo.hf_decoder import HFCausalLM

__all__ = ["HFCausalLM", "hf_causal_lm", "hf_llama", "hf_qwen3"]


def hf_causal_lm(
    *,
    checkpoint: str | Path | None = None,
    model_type: str | None = None,
    part: str | None = None,
    before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    check: bool = True,
    balance_loss: float | None = None,
    router_bias_step: float = 0.0,
    **fields: Any,
) -> HFCausalLM:
    """Build any language model of transformers whose rows pass blocks of attention.

    Args:
        checkpoint: local folder with config.json and safetensors.
        model_type: transformers' name of the model in place of a folder, such as "gemma3_text".
        part: "llm" for the language model of a composite's folder, such as LLaVA's; it is not checked.
        before: change of the rows, as in :class:`CausalLM`.
        check: run a tiny copy of the config at its first use, to see that packed rows are those of transformers' own
            forward, see :mod:`~hetero_strategy.zoo.hf_check`. It takes about a second and is kept on disk.
        balance_loss, router_bias_step: balance of experts, as in :class:`HFCausalLM`.
        **fields: fields of the model's config; they exclude ``checkpoint``.

    Raises:
        ModelError: a field is unknown, the model cannot run on packed rows or fails the check, or the folder belongs to
            no such model.
    """
    options: dict[str, Any] = {"checkpoint": checkpoint, "before": before}
    options |= {"balance_loss": balance_loss, "router_bias_step": router_bias_step}
    if part is not None:
        return _part(part, checkpoint, fields, options)
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    who, kind = "hf_causal_lm", str(model_type)
    if checkpoint is not None:
        content = check_folder(who, checkpoint, quantised=True)  # plain weights under such a config load
        if sections(content) or isinstance(content.get("text_config"), dict):
            raise ModelError(
                f"{who}: {checkpoint}/config.json is of a composite, {content.get('model_type')!r}; hf_composite reads"
                " it, and part='llm' its language model alone"
            )
        kind = model_type or str(content.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"{who}: transformers has no model_type {kind!r}; give a folder or one of its names")
    config = make_config(who, CONFIG_MAPPING[kind], checkpoint, fields)
    classes: Any = AutoModelForCausalLM._model_mapping
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{who}: {kind!r} is an encoder-decoder: its decoder reads the encoder's output by cross-attention; take a"
            " model that is a decoder alone"
        )
    if type(config) not in classes:
        raise ModelError(f"{who}: transformers has no causal language model of model_type {kind!r}")
    model_class = classes[type(config)]
    module = HFCausalLM(model_class, config, **options)
    if check:
        verdict = checked(HFCausalLM, model_class, config)
        verdict.require_packing(who, model_class)
        module.context_parallel = module.context_parallel and verdict.context_parallel
    return module


def hf_llama(**given: Any) -> HFCausalLM:
    """Build transformers' Llama; arguments as in :func:`hf_causal_lm`, with fields of ``LlamaConfig``."""
    return hf_causal_lm(model_type="llama", **given)


def hf_qwen3(**given: Any) -> HFCausalLM:
    """Build transformers' dense Qwen3; arguments as in :func:`hf_causal_lm`, with fields of ``Qwen3Config``."""
    return hf_causal_lm(model_type="qwen3", **given)


def _part(
    part: str, checkpoint: str | Path | None, fields: Mapping[str, Any], options: Mapping[str, Any]
) -> HFComposedLM:
    """Build the language model of a composite's folder."""
    if part != "llm" or checkpoint is None:
        raise ModelError(f"hf_causal_lm: part={part!r}; give part='llm' with checkpoint=, the folder of a composite")
    check_no_fields("hf_causal_lm", fields)
    model_class, config = composite_class("hf_causal_lm", checkpoint)
    path = decoder_path("hf_causal_lm", whole_of(model_class, config))
    return HFComposedLM(model_class, config, path=path, **options)
