"""The process that runs reward functions. It answers each batch with outcomes or with the text of a UserError, and ends
when the controller ends."""

from __future__ import annotations

import asyncio

from weft.errors import UserError
from weft.rl.rewards.calls import RewardFunction
from weft.rl.user_process import add_import_folders, prefer_oom_kill, receive, send, supervise, take_over_streams

_MOST_PROCESSES = 1000  # that reward functions of one process may start


def main() -> None:
    """Serve requests: first (import folders, RewardSpecs), then (number of the function, batch)."""
    supervise(_MOST_PROCESSES)
    prefer_oom_kill()
    requests, answers = take_over_streams()
    path, named = receive(requests)
    add_import_folders(path)
    try:
        functions = [RewardFunction(spec) for spec in named]
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


if __name__ == "__main__":
    main()
