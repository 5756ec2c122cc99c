"""Any decoder of transformers as a causal language model over packed rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.mask import MaskRule
from hetero_strategy.model.adapter import block_linear_flops, linear_flops
from hetero_strategy.model.causal_lm import CausalLM, head_rows_of
from hetero_strategy.model.inputs import Packing, SequenceInputs
from hetero_strategy.zoo.hf import (
    HFAdapter,
    at_least_one_row,
    check_causal,
    make_model,
    make_norms_precise,
)
from hetero_strategy.zoo.hf_experts import (
    expert_parts,
    make_routing,
    routers_that_run,
    use_routed_experts,
)
from hetero_strategy.zoo.hf_mixers import TakesPacking, mixers_of, run_each_sequence
from hetero_strategy.zoo.hf_packed import packed_rows, some_mask, use_packed_attention
from hetero_strategy.zoo.hf_shared_experts import shared_meanwhile
from hetero_strategy.zoo.hf_stand_ins import Calling, Given, Kept, StandIn, first_of, shallow
from hetero_strategy.zoo.hf_tp import tensor_parallel_faults, tensor_parallel_plan
from hetero_strategy.zoo.hf_trace import parts_of

NO_COLUMNS: Mapping[str, Tensor] = MappingProxyType({})


class HFCausalLM(HFAdapter, CausalLM):
    """A transformers model with a decoder, under :attr:`model`.

    Its base's own forward runs on packed rows ``[1, T, width]``, and its own forward computes logits, so scales and
    caps are transformers'. Stand-ins take the places of blocks and parts of other pipeline stages.

    Args:
        model_class: transformers' class with a head.
        config: config of this class.
        path: where the base with the blocks is in the model; None: where the only list of so many blocks is.
        checkpoint: local Hugging Face folder with the weights.
        before: change of the rows, as in :class:`CausalLM`.
        balance_loss: coefficient of the loss on the balance of experts (:mod:`~hetero_strategy.model.routing`); None:
            the config's ``router_aux_loss_coef`` where its ``output_router_logits`` is true, as in transformers.
        router_bias_step: change of a router's ``e_score_correction_bias`` in each optimizer step, such as 0.001; 0: it
            stays, as in transformers.

    Raises:
        ModelError: transformers makes no model of the config, or its forward cannot be run on packed rows.
    """

    def __init__(
        self,
        model_class: type,
        config: Any,
        *,
        path: str | None = None,
        checkpoint: str | Path | None = None,
        before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
        balance_loss: float | None = None,
        router_bias_step: float = 0.0,
    ) -> None:
        super().__init__(before=before)
        who = model_class.__name__
        text = config.get_text_config()
        _check_supported(who, text)
        self.model = make_model(model_class, config)
        use_packed_attention(self.model)
        use_routed_experts(self.model)
        make_norms_precise(self.model)
        self.architecture, self.config, self.text = who, self.model.config, text
        self.path, self.layers = _block_list(who, self.model, path, text.num_hidden_layers)
        self.head_path = _fqn(self.model, self.model.get_output_embeddings())
        packing = Packing.of(np.array([2])).to("meta")
        rows = torch.empty(1, 2, text.hidden_size, device="meta")
        overlap = shared_meanwhile(self.model, expert_parts(self.model))
        with self.measured(), routers_that_run(self.model, text) as routers, overlap:  # experts, too
            parts = parts_of(self.base, self.layers, lambda base: self._run(base, rows, packing))
        self.routing = make_routing(who, self.model, routers, text, balance_loss, router_bias_step)
        embedding = _fqn(self.base, self.base.get_input_embeddings())
        first = [name for name in (embedding, *parts.before) if name not in parts.after]
        self.parts, self.attention, self.results = (first, parts.after), parts.attention, parts.results
        self.finish = parts.finish
        self.block_list = f"model.{self.path}.{self.layers}"
        self.before_blocks = tuple(f"model.{self.path}.{name}" for name in first)
        self.after_blocks = (*(f"model.{self.path}.{name}" for name in parts.after), f"model.{self.head_path}")
        if any(isinstance(getattr(self.base, name), nn.Embedding) for name in first[1:]):
            self.max_length = text.max_position_embeddings
        mixers = self._run_mixers_by_sequence()
        calls = [call for calls in parts.attention for call in calls]
        self.windows = list(dict.fromkeys(call.window for call in calls))
        chunk = next((call.chunk for call in calls if call.chunk), None)
        chunked = f"chunks of {chunk} rows" if chunk else ""
        self.ruleless = "layers that keep a state from row to row" if mixers else chunked
        if any(self.windows) and not self.ruleless:
            super().attend_by("causal")  # so that plans and loaders know the windows
        self.context_parallel = all(parts.attention) and not self.ruleless
        self.context_width = max((call.context_width for call in calls), default=0)
        self.query_width = max((call.heads * call.key_width for call in calls), default=0)
        self.attention_heads = gcd(*(call.heads for call in calls))
        self.width = self.hidden_width = text.hidden_size
        self.vocab_size, self.head_rows = text.vocab_size, head_rows_of(text.vocab_size)
        self.checkpoint = checkpoint
        self._tie()

    def _run_mixers_by_sequence(self) -> bool:
        """Return whether there are layers with a state, after changing them."""
        blocks = list(self.blocks().values())
        mixers = mixers_of(blocks, self.attention)
        for block, names in zip(blocks, mixers, strict=True):
            if names:
                run_each_sequence(block, names)
        if any(mixers):
            count, name = sum(map(bool, mixers)), max(mixers)[0]
            warnings.warn(
                f"{self.architecture}: {count} of {len(blocks)} layers keep a state from row to row ({name}): they run"
                " one sequence at a time, which is slow for short sequences",
                stacklevel=2,
            )
        return any(mixers)

    @override
    def attend_by(self, rule: MaskRule | str) -> None:
        """Let rows see each other by a rule, unless layers have chunks or states, which know none."""
        if self.ruleless:
            raise ModelError(f"{self.architecture}: {self.ruleless} know no rule of attention: leave attend_by out")
        super().attend_by(rule)

    @override
    def block_windows(self) -> Sequence[Collection[int | None]]:
        return [[call.window for call in calls] for calls in self.attention]

    @property
    def base(self) -> Any:
        """Return the module that holds the blocks."""
        return self.model.get_submodule(self.path)

    @override
    def embed(self, ids: Tensor) -> Tensor:
        return self.base.get_input_embeddings()(ids)

    @override
    def transform(self, hidden: Tensor, inputs: SequenceInputs) -> Tensor:
        count = inputs.packing.rows
        hidden, packing = at_least_one_row(hidden, inputs.packing)
        if self.routing is not None and self.routing.tally is not None:
            self.routing.tally.begin(packing.sequence, count)
        base, rows = self.base, hidden[None]
        blocks = base.get_submodule(self.layers)._modules
        driven = {key: self._driven(key, block, rows, packing) for key, block in blocks.items()}
        last = next((key for key, block in reversed(blocks.items()) if block is not None), None)
        if last is None:
            return hidden[:count]
        driven[last] = kept = Kept(like=driven[last])
        absent = {name: StandIn(rows) for name in self.parts[0] if base._modules[name] is None}
        absent |= {name: StandIn() for name in self.parts[1]}
        self._run(self._with(driven, absent), rows, packing, inputs.columns if count else {})
        return first_of(kept.result)[0][:count]

    @override
    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits; where the forward does more to rows than to call children, with stand-ins for all blocks."""
        base = self.base

        def finish(rows: Tensor) -> Tensor:
            if self.finish is not None:
                return reduce(lambda rows, name: base._modules[name](rows), self.finish, rows)
            blocks = {key: self._absent_block(key, rows) for key in base.get_submodule(self.layers)._modules}
            before = {name: StandIn(rows) for name in self.parts[0]}
            return first_of(self._run(self._with(blocks, before), rows))

        owner, child = self._head_owner()
        whole = shallow(owner, {child: Calling(finish, owner._modules[child])})
        rows = hidden if len(hidden) else torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])
        return whole(inputs_embeds=rows[None], use_cache=False, **self._unrecorded).logits[0][: len(hidden)]

    def _run(
        self,
        base: nn.Module,
        rows: Tensor,
        packing: Packing | None = None,
        columns: Mapping[str, Tensor] = NO_COLUMNS,
    ) -> Any:
        """Call a base, in which stand-ins may be, on rows ``[1, T, width]``; without a packing no block may run.

        Columns may have ``positions``, int64 ``[axes, T]``.
        """
        count = rows.shape[1]
        positions = rows.new_zeros(1, count, dtype=torch.int64) if packing is None else packing.positions[None]
        positions = columns.get("positions", positions)
        with packed_rows(packing):
            return base(
                inputs_embeds=rows,
                position_ids=positions if len(positions) == 1 else positions[:, None],
                attention_mask=some_mask(count),
                use_cache=False,
                **self._unrecorded,
            )

    @property
    def _unrecorded(self) -> dict[str, bool]:
        """Return an argument of forwards: logits of routers are not collected, whatever the config says."""
        return {"output_router_logits": False} if getattr(self.text, "output_router_logits", False) else {}

    def _with(self, blocks: Mapping[str, nn.Module], parts: Mapping[str, nn.Module]) -> nn.Module:
        base = self.base
        return shallow(base, {self.layers: shallow(base._modules[self.layers], blocks), **parts})

    def _driven(self, key: str, block: nn.Module | None, rows: Tensor, packing: Packing) -> nn.Module:
        if block is None:
            return self._absent_block(key, rows)
        return Given(block, packing=packing) if isinstance(block, TakesPacking) else block

    def _absent_block(self, key: str, rows: Tensor) -> StandIn:
        original: Any = self.meta_copy()
        return StandIn(rows, original.base.get_submodule(self.layers)._modules[key], self.results)

    def _head_owner(self) -> tuple[nn.Module, str]:
        """Return the smallest module that holds base and head, and its child that holds the base."""
        path, head = self.path.split("."), self.head_path.split(".")
        common = next(n for n, name in enumerate(path) if n >= len(head) or name != head[n])
        return self.model.get_submodule(".".join(path[:common])), path[common]

    def _tie(self) -> None:
        """Share the weights that transformers shares, which it does not do on the meta device."""
        self.tied: tuple[str, str] | None = None
        own = (f"{self.path}.", f"{self.head_path}.")
        pairs = [pair for pair in self.model.all_tied_weights_keys.items() if all(fqn.startswith(own) for fqn in pair)]
        if len(pairs) > 1:
            raise ModelError(f"{self.architecture} shares several weights, {pairs}, and stages know one shared weight")
        for target, source in self.model.all_tied_weights_keys.items():
            owner, _, name = target.rpartition(".")
            setattr(self.model.get_submodule(owner), name, self.model.get_parameter(source))
            self.tied = (f"model.{source}", f"model.{target}")

    @override
    def experts(self) -> dict[str, int]:
        return {f"model.{fqn}": count for fqn, count in expert_parts(self.model).items()}

    @override
    def tied_weight(self) -> tuple[str, str] | None:
        return self.tied

    @override
    def tp_plan(self) -> dict[str, ParallelStyle] | None:
        return tensor_parallel_plan(self.model, "model.")

    @override
    def check_tp(self, tp: int) -> list[str]:
        original: Any = self.meta_copy()
        return tensor_parallel_faults(original.model, tp)

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        rows = int(np.sum(packing_lengths))
        attention = [sum(call.flops(packing_lengths) for call in calls) for calls in self.attention]
        original: Any = self.meta_copy()
        head = float(linear_flops(original.model.get_submodule(self.head_path)) * rows)
        return 0.0, block_linear_flops(self) * rows + np.array(attention, dtype=np.float64), head


