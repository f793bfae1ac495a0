"""Environments of the package verifiers (its v1 API, 0.4) as agents: they call the policy through the endpoint. Imports
no torch.

python -m weft.rl.agents.verifiers_agent NAME > tasks.jsonl    # a row for each task, for data.path
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from weft.config.conditions import VERIFIERS
from weft.errors import UserError, first_line

KEY = "rl.agent"
_MOST_TASKS = 100_000  # rows of a taskset that has no end


def verifiers_function(agent: str) -> Callable[..., Awaitable[Mapping[str, Any]]]:
    """The agent that plays one task of the environment `agent`, which is `verifiers:NAME` or `verifiers:FILE.toml`. The
    row's column `idx` is the task's number. UserError if there is no such environment."""
    env = _environment(agent)

    async def play(row: Mapping[str, Any], base_url: str, api_key: str) -> Mapping[str, Any]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        number = row.get("idx")
        if not isinstance(number, int):
            raise ValueError(
                "the row has no column `idx`, the task's number. Write rows with `python -m "
                f"weft.rl.agents.verifiers_agent {agent.partition(':')[2]} > tasks.jsonl`"
            )
        task = next(itertools.islice(iter(env.taskset), number, None), None)
        if task is None:
            raise ValueError(f"the taskset has no task {number}")
        # The key is in OPENAI_API_KEY (weft/rl/agents/process.py). verifiers must not repeat attempts, because calls of
        # a failed attempt would stay in the episode.
        client = EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        async with env.serving():
            episode = await env.run_episode(task, ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"{errors[-1].type}: {first_line(errors[-1].message)}" if errors else "it failed")
        (trace,) = episode.traces
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        notes = {"scores": scores, "metrics": dict(trace.metrics), "stop": trace.stop_condition}
        return {"reward": trace.reward, **notes}

    return play


@functools.cache
def _environment(agent: str) -> Any:
    """The verifiers.v1.Env. UserError if it cannot be made, or has several agents."""
    name = agent.partition(":")[2].strip()
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ModuleNotFoundError as error:
        raise UserError(
            f"{KEY}: {agent} needs the package verifiers of 0.4 or later, and {first_line(error)}: "
            "pip install 'verifiers>=0.4'."
        ) from error
    try:
        if name.endswith(".toml"):
            table = tomllib.loads(Path(name).read_text())
            config = resolve_env_config(table.get("env", table))
        else:
            config = resolve_env_config({"taskset": {"id": name}})
        roles = agent_config_fields(config)
        if len(roles) != 1:
            raise UserError(
                f"{KEY}: {agent} has the agents {', '.join(roles)}, but weft supports only environments with one "
                "agent in this version. Name another environment, or write an agent function "
                "(docs/how-to/agents.md)."
            )
        ((role, settings),) = roles.items()
        once = settings.retries.model_copy(update={"max_retries": 0})
        return load_environment(config.model_copy(update={role: settings.model_copy(update={"retries": once})}))
    except UserError:
        raise
    except Exception as error:  # of verifiers, and of the environment's package
        raise UserError(f"{KEY}: {agent} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error


def main() -> None:
    """Write a row for each task, as JSON lines. argv[1]: as behind `verifiers:`."""
    taskset = _environment(f"{VERIFIERS}:{sys.argv[1]}").taskset
    tasks = taskset if taskset.bounded else itertools.islice(iter(taskset), _MOST_TASKS)
    for number, task in enumerate(tasks):
        row = {"idx": number, "prompt": task.data.prompt_text or f"task {number}"}
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
