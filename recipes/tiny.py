"""A language model of a width of about a hundred: torchtitan's Llama 3 with initial values that suit it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hetero_strategy.zoo import titan_llama
from hetero_strategy.zoo.titan import TitanLlama


class TinyLlama(TitanLlama):
    """torchtitan starts every matrix at 0.02 and embeddings at 1, which suits widths of thousands: at a hundred the
    blocks would whisper beside the embeddings, and the first hundreds of steps would go into making them heard.
    """

    def initialize(self, prefix: str, unit: nn.Module) -> None:
        """Matrices of blocks by their width, small embeddings; the rest as in torchtitan."""
        super().initialize(prefix, unit)
        for name, weight in unit.named_parameters():
            if prefix and weight.dim() == 2:
                nn.init.normal_(weight, std=0.7 * weight.shape[1] ** -0.5)
            elif name.endswith("tok_embeddings.weight"):
                nn.init.normal_(weight, std=0.1)


def tiny_llama(**fields: Any) -> TinyLlama:
    """A :class:`TinyLlama` with the fields of :func:`hetero_strategy.zoo.titan_llama`."""
    made = titan_llama(**fields)
    tiny = TinyLlama(made.args, checkpoint=made.checkpoint, before=made.before)
    tiny.token_ids = made.token_ids
    return tiny
