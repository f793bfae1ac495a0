"""The rendezvous of ranks on one machine: a store that only this machine can reach.

torch's rendezvous (c10d) listens on every interface without a password, and unpickles values from its store. This store
listens on 127.0.0.1, and the launcher unpickles nothing from it.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

LOOPBACK = "127.0.0.1"
NAME = "weft"


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of a single agent. Its ranks are clients of its store."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._closed = run_id, False
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def register() -> str:
    """Register the rendezvous with torch and return its name. Repeated calls have no effect."""
    rendezvous_handler_registry.register(NAME, _create)
    return NAME


# A function of the module, because torch refuses to register another function under the same name.
def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
