"""Slices of the crash and damage commands, and storage that refuses: the state of the art of what can go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lazarus.checkpoint import memory
from megatron_lazarus.checkpoint.attempt import Save
from megatron_lazarus.checkpoint.engine import FullSaves
from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.manifest import Manifest, read_latest
from megatron_lazarus.checkpoint.owner import NAME as OWNER
from megatron_lazarus.checkpoint.owner import STALE_S, Owner
from megatron_lazarus.checkpoint.restore import read_dense
from tests.crash import damage, kill
from tests.crash.job import EXPERTS, LAYERS, LIMIT_S, Ranks, check_content, check_files, newest

PARTIAL = FullSaves(persist_experts=1)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    assert kill.random_moments(15, seed=5, folder=str(tmp_path)) > 0


def test_killed_before_some_calls(tmp_path: Path) -> None:
    assert kill.all_points(str(tmp_path), every=23) > 5


def test_damage(tmp_path: Path) -> None:
    done = damage.examine(str(tmp_path), 40, seed=3)
    assert min(done["flip"], done["truncation"], done["fell back"]) > 0


def test_white_space_is_damage_too(tmp_path: Path) -> None:
    damage.prepare(str(tmp_path))
    path = tmp_path / "global_step6" / "manifest.json"
    text = path.read_text()
    Manifest.read(str(path.parent))
    path.write_text(text.replace("\n", " ", 1))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        Manifest.read(str(path.parent))


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.fail(f"this test needs the right to mount a tmpfs, as root has it: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("room", [0, 4096, 30_000, 60_000])
def test_disk_full(tmp_path: Path, room: int) -> None:
    """The save fails and frees what it has taken, the checkpoint before it stays, the next one is fine again."""
    disk = tmp_path / "disk"
    with small_disk(disk, 1 << 20):
        folder = str(disk)
        ranks = Ranks(PARTIAL)
        assert ranks.save(folder, 1)[0]
        ranks.settle()
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        (disk / "ballast").write_bytes(b"x" * (free - room))
        before = os.statvfs(folder).f_bavail
        published, reason = ranks.save(folder, 2)
        assert not published
        assert "No space left" in reason
        ranks.settle()
        assert os.statvfs(folder).f_bavail >= before, "the failed save has left something behind"
        assert read_latest(folder) == "global_step1"
        (disk / "ballast").unlink()
        assert ranks.save(folder, 3) == (True, "")
        ranks.close()
        chosen = newest(folder)
        assert chosen is not None
        assert chosen[0] == "global_step3"
        check_content(folder, chosen[1])


def test_no_room_even_to_say_what_failed(tmp_path: Path) -> None:
    """Rank 0 hears of it all the same, instead of waiting for a report that cannot be written."""
    disk, written = tmp_path / "disk", threading.Event()
    with small_disk(disk, 1 << 20):
        ranks = Ranks(PARTIAL)
        assert ranks.save(str(disk), 1)[0]
        ranks.settle()

        def begin(member: Any) -> Save | str:
            member.train(2)
            write = member.writer.write_files

            def first(save: Save) -> Any:
                report = write(save)
                written.set()
                return report

            def full(save: Save) -> Any:
                assert written.wait(LIMIT_S)
                with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
                    while ballast.write(b"x" * 512):
                        pass
                return write(save)

            member.writer.write_files = full if member.rank else first
            return member.begin(str(disk), "global_step2")

        saves = ranks.call(begin)
        assert saves[0].decided.wait(LIMIT_S)
        assert not saves[0].published
        assert "rank 1: No space left" in saves[0].reason
        ranks.settle()
        assert sorted(os.listdir(disk)) == ["ballast", "global_step1", "latest", OWNER]
        ranks.close()


def test_failed_save_is_deleted_while_another_rank_writes(tmp_path: Path) -> None:
    ranks = Ranks(PARTIAL)
    assert ranks.save(str(tmp_path), 1)[0]
    writes = threading.Event()

    def begin(member: Any) -> Save | str:
        member.train(2)

        def fails(save: Save) -> Any:
            assert writes.wait(LIMIT_S)
            raise RuntimeError("broken")

        def goes_on(save: Save) -> Any:
            for number in range(1_000_000):
                (tmp_path / "global_step2" / "experts" / f"{number}").write_bytes(b"x")
                (tmp_path / "global_step2" / f"{number}").write_bytes(b"x")
                if number == 100:
                    writes.set()

        member.writer.write_files = goes_on if member.rank else fails
        return member.begin(str(tmp_path), "global_step2")

    saves = ranks.call(begin)
    assert all(save.finished.wait(LIMIT_S) for save in saves)
    assert "RuntimeError: broken" in saves[0].reason
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest", OWNER]
    ranks.close()


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    ranks = Ranks(PARTIAL)
    published, reason = ranks.save(str(blocked / "saves"), 1)
    assert not published
    assert str(blocked) in reason
    assert ranks.save(str(tmp_path / "other"), 2) == (True, "")
    ranks.close()


def test_read_only_directory(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 1 << 20):
        ranks = Ranks(PARTIAL)
        assert ranks.save(str(disk), 1)[0]
        ranks.settle()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        published, reason = ranks.save(str(disk), 2)
        assert not published
        assert "Read-only file system" in reason
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert ranks.save(str(disk), 3) == (True, "")
        ranks.close()


def test_directory_removed(tmp_path: Path) -> None:
    """Between two saves: what the second would refer to is gone, which is told; the third writes everything anew."""
    import shutil

    folder = tmp_path / "saves"
    ranks = Ranks(PARTIAL)
    assert ranks.save(str(folder), 1)[0]
    ranks.settle()
    shutil.rmtree(folder)
    published, reason = ranks.save(str(folder), 2)
    assert not published
    assert "has been removed or changed" in reason
    assert ranks.save(str(folder), 3) == (True, "")
    ranks.close()
    chosen = newest(str(folder))
    assert chosen is not None
    check_content(str(folder), chosen[1])


def test_directory_removed_while_saving(tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "saves"
    ranks = Ranks(PARTIAL)
    assert ranks.save(str(folder), 1)[0]

    def slow(member: Any) -> Save | str:
        member.train(2)
        if member.rank == 1:
            wait = member.writer.write_files
            member.writer.write_files = lambda save: (shutil.rmtree(folder), wait(save))[1]
        return member.begin(str(folder), "global_step2")

    saves = ranks.call(slow)
    for save in saves:
        assert save.decided.wait(30)
        assert not save.published
    assert "remov" in saves[0].reason or "No such file" in saves[0].reason
    ranks.close()


OTHER_JOB = """
import sys
import threading
from megatron_lazarus.checkpoint.owner import Owner
Owner(sys.argv[1], "other").claim()
print("claimed", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_job(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OTHER_JOB, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def test_second_job_is_refused(tmp_path: Path) -> None:
    with other_job(tmp_path) as process:
        ranks = Ranks(PARTIAL)
        published, reason = ranks.save(str(tmp_path), 1)
        assert not published
        assert f"belongs to job other (process {process.pid}" in reason
        assert not (tmp_path / "global_step1").exists()
        process.kill()
        process.wait()
        # Its file is still there; that it is dead shows.
        assert json.loads((tmp_path / OWNER).read_text())["job"] == "other"
        assert ranks.save(str(tmp_path), 2) == (True, "")
        ranks.close()
    assert not (tmp_path / OWNER).exists()


def test_owner_on_another_host(tmp_path: Path) -> None:
    """Nothing but its signs of life tells whether it is there."""
    elsewhere = {"job": "other", "host": "elsewhere", "pid": 1, "process_start": 1}
    (tmp_path / OWNER).write_text(json.dumps(elsewhere))
    mine = Owner(str(tmp_path), "mine")
    with pytest.raises(CheckpointError, match="belongs to job other"):
        mine.claim()
    old = os.stat(tmp_path / OWNER).st_mtime - STALE_S - 5
    os.utime(tmp_path / OWNER, (old, old))
    mine.claim()
    mine.check()
    # A generation of the same job on another host takes over at once.
    (tmp_path / OWNER).write_text(json.dumps({**elsewhere, "job": "mine"}))
    mine.claim()
    (tmp_path / OWNER).write_text(json.dumps(elsewhere))
    with pytest.raises(CheckpointError, match="job other writes here now"):
        mine.check()
    mine.release()
    assert (tmp_path / OWNER).exists(), "it is not ours to remove"


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_pickle_in_any_file_is_not_executed(tmp_path: Path) -> None:
    """Even where the manifest was made to agree with it."""
    import hashlib
    from dataclasses import asdict, replace

    folder, mark = tmp_path / "saves", tmp_path / "executed"
    ranks = Ranks(PARTIAL)
    assert ranks.save(str(folder), 1)[0]
    ranks.close()
    tag = folder / "global_step1"
    torch.save({"module": Bomb(str(mark))}, tmp_path / "bomb")
    bomb = (tmp_path / "bomb").read_bytes()
    manifest = Manifest.read(str(tag))
    for _, entry, _ in list(manifest.all_files()):
        path = tag / entry.name
        content = path.read_bytes()
        path.write_bytes(bomb)
        text = json.dumps(asdict(manifest)).replace(entry.sha256, hashlib.sha256(bomb).hexdigest())
        text = text.replace(f'"bytes": {entry.bytes}', f'"bytes": {len(bomb)}')
        body = json.loads(text)
        forged = Manifest._from_body({"version": 2, **body})
        forged = replace(forged, files=[f for f in forged.files if f.name == entry.name or f.bytes != len(bomb)])
        with pytest.raises(CheckpointError):
            (check_content if "experts" in entry.name else read_dense)(str(folder), forged)
        path.write_bytes(content)
    (tag / "manifest.json").write_bytes(bomb)
    with pytest.raises(CheckpointError):
        newest(str(folder))
    assert not mark.exists()
    assert len(list(manifest.all_files())) > LAYERS * EXPERTS


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_retention_respects_references(tmp_path: Path, keep: int) -> None:
    ranks = Ranks(FullSaves(persist_experts=1, keep_last=keep))
    for step in range(1, 12):
        assert ranks.save(str(tmp_path), step)[0]
        complete = sorted(int(p.parent.name[11:]) for p in tmp_path.glob("*/manifest.json"))
        assert complete[-1] == step
    ranks.close()
    complete = sorted(int(p.parent.name[11:]) for p in tmp_path.glob("*/manifest.json"))
    assert complete == list(range(12 - keep, 12))
    check_files(str(tmp_path))
    for step in complete:
        check_content(str(tmp_path), Manifest.read(str(tmp_path / f"global_step{step}")))
    # Of four experts one is written at a time: nothing older than four saves is needed by any of these.
    oldest = min(int(path.name[11:]) for path in tmp_path.glob("global_step*"))
    assert oldest >= 12 - keep - 3


END_AT_ONCE = """
import sys, torch
from megatron_lazarus.joining import private_world
from tests.distributed.runs import Run, build, train
private_world()
run = Run(micro_batches=2, experts=4, section={"checkpoint": {"persist_experts": 1}})
engine, ledger = build(0, 1, run)
for step in range(3):
    train(engine, ledger, run, 1)
    engine.save_checkpoint(sys.argv[1])
"""


def test_process_that_ends_waits_for_its_last_save(tmp_path: Path) -> None:
    """Also without ``engine.finish()``; and nobody else need wait for its directory."""
    subprocess.run([sys.executable, "-c", END_AT_ONCE, str(tmp_path)], check=True, timeout=120, capture_output=True)
    assert read_latest(str(tmp_path)) == "global_step3"
    for step in (1, 2, 3):
        folder = str(tmp_path / f"global_step{step}")
        Manifest.read(folder).verify(folder)
    assert not (tmp_path / OWNER).exists()


def test_what_may_change_at_any_time_is_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client state, unlike parameters, need not wait for the update to change."""
    begun, copy = threading.Event(), memory.Snapshot._copy

    def late(snapshot: memory.Snapshot) -> None:
        assert begun.wait(LIMIT_S)
        copy(snapshot)

    monkeypatch.setattr(memory.Snapshot, "_copy", late)
    ranks = Ranks(PARTIAL, world_size=1)
    (rank,) = ranks.members
    rank.train(1)
    counts = torch.zeros(50)
    state = {"module": rank.engine.module.state_dict(), "counts": counts, "global_steps": 1}
    save = rank.saver.begin(rank.saver.agree(str(tmp_path), "global_step1", again=False), state, save_latest=True)
    counts.fill_(7)
    begun.set()
    assert save.decided.wait(LIMIT_S)
    ranks.close()
    chosen = newest(str(tmp_path))
    assert chosen is not None
    assert not read_dense(str(tmp_path), chosen[1])["counts"].any()
