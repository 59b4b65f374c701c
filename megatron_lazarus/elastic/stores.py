"""The TCPStores of generations, opened ahead of need."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor


def host_store(host: str) -> tuple[int, object]:
    """Serve a fresh TCPStore on ``host``; returns its port and the object that keeps it alive."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((host, 0)) as listener:
        port = int(listener.getsockname()[1])
        # The store listens on every interface unless it is given a socket.
        descriptor = listener.detach()
    return port, TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


class StoreHost:
    """Neither a slow name server nor the loading of torch must hold the control server up."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._thread = ThreadPoolExecutor(1, "lazarus-store")
        self._next = self._thread.submit(host_store, host)

    def open(self) -> tuple[int, object] | None:
        """A fresh store, or None if it is not ready yet."""
        if not self._next.done():
            return None
        store = self._next.result()
        self._next = self._thread.submit(host_store, self._host)
        return store

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
