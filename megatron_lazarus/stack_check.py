"""What of this host's software, devices, network and clock will not work with lazarus."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_lazarus.elastic.interfaces import addresses, own_address

_TIME_ERROR = 5
"""What adjtimex(2) returns for a clock that nothing keeps in step with others."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found, and what will not work because of it ("": nothing)."""

    what: str
    found: str
    problem: str = ""


def check_stack(interface: str | None) -> Iterator[Check]:
    """All checks of this host but those of storage; ``interface`` is the one that the configuration names."""
    yield _python()
    torch = yield from _imported("torch")
    deepspeed = yield from _imported("deepspeed")
    yield from _megatron()
    if torch is not None and deepspeed is not None:
        yield from _devices(torch, deepspeed)
    if deepspeed is not None:
        yield from _patches()
    yield _apex()
    yield _extension_locks()
    yield _network(interface)
    yield _clock()


def _python() -> Check:
    number = ".".join(map(str, sys.version_info[:3]))
    return Check("python", number, "" if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed")


def _imported(name: str) -> Any:
    """Yield the check of a package without which nothing works; return it, None if it cannot be imported."""
    try:
        number = version(name)
    except PackageNotFoundError:
        yield Check(name, "not installed", "nothing works without it: install the versions of constraints.txt")
        return None
    try:
        # A package that is there but broken may raise anything.
        module: ModuleType = importlib.import_module(name)
    except Exception as error:
        yield Check(name, number, f"it cannot be imported: {type(error).__name__}: {error}")
        return None
    yield Check(name, number)
    return module


def _megatron() -> Iterator[Check]:
    try:
        yield Check("megatron-core", version("megatron-core"))
    except PackageNotFoundError:
        problem = "pretrain_gpt and the sigmoid router do not work; scripts of your own do"
        yield Check("megatron-core", "not installed", problem)


def _devices(torch: Any, deepspeed: Any) -> Iterator[Check]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    name, needed = accelerator.device_name(), accelerator.communication_backend_name()
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = ""
    if name == "cpu" and cuda:
        problem = f"training would run on the CPU though there are {cuda} GPUs: unset DS_ACCELERATOR"
    elif name == "cuda" and not cuda:
        problem = "DeepSpeed has chosen CUDA, of which torch finds no device: set DS_ACCELERATOR=cpu, or see the driver"
    yield Check("accelerator", f"{name}, {cuda} CUDA devices", problem)
    there = {
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
    }
    found = ", ".join(name for name, available in there.items() if available) or "none"
    lacks = needed in there and not there[needed]
    yield Check(
        "back ends", found, f"{needed} is needed on {name}, and this torch has been built without" if lacks else ""
    )


def _patches() -> Iterator[Check]:
    from megatron_lazarus.patches import ALL, state_of

    states = [state_of(patch) for patch in ALL]
    unfit = [why for state, why in states if state == "does not fit"]
    fit = f"{len(states) - len(unfit)} of {len(states)} fit"
    yield Check("patches", fit, f"no run can start: {unfit[0]} (lazarus patches lists all)" if unfit else "")


def _apex() -> Check:
    """NVIDIA's has optimizers; the package of that name on PyPI is a toolkit for web sites."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return Check("apex", "not installed (it is not needed)")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return Check("apex", "NVIDIA's")
    where = str(folders[0]) if folders else str(spec.origin)
    return Check(
        "apex",
        f"not NVIDIA's, at {where}",
        "packages that look for NVIDIA's apex find this unrelated one and fail in strange ways: pip uninstall apex",
    )


def _extension_locks() -> Check:
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    locks = sorted(root.rglob("lock")) if root.is_dir() else []
    if not locks:
        return Check("extensions", f"no lock in {root}")
    age = max(0.0, time.time() - locks[0].stat().st_mtime)
    return Check(
        "extensions",
        f"{locks[0]} is {age:.0f} s old",
        "unless that extension is being compiled just now, each process that needs it waits for ever: remove the lock",
    )


def _network(interface: str | None) -> Check:
    found = ", ".join(f"{name} {address}" for name, address in addresses().items())
    try:
        own = own_address(interface)
    except ValueError as error:
        return Check("network", found, f"nodes cannot meet: {error}")
    if own.startswith("127."):
        # Right for nodes of one host only, which doctor cannot know.
        return Check("network", f"{found}; others would use {own}, which only this host reaches")
    return Check("network", f"{found}; others use {own}")


def _clock() -> Check:
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if time.time() < 1.7e9:
        return Check("clock", now, "it is years behind: certificates and time stamps of files do not work")
    if _adjtimex() == _TIME_ERROR:
        return Check("clock", f"{now}, not kept in step with other hosts (only the times in logs suffer)")
    return Check("clock", now)


def _adjtimex() -> int:
    """The kernel's state of the clock; -1 if it does not tell."""
    try:
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        return -1
