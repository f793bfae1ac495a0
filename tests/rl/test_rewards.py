"""Rewards: signatures, weights, columns; functions that raise, hang, crash or return nonsense; the built-in ones."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support import reward_functions
from weft.config.keys import schema_keys
from weft.config.load import load_config
from weft.config.rl_schema import BUILT_IN_REWARDS, RlAlgorithm, RlConfig
from weft.errors import UserError
from weft.inference.types import Prompt, Sample
from weft.rl.rewards.base import Failures, Rewards
from weft.rl.rewards.builtin import BUILT_IN
from weft.rl.rewards.calls import RewardBatch, RewardFunction, RewardSpec
from weft.rl.rewards.given import name_rewards
from weft.rl.workers import PARENT_LOST

MODULE = "tests.support.reward_functions:"


def sample_of(prompt: Prompt, number: int, text: str) -> Sample:
    """One token for each character."""
    n = len(prompt.tokens)
    tokens = np.array([*prompt.tokens, *map(ord, text)], np.int64)
    sampled = np.arange(len(tokens)) >= n
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(prompt, number, tokens, sampled, zeros, np.zeros(len(tokens), np.int32), "end", text=text)


def scored(
    texts: Sequence[str],
    *names: str,
    columns: Mapping[str, Any] | None = None,
    chat: bool = False,
    code: Mapping[str, bytes] | None = None,
    **keys: Any,
) -> tuple[list[Sample], Failures]:
    """Samples of one prompt, scored by a pool of one process that is ended."""
    messages = ({"role": "user", "content": "?"},) if chat else None
    prompt = Prompt(4, 0, (1, 2), "?", messages, columns or {}, "data.jsonl:5")
    samples = [sample_of(prompt, i, text) for i, text in enumerate(texts)]
    rewards = Rewards(RlAlgorithm(reward=names, **{"reward_workers": 1, "reward_timeout": 20.0, **keys}), code)
    failures = Failures()

    async def run() -> None:
        async with rewards:
            await rewards.start([prompt])
            await rewards.score(samples, failures)

    asyncio.run(run())
    return samples, failures


def given(samples: Sequence[Sample]) -> list[float | None]:
    return [sample.reward for sample in samples]


@pytest.mark.covers("rl.reward_timeout")
def test_what_fails_costs_its_sample() -> None:
    """One call with all: the function raises, ends, crashes or hangs, or gives what is no number; others are scored."""
    texts = ["1", "raise", "2.5", "exit", "crash", "none", "nan", "hang", "inf", "print"]
    samples, failures = scored(texts, MODULE + "as_number", reward_timeout=1.5)
    assert given(samples) == [1.0, None, 2.5, None, None, None, None, None, None, 1.0]
    errors = [sample.notes.get("reward_errors", {}).get("as_number", "") for sample in samples]
    for i, text in {
        1: "ValueError: no such thing (",
        3: "SystemExit: 3",
        4: "the function's process ended with status 7",
        6: "returned nan",
        7: "the function's process gave no answer within 1.5 seconds",
        8: "returned inf",
    }.items():
        assert text in errors[i]
    assert [i for i, error in enumerate(errors) if not error] == [0, 2, 5, 9]
    assert not [p for p in psutil.Process().children() if "weft.rl.rewards.worker" in p.cmdline()]
    news = failures.pop_messages()
    assert len(news) == 3 and news[0].startswith(
        "reward   as_number failed for sample 4.0/1 (data.jsonl:5): ValueError"
    )
    assert failures.metrics() == {"rewards/failed": 6.0, "rewards/as_number/failed": 6.0}
    assert failures.metrics() == {"rewards/failed": 0.0}


def test_a_function_that_fails_for_all_ends_the_run() -> None:
    samples, failures = scored(["raise", "raise"], MODULE + "as_number", "length")
    assert given(samples) == [None, None] and samples[0].rewards == {"as_number": None, "length": -0.95}
    with pytest.raises(UserError, match=r"as_number failed for all 2 samples .* no such thing"):
        failures.metrics()


def tried(*functions: str, folder: Path, **keys: Any) -> list[str]:
    """The lines of `try_out` for functions that are written as source and found in `folder`."""
    (folder / "tried_rewards.py").write_text("\n\n".join(functions))
    names = [line.split("(")[0].removeprefix("def ") for text in functions for line in text.splitlines()[-2:-1]]
    messages = ({"role": "user", "content": "?"},) if keys.pop("chat", False) else None
    prompts = [Prompt(0, 0, (1,), "?", messages, {"answer": "7"}, "data.jsonl:1")]
    config = RlAlgorithm(
        reward=tuple(f"tried_rewards:{name}" for name in names),
        **{"reward_workers": 1, "reward_timeout": 20.0, **keys},
    )

    async def run() -> list[str]:
        async with Rewards(config) as rewards:
            await rewards.start(prompts)
            return await rewards.try_out(prompts, lambda text: [*text.encode()])

    return asyncio.run(run())


def test_a_function_that_fails_for_every_stand_in_answer_is_an_error_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for text, message in {
        "def raises(completions, answer):\n    return [float(answer.no) for _ in completions]": (
            r"raises \(.*tried_rewards.py:1\) fails for each of 3 placeholder answers to data.jsonl:1: AttributeError: "
            r"'list' object has no attribute 'no' \(.*tried_rewards.py:2\)"
        ),
        "import re\n\ndef reads(completions):\n    return [float(re.sub('a', '', [text])) for text in completions]": (
            r"reads \(.*tried_rewards.py:3\) .*TypeError: expected string .* \(.*tried_rewards.py:4\)"
        ),
        "def word(completions):\n    return ['yes' for _ in completions]": (
            r"word \(.*tried_rewards.py:1\) .*: returned 'yes', which is not a number"
        ),
        "def dies(completions):\n    import os; os._exit(3)": r"dies .*: the function's process ended with status 3",
        "def alone(completions):\n    return [1.0]": r"alone returned 1 values for 3 .* at .*tried_rewards.py:1\.",
        "def compute(solution_str, ground_truth):\n    return {'value': 1.0}": (
            r"compute \(.*tried_rewards.py:1\) .*returned a dict without `score`"
        ),
    }.items():
        with pytest.raises(UserError, match=rf"^rl.reward: {message}"):
            tried(text, folder=tmp_path)


def test_stand_in_answers_are_scored_as_a_run_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What some answers, a limit of time or a missing environment explain is no error."""
    monkeypatch.syspath_prepend(str(tmp_path))
    right = "def right(completions, answer, **columns):\n    return [float(text == answer[0]) for text in completions]"
    tagged = (
        "import re\n\ndef tagged(completions):\n"
        "    return [float(re.search('<answer>(.*)</answer>', text)[1]) for text in completions]"
    )
    never = "def never(completions):\n    import time; time.sleep(60)"
    first, second = tried(right, tagged, folder=tmp_path)
    assert first == "right: 1, 0, 0 for 3 placeholder answers to data.jsonl:1"
    assert second.startswith(
        "tagged: no reward, no reward, 7 for 3 placeholder answers to data.jsonl:1; the last error"
    )
    (line,) = tried(never, folder=tmp_path, reward_timeout=0.3)
    assert line.endswith("the last error: the function's process gave no answer within 0.3 seconds")
    replies = "def replies(completions):\n    return [float(said[-2]['content']) for said in completions]"
    with pytest.raises(UserError, match="IndexError: list index out of range"):
        tried(replies, folder=tmp_path, chat=True)
    (line,) = tried(replies, folder=tmp_path, chat=True, environment="tests.support.environments:Counter")
    assert "IndexError: list index out of range" in line


