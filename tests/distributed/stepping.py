"""Single steps of a small real model on real processes, without a Trainer: many plans through one executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typing_extensions import override

from hetero_strategy import ragged
from hetero_strategy.errors import HeteroError
from hetero_strategy.layout.spec import ModuleLayout, Placement, place
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.mask import RULES, BidirectionalItems, Causal, MaskRule, Spans, Words, by_window
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.combine import StepSums
from hetero_strategy.model.inputs import EncoderInputs
from hetero_strategy.parallelize.float8 import Float8
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.parallelize.transform import Site
from hetero_strategy.parallelize.transforms import of_kind, read_transforms
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.plan_step import ResolvedBalance
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.runtime import executor as running
from hetero_strategy.runtime.warm_up import check_packing, warm_up
from hetero_strategy.schedule.action import Lane, StageGraph, StageId
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.compile import RankAction
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.simulator.balance_context import aligned_rows
from hetero_strategy.strategy.assembly import Assembled, assemble
from hetero_strategy.strategy.blueprint import Options, checked_blueprint
from hetero_strategy.testing import gradients_of, relative_errors
from hetero_strategy.testing.setting import in_dtype
from hetero_strategy.zoo import (
    HFCausalLM,
    flow_decoder,
    hf_llama,
    hf_qwen3,
    siglip2_encoder,
    titan_llama,
    whisper_encoder,
)
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from recipes.digits import write_digits, write_digits_draw
from tests.distributed.damage import damaged, late
from tests.small_models import DRAWING, READING, drawer, kinds_of, reader

WIDTH = 32
SAMPLES = 9
PRECISIONS = {
    "64-true": Storage(torch.float64, torch.float64),
    "32-true": Storage(),
    "32-mixed": Storage(torch.float32, torch.float64),
    "some kept": Storage(torch.float32, torch.float64, keep=("llm.*.mlp.gate.*", "llm.*.0.mlp.experts.*")),
    "bf16-mixed": Storage(torch.bfloat16, torch.float32),
}
"""32-mixed is none that a person can choose: what holds for it to six digits holds for bf16-mixed."""
SHARED = "HETERO_TESTS_SHARED_DATA"
"""Environment variable: data without and with drawings whose index is made before workers are forked."""
MOST = 3
"""Ranks of a world in which everything is damaged, one by one."""


ITEM_MODULES = {"vision": "encoder", "audio": "encoder", "draw": "generator"}
"""All others are language models."""


def by_module(**settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return module -> transform -> setting for transform -> module -> setting."""
    modules = dict.fromkeys(module for of in settings.values() for module in of)
    return {module: {name: of[module] for name, of in settings.items() if module in of} for module in modules}


