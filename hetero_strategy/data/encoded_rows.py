"""Store rows of a frozen encoder's backbone: encoded once, kept in a folder, and read in place of media files.

``python -m recipes.encode`` writes the folder; :func:`encoded` makes an encoder that reads it and whose only part is a
projector. The folder holds files ``rows-*.safetensors``. Each has the rows of some items end to end. Its metadata are
an index of every item (a digest of its media file's content, the number and the checksum of its rows) and the
fingerprint: everything that rows depend on besides the media file. A file gets its name only when it is complete, so a
killed job continues after the files it has written.
"""

from __future__ import annotations

import copy
import hashlib
import json
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from typing_extensions import override

from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.model.encoder import Backbone, Encoder
from hetero_strategy.model.hf_folder import TensorFolder
from hetero_strategy.model.inputs import EncoderInputs, Packing
from hetero_strategy.model.kind import Processor, Sizes
from hetero_strategy.model.materialize import initial_units

FORMAT = 1
"""A part of the fingerprint, increased whenever a file or a digest changes meaning."""
RECORD = np.dtype([("digest", "S32"), ("offset", "<u8"), ("file", "<u4"), ("rows", "<u4"), ("checksum", "<u4")])
AGAIN = "run python -m recipes.encode with the options of this run"
Item = tuple[str, int, int]
"""An item: (digest of a media file, number of its rows, CRC-32 of their bytes)."""


def digest_of(data: Any) -> str:
    """Return 128 bits of a hash of bytes, in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def backbone_tensors(encoder: nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters and buffers of an encoder's backbone under their names in the encoder."""
    tensors = (*encoder.named_parameters(), *encoder.named_buffers())
    return [(name, tensor) for name, tensor in tensors if name.startswith("backbone.")]


