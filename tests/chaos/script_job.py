"""Jobs whose scripts drive their loops themselves, and what must be true of them in the end.

The truth is computed here, in one process, by the plain reference on exactly the samples that the ledger names.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_lazarus.elastic.settings import ElasticConfig
from tests.chaos.job import Ledger, Line, TrainingJob, closing
from tests.chaos.nursery import Nursery
from tests.chaos.script_worker import EVALUATION, collate, sample
from tests.distributed import reference
from tests.distributed.runs import make_optimizer, make_scheduler

BATCH = 2
EVERY_SAMPLE = 48


def steps_of_the_order(count: int, steps: int, micro_batches: int) -> list[list[list[int]]]:
    """[step][micro-batch] -> samples, as documented: epochs in the order of torch's sampler, one after the other."""
    size, row = micro_batches * BATCH, []
    for epoch in range(-(-steps * size // count)):
        row += torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    windows = [row[step * size : (step + 1) * size] for step in range(steps)]
    return [[window[number::micro_batches] for number in range(micro_batches)] for window in windows]


class ScriptJob(TrainingJob):
    """Use with ``script_job``. After ``check``, ``ledger`` and ``committed`` tell what was trained on."""

    def reference(self) -> Ledger:
        return Ledger()

    def micro_batches_by_step(self, ledger: Ledger) -> dict[int, list[Line]]:
        """Those whose gradients are in a committed step, of whatever member."""
        generations: dict[int, int] = {}
        for line in ledger.of("step"):
            generations[line["step"]] = min(line["generation"], generations.get(line["step"], 1 << 62))
        found: dict[int, list[Line]] = {step: [] for step in sorted(generations)}
        for line in ledger.of("sample"):
            if generations.get(line["step"]) == line["generation"]:
                found[line["step"]].append(line)
        return found

    def _check_training(self, ledger: Ledger, _: Ledger, tolerance: float) -> None:
        steps = self.options["total_steps"]
        found = self.micro_batches_by_step(ledger)
        assert list(found) == list(range(steps)), f"committed steps {list(found)}"
        if self.options["data"]:
            wanted = steps_of_the_order(self.options["data"], steps, self.options["micro_batches"])
            for step, rows in enumerate(wanted):
                seen = Counter(tuple(line["rows"]) for line in found[step])
                assert seen == Counter(map(tuple, rows)), f"step {step}: trained on {seen}, not {rows}"
        for step, lines in found.items():
            per_rank = Counter(line["pid"] for line in lines)
            assert self.options["data"] or len(set(per_rank.values())) == 1, f"step {step}: {per_rank}"
        trained = Counter(identity for lines in found.values() for line in lines for identity in line["rows"])
        assert self.options["data"] or max(trained.values()) == 1, "a sample was trained on twice"
        self._check_losses(ledger, found, tolerance)
        for line in ledger.of("drew"):
            same = {other["state"] for other in ledger.of("drew") if other["rows"] == line["rows"]}
            assert self.options["data"] or len(same) == 1, f"{line['rows']} was repeated with other random numbers"
        self._check_end(ledger)

    def _check_losses(self, ledger: Ledger, found: dict[int, list[Line]], tolerance: float) -> None:
        if self.options.get("dropout"):
            return
        batches = [[collate([sample(i) for i in line["rows"]]) for line in lines] for lines in found.values()]
        held_out = [
            collate([sample(EVALUATION + 2 * number), sample(EVALUATION + 2 * number + 1)]) for number in range(3)
        ]
        truth = reference.train_on(
            6, 2, batches, 0.5, make_optimizer("adam"), make_scheduler, 0.05, held_out if ledger.of("eval") else ()
        )
        for line in ledger.of("step"):
            loss, norm, _ = truth[line["step"]]
            for name, value in (("loss", loss), ("norm", norm)):
                error = abs(line[name] - value) / abs(value)
                assert error <= tolerance, f"{name} of step {line['step']}: {line[name]}, not {value} ({error:.2g})"
        for line in ledger.of("eval"):
            for value, right in zip(line["losses"], truth[line["step"] - 1][2], strict=True):
                assert abs(value - right) <= tolerance * abs(right), f"evaluation after step {line['step']}"

    def _check_end(self, ledger: Ledger) -> None:
        final = ledger.of("end")
        assert len({line["dense"] for line in final}) == 1, "dense parameters differ"
        assert len({(line["lost"], line["dropped"], line["micro_steps"]) for line in final}) == 1, "counters differ"
        digests: dict[tuple[int, int], set[str]] = {}
        for line in final:
            for layer, expert, digest in line["records"]:
                digests.setdefault((layer, expert), set()).add(digest)
        assert all(len(one) == 1 for one in digests.values()), "replicas differ"

    def lost_and_dropped(self, ledger: Ledger) -> tuple[int, int]:
        """As every member counts them, and as the events say."""
        line = ledger.of("end")[0]
        told = sum(event["samples"] for event in self.events() if event["kind"] == "samples lost")
        assert told == line["lost"], f"events tell of {told} lost samples, members of {line['lost']}"
        assert self.events_of("step dropped") == line["dropped"]
        return line["lost"], line["dropped"]


@contextlib.contextmanager
def script_job(
    nursery: Nursery, log_dir: Path, nodes: int, loop: str, data: int = 0, **options: Any
) -> Iterator[ScriptJob]:
    """A job that starts when ``nodes`` of them are there, which the caller adds; see ScriptWorker for ``options``."""
    elastic = {"min_nodes": 1, "start_nodes": nodes, "heartbeat_interval_s": 0.25, **options.pop("settings", {})}
    chosen = {"total_steps": 8, "micro_batches": 6, "pause_s": 0.01, "loop": loop, "data": data, **options}
    with closing(ScriptJob(nursery, log_dir, ElasticConfig(**elastic), chosen)) as job:
        yield job
