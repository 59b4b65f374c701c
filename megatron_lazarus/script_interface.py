"""What scripts call in loops that they drive themselves, as they call DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from megatron_lazarus.script_loop import ScriptLoop

Outcome = TypeVar("Outcome")


class ScriptInterface:
    """Part of LazarusEngine."""

    script_loop: ScriptLoop

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Forward of the module, as DeepSpeed's.

        In training mode with gradients it is part of a step. Else it is an evaluation, in which all ranks take part.
        """
        return self.script_loop.forward(inputs, kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of one micro-batch of this rank's ``gradient_accumulation_steps``; returns the scaled loss.

        Under a coordinator the engine repeats it after a failure if ``loss`` is what ``forward`` returned, or a part
        of that; else the step is dropped, unless it is within ``run_step``. Raises RuntimeError without a coordinator
        if the script's own batches cannot be shared out evenly.
        """
        return self.script_loop.backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro-step; at the accumulation boundary take the optimizer step, unless it must be skipped."""
        self.script_loop.step(lr_kwargs)

    def run_step(self, fn: Callable[[], Outcome]) -> Outcome:
        """``fn()``, which does forwards and backwards, and ``step()``: for losses computed outside of the engine.

        ``fn`` does one micro-batch, or all ``gradient_accumulation_steps()`` of the step, as it reads that then. If
        nodes are lost meanwhile it is called again, with the random numbers of the first time, and so are those before
        it in the same step: whatever else it does must bear repetition. Batches of the script's own it must get from
        outside, or keep; those of ``training_data`` it may fetch. Returns what the last call of ``fn`` returned.
        """
        return self.script_loop.run_step(fn)

    def zero_grad(self) -> None:
        """Drop the gradients accumulated so far, of the dense part and of the experts."""
        self.script_loop.clear_gradients()

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that each rank does in the step in progress."""
        return self.script_loop.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch in progress is the last one of its step on this rank."""
        return self.script_loop.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """As DeepSpeed's: the script decides from now on. Batches of ``training_data`` know it themselves."""
        self.script_loop.set_boundary(is_boundary)

    @property
    def lost_samples(self) -> int:
        """Samples of the script's own batches that nobody trains on, because nodes were lost or steps dropped."""
        return self.script_loop.lost_samples

    @property
    def dropped_steps(self) -> int:
        """Steps that a failure interrupted and that could not be repeated."""
        return self.script_loop.dropped_steps
