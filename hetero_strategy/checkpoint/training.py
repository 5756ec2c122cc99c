"""Save and load a training run: parameters, optimizers and everything else in Lightning's checkpoint."""

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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hetero_strategy.checkpoint.all_or_none import AllOrNone, refuse_unequal
from hetero_strategy.checkpoint.exporting import EXPORT_KEY, export_record
from hetero_strategy.checkpoint.folder import StoredTensor, describe, remove
from hetero_strategy.checkpoint.loading import load
from hetero_strategy.checkpoint.optimizer_state import (
    States,
    from_tensors,
    part_of,
    room_for_states,
    room_for_unknown_states,
    to_tensors,
)
from hetero_strategy.checkpoint.saving import Checkpointer
from hetero_strategy.errors import CheckpointError
from hetero_strategy.model.adapter import Adapter

FROM_WEIGHTS = "or begin with its weights: trainer.validate(..., ckpt_path=...), then trainer.fit(...)"
KERNEL_OPTIONS = ("foreach", "fused", "capturable")
"""Options of an optimizer that follow from the layout and the device, not from the checkpoint."""

LIGHTNING_KEYS = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks",
              "optimizer_states", "lr_schedulers", "hparams_name", "hyper_parameters", "hparams_type"}  # fmt: skip
"""Keys that Lightning itself puts into a checkpoint."""


