"""Network interfaces of this host and their IPv4 addresses, by the kernel's own account; Linux only."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct

logger = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
_CHOSEN_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737): the way there shows which of this host's own addresses others see."""


def addresses() -> dict[str, str]:
    """IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # An interface without an address.
                continue
            found[name] = socket.inet_ntoa(raw[20:24])
    return found


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IPv4 address; None if there is none."""
    return next((name for name, own in addresses().items() if own == address), None)


def own_address(interface: str | None) -> str:
    """The address at which other hosts reach this one.

    That of ``interface`` (``elastic.interface``), else of the first one that ``GLOO_SOCKET_IFNAME`` or
    ``NCCL_SOCKET_IFNAME`` names, else that of the way out of this host. Raises ValueError if the interface has none.
    """
    found = addresses()
    named = [interface or "", *(os.environ.get(name, "") for name in _CHOSEN_BY)]
    chosen = next((name.lstrip("=").split(",")[0] for name in named if name), None)
    if chosen is not None and not chosen.startswith("^"):
        if chosen not in found:
            raise ValueError(f"interface {chosen!r} has no IPv4 address; there are {found}")
        return found[chosen]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent.
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            # No route leaves this network.
            return next((own for own in found.values() if not own.startswith("127.")), "127.0.0.1")


def use_interface(name: str | None, local_address: str) -> None:
    """Have gloo and NCCL use an interface, by default that of ``local_address``, unless the user has chosen one.

    What they use, and where it came from, is logged.
    """
    known = addresses()
    for variable in _CHOSEN_BY:
        chosen = os.environ.get(variable)
        why = "set in the environment"
        if chosen is None:
            chosen, why = name or interface_of(local_address), "lazarus.elastic.interface"
            if name is None:
                why = "it reaches the coordinator"
            if chosen is not None:
                os.environ[variable] = chosen
        logger.info(
            "%s=%s, address %s (%s)", variable, chosen, known.get((chosen or "").lstrip("="), "not of this host"), why
        )
