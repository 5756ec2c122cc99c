from __future__ import annotations

import json
import re
import weakref
from itertools import chain
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import CheckpointError, ConfigError, DataError
from hetero_strategy.layout import ModuleLayout, place
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.steps import RankView, StepDataset, epoch_order
from hetero_strategy.model import inputs as model_inputs
from hetero_strategy.model.generator import GeneratorInputs
from hetero_strategy.model.inputs import EncoderInputs, SequenceInputs
from tests.manifests import entry, write_manifest
from tests.small_models import digit_processors, draw_processors, kinds_of

EDGES = (("vision", "llm"), ("audio", "llm"))
MODULES = ("vision", "audio", "llm")


@pytest.fixture(scope="module")
def index(digits: Path) -> DatasetIndex:
    return build_index(digits / "train.json", ChatTokenizer(digits), digit_processors(), progress=False)


def steps(index: DatasetIndex, share: RankView | None = None, **options: object) -> StepDataset:
    options = {"kinds": kinds_of(MODULES), "global_batch_size": 16, "microbatches": 2, "seed": 5, **options}
    return StepDataset(index, digit_processors(), EDGES, share or RankView.whole(MODULES), **options)  # type: ignore[arg-type]


def flat(batch: Batch) -> list[object]:
    """Everything a batch holds, for comparison."""
    found: list[object] = [batch.plan.metadata.epoch, batch.plan.metadata.step, batch.plan.samples.tolist()]
    for name, made in sorted(batch.inputs.items()):
        for number, x in enumerate(made):
            found.append((name, number))
            if x is None:
                continue
            if isinstance(x, EncoderInputs):
                found += [name, x.values.tolist(), x.sizes.tolist(), x.rows.tolist(), x.packing.lengths.tolist()]
            else:
                slots = {k: v.tolist() for k, v in x.slots.items()}
                found += [name, x.ids.tolist(), x.labels.tolist(), x.packing.lengths.tolist(), slots]
    return found


def as_messages(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample in OpenAI's format, every file in its part."""
    files = {field: iter(np.atleast_1d(sample.get(field, []))) for field in ("image", "audio")}
    messages = []
    for turn in sample["conversations"]:
        pieces = re.split("<(image|audio)>", turn["value"])
        texts = [{"type": "text", "text": text} for text in pieces[::2]]
        items = [{"type": field, field: str(next(files[field]))} for field in pieces[1::2]]
        parts = [part for pair in zip(texts, items, strict=False) for part in pair] + texts[len(items) :]
        messages.append({"role": "user" if turn["from"] == "human" else "assistant", "content": parts})
    return {"id": sample["id"], "messages": messages, "images": None}


def test_every_format_makes_the_same_steps(digits: Path, tmp_path: Path, index: DatasetIndex) -> None:
    import datasets

    samples = json.loads((digits / "train.json").read_text())
    messages, keys = [as_messages(sample) for sample in samples], dict.fromkeys(chain(*samples))
    rows = datasets.Dataset.from_list([{key: sample.get(key) for key in keys} for sample in samples])
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "parts").mkdir()
    for number in range(2):
        rows.shard(2, number, contiguous=True).to_parquet(tmp_path / "parts" / f"train-{number:05d}-of-00002.parquet")
    datasets.Dataset.from_list(messages).to_parquet(tmp_path / "messages.PARQUET")
    (tmp_path / "list.jsonl").write_text(json.dumps(samples, indent=1))
    (tmp_path / "lines.JSON").write_text("\n".join(map(json.dumps, messages)))
    (tmp_path / "lines.JSONL").write_text("\n".join(map(json.dumps, samples)))
    expected = [flat(steps(index)[0, step]) for step in (0, 2)]
    for name in ("saved", "parts", "messages.PARQUET", "list.jsonl", "lines.JSON", "lines.JSONL"):
        same = build_index(
            tmp_path / name, ChatTokenizer(digits), digit_processors(), media_folder=digits, progress=False
        )
        assert same.ids.tolist() == index.ids.tolist() and same.loss.tolist() == index.loss.tolist(), name
        assert same.content == index.content and [flat(steps(same)[0, step]) for step in (0, 2)] == expected


