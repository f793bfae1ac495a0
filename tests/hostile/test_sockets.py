"""What weft's processes listen on: nothing that another machine reaches, unless a cluster is configured."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cases import write_small_job
from tests.support.forked import Run
from tests.support.ray_forks import start_server
from tests.support.stand_in_vllm import environment
from tests.support.toy_tokenizers import write_jsonl
from weft.inference.vllm.engine import VllmEngine
from weft.inference.vllm.interpreter import Interpreter
from weft.inference.vllm.server import Settings
from weft.inference.weight_sync.protocol import open_store
from weft.launch.watchdog import periodically

WORDS = (
    "model.path=model", "data.path=chat.jsonl", "step.documents=2", "step.max_tokens_per_device=64",
)  # fmt: skip


def listening(pid: int) -> set[tuple[str, str]]:
    """(name of the process, address or path) of all that a process and those it has started listen on, and of Unix
    sockets that have a path."""
    addresses = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.add((process.name(), connection.laddr.ip))
            addresses |= {
                (process.name(), str(connection_of_process.laddr))
                for connection_of_process in process.net_connections(kind="unix")
                if connection_of_process.laddr
            }
        except psutil.NoSuchProcess:
            continue
    return addresses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_job(tmp_path_factory.mktemp("sockets"))


def outside(listeners: set[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """What others than this user's processes on this machine may reach."""
    return (
        listener
        for listener in listeners
        if listener[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1") and not is_private(listener[1])
    )


def is_private(address: str) -> bool:
    """Whether it is a Unix socket that lies in a folder of mode 0700, or one whose folder is gone."""
    path = Path(address)
    return path.is_absolute() and (
        not path.exists() or any(not folder.stat().st_mode & 0o077 for folder in path.parents)
    )


@contextmanager
def watched(run: Run) -> Iterator[set[tuple[str, str]]]:
    """What a run listens on at any time inside, looked for several times a second."""
    listeners = set[tuple[str, str]]()

    def look(_: float) -> None:
        with suppress(psutil.NoSuchProcess):
            listeners.update(listening(run.pid))

    with periodically(look, 0.2, "sockets"):
        yield listeners


def test_what_is_outside_is_found(tmp_path: Path) -> None:
    """Each kind once, so that the tests below can fail."""
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "open").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    with (
        socket.socket() as all_interfaces,
        socket.socket(socket.AF_UNIX) as hidden,
        socket.socket(socket.AF_UNIX) as shown,
    ):
        all_interfaces.bind(("0.0.0.0", 0))
        hidden.bind(f"{tmp_path}/private/s")
        shown.bind(f"{tmp_path}/open/s")
        for entry in (all_interfaces, hidden, shown):
            entry.listen()
        addresses = {address for _, address in listening(os.getpid())}
        assert {"0.0.0.0", f"{tmp_path}/private/s", f"{tmp_path}/open/s"} <= addresses
        own_listeners = {
            entry for entry in listening(os.getpid()) if entry[1] == "0.0.0.0" or entry[1].startswith(str(tmp_path))
        }
        private_above = any(not folder.stat().st_mode & 0o077 for folder in tmp_path.parents)
        assert {address for _, address in outside(own_listeners)} == {"0.0.0.0"} | (
            set() if private_above else {f"{tmp_path}/open/s"}
        )


def test_verify(folder: Path) -> None:
    run = Run(("verify", *WORDS, "--nproc", "2"), folder)
    with watched(run) as listeners:
        run.wait()
    assert listeners and not list(outside(listeners)), listeners


def test_a_vllm_server(tmp_path: Path) -> None:
    """A stand-in, which listens where it is told to (tests/vllm has the real one)."""
    interpreter = Interpreter(environment(tmp_path / "env") / "bin/python", "0.32.0", cpu=True)
    settings = Settings(interpreter=interpreter, model="m", name="e", folder=tmp_path, max_tokens=96)

    async def run() -> set[tuple[str, str]]:
        engine = await VllmEngine.start(settings)
        try:
            return listening(os.getpid())
        finally:
            await engine.close()

    listeners = {listener for listener in asyncio.run(run()) if "weft-vllm-" in listener[1]}
    assert listeners and not list(outside(listeners)), listeners


