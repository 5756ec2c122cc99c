"""Gain of a layout per module over one layout for all, and cases without a gain.

Simulated on H100 at full size; ``benchmarks.real_steps repeated`` measures one point on gloo processes. Half of the
tokens are pictures of 1024 rows, of which a quarter reach the language model. What is compared, each the best over
tensor, context and pipeline parallelism, microbatches, recompute and schedules, all with the same balance, and all in
the device's memory as the memory model predicts it (rigid ones as the planner's formula does, since that model knows no
repeated encoder):

  rigid            Megatron-LM's usual layout: the encoder in the language model's tensor parallelism, an instance for
                   each of its instances, the same pictures on all context-parallel ranks (Megatron-Bridge #5645:
                   "Every context-parallel rank currently encodes the full image set"), on the first pipeline stage,
                   which has fewer of the language model's blocks by the encoder's work
  rigid, lighter   the same with 2 to 6 times that work less on the first stage
  rigid, dealt     the same, and context-parallel ranks share out the pictures (Megatron-Bridge #5645)
  colocated        the encoder on all ranks, data parallel or with tensor parallelism of 2; of pipelines in turns and,
                   in 1F1B with the fewest microbatches tried, in bubbles
  apart            the encoder on ranks of its own, of the same ranks altogether
  added            the same with ranks added for the encoder
  plan             what the planner proposes, from the same data

The gain at fixed context parallelism follows from the work that is repeated: where an encoder has the share e of all
FLOPs, a step that repeats it on cp ranks takes cp * e + 1 - e as long. Best against best it is less: a rigid layout
with tensor parallelism in place of context parallelism repeats nothing.

NVIDIA prints +49.3% tokens a second where modules are colocated and +13.0% where they are not (+9.6% a GPU). Models,
layouts and clusters of these figures are not known to us. "cp 8 and a share of 7%" gives 1.49 by the formula, as do cp
4 and 16%: that is our inference, and no reproduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Options, option, program, report
from hetero_strategy.errors import HeteroError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.read_spec import spec_of
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.model.without_values import models_without_values
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.plan.step_plan import StepItems, StepMetadata
from hetero_strategy.planner.candidate import Candidate
from hetero_strategy.planner.propose import rigid_layouts
from hetero_strategy.planner.search import Planner
from hetero_strategy.profiling.cache import memory_model
from hetero_strategy.profiling.memory import MemoryModel
from hetero_strategy.simulator.cost_model import MIXED, CostModel
from hetero_strategy.simulator.hardware import cluster
from hetero_strategy.zoo import siglip2_encoder, titan_llama

ENCODERS = {"0.6B": (32, 1280, 16), "2B": (48, 1792, 16), "6B": (48, 3072, 24), "22B": (48, 6144, 48)}
"""Layers, width and heads."""
LLMS = {"8B": (32, 4096, 32, 1.3, 1024), "32B": (64, 5120, 40, 2.02, 512), "70B": (80, 8192, 64, 1.3, 4096)}
"""Layers, width, heads, and what makes the width of the MLP."""
PICTURE = 1024
"""Rows of a picture inside the encoder."""
LIGHTER = (1.0, 2.0, 3.0, 4.0, 6.0)
"""Times the encoder's work by which the first stage is lighter."""
TRIED = 8
"""Of a kind, the fastest whose memory is looked at."""
PRINTED = "NVIDIA prints +49.3% colocated and +13.0% apart; its set-up is not known, cp 8 and 7% is our inference"


@dataclass(frozen=True)
class Row:
    """Models, and the data of a step."""

    encoder: str
    llm: str
    length: int
    samples: int
    gpus: int = 64
    lay: tuple[tuple[int, int, int], ...] = ()
    """(tp, cp, pp) of the language model to try; empty: all inside a node, and pipelines of 2."""

    def __str__(self) -> str:
        return f"{self.encoder} + {self.llm}, {self.length // 1024}k"


TABLE_1 = (
    Row("0.6B", "8B", 4096, 960), Row("0.6B", "8B", 16384, 480), Row("2B", "8B", 16384, 480),
    Row("0.6B", "8B", 131072, 120), Row("0.6B", "8B", 65536, 120), Row("6B", "8B", 131072, 120),
    Row("2B", "8B", 65536, 120), Row("2B", "32B", 65536, 120), Row("22B", "70B", 16384, 128),
)  # fmt: skip
"""The first four by default."""
TABLE_2 = (
    Row("0.6B", "70B", 4096, 128, lay=((8, 1, 8),)), Row("2B", "32B", 16384, 64, lay=((8, 1, 4),)),
    Row("0.6B", "70B", 4096, 128, lay=((8, 1, 4),)), Row("0.6B", "32B", 4096, 256, lay=((8, 1, 4),)),
    Row("2B", "70B", 4096, 128, lay=((8, 1, 8),)),
)  # fmt: skip
"""The first two by default."""
DEFAULT = (4, 2)


