"""Training loops that a person would write without this package: the peers of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hetero_strategy.loading.batch import Batch
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.inputs import IGNORE, SequenceInputs
from hetero_strategy.zoo.titan import TitanLlama, _titan

LR = 1e-4


def by_hand(
    make_model: Callable[[], MultimodalModel], device: torch.device, losses: list[Tensor], *, backend: str | None
) -> Callable[[Iterable[Batch]], None]:
    """The same modules, head and loss in FSDP2 over a group of one, which keeps fp32 and computes in bf16; one backward
    for each microbatch; fused AdamW. With a ``backend`` blocks are compiled by it.
    """

    def train(loader: Iterable[Batch]) -> None:
        model = make_model().to(device)
        for module in model.modules_by_name.values():
            module.compute_dtype = torch.bfloat16
            _sharded(module, module.blocks().values(), device, backend, dynamic=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        orders: dict[tuple[int, int], Tensor | None] = {}
        for batch in loader:
            moved, total = batch.to(device), torch.zeros((), device=device)
            optimizer.zero_grad()
            for number in range(len(batch.inputs["llm"])):
                key = id(batch), number
                if key not in orders and "vision" in batch.inputs:
                    order = batch.local_rows("vision", number, "llm", number)
                    orders[key] = None if order is None else order.to(device)
                loss = _loss(model, moved, number, orders.get(key)) / batch.plan.normalizer("llm")
                loss.backward()
                total += loss.detach()
            optimizer.step()
            losses.append(total)

    return train


def _loss(model: MultimodalModel, batch: Batch, number: int, order: Tensor | None) -> Tensor:
    """Summed over one microbatch."""
    rows = {}
    if "vision" in batch.inputs:
        made = model.modules_by_name["vision"](batch.inputs["vision"][number])
        rows["vision", number] = made if order is None else made.index_select(0, order)
    return model.modules_by_name["llm"](batch.inputs["llm"][number], rows).loss_sum


def of_titan(
    make_model: Callable[[], MultimodalModel], device: torch.device, length: int, *, backend: str | None
) -> Callable[[Iterable[Batch]], None]:
    """torchtitan's own Transformer over sequences of one length, with dense causal attention, whole logits and torch's
    cross entropy; sharded and stepped as :func:`by_hand`.
    """

    def train(loader: Iterable[Batch]) -> None:
        llm = make_model().modules_by_name["llm"]
        assert isinstance(llm, TitanLlama)
        with torch.device("meta"):
            model: Any = _titan().Transformer(llm.args)
        del llm
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=device)
        _sharded(model, model.layers.values(), device, backend, dynamic=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        for batch in loader:
            moved = batch.to(device)
            optimizer.zero_grad()
            for inputs in moved.inputs["llm"]:
                assert isinstance(inputs, SequenceInputs)
                logits = model(inputs.ids.view(-1, length)).flatten(0, 1)
                loss = F.cross_entropy(logits.float(), inputs.labels, ignore_index=IGNORE, reduction="sum")
                (loss / batch.plan.normalizer("llm")).backward()
            optimizer.step()

    return train


def _sharded(
    module: nn.Module, blocks: Iterable[nn.Module], device: torch.device, backend: str | None, *, dynamic: bool
) -> None:
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        if backend:
            block.compile(backend=backend, dynamic=dynamic)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
