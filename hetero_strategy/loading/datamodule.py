"""`MultimodalDataModule`: manifests in, one `Batch` per global batch out, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.fabric.utilities.distributed import _InfiniteBarrier
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from hetero_strategy.checkpoint.folder import INDEX
from hetero_strategy.data.build_index import DatasetIndex, Verify, build_index
from hetero_strategy.data.manifest import PathLike, manifest_paths
from hetero_strategy.data.media import Media
from hetero_strategy.data.processors import processors_of
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, is_whole
from hetero_strategy.layout.registry import connected_on_demand
from hetero_strategy.loading.agree import Agree
from hetero_strategy.loading.ahead import Ahead
from hetero_strategy.loading.context import TrainingContext, finish_epoch
from hetero_strategy.loading.dispatch import Dispatch
from hetero_strategy.loading.item_reader import OnError
from hetero_strategy.loading.limits import Limits, check_limits, item_limits, most_rows, say_left_out
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.metadata import step_metadata, with_own_units
from hetero_strategy.loading.options import Engine, Payload, check_data_options, check_fields, check_microbatch_rows
from hetero_strategy.loading.read_where_sampled import SampledDataset
from hetero_strategy.loading.steps import RankView, StepDataset, check_counts, epoch_order
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
    """Manifests as global batches of a multimodal LLM.

    Under `HeteroStrategy` every rank loads only what its instances compute; on one process it loads everything. The
    global batches are the same in both cases.

    Args:
        train, val, test, predict: a manifest (JSON, parquet or a folder of the datasets library) or a list of them,
            each optional; see `data.manifest`. Samples of ``predict`` need no answer.
        model: the model that is trained, or a function that makes it, called here once without making values. Nothing
            but its modules, edges and processors is read.
        tokenizer: a ``tokenizer.json``, or the folder it lies in.
        processors: encoder or generator -> fields of its processor that the model leaves open, such as
            ``{"max_patches": 1024}`` (see `ImageProcessor`, `AudioProcessor`, `ImageTarget`), or another processor.
        global_batch_size: samples per optimizer step (per batch of an accumulation), over all ranks.
        eval_batch_size: the same for val, test and predict; default: ``global_batch_size``.
        microbatches: pieces of a global batch, or more in steps where these cannot keep the first language model's
            ``balance.budget``; ``auto``: as few as can, or, without a budget, as many as
            ``HeteroStrategy(layouts="auto")`` plans.
        eval_microbatches: the same for val, test and predict; default: ``microbatches``, at most ``eval_batch_size``.
        encoder_microbatch_rows: encoders and generators with microbatches of their own: about this many rows inside
            the module per instance and microbatch, or ``equal``; others keep the step's. See `plan_step`.
        balance: how work is spread over instances and microbatches: a policy, a `BalanceConfig` or its fields.
        payload: how training items get to where they are computed. ``fetch``: each rank reads what it computes; the
            sizes of all media are measured when the index is built. ``all_to_all``: no training file is opened before
            its step; each rank reads a part of the samples, then sizes are exchanged, the step is planned, and items
            are sent where they are computed, all ahead of need. The batches are the same. Other splits are fetched.
        seed: of the order of training samples.
        shuffle: permute training samples anew in every epoch.
        drop_last: leave out the last training step of an epoch if it is not full.
        num_workers, prefetch_factor, pin_memory: processes that make steps beside training, how many steps each is
            ahead, and page-locked memory (default: on CUDA); see `StepLoader`.
        engine: ``local``: workers are processes of this machine; ``ray``: actors on any machine of a Ray cluster.
        on_error: what a faulty sample, found while indexing or training, or a dead worker does: ``stop`` the run, or
            ``skip``: samples are counted and named, workers replaced.
        max_skipped: samples that may be left out of an index, and again of an epoch; default: 1%, at least 10.
        leave_out: media fields; their samples are left out (``indices[split].left_out``), else refused where unread.
        media_folder: what media paths are relative to; default: the folder in which each manifest lies.
        cache_folder: where indices lie; default: ``.hetero_index`` beside a split's (first) manifest.
        verify, max_tokens: see `build_index`.
        bos, eos, placeholders, chat_template: see `ChatTokenizer`.

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
        tokenizer: PathLike,
        processors: Mapping[str, Media | Mapping[str, Any]] | None = None,
        global_batch_size: int,
        eval_batch_size: int | None = None,
        microbatches: int | Literal["auto"] = 1,
        eval_microbatches: int | Literal["auto"] | None = None,
        encoder_microbatch_rows: Mapping[str, int | Literal["equal"]] | None = None,
        balance: BalanceConfig | str | Mapping[str, Any] | None = None,
        payload: Payload = "fetch",
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool | None = None,
        engine: Engine = "local",
        on_error: OnError = "stop",
        max_skipped: int | None = None,
        leave_out: Sequence[str] = (),
        media_folder: PathLike | None = None,
        cache_folder: PathLike | None = None,
        verify: Verify = "auto",
        max_tokens: int | None = None,
        bos: str | None = "auto",
        eos: str = "auto",
        placeholders: Mapping[str, str] | None = None,
        chat_template: PathLike | None = None,
    ) -> None:
        super().__init__()
        check_data_options(
            processors=processors, encoder_microbatch_rows=encoder_microbatch_rows, payload=payload, seed=seed,
            shuffle=shuffle, drop_last=drop_last, num_workers=num_workers, prefetch_factor=prefetch_factor,
            pin_memory=pin_memory, engine=engine, on_error=on_error, max_skipped=max_skipped, leave_out=leave_out,
            media_folder=media_folder, cache_folder=cache_folder, verify=verify, max_tokens=max_tokens,
            placeholders=placeholders,
        )  # fmt: skip
        self.prepare_data_per_node = False
        given = zip(get_args(Split), (train, val, test, predict), strict=True)
        self.manifests: dict[Split, tuple[Path, ...]] = {split: manifest_paths(split, paths) for split, paths in given}
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
        self._check_payload(verify)
        self.global_batch_size = global_batch_size
        self.eval_batch_size = global_batch_size if eval_batch_size is None else eval_batch_size
        self.microbatches = self._count("microbatches", microbatches)
        asked = None if eval_microbatches is None else self._count("eval_microbatches", eval_microbatches)
        check_counts(self.global_batch_size, self.microbatches)
        check_counts(self.eval_batch_size, asked, "eval_batch_size", "eval_microbatches")
        fewest = None if self.microbatches is None else min(self.microbatches, self.eval_batch_size)
        self.eval_microbatches = fewest if eval_microbatches is None else asked
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.num_workers, self.prefetch_factor, self.pin_memory = num_workers, prefetch_factor, pin_memory
        self.engine, self.on_error, self.max_skipped = engine, on_error, max_skipped
        self._index_options: dict[str, Any] = {"media_folder": media_folder, "cache_folder": cache_folder}
        self._index_options |= {"verify": verify, "max_tokens": max_tokens}
        self.leave_out = (leave_out,) if isinstance(leave_out, str) else tuple(leave_out)
        check_fields("leave_out", self.leave_out, self.processors, own=True)
        check_fields("placeholders", placeholders or {}, self.processors)
        self.imports: tuple[str, ...] = ()  # modules that register policies, for workers without this process's memory
        special: dict[str, Any] = {"bos": bos, "eos": eos, "placeholders": placeholders}
        self.tokenizer = ChatTokenizer(tokenizer, **special, chat_template=chat_template)
        self.indices: dict[Split, DatasetIndex] = {}
        self._loaders: dict[Split, StepLoader] = {}
        self._ahead = Ahead()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that this data feeds."""
        return tuple(self.kinds)

    def prepare_data(self) -> None:
        """Build missing indices, before training all, as faults are best found then; Lightning calls this on rank 0."""
        stage = getattr(getattr(self.trainer, "state", None), "fn", None)
        self._map(None if stage == TrainerFn.FITTING else stage)

    def setup(self, stage: str | None = None) -> None:
        """Map the indices, and refuse a run that would read its data wrongly.

        A node that does not see the folder in which rank 0 built them builds its own, once.
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
        """Say what reads a checkpoint's folder, where another strategy was given one."""
        if isinstance(exception, IsADirectoryError) and Path(name := str(exception.filename), INDEX).exists():
            exception.add_note(f"{name} is a checkpoint of HeteroStrategy, which reads it with devices=1, too")

    def teardown(self, stage: str | None = None) -> None:
        """Stop the workers."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
        self._ahead.close()

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
        """What this rank computes, from the strategy's placement; everything where there is only one process.

        Raises:
            ConfigError: several processes without a placement, or a placement that does not fit the data's modules.
        """
        trainer, context = self.trainer, TrainingContext.of(self.trainer)
        placement = context.placement
        if trainer is None or placement is None:
            if trainer is not None and trainer.world_size > 1:
                name = type(trainer.strategy).__name__
                raise ConfigError(
                    f"MultimodalDataModule: {name} runs {trainer.world_size} processes but says not which rank computes"
                    " which module, so every rank would train on the same samples; use HeteroStrategy(layouts=...) or"
                    " devices=1"
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
        """Metadata of so many training batches, drawn with the data module's seed: what a plan is made for.

        Raises:
            ConfigError: there is no training data, or it is not measured (``payload="all_to_all"``).
        """
        index = self._index("train")
        if index is None:
            raise ConfigError("MultimodalDataModule: no train manifest was given, from which layouts could be planned")
        size = min(self.global_batch_size, len(index))
        order = epoch_order(len(index), self.seed, 0)
        each = [order[i * size : (i + 1) * size] for i in range(max(1, min(count, len(index) // size)))]
        return [with_own_units(step_metadata(index, 0, i, s), self.kinds, self.edges) for i, s in enumerate(each)]

    def _index(self, split: Split, progress: bool = True) -> DatasetIndex | None:
        manifests = self.manifests[split]
        if manifests and split not in self.indices:
            index = build_index(
                manifests,
                self.tokenizer,
                self.processors,
                answers=split != "predict",
                measure=not self._dispatches(split),
                leave_out=self.leave_out,
                skip=self.on_error == "skip",
                max_skipped=self.max_skipped,
                most_rows=most_rows(self._limits, self._item_limits, self.processors),
                progress=progress,
                **self._index_options,
            )
            where = ", ".join(map(str, manifests))
            check_limits(
                index, where, self._limits, self._item_limits, self.balance.budget, self.processors, self.tokenizer.eos
            )
            self.indices[split] = index
            say_left_out(index, split, self.leave_out)
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
            "prefetch": self._prefetched(context) if training else (),
            "imports": self.imports,
        }
        steps, finish = self._steps(split, index, share, options)
        if self.on_error == "skip":
            finish.append(Agree(context.group))
        loader = StepLoader(
            steps,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=torch.cuda.is_initialized() if self.pin_memory is None else self.pin_memory,
            engine=self.engine,
            on_error=self.on_error,
            max_skipped=self.max_skipped,
            finish=finish,
            background=self._ahead,
        )
        self._loaders[split] = loader.after(self._loaders.get(split))
        return loader

    def _steps(
        self, split: Split, index: DatasetIndex, share: RankView, options: Mapping[str, Any]
    ) -> tuple[StepDataset, list[Callable[[Any], Any]]]:
        """The steps of a split and what makes batches of them."""
        if not self._dispatches(split):
            return StepDataset(index, self.processors, self.edges, share, **options), []
        shares, rank = self._shares(share)
        steps = SampledDataset(index, self.processors, self.edges, share, **options, rank=rank, world=len(shares))
        return steps, [Dispatch(steps, shares, TrainingContext.of(self.trainer).group)]

    def _prefetched(self, context: TrainingContext) -> Collection[str]:
        """Modules that run a step ahead."""
        names = () if context.compiler is None else context.compiler.config.prefetch
        if names and self.payload == "all_to_all":
            raise ConfigError(
                "MultimodalDataModule: payload is 'all_to_all', but HeteroStrategy(prefetch=...) reads items of"
                f" {', '.join(names)} a step before their samples; use payload='fetch' or leave prefetch out"
            )
        return names

    def _dispatches(self, split: Split) -> bool:
        return split == "train" and self.payload == "all_to_all"

    def _shares(self, mine: RankView) -> tuple[list[RankView], int]:
        """What every rank computes, and this rank."""
        trainer, context = self.trainer, TrainingContext.of(self.trainer)
        if trainer is None or context.placement is None:
            return [mine], 0
        ranks = range(trainer.world_size)
        return [
            RankView.of(context.placement, self.modules, rank, context.row_multiple) for rank in ranks
        ], trainer.global_rank

    def _check_payload(self, verify: str) -> None:
        if self.payload == "fetch":
            return
        if verify != "auto":
            raise ConfigError(
                f"MultimodalDataModule: verify is {verify!r}, but with payload='all_to_all' no training file is opened"
                " before its step; leave verify out or use payload='fetch'"
            )
        if self.balance.window != 1:
            raise ConfigError(
                f"MultimodalDataModule: balance.window is {self.balance.window}, but with payload='all_to_all' the"
                " tokens of a sample are known only in its step; use window=1 or payload='fetch'"
            )

    def _count(self, name: str, given: int | str) -> int | None:
        """Microbatches of a step; None: by budget, or as planned."""
        if given != "auto" and not is_whole(given):
            raise ConfigError(f"MultimodalDataModule: {name} is {given!r}; use a number or 'auto'")
        return None if given == "auto" else int(given)

    def check_microbatches(self, *, fit: bool) -> None:
        """Refuse ``auto`` without a budget, where layouts are given and no plan says how many there are.

        Args:
            fit: whether batches are trained.

        Raises:
            ConfigError: naming the option.
        """
        if fit and self.manifests["train"]:
            self._count_in("train", None)

    def _count_in(self, split: Split, planned: int | None) -> int | None:
        """Microbatches of a step of a split; None: by budget. An evaluation that nobody planned for has one."""
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
        made = model() if callable(model) and not isinstance(model, nn.Module) else model
    if not isinstance(made, MultimodalModel):
        raise ConfigError(
            f"MultimodalDataModule: model is a {type(made).__name__}; give the MultimodalModel that is trained, or the"
            " function that makes it"
        )
    return made
