"""Positions and masks of rows of a transformers composite, found by the composite's own forward.

The forward of Qwen2.5-VL gives its language model positions along three axes, that of Gemma 3 a mask in which an
image's rows see each other, that of PaliGemma both a mask and positions from 1. None of this needs a weight: a copy of
the composite on the meta device runs up to its language model, in whose place a listener notes the arguments. Positions
are made so for each sample, in the loader; the rule of the mask is found once, by samples with known items.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import ModelError
from hetero_strategy.mask import BidirectionalItems, MaskRule, Prefix, Slices, Spans, by_window
from hetero_strategy.model.causal_lm import CausalLMKind
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.model.kind import InstanceUnits, PlacedItems

POSITIONS = "positions"
"""Name of the column, int64 ``[axes, T]``."""
TYPES = {"image": 1, "video": 2, "audio": 3}
"""Number of a kind of media in transformers' ``mm_token_type_ids``; 0 is text."""
MASK = "hetero_heard"
"""Name of the listening mask function in transformers' registry."""


class HFTextKind(CausalLMKind):
    """A kind for the language model of a transformers composite, whose forward decides on positions and masks.

    Args:
        architecture: name of transformers' class of the composite.
        config: content of its config.json.
        windows: windows of the language model's layers, None for layers without one.

    Raises:
        ModelError: the forward fails on a sample of text.
    """

    def __init__(self, architecture: str, config: Mapping[str, Any], windows: Collection[int | None] = (None,)) -> None:
        self.composite = (architecture, json.dumps(config, default=str))  # a hashable key of each worker's listener
        with torch.device("cpu"):  # a module's constructor runs on the meta device
            listener = _listener(*self.composite)
            self.vocabulary, self.axes = listener.vocabulary, listener.axes
            if listener.blocks:
                widest = max((window for window in windows if window is not None), default=None)
                self.rules = by_window(listener.rule(widest), windows)
            none = np.zeros(4, np.int64)
            self.text_is_plain = bool((listener.hear(none, none, none > 0, {}) == torch.arange(4)).all())

    @override
    def inputs(self, units: InstanceUnits) -> SequenceInputs:
        inputs, starts = super().inputs(units), ragged.starts(units.edge_rows)
        of_items = torch.zeros(len(inputs.ids), dtype=torch.bool)
        for each in units.content.placed(units.numbers):
            of_items[torch.from_numpy(ragged.expand(starts[each.sample] + each.start, each.rows))] = True
        # An item's rows replace these; a text's id beyond the vocabulary remains an error.
        return replace(inputs, ids=inputs.ids.masked_fill(of_items & (inputs.ids >= self.vocabulary), 0))

    @override
    def columns(self, units: InstanceUnits, tokens: np.ndarray, learnt: np.ndarray) -> Mapping[str, Tensor]:
        if not self.axes:
            return {}
        listener, lengths = _listener(*self.composite), units.edge_rows
        placed = [each for each in units.content.placed(units.numbers) if each.field in TYPES]
        starts = ragged.starts(lengths)
        types = np.zeros(len(tokens), np.int64)
        for each in placed:
            types[ragged.expand(starts[each.sample] + each.start, each.rows)] = TYPES[each.field]
        positions = [torch.zeros(self.axes, 0, dtype=torch.int64)]
        for sample, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            own = slice(start, start + length)
            if not length or (self.text_is_plain and not types[own].any()):
                heard = torch.arange(length)[None]
            else:
                heard = listener.hear(tokens[own], types[own], learnt[own], _grids(placed, sample))
            positions.append(heard.expand(self.axes, -1))
        return {POSITIONS: torch.cat(positions, dim=1)}


