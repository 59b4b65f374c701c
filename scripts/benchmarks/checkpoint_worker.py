"""A rank of checkpoint.py: trains one model and saves it with one engine, and writes down how long what took.

Segments of steps with a save at their beginning are each between two quiet halves of one. The result is one JSON file
per rank.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from recovery_worker import VOCABULARY, Model
from torch import Tensor

DURABLE_LIMIT_S = 120.0
_POLL_S = 0.01


class Training:
    """An engine, its steps, and the seconds that steps waited for a save in progress (``stalled``)."""

    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        self.options, self.directory = options, directory
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.step_number, self.stalled = 0, 0.0
        torch.manual_seed(1)

    def batch(self, step: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100_003 * step + number)
        return torch.randint(0, VOCABULARY, (1, self.options["tokens"]), generator=generator)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose time counts as a stall."""

        def wrapped(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.stalled += time.perf_counter() - started

        return wrapped

    def model(self, moe_class: Any, **options: Any) -> tuple[Model, dict[str, Any]]:
        sizes = self.options
        model = Model(moe_class, sizes["layers"], sizes["hidden"], sizes["experts"], **options)
        config = {"train_batch_size": self.world, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
        return model, config

    def step(self) -> None:
        raise NotImplementedError

    def save(self, tag: str) -> Callable[[], None]:
        """Begin a save; returns a function that waits until all of it is on storage."""
        raise NotImplementedError

    def close(self) -> None:
        """Everything is saved."""


class Lazarus(Training):
    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        super().__init__(options, directory)
        import megatron_lazarus
        from megatron_lazarus.checkpoint.engine import ExpertCheckpoint
        from megatron_lazarus.moe.layer import MoELayer

        ExpertCheckpoint.before_update = self.timed(ExpertCheckpoint.before_update)  # type: ignore[method-assign]
        model, config = self.model(MoELayer)
        # In so short a run any loss would be a large share of it, and K would rise at once.
        checkpoint = {"persist_experts": options["persist_experts"], "content": options["content"], "dynamic_k": False}
        # Every expert on one rank, as stock has them: both sides train and hold the same.
        config["lazarus"] = {"experts": {"min_replicas": 1}, "checkpoint": checkpoint}
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.engine, *_ = megatron_lazarus.initialize(model=model, optimizer=optimizer, config=config)

    def step(self) -> None:
        self.engine.train_batch(lambda step, number: [self.batch(step, number)])

    def save(self, tag: str) -> Callable[[], None]:
        self.engine.save_checkpoint(str(self.directory), tag=tag)
        latest = self.directory / "latest"

        def durable() -> None:
            deadline = time.monotonic() + DURABLE_LIMIT_S
            while not latest.exists() or latest.read_text() != tag:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{tag} is not complete after {DURABLE_LIMIT_S:g} s")
                time.sleep(_POLL_S)

        return durable


class Stock(Training):
    """Stock DeepSpeed with the checkpoint engine that ``options["checkpoint"]`` chooses."""

    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        super().__init__(options, directory)
        import deepspeed
        from deepspeed.moe.layer import MoE
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        # Its compilation takes minutes, and nothing here uses it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", verbose=False)
        model, config = self.model(MoE, ep_size=self.world)
        if options["checkpoint"]:
            config["checkpoint"] = options["checkpoint"]
        group = {"params": list(model.parameters()), "name": "parameters"}
        optimizer = torch.optim.Adam(split_params_into_different_moe_groups_for_optimizer(group), lr=1e-4)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        # A decoupled engine waits here, at the first update after a save, until everything is written.
        self.engine._commit_decoupled_checkpoint = self.timed(self.engine._commit_decoupled_checkpoint)

    def step(self) -> None:
        loss = self.engine(self.batch(self.engine.global_steps, self.rank))
        self.engine.backward(loss)
        self.engine.step()

    def save(self, tag: str) -> Callable[[], None]:
        self.engine.save_checkpoint(str(self.directory), tag=tag)

        def durable() -> None:
            if self.engine.checkpoint_engine.is_decoupled():
                latest = self.directory / "latest"
                while not latest.exists() or latest.read_text() != tag:
                    time.sleep(_POLL_S)
            flush(self.directory / tag)

        return durable

    def close(self) -> None:
        self.engine.destroy()


class TorchDistributed(Stock):
    """The same training, saved by ``torch.distributed.checkpoint.async_save``."""

    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        super().__init__({**options, "checkpoint": None}, directory)
        # Its background thread must not share a communicator with training.
        self.group = dist.new_group(backend="gloo")
        self.pending: Any = None

    def save(self, tag: str) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        if self.pending is not None:
            self.pending.result()
        self.pending = dcp.async_save(self.state(), checkpoint_id=str(self.directory / tag), process_group=self.group)
        pending = self.pending

        def durable() -> None:
            pending.result()
            flush(self.directory / tag)

        return durable

    def state(self) -> dict[str, Any]:
        """All state of this rank by names that are the same on no two ranks unless the values are."""
        names = {id(p): self.global_name(name) for name, p in self.engine.module.named_parameters()}
        state: dict[str, Any] = {}
        for group in self.engine.optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                state[f"model.{name}"] = parameter.detach()
                for key, value in self.engine.optimizer.state[parameter].items():
                    state[f"optimizer.{name}.{key}"] = value
        return state

    def global_name(self, name: str) -> str:
        marker = ".deepspeed_experts."
        head, found, tail = name.partition(marker)
        if not found:
            return name
        local, _, rest = tail.partition(".")
        return f"{head}{marker}{self.rank * self.options['experts'] // self.world + int(local)}.{rest}"


def flush(directory: Path) -> None:
    """To storage with what DeepSpeed and torch leave in the page cache."""
    for path in [*directory.rglob("*"), directory]:
        if path.exists():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class Watch:
    """Waits in a thread until a save is durable, and says when that was."""

    def __init__(self, wait: Callable[[], None], started: float) -> None:
        self.seconds = 0.0
        self.error: Exception | None = None
        self._wait, self._started = wait, started
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._wait()
        except Exception as error:
            self.error = error
        self.seconds = time.perf_counter() - self._started

    @property
    def writing(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> float:
        self._thread.join(DURABLE_LIMIT_S)
        if self.error is not None or self._thread.is_alive():
            raise RuntimeError("a save did not become durable") from self.error
        return self.seconds


class Measurement:
    """Rounds of quiet steps and as many with a save; ``result`` gathers their seconds and bytes."""

    def __init__(self, training: Training, interval: int) -> None:
        self.training, self.interval = training, interval
        names = ["quiet", "quiet_steps", "quiet_cpu", "saving", "saving_cpu", "while_writing"]
        names += ["blocking", "durable", "bytes"]
        self.result: dict[str, list[float]] = {name: [] for name in names}

    def warm_up(self) -> None:
        """The first steps allocate; the first save makes buffers, and a partial one writes everything."""
        for _ in range(3):
            self.step()
        self.save(0)
        self.result["while_writing"].clear()

    def round(self, number: int) -> None:
        """A segment with a save between two quiet halves of one: whether the machine gets faster or slower cancels."""
        steps, processor = self.quiet(self.interval // 2)
        saving = self.save(number)
        more_steps, more_processor = self.quiet(self.interval - self.interval // 2)
        quiet = steps + more_steps
        self.result["quiet_steps"] += quiet
        for name, value in {**saving, "quiet": sum(quiet), "quiet_cpu": processor + more_processor}.items():
            self.result[name].append(value)

    def quiet(self, steps: int) -> tuple[list[float], float]:
        """Seconds of each step, and of the processor in all."""
        started = time.process_time()
        seconds = [self.step() for _ in range(steps)]
        return seconds, time.process_time() - started

    def step(self) -> float:
        started = time.perf_counter()
        self.training.step()
        return time.perf_counter() - started

    def save(self, number: int) -> dict[str, float]:
        """A segment with a save at its beginning."""
        dist.barrier()
        training, tag, processor = self.training, f"save{number}", time.process_time()
        stalled, started = training.stalled, time.perf_counter()
        watch = Watch(training.save(tag), started)
        call = time.perf_counter() - started
        for _ in range(self.interval):
            writing = watch.writing
            seconds = self.step()
            if writing:
                self.result["while_writing"].append(seconds)
        total = time.perf_counter() - started
        durable = watch.join()
        processor = time.process_time() - processor
        # Nobody goes on until everything is on storage, so that what follows is quiet.
        dist.barrier()
        folder = training.directory / tag
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return {
            "saving": total,
            "saving_cpu": processor,
            "blocking": call + training.stalled - stalled,
            "durable": durable,
            "bytes": size,
        }


def main() -> int:
    """Do a round for every line on standard input, and say on descriptor ``reply`` when it is done."""
    torch.set_num_threads(1)
    kind, directory, result, reply, options = sys.argv[1:6]
    settings = json.loads(options)
    training = {"lazarus": Lazarus, "stock": Stock, "torch": TorchDistributed}[kind](settings, Path(directory))
    measurement = Measurement(training, settings["interval"])
    measurement.warm_up()
    with open(int(reply), "w", buffering=1, encoding="utf-8") as replies:
        print("ready", file=replies)
        for line in sys.stdin:
            measurement.round(int(line))
            print("done", file=replies)
    training.close()
    Path(f"{result}.{training.rank}.json").write_text(json.dumps(measurement.result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
