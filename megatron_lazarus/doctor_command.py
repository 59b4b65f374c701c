"""``lazarus doctor``: what will not work here; with ``--job FILE`` what in a batch script works against surviving.

The first looks at the installed software, the devices, the network, the clock and the folders for checkpoints and
leases, by trying them; the second reads a Slurm batch script.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lazarus.config import LazarusConfig, load_config
from megatron_lazarus.elastic.settings import ElasticConfig

_LONG = {
    "a": "array",
    "k": "no-kill",
    "K": "kill-on-bad-exit",
    "W": "wait",
    "N": "nodes",
    "t": "time",
    "d": "dependency",
}
_WITH_VALUE = set("aNtdWnocepwxJDm")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(\w+)\+?=(\(.*\)|\"[^\"]*\"|'[^']*'|\S*)\s*$")


@dataclass(frozen=True, order=True)
class Finding:
    """One thing to change; ``line`` 0: none of the script."""

    line: int
    option: str
    why: str


@dataclass(frozen=True)
class Command:
    """The options of one sbatch (its directives) or srun, by long name; the value of those without one is ""."""

    line: int
    options: Mapping[str, str]

    def asks_for(self, name: str) -> bool:
        return name in self.options and self.options[name] not in ("off", "no")


def read_script(text: str) -> tuple[Command, list[Command]]:
    """The directives of a batch script, and its srun commands; plain variables in them are put in."""
    directives: dict[str, str] = {}
    steps: list[Command] = []
    variables: dict[str, str] = {}
    for number, line in _logical_lines(text):
        if line.startswith("#SBATCH"):
            directives.update(_options(_words(line)[1:])[0])
        elif line.lstrip().startswith("#"):
            continue
        elif assigned := _ASSIGNMENT.match(line):
            value = _put_in(assigned[2].strip("()\"'"), variables)
            variables[assigned[1]] = f"{variables.get(assigned[1], '')} {value}" if "+=" in line else value
        else:
            words = _words(_put_in(line, variables))
            steps += [
                Command(number, _options(words[index + 1 :])[0])
                for index, word in enumerate(words)
                if Path(word).name == "srun" and words[index - 1 : index] != ["-v"]
            ]
    return Command(0, directives), steps


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations, and the number of their first."""
    begun, number = "", 0
    for at, line in enumerate(text.splitlines(), 1):
        number = number if begun else at
        begun += line
        if begun.endswith("\\") and not begun.startswith("#"):
            begun = begun[:-1] + " "
            continue
        yield number, begun
        begun = ""


def _put_in(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0])

    # In quotes it is one word for the shell, but an array's are several.
    return re.sub(r"\"?\$\{(\w+)(?:\[[@*]\])?\}\"?|\$(\w+)", value, text)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=not line.startswith("#SBATCH"))
    except ValueError:
        # A quote that ends on another line.
        return line.split()


def _options(words: Sequence[str]) -> tuple[dict[str, str], int]:
    """Options up to the command, and how many words they are."""
    found: dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        index += 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            takes = name in _TAKING and not equals
        else:
            letter, value = word[1:2], word[2:].removeprefix("=")
            name, takes = _LONG.get(letter, letter), letter in _WITH_VALUE and not value
        if takes and index < len(words):
            value, index = words[index], index + 1
        found[name] = value
    return found, index


_TAKING = {
    *(
        "array",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "time",
        "dependency",
        "wait",
        "output",
        "error",
        "signal",
        "partition",
    ),
    *(
        "account",
        "job-name",
        "cpus-per-task",
        "gpus-per-node",
        "gres",
        "mem",
        "nodelist",
        "exclude",
        "open-mode",
        "qos",
    ),
    *("constraint", "chdir", "jobid", "export", "cpu-bind", "mpi", "label-prefix", "reservation", "mail-type"),
}


def examine(text: str, drain_grace_s: float, kill_wait_s: float | None) -> list[Finding]:
    """All findings about a script; ``kill_wait_s``: the site's KillWait, None if it is not known."""
    directives, steps = read_script(text)
    findings = [*_about_directives(directives, drain_grace_s)]
    for step in steps:
        findings += _about_step(step, in_array="array" in directives.options)
    if kill_wait_s is not None and kill_wait_s < drain_grace_s:
        why = f"is {kill_wait_s:g} s at this site: less than drain_grace_s = {drain_grace_s:g} s, which a node "
        findings.append(Finding(0, "KillWait", f"{why}may need to hand over what it has; --signal tells it earlier"))
    return sorted(findings)


