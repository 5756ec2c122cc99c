"""What each of thousands of ranks makes, reads and sends: at start, in a step, for a checkpoint.

Vision and audio encoders data parallel on all ranks; a language model with pp, tp and the rest dp_shard. Nothing runs:
all is counted from the graph, the placement, a step plan and the programs that such a run has and, for what a rank
holds, from its stages on the meta device. A rank's figures are those of the busiest of one rank in each stage of the
language model. Bytes are those handed to the backend; its own algorithms may send more.

  groups       process groups made on CUDA, and those that a rank is in; two of all ranks are on the host
  connect      messages of one number before the first step, to each rank to which it may send rows or gradients
  weights      read by a rank from folders in bf16
  rows         messages along edges and between stages in a step, in bf16
  gathers      shards handed to all-gathers in a step, in bf16
  reductions   gradients handed to reduce-scatters and all-reduces in a step, in fp32
  plan         of a checkpoint with AdamW, pickled: what each rank tells all others when it is made; at other saves
               instead of it two bytes are all-reduced
  inventory    what one rank tells all others for those that own alike, pickled, when the plan is made
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import arguments, report, write_json
from benchmarks.pipelines import Setting
from hetero_strategy.checkpoint.inventory import Coordinates, Inventory, take_inventory
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import mesh_sizes
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize import apply
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.stages import owned_tensors
from hetero_strategy.parallelize.tied import tied_rank_sets
from hetero_strategy.plan.step_plan import StepPlan
from hetero_strategy.runtime.connect import connections, meetings_of, process_groups
from hetero_strategy.schedule.action import StageId
from hetero_strategy.schedule.compile import StepCompiler

COMPUTE, MASTER = torch.bfloat16, torch.float32
MICROBATCHES = 16
Stages = Mapping[StageId, Adapter]
PER_RANK = (
    ("start", "groups", "groups"),
    ("start", "connect", "messages"),
    ("start", "weights", "bytes"),
    ("step", "rows", "messages"),
    ("step", "rows", "bytes"),
    ("step", "gathers", "bytes"),
    ("step", "reductions", "bytes"),
    ("checkpoint", "plan", "bytes"),
    ("checkpoint", "inventory", "bytes"),
)
"""Phase, what, and in which numbers."""


def setting(
    world: int,
    pp: int = 8,
    tp: int = 8,
    *,
    encoder: tuple[int, int] = (1152, 27),
    llm: tuple[int, int] = (8192, 80),
    islands: int = 1,
) -> Setting:
    """The example in a world of so many ranks; widths and layers as given."""
    ranks = tuple(range(world))
    everywhere, instances = ModuleLayout(ranks, dp_replicate=world), world // (pp * tp)
    layouts = {"vision": everywhere, "audio": everywhere, "llm": ModuleLayout(ranks, pp=pp, tp=tp, dp_shard=instances)}
    samples = 2 * MICROBATCHES * instances
    return Setting(
        "scale", layouts, vision=encoder, audio=encoder, llm=llm, samples=samples, microbatches=MICROBATCHES,
        balance=None if islands == 1 else {"policy": "auto"}, islands=islands,
    )  # fmt: skip


@contextmanager
def held(chosen: Setting, rank: int) -> Iterator[Stages]:
    """A rank's stages on the meta device, in a world of which all other ranks are fake."""
    layouts, stages = chosen.blueprint.layouts, {}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=chosen.world)
    try:
        with patch.object(apply, "initial_units", lambda *_: ()):
            for name, module in chosen.model().modules_by_name.items():
                layout, mesh = layouts[name], None
                where = chosen.placement.coordinate(name, rank)
                assert where is not None
                if layout.shards > 1 or layout.tp > 1:
                    axes = {a: size for a, size in mesh_sizes(layout).items() if size > 1 or a == "dp_shard"}
                    grid = next(g for g in layout.grid() if rank in g).reshape([*axes.values()])
                    mesh = DeviceMesh("cpu", torch.from_numpy(grid.copy()), mesh_dim_names=tuple(axes))
                split, device = layout.split or (), torch.device("meta")
                made = apply.parallelize(name, module, layout, mesh, device, seed=0, split=split, pp_rank=where.pp)
                stages |= {StageId(name, number): stage for number, stage in made.items()}
        yield stages
    finally:
        dist.destroy_process_group()


