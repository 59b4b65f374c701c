"""What holds for every test: one thread for torch, and DeepSpeed on the CPU, set before either is imported."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
