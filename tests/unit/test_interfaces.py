"""Which interface is used, and that it is told with its address."""

from __future__ import annotations

import logging
import socket

import pytest

from megatron_lazarus.elastic import interfaces
from megatron_lazarus.elastic.interfaces import addresses, interface_of, own_address, use_interface

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        # What the code under test sets is undone, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_loopback_is_known() -> None:
    assert addresses()["lo"] == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # Any address of this host can be bound, no other.
    with socket.create_server((own_address(None), 0)):
        pass
    assert own_address("lo") == "127.0.0.1"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo,eth7")
    assert own_address(None) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"interface 'nosuch0' has no IPv4 address; there are .*lo"):
        own_address("nosuch0")


def test_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_ELSEWHERE", ("not an address", 9))
    monkeypatch.setattr(interfaces, "addresses", lambda: {"lo": "127.0.0.1", "ib0": "10.1.2.3"})
    assert own_address(None) == "10.1.2.3"


@pytest.mark.parametrize(
    ("name", "set_by_user", "gloo", "nccl"),
    [
        (None, None, "lo, address 127.0.0.1 (it reaches", "lo, address 127.0.0.1 (it reaches"),
        ("ib9", None, "ib9, address not of this host (lazarus.elastic.interface", "ib9, address not of this host"),
        ("ib9", "lo", "lo, address 127.0.0.1 (set in the environment", "ib9, address not of this host"),
    ],
)
def test_choice_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str | None,
    set_by_user: str | None,
    gloo: str,
    nccl: str,
) -> None:
    if set_by_user is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", set_by_user)
    with caplog.at_level(logging.INFO):
        use_interface(name, "127.0.0.1")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"GLOO_SOCKET_IFNAME={gloo}")
    assert second.startswith(f"NCCL_SOCKET_IFNAME={nccl}")
