"""An agent for `weft rl`: it asks the policy over HTTP, offers it a calculator, and gives 1 for the right answer.

    weft rl rl.yaml rl.agent=examples.calculator_agent:solve rl.max_turns=4

The row needs a column `answer`. It uses the standard library alone; with the `openai` package, `ask` is
`OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(model="policy", messages=messages, tools=TOOLS)`.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.request import Request, urlopen

from examples.calculator_env import Calculator, result_of

TOOLS = list(Calculator.tools)
MOST_CALLS = 4


def solve(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Ask until an answer calls no tool. Returns the reward, and notes that weft records with the sample."""
    messages = list(row["messages"])
    for calls in range(MOST_CALLS):
        answer = ask(base_url, api_key, messages)
        messages.append(answer)
        if not answer.get("tool_calls"):
            numbers = re.findall(r"-?\d+(?:\.\d+)?", answer["content"] or "")
            return {"reward": float(numbers[-1:] == [str(row["answer"])]), "tool_calls": calls}
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result_of(json.dumps(function_of(call)))}
            for call in answer["tool_calls"]
        ]
    return {"reward": 0.0, "tool_calls": MOST_CALLS}


def ask(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The policy's next message."""
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """The name and the arguments of a call, as result_of reads them."""
    return {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
