"""Training loops that a person would write without this package: the peers of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.training import Orders, microbatch_loss
from hetero_strategy.loading.batch import Batch
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.inputs import IGNORE, SequenceInputs
from hetero_strategy.zoo.titan import TitanLlama, _titan

LR = 1e-4


class Masters:
    """Parameters in bf16 beside fp32 masters, in which gradients add up and which AdamW steps: mixed precision by hand.

    On one device this casts each weight once a step. FSDP2 over a group of one casts, copies and reduces every block's
    weights in every microbatch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._copies = [p for p in module.parameters() if p.requires_grad]
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._copies]
        for parameter in module.parameters():  # alone: buffers, such as complex rotations, keep their dtype
            parameter.data = parameter.data.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self._masters, lr=LR, fused=True)

    @torch.no_grad()
    def fold(self) -> None:
        """Add the gradients of a backward to the masters' and free them."""
        made: tuple[list[Tensor], list[Tensor]] = [], []
        sums: tuple[list[Tensor], list[Tensor]] = [], []
        for copy, master in zip(self._copies, self._masters, strict=True):
            (gradient, copy.grad), total, into = (copy.grad, None), master.grad, sums
            if gradient is None:
                continue
            if total is None:
                master.grad = total = torch.empty_like(gradient, dtype=torch.float32)
                into = made
            into[0].append(total)
            into[1].append(gradient)
        if made[0]:
            torch._foreach_copy_(*made)
        if sums[0]:
            torch._foreach_add_(*sums)

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters and copy them into the parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self._copies, self._masters)


class Sharded:
    """Parameters in FSDP2 over a group of one, which keeps fp32 and computes in bf16."""

    def __init__(self, module: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def fold(self) -> None:
        """Do nothing: FSDP2 adds gradients up."""

    def step(self) -> None:
        """Step the parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def by_hand(
    make_model: Callable[[], MultimodalModel],
    device: torch.device,
    losses: list[Tensor],
    *,
    backend: str | None,
    fsdp: bool,
) -> Callable[[Iterable[Batch]], None]:
    """Return a loop over the same modules, head and loss: one backward for each microbatch, fused AdamW.

    Args:
        make_model: makes it in fp32.
        device: to train on.
        losses: filled, one of each step.
        backend: compiles blocks; None: they are not compiled.
        fsdp: whether parameters are in FSDP2 over a group of one, otherwise in bf16 beside :class:`Masters`.
    """  # fmt: skip

    def train(loader: Iterable[Batch]) -> None:
        model = make_model().to(device)
        for module in model.modules_by_name.values():
            module.compute_dtype = torch.bfloat16
            _compile(module.blocks().values(), backend, dynamic=True)
            if fsdp:
                _shard(module, module.blocks().values(), device)
        weights, orders = (Sharded if fsdp else Masters)(model), Orders()
        for batch in loader:
            moved, total = batch.to(device), torch.zeros((), device=device)
            for number in range(len(batch.inputs["llm"])):
                loss = microbatch_loss(model, batch, moved, number, orders, device)
                loss.backward()
                weights.fold()
                total += loss.detach()
            weights.step()
            losses.append(total)

    return train


def of_titan(
    make_model: Callable[[], MultimodalModel], device: torch.device, length: int, *, backend: str | None, fsdp: bool
) -> Callable[[Iterable[Batch]], None]:
    """Return a loop over torchtitan's own Transformer, with sequences of one length and dense causal attention.

    Logits are whole and the loss is torch's cross entropy, compiled where blocks are, as torchtitan compiles it.
    Parameters are held and stepped as by :func:`by_hand`.
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
        _compile(model.layers.values(), backend, dynamic=False)
        if fsdp:
            _shard(model, model.layers.values(), device)
        weights = (Sharded if fsdp else Masters)(model)
        loss_sum = torch.compile(_loss_sum, backend=backend) if backend else _loss_sum
        for batch in loader:
            moved = batch.to(device)
            for inputs in moved.inputs["llm"]:
                assert isinstance(inputs, SequenceInputs)
                logits = model(inputs.ids.view(-1, length)).flatten(0, 1)
                (loss_sum(logits, inputs.labels) / batch.plan.normalizer("llm")).backward()
                weights.fold()
            weights.step()

    return train


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def _compile(blocks: Iterable[nn.Module], backend: str | None, *, dynamic: bool) -> None:
    if backend:
        for block in blocks:
            block.compile(backend=backend, dynamic=dynamic)


def _shard(module: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
