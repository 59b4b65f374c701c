"""The section that users write: what is legal, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lazarus.elastic.settings import ElasticConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_nodes", 0),
        ("start_nodes", 0),
        ("max_nodes", 0),
        ("join_window_s", -1),
        ("heartbeat_interval_s", 0),
        ("heartbeat_timeout_s", 0.5),
        ("lease_s", 5),
        ("collective_timeout_s", 0),
        ("drain_grace_s", 0),
        ("audit_interval", 0),
        ("max_recoveries_without_progress", 0),
    ],
)
def test_impossible_settings_are_named(key: str, value: Any) -> None:
    settings: dict[str, Any] = {key: value}
    with pytest.raises(ValueError, match=rf'"lazarus.elastic.{key}" is {value}; it must be') as info:
        ElasticConfig(**settings)
    assert str(info.value).endswith(tuple("0123456789"))


def test_start_nodes_lie_between_least_and_most() -> None:
    wrong: list[dict[str, Any]] = [{"min_nodes": 3, "start_nodes": 2}, {"max_nodes": 3, "start_nodes": 4}]
    for settings in wrong:
        with pytest.raises(ValueError, match="start_nodes"):
            ElasticConfig(**settings)
    with pytest.raises(ValueError, match="max_nodes"):
        ElasticConfig(min_nodes=3, max_nodes=2)
    assert ElasticConfig(min_nodes=2, max_nodes=5).wanted_nodes == 5
    assert ElasticConfig(min_nodes=2).wanted_nodes == 2
