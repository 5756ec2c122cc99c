"""Find by one forward on the meta device what a transformers model runs before its blocks, in them and after them.

No table of families: hooks note which parts run before the first block and after the last, stand-ins note what blocks
ask of attention, and autograd notes which parameters reach the output.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.zoo.hf_packed import AttentionCall, noted_attention, reason_of_failure
from hetero_strategy.zoo.hf_stand_ins import Reached, StandIn, first_argument, first_of, shallow, stop, without_values


@dataclass(frozen=True)
class Trace:
    """The structure of a tower; FQNs are those in the traced model."""

    block_list: str
    blocks: int
    """Number of blocks that the output needs, from the first."""
    before: tuple[str, ...]
    """Parts with parameters that run before the blocks alone."""
    after: tuple[str, ...]
    """Parts that run after the blocks, and parts that no output reaches."""
    unreached: tuple[str, ...]
    """Parameters that no output reaches."""
    rows_in: tuple[int, ...]
    """Shape of the first block's input."""
    rows_out: tuple[int, ...]
    """Shape of the output."""
    results: int = 0
    """Length of the tuple that a block returns; 0: rows alone."""


def trace(model: nn.Module, path: str, run: Callable[[Any], Tensor], layer: int | None) -> Trace:
    """Trace ``run`` of a model, on the meta device.

    Args:
        model: transformers module; it is copied.
        path: FQN of the tower in it, "" for the model itself.
        run: call of a copy of the model; returns its rows.
        layer: number of the wanted state as in transformers' ``hidden_states``: state ``k`` is the output of ``k``
            blocks, -1 that of all. None: the result of ``run``.

    Raises:
        ModelError: the tower has no list of blocks, or not so many.
    """
    meta = without_values(model)
    block_list, blocks = longest_list(meta.get_submodule(path), path)
    wanted = len(blocks) if layer is None else layer if layer >= 0 else len(blocks) + 1 + layer
    if not 1 <= wanted <= len(blocks):
        raise ModelError(
            f"layer={layer}, but {type(meta.get_submodule(path)).__name__} has {len(blocks)} blocks; use a layer from"
            f" {-len(blocks)} to {len(blocks)}"
        )
    seen = _Seen(meta, block_list)
    if wanted < len(blocks):
        blocks[wanted].register_forward_pre_hook(stop, with_kwargs=True)
    for parameter in meta.parameters():
        parameter.requires_grad_(True)
    with torch.device("meta"), torch.enable_grad():
        try:
            rows = run(meta)
        except Reached as reached:
            rows = reached.rows
    named = dict(meta.named_parameters())
    late, early = (_reaching(named, result) for result in (rows, seen.first))
    unreached = {*named} - late - early
    needed = max(
        n
        for n in range(1, wanted + 1)
        if any(f"{block_list}.{n - 1}.{fqn}" not in unreached for fqn, _ in blocks[n - 1].named_parameters())
    )
    return Trace(
        block_list,
        needed,
        *seen.around(unreached, needed, early - late),
        tuple(fqn for fqn in named if fqn in unreached),
        tuple(seen.first.shape),
        tuple(rows.shape),
        seen.results,
    )


def _reaching(named: Mapping[str, Tensor], result: Tensor) -> set[str]:
    """Return the names of the parameters on which a result depends."""
    if not result.requires_grad:
        return set()
    gradients = torch.autograd.grad(result.sum(), list(named.values()), retain_graph=True, allow_unused=True)
    return {fqn for fqn, gradient in zip(named, gradients, strict=True) if gradient is not None}


