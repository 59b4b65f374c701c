"""LazarusEngine: owns a DeepSpeedEngine, the experts' records and the step protocol.

DeepSpeed keeps the dense part (module, reduction, optimizer, schedule, monitor). What depends on the whole model is
decided here, once for dense and experts together: gradient norm, clipping, and whether a step is committed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_lazarus.audit import audit
from megatron_lazarus.checkpoint.engine import ExpertCheckpoint
from megatron_lazarus.checkpoint.ledger import Ledger
from megatron_lazarus.config import BatchSizes, LazarusConfig
from megatron_lazarus.expert_state import ExpertState
from megatron_lazarus.guard import LossGuard
from megatron_lazarus.micro_batch import add_values, to_device
from megatron_lazarus.moe.context import StepContext
from megatron_lazarus.planning.batches import micro_batches
from megatron_lazarus.planning.plan import Plan
from megatron_lazarus.rebalancing import Rebalancer
from megatron_lazarus.recovery import Elastic
from megatron_lazarus.reporting.memory_note import MemoryNote
from megatron_lazarus.rng import seed_micro_batch
from megatron_lazarus.script_interface import ScriptInterface
from megatron_lazarus.script_loop import ScriptLoop
from megatron_lazarus.step import StepProtocol, StepResult
from megatron_lazarus.training_data import TrainingData

logger = logging.getLogger(__name__)

_EVALUATION = -1
"""In place of a step number, so that evaluation draws from streams of its own."""

Outcome = TypeVar("Outcome")

MicroBatchFn = Callable[[int, int], Any]
"""(step, micro-batch number) -> the model's arguments: a mapping, a sequence or one tensor."""


