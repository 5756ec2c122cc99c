"""Keep activations of a choice of a module's blocks in host memory between a forward and its backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.parallelize.host_memory import HostMemory, apply_offload
from hetero_strategy.parallelize.recompute import Recompute, SomeBlocks
from hetero_strategy.parallelize.transform import OnPaper, Site, Transform


@dataclass(frozen=True)
class Offload(SomeBlocks):
    """Activations of a choice of a module's blocks are in host memory between a forward and its backward."""

    name: ClassVar[str] = "offload"
    moves: ClassVar[bool] = True

    @override
    def faults(self, module: OnPaper, layout: ModuleLayout, others: Mapping[str, Transform]) -> Iterator[str]:
        again = others.get(Recompute.name)
        assert isinstance(again, Recompute | None)
        if again is not None and (again.whole or again.keeps_matmuls):
            why = "keeps nothing in its blocks" if again.whole else "keeps what torch does not let go"
            fix = "set recompute to 'all' or 'every 2'"
        elif again is not None and "compile" in others and layout.tp > 1:
            why = f"with compile and tp={layout.tp} compares compiled code with that of other tensors"
            fix = "leave recompute or compile out"
        else:
            return
        yield f"with recompute='{again.setting}', which {why}; {fix}, or leave offload out"

    @override
    def apply(self, stages: Sequence[Adapter], site: Site) -> None:
        host = HostMemory(site.device)
        for stage in stages:
            apply_offload(stage, self.chosen(stage, site.blocks), host)
