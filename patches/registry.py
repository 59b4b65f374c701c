"""The registry of patches: applied all or none, idempotent, undoable to identity."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from megatron_lazarus.patches.upstream import Definition, DefinitionError, definition_in, definition_of
from packaging.specifiers import SpecifierSet


class PatchError(RuntimeError):
    """Upstream is not what a patch was written for; nothing has been changed."""


@dataclass(frozen=True)
class Patch:
    """One override, as data.

    ``target`` is ``package.module:Qualified.name``; ``make`` gets the upstream object and returns what stands in its
    place ("wrap" calls the original, "replace" does not). ``versions`` of ``distribution`` are those it is for; in all
    of them upstream has ``signature``, and in those it was tried with, its source has ``fingerprints``: see
    ``upstream.Definition``. ``upstream`` names an issue or pull request there, or says that none is known.
    ``already_in`` says of an upstream object that it does by itself what the patch is for: then it is left alone.
    """

    target: str
    kind: Literal["wrap", "replace"]
    make: Callable[[Any], Any]
    reason: str
    upstream: str
    remove_when: str
    distribution: str
    versions: str
    signature: str
    fingerprints: Mapping[str, str]
    already_in: Callable[[Any], bool] = lambda original: False


State = Literal["applies", "applied", "already in", "does not fit"]

_ORIGINALS: dict[str, tuple[Any, bool]] = {}
"""By target: the upstream object, and whether its holder has it itself (else it is inherited)."""


def _holder(target: str) -> tuple[Any, str]:
    module_name, _, path = target.partition(":")
    holder: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    return holder, name


def _upstream_object(patch: Patch) -> Any:
    """What upstream has now. Raises PatchError if the patch was not written for that."""
    try:
        installed = version(patch.distribution)
    except PackageNotFoundError:
        raise PatchError(f"{patch.target}: {patch.distribution} is not installed") from None
    _check_version(patch, installed)
    found = f"{patch.distribution} {installed}"
    try:
        holder, name = _holder(patch.target)
        original = inspect.getattr_static(holder, name)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{patch.target} is missing in {found}: {error}") from error
    if patch.already_in(original):
        return original
    try:
        check_definition(patch, definition_of(original), installed)
    except DefinitionError as error:
        raise PatchError(f"{patch.target} in {found}: {error}") from error
    return original


def _check_version(patch: Patch, number: str) -> None:
    if not SpecifierSet(patch.versions, prereleases=True).contains(number):
        found = f"found {patch.distribution} {number}"
        raise PatchError(f"{patch.target} is for {patch.distribution} {patch.versions}, {found}")


def check_definition(patch: Patch, definition: Definition, installed: str) -> None:
    """Raise PatchError if ``definition``, of version ``installed``, is not what the patch was written for."""
    found = f"{patch.distribution} {installed}"
    if definition.signature != patch.signature:
        raise PatchError(
            f"{patch.target} in {found} has the signature {definition.signature}, expected {patch.signature}"
        )
    # A version that nobody has tried may pass where its source is one that somebody has.
    expected = patch.fingerprints.get(installed)
    if definition.fingerprint not in ([expected] if expected else patch.fingerprints.values()):
        known = ", ".join(f"{digest} ({number})" for number, digest in patch.fingerprints.items())
        raise PatchError(
            f"{patch.target} in {found} has a body with fingerprint {definition.fingerprint}, expected {known}"
        )


def state_of(patch: Patch) -> tuple[State, str]:
    """What ``apply_all`` would do with a patch, or has done, and why it does not fit."""
    if patch.target in _ORIGINALS:
        return "applied", ""
    try:
        return ("already in" if patch.already_in(_upstream_object(patch)) else "applies"), ""
    except PatchError as error:
        return "does not fit", str(error)


def state_in(source: Path, patch: Patch) -> tuple[State, str]:
    """Whether a patch fits an unpacked source archive, which is only read; and why not."""
    try:
        lines = (source / "PKG-INFO").read_text(encoding="utf-8").splitlines()
        number = next(line.partition(": ")[2] for line in lines if line.startswith("Version: "))
        _check_version(patch, number)
        check_definition(patch, definition_in(source, patch.target), number)
    except (OSError, StopIteration) as error:
        return "does not fit", f"{source} is no source archive: {error}"
    except (PatchError, DefinitionError) as error:
        return "does not fit", str(error)
    return "applies", ""


def apply_all(patches: Iterable[Patch]) -> None:
    """Apply those not applied yet. Raises PatchError before anything is changed if one does not fit."""
    pending = [patch for patch in patches if patch.target not in _ORIGINALS]
    originals = [_upstream_object(patch) for patch in pending]
    made = [
        (patch, original, patch.make(original))
        for patch, original in zip(pending, originals, strict=True)
        if not patch.already_in(original)
    ]
    for patch, original, replacement in made:
        holder, name = _holder(patch.target)
        _ORIGINALS[patch.target] = original, name in vars(holder)
        setattr(holder, name, replacement)


def undo_all() -> None:
    """Put every upstream object back, in reverse order."""
    for target in reversed(list(_ORIGINALS)):
        holder, name = _holder(target)
        original, own = _ORIGINALS.pop(target)
        if own:
            setattr(holder, name, original)
        else:
            delattr(holder, name)


def applied() -> tuple[str, ...]:
    """Targets that are patched now."""
    return tuple(_ORIGINALS)


def unpatched(target: str) -> Any:
    """The upstream object of ``target``, whether it is patched now or not."""
    if target in _ORIGINALS:
        return _ORIGINALS[target][0]
    holder, name = _holder(target)
    return getattr(holder, name)