class TrainingState:
    """The owned tensors of a run by global name, saved to and filled from checkpoints of any layout.

    Args:
        prefix: FQN of the model inside the LightningModule, such as ``"model"``.
        modules: all modules of the model by name; this rank owns the tensors that are not on the meta device.
        group: gloo group of all ranks that nothing else uses.
        asynchronous: write checkpoints in the background.
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
        """Return all parameters and persistent buffers by global name; those that other ranks own are on meta."""
        return {
            start + fqn: tensor.detach()
            for start, module in self._modules.items()
            for fqn, tensor in module.state_dict(keep_vars=True).items()
        }

    def rest_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the persistent state of ``module`` outside the model by global name: buffers, metrics and the like.

        Values are tensors, or whatever a metric or ``get_extra_state`` returns.
        """
        # a plain dict as destination goes into no file: the model does not warn that it lacks what other ranks own
        state: dict[str, Any] = nn.Module.state_dict(module, destination={})
        return {name: value for name, value in state.items() if not name.startswith(tuple(self._modules))}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return ``optimizer.state_dict()`` for a save: with names in place of numbers, as in torch's distributed
        checkpoints, and only with the states of owned parameters.
        """
        state_dict = dict(optimizer.state_dict())
        groups = state_dict.get("param_groups", [])
        sizes, own = ([len(g.get("params", ())) for g in of] for of in (groups, optimizer.param_groups))
        if groups and sizes != own:
            raise CheckpointError(
                f"checkpoint: state_dict() of {type(optimizer).__name__} has groups of {sizes} parameters, and the"
                f" optimizer of {own}; leave 'param_groups' as Optimizer.state_dict() makes it"
            )
        numbers = [number for group in groups for number in group["params"]]
        numbered = dict(zip(numbers, (p for g in optimizer.param_groups for p in g["params"]), strict=False))
        states: dict[str, Any] = {}
        for number, state in state_dict.get("state", {}).items():
            p = numbered.get(number)
            if p is None or id(p) not in self._every_name:
                states.setdefault("", {})[number] = state
            elif id(p) in self._names:
                states[self._names[id(p)]] = state
        return state_dict and state_dict | {"state": states, "param_groups": self._with_names(groups, optimizer)}

    def _names_in(self, optimizer: Optimizer) -> set[str]:
        return {self._every_name.get(id(p), "") for group in optimizer.param_groups for p in group["params"]}

    def _with_names(self, groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return groups of options with the global names of the optimizer's parameters."""
        own = [[self._every_name.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        return [{**group, "params": own[i] if i < len(own) else []} for i, group in enumerate(groups)]

    def save(self, checkpoint: dict[str, Any], path: Path, rest: Collection[str] = ()) -> None:
        """Write Lightning's checkpoint. A collective of all ranks.

        Args:
            rest: names of the module's own state outside the model.
        """
        began = time.perf_counter()
        self.finalize()
        state_dict, known = checkpoint.pop("state_dict"), self._every_tensor().keys()
        optimizers = checkpoint.pop("optimizer_states", None) or []
        more = [{key: value for key, value in of.items() if key not in ("state", "param_groups")} for of in optimizers]
        added = {key: value for key, value in checkpoint.items() if key not in LIGHTNING_KEYS}
        added |= {
            f"state_dict()[{name!r}]": value
            for name, value in state_dict.items()
            if name not in known and name not in rest
        }
        added |= {f"optimizer {i}, {key!r}": value for i, of in enumerate(more) for key, value in of.items()}
        team = AllOrNone.of(self._group)
        team.together(lambda: _check_names(state_dict, known))
        refuse_unequal(team, {**checkpoint.get("callbacks", {}), **added})
        tensors = {
            f"model.{name}": value
            for name, value in state_dict.items()
            if isinstance(value, torch.Tensor) and not value.is_meta and (name in known or team.rank == 0)
        }
        states = team.together(lambda: [to_tensors(i, of.get("state", {})) for i, of in enumerate(optimizers)])
        for i, named in enumerate(states):
            tensors |= {f"optim.{i}.{name}": value for name, value in named.items()}
        metadata = {
            **checkpoint,
            "extra_state": {name: value for name, value in state_dict.items() if not isinstance(value, torch.Tensor)},
            "param_groups": [
                [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in of.get("param_groups", [])
                ]
                for of in optimizers
            ],
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
        in_place: bool = True,
        strict: bool = True,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Fill owned parameters, and return the rest of Lightning's checkpoint. A collective of all ranks.

        Its ``optimizer_states`` have the form of :meth:`optimizer_state`, for :meth:`load_optimizers`.

        Args:
            rest: :meth:`rest_of` the module, which is not filled: its saved values are returned as ``state_dict``.
            in_place: fill the parameters. False: leave them alone and return all saved tensors in ``state_dict`` under
                their saved names. A tensor that the model lacks, or has in another shape, is whole. Of any other tensor
                this rank gets its own part; tensors of other ranks are on meta.
            strict: argument of :func:`~hetero_strategy.checkpoint.load`.
            verify: argument of :func:`~hetero_strategy.checkpoint.load`.
        """
        self.finalize()
        for module in self._modules.values():
            if module.routing is not None:
                module.routing.forget()
        rest, model = rest or {}, self._every_tensor()
        stored: Mapping[str, StoredTensor] = {}
        if optimizers or rest or not in_place:
            stored = AllOrNone.of(self._group).from_one(lambda: describe(path)).tensors
        outside = {
            name: _room_for(stored.get(f"model.{name}"), value)
            for name, value in rest.items()
            if isinstance(value, torch.Tensor) and (in_place or f"model.{name}" in stored)
        }
        if not in_place:
            names = [key.removeprefix("model.") for key in stored if key.startswith("model.")]
            model = {name: _room_owned(stored[f"model.{name}"], model.get(name)) for name in names if name not in rest}
        tensors = {f"model.{name}": value for name, value in {**model, **outside}.items() if not value.is_meta}
        states: list[States] = []
        for i, optimizer in enumerate(optimizers):
            unknown = room_for_unknown_states(i, stored, self._names_in(optimizer))
            if in_place:
                _refuse_lost(path, i, [*unknown])
            states.append(room_for_states(i, optimizer, stored, self._names) | unknown)
            tensors |= {f"optim.{i}.{name}.{k}": v for name, of in states[i].items() for k, v in of.items()}
        with torch.no_grad():
            loaded = load(tensors, path, strict=strict, verify=verify, process_group=self._group)
        extra = loaded.metadata.pop("extra_state", {})
        if strict and in_place and (unmatched := {*extra} ^ ({*rest} - {*outside})):
            raise CheckpointError(
                f"{path}: only one of checkpoint and module has a state {', '.join(sorted(unmatched))}; build the"
                " module it was saved from, or set strict_loading=False in the LightningModule"
            )
        groups, more = loaded.metadata.pop("param_groups", []), loaded.metadata.pop("optimizer_extra", [])
        weights_alone = not groups and "lr_schedulers" not in loaded.metadata
        if optimizers and weights_alone and in_place:
            raise CheckpointError(
                f"{path} holds the model alone (save_weights_only) and no optimizer to go on with; save whole"
                f" checkpoints, {FROM_WEIGHTS}"
            )
        loaded.metadata.pop(EXPORT_KEY, None)
        if loaded.rank_state is not None:
            restore_random_state(loaded.rank_state)
        optimizer_states = [dict(of) for of in more] or [{} for _ in groups]
        for i, (of, options) in enumerate(zip(optimizer_states, groups, strict=True)):
            filled = states[i] if i < len(states) else {}
            of["state"] = {name: from_tensors(named) for name, named in filled.items()}
            of["param_groups"] = self._with_names(options, optimizers[i]) if i < len(optimizers) else options
        if not weights_alone:
            loaded.metadata["optimizer_states"] = optimizer_states
        return {**loaded.metadata, "state_dict": {**({} if in_place else model), **outside, **extra}}

    def load_optimizers(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], path: str) -> None:
        """Load the states that :meth:`load` returned, through the ``load_state_dict`` of each optimizer.

        Args:
            path: path of the checkpoint, for messages.
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
                if lacks and has:  # one of them alone is no fault: versions of torch add options, schedulers leave some
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
            | {key: group[key] for key in KERNEL_OPTIONS if key in group}
            for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})
        own = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
        if not own and getattr(optimizer.load_state_dict, "__func__", None) is Optimizer.load_state_dict:
            for number, state in states.items():  # torch has cast states that had a dtype of their own
                optimizer.state[parameters[number]].update(state)

    def finalize(self) -> None:
        """Wait for the background save, if any; raise CheckpointError if it failed."""
        self._checkpointer.finalize()

    def remove(self, path: Path, first_rank: bool) -> None:
        """Delete a checkpoint. All ranks call this, and the first rank deletes."""
        began = time.perf_counter()
        self.finalize()
        if first_rank:
            remove(path)
        self.seconds += time.perf_counter() - began


def _check_names(state_dict: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse a state_dict with a rank's part of a tensor under a name that no layout knows, or with a known name but no
    tensor.
    """
    for name, value in state_dict.items():
        if name in known and not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"checkpoint: state_dict() has a {type(value).__name__} in the place of parameter or buffer {name!r};"
                " a checkpoint holds tensors under their own names: leave it as it is, or out"
            )
        if name not in known and isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.is_meta):
            raise CheckpointError(
                f"checkpoint: state_dict() has {name!r}, a tensor of which ranks have parts, under a name that the"
                " module does not have, so that no other layout could load it; leave names as they are, and rename"
                " in an export or in load_state_dict()"
            )


def _refuse_lost(path: str | Path, number: int, names: Sequence[str]) -> None:
    """Refuse saved states of parameters that an optimizer does not have."""
    if names:
        raise CheckpointError(
            f"{path}: optimizer {number} was saved with states of {names[0]!r} ({len(names)} in all), which is none of"
            " its parameters now; resume with the same model and configure_optimizers, or without states:"
            " checkpoint['optimizer_states'] = [] in on_load_checkpoint"
        )


def _room_for(saved: StoredTensor | None, value: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor in its saved shape; a metric's state may have another shape now."""
    return value.clone() if saved is None else torch.empty(saved.shape, dtype=saved.dtype, device=value.device)


def _room_owned(saved: StoredTensor, value: torch.Tensor | None) -> torch.Tensor:
    """Allocate this rank's part of a saved tensor, or the whole one if the model does not have it in this shape."""
    if value is not None and tuple(value.shape) == saved.shape:
        return torch.empty_like(value)
    return torch.empty(saved.shape, dtype=saved.dtype, device="meta" if value is not None and value.is_meta else None)


def random_state() -> dict[str, Any]:
    """Return this process's random number states."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set this process's random number states to a result of :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
