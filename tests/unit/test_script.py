"""How a script comes to run under lazarus: its command, its process, and what deepspeed.initialize is in it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from megatron_lazarus.patches import undo_all
from torch import nn

from megatron_lazarus import initialization, script
from megatron_lazarus.config import ConfigError
from megatron_lazarus.moe.drop_in import MoE
from megatron_lazarus.script_command import config_of, python_command

ROOT = Path(__file__).resolve().parents[2]
TELLING = """
import json, os, sys
import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import has_moe_layers
import torch
layer = deepspeed.moe.layer.MoE(8, torch.nn.Linear(8, 8), 2)
seen = {
    "moe": MoE.__module__, "same": deepspeed.moe.layer.MoE is MoE, "isinstance": isinstance(layer, MoE),
    "has moe": has_moe_layers(torch.nn.Sequential(layer)), "name": __name__, "file": __file__, "argv": sys.argv,
    "path": sys.path[0], "main": sys.modules["__main__"].__dict__ is globals(),
    "lazarus": "megatron_lazarus" in sys.modules,
    "initialize": deepspeed.initialize.__module__, "wrapped": hasattr(deepspeed.initialize, "__wrapped__"),
}
with open(os.environ["SEEN"], "w") as file:
    json.dump(seen, file)
"""


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    undo_all()


def _config(tmp_path: Path, **section: Any) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 4, "lazarus": section}))
    return str(path)


def test_where_the_config_is() -> None:
    assert config_of(None, ["--lr", "1"]) is None
    assert config_of(None, ["--deepspeed_config", "a.json", "--x"]) == "a.json"
    assert config_of(None, ["--deepspeed_config=a.json", "--deepspeed_config", "b.json"]) == "b.json"
    assert config_of(None, ["--deepspeed_config"]) is None
    assert config_of(Path("c.json"), ["--deepspeed_config", "a.json"]) == "c.json"


def test_the_command_of_a_script(tmp_path: Path) -> None:
    config = _config(tmp_path)
    runner = [sys.executable, "-m", "megatron_lazarus.script", "--lazarus-config", config]
    assert python_command("a.py", False, ["-x"], config) == [*runner, "a.py", "-x"]
    assert python_command("a.b", True, ["-x"], config) == [*runner, "--module", "a.b", "-x"]
    for without in (None, _config(tmp_path, enabled=False)):
        assert python_command("a.py", False, ["-x"], without, unbuffered=True) == [sys.executable, "-u", "a.py", "-x"]
        assert python_command("a.b", True, [], without) == [sys.executable, "-m", "a.b"]
    with pytest.raises(ConfigError, match=r"unknown key \"lazarus.enable\""):
        python_command("a.py", False, [], _config(tmp_path, enable=True))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_process_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """As the launcher starts it where nodes do not come and go: in the place of its own process."""
    config = _config(tmp_path, enabled=enabled, elastic={"enabled": False})
    train = tmp_path / "train.py"
    train.write_text(TELLING)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "megatron_lazarus.launch", "--local_rank=1", "train.py"]
    subprocess.run([*command, "--deepspeed_config", config], check=True, cwd=tmp_path, timeout=60)
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["argv"] == ["train.py", "--local_rank=1", "--deepspeed_config", config]
    assert seen["name"] == "__main__"
    assert seen["file"] == str(train)
    assert seen["path"] == str(tmp_path)
    assert seen["main"]
    assert seen["same"]
    assert seen["isinstance"]
    assert seen["has moe"] == [True, 2]
    assert seen["lazarus"] is enabled
    assert seen["wrapped"] is enabled
    assert seen["initialize"] == "deepspeed"
    assert seen["moe"] == ("megatron_lazarus.moe.drop_in" if enabled else "deepspeed.moe.layer")


def test_a_module_as_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trainings"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "telling.py").write_text(TELLING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    script.main(["--lazarus-config", _config(tmp_path), "--module", "trainings.telling", "--lr", "3"])
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen["name"], seen["file"]) == ("__main__", str(package / "telling.py"))
    assert seen["argv"] == [str(package / "telling.py"), "--lr", "3"]
    assert seen["path"] == str(tmp_path)
    assert seen["moe"] == "megatron_lazarus.moe.drop_in"


# -- deepspeed.initialize -------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was called with which config: lazarus's initialize, or DeepSpeed's own."""
    called: list[tuple[str, Any]] = []

    def lazarus(*arguments: Any, **options: Any) -> str:
        called.append(("lazarus", (arguments, options)))
        return "lazarus"

    def stock(args=None, model=None, optimizer=None, config=None, config_params=None):  # type: ignore[no-untyped-def]
        called.append(("stock", config))
        return "stock"

    monkeypatch.setattr(initialization, "initialize", lazarus)
    monkeypatch.setattr(deepspeed, "initialize", _patched(stock))
    return called


def _patched(original: Any, section: Any = None) -> Any:
    from megatron_lazarus.patches.deepspeed_init import to_lazarus

    return to_lazarus(original, section)


def test_the_section_decides(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = _config(tmp_path, guard={"on_spike": "skip"})
    args = argparse.Namespace(deepspeed_config=path)
    assert deepspeed.initialize(args, model) == "lazarus"
    arguments, options = calls[-1][1]
    # The script's own arguments are not touched.
    assert args.deepspeed_config == path
    assert arguments[0].deepspeed_config is None
    assert options["config"]["lazarus"] == {"guard": {"on_spike": "skip"}}
    assert options["model"] is model
    for config in ({"lazarus": {}}, {"lazarus": {"enabled": True}}, path):
        assert deepspeed.initialize(model=model, config=config) == "lazarus"
        assert deepspeed.initialize(model=model, config_params=config) == "lazarus"
    for config in ({}, {"lazarus": {"enabled": False}}):
        assert deepspeed.initialize(model=model, config=config) == "stock"
        assert calls[-1] == ("stock", config)


def test_the_launchers_section_serves_configs_without(calls: list[tuple[str, Any]]) -> None:
    mine = {"train_batch_size": 8}
    initialize = _patched(deepspeed.initialize.__wrapped__, {"guard": {"on_nonfinite": "stop"}})
    assert initialize(model=nn.Linear(2, 2), config=mine) == "lazarus"
    assert calls[-1][1][1]["config"] == {**mine, "lazarus": {"guard": {"on_nonfinite": "stop"}}}
    assert mine == {"train_batch_size": 8}
    assert initialize(model=nn.Linear(2, 2), config={"lazarus": {"enabled": False}}) == "stock"


def test_what_does_not_go_together(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), MoE(2, nn.Linear(2, 2), 2))
    with pytest.raises(ConfigError, match=r'"lazarus.enabled" is false .* \'1\' was constructed'):
        deepspeed.initialize(model=model, config={"lazarus": {"enabled": False}})
    with pytest.raises(ConfigError, match="config is given twice"):
        deepspeed.initialize(argparse.Namespace(deepspeed_config=_config(tmp_path)), model, config={})
    with pytest.raises(ConfigError, match=r"needs config=.* or args\.deepspeed_config"):
        deepspeed.initialize(model=model)
    with pytest.raises(ConfigError, match=r'unknown key "lazarus.experts.slots"'):
        deepspeed.initialize(model=model, config={"lazarus": {"experts": {"slots": 3}}})
    assert calls == []


def test_layers_constructed_too_early_are_named() -> None:
    from deepspeed.moe.layer import MoE as Early

    model = nn.Sequential(nn.Linear(2, 2), Early(2, nn.Linear(2, 2), 2))
    script.prepare({})
    config = {"train_batch_size": 1, "lazarus": {"elastic": {"enabled": False}}}
    with pytest.raises(ConfigError, match=r"'1' is a layer of DeepSpeed's own class .* start the script through"):
        deepspeed.initialize(model=model, config=config)
    assert not torch.distributed.is_initialized()
