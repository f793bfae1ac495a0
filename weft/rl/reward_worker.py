"""The process that runs reward functions: requests come in on its standard input, answers go out on its output.

It is started afresh (`python -m weft.rl.reward_worker`), not forked: the controller has threads. Whatever the functions
print goes to the standard error. It ends when the controller does.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import struct
import sys
from typing import IO, Any

from weft.errors import UserError
from weft.rl.reward_calls import RewardFunction

HEADER = struct.Struct(">Q")  # bytes of the pickle that follows


def main() -> None:
    """Answers requests until there are no more: first those that name the functions, then batches for them."""
    _end_with_controller()
    requests, answers = _take_over(0, "rb"), _take_over(1, "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
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


def _end_with_controller() -> None:
    """A process beside this one ends it, with all that it has started, when the controller has ended: a function that
    hangs reads no end of its input, and may hold Python's lock for ever."""
    if os.fork():
        return
    os.close(1)  # whose end tells the controller that this one has ended
    hung_up = select.poll()
    hung_up.register(0, 0)  # without what is to be read
    hung_up.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
