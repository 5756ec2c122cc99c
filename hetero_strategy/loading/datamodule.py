"""`MultimodalDataModule`: manifests in, one `Batch` per global batch out, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
from lightning.fabric.utilities.distributed import _InfiniteBarrier
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from hetero_strategy.checkpoint.folder import INDEX
from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.data.manifest import PathLike, manifest_paths
from hetero_strategy.data.processors import check_encoded, processors_of
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, check_types, is_whole
from hetero_strategy.layout.registry import connected_on_demand
from hetero_strategy.loading.context import TrainingContext, finish_epoch
from hetero_strategy.loading.loader import Background, StepLoader
from hetero_strategy.loading.metadata import step_metadata, with_own_units
from hetero_strategy.loading.options import (
    IndexOptions,
    Limits,
    Payload,
    Processors,
    Rows,
    Seed,
    Skipped,
    TokenizerOptions,
    Workers,
    check_fields,
    check_limits,
    check_microbatch_rows,
    check_prompts,
    item_limits,
    most_rows,
    options_of,
    say_left_out,
)
from hetero_strategy.loading.read_where_sampled import Dispatch, SampledDataset
from hetero_strategy.loading.steps import OnError, RankView, StepDataset, check_counts, epoch_order
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.plan.config import BalanceConfig
from hetero_strategy.plan.step_plan import StepMetadata

Split = Literal["train", "val", "test", "predict"]
STAGES: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
Manifests = PathLike | Sequence[PathLike]


class MultimodalDataModule(L.LightningDataModule):
    """A data module that makes global batches of a multimodal LLM from manifests.

    Under `HeteroStrategy` every rank loads only what its instances compute; on one process it loads everything. The
    global batches are the same in both cases.

    Args:
        train, val, test, predict: a manifest (JSON, parquet or a folder of the datasets library) or a list of them,
            each optional; see `data.manifest`. Samples of ``predict`` need no answer.
        model: the model that is trained, or a function that makes it, called here once without making values. Nothing
            but its modules, edges and processors is read.
        tokenizer: a ``tokenizer.json``, the folder it lies in, or `TokenizerOptions` or their fields.
        processors: encoder or generator -> fields of its processor that the model leaves open, such as
            ``{"max_patches": 1024}`` (see `ImageProcessor`, `AudioProcessor`, `ImageTarget`), or another processor.
        global_batch_size: samples per optimizer step (per batch of an accumulation), over all ranks.
        eval_batch_size: samples per batch of val, test and predict; default: ``global_batch_size``.
        microbatches: pieces of a global batch, or more in steps where these cannot keep the first language model's
            ``balance.budget``; ``auto``: as few as can, or, without a budget, as many as
            ``HeteroStrategy(layouts="auto")`` plans.
        eval_microbatches: microbatches for val, test and predict; default: ``microbatches``, at most
            ``eval_batch_size``.
        encoder_microbatch_rows: encoders and generators with microbatches of their own: about this many rows inside the
            module per instance and microbatch, or ``equal``; others keep the step's. See `plan_step`.
        balance: spread of work over instances and microbatches: a policy, a `BalanceConfig` or its fields.
        payload: path of training items to the ranks that compute them. ``fetch``: each rank reads what it computes; the
            sizes of all media are measured when the index is built. ``all_to_all``: no training file is opened before
            its step; each rank reads a part of the samples, then sizes are exchanged, the step is planned, and items
            are sent to the ranks that compute them, all ahead of need. The batches are the same. Other splits are
            fetched.
        seed: seed of the order of training samples.
        shuffle: whether to permute training samples anew in every epoch.
        drop_last: whether to leave out the last training step of an epoch if it is not full.
        workers: processes that make steps beside training: `Workers` or its fields, such as ``{"count": 4}``.
        index: options of the data set's index: `IndexOptions` or their fields, such as ``{"max_tokens": 4096}``.
        on_error: policy for a faulty sample, found while indexing or training: ``stop`` the run, or ``skip`` the
            sample, which is counted and named.
        max_skipped: samples that may be left out of an index, and again of an epoch; default: 1%, at least 10.

    Raises:
        ConfigError, DataError: before training starts; see `build_index`.
    """

    def __init__(
        self,
        train: Manifests | None = None,
        val: Manifests | None = None,
        test: Manifests | None = None,
        predict: Manifests | None = None,
        *,
        model: MultimodalModel | Callable[[], MultimodalModel],
        tokenizer: PathLike | TokenizerOptions | Mapping[str, Any],
        processors: Processors | None = None,
        global_batch_size: int,
        eval_batch_size: int | None = None,
        microbatches: int | Literal["auto"] = 1,
        eval_microbatches: int | Literal["auto"] | None = None,
        encoder_microbatch_rows: Rows | None = None,
        balance: BalanceConfig | str | Mapping[str, Any] | None = None,
        payload: Payload = "fetch",
        seed: Seed = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: Workers | Mapping[str, Any] = Workers(),  # noqa: B008  # frozen
        index: IndexOptions | Mapping[str, Any] = IndexOptions(),  # noqa: B008
        on_error: OnError = "stop",
        max_skipped: Skipped | None = None,
    ) -> None:
        super().__init__()
        check_types(
            "MultimodalDataModule", MultimodalDataModule.__init__, processors=processors,
            encoder_microbatch_rows=encoder_microbatch_rows, payload=payload, seed=seed, shuffle=shuffle,
            drop_last=drop_last, on_error=on_error, max_skipped=max_skipped,
        )  # fmt: skip
        self.workers = options_of(Workers, "workers", workers)
        self.index_options = options_of(IndexOptions, "index", index)
        if not isinstance(tokenizer, TokenizerOptions | Mapping):
            tokenizer = TokenizerOptions(tokenizer)
        words = options_of(TokenizerOptions, "tokenizer", tokenizer)
        self.prepare_data_per_node = False
        by_split = zip(get_args(Split), (train, val, test, predict), strict=True)
        self.manifests: dict[Split, tuple[Path, ...]] = {
            split: manifest_paths(split, paths) for split, paths in by_split
        }
        model = _made(model)
        self.kinds = {name: module.kind for name, module in model.modules_by_name.items()}
        self.processors = processors_of(model, processors or {})
        self.language_models = model.language_models()
        self._limits = {name: Limits.of(model.modules_by_name[name]) for name in self.language_models}
        self._item_limits = item_limits(model.modules_by_name)
        self.edges = tuple((edge.source, edge.target) for edge in model.edges)
        self.encoder_microbatch_rows = dict(encoder_microbatch_rows or {})
        check_microbatch_rows(self.encoder_microbatch_rows, self.kinds)
        self.balance = BalanceConfig.of(balance)
        self.balance.check(self.modules)
        self.payload: Payload = payload
        self._check_payload()
        self.global_batch_size = global_batch_size
        self.eval_batch_size = global_batch_size if eval_batch_size is None else eval_batch_size
        self.microbatches = self._count("microbatches", microbatches)
        eval_count = None if eval_microbatches is None else self._count("eval_microbatches", eval_microbatches)
        check_counts(self.global_batch_size, self.microbatches)
        check_counts(self.eval_batch_size, eval_count, "eval_batch_size", "eval_microbatches")
        fewest = None if self.microbatches is None else min(self.microbatches, self.eval_batch_size)
        self.eval_microbatches = fewest if eval_microbatches is None else eval_count
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.on_error, self.max_skipped = on_error, max_skipped
        check_fields("leave_out", self.index_options.leave_out, self.processors, own=True)
        check_fields("placeholders", words.placeholders or {}, self.processors)
        self.imports: tuple[str, ...] = ()  # modules that register policies, for workers without this process's memory
        self.tokenizer = ChatTokenizer(**vars(words))
        self.indices: dict[Split, DatasetIndex] = {}
        self._loaders: dict[Split, StepLoader] = {}
        self._background = Background()

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names of the modules that this data feeds."""
        return tuple(self.kinds)

    def prepare_data(self) -> None:
        """Build missing indices, before training all of them to find faults early; Lightning calls this on rank 0."""
        check_encoded(self.processors)
        stage = getattr(getattr(self.trainer, "state", None), "fn", None)
        self._map(None if stage == TrainerFn.FITTING else stage)

    def setup(self, stage: str | None = None) -> None:
        """Map the indices, and refuse a run that would read its data wrongly.

        A node that does not see rank 0's folder of indices builds its own, once.
        """
        if not TrainingContext.of(self.trainer).placed_later:
            self.share()
        if self.trainer is not None and self.trainer.num_nodes > 1:
            with connected_on_demand(), _InfiniteBarrier():
                if self.trainer.local_rank == 0:
                    self._map(stage, progress=False)
        self._map(stage, progress=False)

    def _map(self, stage: Any, progress: bool = True) -> None:
        for split in STAGES.get(str(getattr(stage, "value", stage)), tuple(self.manifests)):
            self._index(split, progress)

    def on_exception(self, exception: BaseException) -> None:
        """Explain what can read a checkpoint's folder, if another strategy was given one."""
        if isinstance(exception, IsADirectoryError) and Path(name := str(exception.filename), INDEX).exists():
            exception.add_note(f"{name} is a checkpoint of HeteroStrategy, which reads it with devices=1, too")

    def teardown(self, stage: str | None = None) -> None:
        """Stop the workers."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
        self._background.close()

    def train_dataloader(self) -> StepLoader:
        finish_epoch(self.trainer)
        return self._loader("train")

    def val_dataloader(self) -> StepLoader | list[StepLoader]:
        return self._loader("val") if self.manifests["val"] else []

    def test_dataloader(self) -> StepLoader:
        return self._loader("test")

    def predict_dataloader(self) -> StepLoader:
        return self._loader("predict")

    def share(self) -> RankView:
        """Return this rank's view of the work, from the strategy's placement; the whole work in a single process."""
        trainer, context = self.trainer, TrainingContext.of(self.trainer)
        placement = context.placement
        if trainer is None or placement is None:
            if trainer is not None and trainer.world_size > 1:
                name = type(trainer.strategy).__name__
                raise ConfigError(
                    f"MultimodalDataModule: {name} runs {trainer.world_size} processes but does not say which rank"
                    " computes which module, so every rank would train on the same samples; use"
                    " HeteroStrategy(layouts=...) or devices=1"
                )
            return RankView.whole(self.modules)
        placed = tuple(placement.layouts)
        missing = [name for name in self.modules if name not in placed]
        unfed = [name for name in placed if name not in self.modules]
        if missing or unfed:
            raise ConfigError(
                f"MultimodalDataModule feeds {', '.join(self.modules)} but the layouts place {', '.join(placed)};"
                " use the same names in the model and the layouts"
            )
        return RankView.of(placement, self.modules, trainer.global_rank, context.row_multiple)

    def sampled_batches(self, count: int) -> list[StepMetadata]:
        """Return the metadata of ``count`` training batches, drawn with the data module's seed, for making a plan.

        Raises:
            ConfigError: there is no training data, or it is not measured (``payload="all_to_all"``).
        """
        index = self._index("train")
        if index is None:
            raise ConfigError("MultimodalDataModule: no train manifest was given, from which layouts could be planned")
        size = min(self.global_batch_size, len(index))
        order = epoch_order(len(index), self.seed, 0)
        each = [order[i * size : (i + 1) * size] for i in range(max(1, min(count, len(index) // size)))]
        metadata = [step_metadata(index, 0, i, samples, self.processors) for i, samples in enumerate(each)]
        return [with_own_units(step, self.kinds, self.edges) for step in metadata]

    def _index(self, split: Split, progress: bool = True) -> DatasetIndex | None:
        manifests = self.manifests[split]
        if manifests and split not in self.indices:
            index = build_index(
                manifests,
                self.tokenizer,
                self.processors,
                answers=split != "predict",
                measure=not self._dispatches(split),
                skip=self.on_error == "skip",
                max_skipped=self.max_skipped,
                most_rows=most_rows(self._limits, self._item_limits, self.processors),
                progress=progress,
                **vars(self.index_options),
            )
            where = ", ".join(map(str, manifests))
            check_limits(
                index, where, self._limits, self._item_limits, self.balance.budget, self.processors, self.tokenizer.eos
            )
            check_prompts(index, where, self.kinds)
            self.indices[split] = index
            say_left_out(index, split, self.index_options.leave_out)
        return self.indices.get(split)

    def _loader(self, split: Split) -> StepLoader:
        index = self._index(split)
        if index is None:
            raise ConfigError(f"MultimodalDataModule: no {split} manifest was given; pass {split}=<manifest>")
        training = split == "train"
        overfit = training and self.trainer is not None and bool(getattr(self.trainer, "overfit_batches", 0))
        share = self.share()
        context = TrainingContext.of(self.trainer)
        compiler = context.compiler
        options: dict[str, Any] = {
            "kinds": self.kinds,
            "global_batch_size": self.global_batch_size if training else self.eval_batch_size,
            "microbatches": self._count_in(split, context.microbatches),
            "microbatch_rows": self.encoder_microbatch_rows,
            "balancing": self.balance.resolve(share.instances, context.model),
            "window": self.balance.window if training and not overfit else 1,
            "seed": self.seed,
            "shuffle": training and self.shuffle and not overfit,
            "drop_last": training and self.drop_last,
            "same_noise": not training,
            "compute_dtype": context.compute_dtype,
            "compiler": compiler and partial(compiler.program, rank=context.rank, train=training),
            "imports": self.imports,
        }
        steps, finish = self._steps(split, index, share, options)
        loader = StepLoader(
            steps,
            workers=self.workers,
            on_error=self.on_error,
            max_skipped=self.max_skipped,
            finish=finish,
            group=context.group,
            background=self._background,
        )
        self._loaders[split] = loader.after(self._loaders.get(split))
        return loader

    def _steps(
        self, split: Split, index: DatasetIndex, share: RankView, options: Mapping[str, Any]
    ) -> tuple[StepDataset, Dispatch | None]:
        """Return the steps of a split, and the function that makes batches of them if they are none."""
        if not self._dispatches(split):
            return StepDataset(index, self.processors, self.edges, share, **options), None
        shares, rank = self._shares(share)
        steps = SampledDataset(index, self.processors, self.edges, share, **options, rank=rank, world=len(shares))
        return steps, Dispatch(steps, shares, TrainingContext.of(self.trainer).group)

    def _dispatches(self, split: Split) -> bool:
        return split == "train" and self.payload == "all_to_all"

    def _shares(self, mine: RankView) -> tuple[list[RankView], int]:
        """Return the view of every rank, and this rank's number."""
        trainer, context = self.trainer, TrainingContext.of(self.trainer)
        if trainer is None or context.placement is None:
            return [mine], 0
        ranks = range(trainer.world_size)
        return [
            RankView.of(context.placement, self.modules, rank, context.row_multiple) for rank in ranks
        ], trainer.global_rank

    def _check_payload(self) -> None:
        if self.payload == "fetch":
            return
        if self.index_options.verify != "auto":
            raise ConfigError(
                f"MultimodalDataModule: verify is {self.index_options.verify!r}, but with payload='all_to_all' no"
                " training file is opened before its step; leave verify out or use payload='fetch'"
            )
        if self.balance.window != 1:
            raise ConfigError(
                f"MultimodalDataModule: balance.window is {self.balance.window}, but with payload='all_to_all' the"
                " tokens of a sample are known only in its step; use window=1 or payload='fetch'"
            )

    def _count(self, name: str, given: int | str) -> int | None:
        """Check a number of microbatches; None: by budget, or as planned."""
        if given != "auto" and not is_whole(given):
            raise ConfigError(f"MultimodalDataModule: {name} is {given!r}; use a number or 'auto'")
        return None if given == "auto" else int(given)

    def check_microbatches(self, *, fit: bool) -> None:
        """Refuse ``auto`` without a budget, if layouts are given and no plan sets the number of microbatches.

        Args:
            fit: whether batches are trained.
        """
        if fit and self.manifests["train"]:
            self._count_in("train", None)

    def _count_in(self, split: Split, planned: int | None) -> int | None:
        """Return the microbatches of a step of a split; None: by budget. An evaluation without a plan has one."""
        training, first = split == "train", self.language_models[0]
        count = self.microbatches if training else self.eval_microbatches
        if count is not None or first in self.balance.budget:
            return count
        if planned is None and not training:
            return 1
        if planned is None:
            raise ConfigError(
                "MultimodalDataModule: microbatches=auto follows from a budget, but"
                f" balance.budget has none for '{first}'; give budget={{{first}: <tokens of an instance in a"
                " microbatch>}, a number of microbatches, or HeteroStrategy(layouts='auto'), which plans it"
            )
        return planned if training else min(planned, self.eval_batch_size)


def _made(model: Any) -> MultimodalModel:
    with models_without_values():
        built = model() if callable(model) and not isinstance(model, nn.Module) else model
    if not isinstance(built, MultimodalModel):
        raise ConfigError(
            f"MultimodalDataModule: model is a {type(built).__name__}; give the MultimodalModel that is trained, or the"
            " function that makes it"
        )
    return built
