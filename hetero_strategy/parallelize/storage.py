"""Dtypes in which a module's tensors are kept: precision belongs to storage, there is no autocast region (law 11).

Traits of a parameter, such as whether it trains, must stay when parallelising replaces the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from hetero_strategy.errors import ConfigError, ModelError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter


@dataclass(frozen=True)
class Traits:
    """The properties of one parameter besides its values."""

    shape: torch.Size
    """Shape of the whole parameter."""
    dtype: torch.dtype
    requires_grad: bool
    hooks: bool
    """Whether a hook is called with its gradient."""
    attributes: dict[str, Any]
    """Attributes that were set on the tensor, such as a factor of the learning rate."""

    @staticmethod
    def of(parameter: nn.Parameter) -> Traits:
        """Return the traits of a parameter as it is now."""
        hooks = bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
        return Traits(parameter.shape, parameter.dtype, parameter.requires_grad, hooks, dict(vars(parameter)))


@dataclass(frozen=True)
class Storage:
    """The dtypes in which the parameters of a model are kept, compute and are reduced.

    Trained parameters are kept in ``master``, with their gradients and the optimizer's states. They compute in
    ``compute``, in which FSDP2 gathers them or, if one rank has them all, copies are made (``parallelize.copies``).
    Frozen parameters are kept in ``compute``. Rows on the edges and between stages are in ``compute``.
    """

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    keep: tuple[str, ...] = ()
    """Patterns of parameters, such as ``llm.*.router.*``, whose layers compute in ``master``."""

    @property
    def mixed(self) -> bool:
        """Return whether trained parameters compute in another dtype than they are kept in."""
        return self.compute != self.master

    @property
    def narrow(self) -> torch.dtype | None:
        """Return the dtype in which modules compute, if narrower than fp32."""
        return self.compute if self.compute.itemsize < 4 else None

    def kept(self, module: str, adapter: nn.Module) -> list[nn.Module]:
        """Return the layers of a module that compute in ``master``: those that hold a parameter of :attr:`keep`."""
        layers: dict[int, nn.Module] = {}
        for fqn, _ in adapter.named_parameters():
            if any(fnmatchcase(f"{module}.{fqn}", pattern) for pattern in self.keep):
                layer = adapter.get_submodule(fqn.rpartition(".")[0])
                layers[id(layer)] = layer
        return list(layers.values())

    def check(self, modules: Mapping[str, Adapter]) -> None:
        """Refuse patterns that match nothing, or a weight that two layers share."""
        if self.keep and not self.mixed:
            raise ConfigError(
                "HeteroStrategy: keep_fp32 needs precision='bf16-mixed' or '16-mixed'; every parameter already"
                f" computes in {str(self.compute).removeprefix('torch.')}"
            )
        named = {name: module.named_parameters(remove_duplicate=False) for name, module in modules.items()}
        names = {f"{name}.{fqn}" for name, parameters in named.items() for fqn, _ in parameters}
        for pattern in self.keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"HeteroStrategy: keep_fp32 names {pattern!r}, but no parameter is called so; they are called such"
                    f" as {', '.join(sorted(names)[:3])}"
                )
            for name, module in modules.items():
                if module in self.kept(name, module):
                    raise ModelError(
                        f"module '{name}': keep_fp32={pattern!r} names a parameter that lies in no layer of it; put it"
                        " into one, or write a narrower pattern"
                    )
                tied = module.tied_weight()
                if tied is not None and any(fnmatchcase(f"{name}.{fqn}", pattern) for fqn in tied):
                    raise ModelError(
                        f"module '{name}': keep_fp32 names {tied[0]}, which is {tied[1]} too; set"
                        " tie_word_embeddings=false or leave it out"
                    )

    def store(self, module: str, adapter: Adapter, traits: Mapping[str, Traits]) -> dict[str, Traits]:
        """Keep frozen parameters in the dtype in which they compute, and no parameter in fewer bytes than it computes
        or trains in, whatever dtype it was loaded in.

        Call it while the module is on the meta device.

        Returns:
            The traits of all parameters as they now are.
        """
        changed = dict(traits)
        kept = {id(p) for layer in self.kept(module, adapter) for p in layer.parameters(recurse=False)}
        for fqn, parameter in adapter.named_parameters():
            precise = parameter.requires_grad or id(parameter) in kept
            dtype = self.master if precise else self.compute
            widen = parameter.dtype in _PLAIN and parameter.itemsize < dtype.itemsize
            if widen or (self.mixed and not precise and parameter.is_floating_point()):
                parameter.data = parameter.data.to(dtype)
                changed[fqn] = replace(changed[fqn], dtype=dtype)
        return changed

    def casts(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether any of these parameters is kept in another dtype than it computes in."""
        return self.mixed and any(p.requires_grad for p in parameters)

    def copies(self, parameters: Iterable[nn.Parameter], layout: ModuleLayout) -> bool:
        """Return whether a stage is cast on one rank alone, where nothing is gathered or summed."""
        return len(layout.ranks) == layout.pp and self.casts(parameters)


_PLAIN = (torch.float16, torch.bfloat16, torch.float32)
FP32 = Storage()


def restore_traits(before: Mapping[str, Traits], parameters: Mapping[str, nn.Parameter]) -> None:
    """Give new parameters the ``requires_grad`` and attributes of the parameters that they replace.

    Torch's sequence parallel style forgets that a parameter is frozen, and moving one off the meta device forgets its
    attributes.
    """
    for name, parameter in parameters.items():
        if name in before:
            parameter.requires_grad_(before[name].requires_grad)
            parameter.__dict__.update(before[name].attributes)


def check_traits(module: str, before: Mapping[str, Traits], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters whose traits have changed."""
    for name, parameter in parameters.items():
        if name not in before:
            raise ModelError(f"module '{module}': parallelising made a parameter '{name}' that was not there before")
        was, now = asdict(before[name]), asdict(Traits.of(parameter))
        now["attributes"] = {key: value for key, value in now["attributes"].items() if key in was["attributes"]}
        for trait, value in was.items():
            if value != now[trait]:
                raise ModelError(
                    f"module '{module}': {trait} of parameter '{name}' was {value} and is {now[trait]} once it is"
                    " parallelised; set it in another way, such as MultimodalModel(freeze=...), or change gradients in"
                    " on_after_backward"
                )
