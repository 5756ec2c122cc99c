"""In which dtypes a module's tensors are kept: precision belongs to storage, there is no autocast region (law 11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from hetero_strategy.errors import ConfigError, ModelError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.traits import Traits


@dataclass(frozen=True)
class Storage:
    """In which dtypes the parameters of a model are kept, compute and are reduced.

    What trains is kept in ``master``, as are its gradients and the optimizer's states; it computes in ``compute``, in
    which FSDP2 gathers it or, where one rank has it all, copies are made (``parallelize.copies``). What is frozen is
    kept in ``compute`` at once. Rows on the edges and between stages are in ``compute``.
    """

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    keep: tuple[str, ...] = ()
    """Patterns of parameters, such as ``llm.*.router.*``, whose layers compute in ``master``."""

    @property
    def mixed(self) -> bool:
        """Whether what trains computes in another dtype than it is kept in."""
        return self.compute != self.master

    @property
    def narrow(self) -> torch.dtype | None:
        """What modules compute in, where that is less than fp32."""
        return self.compute if self.compute.itemsize < 4 else None

    def kept(self, module: str, adapter: nn.Module) -> list[nn.Module]:
        """The layers of a module that compute in ``master``: those that hold a parameter of :attr:`keep`."""
        layers: dict[int, nn.Module] = {}
        for fqn, _ in adapter.named_parameters():
            if any(fnmatchcase(f"{module}.{fqn}", pattern) for pattern in self.keep):
                layer = adapter.get_submodule(fqn.rpartition(".")[0])
                layers[id(layer)] = layer
        return list(layers.values())

    def check(self, modules: Mapping[str, Adapter]) -> None:
        """Refuse patterns that name nothing, or a weight that two layers share.

        Raises:
            ConfigError: ``keep`` without a mixed precision, or a pattern that no parameter has.
            ModelError: the weight of an embedding that is the head's too.
        """
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
        """Let what is frozen be kept in the dtype it computes in, and nothing in one of fewer bytes than it computes
        or trains in, whatever it was loaded in; call it while the module is on the meta device.

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
        """Whether any of these parameters is kept in another dtype than it computes in."""
        return self.mixed and any(p.requires_grad for p in parameters)

    def copies(self, parameters: Iterable[nn.Parameter], layout: ModuleLayout) -> bool:
        """Whether a stage of these parameters is cast on one rank alone, where nothing is gathered or summed."""
        return len(layout.ranks) == layout.pp and self.casts(parameters)


_PLAIN = (torch.float16, torch.bfloat16, torch.float32)
FP32 = Storage()
