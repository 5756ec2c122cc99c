"""SigLIP 2's attention over packed images, in a file of its own because it imports transformers' modeling file."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.siglip2.modeling_siglip2 import Siglip2Attention

from hetero_strategy.model.attention import packed_attention
from hetero_strategy.model.inputs import Packing


class PackedSiglip2Attention(Siglip2Attention):
    """An attention with the same parameters that, unlike transformers' forward, passes keywords to the attention
    function.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packing: Packing, **unused: Any
    ) -> tuple[Tensor, None]:
        """Attend among rows ``[1, R, width]`` of each image; the shape stays."""
        # -1 heads: tensor parallelism leaves only this rank's.
        query, key, value = (
            linear(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.dropout if self.training else 0.0
        out = packed_attention(query, key, value, packing, causal=False, scale=self.scale, dropout=dropout)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None
