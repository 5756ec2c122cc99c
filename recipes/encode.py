"""Encode the items of a data set by frozen encoders: `python -m recipes.encode encoded={vision:/scratch/rows}`.

A training run with the same options then reads the rows: no media file is decoded, and its model has no backbone.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tqdm import tqdm

from hetero_strategy.data.encoded_rows import (
    Item,
    backbone_tensors,
    check_fingerprint,
    digest_of,
    fingerprint,
    read_items,
    weights_digest,
    write_rows,
)  # fmt: skip
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.model import Encoder, MultimodalModel
from hetero_strategy.model.kind import Processor
from hetero_strategy.model.materialize import materialize
from hetero_strategy.model.without_values import models_without_values
from recipes import build, cli, torchrun

DTYPES = {"64": torch.float64, "32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}
"""What comes before the first hyphen of ``trainer.precision`` -> what modules compute in."""
FILE_BYTES = 2**28
"""Bytes of rows in a file, which are lost at most where a process is killed."""
AHEAD = 128
"""Media files that are decoded ahead."""


class Media(NamedTuple):
    """A decoded media file."""

    digest: str
    values: np.ndarray
    sizes: tuple[int, ...]
    rows: int


def encode_rows(
    model: MultimodalModel,
    module: str,
    processor: Processor,
    paths: Sequence[Path],
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rows: int = 4096,
    file_bytes: int = FILE_BYTES,
    progress: bool = False,
) -> int:
    """Write the rows of an encoder's backbone for media files that have none yet; return the number of such files.

    Several processes may write to one folder at once, each for its share of the files.

    Args:
        model: model without values; those of the backbone are made here.
        module: name of the encoder.
        processor: processor that reads the files.
        paths: media files.
        folder: folder of the rows, made where it is missing.
        dtype: dtype of the backbone's parameters and of the rows.
        device: device on which the backbone runs, in evaluation mode.
        rows: number of rows inside the backbone that go through it together.
        file_bytes: bytes of rows in a file.

    Raises:
        ConfigError: the folder holds rows of another encoder, or the module's rows cannot be encoded.
        DataError: a file cannot be read or written, or the backbone makes other rows than the processor says.
    """
    encoder = model.modules_by_name.get(module)
    if not isinstance(encoder, Encoder):
        raise ConfigError(f"encoded names '{module}', which is no encoder; the modules are {[*model.modules_by_name]}")
    said = {**fingerprint(encoder, processor), "dtype": str(dtype).removeprefix("torch.")}
    materialize(encoder, model.seed, name=module, device=torch.device(device))
    for parameter in encoder.parameters():
        parameter.data = parameter.data.to(dtype)
    said["weights"] = weights_digest(backbone_tensors(encoder), dtype)
    for left in folder.glob("rows-*.tmp"):  # by a job that was killed; nothing is written for an hour
        with suppress(FileNotFoundError):  # other ranks delete them too
            if time.time() - left.stat().st_mtime > 3600:
                left.unlink()
    known: set[str] = set()
    for _, stored, there in read_items(folder):
        check_fingerprint(folder, stored, said)
        known |= {digest for digest, *_ in there}
    items, made, count = list[Item](), list[torch.Tensor](), 0
    for batch in _batches(_decoded(paths, processor, known, progress), processor, rows):
        parts = _encode(encoder, processor, batch, dtype, device)
        for media, part in zip(batch, parts, strict=True):
            items.append((media.digest, media.rows, zlib.crc32(part.reshape(-1).view(torch.uint8).numpy())))
        made, count = [*made, *parts], count + len(batch)
        if sum(part.nbytes for part in made) >= file_bytes:
            write_rows(folder, items, torch.cat(made), {**said, "width": made[0].shape[1]})
            items, made = [], []
    if items:
        write_rows(folder, items, torch.cat(made), {**said, "width": made[0].shape[1]})
    return count


@torch.inference_mode()
def _encode(
    encoder: Encoder, processor: Processor, batch: Sequence[Media], dtype: torch.dtype, device: torch.device | str
) -> list[torch.Tensor]:
    """Return the backbone's rows of each file, on the host."""
    sizes, counts = np.array([media.sizes for media in batch]), [media.rows for media in batch]
    inputs = processor.collate([media.values for media in batch], sizes, np.array(counts))
    rows: Any = encoder.backbone.eval()(inputs.to(device).as_numbers().narrowed(dtype))
    if len(rows) != sum(counts):
        raise DataError(
            f"module '{encoder.name}': its backbone makes {len(rows)} rows of {len(batch)} items, and its processor"
            f" says {sum(counts)}, so nobody knows which row is whose; join rows inside the backbone"
        )
    return [part.contiguous() for part in torch.split(rows.cpu(), counts)]


