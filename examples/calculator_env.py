"""An environment for `weft rl`: the policy may call a calculator up to rl.max_turns times before it answers.

    weft rl rl.yaml rl.environment=examples.calculator_env:Calculator 'rl.reward=[math]'

It parses calls in the format of Qwen and Hermes models, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
The chat template renders its replies. An answer without a call ends the conversation, and the reward function scores
it.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from weft.rl.environments import Environment, Reply

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


class Calculator(Environment):
    """Replies to every call in an answer with its result or an error message."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Evaluates an arithmetic expression of numbers, + - * / // % and parentheses.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                },
            },
        },
    )

    def __init__(self) -> None:
        self.calls = 0

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        """The results of the calls in an answer; done if there are none."""
        found = CALL.findall(text)
        self.calls += len(found)
        if not found:
            return Reply(done=True, notes={"calls": self.calls})
        return Reply(messages=[{"role": "tool", "content": result_of(call)} for call in found])


def result_of(call: str) -> str:
    """The result of a call, or an error message from which the model can correct the call."""
    try:
        asked = json.loads(call)
        return f"{evaluate(asked['arguments']['expression']):.12g}"
    except json.JSONDecodeError as error:
        return f"error: the call is no JSON: {error.msg}"
    except (KeyError, TypeError):
        return 'error: write {"name": "calculator", "arguments": {"expression": "1 + 2"}}'
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def evaluate(expression: str) -> float:
    """The value of an arithmetic expression; never executes anything else."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: Any) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"`{ast.unparse(node)}` is no arithmetic")
