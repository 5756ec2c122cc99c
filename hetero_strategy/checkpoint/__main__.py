"""`python -m hetero_strategy.checkpoint describe|export ...`: what a person does with a checkpoint, without a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hetero_strategy.checkpoint.exporting import FILE_BYTES, export
from hetero_strategy.checkpoint.folder import describe
from hetero_strategy.checkpoint.tensorfile import DTYPES
from hetero_strategy.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit status. A CheckpointError is told in one line."""
    parser = argparse.ArgumentParser(prog="python -m hetero_strategy.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("describe", help="list step, tensors, shapes and dtypes")
    show.add_argument("checkpoint")
    out = commands.add_parser("export", help="write plain safetensors and config.json")
    out.add_argument("checkpoint")
    out.add_argument("folder", help="must not exist or be empty")
    out.add_argument("--module", help="only this module, such as vision")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype.is_floating_point}
    out.add_argument("--dtype", choices=sorted(dtypes), help="cast floating tensors; default: as stored")
    out.add_argument(
        "--file-gb", type=float, default=FILE_BYTES / 1e9, help="greatest size of a file (default %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "describe":
            found = describe(chosen.checkpoint)
            head = f"{found.path}: step {found.step}, epoch {found.epoch}, saved by {found.world_size} ranks"
            lines = [f"{head}, {found.nbytes / 1e6:,.1f} MB"]
            for key, stored in found.tensors.items():
                dtype = str(stored.dtype).removeprefix("torch.")
                lines.append(f"{key}  {dtype} {list(stored.shape)}  in {len(stored.pieces)} pieces")
        else:
            written = export(
                chosen.checkpoint,
                chosen.folder,
                module=chosen.module,
                dtype=dtypes.get(chosen.dtype),
                file_bytes=int(chosen.file_gb * 1e9),
            )
            lines = [f"{len(written)} tensors written to {chosen.folder}"]
    except CheckpointError as fault:
        sys.stderr.write(f"{fault}\n")
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