def test_labels_and_slots_of_a_packed_microbatch(digits: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("L", (16, 16)).save(tmp_path / "a.png")
    Image.new("L", (32, 16)).save(tmp_path / "b.png")
    manifest = write_manifest(
        tmp_path,
        entry("x", "<image>u<image>", "1", image=["b.png", "a.png"]),  # bos i i u i \n 1 eos
        entry("y", "v", "23"),  # bos v \n 2 3 eos
    )
    tokenizer = ChatTokenizer(digits)
    index = build_index(manifest, tokenizer, digit_processors(), progress=False)
    share = RankView({"vision": 1, "audio": 1, "llm": 1}, {"vision": 0, "audio": 0, "llm": 0}, {"llm": 4})
    batch = steps(index, share, global_batch_size=2, microbatches=1, shuffle=False)[0]
    inputs = {name: made[0] for name, made in batch.inputs.items()}
    assert inputs["audio"] is None  # no instance has a clip
    sequence = inputs["llm"]
    assert isinstance(sequence, SequenceInputs)
    assert sequence.packing.lengths.tolist() == [8, 6, 2] and set(sequence.slots) == {("vision", 0)}
    assert sequence.slots["vision", 0].tolist() == [1, 2, 4]
    vocabulary, none = tokenizer.tokenizer.get_vocab(), -100
    one, two, three, eos = (vocabulary[t] for t in ("1", "2", "3", "<eos>"))
    assert sequence.labels.tolist() == [*[none] * 5, one, eos, none, none, none, two, three, eos, none, none, none]
    assert sequence.ids[8].item() == tokenizer.bos_id and sequence.ids[14:].tolist() == [0, 0]
    assert sequence.ids[sequence.slots["vision", 0]].tolist() == [tokenizer.placeholder_id("image")] * 3
    assert batch.plan.loss_tokens == 5 == int((sequence.labels != none).sum())
    vision = inputs["vision"]
    assert isinstance(vision, EncoderInputs) and vision.rows.tolist() == [2, 1] and vision.values.shape == (12, 64)


@pytest.mark.parametrize(("second", "alike"), [("3", True), ("33", False)])
def test_rows_of_a_step_of_one_length_are_alike(
    digits: Path, tmp_path: Path, second: str, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_inputs, "ALIKE_ROWS", 2)
    monkeypatch.setattr(model_inputs, "ALIKE_MULTIPLE", 1)
    manifest = write_manifest(tmp_path, entry("x", "u", "1"), entry("y", "v", second))
    index = build_index(manifest, ChatTokenizer(digits), digit_processors(), progress=False)
    share = RankView({"vision": 1, "audio": 1, "llm": 1}, {"vision": 0, "audio": 0, "llm": 0}, {})
    batch = steps(index, share, global_batch_size=2, microbatches=2, shuffle=False)[0]
    found = [x.packing.alike for x in batch.inputs["llm"] if isinstance(x, SequenceInputs)]
    assert found == [alike, alike], "each microbatch has one sequence"


@pytest.mark.parametrize("workers", [0, 1])
def test_waits_are_the_loaders_time_and_nobody_elses(index: DatasetIndex, workers: int) -> None:
    class Slow(StepDataset):
        def __getitem__(self, place: Any) -> Batch:
            sleep(0.3)
            return super().__getitem__(place)

    options: dict[str, Any] = {"kinds": kinds_of(MODULES), "global_batch_size": 4}
    given = Slow(index, digit_processors(), EDGES, RankView.whole(MODULES), **options)
    loader = StepLoader(given, workers=Workers(workers, 1))
    batches = iter(loader)
    next(batches)
    first = loader.waited
    assert first >= 0.3
    sleep(1.5)  # a checkpoint, say
    next(batches)
    second = loader.waited - first
    assert (second < 0.3) if workers else (0.3 <= second < 1.5), "the worker has made it meanwhile"
    loader.close()


@pytest.mark.parametrize("multiple", [1, 4])
def test_three_ranks_load_what_one_does(index: DatasetIndex, multiple: int) -> None:
    """One rank's batch, cut into items and samples by identity, against the union over three ranks."""

    Units = dict[tuple[str, int, int], tuple[object, ...]]

    def cut(batch: Batch, mine: dict[str, int | None], into: Units, batch_multiple: int = 1) -> None:
        for name, made in batch.inputs.items():
            for number, x in enumerate(made):
                instance = mine[name]
                assert instance is not None and x is not None
                units = batch.plan.assignments[name][number].of(instance)
                if isinstance(x, EncoderInputs):
                    pieces = x.values.split((x.sizes.prod(axis=1)).tolist())
                    content = [(piece.tolist(), size.tolist()) for piece, size in zip(pieces, x.sizes, strict=True)]
                else:
                    lengths = x.packing.lengths.tolist()
                    content = list(zip(x.ids.split(lengths), x.labels.split(lengths), strict=True))[: len(units)]
                    content = [(a.tolist(), b.tolist()) for a, b in content]
                    assert x.packing.rows % batch_multiple == 0
                for unit, piece in zip(units, content, strict=True):
                    assert (name, number, int(unit)) not in into  # no unit twice
                    into[name, number, int(unit)] = piece

    whole: Units = {}
    union: Units = {}
    everything = steps(index)
    reference = everything[3, 2]
    cut(reference, dict.fromkeys(MODULES, 0), whole)
    plans = []
    for rank in range(3):
        mine: dict[str, int | None] = {"vision": rank, "audio": 0 if rank == 1 else None, "llm": rank}
        share = RankView({"vision": 3, "audio": 1, "llm": 3}, mine, {"llm": multiple})
        batch = steps(index, share)[3, 2]
        plans.append(batch.plan.samples.tolist())
        assert ("audio" in batch.inputs) == (rank == 1)
        cut(batch, mine, union, multiple)
    assert union == whole and len(whole) > 16
    assert plans == [reference.plan.samples.tolist()] * 3


def test_an_instance_without_units_gets_zero_rows(index: DatasetIndex) -> None:
    many = {"vision": 64, "audio": 64, "llm": 64}
    share = RankView(many, dict.fromkeys(many, 63))
    made = steps(index, share)
    full = (
        number
        for number in range(len(made))
        if not any(a.idle for m in many for a in made.plan(0, number).assignments[m])
    )
    inputs = made[0, next(full)].inputs
    for number in range(2):
        for name in ("vision", "audio"):
            x = inputs[name][number]
            assert isinstance(x, EncoderInputs) and len(x.values) == len(x.rows) == 0
        llm = inputs["llm"][number]
        assert isinstance(llm, SequenceInputs) and len(llm.ids) == 0
        assert set(llm.slots) == {("vision", number), ("audio", number)}


def drawing_steps(folder: Path, share: RankView | None = None, **options: object) -> StepDataset:
    index = build_index(folder / "train.json", ChatTokenizer(folder), draw_processors(), progress=False)
    modules = ("vision", "llm", "draw")
    share = share or RankView.whole(modules)
    options = {"kinds": kinds_of(modules), "global_batch_size": 16, "microbatches": 2, "seed": 5, **options}
    return StepDataset(index, draw_processors(), (("vision", "llm"), ("llm", "draw")), share, **options)  # type: ignore[arg-type]


def drawn_items(batch: Batch, instance: int) -> dict[int, tuple[object, ...]]:
    """Step item -> its targets, noise, time, size, and its rows inside the module."""
    found = {}
    for assignment, x in zip(batch.plan.assignments["draw"], batch.inputs["draw"], strict=True):
        if x is None:
            continue
        assert isinstance(x, GeneratorInputs)
        parts = (part.split(x.target_rows.tolist()) for part in (x.values, x.noise))
        for unit, values, noise, *rest in zip(
            assignment.of(instance), *parts, x.time, x.sizes, x.packing.lengths, strict=True
        ):
            found[int(unit)] = (values.tolist(), noise.tolist(), *(part.tolist() for part in rest))
        filled = torch.cat([torch.arange(0), *x.slots.values()])
        assert len(filled) == x.rows.sum() and len(filled.unique()) == len(filled)
        assert (x.packing.positions[filled] < 2).all()  # an item's first rows are its conditions
    return found


def test_what_is_drawn_is_the_same_on_any_ranks_and_in_any_microbatches(drawings: Path) -> None:
    reference = drawing_steps(drawings)[3, 1]
    whole = drawn_items(reference, 0)
    assert len(whole) == len(reference.plan.metadata.items["draw"].edge_rows) > 4
    assert any(np.shape(values)[0] for values, *_ in whole.values())
    for tokens in (None, 20, 1000):
        union: dict[int, tuple[object, ...]] = {}
        for rank in range(3):
            share = RankView({"vision": 2, "llm": 1, "draw": 3}, {"vision": None, "llm": None, "draw": rank})
            own = {} if tokens is None else {"draw": tokens}
            batch = drawing_steps(drawings, share, microbatch_rows=own)[3, 1]
            mine = drawn_items(batch, rank)
            assert not set(mine) & set(union)
            union |= mine
            count = len(batch.plan.assignments["draw"])
            assert count == 2 if tokens is None else count > 2 if tokens == 20 else count == 1
        assert union == whole
    assert drawn_items(drawing_steps(drawings, seed=6)[3, 1], 0) != whole


def test_noise_changes_with_the_epoch_unless_told_otherwise(drawings: Path) -> None:
    for same in (False, True):
        made = drawing_steps(drawings, shuffle=False, same_noise=same)
        first, second = (drawn_items(made[epoch, 0], 0) for epoch in (0, 1))
        assert set(first) == set(second)
        for unit, (values, noise, time, *_) in first.items():
            assert values == second[unit][0]
            assert (noise == second[unit][1]) == (time == second[unit][2]) == same


def test_inner_stages_read_no_targets_but_know_the_times(drawings: Path) -> None:
    shares = {
        "all": RankView.whole(("vision", "llm", "draw")),
        "first": RankView({"draw": 1, "llm": 1, "vision": 1}, {"draw": 0}, without_last=frozenset({"draw"})),
        "inner": RankView(
            {"draw": 1, "llm": 1, "vision": 1}, {"draw": 0}, {}, frozenset({"draw"}), frozenset({"draw"})
        ),
    }
    made = {name: drawing_steps(drawings, share)[0, 0].inputs["draw"][0] for name, share in shares.items()}
    whole, inner = made["all"], made["inner"]
    assert isinstance(whole, GeneratorInputs) and isinstance(inner, GeneratorInputs)
    assert torch.equal(made["first"].values, whole.values) and len(whole.values)  # type: ignore[union-attr]
    assert inner.values.shape == inner.noise.shape == (0, 4)
    assert torch.equal(inner.time, whole.time) and (inner.packing.lengths == whole.packing.lengths).all()


def test_the_order_of_one_epoch_is_kept() -> None:
    first = weakref.ref(epoch_order(60, 5, 0))
    assert epoch_order(60, 5, 0) is first()
    epoch_order(60, 5, 1)
    assert first() is None


def test_order_depends_on_seed_and_epoch_alone(index: DatasetIndex) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = epoch_order(60, 5, 0).tolist()
    epoch_order.cache_clear()
    torch.manual_seed(2)
    np.random.seed(2)
    assert epoch_order(60, 5, 0).tolist() == first and sorted(first) == list(range(60))
    assert epoch_order(60, 5, 1).tolist() != first != epoch_order(60, 6, 0).tolist()
    loader = StepLoader(steps(index))
    state = torch.get_rng_state()
    seen = [batch.plan.samples.tolist() for batch in loader]
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(s) for s in seen] == [16, 16, 16, 12] and list(chain(*seen)) == first
    assert [len(b.plan.samples) for b in StepLoader(steps(index, drop_last=True))] == [16] * 3
    in_order = [b.plan.samples.tolist() for b in StepLoader(steps(index, shuffle=False))]
    assert list(chain(*in_order)) == list(range(60))


