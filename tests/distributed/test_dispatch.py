"""Payload read where it is sampled and dispatched to where it is computed: the same batches and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero_strategy.data.build_index import DatasetIndex, build_index
from hetero_strategy.loading import read_where_sampled as room
from hetero_strategy.loading.datamodule import MultimodalDataModule
from hetero_strategy.loading.loader import StepLoader, agreed
from hetero_strategy.loading.read_where_sampled import Dispatch, SampledDataset
from hetero_strategy.loading.steps import RankView, StepDataset
from hetero_strategy.plan.config import ModelContext
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed import scenario, stepping
from tests.distributed.exact import compare, expected, on, setting_of
from tests.distributed.stepping import SAMPLES, Reference, Run, Setting, data_of, placed, share_of, steps_on_rank
from tests.loading.compared import differences

LAYOUTS: dict[str, dict[str, Any]] = {
    "unequal dp, tp replicas": {"vision": on(0, 1, 2), "audio": on(2, 3), "llm": on(0, 1, 2, 3, tp=2)},
    "ranks that read for others only": {"vision": on(0, 1, pp=2), "audio": on(2, 3, tp=2), "llm": on(0, 2)},
    "generator": {"vision": on(0, 1), "llm": on(0, 1, 2), "draw": on(1, 2)},
    "pipelined generator": {"vision": on(0, 1), "llm": on(0, 1, 2, 3, cp=2), "draw": on(1, 2, 3, pp=3)},
}
BALANCES: tuple[Mapping[str, Any] | None, ...] = (None, {}, {"policy": "lpt"})


def unmeasured(setting: Setting) -> DatasetIndex:
    made = data_of(setting.folder, "draw" in setting.modules)
    manifest = Path(setting.folder) / "train.json"
    return build_index(manifest, made.tokenizer, made.processors, measure=False, progress=False)


def sampled_like(fetch: StepDataset, setting: Setting, rank: int, world: int) -> SampledDataset:
    """The same steps, read where they are sampled."""
    return SampledDataset(
        unmeasured(setting),
        fetch.processors,
        fetch.edges,
        fetch.share,
        kinds=fetch.kinds,
        global_batch_size=fetch.global_batch_size,
        microbatches=fetch.microbatches,
        microbatch_rows=fetch.microbatch_rows,
        balancing=fetch.balancing,
        seed=fetch.seed,
        shuffle=fetch.shuffle,
        rank=rank,
        world=world,
    )


def shares_of(setting: Setting, world: int) -> list[RankView]:
    return [share_of(placed(setting, world), setting, rank) for rank in range(world)]


@dataclass
class Seen:
    """Of one rank."""

    differences: list[str]
    sent: list[int]
    """Bytes of payload in each step."""
    received: list[int]


def batches_on_rank(
    rank: int, world: int, settings: Sequence[Setting], sizes: Sequence[tuple[int, int]], damage: bool = False
) -> Seen:
    """Batches of (samples, microbatches), fetched and dispatched."""
    group = dist.new_group(backend="gloo")
    shares, seen = shares_of(settings[0], world), Seen([], [], [])
    exchange = dist.all_to_all_single

    def counted(incoming: torch.Tensor, outgoing: torch.Tensor, *args: Any, **options: Any) -> None:
        exchange(incoming, outgoing, *args, **options)
        seen.sent[-1] += outgoing.nbytes
        seen.received[-1] += incoming.nbytes
        if damage and incoming.numel():
            incoming.view(-1).view(torch.uint8)[0] ^= 1  # the smallest there is

    room.dist.all_to_all_single = counted  # type: ignore[attr-defined]
    for setting, (samples, microbatches) in product(settings, sizes):
        batches = tuple(tuple(range(a, min(a + samples, SAMPLES))) for a in range(0, SAMPLES, samples))
        fetch = stepping.steps_of(replace(setting, batches=batches), microbatches, shares[rank])
        sampled = sampled_like(fetch, setting, rank, world)
        dispatch = Dispatch(sampled, shares, group)
        for step in range(len(fetch)):
            seen.sent.append(0)
            seen.received.append(0)
            wanted = fetch[step]
            with stepping.fp64():  # a loading thread runs while the main thread makes tensors of 64-true
                found = dispatch(sampled[step])
            seen.differences += [f"{samples} {step} {path}" for path in differences(wanted, found)]
    return seen


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_batches(pool: Pool, folders: dict[bool, str], layout: str) -> None:
    """Whole epochs: steps of one sample have ranks without items and modules without any."""
    settings = [setting_of(folders, LAYOUTS[layout], "1f1b", balance=balance) for balance in BALANCES]
    seen = pool.run(settings[0].world, batches_on_rank, settings, [(SAMPLES, 3), (2, 1), (1, 1)])
    assert [one.differences for one in seen] == [[]] * settings[0].world
    sent, received = (np.array([getattr(one, way) for one in seen]).sum(axis=0) for way in ("sent", "received"))
    assert (sent == received).all() and sent.sum() > 0


def test_a_damaged_message_is_noticed(pool: Pool, folders: dict[bool, str]) -> None:
    setting = setting_of(folders, LAYOUTS["generator"], "1f1b")
    seen = pool.run(setting.world, batches_on_rank, [setting], [(SAMPLES, 1)], True)
    for rank, one in enumerate(seen):
        assert bool(one.differences) == (one.received[0] > 0), rank
    assert any(one.differences for one in seen)


def bytes_on_rank(rank: int, world: int, setting: Setting) -> tuple[int, int, list[int]]:
    """(payload bytes handed to the all-to-all, received, least that each rank has to receive), of one step."""
    group = dist.new_group(backend="gloo")
    shares = shares_of(setting, world)
    fetch = stepping.steps_of(setting, 2, shares[rank])
    handed = [0, 0]
    exchange = dist.all_to_all_single

    def counted(incoming: torch.Tensor, outgoing: torch.Tensor, *args: Any, **options: Any) -> None:
        handed[0] += outgoing.nbytes
        handed[1] += incoming.nbytes
        exchange(incoming, outgoing, *args, **options)

    room.dist.all_to_all_single = counted  # type: ignore[attr-defined]
    sampled = sampled_like(fetch, setting, rank, world)
    Dispatch(sampled, shares, group)(sampled[0])
    # From what is computed without any dispatch: the payload of each rank's own batch, less what is at home there.
    least = []
    index = fetch.index
    for r in range(world):
        options: dict[str, Any] = {"kinds": fetch.kinds, "global_batch_size": SAMPLES, "microbatches": 2}
        batch = StepDataset(index, fetch.processors, fetch.edges, shares[r], shuffle=False, **options)[0]
        total = 0
        for name in fetch.processors:
            for number, inputs in enumerate(batch.inputs.get(name, ())):
                if inputs is None or not len(inputs.values):  # type: ignore[union-attr]
                    continue
                instance = shares[r].mine[name]
                assert instance is not None
                units = batch.plan.assignments[name][number].of(instance)
                pieces = inputs.values.split(inputs.sizes.prod(axis=1).tolist())  # type: ignore[union-attr]
                of_sample = batch.plan.metadata.items[name].sample[units]
                total += sum(p.nbytes for p, k in zip(pieces, of_sample, strict=True) if k % world != r)
        least.append(total)
    return handed[0], handed[1], least


@pytest.mark.parametrize("layout", ["unequal dp, tp replicas", "pipelined generator"])
def test_no_byte_too_many(pool: Pool, folders: dict[bool, str], layout: str) -> None:
    setting = setting_of(folders, LAYOUTS[layout], "1f1b")
    seen = pool.run(setting.world, bytes_on_rank, setting)
    least = seen[0][2]
    assert [received for _, received, _ in seen] == least and sum(sent for sent, _, _ in seen) == sum(least) > 0


def dispatched_steps_on_rank(
    rank: int, world: int, setting: Setting, wanted: Reference, counts: Sequence[int | None]
) -> Run:
    """Training steps whose batches were dispatched, in a loader's background thread."""
    group = dist.new_group(backend="gloo")
    shares, original = shares_of(setting, world), stepping.steps_of

    def steps_of(setting: Setting, number: int | None, share: RankView, around: ModelContext | None = None) -> Any:
        sampled = sampled_like(original(setting, number, share, around), setting, rank, world)
        return list(StepLoader(sampled, finish=Dispatch(sampled, shares, group), group=group))

    stepping.steps_of = steps_of  # type: ignore[assignment]
    return steps_on_rank(rank, world, setting, wanted, counts)


