"""The experts of one engine as a whole: records of all layers, their gradients and optimizer, and their placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lazarus.moe.context import StepContext
from megatron_lazarus.moe.layer import MoELayer
from megatron_lazarus.moe.migration import migrate
from megatron_lazarus.moe.optimizer import ExpertOptimizer
from megatron_lazarus.moe.records import RecordBuffer
from megatron_lazarus.moe.replicas import Backend, ReplicaGradients
from megatron_lazarus.planning.migration import Missing, migration
from megatron_lazarus.planning.plan import Plan


class ExpertsLost(RuntimeError):
    """No rank holds some experts; ``missing`` are the slots that wanted them."""

    def __init__(self, missing: Sequence[Missing]) -> None:
        self.missing = tuple(missing)
        names = sorted({(slot.layer, slot.expert) for slot in missing})
        listed = ", ".join(f"layer {layer} expert {expert}" for layer, expert in names[:10])
        super().__init__(f"{len(names)} experts have no replica left: {listed}{', …' if len(names) > 10 else ''}")


class ExpertState:
    """What is exchanged, clipped, stepped, saved and moved of the experts, for one rank of one world.

    ``buffers[layer]`` are this rank's records under ``plan``. ``base`` is the client optimizer, whose options and
    learning rates the experts follow.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        buffers: Sequence[RecordBuffer],
        plan: Plan,
        context: StepContext,
        rank: int,
        base: torch.optim.Optimizer,
    ) -> None:
        self.layers, self.context, self.exchange_backend = layers, context, "all_to_all"
        self._base = base
        self._bind(buffers, plan, rank)

    exchange_backend: Backend

    def _bind(self, buffers: Sequence[RecordBuffer], plan: Plan, rank: int) -> None:
        """Make layers, gradient exchange, norm and optimizer follow ``plan`` and ``buffers``."""
        self.buffers, self.plan, self.rank = list(buffers), plan, rank
        nodes = np.asarray(plan.rank_nodes, dtype=np.int64)
        holders = []
        self.norm_gradients: list[Tensor] = []
        for layer, buffer, placement in zip(self.layers, buffers, plan.layers, strict=True):
            layer.bind_placement(placement.replica_counts(), rank, nodes)
            holders.append([placement.holders(expert) for expert in range(placement.num_experts)])
            for expert, slot in buffer.first_slots().items():
                if holders[-1][expert][0] == rank:
                    # The first holder counts the expert in the norm; all holders have the same gradient.
                    self.norm_gradients.append(buffer.gradients[slot])
        self._exchange = ReplicaGradients(buffers, holders, rank, plan.world_size, backend=self.exchange_backend)
        self.optimizer = ExpertOptimizer(self._base, buffers)

    def reduce_gradients(self) -> None:
        """Give every replica the sum of its expert's gradients."""
        self._exchange.reduce()

    def scale_gradients(self, factor: float) -> None:
        for buffer in self.buffers:
            buffer.gradients.mul_(factor)

    def clear_step(self) -> None:
        """Forget gradients and the load of the step."""
        for buffer in self.buffers:
            buffer.gradients.zero_()
        for layer in self.layers:
            layer.load[:] = 0

    def commit(self) -> None:
        """Step records and router biases."""
        self.optimizer.step()
        for layer in self.layers:
            layer.gate.update_expert_bias(torch.from_numpy(layer.load))

    def change_plan(
        self, plan: Plan, rank: int, previous_ranks: Sequence[int | None] | None = None, group: Any = None
    ) -> int:
        """Move records until they lie as ``plan`` says; returns how many crossed between ranks.

        Every rank of the world calls it with the same plan, and with no gradients that still matter. ``rank`` is this
        one's in ``plan``; ``previous_ranks`` says which of the old plan's ranks became which of the new one's, None
        for a new rank. Raises ExpertsLost, before anything is moved, if some expert has no replica.
        """
        moves = migration(self.plan, plan, previous_ranks=previous_ranks)
        if moves.missing:
            raise ExpertsLost(moves.missing)
        buffers = []
        crossing = 0
        for index, placement in enumerate(plan.layers):
            mine = moves.moves[moves.moves[:, 0] == index][:, 2:].tolist()
            crossing += sum(source != target for source, _, target, _ in mine)
            buffer = migrate(self.buffers[index], placement.slots[rank], [tuple(move) for move in mine], rank, group)
            self.layers[index].experts.bind(buffer)
            # Lets go of the old buffer: one layer at a time has two.
            self.buffers[index] = buffer
            buffers.append(buffer)
        self._bind(buffers, plan, rank)
        return crossing
