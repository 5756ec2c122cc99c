"""Does training wait for its data? Real photographs-like JPEGs of 1024x1024, decoded while a real model trains.

The data are made once, under outputs/: smooth random fields with grain, which a JPEG coder finds about as hard as a
photograph (see the printed size of a file). The model's depth is chosen so that decoding a step's images, one after
another, takes about two thirds of the model's own step: in the loop itself it would add that much.

A training loop, one thread for the model, per step:

  in the loop      no workers: decoded when asked for
  1 worker, ...    processes
  ray, 1 actor     the same by a Ray actor, as on a CPU node

wait is the time in next(loader), share that of the whole step. Goal: below 2% with one worker, on two free cores.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.common import Options, option, program, report
from hetero_strategy.data.build_index import DatasetIndex, atomic_folder, build_index
from hetero_strategy.data.media import ImageProcessor
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.model import CausalLM, Encoder, MultimodalModel
from hetero_strategy.zoo import siglip2_encoder, titan_llama
from recipes.digits import write_digits

GOAL = 0.02
IMAGES = {1024: 1000, 512: 250}
"""Pixels on a side -> files."""
PATCH, MERGE, WIDTH = 64, 2, 128
FOLDER = Path("outputs/benchmarks/photographs")
SETTINGS: dict[str, Workers] = {
    "in the loop": Workers(),
    "1 worker": Workers(1),
    "2 workers": Workers(2),
    "ray, 1 actor": Workers(1, engine="ray"),
}


def photograph(rng: np.random.Generator, side: int) -> Image.Image:
    """Random fields from coarse to fine, each half as strong as the one before, and grain."""
    pixels = np.zeros((side, side, 3), np.float32)
    for octave in range(2, 9):
        coarse = rng.normal(0, 1, (2**octave, 2**octave, 3)).astype(np.float32)
        for channel in range(3):
            field = Image.fromarray(coarse[:, :, channel]).resize((side, side), Image.Resampling.BICUBIC)
            pixels[:, :, channel] += np.asarray(field) * 60 / 1.9 ** (octave - 2)
    pixels += pixels.mean(axis=2, keepdims=True) + rng.normal(0, 4, (side, side, 1))
    return Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8))


def photographs(folder: Path, sides: Collection[int]) -> None:
    """Files and a manifest per resolution, written once."""
    for side in sides:
        count = IMAGES[side]
        place = folder / str(side)
        if (place / "manifest.json").is_file():
            continue
        print(f"making {count} images of {side}x{side} in {place}", flush=True)
        rng = np.random.default_rng(side)
        with atomic_folder(place) as new:
            samples = []
            for number in range(count):
                photograph(rng, side).save(new / f"{number}.jpg", quality=90)
                turns = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": f"number {number}"}]
                samples.append({"id": str(number), "image": f"{number}.jpg", "conversations": turns})
            (new / "manifest.json").write_text(json.dumps(samples))


def data(folder: Path, side: int) -> DatasetIndex:
    """Index of the images of one resolution."""
    tokenizer = ChatTokenizer(write_digits(folder / "tokenizer", train=4, val=1, progress=False))
    return build_index(folder / str(side) / "manifest.json", tokenizer, {"vision": processor()}, verify="header")


def processor() -> ImageProcessor:
    """All pixels: 256 patches for each of the larger images, 64 for the smaller."""
    return ImageProcessor(patch_size=PATCH, merge=MERGE, max_patches=256)


def steps_of(index: DatasetIndex, images: int) -> StepDataset:
    """Steps of so many images."""
    modules = ("vision", "llm")
    kinds = {"vision": Encoder.kind, "llm": CausalLM.kind}
    options: dict[str, Any] = {"kinds": kinds, "global_batch_size": images, "seed": 1}
    return StepDataset(index, {"vision": processor()}, (modules,), RankView.whole(modules), **options)


def model_of(layers: int) -> MultimodalModel:
    """A small encoder and a language model of so many layers."""
    vision = siglip2_encoder(
        out_width=WIDTH, merge=MERGE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_channels=3, patch_size=PATCH, num_patches=256,
    )  # fmt: skip
    llm = titan_llama(vocab_size=128, dim=WIDTH, n_layers=layers, n_heads=4, n_kv_heads=4, max_seq_len=1024)
    return MultimodalModel({"vision": vision, "llm": llm}, seed=1)


def trainer_of(layers: int) -> Callable[[Batch], None]:
    """A step of training."""
    model = model_of(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(batch: Batch) -> None:
        optimizer.zero_grad()
        model(batch).loss.backward()
        optimizer.step()

    return train


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Median."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def decoding(steps: StepDataset, rounds: int) -> float:
    """Seconds to make a step, one after another, here."""
    places = iter(range(len(steps)))
    return seconds(lambda: steps[0, next(places)], rounds)


def depth_for(batch: Batch, wanted: float) -> int:
    """Layers of the language model with which a step takes about as long as wanted."""
    shallow, deep = (seconds(partial(trainer_of(layers), batch), 4) for layers in (1, 5))
    return max(1, round(1 + (wanted - shallow) / max(1e-6, (deep - shallow) / 4)))


def loop(loader: StepLoader, train: Callable[[Batch], None], steps: int, warm: int) -> dict[str, float]:
    """Seconds per step after the first ``warm``."""
    waits, whole, made = [], [], []
    iterator = iter(loader)
    for _ in range(steps + warm):
        began = time.perf_counter()
        batch = next(iterator)
        waited = time.perf_counter() - began
        train(batch)
        waits.append(waited)
        whole.append(time.perf_counter() - began)
        made.append(0.0 if batch.times is None else batch.times.payload)
    loader.close()
    waits, whole, made = waits[warm:], whole[warm:], made[warm:]
    return {
        "made": statistics.median(made),
        "wait": statistics.median(waits),
        "worst": max(waits),
        "step": statistics.median(whole),
        "share": statistics.median(w / s for w, s in zip(waits, whole, strict=True)),
        "total": sum(waits) / sum(whole),
    }


@program(
    option("--steps", type=int, default=40, help="measured steps of every loop"),
    option("--images", type=int, default=12, help="images of a step"),
    option("--folder", type=Path, default=FOLDER, help="where the data are kept"),
    option("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS), help="rows of the table"),
)
def main(args: Options) -> Any:
    """Measure and print."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    photographs(args.folder, [1024])
    index = data(args.folder, 1024)
    size = statistics.mean(index.path("vision", n).stat().st_size for n in range(min(100, len(index.names))))
    made = steps_of(index, args.images)
    decode = decoding(made, 5)
    batch = made[0, 0]
    layers = depth_for(batch, 1.5 * decode)
    train = trainer_of(layers)
    alone = seconds(partial(train, batch), 5)
    rows, results = [], {}
    for name in args.only:
        loader = StepLoader(steps_of(index, args.images), workers=SETTINGS[name])
        results[name] = found = loop(loader, train, args.steps, 5)
        rows.append(
            (name, *(found[k] * 1e3 for k in ("made", "wait", "worst", "step")), f"{found['share']:.1%}",
             f"{found['total']:.1%}")
        )  # fmt: skip
    report(
        f"{args.images} images of 1024x1024 a step, {layers} layers: decoding alone {decode * 1e3:.0f} ms, the model's"
        f" step alone {alone * 1e3:.0f} ms",
        ["loader", "made in ms", "wait ms", "worst ms", "step ms", "wait / step", "sum of waits / sum of steps"],
        rows,
        [
            f"a file has {size / 1e3:.0f} kB and takes {decode / args.images * 1e3:.1f} ms to read, decode and cut",
            f"goal: wait / step below {GOAL:.0%} with 1 worker; medians over {args.steps} steps after 5",
        ],
    )
    alone = {"layers": layers, "file_bytes": size, "decode": decode, "step": alone}
    return {"alone": alone, "loops": results}


if __name__ == "__main__":
    main()
