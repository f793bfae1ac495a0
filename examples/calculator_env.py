"""An environment for `weft rl`: the policy may call a calculator as often as rl.max_turns allows, then it answers.

    weft rl rl.yaml rl.environment=examples.calculator_env:Calculator 'rl.reward=[math]'

It reads calls as Qwen and Hermes models write them, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and the
chat template renders what it replies. An answer without a call ends the conversation; the reward function judges it.
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
    """Answers every call in an answer with its result, or with what is wrong with it."""

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
        """The results of the calls in an answer; done where there are none."""
        found = CALL.findall(text)
        self.calls += len(found)
        if not found:
            return Reply(done=True, notes={"calls": self.calls})
        return Reply(messages=[{"role": "tool", "content": result_of(call)} for call in found])


def result_of(call: str) -> str:
    """What a call gives, in words that a model can mend its call by."""
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
    """The value of an arithmetic expression; nothing else is run."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: Any) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"`{ast.unparse(node)}` is no arithmetic")
