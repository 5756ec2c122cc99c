"""Positions and blocks of rows of a transformers composite, made in the loader by the composite's own forward.

The forward of Qwen2.5-VL gives its language model positions along three axes, that of Gemma 3 a mask in which an
image's rows see each other, that of PaliGemma both a mask and positions from 1. None of this needs a weight: a copy of
the composite on the meta device runs up to its language model, in whose place a listener notes the arguments.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import ModelError
from hetero_strategy.model.causal_lm import CausalLMKind
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.model.kind import InstanceUnits, PlacedItems

POSITIONS, BLOCKS = "positions", "blocks"
"""Names of the columns: int64 ``[axes, T]``, and int64 ``[T]``, the number of a row's block in its sequence or -1."""
TYPES = {"image": 1, "video": 2, "audio": 3}
"""Number of a kind of media in transformers' ``mm_token_type_ids``; 0 is text."""
MASK = "hetero_heard"
"""Name of the listening mask function in transformers' registry."""


class HFTextKind(CausalLMKind):
    """A kind for the language model of a transformers composite, whose columns the composite's own forward makes.

    Args:
        architecture: name of transformers' class of the composite.
        config: content of its config.json.

    Raises:
        ModelError: the forward fails on a sample of text.
    """

    def __init__(self, architecture: str, config: Mapping[str, Any]) -> None:
        self.composite = (architecture, json.dumps(config, default=str))  # a hashable key of each worker's listener
        listener = _listener(*self.composite)
        self.vocabulary, self.blockwise = listener.vocabulary, listener.blockwise
        heard = listener.hear(np.zeros(4, np.int64), np.zeros(4, np.int64), np.zeros(4, bool), {})
        self.text_is_plain = heard.plain

    @override
    def inputs(self, units: InstanceUnits) -> SequenceInputs:
        made, starts = super().inputs(units), ragged.starts(units.edge_rows)
        of_items = torch.zeros(len(made.ids), dtype=torch.bool)
        for each in units.content.placed(units.numbers):
            of_items[torch.from_numpy(ragged.expand(starts[each.sample] + each.start, each.rows))] = True
        # An item's rows replace these; a text's id beyond the vocabulary remains an error.
        return replace(made, ids=made.ids.masked_fill(of_items & (made.ids >= self.vocabulary), 0))

    @override
    def columns(self, units: InstanceUnits, tokens: np.ndarray, learnt: np.ndarray) -> Mapping[str, Tensor]:
        listener, lengths = _listener(*self.composite), units.edge_rows
        if not listener.axes and not listener.blockwise:
            return {}
        placed = [each for each in units.content.placed(units.numbers) if each.field in TYPES]
        starts = ragged.starts(lengths)
        types = np.zeros(len(tokens), np.int64)
        for each in placed:
            types[ragged.expand(starts[each.sample] + each.start, each.rows)] = TYPES[each.field]
        positions, blocks = [], []
        for sample, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            own = slice(start, start + length)
            if not length or (self.text_is_plain and not types[own].any()):
                heard = Heard(length)
            else:
                heard = listener.hear(tokens[own], types[own], learnt[own], _grids(placed, sample))
            positions.append(heard.positions)
            blocks.append(heard.blocks)
        columns = {}
        if listener.axes:
            none = torch.zeros(listener.axes, 0, dtype=torch.int64)
            columns[POSITIONS] = torch.cat([none, *(each.expand(listener.axes, -1) for each in positions)], dim=1)
        if listener.blockwise:
            columns[BLOCKS] = torch.cat([*blocks, torch.zeros(0, dtype=torch.int64)])
        return columns


class Heard:
    """The positions and blocks that a language model is given for one sample of T rows.

    Args:
        rows: T.
        positions: int64 ``[axes, T]``; None: 0 to T - 1.
        ahead: whether each row sees the next one, bool ``[T - 1]``; None: none does.
    """

    def __init__(self, rows: int, positions: Tensor | None = None, ahead: Tensor | None = None) -> None:
        counted = torch.arange(rows)[None]
        self.positions = counted if positions is None else positions
        self.blocks = torch.full((rows,), -1)
        if ahead is not None and ahead.any():
            first, last = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
            number = torch.cat([first, ~ahead]).cumsum(0) - 1
            self.blocks = torch.where(torch.cat([last, ahead]) | torch.cat([ahead, last]), number, -1)
        self.plain = bool((self.positions == counted).all()) and not self.blockwise

    @property
    def blockwise(self) -> bool:
        return bool((self.blocks >= 0).any())


class _Stopped(Exception):
    """An end of the composite's forward at its language model."""