def test_the_store_of_a_process_group_listens_where_it_is_told_to() -> None:
    before = listening(os.getpid())
    store = open_store("127.0.0.1", 0, 10.0, serve=True)
    opened = listening(os.getpid()) - before
    joined = open_store("127.0.0.1", store.port, 10.0)
    store.set("a", "1")
    assert joined.get("a") == b"1" and not list(outside(opened)), opened


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.table), 2])
def test_sft(nproc: int, folder: Path) -> None:
    words = ("sft", *WORDS, "train.epochs=100000", "train.log_every=1", f"run.dir=run-{nproc}", "--nproc", str(nproc))
    run = Run(words, folder)
    try:
        with watched(run) as listeners:
            run.wait_for(r"step +2/")
        assert not list(outside(listeners)), listeners
        assert nproc == 1 or listeners, "ranks meet somewhere"
    finally:
        run.process.terminate()
        run.wait()


@pytest.mark.slow
def test_rl(folder: Path) -> None:
    """A Ray of its own, two trainer ranks and an engine in a process of its own."""
    write_jsonl(folder / "asked.jsonl", *[{"messages": [{"role": "user", "content": "1 2"}], "answer": "3"}] * 8)
    run = Run(
        (
            "rl", "model.path=model", "data.path=asked.jsonl", "rl.reward=[length]", "rl.prompts_per_step=2",
            "rl.group_size=2",
            "rollout.engine=hf", "cluster.placement=colocated", "rollout.max_prompt_tokens=32",
            "rollout.max_new_tokens=4", "step.max_tokens_per_device=128", "train.steps=100000",
            "train.log_every=1", "run.dir=run-rl", "--nproc", "2",
        ),
        folder,
        partial(start_server, str(folder)),
    )  # fmt: skip
    check_ray(run, r"step +2/")


@pytest.mark.slow
def test_a_ray_that_was_imported_before(tmp_path: Path) -> None:
    """As a notebook may have done; Ray reads its settings when it is imported."""
    run = Run(import_first, tmp_path)
    check_ray(run, "a task ran")
    assert run.status == 0, "the program's settings are not as they were"


def import_first() -> int:
    import ray

    from weft.launch.ray_actors import Bundle, ray_session

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = settings_of(ray)
    with suppress(KeyboardInterrupt), ray_session(None, [Bundle(cpus=1.0)]):
        assert ray.get(ray.remote(lambda: 5).remote()) == 5
        print("a task ran", flush=True)
        signal.pause()
    return int(settings_of(ray) != before)


def settings_of(ray: Any) -> Any:
    """What the program's own Ray would have."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(("RAY_AUTH", "RAY_ENABLE"))}
    return variables, ray._private.ray_constants.ENABLE_RAY_CLUSTER


def check_ray(run: Run, shown: str) -> None:
    """Its Ray is reached by this machine alone, refuses who has no token, and leaves nothing. shown: what the run
    prints when all of it is up."""
    try:
        with watched(run) as listeners:
            run.wait_for(shown, timeout=240.0)
        assert not list(outside(listeners)), listeners
        assert {name for name, _ in listeners} >= {"gcs_server", "raylet"}
        joined = join_ray(run)
        assert "JOINED" not in joined and "Failed to connect" in joined, joined
        folders = {str(Path(path).parents[3]) for name, path in listeners if name == "raylet" and path.startswith("/")}
        assert len(folders) == 1 and all("weft-ray-" in folder for folder in folders), listeners
    finally:
        run.process.terminate()
        run.wait()
    assert not [folder for folder in folders if Path(folder).exists()]


def join_ray(run: Run) -> str:
    """What a process that has not the token is told when it joins the run's Ray and runs a task there."""
    (server,) = [child for child in psutil.Process(run.pid).children(recursive=True) if child.name() == "gcs_server"]
    port = next(
        connection.laddr.port
        for connection in server.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    )
    source = f"import ray; ray.init('127.0.0.1:{port}'); print('JOINED', ray.get(ray.remote(lambda: 5).remote()))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else it would not even look on loopback
    environment["RAY_NUM_REDIS_GET_RETRIES"] = "1"  # it is asked 20 times, a second apart
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr
