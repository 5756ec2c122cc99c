"""Payload that is read where it is sampled gives the batches of payload that is read where it is computed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hetero_strategy import ragged
from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import ConfigError, DataError
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.loading.loader import StepLoader, agreed
from hetero_strategy.loading.metadata import expanded
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.read_where_sampled import Decoded, Dispatch, SampledDataset, moves
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.mask import BidirectionalItems, Causal, ItemsAlone, MaskRule, Prefix
from hetero_strategy.model.causal_lm import CausalLMKind
from hetero_strategy.plan.config import BalanceConfig, ModelContext
from hetero_strategy.plan.masks import ALIGNMENT, sample_masks, sample_spans
from hetero_strategy.plan.step_plan import StepItems
from recipes.digits import write_digits
from tests.loading.compared import differences
from tests.manifests import entry, write_manifest
from tests.small_models import READING, digit_processors, draw_processors, kinds_of, reader

READS = ("vision", "audio", "llm")
DRAWS = ("vision", "draw", "llm")
EDGES = {READS: (("vision", "llm"), ("audio", "llm")), DRAWS: (("vision", "llm"), ("llm", "draw"))}


def index_of(manifest: Path, tokenizer: Path, *, measure: bool = False, **options: Any) -> DatasetIndex:
    processors = draw_processors() if "drawings" in str(tokenizer) else digit_processors()
    return build_index(manifest, ChatTokenizer(tokenizer), processors, measure=measure, progress=False, **options)


def both(folder: Path, modules: tuple[str, ...], share: RankView | None = None, **options: Any) -> tuple[Any, ...]:
    """(steps that fetch, steps that sample, dispatch) of the same data."""
    processors = draw_processors() if "draw" in modules else digit_processors()
    options = {"kinds": kinds_of(modules), "global_batch_size": 16, "microbatches": 2, "seed": 5, **options}
    indices = (index_of(folder / "train.json", folder, measure=measure) for measure in (True, False))
    share = share or RankView.whole(modules)
    fetch, sampled = (
        kind(index, processors, EDGES[modules], share, **options)
        for kind, index in zip((StepDataset, SampledDataset), indices, strict=True)
    )
    return fetch, sampled, Dispatch(sampled, [share])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one by one": {"global_batch_size": 1, "microbatches": 1},
    "equal microbatches": {"microbatches": 4, "microbatch_rows": {"vision": "equal"}},
    "small microbatches": {"microbatch_rows": {"vision": 8}, "shuffle": False},
    "balanced": {"microbatches": 3, "balancing": "auto"},
    "same noise": {"same_noise": True},
}


@pytest.mark.parametrize("modules", [READS, DRAWS], ids=["reads", "draws"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_batches_are_equal(digits: Path, drawings: Path, modules: tuple[str, ...], options: dict[str, Any]) -> None:
    share = RankView(dict.fromkeys(modules, 1), dict.fromkeys(modules, 0), {"llm": 4})
    if options.get("balancing"):
        options = {**options, "balancing": BalanceConfig.of("auto").resolve(share.instances, ModelContext())}
    fetch, sampled, dispatch = both(drawings if "draw" in modules else digits, modules, share, **options)
    assert len(fetch) == len(sampled)
    for place in [(0, step) for step in range(min(len(fetch), 5))] + [(3, len(fetch) - 1)]:
        wanted, found = fetch[place], dispatch(sampled[place])
        assert isinstance(found, Batch) and not differences(wanted, found)
        assert found.times is not None and found.times.payload > 0


def test_pipeline_stages_take_what_they_need(digits: Path, drawings: Path) -> None:
    for modules in (READS, DRAWS):
        for without in ({"without_first": frozenset(modules)}, {"without_last": frozenset(modules)},
                        {"without_first": frozenset(modules), "without_last": frozenset(modules)}):  # fmt: skip
            share = RankView(dict.fromkeys(modules, 1), dict.fromkeys(modules, 0), **without)  # type: ignore[arg-type]
            fetch, sampled, dispatch = both(drawings if "draw" in modules else digits, modules, share)
            assert not differences(fetch[1, 0], dispatch(sampled[1, 0]))


class Numbered(CausalLMKind):
    """Gives each row of an item the item's size."""

    def columns(self, units: Any, tokens: np.ndarray, learnt: np.ndarray) -> Mapping[str, torch.Tensor]:
        column = np.zeros((2, len(tokens)), np.int64)
        first = ragged.starts(units.edge_rows)
        for number, placed in enumerate(units.content.placed(units.numbers)):
            assert (placed.field, *placed.size_names) in (("image", "grid_h", "grid_w"), ("audio", "frames"))
            rows = ragged.expand(first[placed.sample] + placed.start, placed.rows)
            column[number, rows] = np.repeat(placed.sizes.prod(axis=1), placed.rows)
        return {"sizes": torch.from_numpy(column)}


