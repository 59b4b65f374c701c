"""Compares the loss curves that two runs printed: ``python -m megatron_lazarus.reporting.loss_curves RUN OTHER``.

A run is a log file, or a folder whose ``*.log`` files are those of its workers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

_LINE = re.compile(r"^ iteration +(\d+)/ *\d+ \|.*\| lm loss: ([0-9.eE+-]+) \|", re.MULTILINE)


def read_curve(run: Path) -> dict[int, float]:
    """Loss by iteration. Raises ValueError if the run printed none."""
    files = sorted(run.glob("*.log")) if run.is_dir() else [run]
    curve = {
        int(iteration): float(loss)
        for path in files
        for iteration, loss in _LINE.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
    if not curve:
        raise ValueError(f"{run} holds no line ' iteration … | lm loss: …'")
    return dict(sorted(curve.items()))


def table(run: dict[int, float], other: dict[int, float]) -> str:
    """Both curves side by side, for iterations that both have, and their largest relative difference."""
    common = [iteration for iteration in run if iteration in other]
    lines = [f"{'iteration':>9} {'this run':>10} {'other run':>10} {'difference':>10}"]
    worst = 0.0
    for iteration in common:
        difference = abs(run[iteration] - other[iteration]) / abs(other[iteration])
        worst = max(worst, difference)
        lines.append(f"{iteration:9d} {run[iteration]:10.6f} {other[iteration]:10.6f} {difference:10.1e}")
    lines.append(f"largest relative difference of the loss: {worst:.1e}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of two runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    arguments = parser.parse_args(argv)
    print(table(read_curve(arguments.run), read_curve(arguments.other)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
