"""A whole transformers composite from its folder: an encoder for each kind of media, and its language model.

No family is named here. The decoder and the towers are those that the class itself names, ``get_image_features`` and
``get_audio_features`` turn an encoder's values into rows, and whatever of the base is no decoder is an encoder's.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hetero_strategy.data.hf_processor import HFProcessor
from hetero_strategy.errors import ModelError
from hetero_strategy.model.encoder import Encoder
from hetero_strategy.model.hf_folder import read_config
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from hetero_strategy.zoo.hf_check import checked
from hetero_strategy.zoo.hf_composed import HFComposedLM, composite_class, decoder_path, keep_only, sections, whole_of
from hetero_strategy.zoo.hf_decoder import HFCausalLM
from hetero_strategy.zoo.hf_features import HFFeatures
from hetero_strategy.zoo.hf_frame_tower import FrameTower
from hetero_strategy.zoo.hf_grid_tower import GridTower

MEDIA = {"vision": "image", "audio": "audio"}
"""Name of an encoder -> kind of its media."""
GRID = "image_grid_thw"
"""transformers' name of the sizes (t, h, w) of items whose patches lie end to end."""
FRAMES = "feature_attention_mask"
"""transformers' name of the mask of frames; sizes have the number of its ones."""


def hf_composite(checkpoint: str | Path, *, check: bool = True, **options: Any) -> dict[str, Any]:
    """Build the modules of a whole transformers composite, for ``MultimodalModel(**hf_composite("models/..."))``.

    Args:
        checkpoint: local folder with config.json, safetensors, and settings of processors, which encoders then have.
        check: check the class of the language model alone, if transformers has one, as in :func:`hf_causal_lm`.
        **options: ``before``, ``balance_loss`` and ``router_bias_step`` of the language model, as in
            :class:`HFCausalLM`.

    Returns:
        ``modules``: "vision", "audio" or both, and "llm"; ``edges``: from each encoder to "llm".

    Raises:
        ModelError: the folder's class cannot be split into encoders and a language model, or fails the check.
    """
    model_class, config = composite_class("hf_composite", checkpoint)
    whole = whole_of(model_class, config)
    path = decoder_path("hf_composite", whole)
    encoders = {name: kind for name, kind in MEDIA.items() if has_media(whole, kind)}
    if not encoders:
        raise ModelError(
            f"hf_composite: {model_class.__name__} has neither get_image_features nor get_audio_features, which make"
            " rows of its media; its language model alone is read by hf_causal_lm(checkpoint=..., part='llm')"
        )
    modules: dict[str, Any] = {}
    for name, kind in encoders.items():
        processor = _processor(Path(checkpoint), kind)
        if modules:  # the first encoder takes the parts of the model that is there already
            whole = whole_of(model_class, config)
        modules[name] = encoder_of(whole, kind, checkpoint=checkpoint, processor=processor)
    width = config.get_text_config().hidden_size
    deepstack = max(module.width for module in modules.values()) // width - 1
    modules["llm"] = llm = HFComposedLM(
        model_class, config, path=path, checkpoint=checkpoint, deepstack=deepstack, **options
    )
    if check:
        check_alone(llm, config.get_text_config())
    return {"modules": modules, "edges": [(name, "llm") for name in encoders]}


def check_alone(llm: HFComposedLM, text: Any) -> None:
    """Check the class that a composite's language model has alone, and what it says of context parallelism."""
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM._model_mapping
    alone = classes.get(type(text), None)
    if alone is not None and alone.config_class is type(text):
        verdict = checked(HFCausalLM, alone, text)
        verdict.require_packing(f"hf_composite: {llm.architecture}", alone)
        llm.context_parallel = llm.context_parallel and verdict.context_parallel


def hf_folder(checkpoint: str | Path, **options: Any) -> dict[str, Any]:
    """Build the modules of any local folder of transformers: a composite's by name, or one language model, "llm".

    Args:
        **options: options of the language model, as in :func:`hf_composite`.

    Raises:
        ModelError: as :func:`hf_composite` and :func:`hf_causal_lm` do.
    """
    if sections(read_config(checkpoint)):
        return dict(hf_composite(checkpoint, **options)["modules"])
    return {"llm": hf_causal_lm(checkpoint=checkpoint, **options)}


def has_media(whole: Any, kind: str) -> bool:
    """Return whether a composite has a tower for a kind of media, and makes rows with it."""
    base = whole.base_model
    return hasattr(base, f"get_{kind}_features") and whole.get_encoder(modality=kind) not in (None, whole, base)


def encoder_of(whole: Any, kind: str, *, checkpoint: str | Path | None = None, processor: Any = None) -> Encoder:
    """Build a composite's encoder of one kind of media, with the projector.

    Args:
        whole: the composite on the meta device; all other parts are taken out of it.
        processor: processor of files; its ``columns`` name the numbers in the sizes of items.
    """
    base = whole.base_model
    tower = whole.get_encoder(modality=kind)
    tower_path = next(fqn for fqn, part in whole.named_modules() if part is tower)
    others = [other for other in MEDIA.values() if other != kind and has_media(whole, other)]
    absent = [whole.get_decoder(), *(whole.get_encoder(modality=other) for other in others)]
    own = [name for name, part in base.named_children() if not any(part is one for one in absent)]
    owner = next(fqn for fqn, part in whole.named_modules() if part is base)
    keep_only(whole, tuple(f"{owner}.{name}".lstrip(".") for name in own))
    columns = getattr(processor, "columns", {})
    takes = inspect.signature(type(tower).forward).parameters
    if "feature_lens" in takes:
        sounds = FrameTower(whole, path=tower_path, checkpoint=checkpoint, grid=columns.get(FRAMES))
        if processor is not None:
            processor = replace(processor, packing_rows=sounds.rows_of_folder()[1])
        return Encoder(sounds, nn.Identity(), width=sounds.width, processor=processor)
    if "grid_thw" in takes:
        deep = bool(getattr(tower.config, "deepstack_visual_indexes", None))
        backbone = GridTower(whole, path=tower_path, deepstack=deep, checkpoint=checkpoint, grid=columns.get(GRID))
        return Encoder(backbone, nn.Identity(), width=backbone.width, processor=processor)
    return HFFeatures(whole, kind, columns=columns, checkpoint=checkpoint, processor=processor)


def _processor(folder: Path, kind: str) -> HFProcessor | None:
    """Return the folder's processor of one kind of media, if it has settings of one."""
    there = any((folder / file).is_file() for file in ("preprocessor_config.json", "processor_config.json"))
    return HFProcessor(str(folder), field=kind, kind=kind) if there else None  # type: ignore[arg-type]
