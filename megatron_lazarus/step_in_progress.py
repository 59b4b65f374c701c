"""How far a script's step has come: of one attempt at it, and of the step through all attempts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class StepInProgress:
    """Of the step: ``accumulation``, the micro-batches of each rank; ``holders``, the ranks, by names that outlive a
    change of the world, that have begun it; ``dropped``, why it is given up; ``micro_steps_done``, how often the script
    was told that there is more to it; ``feeds_itself``, whether its batches are the script's own.

    Of the attempt: ``present``, the ranks that make it; ``ready``, whether it has begun; ``next_call``, how many calls
    are done; the losses of its ``backwards``; ``unreduced``, whether dense gradients must still be reduced at the end.
    """

    begun: bool = False
    accumulation: int = 0
    micro_steps_before: int = 0
    holders: set[str] = field(default_factory=set)
    dropped: str | None = None
    micro_steps_done: int = 0
    feeds_itself: bool = False

    present: frozenset[str] = frozenset()
    ready: bool = False
    next_call: int = 0
    micro_steps: int = 0
    backwards: int = 0
    loss_sum: Tensor | None = None
    unreduced: bool = False
    started: float = 0.0

    @property
    def lost(self) -> set[str]:
        """Ranks whose own batches nobody trains on: that have not made this attempt; all, where it is dropped."""
        return self.holders if self.dropped is not None else self.holders - self.present

    def begin(self, accumulation: int, micro_steps_before: int) -> None:
        """The first attempt of this rank; ``accumulation`` counts unless others have begun with another one."""
        self.begun = True
        self.accumulation = self.accumulation or accumulation
        self.micro_steps_before = micro_steps_before

    def restart(self) -> None:
        """Another attempt."""
        self.ready, self.next_call, self.micro_steps = True, 0, 0
        self.backwards, self.loss_sum = 0, None
        self.unreduced = False
        self.started = time.monotonic()

    def add(self, loss: Tensor, ghost: bool) -> None:
        """Another micro-batch has had its backward."""
        self.backwards += 1
        self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
