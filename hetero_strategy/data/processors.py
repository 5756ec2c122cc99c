"""The processor of each encoder and generator: what the module says of it, and what is said of reading its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from typing_extensions import get_protocol_members

from hetero_strategy.data.media import AudioProcessor, ImageProcessor, Media, Processor, TargetProcessor
from hetero_strategy.data.targets import ImageTarget
from hetero_strategy.errors import ConfigError, hint
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.encoder import Encoder
from hetero_strategy.model.generator import Generator
from hetero_strategy.model.inputs import ImagePatches, MelFrames, RawRows, TargetPatches
from hetero_strategy.model.multimodal import MultimodalModel

PROCESSORS: dict[type[RawRows], Any] = {
    ImagePatches: ImageProcessor, MelFrames: AudioProcessor, TargetPatches: ImageTarget,
}  # fmt: skip
"""What a module's weights say -> the processor that it is said of."""


def processors_of(model: MultimodalModel, given: Mapping[str, Media | Mapping[str, Any]]) -> dict[str, Any]:
    """Return the processor of every encoder, generator and other module that reads files, in the model's order.

    Args:
        model: with or without values.
        given: module -> fields of its own processor, such as ``{"max_patches": 1024}``, or another processor.

    Raises:
        ConfigError: naming the module and the field: there is no such module or field, a module has no processor, its
            weights say the field already, an encoder is given a generator's processor or the reverse, or a processor
            lacks a method.
    """
    modules = {name: module for name, module in model.modules_by_name.items() if not module.kind.samplewise}
    for name in given:
        if name not in modules:
            raise ConfigError(
                f"processors names '{name}', but the encoders and generators of the model are"
                f" {', '.join(modules) or 'none'}; use one of these names"
            )
    return {
        name: _processor(name, module, given.get(name, {}))
        for name, module in modules.items()
        if name in given or not module.kind.has_own_units
    }


def _processor(name: str, module: Adapter, given: Media | Mapping[str, Any]) -> Media:
    made: Any = _own(name, module, given) if isinstance(given, Mapping) else given
    if isinstance(module, (Encoder, Generator)) and isinstance(made, TargetProcessor) != isinstance(module, Generator):
        raise ConfigError(
            f"processors.{name} is a {type(made).__name__}, but the module is a {type(module).__name__}; encoders take"
            " a processor such as ImageProcessor, generators one such as ImageTarget"
        )
    needed = get_protocol_members(Processor if isinstance(module, Encoder) else Media)
    if lacking := sorted(member for member in needed if not hasattr(made, member)):
        raise ConfigError(
            f"processor of module '{name}': {type(made).__name__} lacks {', '.join(lacking)}; docs/your_module.md lists"
            " what a processor has"
        )
    return made


def _own(name: str, module: Adapter, given: Mapping[str, Any]) -> Any:
    """The module's processor with the given fields."""
    own: Any = module.processor
    if own is None:
        raise ConfigError(
            f"module '{name}' has no processor, so nobody knows how its files are read; pass processor= to Encoder, or"
            f" processors={{'{name}': ImageProcessor(...)}} to the data module"
        )
    said: dict[str, Any] = {}
    if type(own) in PROCESSORS:
        said = {field: value for field, value in asdict(own).items() if value is not None}
        own = PROCESSORS[type(own)](**said)
    known = [field.name for field in fields(own)] if is_dataclass(own) else []
    for field, value in given.items():
        if field in said and value != said[field]:
            raise ConfigError(
                f"processors.{name}: {field} is {value}, but the module has {said[field]}; leave it out here"
            )
        if field not in known:
            raise ConfigError(f"processors.{name}: no field '{field}'; {hint(field, known)}")
    return replace(own, **given) if given else own