def test_a_kind_is_given_the_places_of_items(digits: Path) -> None:
    """They are the slots that the items' rows fill, and alike in both ways of reading."""
    kinds = {**kinds_of(READS), "llm": Numbered()}
    fetch, sampled, dispatch = both(digits, READS, kinds=kinds, microbatches=1)
    batch = fetch[0, 0]
    assert not differences(batch, dispatch(sampled[0, 0]))
    for number, inputs in enumerate(batch.inputs["llm"]):
        for place, name in enumerate(("vision", "audio")):
            own = [slots for (source, _), slots in inputs.slots.items() if source == name]
            filled = torch.cat([torch.zeros(0, dtype=torch.int64), *own])
            assert torch.equal(inputs.columns["sizes"][place].nonzero()[:, 0], filled.sort()[0])
        given = batch.inputs["vision"][number]
        assert len(given.sizes)
        sizes = np.repeat(given.sizes.prod(axis=1), given.rows)
        assert sorted(sizes) == sorted(inputs.columns["sizes"][0][inputs.columns["sizes"][0] > 0].tolist())


@pytest.mark.parametrize("edges", [EDGES[READS], EDGES[READS][:1]], ids=["both", "vision alone"])
def test_plans_know_the_masks_of_batches(digits: Path, edges: tuple[tuple[str, str], ...]) -> None:
    """In both ways of reading; items of a module without an edge are text."""
    kind = CausalLMKind()
    rules: dict[int | None, MaskRule] = {None: BidirectionalItems(), 3: Prefix(3), 5: ItemsAlone(), 7: Causal(7)}
    kind.rules = rules
    kinds, share = (
        {**kinds_of(READS), "llm": kind},
        RankView(dict.fromkeys(READS, 1), dict.fromkeys(READS, 0), {"llm": 4}),
    )
    fetch, sampled, dispatch = both(digits, READS, share, kinds=kinds, microbatches=3)
    fetch.edges = sampled.edges = edges
    sources, there = [source for source, _ in edges], set[str]()
    for batch in (fetch[0, 0], dispatch(sampled[0, 0])):
        for part, inputs in zip(batch.plan.assignments["llm"], batch.inputs["llm"], strict=True):
            lengths = part.inner_rows_of(0)
            samples = np.append(part.of(0), np.full(len(lengths) - len(part.units), ALIGNMENT))
            masks = sample_masks([*rules.values()], batch.plan.metadata, sources, samples, lengths)
            assert inputs is not None and [*inputs.packing.masks] == [*rules]
            for mask, window in zip(masks, rules, strict=True):
                assert np.array_equal(mask.intervals(), inputs.packing.masks[window])
            there |= {*sample_spans(batch.plan.metadata, sources, samples).source.tolist()}
            assert len({len(mask.row) for mask in masks}) > 1
    assert there == {*sources}


def test_a_difference_is_found(digits: Path) -> None:
    """Negative control: one number of the payload."""
    fetch, sampled, dispatch = both(digits, READS)
    decoded = pickle.loads(pickle.dumps(sampled[0, 1]))
    decoded.items["audio"].values[3, 5] += 1e-3
    assert differences(fetch[0, 1], dispatch(decoded)) and not differences(fetch[0, 1], dispatch(sampled[0, 1]))