def longest_list(tower: nn.Module, path: str) -> tuple[str, list[nn.Module]]:
    """Return the FQN and the members of the tower's longest list of parts; of equally long ones, the largest."""
    lists = [(fqn, part) for fqn, part in tower.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        raise ModelError(f"{type(tower).__name__} has no list of blocks: it cannot be an encoder here")
    fqn, blocks = max(lists, key=lambda one: (len(one[1]), sum(p.numel() for p in one[1].parameters())))
    return ".".join(name for name in (path, fqn) if name), list(blocks)


class _Seen:
    """Notes of when the parts of a model run: before, between or after its blocks."""

    def __init__(self, model: nn.Module, block_list: str) -> None:
        self._model, self._block_list = model, block_list
        self._ended, self._begun = 0, 0
        self._moments: dict[str, set[tuple[int, int]]] = {}
        """Part -> numbers of blocks that had begun and ended when it ran."""
        self.first: Any = None
        """Input of the first block, which gets a copy of it that depends on nothing before the blocks."""
        self.results = 0
        """Length of the tuple that a block returns; 0: rows alone."""
        self.hooks: list[RemovableHandle] = []
        for number, block in enumerate(model.get_submodule(block_list).children()):
            self.hooks.append(block.register_forward_pre_hook(partial(self._begin, number), with_kwargs=True))
            self.hooks.append(block.register_forward_hook(partial(self._end, number), always_call=True))
        for fqn, part in model.named_modules():
            if not self._holds_blocks(fqn) and not fqn.startswith(f"{block_list}."):
                self.hooks.append(part.register_forward_pre_hook(partial(self._note, fqn)))

    def around(
        self, unreached: set[str], needed: int, early: Collection[str] = ()
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the outermost parts before the blocks, and those after them or in no path to the output.

        A part that runs between blocks is in neither, nor one whose parameters are read without it, unless they are
        ``early``, which the first block's input alone depends on.
        """
        before: list[str] = []
        after = [f"{self._block_list}.{name}" for name, _ in self._children(self._block_list) if int(name) >= needed]
        waiting = [""]
        while waiting:
            owner = self._model.get_submodule(start := waiting.pop(0))
            named = {f"{start}.{name}".lstrip("."): part for name, part in owner.named_children()}
            after += [
                fqn
                for n, _ in owner.named_parameters(recurse=False)
                if (fqn := f"{start}.{n}".lstrip(".")) in unreached
            ]
            for fqn, part in named.items():
                names = {f"{fqn}.{inner}" for inner, _ in part.named_parameters()}
                moments = self._moments.get(fqn, set())
                if not names or fqn == self._block_list:
                    continue
                inside = {m for other, ms in self._moments.items() if f"{other}.".startswith(f"{fqn}.") for m in ms}
                runs_between = any(begun and ended < needed for begun, ended in inside)
                if not runs_between and (names <= unreached or (moments and all(n >= needed for _, n in moments))):
                    after.append(fqn)
                elif not any(begun for begun, _ in moments) if moments else names <= {*early}:
                    before.append(fqn)
                elif self._holds_blocks(fqn) or not moments:
                    waiting.append(fqn)
        return tuple(before), tuple(after)

    def _children(self, fqn: str) -> list[tuple[str, nn.Module]]:
        return list(self._model.get_submodule(fqn).named_children())

    def _holds_blocks(self, fqn: str) -> bool:
        return not fqn or f"{self._block_list}.".startswith(f"{fqn}.")

    def _note(self, fqn: str, *_: Any) -> None:
        self._moments.setdefault(fqn, set()).add((self._begun, self._ended))

    def _begin(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._begun = max(self._begun, number + 1)
        if number:
            return None
        self.first = first_argument(args, kwargs)
        if args:
            return (self.first.detach(), *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): self.first.detach()}

    def _end(self, number: int, block: nn.Module, args: Any, result: Any) -> None:
        self._ended = max(self._ended, number + 1)
        self.results = max(self.results, len(result) if isinstance(result, tuple) else 0)


class Parts(NamedTuple):
    """The parts of a base."""

    before: list[str]
    """Names of the parts with parameters that run before the blocks."""
    after: list[str]
    """Names of the parts with parameters that run after the blocks."""
    attention: list[list[AttentionCall]]
    """Calls of attention by each block."""
    results: int
    """Length of the tuple that a block returns; 0: rows alone."""
    finish: list[str] | None
    """Names of children that, called one after another, are all that happens to the last block's rows; None: there is
    more."""


def parts_of(base: nn.Module, layers: str, run: Callable[[nn.Module], Any]) -> Parts:
    """Find the parts of a base on the meta device by one run of its forward.

    Args:
        layers: name of the list of blocks.
        run: calls a base with a few rows on the meta device.

    Raises:
        ModelError: the forward fails.
    """
    blocks = {key: _Traced(block) for key, block in getattr(base, layers)._modules.items()}
    seen = _Seen(base, layers)
    calls: list[_Call] = []
    for name, child in base.named_children():
        note = partial(_note, calls, name)
        seen.hooks.append(child.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            result = run(shallow(base, {layers: shallow(getattr(base, layers), blocks)}))
    except ModelError:
        raise
    except Exception as fault:  # several kinds
        reason = " ".join(str(fault).split())
        raise ModelError(
            f"{type(base).__name__}: its forward fails on rows and positions: {type(fault).__name__} {reason};"
            f" {reason_of_failure(type(base))}"
        ) from fault
    finally:
        for hook in seen.hooks:
            hook.remove()
    if idle := [block for block in blocks.values() if "returned" not in block.__dict__]:
        raise ModelError(
            f"{type(idle[0].__dict__['like']).__name__}: {len(idle)} of {len(blocks)} blocks of {type(base).__name__}"
            " do not run on rows alone, as cross-attention to pictures does not; here pictures are rows of the sequence"
        )
    around = seen.around(set(), len(blocks))
    before, after = (list(dict.fromkeys(fqn.partition(".")[0] for fqn in fqns)) for fqns in around)
    traced = list(blocks.values())
    finish = _finish(traced[-1].returned, calls, result) if traced else None
    return Parts(before, after, [block.calls for block in traced], seen.results, finish)


class _Call(NamedTuple):
    """A call of a child."""

    name: str
    alone: bool
    """Whether it has one argument."""
    given: Any
    result: Any
    version: int


def _note(calls: list[_Call], name: str, child: nn.Module, args: Any, more: Any, result: Any) -> None:
    alone = len(args) == 1 and not more
    calls.append(_Call(name, alone, args[0] if args else None, result, getattr(result, "_version", 0)))


def _finish(returned: tuple[Tensor, int], calls: list[_Call], result: Any) -> list[str] | None:
    """Return the names of the calls from a block's rows to a base's result, if there is nothing but these calls.

    Args:
        returned: rows of the last block, and their version then, which a change in place raises.
    """
    (rows, version), names = returned, []
    for call in calls:
        if call.alone and call.given is rows and rows._version == version:
            names.append(call.name)
            rows, version = call.result, call.version
    return names if first_of(result) is rows and rows._version == version else None


class _Traced(StandIn):
    """A block's stand-in that notes its calls of attention and how many results it has."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(like=block)
        self.__dict__["calls"] = []

    @override
    def forward(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        others = {**kwargs, **{str(place): value for place, value in enumerate(args, 1)}}
        shared = {name: len(value) for name, value in others.items() if isinstance(value, MutableMapping)}
        for name, value in others.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == hidden_states.shape:
                raise ModelError(
                    f"{type(self.__dict__['like']).__name__}: a block takes other rows ({name}) beside those of the"
                    " block before it, which stages do not have; such layers are not built"
                )
        with noted_attention() as self.__dict__["calls"]:
            try:
                result = self.__dict__["like"](hidden_states, *args, **kwargs)
            except ModelError:
                raise
            except Exception as fault:  # such as routing by values; attention has run before it
                if not isinstance(fault, RuntimeError) or "meta" not in str(fault).lower():
                    warnings.warn(
                        f"{type(self.__dict__['like']).__name__}: a run of a block without values ends with"
                        f" {type(fault).__name__}: {fault}; calls of attention after it are not counted",
                        stacklevel=2,
                    )
                result = hidden_states
        if filled := [name for name, count in shared.items() if len(others[name]) != count]:
            raise ModelError(
                f"{type(self.__dict__['like']).__name__}: a block keeps something for later blocks ({filled[0]}), which"
                " those of other stages would lack; such layers are not built"
            )
        self.__dict__["returned"] = first_of(result), first_of(result)._version
        return result
