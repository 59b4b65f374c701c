"""``deepspeed … --module megatron_lazarus.launch``: nodes that die under a launcher that would kill all."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.launch import REPOSITORY, TAG, free_port, kill_tagged, run_command, tagged
from tests.elastic.harness import START_LIMIT_S, Event

END_LIMIT_S = 60.0

PLAIN = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE", "CROSS_RANK")
seen = {"argv": sys.argv[1:], "env": {name: os.environ[name] for name in names}}
with open(os.environ["SEEN"] + os.environ["RANK"], "w") as file:
    json.dump(seen, file)
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""

RAISING = """
import json, os, sys, time
mine = {"argv": sys.argv[1:], "devices": os.environ["CUDA_VISIBLE_DEVICES"]}
mine["launcher's"] = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
place = os.environ["LAZARUS_NODE"] + "." + os.environ["LOCAL_RANK"]
with open(os.environ["SEEN"] + place, "w") as file:
    json.dump(mine, file)
# A job ends when all nodes that have come so far have failed; here all shall have come.
time.sleep(5)
raise ValueError("a bad batch")
"""

ENGINE = """
import time
from tests.distributed.runs import Run, build
engine, ledger = build(0, 1, Run())
while engine.global_steps < 30:
    engine.train_batch(ledger.data(Run()))
    if engine.rank == 0:
        print("step", engine.global_steps, flush=True)
    time.sleep(0.05)
engine.finish()
"""


class Command:
    """A running ``deepspeed`` command."""

    def __init__(self, log_dir: Path, process: subprocess.Popen[bytes], tag: str) -> None:
        self.log_dir, self.process, self.tag = log_dir, process, tag

    def events(self) -> list[Event]:
        path = self.log_dir / "events.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for(self, kind: str, generation: int) -> None:
        self.wait_until(lambda: any((e["kind"], e["generation"]) == (kind, generation) for e in self.events()))

    def wait_until(self, true: Callable[[], bool], limit: float = START_LIMIT_S) -> None:
        deadline = time.monotonic() + limit
        while not true():
            ended = self.process.poll() is not None and not tagged(self.tag)
            assert not ended or true(), f"it has ended\n{self.logs()}"
            assert time.monotonic() < deadline, f"not within {limit:g} s\n{self.logs()}"
            time.sleep(0.05)

    def wait(self, limit: float = END_LIMIT_S) -> int:
        """The command's exit status; nothing may be left of it."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit:g} s\n{self.logs()}") from None
        self.nothing_is_left()
        return code

    def nothing_is_left(self, limit: float = 0.0) -> None:
        deadline = time.monotonic() + limit
        while (left := tagged(self.tag)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [process.cmdline() for process in left] == []

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.log_dir / "result.json").read_text())

    def output(self) -> str:
        return (self.log_dir / "output.txt").read_text(errors="replace")

    def logs(self) -> str:
        paths = [path for path in sorted(self.log_dir.iterdir()) if path.is_file()]
        return "\n".join(f"===== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def worker(self, node: str) -> psutil.Process:
        for process in tagged(self.tag):
            environment = process.environ()
            if environment.get("LAZARUS_NODE") == node and "megatron_lazarus.launch" not in process.cmdline():
                return process
        raise AssertionError(f"no worker of {node}\n{self.logs()}")

    def launcher(self) -> psutil.Process:
        return next(p for p in tagged(self.tag) if "deepspeed.launcher.launch" in p.cmdline())


@contextlib.contextmanager
def started(log_dir: Path, *commands: list[str], **environment: str) -> Iterator[Command]:
    """Commands of which nothing survives; the first is the one that ``wait`` is about."""
    tag = uuid.uuid4().hex
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment, TAG: tag}
    with (log_dir / "output.txt").open("ab") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=REPOSITORY,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for command in commands
        ]
    try:
        yield Command(log_dir, processes[0], tag)
    finally:
        kill_tagged(tag)
        for process in processes:
            process.wait()


def module(log_dir: Path, *options: str | Path) -> list[str]:
    """The launch module with an elastic config and ``options``, among them its script."""
    config = log_dir / "ds.json"
    config.write_text(json.dumps({"lazarus": {"elastic": {"heartbeat_interval_s": 0.25}}}))
    own = ["--module", "megatron_lazarus.launch", "--log-dir", str(log_dir), "--lazarus-config", str(config)]
    return [*own, *map(str, options)]


def deepspeed(
    log_dir: Path, *options: str | Path, flags: tuple[str, ...] = ("--no_local_rank",), **environment: str
) -> contextlib.AbstractContextManager[Command]:
    """The deepspeed command with 4 ranks here."""
    own = ["--num_gpus", "4", "--master_port", str(free_port()), *flags]
    return started(log_dir, ["deepspeed.launcher.runner", *own, *module(log_dir, *options)], **environment)


def loop(log_dir: Path) -> tuple[str | Path, ...]:
    return ("--ranks-per-node", "1", "--module", "tests.elastic.loop", log_dir)


