"""One training step by hand: plan, schedule, program and the loop that runs it. No Lightning, no data module.

    torchrun --nproc-per-node 3 examples/one_step.py

An encoder on rank 0 feeds a language model in two pipeline stages on ranks 1 and 2. Steps 1 to 3 are pure functions of
token counts and layouts; step 4 is what ``hetero_strategy.runtime`` does, without FSDP, streams and split backwards.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hetero_strategy import ModuleLayout
from hetero_strategy.boundary.transport import Channel, Transport
from hetero_strategy.layout.spec import place
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.build import make_schedule
from hetero_strategy.schedule.check import check
from hetero_strategy.schedule.compile import compile_step
from hetero_strategy.schedule.graph import stage_graph, work_of

WIDTH, EDGES = 8, [("vision", "llm")]
LAYOUTS = place({"vision": ModuleLayout([0]), "llm": ModuleLayout([1, 2], pp=2)}, 3).layouts

# A global batch of four samples with 9, 6, 4 and 7 tokens. Sample 0 has two images, which become 3 and 2 of its tokens,
# sample 1 has one, sample 3 has one, and sample 2 is only text.
IMAGES = StepItems(
    sample=np.array([0, 0, 1, 3]),
    edge_rows=np.array([3, 2, 4, 2]),
    start=np.array([0, 5, 1, 0]),  # position of the first of these rows in the sample
    inner_rows=np.array([3, 2, 4, 2]),
)
BATCH = StepMetadata(
    epoch=0,
    step=0,
    samples=np.arange(4),
    tokens=np.array([9, 6, 4, 7]),
    labels=np.array([4, 2, 4, 5]),
    items={"vision": IMAGES},
)


def patches(image: int) -> torch.Tensor:
    """Return the pixels of an image: one patch for each of its rows."""
    return torch.full((int(IMAGES.inner_rows[image]), 4), 0.1 * (image + 1))


def text(sample: int) -> torch.Tensor:
    """Return the embeddings of a sample's tokens, of which images replace some."""
    return torch.full((int(BATCH.tokens[sample]), WIDTH), 0.2 * (sample + 1))


def models() -> dict[StageId, nn.Module]:
    """Return all stages; each rank trains its own."""
    torch.manual_seed(0)
    stages = {StageId("vision", 0): nn.Linear(4, WIDTH), StageId("llm", 0): nn.Linear(WIDTH, WIDTH)}
    return {**stages, StageId("llm", 1): nn.Linear(WIDTH, 1)}


def main() -> None:
    dist.init_process_group("gloo")
    rank, cpu = dist.get_rank(), torch.device("cpu")

    # 1. The plan: which instance computes which samples and images in which microbatch, and the normaliser.
    plan = plan_step(BATCH, {"vision": 1, "llm": 1}, ["llm"], microbatches=2)
    samples = [step.of(0).tolist() for step in plan.assignments["llm"]]
    images = [step.of(0).tolist() for step in plan.assignments["vision"]]

    # 2. The schedule: the order of all actions, proven to end.
    graph = stage_graph(list(LAYOUTS), EDGES, LAYOUTS, dict.fromkeys(models(), True))
    schedule = make_schedule("1f1b", graph, work_of(plan, graph))
    check(schedule)
    if rank == 0:
        print(f"samples of the microbatches: {samples}, images: {images}\n{schedule.grid()}")

    # 3. The program of this rank: what each action reads and gives, and which transfers start after it.
    program = compile_step(plan, schedule, rank)

    # 4. The loop.
    world = dist.group.WORLD
    channels = [Channel(world, world, tag, WIDTH, torch.float32, cpu) for tag in range(2 * len(graph.edges))]
    transfers = [(channels[2 * t.edge + t.backward], t.transfer) for t in program.transfers]
    transport = Transport(transfers, torch.from_numpy(program.index))
    (stage,) = (s for node, s in models().items() if rank in graph.stages[node].ranks)
    live: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
    transport.start(program.starts)
    for step in program.actions:
        node, number = step.action.node, step.action.microbatch
        if step.action.kind == "F":
            leaves = [transport.take(n).detach().requires_grad_() for n in step.reads]
            if node.module == "vision":
                rows = torch.cat([torch.zeros(0, 4), *map(patches, images[number])])
            elif node.stage:
                (rows,) = leaves
            else:  # images replace the text at the places that the program names
                rows = torch.cat([*map(text, samples[number])])
                for leaf, place_of in zip(leaves, step.slots, strict=True):
                    if place_of is not None:
                        index = transport.index.narrow(0, place_of.at, place_of.size)
                        rows = rows.index_copy(0, index, leaf)
            out = stage(rows)
            live[number] = leaves, out.square().sum() / plan.normalizer("llm") if out.shape[1] == 1 else out
            for n in step.gives:
                transport.give(n, out.detach())
        elif step.action.kind == "B":  # a whole backward; REDUCE, with one instance of each module, has nothing to sum
            leaves, out = live.pop(number)
            gradients = [transport.take(n) for n in step.reads]
            out.backward(sum(gradients) if gradients else None)
            for n, leaf in zip(step.gives, leaves, strict=True):
                if n is not None:
                    transport.give(n, leaf.grad)
        transport.start(step.starts)
    transport.drain()

    # The same in one process, sample by sample.
    whole = models()
    vision, first, last = whole.values()
    for sample in range(4):
        rows = text(sample)
        for image in np.flatnonzero(IMAGES.sample == sample).tolist():
            at = int(IMAGES.start[image])
            rows = torch.cat([rows[:at], vision(patches(image)), rows[at + int(IMAGES.edge_rows[image]) :]])
        (last(first(rows)).square().sum() / BATCH.labels.sum()).backward()
    (expected,) = (s for node, s in whole.items() if rank in graph.stages[node].ranks)
    error = (stage.weight.grad - expected.weight.grad).abs().max() / expected.weight.grad.abs().max()
    print(f"rank {rank}: gradient differs from one process by {error:.1e} of its largest value")
    assert error < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
