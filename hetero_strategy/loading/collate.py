"""From the units that an instance computes to what its module takes."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping

import numpy as np
import torch

from hetero_strategy.data.media import TargetProcessor
from hetero_strategy.loading.payload import Content
from hetero_strategy.model.inputs import GeneratorInputs, Packing
from hetero_strategy.plan.step_plan import StepPlan


def targets(
    processor: TargetProcessor,
    plan: StepPlan,
    generator: str,
    number: int,
    instance: int,
    slots: Mapping[Hashable, torch.Tensor],
    seed: int,
    *,
    epoch: int,
    reads: bool,
    content: Content,
) -> GeneratorInputs:
    """What one instance of a generator draws in one of its microbatches.

    Args:
        processor: of the generator.
        plan: of the step.
        generator: its name.
        number: its microbatch.
        instance: its instance.
        slots: (source, its microbatch) -> rows inside the module that it fills.
        seed: of noise and times, which are functions of (seed, epoch, generator, item of the data set) alone.
        epoch: of noise and times.
        reads: whether this rank has a stage that sees target rows: the first or the last.
        content: of the step.
    """
    assignment = plan.assignments[generator][number]
    units = assignment.of(instance)
    items = content.items(generator, units)
    empty = np.zeros((0, processor.feature), np.float32)
    drawn = content.values(generator, units) if reads else []
    noise = [empty]
    time = np.zeros(len(units), np.float32)
    for place, item in enumerate(items.numbers.tolist()):
        random = np.random.Generator(np.random.PCG64([seed, epoch, item, zlib.crc32(generator.encode())]))
        time[place] = random.random(dtype=np.float32)  # first, so that ranks that read no payload draw the same
        if reads:
            noise.append(random.standard_normal(drawn[place].shape, np.float32))
    return GeneratorInputs(
        values=torch.from_numpy(np.concatenate([empty, *drawn])),
        noise=torch.from_numpy(np.concatenate(noise)),
        time=torch.from_numpy(time),
        sizes=items.sizes,
        rows=items.rows,
        packing=Packing.of(assignment.inner_rows_of(instance)),
        slots=dict(slots),
    )
