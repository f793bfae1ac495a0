"""The rewards of a run: scoring samples with reward functions, and counting failures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from weft.config.conditions import REWARD_MODEL
from weft.config.rl_schema import RlAlgorithm, reward_names
from weft.config.yaml12 import override
from weft.errors import UserError
from weft.inference.types import Prompt, Sample
from weft.launch.machine import cpu_cores
from weft.rl.rewards.builtin import INLINE, has_reference, reference_answers
from weft.rl.rewards.calls import STANDARD, RewardBatch, RewardFunction, RewardOutcome, RewardSignature, RewardSpec
from weft.rl.rewards.pool import RewardPool
from weft.rl.workers import PARENT_LOST

# Rewards that come from replies of an environment, and from an agent -> the key that names it.
ENVIRONMENT, AGENT = "environment", "agent"
_GIVEN = {ENVIRONMENT: "rl.environment", AGENT: "rl.agent"}
Scorer = Callable[[Sequence[Sample]], Awaitable[list[RewardOutcome]]]
_OF_A_MODEL = RewardSignature("list", (), (), False, False)
_NEWS = 3  # most messages about failures between two calls of `metrics`
_MOST_WORKERS = 16

_OF_MESSAGES = (
    ". If prompts are messages, or with rl.chat, completions are lists of messages, as in TRL. The text of a "
    "completion is completions[i][-1]['content'], or weft.rl.rewards.builtin.completion_text(completions[i])."
)

# Answers for `Rewards.try_out`: the right answer, a sentence, and the formats that many functions expect. ANSWER is
# replaced by the row's reference answer.
_PLACEHOLDERS = (
    "ANSWER",
    "This is a placeholder answer.",
    "<think>\nThis is a placeholder thought.\n</think>\n\n<answer>ANSWER</answer>\n\\boxed{ANSWER}\n#### ANSWER",
)


class Failures:
    """Counts of calls and failures by function."""

    def __init__(self) -> None:
        self._calls, self._failed, self._last = Counter[str](), Counter[str](), dict[str, str]()
        self._lost = set[str]()  # functions of which a process has ended with its parent
        self._news: list[str] = []

    def count(self, name: str, sample: Sample, error: str | None) -> None:
        """Count one call for a sample. error: None if it succeeded."""
        self._calls[name] += 1
        if error is None:
            return
        self._last[name] = f"sample {sample.id} ({sample.prompt.source}): {error}"
        self._failed[name] += 1
        if PARENT_LOST in error:
            self._lost.add(name)
        if self._failed.total() <= _NEWS:
            self._news.append(f"reward   {name} failed for {self._last[name]}")

    def metrics(self) -> dict[str, float]:
        """`rewards/failed`, in total and per function with failures; resets the counts. UserError if a function, or the
        environment, failed for every sample, unless the parent of its processes was killed or stopped, because the next
        step may then succeed."""
        failed, calls, last, lost = self._failed, self._calls, self._last, self._lost
        self._calls, self._failed, self._last, self._lost = Counter(), Counter(), {}, set()
        for name, count in failed.items():
            if count == calls[name] and name not in lost:
                key = _GIVEN.get(name, f"rl.reward: {name}")
                raise UserError(
                    f"{key} failed for all {count} samples of this step, so the step has no sample to train. The "
                    f"last error: {last[name]}{_about_messages(last[name])}"
                )
        by_name = {f"rewards/{name}/failed": float(count) for name, count in failed.items()}
        return {"rewards/failed": float(failed.total()), **by_name}

    def pop_messages(self) -> list[str]:
        """Messages about the first failures since the last call."""
        news, self._news = self._news, []
        return news


class Rewards:
    """Scores samples with the reward functions: built-in ones that cannot hang run here, others in worker processes. A
    failed call loses only its sample."""

    def __init__(self, config: RlAlgorithm, pickled: Mapping[str, bytes] | None = None) -> None:
        """pickled: pickled functions by their name in rl.reward."""
        self.functions = [
            RewardSpec(name, path, _options(config, name), (pickled or {}).get(path))
            for name, path in zip(reward_names(config.reward), config.reward, strict=True)
        ]
        weights = config.reward_weights or (1.0,) * len(self.functions)
        self.weights = {
            ENVIRONMENT: 1.0,
            AGENT: 1.0,
            **{f.name: w for f, w in zip(self.functions, weights, strict=True)},
        }
        self.column = config.reward_column
        self._reward_from = (
            AGENT if config.agent is not None else ENVIRONMENT if config.environment is not None else None
        )
        # Samples that only a teacher judges have a reward of 0, so that they count.
        self._unrewarded = config.teacher is not None and not config.reward and self._reward_from is None
        self._inline = {f.name: RewardFunction(f) for f in self.functions if f.path in INLINE}
        self._models = [f.name for f in self.functions if f.path.startswith(REWARD_MODEL)]
        self.scorers: dict[str, Scorer] = {}  # of the reward models, once their ranks have started
        self._outside = [f for f in self.functions if f.name not in {*self._inline, *self._models}]
        self._pool = RewardPool(
            self._outside, config.reward_workers or min(cpu_cores(), _MOST_WORKERS), config.reward_timeout
        )
        self._signatures: dict[str, RewardSignature] = {}
        self._columns: dict[str, None] = {}  # of all rows, in order

    async def start(self, prompts: Sequence[Prompt] = ()) -> None:
        """Import the functions. UserError if that fails, or if a prompt lacks a column that a function requires."""
        if self._outside:
            signatures = await self._pool.describe()
            self._signatures = {f.name: d for f, d in zip(self._outside, signatures, strict=True)}
        self._signatures |= {name: function.signature for name, function in self._inline.items()}
        self._signatures |= dict.fromkeys(self._models, _OF_A_MODEL)
        for prompt in prompts:
            self._check(prompt)
            self._columns.update(dict.fromkeys(prompt.columns))

    async def try_out(self, prompts: Sequence[Prompt], encode: Callable[[str], list[int]]) -> list[str]:
        """Call each function once, with placeholder answers to the first prompt that it scores and all columns of that
        row. Returns a line per function with its values; UserError if a function raises, or returns no number, for each
        answer. If a function exceeds the time limit, or if the run has an environment, its errors are in the line
        instead.

        encode: the tokens of a text. Call start() first.
        """
        return list(await asyncio.gather(*(self._tried(function, prompts, encode) for function in self.functions)))

    def lines(self) -> list[str]:
        """A line per function with its weight and arguments. Call start() first."""
        lines = []
        for function in self.functions:
            signature = self._signatures[function.name]
            if function.name in self._models:
                lines.append(f"{function.path}, weight {self.weights[function.name]:g}; reads whole conversations")
                continue
            arguments = [name for name in signature.columns if name in STANDARD or name in signature.required]
            arguments += ["the right answer"] * signature.reference
            arguments += ["and all other columns" if arguments else "all columns"] * signature.takes_all
            lines.append(
                f"{function.path}, weight {self.weights[function.name]:g}; arguments: {', '.join(arguments) or 'none'}"
            )
        return lines

    async def score(self, samples: Sequence[Sample], failures: Failures) -> None:
        """Set `rewards` and `reward` of each sample, from its text.

        Consecutive samples of one prompt are scored in one call per function; branches of an episode get its rewards.
        `reward` stays None, and the sample is
        not trained, if all functions return None or one fails. failures: counts the calls.
        """
        if not self._signatures:
            await self.start()
        episodes = [sample for sample in samples if not sample.branch]
        groups = [
            list(group) for _, group in groupby(episodes, lambda sample: (sample.prompt.id, sample.prompt.source))
        ]
        await asyncio.gather(*(self._call(f, group, failures) for group in groups for f in self.functions))
        for sample in episodes:
            self._sum(sample, failures)
        scored = {(sample.prompt.id, sample.prompt.source, sample.number): sample for sample in episodes}
        for sample in samples:
            if sample.branch:
                episode = scored[sample.prompt.id, sample.prompt.source, sample.number]
                sample.rewards, sample.reward = dict(episode.rewards), episode.reward

    async def __aenter__(self) -> Rewards:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the worker processes."""
        await self._pool.close()

    async def _call(self, function: RewardSpec, group: Sequence[Sample], failures: Failures) -> None:
        """Score samples of one prompt with one function."""
        samples = [sample for sample in group if "error" not in sample.notes]
        if not samples or function.name not in self._named(samples[0].prompt):
            return
        for sample, outcome in zip(samples, await self._outcomes(function, samples), strict=True):
            _note(function.name, sample, outcome)
            failures.count(function.name, sample, outcome.error)

    async def _outcomes(self, function: RewardSpec, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """What one function returns for samples of one prompt."""
        if function.name in self._models:
            return await self.scorers[function.name](samples)
        batch = self._batch(function, samples)
        inline = self._inline.get(function.name)
        return inline(batch) if inline is not None else await self._pool.call(self._outside.index(function), batch)

    async def _tried(self, function: RewardSpec, prompts: Sequence[Prompt], encode: Callable[[str], list[int]]) -> str:
        """Call one function with the placeholder answers to the first prompt that it scores; returns a line."""
        prompt = next((prompt for prompt in prompts if function.name in self._named(prompt)), None)
        if prompt is None:
            return f"{function.name}: never called: no prompt names it in column `{self.column}`"
        if function.name in self._models:
            return f"{function.name}: not tried: its ranks have not started"
        right = next(iter(reference_answers(prompt.columns)), "42")
        texts = [text.replace("ANSWER", str(right)) for text in _PLACEHOLDERS]
        samples = [stand_in(prompt, number, text, encode(text)) for number, text in enumerate(texts)]
        description = f"{len(samples)} placeholder answers to {prompt.source}"
        try:
            outcomes = await self._outcomes(function, samples)
        except UserError as error:
            raise UserError(f"{error} It is defined at {self._signatures[function.name].source}.") from error
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        values = ", ".join("no reward" if outcome.value is None else f"{outcome.value:g}" for outcome in outcomes)
        line = f"{function.name}: {values} for {description}"
        if not errors:
            return line
        # A slow function may be starting a judge, and a function may need an environment's replies, which are missing
        # here.
        if len(errors) < len(samples) or any(outcome.late for outcome in outcomes) or self._reward_from:
            return f"{line}; the last error: {errors[-1]}"
        source = self._signatures[function.name].source
        raise UserError(
            f"rl.reward: {function.name}{f' ({source})' if source else ''} fails for each of {description}: "
            f"{errors[-1]}{_about_messages(errors[-1])}"
        )

    def _sum(self, sample: Sample, failures: Failures) -> None:
        error = sample.notes.get("error")
        if error or not sample.rewards.keys().isdisjoint(_GIVEN):
            failures.count(self._reward_from or ENVIRONMENT, sample, error)
        order = [*(f.name for f in self.functions), *_GIVEN]  # calls end in any order
        sample.rewards = {name: sample.rewards[name] for name in order if name in sample.rewards}
        values = {name: value for name, value in sample.rewards.items() if value is not None}
        lost = error or "reward_errors" in sample.notes
        if self._unrewarded and not lost:
            sample.reward = 0.0
            return
        sample.reward = (
            None if lost or not values else sum(self.weights[name] * value for name, value in values.items())
        )

    def _batch(self, function: RewardSpec, samples: Sequence[Sample]) -> RewardBatch:
        prompt, signature = samples[0].prompt, self._signatures[function.name]
        names = [name for name in signature.columns if name in prompt.columns]
        if signature.takes_all:  # a row without a column of other rows has None there, as in a table
            all_columns = {**self._columns, **dict.fromkeys(prompt.columns)}
            names += [name for name in all_columns if name not in signature.columns]
        chat, ids = prompt.messages is not None, signature.takes_all or "completion_ids" in signature.columns
        return RewardBatch(
            prompts=[list(prompt.messages) if prompt.messages is not None else prompt.text for _ in samples],
            completions=[_as_messages(sample) if chat else sample.text for sample in samples],
            completion_ids=[sample.completion() if ids else () for sample in samples],
            columns={name: [prompt.columns.get(name)] * len(samples) for name in names},
        )

    def _named(self, prompt: Prompt) -> Sequence[str]:
        """The names of the functions that score answers to a prompt."""
        if self.column is None:
            return [function.name for function in self.functions]
        named = prompt.columns.get(self.column)
        return [named] if isinstance(named, str) else list(named or ())

    def _check(self, prompt: Prompt) -> None:
        named = self._named(prompt)
        names = [function.name for function in self.functions]
        if self.column is not None and (not named or set(named) - set(names)):
            raise UserError(
                f"{prompt.source}: rl.reward_column: `{self.column}` is {prompt.columns.get(self.column)!r}, but "
                f"must be a name in rl.reward: {', '.join(names)}."
            )
        for name in named:
            if problem := _missing(name, self._signatures[name], prompt):
                raise UserError(f"{prompt.source}: rl.reward: {problem}")


def decode(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> None:
    """Set `text` of each sample: all tokens after the prompt, decoded without special tokens."""
    texts = tokenizer.batch_decode([sample.completion() for sample in samples], skip_special_tokens=True)
    for sample, text in zip(samples, texts, strict=True):
        sample.text = text


def stand_in(prompt: Prompt, number: int, text: str, completion: Sequence[int]) -> Sample:
    """A sample without a policy, for tests of rewards. completion: the tokens of its text."""
    tokens = np.array([*prompt.tokens, *completion], np.int64)
    sampled = np.arange(len(tokens)) >= len(prompt.tokens)
    zeros, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
    return Sample(prompt, number, tokens, sampled, zeros, versions, "end", text=text)


def try_rewards(
    reward: Sequence[str],
    completions: Sequence[str],
    *,
    prompt: str | Sequence[Mapping[str, Any]] = "",
    timeout: float = 30.0,
    **columns: Any,
) -> list[dict[str, Any]]:
    """Score completions of one prompt as in a run, to test reward functions before training.

    reward: as in rl.reward. prompt: a text, or messages; with messages, functions get each completion as a list of
    messages. timeout: seconds of one call. columns: the prompt's other columns. Functions get the bytes of a completion
    as completion_ids. Returns a row per completion: `reward`, the value of each function, and `errors` by function.
    """
    messages = None if isinstance(prompt, str) else tuple(prompt)
    text = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content", "")) for message in prompt)
    test_prompt = Prompt(0, 0, (), text, messages, columns, "the prompt")
    samples = [stand_in(test_prompt, number, text, list(text.encode())) for number, text in enumerate(completions)]

    async def run() -> None:
        rewards = Rewards(RlAlgorithm(reward=tuple(reward), reward_timeout=timeout, reward_workers=1))
        async with rewards:
            await rewards.start([test_prompt])
            await rewards.score(samples, Failures())

    asyncio.run(run())
    return [
        {"reward": sample.reward, **sample.rewards, "errors": sample.notes.get("reward_errors", {})}
        for sample in samples
    ]


def _about_messages(error: str) -> str:
    """Advice for an error of a function that treats a list of messages as a text; "" for other errors."""
    return _OF_MESSAGES if "'list'" in error or "'dict'" in error else ""


def _missing(name: str, signature: RewardSignature, prompt: Prompt) -> str | None:
    """A message about a column that a function needs and a prompt's row lacks; None if the row has all."""
    absent = next((column for column in signature.required if column not in prompt.columns), None)
    if absent is None and (not signature.reference or has_reference(prompt.columns)):
        return None
    columns = ", ".join(f"`{column}`" for column in prompt.columns) or "no columns besides the prompt"
    named = override("data.columns", {absent or "answer": "COLUMN"})
    if absent is None:
        return f"{name} needs the reference answer, but the row has {columns}. Set {named}."
    return (
        f"{name} has a parameter `{absent}`, but the row has {columns}. weft passes {', '.join(STANDARD)} and the "
        f"columns of the data. Set {named}, or give the parameter a default."
    )


def _note(name: str, sample: Sample, outcome: RewardOutcome) -> None:
    sample.rewards[name] = outcome.value
    if outcome.notes:
        sample.notes[name] = dict(outcome.notes)
    if outcome.error is not None:
        sample.notes.setdefault("reward_errors", {})[name] = outcome.error


def _as_messages(sample: Sample) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] | None = sample.notes.get("messages")
    return messages if messages is not None else [{"role": "assistant", "content": sample.text}]


def _options(config: RlAlgorithm, name: str) -> dict[str, Any]:
    options = ((option.rpartition("."), value) for option, value in config.reward_options.items())
    return {argument: value for (function, _, argument), value in options if function == name}