def _about_directives(directives: Command, drain_grace_s: float) -> Iterator[Finding]:
    options = directives.options
    if "array" in options:
        if options.get("nodes", "1") not in ("1", "1-1"):
            yield Finding(
                0, "--nodes", f"is {options['nodes']}: when one node of an array's element dies, all its nodes go"
            )
    elif not directives.asks_for("no-kill"):
        yield Finding(0, "--no-kill", "is missing: Slurm ends the whole job when it finds a node dead")
    if "no-requeue" in options or "requeue" not in options:
        yield Finding(0, "--requeue", "is missing: what is preempted, or loses its node, does not come back")
    elif options.get("open-mode") != "append":
        yield Finding(0, "--open-mode", "is not append: a requeue empties the output file")
    signal = options.get("signal")
    if signal is None:
        yield Finding(0, "--signal", "is missing: nodes are not told before the time limit ends; B:USR1@120 does that")
        return
    if "array" in options and not signal.startswith("B:"):
        yield Finding(
            0, "--signal", f"is {signal}: without B: the batch script, which is all an element has, is not told"
        )
    before = signal.partition("@")[2] or "60"
    if before.isdigit() and int(before) < drain_grace_s:
        why = f"comes {before} s before the end: less than drain_grace_s = {drain_grace_s:g} s"
        yield Finding(0, "--signal", why)
    if options.get("dependency", "").startswith("expand"):
        yield Finding(
            0, "--dependency", "is expand, which most sites refuse: more nodes come by more elements of an array"
        )


def _about_step(step: Command, in_array: bool) -> Iterator[Finding]:
    if not in_array and not step.asks_for("no-kill"):
        why = "is missing in srun: Slurm kills the step when it finds a node dead; that of sbatch does not hold here"
        yield Finding(step.line, "--no-kill", why)
    bad_exit = step.options.get("kill-on-bad-exit")
    if bad_exit != "0":
        is_set = "is missing in srun: the site's default may be 1" if bad_exit is None else "is set in srun"
        yield Finding(step.line, "--kill-on-bad-exit", f"{is_set}: one task that fails ends all; give it as 0")
    wait = step.options.get("wait")
    if wait != "0":
        is_set = "is missing in srun: the site's default may not be 0" if wait is None else f"is {wait} in srun"
        yield Finding(
            step.line, "--wait", f"{is_set}: so long after the first task's end all others are killed; give 0"
        )


def add_parser(subparsers: Any) -> None:
    """Add the command to those of ``lazarus``."""
    doctor = subparsers.add_parser(
        "doctor", help="say what will not work here, or in a batch script", description=__doc__
    )
    doctor.add_argument("--job", metavar="FILE", help="a Slurm batch script instead of this host; - is standard input")
    doctor.add_argument("--config", type=Path, metavar="JSON", help='DeepSpeed JSON with the "lazarus" section')
    doctor.add_argument("--kill-wait", type=float, metavar="S", help="the site's KillWait; default: as scontrol says")
    doctor.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where checkpoints will be saved (default: .)",
    )
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if there are any, 2 if it could not look."""
    try:
        section = {} if arguments.config is None else load_config(arguments.config).get("lazarus", {})
        elastic = LazarusConfig.from_json(section).elastic
        if arguments.job is None:
            return _examine_host(elastic, arguments.checkpoint_dir)
        text = sys.stdin.read() if arguments.job == "-" else Path(arguments.job).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"lazarus doctor: {error}", file=sys.stderr)
        return 2
    return _examine_job(arguments, text, elastic.drain_grace_s)


def _examine_host(elastic: ElasticConfig, checkpoint_dir: Path) -> int:
    from megatron_lazarus.stack_check import check_stack
    from megatron_lazarus.storage_check import check_folder

    checks = [*check_stack(elastic.interface), *check_folder(checkpoint_dir, "checkpoints")]
    if elastic.lease_path is not None:
        checks += check_folder(Path(elastic.lease_path), "lease")
    problems = [check for check in checks if check.problem]
    for check in checks:
        print(f"{'!!' if check.problem else 'ok'} {check.what:14} {check.found}")
        if check.problem:
            print(f"   {'':14} will not work: {check.problem}")
    print(
        f"{len(problems)} of {len(checks)} checks found something" if problems else f"all {len(checks)} checks passed"
    )
    return int(bool(problems))


def _examine_job(arguments: argparse.Namespace, text: str, grace: float) -> int:
    kill_wait = _kill_wait() if arguments.kill_wait is None else arguments.kill_wait
    findings = examine(text, grace, kill_wait)
    for finding in findings:
        place = f"{arguments.job}:{finding.line}" if finding.line else arguments.job
        print(f"{place}: {finding.option} {finding.why}")
    if not findings:
        print(f"{arguments.job}: nothing that works against surviving")
    return int(bool(findings))


def _kill_wait() -> float | None:
    """The site's, if there is a Slurm here."""
    try:
        shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^KillWait\s*=\s*(\d+)", shown.stdout, re.MULTILINE)
    return float(found[1]) if found else None
