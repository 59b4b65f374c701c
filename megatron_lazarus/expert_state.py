"""The experts of one engine as a whole: records of all layers, their gradients and optimizer, and their placement."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lazarus.checkpoint.parameter_groups import ParameterGroups
from megatron_lazarus.drift import PATIENCE
from megatron_lazarus.moe.communication import Communicator
from megatron_lazarus.moe.context import StepContext
from megatron_lazarus.moe.dispatch import IntArray, Quotas, replica_quotas
from megatron_lazarus.moe.layer import MoELayer
from megatron_lazarus.moe.migration import migrate
from megatron_lazarus.moe.optimizer import ExpertOptimizer
from megatron_lazarus.moe.records import RecordBuffer
from megatron_lazarus.moe.replicas import Backend, ReplicaGradients
from megatron_lazarus.planning.migration import migration
from megatron_lazarus.planning.plan import Plan

Holdings = tuple[tuple[int, ...], ...]
"""The experts whose records a rank has, layer by layer, in slot order."""


class ExpertsLost(RuntimeError):
    """No member holds some experts, and there is no checkpoint to take them from."""


class ExpertState:
    """What is exchanged, clipped, stepped, saved and moved of the experts, for one rank of one world.

    ``buffers[layer]`` are this rank's records under ``plan``; without a plan they are empty, until ``change_plan``.
    ``base`` is the client optimizer, whose options and learning rates the experts follow; ``parameter_groups`` says
    what the script has put into its groups. ``loads[layer]`` are the tokens of each expert a step, in the mean of the
    committed ones of about ``load_steps``, the older the less they count; before the first one, equal. ``counted`` is
    how many steps they stand for. ``before_change`` is called before records move.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        buffers: Sequence[RecordBuffer],
        plan: Plan | None,
        context: StepContext,
        rank: int,
        base: torch.optim.Optimizer,
        parameter_groups: ParameterGroups,
        exchange: Backend = "all_to_all",
        quotas: Quotas = replica_quotas,
        load_steps: int = 50,
    ) -> None:
        self.layers, self.context = layers, context
        self.peers = Communicator()
        self._base, self._backend = base, exchange
        self._plan = plan
        self.buffers, self.rank = list(buffers), rank
        self.parameter_groups = parameter_groups
        self.loads = [np.ones(layer.num_experts) for layer in layers]
        self.counted = 0.0
        self._recent: deque[list[IntArray]] = deque(maxlen=PATIENCE)
        self._load_memory = 1.0 - 1.0 / max(2, load_steps)
        self.quotas = quotas
        self.before_change: Callable[[], None] = lambda: None
        self.last_moved_bytes = 0
        for layer in layers:
            layer.bind_context(context)
            layer.quotas = quotas
        if plan is not None:
            self._bind(buffers, plan, rank)

    @property
    def plan(self) -> Plan:
        """Which expert sits in which slot of which rank. Raises RuntimeError before the first one."""
        if self._plan is None:
            raise RuntimeError("the experts have no place yet: this process has not joined a world")
        return self._plan

    def _bind(self, buffers: Sequence[RecordBuffer], plan: Plan, rank: int) -> None:
        """Make layers, gradient exchange, norm and optimizer follow ``plan`` and ``buffers``."""
        self.buffers, self._plan, self.rank = list(buffers), plan, rank
        nodes = np.asarray(plan.rank_nodes, dtype=np.int64)
        holders = []
        self.norm_gradients: list[Tensor] = []
        for layer, buffer, placement in zip(self.layers, buffers, plan.layers, strict=True):
            layer.bind_placement(placement.replica_counts(), rank, nodes, self.peers)
            holders.append([placement.holders(expert) for expert in range(placement.num_experts)])
            for expert, slot in buffer.first_slots().items():
                if holders[-1][expert][0] == rank:
                    # The first holder counts the expert in the norm; all holders have the same gradient.
                    self.norm_gradients.append(buffer.gradients[slot])
        self._exchange = ReplicaGradients(buffers, holders, rank, plan.world_size, self.peers, self._backend)
        self.optimizer = ExpertOptimizer(self._base, buffers)

    # -- a step -------------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Give every replica the sum of its expert's gradients."""
        self._exchange.reduce()

    def scale_gradients(self, factor: float) -> None:
        for buffer in self.buffers:
            buffer.gradients.mul_(factor)

    def commit(self) -> None:
        """Step records and router biases."""
        self.optimizer.step()
        before = self.counted * self._load_memory
        self.counted = before + 1.0
        for index, layer in enumerate(self.layers):
            self.loads[index] = (self.loads[index] * before + layer.load) / self.counted
            layer.gate.update_expert_bias(torch.from_numpy(layer.load))
        self._recent.append([layer.load.copy() for layer in self.layers])

    def forget_old_loads(self) -> None:
        """Only the last steps count in ``loads`` from now on: those in which they were seen to have changed."""
        if not self._recent:
            return
        self.loads = [np.mean(steps, axis=0, dtype=np.float64) for steps in zip(*self._recent, strict=True)]
        self.counted = float(len(self._recent))

    def clear_gradients(self) -> None:
        for buffer in self.buffers:
            buffer.gradients.zero_()

    def clear_step(self) -> None:
        """Forget gradients and the load of the step."""
        self.clear_gradients()
        for layer in self.layers:
            layer.load[:] = 0

    def rank_tokens(self) -> npt.NDArray[np.float64]:
        """Tokens that each rank's experts process according to ``loads``, all layers together, shape [ranks]."""
        tokens = np.zeros(self.plan.world_size)
        for load, placement in zip(self.loads, self.plan.layers, strict=True):
            counts = placement.replica_counts()
            tokens += (load / counts.sum(axis=1)) @ counts
        return tokens

    # -- changes of placement -----------------------------------------------------------------------------------

    def moved_bytes(self, plan: Plan) -> int:
        """Bytes that a change to ``plan`` brings to the rank that gets most, layer by layer."""
        return self._arriving_bytes(migration(self.plan, plan).moves)

    def _arriving_bytes(self, moves: IntArray) -> int:
        """Of ``Migration.moves``: the most that comes to one rank from others, layer by layer."""
        crossing = moves[moves[:, 2] != moves[:, 4]]
        total = 0
        for index, buffer in enumerate(self.buffers):
            arriving = np.bincount(crossing[crossing[:, 0] == index, 4])
            total += int(arriving.max(initial=0)) * buffer.layout.nbytes
        return total

    @property
    def holdings(self) -> Holdings:
        """What this rank has, whatever the plan says: they differ after a migration that was interrupted."""
        return tuple(buffer.experts for buffer in self.buffers)

    def adopt(self, layer: int, records: RecordBuffer) -> None:
        """Hold further records of a layer, beyond the slots, until the next change of plan."""
        self.buffers[layer] = self.buffers[layer].extended(records)

    def change_plan(self, plan: Plan, rank: int, held: Plan | None = None) -> int:
        """Move records until they lie as ``plan`` says; returns how many crossed between ranks.

        Every rank of the world calls it with the same plans, and with no gradients that still matter. ``held`` is
        what the ranks of ``plan`` hold now, by default the plan so far. If another rank fails meanwhile, the exception
        of its collective passes, and every record that this rank had or got is in its ``holdings``.
        """
        self.before_change()
        moves = migration(held or self.plan, plan).moves
        self.last_moved_bytes = self._arriving_bytes(moves)
        crossing = 0
        for index, placement in enumerate(plan.layers):
            mine = moves[moves[:, 0] == index][:, 2:].tolist()
            crossing += sum(source != target for source, _, target, _ in mine)
            old = self.buffers[index]
            moved = [tuple(move) for move in mine]
            new = migrate(old, placement.slots[rank], moved, rank, plan.world_size, self.peers)
            try:
                # Behind it every rank has what it was sent: only then may a sender let go of its last copy.
                if plan.world_size > 1:
                    self.peers.barrier()
            except BaseException:
                self.buffers[index] = old.extended(new)
                raise
            self.layers[index].experts.bind(new)
            self.buffers[index] = new
        self._bind(self.buffers, plan, rank)
        return crossing


def lost_records(holdings: Mapping[int, Holdings], num_experts: Sequence[int]) -> list[tuple[int, int]]:
    """(layer, expert) that no rank holds. ``holdings`` by rank, ``num_experts`` by layer."""
    return [
        (layer, expert)
        for layer, count in enumerate(num_experts)
        for expert in range(count)
        if not any(expert in held[layer] for held in holdings.values())
    ]
