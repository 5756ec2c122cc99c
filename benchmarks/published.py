"""How near does the planner's model of devices come to what others printed?

The sizes, layouts and batches of published runs go in; seconds of a step come out of the same evaluation that the
planner ranks candidates with: models are counted on the meta device, a real step plan and schedule are simulated over
all ranks, at full size. Fitted is the share of matmuls, once per architecture (the rows marked *, see
``hetero_strategy.simulator.hardware``), and what narrow matmuls lose, on two rows of H100 that say so; all other rows
come as they are. FLOPs and throughput are counted as each source
does. A ratio above 1 means that we predict a faster run.

What sources do not print, and what is taken for all of their rows alike:

  megatron_h100   Megatron-LM's README. Not printed: microbatches (taken: one where there is no pipeline, of one sample
                  each where there is), virtual stages (taken: one layer each), recompute (none). This was chosen after
                  a first look, as sums of gradients hide behind nothing less: with microbatches of one sample 16B and
                  32B come out at 0.88 and 0.71 of what is printed, with one stage per rank 70B at 0.81. Its flags say
                  that collectives of tensor and data parallelism run beside compute.
  megatron_a100   Korthikanti et al., arXiv:2205.05198, tables 3 and 5, from a transcription. All is printed. Nothing
                  runs beside compute, and attention is before FlashAttention.
  torchtitan      its benchmarks of Llama 3 in bf16, compiled. H100 of 500 W and 2.4 TB/s, whose peak they do not know;
                  the share of matmuls is that of 700 W. "Selective" recompute keeps every other matmul. The fp8 rows
                  are left out: the model has one dtype.
  optimus         tables 4 and 5 of the paper, Megatron-LM's columns and FSDP's. Its PFLOP/s are those of a forward more
                  (96BLsh2...), with as many rows in the ViT as in the LLM: so 2048 rows and recompute are taken. How
                  "Megatron-LM" cuts the LLM is not printed: ViT on the first stage's ranks and fewer LLM layers there,
                  in 1F1B; "balanced": six ViT layers and twelve of one LLM layer on each pipeline rank, where theirs
                  has 12 virtual stages that hold layers of both and cannot be as even. Optimus
                  itself: ``benchmarks.filling``.

  disttrain, orchmllm, cornstarch   what they print over their baselines: see ``benchmarks.published_multimodal``.
                  NVIDIA's heterogeneous parallelism: ``benchmarks.heterogeneous_gain``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.common import Options, option, program, report
from benchmarks.published_multimodal import cornstarch, disttrain, orchmllm
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.split_layers import split
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.simulator.cluster import Cluster
from hetero_strategy.simulator.cost_model import SEPARATE, CostModel, Overlap
from hetero_strategy.simulator.hardware import cluster
from hetero_strategy.zoo import siglip2_encoder, titan_llama

HEAD = 128
"""Size of a head in all of these models."""
LLAMA = {
    "8B": {"dim": 4096, "n_layers": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    "70B": {"dim": 8192, "n_layers": 80, "ffn_dim_multiplier": 1.3, "multiple_of": 4096},
}
BESIDE = Overlap(tp=True, dp=True)


@dataclass(frozen=True)
class Result:
    """One row of a table."""

    name: str
    unit: str
    printed: float
    predicted: float
    why: str = ""
    calibrated: bool = False

    @property
    def ratio(self) -> float:
        """Predicted speed over printed speed; seconds the other way round."""
        faster = self.predicted / self.printed
        return 1 / faster if self.unit == "s" else faster

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


def gpt(layers: int, width: int, vocabulary: int) -> MultimodalModel:
    """A Llama of the sizes of a GPT: its three MLP matrices of 8/3 of the width have the parameters of two of 4."""
    heads = width // HEAD
    sizes = {"dim": width, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads, "multiple_of": 64}
    with models_without_values():
        return MultimodalModel({"llm": titan_llama(vocab_size=vocabulary, max_seq_len=4096, **sizes)})


def llama(name: str) -> MultimodalModel:
    """Llama 3.1."""
    sizes = LLAMA[name]
    with models_without_values():
        model = titan_llama(
            vocab_size=128256, n_heads=int(sizes["dim"]) // HEAD, n_kv_heads=8, max_seq_len=8192, **sizes
        )
        return MultimodalModel({"llm": model})


def gpt_flops(samples: int, length: int, layers: int, width: int, vocabulary: int) -> float:
    """Model FLOPs of a step as Megatron-LM counts them (arXiv:2205.05198, equation 7), without a causal mask."""
    rows = 72.0 * samples * length * layers * width**2
    return rows * (1 + length / (6 * width) + vocabulary / (12 * width * layers))


def equal(samples: int, length: int, image_rows: int = 0, encoders: Sequence[str] = ("vision",)) -> StepMetadata:
    """A global batch of equal samples.

    Args:
        image_rows: rows of a sample's one image for each encoder, a quarter of which enter the LLM; 0: no image.
    """
    numbers, tokens = np.arange(samples), np.full(samples, length)
    items = {}
    if image_rows:
        rows = np.full(samples, image_rows)
        items = {name: StepItems(numbers, rows // 4, i * rows // 4, rows) for i, name in enumerate(encoders)}
    return StepMetadata(0, 0, numbers, tokens, tokens - 1, items)


def seconds(
    shape: ModelSpec,
    on: Cluster,
    batch: StepMetadata,
    layouts: Mapping[str, ModuleLayout],
    microbatches: int,
    *,
    recompute: Recompute | None = None,
    overlap: Overlap = SEPARATE,
    reshard: str = "auto",
) -> float:
    """Simulate a step."""
    again = dict.fromkeys(layouts, (recompute,)) if recompute else {}
    evaluator = Evaluator(CostModel(shape, on, overlap=overlap), [batch])
    return evaluator.seconds(Candidate(layouts, microbatches, transforms=again, reshard_after_forward=reshard))


def pipelined(layers: int, ranks: int, tp: int, pp: int, vpp: int) -> ModuleLayout:
    """All stages with equally many layers, as Megatron-LM cuts."""
    split = (layers // (pp * vpp),) * (pp * vpp)
    return ModuleLayout(ranks, dp_shard=ranks // (tp * pp), tp=tp, pp=pp, vpp=vpp, split=split)


@dataclass(frozen=True)
class MegatronRow:
    """A GPT of Megatron-LM's tables; ``printed``: TFLOP/s of a GPU, or seconds of a step."""

    name: str
    layers: int
    width: int
    tp: int
    pp: int
    gpus: int
    samples: int
    printed: float
    why: str = ""


