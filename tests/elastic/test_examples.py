"""The examples, as they are, under stock DeepSpeed and under lazarus: only launch line and JSON differ."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.distributed.launch import REPOSITORY, free_port, run_command
from tests.elastic.test_launch import started

EXAMPLES = REPOSITORY / "scripts" / "examples"
NAMES = ("moe_classifier", "residual_gpt", "manual_loop")
LIMIT_S = 180.0
LINE = re.compile(r"^(step|validation after) (\d+) loss ([\d.]+)", re.MULTILINE)


def deepspeed(*arguments: str | Path) -> list[str]:
    flags = ["--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    return ["deepspeed.launcher.runner", *flags, *map(str, arguments)]


def under_stock(name: str, *options: str | Path) -> list[str]:
    module = ("--module", "tests.elastic.stock_script")
    return deepspeed(*module, EXAMPLES / f"{name}.py", *options, "--deepspeed_config", EXAMPLES / f"{name}.json")


def under_lazarus(name: str, logs: Path, *options: str | Path) -> list[str]:
    launch = ("--module", "megatron_lazarus.launch", "--ranks-per-node", "1", "--log-dir", logs)
    config = ("--deepspeed_config", EXAMPLES / f"{name}_lazarus.json")
    return deepspeed(*launch, EXAMPLES / f"{name}.py", *options, *config)


def losses(output: str) -> dict[tuple[str, int], float]:
    return {(what, int(step)): float(loss) for what, step, loss in LINE.findall(output)}


def run(command: list[str]) -> dict[tuple[str, int], float]:
    # DeepSpeed's loader has worker processes, which leave sockets in the temporary folder. Their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ex-") as folder:
        ended = run_command([sys.executable, "-m", *command], timeout=LIMIT_S, environment={"TMPDIR": folder})
    assert ended.returncode == 0, ended.output
    assert ended.leftovers == []
    return losses(ended.output)


def assert_same(found: dict[tuple[str, int], float], wanted: dict[tuple[str, int], float]) -> None:
    assert found.keys() == wanted.keys()
    for where, loss in wanted.items():
        assert abs(found[where] - loss) <= 1e-5, f"{where}: {found[where]}, under stock DeepSpeed {loss}"


@pytest.mark.parametrize("name", NAMES)
def test_not_a_word_of_lazarus(name: str) -> None:
    assert "lazarus" not in (EXAMPLES / f"{name}.py").read_text().lower()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["moe_classifier", *(pytest.param(name, marks=pytest.mark.extensive) for name in NAMES[1:])]
)
def test_same_losses_as_under_stock_deepspeed(tmp_path: Path, name: str) -> None:
    options = ("--steps", "20")
    stock = run(under_stock(name, *options))
    assert [step for what, step in stock if what == "step"] == list(range(1, 21))
    assert_same(run(under_lazarus(name, tmp_path / "logs", *options)), stock)


@pytest.mark.extensive
@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_killed_resumed_and_exported(tmp_path: Path, name: str) -> None:
    """The checkpoint of a run that has lost a node: lazarus goes on with it, and so does stock DeepSpeed."""
    steps, more = 60, 64
    logs, saved, exported = tmp_path / "logs", tmp_path / "saved", tmp_path / "exported"
    logs.mkdir()
    epochs = ("--epochs", "4") if name == "moe_classifier" else ()
    options = (*epochs, "--save", saved, "--save-interval", "30")
    with started(logs, under_lazarus(name, logs, *options, "--steps", str(steps))) as job:
        job.wait_until(lambda: "step 3 " in job.output())
        job.worker("node1").kill()
        assert job.wait(LIMIT_S) == 0, job.logs()
        disturbed = losses(job.output())
    assert (job.result["status"], job.result["step"], job.result["generation"]) == ("completed", steps, 2)
    assert [step for what, step in disturbed if what == "step"] == list(range(1, steps + 1))

    export = ["megatron_lazarus.cli", "checkpoint", "export", str(saved), str(exported), "--ep-size", "2"]
    run([*export])
    again = (*epochs, "--save-interval", "1000", "--steps", str(more))
    resumed = run(under_lazarus(name, tmp_path / "resumed", *again, "--save", saved))
    stock = run(under_stock(name, *again, "--save", exported))
    for found in (resumed, stock):
        assert [step for what, step in found if what == "step"] == list(range(steps + 1, more + 1))
    if name == "moe_classifier":
        # Stock DeepSpeed's loader begins anew; what it has loaded gives the same outputs all the same.
        resumed, stock = (
            {where: loss for where, loss in one.items() if where[0] != "step"} for one in (resumed, stock)
        )
        assert resumed
    assert_same(resumed, stock)
