"""The workloads have the statistics that their sources print, and are metadata that a step plan takes."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from benchmarks.workloads import WORKLOADS, laion, llava, orchmllm, video
from benchmarks.workloads.workload import choose, generator, patches
from hetero_strategy.plan.plan_step import plan_step
from hetero_strategy.plan.step_plan import edge_blocks

ORCHMLLM = ["orchmllm_10b", "orchmllm_18b", "orchmllm_84b"]
MANY = 200_000


@pytest.mark.parametrize("name", WORKLOADS)
def test_metadata_makes_a_step_plan_in_which_every_row_of_a_sample_has_one_place(name: str) -> None:
    load = WORKLOADS[name](60, 3)
    metadata = load.metadata()
    tokens = load.tokens()
    np.testing.assert_array_equal(metadata.tokens, tokens)
    # Counted sample by sample, apart from the code under test.
    for s in range(60):
        own = [int(r) for i in load.items.values() for r in i.rows[i.sample == s]]
        assert tokens[s] == load.text[s] + sum(own)
        runs = sorted(
            (int(a), int(a + r))
            for i in metadata.items.values()
            for a, r, of in zip(i.start, i.edge_rows, i.sample, strict=True)
            if of == s
        )
        edges = [0, *(x for run in runs for x in run), int(tokens[s])]
        assert edges == sorted(edges), "items overlap or leave their sample"
    assert (metadata.labels >= 0).all() and (metadata.labels <= load.text).all()

    instances = {**dict.fromkeys(load.items, 3), "llm": 4}
    plan = plan_step(metadata, instances, ["llm"], microbatches=2)
    for module, items in load.items.items():
        assert sum(int(a.totals(inner=True).sum()) for a in plan.assignments[module]) == int(items.inner_rows.sum())
        crossing = sum(int(edge_blocks(plan, module, p, "llm", t).rows.sum()) for p, t in plan.feeds(module, "llm"))
        assert crossing == int(items.rows.sum())


@pytest.mark.parametrize("name", WORKLOADS)
def test_depends_on_the_seed_alone_and_has_sound_arrays(name: str) -> None:
    one, same, other = (WORKLOADS[name](500, seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one.text, same.text)
    assert one.assumptions and all(a.endswith(".") for a in one.assumptions)
    assert len(one.text) == 500 and one.text.dtype == np.int64 and (one.text > 0).all()
    for module, items in one.items.items():
        np.testing.assert_array_equal(items.inner_rows, same.items[module].inner_rows)
        assert {x.dtype for x in (items.sample, items.inner_rows, items.rows)} == {np.dtype(np.int64)}
        assert (np.diff(items.sample) >= 0).all() and items.sample.max() < 500
        assert (items.inner_rows >= items.rows).all() and (items.rows >= 1).all()
    assert not np.array_equal(one.text, other.text)


@pytest.mark.perf
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_global_batch_of_2560_instances_takes_a_moment(name: str) -> None:
    start = time.process_time()
    WORKLOADS[name](20_000, 0).metadata()
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("part", orchmllm.PARTS)
def test_librispeech_durations_are_those_that_icefall_prints(part: str) -> None:
    printed = orchmllm.PARTS[part]
    drawn = np.interp(generator(1).random(MANY), orchmllm.QUANTILES, printed.quantiles)
    for q, seconds in zip(orchmllm.QUANTILES[1:-1], printed.quantiles[1:-1], strict=True):
        tail = 0.35 if q in (0.001, 0.999) else 0.1
        assert np.quantile(drawn, q) == pytest.approx(seconds, abs=tail), q
    assert drawn.min() >= printed.quantiles[0] and drawn.max() <= printed.quantiles[-1]
    assert drawn.mean() == pytest.approx(printed.mean, rel=0.015)  # the table's own mean: not used for drawing
    assert drawn.std() == pytest.approx(printed.deviation, rel=0.03)
    # Why not a lognormal of the same mean and deviation: that one is skewed to the other side.
    assert np.mean(drawn < drawn.mean()) < 0.45


def test_the_960_hours_mix_their_parts_by_utterances() -> None:
    """LibriSpeech has 28 539, 104 014 and 148 688 utterances in its training parts."""
    weights = np.array([p.hours * 3600 / p.mean for p in orchmllm.PARTS.values()])
    np.testing.assert_allclose(weights, [28_539, 104_014, 148_688], rtol=0.02)
    share = weights / weights.sum()
    mean = float(share @ [p.mean for p in orchmllm.PARTS.values()])
    assert orchmllm.utterances(generator(2), MANY).mean() == pytest.approx(mean, rel=0.015)


def test_whisper_frames() -> None:
    """Megatron-LM's calculate_audio_tokens.py: 50 rows a second, 1500 at most."""
    seconds = np.array([0.001, 0.02, 1.0, 1.001, 30.0, 33.0])
    np.testing.assert_array_equal(orchmllm.frames(seconds), [1, 1, 50, 51, 1500, 1500])


@pytest.mark.parametrize(("pixels", "either", "both"), [(256, 268, 211), (512, 112, 67), (1024, 26, 9.6)])
def test_laion_sides_are_those_of_its_counts(pixels: int, either: float, both: float) -> None:
    short, long = laion.sides(generator(3), MANY)
    assert (short <= long).all()
    assert np.mean(long >= pixels) == pytest.approx(either / 413, abs=0.012)
    assert np.mean(short >= pixels) == pytest.approx(both / 413, abs=0.004)


