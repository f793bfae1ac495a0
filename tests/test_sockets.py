"""What weft's processes listen on: nothing that another machine reaches, unless a cluster is configured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cases import write_small_job
from tests.forked import Run
from tests.toy_tokenizers import write_jsonl

WORDS = (
    "model.path=model", "data.path=chat.jsonl", "step.documents=2", "step.max_tokens_per_device=64",
)  # fmt: skip


def listening(pid: int) -> set[tuple[str, str]]:
    """(name of the process, address) of all that a process and those it has started listen on."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((process.name(), connection.laddr.ip))
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_job(tmp_path_factory.mktemp("sockets"))


def outside(found: set[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return (one for one in found if one[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1"))


@pytest.mark.parametrize("nproc", [1, 2])
def test_sft(nproc: int, here: Path) -> None:
    words = ("sft", *WORDS, "train.epochs=100000", f"run.dir=run-{nproc}", "--nproc", str(nproc))
    run = Run(words, here)
    try:
        run.wait_for(r"step +2/")
        found = listening(run.pid)
        assert not list(outside(found)), found
        assert nproc == 1 or found, "ranks meet somewhere"
    finally:
        run.process.terminate()
        run.wait()


@pytest.mark.slow
def test_rl(here: Path) -> None:
    """A Ray of its own, two trainer ranks and an engine in a process of its own."""
    write_jsonl(here / "asked.jsonl", *[{"messages": [{"role": "user", "content": "1 2"}], "answer": "3"}] * 8)
    run = Run(
        (
            "rl", "model.path=model", "data.path=asked.jsonl", "rl.reward=[length]", "rl.prompts=2", "rl.group_size=2",
            "rollout.engine=hf", "rollout.max_prompt_tokens=32", "rollout.max_new_tokens=4",
            "step.max_tokens_per_device=128", "train.steps=100000", "run.dir=run-rl", "--nproc", "2",
        ),
        here,
    )  # fmt: skip
    try:
        run.wait_for(r"step +2/", timeout=240.0)
        found = listening(run.pid)
        assert not list(outside(found)), found
        assert {name for name, _ in found} >= {"gcs_server", "raylet"}
        joined = join_ray(run)
        assert "JOINED" not in joined and "Failed to connect" in joined, joined
    finally:
        run.process.terminate()
        run.wait()


def join_ray(run: Run) -> str:
    """What a process that has not the token is told when it joins the run's Ray and runs a task there."""
    (server,) = [child for child in psutil.Process(run.pid).children(recursive=True) if child.name() == "gcs_server"]
    port = next(one.laddr.port for one in server.net_connections("inet") if one.status == psutil.CONN_LISTEN)
    source = f"import ray; ray.init('127.0.0.1:{port}'); print('JOINED', ray.get(ray.remote(lambda: 5).remote()))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kept["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else it would not even look on loopback
    done = subprocess.run([sys.executable, "-c", source], env=kept, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr
