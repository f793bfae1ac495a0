"""The process that runs reward functions. It answers each batch with outcomes or with the text of a UserError, and ends
when the controller ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal

from weft.errors import UserError
from weft.rl.reward_calls import RewardFunction
from weft.rl.user_process import add_import_folders, prefer_oom_kill, receive, send, take_over_streams


def main() -> None:
    """Serve requests: first (import folders, RewardSpecs), then (number of the function, batch)."""
    _end_with_controller()
    prefer_oom_kill()
    requests, answers = take_over_streams()
    path, named = receive(requests)
    add_import_folders(path)
    try:
        functions = [RewardFunction(one) for one in named]
    except UserError as error:
        send(answers, str(error))
        return
    send(answers, [function.signature for function in functions])
    with asyncio.Runner() as runner:
        while (request := receive(requests)) is not None:
            number, batch = request
            try:
                send(answers, functions[number](batch, runner))
            except UserError as error:
                send(answers, str(error))


def _end_with_controller() -> None:
    """Fork a child that kills this process and all its children when the controller has ended. This process may not
    notice that itself: a function that hangs reads no input, and may hold the interpreter's lock for ever."""
    if os.fork():
        return
    os.close(1)  # the controller takes the end of this stream as the end of the worker
    hung_up = select.poll()
    hung_up.register(0, 0)  # wait only for the hang-up, not for input
    hung_up.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