@pytest.mark.parametrize(("name", "most"), [("laion", 32 * 32), ("laion_1024", 64 * 64)])
def test_laion_sequences_are_packed_greedily(name: str, most: int) -> None:
    load = WORKLOADS[name](400, 4)
    tokens, rows = load.tokens(), load.items["vision"].rows
    assert tokens.max() <= laion.SEQUENCE and rows.max() == most
    # Whatever begins a sequence did not fit into the one before: the gap is smaller than any pair that could follow.
    assert laion.SEQUENCE - tokens.min() < most + 256
    assert len(np.unique(load.items["vision"].sample)) == 400


def test_video_durations_are_those_of_their_counts() -> None:
    """The dataset viewer counts 618.0k, 274.1k, 246.5k and 234.3k rows of four ranges of seconds."""
    seconds = video.durations(generator(4), MANY)
    shares = np.histogram(seconds, video.SECONDS)[0] / MANY
    np.testing.assert_allclose(shares, np.array([618.0, 274.1, 246.5, 234.3]) / 1372.9, atol=0.005)
    load = WORKLOADS["video_long_tail"](20_000, 0)
    frames = np.bincount(load.items["vision"].sample[load.items["vision"].rows == video.ROWS], minlength=20_000)
    assert 0.64 < np.mean(frames > 0) < 0.7 and 300 < frames.max() <= video.LONGEST
    tokens = load.tokens()
    assert tokens.max() > 100_000 and np.percentile(tokens, 99) > 10 * np.median(tokens)


def test_packing_against_a_loop() -> None:
    lengths = generator(5).integers(1, 60, 300)
    starts, filled = [0], 0
    for number, length in enumerate(lengths):
        if filled + length > 100:
            starts.append(number)
            filled = 0
        filled += length
    found = laion.packed(lengths, 100, 10_000)
    np.testing.assert_array_equal(found, starts)
    np.testing.assert_array_equal(laion.packed(lengths, 100, 7), starts[:8])


def test_llava_sources_have_the_shares_of_table_7() -> None:
    names, counts = list(llava.SOURCES), np.array([s.samples for s in llava.SOURCES.values()])
    assert counts.sum() == pytest.approx(665, abs=1)
    share = np.bincount(llava.sources(generator(6), MANY), minlength=len(names)) / MANY
    np.testing.assert_allclose(share, counts / counts.sum(), atol=0.004)
    load = WORKLOADS["llava"](MANY, 6)
    assert 1 - len(load.items["vision"].sample) / MANY == pytest.approx(0.060, abs=0.003)  # text only
    assert set(load.items["vision"].rows) == {(336 // 14) ** 2}


@pytest.mark.parametrize("name", ORCHMLLM)
def test_orchmllm_follows_section_8(name: str) -> None:
    cap, vision, audio = {"orchmllm_10b": (448, 1, 2), "orchmllm_18b": (672, 4, 2), "orchmllm_84b": (896, 4, 4)}[name]
    load = WORKLOADS[name](50_000, 8)
    seen, heard = load.items["vision"], load.items["audio"]
    assert seen.inner_rows.max() <= (cap // 14) ** 2
    np.testing.assert_array_equal(seen.rows, -(-seen.inner_rows // vision))
    np.testing.assert_array_equal(heard.rows, -(-heard.inner_rows // audio))
    assert not set(seen.sample) & set(heard.sample), "an auditory task has no picture"
    assert len(heard.sample) / 50_000 == pytest.approx((281 + 21) / 967, abs=0.01)


def test_incoherence_of_orchmllm() -> None:
    """Section 3.1: text follows the duration of transcribed speech, not that of a sound asked about."""
    rng = generator(9)
    seconds = orchmllm.utterances(rng, 20_000)
    assert np.corrcoef(seconds, orchmllm.transcript(rng, seconds))[0, 1] > 0.8
    assert orchmllm.questions(rng, 20_000).max() <= 30.0
    load = WORKLOADS["orchmllm_10b"](20_000, 9)
    for items in load.items.values():
        share = np.zeros(20_000)
        np.add.at(share, items.sample, items.rows / load.tokens()[items.sample])
        assert share.std() > 0.25, "figure 3: the proportions have substantial variance"


@pytest.mark.parametrize(
    ("size", "cap", "grid"),
    [((640, 480), 448, (32, 24)), ((640, 480), 672, (46, 35)), ((200, 100), 448, (15, 8)), ((3, 900), 448, (1, 32))],
)
def test_patches(size: tuple[int, int], cap: int, grid: tuple[int, int]) -> None:
    width, height = np.array([float(size[0])]), np.array([float(size[1])])
    assert patches(width, height, cap, 14)[0] == math.prod(grid)
    assert patches(height, width, cap, 14)[0] == math.prod(grid)


def test_small_draws() -> None:
    drawn = choose(generator(1), [1.0, 0.0, 3.0], 40_000)
    np.testing.assert_allclose(np.bincount(drawn) / 40_000, [0.25, 0.0, 0.75], atol=0.01)
