"""The ``lazarus`` command: one subcommand per file, found here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_lazarus import plan_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lazarus <command> …`` and return its exit status."""
    parser = argparse.ArgumentParser(prog="lazarus", description=__doc__)
    plan_command.add_parser(parser.add_subparsers(dest="command", required=True))
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
