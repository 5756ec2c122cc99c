"""An encoder of your own, with pipeline and tensor parallelism, trained beside a Llama of transformers.

    python examples/own_encoder.py              # one process: Lightning's own strategy
    python examples/own_encoder.py --ranks 4    # the encoder in 2 stages of 2 tensor-parallel ranks

Both print the same losses, in fp64 to some 14 digits. docs/your_module.md explains each name.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import lightning as L
import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import nn

from hetero_strategy import (
    Backbone,
    Encoder,
    HeteroStrategy,
    ImageProcessor,
    ModuleLayout,
    MultimodalDataModule,
    MultimodalModel,
    Projector,
    hf_llama,
)
from hetero_strategy.model import packed_attention


class Block(nn.Module):
    """A transformer block over rows that lie end to end, packed without padding."""

    def __init__(self, width, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows, packing, causal):
        x = self.norm(rows)
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None] for part in (self.q, self.k, self.v)
        )
        seen = packed_attention(q, k, v, packing, causal=causal)  # inside each item, never across
        rows = rows + self.o(seen[0].transpose(0, 1).flatten(1))
        return rows + self.down(nn.functional.gelu(self.up(self.norm2(rows))))


class PatchTransformer(Backbone):
    """A transformer over the patches of each picture."""

    block_list = "layers"  # recompute, FSDP by block and pp need to know the blocks,
    before_blocks = ("patch",)  # pp what is in the first stage
    after_blocks = ("norm",)  # and what in the last,
    tp_columns = ("q", "k", "v", "up")  # and tp the linear layers of a block whose outputs are split
    tp_rows = ("o", "down")  # and those whose inputs are

    def __init__(self, feature=48, width=64, layers=4):
        super().__init__()
        self.patch = nn.Linear(feature, width)
        self.layers = nn.ModuleList(Block(width, head_dim=16) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.width = self.hidden_width = width

    def embed(self, inputs):  # rows of all items of a microbatch, end to end; there may be none
        return self.patch(inputs.values.to(self.patch.weight.dtype))

    def transform(self, rows, inputs):
        for block in self.blocks().values():  # those of this pipeline stage
            rows = block(rows, inputs.packing, causal=False)
        return rows

    def finish(self, rows, inputs):
        return self.norm(rows)

    def output_rows(self, sizes):  # the same number from the sizes alone: plans need no pixels
        return sizes.prod(axis=1)

    packing_rows = output_rows


def make_llm():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf_llama(vocab_size=16, num_key_value_heads=4, max_position_embeddings=256, **sizes)


def make_model():
    llm = make_llm()
    vision = Encoder(PatchTransformer, Projector(64, llm.width), processor=ImageProcessor(patch_size=4))
    return MultimodalModel({"vision": vision, "llm": llm}, seed=1)


def write_data(folder, samples=64, levels=8):
    """Write grey pictures of several sizes and the question how bright they are."""
    rng, entries = np.random.default_rng(0), []
    for i in range(samples):
        level, sides = i % levels, 4 * rng.integers(2, 6, 2)
        Image.fromarray(np.full(sides, 32 * level, np.uint8)).convert("RGB").save(folder / f"{i}.png")
        turns = [{"from": "human", "value": "<image> bright ?"}, {"from": "gpt", "value": f"level {level}"}]
        entries.append({"id": str(i), "image": f"{i}.png", "conversations": turns})
    write_text(folder, entries, "<image>")


def write_text(folder, entries, *special):
    """Write the manifest, and a tokenizer whose words are those of the manifest."""
    (folder / "train.json").write_text(json.dumps(entries))
    special = ["<unk>", "<bos>", "<eos>", *special]
    spoken = " ".join(turn["value"] for entry in entries for turn in entry["conversations"]).split()
    words = list(dict.fromkeys([*special, *spoken]))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))


class Lit(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, make):
        super().__init__()
        self.make, self.model = make, None

    def configure_model(self):
        if self.model is None:
            self.model = self.make()

    def training_step(self, batch, batch_idx):
        out = self.model(batch)
        if self.global_rank == 0:
            print(f"step {batch_idx}: loss {out.loss.item():.12f}", flush=True)
        return out.loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)  # Adam would hide a gradient that is wrong by a factor


def train(text, make, write, layouts):
    """Train three steps, in one process or in four; ``write`` fills a data folder that is still empty."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 4), default=1)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / Path(sys.argv[0]).stem, help="data"
    )
    args = parser.parse_args()
    if not (args.folder / "tokenizer.json").exists():  # Lightning starts this script once more for each further rank
        args.folder.mkdir(parents=True, exist_ok=True)
        write(args.folder)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=HeteroStrategy(layouts) if args.ranks > 1 else "auto",
        precision="64-true",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = MultimodalDataModule(
        train=args.folder / "train.json",
        tokenizer=args.folder / "tokenizer.json",
        model=make,
        global_batch_size=16,
        microbatches=2,
    )
    trainer.fit(Lit(make), datamodule=data)


if __name__ == "__main__":
    layouts = {"vision": ModuleLayout(range(4), pp=2, tp=2), "llm": ModuleLayout(range(4), dp_shard=4)}
    train(__doc__, make_model, write_data, layouts)
