"""Columns that a composite's own forward makes are those that transformers makes in a forward of each sample alone."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.errors import ModelError
from hetero_strategy.layout.row_sharding import two_chunks
from hetero_strategy.mask import BidirectionalItems
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.kind import PlacedItems
from hetero_strategy.model.packing_errors import LENGTHS, Meeting
from hetero_strategy.testing import packing_errors
from hetero_strategy.testing.composites import built, model_class, tiny
from hetero_strategy.testing.setting import in_dtype
from hetero_strategy.zoo import hf_positions
from hetero_strategy.zoo.hf_composed import HFComposedLM, decoder_path, whole_of
from hetero_strategy.zoo.hf_positions import POSITIONS, HFTextKind

IMAGE = 150
GRIDS = [[(1, 4, 6)], [(1, 8, 2), (1, 4, 4)], []]
"""Images of three samples, as (t, h, w) in patches; 2 x 2 patches are a row."""


def kind_of(config: Any, *windows: int | None) -> HFTextKind:
    kind = HFTextKind(model_class(config.model_type).__name__, config.to_dict(), windows or (None,))
    return pickle.loads(pickle.dumps(kind))


def units_of(rows: list[list[int]], sizes: np.ndarray, names: tuple[str, ...], padding: int = 3) -> Any:
    """Samples of five tokens before their images, two after each, and two at the end."""
    lengths = np.array([7 + sum(n + 2 for n in each) for each in rows])
    sample = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    starts = [5 + sum(n + 2 for n in each[:place]) for each in rows for place in range(len(each))]
    counts = np.array([n for each in rows for n in each], np.int64)
    placed = PlacedItems("eyes", "image", names, sample, sizes, np.array(starts, np.int64), counts)
    ids = np.random.default_rng(0).integers(3, 140, lengths.sum()).astype(np.int32)
    learnt = np.zeros(len(ids), bool)
    learnt[np.cumsum(lengths) - 1] = True
    content = SimpleNamespace(text=lambda _: (ids, learnt), placed=lambda _: [placed])
    return SimpleNamespace(
        content=content, numbers=np.arange(len(rows)), edge_rows=lengths, inner_rows=np.append(lengths, padding),
        alike=False, slots={},
    )  # fmt: skip


def samples_of(inputs: Any, column: str) -> list[torch.Tensor]:
    return list(inputs.columns[column].split(inputs.packing.lengths.tolist(), dim=-1))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
@pytest.mark.parametrize("names", [("grid_h", "grid_w"), ("raw_rows", *(f"image_grid_thw[{n}]" for n in range(3)))])
def test_axes_are_those_of_transformers(model_type: str, names: tuple[str, ...]) -> None:
    config = tiny(model_type)
    grids = np.array([grid for each in GRIDS for grid in each])
    sizes = grids[:, 1:] if len(names) == 2 else np.insert(grids, 0, 0, axis=1)
    rows = [[h * w // 4 for _, h, w in each] for each in GRIDS]
    inputs = kind_of(config).inputs(units_of(rows, sizes, names))
    base = built(config).model
    *found, alignment = samples_of(inputs, POSITIONS)
    assert len(found) == 3 and not alignment.any() and not inputs.packing.masks
    for positions, each in zip(found, GRIDS, strict=True):
        ids = torch.full((positions.shape[1],), 5)
        at = 5
        for _, h, w in each:
            ids[at : (at := at + h * w // 4)] = IMAGE
            at += 2
        wanted = torch.arange(len(ids)).expand(3, -1)
        if each:
            types = (ids == IMAGE).int()[None]
            wanted = base.get_rope_index(ids[None], mm_token_type_ids=types, image_grid_thw=torch.tensor(each))[0][:, 0]
            assert not torch.equal(wanted, torch.arange(len(ids)).expand(3, -1))
        assert torch.equal(positions, wanted)


def seen(inputs: Any, window: int | None = None) -> torch.Tensor:
    """Return whether rows see each other, bool ``[T, T]``."""
    first, end = inputs.packing.masks[window]
    assert len(first) == 1
    keys = torch.arange(first.shape[1])
    return (keys >= first[0][:, None]) & (keys < end[0][:, None])


@pytest.mark.parametrize("window", [None, 3])
def test_images_of_gemma_see_themselves_as_in_transformers(window: int | None) -> None:
    """Masks of full layers and of windows shorter than an image are those that transformers' own forward makes."""
    config = tiny("gemma3")
    config.text_config.sliding_window = 3
    inputs = kind_of(config, None, 3).inputs(units_of([[4], [4, 4], []], np.full((3, 2), 4), ("grid_h", "grid_w")))
    assert POSITIONS not in inputs.columns
    ours, start = seen(inputs, window), 0
    config._attn_implementation = "eager"
    make = inspect.getmodule(model_class("gemma3")).create_masks_for_vision_model  # type: ignore[union-attr]
    for length, images in zip((13, 19, 7, 3), ([5], [5, 11], [], []), strict=True):
        blocks = torch.full((1, length), -1)
        for number, image in enumerate(images):
            blocks[0, image : image + 4] = number
        masks = make(config.text_config, torch.zeros(1, length, 8), None, None, None, blocks)
        theirs = masks["sliding_attention" if window else "full_attention"][0, 0] == 0
        own = slice(start, start := start + length)
        assert torch.equal(ours[own, own], theirs)
        assert not ours[own, : own.start].any() and not ours[own, own.stop :].any()


