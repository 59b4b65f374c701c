"""JSON between ranks: short messages go in one round, long ones in two."""

from __future__ import annotations

from megatron_lazarus.json_exchange import gather_json
from tests.distributed.pool import Pools

LENGTHS = (0, 1, 1013, 1014, 1015, 1016, 1017, 5000)


def exchange(rank: int, world: int) -> list[list[str]]:
    return [gather_json(chr(97 + rank) * (length if rank == 1 else 3)) for length in LENGTHS]


def test_messages_of_any_length(workers: Pools) -> None:
    for found in workers(3)(exchange, timeout=60):
        assert found == [["aaa", "b" * length, "ccc"] for length in LENGTHS]