def weights_digest(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str:
    """Return a hash of parameters and buffers as a backbone computes with them in ``dtype``."""
    digests = {}
    for name, value in tensors:
        value = (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()
        digests[name] = digest_of(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest_of(json.dumps(digests, sort_keys=True).encode())


def fingerprint(encoder: Encoder, processor: Processor) -> dict[str, Any]:
    """Return everything that the rows of an encoder's backbone depend on, except weights and dtype."""
    if option := next((name for name in ("before", "after") if getattr(encoder, name) is not None), ""):
        raise ConfigError(f"encoded rows: the encoder has {option}=, which may read values or sizes; leave it out")
    if (token := getattr(processor, "placeholder", None)) is not None:
        raise ConfigError(
            f"encoded rows: texts have what the processor writes for an item, such as {token}, and stored rows do not"
            " say what; give the processor output_rows=, or leave the backbone in the model"
        )
    backbone, weights = encoder.meta_copy().backbone, encoder.hf_weights()
    config = {} if weights is None else dict(weights.config)
    for said_elsewhere in ("dtype", "transformers_version"):
        config.pop(said_elsewhere, None)
    structure = f"{backbone!r} {json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__)}"
    settings = {f"processor.{name}": value for name, value in processor.settings().items()}
    fields = {"format": FORMAT, "backbone": type(backbone).__name__, "structure": digest_of(structure.encode())}
    return json.loads(json.dumps(fields | settings))  # as read back: JSON has no tuples


def check_fingerprint(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse rows whose fingerprint differs from the wanted entries."""
    odd = [f"{key} is {stored.get(key)!r} there and {v!r} here" for key, v in wanted.items() if stored.get(key) != v]
    if odd:
        raise ConfigError(f"{folder} holds rows of another encoder: {', '.join(odd)}; {AGAIN}, in another folder")


def write_rows(folder: Path, items: Sequence[Item], rows: Tensor, found: Mapping[str, Any]) -> None:
    """Write rows of some items, end to end on the host, to a new file of a folder, which is made if missing.

    Args:
        found: fingerprint with ``weights``, ``dtype`` and ``width``.
    """
    path = folder / f"rows-{uuid.uuid4().hex}.safetensors"
    temporary = path.with_suffix(".tmp")
    index = json.dumps([found, items])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(save({"rows": rows}, {"said": index, "checksum": str(zlib.crc32(index.encode()))}))
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise DataError(f"{path} cannot be written: {error.strerror}; mend that and {AGAIN} again") from None


def read_items(folder: Path) -> Iterator[tuple[Path, dict[str, Any], list[Item]]]:
    """Yield the path, the fingerprint and the items of each file of rows."""
    for path in sorted(folder.glob("rows-*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata()
            index = metadata["said"]
            if metadata["checksum"] != str(zlib.crc32(index.encode())):
                raise ValueError("its checksum does not hold")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}); delete it and {AGAIN}") from None
        yield (path, *json.loads(index))


@dataclass(frozen=True, eq=False)
class EncodedInputs(EncoderInputs):
    """The rows of a backbone, as inputs of a module that has only its projector."""

    @override
    def narrowed(self, dtype: torch.dtype) -> EncodedInputs:
        if dtype != self.values.dtype:
            there, here = (str(one).removeprefix("torch.") for one in (self.values.dtype, dtype))
            raise DataError(f"encoded rows are {there}, but the module computes in {here}; {AGAIN}, in another folder")
        return self


class EncodedRows:
    """A processor that reads rows of a backbone in place of media files.

    Args:
        processor: processor that made the backbone's inputs.
        folder: folder that ``recipes.encode`` wrote.
        wanted: entries that the fingerprint of its rows must have; None: any.
        weights: function of a dtype that returns the digest of the backbone's weights in it; None: any weights.

    Raises:
        DataError: the folder has no rows, or a file is damaged or cut short.
        ConfigError: the rows come from another backbone or processor; the message names the differences.
    """

    size_names = ("rows",)

    def __init__(
        self,
        processor: Processor,
        folder: str | Path,
        wanted: Mapping[str, Any] | None = None,
        weights: Callable[[torch.dtype], str] | None = None,
    ) -> None:
        self.processor, self.folder, self._weights = processor, Path(folder).absolute(), weights
        self._files, records = list[Path](), list[tuple[Any, ...]]()
        for path, stored, items in read_items(self.folder):
            check_fingerprint(self.folder, stored, wanted or {})
            self._stored, self.feature = stored, int(stored["width"])
            self.tensor_dtype: torch.dtype = getattr(torch, stored["dtype"])
            with path.open("rb") as file:
                offset = 8 + int.from_bytes(file.read(8), "little")  # safetensors begins with its header's size
            for digest, rows, checksum in items:
                records.append((digest, offset, len(self._files), rows, checksum))
                offset += rows * self.feature * self.tensor_dtype.itemsize
            self._files.append(path)
        if not self._files:
            raise DataError(f"{self.folder} has no encoded rows; {AGAIN}")
        index = np.array(records, RECORD)
        self._digests, first = np.unique(index["digest"], return_index=True)
        self._index, self.field = index[first], processor.field
        # NumPy has no bfloat16; its bits travel as integers.
        self.dtype = np.int16 if self.tensor_dtype == torch.bfloat16 else getattr(np, self._stored["dtype"])

    def __reduce__(self) -> tuple[type[EncodedRows], tuple[Processor, Path]]:
        return EncodedRows, (self.processor, self.folder)  # a loader worker reads the folder itself

    def check_weights(self) -> None:
        """Raise a :class:`ConfigError` if the rows come from other weights than the model's."""
        if self._weights is not None:
            check_fingerprint(self.folder, self._stored, {"weights": self._weights(self.tensor_dtype)})

    def settings(self) -> dict[str, Any]:
        """Return the settings of the processor, and the names of the files that rows are read from."""
        files = digest_of(" ".join(path.name for path in self._files).encode())
        return {"kind": type(self).__name__, "files": files, "processor": self.processor.settings()}

    def measure(self, path: str | Path) -> tuple[Sizes, int]:
        rows = int(self._record(path)["rows"])
        return (rows,), rows

    def check(self, path: str | Path) -> None:
        self.load(path)

    def load(self, path: str | Path, sizes: Sizes | None = None) -> np.ndarray:
        """Return the backbone's rows of a media file, ``[R, feature]``."""
        record = self._record(path)
        data = np.zeros((int(record["rows"]), self.feature), self.dtype)
        content = data.reshape(-1).view(np.uint8).data
        with (stored := self._files[record["file"]]).open("rb") as file:
            file.seek(int(record["offset"]))
            file.readinto(content)
        if zlib.crc32(content) != record["checksum"]:
            raise DataError(f"{stored}: the rows of {path} are damaged; delete it and {AGAIN}", "damaged rows")
        return data

    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        return sizes.reshape(-1).copy()

    def collate(self, values: Sequence[np.ndarray], sizes: np.ndarray, rows: np.ndarray) -> EncoderInputs:
        joined = torch.from_numpy(np.concatenate([np.zeros((0, self.feature), self.dtype), *values]))
        rows = np.asarray(rows, np.int64)
        return EncodedInputs(joined.view(self.tensor_dtype), rows.reshape(-1, 1), rows, Packing.of(rows))

    def _record(self, path: str | Path) -> Any:
        digest = np.array(digest_of(Path(path).read_bytes()), "S32")
        place = int(np.searchsorted(self._digests, digest))
        if place == len(self._digests) or self._digests[place] != digest:
            raise DataError(f"{path} is new or has changed: {self.folder} has no rows of it; {AGAIN}", "not encoded")
        return self._index[place]


@dataclass(frozen=True)
class _Original:
    """A reference to an encoder that is neither a submodule of its holder nor copied with it."""

    encoder: Encoder

    def __deepcopy__(self, memo: dict[int, Any]) -> _Original:
        return self


class EncodedBackbone(Backbone):
    """A stand-in for a backbone whose rows are read: they pass unchanged."""

    def __init__(self, encoder: Encoder, folder: str | Path) -> None:
        super().__init__()
        self.original, self.folder, self.processor = _Original(encoder), folder, encoder.processor
        self.width = self.hidden_width = getattr(encoder.backbone, "width", encoder.width)

    @override
    def forward(self, inputs: EncoderInputs, hidden: Tensor | None = None) -> Tensor:
        return inputs.values

    @override
    def output_rows(self, sizes: np.ndarray) -> np.ndarray:
        return sizes.reshape(-1)

    packing_rows = output_rows

    @override
    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Draw the original backbone's random numbers, so that the projector starts with the same values."""
        original: Any = self.original.encoder.meta_copy()
        blocks: dict[int, Any] = {id(block): nn.Identity() for block in original.blocks().values()}
        rest = copy.deepcopy(original.backbone, blocks).to_empty(device="cpu").float()
        self.original.encoder.initialize("", nn.ModuleDict({"backbone": rest}))

    def reader(self, name: str, seed: int, processor: Processor) -> EncodedRows:
        """Return a processor that reads the rows in place of media files.

        Args:
            name: name of the module.
            seed: seed of the model's initial values.
            processor: processor of the original.
        """
        encoder = self.original.encoder

        def weights(dtype: torch.dtype) -> str:
            wanted: dict[str, Any] = {fqn: {} for fqn, _ in backbone_tensors(encoder.meta_copy())}
            return weights_digest(initial_units(name, encoder, seed, wanted), dtype)

        return EncodedRows(processor, self.folder, fingerprint(encoder, processor), weights)


def encoded(encoder: Encoder, folder: str | Path) -> Encoder:
    """Return an encoder with the same projector, whose backbone's rows are read from a folder of ``recipes.encode``."""
    encoder_of_rows = Encoder(EncodedBackbone(encoder, folder), encoder.projector, width=encoder.width)
    if encoder.checkpoint is not None:  # an export has the projector, too
        with TensorFolder(encoder.checkpoint) as tensors:
            own = {fqn: tensors.read(fqn, {}) for fqn in tensors.own if fqn.startswith("projector.")}
        own = {fqn: value.to(encoder_of_rows.get_parameter(fqn).dtype) for fqn, value in own.items()}
        encoder_of_rows.load_state_dict(own, strict=False, assign=True)
    return encoder_of_rows
