"""``lazarus submit``: every script that it makes, as it must be given to Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_lazarus.cli import main
from megatron_lazarus.submit_command import REPOSITORY, Submission, SubmitError

GOLDEN = Path(__file__).parent / "golden"
ARRAY = ["array", "--job-name", "moe8", "--nodes", "16", "--gpus-per-node", "4", "--min-nodes", "2"]
JOB = ["job", "--job-name", "moe8", "--nodes", "18", "--max-nodes", "16", "--notice-s", "300", "--spot", "aws"]
SITE = ["--slurm", "partition=gpu", "gres=gpu:8", "time=1-00:00:00", "exclusive=user", "contiguous"]
DATA = ["--env", "DATA_PATH=0.3 data/a b_text 0.7 data/c", "TRAIN_ITERS=5000"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["submit", *arguments, "--dry-run"]) == 0
    # The one line that depends on where the repository is.
    return re.sub(r"(?m)^export REPOSITORY=.*$", "export REPOSITORY=…", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("array", [*ARRAY, *DATA]),
        ("array-more", [*ARRAY, "--first-element", "16", *DATA]),
        ("job", [*JOB, "--output", "shared/run", *SITE, *DATA]),
    ],
)
def test_golden(capsys: pytest.CaptureFixture[str], name: str, arguments: list[str]) -> None:
    """With LAZARUS_GOLDEN=write in the environment it writes them: after a wanted change, to be read as a diff."""
    script = shown(capsys, *arguments)
    path = GOLDEN / f"submit-{name}.sbatch"
    if os.environ.get("LAZARUS_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8")


def test_words_arrive_in_the_training_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The shell itself, not the quoting we believe in, is asked."""
    hostile = "a 'b' \"c\" $HOME `id` \\ ; é"
    script = shown(capsys, *ARRAY, "--env", f"DATA_PATH={hostile}").replace("export REPOSITORY=…", "")
    head = script.partition('cd "${REPOSITORY')[0]
    command = head + 'printf \'%s|\' "${DATA_PATH}" "${NODES}" "${MIN_NODES}" "${OUTPUT}" "${NUM_GPUS}"'
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ended.stdout == f"{hostile}|16|2|output/moe8|4|"


def test_file_and_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    given = {"pattern": "array", "job_name": "moe8", "nodes": 3, "gpus_per_node": 4, "min_nodes": 2}
    path.write_text(json.dumps({**given, "env": {"DATA_PATH": "x", "TRAIN_ITERS": "5000"}}))
    data = "DATA_PATH=0.3 data/a b_text 0.7 data/c"
    from_file = shown(capsys, "--from", str(path), "--nodes", "16", "--env", "DATA_PATH=x", "--env", data)
    assert from_file == shown(capsys, *ARRAY, *DATA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes is 0; it must be at least 1"),
        ({"nodes": "4"}, "nodes is '4'; it must be of type int"),
        ({"job_name": "a b"}, "job_name is 'a b'"),
        ({"spot": "ibm"}, "spot is 'ibm'; it must be aws, gcp, azure or null"),
        ({"max_nodes": 1, "min_nodes": 2}, "max_nodes is 1; it must be at least min_nodes = 2"),
        ({"env": {"A B": "c"}}, "'A B' is no name of a variable"),
        ({"partition": "gpu"}, "unknown keys partition"),
        ({"pattern": None}, "pattern is None"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"pattern": "job", "job_name": "r", "nodes": 4, **change}))
    assert main(["submit", "--from", str(path), "--dry-run"]) == 1
    assert message in capsys.readouterr().err


def test_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--nodes", "4"]) == 1
    assert "pattern, job_name must be given" in capsys.readouterr().err
    with pytest.raises(SubmitError):
        Submission("array", "", 4)


def test_submits_what_it_shows(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/usr/bin/env bash\npwd; cat "$@"; exit 3\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    arguments = ["submit", *ARRAY, "--output", str(tmp_path / "out")]
    assert main([*arguments, "--dry-run"]) == 0
    script = capfd.readouterr().out
    assert main(arguments) == 3
    assert capfd.readouterr().out == f"{REPOSITORY}\n{script}"
    # Slurm opens the output files there.
    assert (tmp_path / "out" / "logs").is_dir()
