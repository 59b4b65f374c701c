"""What is overridden in DeepSpeed and Megatron Core: one file per upstream module, each entry data with reasons."""

from megatron_lazarus.patches.deepspeed_accelerator import CPU_FLOAT64
from megatron_lazarus.patches.registry import Patch, PatchError, applied, apply_all, undo_all

ALL = (CPU_FLOAT64,)

__all__ = ["ALL", "Patch", "PatchError", "applied", "apply_all", "undo_all"]
