"""Layers compute with copies of their weights while a step runs, and gradients go into those of the masters."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from hetero_strategy.errors import ModelError
from hetero_strategy.parallelize import copies as copies_module
from hetero_strategy.parallelize.copies import WeightCopies, compute_with_copies, copies_of, masters_kept
from hetero_strategy.runtime import backward


class Tied(nn.Module):
    """Its embedding is its head, and both are used; nothing trains its table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.table = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        known = self.embedding(torch.arange(len(rows)))
        return self.head(self.inner(rows) + known).square().sum()


def made() -> tuple[Tied, WeightCopies, dict[str, nn.Parameter]]:
    module = Tied()
    compute_with_copies(module, torch.bfloat16)
    copies = copies_of(module)
    assert copies is not None
    return module, copies, dict(module.named_parameters())


def test_layers_hold_copies_between_gather_and_release() -> None:
    module, copies, masters = made()
    assert copies.nbytes == 2 * (6 * 4 + 4 * 4 + 4)
    for _ in range(2):
        copies.gather()
        now = dict(module.named_parameters())
        assert now["table"] is masters["table"] and module.head.weight is module.embedding.weight
        for name in masters.keys() - {"table"}:
            assert now[name].dtype == torch.bfloat16 and torch.equal(now[name], masters[name].bfloat16()), name
        copies.release()
        assert all(one is masters[name] for name, one in module.named_parameters())
        assert not sum(one.untyped_storage().size() for one in now.values() if one is not masters["table"])
        with torch.no_grad():
            masters["inner.weight"].add_(1.0)  # as an optimizer does


def test_autograd_keeps_no_other_copy_of_a_weight() -> None:
    """Negative control: a cast by autocast is one."""
    module, copies, _ = made()
    shapes, kept = {(6, 4), (4, 6), (4, 4)}, list[int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.extend([tensor.untyped_storage().data_ptr()] * (tuple(tensor.shape) in shapes))
        return tensor

    def others(net: nn.Module, dtype: torch.dtype) -> set[int]:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            net(torch.ones(3, 4, dtype=dtype, requires_grad=True))
        return {*kept} - {p.untyped_storage().data_ptr() for p in net.parameters()}

    copies.gather()
    assert not others(module, torch.bfloat16) and len({*kept}) == 1
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert others(Tied(), torch.float32)


def test_a_model_that_nobody_has_any_more_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are folded while a backward goes on, too."""
    monkeypatch.setattr(copies_module, "FOLD_BYTES", 1)
    module, copies, masters = made()
    copies.gather()
    module(torch.ones(6, 4, dtype=torch.bfloat16)).backward()
    known = {name: weakref.ref(master) for name, master in masters.items()}
    assert all(master.grad is not None for name, master in masters.items() if name != "table")
    copies.release()
    del module, copies, masters
    gc.collect()
    assert not [name for name, master in known.items() if master() is not None]


@pytest.mark.parametrize("halves", [False, True])
def test_gradients_add_up_in_the_masters(halves: bool) -> None:
    """Each microbatch's is the bf16 gradient of a plain module of rounded weights; their sum is not rounded."""
    module, copies, masters = made()
    plain = Tied().bfloat16()
    plain.load_state_dict({name: value.bfloat16() for name, value in module.state_dict().items()})
    wanted = {name: torch.zeros_like(one) for name, one in masters.items()}
    copies.gather()
    for seed in range(3):
        rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        plain.zero_grad()
        plain(rows).backward()
        for name, one in plain.named_parameters():
            wanted[name] += 0 if one.grad is None else one.grad.float()
        leaf = rows.requires_grad_()
        loss = module(leaf)
        roots = [(torch.autograd.graph.get_gradient_edge(loss), torch.ones_like(loss))]
        if halves:
            backward.inputs_first(roots, [leaf], [p for p in module.parameters() if p.requires_grad])()
        else:
            backward.whole(roots)
        copies.fold()
        assert not [
            name for name, one in module.named_parameters() if one.dtype == torch.bfloat16 and one.grad is not None
        ]
    copies.release()
    assert masters["table"].grad is None
    for name in masters.keys() - {"table"}:
        gradient = masters[name].grad
        assert gradient is not None and gradient.dtype == torch.float32
        assert torch.equal(gradient, wanted[name]) and not torch.equal(gradient, gradient.bfloat16().float()), name


@pytest.mark.parametrize("limit", [1, 2**20])
def test_gradients_of_copies_wait_up_to_a_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it they are moved while the backward runs, below it after it."""
    monkeypatch.setattr(copies_module, "FOLD_BYTES", limit)
    module, copies, masters = made()
    copies.gather()
    module(torch.randn(5, 4).bfloat16()).backward()
    waiting = [one for one in module.parameters() if one.grad is not None]
    assert len(waiting) == (0 if limit == 1 else len(masters) - 1)
    copies.fold()
    assert all(one.grad is None for one in module.parameters())
    assert all((one.grad is None) == (name == "table") for name, one in masters.items())


def test_a_gradient_that_arrives_twice_before_it_is_moved_is_moved_once() -> None:
    """As in a backward of inputs that reaches some weights too."""
    module, copies, masters = made()
    copies.gather()
    bias = module.inner.bias
    loss = module(torch.randn(5, 4).bfloat16())
    for _ in range(2):
        loss.backward(inputs=[bias], retain_graph=True)
    assert bias.grad is not None
    expected = 1.5 * bias.grad.float()
    loss.backward()
    assert copies._arrived[:2] == [bias, bias]
    copies.fold()
    torch.testing.assert_close(masters["inner.bias"].grad, expected, rtol=1e-2, atol=0.0)
    assert all(one.grad is None for one in module.parameters())
    assert all((one.grad is None) == (name == "table") for name, one in masters.items())


def test_copies_lie_in_one_memory_as_their_masters_do() -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.Linear(7, 5))
    module[1].weight = nn.Parameter(torch.randn(7, 5).t())
    masters = dict(module.named_parameters())
    copies = WeightCopies(module, torch.bfloat16)
    copies.gather()
    now = dict(module.named_parameters())
    for name, one in now.items():
        assert one.stride() == masters[name].stride() and torch.equal(one, masters[name].bfloat16()), name
    begins = [2 * one.storage_offset() for one in now.values()]
    assert len({one.untyped_storage().data_ptr() for one in now.values()}) == 1
    assert begins == [0, 512, 1024, 1536]
    before = [one._version for one in now.values()]
    with torch.no_grad():
        module[0].weight.zero_()
    assert [one._version - old for one, old in zip(now.values(), before, strict=True)] == [1, 0, 0, 0]


def test_a_layer_with_a_list_of_its_weights_computes_with_copies_too() -> None:
    module = nn.GRU(3, 2)
    copies = WeightCopies(module, torch.bfloat16)
    for begin in (copies.gather, copies.release):
        begin()
        assert all(one is two for one, two in zip(module._flat_weights, module.parameters(), strict=True))
    assert module.weight_ih_l0.dtype == torch.float32


def test_without_gradients_a_stage_computes_outside_of_steps() -> None:
    module, copies, masters = made()
    rows = torch.randn(5, 4).bfloat16()
    with torch.no_grad():
        outside = module(rows)
        with pytest.raises(RuntimeError):
            module(rows[:, :3])
        assert not copies.there and all(one is masters[name] for name, one in module.named_parameters())
        copies.gather()
        assert torch.equal(outside, module(rows)) and copies.there


def test_nothing_is_left_of_a_backward_that_fails() -> None:
    module, copies, masters = made()
    rows = torch.randn(5, 4).bfloat16()

    def step(fail: bool) -> dict[str, torch.Tensor | None]:
        for one in masters.values():
            one.grad = None
        copies.gather()
        hidden = module.inner(rows)
        if fail:
            hidden.register_hook(lambda _: 1 / 0)
        module.head(hidden).sum().backward()
        copies.fold()
        copies.release()
        return {name: one.grad for name, one in masters.items()}

    with pytest.raises(ZeroDivisionError), masters_kept([module]):
        step(True)
    assert not any(one.grad is not None for one in copies._masters)
    again, alone = step(False), step(False)
    assert all(one is None or torch.equal(one, alone[name]) for name, one in again.items())  # type: ignore[arg-type]


def test_a_deep_copy_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be deep-copied"):
        copy.deepcopy(made()[0])


def test_masters_come_back_where_a_step_fails() -> None:
    module, copies, masters = made()
    with pytest.raises(ValueError), masters_kept([nn.Linear(1, 1), module]):
        copies.gather()
        raise ValueError
    assert all(one is masters[name] for name, one in module.named_parameters())
    with masters_kept([module]):
        copies.gather()
    assert copies.there, "only a failure takes them away"
