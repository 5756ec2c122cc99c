from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Siglip2VisionConfig, Siglip2VisionModel, WhisperConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from hetero_strategy.errors import DataError, ModelError
from hetero_strategy.model.encoder import Encoder, Projector
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.zoo import flow_decoder, hf_llama, hf_qwen3, siglip2_encoder, titan_llama, whisper_encoder
from hetero_strategy.zoo.siglip2 import merge_order
from hetero_strategy.zoo.whisper import clip_spans
from tests.model.helpers import VIT, WHISPER, clips, images, ready

GRIDS = [(2, 3), (4, 4), (1, 5), (2, 3), (6, 2)]


def load(theirs, ours):
    theirs.load_state_dict(ours.state_dict(), strict=False)
    return theirs.to(next(ours.parameters()).dtype).eval()


def siglip_reference(backbone, inputs):
    """transformers' own forward on padded images."""
    model = load(Siglip2VisionModel(Siglip2VisionConfig(**VIT, vision_use_head=False)), backbone.model)
    lengths = inputs.packing.lengths
    padded = torch.zeros(len(lengths), lengths.max(), inputs.values.shape[1], dtype=next(model.parameters()).dtype)
    mask = torch.zeros(padded.shape[:2], dtype=torch.long)
    start = 0
    for i, length in enumerate(lengths):
        padded[i, :length] = inputs.values[start : start + length]
        mask[i, :length] = 1
        start += length
    out = model(padded, mask, torch.from_numpy(inputs.sizes)).last_hidden_state
    return torch.cat([out[i, :length] for i, length in enumerate(lengths)])


def test_siglip2_equals_transformers_on_padded_images():
    encoder = ready(siglip2_encoder(out_width=8, **VIT), dtype=torch.float32)
    inputs = images(GRIDS)
    out = encoder.backbone(inputs)
    torch.testing.assert_close(out, siglip_reference(encoder.backbone, inputs), rtol=1e-5, atol=1e-5)
    # The comparison sees a position: swap two grids of equal size.
    swapped = images([(3, 2), *GRIDS[1:]])
    assert not torch.allclose(encoder.backbone(swapped), out, atol=1e-3)


@pytest.mark.parametrize("made", ["siglip2", "whisper"])
def test_what_nothing_needs_any_more_is_freed_between_blocks(made):
    """Without gradients only the rows between two blocks are there, not those that the first one took."""
    if made == "siglip2":
        backbone, inputs = ready(siglip2_encoder(out_width=8, **VIT)).backbone, images([(16, 16)] * 2)
    else:
        backbone, inputs = ready(whisper_encoder(out_width=8, **WHISPER)).backbone, clips([24] * 20)
    _, second = backbone.blocks().values()
    seen = []
    with Allocations() as counted, torch.no_grad():
        second.register_forward_pre_hook(lambda block, given: seen.append((counted.now, given[0].nbytes)))
        backbone(inputs)
    ((alive, rows),) = seen
    assert rows <= alive < 1.5 * rows


def test_siglip2_every_parameter_has_a_gradient_and_items_are_independent():
    encoder = ready(siglip2_encoder(out_width=8, merge=2, **VIT))
    inputs = images([(2, 4), (4, 4), (2, 2)], merge=2)
    out = encoder(inputs)
    assert out.shape == (2 + 4 + 1, 8) and out.dtype == torch.float64
    out.square().sum().backward()
    assert [name for name, p in encoder.named_parameters() if p.grad is None] == []
    alone = encoder(images([(2, 4)], merge=2))
    torch.testing.assert_close(out[:2], alone, rtol=1e-12, atol=1e-12)


def test_merge_concatenates_neighbours_in_raster_order():
    grids = np.array([[2, 4], [4, 2]])
    order = merge_order(grids, 2)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    picture = np.arange(6 * 9).reshape(6, 9)
    cells = picture.reshape(2, 3, 3, 3).transpose(0, 2, 1, 3).reshape(-1)
    assert merge_order(np.array([[6, 9]]), 3).tolist() == cells.tolist()


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda rows: (rows,), "gave a tuple; let it return one tensor [rows, width] (such as last_hidden_state)"),
        (lambda rows: BaseModelOutput(rows), "gave a BaseModelOutput; let it return one tensor [rows, width]"),
        (lambda rows: rows[None], "gave [1, 2, 8]; let it return one tensor [rows, width]"),
    ],
)
def test_a_backbone_that_gives_no_rows_is_named(give, message):
    class Own(nn.Module):
        def forward(self, inputs):
            return give(torch.ones(2, 8, dtype=torch.float64))

    encoder = ready(Encoder(Own(), Projector(8, 4)))
    encoder.name = "vision"
    with pytest.raises(DataError) as raised:
        encoder(images([(2, 4)], merge=2))
    assert str(raised.value).startswith("module 'vision': Own ") and message in str(raised.value)


