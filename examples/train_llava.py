"""LLaVA's two stages with your own folders: first the projector learns, then projector and language model together.

    python examples/train_llava.py projector --vision models/siglip2-so400m --llm models/llama-3-8b \\
        --train data/llava_pretrain.json --val data/val.json --devices 8 --tp 2 --save outputs/projector.ckpt
    python examples/train_llava.py both --weights outputs/projector.ckpt --save outputs/llava.ckpt ...

Folders are Hugging Face ones (SigLIP 2 of NaFlex; any language model), manifests are LLaVA's (docs/data.md). Several
machines are started by torchrun (docs/cluster.md). ``python -m hetero_strategy.checkpoint export outputs/llava.ckpt
exported`` writes folders for transformers.
"""

import argparse
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from hetero_strategy import (
    HeteroStrategy,
    ModuleLayout,
    MultimodalDataModule,
    MultimodalModel,
    ThroughputMonitor,
    hf_causal_lm,
    siglip2_encoder,
)

FROZEN = {"projector": ["vision.backbone", "llm"], "both": ["vision.backbone"]}
RATE = {"projector": 1e-3, "both": 2e-5}  # LLaVA 1.5's


def make_model(vision, llm, stage):
    language_model = hf_causal_lm(checkpoint=llm)
    encoder = siglip2_encoder(checkpoint=vision, out_width=language_model.width, merge=2)
    return MultimodalModel({"vision": encoder, "llm": language_model}, freeze=FROZEN[stage])


class Llava(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows of ranks."""

    def __init__(self, make, rate):
        super().__init__()
        self.make, self.rate, self.model = make, rate, None

    def configure_model(self):
        if self.model is None:
            self.model = self.make()

    def training_step(self, batch, batch_idx):
        out = self.model(batch)
        self.log_dict({"train/loss": out.loss, "train/accuracy": out.accuracy})
        return out.loss

    def validation_step(self, batch, batch_idx):
        out = self.model(batch)
        self.log("val/loss", out.loss, batch_size=out.loss_tokens)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.rate, weight_decay=0.0)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.rate, int(steps), pct_start=0.03)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=FROZEN)
    for name in ("vision", "llm", "train", "val", "save"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="checkpoint of the first stage")
    parser.add_argument("--devices", type=int, default=1, help="ranks of a machine")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the language model")
    parser.add_argument("--batch", type=int, default=128, help="samples of a step, over all ranks")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--precision", default="bf16-mixed")
    args = parser.parse_args()

    make = partial(make_model, args.vision, args.llm, args.stage)
    layouts = {
        "vision": ModuleLayout(range(args.devices), dp_shard=args.devices),
        "llm": ModuleLayout(range(args.devices), tp=args.tp, dp_shard=args.devices // args.tp),
    }
    data = MultimodalDataModule(
        train=args.train,
        val=args.val,
        tokenizer=args.llm / "tokenizer.json",
        model=make,
        global_batch_size=args.batch,
        microbatches=args.microbatches,
        workers={"count": 2},
        on_error="skip",  # unreadable pictures are left out and counted
    )
    trainer = L.Trainer(
        devices=args.devices,
        strategy=HeteroStrategy(layouts, transforms={"llm": {"recompute": "all"}}),
        precision=args.precision,
        max_steps=args.steps,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        logger=CSVLogger(args.save.parent, name=f"{args.save.stem}_log"),
        callbacks=[ThroughputMonitor(), LearningRateMonitor()],
        enable_checkpointing=False,
    )
    module = Llava(make, RATE[args.stage])
    if args.weights is not None:
        trainer.validate(module, datamodule=data, ckpt_path=args.weights)  # loads the weights alone
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
