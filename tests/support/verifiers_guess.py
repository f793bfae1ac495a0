"""An environment of verifiers' v1 API, as its package writes them: three tasks, and a harness that asks twice with
OpenAI's client, with no sandbox. tests/rl/test_environments_of_others.py has this folder in its path."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import verifiers.v1 as vf

__all__ = ["GuessHarness", "GuessTaskset"]


class GuessData(vf.TaskData):
    answer: str


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for number in range(3):
            yield GuessTask(GuessData(prompt=f"{number}+4?", answer=str(number + 4)), self.config.task)


class GuessHarnessConfig(vf.HarnessConfig):
    pass


class GuessHarness(vf.Harness[GuessHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for question in ("Sure?", None):
            reply = await client.chat.completions.create(model=ctx.model, messages=messages)
            content = reply.choices[0].message.content
            if content == "fail":
                raise RuntimeError("the harness failed")
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": question}]
        return vf.ProgramResult(0, "", "")
