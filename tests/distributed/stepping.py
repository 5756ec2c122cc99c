"""Single steps of a small real model on real processes, without a Trainer: many plans through one executor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hetero_strategy.assembly import Assembled, Scheduling, assemble
from hetero_strategy.data.balancing import Balance, Surroundings
from hetero_strategy.data.datamodule import MultimodalDataModule
from hetero_strategy.data.digits import digit_processors, draw_processors, write_digits, write_digits_draw
from hetero_strategy.data.plan import StepPlan
from hetero_strategy.data.steps import Share, StepDataset
from hetero_strategy.layout.placement import Placement, place
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model import (
    MultimodalModel,
    flow_decoder,
    hf_llama,
    siglip2_encoder,
    titan_llama,
    whisper_encoder,
)
from hetero_strategy.schedule import executor as running
from hetero_strategy.schedule.action import Action, Lane, Node, StageGraph
from hetero_strategy.schedule.check import check
from hetero_strategy.strategy import ROW_ALIGNMENT
from tests.distributed.damage import damaged

WIDTH = 32
SAMPLES = 9
MOST = 6
"""Ranks of a world in which everything is damaged, one by one."""


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
    draw_layers: int = 2
    freeze: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    gather: str = "auto"
    max_in_flight: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    """``encoder_microbatch_tokens``."""
    balance: Mapping[str, Any] | None = None
    """None: all units are dealt in order."""
    ranks_per_node: int = 1 << 30
    tied: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.layouts)

    @property
    def world(self) -> int:
        return 1 + max(max(layout["ranks"]) for layout in self.layouts.values())

    def model_key(self) -> tuple[Any, ...]:
        """What a one-process run depends on."""
        layers = (self.vision_layers, self.audio_layers, self.llm_layers, self.draw_layers)
        return (self.folder, self.modules, self.lm, self.tied, self.freeze, layers)


def data(folder: Path, *, draws: bool = False) -> str:
    """One batch of ragged samples, some of them only text; written once."""
    write = write_digits_draw if draws else write_digits
    return str(write(folder, train=SAMPLES, val=SAMPLES, seed=3, progress=False))


def model_of(setting: Setting, vocabulary: int) -> MultimodalModel:
    """The same small model for every layout."""
    modules: dict[str, Any] = {}
    for name in setting.modules:
        if name == "vision":
            modules[name] = siglip2_encoder(
                out_width=WIDTH, merge=2, hidden_size=32, intermediate_size=64, num_hidden_layers=setting.vision_layers,
                num_attention_heads=4, num_channels=1, patch_size=8, num_patches=16,
            )  # fmt: skip
        elif name == "audio":
            modules[name] = whisper_encoder(
                out_width=WIDTH, d_model=32, encoder_layers=setting.audio_layers, encoder_attention_heads=4,
                encoder_ffn_dim=64, num_mel_bins=40, max_source_positions=256,
            )  # fmt: skip
        elif name == "draw":
            modules[name] = flow_decoder(
                width=WIDTH, patch_size=2, channels=1, dim=32, n_layers=setting.draw_layers, n_heads=4, ffn=64,
                sample_steps=2,
            )  # fmt: skip
        elif setting.lm == "titan":
            modules[name] = titan_llama(
                vocab_size=vocabulary, dim=WIDTH, n_layers=setting.llm_layers, n_heads=4, n_kv_heads=4, multiple_of=16,
                max_seq_len=512,
            )  # fmt: skip
        else:
            modules[name] = hf_llama(
                vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=setting.llm_layers,
                num_attention_heads=4, num_key_value_heads=4, head_dim=8, max_position_embeddings=512,
                tie_word_embeddings=setting.tied,
            )  # fmt: skip
    return MultimodalModel(modules, freeze=setting.freeze, seed=11)


@lru_cache(maxsize=4)
def data_of(folder: str, draws: bool) -> MultimodalDataModule:
    """The data set's index, once per process."""
    made = MultimodalDataModule(
        train=Path(folder) / "train.json",
        tokenizer=Path(folder) / "tokenizer.json",
        processors=draw_processors() if draws else digit_processors(),
        global_batch_size=SAMPLES,
        shuffle=False,
    )
    made.prepare_data()
    return made


