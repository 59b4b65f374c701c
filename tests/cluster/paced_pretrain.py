"""``scripts/pretrain_gpt.py`` in float64, at a larger model's pace: ``PACE_S`` seconds a micro-batch.

Until the file ``HURRY`` exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from megatron_lazarus.models.data import MicroBatches
from megatron_lazarus.pretrain_gpt import main

PACE_S = float(os.environ.get("PACE_S", "0"))
HURRY = Path(os.environ.get("HURRY", "/dev/null"))


def paced(original: Any) -> Any:
    def micro_batch(self: MicroBatches, step: int, number: int) -> Any:
        if not HURRY.exists():
            time.sleep(PACE_S)
        return original(self, step, number)

    return micro_batch


if __name__ == "__main__":
    # The data is the one thing that a step cannot do without.
    setattr(MicroBatches, "micro_batch", paced(MicroBatches.micro_batch))  # noqa: B010  (mypy: a method)
    raise SystemExit(main([*sys.argv[1:], "--float64"]))