def test_prompts_of_paligemma_see_themselves_and_count_from_one() -> None:
    inputs = kind_of(tiny("paligemma")).inputs(units_of([[4], []], np.full((1, 2), 4), ("grid_h", "grid_w")))
    one, two, _ = samples_of(inputs, POSITIONS)
    assert one.tolist() == [list(range(1, 14))] and two.tolist() == [list(range(1, 8))]
    wanted = torch.block_diag(*(torch.ones(n, n).tril() for n in (13, 7, 3)))
    wanted[:12, :12] = wanted[13:19, 13:19] = 1
    assert torch.equal(seen(inputs), wanted.bool())


def test_a_composite_without_either_has_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of(tiny("llava"))
    monkeypatch.setattr(hf_positions, "_grids", None)  # nothing is asked of it
    assert not kind.inputs(units_of([[16], []], np.full((1, 2), 4), ("grid_h", "grid_w"))).columns


def test_a_forward_that_needs_more_is_refused() -> None:
    with pytest.raises(ModelError, match="Gemma4ForConditionalGeneration: its forward fails before the language model"):
        HFTextKind("Gemma4ForConditionalGeneration", tiny("gemma4").to_dict())


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_a_rule_of_ones_own_replaces_that_of_a_composite(model_type: str) -> None:
    """Items have the names of their modules."""
    config = tiny(model_type)
    path = decoder_path("llm", whole_of(model_class(model_type), config))
    with torch.device("meta"):
        llm = HFComposedLM(model_class(model_type), config, path=path)
    llm.attend_by(BidirectionalItems(("eyes",)))
    units = units_of([[4], []], np.full((1, 2), 4), ("grid_h", "grid_w"))
    wanted = torch.block_diag(*(torch.ones(n, n).tril() for n in (13, 7, 3)))
    wanted[5:9, 5:9] = 1
    assert torch.equal(seen(pickle.loads(pickle.dumps(llm.kind)).inputs(units)), wanted.bool())


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mistral3", "gemma3"])
def test_context_parallel_ranks_receive_the_keys_in_windows_alone(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are those of one process; layers of Qwen2.5-VL and of Gemma 3 are with and without a window."""
    config = tiny(model_type)
    text = config.text_config
    text.sliding_window, text.use_sliding_window = 4, True
    if model_type != "mistral3":
        text.layer_types = ["sliding_attention", "full_attention"] * 2
    path = decoder_path("llm", whole_of(model_class(model_type), config))
    llm = MultimodalModel({"llm": HFComposedLM(model_class(model_type), config, path=path)}).double().eval().llm
    exchange, received = Meeting.exchange, [list[int](), list[int]()]

    def counted(meeting: Meeting, rank: int, parts: Any, counts: Any) -> torch.Tensor:
        received[rank].append(sum(counts))
        return exchange(meeting, rank, parts, counts)

    monkeypatch.setattr(Meeting, "exchange", counted)
    with in_dtype(torch.float64):
        assert packing_errors(llm)["context"] < 1e-12
    first = np.repeat(np.cumsum(LENGTHS) - LENGTHS, LENGTHS)
    windows = [window for of in llm.block_windows() for window in of]
    assert set(windows) == ({4} if model_type == "mistral3" else {4, None})
    for own, counts in zip(two_chunks(len(first), 2).tolist(), received, strict=True):
        seen = {
            window: {k for row in own for k in range(max(first[row], row + 1 - (window or 99)), row + 1)}
            for window in (4, None)
        }
        assert counts == [len(seen[window].difference(own)) for window in windows]