@pytest.mark.distributed
def test_the_death_of_a_worker_is_that_of_its_node_only(tmp_path: Path) -> None:
    with deepspeed(tmp_path, *loop(tmp_path)) as run:
        run.wait_for("working", 1)
        run.worker("node0").kill()
        run.wait_for("working", 2)
        run.worker("node2").kill()
        run.wait_for("working", 3)
        (tmp_path / "stop").touch()
        assert run.wait() == 0, run.logs()
    assert run.result["status"] == "completed"
    assert run.result["value"]["world_size"] == 2
    output = run.output().splitlines()
    # Rank 0's lines as it wrote them, also where another node has taken its place.
    assert {"working in 1 as 0/4", "working in 2 as 0/3"} <= set(output)
    assert not {"working in 1 as 2/4", "working in 1 as 3/4", "working in 3 as 1/2"} & set(output)


@pytest.mark.extensive
@pytest.mark.distributed
def test_two_hosts(tmp_path: Path) -> None:
    # Left by a job that was killed.
    (tmp_path / "job.json").write_text('{"coordinator": "127.0.0.1:1", "token": "stale"}')
    world = base64.urlsafe_b64encode(json.dumps({"one": [0, 1], "other": [0, 1]}).encode()).decode()
    own = ["deepspeed.launcher.launch", f"--world_info={world}", "--master_addr=127.0.0.1", "--no_local_rank"]
    own += [f"--master_port={free_port()}"]
    script = module(tmp_path, "--module", "tests.elastic.loop", tmp_path)
    with started(tmp_path, *([*own, f"--node_rank={rank}", *script] for rank in range(2))) as run:
        run.wait_for("working", 1)
        next(process for process in tagged(run.tag) if "--node_rank=1" in process.cmdline()).kill()
        run.wait_for("working", 2)
        (tmp_path / "stop").touch()
        assert run.wait() == 0, run.logs()
    assert run.result["value"]["world_size"] == 2
    nodes = [event["nodes"] for event in run.events() if event["kind"] == "generation"]
    assert nodes == [["node0", "node1"], ["node0"]]


def coordinator(tag: str) -> psutil.Process:
    return next(p for p in tagged(tag) if "megatron_lazarus.elastic.coordinator" in p.cmdline())


@pytest.mark.extensive
@pytest.mark.distributed
def test_a_killed_coordinator_is_replaced(tmp_path: Path) -> None:
    with deepspeed(tmp_path, *loop(tmp_path)) as run:
        run.wait_for("working", 1)
        coordinator(run.tag).kill()
        run.wait_until(lambda: any(e["kind"] == "listening" and e.get("term") == 2 for e in run.events()))
        run.worker("node2").kill()
        run.wait_for("working", 2)
        (tmp_path / "stop").touch()
        assert run.wait() == 0, run.logs()
    assert run.result["status"] == "completed"
    assert run.result["value"]["world_size"] == 3


@pytest.mark.extensive
@pytest.mark.distributed
def test_the_host_of_the_coordinator_dies(tmp_path: Path) -> None:
    """All of the first host's processes, DeepSpeed's launcher among them; the other two are a majority."""
    world = base64.urlsafe_b64encode(json.dumps({"a": [0], "b": [0], "c": [0]}).encode()).decode()
    own = ["deepspeed.launcher.launch", f"--world_info={world}", "--master_addr=127.0.0.1", "--no_local_rank"]
    own += [f"--master_port={free_port()}"]
    script = module(tmp_path, "--module", "tests.elastic.loop", tmp_path)
    with started(tmp_path, *([*own, f"--node_rank={rank}", *script] for rank in range(3))) as run:
        run.wait_for("working", 1)
        first = next(process for process in tagged(run.tag) if "--node_rank=0" in process.cmdline())
        for process in [*first.children(recursive=True), coordinator(run.tag), first]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.wait_for("working", 2)
        (tmp_path / "stop").touch()
        run.wait_until(lambda: (tmp_path / "result.json").exists(), END_LIMIT_S)
        run.nothing_is_left(END_LIMIT_S)
    assert run.result["status"] == "completed"
    assert run.result["value"]["world_size"] == 2
    nodes = [event["nodes"] for event in run.events() if event["kind"] == "generation"]
    assert nodes == [["node0", "node1", "node2"], ["node1", "node2"]]