@pytest.mark.parametrize("name", ["too_few", "one_for_all", "pairs"])
def test_another_number_of_values_is_an_error_at_the_first_call(name: str) -> None:
    """Though each completion alone may have as many."""
    with pytest.raises(UserError, match=rf"rl.reward: {name} returned \d values for \d completions: a reward function"):
        scored(["1", "2", "3"], MODULE + name)


@pytest.mark.covers("rl.reward", "rl.reward_weights", "rl.reward_options")
@pytest.mark.parametrize("chat", [False, True])
def test_trls_signature_with_columns_and_weights(chat: bool) -> None:
    samples, _ = scored(
        ["7", "8"], MODULE + "seen", "length", columns={"answer": "7", "more": 1}, chat=chat,
        reward_weights=(2.0, 0.5), reward_options={"length.target": 2},
    )  # fmt: skip
    assert [list(sample.rewards.items()) for sample in samples] == [
        [("seen", 1.0), ("length", -0.5)],
        [("seen", 0.0), ("length", -0.5)],
    ]
    assert given(samples) == [1.75, -0.25]


def test_the_arguments_of_functions_are_listed() -> None:
    rewards = Rewards(RlAlgorithm(reward=("exact_match", "length", "format")))
    asyncio.run(rewards.start())
    assert rewards.lines() == [
        "exact_match, weight 1; arguments: completions, the right answer, and all other columns",
        "length, weight 1; arguments: completion_ids, and all other columns",
        "format, weight 1; arguments: completions, and all other columns",
    ]