H100 = (
    MegatronRow("1.7B", 24, 2048, 1, 1, 48, 192, 408.8, "what narrow matmuls lose was fitted to it"),
    MegatronRow("7.1B", 30, 4096, 2, 1, 96, 192, 465.9),
    MegatronRow("16B", 32, 6144, 4, 1, 192, 192, 489.1),
    MegatronRow("32B", 48, 7168, 8, 1, 384, 192, 459.6),
    MegatronRow("70B", 84, 8192, 8, 2, 768, 384, 419.7),
    MegatronRow("119B", 92, 10240, 8, 4, 1536, 768, 420.5),
    MegatronRow("177B", 96, 12288, 8, 6, 2304, 1152, 432.8),
    MegatronRow("314B", 96, 16384, 8, 8, 3072, 1536, 474.4, "larger matmuls are nearer to the peak"),
    MegatronRow("462B", 112, 18432, 8, 16, 6144, 3072, 459.9, "larger matmuls are nearer to the peak"),
)


def megatron_h100(rows: Sequence[MegatronRow] = H100) -> list[Result]:
    """Megatron-LM's README, images/model_table.png: sequences of 4096, 131,072 tokens in the vocabulary."""
    results = []
    for row in rows:
        dp, vpp = row.gpus // (row.tp * row.pp), 1 if row.pp == 1 else row.layers // row.pp
        step = seconds(
            spec_of(gpt(row.layers, row.width, 131072)),
            cluster("h100", row.gpus // 8),
            equal(row.samples, 4096),
            {"llm": pipelined(row.layers, row.gpus, row.tp, row.pp, vpp)},
            1 if row.pp == 1 else row.samples // dp,
            overlap=BESIDE,
            reshard="never",
        )
        rate = gpt_flops(row.samples, 4096, row.layers, row.width, 131072) / step / row.gpus / 1e12
        results.append(Result(row.name, "TFLOP/s", row.printed, rate, row.why, row.name == "7.1B"))
    return results


A100 = (
    MegatronRow("22B", 48, 6144, 8, 1, 8, 4, 1.10, "its matmuls are narrow, and attention is not FlashAttention"),
    MegatronRow("175B", 96, 12288, 8, 8, 64, 64, 13.75),
    MegatronRow("530B", 105, 20480, 8, 35, 280, 280, 37.83, "larger matmuls are nearer to the peak"),
    MegatronRow("1T", 128, 25600, 8, 64, 512, 512, 71.49, "larger matmuls are nearer to the peak"),
)
A100_MICROBATCH = {"22B": 4}
A100_VPP = {"175B": 3, "530B": 3}


def megatron_a100(rows: Sequence[MegatronRow] = A100) -> list[Result]:
    """Korthikanti et al., tables 3 and 5, "present work": sequences of 2048, 51,200 tokens in the vocabulary."""
    results = []
    for row in rows:
        step = seconds(
            spec_of(gpt(row.layers, row.width, 51200)),
            cluster("a100", row.gpus // 8),
            equal(row.samples, 2048),
            {"llm": pipelined(row.layers, row.gpus, row.tp, row.pp, A100_VPP.get(row.name, 1))},
            row.samples // A100_MICROBATCH.get(row.name, 1),
            reshard="never",
        )
        results.append(Result(row.name, "s", row.printed, step, row.why, row.name == "175B"))
    return results


@dataclass(frozen=True)
class TitanRow:
    """A Llama 3.1 of torchtitan's benchmarks; ``printed``: tokens per second of a GPU."""

    name: str
    model: str
    gpus: int
    tp: int
    samples: int
    """Of an instance."""
    recompute: Recompute
    overlaps: bool
    printed: float
    why: str = ""


NARROW = "what narrow matmuls lose was fitted to it"
PIECES = "pieces of matmuls are slower than whole ones"
TITAN = (
    TitanRow("8B FSDP", "8B", 8, 1, 2, Recompute(2), False, 6667),
    TitanRow("8B FSDP", "8B", 128, 1, 2, Recompute(2), False, 6514, "500 W instead of 700"),
    TitanRow("8B FSDP 8, TP 8", "8B", 64, 8, 12, Recompute(2), False, 4378, NARROW),
    TitanRow("8B FSDP 8, async TP 8", "8B", 64, 8, 12, Recompute(2), True, 4809, PIECES),
    TitanRow("70B FSDP 32, TP 8", "70B", 256, 8, 16, Recompute(), False, 597.3),
    TitanRow(
        "70B FSDP 32, async TP 8",
        "70B",
        256,
        8,
        16,
        Recompute(),
        True,
        652.4,
        PIECES,
    ),
)


def torchtitan(rows: Sequence[TitanRow] = TITAN) -> list[Result]:
    """benchmarks/llama3_h100_202412 and asyncTP_llama3_h100_2025-06 of pytorch/torchtitan: sequences of 8192."""
    results = []
    for row in rows:
        dp = row.gpus // row.tp
        step = seconds(
            spec_of(llama(row.model)),
            cluster("h100", row.gpus // 8, memory=96e9, memory_bandwidth=2.4e12),
            equal(dp * row.samples, 8192),
            {"llm": ModuleLayout(row.gpus, dp_shard=dp, tp=row.tp)},
            1,
            recompute=row.recompute,
            overlap=Overlap(tp=row.overlaps),
        )
        rate = dp * row.samples * 8192 / step / row.gpus
        results.append(Result(f"{row.name}, {row.gpus} GPUs", "tokens/s", row.printed, rate, row.why))
    return results


def vit_llm(vits: Mapping[str, tuple[int, int]], llm: tuple[int, int]) -> MultimodalModel:
    """Optimus' models, (layers, width) of each encoder and of the LLM: tables 8 and 9."""
    with models_without_values():
        encoders = {
            name: siglip2_encoder(
                out_width=llm[1], merge=2, patch_size=14, num_channels=3, num_patches=2048, hidden_size=width,
                intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // HEAD,
            )
            for name, (layers, width) in vits.items()
        }  # fmt: skip
        language = next(iter(gpt(*llm, 51200).modules_by_name.values()))
        return MultimodalModel({**encoders, "llm": language}, edges=[(name, "llm") for name in encoders])


VIT_22B = {"vision": (48, 6144)}
"""Layers and width."""


def cut_around(shape: ModelSpec, length: int, stages: int) -> tuple[int, ...]:
    """LLM layers of each stage where all encoders are on the first one, by FLOPs."""
    flops = {name: module.per_row + module.per_pair * length for name, module in shape.modules.items()}
    llm = flops.pop("llm")
    return split(np.append(llm[0] + sum(encoder.sum() for encoder in flops.values()), llm[1:]), stages)


STRONG = {1536: (10.65, 10.43), 2048: (8.26, 8.06), 3072: (5.91, 5.87)}
"""GPUs -> seconds of Megatron-LM and of its balanced variant, table 5."""
OPTIMUS_WHY = {
    "Megatron-LM": "their cut and virtual stages are not printed",
    "balanced": "our stages are even; 12 virtual ones of both models cannot be",
}


def optimus(gpus: Sequence[int] = tuple(STRONG), *, fsdp: bool = True) -> list[Result]:
    """Table 5 (ViT-22B and GPT-175B, 1536 samples of 2048 tokens, microbatches of 2) and table 4's FSDP."""
    shape, results = spec_of(vit_llm(VIT_22B, (96, 12288))), []
    again = Recompute()
    for count in gpus:
        dp = count // 64
        first = ModuleLayout(count // 8, dp_shard=dp, tp=8)
        around = ModuleLayout(count, dp_shard=dp, tp=8, pp=8, split=cut_around(shape, 2048, 8))
        even = pipelined(48, count, 8, 8, 1)
        ways = {
            "Megatron-LM": {"vision": first, "llm": around},
            "balanced": {"vision": even, "llm": pipelined(96, count, 8, 8, 12)},
        }
        for (name, layouts), printed in zip(ways.items(), STRONG[count], strict=True):
            on, batch = cluster("h100", count // 8), equal(1536, 2048, 2048)
            step = seconds(shape, on, batch, layouts, 1536 // dp // 2, recompute=again, reshard="never")
            results.append(Result(f"{name}, {count} GPUs", "s", printed, step, OPTIMUS_WHY[name]))
    if fsdp:
        small = spec_of(vit_llm({"vision": (48, 2304)}, (80, 3072)))
        layouts = {"vision": ModuleLayout(8, dp_shard=8), "llm": ModuleLayout(8, dp_shard=8)}
        step = seconds(small, cluster("a100", 1), equal(16, 2048, 2048), layouts, 1, recompute=again)
        results.append(Result("FSDP, 8 A100", "s", 3.20, step, "sizes of its images and recompute are not printed"))
    return results


TABLES: Mapping[str, Callable[[], list[Result]]] = {
    "megatron_h100": megatron_h100,
    "megatron_a100": megatron_a100,
    "torchtitan": torchtitan,
    "optimus": optimus,
    "disttrain": lambda: [Result(*row) for row in disttrain()],
    "orchmllm": lambda: [Result(*row) for row in orchmllm()],
    "cornstarch": lambda: [Result(*row) for row in cornstarch()],
}


def summary(results: Sequence[Result]) -> dict[str, float]:
    """Median and worst error of what was not calibrated."""
    errors = [result.error for result in results if not result.calibrated]
    return {"median": statistics.median(errors), "worst": max(errors)}


@program(
    option("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), help="only these"),
)
def main(args: Options) -> Any:
    """Print the tables."""
    found: dict[str, Any] = {}
    for name in args.tables:
        began = time.perf_counter()
        results = TABLES[name]()
        rows = [[r.name + "*" * r.calibrated, r.unit, r.printed, r.predicted, r.ratio, r.why] for r in results]
        errors = summary(results)
        note = f"median error {errors['median']:.1%}, worst {errors['worst']:.1%}"
        report(name, ("row", "unit", "printed", "predicted", "ratio", "why"), rows, [note])
        found[name] = {"rows": [asdict(r) | {"ratio": r.ratio} for r in results], **errors}
        found[name]["seconds"] = time.perf_counter() - began
    return found


if __name__ == "__main__":
    main()
