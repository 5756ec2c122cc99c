"""Make every unit of a sharded stage take part in every microbatch, in one order, whatever rows a rank has.

If weights are gathered and gradients summed with each microbatch, FSDP's hooks follow the autograd graph: a rank whose
graph leaves a unit out, or reaches it by another path, would meet other ranks in the wrong collective. Backbones have
such graphs if there are no rows: ``torch.cat([x.new_zeros(0, n), *per_item])`` depends on no block without items. A
rank that runs a unit more often than other ranks, such as once per item, would fail in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.kind import LossOutput


def take_part(stage: Adapter, units: Mapping[str, nn.Module], applies: Callable[[], bool], mesh: DeviceMesh) -> None:
    """Make a stage's output depend on all of its units, and each unit's empty input on the parts before it.

    A unit that did not run, or not as often as on other ranks, raises an error: the ranks that share its weights would
    wait for ever. The first forward compares all ranks, and each later one must run its units as often as the first
    did.

    Args:
        stage: FSDP root.
        units: units below the root, by FQN.
        applies: returns whether the stage's coming forward gathers weights and its backward sums gradients.
        mesh: ranks that share its weights.
    """
    runs = _Runs(stage, list(units), mesh)
    ran: dict[str, list[Tensor]] = {}
    """Unit -> its outputs, even if nothing reads them: a backward reaches the same units on all ranks."""
    trained = {fqn: any(p.requires_grad for p in unit.parameters()) for fqn, unit in units.items()}
    outer = {*units} - {*stage.experts()}  # a block reaches its experts on all ranks or on none
    begun = not stage.first_stage or _trains_before(stage, units)
    sliced = any(isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ()) for p in stage.parameters())

    def follow(unit: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Let empty rows require a gradient if something before the unit trains, as rows of items do."""
        rows = given[0] if given else None
        if not isinstance(rows, Tensor) or rows.numel() or rows.requires_grad or not rows.is_floating_point():
            return None
        if not torch.is_grad_enabled() or not applies() or not (begun or any(trained[fqn] for fqn in ran)):
            return None
        return (rows.detach().requires_grad_(), *given[1:])

    def begin(stage: nn.Module, given: tuple[Any, ...]) -> None:
        ran.clear()
        runs.begin(applies())

    def note(fqn: str, unit: nn.Module, given: Any, made: Any) -> None:
        if runs.in_forward:  # an output of a recompute would keep all of its activations
            ran[fqn] = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.requires_grad]

    def join(stage: Adapter, given: Any, made: Any) -> Any:
        if not applies():
            return None
        if missing := [fqn for fqn in units if fqn not in ran]:
            raise ModelError(
                f"module '{stage.name}': {missing[0]} did not run in a microbatch ({len(missing)} of {len(units)} parts"
                " that are gathered apart), so the ranks that share its weights would wait for this one; run all blocks"
                " in every forward, with no rows where there are no items, or set reshard_after_forward='never'"
            )
        runs.end()
        rows = made.loss_sum if isinstance(made, LossOutput) else made
        if not isinstance(rows, Tensor) or not torch.is_grad_enabled():
            return None
        others = [x for fqn, outputs in ran.items() if fqn in outer for x in outputs]
        # FSDP sees the end of a forward by its output, so that must depend on something that trains.
        more = [] if rows.requires_grad else [p for p in stage.parameters() if p.requires_grad][:1]
        # A tensor of its own on all ranks, whose hooks come first in backward, even if a block makes the output.
        joined = _Joined.apply(rows, sliced, *others, *more)
        return replace(made, loss_sum=joined) if isinstance(made, LossOutput) else joined

    for fqn, unit in units.items():
        unit.register_forward_pre_hook(follow, prepend=True)
        unit.register_forward_pre_hook(partial(runs.count, fqn), prepend=True)  # before FSDP gathers its weights
        unit.register_forward_hook(partial(note, fqn))
    stage.register_forward_pre_hook(begin)
    stage.register_forward_hook(join, prepend=True)  # before FSDP's own