@pytest.mark.full
def test_gradients_are_those_of_one_process(pool: Pool, folders: dict[bool, str]) -> None:
    setting = setting_of(folders, LAYOUTS["pipelined generator"], "1f1b", balance={})
    wanted = expected(setting)
    compare(wanted, pool.run(setting.world, dispatched_steps_on_rank, setting, wanted, (3,), timeout=240))


def failing_on_rank(rank: int, world: int, setting: Setting, on_error: str) -> tuple[list[int], int]:
    """A step in which rank 1 cannot read one of its files: (its samples that failed, labels that are left)."""
    group = dist.new_group(backend="gloo")
    shares = shares_of(setting, world)
    sampled = sampled_like(stepping.steps_of(setting, 1, shares[rank]), setting, rank, world)
    sampled.on_error = on_error  # type: ignore[assignment]
    images = sampled.index.items["vision"]
    bad = int(np.asarray(images.sample)[np.asarray(images.sample) % world == 1][0])
    broken = range(int(images.offsets[bad]), int(images.offsets[bad + 1]))
    original = DatasetIndex.path

    def path(self: DatasetIndex, module: str, item: int) -> Path:
        return Path("nowhere.png") if module == "vision" and item in broken else original(self, module, item)

    DatasetIndex.path = path  # type: ignore[method-assign]
    batch = agreed(Dispatch(sampled, shares, group)(sampled[0]), group)
    assert batch.plan.metadata.labels[bad] == 0 and batch.skipped == 1
    assert bad not in batch.plan.metadata.items["vision"].sample
    return sorted(batch.failed), batch.plan.loss_tokens


