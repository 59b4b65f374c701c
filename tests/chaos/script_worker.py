"""A member of an elastic run whose script drives its loop itself, and writes down which samples it trains on.

What a micro-batch consists of is told from its content, since the engine repeats forwards without the script. Lines
of the ledger are ``sample`` (a micro-batch whose loss got a gradient that is not zero, by the samples in it),
``drew`` (the state of the random numbers before its forward), ``step``, ``eval`` and ``end``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.chaos.faults import Faults, faults_while_joining
from tests.distributed.runs import make_optimizer, make_scheduler
from tests.distributed.tiny import TinyMoE, batch, lazarus_moe

LENGTH = 12
EVALUATION = 10_000_000


def sample(identity: int) -> dict[str, Tensor]:
    """One sample: tokens and labels [length]."""
    one = batch(identity, 0, samples=1, length=LENGTH)
    return {name: tensor[0] for name, tensor in one.items()}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}


class Samples:
    """A map-style dataset of the first ``count`` samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return sample(index)


class ScriptWorker:
    """``options``: ``loop`` names the method that does a micro-batch or a step; ``data``: samples in the dataset, 0:
    the script feeds batches of its own; others as named below."""

    def __init__(self, log_dir: Path, options: dict[str, Any]) -> None:
        import megatron_lazarus

        self.log_dir = log_dir
        self.hold = log_dir / "hold"
        self.steps, self.loop = options["total_steps"], options["loop"]
        self.pause, self.eval_every = options.get("pause_s", 0.0), options.get("eval_every", 0)
        self.save_every = options.get("save_every", 0)
        self.ledger = (log_dir / f"ledger-{os.getpid()}.jsonl").open("a")
        text = os.environ.get("CHAOS_FAULT", "")
        faults_while_joining(text)
        torch.set_default_dtype(torch.float64)
        experts = options.get("experts", 6)
        moe = lazarus_moe(experts, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
        self.model = TinyMoE(moe, options.get("dropout", 0.0), 0.05)
        self.model.register_forward_hook(self._watch)
        self.model.register_forward_pre_hook(self._note_draws)
        self.names: dict[bytes, int] = {}
        optimizer = make_optimizer("adam")(self.model)
        config = {
            "train_batch_size": options.get("micro_batches", 6) * 2,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.5,
            "lazarus": options.get("section", {}),
        }
        data = Samples(options["data"]) if options["data"] else None
        self.engine, _, self.loader, _ = megatron_lazarus.initialize(
            model=self.model,
            optimizer=optimizer,
            lr_scheduler=make_scheduler(optimizer),
            training_data=data,
            collate_fn=collate if data else None,
            config=config,
        )
        self._iterator: Any = None
        self._fed = 0
        self._buffer: dict[str, Tensor] = {}
        self._stream = int(os.environ.get("LAZARUS_NODE", "n0")[1:]) * 100_000 + os.getpid() % 97 * 1000
        self._know(range(options["data"]))
        self.faults = Faults(text, self.engine)

    # -- what it writes down ------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        elastic = self.engine._elastic
        return 0 if elastic is None else elastic.membership.generation.number

    def write(self, kind: str, **fields: Any) -> None:
        where = {"generation": self.generation, "pid": os.getpid()}
        self.ledger.write(json.dumps({"kind": kind, "time": time.time(), **where, **fields}) + "\n")
        self.ledger.flush()

    def _know(self, identities: range) -> None:
        for identity in identities:
            self.names[sample(identity)["tokens"].numpy().tobytes()] = identity

    def _identities(self, tokens: Tensor) -> list[int]:
        return [self.names[row.numpy().tobytes()] for row in tokens]

    def _note_draws(self, module: Any, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]

    def _watch(self, module: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        rows, step, state = self._identities(inputs[0]), self.engine.global_steps, self._state

        def count(gradient: Tensor) -> None:
            if float(gradient.abs().sum()) != 0.0:
                self.write("sample", step=step, rows=rows)
                self.write("drew", rows=rows, state=state)

        output[0].register_hook(count)

    # -- the script ---------------------------------------------------------------------------------------------

    def fetch(self) -> dict[str, Tensor]:
        """The next micro-batch: of the loader, epoch after epoch, or of this process's own stream."""
        time.sleep(self.pause)
        while self.hold.exists():
            time.sleep(0.01)
        self.faults.at_data(self.engine.global_steps)
        if self.loader is not None:
            while True:
                if self._iterator is None:
                    self._iterator = iter(self.loader)
                values = next(self._iterator, None)
                if values is not None:
                    break
                self._iterator = None
        else:
            first = self._stream + self._fed
            self._fed += 2
            self._know(range(first, first + 2))
            values = collate([sample(first), sample(first + 1)])
        return values

    def train(self) -> None:
        engine = self.engine
        while engine.global_steps < self.steps:
            before = engine.global_steps
            getattr(self, f"_{self.loop}")()
            if engine.global_steps > before:
                result = engine.protocol.result()
                where = {"rank": engine.rank, "world": engine.world_size}
                self.write("step", step=result.step, loss=result.loss, norm=result.grad_norm, **where)
                if self.eval_every and engine.global_steps % self.eval_every == 0:
                    self.evaluate()
                if self.save_every and engine.global_steps % self.save_every == 0:
                    engine.save_checkpoint(str(self.log_dir / "checkpoint"))
        self.finish()

    def _own(self) -> None:
        values = self.fetch()
        loss, _ = self.engine(values["tokens"], values["labels"])
        self.faults.strike_at("between", self.engine.global_steps)
        self.engine.backward(loss)
        self.faults.strike_at("after-backward", self.engine.global_steps)
        self.engine.step()

    def _two_forwards(self) -> None:
        """Two micro-batches of a step at once; their losses are taken in the other order."""
        losses = []
        for index in range(2):
            values = self.fetch()
            if index == 1:
                self.faults.strike_at("second", self.engine.global_steps)
            losses.append(self.engine(values["tokens"], values["labels"])[0])
        for loss in reversed(losses):
            self.engine.backward(loss)
            self.engine.step()

    def _one_buffer(self) -> None:
        """Every micro-batch of a step in the same memory."""
        for index in range(int(self.engine.gradient_accumulation_steps())):
            for name, values in self.fetch().items():
                self._buffer.setdefault(name, torch.zeros_like(values)).copy_(values)
            if index == 1:
                self.faults.strike_at("second", self.engine.global_steps)
            loss, _ = self.engine(self._buffer["tokens"], self._buffer["labels"])
            self.engine.backward(loss)
            self.engine.step()

    def _outside(self) -> None:
        """As a script that takes the model's output and applies a criterion of its own."""
        values = self.fetch()
        loss = self.criterion(self.engine(values["tokens"], values["labels"]))
        self.faults.strike_at("between", self.engine.global_steps)
        self.engine.backward(loss)
        self.engine.step()

    def _function(self) -> None:
        kept: list[dict[str, Tensor]] = []

        def step() -> None:
            for index in range(int(self.engine.gradient_accumulation_steps())):
                if self.loader is None and index == len(kept):
                    kept.append(self.fetch())
                values = self.fetch() if self.loader is not None else kept[index]
                self.engine.backward(self.criterion(self.engine(values["tokens"], values["labels"])))

        self.engine.run_step(step)

    def _small_function(self) -> None:
        """One micro-batch, fetched outside."""
        values = self.fetch()
        self.engine.run_step(
            lambda: self.engine.backward(self.criterion(self.engine(values["tokens"], values["labels"])))
        )

    @staticmethod
    def criterion(output: Any) -> Tensor:
        loss: Tensor = output[0]
        return loss * 1.0

    def evaluate(self) -> None:
        engine = self.engine
        engine.eval()
        losses = []
        with torch.no_grad():
            for number in range(3):
                if number == 1:
                    self.faults.strike_at("evaluating", engine.global_steps)
                values = collate([sample(EVALUATION + 2 * number), sample(EVALUATION + 2 * number + 1)])
                losses.append(float(engine(values["tokens"], values["labels"])[0]))
        engine.train()
        self.write("eval", step=engine.global_steps, losses=losses)

    def finish(self) -> None:
        engine = self.engine
        dense = hashlib.sha256(b"".join(_bytes(p) for p in engine.module.parameters())).hexdigest()
        records = [
            [layer, expert, hashlib.sha256(_bytes(buffer.rows[slot])).hexdigest()]
            for layer, buffer in enumerate(engine.experts.buffers)
            for slot, expert in enumerate(buffer.experts)
        ]
        counts = {"lost": engine.lost_samples, "dropped": engine.dropped_steps, "micro_steps": engine.micro_steps}
        self.write("end", rank=engine.rank, world=engine.world_size, dense=dense, records=records, **counts)
        engine.finish()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