@dataclass(frozen=True)
class Setting:
    """A model in its layouts, and what it is trained on."""

    folder: str
    layouts: Mapping[str, Mapping[str, Any]]
    schedule: str = "1f1b"
    lm: str = "titan"
    """Or a key of :data:`LANGUAGE_MODELS`."""
    edges: tuple[tuple[str, str], ...] | None = None
    """None: every encoder feeds every language model, the first of which feeds the generators."""
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    heads: int = 4
    """Of language models of Hugging Face."""
    kv_heads: int = 4
    vision_layers: int = 2
    audio_layers: int = 1
    llm_layers: int = 4
    draw_layers: int = 2
    freeze: tuple[str, ...] = ()
    transforms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reshard_after_forward: str = "auto"
    fill: str = "none"
    pieces: Mapping[str, int] = field(default_factory=dict)
    per_item: tuple[str, ...] = ()
    """Encoders whose rows are put together item by item: without items nothing follows from their parameters."""
    unused: tuple[str, ...] = ()
    """Modules whose last block runs in vain, so that no loss reaches its parameters."""
    max_in_flight: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    """``encoder_microbatch_rows``."""
    balance: Mapping[str, Any] | None = None
    """None: all units are dealt in order; with context parallelism items stay with their samples."""
    ranks_per_node: int = 1 << 30
    tied: bool = False
    dropout: Mapping[str, float] = field(default_factory=dict)
    """Of what in every module that has it: ``dropout``, ``attention_dropout``, ``activation_dropout``."""
    batches: tuple[tuple[int, ...], ...] = (tuple(range(SAMPLES)),)
    """Samples of each step."""
    microbatches: int | None = 2
    """Where a test does not say; None: by budget."""
    precision: str = "64-true"
    """Or another key of :data:`PRECISIONS`."""
    attention: Mapping[str, str] = field(default_factory=dict)
    """Language model -> key of :data:`ATTENTION`; default: causal."""
    late: float = 0.0
    """Seconds by which messages between ranks are late, at most."""

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.layouts)

    @property
    def world(self) -> int:
        return 1 + max(max(layout["ranks"]) for layout in self.layouts.values())

    @property
    def storage(self) -> Storage:
        return PRECISIONS[self.precision]

    @property
    def language_models(self) -> tuple[str, ...]:
        """Language models."""
        return tuple(name for name in self.layouts if name not in ITEM_MODULES)

    def flows(self) -> tuple[tuple[str, str], ...]:
        """All edges."""
        if self.edges is not None:
            return self.edges
        of = {kind: [n for n in self.layouts if ITEM_MODULES.get(n) == kind] for kind in ("encoder", "generator")}
        reads = tuple((e, c) for e in of["encoder"] for c in self.language_models)
        return (*reads, *((self.language_models[0], g) for g in of["generator"]))

    def chosen(self, name: str) -> dict[str, Any]:
        """Settings of one transform by module."""
        return {module: of[name] for module, of in self.transforms.items() if name in of}

    def plus(self, **settings: Mapping[str, Any]) -> Setting:
        """Add transforms, given as module -> setting."""
        added = by_module(**settings)
        modules = dict.fromkeys((*self.transforms, *added))
        return replace(self, transforms={n: {**self.transforms.get(n, {}), **added.get(n, {})} for n in modules})

    def model_key(self) -> tuple[Any, ...]:
        """What a one-process run depends on."""
        layers = (self.vision_layers, self.audio_layers, self.llm_layers, self.draw_layers)
        weights = tuple(self.loss_weights.items())
        model = (self.modules, self.lm, self.tied, self.heads, self.kv_heads, self.freeze, layers, self.edges, weights)
        options = (self.dropout, self.chosen("float8"), self.attention)
        others = (tuple(sorted(each.items())) for each in options)
        return (self.folder, *model, self.unused, *others, self.batches, self.precision)


def data(folder: Path, *, draws: bool = False) -> str:
    """One batch of ragged samples, some of them only text; written once."""
    write = write_digits_draw if draws else write_digits
    return str(write(folder, train=SAMPLES, val=SAMPLES, seed=3, progress=False))


class Mixture(HFCausalLM):
    """A language model whose blocks have experts.

    Args:
        visits: experts of a row; with 1, routers have no preference and send all rows to one expert.
        balance_loss: as in :class:`HFCausalLM`.
        sizes: fields of its config.
    """

    def __init__(self, visits: int, head_dim: int, balance_loss: float | None = None, **sizes: Any) -> None:
        experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": visits}
        super().__init__(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **experts), balance_loss=balance_loss)
        self.visits = visits

    @override
    def initialize(self, prefix: str, unit: nn.Module) -> None:
        super().initialize(prefix, unit)
        for name, parameter in unit.named_parameters():
            if name.endswith("mlp.gate.weight") and self.visits == 1:
                nn.init.zeros_(parameter)


def shared_experts(head_dim: int, **sizes: Any) -> HFCausalLM:
    """Return a mixture whose blocks have an expert that all rows visit, too."""
    widths = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return hf_causal_lm(model_type="qwen2_moe", check=False, num_experts=4, num_experts_per_tok=2, **widths, **sizes)


