"""``lazarus checkpoint``: every subcommand on checkpoints whose content is known, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lazarus.checkpoint.manifest import Manifest
from megatron_lazarus.checkpoint.owner import Owner
from megatron_lazarus.checkpoint.parameter_groups import KEY, ParameterGroups, adapted
from megatron_lazarus.checkpoint.restore import read_dense, read_record
from megatron_lazarus.cli import main
from tests.unit.checkpoint.synthetic import Saves, dense_state, record


def lazarus(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Status, standard output and standard error of ``lazarus checkpoint``."""
    status = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_of_four(directory: Path, content: str = "all") -> Saves:
    """Step 10 writes everything, then one expert of every layer each."""
    saves = Saves(directory, content=content)
    saves.save(10, range(4))
    for step, expert in ((20, 0), (30, 1), (40, 2)):
        saves.save(step, [expert])
    return saves


def flip(path: Path, where: int = -1) -> None:
    """Flip a bit, as storage does: the file's times stay."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of_four(tmp_path)
    flip(tmp_path / "global_step30" / "manifest.json", 100)
    status, out, _ = lazarus(capsys, "ls", tmp_path)
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines] == [
        "tag",
        "global_step40",
        "global_step30",
        "global_step20",
        "global_step10",
    ]
    assert lines[1].endswith("2 of 8           latest")
    assert "damaged" in lines[2]
    assert "8 of 8" in lines[4]
    rows = {row["tag"]: row for row in json.loads(lazarus(capsys, "ls", tmp_path, "--json")[1])}
    for tag in ("global_step10", "global_step40"):
        files = [path for path in (tmp_path / tag).rglob("*") if path.is_file() and path.name != "manifest.json"]
        assert rows[tag]["bytes_written"] == sum(path.stat().st_size for path in files)
    # Records are alike, and so are dense parts: a load reads as much whenever it was written.
    assert rows["global_step40"]["bytes_needed"] == rows["global_step10"]["bytes_written"]
    assert rows["global_step30"]["error"] is not None


def test_inspect_says_how_old_experts_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of_four(tmp_path)
    status, out, _ = lazarus(capsys, "inspect", tmp_path)
    assert status == 0
    assert "needs files of: global_step10, global_step20, global_step30" in out
    assert "layer 1: 20 10 0 30" in out
    status, out, _ = lazarus(capsys, "inspect", tmp_path, "--tag", "global_step20", "--json")
    report = json.loads(out)
    assert "lost token" not in out, "these checkpoints have no ledger"
    assert report["steps_behind"] == {layer: {"0": 0, "1": 10, "2": 10, "3": 10} for layer in ("0", "1")}
    assert report["needs"] == ["global_step10"]


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (None, ("12, PLT 6.00% of the run so far", "loses 8 more, 4.00%")),
        (100, ("12, PLT 2.40% of the planned 100 steps", "loses 8 more, 1.60%")),
    ],
)
def test_inspect_says_what_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planned: int | None, expected: tuple[str, str]
) -> None:
    """Two layers of 100 assignments each in 40 steps; counted by hand."""
    tag = tmp_path / Saves(tmp_path).save(40, range(4))
    ledger = {
        "steps": 40,
        "assigned": [100.0, 100.0],
        "held": [[25.0, 25.0, 25.0, 15.0], [25.0, 25.0, 25.0, 23.0]],
        "saved": [[25.0, 20.0, 25.0, 15.0], [22.0, 25.0, 25.0, 23.0]],
        "planned_steps": planned,
    }
    replace(Manifest.read(str(tag)), ledger=ledger).write(str(tag))
    status, out, _ = lazarus(capsys, "inspect", tmp_path)
    assert status == 0
    assert all(text in out for text in expected), out


@pytest.mark.parametrize("content", ["all", "moments"])
def test_verify_finds_damage_by_file_and_expert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    run_of_four(tmp_path, content)
    status, out, _ = lazarus(capsys, "verify", tmp_path, "--all")
    assert status == 0
    assert out.count(": complete") == 4
    # Expert 3 was written by step 10 alone, and the newest checkpoint still needs that.
    flip(tmp_path / "global_step10" / "experts" / "layer_1_expert_3.safetensors")
    (tmp_path / "global_step40" / "dense" / "rank_0.safetensors").unlink()
    status, out, _ = lazarus(capsys, "verify", tmp_path)
    assert status == 1
    assert out.startswith("global_step40: damaged")
    assert "global_step10/experts/layer_1_expert_3.safetensors is altered" in out
    assert "(layer 1 expert 3)" in out
    assert "rank_0.safetensors is missing (dense part)" in out
    status, out, _ = lazarus(capsys, "verify", tmp_path, "--all")
    assert status == 1
    assert out.count(": damaged") == 4, "all four need the record of expert 3"


def needed_files(directory: Path) -> set[str]:
    """What manifests name, by reading them as plain JSON."""
    named = set()
    for path in directory.glob("*/manifest.json"):
        body = json.loads(path.read_text())["manifest"]
        named |= {f"{body['tag']}/{entry['name']}" for entry in body["files"]}
        named |= {f"{part['tag']}/{part['name']}" for entry in body["experts"] for part in entry["parts"]}
    return named


def test_prune_keeps_what_a_manifest_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = run_of_four(tmp_path)
    status, out, _ = lazarus(capsys, "prune", tmp_path, "--keep", "2", "--dry-run")
    assert status == 0
    assert out.splitlines() == ["would retire global_step10", "would retire global_step20"]
    before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    status, out, _ = lazarus(capsys, "prune", tmp_path, "--keep", "2")
    after = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert status == 0
    assert "retired global_step10; files that others need stay" in out
    assert after < before
    for name in needed_files(tmp_path):
        assert (tmp_path / name).is_file(), name
    assert not list(tmp_path.glob("global_step10/dense/*")), "nobody needs the dense part of a retired checkpoint"
    assert lazarus(capsys, "verify", tmp_path, "--all")[0] == 0
    saves.save(50, range(4))
    assert lazarus(capsys, "prune", tmp_path, "--keep", "1")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["global_step50", "latest"]


def test_prune_does_nothing_where_it_could_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of_four(tmp_path)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert lazarus(capsys, "prune", tmp_path, "--keep", "0")[::2] == (
        2,
        "lazarus checkpoint prune: --keep is 0; it must be at least 1\n",
    )
    job = Owner(str(tmp_path), "training")
    job.claim()
    job_file = tmp_path / "owner.json"
    # The command runs in the process of the job here; elsewhere a job's process is another one.
    text = json.loads(job_file.read_text())
    job_file.write_text(json.dumps({**text, "pid": os.getppid(), "process_start": _started(os.getppid())}))
    status, _, err = lazarus(capsys, "prune", tmp_path, "--keep", "1")
    assert status == 2
    assert "belongs to job training" in err
    job_file.unlink()
    flip(tmp_path / "global_step40" / "manifest.json", 100)
    status, _, err = lazarus(capsys, "prune", tmp_path, "--keep", "1")
    assert status == 2
    assert "the latest checkpoint, global_step40, is not complete" in err
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files


def _started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("groups", ["split", "together"])
@pytest.mark.parametrize("content", ["all", "moments"])
def test_export_and_import_give_the_same_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, groups: str
) -> None:
    ours, theirs, again = (tmp_path / name for name in ("ours", "theirs", "again"))
    ours.mkdir()
    run_of_four(ours, content)
    status, out, _ = lazarus(capsys, "export", ours, theirs, "--ep-size", 2, "--optimizer-groups", groups)
    assert status == 0
    assert "6 of 8 experts are of earlier steps" in out
    assert sorted(name for name in os.listdir(theirs / "global_step40") if name.startswith("expp")) == [
        "expp_rank_0_mp_rank_00_optim_states.pt",
        "expp_rank_1_mp_rank_00_optim_states.pt",
    ]
    status, out, _ = lazarus(capsys, "import", theirs, again)
    assert status == 0
    assert "step 40, 8 experts" in out
    manifest = Manifest.read(str(again / "global_step40"))
    # The steps at which experts 0..3 were written last, by save.
    for expert, step in enumerate((20, 30, 40, 10)):
        for layer in range(2):
            found, moments = read_record(str(again), manifest, layer, expert), record(layer, expert, step)
            weights = moments if content == "all" else record(layer, expert, 40)
            for name, tensor in found.items():
                wanted = (weights if name.startswith("master") else moments)[name]
                assert same(tensor, wanted), (layer, expert, name)
    found, wanted = read_dense(str(again), manifest), dense_state(2, 4, 40)
    # For a script that has no groups of their own for experts: the parameters of those that there are.
    there = ParameterGroups.from_json(found[KEY])
    assert any(group.moe for group in there.groups) == (groups == "split")
    whole = (replace(there.groups[0], parameters=tuple(p for group in there.groups for p in group.parameters)),)
    found = adapted(found, replace(there, groups=whole, here=1))
    assert KEY not in found
    for state in (found, wanted):
        state["optimizer"]["optimizer_state_dict"]["param_groups"][0].pop("name", None)
    assert found.pop("dp_world_size") == 2
    assert all(same(found[key], value) for key, value in wanted.items() if key != "dp_world_size")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "{dir}/nowhere"), "ls: {dir}/nowhere is not a directory"),
        (("inspect", "{dir}/empty"), "has no file 'latest'; name a tag with --tag"),
        (("verify", "{dir}/empty", "--all"), "no checkpoint in {dir}/empty"),
        (("verify", "{dir}/ours", "--all", "--tag", "x"), "--all and --tag exclude each other"),
        (("inspect", "{dir}/ours", "--tag", "other"), "{dir}/ours/other/manifest.json does not exist"),
        (("export", "{dir}/ours", "{dir}/out", "--ep-size", "3"), "ep_size is 3; it must divide"),
        (("import", "{dir}/ours", "{dir}/out"), "is not a checkpoint of deepspeed.moe"),
        (("export", "{dir}/ours", "{dir}/ours", "--ep-size", "2"), "exists; it is not written over"),
    ],
)
def test_errors_are_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "ours").mkdir()
    Saves(tmp_path / "ours").save(10, range(4))
    status, out, err = lazarus(capsys, *(argument.format(dir=tmp_path) for argument in arguments))
    assert (status, out) == (2, "")
    assert message.format(dir=tmp_path) in err
    assert err.startswith("lazarus checkpoint ")
    assert err.count("\n") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of_four(tmp_path)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out"), "--ep-size", "2"]) == 0
    assert "verify global_step40" in terminal.getvalue()
    assert "export" in terminal.getvalue()


def test_no_bar_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_of_four(tmp_path)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capfd.readouterr().err == ""