def _decoded(paths: Sequence[Path], processor: Processor, known: set[str], progress: bool) -> Iterator[Media]:
    """Decode files that are not known, some of them ahead in threads: decoders let go of Python's lock."""

    def read(path: Path) -> Media | None:
        digest = digest_of(path.read_bytes())
        if digest in known:
            return None
        known.add(digest)
        sizes, rows = processor.measure(path)
        return Media(digest, processor.load(path, sizes), sizes, rows)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool, tqdm(total=len(paths), disable=not progress) as bar:
        reading, rest = deque[Future[Media | None]](), iter(paths)
        for _ in paths:
            reading.extend(pool.submit(read, path) for path in islice(rest, AHEAD - len(reading)))
            media = reading.popleft().result()
            bar.update()
            if media is not None:
                yield media


def _batches(decoded: Iterator[Media], processor: Processor, rows: int) -> Iterator[list[Media]]:
    """Group files of about so many rows inside the module."""
    batch, inside = list[Media](), 0
    for media in decoded:
        batch.append(media)
        inside += int(processor.inner_rows(np.array([media.sizes])).sum())
        if inside >= rows:
            yield batch
            batch, inside = [], 0
    if batch:
        yield batch


def encode(cfg: DictConfig) -> None:
    """Encode every item of all splits by each encoder that ``encoded`` names."""
    folders = dict(cfg.encoded or {})
    if not folders:
        raise ConfigError("encoded is missing: give the folder of an encoder's rows, encoded={vision:/scratch/rows}")
    cfg.encoded = None  # the model is to have its backbones
    build.check_configuration(cfg, "rows")
    if cli.external() and not torchrun.started():
        raise ConfigError("encode: start several processes with torchrun, not srun: they share one index of the data")
    rank, world = (cli.rank(), int(os.environ["WORLD_SIZE"])) if torchrun.started() else (0, 1)
    width = str(cfg.trainer.precision or "32").partition("-")[0]
    if width not in DTYPES:
        known = ", ".join(f"{bits}-..." for bits in DTYPES)
        raise ConfigError(f"trainer.precision={cfg.trainer.precision}: modules compute in {known}; choose one of these")
    dtype = DTYPES[width]
    on_cuda = cfg.trainer.accelerator != "cpu" and torch.cuda.is_available()
    device = f"cuda:{int(os.environ.get('LOCAL_RANK') or 0) % torch.cuda.device_count()}" if on_cuda else "cpu"
    if dtype == torch.float64:
        torch.set_default_dtype(dtype)  # as Lightning's 64-true

    build.write_data(cfg)
    make_model = build.model_maker(cfg)
    data = build.datamodule(cfg, make_model)
    if torchrun.started():  # the first process indexes the data set while the others wait
        dist.init_process_group("gloo", timeout=timedelta(days=1))
        if not rank:
            data.setup()
        dist.barrier()
    data.setup()
    for name, folder in folders.items():
        with models_without_values():
            model = make_model()
        every = [index.path(name, item) for index in data.indices.values() if name in index.items
                 for item in range(len(index.items[name].sample))]  # fmt: skip
        paths = [*dict.fromkeys(every)]
        made = encode_rows(
            model, name, data.processors.get(name), paths[rank::world], Path(folder), dtype=dtype, device=device,
            rows=int(cfg.rows), progress=cfg.monitor.progress_bar and not rank,
        )  # fmt: skip
        print(f"encoded     {name}: {made} of {len(paths)} files by process {rank} of {world} in {folder}", flush=True)
    if torchrun.started():
        dist.barrier()
        dist.destroy_process_group()


@hydra.main(version_base=None, config_path=cli.CONF, config_name="encode")
@cli.one_message
def main(cfg: DictConfig) -> None:
    """Entry point."""
    encode(cfg)


if __name__ == "__main__":
    cli.start(main, "outputs/encode")
