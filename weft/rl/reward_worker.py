"""The process that runs reward functions: requests come in on its standard input, answers go out on its output.

It is started afresh (`python -m weft.rl.reward_worker`), not forked: the controller has threads. Whatever the functions
print goes to the standard error. It ends when the controller does.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import sys
import threading
import time
from typing import IO, Any

from weft.errors import UserError
from weft.rl.reward_calls import RewardFunction

HEADER = struct.Struct(">Q")  # bytes of the pickle that follows


def main() -> None:
    """Answers requests until there are no more: first those that name the functions, then batches for them."""
    requests, answers = _take_over(0, "rb"), _take_over(1, "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    path, named = receive(requests)
    sys.path += [folder for folder in path if folder not in sys.path]
    try:
        functions = [RewardFunction(one) for one in named]
    except UserError as error:
        send(answers, str(error))
        return
    send(answers, [function.described for function in functions])
    with asyncio.Runner() as runner:
        while (request := receive(requests)) is not None:
            number, batch = request
            send(answers, functions[number](batch, runner))


def receive(stream: IO[bytes]) -> Any:
    """The next thing that was sent; None at the end."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(*HEADER.unpack(header))) if len(header) == HEADER.size else None


def send(stream: IO[bytes], thing: Any) -> None:
    """Sends it at once."""
    stream.write(packed(thing))
    stream.flush()


def packed(thing: Any) -> bytes:
    """As it travels."""
    data = pickle.dumps(thing)
    return HEADER.pack(len(data)) + data


def _take_over(descriptor: int, mode: str) -> IO[Any]:
    return os.fdopen(os.dup(descriptor), mode)


def _end_with(parent: int) -> None:
    """A function that hangs reads no end of its input."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
