"""Files that are written once, flushed, and replaced as a whole or not at all."""

from __future__ import annotations

import hashlib
import os

_RESERVED = 4096


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or must not be loaded; the message names the file or key."""


def read_checked(path: str, size: int, sha256: str, what: str) -> bytes:
    """The content of ``path``. Raises CheckpointError, naming ``what`` it holds, if it is missing, short or altered."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing ({what})") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({what}): {error}") from error
    if len(data) != size:
        raise CheckpointError(f"{path} has {len(data)} bytes, the manifest says {size} ({what})")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointError(f"{path} is altered: its checksum does not match the manifest ({what})")
    return data


def check_file(path: str, size: int, sha256: str, what: str) -> None:
    """Like ``read_checked``, in little memory."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest() if found == size else ""
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing ({what})") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({what}): {error}") from error
    if found != size:
        raise CheckpointError(f"{path} has {found} bytes, the manifest says {size} ({what})")
    if digest != sha256:
        raise CheckpointError(f"{path} is altered: its checksum does not match the manifest ({what})")


def write_atomically(path: str, data: bytes) -> None:
    """Replace ``path`` so that a reader, or a crash at any moment, meets the old content or the new one."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_path(os.path.dirname(path))


def reserve(path: str) -> None:
    """Take a block of the disk for a short file, to be written by ``write_reserved`` even when the disk is full."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(bytes(_RESERVED))


def write_reserved(path: str, data: bytes) -> None:
    """Write ``path``, for which ``reserve`` may have been called, and flush it."""
    temporary = f"{path}.tmp"
    with open(temporary, "r+b" if os.path.exists(temporary) else "wb") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def leave_empty(path: str) -> None:
    """Make ``path`` an empty file: where ``reserve`` got as far as a name, that takes nothing more of the disk."""
    with open(f"{path}.tmp", "wb"):
        pass
    os.replace(f"{path}.tmp", path)


def fsync_path(path: str) -> None:
    """Flush a file or directory to storage."""
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
