"""From ``deepspeed.moe``'s checkpoints to lazarus' and back, without a live model."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from megatron_lazarus.checkpoint.dense import SKELETON, pieces, shard_file, take_apart
from megatron_lazarus.checkpoint.files import CheckpointError, fsync_path, write_atomically
from megatron_lazarus.checkpoint.image import FileImage
from megatron_lazarus.checkpoint.manifest import ExpertEntry, FileEntry, Manifest, chosen_tag
from megatron_lazarus.checkpoint.optimizer_state import USUAL_RULES, Rule
from megatron_lazarus.checkpoint.restore import read_dense, read_record
from megatron_lazarus.checkpoint.safety import dump, refuse_unsafe
from megatron_lazarus.checkpoint.sharing import Unit, share
from megatron_lazarus.checkpoint.stock_export import StockExport
from megatron_lazarus.checkpoint.stock_import import StockCheckpoint
from megatron_lazarus.checkpoint.writer import record_file, write_image, write_part

Progress = Callable[[int, int], None]
"""(experts done, experts in all)."""

_PIECE = 64 << 20
_FILE = 256 << 20


def import_checkpoint(
    source: str,
    target: str,
    tag: str | None = None,
    *,
    rules: Sequence[Rule] = USUAL_RULES,
    progress: Progress = lambda done, total: None,
) -> StockCheckpoint:
    """Write the tag of ``deepspeed.moe`` in ``source`` (default: the latest) as a checkpoint of lazarus in ``target``.

    Optimizer state comes along where ZeRO stage 0 wrote it. Raises CheckpointError for what cannot be taken over;
    ``target`` then is as it was.
    """
    tag = chosen_tag(source, tag)
    stock = StockCheckpoint(os.path.join(source, tag), rules)
    dense = stock.dense_state()
    refuse_unsafe(dense, "checkpoint")
    with _new_tag(target, tag) as directory:
        save_dir, written = os.path.split(directory)
        os.mkdir(os.path.join(directory, "experts"))
        experts, total = [], sum(stock.num_experts)
        for layer, expert, record in stock.records():
            name, image = record_file(layer, expert), FileImage.of(record)
            # What an expert has seen is not known; the ledger of the run that goes on begins here.
            part = write_part(save_dir, written, name, image, step=stock.global_steps, tokens=0.0)
            experts.append(ExpertEntry(layer, expert, [replace(part, tag=tag)]))
            progress(len(experts), total)
        files = _write_dense(directory, dense)
        experts.sort(key=lambda entry: (entry.layer, entry.expert))
        fsync_path(os.path.join(directory, "experts"))
        Manifest(tag, 0, stock.global_steps, stock.model(), files, "all", experts).write(directory)
    return stock


def export_checkpoint(
    source: str,
    target: str,
    ep_size: int,
    tag: str | None = None,
    *,
    world_size: int | None = None,
    split: bool | None = None,
    rules: Sequence[Rule] = USUAL_RULES,
    progress: Progress = lambda done, total: None,
) -> Manifest:
    """Write the tag of lazarus in ``source`` (default: the latest) as ``deepspeed.moe`` loads it, into ``target``.

    ``ep_size``, ``world_size`` (default: the same) and ``split`` are those of the run that will load it: see
    ``StockExport``. Raises CheckpointError for what is damaged or cannot be represented; ``target`` then is as it was.
    """
    tag = chosen_tag(source, tag)
    manifest = Manifest.read(os.path.join(source, tag))
    export = StockExport(read_dense(source, manifest), manifest.model, ep_size, split, world_size, rules)
    with _new_tag(target, tag) as directory:
        export.write(
            directory,
            lambda layer, expert: read_record(source, manifest, layer, expert),
            lambda done: progress(done, len(manifest.experts)),
        )
    return manifest


def _write_dense(directory: str, state: dict[str, object]) -> list[FileEntry]:
    skeleton, tensors = take_apart(state)
    os.mkdir(os.path.join(directory, os.path.dirname(shard_file(0))))
    # Several files: the image of each takes as much memory again.
    flat = pieces(tensors, _PIECE)
    count = max(1, -(-sum(piece.nbytes for piece in flat.values()) // _FILE))
    shards: list[dict[str, Tensor]] = [{} for _ in range(count)]
    units = [Unit(piece.nbytes, range(count)) for piece in flat.values()]
    for name, index in zip(flat, share(units, count), strict=True):
        shards[index][name] = flat[name]
    files = [write_image(directory, shard_file(index), FileImage.of(shard)) for index, shard in enumerate(shards)]
    fsync_path(os.path.join(directory, os.path.dirname(shard_file(0))))
    data = dump(skeleton)
    write_atomically(os.path.join(directory, SKELETON), data)
    return [*files, FileEntry(SKELETON, len(data), hashlib.sha256(data).hexdigest())]


@contextmanager
def _new_tag(target: str, tag: str) -> Iterator[str]:
    """A directory that becomes ``target/tag``, and the latest, if all goes well; else it is removed."""
    final, temporary = os.path.join(target, tag), os.path.join(target, f".{tag}.incomplete")
    if os.path.exists(final):
        raise CheckpointError(f"{final} exists; it is not written over")
    os.makedirs(target, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    os.mkdir(temporary)
    try:
        yield temporary
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    write_atomically(os.path.join(target, "latest"), tag.encode())
