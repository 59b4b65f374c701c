"""``lazarus doctor --job``: flags that make Slurm end what could go on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from megatron_lazarus.cli import main
from megatron_lazarus.doctor_command import examine, read_script

ROOT = Path(__file__).resolve().parents[2]
GOOD = """\
#!/bin/bash
#SBATCH -N 8
#SBATCH --no-kill --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
# srun --kill-on-bad-exit=1 is what this comment warns of
srun --no-kill --kill-on-bad-exit=0 --wait=0 bash node.sh
"""
GOOD_ARRAY = """\
#SBATCH --array=0-7
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
bash node.sh
"""


def found(text: str, grace: float = 30.0, kill_wait: float | None = 30.0) -> list[tuple[int, str]]:
    return [(finding.line, finding.option) for finding in examine(text, grace, kill_wait)]


def test_nothing_to_find() -> None:
    assert found(GOOD) == []
    assert found(GOOD_ARRAY) == []
    for script in sorted((ROOT / "scripts" / "slurm").glob("*.sbatch")):
        assert found(script.read_text()) == [], script


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("--no-kill --requeue", "--requeue", [(0, "--no-kill")]),
        ("--no-kill --requeue", "--no-kill=off --requeue", [(0, "--no-kill")]),
        ("--no-kill --requeue", "-k --requeue", []),
        ("--no-kill --requeue", "--no-kill --no-requeue", [(0, "--requeue")]),
        ("--open-mode=append", "--open-mode=truncate", [(0, "--open-mode")]),
        ("#SBATCH --signal=B:USR1@120\n", "", [(0, "--signal")]),
        ("B:USR1@120", "B:USR1@10", [(0, "--signal")]),
        ("B:USR1@120", "USR1@120", []),
        ("srun --no-kill", "srun", [(7, "--no-kill")]),
        ("srun --no-kill", "srun -k", []),
        ("--kill-on-bad-exit=0", "--kill-on-bad-exit=1", [(7, "--kill-on-bad-exit")]),
        ("--kill-on-bad-exit=0", "--kill-on-bad-exit", [(7, "--kill-on-bad-exit")]),
        ("--kill-on-bad-exit=0", "-K", [(7, "--kill-on-bad-exit")]),
        ("--kill-on-bad-exit=0", "-K0", []),
        ("--kill-on-bad-exit=0", "", [(7, "--kill-on-bad-exit")]),
        ("--wait=0", "--wait=60", [(7, "--wait")]),
        ("--wait=0", "-W 60 -n 4", [(7, "--wait")]),
        ("--wait=0", "-W0", []),
        ("--wait=0", "--wait 0 --label", []),
        # What comes after the command is the command's.
        ("bash node.sh", "bash node.sh --wait=60 -K", []),
    ],
)
def test_one_thing_changed(old: str, new: str, expected: list[tuple[int, str]]) -> None:
    assert old in GOOD
    assert found(GOOD.replace(old, new)) == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("--array=0-7", "-a 0-7", []),
        ("#SBATCH --requeue\n", "", [(0, "--requeue")]),
        ("B:USR1", "USR1", [(0, "--signal")]),
        ("#SBATCH --requeue", "#SBATCH --requeue --nodes=2", [(0, "--nodes")]),
        ("#SBATCH --requeue", "#SBATCH --requeue --dependency=expand:7", [(0, "--dependency")]),
    ],
)
def test_array(old: str, new: str, expected: list[tuple[int, str]]) -> None:
    assert old in GOOD_ARRAY
    assert found(GOOD_ARRAY.replace(old, new)) == expected


def test_time_to_leave() -> None:
    assert found(GOOD, grace=30, kill_wait=10) == [(0, "KillWait")]
    assert found(GOOD, grace=30, kill_wait=None) == []
    assert found(GOOD, grace=200) == [(0, "--signal"), (0, "KillWait")]


def test_a_known_script_as_it_is_written() -> None:
    """The way of BigScience's scripts: options in a variable, several lines, quotes that span them."""
    text = (
        '#SBATCH --nodes=48\n\nSRUN_ARGS=" \\\n    --wait=60 \\\n    --kill-on-bad-exit=1 \\\n    "\n'
        'export CMD="python train.py"\nclear; srun $SRUN_ARGS --jobid $SLURM_JOB_ID bash -c "$LAUNCHER \\\n'
        ' --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt\n'
    )
    step = read_script(text)[1][0]
    assert (step.options["wait"], step.options["kill-on-bad-exit"]) == ("60", "1")
    options = {option for line, option in found(text) if line == step.line}
    assert options == {"--kill-on-bad-exit", "--no-kill", "--wait"}


def test_array_variable() -> None:
    text = GOOD.replace("srun --no-kill", 'FLAGS=(--no-kill)\nFLAGS+=(-K1)\nsrun "${FLAGS[@]}"').replace(
        "--kill-on-bad-exit=0 --wait=0 bash", "--wait=0 bash"
    )
    assert found(text) == [(9, "--kill-on-bad-exit")]


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(GOOD.replace("--wait=0", "--wait=60")))
    assert main(["doctor", "--job", "-", "--kill-wait", "30"]) == 1
    assert capsys.readouterr().out.startswith("-:7: --wait is 60 in srun")
    path = tmp_path / "job"
    path.write_text(GOOD)
    assert main(["doctor", "--job", str(path), "--kill-wait", "30"]) == 0
    assert main(["doctor", "--job", str(tmp_path / "none")]) == 2
    config = tmp_path / "ds.json"
    config.write_text('{"lazarus": {"elastic": {"drain_grace_s": 45}}}')
    assert main(["doctor", "--job", str(path), "--config", str(config), "--kill-wait", "30"]) == 1
    assert "KillWait is 30 s" in capsys.readouterr().out


def test_site_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'KillOnBadExit           = 0'\necho 'KillWait                = 10 sec'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "job"
    path.write_text(GOOD)
    assert main(["doctor", "--job", str(path)]) == 1
    assert "KillWait is 10 s" in capsys.readouterr().out
