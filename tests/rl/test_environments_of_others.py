"""Environments that were not written for weft: games of Gymnasium's API, servers of OpenEnv, tasks of verifiers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rl.test_environments import QUESTION, SAMPLING, TOKENIZER, Scripted, shown
from tests.support.cases import saved_model
from tests.support.local_rl import rollouts_of, run_config
from tests.support.openenv_server import stand_in
from tests.support.rl_samples import algorithm, rl_config
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.data.encode import Encoding
from weft.errors import UserError
from weft.inference.types import Prompt, Sample
from weft.rl.agents.agents import load_agents
from weft.rl.agents.base import check_agent
from weft.rl.chat import ChatRenderer
from weft.rl.environments.base import Reply, load_class
from weft.rl.environments.episodes import EnvironmentFailure, Episodes
from weft.rl.environments.openenv_adapter import read_action
from weft.rl.environments.pool import EnvironmentPool
from weft.rl.prompts import PromptRules, read_prompts
from weft.rl.rollouts import rollout_group

SECRET_7 = replace(QUESTION, columns={"seed": 7})


def conversations(path: str, max_prompt: int = 999, timeout: float = 20) -> Episodes:
    return Episodes(load_class(path), EnvironmentPool(path), ChatRenderer(TOKENIZER), 5, max_prompt, 400, timeout)


def samples_of(path: str, *plays: Sequence[str], prompts: Sequence[Prompt] = (), **limits: Any) -> list[Sample]:
    """One sample for each play, which is what the policy says turn by turn. prompts: of each; default: SECRET_7."""

    async def run() -> list[Sample]:
        env = conversations(path, **limits)
        asked = zip(plays, prompts or [SECRET_7] * len(plays), strict=True)
        try:
            calls = (rollout_group(prompt, 1, Scripted(*play), SAMPLING, env, seed=11) for play, prompt in asked)
            return [group.samples[0] for group in await asyncio.gather(*calls)]
        finally:
            await env.close()

    return asyncio.run(run())


def with_columns(**columns: Any) -> Prompt:
    return replace(QUESTION, columns=columns)


def check_the_game(sample: Sample, crashed: Sample) -> None:
    """Three guesses, by hand: the first observation is in the prompt, behind the question, and nothing of it is
    trained; each of the policy's answers is as it was sampled; the rewards are summed. A crash costs its own sample."""
    prompt = "<|im_start|>user\n3+4?\n\nGuess a number from 0 to 9.<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(sample.prompt.tokens) == prompt
    turn = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    replies = turn.format("higher"), turn.format("lower")
    completion = "3<|im_end|>{}9<|im_end|>{}7<|im_end|>".format(*replies)
    assert TOKENIZER.decode(sample.completion()) == completion
    assert shown(sample, True) == "3<|im_end|>9<|im_end|>7<|im_end|>" and shown(sample, False) == "".join(replies)
    assert sample.rewards == {"environment": 1.2} and sample.turns == 3 and sample.trained
    assert sample.prompt.messages == ({"role": "user", "content": "3+4?\n\nGuess a number from 0 to 9."},)
    assert not crashed.trained and crashed.notes["error"]


def test_a_game_of_gymnasiums_api() -> None:
    check_the_game(*samples_of("gymnasium:tests.support.games:HigherLower", ("3", "9", "7"), ("crash", "7")))
    numbered = "gymnasium:tests.support.games:Numbered"
    limited, fourth = with_columns(seed=7, options={"limit": 1}), replace(QUESTION, index=4)
    plays = ("I say 12", "what?", "then 3, or 7"), ("3",), ("4",)
    sample, short, by_index = samples_of(numbered, *plays, prompts=(SECRET_7, limited, fourth))
    assert sample.rewards == {"environment": 1.0} and sample.turns == 3 and sample.notes["terminated"]
    assert shown(sample, False).count("Answer with a number from 0 to 9.") == 2
    assert short.notes["truncated"] and by_index.rewards == {"environment": 1.0}  # the index is its seed


def test_what_cannot_be_a_game() -> None:
    (sample,) = samples_of("gymnasium:tests.support.games:Arrays", ("3",), max_prompt=5)
    assert sample.notes["error"].startswith("Game.start: TypeError: an observation is list, not a text")
    episodes = conversations("gymnasium:tests.support.games:HigherLower", max_prompt=5)
    opening = Reply(messages=[{"role": "user", "content": "Guess."}])
    with pytest.raises(EnvironmentFailure, match="more than rollout.max_prompt_tokens=5"):
        episodes.opened(QUESTION, opening)
    with pytest.raises(EnvironmentFailure, match="returned done=True before the first answer"):
        episodes.opened(QUESTION, Reply(done=True))
    with pytest.raises(UserError, match="is a text, but rl.environment starts with messages"):
        episodes.opened(Prompt(0, 0, (5,), "> "), opening)
    text = replace(episodes, most_prompt=99).opened(Prompt(0, 0, (5,), "> "), Reply(tokens=[6, 7], text=None))
    assert text.tokens == (5, 6, 7)


def test_a_server_of_openenv() -> None:
    with stand_in() as url:
        plays = ("3", "9", "7"), ("crash", "7"), ('{"txet": 3}', '```json\n{"text": "7"}\n```'), ("seven",), ("3",)
        reset = with_columns(reset={"seed": 4, "options": {"limit": 1}})
        samples = samples_of(f"openenv:{url}", *plays, prompts=(*[SECRET_7] * 4, reset))
    check_the_game(*samples[:2])
    _, _, invalid, failed, limited = samples
    assert shown(invalid, False).count("Invalid action: text: Field required") == 1
    assert invalid.rewards == {"environment": 1.0} and invalid.notes["observation"]["text"] == "right"
    assert "EXECUTION_ERROR" in failed.notes["error"] and limited.rewards == {"environment": 0.1}
    with pytest.raises(UserError, match=r"no server of OpenEnv answers at http://127.0.0.1:9/schema"):
        load_class("openenv:http://127.0.0.1:9")


def test_an_answer_as_an_action() -> None:
    several = {"properties": {"x": {"type": "integer"}, "y": {}}, "required": ["x", "y"]}
    assert read_action('{"x": 1, "y": 2}', several) == {"x": 1, "y": 2}
    with pytest.raises(ValueError, match="answer with a JSON object"):
        read_action("1", several)
    number = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert read_action(" 12 ", number) == {"x": 12}
    text = {"properties": {"x": {"type": "string"}}, "required": ["x"]}
    assert read_action("12", text) == {"x": "12"}


def test_a_run_with_a_game(tmp_path: Path) -> None:
    """A whole run: samples of a prompt begin with the same observation, and rewards are the game's."""
    shutil.copytree(saved_model("qwen3", vocab_size=len(TOKENIZER), initializer_range=0.05), tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    data = tmp_path / "games.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Play {n}.", "seed": n}) + "\n" for n in range(4)))
    words = [
        f"model.path={tmp_path / 'model'}", f"data.path={data}", "rl.reward=[]", "rl.chat=true",
        "rl.prompts_per_step=2", "rl.group_size=2", "rl.max_turns=3", "train.steps=1", "schedule.warmup_steps=0",
        "rollout.max_prompt_tokens=150", "rollout.max_new_tokens=100", "step.max_tokens_per_device=600",
        f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    for name, error in (
        ("verifiers:gsm8k", "set rl.agent=verifiers:gsm8k"),
        ("openenv:localhost", "write the server's address"),
        ("gymnasium:", "write a Gymnasium id or an import path"),
        ("gymnasium:tests.support.games:Lower", "has no Lower"),
    ):
        with pytest.raises(UserError, match=error):
            load_config([], [*words, f"rl.environment={name}"], RlConfig)
    run_config(load_config([], [*words, "rl.environment=gymnasium:tests.support.games:Endless"], RlConfig))
    (samples,) = rollouts_of(tmp_path / "run").values()
    assert len(samples) == 4
    for sample in samples:
        assert sample["prompt"].endswith("Guess a number from 0 to 9.") and sample["trained"]
        replies = json.loads(sample["rewards"])["environment"] / 0.1
        assert round(replies) in (sample["turns"], sample["turns"] - 1)  # the last answer was cut, or its reply


def test_gymnasiums_own_games() -> None:
    pytest.importorskip("gymnasium")
    (sample,) = samples_of("gymnasium:FrozenLake-v1", ("0", "2", "nowhere", "3"), prompts=[with_columns(seed=0)])
    assert "[S]FFF" in str(TOKENIZER.decode(sample.prompt.tokens)) and sample.turns == 4 and sample.trained
    assert "Answer with a number from 0 to 3." in shown(sample, False) and "(Left)" in shown(sample, False)
    assert sample.rewards == {"environment": 0.0}
    with pytest.raises(UserError, match="gymnasium:NoGame-v9 cannot be created: .*NoGame"):
        load_class("gymnasium:NoGame-v9")


@pytest.fixture(scope="module")
def openenv_url() -> Iterator[str]:
    pytest.importorskip("openenv.core")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "tests.support.openenv_server", str(port)])
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/schema", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def test_openenvs_own_server(openenv_url: str) -> None:
    plays = ("3", "9", "7"), ("7",), ('{"txet": 3}', "7"), ("seven",)
    *samples, failed = samples_of(f"openenv:{openenv_url}", *plays)
    assert [s.rewards["environment"] for s in samples] == pytest.approx([1.2, 1.0, 1.0])
    assert all(sample.trained for sample in samples) and "Field required" in shown(samples[2], False)
    assert "EXECUTION_ERROR" in failed.notes["error"] and not failed.trained


def verifiers_samples(agent: str, *answers: str) -> list[Sample]:
    """One episode for each answer, which the policy gives to every call; of the tasks in order."""
    config = rl_config(algorithm(reward=(), agent=agent), max_prompt_tokens=2000, max_new_tokens=40)
    agents = load_agents(config, TOKENIZER)
    assert agents is not None
    rows = [{"prompt": f"task {n}", "idx": n} for n in range(len(answers))]
    prompts = read_prompts(rows, TOKENIZER, Encoding(), PromptRules(999))

    async def run() -> list[Sample]:
        await agents.start()
        try:
            asked = zip(answers, prompts, strict=True)
            calls = (rollout_group(prompt, 1, Scripted(answer), SAMPLING, agents, seed=11) for answer, prompt in asked)
            return [group.samples[0] for group in await asyncio.gather(*calls)]
        finally:
            await agents.close()

    return asyncio.run(run())


def test_tasks_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own loop asks through its own client; the two calls of an episode are one document."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "support")
    settings = tmp_path / "env.toml"
    settings.write_text('[env]\ntaskset.id = "verifiers_guess"\nagent.runtime.type = "subprocess"\n')
    right, wrong, failed, absent = verifiers_samples(f"verifiers:{settings}", "It is 4.", "4?", "fail", "It is 7.")
    turn = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    start = "<|im_start|>user\n0+4?<|im_end|>\n<|im_start|>assistant\n"
    assert "error" not in right.notes, right.notes
    assert TOKENIZER.decode(right.tokens) == f"{start}It is 4.<|im_end|>{turn}It is 4.<|im_end|>"
    assert shown(right, True) == "It is 4.<|im_end|>" * 2 and right.trained
    assert right.rewards == {"agent": 2.0} and right.notes["scores"] == {"right": 1.0}
    assert right.notes["metrics"] == {"turns": 2.0} and wrong.rewards == {"agent": 0.0}
    assert not failed.trained and "the harness failed" in failed.notes["error"]
    assert not absent.trained and "has no task 3" in absent.notes["error"]
    written = subprocess.run(
        [sys.executable, "-m", "weft.rl.agents.verifiers_agent", "verifiers_guess"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [json.loads(line) for line in written.stdout.splitlines()] == [
        {"idx": number, "prompt": f"{number}+4?"} for number in range(3)
    ]
    with pytest.raises(UserError, match="rl.agent: verifiers:no_such_env cannot be loaded: ModuleNotFoundError"):
        check_agent("verifiers:no_such_env")


def test_verifiers_that_is_not_installed() -> None:
    if importlib.util.find_spec("verifiers") is not None:
        pytest.skip("it is installed")
    with pytest.raises(UserError, match="pip install 'verifiers>=0.4'"):
        check_agent("verifiers:gsm8k")
