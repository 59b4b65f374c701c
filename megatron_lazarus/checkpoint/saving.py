"""Begins saves: all ranks agree on what each writes, and go on as soon as the copies have begun."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor

from megatron_lazarus.checkpoint.attempt import Attempt, PlannedFile, Publication, Save
from megatron_lazarus.checkpoint.background import BackgroundWriter, base_of
from megatron_lazarus.checkpoint.dense import SKELETON, pieces, shard_file, take_apart
from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.history import SaveHistory
from megatron_lazarus.checkpoint.ledger import choose_k
from megatron_lazarus.checkpoint.manifest import NAME, Manifest
from megatron_lazarus.checkpoint.memory import BufferPool, HostBuffer, Snapshot
from megatron_lazarus.checkpoint.model import Experts, describe
from megatron_lazarus.checkpoint.owner import Owner
from megatron_lazarus.checkpoint.retention import RETIRED, discard, mark_incomplete, marked_for
from megatron_lazarus.checkpoint.safety import dump
from megatron_lazarus.checkpoint.selection import Policy
from megatron_lazarus.checkpoint.sharing import Unit, piece_limit, share
from megatron_lazarus.checkpoint.writer import parts_of, record_file

logger = logging.getLogger(__name__)

STALL_LIMIT_S = 10.0
"""How long a save waits for host memory that earlier saves still occupy, before it counts as failed."""


class Settings(Protocol):
    """What of the configuration concerns saving: see CheckpointConfig."""

    @property
    def persist_experts(self) -> int | str: ...
    @property
    def selection(self) -> Policy: ...
    @property
    def content(self) -> str: ...
    @property
    def max_lost_token_fraction(self) -> float: ...
    @property
    def dynamic_k(self) -> bool: ...
    @property
    def keep_last(self) -> int | None: ...


def _asked(everyone: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What of the ranks' words a decision depends on."""
    return (
        [rank for rank, one in enumerate(everyone) if not one["room"]],
        any(one["again"] for one in everyone),
        any(one["tried"] for one in everyone),
        max(one["number"] for one in everyone),
        {one["tag"] for one in everyone},
    )