def test_a_row_without_a_column_of_other_rows_has_none_there() -> None:
    """As in a table. A parameter that has a default keeps it."""
    rows = [{"answer": "7", "more": 1, "hint": "h"}, {"answer": "7"}]
    prompts = [Prompt(i, 0, (1, 2), "?", None, row, f"data.jsonl:{i}") for i, row in enumerate(rows)]
    samples = [sample_of(prompt, i, "7") for i, prompt in enumerate(prompts)]
    rewards = Rewards(RlAlgorithm(reward=(MODULE + "told",), reward_workers=1, reward_timeout=20.0))

    async def run() -> None:
        async with rewards:
            await rewards.start(prompts)
            await rewards.score(samples, Failures())

    asyncio.run(run())
    assert [sample.notes.get("reward_errors") for sample in samples] == [None, None]
    assert given(samples) == [1.0, 5.0]


def test_verls_signature() -> None:
    columns = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
    samples, _ = scored(["7", "8", "raise"], MODULE + "compute_score", columns=columns)
    assert given(samples) == [1.0, 0.0, None]
    assert given(scored(["7", "8"], MODULE + "async_score", columns=columns)[0]) == [1.0, 0.0]
    assert samples[1].notes["compute_score"] == {"score": 0.0, "prediction": "8"}
    assert "RuntimeError: scorer" in samples[2].notes["reward_errors"]["compute_score"]


def test_async_functions_wait_side_by_side_and_a_failure_is_one_samples() -> None:
    began = time.perf_counter()
    samples, _ = scored(["1"] * 20 + ["raise"], MODULE + "slow_number")
    assert given(samples) == [1.0] * 20 + [None]
    assert time.perf_counter() - began < 0.3 * 21


@pytest.mark.covers("rl.reward_workers")
@pytest.mark.parametrize("workers", [1, 2])
def test_so_many_processes_work_side_by_side(workers: int) -> None:
    """A call for each prompt; three prompts."""
    samples = [sample_of(Prompt(i, 0, (1,), "?"), 0, "a") for i in range(3)]
    rewards = Rewards(RlAlgorithm(reward=(MODULE + "process_slowly",), reward_workers=workers))

    async def run() -> None:
        async with rewards:
            await rewards.score(samples, Failures())

    asyncio.run(run())
    assert len({sample.reward for sample in samples}) == workers


@pytest.mark.covers("rl.reward_column")
def test_a_column_says_which_functions_are_asked() -> None:
    prompts = [
        Prompt(i, 0, (1,), "?", None, {"by": chosen}, f"d:{i}") for i, chosen in enumerate(("length", ["as_number"]))
    ]
    rewards = Rewards(
        RlAlgorithm(
            reward=(MODULE + "as_number", "length"),
            reward_column="by",
            reward_workers=1,
            reward_options={"length.target": 1},
        )
    )
    samples = [sample_of(prompt, 0, "5") for prompt in prompts]

    async def run() -> None:
        await rewards.start(prompts)
        await rewards.score(samples, Failures())
        with pytest.raises(UserError, match="d:9: rl.reward_column: `by` is 'math', but must be a name in rl.reward"):
            await rewards.start([Prompt(9, 0, (1,), "?", None, {"by": "math"}, "d:9")])
        await rewards.close()

    asyncio.run(run())
    assert [sample.rewards for sample in samples] == [{"length": 0.0}, {"as_number": 5.0}]
    assert given(samples) == [0.0, 5.0]


def test_samples_whose_environment_failed_are_not_scored() -> None:
    prompt = Prompt(0, 0, (1,), "?")
    good, bad = sample_of(prompt, 0, "ab"), sample_of(prompt, 1, "ab")
    good.rewards["environment"], bad.notes["error"] = 0.5, "Env.step: boom"
    rewards = Rewards(RlAlgorithm(reward=("length",), reward_options={"length.target": 4}))
    failures = Failures()
    asyncio.run(rewards.score([good, bad], failures))
    assert (good.reward, bad.reward, bad.rewards) == (0.0, None, {})
    assert failures.metrics()["rewards/environment/failed"] == 1
    asyncio.run(rewards.score([bad], failures))
    with pytest.raises(UserError, match="rl.environment failed for all 1 samples"):
        failures.metrics()
    bad.notes["error"] = f"Env.step: its process {PARENT_LOST}"  # by no fault of the environment
    asyncio.run(rewards.score([bad], failures))
    assert failures.metrics()["rewards/environment/failed"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_miles", "has the parameters args, sample; a reward function is"),
        ("NO_FUNCTION", "is a int, which cannot be called"),
        ("absent", "tests.support.reward_functions has no absent"),
        ("needs_more", "data.jsonl:5: rl.reward: needs_more has a parameter `difficulty`, but the row has no columns"),
    ],
)
def test_what_is_no_reward_function_is_said_before_anything_runs(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        scored([], MODULE + name)


def test_a_missing_answer_is_said_before_anything_runs() -> None:
    with pytest.raises(
        UserError, match=r"exact_match needs the reference answer, .* Set 'data.columns={answer: COLUMN}'"
    ):
        scored([], "exact_match", columns={"question": "a"})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.reward=[]", "rl.reward is empty: set at least one"),
        ("rl.reward=[maths]", "rl.reward contains maths, which is not one of math"),
        ("rl.reward=[math,math]", "contains math twice"),
        ("rl.reward_weights=[1,2]", "rl.reward_weights has 2 numbers for 1 reward functions"),
        ("rl.reward_options={maths.boxed: true}", "maths.boxed is not an argument of a reward function"),
        ("rl.reward=[regex]", "regex, whose pattern is not set"),
        ("rl.environment=calc", "rl.environment is calc, which is not an import path"),
        ("rl.max_turns=3", "rl.max_turns would have no effect"),
        ("eval.samples=4", "eval.samples would have no effect"),
    ],
)
def test_configs_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config([], ["model.path=none", "data.path=none", "rl.reward=[math]", override], schema=RlConfig)


# ---------------------------------------------------------------- built-in functions


def built_in(name: str, text: str, **columns: Any) -> float | None:
    options = {
        key: columns.pop(key)
        for key in ("after", "ignore_case", "pattern", "tags", "target", "boxed")
        if key in columns
    }
    function = RewardFunction(RewardSpec(name, name, options))
    batch = RewardBatch(["?"], [text], [list(map(ord, text))], {key: [value] for key, value in columns.items()})
    (outcome,) = function(batch)
    assert outcome.error is None, outcome.error
    return outcome.value


@pytest.mark.parametrize(
    ("name", "text", "columns", "expected"),
    [
        ("exact_match", " 42\n", {"answer": 42}, 1.0),
        ("exact_match", "42.", {"answer": "42"}, 0.0),
        ("exact_match", "so #### 42", {"answer": "42", "after": "####"}, 1.0),
        ("exact_match", "42", {"answer": "42", "after": "####"}, 0.0),
        ("exact_match", "so #### 42 ", {"answer": "40 + 2 = 42\n#### 42", "after": "####"}, 1.0),
        ("exact_match", "so #### 40", {"answer": "40 + 2 = 42\n#### 42", "after": "####"}, 0.0),
        ("exact_match", "42", {"answer": "40 + 2 = 42\n#### 42", "after": "####"}, 0.0),
        ("exact_match", "", {"answer": "40 ####", "after": "####"}, 0.0),
        ("exact_match", "Paris", {"solution": "paris", "ignore_case": True}, 1.0),
        ("exact_match", "a", {"answer": None, "reward_model": {"ground_truth": "a"}}, 1.0),
        ("regex", "x = 3", {"pattern": r"= \d"}, 1.0),
        ("regex", "x = y", {"pattern": r"= \d"}, 0.0),
        ("regex", "= 3, = 4", {"pattern": r"= (\d)", "answer": "4"}, 1.0),
        ("regex", "= 3, = 4", {"pattern": r"= (\d)", "answer": "3"}, 0.0),
        ("regex", "none", {"pattern": r"= (\d)", "answer": ""}, 0.0),
        ("regex", "#### 4", {"pattern": "#### (.+)", "answer": "2 + 2\n#### 4"}, 1.0),
        ("regex", "#### 5", {"pattern": "#### (.+)", "answer": "2 + 2\n#### 4"}, 0.0),
        ("regex", "so 8", {"pattern": r"(\d)", "answer": "18"}, 0.0),
        ("format", "<think>a</think> b", {}, 1.0),
        ("format", "a</think> b", {}, 1.0),
        ("format", "<think>a</think>", {}, 0.0),
        ("format", "<think></think> b", {}, 0.0),
        ("format", "<think>a</think> b </think>", {}, 0.0),
        ("format", "<think>a<think>b</think> b", {}, 0.0),
        ("format", "<think>a</think>\n<answer>b</answer>", {"tags": ("think", "answer")}, 1.0),
        ("format", "<think>a</think>\n<answer>b</answer>c", {"tags": ("think", "answer")}, 0.0),
        ("format", "<answer>b</answer><think>a</think>", {"tags": ("think", "answer")}, 0.0),
        ("length", "abc", {"target": 4}, -0.25),
        ("math", r"so \boxed{\frac{1}{2}}", {"answer": "0.5"}, 1.0),
        ("math", "The answer is 72.", {"answer": "He sold 48/2 = 24\n#### 72"}, 1.0),
        ("math", "The answer is 71.", {"answer": "#### 72"}, 0.0),
        ("math", r"<think>\boxed{3}</think> It is $4$", {"answer": "3"}, 0.0),
        ("math", "It is 3", {"answer": "3", "boxed": True}, 0.0),
        ("math", r"\boxed{x^2+2x+1}", {"answer": "$(x+1)^2$"}, 1.0),
        ("math", "no idea", {"answer": "3"}, 0.0),
    ],
)  # fmt: skip
def test_built_in(name: str, text: str, columns: dict[str, Any], expected: float) -> None:
    assert built_in(name, text, **columns) == expected


