"""What the members of a new generation tell one another before they go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lazarus.expert_state import Holdings


@dataclass(frozen=True)
class Report:
    """What a member says of itself when a generation begins.

    ``operation``: how many it has completed, None if it has no state yet; ``outcome``: of the last one;
    ``saves``: numbers of those in flight that it knows to be complete; ``counted``: see ``Goodput.adopt``; ``script``:
    see ``ScriptLoop.report``.
    """

    operation: int | None
    outcome: Any
    saves: list[int]
    holdings: Holdings
    counted: list[float]
    script: dict[str, Any]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        held = tuple(tuple(row) for row in data["holdings"])
        return cls(data["operation"], data["outcome"], data["saves"], held, data["counted"], data["script"])
