"""How a module is cut into stages, and how the whole module keeps the names of what its stages own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from hetero_strategy.model.adapter import Adapter


def cut(module: Adapter, split: Sequence[int], numbers: Iterable[int]) -> dict[int, Adapter]:
    """Make the stages of these numbers of a whole module, where ``split`` is the blocks of each stage.

    With fewer than two entries there is no pipeline, and the only stage is the module itself.
    """
    if len(split) < 2:
        return {0: module}
    blocks = list(module.blocks())
    assert sum(split) == len(blocks), f"split {split} of {len(blocks)} blocks"
    stages = {}
    for number in numbers:
        before = sum(split[:number])
        held = blocks[before : before + split[number]]
        stages[number] = module.stage(held, first=number == 0, last=number == len(split) - 1)
    return stages


def in_no_stage(module: Adapter) -> list[str]:
    """Parameters of which nothing says which stage has them."""
    parts = (*module.blocks(), *(fqn for around in module.around_blocks() for fqn in around))
    known = tuple(f"{fqn}." for fqn in parts)
    return [fqn for fqn, _ in module.named_parameters(remove_duplicate=False) if not f"{fqn}.".startswith(known)]


def owned_tensors(stage: Adapter) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage by their name in the whole module."""
    return {stage.global_name(fqn): parameter for fqn, parameter in stage.named_parameters()}


def adopt(module: Adapter, stages: Mapping[int, Adapter]) -> None:
    """Let the whole module hold the tensors of its stages on this rank, under its own names.

    Most are in parts that it shares with them. The others are those of the modules around the blocks, and a weight
    that two stages share, both of whose names are bound to this rank's copy.
    """
    tied = module.tied_weight() or ()
    for stage in stages.values():
        if stage is module:
            continue
        for fqn, buffer in stage.named_buffers(remove_duplicate=False):
            owner, key = _holder(module, fqn)
            owner._buffers[key] = buffer
        for fqn, parameter in stage.named_parameters(remove_duplicate=False):
            for name in tied if fqn in tied else (fqn,):
                owner, key = _holder(module, name)
                owner._parameters[key] = parameter


@contextmanager
def ties_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep shared parameters shared through ``to`` and ``to_empty``, which would make one for each of their holders."""
    holders: dict[int, dict[tuple[int, str], nn.Module]] = {}
    for module in modules:
        for owner in module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    holders.setdefault(id(parameter), {})[(id(owner), key)] = owner
    yield
    for shared in holders.values():
        (first, *others) = [(owner, key) for (_, key), owner in shared.items()]
        for owner, key in others:
            owner._parameters[key] = first[0]._parameters[first[1]]


def _holder(module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    path, _, key = fqn.rpartition(".")
    return module.get_submodule(path), key
