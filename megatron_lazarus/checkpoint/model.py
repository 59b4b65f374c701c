"""What is saved: the experts of one rank, and by what names and shapes a checkpoint of another model is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from megatron_lazarus.checkpoint.files import CheckpointError


class Experts(Protocol):
    """The records of this rank and where all records are."""

    layers: Sequence[Any]
    buffers: list[Any]
    parameter_groups: Any
    context: Any
    rank: int

    @property
    def plan(self) -> Any: ...


def describe(module: Any, experts: Experts) -> dict[str, Any]:
    """Names and shapes of everything."""
    dense = {name: list(p.shape) for name, p in module.named_parameters()}
    layers = [
        {
            "num_experts": layer.num_experts,
            "tensors": {spec.name: list(spec.shape) for spec in buffer.layout.tensors},
            **_buffers(buffer.layout),
        }
        for layer, buffer in zip(experts.layers, experts.buffers, strict=True)
    ]
    state = sorted({name for buffer in experts.buffers for name in buffer.layout.state_names})
    return {"dense": dense, "moe_layers": layers, "expert_optimizer_state": state}


def _buffers(layout: Any) -> dict[str, Any]:
    """Nothing for a layer whose experts have none, as in all checkpoints before there could be any."""
    return {"buffers": {spec.name: list(spec.shape) for spec in layout.buffers}} if layout.buffers else {}


def check_model(model: Mapping[str, Any], directory: str, here: dict[str, Any], with_state: bool) -> None:
    """Raise CheckpointError, naming what differs, if a checkpoint of ``model`` is not of the model ``here``."""
    saved = dict(model)
    if not with_state:
        saved["expert_optimizer_state"] = here["expert_optimizer_state"]
    differences = list(_differences(saved, here, ""))
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(
            f"checkpoint {directory} is of another model or optimizer: {'; '.join(differences[:5])}{more}"
        )


def _differences(saved: Any, here: Any, path: str) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in sorted({*saved, *here}):
            name = f"{path}.{key}" if path else str(key)
            if key not in saved:
                yield f"{name} is missing in the checkpoint"
            elif key not in here:
                yield f"{name} is in the checkpoint only"
            else:
                yield from _differences(saved[key], here[key], name)
    elif path == "moe_layers" and len(saved) != len(here):
        yield f"{len(saved)} MoE layers in the checkpoint, {len(here)} in the model"
    elif path == "moe_layers":
        for index, (left, right) in enumerate(zip(saved, here, strict=True)):
            yield from _differences(left, right, f"moe_layers[{index}]")
    elif saved != here:
        yield f"{path} is {saved} in the checkpoint, {here} in the model"