def test_nothing_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_digits(tmp_path / "d", train=12, val=2, progress=False)
    full = index_of(folder / "train.json", folder, measure=True)
    shutil.rmtree(folder / "images")
    index = index_of(folder / "train.json", folder)
    assert not index.measured and full.measured and index.folder != full.folder and index.content != full.content
    assert len(index) == len(full) and index.labels.tolist() == full.labels.tolist()
    again = pickle.loads(pickle.dumps(index))
    assert not again.measured and again.items["vision"].sizes.shape == (len(index.items["vision"].sample), 2)
    images = index.items["vision"]
    assert (index.ids == ChatTokenizer(folder).placeholder_id("image")).sum() == len(images.sample)


def test_refusals(digits: Path) -> None:
    index, full = index_of(digits / "train.json", digits), index_of(digits / "train.json", digits, measure=True)
    options: dict[str, Any] = {"kinds": kinds_of(READS), "global_batch_size": 4, "microbatches": 1}
    arguments = (digit_processors(), EDGES[READS], RankView.whole(READS))
    with pytest.raises(ConfigError, match="sizes are known only once items are decoded; use payload='all_to_all'"):
        StepDataset(index, *arguments, **options)[0]
    with pytest.raises(ConfigError, match="payload='all_to_all' needs one built with measure=False"):
        SampledDataset(full, *arguments, **options)
    with pytest.raises(ConfigError, match="verify is 'header' but measure is False"):
        index_of(digits / "train.json", digits, verify="header")
    with pytest.raises(ValueError, match="rank 0 of 1 dispatches what is read as rank 1 of 2"):
        Dispatch(SampledDataset(index, *arguments, rank=1, world=2, **options), [RankView.whole(READS)])
    with pytest.raises(IndexError):
        SampledDataset(index, *arguments, **options)[99]


def test_every_sample_has_one_home(digits: Path) -> None:
    index = index_of(digits / "train.json", digits)
    arguments = (index, digit_processors(), EDGES[READS], RankView.whole(READS))
    options: dict[str, Any] = {"kinds": kinds_of(READS), "global_batch_size": 13, "seed": 5}
    parts: list[Decoded] = []
    for rank in range(5):
        parts.append(SampledDataset(*arguments, rank=rank, world=5, **options)[2, 1])
    whole = SampledDataset(*arguments, **options)[2, 1]
    for name, items in whole.items.items():
        assert sum(len(part.items[name].numbers) for part in parts) == len(items.numbers)
        assert sum(part.items[name].values.sum(dtype=np.float64) for part in parts) == pytest.approx(
            items.values.sum(dtype=np.float64)
        )


def test_resume_and_workers(digits: Path) -> None:
    """The loader's places, workers and state are those of the other way."""
    fetch, sampled, dispatch = both(digits, READS, global_batch_size=8)
    wanted = list(StepLoader(fetch))
    loader = StepLoader(sampled, workers=Workers(2), finish=dispatch)
    found = []
    for batch in loader:
        found.append(batch)
        if len(found) == 3:
            state = loader.state_dict()
    loader.close()
    assert not differences(wanted, found) and len(wanted) == 8
    resumed = StepLoader(sampled, finish=dispatch)
    resumed.load_state_dict(state)
    assert not differences(wanted[3:], list(resumed))
    assert state.keys() == StepLoader(fetch).state_dict().keys()
    resumed.close()


