"""Transformers' own image and sound processors as processors of media files.

Resizing, tiles, normalisation and padding are those of the folder's ``preprocessor_config.json``, because transformers'
code makes the values. That code runs in the loader's workers, with Pillow and numpy wherever a family has such a class.

Sizes come from blank items: the shapes that a processor makes, and the text that it writes for an item, depend on the
item's height and width (or number of samples) alone. So each distinct size is processed once, when a data set is
indexed, and no file is decoded for it. Of pictures only shapes are computed; silence is processed as sound is, which
takes some 11 ms for each distinct number of samples.

An item's sizes are its raw rows, its height and width (its number of samples), and whatever else the processor gives
the model, such as ``image_grid_thw``. For example, Qwen2-VL's processor makes of an image of 98 x 140 pixels::

    pixel_values    float32 [70, 1176]     raw rows: patches
    image_grid_thw  [[1, 7, 10]]           columns of the sizes
    sizes           (70, 98, 140, 1, 7, 10)
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, inf, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from hetero_strategy.data.chat_template import read_json
from hetero_strategy.data.hf_parts import FILES, Values, parts_of, rows_together, split, without_values
from hetero_strategy.data.media import at_rate, check_picture, same_sizes, upright, upright_size, zero_rows
from hetero_strategy.data.media_file import length_of, open_picture, reading, waveform_of
from hetero_strategy.errors import ConfigError, DataError, require
from hetero_strategy.model.inputs import EncoderInputs, Packing
from hetero_strategy.model.kind import Sizes

PROBES: dict[str, tuple[tuple[int, ...], ...]] = {
    "image": ((224, 224), (160, 350), (311, 97)), "audio": ((16000,), (40007,)),
}  # fmt: skip
"""Sizes of blank items from which the shapes of a processor's values are known."""
MOST_BLANKS = 2**20
"""Most sizes of which a processor keeps what it makes of them."""
WORDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets", "labels")
"""Outputs of a processor that belong to the text."""
_shared = cache(tuple)  # equal texts of many sizes are in memory once


class Blank(NamedTuple):
    """An item of one size as a processor makes it, without its values."""

    sizes: Sizes
    written: tuple[str | int, ...]
    """Text that stands for the item in its sample: texts and numbers of rows, in turn; without a tokenizer empty."""