def test_a_built_in_function_without_a_process_starts_none() -> None:
    samples, _ = scored(["ab"], "length", "format", "exact_match", columns={"answer": "ab"})
    assert samples[0].reward == pytest.approx(-0.98 + 0 + 1)
    assert not Rewards(RlAlgorithm(reward=("length", "format", "exact_match")))._outside
    assert tuple(BUILT_IN) == BUILT_IN_REWARDS == ("math", "exact_match", "regex", "format", "length")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_one_is_explained(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-reward.md"
    assert f"\n| `{name}` | " in page.read_text(encoding="utf-8")
    assert name in {word.strip("(,)") for word in schema_keys(RlConfig)["rl.reward"].help.split()}


def test_processes_import_no_torch_and_end_with_the_run() -> None:
    (sample,), _ = scored(["1"], MODULE + "process", MODULE + "has_torch")
    assert sample.rewards["has_torch"] == 0.0
    assert sample.rewards["process"] not in (None, os.getpid())
    assert not os.path.exists(f"/proc/{int(sample.rewards['process'] or 0)}")


# ---------------------------------------------------------------- functions that a program gives


BONUS = 0.5


class Judge:
    """An object that can be called."""

    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(text) + self.bonus for text in completions]


def in_a_program(code: str) -> dict[str, Any]:
    """The names of a program of its own, as of a script or a notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    return names


def test_functions_of_a_program_are_sent_and_others_named() -> None:
    program = in_a_program("LESS = 1\n\ndef less(completions, **_):\n    return [float(t) - LESS for t in completions]")
    own_reward = lambda completions, **_: [BONUS * float(text) for text in completions]  # noqa: E731
    functions = [program["less"], reward_functions.as_number, own_reward, Judge(2.0), "length"]
    names, code = name_rewards(functions)
    assert names == ["__main__:less", MODULE + "as_number", "__main__:reward_3", "__main__:Judge", "length"]
    assert list(code) == ["__main__:less", "__main__:reward_3", "__main__:Judge"]
    (sample,), _ = scored(["3"], *names, code=code, reward_options={"length.target": 1})
    assert sample.rewards == {"less": 2.0, "as_number": 3.0, "reward_3": 1.5, "Judge": 5.0, "length": 0.0}
    assert name_rewards("math") == (["math"], {}) and name_rewards([program["less"]] * 2)[0][1] == "__main__:reward_2"


def test_what_cannot_be_sent_is_said() -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"reward: held cannot be pickled for the reward processes: .*lock"):
        name_rewards(
            in_a_program("def hold(lock):\n    def held(completions):\n        lock\n    return held")["hold"](lock)
        )
    with pytest.raises(UserError, match="reward: 3 is of type int: give a function, the name of a built-in one"):
        name_rewards(3)
    with pytest.raises(UserError, match="__main__:less is defined in the program that started the run"):
        scored([], "__main__:less")


@pytest.mark.parametrize(("page", "text"), [("notebook.md", "7"), ("write-a-reward.md", "It is 7")])
def test_the_rewards_of_the_docs_take_texts_and_messages(page: str, text: str) -> None:
    from tests.support.docs_runner import blocks

    folder = Path(__file__).parents[2] / "docs" / "how-to"
    (block,) = [block.text for block in blocks(folder / page) if "def is_right" in block.text]
    space: dict[str, Any] = {}
    exec(block.partition("\n\n\nrun = ")[0], space)
    messages = [{"role": "assistant", "content": text}]
    assert space["is_right"]([text, messages, "no"], answer=["7", "7", "7"]) == [1.0, 1.0, 0.0]


def test_a_reward_that_takes_messages_for_texts_is_told_how_to_read_them() -> None:
    from tests.support.rl_samples import group

    for error, advised in (("AttributeError: 'list' object has no attribute 'strip'", True), ("ValueError: no", False)):
        failures = Failures()
        failures.count("is_right", group((0.0, 0.0)).samples[0], error)
        with pytest.raises(UserError) as caught:
            failures.metrics()
        assert ("completions[i][-1]['content']" in str(caught.value)) is advised
