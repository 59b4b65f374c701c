"""The registry of patches against simulated drift of what it patches, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.moe.utils
import pytest
from megatron_lazarus.patches import ALL, Patch, PatchError, applied, apply_all, registry, undo_all, unpatched
from megatron_lazarus.patches.upstream import definition_of

from megatron_lazarus.script import prepare


class Upstream:
    def first(self, value: int) -> int:
        return value

    def second(self) -> str:
        return "second"


class Heir(Upstream):
    pass


def _patch(name: str, of: str = "Upstream") -> Patch:
    definition = definition_of(getattr(Upstream, name))
    return Patch(
        target=f"upstream_of_patches:{of}.{name}",
        kind="wrap",
        make=lambda original: lambda self, *arguments: ("patched", original(self, *arguments)),
        reason="test",
        upstream="none known",
        remove_when="never",
        distribution="pytest",
        versions=">=1",
        signature=definition.signature,
        fingerprints={"0.1": definition.fingerprint},
    )


FIRST, SECOND = _patch("first"), _patch("second")


@pytest.fixture(autouse=True)
def _upstream() -> Iterator[None]:
    module = types.ModuleType("upstream_of_patches")
    module.Upstream, module.Heir = Upstream, Heir  # type: ignore[attr-defined]
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
    assert unpatched(FIRST.target) is original
    undo_all()
    assert inspect.getattr_static(Upstream, "first") is original
    assert unpatched(FIRST.target) is original
    assert applied() == ()


def test_an_inherited_attribute_is_inherited_again() -> None:
    apply_all([_patch("first", of="Heir")])
    assert Heir().first(1) == ("patched", 1)
    assert Upstream().first(1) == 1
    undo_all()
    assert "first" not in vars(Heir)


def test_what_upstream_does_itself_is_left_alone() -> None:
    original = inspect.getattr_static(Upstream, "first")
    patch = dataclasses.replace(FIRST, already_in=lambda found: found is original)
    assert registry.state_of(patch) == ("already in", "")
    apply_all([patch, SECOND])
    assert inspect.getattr_static(Upstream, "first") is original
    assert applied() == (SECOND.target,)
    assert registry.state_of(SECOND) == ("applied", "")


BROKEN = {
    "renamed argument": (
        dataclasses.replace(SECOND, signature="(self, more)"),
        r"second in pytest .* has the signature \(self\), expected \(self, more\)",
    ),
    "missing symbol": (dataclasses.replace(SECOND, target="upstream_of_patches:Upstream.third"), "third is missing in"),
    "missing module": (dataclasses.replace(SECOND, target="no_such_module:Upstream.second"), "no_such_module.*missing"),
    "other body": (
        dataclasses.replace(SECOND, fingerprints={"0.1": "f00d"}),
        r"second in pytest .* has a body with fingerprint [0-9a-f]{16}, expected f00d \(0\.1\)",
    ),
    "other version": (dataclasses.replace(SECOND, versions="<1"), r"second is for pytest <1, found pytest \d"),
    "not installed": (dataclasses.replace(SECOND, distribution="no-such-thing"), "no-such-thing is not installed"),
    "no class or function": (
        dataclasses.replace(SECOND, target="upstream_of_patches:Upstream.__doc__"),
        "its source cannot be read",
    ),
    "make fails": (dataclasses.replace(SECOND, make=lambda original: 1 / 0), "division by zero"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_drift_stops_before_anything_is_changed(kind: str) -> None:
    broken, message = BROKEN[kind]
    original = inspect.getattr_static(Upstream, "first")
    with pytest.raises((PatchError, ZeroDivisionError), match=message):
        apply_all([FIRST, broken])
    assert inspect.getattr_static(Upstream, "first") is original
    assert applied() == ()


def test_a_known_version_must_be_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new release with a tried body passes; a tried release with the body of another does not."""
    fingerprints = {"1.0": FIRST.fingerprints["0.1"], "1.1": "f00d"}
    patch = dataclasses.replace(FIRST, fingerprints=fingerprints)
    monkeypatch.setattr(registry, "version", lambda distribution: "1.2")
    assert registry.state_of(patch)[0] == "applies"
    monkeypatch.setattr(registry, "version", lambda distribution: "1.1")
    assert registry.state_of(patch)[0] == "does not fit"


def test_a_source_archive_is_read_like_what_is_loaded(tmp_path: Path) -> None:
    """Nothing of it is imported; a name is followed to where it is defined."""
    package = tmp_path / "upstream"
    (package / "inner").mkdir(parents=True)
    (tmp_path / "PKG-INFO").write_text("Name: pytest\nVersion: 1.5\n\nVersion: of the description\n")
    (package / "__init__.py").write_text("from .inner import *\nfrom .other import Heir as _\nraise ImportError\n")
    (package / "inner" / "__init__.py").write_text("from .home import Upstream\n")
    home = package / "inner" / "home.py"
    text = textwrap.dedent(inspect.getsource(Upstream))
    home.write_text(f"import os\n\n\n# a comment\n{text}")
    patch = dataclasses.replace(FIRST, target="upstream.inner.home:Upstream.first")
    assert registry.state_in(tmp_path, patch) == ("applies", "")
    whole = definition_of(Upstream)
    for target in ("upstream:Upstream", "upstream.inner:Upstream", "upstream.inner.home:Upstream"):
        named = dataclasses.replace(
            FIRST, target=target, signature=whole.signature, fingerprints={"1.5": whole.fingerprint}
        )
        assert registry.state_in(tmp_path, named) == ("applies", ""), target

    def why(**changes: Any) -> str:
        state, text = registry.state_in(tmp_path, dataclasses.replace(patch, **changes))
        assert state == "does not fit"
        return text

    assert "is missing in" in why(target="upstream.inner.home:Upstream.third")
    assert "there is no module upstream.outer" in why(target="upstream.outer:Upstream.first")
    assert "is for pytest <1, found pytest 1.5" in why(versions="<1")
    # Comments and blank lines do not matter, anything else does.
    home.write_text(home.read_text().replace("        return value", "\n        # why\n        return value"))
    assert registry.state_in(tmp_path, patch)[0] == "applies"
    home.write_text(home.read_text().replace("return value", "return 2 * value"))
    assert "has a body with fingerprint" in why()
    home.write_text(home.read_text().replace("value: int", "amount: int"))
    assert "has the signature (self, amount), expected (self, value)" in why()
    (tmp_path / "PKG-INFO").unlink()
    assert "is no source archive" in why()