def test_siglip2_refuses_what_does_not_fit():
    with pytest.raises(ModelError, match=r"Siglip2VisionModel: .* KeyError 'gleu'"):
        siglip2_encoder(out_width=8, **VIT, hidden_act="gleu")
    encoder = ready(siglip2_encoder(out_width=8, merge=2, **VIT))
    with pytest.raises(DataError, match="merge=2"):
        encoder(images([(3, 2)], merge=2))
    with pytest.raises(DataError, match="made 1 rows but"):
        encoder(images([(2, 2)], merge=1))
    with pytest.raises(DataError, match="patch_size 2"):
        encoder(images([(2, 2)], merge=2, patch=3))
    with pytest.raises(ModelError, match="hidden_sizes"):
        siglip2_encoder(out_width=8, hidden_sizes=3)


@pytest.mark.parametrize("make", ["siglip2", "whisper"])
def test_zero_items_forward_and_backward(make):
    if make == "siglip2":
        encoder, inputs = siglip2_encoder(out_width=8, merge=2, **VIT), images([], merge=2)
    else:
        encoder, inputs = whisper_encoder(out_width=8, stack=2, **WHISPER), clips([], stack=2)
    encoder = ready(encoder)
    out = encoder(inputs)
    assert out.shape == (0, 8)
    out.sum().backward()
    for name, parameter in encoder.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and (parameter.grad == 0).all(), name


def test_half_precision_keeps_position_tables():
    encoder = ready(siglip2_encoder(out_width=8, **VIT)).to(torch.bfloat16)
    out = encoder(images(GRIDS))
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


