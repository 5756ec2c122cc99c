"""Expert parallelism: steps of a small mixture, one layer beside its peers, and simulated steps of large mixtures.

Steps: a language model with 8 experts in each layer, of which a row visits two, on 4 gloo processes, with and without
recompute. Travel is the bytes that ranks send each other in a step, both ways and forward and backward, without rows
whose expert lies on their own rank. Waits are the host's for numbers of rows, of one rank: one for each layer and
microbatch.

A layer in one process, forward and backward: ours, transformers' own forwards of the same experts, and a dense layer of
equal active FLOPs.

Simulated: plans for a mixture with a vision tower and for its language model alone, on as many H100s. Sizes are those
of the config.json of Qwen/Qwen3-VL-30B-A3B-Instruct and moonshotai/Kimi-K2.5 at Hugging Face. Both towers are
Qwen3-VL's but for their output: MoonViT has its width, layers and heads, and patches of 14 pixels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from benchmarks.common import Options, option, program, report
from benchmarks.measuring import CPU, seconds_in_turns
from benchmarks.pipelines import Turn, run_turns
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.planner.search import Planner
from hetero_strategy.simulator.cost_model import CostModel
from hetero_strategy.simulator.hardware import cluster
from hetero_strategy.testing import Setting
from hetero_strategy.testing.plans import batch
from hetero_strategy.testing.setting import mixture
from hetero_strategy.zoo import siglip2_encoder
from hetero_strategy.zoo.hf_causal_lm import hf_causal_lm
from hetero_strategy.zoo.hf_experts import HF_EXPERTS

EXPERTS, WORLD = 8, 4
LARGE: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3-VL-30B-A3B": (64, {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    }),
    "Kimi K2.5": (512, {
        "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "intermediate_size": 18432, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    }),
}  # fmt: skip
"""GPUs, and fields of the language model's config."""
VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
          "num_channels": 3, "patch_size": 16, "num_patches": 2304}  # fmt: skip


class Travel(TorchDispatchMode):
    """Counts the bytes that a rank sends to other ranks by all-to-all, among neighbours, and how often."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.bytes, self.exchanges = rank, 0, 0

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops._c10d_functional.all_to_all_single.default and args[0].is_floating_point():
            row = args[0].nbytes // max(1, len(args[0]))
            self.bytes += row * (sum(args[2]) - args[2][self.rank % len(args[2])])
            self.exchanges += 1
        return function(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts the host's reads of tensors on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.nonzero)
        return function(*args, **(kwargs or {}))


def counted(rank: int, world: int, setting: Setting) -> dict[str, int]:
    """Count the bytes that a rank sends in a step's exchanges, their number, and the host's waits."""
    executor, batch = setting.assembled(rank).executor, setting.batch(0, rank)
    with Travel(rank) as travel, Waits() as waits:
        executor.run(batch, train=True)
    return {"bytes": travel.bytes, "exchanges": travel.exchanges, "waits": waits.count}


def setting_of(ep: int, recompute: bool, dim: int, tokens: int) -> Setting:
    """Text alone, on four instances."""
    transforms = {"llm": {"recompute": "all"}} if recompute else {}
    layouts = {"llm": ModuleLayout(tuple(range(WORLD)), ep=ep)}
    return Setting(f"ep {ep}" + ", recompute" * recompute, layouts, llm=(dim, 4), experts=EXPERTS, samples=16,
                   microbatches=2, text=(tokens // 2, tokens), transforms=transforms)  # fmt: skip


def steps(chosen: Options) -> dict[str, dict[str, float]]:
    """Measure steps of every degree, in turns."""
    ways = [(ep, again) for ep in (1, 2, 4) for again in (False, True)]
    turns = [Turn(setting_of(*way, chosen.dim, chosen.tokens), model=i) for i, way in enumerate(ways)]
    ran = chosen.pool.run(WORLD, run_turns, turns, 1, chosen.rounds, timeout=900)
    found = {}
    for number, turn in enumerate(turns):
        of_turn = [ranks for ranks in zip(*ran, strict=True) if ranks[0].turn == number]
        seconds = [max(step.end for step in ranks) - min(step.begin for step in ranks) for ranks in of_turn]
        counts = chosen.pool.run(WORLD, counted, turn.setting, timeout=300)
        found[turn.setting.name] = {
            "seconds": statistics.median(seconds),
            **{key: sum(one[key] for one in counts) for key in ("bytes", "exchanges")},
            "waits": counts[0]["waits"],
        }
    return found


def layer(rows: int, dim: int, rounds: int) -> dict[str, float]:
    """Measure a layer's experts, forward and backward, in milliseconds."""
    model = mixture(dim, 1, EXPERTS)
    part: Any = model.get_submodule(next(iter(model.experts()))).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.02)
    hidden, weights = torch.randn(rows, dim), torch.full((rows, 2), 0.5)
    chosen = torch.rand(rows, EXPERTS).topk(2).indices
    width = 2 * part.down_proj.shape[2]
    gate, up, down = nn.Linear(dim, width, False), nn.Linear(dim, width, False), nn.Linear(width, dim, False)

    def experts(name: str) -> Tensor:
        part.config._experts_implementation_internal = name
        out: Tensor = part(hidden, chosen, weights)
        return out

    def both(forward: Callable[[], Tensor]) -> None:
        forward().sum().backward()

    ways: dict[str, Callable[[], Tensor]] = {
        "ours": partial(experts, HF_EXPERTS),
        "transformers, grouped_mm": partial(experts, "grouped_mm"),
        "transformers, eager": partial(experts, "eager"),
        "dense, equal active FLOPs": lambda: down(nn.functional.silu(gate(hidden)) * up(hidden)),
    }
    errors = {name: float((way() - ways["ours"]()).detach().abs().max()) for name, way in list(ways.items())[1:3]}
    assert max(errors.values()) < 1e-4, f"experts differ from transformers': {errors}"
    turns = seconds_in_turns({name: partial(both, way) for name, way in ways.items()}, CPU, rounds)
    return {name: 1e3 * statistics.median(of) for name, of in turns.items()}


