"""Held-out evaluation of a policy: a greedy answer to each prompt, and pass@k from several sampled ones.

Seeds depend only on the run's seed and the held-out prompt, under names that training never uses. So an evaluation does
not change training, and two evaluations of the same weights are equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import comb
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.config.rl_schema import RlConfig, RlEvalConfig
from weft.config.sources import source_name
from weft.data.documents import leak_hint
from weft.data.images import Images
from weft.inference.base import SamplingParams
from weft.inference.types import Prompt, Sample, SampleGroup
from weft.launch.summary import Phases
from weft.rl.agents.agents import Agents
from weft.rl.colocation import DeviceSharing
from weft.rl.environments.episodes import Episodes
from weft.rl.meter import Meter, Show
from weft.rl.prompts import Prompts, load_rl_prompts
from weft.rl.rewards.base import Failures, Rewards, decode
from weft.rl.rollouts import rewarded_groups, rollout_group

PREFIX = "eval/"
_UNNAMED = ""


@dataclass(frozen=True)
class HeldOutPrompts:
    """Held-out prompts by the source names of eval.sources; those of eval.path have the name ""."""

    named: Mapping[str, Prompts] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.named)

    @property
    def bad(self) -> list[tuple[str, str]]:
        """The bad rows of all sources, as in Prompts.bad."""
        return [row for prompts in self.named.values() for row in prompts.bad]

    def leaks(self, training: Prompts) -> list[str]:
        """Lines about held-out prompts that are also training prompts: their tokens and image sizes are equal."""
        lines: list[str] = []
        for name, prompts in self.named.items():
            held_out = {_content(prompt) for prompt in prompts}
            trained: dict[Any, str] = {}
            for prompt in training.prompts:
                if (content := _content(prompt)) in held_out:
                    trained.setdefault(content, prompt.source)
            equal = [(p.source, trained[_content(p)]) for p in prompts.prompts if _content(p) in trained]
            lines += leak_hint(name, equal, len(prompts), "prompts")
        return lines

    def all(self) -> list[Prompt]:
        """The prompts of all sources."""
        return [prompt for prompts in self.named.values() for prompt in prompts]


def _content(prompt: Prompt) -> tuple[Any, ...]:
    images = () if prompt.images is None else prompt.images.sizes
    return prompt.tokens, *((size.height, size.width, size.size) for size in images)


@dataclass(frozen=True)
class EvaluationResult:
    """The outcome of an evaluation. greedy, drawn: groups of greedy and of sampled answers, by source name."""

    metrics: dict[str, float]
    greedy: Mapping[str, Sequence[SampleGroup]]
    drawn: Mapping[str, Sequence[SampleGroup]]

    def line(self, step: int) -> str:
        """For example `eval     step 20: accuracy 61.2%, reward 0.612, pass@4 80.0% (0.8 s)`."""
        figures = {name.removeprefix(PREFIX): value for name, value in self.metrics.items()}
        words = [f"accuracy {figures['accuracy']:.1%}", f"reward {figures['reward']:.3f}"]
        words += [f"{name} {value:.1%}" for name, value in figures.items() if name.startswith("pass@")]
        words += [f"{name} {figures[f'{name}/accuracy']:.1%}" for name in self.greedy if name]
        return f"eval     step {step}: {', '.join(words)} ({figures['seconds']:.1f} s)"


def read_held_out_prompts(
    config: RlConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None, images: Images | None = None
) -> HeldOutPrompts:
    """The prompts of eval.path and eval.sources. Arguments and errors are as in load_rl_prompts()."""
    prompts, read = {}, partial(load_rl_prompts, config, tokenizer, vocab_size=vocab_size, images=images)
    if config.eval.path is not None:
        data = replace(config.data, path=config.eval.path, split=None, subset=None, sources=None)
        prompts[_UNNAMED] = read(data)
    for source in config.eval.sources or ():
        data = replace(config.data, path=None, sources=(source,))
        prompts[source_name(source)] = read(data)
    return HeldOutPrompts(prompts)


class RlEvaluator:
    """Evaluates the policy. ends: tokens that end an answer. show: called with a progress text."""

    def __init__(
        self,
        config: RlConfig,
        held_out: HeldOutPrompts,
        switch: DeviceSharing,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        episodes: Episodes | Agents | None = None,
        ends: Sequence[int] = (),
        show: Show = lambda text: None,
    ) -> None:
        self._show = show
        self.config, self.held_out, self.switch, self.rewards = config.eval, held_out, switch, rewards
        self.tokenizer, self.seed = tokenizer, config.train.seed
        longest = config.eval.max_new_tokens or config.rollout.max_new_tokens
        self.episodes = replace(episodes, most_tokens=longest) if isinstance(episodes, Episodes) else episodes
        self.sampling = SamplingParams(longest, temperature=0.0, ends=tuple(ends), stop=config.rollout.stop)

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after optimizer step `step` of `steps`. Step 0 is before the first."""
        if not self.held_out:
            return False
        if step == 0:
            return self.config.at_start
        return step == steps or (self.config.every > 0 and step % self.config.every == 0)

    async def __call__(self) -> EvaluationResult:
        """Answer every held-out prompt once greedily and eval.samples times by sampling, with rewards."""
        began = time.perf_counter()
        meter = Meter("evaluation", lambda: self.switch.engine.drawn)
        meter.expected = len(self.held_out.all()) * (1 + self.config.samples)
        drawn: dict[str, list[SampleGroup]] = {}
        async with meter.shown(self._show):
            greedy = await self._answers(self.sampling, 1, "greedy", meter)
            if self.config.samples:
                sampling = replace(
                    self.sampling, temperature=self.config.temperature, top_p=self.config.top_p, top_k=self.config.top_k
                )
                drawn = await self._answers(sampling, self.config.samples, "drawn", meter)
        metrics = evaluation_metrics(greedy, drawn, self.config)
        return EvaluationResult({**metrics, f"{PREFIX}seconds": time.perf_counter() - began}, greedy, drawn)

    async def _answers(
        self, sampling: SamplingParams, count: int, kind: str, meter: Meter
    ) -> dict[str, list[SampleGroup]]:
        """`count` scored answers per prompt, by source name. All prompts are requested at once; the engine batches."""
        named_prompts = [(name, prompt) for name, prompts in self.held_out.named.items() for prompt in prompts]
        failures = Failures()

        async def generate(named_prompt: tuple[str, Prompt]) -> SampleGroup:
            (name, prompt), engine = named_prompt, self.switch.engine
            label = f"eval/{name}/{kind}/"
            group = await rollout_group(prompt, count, engine, sampling, self.episodes, self.seed, label)
            meter.done += len(group.episodes)
            return group

        async def reward(group: SampleGroup) -> None:
            decode(group.samples, self.tokenizer)
            with meter.scoring(len(group.samples)):
                await self.rewards.score(group.samples, failures)

        groups = await rewarded_groups(named_prompts, generate, reward, Phases(), self.switch)
        answers: dict[str, list[SampleGroup]] = {name: [] for name in self.held_out.named}
        for (name, _), group in zip(named_prompts, groups, strict=True):
            answers[name].append(group)
            for sample in group.samples:
                sample.notes["evaluation"] = f"{name} {kind}".strip()
        return answers


