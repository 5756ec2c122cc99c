"""Describe or export a checkpoint without a model: ``python -m hetero_strategy.checkpoint describe|export ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hetero_strategy.checkpoint.exporting import CASTS, FILE_BYTES, Exported, export
from hetero_strategy.checkpoint.folder import describe
from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.hf_folder import EXTRA

HELP = "Describe a checkpoint, or export it for other programs. Neither needs the model."
EXPORT_HELP = f"""
Write weights and a config.json that from_pretrained of transformers loads, and a README.md that names the class.
Language models become what AutoModelForCausalLM loads. The backbone of an encoder becomes its vision or audio model,
with the tensors of its origin that no run trains. No auto class has a WhisperEncoder: AutoModel would make a
WhisperModel with new weights. An encoder's projector goes to {EXTRA} in the same folder; checkpoint= of our functions
reads both.
With --whole, modules that come from one folder, such as a vision language model, become one folder again: its names of
tensors, its other tensors bit by bit, its configs, tokenizer, processor and templates.
A flow_decoder and your own modules keep their own names in model.safetensors and have no config.json. So does every
module of a checkpoint without a record of Hugging Face names, such as one that no run has saved.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit status; a CheckpointError becomes one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m hetero_strategy.checkpoint", description=HELP)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("describe", help="list step, tensors, shapes and dtypes")
    show.add_argument("checkpoint")
    out = commands.add_parser("export", help="write every module as Hugging Face does", description=EXPORT_HELP)
    out.add_argument("checkpoint", help="checkpoint of a run, in any layout")
    out.add_argument("folder", help="folder to write, empty or new; every module becomes a folder in it")
    out.add_argument("--module", help="export only this module, such as vision, into the folder itself")
    out.add_argument(
        "--whole", action="store_true", help="write one folder like the one that all modules come from, with its names"
    )
    out.add_argument("--origin", help="present place of the folder that modules come from, if it was moved")
    out.add_argument("--dtype", choices=list(CASTS), help="cast floating tensors; default: as stored")
    out.add_argument(
        "--file-gb", type=float, default=FILE_BYTES / 1e9, help="greatest size of a file (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.command == "describe":
            about = describe(options.checkpoint)
            head = f"{about.path}: step {about.step}, epoch {about.epoch}, saved by {about.world_size} ranks"
            lines = [f"{head}, {about.nbytes / 1e6:,.1f} MB"]
            for key, stored in about.tensors.items():
                dtype = str(stored.dtype).removeprefix("torch.")
                lines.append(f"{key}  {dtype} {list(stored.shape)}  in {len(stored.pieces)} pieces")
        else:
            cast, file_bytes = CASTS.get(options.dtype), int(options.file_gb * 1e9)
            written = export(
                options.checkpoint, options.folder, module=options.module, whole=options.whole, origin=options.origin,
                dtype=cast, file_bytes=file_bytes,
            )  # fmt: skip
            lines = [_summary(exported) for exported in written]
    except CheckpointError as fault:
        sys.stderr.write(f"{fault}\n")
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _summary(exported: Exported) -> str:
    if not exported.names:
        return f"{exported.folder / EXTRA}: {len(exported.extra)} tensors outside the modules"
    name = exported.model_class
    names = f"for {name}" if name else "under their own names"
    if name and name.count(".") > 1:
        names += ", not AutoModel"
    more = f"; {len(exported.extra)} more in {EXTRA}, under their own names" if exported.extra else ""
    return f"{exported.folder}: {len(exported.names)} tensors {names}{more}"


if __name__ == "__main__":
    sys.exit(main())