def test_workers_give_the_same_batches(index: DatasetIndex) -> None:
    plain, parallel = StepLoader(steps(index)), StepLoader(steps(index), workers=Workers(2))
    for epoch in range(2):  # the second epoch runs on the workers of the first
        for loader in (plain, parallel):
            loader.set_epoch(epoch)
        assert [flat(b) for b in plain] == [flat(b) for b in parallel]
    iterator = iter(parallel)
    next(iterator)
    assert parallel.state_dict()["consumed"] == 1  # although more is loaded already
    parallel.set_epoch(7)  # an epoch left half way, as with limit_train_batches
    plain.set_epoch(7)
    assert [flat(b) for b in plain] == [flat(b) for b in parallel]
    parallel.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_the_middle(index: DatasetIndex, workers: int) -> None:
    loader = StepLoader(steps(index), workers=Workers(workers))
    loader.set_epoch(2)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    rest = [flat(b) for b in iterator]
    again = StepLoader(steps(index), workers=Workers(workers))
    again.load_state_dict(state)
    assert again.state_dict() == state and len(again) == 4
    iter(again)  # Lightning asks for iterators it never uses
    again.set_epoch(2)
    assert [flat(b) for b in again] == rest and len(rest) == 2
    assert len(list(again)) == 4, "once more from the start"
    again.set_epoch(3)
    assert len(list(again)) == 4
    again.load_state_dict(state)
    again.set_epoch(3)  # the place belongs to its own epoch
    assert len(list(again)) == 4
    for one in (loader, again):
        one.close()


