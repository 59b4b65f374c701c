"""Loads a checkpoint at any world size and placement: the newest one that is undamaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from megatron_lazarus.checkpoint.files import CheckpointError, check_file
from megatron_lazarus.checkpoint.manifest import Manifest, read_latest, tags
from megatron_lazarus.checkpoint.model import Experts, check_model, describe
from megatron_lazarus.checkpoint.parameter_groups import adapted
from megatron_lazarus.checkpoint.restore import fill_record, read_dense, read_record

logger = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]
"""A JSON value of every rank, by rank."""


class Loader:
    """Loads into one engine. ``gather`` lets the ranks agree."""

    def __init__(self, ds_engine: Any, experts: Experts, gather: Gather) -> None:
        self.engine, self.experts, self.gather = ds_engine, experts, gather
        self.reading: dict[str, Any] | None = None
        """The dense part of the checkpoint being loaded, for which DeepSpeed is about to ask."""

    def choose(self, load_dir: str, tag: str | None, with_state: bool) -> tuple[str, Manifest] | None:
        """(tag, manifest) of the checkpoint to load: ``tag``, or the newest undamaged one; None if there is none.

        Alike on all ranks, which share the work of checking every file. Raises CheckpointError if ``tag``, or without
        one everything there is, is damaged, or if the checkpoint is of another model.
        """
        wanted = tag if tag is not None else self.gather(read_latest(load_dir))[0]
        if wanted is None:
            return None
        first: str | None = None
        for candidate in [wanted] if tag is not None else list(self._candidates(load_dir, wanted)):
            directory = os.path.join(load_dir, candidate)
            manifest, damage = self._examine(directory, with_state)
            if manifest is not None and damage is None:
                if first is not None and self.experts.rank == 0:
                    logger.error("checkpoint %s is loaded instead, of step %d", directory, manifest.global_steps)
                return candidate, manifest
            first = first or damage
            if self.experts.rank == 0:
                logger.error("checkpoint %s is damaged: %s", directory, damage)
        raise CheckpointError(f"no undamaged checkpoint in {load_dir}: {first}")

    def _candidates(self, load_dir: str, latest: str) -> Iterator[str]:
        """``latest``, then what is older; if its age is unknown, all others, the newest first."""
        yield latest
        ordered: list[list[Any]] = self.gather(self._older(load_dir, latest) if self.experts.rank == 0 else None)
        yield from ordered[0]

    def _older(self, load_dir: str, latest: str) -> list[str]:
        names = [name for name in tags(load_dir) if name != latest]
        try:
            limit = Manifest.read(os.path.join(load_dir, latest)).global_steps
        except CheckpointError:
            return names
        older = []
        for name in names:
            try:
                if Manifest.read(os.path.join(load_dir, name)).global_steps <= limit:
                    older.append(name)
            except CheckpointError as error:
                logger.error("checkpoint %s is damaged: %s", name, error)
        return older

    def _examine(self, directory: str, with_state: bool) -> tuple[Manifest | None, str | None]:
        """(manifest, what is damaged on any rank). Raises CheckpointError if it is of another model."""
        manifest, damage = None, None
        try:
            manifest = Manifest.read(directory)
            files = list(manifest.all_files())
            for tag, entry, what in files[self.experts.rank :: self.experts.plan.world_size]:
                path = os.path.join(os.path.dirname(directory), tag, entry.name)
                check_file(path, entry.bytes, entry.sha256, what)
        except CheckpointError as error:
            damage = str(error)
        found = [damage for damage in self.gather(damage) if damage is not None]
        if manifest is not None and not found:
            check_model(manifest.model, directory, describe(self.engine.module, self.experts), with_state)
        return manifest, found[0] if found else None

    def load(self, load_dir: str, tag: str, manifest: Manifest, with_state: bool, **options: Any) -> dict[str, Any]:
        """Fill the engine; ``options`` are those of DeepSpeed's ``load_checkpoint``. Returns the client state."""
        dense = adapted(read_dense(load_dir, manifest), self.experts.parameter_groups)
        client_state = self.load_dense(load_dir, tag, dense, **options)
        for layer, buffer in enumerate(self.experts.buffers):
            for slot, expert in enumerate(buffer.experts):
                record = read_record(load_dir, manifest, layer, expert)
                fill_record(buffer.named_tensors(slot), record, with_state, f"layer {layer} expert {expert}")
        return client_state

    def load_dense(self, load_dir: str, tag: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Have DeepSpeed take over ``state``; returns the client state."""
        self.reading = state
        try:
            with self.experts.context.dense_only():
                _, client_state = self.engine.load_checkpoint(load_dir, tag=tag, **options)
        finally:
            self.reading = None
        return dict(client_state)

    def record(self, directory: str, layer: int, expert: int) -> tuple[Any, Manifest]:
        """One expert's record with optimizer state, as a buffer of one row, from a tag or, where damaged, an older one.

        Also the manifest of the tag that it was taken from. Local: no other rank takes part. Raises CheckpointError.
        """
        load_dir, latest = os.path.split(os.path.normpath(directory))
        like = self.experts.buffers[layer]
        what = f"layer {layer} expert {expert}"
        first: CheckpointError | None = None
        for name in (latest, *self._older(load_dir, latest)):
            try:
                manifest = Manifest.read(os.path.join(load_dir, name))
                tensors = read_record(load_dir, manifest, layer, expert)
            except CheckpointError as error:
                first = first or error
                logger.error("%s cannot be taken from checkpoint %s: %s", what, name, error)
                continue
            record = type(like)(like.layout, (expert,), like.rows.device)
            fill_record(record.named_tensors(0), tensors, True, what)
            return record, manifest
        raise CheckpointError(f"no checkpoint in {load_dir} has an undamaged record of {what}: {first}")