class Found(NamedTuple):
    """One layout and what it takes."""

    seconds: float
    candidate: Candidate

    @property
    def llm(self) -> tuple[int, int, int]:
        """Degrees of the language model: tp, cp, pp."""
        way = self.candidate.layouts["llm"]
        return way.tp, way.cp, way.pp


class Case:
    """One row: its model, data and planner."""

    def __init__(self, row: Row) -> None:
        self.row, self.model = row, built(row)
        self.shape: ModelSpec = spec_of(self.model)
        self.planner = self._planner(row.gpus)

    def _planner(self, gpus: int) -> Planner:
        return Planner(CostModel(self.shape, cluster("h100", -(-gpus // 8))), [data(self.row)])

    @cached_property
    def memory(self) -> MemoryModel:
        return memory_model(self.model.train(), self.shape, "h100", MIXED)

    @cached_property
    def share(self) -> float:
        """Share of the encoder in all FLOPs."""
        batch, work = data(self.row), dict[str, float]()
        for name, module in self.shape.modules.items():
            rows = (batch.tokens if module.samplewise else batch.items[name].inner_rows).astype(np.float64)
            work[name] = float(module.per_row.sum() * rows.sum() + module.per_pair.sum() * (rows**2).sum())
        return work["vision"] / sum(work.values())

    def llms(self, gpus: int) -> Iterator[tuple[ModuleLayout, int]]:
        """Layouts of the language model on so many ranks, and numbers of microbatches."""
        row, tps = self.row, (1, 2, 4, 8)
        for tp, cp, pp in row.lay or product(tps, tps, (1, 2)):
            dp = gpus // (tp * cp * pp)
            if (
                tp * cp > 8
                or gpus % (tp * cp * pp)
                or not dp
                or row.samples % dp
                or (cp > 1 and row.length // cp < 4096)
            ):
                continue
            most = row.samples // dp
            for count in sorted({most // n for n in (1, 2, 3, 5) if most % n == 0}):
                if count <= 64 * pp and (pp == 1 or count >= 2 * pp):
                    yield ModuleLayout(gpus, dp_shard=dp, tp=tp, cp=cp, pp=pp).resolved(), count

    def best(self, kind: str, gpus: int | None = None, added: int = 0) -> list[Found]:
        """Return all candidates of a kind, the fastest first, of which the first fits by the memory model.

        Args:
            gpus: number of GPUs of the language model; None: all.
            added: ranks of the encoder, besides.
        """
        planner = self.planner if not added else self._planner(self.row.gpus + added)
        found = list[Found]()
        for llm, count in self.llms(self.row.gpus if gpus is None else gpus):
            if kind.endswith("fine") and found and found[-1].candidate.microbatches < count:
                continue
            for layouts, fill in self._around(kind, llm, added or self.row.gpus - len(llm.ranks)):
                holds = partial(self._holds, planner, fill, kind.startswith("rigid"))
                found += _simulated(planner, layouts, count, fill, holds)
        found.sort(key=lambda one: one.seconds)
        if kind.startswith("rigid") or kind.endswith("fine"):  # which were looked at one by one
            return found
        held = (n for n, one in enumerate(found[:TRIED]) if planner._has_room(one.candidate, self.memory))
        return found[next(held, len(found)) :]

    def _holds(self, planner: Planner, fill: str, rigid: bool, one: Candidate) -> bool:
        """Whether a candidate fits by the formula, and where an encoder fills, whose rows wait as the formula does not
        know, by the memory model.
        """
        fits = bool((planner.estimates.needed(one, in_step=rigid) <= planner.estimates.memory).all())
        return fits and (fill == "none" or planner._has_room(one, self.memory))

    def _around(self, kind: str, llm: ModuleLayout, own: int) -> Iterator[tuple[Mapping[str, ModuleLayout], str]]:
        """Layouts of the encoder that go with one of the language model, and how it fills."""
        estimates, ways = self.planner.estimates, [llm]
        if llm.pp > 1 and 2 * llm.pp <= self.shape.modules["llm"].blocks:
            ways.append(replace(llm, vpp=2, pp_style="v"))
        if kind.startswith("rigid"):
            for way, lighter in product(ways, LIGHTER[1:] if kind == "rigid, lighter" else LIGHTER[:1]):
                try:
                    layouts = rigid_layouts(self.shape, estimates, replace(way, split=None), lighter)
                except HeteroError:  # fewer blocks than the first stage would have to give
                    continue
                if kind == "rigid, dealt":
                    tp, first = layouts["vision"].tp, llm.stage_grid(0).reshape(-1, llm.tp)
                    ranks = tuple(map(int, first[:, :tp].flat))
                    layouts["vision"] = ModuleLayout(ranks, tp=tp, dp_shard=len(first))
                yield layouts, "none"
            return
        fill = "fine" if kind.endswith("fine") else "none"
        if fill == "fine":
            ways = [llm]
        ranks = range(len(llm.ranks)) if kind.startswith("colocated") else range(len(llm.ranks), len(llm.ranks) + own)
        for way, tp in product(ways, (1, 2)):
            if tp in self.shape.modules["vision"].tp and len(ranks) % tp == 0:
                vision = ModuleLayout(ranks, tp=tp, dp_shard=len(ranks) // tp)
                yield {"vision": vision, "llm": way}, fill

    def planned(self) -> Found:
        """Return the planner's choice, with its memory model."""
        best = self.planner.plan(memory=lambda: self.memory).best
        return Found(best.seconds, best.candidate)


def built(row: Row) -> MultimodalModel:
    """Return the model without values."""
    layers, width, heads = ENCODERS[row.encoder]
    blocks, dim, of, multiplier, multiple = LLMS[row.llm]
    with models_without_values():
        encoder = siglip2_encoder(
            out_width=dim, merge=2, patch_size=14, num_channels=3, num_patches=4096, hidden_size=width,
            intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
        )  # fmt: skip
        llm = titan_llama(
            vocab_size=128256, dim=dim, n_layers=blocks, n_heads=of, n_kv_heads=8, max_seq_len=row.length,
            ffn_dim_multiplier=multiplier, multiple_of=multiple,
        )  # fmt: skip
        return MultimodalModel({"vision": encoder, "llm": llm}, edges=[("vision", "llm")])


def data(row: Row) -> StepMetadata:
    """Equal samples, half of whose tokens are pictures."""
    each = row.length // 2 // (PICTURE // 4)
    tokens, rows = np.full(row.samples, row.length), np.full(row.samples * each, PICTURE)
    sample, number = np.divmod(np.arange(row.samples * each), each)
    items = StepItems(sample, rows // 4, number * (PICTURE // 4), rows)
    return StepMetadata(0, 0, np.arange(row.samples), tokens, tokens - 1, {"vision": items})


def _simulated(
    planner: Planner,
    layouts: Mapping[str, ModuleLayout],
    count: int,
    fill: str,
    holds: Callable[[Candidate], bool],
) -> Iterator[Found]:
    """Simulate with what runs again that costs least, of all that fits by the formula, with both ways to gather."""
    piped = layouts["llm"].pp > 1
    schedules = ("zbv",) if layouts["llm"].vpp > 1 else ("1f1b", *["zb_h1"] * (fill == "none")) if piped else ("auto",)
    work = {name: planner.estimates.work(name, way.tp, cp=way.cp).total / way.dp for name, way in layouts.items()}

    def again(recompute: Mapping[str, Recompute]) -> float:
        return sum(work[name] / how.every for name, how in recompute.items())

    ways = [
        {**({"vision": Recompute()} if v else {}), **({"llm": Recompute(n)} if n else {})}
        for v, n in product((0, 1), (0, 4, 2, 1))
    ]
    for reshard in ("auto", "never") if layouts["llm"].pp == 1 else ("never",):
        for recompute in sorted(ways, key=again):
            transforms = {name: [how] for name, how in recompute.items()}
            one = Candidate(layouts, count, schedules[0], transforms, reshard, fill)
            if holds(one):
                for schedule in schedules:
                    try:
                        candidate = replace(one, schedule=schedule)
                        yield Found(planner.evaluator.seconds(candidate), candidate)
                    except HeteroError:  # such as fewer microbatches than a schedule wants
                        continue
                break


def percent(slow: Found | None, fast: Found | None) -> str:
    """How many percent more tokens a second."""
    return "" if slow is None or fast is None else f"{100 * (slow.seconds / fast.seconds - 1):+.0f}%"


def first(found: Iterable[Found], *llm: int) -> Found | None:
    """The fastest whose language model has so much tp, cp and pp; of any, where nothing is said."""
    return next((one for one in found if not llm or one.llm == llm), None)


def long_contexts(rows: Sequence[Row]) -> tuple[list[list[Any]], list[list[Any]], dict[str, Any]]:
    """Table 1: by context parallelism at one layout of the language model, and the best against the best."""
    by_cp, best, found = list[list[Any]](), list[list[Any]](), dict[str, Any]()
    for row in rows:
        case = Case(row)
        kinds = {kind: case.best(kind) for kind in ("rigid", "rigid, dealt", "colocated")}
        kinds["rigid, lighter"] = case.best("rigid, lighter")
        eighth = max(8, 8 * round(row.gpus * case.share / 8))
        kinds["apart"] = case.best("apart", row.gpus - eighth)
        kinds["plan"] = [case.planned()]
        for cp in (1, 2, 4, 8):
            rigid = next((one for one in kinds["rigid"] if one.llm[1] == cp), None)
            if rigid is not None:
                same, dealt = (first(kinds[kind], *rigid.llm) for kind in ("colocated", "rigid, dealt"))
                formula = cp * case.share + 1 - case.share
                by_cp.append([row, f"{case.share:.0%}", cp, "/".join(map(str, rigid.llm)), rigid.seconds,
                              percent(rigid, same), f"{100 * (formula - 1):+.0f}%", percent(dealt, same)])  # fmt: skip
        tops = {kind: first(some) for kind, some in kinds.items()}
        fastest = min((one for one in tops.values() if one), key=lambda one: one.seconds)
        over = [percent(tops[kind], tops["colocated"]) for kind in ("rigid", "rigid, lighter", "rigid, dealt")]
        plan = tops["plan"]
        assert plan is not None
        best.append([row, tops["rigid"].seconds if tops["rigid"] else "", *over, percent(tops["rigid"], tops["apart"]),
                     percent(tops["rigid"], plan), plan.seconds / fastest.seconds])  # fmt: skip
        found[str(row)] = {"share": case.share} | {kind: one and one.seconds for kind, one in tops.items()}
    return by_cp, best, found


def pipelines(rows: Sequence[Row], added: Sequence[int]) -> tuple[list[list[Any]], dict[str, Any]]:
    """Table 2: at one layout of a language model in a pipeline, with ranks added for the encoder."""
    table, found = list[list[Any]](), dict[str, Any]()
    for row in rows:
        case, (way,) = Case(row), row.lay
        rigid, lighter = (first(case.best(kind)) for kind in ("rigid", "rigid, lighter"))
        ways = {kind: first(case.best(kind)) for kind in ("colocated, fill none", "colocated, fill fine")}
        ways |= {f"added {count}": first(case.best("apart", row.gpus, count)) for count in added}
        name = f"{row}, tp {way[0]} pp {way[2]}"
        for kind, one in ways.items():
            more = int(kind.split()[-1]) if kind.startswith("added") else 0
            per = one and one._replace(seconds=one.seconds * (1 + more / row.gpus))
            table.append([name, f"{case.share:.0%}", kind, one.seconds if one else "does not fit",
                          percent(rigid, one), percent(lighter, one), percent(lighter, per)])  # fmt: skip
        found[name] = {kind: one and one.seconds for kind, one in {**ways, "rigid": rigid, "lighter": lighter}.items()}
    return table, found


@program(
    option("--all", action="store_true", help="all rows (hours)"),
    option("--rows", type=int, nargs=2, default=DEFAULT, help="rows of tables 1 and 2"),
    option("--added", type=int, nargs="*", default=[2, 4, 8], help="ranks added for the encoder"),
)
def main(args: Options) -> Any:
    """Print the tables."""
    one, two = (len(TABLE_1), len(TABLE_2)) if args.all else args.rows
    found: dict[str, Any] = {}
    by_cp, best, found["long"] = long_contexts(TABLE_1[:one])
    head = ("row", "encoder's share", "cp", "tp/cp/pp", "rigid, s", "colocated", "cp * e + 1 - e", "over dealt")
    report("Tokens a second at one layout of the language model", head, by_cp, [PRINTED])
    head = ("row", "rigid, s", "colocated", "over lighter", "over dealt", "apart", "plan", "plan / best")
    report("The best against the best: over rigid, unless another is named", head, best, [PRINTED])
    table, found["pipelines"] = pipelines(TABLE_2[:two], args.added)
    head = ("row", "encoder's share", "way", "s", "over rigid", "over lighter", "of a GPU over lighter")
    report("Tokens a second where the language model is a pipeline", head, table, [PRINTED])
    return found


if __name__ == "__main__":
    main()
