"""Measure what ranks read of a Hugging Face folder when they start and the host memory it takes, over what they own.

Folders have random values in bfloat16, parameters are fp32. ``read / owned``: bytes read of the folder over those of
the parameters that the rank owns, in the folder's dtype; the largest of all ranks. ``memory / owned``: the most private
memory of the process during the start, beyond that before it, over the bytes of its parameters; pages of the folder's
files, which the system drops when it needs room, do not count.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from typing_extensions import override

from benchmarks.common import Options, option, program, report
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.hf_folder import Selection
from hetero_strategy.model.unread import Stored
from hetero_strategy.profiling.allocations import local
from hetero_strategy.strategy.assembly import assemble
from hetero_strategy.testing import Pool, Setting
from hetero_strategy.zoo.hf_composite import hf_folder

PAGE = 4096
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp_shard2": {"dp_shard": 2}, "pp2": {"pp": 2}}
SIZES: Mapping[str, Any] = {
    "vocab_size": 24_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 384, "num_experts_per_tok": 2, "head_dim": 64}
VISION = {"depth": 8, "hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "out_hidden_size": 768}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**SIZES, **EXPERTS}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "intermediate_size": 384, "num_local_experts": 16}),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {**SIZES, "rope_parameters": ROPE}, "vision_config": VISION},
    ),
    "qwen3, tied": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 64, "vocab_size": 80_000, "tie_word_embeddings": True}),
}
"""Name -> class and config. The tied table is two thirds of its model."""


def written(folder: Path, family: str, **changes: Any) -> Path:
    """Write a folder of random values; return it."""
    import transformers

    name, fields = FAMILIES[family]
    model_class: Any = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**fields, **changes})).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class FolderSetting(Setting):
    """A setting whose model is a folder's."""

    folder: str = ""

    @override
    def model(self, device: str = "meta") -> MultimodalModel:
        with torch.device(device):
            return MultimodalModel(hf_folder(self.folder)).train()


@contextmanager
def reads() -> Iterator[list[int]]:
    """Collect the bytes of every read of a Hugging Face folder."""
    found: list[int] = []
    read = Stored.read

    def noted(self: Stored, selection: Selection) -> torch.Tensor:
        tensor = read(self, selection)
        found.append(tensor.nbytes)
        return tensor

    with patch.object(Stored, "read", noted):
        yield found


class PrivateMemory(threading.Thread):
    """A context manager that samples the private memory of this process; :attr:`most` has the largest growth."""

    def __enter__(self) -> PrivateMemory:
        self.before = self.most = self._now()
        self.over = threading.Event()
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.over.set()
        self.join()
        self.most = max(self.most, self._now()) - self.before

    @override
    def run(self) -> None:
        while not self.over.wait(0.0005):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * PAGE


def on_rank(rank: int, world: int, setting: FolderSetting) -> tuple[float, float, int]:
    """Start a rank; return bytes read and memory over those owned, and the bytes owned."""
    model, blueprint = setting.model(), setting.blueprint
    with reads() as found, PrivateMemory(daemon=True) as memory:
        made = assemble("model", model, blueprint, rank, torch.device("cpu"))
    parts = [local(parameter) for module in made.executor.modules.values() for parameter in module.parameters()]
    numbers = sum(part.numel() for part in parts if not part.is_meta)
    return sum(found) / (numbers * torch.bfloat16.itemsize), memory.most / (numbers * 4), numbers * 4


def measured(
    folder: Path, pool: Pool, chosen: Sequence[str] = tuple(LAYOUTS)
) -> dict[str, list[tuple[float, float, int]]]:
    """Return the figures of each rank by layout."""
    names = list(hf_folder(folder))
    found = {}
    for name in chosen:
        degrees = {m: {"dp_shard": 2} if m == "vision" and name == "tp2" else LAYOUTS[name] for m in names}
        layouts = {m: ModuleLayout(range(2), **degrees[m]) for m in names}
        found[name] = pool.run(2, on_rank, FolderSetting(name, layouts, folder=str(folder)))
    return found


@program(option("--families", nargs="*", default=list(FAMILIES), help="names (default all)"))
def main(given: Options) -> dict[str, Any]:
    """Start every family in every layout and print a table."""
    rows, figures = [], {}
    for family in given.families:
        with tempfile.TemporaryDirectory() as folder:
            for layout, ranks in measured(written(Path(folder), family), given.pool).items():
                read, memory, owned = (max(of) for of in zip(*ranks, strict=True))
                figures[f"{family}, {layout}"] = {"read": read, "memory": memory}
                rows.append([family, layout, f"{owned / 1e6:.0f} MB", f"{read:.3f}", f"{memory:.2f}"])
    report("start from a folder", ["family", "layout", "owned", "read / owned", "memory / owned"], rows, [])
    return figures


if __name__ == "__main__":
    main()
