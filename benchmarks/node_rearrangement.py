"""Bytes between nodes after balancing: batches left where they fall, placed on nodes, or balanced near home.

OrchMLLM (section 5.2.2, figure 13) permutes balanced mini-batches over instances by an integer program, so that fewer
bytes cross between nodes, on 128 instances of 16 nodes. Here the same on its data mix (recipes/workloads), for the
payload of each encoder (from the instance that sampled it to the one that encodes it) and for the encoders' rows (from
there to the LLM's instance). Columns, each over the plain balance, whose batches fall on any node:

  fast       batches permuted by rounds of proposals and swaps (data/nodes), milliseconds
  ilp        the paper's integer program within --seconds, and the bound that it proves
  near home  not a permutation: a balance that lets only a node's excess leave it, load within 0.2 %; a module that
             pads (audio) has no costs that add, so there the product permutes whole batches: the figures of fast

max is the most bytes that one instance sends to other nodes (the paper's objective), total their sum. The
LLM's sources are the encoders' instances, so its row depends on how the encoders were balanced in the same column.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import arguments, report, write_json
from hetero_strategy.plan.balance import Cost, balance, loads
from hetero_strategy.plan.nodes.near_home import balance_near_home
from hetero_strategy.plan.nodes.placement_ilp import solve_placement
from hetero_strategy.plan.nodes.propose import place_items
from hetero_strategy.plan.nodes.slots import volumes
from recipes.workloads import WORKLOADS, Workload

MODELS = {"orchmllm_10b": (75, 3584), "orchmllm_18b": (50, 5120), "orchmllm_84b": (25, 8192)}
"""Samples per instance (section 8.3) and the LLM's hidden size (table 1)."""
INSTANCES, PER_NODE = 128, 8
PAYLOAD = {"vision": 14 * 14 * 3, "audio": 2 * 80 * 4}
"""Bytes of what becomes one row in the encoder: a patch of 8 bits, two frames of 80 float32 mels."""
PAPER = (0.436, 0.722)
"""Figure 13: "the reduction ... ranges from 0.436 to 0.722"; the text does not say whether saved or left."""


@dataclass(frozen=True)
class Flow:
    """What crosses to one module: bytes of items, their source instance, and the unit (item or sample) they are of."""

    size: np.ndarray
    source: np.ndarray
    unit: np.ndarray


def figures(flow: Flow, slot: np.ndarray, node: np.ndarray) -> dict[str, float]:
    """Most bytes of an instance, and all, that go to other nodes if unit ``u`` is on ``slot[u]``."""
    away = node[flow.source] != node[slot[flow.unit]]
    sent = np.bincount(flow.source[away], weights=flow.size[away], minlength=len(node))
    return {"max": float(sent.max()), "total": float(sent.sum())}


def home_of(flow: Flow, units: int, node: np.ndarray) -> np.ndarray:
    """Node with most bytes of each unit; -1 without bytes."""
    count = int(node.max()) + 1
    held = np.bincount(flow.unit * count + node[flow.source], flow.size, units * count).reshape(units, count)
    return np.where(held.max(axis=1) > 0, held.argmax(axis=1), -1)


def place(flow: Flow, batch: np.ndarray, node: np.ndarray) -> np.ndarray:
    """Slot of each unit after the fast permutation of batches."""
    return place_items(flow.size, flow.source, batch[flow.unit], node, node)[batch]


def compare(name: str, seed: int, seconds: float) -> list[dict[str, Any]]:
    """One row per module of one model; ``seconds`` 0: without the integer program."""
    per_instance, width = MODELS[name]
    work = WORKLOADS[name](INSTANCES * per_instance, seed)
    node = np.arange(INSTANCES) // PER_NODE
    sampled = np.arange(len(work.text)) // per_instance
    rows, encoded = [], {}
    for module, items in work.items.items():
        cost = Cost(padding=work.padding[module])  # type: ignore[arg-type]
        flow = Flow(items.inner_rows * float(PAYLOAD[module]), sampled[items.sample], np.arange(len(items.sample)))
        row, slots = one_module(items.inner_rows, cost, dict.fromkeys(("plain", "fast", "near"), flow), node, seconds)
        rows.append({"model": name, "module": module, **row})
        encoded[module] = slots
    flows = {k: llm_flow(work, {m: s[k] for m, s in encoded.items()}, width) for k in ("plain", "fast", "near")}
    row, _ = one_module(work.tokens(), Cost(), flows, node, seconds)
    return [*rows, {"model": name, "module": "llm", **row}]


def llm_flow(work: Workload, slots: Mapping[str, np.ndarray], width: int) -> Flow:
    """Rows (bfloat16) from the instances that encoded them."""
    size = [items.rows * 2.0 * width for items in work.items.values()]
    unit = [items.sample for items in work.items.values()]
    return Flow(np.concatenate(size), np.concatenate([slots[m] for m in work.items]), np.concatenate(unit))


