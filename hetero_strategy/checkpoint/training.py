"""What of a training run is saved, and how it comes back: the strategy's view of a checkpoint."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hetero_strategy.checkpoint.all_or_none import AllOrNone
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
        self._names = {
            id(parameter): start + fqn
            for start, module in self._modules.items()
            for fqn, parameter in module.named_parameters()
            if not parameter.is_meta
        }
        self._group = group
        self._asynchronous = asynchronous
        self._checkpointer = Checkpointer(group)
        self.seconds = 0.0
        """Seconds that this rank has spent on writing and removing checkpoints."""

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Return owned parameters and persistent buffers by global name."""
        return {
            start + fqn: tensor.detach()
            for start, module in self._modules.items()
            for fqn, tensor in module.state_dict(keep_vars=True).items()
            if not tensor.is_meta
        }

    def rest_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the persistent state of ``module`` beside the model's modules by global name: buffers, metrics, ...

        Values are tensors, or whatever a metric or ``get_extra_state`` returns.
        """
        # A destination of one's own has no metadata of torch: no file is made of it that a warning would be for.
        state: dict[str, Any] = nn.Module.state_dict(module, destination={})
        return {name: value for name, value in state.items() if not name.startswith(tuple(self._modules))}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the states of owned parameters by name, "" for those of none, and the hyperparameters of every group.
        A save looks at them.
        """
        states = {self._names[id(p)]: state for p, state in optimizer.state.items() if id(p) in self._names}
        if apart := {key: of for key, of in optimizer.state.items() if of and not isinstance(key, torch.Tensor)}:
            states[""] = apart
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return {"optimizer": type(optimizer).__name__, "states": states, "param_groups": groups}

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write Lightning's checkpoint. A collective of the world.

        Raises:
            CheckpointError: it cannot be written, or tensors of a callback, or that a module's ``on_save_checkpoint``
                adds, differ between ranks, or an optimizer has a state without a form; a previous one at ``path`` is
                untouched.
        """
        began = time.perf_counter()
        self.finalize()
        added = {key: value for key, value in checkpoint.items() if key not in LIGHTNINGS}
        team = AllOrNone.of(self._group)
        _refuse_apart(team, {**checkpoint.get("callbacks", {}), **added})
        owned = checkpoint.pop("state_dict")
        tensors = {f"model.{name}": value for name, value in owned.items() if isinstance(value, torch.Tensor)}
        optimizers = checkpoint.pop("optimizer_states", [])
        every = team.together(lambda: [to_tensors(of["optimizer"], of["states"]) for of in optimizers])
        for i, named in enumerate(every):
            tensors |= {f"optim.{i}.{name}": value for name, value in named.items()}
        metadata = {
            **checkpoint,
            "extra_state": {name: value for name, value in owned.items() if f"model.{name}" not in tensors},
            "param_groups": [state["param_groups"] for state in optimizers],
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
        strict: bool = True,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Fill owned parameters and optimizer state, and return the rest of Lightning's checkpoint. A collective.

        Optimizer state is allocated as the checkpoint describes it, so any optimizer works.

        Args:
            rest: :meth:`rest_of` the module; what the checkpoint has of it is returned as ``state_dict``.
            strict, verify: as in :func:`~hetero_strategy.checkpoint.load`.

        Raises:
            CheckpointError: there is none, it is damaged, or it was saved from another model.
        """
        self.finalize()
        rest = rest or {}
        tensors = {f"model.{name}": value for name, value in self.model_tensors().items()}
        stored: Mapping[str, StoredTensor] = {}
        if optimizers or rest:
            stored = AllOrNone.of(self._group).from_one(lambda: describe(path)).tensors
        states = [self._empty_state(i, optimizer, stored) for i, optimizer in enumerate(optimizers)]
        beside = {
            name: _room_for(stored.get(f"model.{name}"), value)
            for name, value in rest.items()
            if isinstance(value, torch.Tensor)
        }
        tensors |= {f"model.{name}": value for name, value in beside.items()}
        for i, state in enumerate(states):
            tensors |= {f"optim.{i}.{self._names[id(p)]}.{k}": v for p, s in state.items() for k, v in s.items()}
        with torch.no_grad():
            loaded = load(tensors, path, strict=strict, verify=verify, process_group=self._group)
        extra = loaded.metadata.pop("extra_state", {})
        if strict and (odd := {*extra} ^ ({*rest} - {*beside})):
            raise CheckpointError(
                f"{path}: only one of checkpoint and module has a state {', '.join(sorted(odd))}; build the module it"
                " was saved from, or set strict_loading=False in the LightningModule"
            )
        groups = loaded.metadata.pop("param_groups", [])
        if optimizers and not groups:
            raise CheckpointError(
                f"{path} holds the model alone (save_weights_only) and no optimizer to go on with; save whole"
                f" checkpoints, {FROM_WEIGHTS}"
            )
        loaded.metadata.pop(EXPORT_KEY, None)
        for i, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            saved = groups[i] if i < len(groups) else []
            if len(saved) != len(optimizer.param_groups):
                raise CheckpointError(
                    f"{path}: optimizer {i} has {len(optimizer.param_groups)} parameter groups, the checkpoint"
                    f" {len(saved)}; resume with the same configure_optimizers"
                )
            for group, options in zip(optimizer.param_groups, saved, strict=True):
                lacks = optimizer.defaults.keys() - options.keys()
                has = {key for key in options.keys() - group.keys() if not key.endswith(("_lr", "_momentum"))}
                if lacks and has:  # versions of torch add options, and schedulers leave some
                    raise CheckpointError(
                        f"{path} was saved with another optimizer than {type(optimizer).__name__} (with"
                        f" {', '.join(sorted(has))}, without {', '.join(sorted(lacks))}); resume with the same"
                        f" configure_optimizers, {FROM_WEIGHTS}"
                    )
            optimizer.state.clear()  # as Optimizer.load_state_dict: what is loaded takes the place of what was
            optimizer.state.update({p: from_tensors(named) for p, named in state.items()})
            for group, options in zip(optimizer.param_groups, saved, strict=True):
                group.update({key: value for key, value in options.items() if key not in KERNELS})
        if loaded.rank_state is not None:
            restore_random_state(loaded.rank_state)
        return {"state_dict": beside | extra, "optimizer_states": [{} for _ in optimizers], **loaded.metadata}

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
        keys: dict[str, list[str]] = {}
        start = f"optim.{number}."
        for name in stored:
            if name.startswith(start):
                fqn, _, key = name.removeprefix(start).rpartition(".")
                keys.setdefault(fqn, []).append(key)
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