@pytest.mark.extensive
@pytest.mark.distributed
def test_an_engine_trains_on(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    with deepspeed(tmp_path, "--ranks-per-node", "1", script, flags=(), PYTHONPATH=str(REPOSITORY)) as run:
        run.wait_until(lambda: "step 3\n" in run.output())
        run.worker("node0").kill()
        assert run.wait() == 0, run.logs()
    assert (run.result["status"], run.result["step"], run.result["generation"]) == ("completed", 30, 2)
    steps = [int(line.split()[1]) for line in run.output().splitlines() if line.startswith("step ")]
    # Killed between a step's commit and its line, node0 takes the line with it.
    assert len(set(range(1, 31)) - set(steps)) <= 1


@pytest.mark.extensive
@pytest.mark.distributed
def test_a_script_that_raises_everywhere(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISING)
    options = ("--ranks-per-node", "2", script, "--data", "x")
    with deepspeed(tmp_path, *options, flags=(), SEEN=f"{tmp_path}/seen-") as run:
        # DeepSpeed's launcher could kill nobody any more who could go on.
        assert run.wait() == 1, run.logs()
    assert run.result["status"] == "failed"
    assert "exit status 1" in str(run.result)
    assert "ValueError: a bad batch" in run.output()
    for node, devices in (("node0", "0,1"), ("node1", "2,3")):
        for local_rank in range(2):
            seen = json.loads((tmp_path / f"seen-{node}.{local_rank}").read_text())
            arguments = [f"--local_rank={local_rank}", "--data", "x"]
            assert seen == {"argv": arguments, "devices": devices, "launcher's": []}


@pytest.mark.extensive
@pytest.mark.distributed
def test_the_provided_script_tells_of_a_failed_job(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "result.json").write_text('{"status": "completed"}')
    variables = {"OUTPUT": str(tmp_path), "DATA_PATH": str(tmp_path / "none"), "NUM_GPUS": "1"}
    variables |= {"LAUNCHER": "deepspeed-elastic", "MASTER_PORT": str(free_port())}
    ended = run_command(["scripts/pretrain_gpt_tiny.sh"], timeout=START_LIMIT_S, environment=variables)
    assert ended.returncode == 1, ended.output
    assert ended.leftovers == []
    assert json.loads((logs / "result.json").read_text())["status"] == "failed"
    assert "pretrain_gpt: " in ended.output


@pytest.mark.distributed
def test_disabled_it_leaves_the_script_as_it_is(tmp_path: Path) -> None:
    script, config = tmp_path / "plain.py", tmp_path / "config.json"
    script.write_text(PLAIN)
    config.write_text('{"lazarus": {"enabled": false}}')
    logs = tmp_path / "logs"
    port = str(free_port())
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port, "--module"]
    command += ["megatron_lazarus.launch", "--log-dir", str(logs), str(script), "fail", "--deepspeed_config"]
    seen = {"SEEN": str(tmp_path / "seen-")}
    ended = run_command([*command, str(config)], timeout=START_LIMIT_S, environment=seen)
    assert (ended.returncode, ended.leftovers) == (3, []), ended.output
    for rank in ("0", "1"):
        found = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert found["argv"] == [f"--local_rank={rank}", "fail", "--deepspeed_config", str(config)]
        expected = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0"}
        assert found["env"] == {**expected, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    assert not logs.exists()


@pytest.mark.parametrize("section", ["", '"lazarus": {"enabled": false}', '"lazarus": {"elastic": {"enabled": false}}'])
@pytest.mark.parametrize("equals", [True, False])
def test_without_an_elastic_section_the_script_takes_over(section: str, equals: bool, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(f"{{{section}}}")
    option = [f"--deepspeed_config={config}"] if equals else ["--deepspeed_config", str(config)]
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "megatron_lazarus.launch", "--local_rank=1", script, *option]
    assert run_command(command, timeout=20).output == f"{['--local_rank=1', *option]}\n"


@pytest.mark.extensive
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    with deepspeed(tmp_path, *loop(tmp_path)) as run:
        run.wait_for("working", 1)
        run.launcher().send_signal(number)
        run.wait(40)
    # The coordinator may be killed before it has seen the others go.
    assert (number == signal.SIGKILL and not (tmp_path / "result.json").exists()) or run.result["status"] == "failed"


@pytest.mark.extensive
@pytest.mark.distributed
@pytest.mark.parametrize("whole_group", [True, False])
def test_a_stopped_command_ends_the_job(whole_group: bool, tmp_path: Path) -> None:
    with deepspeed(tmp_path, *loop(tmp_path)) as run:
        run.wait_for("working", 1)
        if whole_group:
            # What a terminal does for Ctrl-C.
            os.killpg(run.process.pid, signal.SIGINT)
        else:
            run.process.terminate()
        run.process.wait(40)
        run.nothing_is_left(40)
    assert run.result["status"] == "failed"
    assert "SIGTERM" in run.result["reason"]


def test_a_wrong_config_is_told_once(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"lazarus": {"elastic": {"min_node": 2}}}')
    command = [sys.executable, "-m", "megatron_lazarus.launch", "--lazarus-config", config, "train.py"]
    first = run_command(command, timeout=20, environment={"RANK": "0"})
    assert (first.returncode, first.output.count("lazarus.elastic.min_node")) == (2, 1)
    assert run_command(command, timeout=20, environment={"RANK": "1"}).output == ""


def test_it_starts_without_the_libraries_of_the_worker() -> None:
    code = "import sys, megatron_lazarus.launch; print(sorted({'torch', 'numpy', 'deepspeed'} & set(sys.modules)))"
    assert run_command([sys.executable, "-c", code], timeout=20).output == "[]\n"
