"""Does training wait for its data? Real photographs-like JPEGs of 1024x1024, decoded while a real model trains.

The data are made once, under outputs/: smooth random fields with grain, which a JPEG coder finds about as hard as a
photograph (see the printed size of a file). The model's depth is chosen so that decoding a step's images, one after
another, takes about two thirds of the model's own step: in the loop itself it would add that much.

Table 1, a training loop, one thread for the model, per step:

  in the loop      num_workers=0: decoded when asked for
  thread           num_workers=0 and the background thread: decoders let go of Python's lock, some of the time
  1 worker, ...    processes; + thread: with something to finish (agreement on skipped samples)
  ray, 1 actor     the same by a Ray actor, as on a CPU node

wait is the time in next(loader), share that of the whole step. Goal: below 2% with one worker, on two free cores.

Table 2 is figure 21 of DistTrain (section 7.3.2): loading per iteration by number and resolution of images, DP size 1,
with and without asynchronous loading. Training on a GPU, which leaves the processor alone, is a pause there, 1.5 times
as long as decoding. The paper's figure shows seconds against milliseconds, without printed numbers.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.common import arguments, report, write_json
from hetero_strategy.data.build_index import DatasetIndex, atomic_folder, build_index
from hetero_strategy.data.media import ImageProcessor
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.loading.agree import Agree
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.model import MultimodalModel
from hetero_strategy.zoo import siglip2_encoder, titan_llama
from recipes.digits import write_digits
from tests.small_models import kinds_of

GOAL = 0.02
IMAGES = {1024: 1000, 512: 250}
"""Pixels on a side -> files."""
PATCH, MERGE, WIDTH = 64, 2, 128
FOLDER = Path("outputs/benchmarks/photographs")
SETTINGS: dict[str, dict[str, Any]] = {
    "in the loop": {"num_workers": 0},
    "thread": {"num_workers": 0, "finish": (Agree(),)},
    "1 worker": {"num_workers": 1},
    "1 worker + thread": {"num_workers": 1, "finish": (Agree(),)},
    "2 workers": {"num_workers": 2},
    "ray, 1 actor": {"num_workers": 1, "engine": "ray"},
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


def photographs(folder: Path, sides: Collection[int] = tuple(IMAGES)) -> None:
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
    options: dict[str, Any] = {"kinds": kinds_of(modules), "global_batch_size": images, "seed": 1}
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


def figure21(folder: Path, cases: list[tuple[int, int]], steps: int) -> list[dict[str, Any]]:
    """Loading per iteration with and without workers."""
    found = []
    for images, side in cases:
        index = data(folder, side)
        alone = decoding(steps_of(index, images), 4)
        loader = StepLoader(steps_of(index, images), num_workers=1, finish=(Agree(),))
        measured = loop(loader, lambda _, pause=1.5 * alone: time.sleep(pause), steps, 5)  # type: ignore[misc]
        found.append({"images": images, "side": side, "without": alone, "with": measured["wait"]})
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="measured steps of every loop")
    parser.add_argument("--images", type=int, default=12, help="images of a step in table 1")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the data are kept")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS), help="rows of table 1")
    args = parser.parse_args(argv)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    torch.set_num_threads(1)
    photographs(args.folder)
    index = data(args.folder, 1024)
    size = statistics.mean(index.path("vision", n).stat().st_size for n in range(100))
    made = steps_of(index, args.images)
    decode = decoding(made, 5)
    batch = made[0, 0]
    layers = depth_for(batch, 1.5 * decode)
    train = trainer_of(layers)
    alone = seconds(partial(train, batch), 5)
    rows, results = [], {}
    for name in args.only:
        loader = StepLoader(steps_of(index, args.images), **SETTINGS[name])
        results[name] = found = loop(loader, train, args.steps, 5)
        rows.append(
            (name, *(found[k] * 1e3 for k in ("made", "wait", "worst", "step")), f"{found['share']:.1%}",
             f"{found['total']:.1%}")
        )  # fmt: skip
    report(
        "loader",
        f"{args.images} images of 1024x1024 a step, {layers} layers: decoding alone {decode * 1e3:.0f} ms, the model's"
        f" step alone {alone * 1e3:.0f} ms",
        ["loader", "made in ms", "wait ms", "worst ms", "step ms", "wait / step", "sum of waits / sum of steps"],
        rows,
        [
            f"a file has {size / 1e3:.0f} kB and takes {decode / args.images * 1e3:.1f} ms to read, decode and cut",
            f"goal: wait / step below {GOAL:.0%} with 1 worker; medians over {args.steps} steps after 5",
        ],
    )
    cases = figure21(args.folder, [(4, 512), (4, 1024), (8, 512), (8, 1024), (16, 512), (16, 1024)], 10)
    report(
        "loader",
        "DistTrain, figure 21: loading per iteration, ms",
        ["images, pixels on a side", "without", "with", "without / with"],
        [
            (f"{c['images']}, {c['side']}", c["without"] * 1e3, c["with"] * 1e3, f"{c['without'] / c['with']:.0f}")
            for c in cases
        ],
        ["without: read, decoded and cut in the loop; with: waited for in next(), 1 worker and the thread"],
    )
    settings = {"images": args.images, "steps": args.steps, "layers": layers, "file_bytes": size, "goal": GOAL}
    alone_results = {"decode": decode, "step": alone}
    write_json(args.json, "loader", "cpu", settings, {"alone": alone_results, "loops": results, "figure21": cases})


if __name__ == "__main__":
    main()
