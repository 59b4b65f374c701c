"""The worker pools: what the other distributed tests rely on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import distributed

from tests.distributed import launch as launching
from tests.distributed import pool as pool_module
from tests.distributed.launch import launch, run_command
from tests.distributed.pool import Pools, WorkersFailed


def sum_of_ranks(rank: int, world_size: int, factor: float) -> tuple[int, int, float]:
    values = torch.full((3,), factor * rank)
    distributed.all_reduce(values)
    return rank, world_size, values[0].item()


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        print("about to fail")
        raise ValueError("rank one does not like this")
    distributed.barrier()


def sleep_on_rank_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)
    distributed.barrier()


def end_rank_one(rank: int, world_size: int, how: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), how)
    distributed.barrier()


def return_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


def refuse() -> None:
    raise RuntimeError("cannot be read by the test")


class Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return refuse, ()


def return_unreadable(rank: int, world_size: int) -> Unreadable:
    return Unreadable()


def start_a_sleeper(rank: int, world_size: int) -> int:
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")


def leave_state_behind(rank: int, world_size: int) -> None:
    from deepspeed.utils import groups
    from megatron.core import parallel_state

    groups._create_expert_and_data_parallel(world_size)
    parallel_state.initialize_model_parallel()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(rank + 17)
    os.environ["LEFT_BEHIND"] = "1"


def break_the_world(rank: int, world_size: int) -> None:
    from deepspeed.utils import groups

    groups._create_expert_and_data_parallel(world_size)
    distributed.destroy_process_group()


def state(rank: int, world_size: int) -> dict[str, object]:
    from deepspeed.utils import groups
    from megatron.core import parallel_state

    return {
        "expert groups": len(groups._EXPERT_PARALLEL_GROUP),
        "megatron": parallel_state.model_parallel_is_initialized(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": torch.rand(()).item(),
        "environment": os.environ.get("LEFT_BEHIND"),
    }


def train_stock_moe(rank: int, world_size: int, expert_parallel_size: int) -> float:
    import deepspeed
    from deepspeed.moe.layer import MoE

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            expert = torch.nn.Linear(8, 8)
            self.moe = MoE(8, expert, num_experts=world_size, ep_size=expert_parallel_size, use_rts=False)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            output, auxiliary_loss, _ = self.moe(values)
            return output.square().mean() + auxiliary_loss

    model = Model()
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 1000}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = engine(torch.rand(4, 8))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def alive(pids: list[int], within: float = 10.0) -> list[int]:
    """The processes that still live after so many seconds; a zombie nobody has waited for yet is dead."""
    deadline = time.monotonic() + within
    while True:
        living = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    living.append(pid)
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(0.05)


def test_results_come_back_by_rank(workers: Pools) -> None:
    assert workers(2)(sum_of_ranks, 2.0) == [(0, 2, 2.0), (1, 2, 2.0)]
    assert workers(1)(sum_of_ranks, 2.0) == [(0, 1, 0.0)]


def test_workers_are_kept(workers: Pools) -> None:
    assert workers(2)(process_id) == workers(2)(process_id)


def test_state_does_not_leak_into_the_next_test(workers: Pools) -> None:
    before = workers(2)(state)
    workers(2)(leave_state_behind)
    assert workers(2)(state) == before
    workers(2)(break_the_world)
    assert workers(2)(state) == before


def test_stock_deepspeed_moe_at_another_expert_parallel_size(workers: Pools) -> None:
    for size in (2, 1, 2):
        assert all(loss > 0 for loss in workers(2)(train_stock_moe, size))


def test_an_exception_is_reported_with_the_first_failing_rank_first(workers: Pools) -> None:
    with pytest.raises(WorkersFailed) as caught:
        workers(2)(fail_on_rank_one)
    first = caught.value.failures[0]
    assert (first.rank, first.kind) == (1, "ValueError")
    assert "in fail_on_rank_one" in first.detail
    assert "rank one does not like this" in first.detail
    assert "about to fail" in first.detail
    assert str(caught.value).index("rank 1") < str(caught.value).index("rank 0")
    assert workers(2)(sum_of_ranks, 1.0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_result_that_cannot_travel_is_an_exception(workers: Pools) -> None:
    with pytest.raises(WorkersFailed, match="return_lambda"):
        workers(2)(return_lambda)


def test_a_time_out_dumps_the_stacks_and_ends_the_pool(workers: Pools) -> None:
    old = workers(2)(process_id)
    with pytest.raises(WorkersFailed) as caught:
        workers(2)(sleep_on_rank_zero, timeout=5)
    waiting, hung = caught.value.failures
    assert (waiting.rank, waiting.kind) == (1, "RuntimeError")
    assert "Timed out waiting 4000ms" in waiting.detail
    assert (hung.rank, hung.kind) == (0, "timeout")
    assert "in sleep_on_rank_zero" in hung.detail
    assert alive(old) == []
    assert not set(old) & set(workers(2)(process_id))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_worker_fails_the_test_at_once(workers: Pools, how: signal.Signals) -> None:
    workers(2)(process_id)
    started = time.monotonic()
    with pytest.raises(WorkersFailed, match=f"exit status -{int(how)} \\({how.name}\\)"):
        workers(2)(end_rank_one, int(how), timeout=120)
    assert time.monotonic() - started < 60
    assert workers(2)(sum_of_ranks, 1.0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_stopped_worker_is_killed(workers: Pools) -> None:
    old = workers(2)(process_id)
    with pytest.raises(WorkersFailed, match="stopped"):
        workers(2)(end_rank_one, int(signal.SIGSTOP), timeout=5)
    assert alive(old) == []


def test_a_worker_that_dies_between_two_tests_is_replaced(workers: Pools) -> None:
    os.kill(workers(1)(process_id)[0], signal.SIGKILL)
    assert workers(1)(sum_of_ranks, 1.0) == [(0, 1, 0.0)]


def test_a_result_that_cannot_be_read_ends_the_pool(workers: Pools) -> None:
    old = workers(1)(process_id)
    with pytest.raises(RuntimeError, match="read by the test"):
        workers(1)(return_unreadable)
    assert alive(old) == []


def test_idle_workers_do_not_spin(workers: Pools) -> None:
    pids = workers(2)(process_id)
    time.sleep(1)
    before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    time.sleep(2)
    after = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    assert max(end - start for start, end in zip(before, after, strict=True)) < 0.2


def test_the_least_recently_used_pool_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def stub(world_size: int) -> SimpleNamespace:
        return SimpleNamespace(closed=False, wait_ready=lambda: None, close=lambda: closed.append(world_size))

    monkeypatch.setattr(pool_module, "Pool", stub)
    pools = Pools()
    for world_size in (1, 2, 3, 4, 1, 5):
        pools.get(world_size)
    assert closed == [2, 3]
    pools.close()
    assert sorted(closed) == [1, 2, 3, 4, 5]


def test_closing_a_pool_leaves_nothing() -> None:
    before = set(psutil.Process().children(recursive=True))
    pools = Pools()
    sleepers = pools(1)(start_a_sleeper)
    port = pools.get(1).port
    pools.close()
    assert alive(sleepers) == []
    assert set(psutil.Process().children(recursive=True)) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


SESSION = """
import os, sys
from tests.distributed.pool import Pools
from tests.distributed.test_pool import process_id
pools = Pools()
print("workers", *pools(2)(process_id), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
pools.close()
"""


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_nothing_outlives_the_session(tmp_path: Path, end: str) -> None:
    files = tmp_path / "temporary"
    files.mkdir()
    environment = {"TMPDIR": str(files)}
    session = run_command([sys.executable, "-c", SESSION, end], timeout=120, environment=environment)
    pids = [
        int(word) for line in session.output.splitlines() if line.startswith("workers") for word in line.split()[1:]
    ]
    assert len(pids) == 2, session.output
    assert session.returncode == (0 if end == "closed" else -signal.SIGKILL)
    if end == "closed":
        assert session.leftovers == []
    assert alive(pids) == []
    assert list(files.iterdir()) == []


HELLO = """
import os, subprocess, sys, time
# One write, since both ranks write to the same file.
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[-1]}\\n")
if sys.argv[-1] == "orphan":
    subprocess.Popen(["sleep", "601"], start_new_session=True)
if sys.argv[-1] == "hang":
    def wait_for_ever():
        time.sleep(600)
    wait_for_ever()
"""


def test_launch_runs_a_script_under_deepspeed(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(HELLO)
    result = launch(script, "orphan", ranks=2, timeout=120)
    assert result.returncode == 0, result.output
    assert "rank 0 of 2 orphan" in result.output
    assert "rank 1 of 2 orphan" in result.output
    assert result.leftovers == ["sleep 601"] * 2


def test_a_launch_that_hangs_is_killed_with_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hello.py"
    script.write_text(HELLO)
    tags: list[str] = []
    kill_tagged = launching.kill_tagged

    def remember(tag: str) -> list[str]:
        tags.append(tag)
        return kill_tagged(tag)

    monkeypatch.setattr(launching, "kill_tagged", remember)
    with pytest.raises(AssertionError, match="in wait_for_ever"):
        run_command([sys.executable, script, "hang"], timeout=4, environment={"RANK": "0", "WORLD_SIZE": "1"})
    assert launching.tagged(tags[0]) == []
