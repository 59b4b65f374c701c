"""``lazarus submit``: fills one of the scripts in ``scripts/slurm`` in, and gives it to Slurm."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PATTERNS = ("array", "job")
_SETTINGS = ': "${PRETRAIN:='
"""The line of a script before which the user's variables go."""


class SubmitError(ValueError):
    """The request does not make sense, or Slurm does not take it; the message says why."""


@dataclass(frozen=True)
class Submission:
    """A run to be submitted; the keys of the JSON file and, with dashes, the options of the command.

    ``pattern``: "array": an element a node, more can be added by submitting again; "job": one job, spares included.
    ``job_name``: of the run. ``nodes``: nodes asked for. ``min_nodes``: that must survive. ``max_nodes``: that train at
    most, the others wait as spares; null: all. ``pretrain``: script that starts the training, relative to the
    repository. ``gpus_per_node``: worker processes of a node. ``output``: folder of logs and checkpoints, on storage
    that all nodes share; null: output/<job_name>. ``first_element``: of an array, to add to one that runs.
    ``notice_s``: seconds before the end of the time limit at which nodes begin to leave. ``spot``: "aws", "gcp" or
    "azure": drain a node whose host the cloud takes back. ``slurm``: more options of sbatch, null for those without a
    value. ``env``: variables of the training script, such as DATA_PATH.
    """

    pattern: str
    job_name: str
    nodes: int
    min_nodes: int = 1
    max_nodes: int | None = None
    pretrain: str = "scripts/pretrain_gpt_125M_moe8.sh"
    gpus_per_node: int = 8
    output: str | None = None
    first_element: int = 0
    notice_s: int = 120
    spot: str | None = None
    slurm: Mapping[str, str | None] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._require("pattern", self.pattern in PATTERNS, f"one of {', '.join(PATTERNS)}")
        legal = re.fullmatch(r"[\w.+-]+", self.job_name) is not None
        self._require("job_name", legal, "of letters, digits and . _ + -")
        self._require("nodes", self.nodes >= 1, "at least 1")
        self._require("min_nodes", self.min_nodes >= 1, "at least 1")
        self._require("gpus_per_node", self.gpus_per_node >= 1, "at least 1")
        self._require("first_element", self.first_element >= 0, "at least 0")
        self._require("notice_s", self.notice_s >= 1, "at least 1")
        fits = self.max_nodes is None or self.max_nodes >= self.min_nodes
        self._require("max_nodes", fits, f"at least min_nodes = {self.min_nodes}")
        self._require("spot", self.spot in (None, "aws", "gcp", "azure"), "aws, gcp, azure or null")
        for name in self.env:
            if re.fullmatch(r"[A-Za-z_]\w*", name) is None:
                raise SubmitError(f"env: {name!r} is no name of a variable")

    def _require(self, name: str, legal: bool, what: str) -> None:
        if not legal:
            raise SubmitError(f"{name} is {getattr(self, name)!r}; it must be {what}")

    @property
    def folder(self) -> str:
        return self.output or f"output/{self.job_name}"

    @property
    def log_dir(self) -> str:
        return f"{self.folder}/logs"

    def options(self) -> dict[str, str | None]:
        """Of sbatch."""
        if self.pattern == "array":
            last = self.first_element + self.nodes - 1
            size = {"array": f"{self.first_element}-{last}", "output": f"{self.log_dir}/%x-%A_%a.out"}
        else:
            size = {"nodes": str(self.nodes), "output": f"{self.log_dir}/%x-%j.out"}
        return {"job-name": self.job_name, **size, "signal": f"B:USR1@{self.notice_s}", **self.slurm}

    def variables(self, repository: Path) -> dict[str, str]:
        """Of the training script."""
        start = self.nodes if self.max_nodes is None else min(self.nodes, self.max_nodes)
        given = {
            "REPOSITORY": str(repository),
            "PRETRAIN": self.pretrain,
            "OUTPUT": self.folder,
            "NUM_GPUS": str(self.gpus_per_node),
            "MIN_NODES": str(self.min_nodes),
            "NODES": str(start),
        }
        if self.max_nodes is not None:
            given["MAX_NODES"] = str(self.max_nodes)
        if self.spot is not None:
            given["SPOT"] = self.spot
        return {**given, **self.env}


