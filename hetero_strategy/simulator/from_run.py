"""Seconds of a model's blocks, derived from the stages of a training run, for plans of other layouts. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hetero_strategy import ragged
from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.spec import ModelSpec
from hetero_strategy.schedule.action import Kind, StageId
from hetero_strategy.simulator.cluster import Cluster
from hetero_strategy.simulator.cost_model import (
    Precision,
    block_lines,
    expert_exchanges,
    key_exchanges,
    key_travel,
    rank_collectives,
)
from hetero_strategy.simulator.stage_times import NOTHING, BlockSeconds, KeyTravel, Line, ModuleSeconds

StageSeconds = Mapping[StageId, Mapping[Kind, Line]]
"""Seconds of F, and of B or of I and W, of one instance of a stage."""


@dataclass(frozen=True)
class Measured:
    """The measured seconds of stages in the last steps of a run, and the run's layouts."""

    layouts: Mapping[str, ModuleLayout]
    """Layout of each module, with ``split``."""
    recomputed: Mapping[str, float]
    """Module -> share of its forward that backward runs again; modules left out: 0."""
    stages: StageSeconds
    microbatches: int = 1
    """Microbatches of the run's last step."""
    expert_load: float = 1.0
    """Rows of the rank whose experts are chosen most, over the mean: of the last step, the mean of layers."""
    keys: Mapping[str, float] = field(default_factory=dict)
    """Module -> keys that the busiest context-parallel rank receives for each row of its instance; modules left
    out: all keys of other ranks."""
    pairs: Mapping[str, float] = field(default_factory=dict)
    """Module -> pairs of the busiest context-parallel rank, over the mean of ranks; modules left out: 1."""

    def write(self, file: Path) -> None:
        """Write the measurement as JSON."""
        data = {
            "layouts": {name: _plain(layout) for name, layout in self.layouts.items()},
            "recomputed": dict(self.recomputed),
            "microbatches": self.microbatches,
            "expert_load": self.expert_load,
            "keys": dict(self.keys),
            "pairs": dict(self.pairs),
            "stages": {str(stage): dict(of) for stage, of in self.stages.items()},
        }
        file.write_text(json.dumps(data, indent=1))

    @classmethod
    def read(cls, file: Path) -> Measured:
        """Read a file of :meth:`write`."""
        try:
            data: dict[str, Any] = json.loads(file.read_text())
            stages = {
                StageId(name, int(number)): {kind: Line(*line) for kind, line in of.items()}
                for name, _, number, of in ((*s.rpartition("."), of) for s, of in data["stages"].items())
            }
            layouts = {name: ModuleLayout.from_config(name, of) for name, of in data["layouts"].items()}
            load = float(data.get("expert_load", 1.0))  # files of earlier versions have none
            dealt = data.get("keys", {}), data.get("pairs", {})
            return cls(layouts, data["recomputed"], stages, int(data["microbatches"]), load, *dealt)
        except FileNotFoundError:
            raise ConfigError(
                f"{file} is missing: a run writes it at the end of training (TimelineMonitor), once it has made steps"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is damaged ({error!r}); train again") from error

    def modules(self, shape: ModelSpec, cluster: Cluster, precision: Precision) -> dict[str, ModuleSeconds]:
        """Return the seconds of the blocks of every module that ran.

        A stage's seconds are dealt out to its blocks in proportion to the formula. The recomputed forward and the
        predicted collectives of tensor parallelism are then subtracted.
        """
        fed = shape.fed_by_trainable()
        seconds: dict[str, ModuleSeconds] = {}
        for name, module in shape.modules.items():
            layout = self.layouts.get(name)
            if layout is None or sum(layout.split or ()) != module.blocks * module.has_blocks:
                raise ConfigError(f"run: it was of another model; {name} has {module.blocks} blocks in this one")
            if all(StageId(name, i) in self.stages for i in range(layout.pipeline.stages)):
                again = self.recomputed.get(name, 0.0)
                formula = block_lines(module, layout, cluster, fed[name], again, precision)
                _, into, own = block_lines(module, layout, cluster, fed[name], 0.0, precision)
                split = layout.split if module.has_blocks else (1,)
                exchanges = np.add.reduceat(key_exchanges(module, fed[name], again), ragged.starts(np.array(split)), 1)
                travels = [key_travel(module, layout, cluster, precision, of.tolist()) for of in exchanges.T]
                stages = [self._on_even_ranks(StageId(name, i), keys) for i, keys in enumerate(travels)]
                took = _of_blocks(stages, split, formula)
                tp, heads = rank_collectives(module, layout, cluster, precision)
                experts = expert_exchanges(module, layout, cluster, precision, self.expert_load)
                seconds[name] = {
                    layout.tp: [
                        _block(block, (i, o), again, tp, heads.plus(travel), layout.cp)
                        for block, i, o, travel in zip(zip(*took, strict=True), into, own, experts, strict=True)
                    ]
                }
        return seconds

    def _on_even_ranks(self, node: StageId, keys: KeyTravel | None) -> Mapping[Kind, Line]:
        """Return a stage's seconds as if context-parallel ranks had equally many pairs, without the travel of the first
        group of its keys; attention is taken to hide the other groups.
        """
        name, stage = node.module, self.stages[node]
        if keys is None:
            return stage
        cp = self.layouts[name].cp
        received = self.keys.get(name, (cp - 1) / cp)
        one = Line(keys.latency * (received > 0), keys.per_key * received / keys.groups, 0.0)
        even = {kind: line._replace(per_pair=line.per_pair / self.pairs.get(name, 1.0)) for kind, line in stage.items()}
        return {kind: _less(line, NOTHING.plus(one, keys.exchanges(kind))) for kind, line in even.items()}


def _of_blocks(
    stages: Sequence[Mapping[Kind, Line]], split: Sequence[int] | None, formula: Sequence[Sequence[Line]]
) -> tuple[list[Line], list[Line], list[Line], list[Line]]:
    """Return every block's forward, whole backward, and its halves, which are :data:`NOTHING` if they ran as one."""
    ends = ragged.offsets(np.asarray(split))
    forward, into, own = formula
    whole = [a.plus(b) for a, b in zip(into, own, strict=True)]
    kinds: tuple[tuple[Kind, Sequence[Line]], ...] = (("F", forward), ("B", whole), ("I", into), ("W", own))
    dealt: list[list[Line]] = [[], [], [], []]
    for took, (first, last) in zip(stages, pairwise(ends), strict=True):
        for lines, (kind, expected) in zip(dealt, kinds, strict=True):
            lines += _dealt(took.get(kind, NOTHING), expected[first:last])
    return dealt[0], [b if b != NOTHING else i.plus(w) for b, i, w in zip(*dealt[1:], strict=True)], dealt[2], dealt[3]


def _dealt(total: Line, expected: Sequence[Line]) -> list[Line]:
    """Deal out a stage's seconds in proportion to the expected ones, or equally if none are expected."""
    table = np.array(expected)
    sums, there = table.sum(axis=0), table.any(axis=1, keepdims=True)
    shares = np.where(sums > 0, table / np.where(sums > 0, sums, 1.0), there / max(1, there.sum()))
    return [Line(*map(float, row)) for row in shares * np.array(total)]


def _block(
    took: tuple[Line, Line, Line, Line],
    formula: tuple[Line, Line],
    again: float,
    tp: Line,
    travel: Line,
    cp: int,
) -> BlockSeconds:
    """Return one block's seconds without recompute and collectives, on a rank that has all rows of its ``cp``
    context-parallel ranks.

    Args:
        took: lines of the block from :func:`_of_blocks`.
        formula: estimated halves of its backward, without recompute.
        tp: collectives of tensor parallelism.
        travel: exchanges of rows for heads and with experts.
    """
    (forward, whole, into, own), (plain_into, plain_own) = took, formula
    fed, trains = plain_into != NOTHING, plain_own != NOTHING
    less = NOTHING.plus(forward, again * (fed or trains)).plus(tp, float(fed)).plus(travel, float(fed or trains))
    whole = _less(whole, less)
    if into != NOTHING or own != NOTHING:
        into, own = (_less(into, less), own) if fed else (into, _less(own, less))
    else:
        share = plain_into.per_row / ((plain_into.per_row + plain_own.per_row) or 1.0)
        into, own = NOTHING.plus(whole, share), NOTHING.plus(whole, 1.0 - share)
    forward = _less(forward, tp.plus(travel))
    of_all = (line.shared(1 / cp) for line in (forward, whole, into if fed else NOTHING, own if trains else NOTHING))
    return BlockSeconds(*of_all)


def _plain(layout: ModuleLayout) -> dict[str, Any]:
    """Return a layout as a layout file spells it."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(layout).items()}


def _less(line: Line, other: Line) -> Line:
    """Subtract another line, and clip at zero."""
    return Line(*(max(0.0, a - b) for a, b in zip(line, other, strict=True)))
