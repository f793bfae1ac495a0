"""The process that runs reward functions. It answers each batch with outcomes or with the text of a UserError, and ends
when the controller ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from weft.errors import UserError, first_line
from weft.rl.rewards.calls import RewardFunction, RewardOutcome
from weft.rl.user_process import (
    add_import_folders,
    end_if_forked,
    packed,
    prefer_oom_kill,
    receive,
    send,
    supervise,
    take_over_streams,
)

_MOST_PROCESSES = 1000  # that reward functions of one process may start


def main() -> None:
    """Serve requests: first (import folders, RewardSpecs), then (number of the function, batch)."""
    supervise(_MOST_PROCESSES)
    prefer_oom_kill()
    requests, answers = take_over_streams()
    process = os.getpid()
    path, named = receive(requests)
    add_import_folders(path)
    try:
        functions = [RewardFunction(spec) for spec in named]
    except UserError as error:
        end_if_forked(process)
        send(answers, str(error))
        return
    end_if_forked(process)
    send(answers, [function.signature for function in functions])
    with asyncio.Runner() as runner:
        while (request := receive(requests)) is not None:
            number, batch = request
            answer: str | list[RewardOutcome]
            try:
                answer = _sendable(functions[number](batch, runner))
            except UserError as error:
                answer = str(error)
            end_if_forked(process)
            send(answers, answer)


def _sendable(outcomes: Sequence[RewardOutcome]) -> list[RewardOutcome]:
    """The outcomes. One whose notes cannot be pickled becomes a failure."""
    sendable = list[RewardOutcome]()
    for outcome in outcomes:
        try:
            packed(outcome)
        except Exception as error:
            outcome = RewardOutcome(None, f"its result cannot be sent to the controller: {first_line(error)}")
        sendable.append(outcome)
    return sendable


if __name__ == "__main__":
    main()
