"""The language model inside a transformers composite."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import NO_ROWS
from hetero_strategy.model.causal_lm import LMOutput
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.zoo.hf import check_folder, make_model
from hetero_strategy.zoo.hf_decoder import HFCausalLM
from hetero_strategy.zoo.hf_positions import HFTextKind
from hetero_strategy.zoo.hf_stand_ins import StandIn


class HFComposedLM(HFCausalLM):
    """The language model of a composite, which may add rows of encoders behind its first blocks, too.

    Args:
        model_class: transformers' class of the composite.
        config: its config.
        path: where its language model is.
        checkpoint: local folder with the weights.
        deepstack: number of blocks behind which an encoder's rows are added. Rows at the edge have ``1 + deepstack``
            parts: one for the slots, and one for each of these blocks.
        **options: further options of :class:`HFCausalLM`.
    """

    _added: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def __init__(
        self,
        model_class: type,
        config: Any,
        *,
        path: str,
        checkpoint: str | Path | None = None,
        deepstack: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(model_class, copy.deepcopy(config), path=path, checkpoint=checkpoint, **options)
        keep_only(self.model, (path, self.head_path), loose=False)
        self.deepstack, self.first_blocks = deepstack, max(1, deepstack)
        self.width = self.hidden_width * (1 + deepstack)
        causal = self.kind.rules  # of each window; none without windows
        self.kind = HFTextKind(model_class.__name__, config.to_dict(), self.windows)
        self.kind.rules = {**(self.kind.rules or causal)}

    @override
    def forward(
        self,
        inputs: SequenceInputs,
        rows: Mapping[Hashable, Tensor] = NO_ROWS,
        hidden: Tensor | None = None,
        *,
        keep_logits: bool = False,
    ) -> LMOutput | Tensor:
        if self.deepstack and rows:
            index = torch.cat([inputs.slots[source] for source in rows])
            parts = torch.cat([*rows.values()]).split(self.hidden_width, dim=1)
            self._added = index, parts[1:]
            rows = {source: part[:, : self.hidden_width] for source, part in rows.items()}
        try:
            return super().forward(inputs, rows, hidden, keep_logits=keep_logits)
        finally:
            self._added = None

    @override
    def transform(self, hidden: Tensor, inputs: SequenceInputs) -> Tensor:
        numbers = [int(fqn.rpartition(".")[2]) for fqn in self.blocks()]
        hidden = super().transform(hidden, inputs)
        added, self._added = self._added, None  # the head runs no block
        if added is not None and max(numbers) < self.deepstack:  # what the last block gave is the stage's result
            hidden = hidden.index_add(0, added[0], added[1][max(numbers)].to(hidden.dtype))
        return hidden

    @override
    def _with(self, blocks: Mapping[str, nn.Module], parts: Mapping[str, nn.Module]) -> nn.Module:
        if self._added is not None:
            index, rows = self._added
            behind = {str(number): part for number, part in enumerate(rows)}
            blocks = {key: Adding(part, index, behind[key]) if key in behind else part for key, part in blocks.items()}
        return super()._with(blocks, parts)


class Adding(StandIn):
    """A block's stand-in that runs it and adds rows to some of its rows ``[1, T, width]``."""

    def __init__(self, block: nn.Module, index: Tensor, rows: Tensor) -> None:
        super().__init__(like=block)
        self.__dict__.update(index=index, added=rows)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__dict__["like"](*args, **kwargs)
        first = result if isinstance(result, Tensor) else result[0]
        first = first.index_add(1, self.__dict__["index"], self.__dict__["added"][None].to(first.dtype))
        return first if isinstance(result, Tensor) else (first, *result[1:])


def sections(content: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts that a config.json describes apart from each other; of a single model none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(content.get("model_type"))
    known = CONFIG_MAPPING[kind].sub_configs if kind in CONFIG_MAPPING else ()
    return [name for name in known if content.get(name)]


def composite_class(who: str, checkpoint: str | Path) -> tuple[Any, Any]:
    """Return transformers' class and config of a composite's folder; refuse folders of any other model.

    Of a folder that has a composite beside other models, such as Qwen2.5-Omni's thinker beside its talker, they are
    those of the composite.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content, where = check_folder(who, checkpoint), f"{who}: {checkpoint}/config.json"
    names = content.get("architectures") or [None]
    parts = sections(content)
    classes: Any = transformers.AutoModelForMultimodalLM._model_mapping
    try:
        config = CONFIG_MAPPING[content["model_type"]].from_dict(content) if parts else None
    except Exception as fault:  # transformers raises several kinds
        raise ModelError(f"{where}: {' '.join(str(fault).split())}") from None
    for name in parts:
        part = getattr(config, name)
        if part.sub_configs and type(part) in classes:
            warnings.warn(f"{where}: {name} alone is built; an export copies the other parts", stacklevel=3)
            return classes[type(part)], part
    model_class = getattr(transformers, str(names[0]), None)
    if model_class is None:
        raise ModelError(f"{where} has architectures={names}, of which transformers has no class; correct it")
    if config is None:
        raise ModelError(
            f"{where} has neither text_config nor a section for pictures or sound, so it is of no composite; a language"
            " model alone is read by hf_causal_lm(checkpoint=...), a tower by hf_encoder(...)"
        )
    return model_class, config


def whole_of(model_class: Any, config: Any) -> Any:
    """Make a composite on the meta device with a config of its own, in which each module names its attention."""
    with torch.device("meta"):
        return make_model(model_class, copy.deepcopy(config))


def decoder_path(who: str, whole: Any) -> str:
    """Return the FQN of a composite's language model; refuse composites whose media are no rows in its sequence."""
    name, base = type(whole).__name__, whole.base_model
    if whole.config.is_encoder_decoder:
        raise ModelError(
            f"{who}: {name} is an encoder-decoder: its decoder reads the encoder's output by cross-attention, and"
            " here rows stand in the sequence; take a model with image tokens, such as qwen2_5_vl"
        )
    if hasattr(base, "get_image_tokens"):
        raise ModelError(
            f"{who}: pictures of {name} are tokens of its vocabulary, which no encoder's rows are; take a model"
            " with image tokens that rows replace, such as qwen2_5_vl"
        )
    decoder = whole.get_decoder()
    takes = inspect.signature(type(decoder).forward).parameters
    if cross := [one for one in takes if one.startswith(("cross_attention", "image_", "vision_", "encoder_"))]:
        raise ModelError(
            f"{who}: pictures go into the language model of {name} by cross-attention ({cross[0]}), and here rows"
            " stand in the sequence; take a model with image tokens, such as qwen2_5_vl"
        )
    return next(fqn for fqn, part in whole.named_modules() if part is decoder)


def keep_only(model: Any, paths: tuple[str, ...], loose: bool = True) -> None:
    """Take all parts out of a model but those at some FQNs and what holds them.

    Args:
        loose: keep parameters that the holders themselves have.
    """
    holders = {".".join(path.split(".")[:depth]) for path in paths for depth in range(path.count(".") + 1)}
    for holder in holders:
        part = model.get_submodule(holder)
        for name in list(part._modules):
            fqn = f"{holder}.{name}".lstrip(".")
            if fqn not in holders and fqn not in paths:
                del part._modules[name]
        if not loose:
            part._parameters.clear()
            if holder:
                part._init_weights = _nothing


def _nothing(module: nn.Module) -> None:
    """Initialise no parameter of a module whose own ones have gone."""
