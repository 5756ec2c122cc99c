"""A language model of a width of about a hundred: torchtitan's Llama 3 with initial values that suit it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hetero_strategy.zoo import titan_llama
from hetero_strategy.zoo.titan import TitanLlama


class TinyLlama(TitanLlama):
    """A Llama whose blocks start at the scale of its embeddings.

    torchtitan starts every matrix at 0.02 and embeddings at 1, which suits widths of thousands. At a width of a hundred
    the output of blocks would vanish beside the embeddings for the first hundreds of steps.
    """

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Scale matrices of blocks by their width and start with small embeddings; the rest is as in torchtitan."""
        super().initialize(prefix, unit)
        for name, weight in unit.named_parameters():
            if prefix and weight.dim() == 2:
                nn.init.normal_(weight, std=0.7 * weight.shape[1] ** -0.5)
            elif name.endswith("tok_embeddings.weight"):
                nn.init.normal_(weight, std=0.1)


def tiny_llama(**fields: Any) -> TinyLlama:
    """Make a :class:`TinyLlama` with the fields of :func:`hetero_strategy.zoo.titan_llama`."""
    llama = titan_llama(**fields)
    tiny = TinyLlama(llama.args, checkpoint=llama.checkpoint, before=llama.before)
    tiny.token_ids = llama.token_ids
    return tiny
