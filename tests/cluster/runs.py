"""What the runs on simulated clusters have in common: a training run in a folder, and what must be true of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_lazarus.reporting.loss_curves import read_curve

REPOSITORY = Path(__file__).resolve().parents[2]
ITERATIONS = 300
LIMIT_S = 120.0
TOLERANCE = 1e-6
"""Relative, of the loss, which the logs give to seven digits; the runs are in float64."""

Found = TypeVar("Found")


@dataclass
class RunFolder:
    """One training run. ``notes``: what was seen."""

    name: str
    folder: Path
    data: Path
    notes: list[str] = field(default_factory=list)

    @property
    def log_dir(self) -> Path:
        return self.folder / "logs"

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}", flush=True)

    def wait_until(self, condition: Callable[[], Found | None], what: str, limit_s: float = LIMIT_S) -> Found:
        """Raises AssertionError if it does not come."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (found := condition()) is not None:
                return found
            time.sleep(0.2)
        raise AssertionError(f"{what} has not happened within {limit_s:g} s")

    # -- looking ------------------------------------------------------------------------------------------------

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Of these kinds, or all."""
        path = self.log_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        events = [json.loads(line) for line in text.split("\n")[:-1]]
        return [event for event in events if not kinds or event["kind"] in kinds]

    def log_lines(self, part: str) -> list[str]:
        """Lines of the workers' logs with this in them."""
        logs = self.log_dir.glob("*.[0-9].log")
        return [line for path in logs for line in path.read_text(errors="replace").splitlines() if part in line]

    def generation(self) -> tuple[int, list[str]]:
        """Number and nodes of the newest generation, if it works; else 0 and none."""
        generations, working = self.events("generation"), self.events("working")
        if not generations or not working or working[-1]["generation"] != generations[-1]["generation"]:
            return 0, []
        return generations[-1]["generation"], sorted(generations[-1]["nodes"])

    def wait_for_nodes(self, *nodes: str, limit_s: float = LIMIT_S) -> None:
        wanted = sorted(nodes)
        self.wait_until(lambda: self.generation()[1] == wanted or None, f"training on {wanted}", limit_s)

    def worked_at(self) -> float:
        """When the newest generation had made its first step (s since 1970)."""
        return float(self.events("working")[-1]["time"])

    def iteration(self) -> int:
        """Of the newest line in a log."""
        lines = self.log_lines(" lm loss: ")
        return max((int(line.split("/")[0].split()[1]) for line in lines if line.startswith(" iteration")), default=0)

    # -- the end ------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def compare(self, reference: Mapping[int, float]) -> None:
        """The run has completed, with the loss curve of the undisturbed one."""
        result = json.loads((self.log_dir / "result.json").read_text())
        assert result["status"] == "completed", result
        curve = read_curve(self.log_dir)
        assert curve.keys() == reference.keys(), f"iterations {sorted(curve.keys() ^ reference.keys())}"
        worst = max(abs(curve[step] - loss) / loss for step, loss in reference.items())
        assert worst <= TOLERANCE, f"the loss curve differs by {worst:.1e}"
        self.note(f"completed; largest relative difference of the loss from the undisturbed run's: {worst:.1e}")


def settings() -> dict[str, str]:
    """Of the training script, for all runs."""
    chosen = {"TRAIN_ITERS": ITERATIONS, "SAVE_INTERVAL": 100, "LOG_INTERVAL": 10, "LR": 1e-3, "MIN_LR": 1e-4}
    chosen |= {"EVAL_INTERVAL": ITERATIONS // 2, "EVAL_ITERS": 2}
    return {name: str(value) for name, value in chosen.items()} | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def prepare_data(folder: Path) -> Path:
    """A data set of this repository's own text; its prefix. One that is there stays: the undisturbed run used it."""
    prefix = folder / "text_text_document"
    if prefix.with_suffix(".idx").exists():
        return prefix
    patterns = ("*.md", "docs/*.md", "megatron_lazarus/*/*.py")
    files = sorted(path for pattern in patterns for path in REPOSITORY.glob(pattern))
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": path.read_text()}) + "\n" for path in files))
    command = [sys.executable, "scripts/preprocess_data.py", "--input", str(source), "--append-eod"]
    command += ["--output-prefix", str(folder / "text"), "--tokenizer-type", "ByteLevelTokenizer"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return prefix


def undisturbed(folder: Path, data: Path) -> dict[int, float]:
    """The loss curve of the same training, on two nodes that nothing happens to."""
    variables = {**os.environ, **settings(), "DATA_PATH": str(data), "OUTPUT": str(folder), "LAUNCHER": "lazarus"}
    variables |= {"NUM_GPUS": "2", "NODES": "2", "TRAIN_SCRIPT": "tests/cluster/paced_pretrain.py"}
    command = ["bash", "scripts/pretrain_gpt_tiny.sh"]
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        code = subprocess.call(command, cwd=REPOSITORY, env=variables, stdout=output, stderr=output, timeout=900)
    assert code == 0, log.read_text()[-3000:]
    return read_curve(folder / "logs")
