"""Settings whose modules are those of a composite's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.model import EncoderInputs, MultimodalModel, Packing
from hetero_strategy.model.kind import Content, Items
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.testing.composite_samples import LEARNT, MediaSample
from hetero_strategy.testing.setting import Setting
from hetero_strategy.zoo.hf_composite import hf_composite


@dataclass(frozen=True)
class InMemory:
    """A processor of an encoder's items, which are in memory."""

    field: str
    size_names: tuple[str, ...]
    feature: int
    encoder: Any

    @property
    def columns(self) -> dict[str, slice]:
        """Return the numbers in sizes by transformers' name."""
        ranges: dict[str, slice] = {}
        for number, each in enumerate(self.size_names):
            name = each.partition("[")[0]
            ranges[name] = slice(ranges.get(name, slice(number, 0)).start, number + 1)
        return ranges

    def raw_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return raw rows of items with these sizes: of patches their grid, else the first number."""
        return sizes.prod(axis=1) if sizes.shape[1] == 2 and self.field == "image" else sizes[:, 0]

    def inner_rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return rows in the blocks of items with these sizes."""
        inside = getattr(self.encoder, "rows_inside", None)
        return self.raw_rows(sizes) if inside is None else inside()(sizes)

    def collate(self, values: Sequence[np.ndarray], sizes: np.ndarray, rows: np.ndarray) -> EncoderInputs:
        """Put items end to end."""
        whole = torch.from_numpy(np.concatenate([np.zeros((0, self.feature), np.float32), *values]))
        return EncoderInputs(whole, sizes, rows, Packing.of(self.inner_rows(sizes)), raw_rows=self.raw_rows(sizes))


@dataclass(frozen=True)
class CompositeSetting(Setting):
    """A setting of a composite's modules, whose batches hold samples of transformers' forward in their order."""

    folder: str = ""
    content: tuple[MediaSample, ...] = ()
    """Samples of all steps."""

    @override
    def model(self, device: str = "meta") -> MultimodalModel:
        with torch.device(device):
            parts = hf_composite(self.folder, check=False)
            for name, items in self.content[0].items.items():
                if hasattr(encoder := parts["modules"][name], "columns"):
                    encoder.columns = InMemory(items.kind, items.names, 0, encoder).columns
                    encoder.runs_vary = "tile" in encoder.columns
            return MultimodalModel(**parts).train().to(self.storage.master)

    def samples_of(self, seed: int) -> tuple[MediaSample, ...]:
        """Return the samples of a step."""
        return self.content[seed * self.samples : (seed + 1) * self.samples]

    @cached_property
    def _bare(self) -> MultimodalModel:
        return self.model()

    def _processor(self, name: str) -> InMemory:
        items = self.content[0].items[name]
        return InMemory(items.kind, items.names, items.values.shape[1], self._bare.modules_by_name[name])

    @override
    def metadata(self, seed: int) -> StepMetadata:
        samples = self.samples_of(seed)
        items = {}
        for name in samples[0].items:
            own = [sample.items[name] for sample in samples]
            rows, starts = (
                np.array([n for each in own for n in getattr(each, of)], np.int64) for of in ("rows", "starts")
            )
            inner = self._processor(name).inner_rows(np.concatenate([each.sizes for each in own]))
            items[name] = StepItems(
                np.repeat(np.arange(len(own)), [len(each.rows) for each in own]), rows, starts, inner
            )
        tokens = np.array([len(sample.ids) for sample in samples])
        return StepMetadata(0, seed, np.arange(len(samples)), tokens, np.full(len(samples), LEARNT), items)

    @override
    def batch(self, seed: int, rank: int) -> Batch:
        plan, model, samples = self.plan(seed), self._bare, self.samples_of(seed)
        processors: dict[str, Any] = {name: self._processor(name) for name in plan.metadata.items}
        sizes = {n: np.concatenate([sample.items[n].sizes for sample in samples]) for n in processors}
        values = {
            name: torch.cat([sample.items[name].values for sample in samples]).split(own.raw_rows(sizes[name]).tolist())
            for name, own in processors.items()
        }

        def text(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            ids = [samples[unit].ids.numpy() for unit in units]
            learnt = [np.arange(len(own)) >= len(own) - LEARNT for own in ids]
            return np.concatenate([np.zeros(0, np.int64), *ids]), np.concatenate([np.zeros(0, bool), *learnt])

        content = Content(
            text,
            lambda name, units: Items(units, sizes[name][units], plan.metadata.items[name].edge_rows[units]),
            lambda name, units: [values[name][unit].numpy() for unit in units],
        )
        index: Any = samples  # the number of samples is all that is read of it
        steps = StepDataset(
            index,
            processors,
            tuple((name, "llm") for name in processors),
            RankView.of(self.placement, [*model.modules_by_name], rank, self.blueprint.row_multiple),
            kinds={name: module.kind for name, module in model.modules_by_name.items()},
            global_batch_size=len(samples),
            microbatches=self.microbatches,
        )
        return Batch(plan, steps.inputs(plan, content))
