"""A reward function that asks a judge: any model behind an OpenAI-compatible URL (vLLM, SGLang, a hosted service).

    export JUDGE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=Qwen/Qwen3-32B
    weft rl rl.yaml 'rl.reward=[examples.judge_reward:judged]'

JUDGE_KEY is sent as a bearer token, if it is set. The judge gets the question and the answer, and writes a grade from 0
to 10; the reward is a tenth of it, and None, so that the sample is not trained, where no grade is found.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

INSTRUCTION = "Grade the answer to the question from 0 (useless) to 10 (perfect). Write only the grade.\n\n"
GRADE = re.compile(r"\b(10|\d)\b")


def ask(content: str) -> str:
    """The judge's reply to one message. Raises OSError where it cannot be reached."""
    body = {
        "model": os.environ["JUDGE_MODEL"], "temperature": 0.0, "max_tokens": 8,
        "messages": [{"role": "user", "content": content}],
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if "JUDGE_KEY" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['JUDGE_KEY']}"
    request = urllib.request.Request(
        f"{os.environ['JUDGE_URL'].rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        reply: str = json.load(response)["choices"][0]["message"]["content"]
    return reply


def text_of(messages: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt or a completion as text."""
    return messages if isinstance(messages, str) else "\n".join(f"{m['role']}: {m['content']}" for m in messages)


async def judged(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """A tenth of the judge's grade of each completion."""
    questions = [
        f"{INSTRUCTION}Question: {text_of(prompt)}\n\nAnswer: {text_of(completion)}"
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    replies = await asyncio.gather(*(asyncio.to_thread(ask, question) for question in questions))
    grades = [GRADE.search(reply) for reply in replies]
    return [None if grade is None else int(grade[1]) / 10 for grade in grades]
