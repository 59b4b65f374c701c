"""Process groups for a model without model parallelism.

Megatron Core asks every module for tensor, pipeline and context parallel groups. Here each of them has one member,
so no collective ever runs on them, and a stand-in that knows its size does. The model then holds no process group at
all: a change of the world leaves nothing in it to rebuild, and ``megatron.core.parallel_state`` stays untouched.
"""

from __future__ import annotations

from megatron_lazarus.models.megatron import ProcessGroupCollection


class SoloGroup:
    """A group whose only member is this rank."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0


def solo_groups() -> ProcessGroupCollection:
    """Return the collection to give to Megatron Core's modules."""
    groups = ProcessGroupCollection()
    groups.tp = groups.pp = groups.cp = SoloGroup()
    groups.embd = groups.pos_embd = None
    return groups
