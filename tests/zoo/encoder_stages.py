"""Two stages of an encoder against the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hetero_strategy.model.encoder import Encoder
from hetero_strategy.model.inputs import EncoderInputs


def gradients(made: Encoder, run: Callable[[], None]) -> dict[str, Tensor]:
    """Return the gradients that a run gives an encoder."""
    made.zero_grad()
    run()
    return {fqn: p.grad.clone() for fqn, p in made.named_parameters() if p.grad is not None}


def assert_two_stages_are_the_whole(made: Encoder, inputs: EncoderInputs) -> None:
    """Compare rows and gradients of two stages with the whole's, bit for bit."""
    blocks, weights = list(made.blocks()), torch.randn(int(inputs.rows.sum()), made.width)
    stages = made.stage(blocks[:1], first=True, last=False), made.stage(blocks[1:], first=False, last=True)

    def whole() -> None:
        for sign in (1, -2):  # two microbatches add up
            (made(inputs) * weights * sign).sum().backward()

    def in_stages() -> None:
        for sign in (1, -2):
            hidden = stages[0](inputs)
            received = hidden.detach().requires_grad_()
            rows = stages[1](inputs, hidden=received)
            assert torch.equal(rows, made(inputs))
            (rows * weights * sign).sum().backward()
            hidden.backward(received.grad)

    expected, found = gradients(made, whole), gradients(made, in_stages)
    assert expected.keys() == found.keys() == {fqn for fqn, p in made.named_parameters() if p.requires_grad}
    assert all(torch.equal(found[fqn], gradient) for fqn, gradient in expected.items())
    assert not {*dict(stages[0].named_parameters())} & {*dict(stages[1].named_parameters())}
