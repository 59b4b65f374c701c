"""What a run knows of its saves, alike on all ranks: it changes only by what all of them learn at the same step."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_lazarus.checkpoint.attempt import Attempt, Save, tokens_of
from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.ledger import Ledger
from megatron_lazarus.checkpoint.manifest import Manifest
from megatron_lazarus.checkpoint.selection import Rotation

logger = logging.getLogger(__name__)

Signal = list[float]
"""From rank 0 in every vote: [number of the last save that is decided, bit i set: the i-th before it has failed]."""


class SaveHistory:
    """Saves in flight, those that succeeded, the experts' turns and the lost-token ledger.

    ``newest``: tag directory last published or loaded; ``job``: names the run to other jobs; ``number``: attempts so
    far; ``k``: experts per layer of the last save; ``assigned``: the ledger's at that save.
    ``report(kind, **fields)`` adds to the run's events; ``withdraw`` is told of every save that failed.
    """

    def __init__(self, num_experts: Sequence[int], rank: Callable[[], int], strict: bool) -> None:
        self.num_experts = tuple(num_experts)
        self._rank, self._strict = rank, strict
        self.newest: str | None = None
        self.job = uuid.uuid4().hex[:12]
        self.number = self.k = self.failures = 0
        self.ledger = Ledger(num_experts)
        self.rotation = Rotation(num_experts)
        self.assigned = self.ledger.assigned.copy()
        self.in_flight: list[Save] = []
        self.must_stop: str | None = None
        self.report: Callable[..., None] = lambda kind, **fields: None
        self.withdraw: Callable[[Save], None] = lambda save: None

    # -- outcomes -----------------------------------------------------------------------------------------------

    def signal(self) -> Signal:
        """What is decided on this rank, which is rank 0."""
        decided: list[Save] = []
        for save in self.in_flight:
            if not save.decided.is_set():
                break
            decided.append(save)
        if not decided:
            return [0.0, 0.0]
        last = decided[-1].attempt.number
        return [float(last), float(sum(1 << last - one.attempt.number for one in decided if not one.published))]

    def hear(self, signal: Signal) -> None:
        """Conclude what rank 0 says is decided."""
        last, failed = int(signal[0]), int(signal[1])
        for save in [one for one in self.in_flight if one.attempt.number <= last]:
            self.conclude(save, not failed >> last - save.attempt.number & 1)

    def conclude(self, save: Save, published: bool) -> None:
        """The outcome of a save, as all ranks know it now."""
        self.in_flight.remove(save)
        attempt = save.attempt
        if not published:
            self.withdraw(save)
            self.failed(attempt.directory, save.reason or "see the log of rank 0")
            return
        self.newest = attempt.directory
        self.rotation.advance(attempt.selection, attempt.number)
        self.ledger.save(save.tokens)
        if self._rank() == 0:
            logger.info("checkpoint %s is complete", attempt.directory)
            self.report("checkpoint", tag=attempt.tag, steps=attempt.step, experts=attempt.k)

    def failed(self, directory: str, reason: str) -> None:
        """A save has come to nothing; training goes on, unless ``strict``."""
        self.failures += 1
        if self._strict:
            self.must_stop = f'checkpoint {directory} failed ("lazarus.checkpoint.strict" is true): {reason}'
        if self._rank() == 0:
            logger.error("checkpoint %s failed: %s", directory, reason)
            self.report("checkpoint failed", directory=directory, why=reason)

    def stop_if_strict(self) -> None:
        """Raise CheckpointError, alike on every rank, if a save has failed and that must stop the run."""
        if self.must_stop is not None:
            raise CheckpointError(self.must_stop)

    # -- what recovery takes from checkpoints -------------------------------------------------------------------

    def loaded(self, directory: str, manifest: Manifest) -> None:
        """The whole state is that of a checkpoint; experts that it saved earlier have lost tokens since."""
        self.newest = directory
        if manifest.ledger:
            self.ledger.restore(manifest.ledger)
            self.rotation = Rotation.from_json(self.num_experts, manifest.ledger["rotation"])
            self.number = max(self.number, int(manifest.ledger["number"]))
            self.assigned = self.ledger.assigned.copy()
        self.lost({(entry.layer, entry.expert): tokens_of(entry) for entry in manifest.experts})

    def lost(self, experts: Mapping[tuple[int, int], float]) -> float:
        """These experts are restored from records that hold so many tokens; returns how many tokens are lost by it."""
        lost = self.ledger.lose(experts)
        if lost and self._rank() == 0:
            plt, so_far = self.ledger.plt(), self.ledger.plt(so_far=True)
            logger.warning(
                "%d token updates of experts are lost; lost in all: %.4f %% of the planned run, %.4f %% of it so far",
                lost,
                100 * plt,
                100 * so_far,
            )
            self.report("lost tokens", tokens=lost, proportion=plt, proportion_so_far=so_far)
        return lost

    # -- on other ranks -----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "newest": self.newest,
            "job": self.job,
            "number": self.number,
            "k": self.k,
            "ledger": self.ledger.to_json(),
            "rotation": self.rotation.to_json(),
            "assigned": self.assigned.tolist(),
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        self.newest, self.job, self.k = data["newest"], data["job"], data["k"]
        self.number = max(self.number, data["number"])
        self.ledger.restore(data["ledger"])
        self.rotation = Rotation.from_json(self.num_experts, data["rotation"])
        self.assigned = self.ledger.assigned.copy()
        self.assigned[:] = data["assigned"]

    def ledger_after(self, attempt: Attempt, tokens: Mapping[tuple[int, int], float]) -> dict[str, Any]:
        """What the manifest of ``attempt`` says: as if it had succeeded, for only then is it read."""
        ledger = Ledger(self.num_experts)
        ledger.restore(self.ledger.to_json())
        ledger.save(tokens)
        rotation = self.expected_rotation()
        rotation.advance(attempt.selection, attempt.number)
        return {
            **ledger.to_json(),
            "rotation": rotation.to_json(),
            "number": attempt.number,
            "attempt": attempt.token,
            "k": attempt.k,
            "planned_steps": self.ledger.planned_steps,
            "plt": self.ledger.plt(),
        }

    def expected_rotation(self) -> Rotation:
        """The experts' turns if all saves in flight succeed."""
        rotation = self.rotation.copy()
        for save in self.in_flight:
            rotation.advance(save.attempt.selection, save.attempt.number)
        return rotation