def test_all_ranks_hear_of_a_bad_file(pool: Pool, folders: dict[bool, str]) -> None:
    setting = setting_of(folders, LAYOUTS["unequal dp, tp replicas"], "1f1b")
    seen = pool.run(4, failing_on_rank, setting, "skip")
    assert [len(failed) for failed, _ in seen] == [0, 1, 0, 0] and len({left for _, left in seen}) == 1
    with pytest.raises(WorkerError, match=r"nowhere\.png: file is missing") as caught:
        pool.run(4, failing_on_rank, setting, "stop")
    assert caught.value.error == "DataError" and "failed too" in str(caught.value)


def trained_on_rank(rank: int, world: int, job: scenario.Job, payload: str) -> scenario.Result:
    """A Trainer's run."""
    original = scenario.datamodule

    def datamodule(job: scenario.Job) -> MultimodalDataModule:
        made = original(job)
        return MultimodalDataModule(
            made.manifests["train"],
            model=lambda: scenario.model_of(job, vocabulary=512),
            tokenizer=job.folder,
            processors=made.processors,
            global_batch_size=job.batch,
            microbatches=job.microbatches,
            seed=1,
            payload=payload,  # type: ignore[arg-type]
        )

    scenario.datamodule = datamodule
    return scenario.train_on_rank(rank, world, job)


@pytest.mark.full
def test_a_trainer_trains_the_same(pool: Pool, tmp_path: Path) -> None:
    folder = scenario.data(tmp_path / "data")
    layouts = {"vision": on(0), "audio": on(1), "llm": on(0, 1)}
    job = scenario.Job(str(folder), layouts, steps=3, trainer={"max_epochs": 1})
    runs = [pool.run(2, trained_on_rank, job, payload, group=False) for payload in ("fetch", "all_to_all")]
    for fetched, dispatched in zip(*runs, strict=True):
        assert fetched.losses == dispatched.losses and len(fetched.losses) == 3
        assert fetched.gradients.keys() == dispatched.gradients.keys()
        assert all(torch.equal(x, dispatched.gradients[name]) for name, x in fetched.gradients.items())