def evaluation_metrics(
    greedy: Mapping[str, Sequence[SampleGroup]], drawn: Mapping[str, Sequence[SampleGroup]], config: RlEvalConfig
) -> dict[str, float]:
    """Metrics over all prompts, and per named source. A sample without a reward counts as wrong, with reward 0."""
    metrics: dict[str, float] = {}
    for name in [_UNNAMED, *(name for name in greedy if name)]:
        prefix = f"{PREFIX}{name}/" if name else PREFIX
        greedy_groups = greedy.values() if name == _UNNAMED else (greedy[name],)
        samples = [sample for groups in greedy_groups for group in groups for sample in group.episodes]
        metrics[f"{prefix}reward"] = _mean(sample.reward or 0.0 for sample in samples)
        metrics[f"{prefix}accuracy"] = _mean(float(is_correct(sample, config.correct_from)) for sample in samples)
        metrics[f"{prefix}length"] = _mean(float(sample.length) for sample in samples)
        metrics[f"{prefix}clipped_ratio"] = _mean(float(sample.finish == "length") for sample in samples)
        metrics[f"{prefix}failed"] = float(sum(sample.reward is None for sample in samples))
        drawn_groups = drawn.values() if name == _UNNAMED else (drawn.get(name, ()),)
        groups = [group for part in drawn_groups for group in part]
        if groups:
            right = [sum(is_correct(sample, config.correct_from) for sample in group.episodes) for group in groups]
            for k in config.pass_at or _powers(config.samples):
                metrics[f"{prefix}pass@{k}"] = _mean(pass_at(config.samples, c, k) for c in right)
    return metrics


def is_correct(sample: Sample, correct_from: float) -> bool:
    """Whether the sample's first reward that is not None is at least `correct_from`; False for a failed sample."""
    first_reward = next((value for value in sample.rewards.values() if value is not None), None)
    return sample.reward is not None and first_reward is not None and first_reward >= correct_from


def pass_at(n: int, c: int, k: int) -> float:
    """pass@k of n answers of which c are correct: 1 - C(n-c, k) / C(n, k).

    This is an unbiased estimate of the probability that one of k answers is correct (Chen et al. 2021,
    arXiv:2107.03374, equation 1).
    """
    assert 0 <= c <= n and 1 <= k <= n
    return 1.0 - comb(n - c, k) / comb(n, k)


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
