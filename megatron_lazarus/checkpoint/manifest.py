"""``manifest.json``: what a checkpoint tag consists of, with sizes and checksums, published atomically."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

NAME = "manifest.json"
_VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or must not be loaded; the message names the file or key."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a tag: ``name`` relative to the tag directory, size in bytes, SHA-256."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, directory: str, name: str) -> FileEntry:
        path = os.path.join(directory, name)
        return cls(name, os.path.getsize(path), _sha256(path))


@dataclass(frozen=True)
class Manifest:
    """The whole of a tag. ``model`` describes the model it belongs to; ``generation`` wrote it (0: not elastic)."""

    tag: str
    generation: int
    global_steps: int
    model: dict[str, Any]
    files: list[FileEntry]

    def write(self, directory: str) -> None:
        """Write ``manifest.json``; it carries its own checksum. The tag is complete when this returns."""
        body = {"version": _VERSION, **asdict(self)}
        text = json.dumps({"sha256": _digest(body), "manifest": body}, indent=1)
        write_atomically(os.path.join(directory, NAME), text.encode())

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """Read and check the manifest itself. Raises CheckpointError if it is missing, damaged or of a newer kind."""
        path = os.path.join(directory, NAME)
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
            body, digest = data["manifest"], data["sha256"]
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist: the checkpoint is incomplete or not one of lazarus"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if _digest(body) != digest:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")
        if body["version"] != _VERSION:
            raise CheckpointError(f"{path} has version {body['version']}; this release reads version {_VERSION}")
        files = [FileEntry(**entry) for entry in body["files"]]
        return cls(body["tag"], body["generation"], body["global_steps"], body["model"], files)

    def verify(self, directory: str) -> None:
        """Raise CheckpointError naming the first file that is missing, short or altered."""
        for entry in self.files:
            path = os.path.join(directory, entry.name)
            if not os.path.isfile(path):
                raise CheckpointError(f"{path} is missing")
            if (size := os.path.getsize(path)) != entry.bytes:
                raise CheckpointError(f"{path} has {size} bytes, the manifest says {entry.bytes}")
            if _sha256(path) != entry.sha256:
                raise CheckpointError(f"{path} is altered: its checksum does not match the manifest")


def read_latest(directory: str) -> str | None:
    """The tag that ``latest`` names, or None if there is no such file."""
    try:
        with open(os.path.join(directory, "latest"), encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return None


def write_atomically(path: str, data: bytes) -> None:
    """Replace ``path`` so that a reader, or a crash at any moment, meets the old content or the new one."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_path(os.path.dirname(path))


def fsync_path(path: str) -> None:
    """Flush a file or directory to storage."""
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
