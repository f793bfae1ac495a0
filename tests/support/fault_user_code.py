"""A reward function and an environment of a user, which fail when the variables of RlRun (rl_faults.py) say so.

No torch: processes import this.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.agents import post
from tests.support.faults import DO
from weft.rl.environments import Environment, Reply

VARIABLE = "WEFT_TEST_FAULT"  # an RlFault, as JSON, and where to note that it struck


def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> Any:
    """How many different characters there are, unless a fault strikes."""
    values = [float(len(set(text))) for text in completions]
    do = strikes(prompts[0], "reward")
    return GIVES[do](values) if do in GIVES else acts(do) or values


class FaultyEnvironment(Environment):
    """Rewards what is said, unless a fault strikes, at the start or in a step."""

    gives_reward = True

    async def start(self, prompt: Any) -> None:
        self.prompt = prompt.text
        acts(strikes(self.prompt, "start"))

    def step(self, text: str, tokens: Sequence[int]) -> Reply:  # type: ignore[override]
        values = [float(len(set(text)))]
        do = strikes(self.prompt, "step")
        return Reply(done=True, reward=(GIVES[do](values) if do in GIVES else acts(do) or values)[0])


def agent(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Asks once; the reward is how many different characters were answered, unless a fault strikes: in `start`, before
    it asks, or in `step`, after it."""
    acts(strikes(row["prompt"], "start"))
    body = {"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}
    status, text = post(base_url, api_key, "/chat/completions", body)
    assert status == 200, text
    values = [float(len(set(json.loads(text)["choices"][0]["message"]["content"])))]
    do = strikes(row["prompt"], "step")
    return (GIVES[do](values) if do in GIVES else acts(do) or values)[0]


def strikes(prompt: str, phase: str) -> str | None:
    """What is to be done now, if anything."""
    fault = json.loads(os.environ.get(VARIABLE, "null"))
    if fault is None or fault["prompt"] not in ("", prompt) or fault["phase"] != phase:
        return None
    if fault["once"]:
        try:
            os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
    _note(fault)
    return str(fault["do"])


def _note(fault: dict[str, Any]) -> None:
    if not os.path.exists(fault["struck"]):
        with open(fault["struck"], "w") as file:
            file.write(str(time.monotonic()))


def acts(do: str | None) -> None:
    """Anything of tests.support.faults.DO, or of OWN."""
    if do is not None:
        (USER_FAULTS.get(do) or DO[do])(None)


def _print_much(_: Any) -> None:
    for _number in range(64):
        print("x" * (1 << 16))
        print("y" * (1 << 16), file=sys.stderr)


USER_FAULTS: dict[str, Callable[[Any], Any]] = {
    "print megabytes": _print_much,
    "kill the parent": lambda _: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
    "stop the parent": lambda _: os.kill(os.getppid(), signal.SIGSTOP),
}
GIVES: dict[str | None, Callable[[list[float]], Any]] = {
    "nan": lambda values: [math.nan] * len(values),
    "infinity": lambda values: [math.inf] * len(values),
    "too few": lambda values: values[1:],
    "a number": lambda values: 1.0,
    "words": lambda values: ["good"] * len(values),
    "none": lambda values: [None] * len(values),
    "all alike": lambda values: [1.0] * len(values),
}
