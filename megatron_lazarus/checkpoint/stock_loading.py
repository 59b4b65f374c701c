"""Loading a checkpoint that ``deepspeed.moe`` wrote for the same script, as it is."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from megatron_lazarus.checkpoint import manifest
from megatron_lazarus.checkpoint.files import CheckpointError
from megatron_lazarus.checkpoint.loading import Gather, Loader
from megatron_lazarus.checkpoint.manifest import read_latest
from megatron_lazarus.checkpoint.model import check_model, describe
from megatron_lazarus.checkpoint.restore import fill_record
from megatron_lazarus.checkpoint.stock_import import StockCheckpoint
from megatron_lazarus.checkpoint.stock_layout import expert_file

Records = dict[tuple[int, int], dict[str, Tensor]]


def stock_tag(load_dir: str, tag: str | None, gather: Gather) -> str | None:
    """The tag that is to be loaded, if ``deepspeed.moe`` wrote it; alike on all ranks."""

    def found() -> str | None:
        name = str(tag) if tag is not None else read_latest(load_dir)
        if name is None or os.path.exists(os.path.join(load_dir, name, manifest.NAME)):
            return None
        return name if os.path.exists(os.path.join(load_dir, name, expert_file(0, 0))) else None

    name: str | None = gather(found())[0]
    return name


def load_stock(loader: Loader, load_dir: str, tag: str, with_state: bool, **options: Any) -> dict[str, Any]:
    """Fill the engine; returns the client state. ``options`` are those of DeepSpeed's ``load_checkpoint``.

    Raises CheckpointError, on all ranks and before anything is changed, for what is damaged, of another model, or
    cannot be taken over.
    """
    experts, problem = loader.experts, None
    try:
        dense, records = _read(loader, os.path.join(load_dir, tag), with_state)
    except CheckpointError as error:
        problem = str(error)
    problems = [found for found in loader.gather(problem) if found is not None]
    if problems:
        raise CheckpointError(problems[0])
    client_state = loader.load_dense(load_dir, tag, dense, **options)
    for layer, buffer in enumerate(experts.buffers):
        for slot, expert in enumerate(buffer.experts):
            what = f"layer {layer} expert {expert}"
            fill_record(buffer.named_tensors(slot), records[layer, expert], with_state, what)
    return client_state


def _read(loader: Loader, directory: str, with_state: bool) -> tuple[dict[str, Any], Records]:
    experts, module = loader.experts, loader.engine.module
    buffers = [{spec.name for spec in buffer.layout.buffers} for buffer in experts.buffers]
    try:
        stock = StockCheckpoint(directory, groups=experts.parameter_groups, buffers=buffers)
    except CheckpointError:
        if with_state:
            raise
        # Its optimizer may be of any kind then.
        stock = StockCheckpoint(directory, with_state=False, buffers=buffers)
    if with_state and not stock.ep_size:
        raise CheckpointError(
            f"{directory} has no optimizer state of ZeRO stage 0, the only one that can be taken over; load its "
            "weights alone with load_module_only=True or load_optimizer_states=False"
        )
    here = describe(module, experts)
    with experts.context.dense_only():
        # Names of tied parameters beyond the first: the file has them all, the description one.
        further = set(module.state_dict()) - set(here["dense"])
    model = stock.model()
    model["dense"] = {name: shape for name, shape in stock.dense_shapes().items() if name not in further}
    check_model(model, directory, here, with_state)
    held = [set(buffer.experts) for buffer in experts.buffers]
    records = {
        (layer, expert): record for layer, expert, record in stock.records(lambda layer, expert: expert in held[layer])
    }
    return stock.dense_state(experts.parameter_groups), records
