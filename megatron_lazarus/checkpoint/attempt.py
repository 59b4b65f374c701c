"""One attempt to write one checkpoint, as one rank sees it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.image import FileImage
from megatron_lazarus.checkpoint.manifest import ExpertEntry, Manifest, PartEntry
from megatron_lazarus.checkpoint.selection import Selection


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file that this rank writes: of the dense part, or (with layer and expert) a part of a record."""

    name: str
    image: FileImage
    layer: int | None = None
    expert: int | None = None
    tokens: float = 0.0


@dataclass(frozen=True)
class Attempt:
    """What all ranks agree on: rank 0 decides and tells the others.

    ``number`` counts the attempts of a run; ``token`` is unique; ``suffix``: part of all its files' names, where files
    of others may be in the tag's directory. ``complete``: nothing to do, an earlier attempt has succeeded after all.
    """

    number: int
    token: str
    save_dir: str
    tag: str
    suffix: str
    step: int
    generation: int
    content: str
    k: int
    selection: Selection
    complete: bool = False

    @property
    def directory(self) -> str:
        return os.path.join(self.save_dir, self.tag)

    def report_file(self, rank: int) -> str:
        """Where a rank says what it has written."""
        return os.path.join(self.directory, f"rank_{rank}.{self.token}.json")


@dataclass
class Publication:
    """What rank 0 needs to publish an attempt: ``head`` is the manifest but for the files.

    ``num_experts``: by layer; ``keep_last``: see retention.py; ``may_publish`` is asked at the end.
    """

    head: Manifest
    num_experts: Sequence[int]
    world_size: int
    save_latest: bool
    keep_last: int | None
    may_publish: Callable[[], bool]


@dataclass
class Save:
    """The share of this rank in an attempt, and what became of it.

    ``tokens``: what each (layer, expert) that the attempt writes holds. ``wait_for_copy`` returns when the planned
    files' images hold the snapshot; ``release`` lets their memory go. ``rest``: the pickled rest of the dense part
    (name, content), on the rank that writes it. ``decided`` and ``published`` are, on ranks other than 0, about this
    rank's part alone; ``finished``: the thread has let go of it.
    """

    attempt: Attempt
    tokens: dict[tuple[int, int], float]
    rank: int
    files: list[PlannedFile]
    rest: tuple[str, bytes] | None
    publication: Publication | None
    wait_for_copy: Callable[[], None]
    release: Callable[[], None]
    cancelled: threading.Event = field(default_factory=threading.Event)
    decided: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    published: bool = False
    reason: str = ""

    def decide(self, published: bool, reason: str = "") -> None:
        """Once and for all."""
        if not self.decided.is_set():
            self.published, self.reason = published, reason
            self.decided.set()


def composed(base: ExpertEntry | None, new: list[PartEntry], layer: int, expert: int) -> ExpertEntry:
    """The entry after a save that wrote the parts ``new`` (maybe none) of an expert: they replace their fields."""
    written = {name for part in new for name in part.fields}
    kept = [part for part in (base.parts if base else []) if not written & set(part.fields)]
    return ExpertEntry(layer, expert, [*kept, *new])


def tokens_of(entry: ExpertEntry) -> float:
    """What the record holds: as much as the oldest of its parts."""
    return min(part.tokens for part in entry.parts)


def is_published(attempt: Attempt) -> bool:
    """Whether this very attempt is complete on storage, whoever completed it."""
    try:
        return bool(Manifest.read(attempt.directory).ledger.get("attempt") == attempt.token)
    except CheckpointError:
        return False
