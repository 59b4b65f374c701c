"""The registry of patches: applied all or none, idempotent, undoable to identity."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any


class PatchError(RuntimeError):
    """Upstream is not what a patch was written for; nothing has been changed."""


@dataclass(frozen=True)
class Patch:
    """One override, as data.

    ``target`` is ``package.module:Qualified.name``; ``make`` gets the upstream object and returns what stands in its
    place ("wrap" calls the original, "replace" does not). ``signature`` is what upstream must look like.
    """

    target: str
    kind: str
    make: Callable[[Any], Any]
    reason: str
    upstream: str
    remove_when: str
    distribution: str
    signature: str


_ORIGINALS: dict[str, Any] = {}


def _holder(target: str) -> tuple[Any, str]:
    module_name, _, path = target.partition(":")
    holder: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    return holder, name


def _check(patch: Patch) -> None:
    found = f"{patch.distribution} {version(patch.distribution)}"
    try:
        holder, name = _holder(patch.target)
        original = inspect.getattr_static(holder, name)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{patch.target} is missing in {found}: {error}") from error
    if (signature := str(inspect.signature(original))) != patch.signature:
        raise PatchError(
            f"{patch.target} in {found} has the signature {signature}, expected {patch.signature}: "
            "use a tested version (constraints.txt)"
        )


def apply_all(patches: Iterable[Patch]) -> None:
    """Apply those not applied yet. Raises PatchError before anything is changed if one does not fit."""
    pending = [patch for patch in patches if patch.target not in _ORIGINALS]
    for patch in pending:
        _check(patch)
    for patch in pending:
        holder, name = _holder(patch.target)
        _ORIGINALS[patch.target] = inspect.getattr_static(holder, name)
        setattr(holder, name, patch.make(_ORIGINALS[patch.target]))


def undo_all() -> None:
    """Put every upstream object back, in reverse order."""
    for target in reversed(list(_ORIGINALS)):
        holder, name = _holder(target)
        setattr(holder, name, _ORIGINALS.pop(target))


def applied() -> tuple[str, ...]:
    """Targets that are patched now."""
    return tuple(_ORIGINALS)