def steps_of(
    setting: Setting, microbatches: int | None, share: Share, around: Surroundings | None = None
) -> StepDataset:
    """Batches of a rank; step 0 has the whole data set."""
    made = data_of(setting.folder, "draw" in setting.modules)
    return StepDataset(
        made.indices["train"],
        made.processors,
        tuple((s, t) for s, t in made.edges if s in setting.modules and t in setting.modules),
        share,
        global_batch_size=SAMPLES,
        microbatches=microbatches,
        microbatch_tokens=setting.tokens,
        balancing=None
        if setting.balance is None
        else Balance.of(setting.balance).resolve(share.instances, around or Surroundings()),
        shuffle=False,
    )


def share_of(placement: Placement, setting: Setting, rank: int) -> Share:
    """What a rank computes, as the strategy and the data module say it."""
    tp = placement.layouts["llm"].tp
    return Share.of(placement, setting.modules, rank, {"llm": tp * ROW_ALIGNMENT} if tp > 1 else {})


@dataclass
class Reference:
    """What one process makes of the batch, fp64."""

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor]
    predicted: torch.Tensor | None = None
    drawn: dict[str, torch.Tensor] = field(default_factory=dict)

    def errors(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Relative error of every parameter's gradient, in the 2-norm."""
        found = {}
        for name, gradient in gradients.items():
            expected = self.gradients[name]
            size = float(expected.norm())
            if name.endswith(("k_proj.bias", "wk.bias")):
                # Softmax ignores a shift of all keys: this gradient is zero, and what is there is rounding noise of
                # the size of its weight's gradient.
                size = float(self.gradients[name.replace("bias", "weight")].norm())
            found[name] = float((gradient - expected).norm()) / size
        return found


@contextmanager
def fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def reference(setting: Setting, microbatches: int, *, train: bool = True) -> Reference:
    """The one-process step."""
    with fp64():
        vocabulary = data_of(setting.folder, "draw" in setting.modules).tokenizer.vocab_size
        model = model_of(setting, vocabulary).double().train(train)
        out = model(steps_of(setting, microbatches, Share.whole(setting.modules))[0])
        if train:
            out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    predicted = None if out.predictions is None else out.predictions.values
    losses = {n: float(x.detach()) for n, x in out.losses.items()}
    return Reference(losses, gradients, predicted, dict(out.drawn or {}))


def placed(setting: Setting, world: int) -> Placement:
    return place({n: ModuleLayout.from_config(n, dict(v)) for n, v in setting.layouts.items()}, world)


def assembled(setting: Setting, rank: int, world: int, *, train: bool = True) -> Assembled:
    """The model on its ranks, fp64."""
    with fp64():
        vocabulary = data_of(setting.folder, "draw" in setting.modules).tokenizer.vocab_size
        with torch.device("meta"):
            model = model_of(setting, vocabulary).double().train(train)
        return assemble(
            "model",
            model,
            placed(setting, world),
            rank,
            torch.device("cpu"),
            wire_dtype=torch.float64,
            hidden_dtype=torch.float64,
            scheduling=Scheduling(setting.order, setting.max_in_flight, setting.gather),
            recompute=setting.recompute,
            ranks_per_node=setting.ranks_per_node,
        )


@contextmanager
def counted() -> Iterator[dict[Node, int]]:
    """Most microbatches of each of this rank's stages that are alive after any action of a step."""
    peaks: dict[Node, int] = {}
    original = running._Step.do

    def do(self: running._Step, action: Action) -> None:
        original(self, action)
        for node in {node for node, _ in self.live}:
            peaks[node] = max(peaks.get(node, 0), sum(n == node for n, _ in self.live))

    running._Step.do = do  # type: ignore[method-assign]
    try:
        yield peaks
    finally:
        running._Step.do = original  # type: ignore[method-assign]


@dataclass
class Stepped:
    """What a rank saw of one step."""

    losses: dict[str, float]
    errors: dict[str, float]
    """Of the gradients of parameters that this rank owns, against the reference."""
    peaks: dict[Node, int]
    in_flight: dict[Node, int]
    """What the schedule says of the same nodes."""
    plan: StepPlan
    lanes: tuple[Lane, ...]
    """Of the schedule: what every rank does, as this one has it."""


@dataclass(frozen=True)
class Run:
    """All steps of a rank."""

    steps: list[Stepped]
    damaged: dict[str, dict[str, float]]
    """Damage -> errors; the damages are named by direction and edge."""


def steps_on_rank(
    rank: int,
    world: int,
    setting: Setting,
    expected: Reference,
    counts: Sequence[int | None],
    damages: int = 0,
    balances: Sequence[Mapping[str, Any]] = (),
) -> Run:
    """One training step for every number of microbatches, then one for every damage, through one executor.

    Args:
        rank, world: of this process.
        setting: what runs.
        expected: to compare with.
        counts: numbers of microbatches.
        damages: number of microbatches of steps in which one edge is damaged in one direction: all that carry
            anything, in large worlds (where steps are slow) the first and the last of them; 0: none.
        balances: ways to spread the work, every number of microbatches with each of them; default: the setting's.
    """
    made = assembled(setting, rank, world)
    share = share_of(placed(setting, world), setting, rank)
    modules = made.executor.wiring.modules
    owned = {f"{n}.{fqn}": p for n, m in modules.items() for fqn, p in m.named_parameters() if not p.is_meta}

    def step(number: int | None, setting: Setting, damage: str = "") -> Stepped:
        with damaged(damage), counted() as peaks:
            outcome = made.executor.run(steps_of(setting, number, share, made.surroundings)[0], train=True)
        schedule = made.executor.recorder.steps[-1].schedule
        if not damage and rank == 0:
            check(schedule)
        gradients = {}
        for name, p in owned.items():
            if p.grad is not None:
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                gradients[name] = whole.detach()
            p.grad = None
        held = {node: most for node, most in schedule.in_flight.items() if node in made.executor.stages and most}
        losses = {n: float(x.detach()) for n, x in outcome.losses.items()}
        plan = made.executor.recorder.steps[-1].plan
        return Stepped(losses, expected.errors(gradients), dict(peaks), held, plan, schedule.lanes)

    ways = [replace(setting, balance=balance) for balance in balances] or [setting]
    steps = [step(number, way) for way in ways for number in counts]
    breaks = _breaks(made.executor.graph) if damages else {}
    names = list(breaks) if world <= MOST else [next(iter(breaks)), list(breaks)[-1]]
    found = {name: step(damages, setting, breaks[name]).errors for name in names}
    dist.barrier()
    return Run(steps, found)


def _breaks(graph: StageGraph) -> dict[str, str]:
    """What can be damaged, forwards first: name for people -> name for :func:`damaged`."""
    edges = list(enumerate(graph.edges))
    forward = {f"forward {s} to {t}": f"forward:{i}" for i, (s, t) in edges}
    return forward | {f"backward {s} to {t}": f"backward:{i}" for i, (s, t) in edges if graph.stages[s].backward}


@dataclass
class Evaluated:
    losses: dict[str, float]
    predicted: torch.Tensor
    drawn: dict[str, torch.Tensor]
    recorded: int
    """Training steps that the recorder holds."""


def evaluations_on_rank(rank: int, world: int, setting: Setting, counts: Sequence[int]) -> list[Evaluated]:
    """One forward-only step for every number of microbatches."""
    made = assembled(setting, rank, world, train=False)
    share = share_of(placed(setting, world), setting, rank)
    found = []
    for number in counts:
        batch = steps_of(setting, number, share)[0]
        with torch.no_grad():
            outcome = made.executor.run(batch, train=False)
        check(made.executor.schedule(batch, train=False))
        assert outcome.predicted is not None
        losses = {n: float(x) for n, x in outcome.losses.items()}
        found.append(Evaluated(losses, outcome.predicted, outcome.drawn, len(made.executor.recorder.steps)))
    dist.barrier()
    return found
