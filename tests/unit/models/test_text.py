"""Text for a first run: the order of sources, duplicates, passages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lazarus.models import text


def passages(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def work(topic: str, paragraphs: int = 60) -> str:
    return "\n\n".join(
        f"{topic} paragraph {number}, {topic} words that say {number * 7} things." * 3 for number in range(paragraphs)
    )


def test_falls_back_in_order_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unavailable(_: float) -> Iterator[str]:
        raise text.SourceError("no network")
        yield ""

    monkeypatch.setattr(
        text, "SOURCES", {"first": unavailable, "second": lambda _: [work("sea")], "third": lambda _: [work("sky")]}
    )
    told = text.fetch_text(tmp_path / "text.jsonl")
    assert told.startswith("text: second")
    assert "not used: first: no network" in told
    assert all("sea" in passage for passage in passages(tmp_path / "text.jsonl"))
    monkeypatch.setattr(text, "SOURCES", {"first": unavailable, "empty": lambda _: []})
    with pytest.raises(text.SourceError, match=r"first: no network; empty: no text"):
        text.fetch_text(tmp_path / "text.jsonl")


def test_drops_licences_and_second_editions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play, other = work("sea"), work("sky")
    edition = "A NEW EDITION\n\n" + play.replace("paragraph 5,", "paragraph five,")
    licensed = f"Small print.\n*** START OF THE PROJECT ***\n{other}\n*** END OF THE PROJECT ***\nMore print."
    monkeypatch.setattr(text, "SOURCES", {"only": lambda _: [play, edition, licensed]})
    text.fetch_text(tmp_path / "text.jsonl")
    found = passages(tmp_path / "text.jsonl")
    assert not any("print" in passage or "EDITION" in passage for passage in found)
    assert sum(passage.count("sea paragraph 7,") for passage in found) == 3
    assert sum(passage.count("sky paragraph 7,") for passage in found) == 3


def test_passages_keep_paragraphs_whole() -> None:
    original = work("sea", 300)
    cut = list(text._passages(original))
    assert "\n\n".join(cut) == original
    assert all(text.PASSAGE_BYTES <= len(passage.encode()) < text.PASSAGE_BYTES + 400 for passage in cut[:-1])


def test_standard_library_is_always_there() -> None:
    works = text._standard_library(60.0)
    assert any("iterat" in next(works) for _ in range(40))
