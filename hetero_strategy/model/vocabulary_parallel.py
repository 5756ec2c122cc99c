"""An embedding whose vocabulary tensor-parallel ranks share, and the gradient of it, too."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import RowwiseParallel
from typing_extensions import override


class VocabularyParallel(RowwiseParallel):
    """torch's ``RowwiseParallel`` of an ``nn.Embedding``, but for its gradient: each rank makes that of its own tokens.

    DTensor's embedding (torch 2.13) gives every rank the gradient of the whole vocabulary, which stays until the step's
    end. A vocabulary that the ranks do not divide is left to it. Rows are looked up as in Megatron-LM's
    ``VocabParallelEmbedding`` (arXiv:1909.08053, section 3).
    """

    @override
    def _partition_embedding_fn(self, name: str, module: nn.Embedding, device_mesh: DeviceMesh) -> None:
        super()._partition_embedding_fn(name, module, device_mesh)
        if type(module) is nn.Embedding and module.num_embeddings % device_mesh.size() == 0:
            module.__class__ = _OwnTokens


class _OwnTokens(nn.Embedding):
    @override
    def forward(self, ids: DTensor) -> Tensor:  # type: ignore[override]
        """Look up ids ``[...]``, the same on all ranks; rows ``[..., width]``, of which each rank has its tokens'."""
        weight = self.weight
        assert isinstance(weight, DTensor)
        part, mesh = weight.to_local(), weight.device_mesh
        first = mesh.get_local_rank() * len(part)
        own = ids.to_local() - first
        elsewhere = (own < 0) | (own >= len(part))
        padding = -1 if self.padding_idx is None else self.padding_idx - first
        here = padding if 0 <= padding < len(part) else None
        rows = F.embedding(own.masked_fill_(elsewhere, 0), part, here).masked_fill_(elsewhere[..., None], 0)
        return DTensor.from_local(rows, mesh, (Partial(),), run_check=False)