class Saver:
    """Begins the saves of one engine. ``gather``: a JSON value of every rank, by rank."""

    def __init__(
        self,
        ds_engine: Any,
        experts: Experts,
        settings: Settings,
        history: SaveHistory,
        writer: BackgroundWriter,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._engine, self._experts, self._settings = ds_engine, experts, settings
        self._history, self._writer, self._gather = history, writer, gather
        self._pool = BufferPool()
        self._tried: set[tuple[str, str]] = set()
        self._buffer: HostBuffer | None = None
        self.snapshots: list[Snapshot] = []
        self.generation: Callable[[], int] = lambda: 0
        self.may_publish: Callable[[], bool] = lambda: True

    # -- agreement ----------------------------------------------------------------------------------------------

    def agree(self, save_dir: str, tag: str, again: bool) -> Attempt:
        """What this save is going to do, as rank 0 decides. Raises CheckpointError, alike on all ranks, if it cannot.

        ``again``: this rank has tried before, at this step, and a rank was lost.
        """
        # What was given up must not write any more where this one is going to.
        self._buffer = self._pool.take(STALL_LIMIT_S) if self._writer.has_let_go(STALL_LIMIT_S) else None
        mine = {
            "room": self._buffer is not None,
            "again": again,
            "tried": (save_dir, tag) in self._tried,
            "number": self._history.number,
            "job": self._history.job,
            "tag": tag,
        }
        is_first = self._experts.rank == 0
        # Training waits for every round. Rank 0 nearly always knows enough to decide before it has heard the others.
        decision = self._decide(save_dir, tag, [mine]) if is_first else None
        everyone = self._gather({**mine, "decision": decision})
        known, decision = everyone[0], everyone[0]["decision"]
        if _asked(everyone) != _asked(everyone[:1]):
            if is_first:
                self._withdraw(decision)
                decision = self._decide(save_dir, tag, everyone)
            decision = self._gather(decision)[0]
        self._history.number = 1 + max(one["number"] for one in everyone)
        self._history.job = known["job"]
        self._tried.add((save_dir, tag))
        if "refused" in decision:
            self.give_up()
            raise CheckpointError(decision["refused"])
        return Attempt(**decision)

    def _withdraw(self, decision: Mapping[str, Any]) -> None:
        """What was decided is not done: its folders go."""
        if "refused" not in decision and not decision["complete"]:
            self.discard(Attempt(**decision))

    def discard(self, attempt: Attempt) -> None:
        """On rank 0: nothing is going to be written of an attempt."""
        self._writer.active.discard(attempt.token)
        with contextlib.suppress(OSError):
            discard(attempt.directory, attempt.suffix, attempt.token, self._writer.preparing)

    def give_up(self) -> None:
        """The save that was agreed on is not begun here: its memory is free again."""
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
            self._buffer = None

    def _decide(self, save_dir: str, tag: str, everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The attempt as JSON, or {"refused": why}."""
        if late := [rank for rank, one in enumerate(everyone) if not one["room"]]:
            return {"refused": f"storage is too slow: the last saves of ranks {late} are still being written"}
        if others := sorted({one["tag"] for one in everyone} - {tag}):
            differ = f"the tag is {tag!r} on rank 0, {', '.join(map(repr, others))} on others"
            if self._engine.checkpoint_tag_validation_fail():
                return {"refused": differ}
            logger.warning("%s: rank 0's is taken", differ)
        token = uuid.uuid4().hex[:12]
        try:
            os.makedirs(save_dir, exist_ok=True)
            self._claim(save_dir, everyone[0]["job"])
            complete = any(one["again"] for one in everyone) and self._is_complete(os.path.join(save_dir, tag))
            suffix = "" if complete else self._prepare(save_dir, tag, token, any(one["tried"] for one in everyone))
        except (OSError, CheckpointError) as error:
            return {"refused": f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)}
        k = self._choose_k(save_dir)
        selection = self._history.expected_rotation().select(
            self._settings.selection, k, [unsaved.tolist() for unsaved in self._history.ledger.unsaved()]
        )
        attempt = Attempt(
            number=1 + max(one["number"] for one in everyone),
            token=token,
            save_dir=save_dir,
            tag=tag,
            suffix=suffix,
            step=self._engine.global_steps,
            generation=self.generation(),
            content=self._settings.content,
            k=k,
            selection=selection,
            complete=complete,
        )
        return asdict(attempt)

    def _claim(self, save_dir: str, job: str) -> None:
        owner = self._writer.owner
        path = os.path.realpath(save_dir)
        if owner is None or os.path.dirname(owner.path) != path or owner.job != job:
            if owner is not None:
                owner.release()
            self._writer.owner = None
            owner = Owner(path, job)
            owner.claim()
            self._writer.owner = owner
            return
        try:
            owner.check()
        except CheckpointError:
            # The directory was removed, or there is another owner, who is named if alive.
            owner.claim()

    def _is_complete(self, directory: str) -> bool:
        """Whether the tag is complete and undamaged, of this step."""
        try:
            manifest = Manifest.read(directory)
            manifest.verify(directory)
            return manifest.global_steps == self._engine.global_steps and self.may_publish()
        except CheckpointError as error:
            logger.info("the interrupted checkpoint is written again: %s", error)
            return False

    def _prepare(self, save_dir: str, tag: str, token: str, tried: bool) -> str:
        """Make the folders; returns the suffix that keeps this attempt's files apart from what is there."""
        directory = os.path.join(save_dir, tag)
        with self._writer.preparing:
            self._writer.active.add(token)
            return self._make_folders(directory, token, tried)

    def _make_folders(self, directory: str, token: str, tried: bool) -> str:
        complete = os.path.isfile(os.path.join(directory, NAME))
        retired = os.path.isfile(os.path.join(directory, RETIRED))
        if not tried and not complete and not retired and marked_for(directory) is not None:
            # Left by a job that died; nothing refers to it.
            shutil.rmtree(directory)
        suffix = f".{token}" if os.path.isdir(directory) else ""
        for folder in ("experts", "dense"):
            os.makedirs(os.path.join(directory, folder), exist_ok=True)
        if not complete:
            mark_incomplete(directory, token)
        return suffix

    def _choose_k(self, save_dir: str) -> int:
        """Experts per layer to write this time."""
        settings, history = self._settings, self._history
        most = max(history.num_experts, default=0)
        known = len(base_of(self._base(save_dir), save_dir, settings.content))
        coming = any(one.attempt.save_dir == save_dir and one.attempt.k >= most for one in history.in_flight)
        if known < sum(history.num_experts) and not coming:
            # Without a save that the others could be taken from, there are no others.
            return most
        if not isinstance(settings.persist_experts, int):
            return most
        base = min(settings.persist_experts, most)
        if not settings.dynamic_k:
            return base
        k = choose_k(base, most, settings.max_lost_token_fraction, self._plt_if_lost)
        if k != history.k and history.k:
            logger.info("experts per layer and save: %d -> %d", history.k, k)
            history.report("experts per save", before=history.k, now=k, proportion=history.ledger.plt())
        return k

    def _plt_if_lost(self, k: int) -> float:
        """The proportion of lost tokens if, just before the save after this one, every expert had to be restored.

        Until then as many tokens come as came since the last save.
        """
        ledger, history = self._history.ledger, self._history
        unsaved = ledger.unsaved()
        chosen = history.expected_rotation().select(
            self._settings.selection, k, [tokens.tolist() for tokens in unsaved]
        )
        left = [float(tokens.sum() - tokens[experts].sum()) for tokens, experts in zip(unsaved, chosen, strict=True)]
        return ledger.fraction((ledger.lost() + left + ledger.assigned - history.assigned).tolist())

    def _base(self, save_dir: str) -> tuple[str, Manifest] | None:
        """What saves in ``save_dir`` refer to. Rank 0 may be another process than at the last save."""
        newest = self._history.newest
        if self._writer.newest is None and newest not in (None, self._writer.broken):
            try:
                self._writer.newest = os.path.dirname(newest or ""), Manifest.read(newest or "")
            except CheckpointError as error:
                logger.warning("everything is saved anew: %s", error)
        return self._writer.newest

    # -- what this rank writes ----------------------------------------------------------------------------------

    def begin(self, attempt: Attempt, state: Any, save_latest: bool) -> Save:
        """Start copying this rank's share of ``state``, DeepSpeed's dense state dict, and of the selected records."""
        rank, world_size = self._experts.rank, self._experts.plan.world_size
        skeleton, tensors = take_apart(state)
        trained = {parameter.data_ptr() for parameter in self._engine.module.parameters()}
        # Only the step changes parameters and optimizer state. The rest may change at any time: it is copied now.
        steady = {name for name, t in tensors.items() if t.data_ptr() in trained or name.startswith("/optimizer/")}
        tensors = {name: tensor if name in steady else tensor.clone() for name, tensor in tensors.items()}
        dense = pieces(tensors, piece_limit(sum(tensor.nbytes for tensor in tensors.values()), world_size))
        records = self._records(attempt)
        units = [
            Unit(sum(self._field_bytes(layer, name) for name in fields), self._holders(layer, expert))
            for layer, expert, _, fields in records
        ]
        units += [Unit(tensor.nbytes, range(world_size)) for tensor in dense.values()]
        writers = share(units, world_size)
        sources: dict[str, dict[str, Tensor]] = {}
        places: dict[str, tuple[int, int]] = {}
        for (layer, expert, master, fields), writer in zip(records, writers[: len(records)], strict=True):
            if writer == rank:
                name = record_file(layer, expert, master=master, suffix=attempt.suffix)
                places[name] = layer, expert
                sources[name] = self._record_tensors(layer, expert, fields)
        shard = {
            key: tensor
            for (key, tensor), writer in zip(dense.items(), writers[len(records) :], strict=True)
            if writer == rank
        }
        if shard:
            sources[shard_file(rank, attempt.suffix)] = shard
        return self._start(attempt, sources, places, skeleton, save_latest)

    def _start(
        self,
        attempt: Attempt,
        sources: dict[str, dict[str, Tensor]],
        places: dict[str, tuple[int, int]],
        skeleton: Any,
        save_latest: bool,
    ) -> Save:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None, "a save begins with memory of its own"
        images = buffer.images(sources)
        held = self._history.ledger.held
        tokens = {
            (layer, expert): float(held[layer][expert])
            for layer, experts in enumerate(attempt.selection)
            for expert in experts
        }
        files = []
        for name, image in images.items():
            layer, expert = places.get(name, (None, None))
            holds = 0.0 if layer is None or expert is None else float(held[layer][expert])
            files.append(PlannedFile(name, image, layer, expert, holds))
        rest = publication = None
        if self._experts.rank == 0:
            stem, dot, ending = SKELETON.rpartition(".")
            rest = f"{stem}{attempt.suffix}{dot}{ending}", dump(skeleton)
            publication = self._publication(attempt, tokens, save_latest)
        copies = [
            (tensor, images[file].tensors[key]) for file, tensors in sources.items() for key, tensor in tensors.items()
        ]
        snapshot = Snapshot(copies)
        self.snapshots.append(snapshot)
        given_back: list[HostBuffer] = [buffer]

        def release() -> None:
            while given_back:
                self._pool.give_back(given_back.pop())

        save = Save(attempt, tokens, self._experts.rank, files, rest, publication, snapshot.wait, release)
        self._history.in_flight.append(save)
        self._history.k = attempt.k
        self._history.assigned = self._history.ledger.assigned.copy()
        self._writer.submit(save)
        return save

    def _publication(self, attempt: Attempt, tokens: Mapping[tuple[int, int], float], save_latest: bool) -> Publication:
        generation = attempt.generation
        head = Manifest(
            tag=attempt.tag,
            generation=generation,
            global_steps=attempt.step,
            model=describe(self._engine.module, self._experts),
            files=[],
            content=attempt.content,
            ledger=self._history.ledger_after(attempt, tokens),
        )
        return Publication(
            head=head,
            num_experts=self._history.num_experts,
            world_size=self._experts.plan.world_size,
            save_latest=save_latest,
            keep_last=self._settings.keep_last,
            may_publish=lambda: self.generation() == generation and self.may_publish(),
        )

    def _records(self, attempt: Attempt) -> list[tuple[int, int, bool, list[str]]]:
        """(layer, expert, whether it is the weights alone, fields) of every file of a record that is to be written."""
        return [
            (layer, expert, master, fields)
            for layer, buffer in enumerate(self._experts.buffers)
            for expert in range(self._history.num_experts[layer])
            for master, fields in parts_of(
                attempt.content, expert in attempt.selection[layer], buffer.layout.field_names
            )
        ]

    def _field_bytes(self, layer: int, name: str) -> int:
        return int(self._experts.buffers[layer].layout.field_bytes(name))

    def _holders(self, layer: int, expert: int) -> Sequence[int]:
        holders: Sequence[int] = self._experts.plan.layers[layer].holders(expert)
        return holders

    def _record_tensors(self, layer: int, expert: int, fields: Sequence[str]) -> dict[str, Tensor]:
        buffer = self._experts.buffers[layer]
        named: dict[str, Tensor] = buffer.named_tensors(buffer.first_slots()[expert])
        return {name: tensor for name, tensor in named.items() if name.partition("/")[0] in fields}
