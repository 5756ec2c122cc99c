"""What a person says of a run, to which a plan keeps. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_strategy.parallelize.offload import Offload, check_offload, refusal
from hetero_strategy.parallelize.per_module import check_blocks
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.shape import ModelShape


@dataclass(frozen=True)
class Given:
    """Options that every candidate has."""

    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    """What runs again; empty: the plan chooses."""
    offload: Mapping[str, Offload] = field(default_factory=dict)
    """What is in host memory between forward and backward."""
    compile: Collection[str] = ()
    """Modules whose blocks are compiled."""
    accumulated: int = 1
    """Global batches of an optimizer step."""
    reshard_after_forward: str = "auto"
    """When FSDP frees what it gathered."""

    def check(self, shape: ModelShape) -> None:
        """Refuse what no layout can run.

        Raises:
            ConfigError: a module that there is not or that has no blocks, or see :func:`check_offload`.
        """
        blocks = {name: module.has_blocks for name, module in shape.modules.items()}
        check_blocks("recompute", self.recompute, blocks)
        check_blocks("offload", self.offload, blocks)
        check_offload(self.offload, self.recompute, self.compile, dict.fromkeys(blocks, 1))

    def recomputed(self, module: str, chosen: int) -> Recompute | None:
        """What of a module runs again, if a plan chooses one of so many blocks; 0: none."""
        return self.recompute.get(module) if self.recompute else Recompute(chosen) if chosen else None

    def allows(self, module: str, tp: int, chosen: int) -> bool:
        """Whether a run takes a module with a degree of tensor parallelism, recomputed if a plan chooses so."""
        if chosen and self.recompute:
            return False
        how = self.recomputed(module, chosen)
        return module not in self.offload or refusal(module, how, module in self.compile, tp) is None

    def __str__(self) -> str:
        """As a person says it, after what is said of a plan; empty: nothing is given."""
        options = {"recompute": self.recompute, "offload": self.offload}
        said: dict[str, Any] = {
            option: {name: str(how) for name, how in of.items()} for option, of in options.items() if of
        }
        if self.accumulated > 1:
            said["accumulate_grad_batches"] = self.accumulated
        return ", with " + " and ".join(f"{option}={of}" for option, of in said.items()) if said else ""