def _block_list(who: str, model: nn.Module, path: str | None, count: int) -> tuple[str, str]:
    """Return where the base is, and the name of its list of blocks, of which the config says there are ``count``."""
    lists = [fqn for fqn, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    lists = [fqn for fqn in lists if path is None or fqn.rpartition(".")[0] == path]
    lists = [fqn for fqn in lists if not any(fqn.startswith(f"{other}.") for other in lists)]
    if len(lists) != 1:
        raise ModelError(
            f"{who}: {path or 'it'} has {len(lists)} lists of {count} blocks, and one list is cut into stages; its"
            f" blocks would be {', '.join(lists) or 'none'}"
        )
    owner, _, name = lists[0].rpartition(".")
    return owner, name


def _fqn(owner: nn.Module, part: nn.Module | None) -> str:
    """Return the name of a part."""
    name = next((fqn for fqn, module in owner.named_modules() if module is part and fqn), None)
    if name is None:
        raise ModelError(f"{type(owner).__name__} has no embedding or no output projection, as a language model has")
    return name


def _check_supported(who: str, config: Any) -> None:
    """Refuse fields of a config with which packed rows would be wrong."""
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope in ("dynamic", "longrope"):
            raise ModelError(f"{who}: rope_type {rope!r} changes with the longest sequence and cannot be packed")
    check_causal(who, config)
    heads, key_heads = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", None)
    if key_heads and heads % key_heads:
        raise ModelError(f"{who}: num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}")


def _ropes(parameters: Any) -> Iterator[str]:
    """Yield every rope_type of a config, which may have one for each kind of layer."""
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _ropes(value)
