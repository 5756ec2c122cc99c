from __future__ import annotations

import builtins
import errno
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import save_file

from hetero_strategy import checkpoint as ck
from hetero_strategy.checkpoint import folder as folders
from hetero_strategy.checkpoint import saving
from hetero_strategy.errors import CheckpointError
from tests.checkpoint.helpers import blank, flip, owned, same


def test_foreign_paths_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    (tmp_path / "stock.ckpt").write_bytes(pickle.dumps({}))
    (tmp_path / "empty").mkdir()
    for name, said in [("home", "thesis.txt"), ("stock.ckpt", "is a file")]:
        for act in (lambda p: ck.Checkpointer().save(owned(), {}, p), ck.remove, lambda p: ck.load(blank(), p)):
            with pytest.raises(CheckpointError):
                act(tmp_path / name)
        with pytest.raises(CheckpointError, match=said):
            ck.Checkpointer().save(owned(), {}, tmp_path / name)
    assert (tmp_path / "home" / "thesis.txt").exists() and (tmp_path / "stock.ckpt").exists()
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        ck.load(blank(), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint\.json"):
        ck.load(blank(), tmp_path / "empty")
    ck.Checkpointer().save(owned(), {}, tmp_path / "empty")


def test_what_a_file_system_leaves_in_a_checkpoint_goes_with_it(tmp_path: Path) -> None:
    for name in (".nfs0001", ".DS_Store"):
        ck.Checkpointer().save(owned(), {}, tmp_path / "c")
        (tmp_path / "c" / name).touch()
    ck.Checkpointer().save(owned(2), {}, tmp_path / "c")
    assert not any(name.startswith(".") for name in os.listdir(tmp_path / "c"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").touch()
    with pytest.raises(CheckpointError, match=r"it holds '\.netrc'"):
        ck.Checkpointer().save(owned(), {}, tmp_path / "home")


def test_an_old_checkpoint_that_stays_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder))

    ck.Checkpointer().save(owned(), {}, tmp_path / "c")
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"c\.old.* cannot be deleted yet"):
        patch.setattr(folders.shutil, "rmtree", busy)
        ck.Checkpointer().save(owned(2), {}, tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["c", "c.old"]
    ck.Checkpointer().save(owned(2), {}, tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]
    into = blank()
    ck.load(into, tmp_path / "c")
    assert same(into, owned(2))


def rewrite(**changes: Any) -> Callable[[Path], None]:
    """An index with other content and the right checksum."""

    def act(path: Path) -> None:
        content = json.loads((path / "checkpoint.json").read_text())
        del content["crc32"]
        body = json.dumps(content | changes)[:-1]
        (path / "checkpoint.json").write_text(f'{body},"crc32":"{zlib.crc32(body.encode()):08x}"}}')

    return act


def truncate(name: str, by: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - by)


def garbage(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate("rank-00000.safetensors", 4), "bytes instead of"),
        (truncate("checkpoint.json", 10), "is damaged"),
        (lambda path: (path / "metadata.json").unlink(), "not complete"),
        (lambda path: (path / "checkpoint.json").unlink(), "cut short"),
        (lambda path: (path / "metadata.json").write_text("}" * (path / "metadata.json").stat().st_size), "damaged"),
        (lambda path: (path / "checkpoint.json").write_bytes(b"\x80\x04\xff"), "is damaged"),
        (garbage, "its header changed since it was written"),
        (rewrite(version=9), "version 9"),
        (rewrite(version=1), "version 1, .*; load it with version 0.1 and save it again"),
        (rewrite(files={"../../etc/passwd": [1, []]}), "damaged"),
        (rewrite(tensors={}), "lacks 4 tensors"),
    ],
)
def test_damage_is_told(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    ck.Checkpointer().save(owned(), {"k": 1}, tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError, match=said):
        ck.load(blank(), tmp_path / "c")


def all_kinds(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint with a file of every kind, and tensors to load it into."""
    ck.Checkpointer().save(
        owned(), {"epoch": 1, "t": torch.arange(3.0)}, path, rank_state={"rng": torch.arange(5), "n": 1}
    )
    assert len(os.listdir(path)) == 6
    return blank()


def test_a_flip_of_any_byte_is_noticed(tmp_path: Path) -> None:
    into, draw = all_kinds(tmp_path / "c"), random.Random(0)
    ck.load(into, tmp_path / "c")
    named: list[str] = []
    for file in sorted((tmp_path / "c").iterdir()):
        size, header = file.stat().st_size, 8 + int.from_bytes(file.read_bytes()[:8], "little")
        for at in range(size):
            flip(file, at, bits := draw.randrange(1, 256))
            with pytest.raises(CheckpointError) as fault:
                ck.load(into, tmp_path / "c")
            assert str(file) in str(fault.value), (at, bits)
            if file.name == "rank-00000.safetensors" and at >= header:
                named.append(str(fault.value).split("of '")[1].split("'")[0])
            flip(file, at, bits)
    assert {key: named.count(key) for key in named} == {key: t.nbytes for key, t in owned().items() if t.nbytes}
    ck.load(into, tmp_path / "c")
    assert same(into, owned())


def test_checks_of_tensors_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "c"
    into = all_kinds(path)
    flip(path / "rank-00000.safetensors", (path / "rank-00000.safetensors").stat().st_size - 1, 0x40)
    ck.load(into, path, verify=False)
    assert not torch.equal(into["model.llm.b"], owned()["model.llm.b"])
    with pytest.raises(CheckpointError, match=r"of 'model\.llm\.b' changed since it was written"):
        ck.export(path, tmp_path / "out")
    flip(path / "metadata.safetensors", (path / "metadata.safetensors").stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"metadata\.safetensors is damaged"):
        ck.load(into, path, verify=False)


def test_a_damaged_index_is_told_though_an_older_one_is_there(tmp_path: Path) -> None:
    ck.Checkpointer().save(owned(), {}, tmp_path / "c.old")
    ck.Checkpointer().save(owned(2), {}, tmp_path / "new")
    os.rename(tmp_path / "new", tmp_path / "c")
    flip(tmp_path / "c" / folders.INDEX, 50)
    with pytest.raises(CheckpointError, match=r"c/checkpoint\.json"):
        ck.load(blank(), tmp_path / "c")


def test_a_link_gives_way_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    """``ModelCheckpoint(save_last="link")`` leaves one, where a later run saves."""
    ck.Checkpointer().save(owned(), {}, tmp_path / "best")
    os.symlink("best", tmp_path / "last")
    for _ in range(2):
        ck.Checkpointer().save(owned(2), {}, tmp_path / "last")
    assert sorted(os.listdir(tmp_path)) == ["best", "last"] and not (tmp_path / "last").is_symlink()
    for name, wanted in (("best", owned()), ("last", owned(2))):
        into = blank()
        ck.load(into, tmp_path / name)
        assert same(into, wanted)


def test_incomplete_folder_falls_back_to_the_old_one(tmp_path: Path) -> None:
    ck.Checkpointer().save(owned(), {}, tmp_path / "c")
    os.rename(tmp_path / "c", tmp_path / "c.old")
    for _ in ("missing", "incomplete"):
        into = blank()
        ck.load(into, tmp_path / "c")
        assert same(into, owned())
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / "metadata.json").write_text("{}")
    (tmp_path / "c.tmp-0badcafe").mkdir()
    ck.load(into, tmp_path / "c.tmp-0badcafe")  # what "the newest folder" finds after a kill
    ck.Checkpointer().save(owned(2), {}, tmp_path / "c")
    ck.load(into, tmp_path / "c")
    assert same(into, owned(2))
    assert os.listdir(tmp_path) == ["c"]


def test_a_killed_save_is_not_what_a_job_that_is_queued_again_goes_on_from(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", barebones=True)
    for number in (1, 2):
        path = trainer._checkpoint_connector.hpc_save_path(tmp_path)
        ck.Checkpointer().save(owned(number), {}, path)
    killed = folders.temporary_of(Path(path), "0badcafe")
    os.rename(path, killed)
    os.remove(killed / "checkpoint.json")
    assert trainer._checkpoint_connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_1.ckpt")
    assert trainer._checkpoint_connector.hpc_save_path(tmp_path) == path
    ck.Checkpointer().save(owned(), {}, path)
    assert sorted(os.listdir(tmp_path)) == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]


def test_a_run_that_finds_what_another_one_saved_in_place_of_its_own_ends(tmp_path: Path) -> None:
    """Each of the two would go on from the other's checkpoint, or lose its own. A run may replace an older one's."""
    path, saver = tmp_path / "c", ck.Checkpointer()
    for number in (1, 2):
        saver.save(owned(number), {}, path)
    ck.Checkpointer().save(owned(3), {}, path)  # of a later Trainer of this process
    saver.save(owned(4), {"global_step": 7}, tmp_path / "theirs")
    shutil.rmtree(path)
    os.rename(tmp_path / "theirs", path)
    with pytest.raises(
        CheckpointError, match=r"another run has saved step 7 there since this one saved; two runs would"
    ):
        saver.save(owned(5), {}, path)
    assert ck.describe(path).step == 7
    (path / "checkpoint.json").write_text("{")  # of a damaged one nothing is lost
    saver.save(owned(6), {}, path)


def test_two_runs_that_save_to_one_path_do_not_delete_what_the_other_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, write = [], saving.write_tensors

    def meanwhile(path: Path, entries: Any) -> Any:
        for act in (lambda: ck.Checkpointer().save(owned(2), {}, tmp_path / "c"), lambda: ck.remove(tmp_path / "c")):
            with pytest.raises(CheckpointError, match="another process is saving there now") as refused:
                act()
            said.append(refused)
        return write(path, entries)

    (tmp_path / "c.tmp-0badcafe").mkdir()  # of a killed one
    monkeypatch.setattr(saving, "write_tensors", meanwhile)
    ck.Checkpointer().save(owned(), {}, tmp_path / "c")
    assert len(said) == 2 and os.listdir(tmp_path) == ["c"] and not folders._handles
    monkeypatch.setattr(saving, "write_tensors", lambda path, entries: shutil.rmtree(path.parent) or {})
    with pytest.raises(CheckpointError, match="no other run may save there"):
        ck.Checkpointer().save(owned(3), {}, tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"] and not folders._handles
    into = blank()
    ck.load(into, tmp_path / "c")
    assert same(into, owned())


class Kill:
    """Counts file operations of this process and kills it at one of them."""

    def __init__(self, at: int) -> None:
        self.left = at

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    def install(self) -> None:
        for name in ("rename", "unlink", "rmdir", "mkdir", "fsync", "truncate"):
            setattr(os, name, self.around(getattr(os, name)))
        builtins.open = self.around(builtins.open)  # type: ignore[assignment]


def killed(at: int, act: Callable[[], Any]) -> bool:
    """Whether `act`, in a child process, was killed at its file operation number `at`."""
    child = os.fork()
    if child == 0:
        try:
            folders._seals.clear()  # this is a run of its own
            Kill(at).install()
            act()
        except BaseException:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def stands(path: Path, damaged: bool) -> None:
    """Checkpoint 1 at `path`, or in `.old` beside a damaged folder at `path`."""
    folders._seals.clear()
    ck.Checkpointer().save(owned(), {"n": 1}, path)
    if damaged:
        os.rename(path, path.with_name("c.old"))
        path.mkdir()
        (path / "metadata.json").write_text("{}")


def loaded_number(path: Path) -> int:
    into = blank()
    number = ck.load(into, path).metadata["n"]
    assert same(into, owned(number))
    return int(number)


@pytest.mark.parametrize("damaged", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_at_any_file_operation_one_checkpoint_is_whole(tmp_path: Path, damaged: bool) -> None:
    path = tmp_path / "c"
    seen = []
    for at in itertools.count():
        stands(path, damaged)
        dead = killed(at, lambda: ck.Checkpointer().save(owned(2), {"n": 2}, path))
        seen.append(loaded_number(path))
        if not dead:
            break
        # a second kill, with the leftovers of the first in the way
        killed(at // 2, lambda: ck.Checkpointer().save(owned(3), {"n": 3}, path))
        assert loaded_number(path) in (seen[-1], 3)
    assert seen == sorted(seen) and set(seen) == {1, 2} and len(seen) > 12
    ck.remove(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.full
def test_killed_removal_does_not_bring_back_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for at in itertools.count():
        ck.Checkpointer().save(owned(), {"n": 1}, path.with_name("c.old"))
        ck.Checkpointer().save(owned(2), {"n": 2}, tmp_path / "new")
        os.rename(tmp_path / "new", path)  # as a kill before the last deletion of a save leaves them
        dead = killed(at, lambda: ck.remove(path))
        if not dead:
            break
        try:
            assert loaded_number(path) == 2, at
        except CheckpointError:
            assert at > 0
        ck.remove(path)
    assert at > 6 and os.listdir(tmp_path) == []


def test_a_folder_of_safetensors_is_no_checkpoint(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a checkpoint of hetero_strategy"):
        ck.load({"model.w": torch.zeros(1)}, tmp_path)