class _Listener:
    """A composite on the meta device whose forward runs on the ids and types of one sample's rows."""

    def __init__(self, architecture: str, config: str) -> None:
        import transformers

        model_class: Any = getattr(transformers, architecture)
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_dict(json.loads(config)))
        decoder = model.get_decoder()
        path = next(fqn for fqn, part in model.named_modules() if part is decoder)
        self.base = model.get_submodule(path.rpartition(".")[0])
        self.positions: Tensor | None = None
        self.masks: list[Any] = []
        decoder.forward = self._stop
        model.get_input_embeddings().forward = lambda ids: torch.zeros(*ids.shape, 1)
        self._listen(text := model.config.get_text_config())
        self.vocabulary = int(text.vocab_size)
        self.takes = inspect.signature(type(self.base).forward).parameters
        tokens = [_token(model.config, kind) for kind in TYPES]
        self.token = np.array([0, *(0 if token is None else token for token in tokens)])
        self.suffixes, self.axes, self.blockwise = False, 0, False
        self._probe(
            model_class.__name__,
            model.config,
            [0, *(TYPES[kind] for kind in ("image", "video") if self.token[TYPES[kind]])],
        )

    def hear(self, ids: np.ndarray, types: np.ndarray, learnt: np.ndarray, columns: Mapping[str, Tensor]) -> Heard:
        """Return what the language model is given for one sample.

        Args:
            ids: token ids, int ``[T]``.
            types: kind of media of each row, int64 ``[T]``, as in :data:`TYPES`.
            learnt: whether each token is predicted, bool ``[T]``.
            columns: other arguments of the composite's forward, such as ``image_grid_thw``.
        """
        with torch.device("cpu"):  # a module's constructor runs on the meta device
            return self._hear(ids, types, learnt, columns)

    def _hear(self, ids: np.ndarray, types: np.ndarray, learnt: np.ndarray, columns: Mapping[str, Tensor]) -> Heard:
        kinds = torch.from_numpy(types)[None]
        later = torch.from_numpy(np.cumsum(learnt) > 0)[None]
        arguments = {
            "input_ids": torch.from_numpy(np.where(types > 0, self.token[types], ids).astype(np.int64))[None],
            "mm_token_type_ids": kinds.int(),
            "token_type_ids": (later if self.suffixes else kinds > 0).long(),
            "attention_mask": torch.ones_like(kinds),
            **columns,
        }
        self.masks.clear()
        with suppress(_Stopped):
            self.base.forward(**{name: value for name, value in arguments.items() if name in self.takes})
        positions = self.positions
        ahead = [_seen(mask, torch.arange(len(ids) - 1), torch.arange(1, len(ids))) for mask in self.masks]
        return Heard(
            len(ids),
            None if positions is None else positions.squeeze(-2).reshape(-1, len(ids)),
            torch.stack(ahead).any(0) if ahead else None,
        )

    def _stop(self, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> None:
        """Note the positions that the language model is given, and end the forward."""
        self.positions = position_ids
        raise _Stopped

    def _listen(self, text: Any) -> None:
        """Note the functions of the composite's masks, which are not made."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        def listen(*, mask_function: Any, **_: Any) -> None:
            self.masks.append(mask_function)

        name = f"{MASK}_{id(self)}"  # of this composite alone
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, listen)
        text._attn_implementation = name

    def _probe(self, who: str, config: Any, types: list[int]) -> None:
        """Find out which columns the composite needs, by samples with two rows of one item between texts."""
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
        grid = torch.tensor([[1, merge, 2 * merge]], device="cpu")
        for kind in types:
            grids = {f"{name}_grid_thw": grid for name, number in TYPES.items() if number == kind}
            sample = np.zeros(6, np.int64), np.array([0, 0, kind, kind, 0, 0]), np.zeros(6, bool), grids
            try:
                heard = self.hear(*sample)
                if int(heard.blocks[0]) >= 0:  # not the items' rows have another type, but those after the prompt
                    self.suffixes = True
                    heard = self.hear(*sample)
            except Exception as fault:  # several kinds
                reason = " ".join(str(fault).split())
                raise ModelError(
                    f"{who}: its forward fails before the language model: {type(fault).__name__} {reason}; its language"
                    " model alone is read by hf_causal_lm(part='llm')"
                ) from fault
            steps = torch.arange(6, device="cpu")
            blocks = heard.blocks
            known = (steps <= steps[:, None]) | ((blocks[:, None] == blocks) & (blocks >= 0))
            for mask in self.masks:
                if bool((_seen(mask, steps[:, None].expand(6, 6), steps.expand(6, 6)) & ~known).any()):
                    raise ModelError(f"{who}: its rows see later rows other than those of their own item; not built")
            self.blockwise = self.blockwise or heard.blockwise
            if not torch.equal(heard.positions, steps[None]):
                self.axes = max(self.axes, len(heard.positions))


@lru_cache(maxsize=4)
def _listener(architecture: str, config: str) -> _Listener:
    return _Listener(architecture, config)


def _seen(mask: Any, rows: Tensor, keys: Tensor) -> Tensor:
    """Return whether rows see keys by a mask function of transformers, bool of their shape."""
    seen: Tensor = mask(torch.zeros_like(rows), 0, rows, keys)
    return seen.expand(rows.shape)


def _token(config: Any, kind: str) -> int | None:
    """Return the id that stands for a row of one kind of media."""
    return getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))


def _grids(placed: list[PlacedItems], sample: int) -> dict[str, Tensor]:
    """Return the arguments of the composite's forward that a sample's items have in their sizes.

    Processors of transformers put these into the sizes by name, such as ``image_grid_thw[0]`` to ``image_grid_thw[2]``.
    Sizes of two or three numbers are a grid of patches.
    """
    grids: dict[str, Tensor] = {}
    for each in placed:
        if not len(sizes := torch.from_numpy(each.sizes[each.sample == sample])):
            continue
        named: dict[str, list[int]] = {}
        for column, name in enumerate(each.size_names):
            named.setdefault(name.partition("[")[0], []).append(column)
        for name, columns in named.items():
            own = sizes[:, columns]
            grids[name] = torch.arange(int(own.max())) < own if "mask" in name else own  # a mask's number of ones
        if sizes.shape[1] in (2, 3) and each.field != "audio":
            whole = sizes if sizes.shape[1] == 3 else torch.cat([torch.ones_like(sizes[:, :1]), sizes], dim=1)
            grids.setdefault(f"{each.field}_grid_thw", whole)
    return grids
