"""What a script asks of the engine within a step, each as something that can be done again.

A call holds what it was given; what it computes belongs to the attempt in progress. Done again, it draws the same
random numbers: a forward of the script's own batch those it drew first, one of ``training_data`` those of its
micro-batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_lazarus.rng import generator_states, seed_micro_batch, set_generator_states

if TYPE_CHECKING:
    from megatron_lazarus.script_loop import ScriptLoop


class Call(Protocol):
    """One call of the script."""

    def run(self, loop: ScriptLoop) -> None:
        """Do it, for the first time or again; all calls before it in the step are done."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in nested mappings and sequences, always in the same order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors(item)


def _version(tensor: Tensor) -> int:
    """Grows with every change in place."""
    return 0 if tensor.is_inference() else tensor._version


class _Drawing:
    """Has a computation draw the same random numbers whenever it is done again."""

    def __init__(self) -> None:
        self._before: list[Tensor] | None = None
        self._complete = False

    def run(self, device: torch.device, compute: Callable[[], Any]) -> Any:
        """``compute()``; once it was complete, a repetition leaves the generators as the script has them now."""
        now = generator_states(device)
        if self._before is None:
            self._before = now
        set_generator_states(device, self._before)
        result = compute()
        if self._complete:
            set_generator_states(device, now)
        self._complete = True
        return result


class Forward:
    """``engine(...)`` of a micro-batch that is trained on."""

    def __init__(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._inputs, self._options = inputs, options
        self._versions = [_version(tensor) for tensor in tensors((inputs, options))]
        self._drawing = _Drawing()
        self._output: Any = None
        self._handed: list[weakref.ref[Tensor]] = []
        self.backwarded = False

    def run(self, loop: ScriptLoop) -> None:
        engine, data = loop.engine, loop.data_in_use
        loop.begin_micro_batch()
        engine.deepspeed_engine.set_gradient_accumulation_boundary(loop.is_last_backward)
        engine._context.ghost = data is not None and data.number is None
        try:
            if data is not None:
                now = generator_states(engine.device)
                seed_micro_batch(engine.seed, engine.global_steps, data.number or 0)
                self._output = self._forward(loop)
                set_generator_states(engine.device, now)
            elif loop.can_repeat:
                self._output = self._drawing.run(engine.device, lambda: self._forward(loop))
            else:
                self._output = self._forward(loop)
        finally:
            engine._context.ghost = False
        engine._log_memory(engine.experts)

    def _forward(self, loop: ScriptLoop) -> Any:
        return loop.engine.deepspeed_engine.forward(*self._inputs, **self._options)

    def hand_over(self) -> Any:
        """The output, which belongs to the script now: nothing here keeps its graph alive."""
        output, self._output = self._output, None
        self._handed = [weakref.ref(tensor) for tensor in tensors(output)]
        return output

    def index_of(self, tensor: Tensor) -> int | None:
        """Which of the tensors that the script got this one is."""
        return next((index for index, reference in enumerate(self._handed) if reference() is tensor), None)

    def tensor(self, index: int) -> Tensor | None:
        """That one, as it is now: of the newest repetition, or the script's own."""
        if self._output is None:
            return self._handed[index]()
        return list(tensors(self._output))[index]

    def forget(self) -> None:
        """Its graph is not needed any more."""
        self._output = None

    @property
    def is_outdated(self) -> bool:
        """Whether the script holds an output that has been computed again since."""
        return bool(self._handed) and self._output is not None

    @property
    def is_with_script(self) -> bool:
        """Whether the script has its output, and may compute a loss from it."""
        return bool(self._handed) and not self.backwarded

    @property
    def is_overwritten(self) -> bool:
        """Whether an input was changed in place meanwhile."""
        return [_version(tensor) for tensor in tensors((self._inputs, self._options))] != self._versions


class Backward:
    """``engine.backward(loss)``. ``source``: the forward, and which of its outputs ``loss`` is; None: none of them."""

    def __init__(
        self, loss: Tensor, source: tuple[Forward, int] | None, retain_graph: bool, scale_wrt_gas: bool, no_sync: bool
    ) -> None:
        self._loss: Tensor | None = loss if source is None else None
        self.source = source
        self._retain_graph, self._scale_wrt_gas, self._no_sync = retain_graph, scale_wrt_gas, no_sync
        if source is not None:
            source[0].backwarded = True

    def run(self, loop: ScriptLoop) -> None:
        data = loop.data_in_use
        if loop.dropped is None:
            self._backward(loop, ghost=data is not None and data.number is None)
        if data is not None:
            data.backwarded()

    def _backward(self, loop: ScriptLoop, ghost: bool) -> None:
        loss = self._loss if self.source is None else self.source[0].tensor(self.source[1])
        assert loss is not None, "a backward without a loss is never done again"
        engine = loop.engine
        scale = engine._context.loss_scale = loop.loss_scale(self._scale_wrt_gas)
        engine.deepspeed_engine.set_gradient_accumulation_boundary(loop.is_last_backward)
        was_inside, engine.deepspeed_engine.inside_no_sync_ctxt = (
            engine.deepspeed_engine.inside_no_sync_ctxt,
            self._no_sync or loop.inside_function,
        )
        engine._context.ghost = ghost
        try:
            engine._backward(loss * (0.0 if ghost else scale), self._retain_graph)
        finally:
            engine._context.ghost = False
            engine.deepspeed_engine.inside_no_sync_ctxt = was_inside
        loop.count(loss, ghost)
        if not self._retain_graph:
            self._loss = None
            if self.source is not None:
                self.source[0].forget()


class ZeroGrad:
    """``engine.zero_grad()``."""

    def run(self, loop: ScriptLoop) -> None:
        loop.zero_grad()


class Function:
    """The function that ``engine.run_step`` was given."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._drawing = _Drawing()
        self.result: Any = None

    def run(self, loop: ScriptLoop) -> None:
        with loop.inside():
            if loop.can_repeat:
                self.result = self._drawing.run(loop.engine.device, self._function)
            else:
                self.result = self._function()


class Step:
    """``engine.step()``: it completes the step where no micro-batch is missing.

    ``completes``: whether it has. Done again with fewer ranks it may not any more: there is more to do for each.
    """

    def __init__(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        self._lr_kwargs = lr_kwargs
        self.completes = False

    def run(self, loop: ScriptLoop) -> None:
        self.completes = loop.is_complete
        if self.completes:
            loop.finish(self._lr_kwargs)
        else:
            loop.micro_step()
