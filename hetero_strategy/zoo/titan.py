"""torchtitan's Llama 3 as a causal language model: the only file that imports torchtitan."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from typing_extensions import override

from hetero_strategy.errors import ModelError, require
from hetero_strategy.layout.row_sharding import RowSharding, sharding
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import block_linear_flops, linear_flops
from hetero_strategy.model.attention import attention_pairs, packed_attention
from hetero_strategy.model.causal_lm import CausalLM, head_rows_of
from hetero_strategy.model.hf_folder import HFWeights, read_config
from hetero_strategy.model.inputs import Packing, SequenceInputs
from hetero_strategy.model.tensor_parallel import divisible
from hetero_strategy.model.token_loss import VocabularyParallel
from hetero_strategy.zoo.hf import check_causal, check_config, check_no_fields, make_config

TITAN_VERSION = "0.2.2"
"""The only release that works with this file: other releases renamed or removed parts it uses."""
_PROJECTIONS = ("wq", "wk", "wv", "wo")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@functools.cache
def _titan() -> types.SimpleNamespace:
    """Import the parts of torchtitan in use on first need: the import takes seconds and pulls in many packages."""
    require("torchtitan", "titan", "titan_llama")
    version = importlib.metadata.version("torchtitan")
    if version != TITAN_VERSION:
        raise ModelError(f"titan_llama needs torchtitan=={TITAN_VERSION}, found {version}: install that version")
    kernels = "torchtitan.models.moe.kernels"
    if importlib.util.find_spec("triton") is None and kernels not in sys.modules:
        # torchtitan imports its MoE kernels unconditionally and they need triton, which CPU builds do not have.
        stand_in = types.ModuleType(kernels)
        stand_in.generate_permute_indices = _no_triton  # type: ignore[attr-defined]
        sys.modules[kernels] = stand_in
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.models.llama3.model import args, model, state_dict_adapter
    from torchtitan.models.utils import trunc_normal_

    return types.SimpleNamespace(
        apply_tp=parallelize.apply_tp,
        RoPEScalingArgs=args.RoPEScalingArgs,
        TransformerModelArgs=args.TransformerModelArgs,
        Attention=model.Attention,
        Transformer=model.Transformer,
        Llama3StateDictAdapter=state_dict_adapter.Llama3StateDictAdapter,
        trunc_normal_=trunc_normal_,
    )


def _no_triton(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("torchtitan's MoE kernels need triton, which is not installed")


class PackedAttention(nn.Module):
    """A replacement of torchtitan's attention for packed sequences, with the same parameters and names.

    It differs in two ways: the packing arrives as ``attention_masks`` and bounds attention to sequences, and rotary
    embeddings keep the precision of fp64 inputs, which torchtitan rounds to fp32.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.head_dim: int = attention.head_dim  # type: ignore[assignment]
        self.wq, self.wk, self.wv, self.wo = (cast(nn.Linear, getattr(attention, name)) for name in _PROJECTIONS)

    def init_weights(self, init_std: float) -> None:
        """Apply torchtitan's rule; its block calls this."""
        _titan().Attention.init_weights(self, init_std)

    @override
    def forward(
        self, x: Tensor, freqs_cis: Tensor, attention_masks: Packing, positions: Tensor | None = None
    ) -> Tensor:
        """Attend among rows ``[1, T, dim]``; torchtitan's block passes these four arguments by position.

        Args:
            x: rows ``[1, T, dim]``.
            freqs_cis: cosines and sines for :func:`rotate`.
            attention_masks: packing of the sequences.
            positions: ignored, because ``freqs_cis`` are already selected for the rows.
        """
        # -1 heads: tensor parallelism leaves only this rank's.
        query, key, value = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        query, key, value = (rows.transpose(1, 2) for rows in (rotate(query, freqs_cis), rotate(key, freqs_cis), value))
        out = packed_attention(query, key, value, attention_masks, causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def rotate(rows: Tensor, turns: Tensor) -> Tensor:
    """Rotate neighbouring pairs of ``[1, T, heads, head_dim]`` by ``[T, head_dim / 2, 2]`` cosines and sines, in their
    dtype.
    """
    pairs = rows.to(turns.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # it makes no kernels for complex numbers
        (a, b), (cos, sin) = pairs.unbind(-1), turns[:, None].unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(turns)[:, None])
    return turned.flatten(-2).to(rows.dtype)


class TitanLlama(CausalLM):
    """A wrapper of torchtitan's Llama 3 ``Transformer``, under :attr:`model`."""

    block_list = "model.layers"
    before_blocks = ("model.tok_embeddings",)
    after_blocks = ("model.norm", "model.output")
    tp_columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    tp_rows = ("attention.wo", "feed_forward.w2")
    tp_compiles = True
    context_parallel = True
    token_ids: Mapping[str, Any] = dict.fromkeys(_TOKEN_IDS)
    """Token ids in config.json. Null, because transformers would default to Llama 2's ids."""
    rows_mesh: DeviceMesh | None = None
    """Mesh of the tensor-parallel ranks among which rows are sharded."""

    def __init__(
        self,
        args: Any,
        *,
        checkpoint: str | Path | None = None,
        before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    ) -> None:
        super().__init__(before=before)
        self.args = args
        self.width = self.hidden_width = args.dim
        self.vocab_size, self.head_rows = args.vocab_size, head_rows_of(args.vocab_size)
        self.max_length = args.max_seq_len
        self.context_width = 2 * (args.n_kv_heads or args.n_heads) * (args.dim // args.n_heads)
        self.attention_heads = args.n_heads
        self.checkpoint = checkpoint
        self.model = _titan().Transformer(args)
        for block in self.model.layers.values():
            block.attention = PackedAttention(block.attention)

    @override
    def embed(self, ids: Tensor) -> Tensor:
        return self.model.tok_embeddings(ids[None])[0]

    @override
    def transform(self, hidden: Tensor, inputs: SequenceInputs) -> Tensor:
        precise = torch.complex128 if hidden.dtype == torch.float64 else torch.complex64
        turns = torch.view_as_real(self.model.freqs_cis[inputs.packing.positions].to(precise))
        rows = hidden[None]
        for block in self.blocks().values():
            rows = block(rows, turns, inputs.packing)
        return rows[0]

    @override
    def head(self, hidden: Tensor) -> Tensor:
        return self.model.output(self.model.norm(hidden))

    @override
    def whole_rows(self, hidden: Tensor) -> Tensor:
        if self.rows_mesh is None:
            return hidden
        rows = DTensor.from_local(hidden, self.rows_mesh, [Shard(0)], run_check=False)
        return rows.redistribute(placements=[Replicate()]).to_local()

    @override
    def tp_plan(self) -> dict[str, ParallelStyle]:
        return {}  # apply_tp uses torchtitan's plan

    @override
    def row_sharding(self, layout: ModuleLayout) -> RowSharding:
        """Return sequence parallelism: each tensor-parallel rank has a part of the rows."""
        return sharding(layout.cp, layout.tp)

    @override
    def check_tp(self, tp: int) -> list[str]:
        heads, kv_heads = self.args.n_heads, self.args.n_kv_heads or self.args.n_heads
        return divisible(tp, heads=heads, kv_heads=kv_heads, feed_forward_width=self._ffn_width())

    @override
    def apply_tp(self, mesh: DeviceMesh) -> None:
        """Apply torchtitan's tensor and sequence parallel plan to the blocks and the norm.

        The embedding splits the vocabulary and shares its gradient; the head takes whole rows and splits the
        vocabulary.
        """
        if faults := self.check_tp(mesh.size()):
            raise ModelError(f"{type(self).__name__}: {'; '.join(faults)}")
        plan = self._tp_plan_of_blocks()
        in_blocks = self.tp_styles(plan)
        with warnings.catch_warnings():
            # A pipeline stage lacks the embedding or the head that the plan names.
            warnings.filterwarnings("ignore", message="Parallelize plan key")
            apart = self.model.tok_embeddings, self.model.norm, self.model.output
            layers = self.model.layers
            self.model.tok_embeddings = self.model.norm = self.model.output = None
            if in_blocks is not plan:
                self.model.layers = nn.ModuleDict()
            _titan().apply_tp(self.model, mesh, loss_parallel=True, enable_float8_tensorwise_tp=False)
            self.model.tok_embeddings, self.model.norm, self.model.output = apart
            self.model.layers = layers
            tokens = VocabularyParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(self.model, mesh, {"tok_embeddings": tokens, "output": split})
        if in_blocks is not plan:
            parallelize_module(self, mesh, in_blocks)
        self.rows_mesh = mesh

    def _tp_plan_of_blocks(self) -> dict[str, ParallelStyle]:
        """Return torchtitan's plan of a block, in which each linear map gathers its rows itself."""
        styles: dict[str, ParallelStyle] = {
            **dict.fromkeys(("attention_norm", "ffn_norm"), SequenceParallel(use_local_output=True)),
            **dict.fromkeys(self.tp_columns, ColwiseParallel(input_layouts=Shard(1))),
            **dict.fromkeys(self.tp_rows, RowwiseParallel(output_layouts=Shard(1))),
        }
        return {f"{self.block_list}.*.{name}": style for name, style in styles.items()}

    @override
    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Apply torchtitan's ``init_weights`` to a block, and its ``Transformer``'s rule to all other parts."""
        if prefix:
            unit.init_weights()  # type: ignore[operator]
            return
        model: Any = unit.model
        model.freqs_cis.copy_(model._precompute_freqs_cis())
        nn.init.normal_(model.tok_embeddings.weight)
        model.norm.reset_parameters()
        std = self.args.dim**-0.5
        _titan().trunc_normal_(model.output.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)

    @override
    def hf_weights(self) -> HFWeights:
        """Return the weights of the Hugging Face Llama with the same forward, named by torchtitan's own map."""
        args, scaling = self.args, self.args.rope_scaling_args
        kv_heads = args.n_kv_heads or args.n_heads
        hf_names = _titan().Llama3StateDictAdapter(args, None).from_hf_map
        to_hf = {ours: theirs for theirs, ours in hf_names.items() if ours is not None}
        names, paired_heads = {}, {}
        for fqn, _ in self.meta_copy().named_parameters():
            ours = fqn.removeprefix("model.")
            number = re.findall(r"layers\.(\d+)\.", ours)
            names[fqn] = to_hf[re.sub(r"layers\.\d+\.", "layers.{}.", ours)].format(*number)
            if fqn.endswith(("attention.wq.weight", "attention.wk.weight")):
                paired_heads[fqn] = args.n_heads if "wq" in fqn else kv_heads
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(args.rope_theta)}
        if scaling.scaling_factor != 1:  # transformers warns of a factor of 1
            rope |= {
                "rope_type": "llama3",
                "factor": float(scaling.scaling_factor),
                "low_freq_factor": float(scaling.low_freq_factor),
                "high_freq_factor": float(scaling.high_freq_factor),
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": args.vocab_size,
            "hidden_size": args.dim,
            "intermediate_size": self._ffn_width(),
            "num_hidden_layers": args.n_layers,
            "num_attention_heads": args.n_heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": args.max_seq_len,
            "rms_norm_eps": args.norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            **self.token_ids,
            "rope_parameters": rope,
        }
        return HFWeights(names, config, paired_heads)

    @override
    def part_flops(self, packing_lengths: np.ndarray) -> tuple[float, np.ndarray, float]:
        rows = int(np.sum(packing_lengths))
        attention = 4 * self.args.dim * attention_pairs(packing_lengths, causal=True)
        original: Any = self.meta_copy()
        head = float(linear_flops(original.model.output) * rows)
        return 0.0, block_linear_flops(self) * rows + attention, head

    def _ffn_width(self) -> int:
        block: Any = next(iter(self.meta_copy().blocks().values()))
        return block.feed_forward.w1.out_features


def titan_llama(
    *,
    checkpoint: str | Path | None = None,
    before: Callable[[Tensor, SequenceInputs], Tensor] | None = None,
    **fields: Any,
) -> TitanLlama:
    """Build torchtitan's Llama 3.

    Args:
        checkpoint: local Hugging Face Llama folder (config.json, safetensors) to take sizes and weights from.
        before: change of the rows, as in :class:`CausalLM`.
        **fields: fields of torchtitan's ``TransformerModelArgs`` (``vocab_size, dim, n_layers, n_heads, n_kv_heads,
            multiple_of, ffn_dim_multiplier, norm_eps, rope_theta, rope_scaling_args (a mapping), max_seq_len,
            depth_init``); they exclude ``checkpoint``.

    Raises:
        ModelError: a field is unknown, sizes do not fit, or the model cannot represent the folder.
    """
    config: Mapping[str, Any] = {}
    if checkpoint is not None:
        check_no_fields("titan_llama", fields)
        config = read_config(checkpoint)
        fields = _fields_of(config, checkpoint)
    titan = _titan()
    allowed = {field.name for field in dataclasses.fields(titan.TransformerModelArgs)}
    allowed -= {"attn_type", "attn_mask_type", "eos_id"}  # attention is always packed and causal
    if unknown := set(fields) - allowed:
        raise ModelError(f"titan_llama: unknown field {sorted(unknown)}: allowed are {sorted(allowed)}")
    if isinstance(scaling := fields.get("rope_scaling_args"), Mapping):
        allowed = {field.name for field in dataclasses.fields(titan.RoPEScalingArgs)}
        if unknown := set(scaling) - allowed:
            raise ModelError(
                f"titan_llama: unknown field {sorted(unknown)} of rope_scaling_args: allowed are {sorted(allowed)}"
            )
        fields["rope_scaling_args"] = titan.RoPEScalingArgs(**scaling)
    check_config("titan_llama", fields)
    args = titan.TransformerModelArgs(**fields)
    if args.dim % args.n_heads or args.n_heads % (args.n_kv_heads or args.n_heads):
        raise ModelError(
            f"titan_llama: dim {args.dim} must be a multiple of n_heads {args.n_heads}, and that of n_kv_heads "
            f"{args.n_kv_heads}"
        )
    if (head_dim := args.dim // args.n_heads) % 2:
        raise ModelError(f"titan_llama: dim {args.dim} / n_heads {args.n_heads} is {head_dim}; it must be even")
    module = TitanLlama(args, checkpoint=checkpoint, before=before)
    if checkpoint is not None:  # ids missing there stay missing
        module.token_ids = {name: config[name] for name in _TOKEN_IDS if name in config}
    return module


def _fields_of(content: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """Translate a Hugging Face Llama's config.json to ``TransformerModelArgs`` fields with the same forward."""
    from transformers import LlamaConfig

    config = make_config("titan_llama", LlamaConfig, folder, {})  # fills in transformers' defaults
    fixed = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
    for name, value in (fixed | {"attention_dropout": 0.0}).items():
        if content.get(name, value) != value:
            raise ModelError(
                f"titan_llama: {folder}/config.json has {name}={content[name]!r}, torchtitan's Llama 3 has {value!r}: "
                "use hf_llama"
            )
    check_causal("titan_llama", config)
    config.standardize_rope_params()  # as transformers' models do; adds all rope fields
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ("default", "llama3"):
        raise ModelError(f"titan_llama: {folder}/config.json has rope_type {kind!r}, known are default and llama3")
    dim, heads = config.hidden_size, config.num_attention_heads
    if config.head_dim != dim // heads:
        raise ModelError(f"titan_llama: {folder}/config.json has head_dim {config.head_dim}, not {dim}/{heads}")
    ffn, natural = config.intermediate_size, int(8 * dim / 3)
    scaling = {"scaling_factor": 1.0}
    if kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {"scaling_factor": rope["factor"], **{name: rope[name] for name in names}}
    return {
        "vocab_size": config.vocab_size,
        "dim": dim,
        "n_layers": config.num_hidden_layers,
        "n_heads": heads,
        "n_kv_heads": config.num_key_value_heads or heads,
        # torchtitan rounds its own width up to a multiple of this number: from a smaller width it gets this number.
        "multiple_of": ffn,
        "ffn_dim_multiplier": min(1.0, ffn / natural),
        "norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling_args": scaling,
        "max_seq_len": config.max_position_embeddings,
    }
