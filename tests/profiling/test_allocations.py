"""Memory of tensors is counted from their making to their end."""

from __future__ import annotations

import torch

from hetero_strategy.profiling.allocations import Allocations


def test_memory_counts_while_anything_holds_it() -> None:
    given, weight = torch.zeros(1000), torch.nn.Parameter(torch.ones(10, 100))
    seen = {}
    with Allocations() as counted:
        made = given + 1
        view, other = made.view(10, 100), given.view(10, 100)
        seen["a view takes no memory, whosever it is"] = counted.now, 4000
        del made, other
        seen["a view holds it"] = counted.now, 4000
        product = view * weight
        del view
        seen["autograd keeps a factor"] = counted.now, 8000
        product.backward(given.view(10, 100))
        seen["a gradient came, the factor went"] = counted.now, 8000
        product.detach().untyped_storage().resize_(0)
        seen["FSDP frees so what it gathered"] = counted.now, 4000
        weight.grad = None
        seen["nothing is left"] = counted.now, 0
    assert seen == {what: (size, size) for what, (_, size) in seen.items()}
    assert counted.most == 12000
    outside = torch.zeros(1000).untyped_storage()
    assert outside.resize_(0).nbytes() == 0 and counted.now == 0
