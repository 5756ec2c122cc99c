"""Single steps of a small real model on real processes, without a Trainer: many plans through one executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hetero_strategy.assembly import Assembled, Scheduling, assemble
from hetero_strategy.data.batch import Batch
from hetero_strategy.data.datamodule import MultimodalDataModule
from hetero_strategy.data.digits import digit_processors
from hetero_strategy.data.loader import Share, StepDataset
from hetero_strategy.layout.placement import Placement, place
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model import MultimodalModel, hf_llama, siglip2_encoder, titan_llama, whisper_encoder
from hetero_strategy.schedule.check import check
from tests.distributed.damage import damaged

WIDTH = 32


@dataclass(frozen=True)
class Setting:
    """A model in its layouts."""

    folder: str
    layouts: Mapping[str, Mapping[str, Any]]
    order: str = "1f1b"
    lm: str = "titan"
    vision_layers: int = 2
    audio_layers: int = 1
    llm_layers: int = 4
    batch: int = 9
    freeze: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    gather: str = "auto"
    max_in_flight: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    """``encoder_microbatch_tokens``."""
    tied: bool = False
    draws: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.layouts)


def model_of(setting: Setting, vocabulary: int) -> MultimodalModel:
    """The same small model for every layout."""
    modules: dict[str, Any] = {}
    if "vision" in setting.modules:
        modules["vision"] = siglip2_encoder(
            out_width=WIDTH, merge=2, hidden_size=32, intermediate_size=64, num_hidden_layers=setting.vision_layers,
            num_attention_heads=4, num_channels=1, patch_size=8, num_patches=16,
        )  # fmt: skip
    if "audio" in setting.modules:
        modules["audio"] = whisper_encoder(
            out_width=WIDTH, d_model=32, encoder_layers=setting.audio_layers, encoder_attention_heads=4,
            encoder_ffn_dim=64, num_mel_bins=40, max_source_positions=256,
        )  # fmt: skip
    if setting.lm == "titan":
        modules["llm"] = titan_llama(
            vocab_size=vocabulary, dim=WIDTH, n_layers=setting.llm_layers, n_heads=4, n_kv_heads=4, multiple_of=16,
            max_seq_len=512,
        )  # fmt: skip
    else:
        modules["llm"] = hf_llama(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=setting.llm_layers,
            num_attention_heads=4, num_key_value_heads=4, head_dim=8, max_position_embeddings=512,
            tie_word_embeddings=setting.tied,
        )  # fmt: skip
    if setting.draws:
        from hetero_strategy.model import flow_decoder

        modules["draw"] = flow_decoder(**DRAW, condition_width=WIDTH)
    return MultimodalModel(modules, freeze=setting.freeze, seed=11)


DRAW: dict[str, Any] = {}


@lru_cache(maxsize=4)
def data_of(folder: str, draws: bool) -> MultimodalDataModule:
    """The data set's index, once per process."""
    place_of = Path(folder)
    processors: dict[str, Any] = dict(digit_processors())
    data = MultimodalDataModule(
        train=place_of / "train.json",
        tokenizer=place_of / "tokenizer.json",
        processors=processors,
        global_batch_size=9,
        shuffle=False,
    )
    data.prepare_data()
    return data


def steps_of(setting: Setting, microbatches: int, share: Share) -> StepDataset:
    data = data_of(setting.folder, setting.draws)
    index = data._index("train", progress=False)
    assert index is not None
    return StepDataset(
        index,
        data.processors,
        tuple((s, t) for s, t in data.edges if s in setting.modules and t in setting.modules),
        share,
        global_batch_size=setting.batch,
        microbatches=microbatches,
        microbatch_tokens=setting.tokens,
        shuffle=False,
    )


def share_of(placement: Placement, setting: Setting, rank: int) -> Share:
    modules = setting.modules
    seats = {name: placement.coordinate(name, rank) for name in modules}
    stages = {n: () if c is None else placement.layouts[n].pipeline.stages_of(c.pp) for n, c in seats.items()}
    tp = {n: placement.layouts[n].tp for n in modules}
    return Share(
        instances={n: placement.layouts[n].dp for n in modules},
        mine={n: None if c is None else c.instance for n, c in seats.items()},
        row_multiple={"llm": 8 * tp["llm"]} if tp["llm"] > 1 else {},
        without_first=frozenset(n for n in modules if 0 not in stages[n]),
        without_last=frozenset(n for n in modules if placement.layouts[n].pipeline.stages - 1 not in stages[n]),
    )


@dataclass
class Stepped:
    losses: dict[str, float]
    gradients: dict[str, torch.Tensor]
    """Of the parameters that this process owns, whole."""
    measured: list[Any] = field(default_factory=list)


def reference(setting: Setting, microbatches: int, step: int = 0) -> Stepped:
    """The one-process step, in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        data = data_of(setting.folder, setting.draws)
        model = model_of(setting, data.tokenizer.vocab_size).double().train()
        batch = steps_of(setting, microbatches, Share.whole(setting.modules))[step]
        out = model(batch)
        out.loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Stepped({n: float(x) for n, x in out.losses.items()}, gradients)


def placed(setting: Setting, world: int) -> Placement:
    return place({n: ModuleLayout.from_config(n, dict(v)) for n, v in setting.layouts.items()}, world)


def assembled(setting: Setting, rank: int, world: int, dtype: torch.dtype = torch.float64) -> Assembled:
    """The model on its ranks."""
    torch.set_default_dtype(dtype)
    data = data_of(setting.folder, setting.draws)
    with torch.device("meta"):
        model = model_of(setting, data.tokenizer.vocab_size).to(dtype).train()
    return assemble(
        "model",
        model,
        placed(setting, world),
        rank,
        torch.device("cpu"),
        wire_dtype=dtype,
        hidden_dtype=dtype,
        scheduling=Scheduling(setting.order, setting.max_in_flight, setting.gather),
        recompute=setting.recompute,
    )


def steps_on_rank(
    rank: int, world: int, setting: Setting, counts: Sequence[int], damage: str = ""
) -> list[Stepped]:
    """One training step for every number of microbatches, through one executor."""
    made = assembled(setting, rank, world)
    placement = placed(setting, world)
    owned = made.state.model_parameters()
    results = []
    for number in counts:
        batch: Batch = steps_of(setting, number, share_of(placement, setting, rank))[0]
        with damaged(damage):
            outcome = made.executor.run(batch, train=True)
        check(made.executor.recorder.steps[-1].schedule)
        gradients = {}
        for name, p in owned.items():
            if p.grad is not None:
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                gradients[name.removeprefix("model.")] = whole.detach().clone()
            p.grad = None
        results.append(Stepped({n: float(x) for n, x in outcome.losses.items()}, gradients))
    dist.barrier()
    return results
