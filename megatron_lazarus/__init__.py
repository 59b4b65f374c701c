"""Resilient, elastic pretraining of Mixture-of-Experts models, as a plugin of DeepSpeed and Megatron Core.

The import is lazy: the launcher runs once per rank and must not pay for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lazarus.engine import LazarusEngine
    from megatron_lazarus.initialization import initialize as initialize
    from megatron_lazarus.moe.layer import MoELayer

__version__ = "0.1.0"
__all__ = ["LazarusEngine", "MoELayer", "__version__", "initialize"]

_HOMES = {
    "initialize": "megatron_lazarus.initialization",
    "LazarusEngine": "megatron_lazarus.engine",
    "MoELayer": "megatron_lazarus.moe.layer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
