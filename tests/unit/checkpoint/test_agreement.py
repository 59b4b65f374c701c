"""What a save does where ranks know different things: rank 0's first decision holds for nobody then."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_lazarus.checkpoint.attempt import Save
from megatron_lazarus.checkpoint.engine import FullSaves
from megatron_lazarus.checkpoint.manifest import read_latest
from tests.crash.job import LIMIT_S, Ranks, check_content, newest

PARTIAL = FullSaves(persist_experts=1)


def rounds(ranks: Ranks) -> list[Any]:
    """What rank 0 gathers from now on, in the order of the rounds."""
    seen: list[Any] = []
    member = ranks.members[0]
    gather = member.saver._gather

    def counted(mine: Any) -> list[Any]:
        found = gather(mine)
        seen.append(found)
        return found

    member.saver._gather = counted
    return seen


def test_one_round_where_all_know_the_same(tmp_path: Path) -> None:
    ranks = Ranks(PARTIAL)
    seen = rounds(ranks)
    for step in (1, 2, 3):
        assert ranks.save(str(tmp_path), step) == (True, "")
    assert len(seen) == 3
    ranks.close()


def test_rank_1_knows_of_more_attempts(tmp_path: Path) -> None:
    """Rank 0 is new, and takes the number that no attempt has had."""
    ranks = Ranks(PARTIAL)
    ranks.members[1].history.number = 7
    seen = rounds(ranks)
    saves = ranks.call(lambda member: (member.train(1), member.begin(str(tmp_path), "global_step1"))[1])
    assert [save.attempt.number for save in saves] == [8, 8]
    assert saves[0].attempt == saves[1].attempt
    assert len(seen) == 2
    assert saves[0].decided.wait(LIMIT_S)
    assert saves[0].published, saves[0].reason
    ranks.settle()
    ranks.close()
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest"], "the first decision's folders are still there"
    chosen = newest(str(tmp_path))
    assert chosen is not None
    check_content(str(tmp_path), chosen[1])


def test_rank_1_has_no_room(tmp_path: Path) -> None:
    ranks = Ranks(PARTIAL)
    assert ranks.save(str(tmp_path), 1)[0]
    ranks.members[1].writer.has_let_go = lambda limit_s: False  # type: ignore[method-assign]
    published, reason = ranks.save(str(tmp_path), 2)
    assert not published
    assert "the last saves of ranks [1] are still being written" in reason
    ranks.close()
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest"]
    assert not ranks.members[0].writer.active


@pytest.mark.parametrize("strict", [False, True])
def test_tags_differ(tmp_path: Path, strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As with DeepSpeed: a warning, or with ``tag_validation: Fail`` an error."""
    ranks = Ranks(PARTIAL)

    def begin(member: Any) -> Save | str:
        member.engine.checkpoint_tag_validation_fail = lambda: strict
        member.train(1)
        return member.begin(str(tmp_path), f"rank{member.rank}")

    with caplog.at_level(logging.WARNING):
        saves = ranks.call(begin)
    if strict:
        assert saves == ["the tag is 'rank0' on rank 0, 'rank1' on others"] * 2
        assert not list(tmp_path.glob("rank*"))
    else:
        assert all(save.decided.wait(LIMIT_S) for save in saves)
        assert read_latest(str(tmp_path)) == "rank0"
        assert "the tag is 'rank0' on rank 0, 'rank1' on others: rank 0's is taken" in caplog.text
    ranks.close()