def one_module(
    lengths: np.ndarray, cost: Cost, flows: Mapping[str, Flow], node: np.ndarray, seconds: float
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Bytes and loads of all ways, and the slot of each unit by way."""
    batch = balance(lengths, INSTANCES, cost)
    slots = {"plain": batch, "fast": place(flows["fast"], batch, node)}
    additive = cost.padding == "none"
    near = flows["near"]
    slots["near"] = (
        balance_near_home(cost.alone(lengths), home_of(near, len(lengths), node), node)
        if additive
        else place(near, batch, node)
    )
    plain = figures(flows["plain"], batch, node)
    row: dict[str, Any] = {"plain_bytes": plain, "ilp": None, "ilp_bound": None, "over_bound": None}
    for way in ("fast", "near"):
        row[way] = {k: v / plain[k] for k, v in figures(flows[way], slots[way], node).items()}
    row["permuted"], row["load"] = not additive, {}
    for way, slot in slots.items():
        load = loads(lengths, slot, INSTANCES, cost)
        row["load"][way] = float(load.max() / load.mean())
    if seconds:
        flow = flows["fast"]
        volume = volumes(flow.size, flow.source, batch[flow.unit], INSTANCES, INSTANCES)
        found = solve_placement(volume, node, node, time_limit=seconds)
        row["ilp_bound"] = found.bound / plain["max"]
        row["over_bound"] = row["fast"]["max"] / row["ilp_bound"] if found.bound else None
        if found.slots is not None:
            row["ilp"] = {k: v / plain[k] for k, v in figures(flow, found.slots[batch], node).items()}
    return row, slots


def middle(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, of rows with the same keys; the integer program is that of the first seed."""
    result: dict[str, Any] = {}
    for key, first in rows[0].items():
        if isinstance(first, Mapping) and key != "ilp":
            result[key] = middle([r[key] for r in rows])
        elif isinstance(first, float) and key not in ("ilp_bound", "over_bound"):
            result[key] = statistics.median(r[key] for r in rows)
        else:
            result[key] = first
    return result


def milliseconds(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and least time of a call."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return {"median": statistics.median(times), "least": min(times)}


def scale(instances: int, repeats: int, seconds: float) -> dict[str, Any]:
    """Times at one size, 60 pictures per instance, and the fast method over the linear program's bound."""
    work = WORKLOADS["orchmllm_10b"](instances * 100, 0)
    seen = work.items["vision"]
    count = min(len(seen.sample), 60 * instances)
    hidden, source = seen.inner_rows[:count], np.arange(count) * instances // count
    node = np.arange(instances) // PER_NODE
    size = hidden * float(PAYLOAD["vision"])
    batch = balance(hidden, instances, Cost())
    weights, home = hidden.astype(np.float64), node[source]
    slots = place_items(size, source, batch, node, node)
    fast = figures(Flow(size, source, batch), slots, node)["max"]
    row: dict[str, Any] = {
        "instances": instances,
        "items": count,
        "fast_ms": milliseconds(lambda: place_items(size, source, batch, node, node), repeats),
        "near_ms": milliseconds(lambda: balance_near_home(weights, home, node), repeats),
        "fast_over_bound": None,
        "fast_over_ilp_bound": None,
    }
    if instances <= 128:
        volume = volumes(size, source, batch, instances, instances)
        row["fast_over_bound"] = float(fast / solve_placement(volume, node, node, relax=True).bound)
        if seconds:
            row["fast_over_ilp_bound"] = float(fast / solve_placement(volume, node, node, time_limit=seconds).bound)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each integer program; 0: none (20)")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the data, of which medians are shown (3)")
    parser.add_argument("--repeats", type=int, default=11, help="timed calls (11)")
    options = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    for name in MODELS:
        drawn = [compare(name, seed, options.seconds if seed == 0 else 0.0) for seed in range(options.seeds)]
        found += [middle(rows) for rows in zip(*drawn, strict=True)]
    _print_bytes(found)
    scales = [scale(n, options.repeats, options.seconds) for n in (64, 128, 512, 2560)]
    _print_scales(scales)
    settings = {"instances": INSTANCES, "per_node": PER_NODE, "seconds": options.seconds, "seeds": options.seeds}
    write_json(options.json, "node_rearrangement", "cpu", settings, {"bytes": found, "scale": scales})


def _print_bytes(found: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for row in found:
        ways = [row[way][kind] if row[way] else None for kind in ("max", "total") for way in ("fast", "ilp", "near")]
        name = f"{row['model']} {row['module']}{' (padded)' if row['permuted'] else ''}"
        lines.append([name, row["plain_bytes"]["max"] / 1e6, *ways[:2], row["over_bound"]])
        lines[-1] += [*ways[2:], *(f"{row['load'][way]:.4f}" for way in ("plain", "near"))]
    columns = ["model, module", "plain max MB", "max: fast", "ilp", "fast / bound", "near home"]
    columns += ["total: fast", "ilp", "near home", "load plain", "near home"]
    notes = [
        f"OrchMLLM, figure 13: reductions from {PAPER[0]} to {PAPER[1]}, that is, {1 - PAPER[1]:.3f} to "
        f"{1 - PAPER[0]:.3f} left if they are what is saved",
        "ilp, and fast over its bound: of the first draw; all else: medians over draws",
        "bytes to other nodes over the plain balance's; near home of a padded module: whole batches permuted, as fast",
    ]
    report("node_rearrangement", "128 instances, 16 nodes", columns, lines, notes)


def _print_scales(scales: Sequence[Mapping[str, Any]]) -> None:
    lines = [
        [
            str(row["instances"]),
            str(row["items"]),
            *(f"{row[key]['median']:.2f} ({row[key]['least']:.2f})" for key in ("fast_ms", "near_ms")),
            row["fast_over_bound"],
            row["fast_over_ilp_bound"],
        ]
        for row in scales
    ]
    columns = ["instances", "items", "fast ms (least)", "near home ms (least)", "fast / LP bound", "fast / ILP bound"]
    report("node_rearrangement", "Speed, and gap of the maximum", columns, lines)


if __name__ == "__main__":
    main()
