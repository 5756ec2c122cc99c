"""What does it cost to read payload where it is sampled and send it to where it is computed?

Real files (JPEG, WAV) of ragged sizes and gloo ranks on this machine; the same global batches in all cases. For every
placement

  least        bytes of items that are not read on the rank that computes them, once for every such rank: no way of
               sending items from where they were sampled to where they are computed has fewer
  moved        bytes handed to the all-to-alls; with --wire also what the loopback device carried (alone on it:
               unshare -rn sh -c 'ip link set lo up; python -m benchmarks.dispatch --wire')
  all-gather   the same for a gather of everything to every rank, the strawman of OrchMLLM section 5.2.1 (figure 12),
               padded to the rank with most; its equation 3 in bytes
  time ratio   of a whole dispatch (sizes, plan, payload, batch) with the all-gather over one with the all-to-all,
               median over steps, the two in turns
  decode       seconds a step takes to decode on its busiest rank, processor time: fetch (every rank what it computes,
               so replicas decode the same) and all_to_all (every rank what it samples)
  wait         seconds that training waits for a batch (median) where a step takes as long as making one does by
               itself: both ways, one worker, ahead of need. Training is a pause, so it takes no core
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torch.distributed as dist
from PIL import Image

from benchmarks.common import arguments, report, write_json
from hetero_strategy.data.build_index import build_index
from hetero_strategy.data.media import AudioProcessor, ImageProcessor, Processor
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.placement import place
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.dispatch import Dispatch, Moves
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.read_where_sampled import DecodedItems, SampledDataset
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.model.inputs import EncoderInputs
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from recipes.digits import write_digits
from tests.distributed.harness import Pool
from tests.small_models import kinds_of

MODULES = ("vision", "audio", "llm")
EDGES = (("vision", "llm"), ("audio", "llm"))
RATE = 16000

Layouts = Mapping[str, Mapping[str, Any]]
PLACEMENTS: dict[str, Layouts] = {
    "dp4 everywhere": {name: {"ranks": range(4), "dp_shard": 4} for name in MODULES},
    "vision dp3, audio alone, llm tp2·dp2": {
        "vision": {"ranks": range(3), "dp_shard": 3},
        "audio": {"ranks": [3]},
        "llm": {"ranks": range(4), "tp": 2, "dp_shard": 2},
    },
    "encoders tp2·dp2, llm pp2·dp2": {
        "vision": {"ranks": range(4), "tp": 2, "dp_shard": 2},
        "audio": {"ranks": range(4), "tp": 2, "dp_shard": 2},
        "llm": {"ranks": range(4), "pp": 2, "dp_shard": 2},
    },
    "vision alone, audio alone, llm dp2": {
        "vision": {"ranks": [0]},
        "audio": {"ranks": [1]},
        "llm": {"ranks": [2, 3], "dp_shard": 2},
    },
}


@dataclass(frozen=True)
class Task:
    """What a world measures."""

    folder: str
    layouts: Layouts
    samples: int
    wire: bool


@dataclass
class Found:
    """Of one rank, by step."""

    least: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    gathered_wire: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gathered_seconds: list[float] = field(default_factory=list)
    decode: dict[str, list[float]] = field(default_factory=dict)
    making: dict[str, float] = field(default_factory=dict)
    wait: dict[str, float] = field(default_factory=dict)


def processors() -> dict[str, Processor]:
    """Of encoders of common sizes."""
    return {"vision": ImageProcessor(patch_size=14, merge=2, max_patches=4096), "audio": AudioProcessor()}


def write_data(folder: Path, samples: int, seed: int = 0) -> None:
    """A third of the samples has up to four images, a third a recording, the rest both."""
    write_digits(folder, train=1, val=1, progress=False)  # for its tokenizer
    rng = np.random.default_rng(seed)
    entries = []
    for number in range(samples):
        one: dict[str, Any] = {"id": str(number)}
        text = ""
        if number % 3 != 1:
            one["image"] = []
            for k in range(int(rng.integers(1, 5))):
                height, width = np.clip(rng.lognormal(5.4, 0.5, 2), 56, 900).astype(int)
                noise = rng.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
                one["image"].append(f"{number}-{k}.jpg")
                Image.fromarray(noise).resize((width, height)).save(folder / one["image"][-1])
                text += "<image>"
        if number % 3:
            one["audio"] = f"{number}.wav"
            length = int(np.clip(rng.lognormal(1.6, 0.8), 0.5, 29) * RATE)
            soundfile.write(folder / one["audio"], rng.normal(0, 0.1, length), RATE, subtype="PCM_16")
            text += "<audio>"
        one["conversations"] = [
            {"from": "human", "value": text + "?"},
            {"from": "gpt", "value": "yes" * (number % 9 + 1)},
        ]
        entries.append(one)
    (folder / "data.json").write_text(json.dumps(entries))


class Counted(Dispatch):
    """Ours, with the bytes of payload that this rank has sent."""

    bytes = 0

    def _moved(self, who: Moves, items: DecodedItems, home: np.ndarray, length: np.ndarray) -> dict[int, np.ndarray]:
        self.bytes += int(length[who.sent].sum()) * items.values[:1].nbytes
        return super()._moved(who, items, home, length)


class GatherAll(Dispatch):
    """The strawman: every rank gets everything, then keeps what it computes."""

    bytes = 0

    def _moved(self, who: Moves, items: DecodedItems, home: np.ndarray, length: np.ndarray) -> dict[int, np.ndarray]:
        rows = np.bincount(home, length, self._world).astype(np.int64)  # known to all ranks
        most, width = int(rows.max()), items.values.shape[1]
        own = torch.zeros(most, width)
        own[: len(items.values)] = torch.from_numpy(items.values)
        everyone = torch.empty(self._world, most, width)
        dist.all_gather(list(everyone), own, group=self._group)
        self.bytes += (self._world - 1) * own.nbytes
        wanted, found = np.concatenate([who.kept, who.received]), {}
        for source in range(self._world):
            theirs = np.flatnonzero(home == source)
            pieces = np.split(everyone[source].numpy(), np.cumsum(length[theirs]))
            found.update({unit: piece for unit, piece in zip(theirs.tolist(), pieces, strict=False) if unit in wanted})
        return found


def measure_on_rank(rank: int, world: int, task: Task) -> Found:
    """All that is measured in one placement."""
    torch.multiprocessing.set_start_method("fork", force=True)  # workers of this process, not of the harness's server
    folder, found = Path(task.folder), Found()
    tokenizer, group = ChatTokenizer(folder), dist.new_group(backend="gloo")
    placement = place({n: ModuleLayout.from_config(n, dict(x)) for n, x in task.layouts.items()}, world)
    shares = [RankView.of(placement, MODULES, r) for r in range(world)]
    options: dict[str, Any] = {
        "kinds": kinds_of(MODULES),
        "global_batch_size": task.samples,
        "microbatches": 2,
        "balancing": BalanceConfig.of("auto").resolve(shares[rank].instances, ModelContext()),
    }
    indices = [
        build_index(folder / "data.json", tokenizer, processors(), measure=measure, progress=False)
        for measure in (True, False)
    ]
    fetch = StepDataset(indices[0], processors(), EDGES, shares[rank], **options)
    sampled = SampledDataset(indices[1], processors(), EDGES, shares[rank], **options, rank=rank, world=world)
    ours, strawman = Counted(sampled, shares, group), GatherAll(sampled, shares, group)
    found.decode = {"fetch": [], "all_to_all": []}
    for step in range(len(fetch)):
        decoded, seconds = _clocked(lambda step=step: sampled[step])  # type: ignore[misc]
        found.decode["all_to_all"].append(seconds)
        whole, seconds = _clocked(lambda step=step: fetch[step])  # type: ignore[misc]
        found.decode["fetch"].append(seconds)
        for turn in (0, 1) if step % 2 else (1, 0):
            dist.barrier()
            carried, began = _carried(), time.perf_counter()
            batch = (ours, strawman)[turn](decoded)
            dist.barrier()
            seconds, carried = time.perf_counter() - began, _carried() - carried
            for name, made in whole.inputs.items():
                for x, y in zip(made, batch.inputs[name], strict=True):
                    if x is not None and hasattr(x, "values"):
                        assert torch.equal(x.values, y.values), name  # type: ignore[union-attr]
            if turn == 0:
                found.seconds.append(seconds)
                found.wire.append(carried)
            else:
                found.gathered_seconds.append(seconds)
                found.gathered_wire.append(carried)
        found.moved.append(ours.bytes)
        found.gathered.append(strawman.bytes)
        ours.bytes = strawman.bytes = 0
        found.least.append(_least(whole, shares[rank], rank, world))
    if not task.wire:
        for name, loader in (
            ("fetch", lambda: StepLoader(fetch, num_workers=1)),
            ("all_to_all", lambda: StepLoader(sampled, num_workers=1, finish=[ours])),
        ):
            found.making[name], found.wait[name] = _ahead(loader, len(fetch))
    dist.barrier()
    return found


def _ahead(make: Callable[[], StepLoader], steps: int) -> tuple[float, float]:
    """Seconds that a step takes to make, and that training waits for it where it takes as long itself."""
    loader = make()
    dist.barrier()
    began = time.perf_counter()
    for _ in loader:
        dist.barrier()
    making = (time.perf_counter() - began) / steps
    waits, batches = [], iter(loader)
    slowest = torch.tensor([making])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    for _ in range(steps):
        began = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - began)
        dist.barrier()
        time.sleep(float(slowest))
    loader.close()
    return making, statistics.median(waits[1:])  # the first one has nothing before it


def _least(batch: Batch, share: RankView, rank: int, world: int) -> int:
    """Bytes that this rank computes and has not read itself; from the batch that is made without a dispatch."""
    total = 0
    for name, made in batch.inputs.items():
        for number, inputs in enumerate(made):
            instance = share.mine[name]
            if isinstance(inputs, EncoderInputs) and len(inputs.values) and instance is not None:
                units = batch.plan.assignments[name][number].of(instance)
                foreign = batch.plan.metadata.items[name].sample[units] % world != rank
                rows = inputs.sizes.prod(axis=1)[foreign].sum()
                total += int(rows) * inputs.values.shape[1] * inputs.values.element_size()
    return total


def _clocked(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return work(), time.process_time() - began


def _carried() -> int:
    """Bytes that the loopback device has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def summary(ranks: Sequence[Found], steps: int) -> dict[str, Any]:
    """Of one placement, per step."""
    mega = 1e-6 / steps
    slowest = {
        name: statistics.median(max(times) for times in zip(*(r.decode[name] for r in ranks), strict=True))
        for name in ranks[0].decode
    }
    pairs = zip(ranks[0].gathered_seconds, ranks[0].seconds, strict=True)
    return {
        "least": sum(sum(r.least) for r in ranks) * mega,
        "moved": sum(sum(r.moved) for r in ranks) * mega,
        "wire": sum(ranks[0].wire) * mega,
        "gathered": sum(sum(r.gathered) for r in ranks) * mega,
        "gathered_wire": sum(ranks[0].gathered_wire) * mega,
        "seconds": statistics.median(ranks[0].seconds),
        "ratio": statistics.median(a / b for a, b in pairs),
        "decode": slowest,
        "making": {name: max(r.making[name] for r in ranks) for name in ranks[0].making},
        "wait": {name: max(r.wait[name] for r in ranks) for name in ranks[0].wait},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, default=24, help="samples of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps (default: %(default)s)")
    parser.add_argument("--wire", action="store_true", help="also count what loopback carries; leaves waits out")
    options = parser.parse_args(argv)
    pool, results, rows = Pool(), {}, []
    with tempfile.TemporaryDirectory(prefix="dispatch-") as root:
        folder = Path(root) / "data"
        write_data(folder, options.samples * options.steps)
        for name, layouts in PLACEMENTS.items():
            task = Task(str(folder), layouts, options.samples, options.wire)
            one = results[name] = summary(pool.run(4, measure_on_rank, task, timeout=600), options.steps)
            least = one["least"]
            rows.append(
                [name, least, one["moved"] / least, one["gathered"] / least]
                + ([one["wire"] / least, one["gathered_wire"] / least] if options.wire else [])
                + [one["seconds"], one["ratio"], *one["decode"].values()]
                + [f"{one['wait'][way]:.3f} of {one['making'][way]:.2f}" for way in one["wait"]]
            )
    columns = ["placement, 4 ranks", "least MB", "moved / least", "all-gather / least"]
    columns += ["wire / least", "all-gather wire / least"] if options.wire else []
    columns += ["dispatch s", "time ratio", "decode s fetch", "all_to_all"]
    columns += [] if options.wire else ["wait s fetch", "all_to_all"]
    report("dispatch", f"{options.samples} samples a step, {options.steps} steps", columns, rows)
    settings = {"samples": options.samples, "steps": options.steps, "wire": options.wire}
    write_json(options.json, "dispatch", "cpu", settings, results)


if __name__ == "__main__":
    main()