def test_the_option(digits: Path) -> None:
    """Training batches are dispatched, others fetched; what has no meaning then is refused at once."""

    def module(**options: Any) -> MultimodalDataModule:
        return MultimodalDataModule(
            digits / "train.json", digits / "val.json", tokenizer=digits, model=reader, processors=READING,
            global_batch_size=16, microbatches=2, seed=1, **options,
        )  # fmt: skip

    fetch, other = module(), module(payload="all_to_all")
    assert not differences(list(fetch.train_dataloader()), list(other.train_dataloader()))
    assert not differences(list(fetch.val_dataloader()), list(other.val_dataloader()))  # type: ignore[arg-type]
    assert not other.indices["train"].measured and other.indices["val"].measured
    other.teardown()
    for options, message in (
        ({"payload": "all_to_all", "index": {"verify": "decode"}}, "verify is 'decode', but with payload='all_to_all'"),
        ({"payload": "all_to_all", "balance": {"window": 2}}, "balance.window is 2, but with payload='all_to_all'"),
    ):
        with pytest.raises(ConfigError, match=message):
            module(**options)


@pytest.fixture
def broken(digits: Path, tmp_path: Path) -> Path:
    """Four samples: one whose image is cut short, one without its file, one of text, one that is good."""
    Image.fromarray(np.arange(16 * 90, dtype=np.uint8).reshape(16, 90)).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    return write_manifest(
        tmp_path,
        entry("good", "see<image>", image="a.png"),
        entry("cut", "<image>and<image>", "22", image=["a.png", "cut.png"]),
        entry("text", "hi"),
        entry("gone", "<audio>with<image>", image="a.png", audio="none.wav"),
    )


def steps_of(manifest: Path, tokenizer: Path, **options: Any) -> SampledDataset:
    index = index_of(manifest, tokenizer, **options)
    processors = digit_processors()
    options: dict[str, Any] = {"kinds": kinds_of(READS), "global_batch_size": 4, "shuffle": False}
    return SampledDataset(index, processors, EDGES[READS], RankView.whole(READS), **options)


def test_what_cannot_be_read_stops(digits: Path, broken: Path) -> None:
    steps = steps_of(broken, digits)
    with pytest.raises(DataError, match=r"cut\.png: not a readable image.*sample 'cut', module 'vision'.*on_error"):
        Dispatch(steps, [RankView.whole(READS)])(steps[0])


def test_what_cannot_be_read_is_left_out(digits: Path, broken: Path, tmp_path: Path) -> None:
    """The samples that are left have the inputs and the N of a batch without the others."""
    steps = steps_of(broken, digits)
    steps.on_error = "skip"
    batch = agreed(Dispatch(steps, [RankView.whole(READS)])(steps[0]), None)
    assert sorted(batch.failed) == [1, 3] and batch.skipped == 2
    assert "none.wav: file is missing (sample 'gone', module 'audio')" in batch.failed[3]
    vision, text = batch.inputs["vision"][0], batch.inputs["llm"][0]
    assert vision is not None and text is not None and batch.inputs["audio"] == (None,)
    only = write_manifest(
        broken.parent, entry("good", "see<image>", image="a.png"), entry("text", "hi"), name="only.json"
    )
    kept = steps_of(only, digits)
    kept_batch = Dispatch(kept, [RankView.whole(READS)])(kept[0])
    wanted = kept_batch.inputs["llm"][0]
    assert not differences(vision, kept_batch.inputs["vision"][0])
    assert batch.plan.loss_tokens == kept_batch.plan.loss_tokens == int((text.labels != -100).sum())  # type: ignore[union-attr]
    lengths = text.packing.lengths.tolist()
    pieces = [text.ids.split(lengths)[i].tolist() for i in (0, 2)]  # type: ignore[union-attr]
    assert pieces == [x.tolist() for x in wanted.ids.split(wanted.packing.lengths.tolist())]  # type: ignore[union-attr]


