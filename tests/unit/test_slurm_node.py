"""``scripts/slurm`` with a Slurm that writes down what it is asked: exit statuses, signals, the held element."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
COMMANDS = {
    "squeue": 'case "$*" in *State:20*) echo "${STATE:-RUNNING}";; *RestartCnt*) cat "${HELD:-/dev/null}";; esac',
    "scontrol": 'echo "scontrol $*" >>"${ASKED}"; case "$1" in requeue) kill -TERM $PPID;; esac',
    "scancel": 'echo "scancel $*" >>"${ASKED}"',
    "srun": 'echo "srun $*" >>"${ASKED}"; while [[ "$1" == -* ]]; do shift; done; exec "$@"',
}


class Site:
    """A folder with these commands, and a training script that does as told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = folder / "asked"
        self.asked.touch()
        (folder / "bin").mkdir()
        for name, body in COMMANDS.items():
            path = folder / "bin" / name
            path.write_text(f"#!/usr/bin/env bash\n{body}\n")
            path.chmod(0o755)
        self.logs = folder / "out" / "logs"
        self.logs.mkdir(parents=True)

    def start(self, script: str, training: str, **more: str) -> subprocess.Popen[str]:
        (self.folder / "train.sh").write_text(training)
        environment = {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "ASKED": str(self.asked),
            "REPOSITORY": str(ROOT),
            "PRETRAIN": str(self.folder / "train.sh"),
            "OUTPUT": str(self.folder / "out"),
            "DATA_PATH": "data",
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NAME": "run",
            "SLURM_ARRAY_TASK_COUNT": "4",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "LAZARUS_POLL_S": "0.1",
            **more,
        }
        return subprocess.Popen(
            ["bash", str(ROOT / "scripts" / "slurm" / script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, training: str, **more: str) -> tuple[int, str]:
        process = self.start(script, training, **more)
        output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output

    def has_result(self, status: str) -> None:
        (self.logs / "result.json").write_text(json.dumps({"status": status, "reason": ""}, indent=1))

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.02)

    def requests(self) -> list[str]:
        return self.asked.read_text().splitlines()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def result(site: Site, status: str) -> str:
    value = json.dumps({"status": status, "reason": ""}, indent=1)
    return f"cat >{site.logs}/result.json <<'END'\n{value}\nEND\n"


@pytest.mark.parametrize("script", ["pretrain_array.sbatch", "pretrain_job.sbatch"])
def test_status_is_the_runs(site: Site, script: str) -> None:
    assert site.run(script, result(site, "completed") + "exit 5")[0] == 0
    assert site.run(script, result(site, "failed") + "exit 1")[0] == 1
    # Nobody has said that it is complete.
    assert site.run(script, f"rm {site.logs}/result.json; exit 0")[0] == 1
    assert [request for request in site.requests() if not request.startswith("srun")] == []


def test_training_is_told_of_the_job(site: Site) -> None:
    training = 'echo "$LAUNCHER|$NODES|$MIN_NODES|$OUTPUT|$LOG_DIR|$DATA_PATH"'
    out = site.folder / "out"
    assert f"join|4|1|{out}|{out}/logs|data\n" in site.run("pretrain_array.sbatch", training)[1]


def test_srun_has_the_flags_that_survive(site: Site) -> None:
    site.has_result("completed")
    site.run("pretrain_job.sbatch", "exit 0")
    (request,) = site.requests()
    assert request == (
        "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --open-mode=append "
        f"--output={site.logs}/%x-%j-%N.out bash scripts/slurm/node.sh"
    )


TRAINING = """\
trap 'echo drained; touch {folder}/told; exit {status}' TERM
touch {folder}/ready
for ((i = 0; i < 600; i++)); do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("state", "status", "requests"),
    [
        ("RUNNING", 79, ["scontrol requeue 41"]),
        # scancel, or a preemption after which Slurm requeues by itself.
        ("COMPLETING", 79, []),
        # It did not get to leave in time.
        ("RUNNING", 1, []),
    ],
)
def test_signal_drains_and_requeues(
    site: Site, number: signal.Signals, state: str, status: int, requests: list[str]
) -> None:
    process = site.start("pretrain_array.sbatch", TRAINING.format(folder=site.folder, status=status), STATE=state)
    site.wait_for("ready")
    process.send_signal(number)
    if requests:
        site.wait_for("told")
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == status
    assert (site.folder / "told").exists()
    assert site.requests() == requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(("state", "requests"), [("RUNNING", ["scontrol requeue 41"]), ("COMPLETING", [])])
def test_job_passes_the_signal_through_srun(
    site: Site, number: signal.Signals, state: str, requests: list[str]
) -> None:
    process = site.start("pretrain_job.sbatch", TRAINING.format(folder=site.folder, status=79), STATE=state)
    site.wait_for("ready")
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert (site.folder / "told").exists()
    assert site.requests()[1:] == requests


def test_job_that_slurm_has_told_node_by_node_comes_back(site: Site) -> None:
    site.run("pretrain_job.sbatch", result(site, "drained") + "exit 79")
    assert site.requests()[1:] == ["scontrol requeue 41"]


def test_element_that_slurm_holds_back_is_released(site: Site) -> None:
    held = site.folder / "held"
    held.write_text("7_3   BeginTime   1\n7_4   Resources   2\n7_5   BeginTime   0\n")
    training = f"while [[ ! -s {site.asked} ]]; do sleep 0.05; done\n" + result(site, "completed")
    assert site.run("pretrain_array.sbatch", training, HELD=str(held))[0] == 0
    # 7_5 was never requeued: its user wants it later.
    assert site.requests() == ["scontrol update jobid=7_3 StartTime=now"]


@pytest.mark.parametrize(
    ("environment", "requests"),
    [({}, ["scancel 41"]), ({"BATCH": "lives"}, []), ({"BATCH": "has ended"}, [])],
)
def test_job_without_its_batch_host_ends(site: Site, environment: Mapping[str, str], requests: list[str]) -> None:
    alive = site.logs / "batch-41.alive"
    if environment.get("BATCH") != "has ended":
        alive.write_text("1")
    training = result(site, "completed")
    if environment.get("BATCH") == "lives":
        training += f"(sleep 1; echo 2 >{alive}) >/dev/null 2>&1 &\n"
    assert site.run("node.sh", training, ALIVE_LIMIT_S="4", NODES="4", MIN_NODES="1")[0] == 0
    assert site.requests() == requests