def simulated(name: str, samples: int) -> dict[str, Any]:
    """Plan for a large mixture with its tower and for its language model alone."""
    gpus, fields = LARGE[name]
    with torch.device("meta"):
        llm = hf_causal_lm(**fields, check=False)
        vision = siglip2_encoder(out_width=fields["hidden_size"], merge=2, **VISION)
        shape = spec_of(MultimodalModel({"vision": vision, "llm": llm}))
    data, module = batch(samples, images=1, rows=1024, text=4096), shape.modules["llm"]
    on, alone = cluster("h100", gpus // 8), ModelSpec({"llm": module}, ())
    whole, text = (
        Planner(CostModel(spec, on), [drawn], simulations=4).plan().best
        for spec, drawn in ((shape, data), (alone, replace(data, items={})))
    )
    layout = whole.candidate.layouts["llm"]
    degrees = {key: getattr(layout, key) for key in ("tp", "pp", "dp_shard", "cp", "ep") if getattr(layout, key) > 1}
    return {
        "gpus": gpus, "parameters": int(module.parameters.sum()), "active": module.active, "seconds": whole.seconds,
        "over_language_model": whole.seconds / text.seconds, "degrees": degrees,
    }  # fmt: skip


@program(
    option("--dim", type=int, default=256, help="width of the small model"),
    option("--tokens", type=int, default=512, help="most of a sequence"),
    option("--rounds", type=int, default=5, help="steps of each degree that are measured"),
    option("--samples", type=int, default=1024, help="samples of a simulated step"),
    option("--large", nargs="*", default=[*LARGE], help="mixtures that are simulated"),
)
def main(chosen: Options) -> Any:
    """Print the tables; returns their figures."""
    found = {"steps": steps(chosen), "layer": layer(16 * chosen.tokens, chosen.dim, chosen.rounds)}
    lines = [
        [name, f"{one['seconds']:.2f}", f"{one['bytes'] / 2**20:.1f}", int(one["exchanges"]), int(one["waits"])]
        for name, one in found["steps"].items()
    ]
    report(
        f"a step of 4 layers of {EXPERTS} experts", ("layout", "seconds", "MiB of travel", "exchanges", "waits"), lines
    )
    dense = found["layer"]["dense, equal active FLOPs"]
    lines = [[name, f"{of:.1f}", f"{of / dense:.2f}"] for name, of in found["layer"].items()]
    report(f"a layer's experts, {16 * chosen.tokens} rows", ("experts", "ms", "of dense"), lines)
    found["simulated"] = {name: simulated(name, chosen.samples) for name in chosen.large}
    lines = [
        [name, one["gpus"], f"{one['parameters'] / 1e9:.1f}", f"{one['active'] / 1e9:.1f}", f"{one['seconds']:.2f}",
         f"{one['over_language_model']:.3f}", " ".join(f"{k}={v}" for k, v in one["degrees"].items())]
        for name, one in found["simulated"].items()
    ]  # fmt: skip
    columns = ("mixture", "GPUs", "1e9 parameters", "active", "step s", "of its language model's", "llm")
    report("planned steps on H100s", columns, lines)
    return found


if __name__ == "__main__":
    main()