def experts_with_biases(intermediate_size: int, num_hidden_layers: int, **sizes: Any) -> HFCausalLM:
    """Return a mixture whose experts and routers have biases, and whose attention has sinks."""
    layers = {"num_hidden_layers": num_hidden_layers, "layer_types": ["full_attention"] * num_hidden_layers}
    experts = {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    return hf_causal_lm(model_type="gpt_oss", check=False, **sizes, **layers, **experts)


LANGUAGE_MODELS: dict[str, Callable[..., Any]] = {
    "hf_llama": hf_llama,
    "hf_qwen3": hf_qwen3,
    "mixture": partial(Mixture, 2),
    "shared experts": shared_experts,
    "experts with biases": experts_with_biases,
    "all to one expert": partial(Mixture, 1),
    "balanced": partial(Mixture, 2, balance_loss=0.5),
    "biased": partial(
        hf_causal_lm,
        model_type="minimax_m2",
        num_local_experts=4,
        num_experts_per_tok=2,
        check=False,
        balance_loss=0.5,
        router_bias_step=0.01,
    ),
}


def words_of_items(lengths: np.ndarray, spans: Spans) -> np.ndarray:
    """Return Cornstarch's words: text sees items of one of two kinds, which depend on the items' places alone."""
    words = np.full(int(lengths.sum()), 1 | 2, np.int64)
    first = ragged.starts(lengths)[spans.sequence] + spans.start
    words[ragged.expand(first, spans.rows)] = np.repeat(2 << spans.start % 2, spans.rows)
    return words


ATTENTION: dict[str, MaskRule] = {
    **RULES,
    "window": Causal(7),
    "items in a window": BidirectionalItems(window=7),
    "items beyond a window": BidirectionalItems(window=7, whole_items=True),
    "words": Words(words_of_items),
}
"""Rules of attention by the name that a setting has for them."""


def model_of(setting: Setting, vocabulary: int) -> MultimodalModel:
    """The same small model for every layout."""
    modules: dict[str, Any] = {}
    attention = {n: p for n, p in setting.dropout.items() if n == "attention_dropout"}
    for name in setting.modules:
        if name == "vision":
            modules[name] = siglip2_encoder(
                out_width=WIDTH, merge=2, hidden_size=32, intermediate_size=64, num_hidden_layers=setting.vision_layers,
                num_attention_heads=4, num_channels=1, patch_size=8, num_patches=16, **attention,
            )  # fmt: skip
        elif name == "audio":
            modules[name] = whisper_encoder(
                out_width=WIDTH, d_model=32, encoder_layers=setting.audio_layers, encoder_attention_heads=4,
                encoder_ffn_dim=64, num_mel_bins=40, max_source_positions=256, **setting.dropout,
            )  # fmt: skip
        elif name == "draw":
            modules[name] = flow_decoder(
                width=WIDTH, patch_size=2, channels=1, dim=32, n_layers=setting.draw_layers, n_heads=4, ffn=64,
                sample_steps=2,
            )  # fmt: skip
        elif setting.lm == "titan":
            modules[name] = titan_llama(
                vocab_size=vocabulary, dim=WIDTH, n_layers=setting.llm_layers, n_heads=4, n_kv_heads=setting.kv_heads,
                multiple_of=16, max_seq_len=512,
            )  # fmt: skip
        else:
            modules[name] = LANGUAGE_MODELS[setting.lm](
                vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=setting.llm_layers,
                num_attention_heads=setting.heads, num_key_value_heads=setting.kv_heads, head_dim=8,
                max_position_embeddings=512,
                tie_word_embeddings=setting.tied, **attention,
            )  # fmt: skip
    for name, rule in setting.attention.items():
        modules[name].attend_by(ATTENTION[rule])
    for name in setting.per_item:
        modules[name].after = item_by_item
    for name in setting.unused:
        list(modules[name].blocks().values())[-1].register_forward_hook(in_vain)
    return MultimodalModel(modules, setting.flows(), freeze=setting.freeze, loss_weights=setting.loss_weights, seed=11)


def in_vain(block: Any, given: tuple[Any, ...], made: Any) -> Any:
    """The rows that a block was given."""
    return given[0]


def item_by_item(rows: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
    """The same rows, as a person may write it."""
    return torch.cat([rows.new_zeros(0, rows.shape[1]), *rows.split(inputs.rows.tolist())])


@lru_cache(maxsize=4)
def data_of(folder: str, draws: bool) -> MultimodalDataModule:
    """The data set's index, once per process."""
    made = MultimodalDataModule(
        train=Path(folder) / "train.json",
        tokenizer=Path(folder) / "tokenizer.json",
        model=drawer if draws else reader,
        processors=DRAWING if draws else READING,
        global_batch_size=SAMPLES,
        shuffle=False,
    )
    made.prepare_data()
    return made


class Steps(StepDataset):
    """Batches of given samples."""

    def __init__(self, batches: Sequence[Sequence[int]], *args: Any, **options: Any) -> None:
        self.batches = batches
        super().__init__(*args, global_batch_size=max(map(len, batches)), **options)

    def __len__(self) -> int:
        return len(self.batches)

    def samples(self, epoch: int, step: int) -> np.ndarray:
        return np.asarray(self.batches[step], dtype=np.int64)


def steps_of(
    setting: Setting, microbatches: int | None, share: RankView, around: ModelContext | None = None
) -> StepDataset:
    """Batches of a rank; by default one, of the whole data set."""
    made, around = data_of(setting.folder, "draw" in setting.modules), around or ModelContext()
    balancing = ResolvedBalance(dealing=around.dealing) if around.dealing else None
    if setting.balance is not None:
        balancing = BalanceConfig.of(setting.balance).resolve(share.instances, around)
    kinds = kinds_of(setting.layouts)
    for name, rule in setting.attention.items():
        kinds[name] = copy(kinds[name])
        cast(Any, kinds[name]).rules = by_window(ATTENTION[rule], (None,))
    return Steps(
        setting.batches,
        made.indices["train"],
        made.processors,
        setting.flows(),
        share,
        kinds=kinds,
        microbatches=microbatches,
        microbatch_rows=setting.tokens,
        balancing=balancing,
        shuffle=False,
    )


def share_of(placement: Placement, setting: Setting, rank: int) -> RankView:
    """What a rank computes, as the strategy and the data module say it."""
    return RankView.of(placement, setting.modules, rank, aligned_rows(setting.language_models, placement.layouts))


@dataclass
class Reference:
    """What one process makes of the batch, in the precision of the setting."""

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor]
    trains: frozenset[str] = frozenset()
    """Parameters that are not frozen."""
    precision: str = "64-true"
    predicted: torch.Tensor | None = None
    drawn: dict[str, torch.Tensor] = field(default_factory=dict)

    def errors(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the relative error of each gradient, small ones as if they were larger: they are rounding noise."""
        small = torch.finfo(PRECISIONS[self.precision].compute).eps ** (1 / 3)
        found: dict[str, float] = {}
        for module in {name.split(".")[0] for name in gradients}:
            mine, wanted = (
                {name: g for name, g in all_of.items() if name.startswith(f"{module}.")}
                for all_of in (gradients, self.gradients)
            )
            found |= relative_errors(mine, wanted, small)
        return found


def fp64() -> AbstractContextManager[None]:
    return in_dtype(torch.float64)


def reference(setting: Setting, microbatches: int, *, train: bool = True, step: int = 0) -> Reference:
    """A step of one process, samples dealt in order."""
    setting = replace(setting, balance=None)
    with in_dtype(setting.storage.master):
        model = _model(setting).to(setting.storage.compute).train(train)
        for name, recipe in setting.chosen("float8").items():
            how, module = Float8.of(recipe), model.modules_by_name[name]
            assert how is not None
            layout, cpu = ModuleLayout((0,)).resolved(), torch.device("cpu")
            how.apply([module], Site(name, layout, cpu, list(module.blocks()), ()))
        out = model(steps_of(setting, microbatches, RankView.whole(setting.modules))[step])
        if train and out.loss.requires_grad:
            out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    trains = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    predicted = None if out.predictions is None else out.predictions.values
    losses = {n: float(x.detach()) for n, x in out.losses.items()}
    return Reference(losses, gradients, trains, setting.precision, predicted, dict(out.drawn or {}))


def placed(setting: Setting, world: int) -> Placement:
    return place({n: ModuleLayout.from_config(n, dict(v)) for n, v in setting.layouts.items()}, world)


def empty_model(setting: Setting, *, train: bool = True) -> MultimodalModel:
    """Without values."""
    with in_dtype(setting.storage.master), torch.device("meta"):
        return _model(setting).train(train)


def _model(setting: Setting) -> MultimodalModel:
    model = model_of(setting, data_of(setting.folder, "draw" in setting.modules).tokenizer.vocab_size)
    if setting.chosen("float8"):
        _emulate_in_full()
    return model.double() if setting.storage.master == torch.float64 else model


@lru_cache(1)
def _emulate_in_full() -> None:
    """Let emulated float8 multiply in fp64 where its model is.

    torchao always emulates in fp32, whose sums depend in their last bits on how many rows are multiplied at once, which
    is not the same on one process.
    """
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    emulated = FLOAT8_OPS_TABLE[torch.ops.aten.mm.default]

    def multiply(op: Any, factors: Sequence[Any], kwargs: Any = None) -> torch.Tensor:
        if factors[0].dtype != torch.float64:
            return emulated(op, factors, kwargs)
        left, right = (factor.to_original_precision() for factor in factors)
        return torch.mm(left, right)

    FLOAT8_OPS_TABLE[torch.ops.aten.mm.default] = multiply


def assembled(
    setting: Setting, rank: int, world: int, *, train: bool = True, model: MultimodalModel | None = None
) -> Assembled:
    """The model on its ranks."""
    with in_dtype(setting.storage.master):
        scheduling = ScheduleConfig(
            setting.schedule,
            setting.max_in_flight,
            setting.reshard_after_forward,
            setting.fill,
            setting.pieces,
        )
        options = Options(scheduling, read_transforms(setting.transforms), setting.storage)
        built = model or empty_model(setting, train=train)
        plan = checked_blueprint(built, placed(setting, world), options)
        made = assemble("model", built, plan, rank, torch.device("cpu"))
    for node, stage in made.executor.stages.items():
        if (how := of_kind(made.plan.options.transforms, Recompute).get(node.module)) is not None:
            again = how.chosen(stage, list(made.executor.modules[node.module].blocks()))
            parts = [stage] if how.whole else again
            assert all("forward" in vars(part) for part in parts), f"{node} does not run again"
    return made


@contextmanager
def counted() -> Iterator[dict[StageId, int]]:
    """Most microbatches of each of this rank's stages that are alive after any action of a step, whose rows want a
    gradient where a backward comes to what made them, and nowhere else.
    """
    peaks: dict[StageId, int] = {}
    original = running.RunningStep.run

    def run(self: running.RunningStep, step: RankAction) -> None:
        original(self, step)
        live = self.live.get((step.action.node, step.action.microbatch))
        if step.action.kind == "F" and live is not None:
            for source, leaf in zip(step.sources, live.leaves, strict=True):
                assert leaf.requires_grad == self.graph.stages[source.node].backward, f"rows of {source}"
        for node in {node for node, _ in self.live}:
            peaks[node] = max(peaks.get(node, 0), sum(n == node for n, _ in self.live))

    running.RunningStep.run = run  # type: ignore[method-assign]
    try:
        yield peaks
    finally:
        running.RunningStep.run = original  # type: ignore[method-assign]


@dataclass
class Stepped:
    """What a rank saw of one step."""

    losses: dict[str, float]
    errors: dict[str, float]
    """Of the gradients of parameters that this rank owns, against the reference."""
    trains: dict[str, bool]
    """Parameter that this rank owns -> whether it is trained."""
    peaks: dict[StageId, int]
    in_flight: dict[StageId, int]
    """What the schedule says of the same nodes."""
    plan: StepPlan
    lanes: tuple[Lane, ...]
    """Of the schedule: what every rank does, as this one has it."""
    evaluated: dict[str, float] = field(default_factory=dict)
    """Losses of the same batch without backwards, where it was run so."""


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
    made = OnRank(rank, world, setting)
    ways = [replace(setting, balance=balance) for balance in balances] or [setting]
    steps = [made.step(expected, number, way) for way in ways for number in counts]
    breaks = _breaks(made.executor.compiler.graph) if damages else {}
    names = list(breaks) if world <= MOST else [*breaks][:1] + [*breaks][-1:]
    found = {name: made.step(expected, damages, setting, breaks[name]).errors for name in names}
    dist.barrier()
    return Run(steps, found)


class OnRank:
    """A model in place on this rank, to be compared with one process."""

    def __init__(self, rank: int, world: int, setting: Setting, *, checks_packing: bool = False) -> None:
        self.rank, self.checks_packing = rank, checks_packing
        self.share = share_of(placed(setting, world), setting, rank)
        self.made = assembled(setting, rank, world)
        self.executor = self.made.executor
        modules = self.executor.modules
        self.owned = {f"{n}.{fqn}": p for n, m in modules.items() for fqn, p in m.named_parameters() if not p.is_meta}
        self.warm = set[bool]()

    def steps(self, setting: Setting, microbatches: int | None) -> StepDataset:
        """Return the batches of this rank."""
        return steps_of(setting, microbatches, self.share, self.made.plan.context(setting.ranks_per_node))

    def step(
        self, expected: Reference, microbatches: int | None, setting: Setting, damage: str = "", number: int = 0
    ) -> Stepped:
        """One training step.

        Args:
            expected: of this step.
            microbatches: None: by budget.
            setting: as it was assembled, but for how work is spread.
            damage: see :func:`damaged`.
            number: of the step in the setting's batches.
        """
        batch: Batch = self.steps(setting, microbatches)[number]
        self.warm_up(batch)
        with damaged(damage), late(setting.late, self.rank), counted() as peaks:
            outcome = self.executor.run(batch, train=True)
        schedule = self.executor.recorder.steps[-1].schedule
        if not damage and self.rank == 0:
            check(schedule)
        gradients = gradients_of(self.executor.modules)
        for p in self.owned.values():
            p.grad = None
        held = {node: most for node, most in schedule.in_flight.items() if node in self.executor.stages and most}
        trains = {name: p.requires_grad for name, p in self.owned.items()}
        plan = self.executor.recorder.steps[-1].plan
        errors = expected.errors(gradients)
        return Stepped(self._losses(outcome), errors, trains, dict(peaks), held, plan, schedule.lanes)

    def warm_up(self, batch: Batch, *, train: bool = True) -> None:
        """Before the first step every stage runs by itself, which changes nothing, and packed units are compared where
        a test asks for it: those of a Trainer and settings drawn at random do.
        """
        if train in self.warm:
            return
        self.warm.add(train)
        executor, state = self.executor, torch.get_rng_state()
        shards = {name: list(stage.parameters()) for name, stage in executor.stages.items()}
        for p in self.owned.values():
            p.grad = torch.full_like(p, 7.0)
        if self.checks_packing:
            check_packing(executor, batch)
        warm_up(executor, batch, train=train)
        assert torch.equal(torch.get_rng_state(), state) and executor.running is None
        assert all(list(stage.parameters()) == shards[name] for name, stage in executor.stages.items())
        for p in self.owned.values():
            assert p.grad is not None and bool((local(p.grad) == 7.0).all())
            p.grad = None

    def evaluate(self, setting: Setting) -> dict[str, float]:
        """Losses of the first batch, forwards alone."""
        modules = self.executor.modules.values()
        for module in modules:
            module.eval()
        batch: Batch = self.steps(setting, setting.microbatches)[0]
        with torch.no_grad():
            self.warm_up(batch, train=False)
            outcome = self.executor.run(batch, train=False)
        for module in modules:
            module.train()
        return self._losses(outcome)

    def _losses(self, outcome: StepSums) -> dict[str, float]:
        """Shares of the loss."""
        return {name: self.executor.weights[name] * float(x.detach()) for name, x in outcome.losses.items()}


def batches_on_rank(
    rank: int, world: int, setting: Setting, expected: Sequence[Reference], damage: str = ""
) -> list[Stepped] | str:
    """All batches of a setting, each as it is expected, through one executor, after the first of them the same
    once more without backwards; or why the setting is refused.
    """
    try:
        made = OnRank(rank, world, setting, checks_packing=True)
        found: list[Stepped] = []
        for step, one in enumerate(expected):
            found.append(made.step(one, setting.microbatches, setting, damage, step))
            if not step and not setting.dropout and setting.lm != "balanced":
                found[0].evaluated = made.evaluate(setting)
    except HeteroError as refusal:
        return str(refusal)
    dist.barrier()
    return found


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
        check(made.executor.compiler.schedule(batch.plan, train=False))
        losses = {n: float(x) for n, x in outcome.losses.items()}
        drawn = {n: x for n, x in outcome.results.items() if n in ITEM_MODULES}
        found.append(Evaluated(losses, outcome.results["llm"], drawn, len(made.executor.recorder.steps)))
    dist.barrier()
    return found
