"""A script's forwards that belong to no step: in evaluation mode, or without gradients."""

from __future__ import annotations

from typing import Any

from megatron_lazarus.rng import generator_states, set_generator_states


def evaluate(engine: Any, elastic: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The model's output. It counts in no statistics of the step in progress.

    With ``elastic`` it is done again, with the same random numbers, if nodes are lost meanwhile; all ranks take part.
    """
    if elastic is None:
        return _forward(engine, inputs, options)
    before = generator_states(engine.device)
    outputs: list[Any] = []

    def attempt() -> None:
        set_generator_states(engine.device, before)
        outputs.append(_forward(engine, inputs, options))
        if engine.world_size > 1:
            # Where another rank has passed it, this one has its output.
            engine.experts.peers.barrier()

    elastic.run(attempt, lambda _: {"value": None}, lambda _: None)
    return outputs[-1]


def _forward(engine: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    loads = [layer.load.copy() for layer in engine.experts.layers]
    output = engine.deepspeed_engine.forward(*inputs, **options)
    for layer, load in zip(engine.experts.layers, loads, strict=True):
        layer.load[:] = load
    return output