def fill(template: str, submission: Submission, repository: Path) -> str:
    """The batch script of a submission: the template with the options and variables of it."""
    wanted = submission.options()
    lines: list[str] = []
    last = 0
    for line in template.splitlines():
        if line.startswith("#SBATCH --"):
            name = line.removeprefix("#SBATCH --").partition("=")[0]
            if name in wanted:
                line = _directive(name, wanted.pop(name))
            lines.append(line)
            last = len(lines)
        elif line.startswith(_SETTINGS):
            exports = [f"{name}={shlex.quote(value)}" for name, value in submission.variables(repository).items()]
            lines += [*(f"export {words}" for words in exports), line]
        else:
            lines.append(line)
    lines[last:last] = [_directive(name, value) for name, value in wanted.items()]
    return "\n".join(lines) + "\n"


def _directive(name: str, value: str | None) -> str:
    return f"#SBATCH --{name}" + ("" if value is None else f"={value}")


def add_parser(subparsers: Any) -> None:
    """Add the command to those of ``lazarus``."""
    submit = subparsers.add_parser("submit", help="start a run on a Slurm cluster")
    submit.add_argument("pattern", nargs="?", choices=PATTERNS, help="a job array (one element a node), or one job")
    submit.add_argument("--from", dest="file", type=Path, metavar="JSON", help="a file with these options; flags win")
    for key in dataclasses.fields(Submission):
        if key.name not in ("pattern", "slurm", "env"):
            kind = int if "int" in str(key.type) else str
            submit.add_argument(f"--{key.name.replace('_', '-')}", type=kind)
    submit.add_argument(
        "--slurm", nargs="*", action="extend", default=[], metavar="OPTION[=VALUE]", help="more options of sbatch"
    )
    submit.add_argument(
        "--env", nargs="*", action="extend", default=[], metavar="NAME=VALUE", help="variables of the training script"
    )
    submit.add_argument("--dry-run", action="store_true", help="print the script instead")
    submit.set_defaults(run=submit_run)


def submit_run(arguments: argparse.Namespace) -> int:
    """Print the script, or keep it in the log folder and submit it."""
    try:
        submission = read_submission(arguments)
        template = REPOSITORY / "scripts" / "slurm" / f"pretrain_{submission.pattern}.sbatch"
        if not template.exists():
            raise SubmitError(
                f"{template} is missing: the command needs the repository, installed with `pip install -e`"
            )
        script = fill(template.read_text(encoding="utf-8"), submission, REPOSITORY)
        if arguments.dry_run:
            print(script, end="")
            return 0
        log_dir = REPOSITORY / submission.log_dir
        # Slurm ends a job whose output has no folder, and says nothing.
        log_dir.mkdir(parents=True, exist_ok=True)
        kept = log_dir / f"{submission.job_name}-{submission.pattern}.sbatch"
        kept.write_text(script, encoding="utf-8")
        return subprocess.run(["sbatch", str(kept)], cwd=REPOSITORY, check=False).returncode
    except (SubmitError, OSError) as error:
        print(f"lazarus submit: {error}", file=sys.stderr)
        return 1


def read_submission(arguments: argparse.Namespace) -> Submission:
    """From the file and the flags. Raises SubmitError or OSError."""
    given: dict[str, Any] = {}
    if arguments.file is not None:
        given = _read(arguments.file)
    known = [key.name for key in dataclasses.fields(Submission)]
    if unknown := sorted(given.keys() - set(known)):
        raise SubmitError(f"unknown keys {', '.join(unknown)} in {arguments.file}; known are {', '.join(known)}")
    for name in known:
        if name in ("slurm", "env"):
            given[name] = {**given.get(name, {}), **_pairs(name, getattr(arguments, name))}
        elif (value := getattr(arguments, name)) is not None:
            given[name] = value
    if missing := [name for name in ("pattern", "job_name", "nodes") if name not in given]:
        raise SubmitError(f"{', '.join(missing)} must be given")
    for key in dataclasses.fields(Submission):
        value, kind = given.get(key.name), str(key.type)
        fits = value is None or isinstance(value, int if "int" in kind else Mapping if "Mapping" in kind else str)
        if not fits or isinstance(value, bool):
            raise SubmitError(f"{key.name} is {value!r}; it must be of type {kind}")
    return Submission(**given)


def _read(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SubmitError(f"{path} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise SubmitError(f"{path} must hold an object")
    return given


def _pairs(option: str, words: Sequence[str]) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if option == "env" and not equals:
            raise SubmitError(f"--env is {word!r}; it must be NAME=VALUE")
        pairs[name] = value if equals else None
    return pairs
