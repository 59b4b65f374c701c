"""``lazarus patches``: what is overridden in the installed DeepSpeed, why, and whether it fits."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lazarus.patches import Patch

HELP = "list what is overridden in DeepSpeed, and whether it fits the installed version"


def add_parser(subparsers: Any) -> None:
    """Add the command to those of ``lazarus``."""
    parser = subparsers.add_parser("patches", help=HELP, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="an unpacked source archive of DeepSpeed, instead of what is installed",
    )
    parser.set_defaults(run=list_patches)


def list_patches(arguments: argparse.Namespace) -> int:
    """Print all patches; 1 if one does not fit."""
    # What fits does not depend on the device, which DeepSpeed would look for.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from megatron_lazarus.patches import ALL, state_in, state_of

    if arguments.source is None:
        found = [(patch, *state_of(patch)) for patch in ALL]
    else:
        found = [(patch, *state_in(arguments.source, patch)) for patch in ALL]
    if arguments.json:
        print(json.dumps([_entry(patch, state, why) for patch, state, why in found], indent=1))
    else:
        for patch, state, why in found:
            print(_shown(patch, state, why))
    return int(any(state == "does not fit" for _, state, _ in found))


def _entry(patch: Patch, state: str, why: str) -> dict[str, Any]:
    names = ("target", "kind", "reason", "upstream", "remove_when", "distribution", "versions", "signature")
    entry = {name: getattr(patch, name) for name in names}
    return {**entry, "fingerprints": dict(patch.fingerprints), "state": state, "why": why}


def _shown(patch: Patch, state: str, why: str) -> str:
    lines = [f"{state}: {patch.target} ({patch.kind}, {patch.distribution} {patch.versions})"]
    for label, text in (
        ("", why),
        ("why: ", patch.reason),
        ("upstream: ", patch.upstream),
        ("until ", patch.remove_when),
    ):
        if text:
            lines.append(textwrap.indent(textwrap.fill(f"{label}{text}", 110, break_long_words=False), "    "))
    return "\n".join(lines)
