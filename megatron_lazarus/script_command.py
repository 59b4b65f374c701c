"""How a user's script is started: as it is, or where its DeepSpeed config asks for lazarus, through ``script.py``.

Standard library only: this runs once per rank in processes that only start others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_lazarus.config import LazarusConfig, load_config

OPTION = "--deepspeed_config"


def config_of(explicit: str | Path | None, arguments: Sequence[str]) -> str | None:
    """The DeepSpeed config of a script: ``explicit``, or what its ``arguments`` say."""
    if explicit is not None:
        return str(explicit)
    found = None
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == OPTION:
            found = value if equals else next(iter(arguments[index + 1 :]), None)
    return found


def enabled_section(path: str | None) -> LazarusConfig | None:
    """The config's ``"lazarus"`` section if it has one that is enabled. Raises ConfigError."""
    section = None if path is None else load_config(path).get("lazarus")
    config = None if section is None else LazarusConfig.from_json(section)
    return config if config is not None and config.enabled else None


def python_command(
    script: str, module: bool, arguments: Sequence[str], config: str | None, unbuffered: bool = False
) -> list[str]:
    """The command that runs ``script`` (``module``: the name of one) with the DeepSpeed config at ``config``.

    Raises ConfigError for a section that cannot be read.
    """
    python = [sys.executable, *(["-u"] if unbuffered else [])]
    if enabled_section(config) is None:
        return [*python, *(["-m"] if module else []), script, *arguments]
    runner = ["-m", "megatron_lazarus.script", "--lazarus-config", str(Path(str(config)).resolve())]
    return [*python, *runner, *(["--module"] if module else []), script, *arguments]
