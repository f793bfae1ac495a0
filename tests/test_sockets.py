"""What weft's processes listen on: nothing that another machine reaches, unless a cluster is configured."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cases import saved_model
from tests.forked import Run
from tests.toy_tokenizers import byte_tokenizer, chat, write_jsonl

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
    folder = tmp_path_factory.mktemp("sockets")
    shutil.copytree(saved_model("llama", vocab_size=264), folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    write_jsonl(folder / "chat.jsonl", *[chat(("user", "1 2"), ("assistant", "2 1"))] * 4)
    return folder


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
