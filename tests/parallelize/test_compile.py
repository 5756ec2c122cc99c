"""Compiled blocks: gradients of any number of rows, and how often anything is compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import fake_world
from hetero_strategy.layout.row_sharding import two_chunks
from hetero_strategy.layout.spec import Placement, place
from hetero_strategy.mask import BidirectionalItems, Spans
from hetero_strategy.model import MultimodalModel, Packing, attention
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.causal_lm import CausalLMKind
from hetero_strategy.model.context import in_context
from hetero_strategy.model.inputs import SequenceInputs
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.compile import apply_compile
from hetero_strategy.parallelize.transforms import read_transforms
from hetero_strategy.strategy.blueprint import Options, checked_blueprint
from hetero_strategy.zoo import hf_llama, titan_llama
from tests.model.helpers import TITAN, tokens
from tests.small_models import reader
from tests.zoo.families import TINY

RAGGED = ([40, 24], [7], [30, 2, 60], [1], [64, 64, 1], [], [33, 5], [2])
"""Lengths of the sequences of calls that follow each other."""


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def made(backend: str | None, recompute: str | None, module: Adapter | None = None) -> Adapter:
    module = module or titan_llama(**TITAN | {"n_layers": 4})
    layout = ModuleLayout.from_config("llm", {"ranks": [0]}).resolved()
    how = read_transforms({"llm": {"recompute": recompute, "compile": backend}})
    parallelize("llm", module, layout, None, torch.device("cpu"), seed=1, transforms=how.get("llm", {}))
    return module


WAYS = [("aot_eager", "all"), ("aot_eager", "every 2"), ("aot_eager", "all but matmuls")]
WAYS += [("inductor", "every 2"), ("inductor", "all but matmuls")]
"""With 'every 2' some blocks are recomputed and others are not, so neither way needs a case of its own."""


@pytest.mark.parametrize("way", ["all", "all but matmuls"])
def test_frozen_blocks_of_frozen_rows_may_be_said_to_run_again(way: str) -> None:
    """As an encoder's whose projector trains: torch cannot compile what would run again and has no backward."""
    found = []
    for backend in ("aot_eager", None):
        module = titan_llama(**TITAN | {"n_layers": 1})
        for frozen in (module.model.tok_embeddings, module.model.layers):
            frozen.requires_grad_(False)
        layout, how = ModuleLayout((0,)).resolved(), read_transforms({"llm": {"recompute": way, "compile": backend}})
        parallelize("llm", module, layout, None, torch.device("cpu"), seed=1, transforms=how["llm"])
        module(tokens([40, 24])).loss_sum.backward()
        found.append(module.model.output.weight.grad)
    torch.testing.assert_close(*found)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "way"), WAYS)
