"""Ranks read of a folder what they own, and never have a large tensor in memory twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.folder_start import FAMILIES, VISION, measured, written
from hetero_strategy.testing import Pool

WIDTH = {"num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 256}
"""Sizes of a model that is mostly its table: twice that would be 1.9 of what a stage owns."""


@pytest.mark.distributed
def test_a_tied_table_is_in_memory_once(pool: Pool, tmp_path: Path) -> None:
    folder = written(tmp_path, "qwen3, tied", **WIDTH, vocab_size=150_000)
    for read, memory, owned in measured(folder, pool, ["pp2"])["pp2"]:
        assert read == 1 and memory < 1.5 and owned > 5e7


@pytest.mark.distributed
def test_a_composites_ranks_read_their_parts(pool: Pool, tmp_path: Path) -> None:
    text = {**FAMILIES["qwen2_5_vl"][1]["text_config"], **WIDTH, "vocab_size": 1000}
    text["rope_parameters"] |= {"mrope_section": [2, 3, 3]}
    vision = {**VISION, "depth": 2, "out_hidden_size": 192}
    folder = written(tmp_path, "qwen2_5_vl", text_config=text, vision_config=vision)
    assert [read for ranks in measured(folder, pool, ["tp2", "pp2"]).values() for read, *_ in ranks] == [1] * 4