# -- the real ones --------------------------------------------------------------------------------------------------


Everything = dict[tuple[str, ...], Any]


def _everything() -> Everything:
    """Every attribute of every loaded module of DeepSpeed, and of the classes in them."""
    found: Everything = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "deepspeed" or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            found[name, attribute] = value
            if isinstance(value, type) and value.__module__.startswith("deepspeed"):
                for inner, member in list(vars(value).items()):
                    found[name, attribute, inner] = member
    return found


def _changed(before: Everything) -> set[str]:
    now = _everything()
    missing = object()
    return {".".join(path) for path, value in before.items() if now.get(path, missing) is not value}


def _fresh_patches() -> None:
    """Loads what applying loads, so that nothing is new afterwards."""
    prepare({})
    undo_all()


@pytest.mark.parametrize("section", [None, {"enabled": False}, {"enabled": False, "elastic": {"enabled": True}}])
def test_without_an_enabled_section_nothing_is_touched(section: Any) -> None:
    _fresh_patches()
    before = _everything()
    assert len(before) > 5000
    prepare(section)
    assert _changed(before) == set()
    assert set(_everything()) == set(before)


def test_enabled_exactly_the_targets_change_and_undo_restores_them_all() -> None:
    _fresh_patches()
    before = _everything()
    prepare({})
    targets = {patch.target.replace(":", ".") for patch in ALL}
    changed = _changed(before)
    assert targets <= changed
    # Also what is inside of a replaced class, and a class by its further names.
    assert {
        path
        for path in changed
        if not path.endswith("CPU_Accelerator.supported_dtypes")
        and not any(path == target or path.startswith(f"{target}.") for target in targets)
    } == set()
    undo_all()
    assert _changed(before) == set()


def _renamed(original: Any) -> Any:
    def initialize(arguments=None, model=None):  # type: ignore[no-untyped-def]
        return arguments, model

    return initialize


def _other_body(original: Any) -> Any:
    class MoE(torch_module()):  # type: ignore[misc]
        def __init__(
            self,
            hidden_size,
            expert,
            num_experts=1,
            ep_size=1,
            k=1,
            capacity_factor=1.0,
            eval_capacity_factor=1.0,
            min_capacity=4,
            use_residual=False,
            noisy_gate_policy=None,
            drop_tokens=True,
            use_rts=True,
            use_tutel=False,
            enable_expert_tensor_parallelism=False,
            top2_2nd_expert_sampling=True,
        ):  # type: ignore[no-untyped-def]
            super().__init__()

    return MoE


def torch_module() -> type:
    import torch

    return torch.nn.Module


DRIFTS: dict[str, tuple[Any, str, Callable[[Any], Any] | None, str]] = {
    "renamed argument": (
        deepspeed,
        "initialize",
        _renamed,
        r"deepspeed:initialize .*\(arguments=.*expected \(args=",
    ),
    "missing symbol": (deepspeed.moe.utils, "MoE", None, "deepspeed.moe.utils:MoE is missing in deepspeed 0"),
    "other body": (deepspeed.moe.utils, "MoE", _other_body, "deepspeed.moe.utils:MoE .* fingerprint .* expected 7ab5"),
}


@pytest.mark.parametrize("kind", DRIFTS)
def test_drift_of_deepspeed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _fresh_patches()
    holder, name, change, message = DRIFTS[kind]
    if change is None:
        monkeypatch.delattr(holder, name)
    else:
        monkeypatch.setattr(holder, name, change(getattr(holder, name)))
    before = _everything()
    with pytest.raises(PatchError, match=message):
        prepare({})
    assert _changed(before) == set()
    assert applied() == ()


@pytest.mark.parametrize("number", ["0.20.0", "0.18.8", "1.0"])
def test_another_version_of_deepspeed(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    _fresh_patches()
    before = _everything()
    monkeypatch.setattr(registry, "version", lambda distribution: number)
    with pytest.raises(PatchError, match=rf"is for deepspeed >=0.18.9,<0.20, found deepspeed {number}"):
        prepare({})
    assert _changed(before) == set()


def test_every_entry_is_complete() -> None:
    for patch in ALL:
        assert set(patch.fingerprints) >= {"0.18.9", "0.19.8"}, patch.target
        assert all((patch.reason, patch.upstream, patch.remove_when, patch.signature)), patch.target
        assert patch.kind in ("wrap", "replace")