def random_state() -> dict[str, Any]:
    """Return this process's random number states."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def _refuse_apart(team: AllOrNone, states: Mapping[str, object]) -> None:
    """Refuse states whose tensors are not the same on all ranks, such as averages of the weights that a rank owns:
    rank 0's are saved, and all ranks would get those back. Single numbers are left out: ranks may round a score apart.
    """
    if team.size == 1:
        return
    digests = {name: digest for name, state in states.items() if (digest := _digest(state)) is not None}
    if not team.anywhere([bool(digests)])[0]:
        return
    first = team.from_one(lambda: digests)
    names = sorted(first)
    apart = team.anywhere([digests.get(name) != first[name] for name in names] + [digests.keys() != first.keys()])
    if any(apart):
        which = [name for name, differs in zip([*names, "one that is not on all ranks"], apart, strict=True) if differs]
        raise CheckpointError(
            f"checkpoint: tensors in the state of {', '.join(which)} differ between ranks, and rank 0's are kept for"
            " all; leave them out of its state_dict() or on_save_checkpoint(), or keep them the same on all ranks"
        )


def _digest(state: object) -> int | None:
    """Of all tensors of several numbers in a state; None if it has none."""
    leaves = (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor))
    strided = (leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_meta)  # others have no form
    tensors, digest = [leaf for leaf in strided if leaf.numel() > 1], 0
    for tensor in tensors:
        digest = zlib.crc32(repr((tensor.dtype, tensor.shape)).encode(), digest)
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
        digest = zlib.crc32(plain.view(torch.uint8).numpy().data, digest)
    return digest if tensors else None


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Undo :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
