"""The registry of patches against simulated drift of what it patches."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Iterator

import pytest
from megatron_lazarus.patches import ALL, Patch, PatchError, applied, apply_all, undo_all


class Upstream:
    def first(self, value: int) -> int:
        return value

    def second(self) -> str:
        return "second"


def _patch(name: str, signature: str) -> Patch:
    return Patch(
        target=f"upstream_of_patches:Upstream.{name}",
        kind="wrap",
        make=lambda original: lambda self, *arguments: ("patched", original(self, *arguments)),
        reason="test",
        upstream="none",
        remove_when="never",
        distribution="pytest",
        signature=signature,
    )


FIRST = _patch("first", "(self, value: 'int') -> 'int'")
SECOND = _patch("second", "(self) -> 'str'")


@pytest.fixture(autouse=True)
def _upstream() -> Iterator[None]:
    module = types.ModuleType("upstream_of_patches")
    module.Upstream = Upstream  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    undo_all()
    yield
    undo_all()
    del sys.modules[module.__name__]


def test_apply_is_idempotent_and_undo_restores_identity() -> None:
    original = inspect.getattr_static(Upstream, "first")
    apply_all([FIRST, SECOND])
    apply_all([FIRST, SECOND])
    assert Upstream().first(3) == ("patched", 3)
    assert applied() == (FIRST.target, SECOND.target)
    undo_all()
    assert inspect.getattr_static(Upstream, "first") is original
    assert applied() == ()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            _patch("second", "(self, more) -> 'str'"),
            r"second in pytest .* has the signature \(self\) -> 'str', expected",
        ),
        (_patch("third", "(self)"), r"third is missing in pytest"),
        (dataclasses.replace(SECOND, target="no_such_module:Upstream.second"), r"no_such_module.* is missing"),
    ],
)
def test_drift_stops_before_anything_is_changed(broken: Patch, message: str) -> None:
    original = inspect.getattr_static(Upstream, "first")
    with pytest.raises(PatchError, match=message):
        apply_all([FIRST, broken])
    assert inspect.getattr_static(Upstream, "first") is original
    assert applied() == ()


def test_real_patches_fit_the_installed_stack() -> None:
    before = {patch.target: _now(patch.target) for patch in ALL}
    apply_all(ALL)
    assert all(_now(target) is not found for target, found in before.items())
    undo_all()
    assert all(_now(target) is found for target, found in before.items())


def _now(target: str) -> object:
    from megatron_lazarus.patches.registry import _holder

    holder, name = _holder(target)
    return inspect.getattr_static(holder, name)
