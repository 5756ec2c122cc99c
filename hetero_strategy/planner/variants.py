"""Other ways to run a candidate's layouts: with other schedules, a step ahead, and with less memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice, product
from math import inf, lcm

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.chain import moved
from hetero_strategy.planner.estimate import EVERY
from hetero_strategy.planner.evaluate import Candidate, Evaluator, Placed
from hetero_strategy.planner.every import FEW
from hetero_strategy.planner.given import Given
from hetero_strategy.planner.shape import ModelShape
from hetero_strategy.planner.space import Degrees, degrees, divisors, one_after_another
from hetero_strategy.schedule.config import ScheduleConfig


@dataclass(frozen=True)
class Allowed:
    """What the other options of a run leave to a plan."""

    decoupled: bool = True
    """``fill="decoupled"``, which says itself what is computed again and holds all microbatches."""
    prefetch: bool = True
    """``prefetch``, and ``pieces`` for it."""
    given: Given = field(default_factory=Given)
    """What every candidate has."""
    asked: ScheduleConfig = field(default_factory=ScheduleConfig)
    """How every candidate is scheduled, as far as a person says it."""

    @classmethod
    def beside(cls, asked: ScheduleConfig, given: Given, payload: str) -> Allowed:
        """What goes with options that a person gave.

        Args:
            payload: of the data module.
        """
        free = asked.fill == "auto"
        if free and asked.pieces and not asked.prefetch:  # parts of what fills
            asked = replace(asked, fill="fine")
        return cls(
            decoupled=free and not given.recompute and not given.offload and not asked.max_in_flight,
            prefetch=free and not asked.prefetch and not asked.pieces and payload != "all_to_all",
            given=given,
            asked=asked,
        )

    def check(self, shape: ModelShape) -> None:
        """Refuse what is asked of modules that there are not.

        Raises:
            ConfigError: naming them.
        """
        for option in ("pieces", "prefetch", "max_in_flight"):
            if unknown := sorted({*getattr(self.asked, option)} - {*shape.modules}):
                raise ConfigError(f"planner: {option} names {unknown}; the modules are {', '.join(shape.modules)}")


class Variants:
    """Makes them for one model and cluster.

    Args:
        allowed: what may be asked of the strategy besides schedules.
        fits: whether there is memory for a candidate.
        microbatches: as many as are asked for; None: any.
        worth: whether context parallelism of a module may be.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        allowed: Allowed,
        fits: Callable[[Candidate], bool] = lambda _: True,
        microbatches: int | None = None,
        worth: Callable[[str, Degrees], bool] = lambda _, way: way.cp == 1,
    ) -> None:
        samples = min(len(batch.samples) for batch in evaluator.batches)
        self._counts = range(1, samples + 1) if microbatches is None else range(microbatches, microbatches + 1)
        self._evaluator, self._allowed, self._fits, self._worth = evaluator, allowed, fits, worth
        modules, fed = evaluator.shape.modules, {target for _, target in evaluator.shape.edges}
        self._blocks = {name: module.blocks if module.has_blocks else 1 for name, module in modules.items()}
        self._tied = {name: module.tied for name, module in modules.items()}
        self._blocked = [name for name, module in modules.items() if module.has_blocks]
        self._first = {source for source, _ in evaluator.shape.edges} - fed
        """Modules that feed others and that nothing feeds."""
        self._frozen = {n for n in self._first & evaluator.shape.others if not modules[n].trained[:1].any()}
        """Those of them that begin with what does not train."""

    def schedules(self, candidate: Candidate) -> list[Candidate]:
        """With other schedules, and with virtual stages."""
        piped = [name for name, layout in candidate.layouts.items() if layout.pp > 1]
        if not piped or self._allowed.asked.schedule != "auto":
            return []
        ways = [replace(candidate, schedule="zb_h1")]
        if candidate.microbatches <= max(layout.pp for layout in candidate.layouts.values()):  # 1F1B holds all, too
            ways.append(replace(candidate, schedule="gpipe"))
        tied = [name for name in piped if self._tied[name] and _reduced(candidate.layouts[name])]
        for vpp, style, schedule in ((2, "loop", "interleaved_1f1b"), (4, "loop", "interleaved_1f1b"), (2, "v", "zbv")):
            if style == "v" and tied:  # a rank with both stages would reduce the gradient of what they share twice
                continue
            layouts = dict(candidate.layouts)
            for name in piped:
                if layouts[name].split is None and layouts[name].pp * vpp <= self._blocks[name]:
                    layouts[name] = replace(layouts[name], vpp=vpp, pp_style=style)  # type: ignore[arg-type]
            if layouts != candidate.layouts:
                ways.append(replace(candidate, layouts=layouts, schedule=schedule))
        return ways

    def cuts(self, candidate: Candidate) -> list[Candidate]:
        """With one block more in a stage, and one less in its neighbour of the same module: where stages are given, and
        on few ranks all of modules without virtual stages. In one pipeline through all modules, in any neighbour.
        """
        if ways := [replace(candidate, layouts=x) for x in moved(self._evaluator.shape, candidate.layouts)]:
            return ways
        for name, stages in self._cut(candidate).items():
            for border in range(len(stages) - 1):
                for more in (1, -1):
                    split = [*stages]
                    split[border] += more
                    split[border + 1] -= more
                    if min(split) > 0:
                        other = replace(candidate.layouts[name], split=tuple(split))
                        ways.append(replace(candidate, layouts={**candidate.layouts, name: other}))
        return ways

    def most_cut(self, candidate: Candidate) -> float:
        """Seconds as it is, over those with one block less in its largest stage, at most."""
        largest = max((max(stages) for stages in self._cut(candidate).values()), default=1)
        return largest / (largest - 1) if largest > 1 else 1.0

    def _cut(self, candidate: Candidate) -> dict[str, tuple[int, ...]]:
        """Blocks of the stages that may be cut otherwise."""
        found = {name: layout.split for name, layout in candidate.layouts.items() if layout.split is not None}
        if self._evaluator.cluster.ranks <= FEW:
            parts = {**candidate.pieces, **self._allowed.asked.pieces}
            open_ = {n for n, x in candidate.layouts.items() if x.pp > 1 and x.vpp == 1 and n not in parts}
            placed = self._evaluator.place(candidate).placement.layouts if open_ - found.keys() else {}
            found |= {name: placed[name].split or () for name in placed if name in open_ - found.keys()}
        return found

    def fills(self, candidate: Candidate) -> list[Candidate]:
        """With encoders that fill bubbles otherwise: wherever ranks idle, around the pipeline alone, or not at all; and
        generators that go with the first of these.
        """
        shape, fine = self._evaluator.shape, replace(candidate, fill="fine")
        # Instances that gather in each microbatch cannot act on their own.
        fixed = candidate.reshard_after_forward == "always" or self._allowed.asked.fill != "auto"
        if fixed or candidate.pieces or not fine.scheduling.apart(shape.others, candidate.layouts, shape.edges):
            return []
        around = ("coarse",) if self._filling(fine, candidate.layouts) else ()
        same = {"auto": "none"}.get(candidate.fill, candidate.fill)
        return [replace(candidate, fill=fill) for fill in ("fine", *around, "none") if fill != same]

    def ahead(self, candidate: Candidate) -> list[Candidate]:
        """With all encoders a step ahead whose first stage does not train; where only the last block does, in two
        pieces. None of those that share ranks with what they feed and no pipeline: they have no bubbles.
        """
        if not self._frozen or not self._allowed.prefetch or candidate.prefetch:
            return []
        if candidate.reshard_after_forward == "always":
            return []
        placed = self._evaluator.place(candidate)
        may = {name for name in self._frozen if candidate.layouts[name].vpp == 1}
        filling = self._filling(replace(candidate, prefetch=dict.fromkeys(may, 1)), placed.placement.layouts)
        late = {name for name in may & filling if self._trains_last(name, candidate)}
        whole = {n for n in may if not self._trains(n, placed) and (n in filling or self._apart(n, candidate))}
        if not late | whole:
            return []
        pieces = {**candidate.pieces, **dict.fromkeys(sorted(late), 2)}
        return [replace(candidate, prefetch=dict.fromkeys(sorted(late | whole), 1), pieces=pieces)]

    def whole(self, candidate: Candidate) -> list[Candidate]:
        """With all parameters gathered once per step, where some are with every microbatch; with as few modules more
        that run again as that takes.
        """
        if candidate.reshard_after_forward != "auto":
            return []
        times = self._evaluator.place(candidate).times.values()
        if not any(not stage.once and stage.gather for stage in times):
            return []
        has = {*candidate.recompute}
        if candidate.fill == "decoupled":  # what fills runs again already
            has |= self._filling(candidate, candidate.layouts)
        may = [] if self._allowed.given.recompute else [name for name in self._blocked if name not in has]
        for count in range(len(may) + 1):
            more = (dict.fromkeys(names, Recompute()) for names in combinations(may, count))
            ways = [
                replace(candidate, reshard_after_forward="never", recompute={**candidate.recompute, **m}) for m in more
            ]
            if fitting := [*filter(self._fits, ways)]:
                return fitting
        return []

    def partly(self, candidate: Candidate) -> list[Candidate]:
        """With fewer blocks of a module that run again, as few as there is memory for; none of one pipeline through all
        modules, of whose stages the formula knows too little.
        """
        if self._allowed.given.recompute or any(moved(self._evaluator.shape, candidate.layouts)):
            return []
        ways = []
        for name, how in candidate.recompute.items():
            fewer = (Recompute(n) for n in reversed(EVERY[1:]) if how == Recompute() and n <= self._blocks[name])
            less = (replace(candidate, recompute={**candidate.recompute, name: way}) for way in fewer)
            ways += [*islice(filter(self._fits, less), 1)]
        return ways

    def mixtures(self, candidate: Candidate) -> list[Candidate]:
        """With other mixtures of replicas and shards of one module; in one pipeline through all modules, of all."""
        layouts, ways = candidate.layouts, []
        for names in [[*layouts]] if any(moved(self._evaluator.shape, layouts)) else [[name] for name in layouts]:
            one = layouts[names[0]]
            dp = len(one.ranks) // (one.neighbours * one.pp)
            for n in divisors(dp):
                other = {name: replace(layouts[name], dp_replicate=dp // n, dp_shard=n) for name in names}
                ways.append(replace(candidate, layouts={**layouts, **other}))
        return [*filter(self._fits, ways)]

    def laid_out(self, candidate: Candidate) -> list[Candidate]:
        """With one module in another number of tensor, context and pipeline ranks, where each has its own."""
        layouts, ways = candidate.layouts, []
        if any(moved(self._evaluator.shape, layouts)):
            return []
        for name in (n for n, layout in layouts.items() if layout.vpp == 1):
            layout, module = layouts[name], self._evaluator.shape.modules[name]
            for way in degrees(module, len(layout.ranks), self._evaluator.cluster.on(layout.ranks).ranks_per_node, inf):
                if (way.tp, way.cp, way.pp) != (layout.tp, layout.cp, layout.pp) and self._worth(name, way):
                    others = {**layouts, name: way.layout(layout.ranks)}
                    piped = any(x.pp > 1 for x in others.values()) and all(x.vpp == 1 for x in others.values())
                    schedule = "zb_h1" if piped and candidate.schedule == "auto" else candidate.schedule
                    ways.append(replace(candidate, layouts=others, schedule=schedule))
        return [*filter(self._fits, ways)]

    def borders(self, candidate: Candidate) -> list[Candidate]:
        """With the next number of ranks, more or less, of one group of modules that share theirs: idle ones, or those
        of another group.
        """
        asked, groups = candidate.layouts, dict[tuple[int, ...], list[str]]()
        for name, layout in asked.items():
            groups.setdefault(tuple(layout.ranks), []).append(name)
        groups = dict(sorted(groups.items()))
        sizes, cluster = [*map(len, groups)], self._evaluator.cluster
        if len(cluster.pools) > 1 or [*chain(*groups)] != [*range(sum(sizes))]:
            return []
        least = [lcm(*(asked[name].neighbours * asked[name].pp for name in names)) for names in groups.values()]
        ways = []
        for i, j in product(range(len(sizes)), repeat=2):
            step = lcm(least[i], least[j])
            for more in (step, -step) if i == j else (step,):
                given = [*sizes]
                given[i] += more
                if i != j:  # otherwise idle ones
                    given[j] -= more
                if min(given) > 0 and sum(given) <= cluster.ranks:
                    ranks = one_after_another(range(sum(given)), given, range(len(given)))
                    of = {name: own for names, own in zip(groups.values(), ranks, strict=True) for name in names}
                    layouts = {name: _sharded(layout, of[name]) for name, layout in asked.items()}
                    if not any(self._tied[n] and one.pp_style == "v" and _reduced(one) for n, one in layouts.items()):
                        ways.append(replace(candidate, layouts=layouts))  # a run refuses those
        return [*filter(self._fits, ways)]

    def counts(self, candidate: Candidate) -> list[Candidate]:
        """With one microbatch more or less, twice or half as many."""
        n = candidate.microbatches
        others = [count for count in (n - 1, n + 1, n // 2, 2 * n) if count in self._counts]
        return [*filter(self._fits, (replace(candidate, microbatches=count) for count in others))]

    def leaner(self, candidate: Candidate) -> list[Candidate]:
        """With less memory for the activations of what fills bubbles: computed again, or in turns with the pipeline."""
        if candidate.fill != "fine":
            return []
        graph = self._evaluator.place(candidate).graph
        if not any(stage.backward for node, stage in graph.stages.items() if node.module in graph.filling):
            return []
        rest: dict[str, Recompute] = {n: how for n, how in candidate.recompute.items() if n not in graph.filling}
        ways = [replace(candidate, fill="decoupled", recompute=rest)] if self._allowed.decoupled else []
        return ways if candidate.pieces.keys() - candidate.prefetch else [*ways, replace(candidate, fill="none")]

    def _filling(self, candidate: Candidate, layouts: Mapping[str, ModuleLayout]) -> frozenset[str]:
        shape = self._evaluator.shape
        return candidate.scheduling.filling(shape.others, layouts, shape.edges)

    def _trains(self, name: str, placed: Placed) -> bool:
        """Whether anything trains in a module's first stage."""
        return any(s.trains for n, s in placed.graph.stages.items() if (n.module, n.stage) == (name, 0))

    def _trains_last(self, name: str, candidate: Candidate) -> bool:
        """Whether only the last block of a module trains, which may be cut off."""
        trained, layout = self._evaluator.shape.modules[name].trained, candidate.layouts[name]
        free = layout.pp == 1 and layout.split is None and name not in candidate.pieces and self._blocks[name] > 1
        return free and bool(trained[-1]) and not trained[:-1].any()

    def _apart(self, name: str, candidate: Candidate) -> bool:
        """Whether a module has ranks of its own, seen from those that it feeds."""
        fed = (target for source, target in self._evaluator.shape.edges if source == name)
        return all({*candidate.layouts[name].ranks}.isdisjoint(candidate.layouts[target].ranks) for target in fed)


def _reduced(layout: ModuleLayout) -> bool:
    """Whether gradients are summed over ranks."""
    return layout.dp_replicate * layout.shards > 1


def _sharded(layout: ModuleLayout, ranks: Sequence[int]) -> ModuleLayout:
    """On other ranks, with the same stages and shards alone."""
    return replace(layout, ranks=tuple(ranks), dp_replicate=1, dp_shard=len(ranks) // (layout.neighbours * layout.pp))
