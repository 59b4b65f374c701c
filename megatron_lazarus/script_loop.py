"""Loops that a script drives itself: ``loss = engine(batch); engine.backward(loss); engine.step()``.

Under a coordinator the calls of the step in progress are kept, with what they were given. When a node is lost, every
survivor does its own calls again in the next generation, up to where its script stands; then all stand in the same
sequence of collectives, wherever they were before. A step whose calls some rank cannot repeat is dropped by all: its
forwards still run, for their outputs, and nothing of it is applied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_lazarus.script_calls import Backward, Call, Forward, Function, Step, ZeroGrad
from megatron_lazarus.script_evaluation import evaluate
from megatron_lazarus.step_in_progress import StepInProgress
from megatron_lazarus.training_data import TrainingData

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

POSITION = "lazarus_script_loop"
"""The key in a checkpoint's client state."""

OUTSIDE = "its loss was computed outside of the engine (engine.run_step can repeat that)"
OVERWRITTEN = "the inputs of one of its micro-batches were changed in place"


class ScriptLoop:
    """The calls of one engine's script. ``data``: the ``training_data`` of ``initialize``, if any.

    ``lost_samples``: of the script's own batches, so many went with ranks that were lost in a step, or with steps that
    were dropped. ``dropped_steps`` were computed in part and given up. Both are equal on all ranks.
    """

    def __init__(self, engine: Any, data: TrainingData | None, elastic: Any) -> None:
        self.engine, self.data, self._elastic = engine, data, elastic
        self.can_repeat = elastic is not None
        self.tell: Callable[..., None] = lambda kind, **fields: None
        self.lost_samples = self.dropped_steps = 0
        self._takes_outputs: bool | None = None
        self._calls: list[Call] = []
        self._boundary: bool | None = None
        self.inside_function = False
        self._step = StepInProgress()
        if data is not None:
            data.place = lambda: (engine.rank, engine.world_size)

    # -- what the script calls ----------------------------------------------------------------------------------

    def forward(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Forward of the module: part of a step in training mode with gradients, else an evaluation."""
        if not (torch.is_grad_enabled() and self.engine.module.training):
            return evaluate(self.engine, None if self.inside_function else self._elastic, inputs, options)
        call = Forward(inputs, options)
        self._do(call)
        return call.hand_over()

    def backward(self, loss: Tensor, retain_graph: bool, scale_wrt_gas: bool) -> Tensor:
        """Backward of one micro-batch. Raises RuntimeError if the batches cannot be shared out over the ranks."""
        if self.data_in_use is None and not self.can_repeat:
            self._refuse_uneven_batches()
        source = self._source_of(loss) if self.can_repeat and not self.inside_function else None
        if self.can_repeat and not self.inside_function and self._step.dropped is None:
            self._takes_outputs = source is not None
            if source is None and any(isinstance(call, Forward) and call.is_outdated for call in self._calls):
                raise RuntimeError(
                    f"{self.engine.place}: a loss was computed from outputs of before a failure, after others had been "
                    "taken as they are; engine.run_step can repeat such a step"
                )
        accumulation = self.accumulation if scale_wrt_gas else 1
        no_sync = self.engine.deepspeed_engine.inside_no_sync_ctxt
        self._do(Backward(loss, source, retain_graph, scale_wrt_gas, no_sync))
        return loss / accumulation

    def step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Count a micro-step; where the step is complete, take it."""
        self._do(Step(lr_kwargs))

    def run_step(self, function: Callable[[], Outcome]) -> Outcome:
        """See ``LazarusEngine.run_step``."""
        call = Function(function)
        self._do(call)
        self._do(Step(None))
        result: Outcome = call.result
        return result

    def clear_gradients(self) -> None:
        """``engine.zero_grad()``: drop what was accumulated in this step."""
        if self._calls and not self.inside_function:
            self._do(ZeroGrad())
        else:
            self.zero_grad()

    @property
    def accumulation(self) -> int:
        """Micro-batches that this rank does in the step in progress."""
        if self.data is not None and not self._step.feeds_itself:
            return self.data.rounds
        return self._step.accumulation or int(self.engine.deepspeed_engine.gradient_accumulation_steps())

    @property
    def is_boundary(self) -> bool:
        """Whether the micro-batch that the script has is the last one of its step on this rank."""
        if self.data_in_use is not None:
            return self.data_in_use.has_last
        if self._boundary is not None:
            return self._boundary
        return self._step.micro_steps + 1 >= self.accumulation

    def set_boundary(self, boundary: bool) -> None:
        """From now on the script says which micro-batch is the last one; those of ``training_data`` know it."""
        self._boundary = boundary

    # -- what calls ask for -------------------------------------------------------------------------------------

    @property
    def dropped(self) -> str | None:
        """Why the step in progress is dropped; None while it is not."""
        return self._step.dropped

    @property
    def data_in_use(self) -> TrainingData | None:
        """The training data, where the micro-batch in progress is from there."""
        return self.data if self.data is not None and self.data.in_use else None

    def begin_micro_batch(self) -> None:
        """A forward begins. Raises RuntimeError if its batch is of a later step."""
        self._step.feeds_itself = self.data_in_use is None
        if self.data is not None and self.data.is_ahead:
            raise RuntimeError(
                f"{self.engine.place}: a batch of the next step is forwarded before this one is complete; a step has "
                f"{self.data.rounds} micro-batches (engine.gradient_accumulation_steps()), then comes engine.step()"
            )

    @property
    def is_last_backward(self) -> bool:
        """Whether no further backward of this step comes after the next one."""
        data = self.data_in_use
        return self.is_boundary if data is None else data.round + 1 >= data.rounds

    @property
    def is_complete(self) -> bool:
        """Whether ``engine.step()`` ends the step now."""
        data = self.data_in_use
        return self.is_boundary if data is None else data.round >= data.rounds

    def loss_scale(self, scale_wrt_gas: bool) -> float:
        """Factor between a micro-batch's loss and what is differentiated: the mean over all micro-batches."""
        if self.data_in_use is not None:
            return 1.0 / self.engine.sizes.micro_batches
        return 1.0 / (self.engine.world_size * (self.accumulation if scale_wrt_gas else 1))

    def count(self, loss: Tensor, ghost: bool) -> None:
        """A backward of ``loss`` is done."""
        self._step.add(loss.detach().double() * (0.0 if ghost else 1.0), ghost)

    def micro_step(self) -> None:
        self.engine.deepspeed_engine.micro_steps += 1
        self.engine.deepspeed_engine._step_applied = False
        self._step.micro_steps += 1
        self._step.micro_steps_done = max(self._step.micro_steps_done, self._step.micro_steps)

    def zero_grad(self) -> None:
        """Of the dense part and of the experts."""
        self.engine.deepspeed_engine.zero_grad()
        self.engine.experts.clear_gradients()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Calls made within are part of one that is repeated as a whole; dense gradients are reduced at its end."""
        self.inside_function, self._step.unreduced = True, True
        before = self._step.backwards
        if self.data is not None:
            self.data.lends = True
        try:
            yield
        finally:
            self.inside_function = False
            if self.data is not None:
                self.data.lends = False
        for _ in range(self._step.backwards - before - 1):
            self.micro_step()

    def finish(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Reduce, vote, decide; or, where the step is dropped, see to it that all have come so far."""
        engine, step = self.engine, self._step
        if step.dropped is not None:
            if engine.world_size > 1:
                engine.experts.peers.barrier()
            engine.protocol.abandon()
            return
        if step.loss_sum is None:
            raise RuntimeError(f"{engine.place}: step() needs a backward() first")
        engine.deepspeed_engine.set_gradient_accumulation_boundary(True)
        if step.unreduced:
            engine.deepspeed_engine.allreduce_gradients()
        count, samples = engine.world_size * step.backwards, "the script's own batches"
        if self.data_in_use is not None:
            size = engine.sizes.global_batch_size
            first = self.data_in_use.step * size
            count, samples = engine.sizes.micro_batches, f"samples {first}..{first + size - 1} of the order"
        engine.protocol.finish({"loss": step.loss_sum}, count, samples, lr_kwargs)
        engine._checkpoint.history.stop_if_strict()

    # -- doing calls, once or again -----------------------------------------------------------------------------

    def _do(self, call: Call) -> None:
        """Do ``call``; if nodes are lost meanwhile, again, after all calls of the step before it."""
        if self.inside_function:
            call.run(self)
            return
        self._calls.append(call)
        step = self._step
        while True:
            try:
                self._catch_up()
                break
            except Exception as error:
                if self._elastic is None:
                    raise
                if self._elastic.survive(error) is not None:
                    break
        if self._step is not step:
            # Completed by another member, whose outcome has ended it here.
            self.engine.after_step()
        elif isinstance(call, Step) and call.completes:
            self._complete(step)
            self.engine.after_step()
        elif not self.can_repeat:
            self._calls.clear()
            step.next_call = 0

    def _catch_up(self) -> None:
        step = self._step
        if not step.ready:
            self._prepare()
        while step.next_call < len(self._calls):
            self._calls[step.next_call].run(self)
            step.next_call += 1

    def _prepare(self) -> None:
        """Let the world and the places of experts change where that is due; then the step begins, or begins again."""
        engine, step = self.engine, self._step
        if self._elastic is not None:
            self._elastic.before_step()
            step.present = self._elastic.present
            step.holders |= step.present
        elif engine.rebalancer.due(engine.global_steps):
            engine.rebalancer.run(engine.global_steps)
        if not step.begun:
            step.begin(int(engine.deepspeed_engine.gradient_accumulation_steps()), engine.micro_steps)
        step.restart()
        engine.deepspeed_engine.micro_steps = step.micro_steps_before
        if self.data is not None:
            self.data.begin_again()

    def _complete(self, step: StepInProgress) -> None:
        seconds = time.monotonic() - step.started
        if step.dropped is not None:
            outcome: dict[str, Any] = {"dropped": step.dropped}
        else:
            outcome = {"vote": self.engine.protocol.vote_json()}
        if self._elastic is not None:
            self._elastic.completed(outcome, seconds)
        else:
            self.ended()
        self.engine.rebalancer.observe(seconds)

    def ended(self) -> None:
        """The step in progress is over: here, or, for this rank to take over, on another member."""
        step, in_use = self._step, self.data_in_use
        if not step.begun:
            return
        where = self.engine.global_steps - (step.dropped is None)
        if step.dropped is not None:
            self.dropped_steps += 1
            told = {"steps": where, "total": self.dropped_steps, "why": step.dropped}
            self._say("step dropped", f"step {where} is dropped: {step.dropped}", **told)
            self.engine.protocol.abandon()
        if in_use is not None:
            in_use.dropped() if step.dropped is not None else in_use.committed()
        elif lost := len(step.lost) * step.accumulation * self.engine.sizes.micro_batch_size:
            self.lost_samples += lost
            text = f"{lost} samples of step {where} are lost, {self.lost_samples} in all"
            self._say("samples lost", text, steps=where, samples=lost, total=self.lost_samples)
        self._calls.clear()
        self._step = StepInProgress()

    def _say(self, kind: str, text: str, **fields: Any) -> None:
        logger.log(logging.WARNING if self.engine.rank == 0 else logging.DEBUG, "%s", text)
        if self.engine.rank == 0:
            self.tell(kind, **fields)

    # -- between generations ------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What this rank tells the others when a generation begins: see ``settle``."""
        step = self._step
        return {
            "begun": step.begun,
            "why": (step.dropped or self._why_not_again()) if step.begun else None,
            "accumulation": step.accumulation,
            "holders": sorted(step.holders),
            "rounds": step.micro_steps_done,
            "data": self.data.report() if self.data is not None else [],
        }

    def settle(self, reports: Sequence[Mapping[str, Any] | None], current: Sequence[bool]) -> None:
        """After a change of the world: the step in progress begins again, or is dropped, alike on all ranks.

        ``reports`` by rank, None of newcomers; ``current``: whether a rank's is about the operation in progress now.
        """
        step = self._step
        step.ready = False
        begun = [one for one, now in zip(reports, current, strict=True) if now and one is not None and one["begun"]]
        if self.data is not None:
            # A script that was told that there is more to the step goes on with it.
            least = 1 + max((report["rounds"] for report in begun), default=0)
            self.data.share_out([report["data"] if report is not None else [] for report in reports], least)
        if not begun:
            return
        step.accumulation = begun[0]["accumulation"]
        step.holders.update(*(one["holders"] for one in begun))
        step.dropped = next((one["why"] for one in begun if one["why"] is not None), None)

    def _why_not_again(self) -> str | None:
        """Why the calls of the step in progress cannot be repeated; None: they can."""
        forwards = [call for call in self._calls if isinstance(call, Forward)]
        backwards = [call for call in self._calls if isinstance(call, Backward)]
        if any(call.source is None for call in backwards):
            return OUTSIDE
        if not self._takes_outputs and any(call.is_with_script for call in forwards):
            # It may be about to compute a loss from them.
            return OUTSIDE
        return OVERWRITTEN if any(call.is_overwritten for call in forwards) else None

    # -- details ------------------------------------------------------------------------------------------------

    def _source_of(self, loss: Tensor) -> tuple[Forward, int] | None:
        for call in reversed(self._calls):
            if isinstance(call, Forward) and (index := call.index_of(loss)) is not None:
                return call, index
        return None

    def _refuse_uneven_batches(self) -> None:
        micro_batches, world_size = self.engine.sizes.micro_batches, self.engine.world_size
        if micro_batches % world_size:
            raise RuntimeError(
                f"{micro_batches} micro-batches of a global batch do not divide by {world_size} ranks; a loop of your "
                "own needs that it does, engine.train_batch does not, and a dataset given as training_data neither"
            )

    # -- state of the run ---------------------------------------------------------------------------------------

    def add_position(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """``client_state`` for a checkpoint: with the position in the training data, and what was lost."""
        if self.data is None and not (self.lost_samples or self.dropped_steps):
            return dict(client_state)
        position = self.data.state() if self.data is not None else None
        return {**client_state, POSITION: {**self.counters(), "training_data": position}}

    def take_position(self, client_state: dict[str, Any] | None, module_only: bool) -> None:
        """Take what ``add_position`` has added out of a checkpoint's client state, and unless ``module_only`` over."""
        position = (client_state or {}).pop(POSITION, None)
        if position is None or module_only:
            return
        self.lost_samples, self.dropped_steps = position["lost_samples"], position["dropped_steps"]
        if self.data is not None and position["training_data"] is not None:
            self.data.restore(position["training_data"])

    def counters(self) -> dict[str, int]:
        """What a newcomer takes over from another rank, which may be in a step that is about to be repeated."""
        step = self._step
        return {
            "data_step": self.data.step if self.data is not None else 0,
            "lost_samples": self.lost_samples,
            "dropped_steps": self.dropped_steps,
            "micro_steps": step.micro_steps_before if step.begun else self.engine.micro_steps,
        }

    def adopt(self, counters: Mapping[str, int]) -> None:
        """Take over ``counters()`` of a run in progress."""
        self.lost_samples, self.dropped_steps = counters["lost_samples"], counters["dropped_steps"]
        self.engine.deepspeed_engine.micro_steps = counters["micro_steps"]
        if self.data is not None:
            self.data.join(counters["data_step"])
