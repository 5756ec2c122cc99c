"""Is damage of a checkpoint noticed, and what does it cost to look?

Two gloo ranks train vision (in two stages), audio (on one rank) and a sharded language model for a step with AdamW, and
save it as a run does.

  flips  one byte of one file is changed, the checkpoint loaded by both ranks as a run resumes, the byte put back. Files
         take turns, positions and new values are drawn. Noticed: both ranks raise one CheckpointError that names the
         file and, in a tensor's bytes, the tensor. Beside it: noticed by what verify_checkpoints=False leaves on
  load   seconds of a whole resume, slowest rank, median over rounds, with and without checks in turns: from the page
         cache, where checks cost most, and from the disk. Where other work takes the processors, the processor time
         of both ranks (least over rounds) is the steadier figure
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import arguments, report, write_json
from benchmarks.pipelines import Setting, assembled
from hetero_strategy.checkpoint import describe
from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import CheckpointError
from hetero_strategy.layout import ModuleLayout
from tests.distributed.harness import Pool

LAYOUTS = {
    "vision": ModuleLayout(ranks=(0, 1), pp=2),
    "audio": ModuleLayout(ranks=(1,)),
    "llm": ModuleLayout(ranks=(0, 1), dp_shard=2),
}
WORLD = 2
Timed = tuple[str, bool, float, float]
"""A load: from where, with checks, seconds, processor seconds."""


class Run:
    """A model and its optimizer after one step, and its checkpoint at ``path``; made by both ranks."""

    def __init__(self, rank: int, width: int, layers: int, path: Path) -> None:
        size = (width // 2, layers)
        setting = Setting("run", LAYOUTS, vision=size, audio=size, llm=(width, layers), samples=4, microbatches=2)
        made = assembled(setting, rank)
        made.executor.run(setting.batch(0, rank), train=True)
        parameters = [p for module in made.executor.modules.values() for p in module.parameters()]
        self.path = path
        self.state: TrainingState = made.state
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
        self.optimizer.step()
        self.state.save(
            {
                "state_dict": self.state.model_tensors(),
                "optimizer_states": [self.state.optimizer_state(self.optimizer)],
                "global_step": 1,
            },
            path,
        )

    def load(self, *, verify: bool) -> str:
        """What is said of it; nothing where it loads."""
        try:
            loaded = self.state.load(self.path, [self.optimizer], verify=verify)
            self.state.load_optimizers([self.optimizer], loaded["optimizer_states"], str(self.path))
        except CheckpointError as fault:
            return str(fault)
        return ""


def measure_on_rank(
    rank: int, world: int, folder: str, count: int, seed: int, width: int, rounds: int
) -> tuple[list[dict[str, Any]], list[Timed]]:
    """Both parts, of this rank."""
    return flips_on_rank(rank, folder, count, seed), loads_on_rank(rank, width, folder, rounds)


def flips_on_rank(rank: int, folder: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Every flip, with what this rank is told."""
    run = Run(rank, 64, 2, Path(folder) / "flipped")
    files = sorted(run.path.iterdir())
    draw = np.random.default_rng(seed)
    found = []
    assert run.load(verify=True) == ""
    for number in range(count):
        file = files[number % len(files)]
        at, bits = int(draw.integers(file.stat().st_size)), int(draw.integers(1, 256))
        place = _place(file, at)
        said = []
        for flipped in (True, False):  # there and back
            dist.barrier()
            if rank == 0:
                with open(file, "r+b") as stream:
                    stream.seek(at)
                    (byte,) = stream.read(1)
                    stream.seek(at)
                    stream.write(bytes([byte ^ bits]))
            dist.barrier()
            if flipped:
                said = [run.load(verify=verify) for verify in (True, False)]
        found.append({"file": file.name, "at": at, "bits": bits, **place, "said": said[0], "unchecked": said[1]})
    assert run.load(verify=True) == ""
    return found


def _place(file: Path, at: int) -> dict[str, str]:
    """The kind of a byte, and the tensor it belongs to."""
    if file.suffix == ".json" or ".state" in file.name:
        return {"kind": "index" if file.stem == "checkpoint" else "metadata, random states", "tensor": ""}
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    for name, entry in header.items():
        start, end = entry.get("data_offsets", (0, 0))
        if start <= at - 8 - size < end:
            return {"kind": "parameters, moments", "tensor": name}
    return {"kind": "their headers", "tensor": ""}