class LazarusEngine(ScriptInterface):
    """What ``megatron_lazarus.initialize`` returns. Attributes it does not have are those of its DeepSpeedEngine.

    ``train_batch`` drives whole steps from numbered micro-batches, and its result does not depend on the number of
    ranks. ``forward``/``backward``/``step`` serve loops that the script drives, as with DeepSpeed.
    """

    def __init__(
        self,
        ds_engine: Any,
        *,
        experts: ExpertState,
        sizes: BatchSizes,
        config: LazarusConfig,
        gradient_clipping: float,
        seed: int,
        elastic: Elastic | None = None,
        data: TrainingData | None = None,
    ) -> None:
        self.deepspeed_engine = ds_engine
        self.experts, self.sizes, self.config, self.seed = experts, sizes, config, seed
        self._log_memory, self._finished = MemoryNote(), False
        self.guard = LossGuard(config.guard)
        # Losses are divided by the number of micro-batches, whatever the number of ranks: reduction is a sum.
        ds_engine.gradient_average = False
        ds_engine._config.train_batch_size = sizes.global_batch_size
        ds_engine.tput_timer.batch_size = sizes.global_batch_size
        # A rank that hangs in DeepSpeed's reduction must be found as one that hangs in ours.
        ds_engine.allreduce_gradients = experts.peers.watched(ds_engine.allreduce_gradients)
        if any(p.dtype == torch.float64 for p in ds_engine.module.parameters()):
            ds_engine.communication_data_type = torch.float64
        self.protocol = StepProtocol(ds_engine, experts, sizes, self.guard, gradient_clipping)
        self.rebalancer = Rebalancer(ds_engine, experts, config.experts)
        self.protocol.wants_look = self.rebalancer.wants_look
        self.protocol.look_before = self.rebalancer.look_before
        self._checkpoint = self.protocol.checkpoint = ExpertCheckpoint(ds_engine, experts, config.checkpoint)
        experts.before_change = self._checkpoint.before_update
        self._elastic = elastic
        self.script_loop = ScriptLoop(self, data, elastic)
        if data is not None:
            ds_engine.training_dataloader = data
            data.begins = ds_engine.tput_timer.start
        if elastic is not None:
            elastic.attach(self)

    @property
    def rank(self) -> int:
        return self.experts.rank

    @property
    def world_size(self) -> int:
        return self.experts.plan.world_size

    @property
    def plan(self) -> Plan:
        """Which expert sits in which slot of which rank."""
        return self.experts.plan

    @property
    def _context(self) -> StepContext:
        return self.experts.context

    def __getattr__(self, name: str) -> Any:
        if name == "deepspeed_engine":
            raise AttributeError(name)
        return getattr(self.deepspeed_engine, name)

    # -- whole steps --------------------------------------------------------------------------------------------

    def train_batch(self, micro_batch_fn: MicroBatchFn) -> StepResult:
        """Run one step on the M micro-batches ``micro_batch_fn(step, 0..M-1)``, of which this rank does its share.

        The model returns its loss, or (loss, metrics). Under a coordinator the step survives the loss of other nodes,
        and between steps nodes join and leave; this node's own departure raises NodeDrained (a SystemExit, status 0).
        Raises StepRefused where the guard's policy is to stop, and CheckpointError after a save that failed where
        ``lazarus.checkpoint.strict`` is true.
        """
        if self._elastic is None:
            if self.rebalancer.due(self.global_steps):
                self.rebalancer.run(self.global_steps)
            result = self._train_step(micro_batch_fn)
            self.after_step()
            return result
        result = self._elastic.run(
            lambda: self._train_step(micro_batch_fn),
            lambda _: {"vote": self.protocol.vote_json()},
            lambda _: self.protocol.result(),
            between_steps=True,
        )
        self.after_step()
        return result

    def eval_batch(self, micro_batch_fn: MicroBatchFn, num_micro_batches: int) -> dict[str, float]:
        """Mean loss and metrics over ``micro_batch_fn(step, 0..num_micro_batches-1)``, without gradients."""
        return self._together(lambda: self._evaluate(micro_batch_fn, num_micro_batches))

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank passes true; every rank passes as many."""
        values = [torch.tensor(float(flag)) for flag in flags]
        return self._together(lambda: [total > 0 for total in self.protocol.all_reduce(values)])

    def finish(self) -> None:
        """Wait for the last checkpoint, and under a coordinator for every member; to be called once, at the end.

        Raises CheckpointError if it fails and ``lazarus.checkpoint.strict`` is true. Called again it does nothing.
        """
        if self._finished:
            return
        self._finished = True
        self._together(self._checkpoint.finish)
        self._checkpoint.close()
        if self._elastic is not None:
            self._elastic.finish({"steps": self.global_steps})

    @property
    def ledger(self) -> Ledger:
        """Lost tokens. Its ``planned_steps``, if known, should be set before the first step."""
        return self._checkpoint.history.ledger

    @property
    def newest_checkpoint(self) -> str | None:
        """The directory of the last checkpoint that is known, on all ranks, to be complete or was loaded."""
        return self._checkpoint.history.newest

    @property
    def joined_running(self) -> bool:
        """Whether this process came into a run that had begun: its state is the run's, not to be loaded."""
        return self._elastic is not None and self._elastic.joined_running

    @property
    def goodput(self) -> float | None:
        """Share of the run's wall time that went into steps that committed, 0..1; None without a coordinator."""
        return None if self._elastic is None else self._elastic.goodput.share

    def _together(self, attempt: Callable[[], Outcome]) -> Outcome:
        """Do something that all ranks do and whose result is JSON, again if nodes are lost meanwhile."""
        if self._elastic is None:
            return attempt()
        return self._elastic.run(attempt, lambda value: {"value": value}, lambda outcome: outcome["value"])

    def settle(self) -> None:
        """After a change of the world: nothing of an interrupted micro-batch remains."""
        self._context.ghost, self._context.phase = False, "forward"

    def _train_step(self, micro_batch_fn: MicroBatchFn) -> StepResult:
        started = time.monotonic()
        step, total = self.global_steps, self.sizes.micro_batches
        share = micro_batches(total, self.world_size)[self.rank]
        rounds = -(-total // self.world_size)
        self.module.train()
        self._context.loss_scale = 1.0 / total
        sums: dict[str, Tensor] = {}
        for index in range(rounds):
            # A rank without a micro-batch left forwards any one as a ghost, to take part in every collective.
            ghost = index >= len(share)
            number = 0 if ghost else share[index]
            arguments = micro_batch_fn(step, number)
            seed_micro_batch(self.seed, step, number)
            self.deepspeed_engine.set_gradient_accumulation_boundary(index == rounds - 1)
            self._context.ghost = ghost
            loss, metrics = self._forward(arguments)
            self._log_memory(self.experts)
            self._backward(loss * (0.0 if ghost else 1.0 / total))
            add_values(sums, {"loss": loss, **metrics}, ghost)
        self._context.ghost = False
        first, size = step * self.sizes.global_batch_size, self.sizes.global_batch_size
        result = self.protocol.finish(sums, total, f"samples {first}..{first + size - 1}")
        self.rebalancer.observe(time.monotonic() - started)
        self._checkpoint.history.stop_if_strict()
        return result

    def _evaluate(self, micro_batch_fn: MicroBatchFn, num_micro_batches: int) -> dict[str, float]:
        share = micro_batches(num_micro_batches, self.world_size)[self.rank]
        was_training = self.module.training
        self.module.eval()
        sums: dict[str, Tensor] = {}
        try:
            for index in range(-(-num_micro_batches // self.world_size)):
                ghost = self._context.ghost = index >= len(share)
                number = 0 if ghost else share[index]
                arguments = micro_batch_fn(self.global_steps, number)
                # Some routers sample in evaluation too; the same draws at every evaluation.
                seed_micro_batch(self.seed, _EVALUATION, number)
                with torch.no_grad():
                    loss, metrics = self._forward(arguments)
                add_values(sums, {"loss": loss, **metrics}, ghost)
        finally:
            self._context.ghost = False
            self.module.train(was_training)
        totals = self.protocol.all_reduce([sums[name] for name in sorted(sums)])
        return {name: value / num_micro_batches for name, value in zip(sorted(sums), totals, strict=True)}

    # -- details --------------------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """Rank, step and, under a coordinator, node and generation, for messages."""
        at = f"rank {self.rank}, step {self.global_steps}"
        return at if self._elastic is None else f"{at}, {self._elastic.membership.place}"

    def after_step(self) -> None:
        """What is due when a step is complete on all ranks."""
        if self._elastic is not None and self.global_steps % self.config.elastic.audit_interval == 0:
            self._together(lambda: [str(finding) for finding in audit(self)])

    # -- one micro-batch ----------------------------------------------------------------------------------------

    def _forward(self, arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        arguments = to_device(arguments, self.device)
        if isinstance(arguments, Mapping):
            output = self.deepspeed_engine.forward(**arguments)
        elif isinstance(arguments, Sequence):
            output = self.deepspeed_engine.forward(*arguments)
        else:
            output = self.deepspeed_engine.forward(arguments)
        return output if isinstance(output, tuple) else (output, {})

    def _backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self._context.phase = "backward"
        try:
            self.deepspeed_engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        finally:
            self._context.phase = "forward"

    # -- queries and checkpoints --------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        return self.deepspeed_engine.module

    def train_batch_size(self) -> int:
        return self.sizes.global_batch_size

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping, each expert counted once; None before the first step."""
        return self.protocol.grad_norm

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        wait: bool = False,
    ) -> bool:
        """Save dense state and expert records; ``latest`` moves only when all of it is on storage.

        With a section ``lazarus.checkpoint`` this returns when the copy to host memory has begun, unless ``wait``: the
        state must then change by steps alone until the next one. False: this save has failed; training may go on.
        Raises CheckpointError, before anything is written, for a ``client_state`` that could not be loaded safely, and
        where a failed save must stop the run.
        """
        state, attempts = self.script_loop.add_position(client_state or {}), itertools.count()
        return self._together(
            lambda: self._checkpoint.save(
                save_dir, tag, state, save_latest, exclude_frozen_parameters, again=next(attempts) > 0, wait=wait
            )
        )

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint written at any world size and placement; (None, None) if there is none.

        Without ``tag`` the newest undamaged one. In a process that has just joined a running job nothing is loaded: it
        has that job's state. Raises CheckpointError, before anything is changed, if there is only damage, or for a
        checkpoint of another model; ConfigError for a position in other ``training_data``.
        """
        if self._elastic is not None and self._elastic.is_newcomer:
            logger.info("%s: nothing is loaded, the state is that of the running job", self.place)
            return None, None
        loaded: list[tuple[str | None, dict[str, Any] | None]] = []

        def load() -> None:
            result = self._checkpoint.load(
                load_dir,
                tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
            self.experts.optimizer.load_steps()
            self.script_loop.take_position(result[1], load_module_only)
            loaded.append(result)
            if self.world_size > 1:
                # Where another rank has passed it, this one has loaded everything too.
                self.experts.peers.barrier()

        self._together(load)
        return loaded[-1]
