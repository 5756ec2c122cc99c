"""What of a training run is saved, and how it comes back: the strategy's view of a checkpoint."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.optim import Optimizer

from hetero_strategy.checkpoint.all_or_none import AllOrNone
from hetero_strategy.checkpoint.equal_on_ranks import refuse_apart, refuse_parts
from hetero_strategy.checkpoint.exporting import EXPORT_KEY, export_record
from hetero_strategy.checkpoint.folder import StoredTensor, describe, remove
from hetero_strategy.checkpoint.loading import load
from hetero_strategy.checkpoint.optimizer_state import from_tensors, to_tensors
from hetero_strategy.checkpoint.saving import Checkpointer
from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.adapter import Adapter

FROM_WEIGHTS = "or begin with its weights: trainer.validate(..., ckpt_path=...), then trainer.fit(...)"
KERNELS = ("foreach", "fused", "capturable")
"""Options of an optimizer that follow from the layout and the device, not from the checkpoint."""

LIGHTNINGS = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks",
              "optimizer_states", "lr_schedulers", "hparams_name", "hyper_parameters", "hparams_type"}  # fmt: skip
"""What Lightning itself puts into a checkpoint."""


class TrainingState:
    """Owned tensors of a run by global name, saved to and filled from checkpoints of any layout.

    Args:
        prefix: FQN of the model inside the LightningModule, such as ``"model"``.
        modules: all modules of the model by name; this rank owns what is not on the meta device.
        group: gloo group of all ranks that nothing else uses.
    """

    def __init__(
        self,
        prefix: str,
        modules: Mapping[str, Adapter],
        *,
        group: dist.ProcessGroup | None,
        asynchronous: bool = False,
    ) -> None:
        self._modules = {f"{prefix}.{name}." if prefix else f"{name}.": module for name, module in modules.items()}
        self._every_name = {
            id(parameter): start + fqn
            for start, module in self._modules.items()
            for fqn, parameter in module.named_parameters()
        }
        self._names = {
            id(parameter): self._every_name[id(parameter)]
            for module in self._modules.values()
            for parameter in module.parameters()
            if not parameter.is_meta
        }
        self._group = group
        self._asynchronous = asynchronous
        self._checkpointer = Checkpointer(group)
        self.seconds = 0.0
        """Seconds that this rank has spent on writing and removing checkpoints."""

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Return owned parameters and persistent buffers by global name."""
        return {name: tensor for name, tensor in self._every_tensor().items() if not tensor.is_meta}

    def _every_tensor(self) -> dict[str, torch.Tensor]:
        """Return the same of all modules: what other ranks own is on the meta device."""
        return {
            start + fqn: tensor.detach()
            for start, module in self._modules.items()
            for fqn, tensor in module.state_dict(keep_vars=True).items()
        }

    def rest_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the persistent state of ``module`` beside the model's modules by global name: buffers, metrics, ...

        Values are tensors, or whatever a metric or ``get_extra_state`` returns.
        """
        # A destination of one's own has no metadata of torch: no file is made of it that a warning would be for.
        state: dict[str, Any] = nn.Module.state_dict(module, destination={})
        return {name: value for name, value in state.items() if not name.startswith(tuple(self._modules))}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return ``optimizer.state_dict()`` with names of parameters in the place of numbers, as torch's distributed
        checkpoints have it, and the states of owned parameters alone. A save looks at them.

        Raises:
            CheckpointError: ``state_dict()`` has other groups than the optimizer.
        """
        found = dict(optimizer.state_dict())
        groups = found.get("param_groups", [])
        sizes, own = ([len(g.get("params", ())) for g in of] for of in (groups, optimizer.param_groups))
        if groups and sizes != own:
            raise CheckpointError(
                f"checkpoint: state_dict() of {type(optimizer).__name__} has groups of {sizes} parameters, and the"
                f" optimizer of {own}; leave 'param_groups' as Optimizer.state_dict() makes it"
            )
        numbers = [number for group in groups for number in group["params"]]
        numbered = dict(zip(numbers, (p for g in optimizer.param_groups for p in g["params"]), strict=False))
        states: dict[str, Any] = {}
        for number, state in found.get("state", {}).items():
            p = numbered.get(number)
            if p is None or id(p) not in self._every_name:
                states.setdefault("", {})[number] = state
            elif id(p) in self._names:
                states[self._names[id(p)]] = state
        return found and found | {"state": states, "param_groups": self._with_names(groups, optimizer)}

    def _names_in(self, optimizer: Optimizer) -> set[str]:
        return {self._every_name.get(id(p), "") for group in optimizer.param_groups for p in group["params"]}

    def _with_names(self, groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return groups of options with the names of the optimizer's parameters."""
        own = [[self._every_name.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        return [{**group, "params": own[i] if i < len(own) else []} for i, group in enumerate(groups)]

    def save(self, checkpoint: dict[str, Any], path: Path, rest: Collection[str] = ()) -> None:
        """Write Lightning's checkpoint. A collective of the world.

        Args:
            rest: names that the module itself has beside the model.

        Raises:
            CheckpointError: it cannot be written, or tensors of a callback, or that ``on_save_checkpoint`` or
                ``state_dict`` of a module or an optimizer adds, differ between ranks, or an optimizer has a state
                without a form; a previous one at ``path`` is untouched.
        """
        began = time.perf_counter()
        self.finalize()
        found, known = checkpoint.pop("state_dict"), self._every_tensor().keys()
        optimizers = checkpoint.pop("optimizer_states", None) or []
        more = [{key: value for key, value in of.items() if key not in ("state", "param_groups")} for of in optimizers]
        added = {key: value for key, value in checkpoint.items() if key not in LIGHTNINGS}
        added |= {f"state_dict()[{name!r}]": found[name] for name in found if name not in known and name not in rest}
        added |= {f"optimizer {i}, {key!r}": value for i, of in enumerate(more) for key, value in of.items()}
        team = AllOrNone.of(self._group)
        team.together(lambda: refuse_parts(found, known))
        refuse_apart(team, {**checkpoint.get("callbacks", {}), **added})
        tensors = {
            f"model.{name}": value
            for name, value in found.items()
            if isinstance(value, torch.Tensor) and not value.is_meta and (name in known or team.rank == 0)
        }
        every = team.together(lambda: [to_tensors(i, of.get("state", {})) for i, of in enumerate(optimizers)])
        for i, named in enumerate(every):
            tensors |= {f"optim.{i}.{name}": value for name, value in named.items()}
        metadata = {
            **checkpoint,
            "extra_state": {name: value for name, value in found.items() if not isinstance(value, torch.Tensor)},
            "param_groups": [[_options(group) for group in of.get("param_groups", [])] for of in optimizers],
            **({"optimizer_extra": more} if any(more) else {}),
            EXPORT_KEY: export_record(self._modules),
        }
        self._checkpointer.save(tensors, metadata, path, rank_state=random_state(), async_=self._asynchronous)
        self.seconds += time.perf_counter() - began

    def load(
        self,
        path: Path,
        optimizers: Sequence[Optimizer],
        rest: Mapping[str, Any] | None = None,
        *,
        apart: bool = False,
        strict: bool = True,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Fill owned parameters, and return the rest of Lightning's checkpoint. A collective.

        ``optimizer_states`` of it are as :meth:`optimizer_state` returns them, for :meth:`load_optimizers`.

        Args:
            rest: :meth:`rest_of` the module; what the checkpoint has of it is returned as ``state_dict``.
            apart: leave the parameters alone, and return as ``state_dict`` everything under the names that it was
                saved with: of a parameter what this rank owns, in memory of its own; whole what the model does not have
                or has in another shape; and what other ranks own on the meta device.
            strict, verify: as in :func:`~hetero_strategy.checkpoint.load`.

        Raises:
            CheckpointError: there is none, it is damaged, or it was saved from another model.
        """
        self.finalize()
        rest, known = rest or {}, self._every_tensor()
        stored: Mapping[str, StoredTensor] = {}
        if optimizers or rest or apart:
            stored = AllOrNone.of(self._group).from_one(lambda: describe(path)).tensors
        states: list[dict[str, dict[str, torch.Tensor]]] = []
        beside = {
            name: _room_for(stored.get(f"model.{name}"), value)
            for name, value in rest.items()
            if isinstance(value, torch.Tensor) and not (apart and f"model.{name}" not in stored)
        }
        if apart:
            names = [key.removeprefix("model.") for key in stored if key.startswith("model.")]
            known = {name: _room_apart(stored[f"model.{name}"], known.get(name)) for name in names if name not in rest}
        tensors = {f"model.{name}": value for name, value in {**known, **beside}.items() if not value.is_meta}
        for i, optimizer in enumerate(optimizers):
            named = {self._names[id(p)]: of for p, of in self._empty_state(i, optimizer, stored).items()}
            others = _states_of_others(i, stored, self._names_in(optimizer))
            if not apart:
                _refuse_lost(path, i, [*others])
            states.append(named := named | others)
            tensors |= {f"optim.{i}.{name}.{k}": v for name, of in named.items() for k, v in of.items()}
        with torch.no_grad():
            loaded = load(tensors, path, strict=strict, verify=verify, process_group=self._group)
        extra = loaded.metadata.pop("extra_state", {})
        if strict and not apart and (odd := {*extra} ^ ({*rest} - {*beside})):
            raise CheckpointError(
                f"{path}: only one of checkpoint and module has a state {', '.join(sorted(odd))}; build the module it"
                " was saved from, or set strict_loading=False in the LightningModule"
            )
        groups, more = loaded.metadata.pop("param_groups", []), loaded.metadata.pop("optimizer_extra", [])
        weights_alone = not groups and "lr_schedulers" not in loaded.metadata
        if optimizers and weights_alone and not apart:
            raise CheckpointError(
                f"{path} holds the model alone (save_weights_only) and no optimizer to go on with; save whole"
                f" checkpoints, {FROM_WEIGHTS}"
            )
        loaded.metadata.pop(EXPORT_KEY, None)
        if loaded.rank_state is not None:
            restore_random_state(loaded.rank_state)
        made = [dict(of) for of in more] or [{} for _ in groups]
        for i, (of, options) in enumerate(zip(made, groups, strict=True)):
            filled = states[i] if i < len(states) else {}
            of["state"] = {name: from_tensors(named) for name, named in filled.items()}
            of["param_groups"] = self._with_names(options, optimizers[i]) if i < len(optimizers) else options
        if not weights_alone:
            loaded.metadata["optimizer_states"] = made
        return {**loaded.metadata, "state_dict": {**(known if apart else {}), **beside, **extra}}

    def load_optimizers(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], path: str) -> None:
        """Give optimizers what :meth:`load` has returned of them, by their own ``load_state_dict``.

        Args:
            path: what the checkpoint is called in messages.

        Raises:
            CheckpointError: another optimizer was saved.
        """
        for i, (optimizer, saved) in enumerate(zip(optimizers, states, strict=False)):
            groups, names = saved.get("param_groups", []), self._names_in(optimizer)
            _refuse_lost(path, i, [name for name in saved["state"] if name not in names])
            if len(groups) != len(optimizer.param_groups):
                raise CheckpointError(
                    f"{path}: optimizer {i} has {len(optimizer.param_groups)} parameter groups, the checkpoint"
                    f" {len(groups)}; resume with the same configure_optimizers"
                )
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                lacks = optimizer.defaults.keys() - options.keys()
                has = {key for key in options.keys() - group.keys() if not key.endswith(("_lr", "_momentum"))}
                if lacks and has:  # versions of torch add options, and schedulers leave some
                    raise CheckpointError(
                        f"{path} was saved with another optimizer than {type(optimizer).__name__} (with"
                        f" {', '.join(sorted(has))}, without {', '.join(sorted(lacks))}); resume with the same"
                        f" configure_optimizers, {FROM_WEIGHTS}"
                    )
            self._load_optimizer(optimizer, saved)

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = {
            number: {key: part_of(p, value) for key, value in saved["state"][name].items()}
            for number, p in enumerate(parameters)
            if (name := self._names.get(id(p), "")) in saved["state"]
        }
        numbers = itertools.count()
        groups = [
            {**options, "params": [next(numbers) for _ in group["params"]]}
            | {key: group[key] for key in KERNELS if key in group}
            for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})
        own = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
        if not own and getattr(optimizer.load_state_dict, "__func__", None) is Optimizer.load_state_dict:
            for number, state in states.items():  # torch casts to the parameter's dtype what had one of its own
                optimizer.state[parameters[number]].update(state)

    def finalize(self) -> None:
        """Wait for a save in the background; raise CheckpointError if it failed."""
        self._checkpointer.finalize()

    def remove(self, path: Path, first_rank: bool) -> None:
        """Delete a checkpoint; every rank calls this and the first one does it."""
        began = time.perf_counter()
        self.finalize()
        if first_rank:
            remove(path)
        self.seconds += time.perf_counter() - began

    def _empty_state(
        self, number: int, optimizer: Optimizer, stored: Mapping[str, StoredTensor]
    ) -> dict[Any, dict[str, torch.Tensor]]:
        """Allocate the tensors of the state that the checkpoint has for each owned parameter, in its shapes."""
        keys, start = _states_by_name(number, stored), f"optim.{number}."
        state: dict[Any, dict[str, torch.Tensor]] = {}
        for group, p in ((g, p) for g in optimizer.param_groups for p in g["params"]):
            fqn = self._names.get(id(p), "")
            saved, kernel = stored.get(f"model.{fqn}"), group.get("fused") or group.get("capturable")
            for key in keys.get(fqn, []):
                entry = stored[f"{start}{fqn}.{key}"]
                # As Optimizer.load_state_dict does: all but counters goes with the parameter, and those lie beside it
                # for kernels that read them there. A dtype that was not the parameter's was chosen, and stays.
                plain = ":" in key  # a number, which comes back as one
                goes = key != "step" and not plain and saved is not None and entry.dtype == saved.dtype
                device = p.device if (key != "step" or kernel) and not plain else None
                empty = _empty(p, entry.shape, p.dtype if goes else entry.dtype, device)
                state.setdefault(p, {})[key] = empty.detach()
        return state


def _states_by_name(number: int, stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """Return the names of the states that a checkpoint has of each parameter of an optimizer."""
    keys: dict[str, list[str]] = {}
    for name in stored:
        if name.startswith(start := f"optim.{number}."):
            fqn, _, key = name.removeprefix(start).rpartition(".")
            keys.setdefault(fqn, []).append(key)
    return keys


def _states_of_others(
    number: int, stored: Mapping[str, StoredTensor], known: Collection[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Allocate whole states of parameters that an optimizer does not have, for a hook that renames them."""
    return {
        fqn: {
            key: torch.empty((entry := stored[f"optim.{number}.{fqn}.{key}"]).shape, dtype=entry.dtype) for key in keys
        }
        for fqn, keys in _states_by_name(number, stored).items()
        if fqn not in known
    }


def _refuse_lost(path: str | Path, number: int, names: Sequence[str]) -> None:
    """Refuse states of parameters that an optimizer does not have."""
    if names:
        raise CheckpointError(
            f"{path}: optimizer {number} was saved with states of {names[0]!r} ({len(names)} in all), which is none of"
            " its parameters now; resume with the same model and configure_optimizers, or without states:"
            " checkpoint['optimizer_states'] = [] in on_load_checkpoint"
        )


def part_of(p: torch.Tensor, value: Any) -> Any:
    """Return this rank's part of a whole value of a sharded parameter's shape; anything else as it is."""
    if not isinstance(p, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != p.shape or value.is_meta or not value.dim():
        return value
    mesh, coordinate = p.device_mesh, p.device_mesh.get_coordinate()
    sizes, offsets = _compute_local_shape_and_global_offset(p.shape, mesh.shape, list(coordinate or ()), p.placements)
    box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    local = value[box].to(p.device, copy=True)
    return DTensor.from_local(local, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _empty(p: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Allocate a state of a parameter, sharded as it is if they have one shape."""
    if tuple(shape) == tuple(p.shape) and p.dim() > 0:
        return torch.zeros_like(p, dtype=dtype)
    value = torch.zeros(shape, dtype=dtype, device=device)
    if not isinstance(p, DTensor) or not value.dim():
        return value
    whole = [Replicate()] * p.device_mesh.ndim  # as what follows from a sharded gradient
    return DTensor.from_local(value, p.device_mesh, whole, run_check=False)


def _room_for(saved: StoredTensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return what a saved value fills: a metric's state may have another shape than at its start."""
    return value.clone() if saved is None else torch.empty(saved.shape, dtype=saved.dtype, device=value.device)


def _room_apart(saved: StoredTensor, value: torch.Tensor | None) -> torch.Tensor:
    """Return what a saved value fills beside the model's: this rank's part, or the whole where there is none of it."""
    if value is not None and tuple(value.shape) == saved.shape:
        return torch.empty_like(value)
    return torch.empty(saved.shape, dtype=saved.dtype, device="meta" if value is not None and value.is_meta else None)


def random_state() -> dict[str, Any]:
    """Return this process's random number states."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Undo :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
