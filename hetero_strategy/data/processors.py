"""Choose the processor of each encoder and generator: fields come from the module's weights and from the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from typing_extensions import get_protocol_members

from hetero_strategy.data.encoded_rows import EncodedBackbone, EncodedRows
from hetero_strategy.data.media import AudioProcessor, ImageProcessor, ImageTarget
from hetero_strategy.errors import ConfigError, hint
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.encoder import Encoder
from hetero_strategy.model.generator import Generator
from hetero_strategy.model.inputs import ImagePatches, MelFrames, RawRows, TargetPatches
from hetero_strategy.model.kind import Media, Processor, TargetProcessor
from hetero_strategy.model.multimodal import MultimodalModel

PROCESSORS: dict[type[RawRows], Any] = {
    ImagePatches: ImageProcessor, MelFrames: AudioProcessor, TargetPatches: ImageTarget,
}  # fmt: skip
"""Raw rows that a module's weights describe -> class of the processor that makes them."""


def processors_of(model: MultimodalModel, given: Mapping[str, Media | Mapping[str, Any]]) -> dict[str, Any]:
    """Return the processor of every encoder, generator and other module that reads files, in the model's order.

    Args:
        model: the model, with or without values.
        given: module -> fields of its own processor, such as ``{"max_patches": 1024}``, or another processor.
    """
    modules = {name: module for name, module in model.modules_by_name.items() if not module.kind.samplewise}
    for name in given:
        if name not in modules:
            raise ConfigError(
                f"processors names '{name}', but the encoders and generators of the model are"
                f" {', '.join(modules) or 'none'}; use one of these names"
            )
    processors: dict[str, Any] = {
        name: _processor(name, module, given.get(name, {}))
        for name, module in modules.items()
        if name in given or not module.kind.has_own_units
    }
    backbones = {name: getattr(modules[name], "backbone", None) for name in processors}
    encoded = {name: backbone for name, backbone in backbones.items() if isinstance(backbone, EncodedBackbone)}
    return processors | {name: one.reader(name, model.seed, processors[name]) for name, one in encoded.items()}


def check_encoded(processors: Mapping[str, Any]) -> None:
    """Refuse encoded rows from other weights than the model's; this reads all of its weights."""
    for processor in processors.values():
        if isinstance(processor, EncodedRows):
            processor.check_weights()


def _processor(name: str, module: Adapter, given: Media | Mapping[str, Any]) -> Media:
    media: Any = _own(name, module, given) if isinstance(given, Mapping) else given
    if isinstance(module, (Encoder, Generator)) and isinstance(media, TargetProcessor) != isinstance(module, Generator):
        raise ConfigError(
            f"processors.{name} is a {type(media).__name__}, but the module is a {type(module).__name__}; encoders take"
            " a processor such as ImageProcessor, generators one such as ImageTarget"
        )
    needed = get_protocol_members(Processor if isinstance(module, Encoder) else Media)
    if lacking := sorted(member for member in needed if not hasattr(media, member)):
        raise ConfigError(
            f"processor of module '{name}': {type(media).__name__} lacks {', '.join(lacking)}; docs/your_module.md"
            " lists what a processor has"
        )
    return media


def _own(name: str, module: Adapter, given: Mapping[str, Any]) -> Any:
    """Return the module's processor with the ``given`` fields."""
    own: Any = module.processor
    if own is None:
        raise ConfigError(
            f"module '{name}' has no processor, so nobody knows how its files are read; pass processor= to Encoder, or"
            f" processors={{'{name}': ImageProcessor(...)}} to the data module"
        )
    fixed: dict[str, Any] = {}
    if type(own) in PROCESSORS:
        fixed = {field: value for field, value in asdict(own).items() if value is not None}
        own = PROCESSORS[type(own)](**fixed)
    known = [field.name for field in fields(own)] if is_dataclass(own) else []
    for field, value in given.items():
        if field in fixed and value != fixed[field]:
            raise ConfigError(
                f"processors.{name}: {field} is {value}, but the module has {fixed[field]}; leave it out here"
            )
        if field not in known:
            raise ConfigError(f"processors.{name}: no field '{field}'; {hint(field, known)}")
    return replace(own, **given) if given else own