def loads_on_rank(rank: int, width: int, folder: str, rounds: int) -> list[Timed]:
    """Of this rank, by round."""
    run = Run(rank, width, 8, Path(folder) / "timed")
    found = []
    for number in range(rounds):
        for place in ("page cache", "disk"):
            for verify in (True, False) if number % 2 else (False, True):
                dist.barrier()
                if rank == 0 and place == "disk":
                    _forget(run.path)
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                assert run.load(verify=verify) == ""
                found.append((place, verify, time.perf_counter() - began, time.process_time() - cpu))
    return found


def _forget(folder: Path) -> None:
    """Ask the kernel to drop the files from its cache."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def judged(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every flip as all ranks saw it."""
    found = []
    for one, *others in zip(*ranks, strict=True):
        said = one["said"]
        named = one["file"] in said and (f"of {one['tensor']!r}" in said if one["tensor"] else True)
        agreed = all(other["said"] == said for other in others)
        found.append({**one, "noticed": bool(said) and named and agreed, "noticed_unchecked": bool(one["unchecked"])})
    return found


def _loads(ranks: Sequence[Sequence[Timed]], place: str, nbytes: int) -> dict[str, float]:
    """Seconds of the slowest rank, median over rounds; what checks add to them and to the least processor time."""
    wall, cpu = {}, {}
    for verify in (True, False):
        rounds = [runs for runs in zip(*ranks, strict=True) if runs[0][:2] == (place, verify)]
        wall[verify] = statistics.median(max(run[2] for run in runs) for runs in rounds)
        cpu[verify] = min(sum(run[3] for run in runs) for runs in rounds)
    return {
        "with": wall[True],
        "without": wall[False],
        "ratio": wall[True] / wall[False],
        "ms_per_gb": 1e12 * (wall[True] - wall[False]) / nbytes,
        "cpu_ms_per_gb": 1e12 * (cpu[True] - cpu[False]) / nbytes,
    }


def checksum_speed(nbytes: int = 256 << 20) -> float:
    """Bytes per second of zlib's CRC-32 in one thread, the best of three."""
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).data
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for start in range(0, nbytes, 4 << 20):
            zlib.crc32(data[start : start + (4 << 20)])
        best = min(best, time.perf_counter() - began)
    return nbytes / best


def main(argv: Sequence[str] | None = None, pool: Pool | None = None) -> dict[str, Any]:
    """Run, print, write; returns the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--flips", type=int, default=200, help="bytes that are changed (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of their positions (default %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the timed language model (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of the timed loads (default %(default)s)")
    given = parser.parse_args(argv)
    pool = pool or Pool()
    with tempfile.TemporaryDirectory(prefix="integrity-") as folder:
        ranks = pool.run(
            WORLD, measure_on_rank, folder, given.flips, given.seed, given.width, given.rounds, timeout=1200
        )
        flips, timed = judged([flipped for flipped, _ in ranks]), [loads for _, loads in ranks]
        nbytes = describe(Path(folder) / "timed").nbytes
        files = len(list((Path(folder) / "flipped").iterdir()))
    kinds = sorted({one["kind"] for one in flips})
    rows = []
    for kind in [*kinds, "all"]:
        mine = [one for one in flips if kind in (one["kind"], "all")]
        rows.append((kind, len(mine), sum(x["noticed"] for x in mine), sum(x["noticed_unchecked"] for x in mine)))
    report(
        "checkpoint_integrity",
        f"one byte changed, {files} files of {WORLD} ranks",
        ("where", "flips", "noticed and named", "noticed without checks of tensors"),
        rows,
        [f"not noticed: {one}" for one in flips if not one["noticed"]],
    )
    loads = {place: _loads(timed, place, nbytes) for place in ("page cache", "disk")}
    speed = checksum_speed()
    columns = ("with checks s", "without s", "with / without", "checks ms per GB", "processor ms per GB")
    report(
        "checkpoint_integrity",
        f"resume of {nbytes / 1e6:.0f} MB by {WORLD} ranks, {given.rounds} rounds",
        ("from", *columns),
        [
            (place, one["with"], one["without"], one["ratio"], f"{one['ms_per_gb']:.0f}", f"{one['cpu_ms_per_gb']:.0f}")
            for place, one in loads.items()
        ],
        [f"CRC-32 of zlib {zlib.ZLIB_RUNTIME_VERSION}, one thread: {speed / 1e9:.1f} GB/s"],
    )
    results = {
        "flips": flips,
        "noticed": sum(one["noticed"] for one in flips),
        "bytes": nbytes,
        "loads": loads,
        "checksum_bytes_per_second": speed,
    }
    write_json(
        given.json, "checkpoint_integrity", "cpu", {k: v for k, v in vars(given).items() if k != "json"}, results
    )
    return results


if __name__ == "__main__":
    main()
