"""What a loader does when a file is damaged or a worker is killed: with real damaged files and real SIGKILLs."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.data.media import AudioProcessor, ImageProcessor
from hetero_strategy.data.tokenizer import ChatTokenizer
from hetero_strategy.errors import DataError
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.loader import StepLoader
from hetero_strategy.loading.options import Workers
from hetero_strategy.loading.process_pool import _lent
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.generator import GeneratorInputs
from hetero_strategy.model.inputs import IGNORE, EncoderInputs, SequenceInputs
from hetero_strategy.plan.step_plan import StepItems, StepMetadata, StepPlan
from hetero_strategy.zoo import flow_decoder, siglip2_encoder, titan_llama
from tests.loading.test_loader import flat
from tests.manifests import entry, write_manifest
from tests.small_models import draw_processors, kinds_of

MODULES = ("vision", "audio", "llm")
KINDS = kinds_of(MODULES)
EDGES = (("vision", "llm"), ("audio", "llm"))


def photographs(folder: Path, tokenizer: Path, count: int = 12) -> DatasetIndex:
    """Samples with a JPEG each, every third with a WAV too."""
    import soundfile

    rng = np.random.default_rng(0)
    entries = []
    for number in range(count):
        pixels = rng.integers(0, 255, (32, 48, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)
        media: dict[str, Any] = {"image": f"{number}.jpg"}
        question = "<image>"
        if number % 3 == 0:
            soundfile.write(folder / f"{number}.wav", rng.normal(0, 0.1, 4000).astype(np.float32), 8000)
            media["audio"], question = f"{number}.wav", "<image><audio>"
        entries.append(entry(f"s{number}", question, str(number), **media))
    manifest = write_manifest(folder, *entries)
    return build_index(manifest, ChatTokenizer(tokenizer), PROCESSORS, progress=False)


PROCESSORS = {
    "vision": ImageProcessor(patch_size=8, merge=2, channels=3),
    "audio": AudioProcessor(sampling_rate=8000, n_mels=8, n_fft=200),
}


def cut(path: Path) -> None:
    """Leave the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def index(digits: Path, tmp_path: Path) -> DatasetIndex:
    return photographs(tmp_path, digits)


def in_order(index: DatasetIndex, cls: type[StepDataset] = StepDataset, **options: Any) -> Any:
    options = {"kinds": KINDS, "global_batch_size": 2, "microbatches": 1, "shuffle": False, **options}
    return cls(index, PROCESSORS, EDGES, RankView.whole(MODULES), **options)


@pytest.fixture
def closing() -> Iterator[list[StepLoader]]:
    """Loaders to close after the test."""
    loaders: list[StepLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["5.jpg", "6.wav"])