class _Runs:
    """A count of the runs of a stage's units in a forward: equal on all ranks, and in all forwards of a kind.

    Args:
        names: names of the units.
        mesh: ranks that are compared.
    """

    def __init__(self, stage: Adapter, names: Sequence[str], mesh: DeviceMesh) -> None:
        self._stage, self._names, self._mesh = stage, names, mesh
        self._first: dict[tuple[bool, bool], dict[str, int]] = {}
        """Unit -> its runs in the first forward of each kind: with or without gradients, in training or in evaluation,
        in which a generator draws samples."""
        self._now: dict[str, int] = {}
        self.in_forward = False
        """Whether units run in a forward that is compared, not again in a backward."""

    @property
    def _kind(self) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), self._stage.training

    def begin(self, counts: bool) -> None:
        self.in_forward, self._now = counts, dict.fromkeys(self._names, 0)

    def count(self, name: str, unit: nn.Module, given: Any) -> None:
        if not self.in_forward:
            return
        self._now[name] = runs = self._now[name] + 1
        first = self._first.get(self._kind)
        if first is None and runs > 1:
            self._meet(name)
        elif first is not None and runs > first[name]:
            raise self._fault(
                f"{name} runs {runs} times or more in a microbatch, and ran {first[name]} in the first one"
            )

    def end(self) -> None:
        """Compare the whole forward; the first one is a collective over the mesh, as each further run of a unit is."""
        self.in_forward = False
        first = self._first.get(self._kind)
        if first is None:
            self._meet(None)
            self._first[self._kind] = self._now
        elif fewer := [name for name in self._names if self._now[name] < first[name]]:
            name = fewer[0]
            raise self._fault(f"{name} ran {self._now[name]} times in a microbatch, and {first[name]} in the first one")

    def _meet(self, name: str | None) -> None:
        """Compare which unit the ranks are about to run again; None: this rank runs none again.

        Up to here all of them ran the same units, so ranks that do not come have run it one time less.
        """
        own_place = torch.tensor([0 if name is None else 1 + self._names.index(name)], device=self._mesh.device_type)
        for axis in reversed(range(self._mesh.ndim)):
            group = self._mesh.get_group(axis)
            gathered = own_place.new_empty(group.size())
            dist.all_gather_into_tensor(gathered, own_place, group=group)
            places = gathered.tolist()
            if len(set(places)) > 1:
                again, ranks = max(places), dist.get_process_group_ranks(group)
                more = [rank for rank, place in zip(ranks, places, strict=True) if place == again]
                name = self._names[again - 1]
                runs = self._now[name] - (max(places) == own_place.item())
                raise self._fault(
                    f"{name} runs {runs + 1} times or more in a microbatch on ranks {more}, and {runs} on ranks"
                    f" {sorted({*ranks} - {*more})}"
                )

    def _fault(self, what: str) -> ModelError:
        return ModelError(
            f"module '{self._stage.name}': {what}, but the ranks that share its weights gather them for each run; let"
            " each block run once for all items of a microbatch, or set reshard_after_forward='never'"
        )


def _trains_before(stage: Adapter, units: Mapping[str, nn.Module]) -> bool:
    """Return whether anything trains in a stage that is in no unit, and not after all blocks."""
    inside = {id(p) for unit in units.values() for p in unit.parameters()}
    after = tuple(f"{fqn}." for fqn in stage.around_blocks()[1])
    own = ((fqn, p) for fqn, p in stage.named_parameters() if id(p) not in inside and not f"{fqn}.".startswith(after))
    return any(p.requires_grad for _, p in own)


class _Joined(torch.autograd.Function):
    """A function that returns its rows and makes them depend on more tensors, whose hooks a backward then runs.

    These get no gradient, or an empty one if they are empty and weights are ``sliced`` by tensor parallelism: rows that
    nothing else reads would come to a DTensor without a gradient, for which torch makes a plain tensor and fails.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, sliced: bool, *others: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.gradients = [torch.zeros_like(x) if sliced and not x.numel() else None for x in others]
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        return gradient, None, *ctx.gradients