def resumed(made: StepDataset, state: dict[str, Any], epoch: int = 0) -> list[Batch]:
    loader = StepLoader(made)
    loader.load_state_dict(state)
    loader.set_epoch(epoch)
    return list(loader)


def test_resume_refuses_another_order(index: DatasetIndex) -> None:
    loader = StepLoader(steps(index))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(CheckpointError, match=r"after 1 of 4 steps: .*global_batch_size was 16, is 8"):
        resumed(steps(index, global_batch_size=8), state)
    with pytest.raises(CheckpointError, match="seed was 5, is 6"):
        resumed(steps(index, seed=6), state)
    assert len(resumed(steps(index, microbatches=1), state)) == 3  # does not change the global batches
    done = {**state, "consumed": 4}
    assert not resumed(steps(index, seed=6), done)
    assert len(resumed(steps(index, seed=6), state, epoch=1)) == 4  # a limit had ended the epoch there


def test_files_that_change_after_indexing(digits: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("L", (16, 16)).save(tmp_path / "a.png")
    manifest = write_manifest(tmp_path, entry("x", "<image>", image="a.png"))
    index = build_index(manifest, ChatTokenizer(digits), digit_processors(), progress=False)
    dataset = steps(index, global_batch_size=1, microbatches=1)
    assert dataset[0]
    Image.new("L", (48, 16)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png: .*the file has changed"):
        dataset[0]
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png: file is missing"):
        dataset[0]


def test_refusals(index: DatasetIndex) -> None:
    with pytest.raises(ConfigError, match="global_batch_size is 0"):
        steps(index, global_batch_size=0)
    with pytest.raises(ConfigError, match="microbatches is 9 but global_batch_size is 8"):
        steps(index, global_batch_size=8, microbatches=9)
    with pytest.raises(ConfigError, match="drop_last with global_batch_size 100 leaves nothing of 60"):
        steps(index, global_batch_size=100, drop_last=True)
    with pytest.raises(IndexError):
        steps(index)[0, 4]


def test_a_window_levels_steps_and_keeps_every_sample(index: DatasetIndex) -> None:
    few = {"global_batch_size": 6, "drop_last": True}
    alone, moved = steps(index, **few), steps(index, window=4, **few)
    assert len(alone) == len(moved) >= 8

    def epoch(made: StepDataset) -> list[np.ndarray]:
        return [made.samples(2, step) for step in range(len(made))]

    def tokens(drawn: list[np.ndarray]) -> np.ndarray:
        return np.array([np.asarray(index.offsets[s + 1] - index.offsets[s]).sum() for s in drawn])

    plain, levelled = epoch(alone), epoch(moved)
    full = len(alone) // 4 * 4
    for first in range(0, full, 4):
        window = slice(first, first + 4)
        assert sorted(np.concatenate(plain[window])) == sorted(np.concatenate(levelled[window]))
    assert all(len(drawn) == 6 for drawn in levelled)
    for one, other in zip(plain[full:], levelled[full:], strict=True):
        assert np.array_equal(one, other)  # too few steps are left for a window
    spread = [np.ptp(tokens(drawn[:full]).reshape(-1, 4), axis=1).mean() for drawn in (plain, levelled)]
    assert spread[1] < 0.3 * spread[0]
    assert np.array_equal(moved[2, 1].plan.samples, levelled[1])
    state = {**StepLoader(alone).state_dict(), "consumed": 2}
    assert resumed(alone, {name: value for name, value in state.items() if name != "window"})
    with pytest.raises(CheckpointError, match="window was 1, is 4"):
        resumed(moved, state)


def test_a_rank_knows_which_of_its_instances_context_parallel_ranks_it_is() -> None:
    placement = place({"vision": ModuleLayout(16), "llm": ModuleLayout(16, cp=4, tp=2)}, 16)
    found = [RankView.of(placement, ("vision", "llm"), rank).cp for rank in range(16)]
    assert found == [{"llm": (number // 2, 4, False)} for number in range(8)] * 2
