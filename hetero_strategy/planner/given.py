"""What a person says of a run, to which a plan keeps. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hetero_strategy.errors import ConfigError
from hetero_strategy.parallelize.offload import Offload, check_offload, refusal
from hetero_strategy.parallelize.per_module import check_blocks
from hetero_strategy.parallelize.recompute import Recompute
from hetero_strategy.planner.shape import ModelShape, ModuleShape


def check_schedule(schedule: str) -> None:
    """Refuse a schedule that plans cannot keep to.

    Raises:
        ConfigError: it is for layouts with virtual stages.
    """
    if schedule in ("interleaved_1f1b", "zbv"):
        raise ConfigError(
            f"schedule={schedule!r}: plans choose virtual stages and the schedule that goes with them; leave it out, or"
            " give layouts"
        )


@dataclass(frozen=True)
class Given:
    """Options that every candidate has."""

    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    """What runs again; empty: the plan chooses."""
    offload: Mapping[str, Offload] = field(default_factory=dict)
    """What is in host memory between forward and backward."""
    compile: Mapping[str, str] = field(default_factory=dict)
    """Modules whose blocks are compiled, and by which backend."""
    accumulated: int = 1
    """Global batches of an optimizer step."""
    reshard_after_forward: str = "auto"
    """When FSDP frees what it gathered."""
    cached: Collection[str] = ()
    """Modules whose rows are read from disk."""
    microbatch_rows: Mapping[str, int | Literal["equal"]] = field(default_factory=dict)
    """``encoder_microbatch_rows`` of the data module."""

    def check(self, shape: ModelShape) -> None:
        """Refuse what no layout can run.

        Raises:
            ConfigError: a module that there is not or that has no blocks, or see :func:`check_offload`.
        """
        blocks = {name: module.has_blocks for name, module in shape.modules.items()}
        check_blocks("recompute", self.recompute, blocks)
        check_blocks("offload", self.offload, blocks)
        check_offload(self.offload, self.recompute, self.compile, dict.fromkeys(blocks, 1))

    def narrowed(self, shape: ModelShape) -> ModelShape:
        """Without tensor parallelism of modules that a run takes whole alone: those whose rows are read from disk, and
        compiled ones that torch's compiler fails on.
        """

        def whole(name: str, module: ModuleShape) -> bool:
            again = self.recompute.get(name)
            keeps = again is not None and again.keeps_matmuls
            return name in self.cached or (name in self.compile and (keeps or not module.tp_compiles))

        modules = {n: replace(m, tp=(1,)) if whole(n, m) else m for n, m in shape.modules.items()}
        return replace(shape, modules=modules)

    def recomputed(self, module: str, chosen: int) -> Recompute | None:
        """What of a module runs again, if a plan chooses one of so many blocks; 0: none."""
        return self.recompute.get(module) if self.recompute else Recompute(chosen) if chosen else None

    def allows(self, module: str, tp: int, chosen: int) -> bool:
        """Whether a run takes a module with a degree of tensor parallelism, recomputed if a plan chooses so."""
        if chosen and self.recompute:
            return False
        if chosen and tp == 1 and self.compile.get(module) == "eager":  # which a run refuses
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
