"""Neighbours of a candidate: other schedules, transforms and layouts, one change away. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from math import inf, lcm

from hetero_strategy.layout.spec import ModuleLayout, divisors
from hetero_strategy.planner.candidate import Candidate, RunOptions
from hetero_strategy.planner.evaluate import Evaluator
from hetero_strategy.planner.propose import FEW, FEW_MODULES
from hetero_strategy.planner.space import Degrees, degrees, divided, one_after_another, shards


class Neighbours:
    """A source of candidates that differ from a given one in one way. All of them fit into memory by the formula.

    Args:
        options: options that the user set.
        fits: tells whether a candidate fits into memory.
        microbatches: number that the user set; None: any.
        worth: tells whether context parallelism of a module may pay off.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        options: RunOptions,
        fits: Callable[[Candidate], bool] = lambda _: True,
        microbatches: int | None = None,
        worth: Callable[[str, Degrees], bool] = lambda _, way: way.cp == 1,
    ) -> None:
        samples = min(len(batch.samples) for batch in evaluator.batches)
        self._counts = range(1, samples + 1) if microbatches is None else range(microbatches, microbatches + 1)
        self._evaluator, self._options, self._fits, self._worth = evaluator, options, fits, worth
        modules = evaluator.shape.modules
        self._modules = modules
        self._tied = {name: module.tied for name, module in modules.items()}
        self._choices = {name: [*options.choices(module).items()] for name, module in modules.items()}
        self._few = evaluator.cluster.ranks <= FEW
        always = self.schedules, self.fills, self.gathered_once, self.transformed, self.mixtures
        self._generators = (*always, self.laid_out, self.borders, self.cuts, self.counts) if self._few else always

    def of(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield all neighbours; on many ranks, modules keep their ranks, degrees and microbatches."""
        return chain.from_iterable(generator(candidate) for generator in self._generators)

    def schedules(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with other schedules, and with virtual stages."""
        piped = [name for name, layout in candidate.layouts.items() if layout.pp > 1]
        if not piped or self._options.schedule.schedule != "auto":
            return []
        ways = [replace(candidate, schedule="zb_h1")]
        if candidate.microbatches <= max(layout.pp for layout in candidate.layouts.values()):  # 1F1B holds all, too
            ways.append(replace(candidate, schedule="gpipe"))
        tied = [name for name in piped if self._tied[name] and _reduced(candidate.layouts[name])]
        for vpp, style, schedule in ((2, "loop", "interleaved_1f1b"), (4, "loop", "interleaved_1f1b"), (2, "v", "zbv")):
            if style == "v" and tied:  # a rank with both stages would reduce their shared gradient twice
                continue
            layouts = dict(candidate.layouts)
            for name in piped:
                if layouts[name].split is None and layouts[name].pp * vpp <= self._modules[name].most_stages:
                    layouts[name] = replace(layouts[name], vpp=vpp, pp_style=style)  # type: ignore[arg-type]
            if layouts != candidate.layouts:
                ways.append(replace(candidate, layouts=layouts, schedule=schedule))
        return ways

    def cuts(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with one block of a module moved to a neighbouring stage, if no stage is virtual."""
        ways = []
        for name, stages in self._cut(candidate).items():
            for border in range(len(stages) - 1):
                for more in (1, -1):
                    split = [*stages]
                    split[border] += more
                    split[border + 1] -= more
                    if min(split) > 0 and split[0] >= self._modules[name].first_blocks:
                        other = replace(candidate.layouts[name], split=tuple(split))
                        ways.append(replace(candidate, layouts={**candidate.layouts, name: other}))
        return ways

    def _cut(self, candidate: Candidate) -> dict[str, tuple[int, ...]]:
        """Return the splits of the modules whose cuts may move."""
        splits = {name: layout.split for name, layout in candidate.layouts.items() if layout.split is not None}
        parts = {**candidate.pieces, **self._options.schedule.pieces}
        open_ = {n for n, x in candidate.layouts.items() if x.pp > 1 and x.vpp == 1 and n not in parts}
        placed = self._evaluator.place(candidate).placement.layouts if open_ - splits.keys() else {}
        return splits | {name: placed[name].split or () for name in placed if name in open_ - splits.keys()}

    def fills(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with encoders that fill bubbles wherever ranks idle, or nowhere; generators follow the
        fine fill.
        """
        shape, fine = self._evaluator.shape, replace(candidate, fill="fine")
        # Instances that gather in each microbatch cannot act on their own.
        fixed = candidate.reshard_after_forward == "always" or self._options.fixed_schedule.fill != "auto"
        if fixed or candidate.pieces or not fine.scheduling.apart(shape.others, candidate.layouts, shape.edges):
            return []
        same = {"auto": "none"}.get(candidate.fill, candidate.fill)
        return [replace(candidate, fill=fill) for fill in ("fine", "none") if fill != same]

    def gathered_once(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with all parameters gathered once per step, if some are gathered with every microbatch,
        with each least choice of transforms that this needs.
        """
        if candidate.reshard_after_forward != "auto":
            return []
        times = self._evaluator.place(candidate).times.values()
        if not any(not stage.once and stage.gather for stage in times):
            return []
        return self.transformed(replace(candidate, reshard_after_forward="never"))

    def transformed(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with every least choice of transforms: with less in any module it does not fit.

        For example, the language model alone runs again, or the encoder does and every other block of the language
        model.
        """
        filling: Collection[str] = ()
        if candidate.fill == "decoupled":  # filling modules run again already
            shape = self._evaluator.shape
            filling = candidate.scheduling.filling(shape.others, candidate.layouts, shape.edges)
        open_ = {name: of for name, of in self._choices.items() if len(of) > 1 and name not in filling}
        if len(open_) > FEW_MODULES:  # nothing, or what saves most
            open_ = {name: [of[0], of[-1]] for name, of in open_.items()}
        every = [
            (tuple(chain(*(amount for amount, _ in some))), dict(zip(open_, (of for _, of in some), strict=True)))
            for some in product(*open_.values())
        ]
        least, ways = list[tuple[int, ...]](), list[Candidate]()
        for amounts, chosen in sorted(every, key=lambda one: sum(one[0])):
            if any(all(a <= b for a, b in zip(one, amounts, strict=True)) for one in least):
                continue
            transforms = {name: self._options.of(name, chosen.get(name, ())) for name in candidate.layouts}
            other = replace(candidate, transforms=transforms)
            if self._fits(other):
                least.append(amounts)
                ways.append(other)
        return ways

    def mixtures(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with other mixtures of replicas, shards and ranks of experts of one module."""
        layouts, ways = candidate.layouts, []
        for name, one in layouts.items():
            dp, on_node = len(one.ranks) // (one.neighbours * one.pp), self._evaluator.cluster.ranks_per_node
            for n in divisors(dp) if self._few else shards(dp, max(1, on_node // one.neighbours)):
                for way in divided(self._modules[name], Degrees.of(replace(one, dp_replicate=dp // n, dp_shard=n))):
                    other = replace(one, dp_replicate=way.dp_replicate, dp_shard=n, ep=way.ep)
                    ways.append(replace(candidate, layouts={**layouts, name: other}))
        return [*filter(self._fits, ways)]

    def laid_out(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with other tensor, context, pipeline and expert degrees of one module on its ranks."""
        layouts, ways = candidate.layouts, []
        for name in (n for n, layout in layouts.items() if layout.vpp == 1):
            layout, module = layouts[name], self._evaluator.shape.modules[name]
            for way in degrees(module, len(layout.ranks), self._evaluator.cluster.ranks_per_node, inf):
                own = layout.tp, layout.cp, layout.pp, layout.ep
                if (way.tp, way.cp, way.pp, way.ep) != own and self._worth(name, way):
                    others = {**layouts, name: way.layout(layout.ranks)}
                    piped = any(x.pp > 1 for x in others.values()) and all(x.vpp == 1 for x in others.values())
                    schedule = "zb_h1" if piped and candidate.schedule == "auto" else candidate.schedule
                    ways.append(replace(candidate, layouts=others, schedule=schedule))
        return [*filter(self._fits, ways)]

    def borders(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with the next number of ranks, more or less, for one group of modules that share theirs.
        Its ranks come from the idle ones, or from another group.
        """
        current, groups = candidate.layouts, dict[tuple[int, ...], list[str]]()
        for name, layout in current.items():
            groups.setdefault(tuple(layout.ranks), []).append(name)
        groups = dict(sorted(groups.items()))
        sizes, cluster = [*map(len, groups)], self._evaluator.cluster
        if [*chain(*groups)] != [*range(sum(sizes))]:
            return []
        least = [lcm(*(current[name].neighbours * current[name].pp for name in names)) for names in groups.values()]
        ways = []
        for i, j in product(range(len(sizes)), repeat=2):
            step = lcm(least[i], least[j])
            for more in (step, -step) if i == j else (step,):
                new_sizes = [*sizes]
                new_sizes[i] += more
                if i != j:  # j == i: idle ranks
                    new_sizes[j] -= more
                if min(new_sizes) > 0 and sum(new_sizes) <= cluster.ranks:
                    ranks = one_after_another(new_sizes, range(len(new_sizes)))
                    of = {name: own for names, own in zip(groups.values(), ranks, strict=True) for name in names}
                    layouts = {name: self._sharded(name, layout, of[name]) for name, layout in current.items()}
                    if not any(self._tied[n] and one.pp_style == "v" and _reduced(one) for n, one in layouts.items()):
                        ways.append(replace(candidate, layouts=layouts))  # a run refuses the other layouts
        return [*filter(self._fits, ways)]

    def _sharded(self, name: str, layout: ModuleLayout, ranks: Sequence[int]) -> ModuleLayout:
        """Return a layout on other ranks, with the same stages, shards alone, and at most as many ranks of experts."""
        dp = len(ranks) // (layout.neighbours * layout.pp)
        ways = divided(self._modules[name], Degrees.of(replace(layout, dp_replicate=1, dp_shard=dp)))
        ep = max(way.ep for way in ways if way.ep <= max(1, layout.ep))
        return replace(layout, ranks=tuple(ranks), dp_replicate=1, dp_shard=dp, ep=ep)

    def counts(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with one microbatch more or less, and with twice or half as many."""
        n = candidate.microbatches
        others = [count for count in (n - 1, n + 1, n // 2, 2 * n) if count in self._counts]
        return [*filter(self._fits, (replace(candidate, microbatches=count) for count in others))]

    def leaner(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate with less memory for the activations of filling modules: decoupled, or in turns with
        the pipeline.
        """
        if candidate.fill != "fine":
            return []
        graph = self._evaluator.place(candidate).graph
        if not any(stage.backward for node, stage in graph.stages.items() if node.module in graph.filling):
            return []
        own = {n: self._options.of(n) if n in graph.filling else of for n, of in candidate.transforms.items()}
        ways = [replace(candidate, fill="decoupled", transforms=own)] if self._options.decoupled else []
        return ways if candidate.pieces else [*ways, replace(candidate, fill="none")]


def _reduced(layout: ModuleLayout) -> bool:
    """Return whether gradients are summed over ranks."""
    return layout.dp_replicate * layout.shards > 1