@dataclass(frozen=True)
class BidirectionalBlocks(BidirectionalItems):
    """A composite's own rule: its blocks are items of some fields, those without rows between them as one.

    Args:
        media: fields of the items.
    """

    media: tuple[str, ...] = ()

    @override
    def slices(self, lengths: np.ndarray, spans: Spans) -> Slices:
        modules = [module for module, field in spans.media.items() if field in self.media]
        keep = np.flatnonzero(np.isin(spans.source, modules))
        keep = keep[np.lexsort((spans.start[keep], spans.sequence[keep]))]
        sequence, start, rows, of = (x[keep] for x in (spans.sequence, spans.start, spans.rows, spans.source))
        apart = (sequence[1:] != sequence[:-1]) | (start[1:] != (start + rows)[:-1]) | (of[1:] != of[:-1])
        first = np.flatnonzero(np.append(True, apart)[: len(rows)])
        total = np.add.reduceat(rows, first) if len(first) else rows
        return super().slices(lengths, Spans(sequence[first], start[first], total, of[first]))


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
        self.who = model_class.__name__
        self.merge = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", 1)
        self.suffixes, self.axes = False, 0
        self.blocks: list[str] = []
        """Fields whose items are blocks of rows that see each other; all if the rows before a label are one."""
        self._probe([0, *(TYPES[kind] for kind in ("image", "video") if self.token[TYPES[kind]])])

    def hear(self, ids: np.ndarray, types: np.ndarray, learnt: np.ndarray, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the positions that the language model is given for one sample, int64 ``[axes, T]``.

        Args:
            ids: token ids, int ``[T]``.
            types: kind of media of each row, int64 ``[T]``, as in :data:`TYPES`.
            learnt: whether each token is predicted, bool ``[T]``.
            columns: other arguments of the composite's forward, such as ``image_grid_thw``.
        """
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
        if self.positions is None:
            return torch.arange(len(ids))[None]
        return self.positions.squeeze(-2).reshape(-1, len(ids))

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

    def _probe(self, kinds: list[int]) -> None:
        """Find out which positions and blocks the composite needs, by samples with two rows of an item among texts."""
        for kind in kinds:
            types = np.array([0, 0, kind, kind, 0, 0])
            positions, seen = self._sample(types)
            if seen.any(0)[0, 1]:  # not the items' rows have another type, but those after the prompt
                self.suffixes, self.blocks = True, [*TYPES]
                positions, seen = self._sample(types)
            block = np.ones(6, bool) if self.suffixes else types > 0
            own = torch.from_numpy(block & block[:, None])
            if bool((seen & torch.ones(6, 6).triu(1).bool() & ~own).any()):
                raise ModelError(f"{self.who}: its rows see later rows other than those of their own item; not built")
            if not self.suffixes and seen.any(0)[2, 3]:
                self.blocks += [name for name, number in TYPES.items() if number == kind]
            if not torch.equal(positions, torch.arange(6)[None]):
                self.axes = max(self.axes, len(positions))

    def rule(self, window: int | None) -> MaskRule:
        """Return the rule of blocks, by an item longer than a window."""
        rows = (window or 1) + 3
        kind = 0 if self.suffixes else TYPES[self.blocks[0]]
        _, seen = self._sample(np.where(np.arange(rows) > 0, kind, 0), np.array([1, rows - 1]))
        if not bool(seen[:, 0, 1].all()):
            raise ModelError(f"{self.who}: rows of an item do not see all its later rows; not built")
        whole = bool(seen[:, 1, 0].all())
        if self.suffixes:
            return Prefix(whole_items=whole)
        return BidirectionalBlocks(whole_items=whole, media=tuple(self.blocks))

    def _sample(self, types: np.ndarray, rows: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Return the positions of a sample without labels, and by which masks some of its rows see each other, all if
        None: bool ``[masks, n, n]``.
        """
        kind, count = types.max(), int((types > 0).sum())
        grid = torch.tensor([[1, self.merge, count * self.merge]])
        grids = {f"{name}_grid_thw": grid for name, number in TYPES.items() if number == kind}
        try:
            positions = self.hear(np.zeros(len(types), np.int64), types, np.zeros(len(types), bool), grids)
            at = torch.arange(len(types)) if rows is None else torch.from_numpy(rows)
            pairs = at[:, None].expand(len(at), len(at)), at.expand(len(at), len(at))
            none = torch.zeros(0, len(at), len(at), dtype=torch.bool)
            return positions, torch.cat([none, *(_seen(mask, *pairs)[None] for mask in self.masks)])
        except Exception as fault:  # several kinds
            reason = " ".join(str(fault).split())
            raise ModelError(
                f"{self.who}: its forward fails before the language model: {type(fault).__name__} {reason}; its"
                " language model alone is read by hf_causal_lm(part='llm')"
            ) from fault


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
