"""Weights of a Hugging Face folder on real ranks: those of one process bit by bit, and a rank reads its own alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.layout.registry import GroupRegistry
from hetero_strategy.model.materialize import materialize
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.testing import Pool
from hetero_strategy.zoo import hf_llama, hf_qwen3, titan_llama
from hetero_strategy.zoo.hf_causal_lm import HFCausalLM
from hetero_strategy.zoo.hf_tp import tensor_parallel_plan
from tests.model.helpers import LLAMA, reads
from tests.model.hf_models import made

TEXT = LLAMA | {"initializer_range": 0.3}


class WithExperts(HFCausalLM):
    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        return tensor_parallel_plan(self.model, "model.")


def with_experts(checkpoint: Path) -> WithExperts:
    config = AutoConfig.from_pretrained(checkpoint)
    return WithExperts(getattr(transformers, config.architectures[0]), config, checkpoint=checkpoint)


MAKE: dict[str, tuple[Any, Any]] = {
    "titan": (titan_llama, lambda: LlamaForCausalLM(LlamaConfig(**TEXT))),
    "hf_llama": (hf_llama, lambda: LlamaForCausalLM(LlamaConfig(**TEXT))),
    "tied": (hf_qwen3, partial(made, "tied")),
    **{family: (with_experts, partial(made, family)) for family in ("qwen3_moe", "mixtral")},
}
"""Kind -> our module of a folder, transformers' model in it. Experts lie there one by one."""
MIXED = Storage(torch.bfloat16, torch.float32)
LAYOUTS = [
    {"ranks": 2, "tp": 2},
    {"ranks": 3, "dp_shard": 3},
    {"ranks": 4, "dp_shard": 2, "tp": 2},
    {"ranks": 4, "dp_shard": 2, "dp_replicate": 2},
    {"ranks": 4, "pp": 2, "tp": 2},
]


def on_rank(rank: int, world: int, kind: str, folder: Path, fields: dict[str, Any], storage: Storage) -> dict[str, Any]:
    """What a rank reads of a folder, what it keeps of it, and whether that is what one process has."""
    layout = ModuleLayout.from_config("m", fields).resolved()
    placement = place({"m": layout}, world)
    registry = GroupRegistry(placement, [], "cpu")
    where = placement.coordinate("m", rank)
    assert where is not None
    whole, module = MAKE[kind][0](checkpoint=folder), MAKE[kind][0](checkpoint=folder)
    materialize(whole, 3, name="m")
    module.train()
    with reads() as found:
        parallelize(
            "m", module, layout, registry.mesh("m"), torch.device("cpu"),
            seed=3, split=(1, 1) if layout.pp > 1 else (), pp_rank=where.pp, storage=storage,
        )  # fmt: skip
    kept, wrong, first = 0, [], dict(whole.named_parameters())
    for fqn, parameter in module.named_parameters():
        if not parameter.is_meta:
            kept += local(parameter).numel() * 2  # the folder's values are bf16
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            wrong += [fqn] if not torch.equal(value, first[fqn]) else []
    return {"read": sum(found), "kept": kept, "wrong": wrong, "all": sum(p.numel() * 2 for p in first.values())}


@pytest.mark.full_cases(
    "titan-{'ranks': 3, 'dp_shard': 3}",
    "titan-{'ranks': 4, 'dp_shard': 2, 'dp_replicate': 2}",
    "titan-{'ranks': 4, 'dp_shard': 2, 'tp': 2}",
    "titan-{'ranks': 4, 'pp': 2, 'tp': 2}",
    *(f"tied-{layout}" for layout in LAYOUTS[:-1]),
    *(f"mixtral-{layout}" for layout in LAYOUTS[1:]),
    *(f"qwen3_moe-{layout}" for layout in (LAYOUTS[0], LAYOUTS[1], LAYOUTS[3])),
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", MAKE)
def test_a_rank_reads_what_it_keeps(pool: Pool, tmp_path: Path, kind: str, layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    MAKE[kind][1]().bfloat16().save_pretrained(tmp_path)
    storage = MIXED if layout.get("dp_shard") == 2 else Storage()
    ranks = pool.run(layout["ranks"], on_rank, kind, tmp_path, layout, storage)
    for rank in ranks:
        assert not rank["wrong"]
        assert rank["read"] == rank["kept"] < 0.7 * rank["all"]
