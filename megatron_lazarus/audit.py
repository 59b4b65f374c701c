"""Compares what must be equal across ranks, and repairs a rank that has drifted: silent corruption must not spread.

Dense state is equal on all ranks, replicas of an expert on all their holders, bit by bit after every committed step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lazarus import dense_state
from megatron_lazarus.json_exchange import broadcast_bytes, gather_json
from megatron_lazarus.moe.records import RecordBuffer

logger = logging.getLogger(__name__)


class AuditFailed(RuntimeError):
    """Ranks disagree and no majority tells who is right."""


@dataclass(frozen=True)
class Finding:
    """``rank`` differs from the others in ``expert`` of ``layer``, or in the dense state if both are None."""

    rank: int
    layer: int | None
    expert: int | None
    source: int

    def __str__(self) -> str:
        what = "the dense state" if self.layer is None else f"expert {self.expert} of layer {self.layer}"
        return f"rank {self.rank} differs in {what} from the majority (rank {self.source})"


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit number of the tensor's bytes, computed where the tensor is: a changed bit changes it."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.int32).to(torch.int64)
    # Odd weights are invertible modulo 2^64, so that no single changed word can cancel out.
    weights = torch.arange(words.numel(), device=words.device, dtype=torch.int64) * 0x9E3779B97F4A7C15 - (1 << 63) | 1
    return int((words * weights).sum())


def audit(engine: Any) -> list[Finding]:
    """Compare dense state and replicas over all ranks and repair those that differ from a majority.

    Every rank calls it between two steps. Returns what was repaired, alike on every rank. Raises AuditFailed, on all of
    them, where there is no majority.
    """
    experts = engine.experts
    mine = {
        "dense": [fingerprint(tensor) for tensor in _dense_tensors(engine.deepspeed_engine)],
        "records": [
            [layer, expert, fingerprint(buffer.rows[slot])]
            for layer, buffer in enumerate(experts.buffers)
            for slot, expert in enumerate(buffer.experts)
        ],
    }
    findings = compare(gather_json(mine))
    for finding in findings:
        if engine.rank == 0:
            logger.error("audit at step %d: %s; repaired", engine.global_steps, finding)
    if findings:
        engine._checkpoint.before_update()
    dense = [finding for finding in findings if finding.layer is None]
    if dense:
        source = dense[0].source
        data = dense_state.pack(engine) if engine.rank == source else None
        data = broadcast_bytes(data, source)
        if engine.rank in {finding.rank for finding in dense}:
            dense_state.unpack(data, engine)
    for finding in findings:
        if finding.layer is not None and finding.expert is not None:
            _copy_record(engine, finding.layer, finding.expert, finding.source, finding.rank)
    if findings:
        experts.optimizer.load_steps()
    return findings


def compare(reports: list[Mapping[str, Any]]) -> list[Finding]:
    """Who differs in what, from every rank's fingerprints. Raises AuditFailed where votes are tied."""
    findings = []
    dense = {rank: str(report["dense"]) for rank, report in enumerate(reports)}
    findings += [Finding(rank, None, None, source) for rank, source in _odd_ones(dense, "the dense state")]
    records: dict[tuple[int, int], dict[int, str]] = {}
    for rank, report in enumerate(reports):
        for layer, expert, value in report["records"]:
            held = records.setdefault((layer, expert), {})
            # Two replicas on one rank that differ from each other differ from everybody.
            held[rank] = str(value) if held.get(rank, str(value)) == str(value) else f"torn on rank {rank}"
    for (layer, expert), votes in sorted(records.items()):
        what = f"expert {expert} of layer {layer}"
        findings += [Finding(rank, layer, expert, source) for rank, source in _odd_ones(votes, what)]
    return findings


def _odd_ones(votes: dict[int, str], what: str) -> Iterator[tuple[int, int]]:
    """(rank outside the majority, a rank of it)."""
    if len(set(votes.values())) == 1:
        return
    (value, count), *_ = Counter(votes.values()).most_common()
    if 2 * count <= len(votes):
        raise AuditFailed(f"ranks {sorted(votes)} disagree on {what}, and no majority tells who is right: {votes}")
    source = min(rank for rank, vote in votes.items() if vote == value)
    yield from ((rank, source) for rank, vote in sorted(votes.items()) if vote != value)


def _dense_tensors(ds_engine: Any) -> Iterator[Tensor]:
    yield from ds_engine.module.parameters()
    yield from ds_engine.module.buffers()
    for group in ds_engine.basic_optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            state = ds_engine.basic_optimizer.state.get(parameter, {})
            yield from (state[name] for name in sorted(state) if isinstance(state[name], Tensor))


def _copy_record(engine: Any, layer: int, expert: int, source: int, target: int) -> None:
    buffer: RecordBuffer = engine.experts.buffers[layer]
    slots = [slot for slot, held in enumerate(buffer.experts) if held == expert]
    if engine.rank == source:
        engine.experts.peers.point_to_point([(buffer.rows[slots[0]], target, 0)], [])
    elif engine.rank == target:
        engine.experts.peers.point_to_point([], [(buffer.rows[slots[0]], source, 0)])
        for slot in slots[1:]:
            buffer.rows[slot] = buffer.rows[slots[0]]
