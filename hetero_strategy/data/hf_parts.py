"""Make transformers' own processors from the files of a local folder, and tell apart what they make of an item."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from hetero_strategy.data.chat_template import read_json
from hetero_strategy.errors import ConfigError, require

FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of a folder that describe its processor, in the order in which transformers reads them."""
TILE = {"image": 3, "audio": 2}
"""Dimensions of a tile: channels, height and width; or mel bands and frames."""
MOST_NUMBERS = 16
"""Most numbers of one name that a processor may give the model besides an item's values."""
_TOKENIZERS = Lock()
"""A lock, because several threads may not use a tokenizer at once."""


class Values(NamedTuple):
    """The values that a processor makes of one item."""

    array: np.ndarray
    """Rows, ``[R, feature]``; or tiles, ``[..., channels, height, width]`` or ``[..., bands, frames]``. A waveform is a
    tile of one band."""
    tile: int
    """Number of dimensions of a row or tile."""
    columns: dict[str, tuple[int, ...]]
    """Name -> numbers that the model is given with the values."""


def parts_of(folder: Path, kind: str) -> tuple[Any, Any]:
    """Make the processor of a folder's items, and its processor of texts with items; None if it has none."""
    import transformers

    def part(name: str) -> Any:
        if "video" in name:
            return None
        auto = {"image_processor": "AutoImageProcessor", "tokenizer": "AutoTokenizer"}.get(name, "AutoFeatureExtractor")
        options = {"backend": "pil"} if name == "image_processor" else {}
        return getattr(transformers, auto).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )

    try:
        alone = part("image_processor" if kind == "image" else "feature_extractor")
        whole = _whole(folder, part, kind, alone) if (folder / "tokenizer.json").is_file() else None
    except Exception as error:
        reason = " ".join(str(error).split())
        for package in ("torchvision", "num2words"):
            if package in reason.lower():
                require(package, "vision", f"the processor in {folder}, which transformers has only with {package},")
        raise ConfigError(f"{folder}: transformers cannot make its processor: {reason}") from None
    return alone, whole


def _whole(folder: Path, part: Callable[[str], Any], kind: str, alone: Any) -> Any:
    """Make the processor of texts with items, without its part for videos, which needs torchvision."""
    import transformers
    from transformers.models.auto import processing_auto

    names = [read_json(folder / file).get("processor_class") for file in (*FILES, "tokenizer_config.json")]
    known: Any = processing_auto
    names.append(known.PROCESSOR_MAPPING_NAMES.get(read_json(folder / "config.json").get("model_type")))
    name = next(filter(None, names), None)
    family = None if name is None else getattr(transformers, name, None)
    if family is None:
        return None

    class Processor(family):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    own = "image_processor" if kind == "image" else "feature_extractor"
    parts = [alone if name == own else part(name) for name in family.get_attributes()]
    parts = [_locked(one) if isinstance(one, transformers.PreTrainedTokenizerBase) else one for one in parts]
    whole = Processor.from_args_and_dict(parts, family.get_processor_dict(folder, local_files_only=True)[0])
    return whole if getattr(whole, f"{kind}_token", None) is not None else None


def _locked(tokenizer: Any) -> Any:
    """Let one thread at a time tokenise."""
    family = type(tokenizer)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        with _TOKENIZERS:
            return family.__call__(self, *arguments, **options)

    tokenizer.__class__ = type(family.__name__, (family,), {"__call__": call})
    return tokenizer


def rows_together(whole: Any, picture: Any, row: str) -> tuple[int, int] | None:
    """Return how often a processor writes the row's token for a picture alone and for one beside another in its sample.

    It is None if both are alike, or if the processor takes no nested lists of pictures.
    """

    def rows(count: int) -> int:
        own, text = copy(whole), whole.image_token * count
        output = own(text=[text], images=[[picture] * count], return_text_replacement_offsets=True)
        return output["text_replacement_offsets"][0][0]["replacement"].count(row)

    try:
        alone, in_pair = rows(1), rows(2)
    except Exception:
        return None
    return None if alone == in_pair else (alone, in_pair)


def without_values(alone: Any, whole: Any) -> tuple[Any, Any]:
    """Return the parts for blank pictures: of each step only the shapes are computed; other kinds as they are."""
    from transformers.image_processing_backends import PilBackend
    from transformers.image_utils import PILImageResampling

    if not isinstance(alone, PilBackend):
        return alone, whole

    class Zeros(PilBackend):  # follows the family's class, whose methods call these
        def process_image(self, image: Any, *_: Any, **options: Any) -> np.ndarray:
            return np.broadcast_to(np.uint8(0), (3, image.height, image.width))

        def resize(
            self, image: np.ndarray, size: Any, resample: Any = None, reducing_gap: Any = None, **options: Any
        ) -> np.ndarray:
            one = super().resize(image[:1], size, PILImageResampling.NEAREST, **options)
            return np.broadcast_to(one, (len(image), *one.shape[1:]))

        def rescale(self, image: np.ndarray, *_: Any, **options: Any) -> np.ndarray:
            return np.broadcast_to(np.float32(0), image.shape)

        normalize = rescale

    alone, whole = copy(alone), copy(whole)
    alone.__class__ = type(type(alone).__name__, (type(alone), Zeros), {})
    if whole is not None:
        whole.image_processor = alone
    return alone, whole


def split(arrays: dict[str, np.ndarray], kind: str) -> Values:
    """Tell the values of one item from the numbers beside them.

    A mask over rows takes padding out; any other mask becomes the number of its ones.

    Args:
        kind: ``image`` or ``audio``.
    """
    floats = [name for name, array in arrays.items() if array.dtype.kind == "f"]
    if not floats:
        raise ConfigError(f"HFProcessor: no values among the processor's outputs {', '.join(arrays)}")
    main = max(floats, key=lambda name: arrays[name].size)
    values, columns = arrays.pop(main), dict[str, tuple[int, ...]]()
    is_waveform = kind == "audio" and values.ndim == 2 and len(values) == 1
    for name, array in arrays.items():
        if "mask" in name and array.ndim < values.ndim and array.shape == values.shape[: array.ndim]:
            values = values[array.astype(bool)]
        elif "mask" in name:
            ones = int(array.sum())
            if not array.reshape(-1)[:ones].all():
                raise ConfigError(
                    f"HFProcessor: {name} hides parts of {main} that are not at its end; this is not built"
                )
            columns[name] = (ones,)
        elif array.dtype.kind in "iu" and array.size <= MOST_NUMBERS:
            columns[name] = tuple(array.reshape(-1).tolist())
        else:
            raise ConfigError(
                f"HFProcessor: besides {main} the processor makes {name} {list(array.shape)}, which nothing reads; at"
                f" most {MOST_NUMBERS} whole numbers of one name have a place in an item's sizes"
            )
    tile = TILE[kind]
    return Values(values, tile if values.ndim > tile or is_waveform else 1, columns)
