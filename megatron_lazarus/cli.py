"""The ``lazarus`` command: one subcommand per file, found here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_lazarus import checkpoint_command, doctor_command, patches_command, plan_command, submit_command
from megatron_lazarus.elastic import join_command, run_command
from megatron_lazarus.reporting import run_report


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lazarus <command> …`` and return its exit status."""
    parser = argparse.ArgumentParser(prog="lazarus", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    plan_command.add_parser(subparsers)
    run_command.add_parser(subparsers)
    join_command.add_parser(subparsers)
    submit_command.add_parser(subparsers)
    doctor_command.add_parser(subparsers)
    patches_command.add_parser(subparsers)
    run_report.add_parser(subparsers)
    checkpoint_command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
