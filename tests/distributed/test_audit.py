"""Silent corruption of one rank is found, named and repaired, or stops the run."""

from __future__ import annotations

import pytest
import torch

from megatron_lazarus.audit import AuditFailed, audit, compare, fingerprint
from tests.distributed.pool import Pools
from tests.distributed.runs import Run, assert_replicas_equal, build, relative, run_all, train

SLOTS = ((0, 1, 2), (1, 2, 0), (3, 4, 5, 0), (5, 5, 1))


def corrupt(rank: int, world: int, run: Run) -> tuple[list[str], list[float]]:
    """Flip a bit of a record's moment on rank 1, of a mirrored replica and a dense weight on rank 3; train on."""
    engine, ledger = build(rank, world, run)
    train(engine, ledger, run, 3)
    assert audit(engine) == []
    if rank == 1:
        engine.experts.buffers[0].field("exp_avg")[2, 7].neg_()
    if rank == 3:
        engine.experts.buffers[1].rows[2, 40] ^= 1
        engine.module.head.weight.data[0, 0] += 1e-12
    findings = [str(finding) for finding in audit(engine)]
    assert audit(engine) == []
    assert_replicas_equal(engine)
    return findings, train(engine, ledger, run, 3).losses


def test_the_odd_one_out_is_named_and_repaired(workers: Pools) -> None:
    run = Run(slots=SLOTS, micro_batches=4, steps=6)
    undisturbed = workers(4)(run_all, run, timeout=60)[0][0].losses
    for findings, losses in workers(4)(corrupt, run, timeout=60):
        assert findings == [
            "rank 3 differs in the dense state from the majority (rank 0)",
            "rank 1 differs in expert 0 of layer 0 from the majority (rank 0)",
            "rank 3 differs in expert 1 of layer 1 from the majority (rank 0)",
        ]
        assert relative(losses, undisturbed[3:]) < 1e-9


def test_without_a_majority_the_run_stops() -> None:
    report = {"dense": [1, 2], "records": [[0, 4, 7]]}
    with pytest.raises(AuditFailed, match=r"ranks \[0, 1\] disagree on expert 4 of layer 0"):
        compare([report, {**report, "records": [[0, 4, 8]]}])
    with pytest.raises(AuditFailed, match="the dense state"):
        compare([report, {**report, "dense": [1, 3]}])


def test_fingerprint_sees_every_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, size in ((torch.uint8, 13), (torch.float32, 5), (torch.bfloat16, 7), (torch.float64, 3)):
        tensor = (torch.rand(size, generator=generator) * 100).to(dtype)
        seen = {fingerprint(tensor)}
        raw = tensor.view(torch.uint8)
        for byte in range(raw.numel()):
            for bit in range(8):
                raw[byte] ^= 1 << bit
                seen.add(fingerprint(tensor))
                raw[byte] ^= 1 << bit
        assert len(seen) == 1 + 8 * raw.numel()
        assert fingerprint(tensor) in seen
    swapped = torch.tensor([1.0, 2.0])
    assert fingerprint(swapped) != fingerprint(swapped.flip(0))
