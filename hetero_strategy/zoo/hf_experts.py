"""Experts of transformers' mixtures, whose weights are stacks of matrices: rows are routed by this library.

transformers' classes, parameters and routers stay. Its registry of experts' forwards gets one function, as the registry
of attention does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.model.experts import routed
from hetero_strategy.model.routing import Routing, count_choices

HF_EXPERTS = "hetero_routed"
"""Name of the function in transformers' registry."""
BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of a router's bias: in most families, and in AFMoE and LFM2."""


def use_routed_experts(model: nn.Module) -> None:
    """Set the registered function in every config of a model that has a field for it, also if it has no experts.

    Raises:
        ModelError: experts have another implementation in their config than ``"grouped_mm"``, which is transformers'
            default and computed here, too.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(HF_EXPERTS, _experts)
    for fqn, module in model.named_modules():
        chosen = getattr(getattr(module, "config", None), "_experts_implementation_internal", None)
        if hasattr(module, "_is_expert_parallel") and chosen not in (None, "grouped_mm", HF_EXPERTS):
            raise ModelError(
                f"{type(model).__name__}: {fqn} has experts_implementation={chosen!r} in its config, but experts run by"
                " grouped_mm here; leave it out"
            )
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = HF_EXPERTS


def expert_parts(model: nn.Module) -> dict[str, int]:
    """Return FQN -> number of experts of the modules that call the registered function and hold nothing but experts."""
    named = {fqn: part for fqn, part in model.named_modules() if hasattr(part, "_is_expert_parallel")}
    counts = {fqn: {p.shape[0] for p in part.parameters()} for fqn, part in named.items()}
    return {fqn: part.num_experts for fqn, part in named.items() if counts[fqn] == {part.num_experts}}


class _CheckedChoices(TorchFunctionMode):
    """A mode that refuses routers that choose no expert or more than there are."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self._who, self._config = type(model).__name__, config

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk):
            self._check(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _check(self, input: Tensor, k: int, dim: int = -1, **_: Any) -> None:
        count = input.shape[dim]
        if count and not 1 <= k <= count:
            fields = [name for name, value in self._config.to_dict().items() if f"{value}" == f"{k}"]
            named = " or ".join(name for name in fields if re.search("top_?k|per_tok|moe_k", name)) or "top_k"
            raise ModelError(
                f"{self._who}: {named}={k}, but its routers choose from {count}; use a number from 1 to {count}"
            )


@contextmanager
def routers_that_run(model: nn.Module, config: Any) -> Iterator[dict[str, str]]:
    """Collect routers that run: modules of which transformers can record ``router_logits``, and that return logits
    ``[T, experts]``, weights and experts of each row. FQN -> the function that made its "logits" if it is no matmul:
    ``"Softmax"``, ``"Sigmoid"``.

    Args:
        model: a model of transformers on the meta device.
        config: config of the language model.

    Raises:
        ModelError: in this context, a router chooses no expert, more than there are, or another number than the config
            says.
    """
    experts = max(expert_parts(model).values(), default=0)
    recorders = [getattr(type(part), "_can_record_outputs", None) or {} for part in model.modules()]
    records = [of["router_logits"] for of in recorders if "router_logits" in of]
    listed = [one for record in records for one in (record if isinstance(record, (list, tuple)) else [record])]
    classes = tuple({getattr(one, "target_class", one) for one in listed})
    ran: dict[str, str] = {}

    def note(fqn: str, router: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3 and output[0].shape[-1] == experts:
            per_row, visits = getattr(config, "num_experts_per_tok", None), output[2].shape[-1]
            if isinstance(per_row, int) and per_row != visits:  # not a list, one for each layer
                raise ModelError(
                    f"{type(model).__name__}: num_experts_per_tok={per_row}, but {fqn} chooses {visits}; set that"
                )
            with torch.enable_grad():  # for the graph, on the meta device
                ran[fqn] = _normalized_by(router.forward(*args, **kwargs)[0])

    named = [(fqn, part) for fqn, part in model.named_modules() if isinstance(part, classes)]
    handles = [part.register_forward_hook(partial(note, fqn), with_kwargs=True) for fqn, part in named]
    try:
        with _CheckedChoices(model, config):
            yield ran
    finally:
        for handle in handles:
            handle.remove()


def _normalized_by(logits: Tensor) -> str:
    """Return the name of the function that made a router's logits, if it is softmax or sigmoid; else nothing."""
    node = logits.grad_fn
    while node is not None and node.name() in ("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    name = "" if node is None else node.name().removesuffix("Backward0")
    return name if name in ("Softmax", "Sigmoid") else ""


def make_routing(
    who: str,
    model: nn.Module,
    routers: Mapping[str, str],
    config: Any,
    balance_loss: float | None,
    bias_step: float,
) -> Routing | None:
    """Let a model's routers count their choices; None: it has none.

    Args:
        routers: result of :func:`routers_that_run`.
        config: config of the language model.
        balance_loss: coefficient of the balance loss; None: transformers' own, 0 unless its config asks for the loss.
        bias_step: see :class:`Routing`.

    Raises:
        ModelError: the options are no numbers of at least 0, or the model has nothing that they change.
    """
    for name, value in (("balance_loss", balance_loss or 0), ("router_bias_step", bias_step)):
        if not 0 <= value < math.inf:
            raise ModelError(f"{who}: {name}={value!r}; use a number of at least 0")
    if balance_loss is None:
        wants_balance = getattr(config, "output_router_logits", False)
        balance_loss = float(getattr(config, "router_aux_loss_coef", None) or 0) if wants_balance and routers else 0.0
        if wants_balance and not balance_loss:
            rank_zero_warn(
                f"{who}: output_router_logits is true in its config, but its loss of routers is left out, because its"
                " routers or router_aux_loss_coef are not known here; with known routers give balance_loss=0.001"
            )
    biases = [bias for router in routers if (bias := _bias_of(model, router)) is not None]
    if balance_loss and not routers:
        raise ModelError(f"{who}: balance_loss={balance_loss}, but it has no routers that are known here; leave it out")
    made_by = {*routers.values()}
    if balance_loss and (len(made_by) > 1 or not made_by <= {"", "Softmax"}):
        raise ModelError(
            f"{who}: balance_loss={balance_loss}, but its routers return results of {' and '.join(sorted(made_by))} in"
            " place of logits, from which no probabilities follow; set balance_loss=0"
        )
    if bias_step and len(biases) != max(1, len(routers)):
        names = " or ".join(BIASES)
        raise ModelError(f"{who}: router_bias_step={bias_step}, but not all of its routers have {names}; leave it out")
    if not routers:
        return None
    experts = max(expert_parts(model).values())
    named = tuple(f"model.{fqn}" for fqn in routers), tuple(f"model.{fqn}" for fqn in biases)
    shown = named[1] * (len(biases) == len(routers))
    routing = Routing(named[0], experts, shown, balance_loss, bias_step, normalized=made_by == {"Softmax"})
    for number, fqn in enumerate(routers):
        model.get_submodule(fqn).register_forward_hook(partial(count_choices, routing, number))
    return routing


def _bias_of(model: nn.Module, router: str) -> str | None:
    """Return the FQN of a router's bias, in it or next to it, once it is a buffer: training changes it, no gradient."""
    for owner in (router, router.rpartition(".")[0]):
        for name, part in model.get_submodule(owner).named_modules(prefix=owner):
            attribute = next((each for each in BIASES if getattr(part, each, None) is not None), None)
            if attribute is None:
                continue
            bias = getattr(part, attribute)
            if isinstance(bias, nn.Parameter):  # which FSDP would shard
                delattr(part, attribute)
                part.register_buffer(attribute, bias.detach())
            return f"{name}.{attribute}"
    return None


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a transformers module of experts on rows ``[T, width]``, with choices and weights ``[T, k]`` of a router."""
    exchange, meanwhile = (module.__dict__.get(name) for name in ("exchange", "meanwhile"))
    if top_k_index.is_meta:
        module.visits = top_k_index.shape[-1]  # for FLOPs
    compute = partial(_compute, module)
    return routed(hidden_states, top_k_index, top_k_weights, module.num_experts, compute, exchange, meanwhile)


def _compute(module: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """Run this rank's experts on rows ``[n, width]``, sorted by expert."""
    if module.has_gate:
        hidden = module._apply_gate(_linear(module, "gate_up_proj", rows, ends))
    else:
        hidden = module.act_fn(_linear(module, "up_proj", rows, ends))
    out = _linear(module, "down_proj", hidden, ends)
    return module.post_expert_norm(out) if module.has_post_expert_norm else out


def _linear(module: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix and add its bias."""
    weight = getattr(module, name)
    out = _grouped(rows.to(weight.dtype), weight if module.is_transposed else weight.transpose(1, 2), ends)
    if not module.has_bias:
        return out
    counts = ends.diff(prepend=ends.new_zeros(1))
    return out + getattr(module, f"{name}_bias").repeat_interleave(counts, 0, output_size=len(rows))


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows ``[n, in]`` by the matrices of their experts, ``[experts, in, out]``.

    torch's kernel has no fp64; transformers' operator, a loop, has every dtype and waits for the device.
    """
    from transformers.integrations import moe

    if rows.dtype == torch.float64 or not moe._can_use_grouped_mm(rows, weights, ends):
        out: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
        return out
    return F.grouped_mm(rows, weights, offs=ends)