def test_stop_at_a_damaged_file(index: DatasetIndex, closing: list[StepLoader], workers: int, name: str) -> None:
    number = int(name[0])
    cut(index.media_folder / name)
    loader = StepLoader(in_order(index), workers=Workers(workers))
    closing.append(loader)
    with pytest.raises(DataError) as error:
        list(loader)
    assert loader.consumed == number // 2  # the steps before it are trained on
    message = str(error.value)
    assert name in message and f"sample 's{number}'" in message and "on_error='skip'" in message
    assert "Traceback" not in message and "\n" not in message and len(message) < 500
    kind, reason = (("image", "truncated"), ("audio", "truncated"))[name.endswith("wav")]
    assert kind in message and reason in message


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_what_cannot_be_read(
    index: DatasetIndex, closing: list[StepLoader], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [flat(batch) for batch in StepLoader(in_order(index))]
    intact = in_order(index)[0, 2]
    cut(index.media_folder / "5.jpg")
    (index.media_folder / "6.wav").unlink()
    loader = StepLoader(in_order(index), workers=Workers(workers), on_error="skip")
    closing.append(loader)
    with caplog.at_level(logging.WARNING):
        batches = list(loader)
        assert [batch.skipped for batch in batches] == [0, 0, 1, 1, 0, 0]
        assert loader.skipped == 2
        loader.set_epoch(1)
        list(loader)
    assert loader.skipped == 4 and loader.state_dict()["skipped"] == 4
    warned = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(warned) == 2 and "5.jpg" in warned[0] and "6.wav" in warned[1]  # once per file
    assert [flat(b) for b in batches[:2]] == whole[:2] and [flat(b) for b in batches[4:]] == whole[4:]
    third = batches[2]
    labels, before = third.plan.metadata.labels, intact.plan.metadata.labels
    assert labels[0] == before[0] > 0 and labels[1] == 0 < before[1]
    assert third.plan.loss_tokens == before[0] == third.plan.normalizer("llm")
    vision, llm = third.inputs["vision"][0], third.inputs["llm"][0]
    assert isinstance(vision, EncoderInputs) and isinstance(llm, SequenceInputs)
    first, second = vision.values.split(vision.sizes.prod(axis=1).tolist())
    assert first.any() and second.shape == first.shape and not second.any()
    good, bad = llm.labels.split(llm.packing.lengths.tolist())
    assert (good != IGNORE).sum() == before[0] and (bad == IGNORE).all()
    assert llm.ids.equal(intact.inputs["llm"][0].ids)  # shapes and routes as planned


def test_skipped_samples_are_counted_over_a_resume_and_bounded(index: DatasetIndex) -> None:
    for number in (0, 1, 5, 8):
        cut(index.media_folder / f"{number}.jpg")
    loader = StepLoader(in_order(index), on_error="skip", max_skipped=3)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert (state["skipped"], state["consumed"]) == (3, 3)
    again = StepLoader(in_order(index), on_error="skip", max_skipped=3)
    again.load_state_dict(state)
    with pytest.raises(
        DataError, match=r"4 samples of epoch 0 .* max_skipped=3; the last: .*8\.jpg.*raise max_skipped"
    ):
        list(again)
    again.load_state_dict(state)
    again.set_epoch(1)
    assert again.skipped == 3
    with pytest.raises(DataError, match="4 samples of epoch 1"):  # counted per epoch
        list(again)
    old = {key: value for key, value in state.items() if "skipped" not in key}
    again.load_state_dict(old)  # a state of before there was a count
    assert again.skipped == 0
    for one in (loader, again):
        one.close()
    assert StepLoader(in_order(index)).max_skipped == 10


# ---- a sample without its image counts for nothing ------------------------------------------------------------------

WIDTH = 32


def small_model() -> MultimodalModel:
    modules = {
        "vision": siglip2_encoder(
            out_width=WIDTH, merge=2, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=4, num_channels=1, patch_size=8, num_patches=16,
        ),
        "llm": titan_llama(
            vocab_size=128, dim=WIDTH, n_layers=1, n_heads=4, n_kv_heads=4, multiple_of=16, max_seq_len=256
        ),
        "draw": flow_decoder(width=WIDTH, patch_size=2, channels=1, dim=16, n_layers=1, n_heads=2),
    }  # fmt: skip
    return MultimodalModel(modules, seed=11).double()


def gradients(batch: Batch) -> dict[str, torch.Tensor]:
    model = small_model()
    model(batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def drawing_sample(folder: Path, tokenizer: Path, last: object) -> DatasetIndex:
    """Seven whole samples and a last one."""
    rng = np.random.default_rng(1)
    for number in range(8):
        Image.fromarray(rng.integers(0, 255, (16, 32)).astype(np.uint8)).save(folder / f"{number}.jpg")
        Image.fromarray(rng.integers(0, 255, (8, 8)).astype(np.uint8)).save(folder / f"{number}.png")
    samples = [
        entry(f"s{n}", "<image>go", f"{n}<draw>", image=f"{n}.jpg", draw=f"{n}.png") if n % 2 else
        entry(f"s{n}", "<image>read", f"{n}{n}", image=f"{n}.jpg")
        for n in range(7)
    ]  # fmt: skip
    name = f"{len(list(folder.glob('*.json')))}.json"
    manifest = write_manifest(folder, *samples, last, name=name)
    return build_index(manifest, ChatTokenizer(tokenizer), draw_processors(), progress=False)


def eight(index: DatasetIndex, microbatches: int) -> StepDataset:
    edges, modules = (("vision", "llm"), ("llm", "draw")), ("vision", "llm", "draw")
    options: dict[str, Any] = {"kinds": kinds_of(modules), "global_batch_size": 8, "microbatches": microbatches}
    return StepDataset(index, draw_processors(), edges, RankView.whole(modules), **options)


@pytest.mark.full
@pytest.mark.parametrize("damaged", ["7.jpg", "7.png"])
def test_gradients_are_those_without_the_sample(drawings: Path, tmp_path: Path, damaged: str) -> None:
    """Against data whose last sample is a text of which nothing is to be learnt, in other microbatches."""
    last = entry("last", "<image>go", "7<draw>", image="7.jpg", draw="7.png")
    index = drawing_sample(tmp_path, drawings, last)
    other = drawing_sample(tmp_path, drawings, entry("last", "something else", "in its place"))
    loss, labels = np.array(other.loss), np.array(other.labels)
    loss[other.offsets[7] :], labels[7] = False, 0
    reference = gradients(eight(replace(other, loss=loss, labels=labels), 1)[0, 0])
    cut(tmp_path / damaged)
    loader = StepLoader(eight(index, 2), on_error="skip")
    batch = next(iter(loader))
    loader.close()
    assert batch.skipped == 1
    drawn = [x for x in batch.inputs["draw"] if isinstance(x, GeneratorInputs)]
    assert sum(int((~x.counted).sum()) for x in drawn if x.counted is not None) == 1
    assert batch.plan.normalizer("draw") == 3 * 64 and batch.plan.normalizer("llm") == labels.sum()
    found = gradients(batch)
    assert set(found) == set(reference) and len(found) > 30
    assert worst(found, reference) < 1e-10
    counted = eight(index, 2)
    counted.on_error = "skip"
    assert worst(gradients(counted[0, 0]), reference) > 1e-3  # the control: nobody silenced it
    # Controls: silenced in N and not in the losses, and the other way round.
    assert worst(gradients(Batch(batch.plan, counted[0, 0].inputs)), reference) > 1e-3
    assert worst(gradients(Batch(counted[0, 0].plan, batch.inputs)), reference) > 1e-3


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative error of the worst parameter; keys' biases have no gradient but rounding."""
    return max(
        float((found[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-6))
        for n in expected
        if not n.endswith("k_proj.bias") and expected[n].norm() > 1e-12
    )


def test_a_batch_of_bad_samples_alone_has_a_zero_gradient(drawings: Path, tmp_path: Path) -> None:
    index = drawing_sample(tmp_path, drawings, entry("last", "x", "y"))
    batch = eight(index, 2)[0, 0].without(np.ones(8, bool))
    assert batch.plan.loss_tokens == 0
    found = gradients(batch)
    assert found and all(not g.any() for g in found.values())


def test_ranks_with_several_instances_silence_their_own(digits: Path, tmp_path: Path) -> None:
    """Every rank's labels are silenced where the sample lies, and nowhere else."""
    index = photographs(tmp_path, digits, 8)
    bad = np.zeros(8, bool)
    bad[[1, 6]] = True
    left = 0
    for rank in range(3):
        share = RankView({"vision": 3, "audio": 1, "llm": 3}, {"vision": rank, "audio": None, "llm": rank}, {"llm": 4})
        steps = StepDataset(
            index, PROCESSORS, EDGES, share, kinds=KINDS, global_batch_size=8, microbatches=2, shuffle=False
        )
        before = steps[0, 0]
        after = before.without(bad)
        for number, (old, new) in enumerate(zip(before.inputs["llm"], after.inputs["llm"], strict=True)):
            assert isinstance(old, SequenceInputs) and isinstance(new, SequenceInputs)
            units = before.plan.assignments["llm"][number].of(rank)
            lengths = old.packing.lengths.tolist()
            for unit, was, now in zip(units, old.labels.split(lengths), new.labels.split(lengths), strict=False):
                assert (now == IGNORE).all() if bad[unit] else now.equal(was)
            left += int((new.labels != IGNORE).sum())
        assert after.plan.loss_tokens == before.plan.metadata.labels[~bad].sum()
        assert after.plan.metadata.skipped is bad
    assert left == after.plan.loss_tokens
    with pytest.raises(ValueError, match="which of 3 instances"):
        Batch(before.plan, before.inputs).without(bad)


# ---- killed workers -------------------------------------------------------------------------------------------------


class Deadly(StepDataset):
    """Kills the process that makes one of its steps, until it has done so ``times`` times."""

    deadly = 4
    times = 1
    signal = signal.SIGKILL
    notes: Path

    def __getitem__(self, place: Any) -> Any:
        with open(self.notes / str(os.getpid()), "a") as file:
            file.write(f"{place[1]} ")
        killed = len(list(self.notes.glob("killed*")))
        if place[1] == self.deadly and killed < self.times:
            (self.notes / f"killed{killed}").touch()
            faulthandler.disable()
            os.kill(os.getpid(), self.signal)
            time.sleep(10)
        return super().__getitem__(place)


def deadly(index: DatasetIndex, folder: Path, times: int, **options: Any) -> Any:
    notes = folder / f"notes{len(list(folder.glob('notes*')))}"
    notes.mkdir()
    steps = in_order(index, Deadly, global_batch_size=1, **options)
    steps.notes, steps.times = notes, times
    return steps


@pytest.mark.parametrize("workers", [1, 3])
def test_stop_at_a_killed_worker(index: DatasetIndex, tmp_path: Path, workers: int) -> None:
    loader = StepLoader(deadly(index, tmp_path, 1), workers=Workers(workers))
    with pytest.raises(DataError) as error:
        list(loader)
    assert 4 - workers <= loader.consumed <= 4  # steps that it had made may die with it
    message = str(error.value)
    assert f"loader worker {4 % workers} of {workers} was killed by SIGKILL (out of memory" in message
    assert (
        f"step {loader.consumed} of epoch 0" in message
        and f"workers.count={workers}" in message
        and "resume=" in message
    )
    assert "workers.prefetch (2)" in message and "\n" not in message
    loader.close()


def test_a_crash_of_a_decoder_is_told_apart(index: DatasetIndex, tmp_path: Path) -> None:
    steps = deadly(index, tmp_path, 1)
    steps.signal = signal.SIGSEGV
    loader = StepLoader(steps, workers=Workers(1))
    with pytest.raises(DataError, match=r"killed by SIGSEGV .a decoder crashed"):
        list(loader)
    loader.close()


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_resumed_run_goes_on_at_the_step_that_killed(index: DatasetIndex, tmp_path: Path, on_error: Any) -> None:
    expected = [flat(b) for b in StepLoader(in_order(index, global_batch_size=1))]
    steps = deadly(index, tmp_path, 1)
    loader = StepLoader(steps, workers=Workers(3), on_error=on_error)
    found = []
    with pytest.raises(DataError, match="loader worker 1 of 3 was killed by SIGKILL"):
        for batch in loader:
            found.append(flat(batch))
    state = loader.state_dict()
    loader.close()
    again = StepLoader(steps, workers=Workers(2), on_error=on_error)
    again.load_state_dict(state)
    assert found + [flat(b) for b in again] == expected  # nothing lost, nothing twice
    again.set_epoch(1)
    assert len(list(again)) == 12
    again.close()


def test_an_idle_worker_that_is_killed_stops_the_next_pass(index: DatasetIndex) -> None:
    loader = StepLoader(in_order(index), workers=Workers(2))
    assert len(list(loader)) == 6
    os.kill(loader._pool._workers[1].pid, signal.SIGKILL)  # type: ignore[union-attr]
    time.sleep(0.2)  # no signal interrupts whatever runs now
    loader.set_epoch(1)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"loader worker 1 of 2 was killed by SIGKILL .*step 0 of epoch 1"):
        list(loader)
    assert time.monotonic() - began < 20
    loader.close()
    assert len(list(loader)) == 6  # with new workers
    loader.close()


def test_a_fault_of_the_program_keeps_its_traceback(index: DatasetIndex) -> None:
    steps = in_order(index)
    steps.edges = None  # a bug
    loader = StepLoader(steps, workers=Workers(1))
    with pytest.raises(RuntimeError, match=r"(?s)TypeError in a loader worker: .*Traceback.*steps\.py"):
        list(loader)
    loader.close()


@pytest.mark.parametrize("workers", [0, 3])
def test_resume_is_exact_with_skips(index: DatasetIndex, workers: int) -> None:
    cut(index.media_folder / "2.jpg")
    options: dict[str, Any] = {"workers": Workers(workers), "on_error": "skip"}
    loader = StepLoader(in_order(index, global_batch_size=1, shuffle=True, seed=3), **options)
    loader.set_epoch(4)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    rest = [(flat(b), b.skipped) for b in iterator]
    again = StepLoader(in_order(index, global_batch_size=1, shuffle=True, seed=3), **options)
    again.load_state_dict(state)
    assert [(flat(b), b.skipped) for b in again] == rest and len(rest) == 7
    assert again.skipped == loader.skipped == 1
    for one in (loader, again):
        one.close()


def test_memory_of_a_batch_is_used_again_only_when_nobody_holds_it(index: DatasetIndex) -> None:
    before = len(_lent)
    loader = StepLoader(in_order(index, global_batch_size=1), workers=Workers(2))
    kept = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch == number % 3:
                tensor = next(x for x in batch.inputs["llm"] if x is not None).ids[2:]  # a part keeps the whole
                tensor += 1  # writable
                kept.append((tensor, tensor.clone()))
    assert len(kept) == 12 < len(_lent) - before < 12 + 2 * 4 < 36  # not one for each of 36 batches
    loader.close()
    assert len(_lent) == before
    assert all(tensor.equal(clone) for tensor, clone in kept)  # and they outlive the workers


def test_what_was_silenced_is_part_of_no_normaliser() -> None:
    ones, sample = np.ones(3, np.int64), np.array([0, 1, 1])
    items = {"draw": StepItems(sample, ones, ones, ones, targets=np.array([4, 8, 16]))}
    plan = StepPlan(StepMetadata(0, 0, np.arange(2), np.array([5, 5]), np.array([3, 2]), items), 1, {})
    left = Batch(plan, {}).without(np.array([False, True])).plan
    assert (left.normalizer("draw"), left.normalizer("llm")) == (4, 3)