@dataclass(frozen=True)
class HFProcessor:
    """A processor of the files of one field by transformers' own processor.

    A folder that holds a tokenizer, too, and whose model takes the items in its text, says itself how many rows an item
    has in the text, and which tokens stand around and between them. The rows of other folders, such as CLIP's, are
    those that ``output_rows`` counts.

    Args:
        folder: local folder with ``preprocessor_config.json`` or ``processor_config.json``.
        field: manifest field that names the files.
        kind: ``image`` or ``audio``.
        output_rows: function of sizes, int64 ``[n, k]``, to rows at the edge, int64 ``[n]``; to be pickled. With it
            texts have these rows, and nothing that the folder's processor would write around them.
        packing_rows: function of sizes to rows inside the module; default: raw rows.

    Raises:
        ConfigError: the folder has no processor, or one that needs torchvision, or code of its own.
    """

    folder: str
    field: str = "image"
    kind: Literal["image", "audio"] = "image"
    output_rows: Callable[[np.ndarray], np.ndarray] | None = None
    packing_rows: Callable[[np.ndarray], np.ndarray] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", os.path.abspath(self.folder))  # a Ray actor has another working directory
        if self.kind not in PROBES:
            raise ConfigError(f"HFProcessor: kind is {self.kind!r}; use 'image' or 'audio'")
        if not any((Path(self.folder) / file).is_file() for file in FILES):
            raise ConfigError(
                f"HFProcessor: {self.folder} has neither {FILES[1]} nor {FILES[0]}; give a folder with one"
            )
        if self.kind == "audio":
            require("soundfile", "audio", "HFProcessor(kind='audio')")

    def __reduce__(self) -> tuple[Any, ...]:  # workers read the folder themselves
        return HFProcessor, (self.folder, self.field, self.kind, self.output_rows, self.packing_rows)

    @property
    def feature(self) -> int:
        return prod(self.tile)

    @property
    def tile(self) -> tuple[int, ...]:
        """Return the shape of a raw row: of a tile, such as (3, 336, 336), or (feature,).

        If tiles differ in size, a raw row is a pixel, and the sizes have the height and width of the tile in their
        columns ``tile``.
        """
        return self._layout[0]

    @property
    def columns(self) -> dict[str, slice]:
        """Return name -> columns of the sizes.

        The names are ``raw_rows``, ``height`` and ``width`` (or ``samples``), and transformers' names of what the
        processor gives the model with the values.
        """
        return self._layout[1]

    @property
    def size_names(self) -> tuple[str, ...]:
        names = []
        for name, columns in self.columns.items():
            count = columns.stop - columns.start
            names += [name] if count == 1 else [f"{name}[{number}]" for number in range(count)]
        return tuple(names)

    @property
    def placeholder(self) -> str | None:
        """Return the text that a chat template writes for an item, such as ``<|image_pad|>``.

        It is None without a tokenizer. With ``output_rows``, too: then the folder's own rows in texts are other ones.
        """
        return None if self.output_rows is not None else self._token

    @property
    def row_token(self) -> str | None:
        """Return the token that stands for a row; None without a tokenizer."""
        return None if self._row is None else self._row[0]

    @property
    def writes_text(self) -> bool:
        """Return whether the processor writes tokens around or between an item's rows."""
        return any(any(self._blank(size, self.folder).written[::2]) for size in PROBES[self.kind])

    @property
    def row_id(self) -> int | None:
        """Return the id of the token that stands for a row; None without a tokenizer."""
        return None if self._row is None else self._row[1]

    def measure(self, path: str | Path) -> tuple[Sizes, int]:
        if self.kind == "image":
            with open_picture(path) as image:
                size: tuple[int, ...] = upright_size(image)
        else:
            samples, rate = length_of(path)
            size = (ceil(samples * self._rate / rate),)
        if min(size) < 1:
            raise DataError(f"{path}: {self.kind} of zero length", "zero length")
        if size[0] > self._most_samples:
            raise DataError(
                f"{path}: {self._shown(size)} at {self._rate} Hz, of which {type(self._parts[0]).__name__} keeps only"
                f" the first {self._most_samples}; cut the clip",
                "too long",
            )
        blank = self._blank(size, path)
        if (rows := self._edge_rows(blank)) < 1:
            raise DataError(f"{path}: {self.kind} of {self._shown(size)} becomes no row; leave it out", "no rows")
        return blank.sizes, rows

    def check(self, path: str | Path) -> str | None:
        """Decode the whole file."""
        if self.kind == "image":
            return check_picture(path)
        waveform_of(path)
        return None

    def load(self, path: str | Path, sizes: Sizes | None = None) -> np.ndarray:
        """Return the values that the processor makes of the file, float32."""
        if self.kind == "image":
            with open_picture(path) as image:
                item: Any = reading(path, "image", lambda _: upright(image).convert("RGB"))
        else:
            item = at_rate(*waveform_of(path), self._rate)
        rows, described = self._made(item, path)
        same_sizes(path, self.size_names, described.sizes, sizes)
        return rows

    def written(self, sizes: Sequence[int]) -> tuple[str | int, ...]:
        """Return what stands for an item of these sizes in a text: texts and numbers of rows, in turn.

        For example, Gemma 3's processor writes ``("\\n\\n<start_of_image>", 256, "<end_of_image>\\n\\n")``.
        """
        size = tuple(int(number) for number in sizes[1 : 1 + len(PROBES[self.kind][0])])
        return self._blank(size, self.folder).written

    def apart(self) -> tuple[int, int] | None:
        """Return rows of a picture alone and beside another one, if transformers' processor makes unlike ones."""
        row = self._row if self.kind == "image" else None
        return row and rows_together(self._parts[1], _blank_item(PROBES["image"][0]), row[0])

    def raw_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return raw rows, int64 ``[n]``, of items with these sizes."""
        return np.asarray(sizes, np.int64).reshape(-1, len(self.size_names))[:, 0]

    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the number of rows inside the module."""
        sizes = np.asarray(sizes, np.int64).reshape(-1, len(self.size_names))
        return self.raw_rows(sizes) if self.packing_rows is None else self.packing_rows(sizes)

    def collate(self, values: Sequence[np.ndarray], sizes: np.ndarray, rows: np.ndarray) -> EncoderInputs:
        """Put items end to end."""
        joined = np.concatenate([zero_rows(self), *values])
        sizes = np.asarray(sizes, np.int64).reshape(-1, len(self.size_names))
        packing = Packing.of(self.inner_rows(sizes).astype(np.int64))
        raw = self.raw_rows(sizes)
        return EncoderInputs(torch.from_numpy(joined), sizes, np.asarray(rows, np.int64), packing, raw_rows=raw)

    def settings(self) -> dict[str, Any]:
        """Return transformers' version, hashes of the folder's files, and what the processor makes of blank items."""
        from transformers import __version__

        files = {file: Path(self.folder) / file for file in (*FILES, "config.json", "tokenizer_config.json")}
        hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file.is_file()}
        blanks = [self._blank(size, self.folder) for size in PROBES[self.kind]]
        inner = self.inner_rows(np.array([blank.sizes for blank in blanks])).tolist()
        row = [[*one.sizes, self._edge_rows(one), n, *one.written] for one, n in zip(blanks, inner, strict=True)]
        name = f"{type(self).__name__} of {type(self._parts[0]).__name__}"
        own = {"row": self._row and list(self._row), "transformers": __version__}
        return {"kind": name, "field": self.field, "files": hashes, "blank": row, **own}

    # All that follows is computed once in a process.

    @property
    def _token(self) -> str | None:
        return getattr(self._parts[1], f"{self.kind}_token", None)

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        """The processor of items, and the processor of texts with items, or None."""
        return parts_of(Path(self.folder), self.kind)

    @cached_property
    def _row(self) -> tuple[str, int] | None:
        """The token that stands for a row, and its id."""
        if self.placeholder is None:
            return None
        tokenizer = self._parts[1].tokenizer
        output = self._processed(_blank_item(PROBES[self.kind][0]), self._parts)
        ids = np.asarray(output["input_ids"]).reshape(-1).tolist()
        added = set(tokenizer.get_added_vocab().values())
        most = next((number for number, _ in Counter(ids).most_common() if number in added), None)
        if most is None:
            raise ConfigError(
                f"{self.folder}: the processor writes {tokenizer.decode(ids)[:80]!r} for an item, and none of it is a"
                " special token of the tokenizer; take the tokenizer that was saved with the model"
            )
        config = read_json(Path(self.folder) / "config.json")
        named = config.get(f"{self.kind}_token_id", config.get(f"{self.kind}_token_index"))
        if named is not None and named not in ids:
            raise ConfigError(
                f"{self.folder}: config.json says that rows of {self.field} take the place of token {named}"
                f" ({tokenizer.convert_ids_to_tokens(named)!r} of the tokenizer), but the processor writes"
                f" {tokenizer.convert_ids_to_tokens(most)!r}, which is token {most}; take the tokenizer and the"
                " processor that were saved with the model"
            )
        number = most if named is None else int(named)
        return tokenizer.convert_ids_to_tokens(number), number

    @cached_property
    def _layout(self) -> tuple[tuple[int, ...], dict[str, slice]]:
        """Shape of a raw row, and columns of the sizes."""
        outputs = [self._processed(_blank_item(size), self._parts) for size in PROBES[self.kind]]
        probes = [self._split(output) for output in outputs]
        shapes = {values.array.shape[-values.tile :] for values in probes}
        columns = [{name: len(numbers) for name, numbers in values.columns.items()} for values in probes]
        if columns.count(columns[0]) < len(columns):
            raise ConfigError(
                f"{self.folder}: {type(self._parts[0]).__name__} gives the model {columns[0]} numbers with one item and"
                f" {next(c for c in columns if c != columns[0])} with another; there is no place for them"
            )
        for output in outputs:
            self._written(output)
        shape = next(iter(shapes))
        if len(shapes) > 1:  # tiles of many sizes: their pixels, or frames, are rows
            shape, columns[0]["tile"] = shape[:1], len(shape) - 1
        names = ("height", "width") if self.kind == "image" else ("samples",)
        widths = {"raw_rows": 1, **dict.fromkeys(names, 1), **columns[0]}
        ends = np.cumsum(list(widths.values())).tolist()
        return shape, {name: slice(end - widths[name], end) for name, end in zip(widths, ends, strict=True)}

    @cached_property
    def _blanks(self) -> dict[tuple[int, ...], Blank]:
        return {}

    @cached_property
    def _quick(self) -> tuple[Any, Any]:
        """The parts that compute shapes alone, if all is the same with them; else the folder's own."""
        quick = without_values(*self._parts)
        if quick[0] is self._parts[0]:
            return quick
        try:
            same = all(
                self._made(item, "", quick)[1] == self._made(item, "")[1]
                for item in map(_blank_item, PROBES[self.kind])
            )
        except DataError:
            same = False
        return quick if same else self._parts

    def _blank(self, size: tuple[int, ...], path: str | Path) -> Blank:
        """Return what the processor makes of an item of this size."""
        if (blank := self._blanks.get(size)) is None:
            item = _blank_item(size)
            try:
                _, blank = self._made(item, path, self._quick)
            except DataError:  # the message is that of the folder's own
                _, blank = self._made(item, path)
            if len(self._blanks) >= MOST_BLANKS:
                self._blanks.clear()
            self._blanks[size] = blank = blank._replace(written=_shared(blank.written))
        return blank

    def _made(self, item: Any, path: str | Path, parts: tuple[Any, Any] | None = None) -> tuple[np.ndarray, Blank]:
        """Return an item's raw rows, and what does not depend on their values."""
        size = tuple(item.shape) if self.kind == "audio" else (item.height, item.width)
        _ = self._layout, self._row  # faults of the folder are not the file's
        try:
            output = self._processed(item, parts or self._parts)
            rows, numbers = self._rows(self._split(output))
            blank = Blank((len(rows), *size, *numbers), self._written(output))
            if len(blank.sizes) != len(self.size_names):
                raise ValueError(
                    f"it gives the model {len(numbers)} numbers, not {len(self.size_names) - 1 - len(size)}"
                )
        except Exception as error:  # such as of an aspect that the processor does not take
            raise DataError(
                f"{path}: {type(self._parts[0]).__name__} refuses this {self.kind} of {self._shown(size)}: {error}",
                "refused by the processor",
            ) from None
        return rows, blank

    def _split(self, output: Mapping[str, Any]) -> Values:
        words = WORDS if self._parts[1] is not None else ()
        return split({name: np.asarray(one) for name, one in output.items() if name not in words}, self.kind)

    def _processed(self, item: Any, parts: tuple[Any, Any]) -> Any:
        """Return the outputs of the parts for one item: a picture, or a waveform at the processor's rate."""
        alone, whole = parts
        options: dict[str, Any] = {"return_tensors": "pt"}
        if self.kind == "audio":
            options["sampling_rate"] = self._rate
        items = {"images" if self.kind == "image" else "audio": [item]}
        with torch.device("cpu"):  # also where a model is built without values
            if whole is None:
                return alone([item], **options)
            own = copy(whole)  # some processors keep numbers of the item at hand, and threads share them
            return own(text=[self._token], **items, **options, return_text_replacement_offsets=True)

    def _rows(self, values: Values) -> tuple[np.ndarray, list[int]]:
        """Return raw rows and the sizes that follow an item's own."""
        array, numbers = values.array, [number for group in values.columns.values() for number in group]
        tile = array.shape[-values.tile :]
        if "tile" in self.columns:
            numbers, tile = [*numbers, *tile[1:]], tile[:1]
            array = np.moveaxis(array, -values.tile, -1)
        if tile != self.tile:
            raise ValueError(f"it makes rows or tiles of {list(tile)}, and of other items {list(self.tile)}")
        return np.ascontiguousarray(array.reshape(-1, self.feature), np.float32), numbers

    def _written(self, output: Any) -> tuple[str | int, ...]:
        if self._row is None:
            return ()
        token, number = self._row
        text = output["text_replacement_offsets"][0][0]["replacement"]
        parts = re.split(f"((?:{re.escape(token)})+)", text)
        written = tuple(len(part) // len(token) if place % 2 else part for place, part in enumerate(parts))
        rows = int((np.asarray(output["input_ids"]) == number).sum())
        if _rows_of(written) != rows:
            raise ConfigError(
                f"{self.folder}: the processor writes {token!r} {_rows_of(written)} times for an item, but the"
                f" tokenizer makes {rows} tokens of it; add it to the tokenizer as a special token"
            )
        return written

    def _edge_rows(self, blank: Blank) -> int:
        if self.output_rows is not None:
            return int(self.output_rows(np.array([blank.sizes], np.int64))[0])
        if not blank.written:
            raise ConfigError(
                f"{self.folder}: {type(self._parts[0]).__name__} does not say how many rows of the language model an"
                " item has, because there is no processor of texts beside it; give output_rows="
            )
        return _rows_of(blank.written)

    @cached_property
    def _most_samples(self) -> float:
        """Length at which the processor cuts recordings: its ``n_samples`` if it makes no more of a longer one."""
        most = getattr(self._parts[0], "n_samples", None)
        if self.kind != "audio" or not most:
            return inf
        try:
            whole, longer = (self._blank((most * times,), self.folder).sizes for times in (1, 2))
        except DataError:
            return inf
        return most if (whole[0], *whole[2:]) == (longer[0], *longer[2:]) else inf

    def _shown(self, size: tuple[int, ...]) -> str:
        return " x ".join(map(str, size)) + (" pixels" if self.kind == "image" else " samples")

    @property
    def _rate(self) -> int:
        return int(self._parts[0].sampling_rate)


def _rows_of(written: Sequence[str | int]) -> int:
    return sum(part for part in written if isinstance(part, int))


def _blank_item(size: tuple[int, ...]) -> Any:
    """Return a black picture of (height, width), or a silent waveform of (samples,)."""
    return np.zeros(size, np.float32) if len(size) == 1 else Image.new("RGB", (size[1], size[0]))
