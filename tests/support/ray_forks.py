"""Ray's workers as forks of a process that has torch, transformers and weft in memory, because to import them takes
longer than what most tests do with a worker.

Ray starts a worker by a script that sets up its environment and then becomes it. This file is that script: it asks the
fork server, waits for the fork and ends with it, as the fork ends with the script.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
import threading
from functools import partial
from typing import Any, NoReturn

_SOCKET = "WEFT_TEST_RAY_FORKS"  # a variable: where the fork server listens
_OPTIONS = ("--serialized-runtime-env-context", "--language")  # of the script; the other words are the worker's


def start_server(folder: str) -> None:
    """Start the fork server, a fork of this process that ends with it, and make a Ray that weft starts here use it."""
    import tests.support.preload  # noqa: F401
    from weft.launch import ray_actors
    from weft.launch.machine import end_with_parent

    def import_and_use(*names: str) -> Any:
        ray = import_extra(*names)
        use_server()
        return ray

    import_extra, ray_actors.import_extra = ray_actors.import_extra, import_and_use
    os.environ[_SOCKET] = os.path.join(folder, "forks")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ[_SOCKET])
    listener.listen(64)
    if os.fork() == 0:
        end_with_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        _serve(listener)
    listener.close()


def use_server() -> None:
    """Make a Ray that is started here use the fork server. This imports Ray."""
    from ray._private import ray_constants

    ray_constants.SETUP_WORKER_FILENAME = os.path.abspath(__file__)


def _ask() -> None:
    """What Ray calls, with the words of the worker."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[_SOCKET])
        request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))]
        connection.sendmsg([len(request).to_bytes(8, "big")], rights)
        connection.sendall(request)
        connection.recv(1)  # until the fork has ended


def _serve(listener: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become_worker(connection)
        connection.close()


def _become_worker(connection: socket.socket) -> None:
    """In a fork: what Ray's own script and the worker do."""
    import tempfile

    import torch

    from tests.support.forked import end_with, script

    size, descriptors, *_ = socket.recv_fds(connection, 8, 2)
    for descriptor, received in zip((1, 2), descriptors, strict=True):
        os.dup2(received, descriptor)
        os.close(received)
    message = connection.makefile("rb").read(int.from_bytes(size, "big"))
    words, environment, folder = json.loads(message)
    options = dict(word.split("=", 1) for word in words if word.startswith(_OPTIONS))
    os.chdir(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    torch.set_num_threads(1)
    threading.Thread(target=_end_after, args=[connection], daemon=True).start()
    worker = partial(script, [word for word in words if not word.startswith(_OPTIONS)])
    end_with(worker, environment | json.loads(options.get(_OPTIONS[0], "{}")).get("env_vars", {}))


def _end_after(connection: socket.socket) -> None:
    connection.recv(1)  # nothing comes but the end
    os._exit(1)


if __name__ == "__main__":
    _ask()
