"""``lazarus doctor`` in environments that are broken on purpose, one thing at a time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lazarus import stack_check, storage_check
from megatron_lazarus.cli import main
from megatron_lazarus.stack_check import Check, check_stack
from megatron_lazarus.storage_check import check_folder


@pytest.fixture(autouse=True)
def _no_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def problems(checks: Iterable[Check]) -> dict[str, str]:
    return {check.what: check.problem for check in checks if check.problem}


def found(checks: Iterable[Check], what: str) -> str:
    return next(check.found for check in checks if check.what == what)


def test_a_whole_stack_has_no_problem() -> None:
    assert problems(check_stack(None)) == {}
    assert {check.what for check in check_stack(None)} >= {
        *("python", "torch", "deepspeed", "megatron-core", "accelerator", "back ends", "patches", "apex", "network"),
        "clock",
    }


def test_missing_and_broken_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = stack_check.version

    def version(name: str) -> str:
        if name in ("deepspeed", "megatron-core"):
            raise PackageNotFoundError(name)
        return real(name)

    def import_module(name: str) -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(stack_check, "version", version)
    monkeypatch.setattr(stack_check, "importlib", SimpleNamespace(import_module=import_module, util=importlib_util()))
    broken = problems(check_stack(None))
    assert "nothing works without it" in broken["deepspeed"]
    assert "cannot be imported: OSError: libcudart" in broken["torch"]
    assert "sigmoid router" in broken["megatron-core"]
    assert set(broken) == {"deepspeed", "torch", "megatron-core"}


def importlib_util() -> Any:
    import importlib.util

    return importlib.util


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_check, "sys", SimpleNamespace(version_info=(3, 10, 2)))
    assert problems(check_stack(None)) == {"python": "Python 3.11 or newer is needed"}


def test_patches_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lazarus.patches import registry

    monkeypatch.setattr(registry, "version", lambda name: "0.21.0")
    broken = problems(check_stack(None))
    assert "no run can start" in broken["patches"]
    assert "found deepspeed 0.21.0" in broken["patches"]
    assert found(check_stack(None), "patches") == "0 of 7 fit"


@pytest.mark.parametrize(
    ("device", "backend", "cuda", "nccl", "expected"),
    [
        ("cpu", "gloo", 0, False, {}),
        ("cuda", "nccl", 8, True, {}),
        ("cpu", "gloo", 8, True, {"accelerator": "there are 8 GPUs: unset DS_ACCELERATOR"}),
        ("cuda", "nccl", 0, True, {"accelerator": "torch finds no device"}),
        ("cuda", "nccl", 8, False, {"back ends": "nccl is needed on cuda"}),
    ],
)
def test_devices_and_back_ends(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, cuda: int, nccl: bool, expected: dict[str, str]
) -> None:
    import deepspeed.accelerator

    accelerator = SimpleNamespace(device_name=lambda: device, communication_backend_name=lambda: backend)
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: accelerator)
    torch = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: cuda > 0, device_count=lambda: cuda),
        distributed=SimpleNamespace(
            is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: nccl
        ),
    )
    broken = problems(stack_check._devices(torch, deepspeed))
    assert set(broken) == set(expected)
    assert all(text in broken[what] for what, text in expected.items())


@pytest.mark.parametrize("real", [True, False])
def test_apex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real: bool) -> None:
    folder = tmp_path / "apex"
    (folder / "optimizers").mkdir(parents=True)
    # The unrelated one does not even import without its own requirements.
    (folder / "__init__.py").write_text("raise ImportError('pyramid')")
    if real:
        (folder / "optimizers" / "fused_adam.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "apex" not in sys.modules
    broken = problems(check_stack(None))
    assert ("apex" in broken) is not real
    if not real:
        assert "pip uninstall apex" in broken["apex"]
        assert str(folder) in found(check_stack(None), "apex")


def test_a_lock_left_by_a_killed_compiler(tmp_path: Path) -> None:
    lock = tmp_path / "extensions" / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 500, time.time() - 500))
    assert "remove the lock" in problems(check_stack(None))["extensions"]
    assert found(check_stack(None), "extensions").startswith(f"{lock} is 50")


def test_network_and_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "interface 'nosuch0' has no IPv4 address" in problems(check_stack("nosuch0"))["network"]
    monkeypatch.setattr(stack_check, "_adjtimex", lambda: 5)
    assert "not kept in step" in found(check_stack(None), "clock")
    monkeypatch.setattr(stack_check, "_adjtimex", lambda: 0)
    assert "not kept in step" not in found(check_stack(None), "clock")
    monkeypatch.setattr(stack_check.time, "time", lambda: 86400.0)
    assert "years behind" in problems(check_stack(None))["clock"]


# -- storage --------------------------------------------------------------------------------------------------------


def test_a_good_folder_stays_empty(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checks = list(check_folder(folder, "checkpoints"))
    assert problems(checks) == {}
    assert len(checks) == 8
    assert os.listdir(folder) == []
    # One that does not exist yet is not made.
    assert problems(check_folder(tmp_path / "later" / "still", "checkpoints")) == {}
    assert not (tmp_path / "later").exists()


def _copy_over(source: Any, target: Any) -> None:
    """What a file system without rename, or a careless layer over one, does."""
    Path(target).write_bytes(Path(source).read_bytes())
    os.unlink(source)


def _refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def _without_exclusion(real: Callable[..., int]) -> Callable[..., int]:
    return lambda path, flags, *rest, **named: real(path, flags & ~os.O_EXCL, *rest, **named)


def _relink(source: Any, target: Any) -> None:
    shutil.copyfile(source, target)


BROKEN: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "replace": ("replace", lambda real: _copy_over, "may leave no checkpoint to resume from"),
    "exclusive": ("open", _without_exclusion, "two coordinators may rule at once"),
    "no links": ("link", lambda real: _refuse, "the owner of the folder cannot be told"),
    "links replace": ("link", lambda real: _relink, "the owner of the folder cannot be told"),
    "fsync": ("fsync", lambda real: _refuse, "a power cut loses"),
    "rename": ("rename", lambda real: _refuse, "import and export fail"),
    "skew": ("utime", lambda real: lambda path: real(path, (time.time() + 90, time.time() + 90)), "let NTP run"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_system_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    name, broken, consequence = BROKEN[kind]
    monkeypatch.setattr(os, name, broken(getattr(os, name)))
    left = [check for check in check_folder(tmp_path, "checkpoints") if check.problem]
    monkeypatch.undo()
    assert [consequence in check.problem for check in left] == [True]
    assert [path.name for path in tmp_path.iterdir()] == []


def test_full_and_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = SimpleNamespace(total=500 << 30, free=100 << 20)
    monkeypatch.setattr(storage_check.shutil, "disk_usage", lambda folder: usage)
    assert "a save that does not fit" in problems(check_folder(tmp_path, "checkpoints"))["checkpoints"]
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "mkdtemp", _refuse)
    assert "nothing can be written there" in problems(check_folder(tmp_path, "checkpoints"))["checkpoints"]


# -- the commands ---------------------------------------------------------------------------------------------------


def test_doctor_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    lease.mkdir()
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"lazarus": {"elastic": {"lease_path": str(lease)}}}))
    arguments = ["doctor", "--config", str(config), "--checkpoint-dir", str(tmp_path)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("all ")
    assert any(line.startswith("ok lease ") and str(lease) in line for line in lines)
    monkeypatch.setattr(os, "link", _refuse)
    assert main(arguments) == 1
    output = capsys.readouterr().out
    assert output.count("will not work: save_checkpoint fails") == 2
    config.write_text(json.dumps({"lazarus": {"elastic": {"interfaces": "lo"}}}))
    assert main(arguments) == 2
    assert 'unknown key "lazarus.elastic.interfaces"' in capsys.readouterr().err


def test_patches_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lazarus.patches import ALL, apply_all, registry, undo_all

    assert main(["patches", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["target"], entry["state"]) for entry in entries] == [(patch.target, "applies") for patch in ALL]
    apply_all(ALL)
    try:
        assert main(["patches"]) == 0
        assert capsys.readouterr().out.count("applied: deepspeed") == len(ALL)
    finally:
        undo_all()
    monkeypatch.setattr(registry, "version", lambda name: "0.17.6")
    assert main(["patches"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("does not fit: deepspeed") == len(ALL)
    assert "deepspeed:initialize is for deepspeed >=0.18.9,<0.20, found deepspeed 0.17.6" in " ".join(shown.split())
