"""``manifest.json``: what a checkpoint consists of, with sizes and checksums, published atomically.

A partial checkpoint writes some experts; for the others its manifest names the files of earlier tags.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_lazarus.checkpoint.files import CheckpointError, check_file, write_atomically

NAME = "manifest.json"
_VERSION = 2
_OLD_RECORD = re.compile(r"experts/layer_(\d+)_expert_(\d+)\.safetensors")


@dataclass(frozen=True)
class FileEntry:
    """One file of a tag: ``name`` relative to the tag directory, size in bytes, SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PartEntry:
    """One file with some ``fields`` of an expert's record, in the directory of ``tag``.

    ``step``: global steps when it was taken; ``tokens``: what the expert had seen by then in the run.
    """

    tag: str
    name: str
    bytes: int
    sha256: str
    step: int
    tokens: float
    fields: list[str]


@dataclass(frozen=True)
class ExpertEntry:
    """Where the record of an expert is; every field is in exactly one of the parts."""

    layer: int
    expert: int
    parts: list[PartEntry]

    @property
    def what(self) -> str:
        return f"layer {self.layer} expert {self.expert}"


@dataclass(frozen=True)
class Manifest:
    """The whole of a checkpoint.

    ``model`` describes the model it belongs to; ``generation`` wrote it (0: not elastic); ``files`` are those of the
    dense part; ``content``: which fields every save writes ("all": none but of the selected experts; "moments": the
    weights); ``ledger``: see ledger.py.
    """

    tag: str
    generation: int
    global_steps: int
    model: dict[str, Any]
    files: list[FileEntry]
    content: str = "all"
    experts: list[ExpertEntry] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: str) -> None:
        """Write ``manifest.json``; it carries its own checksum. The tag is complete when this returns."""
        body = {"version": _VERSION, **asdict(self)}
        write_atomically(os.path.join(directory, NAME), _text({"sha256": _digest(body), "manifest": body}).encode())

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """Read and check the manifest itself. Raises CheckpointError if it is missing, damaged or of a newer kind."""
        path = os.path.join(directory, NAME)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
            data = json.loads(text)
            body, digest = data["manifest"], data["sha256"]
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist: the checkpoint is incomplete or not one of lazarus"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        # Also what JSON does not mind, as other white space, is not what was written.
        if _digest(body) != digest or _text(data) != text:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")
        if body["version"] not in (1, _VERSION):
            raise CheckpointError(f"{path} has version {body['version']}; this release reads versions 1 and {_VERSION}")
        return cls._from_body(body)

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        files = [FileEntry(**entry) for entry in body["files"]]
        common = (body["tag"], body["generation"], body["global_steps"], body["model"])
        if body["version"] == 1:
            return cls(*common, *_split_old(body["tag"], body["global_steps"], files))
        experts = [
            ExpertEntry(entry["layer"], entry["expert"], [PartEntry(**part) for part in entry["parts"]])
            for entry in body["experts"]
        ]
        return cls(*common, files, body["content"], experts, body["ledger"])

    def record(self, layer: int, expert: int) -> ExpertEntry:
        """Raises CheckpointError if there is none."""
        for entry in self.experts:
            if (entry.layer, entry.expert) == (layer, expert):
                return entry
        raise CheckpointError(f"the manifest of {self.tag} has no record of layer {layer} expert {expert}")

    def all_files(self) -> Iterator[tuple[str, FileEntry | PartEntry, str]]:
        """(tag, entry, what it holds) of every file, those of earlier tags included."""
        for entry in self.files:
            yield self.tag, entry, "dense part"
        for expert in self.experts:
            for part in expert.parts:
                yield part.tag, part, expert.what

    def verify(self, directory: str, progress: Callable[[int], None] = lambda done: None) -> None:
        """Raise CheckpointError naming the first file that is missing, short or altered, and the expert it holds.

        ``directory`` is that of the tag; ``progress`` is told the bytes of every file that is as it should be.
        """
        save_dir = os.path.dirname(os.path.normpath(directory))
        for tag, entry, what in self.all_files():
            folder = directory if tag == self.tag else os.path.join(save_dir, tag)
            check_file(os.path.join(folder, entry.name), entry.bytes, entry.sha256, what)
            progress(entry.bytes)


def read_latest(directory: str) -> str | None:
    """The tag that ``latest`` names, or None if there is no such file."""
    try:
        with open(os.path.join(directory, "latest"), encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return None


def chosen_tag(directory: str, tag: str | None) -> str:
    """``tag``, or else the newest. Raises CheckpointError if there is none."""
    tag = tag or read_latest(directory)
    if tag is None:
        raise CheckpointError(f"{directory} has no file 'latest'; name a tag with --tag")
    return tag


def tags(save_dir: str) -> list[str]:
    """The tags in ``save_dir`` that have a manifest, damaged or not, the newest step first.

    One whose manifest cannot be read stands where its files' age puts it.
    """
    found: list[tuple[int, float, str]] = []
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else []:
        path = os.path.join(save_dir, name, NAME)
        if not os.path.isfile(path):
            continue
        try:
            steps = Manifest.read(os.path.dirname(path)).global_steps
        except CheckpointError:
            steps = -1
        found.append((steps, os.path.getmtime(path), name))
    by_age = sorted(found, key=lambda entry: entry[1])
    newest = -1
    ordered = []
    for steps, modified, name in by_age:
        newest = max(newest, steps)
        ordered.append((steps if steps >= 0 else newest, modified, name))
    return [name for _, _, name in sorted(ordered, reverse=True)]


def _split_old(tag: str, steps: int, files: list[FileEntry]) -> tuple[list[FileEntry], str, list[ExpertEntry]]:
    """Version 1 listed dense files and whole records together."""
    dense, experts = [], []
    for entry in files:
        if match := _OLD_RECORD.fullmatch(entry.name):
            part = PartEntry(tag, entry.name, entry.bytes, entry.sha256, steps, 0.0, [])
            experts.append(ExpertEntry(int(match[1]), int(match[2]), [part]))
        else:
            dense.append(entry)
    return dense, "all", sorted(experts, key=lambda entry: (entry.layer, entry.expert))


def _text(data: Any) -> str:
    return json.dumps(data, indent=1)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