def test_a_sample_that_turns_out_too_long(digits: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 90), np.uint8)).save(tmp_path / "b.png")
    manifest = write_manifest(
        tmp_path, entry("short", "<image>", image="b.png"), entry("long", "<image><image>", image=["b.png", "b.png"])
    )
    measured = index_of(manifest, digits, measure=True)
    tokens = np.diff(measured.offsets)
    assert len(index_of(manifest, digits, max_tokens=int(tokens[1]))) == 2
    steps = steps_of(manifest, digits, max_tokens=int(tokens[1]))
    assert not steps[0].failed
    steps = steps_of(manifest, digits, max_tokens=int(tokens[1]) - 1)
    message = (
        f"sample 'long': {tokens[1]} tokens, of which 12 are rows of 'vision', more than max_tokens={tokens[1] - 1};"
    )
    assert [*steps[0].failed] == [1] and steps[0].failed[1].startswith(message)
    with pytest.raises(DataError, match=message):
        Dispatch(steps, [RankView.whole(READS)])(steps[0])
    with pytest.raises(DataError, match="more than max_tokens=3"):  # the text alone: found without a file
        index_of(manifest, digits, max_tokens=3)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_places_after_expansion(data: st.DataObject) -> None:
    """Against a sample written out token by token."""
    samples = data.draw(st.integers(1, 4))
    words: list[list[tuple[str, int]]] = []
    for _ in range(samples):
        words.append(
            data.draw(st.lists(st.tuples(st.sampled_from(["text", "vision", "audio"]), st.integers(0, 4)), max_size=6))
        )
    tables: dict[str, StepItems] = {}
    wanted: dict[str, list[tuple[int, int, int]]] = {}
    for name in ("vision", "audio"):
        rows, start, sample, placed = [], [], [], []
        for number, sequence in enumerate(words):
            before = 0
            for place, (kind, size) in enumerate(sequence):
                if kind == name:
                    rows.append(size)
                    start.append(place)
                    sample.append(number)
                    if size:
                        placed.append((number, before, size))
                before += 1 if kind == "text" else size
        tables[name] = StepItems(*(np.array(x, np.int64) for x in (sample, rows, start, rows)))
        wanted[name] = placed
    given_tokens = np.array([len(sequence) for sequence in words])
    prompts = np.array([data.draw(st.integers(0, len(sequence))) for sequence in words])
    read = {name: table.edge_rows > 0 for name, table in tables.items()}
    tokens, prompt_rows, items = expanded(given_tokens, prompts, tables, read)
    ahead = [sequence[:prompt] for sequence, prompt in zip(words, prompts, strict=True)]
    assert prompt_rows is not None
    assert prompt_rows.tolist() == [sum(1 if k == "text" else n for k, n in sequence) for sequence in ahead]
    assert tokens.tolist() == [sum(1 if k == "text" else n for k, n in sequence) for sequence in words]
    for name, table in items.items():
        found = list(zip(table.sample.tolist(), table.start.tolist(), table.edge_rows.tolist(), strict=True))
        assert found == wanted[name]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_moves(data: st.DataObject) -> None:
    """Every rank gets what it computes, once, in the order in which it is sent; nothing else moves."""
    world, instances = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    items = data.draw(st.integers(0, 9))
    draw: Mapping[str, Any] = {
        "home": st.lists(st.integers(0, world - 1), min_size=items, max_size=items),
        "where": st.lists(st.integers(0, instances - 1), min_size=items, max_size=items),
        "reader": st.lists(st.integers(-1, instances - 1), min_size=world, max_size=world),
    }
    home, where, reader = (np.array(data.draw(one), np.int64) for one in draw.values())
    made = [moves(home, where, reader, rank) for rank in range(world)]
    sent: dict[tuple[int, int], list[int]] = {}
    for rank, mine in enumerate(made):
        assert (np.diff(mine.to) >= 0).all() and (np.diff(mine.source) >= 0).all()
        for item, to in zip(mine.sent.tolist(), mine.to.tolist(), strict=True):
            sent.setdefault((rank, to), []).append(item)
    for rank, mine in enumerate(made):
        computes = [item for item in range(items) if where[item] == reader[rank]]
        assert sorted([*mine.kept.tolist(), *mine.received.tolist()]) == computes
        assert all(home[item] == rank for item in mine.kept)
        for source in range(world):
            assert mine.received[mine.source == source].tolist() == sent.pop((source, rank), [])
        assert mine.any == any(len(other.sent) for other in made)
    assert not sent  # nothing was sent that nobody awaits
