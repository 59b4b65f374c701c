"""``python -m tests.elastic.stock_script [--local_rank=N] script.py …``: a script under stock DeepSpeed, as it is.

But for the extension that DeepSpeed compiles in the first ``init_distributed`` on a CPU and never uses in training: it
takes minutes, and a process that is killed meanwhile leaves a lock that all later ones wait for.
"""

from __future__ import annotations

import runpy
import sys

import deepspeed

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    words = sys.argv[1:]
    launchers = [word for word in words if word.startswith("--local_rank")]
    script, *arguments = (word for word in words if word not in launchers)
    sys.argv = [script, *launchers, *arguments]
    runpy.run_path(script, run_name="__main__")
