"""vLLM's own server, in an environment that has it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.machine import business
from weft.launch.machine import free_port


@contextmanager
def vllm_server(model: Path, name: str, log: Path, *options: str) -> Iterator[str]:
    """The URL of its API, as docs/how-to/serve-with-vllm.md starts it; in fp32. options: further ones."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name,
        "--dtype", "float32", "--enforce-eager", "--port", str(port), *options,
    ]  # fmt: skip
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            end = time.monotonic() + 300 * business()
            while "startup complete" not in log.read_text():
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
