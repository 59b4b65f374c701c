"""``python -m megatron_lazarus.script --lazarus-config ds.json train.py …``: a DeepSpeed script under lazarus.

Before the script's first line ``deepspeed.moe.layer.MoE`` is made the adaptive layer and ``deepspeed.initialize`` what
returns the engine that survives failures; see ``patches``. All else is as under ``python train.py …``.
"""

from __future__ import annotations

import argparse
import inspect
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lazarus.config import ConfigError, LazarusConfig, load_config
from megatron_lazarus.script_end import end_with


def main(argv: Sequence[str] | None = None) -> None:
    """Take the place of ``python script arguments``."""
    parser = argparse.ArgumentParser(prog="python -m megatron_lazarus.script", description=__doc__, allow_abbrev=False)
    parser.add_argument("--lazarus-config", required=True, metavar="JSON", help="the DeepSpeed config")
    parser.add_argument("--module", action="store_true", help="the script is a module's name")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    engines: list[Any] = []
    prepare(load_config(options.lazarus_config).get("lazarus"), engines)
    sys.argv = [options.script, *options.arguments]
    end_with(lambda: _run(options), engines)


def _run(options: argparse.Namespace) -> None:
    if options.module:
        # Python does so for `-m`, too; argv[0] becomes the module's file.
        sys.path[0] = os.getcwd()
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        _run_file(os.path.abspath(options.script))


def _run_file(path: str) -> None:
    """As Python does it: unlike in ``runpy``, argv[0] stays what the user has typed, and the module stays."""
    sys.path[0] = os.path.dirname(path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def prepare(section: Any, engines: list[Any] | None = None) -> None:
    """Make this process one in which DeepSpeed is overridden; without an enabled ``section`` do nothing.

    Engines that the script makes are added to ``engines``. Raises ConfigError, and PatchError before anything is
    changed.
    """
    if section is None or not LazarusConfig.from_json(section).enabled:
        return
    from megatron_lazarus.patches import apply_all, drop_in

    apply_all(drop_in(section, engines))


def prepare_world(section: Any) -> None:
    """Before ``deepspeed.init_distributed``: under a coordinator the world is this process alone, until it trains."""
    from megatron_lazarus.joining import joins_coordinator, private_world, without_shared_memory_extension

    without_shared_memory_extension()
    if joins_coordinator(LazarusConfig.from_json(section)):
        private_world()


def initialize_script(
    original: Callable[..., Any], section: Any, engines: list[Any] | None, *arguments: Any, **options: Any
) -> Any:
    """What ``deepspeed.initialize`` does in a script: ``megatron_lazarus.initialize``, or without a section its own.

    ``section`` holds for a config without one; an engine of lazarus is added to ``engines``. Raises ConfigError for a
    model with adaptive layers and a config that disables them.
    """
    from megatron_lazarus.initialization import initialize, read_config
    from megatron_lazarus.moe.drop_in import MoE

    given = inspect.signature(original).bind(*arguments, **options).arguments
    args, config = read_config(given.pop("args", None), given.pop("config", None), given.pop("config_params", None))
    if section is not None:
        config.setdefault("lazarus", section)
    if LazarusConfig.from_json(config.get("lazarus", {"enabled": False})).enabled:
        made = initialize(args, config=config, **given)
        if engines is not None:
            engines.append(made[0])
        return made
    layers = [name for name, module in given["model"].named_modules() if isinstance(module, MoE)]
    if layers:
        raise ConfigError(
            f'"lazarus.enabled" is false in the config of deepspeed.initialize, but true in the one under which '
            f"{layers[0]!r} was constructed; they must be the same"
        )
    return original(*arguments, **options)


if __name__ == "__main__":
    main()
