"""Peak memory of every rank as the planner predicts it, beside that of real steps, over 40 layouts.

Every layout runs on gloo processes: the model is made, two steps with AdamW, then one whose tensors are counted as
operators make and free them (parameters, optimizer states, gathered weights, gradients, activations, rows on their way,
and what operators need for a moment), and the batch's own, or with --copies what is
copied of it, microbatch by microbatch, as for a GPU. The prediction knows the layouts, the step's plan and its
schedule; what blocks keep it measured on fake tensors.

  predicted, measured   MB of the rank where the two differ most
  ratio                 predicted / measured of that rank
  of the step           the same without parameters and optimizer states, which are easy to know
  worst of all ranks    whose ratio is farthest from 1, above or below
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import Options, option, program, report
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model.inputs import ModuleInputs
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.parallelize.offload import Offload
from hetero_strategy.parallelize.optimizer import choose_kernels
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.parallelize.storage import Storage
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.profiling.activations import activations_of, ways_of
from hetero_strategy.profiling.allocations import Allocations
from hetero_strategy.profiling.memory import CPU, Memory, MemoryModel
from hetero_strategy.profiling.stage_memory import Activations
from hetero_strategy.runtime.payload import Moving
from hetero_strategy.simulator.cost_model import Precision
from hetero_strategy.testing import Setting, planned

MIXED = Storage(torch.bfloat16, torch.float32)
Layout = ModuleLayout


def _setting(name: str, llm: ModuleLayout, vision: ModuleLayout | None = None, **others: Any) -> Setting:
    layouts = {"llm": llm} if vision is None else {"vision": vision, "llm": llm}
    sizes: dict[str, Any] = {"samples": 16, "microbatches": 4, "text": (40, 120), "llm": (256, 4)}
    return Setting(name, layouts, **sizes | others)


ALONE, ROW = Layout((0,)), (0, 1, 2, 3)
AGAIN = {"recompute": "all"}
AWAY: dict[str, Any] = {"transforms": {"llm": {"recompute": "all", "offload": "all"}}}
SETTINGS = (
    _setting("text, 1 rank", ALONE),
    _setting("text, 1 rank, bf16", ALONE, storage=MIXED),
    _setting("colocated, 1 rank", ALONE, ALONE),
    _setting(
        "colocated, 1 rank, recompute all",
        ALONE,
        ALONE,
        transforms={"llm": AGAIN, "vision": AGAIN},
    ),
    _setting("recompute every 2", ALONE, ALONE, transforms={"llm": {"recompute": "every 2"}}),
    _setting(
        "recompute all but matmuls, bf16",
        ALONE,
        ALONE,
        transforms={"llm": {"recompute": "all but matmuls"}},
        storage=MIXED,
    ),
    _setting("offload all", ALONE, ALONE, transforms={"llm": {"offload": "all"}, "vision": {"offload": "all"}}),
    _setting("offload every 2, bf16", ALONE, ALONE, transforms={"llm": {"offload": "every 2"}}, storage=MIXED),
    _setting("recompute and offload all, gpipe", Layout((0, 1), pp=2), ALONE, schedule="gpipe", **AWAY),
    _setting("colocated, dp_shard 2", Layout((0, 1)), Layout((0, 1))),
    _setting("colocated, dp_shard 2, bf16", Layout((0, 1)), Layout((0, 1)), storage=MIXED),
    _setting("dp_shard 2, never reshard", Layout((0, 1)), Layout((0, 1)), reshard_after_forward="never"),
    _setting("dp_replicate 2", Layout((0, 1), dp_replicate=2), Layout((0, 1), dp_replicate=2)),
    _setting("dp_replicate 2 x dp_shard 2, bf16", Layout(ROW, dp_replicate=2), Layout(ROW), storage=MIXED),
    _setting("llm pp 2, 1f1b", Layout((0, 1), pp=2), ALONE),
    _setting("llm pp 2, gpipe, bf16", Layout((0, 1), pp=2), ALONE, schedule="gpipe", storage=MIXED),
    _setting("disjoint, llm pp 2", Layout((1, 2), pp=2), ALONE),
    _setting("llm pp 4, zb_h1, bf16", Layout(ROW, pp=4), ALONE, schedule="zb_h1", storage=MIXED, microbatches=8),
    _setting("llm pp 2 x vpp 2", Layout((0, 1), pp=2, vpp=2), ALONE, schedule="interleaved_1f1b"),
    _setting("mixed, llm pp 2 x dp_shard 2, bf16", Layout(ROW, pp=2), Layout((0, 1)), storage=MIXED),
    _setting("llm tp 2", Layout((0, 1), tp=2), Layout((0, 1))),
    _setting("llm pp 2 x tp 2, bf16", Layout(ROW, pp=2, tp=2), Layout((0, 1)), storage=MIXED),
    _setting("llm cp 2", Layout((0, 1), cp=2), Layout((0, 1))),
    _setting("llm cp 2 x tp 2, bf16", Layout(ROW, cp=2, tp=2), Layout(ROW), storage=MIXED),
    _setting(
        "llm pp 2 x cp 2, recompute all, bf16",
        Layout(ROW, pp=2, cp=2),
        ALONE,
        storage=MIXED,
        transforms={"llm": {"recompute": "all"}},
    ),
    _setting("encoder in the bubbles of pp 4, bf16", Layout(ROW, pp=4), Layout(ROW), fill="fine", storage=MIXED),
    _setting("decoupled from pp 4, bf16", Layout(ROW, pp=4), Layout(ROW), fill="decoupled", storage=MIXED),
    _setting("disjoint, frozen encoder pp 2", Layout((2,)), Layout((0, 1), pp=2), freeze=("vision",)),
    _setting("whole, dp_shard 2", Layout((0, 1)), Layout((0, 1)), transforms={"llm": {"recompute": "whole"}}),
    _setting("disjoint, encoder pp 2, llm pp 2, zb_h1", Layout((2, 3), pp=2), Layout((0, 1), pp=2), schedule="zb_h1"),
    *(_setting(f"8 experts, ep {ep}", Layout(ROW, ep=ep), Layout(ROW), experts=8) for ep in (1, 2, 4)),
    _setting("8 experts, ep 2, bf16", Layout(ROW, ep=2), experts=8, storage=MIXED),
    _setting("8 experts, ep 2, once", Layout(ROW, ep=2), experts=8, storage=MIXED, reshard_after_forward="never"),
    _setting("8 experts, tp 2, ep 4, bf16", Layout(ROW, tp=2, ep=4), experts=8, storage=MIXED),
    *(
        _setting(f"8 experts, tp 2, ep {ep}, long", Layout((0, 1), tp=2, ep=ep), experts=8, text=(400, 1200))
        for ep in (1, 2)
    ),
    _setting("8 experts, pp 2, ep 2", Layout(ROW, pp=2, ep=2), ALONE, experts=8),
    _setting("8 experts, ep 4, recompute", Layout(ROW, ep=4), experts=8, transforms={"llm": AGAIN}),
)


class Cloned:
    """Stands for copies to a device."""

    def start(self, inputs: ModuleInputs) -> Moving:
        return Moving(inputs.each(torch.Tensor.clone))

    def finish(self, moving: Moving) -> ModuleInputs:
        return moving.inputs


class Measured(NamedTuple):
    """Bytes on one rank."""

    peak: int
    owned: int
    """Parameters and optimizer states, between steps."""


def steps_on_rank(rank: int, world: int, setting: Setting, copies: bool = False) -> Measured:
    """The most of a step after two others, which make what is made once; inputs are copied, or are there."""
    batch = setting.batch(0, rank)
    with Allocations() as counted:
        made = setting.assembled(rank)
        if copies:
            made.executor.copies = Cloned()
        parameters = [owned.parameter for owned in made.owned.values() if owned.parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters or [torch.zeros(0)])  # a rank with frozen modules alone has none
        choose_kernels([optimizer], made.owned, lambda any_: any_)
        gc.collect()  # as a run does before its first step: modules that values came from refer to each other
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            owned, counted.most = counted.now, counted.now
            made.executor.run(batch, train=True)
            optimizer.step()
    payload = 0 if copies else sum(tensor.nbytes for tensor in batch.tensors())
    return Measured(counted.most + payload, owned)


@cache
def known(
    llm: tuple[int, int],
    vision: tuple[int, int],
    experts: int,
    names: tuple[str, ...],
    freeze: tuple[str, ...],
    storage: Storage,
) -> Any:
    """Return the shape and the activations of a model."""
    model = Setting("", dict.fromkeys(names, ALONE), llm=llm, vision=vision, experts=experts, freeze=freeze).model()
    given: list[dict[str, Transform]] = [{"offload": Offload()}, {"recompute": Recompute(keeps_matmuls=True)}]
    ways = {
        name: {label: way for of in ({}, *given) for label, way in ways_of(len(module.blocks()), of).items()}
        for name, module in model.modules_by_name.items()
    }
    return spec_of(model), activations_of(model, storage.compute, ways=ways)


def predicted(setting: Setting, copies: bool = False) -> Memory:
    """Predict the memory of the step that :func:`steps_on_rank` runs."""
    shape: ModelSpec
    activations: Mapping[str, Activations]
    sizes, names = (setting.llm, setting.vision, setting.experts), tuple(setting.layouts)
    shape, activations = known(*sizes, names, setting.freeze, setting.storage)
    precision = Precision(setting.storage.compute.itemsize, setting.storage.master.itemsize)
    plan, _, _, schedule = planned(setting, 0)
    placement, of = setting.blueprint.placement, setting.blueprint.options.transforms
    predictor = MemoryModel(shape, activations, precision, replace(CPU, copies=copies))
    return predictor.of(plan, schedule, placement, of)


@program(
    option("--only", default="", help="layouts whose name contains this"),
    option("--copies", action="store_true", help="inputs are copied one microbatch ahead"),
)
def main(chosen: Options) -> Any:
    """Print the table; returns predicted and measured bytes of every rank by layout."""
    begin = time.perf_counter()
    rows, figures, ratios, of_step = [], {}, [], []
    for setting in (one for one in SETTINGS if chosen.only in one.name):
        memory = predicted(setting, chosen.copies)
        measured = np.array(
            chosen.pool.run(setting.world, steps_on_rank, setting, chosen.copies, timeout=300), dtype=np.float64
        )
        ratio = memory.peak / measured[:, 0]
        steps = (memory.peak - memory.bytes[:2].sum(axis=0)) / (measured[:, 0] - measured[:, 1])
        worst = int(np.abs(ratio - 1).argmax())
        figures[setting.name] = {"predicted": memory.peak.tolist(), "measured": measured[:, 0].tolist()}
        ratios.append(ratio)
        of_step.append(steps)
        sizes = (memory.peak[worst], measured[worst, 0])
        rows.append([setting.name, worst, *(f"{x / 1e6:.1f}" for x in sizes), *_shown(ratio[worst], steps[worst])])
        rows[-1] += _shown(ratio.min(), ratio.max())
    every, parts = np.concatenate(ratios), np.concatenate(of_step)
    off = [f"{np.median(np.abs(x - 1)):.1%} and {np.abs(x - 1).max():.1%}" for x in (every, parts)]
    notes = [f"median and worst of {len(every)} ranks: off by {off[0]}; of the step alone by {off[1]}"]
    notes.append(f"{time.perf_counter() - begin:.0f} s")
    columns = ("layout", "rank", "predicted", "measured", "ratio", "of the step", "least ratio", "largest")
    report("MB at the peak of a step, predicted beside measured", columns, rows, notes)
    return figures


def _shown(*ratios: float) -> list[str]:
    return [f"{ratio:.3f}" for ratio in ratios]


if __name__ == "__main__":
    main()
