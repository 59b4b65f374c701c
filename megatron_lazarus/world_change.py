"""What members agree on between two steps when nodes wait to join or are about to leave."""

from __future__ import annotations

from typing import Any

from megatron_lazarus.elastic.membership import Generation, Pending
from megatron_lazarus.json_exchange import broadcast_json
from megatron_lazarus.placing import plan_for, spread
from megatron_lazarus.planning.plan import Plan

CHANGE_LIMIT_S = 10.0
"""How long a change of the world waits for a checkpoint that is being written, before that counts as failed."""


def agree_on_change(engine: Any, pending: Pending, generation: Generation) -> tuple[list[str], list[str], bool]:
    """(nodes to admit, nodes that leave, whether there are too few), as rank 0 has heard; ``pending`` is what we have.

    Nodes that leave have handed over what they held. All ranks of ``generation`` call it.
    """
    joining, draining, short = broadcast_json([list(pending.join), list(pending.drain), pending.short], 0)
    leaving = [member.node for member in generation.members if member.node in draining]
    if joining or leaving or short:
        # What goes on into the next generation is not completed there.
        engine._checkpoint.finish(CHANGE_LIMIT_S)
    if leaving and len(leaving) < len(generation.members):
        _hand_over(engine, generation, leaving)
    return joining, leaving, short


def _hand_over(engine: Any, generation: Generation, leaving: list[str]) -> None:
    """Put what leaving nodes hold on those that stay."""
    staying = [
        rank
        for member in generation.members
        if member.node not in leaving
        for rank in range(member.first_rank, member.first_rank + member.ranks)
    ]
    proposal: Any = None
    if generation.rank == 0:
        nodes = [generation.rank_nodes[rank] for rank in staying]
        part = plan_for(engine.experts.loads, engine.config.experts, nodes)
        proposal = spread(part, staying, generation.rank_nodes).to_json()
    engine.experts.change_plan(Plan.from_json(broadcast_json(proposal, 0)), generation.rank)