def whisper_reference(backbone, frames, values):
    """transformers' own forward of one clip: a model whose positions are exactly as long as the clip."""
    rows = -(-frames // 2)
    model = WhisperEncoder(WhisperConfig(**WHISPER | {"max_source_positions": rows}))
    state = backbone.model.state_dict()
    state["embed_positions.weight"] = state["embed_positions.weight"][:rows]
    model.load_state_dict(state)
    return model.to(values.dtype).eval()(values.T[None], None).last_hidden_state[0]


def test_whisper_equals_transformers_on_a_full_length_clip():
    encoder = ready(whisper_encoder(out_width=8, **WHISPER))
    inputs = clips([24])  # all positions
    expected = whisper_reference(encoder.backbone, 24, inputs.values.double())
    torch.testing.assert_close(encoder.backbone(inputs), expected, rtol=1e-11, atol=1e-11)


def test_whisper_clips_together_equal_each_clip_alone():
    encoder = ready(whisper_encoder(out_width=8, **WHISPER))
    frames = [7, 24, 1, 12, 2, 13]
    inputs = clips(frames)
    out = encoder.backbone(inputs)
    start = row = 0
    for length in frames:
        rows = -(-length // 2)
        own = clips([length])
        values = inputs.values[start : start + length]
        alone = encoder.backbone(type(own)(values, own.sizes, own.rows, own.packing))
        torch.testing.assert_close(out[row : row + rows], alone, rtol=1e-11, atol=1e-11)
        if length % 2 == 0:  # transformers takes even lengths only
            expected = whisper_reference(encoder.backbone, length, values.double())
            torch.testing.assert_close(alone, expected, rtol=1e-11, atol=1e-11)
        start, row = start + length, row + rows
    assert row == len(out)


def test_whisper_masks_what_the_first_convolution_writes_beyond_a_clip():
    """Without the mask conv1's bias would leak into a clip's last row: the bias must matter only inside."""
    encoder = ready(whisper_encoder(out_width=8, **WHISPER))
    together, alone = clips([5, 5]), clips([5])
    first = encoder.backbone(together)[:3]
    torch.testing.assert_close(
        first,
        encoder.backbone(type(alone)(together.values[:5], alone.sizes, alone.rows, alone.packing)),
        rtol=1e-11,
        atol=1e-11,
    )
    with torch.no_grad():
        encoder.backbone.model.conv1.bias += 1.0
    assert not torch.allclose(encoder.backbone(together)[:3], first)


def test_whisper_stack_fills_the_tail_with_zeros():
    encoder = ready(whisper_encoder(out_width=8, stack=3, **WHISPER))
    inputs = clips([14, 5], stack=3)  # 7 and 3 rows -> 3 and 1
    out = encoder.backbone(inputs)
    assert out.shape == (4, 48)
    assert (out[2, 16:] == 0).all() and (out[2, :16] != 0).all() and (out[3] != 0).all()
    encoder(inputs).square().sum().backward()
    missing = [name for name, p in encoder.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    assert not encoder.backbone.model.embed_positions.weight.requires_grad


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (
            siglip2_encoder,
            {"out_width": None, "merge": "2", "projector_hidden": 0, "patch_size": 0, "num_channels": -1},
        ),
        (whisper_encoder, {"out_width": 0, "stack": None, "projector_hidden": 1.5, "num_mel_bins": 0}),
        (flow_decoder, {"width": None, "dim": 16.0, "n_layers": "4", "ffn": 0}),
        (hf_llama, {"vocab_size": 0, "num_key_value_heads": 0, "num_hidden_layers": -1, "intermediate_size": 0}),
        (hf_qwen3, {"hidden_size": 0, "max_position_embeddings": 0}),
        (
            titan_llama,
            {"vocab_size": None, "dim": 0, "n_heads": 0, "n_kv_heads": 0, "n_layers": 1.5, "max_seq_len": "9"},
        ),
    ],
)
def test_sizes_that_no_model_has_are_named(make, fields):
    """Libraries divided by them, or made a model whose rows are empty."""
    given = {"out_width": 8} if make in (siglip2_encoder, whisper_encoder) else {}
    given |= {"width": 16, "patch_size": 2} if make is flow_decoder else {}
    for name, size in fields.items():
        with pytest.raises(
            ModelError, match=rf": {name.removeprefix('projector_')} is {size!r}; use a whole number of at"
        ):
            make(**{**given, name: size})


def test_whisper_counts_its_padding_and_refuses_long_clips():
    assert clip_spans(np.array([[7], [24], [1]])).sum() == 8 + 26 + 2
    encoder = ready(whisper_encoder(out_width=8, **WHISPER))
    with pytest.raises(DataError, match="26 frames exceeds 24"):
        encoder(clips([26]))
    with pytest.raises(ModelError, match="layerdrop"):
        whisper_encoder(out_width=8, **WHISPER, encoder_layerdrop=0.1)
    with pytest.raises(ModelError, match=r"apply_spec_augment=true masks frames at random .*: set it to false"):
        whisper_encoder(out_width=8, **WHISPER, apply_spec_augment=True)
    with pytest.raises(ModelError, match=r"WhisperEncoder: .* KeyError 'gleu'"):
        whisper_encoder(out_width=8, **WHISPER, activation_function="gleu")


@pytest.mark.parametrize("make", ["siglip2", "whisper"])
def test_flops_are_those_that_torch_counts(make):
    if make == "siglip2":
        encoder, inputs = siglip2_encoder(out_width=8, merge=2, **VIT), images([(4, 4), (4, 4)], merge=2)
    else:
        encoder, inputs = whisper_encoder(out_width=8, stack=2, **WHISPER), clips([24, 24], stack=2)
    encoder = ready(encoder, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        encoder(inputs)
    # torch does not count attention: two products of each pair of rows, in two blocks.
    extra = -4 * 16 * 2 * int((inputs.packing.lengths**2).sum())
    if make == "whisper":  # silent frames between clips: 26 instead of 24 each
        extra += 2 * 3 * 16 * (2 * 6 + 16) * 2
    assert encoder.flops(inputs.packing.lengths) == counter.get_total_flops() - extra


def test_a_siglip_of_one_resolution_is_refused_with_what_to_take(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "siglip"}')
    with pytest.raises(
        ModelError, match=r"of a 'siglip' model, .*; take .* such as google/siglip2-so400m-patch16-naflex"
    ):
        siglip2_encoder(checkpoint=tmp_path, out_width=8)