def of_rank(chosen: Setting, rank: int, sets: Sequence[Sequence[int]], step: StepPlan) -> dict[str, int]:
    """Figures of one rank, by the last two of :data:`PER_RANK`, joined by a blank."""
    plan, graph, layouts = chosen.blueprint, chosen.blueprint.graph, chosen.blueprint.layouts
    program = StepCompiler(graph, plan.costs, chosen.scheduling).program(step, rank=rank, train=True)
    ways = [hops for number in range(len(graph.edges)) for hops in meetings_of(graph, number).values()]
    met = [meetings.peers(rank) for hops in ways for meetings in hops]
    done = [(action.action.node, action.action.kind) for action in program.actions]
    model = chosen.model().modules_by_name
    widths = [model[t.module].hidden_width if s.module == t.module else model[s.module].width for s, t in graph.edges]
    hops = [(t.edge, hop) for t in program.transfers for hop in (t.transfer.first, t.transfer.second)]
    weights = gathers = reductions = 0
    with held(chosen, rank) as stages:
        for node, stage in stages.items():
            own = sum(local(p).numel() for p in stage.parameters())
            weights += own * COMPUTE.itemsize
            gathers += own * COMPUTE.itemsize * done.count((node, "UNSHARD"))
            trained = sum(local(p).numel() for p in stage.parameters() if p.requires_grad)
            reductions += trained * MASTER.itemsize * layouts[node.module].shards
        inventory, coordinates = saved(stages)
        plan_bytes = len(pickle.dumps((inventory.digest, coordinates)))
    return {
        "groups groups": sum(rank in ranks for ranks in sets),
        "connect messages": sum(map(len, met)),
        "weights bytes": weights,
        "rows messages": sum(len(hop.sends) for _, hop in hops),
        "rows bytes": sum(hop.rows_sent * widths[edge] * COMPUTE.itemsize for edge, hop in hops),
        "gathers bytes": gathers,
        "reductions bytes": reductions,
        "plan bytes": plan_bytes,
        "inventory bytes": len(pickle.dumps((inventory, None))),
    }


def saved(stages: Stages) -> tuple[Inventory, Coordinates]:
    """What a rank saves, parameters and AdamW's state, and where on its meshes it is."""
    owned = {f"model.{n.module}.{fqn}": p for n, stage in stages.items() for fqn, p in owned_tensors(stage).items()}
    tensors = {f"model.{name}": value.detach() for name, value in owned.items()}
    trained = {name: value.detach() for name, value in owned.items() if value.requires_grad}
    for name, value in trained.items():
        state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value)}
        tensors |= {f"optim.0.{name}.{key}": of for key, of in state.items()}
    return take_inventory(tensors)


def groups(chosen: Setting, device_type: str) -> list[tuple[int, ...]]:
    """Ranks of each process group."""
    owners = tied_rank_sets(chosen.model().modules_by_name, chosen.placement.layouts)
    made = process_groups(chosen.placement, chosen.blueprint.graph, owners, device_type)
    return [ranks for sets in made.values() for ranks in sets]


def measure(chosen: Setting) -> dict[str, Any]:
    """All figures of a setting."""
    graph, sets = chosen.blueprint.graph, groups(chosen, "cuda")
    first = [int(graph.stages[node].grid[0, 0]) for node in graph.nodes_of("llm")]
    step = chosen.plan(0)
    ranks = [of_rank(chosen, rank, sets, step) for rank in first]
    most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    every = {"groups groups": len(sets), "connect messages": connections(graph)}
    every["plan bytes"] = chosen.world // len(first) * sum(rank["plan bytes"] for rank in ranks)
    every["inventory bytes"] = sum(rank["inventory bytes"] for rank in ranks)  # each stage has its own
    return {"world": chosen.world, "rank": most, "all": every}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Count, print, write; returns the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1024, 10240], help="ranks (default 1024 10240)")
    parser.add_argument("--islands", type=int, default=1, help="that exchange rows only within (default 1)")
    given = parser.parse_args(argv)
    found = [measure(setting(world, islands=given.islands)) for world in given.worlds]
    rows = []
    for phase, what, number in PER_RANK:
        key = f"{what} {number}"
        pairs = [(one["rank"][key], one["all"].get(key)) for one in found]
        rows.append((phase, f"{what}, {number}", *(None if x is None else f"{x:,}" for pair in pairs for x in pair)))
    columns = [f"{who} of {world:,}" for world in given.worlds for who in ("a rank", "all")]
    report("scale", "what ranks make, read and send", ("phase", "what", *columns), rows)
    write_json(given.json, "scale", "cpu", {"worlds": given.worlds, "islands": given.islands}, found)
    return found


if __name__ == "__main__":
    main()