def test_ragged_rows_are_compiled_once(backend: str, way: str) -> None:
    """Blocks share what is compiled: one for rows that are a view, as the first block's, and one for the others'; the
    loss has one for each direction.
    """
    compiled, plain = made(backend, way), made(None, way)
    for lengths in RAGGED:
        for module in (compiled, plain):
            module.zero_grad()
            module(tokens(lengths)).loss_sum.backward()
        for (name, a), b in zip(compiled.named_parameters(), plain.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if b.grad is not None and a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        if lengths == RAGGED[0]:
            first = counters["stats"]["unique_graphs"]
    assert first == counters["stats"]["unique_graphs"] == (5 if way == "every 2" else 4)
    assert not counters["graph_break"]


def test_blocks_of_transformers_are_compiled_whole() -> None:
    compiled, plain = (made(backend, None, hf_llama(check=False, **TINY["llama"])) for backend in ("aot_eager", None))
    for lengths in ([40, 24], [7], [30, 2, 60]):
        for module in (compiled, plain):
            module.zero_grad()
            module(tokens(lengths)).loss_sum.backward()
        for (name, a), b in zip(compiled.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 4


@pytest.mark.full
def test_evaluation_is_compiled_apart() -> None:
    module, plain = made("eager", None), made(None, None)
    for lengths in RAGGED:
        module(tokens(lengths)).loss_sum.backward()
    trained = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for lengths in RAGGED:
            torch.testing.assert_close(module(tokens(lengths)).loss_sum, plain(tokens(lengths)).loss_sum)
    assert trained < counters["stats"]["unique_graphs"] <= trained + 2


def with_items(inputs: SequenceInputs, rng: np.random.Generator) -> None:
    """Let some of the sequences begin with an item, whose rows see each other."""
    lengths = inputs.packing.lengths
    of = np.flatnonzero(rng.random(len(lengths)) * (lengths > 0) > 0.3)
    spans = Spans(of, 0 * of, rng.integers(1, lengths[of] + 1), np.full(len(of), "vision"), 0 * lengths)
    kind = CausalLMKind()
    kind.rules = {None: BidirectionalItems()}
    inputs.packing.masks = kind.masks(lengths, spans)


@pytest.mark.full_cases("cp by heads")
@pytest.mark.parametrize("what", ["causal", "items", "cp by heads"])
def test_a_block_is_compiled_three_times_at_most(what: str) -> None:
    """In 20 microbatches of other lengths, some of them without items."""
    rng, module = np.random.default_rng(0), made("eager", None, titan_llama(**TITAN | {"n_layers": 1}))
    clear_compilation_metrics()
    over_ranks = what == "cp by heads"
    with fake_world(0, 2) if over_ranks else nullcontext():
        for number in range(20):
            lengths = rng.integers(1, 60, 1 if over_ranks else rng.integers(1, 9)) if number > 2 else [4 << 2 * number]
            # A fake world refuses ranks that send nothing, so no label travels.
            more, share = ([4 - sum(lengths) % 4], 0.0) if over_ranks else ([], 0.5)
            inputs = tokens([*lengths, *more], label_share=share)
            if what == "items":
                with_items(inputs, rng)
            if over_ranks:
                inputs = in_context(inputs, 0, two_chunks(len(inputs.ids), 2), by_heads=True)
                module.context_group = dist.group.WORLD.group_name
            module(inputs).loss_sum.backward()
    compiled = Counter((one.co_filename, one.co_firstlineno, one.co_name) for one in get_compilation_metrics())
    assert compiled and max(compiled.values()) <= 3, compiled


class Flash(torch.nn.Module):
    """A block that is nothing but the kernel of a GPU, which on tensors without values only tells shapes."""

    def forward(self, rows: torch.Tensor, packing: Packing) -> torch.Tensor:
        rows = rows.unflatten(-1, (2, 8)).transpose(1, 2)
        return attention._flash(rows, rows, rows, packing, attention._Options(causal=True)).transpose(1, 2).flatten(2)


def test_the_flash_kernel_is_compiled_once() -> None:
    """However many sequences there are, and however long the longest is: at first it is all rows, by chance."""
    block = Flash()
    apply_compile([block], "eager")
    for lengths in ([7], *RAGGED):
        packing = Packing.of(np.array(lengths, np.int64)).to("meta")
        rows = torch.empty(1, packing.rows, 16, dtype=torch.bfloat16, device="meta")
        if packing.rows:
            assert block(rows, packing).shape == rows.shape
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize(
    ("module", "tp", "recompute", "message"),
    [
        ("lm", 1, None, "transforms name 'lm'; the modules are vision, audio, llm"),
        ("vision", 2, None, "compile of 'vision' with tp=2: .*; set tp=1 or leave it out"),
        ("llm", 2, "all but matmuls", "fails on recompute='all but matmuls' there; set recompute to 'all'"),
        ("llm: eager", 1, "every 2", "compile of 'llm' is 'eager', .* other random numbers .*'aot_eager'"),
    ],
)
def test_what_cannot_be_compiled_is_refused(module: str, tp: int, recompute: str | None, message: str) -> None:
    model = reader()
    modules = dict(model.modules_by_name) | {"llm": titan_llama(**TITAN | {"dim": 16})}
    layouts = {n: ModuleLayout.from_config(n, {"ranks": [0, 1], "tp": tp}).resolved() for n in modules}
    name, _, backend = module.partition(": ")
    given = read_transforms({name: {"recompute": recompute, "compile": backend or "aot_eager"}})
    with pytest.raises(ConfigError, match=message):
        checked_blueprint(MultimodalModel(modules), Placement(layouts, 2), Options(transforms=given))


def test_a_module_without_blocks_is_refused() -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MultimodalModel({"llm": hf_llama(vocab_size=8, num_hidden_layers=0, **small)})
    transforms = read_transforms({"llm": {"compile": "eager", "recompute": "all"}})
    with pytest.raises(ConfigError, match="compile and recompute of 'llm': it has no blocks; leave it out"):
        checked_blueprint(model, place({"llm": ModuleLayout((0,))}, 1), Options(transforms=transforms))
