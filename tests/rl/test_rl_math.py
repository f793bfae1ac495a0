"""Advantages, corrections, KL and the dealing of groups against numbers worked out by hand."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.rl_samples import PROMPT, algorithm, group, rl_config, sample, sharing
from weft.config.load import load_config
from weft.config.presets import LIKE
from weft.config.rl_schema import RlConfig, RolloutConfig
from weft.engine.batch.document import Costs, document_metadata
from weft.engine.losses.correction import importance_ratios
from weft.errors import ActorError, UserError
from weft.inference.base import SamplingParams, spans_of
from weft.inference.engine_clock import EngineClock
from weft.inference.types import Prompt, Sample, SampleGroup
from weft.recipes import rl as recipe
from weft.rl.advantages import advantages, overlong_penalty, shape_rewards
from weft.rl.algorithms import tables
from weft.rl.corrections import correct, kl, require_comparable, require_parity
from weft.rl.documents import ReadSamples, TrainedSamples, build_documents, deal
from weft.rl.prompts import PromptStream
from weft.rl.recorder import truncation_line

FIRST = len(PROMPT)  # place of the first token that was drawn


def drawn(member: Sample) -> list[float]:
    """Advantages of the tokens that the policy drew; those of the others must be zero."""
    assert member.advantages is not None and not member.advantages[~member.sampled].any()
    return [float(a) for a in member.advantages[member.sampled]]


def firsts(groups: list[SampleGroup]) -> list[list[float]]:
    return [[drawn(s)[0] for s in g.samples] for g in groups]


# ---------------------------------------------------------------- advantages

THIRD = 1 / math.sqrt(1 / 3)  # 1 / the standard deviation of 1, 0, 0 with n - 1


@pytest.mark.covers("rl.advantage", "rl.advantage_norm")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # two groups: rewards 1, 0, 0, whose mean is 1/3 and deviation sqrt(1/3); and 2, 2, which teach nothing
        ({}, [[2 / 3 * THIRD, -1 / 3 * THIRD, -1 / 3 * THIRD], [0, 0]]),
        # of 1, 0, 0, 2, 2 the mean is 1, the deviation 1
        ({"advantage_norm": "batch"}, [[2 / 3, -1 / 3, -1 / 3], [0, 0]]),
        ({"advantage_norm": "none"}, [[2 / 3, -1 / 3, -1 / 3], [0, 0]]),
        ({"advantage": "rloo"}, [[1, -1 / 2, -1 / 2], [0, 0]]),
    ],
    ids=["grpo", "batch", "dr_grpo", "rloo"],
)
def test_rewards_are_compared_within_a_group(keys: dict[str, Any], expected: list[list[float]]) -> None:
    groups = [group([1.0, 0.0, 0.0], [2, 3, 1]), group([2.0, 2.0])]
    advantages(groups, algorithm(**keys))
    assert firsts(groups) == [pytest.approx(e, rel=3e-4) for e in expected]
    assert [len(set(drawn(s))) for s in groups[0].samples] == [1, 1, 1]  # every token of a sample has the same


def test_what_does_not_count_is_in_no_mean_and_moves_nobody() -> None:
    """B26: rows that fill a batch, rewards that failed and samples that are not to be trained."""
    plain = [group([1.0, 0.0, 0.0])]
    metrics = advantages(plain, algorithm())
    padded = [group([1.0, None, 0.0, 7.0, 0.0]), group([None, None])]
    padded[0].samples[3].trained = False
    assert advantages(padded, algorithm()) == metrics
    counted = [s for n, s in enumerate(padded[0].samples) if n in (0, 2, 4)]
    assert [drawn(s) for s in counted] == [drawn(s) for s in plain[0].samples]
    uncounted = [padded[0].samples[1], padded[0].samples[3], *padded[1].samples]
    assert all(s.advantages is not None and not s.advantages.any() for s in uncounted)
    assert advantages([group([None])], algorithm()) == {}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"])
def test_groups_without_signal_give_zeros(name: str) -> None:
    """0.1 three times has a mean that is not 0.1 in floating point."""
    groups = [group([0.1, 0.1, 0.1])]
    metrics = advantages(groups, algorithm(name))
    assert firsts(groups) == [[0.0, 0.0, 0.0]] and metrics["frac_reward_zero_std"] == 1.0
    assert metrics["reward_std"] == 0.0


@pytest.mark.covers("rl.gamma")
def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_step() -> None:
    """Two samples of one and three tokens with rewards 4 and 0, no discount: tokens 4, 0, 0, 0 have mean 1 and a
    deviation of 2. With gamma 1/2 the second sample's reward of 4 is worth 1, 2, 4 along its tokens."""
    groups = [group([4.0], [1], index=0), group([0.0], [3], index=1)]
    advantages(groups, algorithm("reinforce++"))
    assert [drawn(g.samples[0]) for g in groups] == [pytest.approx([1.5]), pytest.approx([-0.5] * 3)]
    groups = [group([1.0], [1], index=0), group([4.0], [3], index=1)]
    advantages(groups, algorithm("reinforce++", gamma=0.5))  # 1; 1, 2, 4: mean 2, deviation sqrt(2)
    root = math.sqrt(2)
    assert drawn(groups[1].samples[0]) == pytest.approx([-1 / root, 0, 2 / root], abs=1e-6)


def test_reinforce_plus_plus_baseline_takes_the_groups_mean_first() -> None:
    """Rewards 3, 1 of two tokens each, and 5, 5 of one: less their means 1, 1, -1, -1, 0, 0: deviation sqrt(4/5)."""
    groups = [group([3.0, 1.0], [2, 2]), group([5.0, 5.0], [1, 1])]
    advantages(groups, algorithm("reinforce++_baseline"))
    scale = math.sqrt(5 / 4)
    assert firsts(groups) == [pytest.approx([scale, -scale]), pytest.approx([0, 0])]


def test_reinforce_plus_plus_baseline_takes_the_kl_off_its_rewards() -> None:
    """Rewards 3 and 1; k1 of the first's tokens is 0.5 and 1, of weight 2: 3 - 2 x 1.5 = 0, now below the other. The
    deviation of -0.5, -0.5, 0.5, 0.5 is sqrt(1/3)."""
    groups = [group([3.0, 1.0], [2, 2])]
    for member, old in zip(groups[0].samples, ([0.5, 1.0], [0.0, 0.0]), strict=True):
        member.old_logprobs, member.ref_logprobs = np.zeros(len(member), np.float32), np.zeros(len(member), np.float32)
        member.old_logprobs[member.sampled] = old
    advantages(groups, algorithm("reinforce++_baseline", kl_coef=2.0, kl_in="reward", kl_estimator="k1"))
    assert firsts(groups) == [pytest.approx([-math.sqrt(3 / 4), math.sqrt(3 / 4)])]


@pytest.mark.covers("rl.gae_lambda")
def test_gae_and_its_returns() -> None:
    """Values 0.5, 0.25, 1 and a reward of 2, gamma 1/2, lambda 1/2: delta = -0.375, 0.25, 1, so from the end
    A = 1, 0.25 + 1/4, -0.375 + 0.5/4. A tool wrote the token between the first and the second."""
    drawn_sample = sample(0, 4, 2.0, gaps=[1], values=[0.5, 99.0, 0.25, 1.0])
    advantages(
        [SampleGroup(drawn_sample.prompt, [drawn_sample])],
        algorithm("ppo", advantage_norm="none", gamma=0.5, gae_lambda=0.5),
    )
    assert drawn(drawn_sample) == pytest.approx([-0.25, 0.5, 1.0])
    assert drawn_sample.returns is not None
    assert drawn_sample.returns[drawn_sample.sampled] == pytest.approx([0.25, 0.75, 2.0])
    advantages(
        [SampleGroup(drawn_sample.prompt, [drawn_sample])], algorithm("ppo", gamma=0.5, gae_lambda=0.5)
    )  # whitened, returns are not
    mean, deviation = np.mean([-0.25, 0.5, 1.0]), np.std([-0.25, 0.5, 1.0], ddof=1)
    assert drawn(drawn_sample) == pytest.approx([(a - mean) / deviation for a in (-0.25, 0.5, 1.0)])
    assert drawn_sample.returns[drawn_sample.sampled] == pytest.approx([0.25, 0.75, 2.0])


@pytest.mark.covers("rl.kl_coef", "rl.kl_in")
@pytest.mark.parametrize(
    ("estimator", "penalties"),
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [math.exp(-0.5) - 0.5, math.exp(1) - 2])],
)
def test_kl_in_the_reward(estimator: Any, penalties: list[float]) -> None:
    """d = old - reference = 0.5, -1, weight 0.1: each token pays its own and those that follow, and the reward comes
    with the last; an estimator of whole samples takes all of it."""
    assert kl(np.array([0.5, -1.0]), estimator) == pytest.approx(penalties)
    pair = [sample(n, 2, 1.0, old_logprobs=[-1.0, -2.0], ref_logprobs=[-1.5, -1.0]) for n in range(2)]
    pair[1].ref_logprobs = pair[1].old_logprobs
    keys: dict[str, Any] = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": estimator, "advantage_norm": "none"}
    advantages([SampleGroup(pair[0].prompt, pair)], algorithm(**keys))
    assert drawn(pair[0]) == pytest.approx([-0.05 * sum(penalties)] * 2)
    pair[0].values = np.zeros(len(pair[0]), np.float32)
    advantages([SampleGroup(pair[0].prompt, pair[:1])], algorithm("ppo", **keys))
    assert drawn(pair[0]) == pytest.approx([1 - 0.1 * sum(penalties), 1 - 0.1 * penalties[1]])
    keys["kl_in"] = "loss"
    advantages([SampleGroup(pair[0].prompt, pair)], algorithm(**keys))
    assert drawn(pair[0]) == [0.0, 0.0]


def test_a_kl_in_the_reward_is_clamped() -> None:
    """k3 of d = -5 is exp(5) - 6, some 142; verl's bound is 10."""
    assert kl(np.array([-5.0, 1.0]), "k3", 10.0) == pytest.approx([10.0, math.exp(-1)])
    assert kl(np.array([-5.0, 5.0, 0.5]), "k1", 1.0).tolist() == [-1.0, 1.0, 0.5]
    drawn_sample = sample(0, 2, 1.0, old_logprobs=[-6.0, -1.0], ref_logprobs=[-1.0, -2.0], values=[0.0, 0.0])
    keys: dict[str, Any] = {
        "kl_coef": 0.1,
        "kl_in": "reward",
        "kl_estimator": "k3",
        "kl_clamp": 10.0,
        "advantage_norm": "none",
    }
    advantages([SampleGroup(drawn_sample.prompt, [drawn_sample])], algorithm("ppo", **keys))
    assert drawn(drawn_sample) == pytest.approx([1 - 0.1 * (10 + math.exp(-1)), 1 - 0.1 * math.exp(-1)])


def test_metrics_of_rewards() -> None:
    groups = [group([1.0, 0.0, 0.0]), group([2.0, 2.0])]
    for member in groups[0].samples:
        member.rewards = {"math": member.reward, "style": None}
    groups[1].samples[0].rewards = {"style": 0.5}
    metrics = advantages(groups, algorithm())
    assert metrics == pytest.approx({
        "reward": 1.0, "reward_std": math.sqrt(1 / 3) / 2, "frac_reward_zero_std": 0.5,
        "rewards/math/mean": 1 / 3, "rewards/math/std": math.sqrt(1 / 3),
        "rewards/style/mean": 0.5, "rewards/style/std": 0.0,
    })  # fmt: skip


SOURCE = """
import numpy as np

def ranks(groups, config):
    return [np.argsort(np.argsort([s.reward for s in group.samples])) for group in groups]

def wrong(groups, config):
    return [[float("nan")] * len(group.samples) for group in groups]

number = 3
"""


@pytest.fixture
def own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rl.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own_functions")
def test_an_advantage_of_ones_own() -> None:
    groups = [group([0.5, 3.0, None, 1.0])]
    advantages(groups, algorithm(advantage="own_rl:ranks"))
    assert firsts(groups) == [[0.0, 2.0, 0.0, 1.0]]
    with pytest.raises(UserError, match=r"own_rl:wrong must return one finite number for sample 0.0/0, or 2 numbers"):
        advantages(groups, algorithm(advantage="own_rl:wrong"))
    with pytest.raises(UserError, match="own_rl:number is not a function"):
        advantages(groups, algorithm(advantage="own_rl:number"))


@pytest.mark.covers("rl.overlong_buffer", "rl.overlong_penalty")
def test_overlong_shaping() -> None:
    """DAPO's example in small: of 20 tokens the last 4 are punished."""
    assert [overlong_penalty(n, 20, 4) for n in (1, 16, 17, 18, 20, 25)] == [0, 0, -0.25, -0.5, -1, -1]
    groups = [group([1.0, 1.0, None], [16, 18, 20])]
    shape_rewards(groups, rl_config(algorithm(), max_new_tokens=20))
    assert groups[0].rewards == [1.0, 1.0, None]
    shape_rewards(groups, rl_config(algorithm(overlong_buffer=4, overlong_penalty=0.5), max_new_tokens=20))
    assert groups[0].rewards == [1.0, 0.75, None]
    assert groups[0].samples[1].rewards == {"overlong": -0.25}


def test_groups_are_chosen_before_their_rewards_are_shaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """DAPO, equation 11: a group that is all wrong is replaced, whatever its lengths; the others are shaped."""
    groups = [group([0.0, 0.0], [16, 20], 0), group([1.0, 0.0], [16, 20], 1)]

    async def sampled(prompt: Prompt, *_: Any) -> SampleGroup:
        return groups[prompt.index]

    async def score(samples: Any, failures: Any) -> None:
        pass

    monkeypatch.setattr(recipe, "rollout_group", sampled)
    monkeypatch.setattr(recipe, "decode", lambda samples, tokenizer: None)
    config = rl_config(algorithm("dapo", overlong_buffer=4, prompts_per_step=1, group_size=2), max_new_tokens=20)
    stream = PromptStream([g.prompt for g in groups], 1, 0, shuffle=False)
    task = SimpleNamespace(stream=stream, tokenizer=None, episodes=None, rewards=SimpleNamespace(score=score))
    run: Any = SimpleNamespace(config=config, task=task, show=lambda text: None)
    engine: Any = SimpleNamespace(drawn=0, clock=EngineClock())
    step = asyncio.run(recipe.roll_out(run, sharing(engine), SamplingParams(20), 1))
    assert step.groups == [groups[1]] and step.metrics["rollout/replaced"] == 1
    assert groups[1].rewards == [1.0, -1.0]


# ---------------------------------------------------------------- corrections

LOG2 = math.log(2)


def mismatched() -> list[Sample]:
    """Ratios old / rollout 1, 8, 1/4 of one sample, whose product is 2, and 1, 1 of another."""
    differing = sample(
        0,
        4,
        1.0,
        gaps=[2],
        old_logprobs=[-1.0, -1.0, 9.0, -3.0],
        rollout_logprobs=[-1.0, -1.0 - 3 * LOG2, 3.0, -3 + 2 * LOG2],
    )
    return [differing, sample(1, 2, 0.0, old_logprobs=[-1.0, -2.0], rollout_logprobs=[-1.0, -2.0])]


@pytest.mark.covers("rl.correction", "rl.correction_level", "rl.correction_limits")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [[1, 2, 0.25], [1, 1]]),
        ({"correction_limits": (0.5, 4.0)}, [[1, 4, 0.5], [1, 1]]),
        ({"correction": "mis"}, [[1, 0, 0.25], [1, 1]]),
        ({"correction": "icepop"}, [[1, 0, 0], [1, 1]]),
        ({"correction": "icepop", "correction_limits": (0.2, 9.0)}, [[1, 8, 0.25], [1, 1]]),
        ({"correction_level": "sequence"}, [[2, 2, 2], [1, 1]]),
        ({"correction": "mis", "correction_level": "sequence", "correction_limits": (0.0, 1.5)}, [[0] * 3, [1, 1]]),
        ({"correction_level": "geometric"}, [[2 ** (1 / 3)] * 3, [1, 1]]),
    ],
)
def test_corrections(keys: dict[str, Any], expected: list[list[float]]) -> None:
    samples = mismatched()
    correct(samples, algorithm(**keys))
    for member, weights in zip(samples, expected, strict=True):
        assert member.correction is not None and not member.correction[~member.sampled].any()
        assert member.correction[member.sampled] == pytest.approx(weights, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratios_are_neither_infinite_nor_zero(level: Any) -> None:
    ratios = importance_ratios(torch.tensor([-900.0, 900.0]), torch.arange(2), 2, algorithm(correction_level=level))
    assert ratios.tolist() == pytest.approx([math.exp(-20), math.exp(20)])


def test_corrections_leave_what_agrees_exactly_as_it_is() -> None:
    samples = mismatched()[1:]
    for level in ("token", "sequence", "geometric"):
        for correction in ("tis", "mis", "icepop"):
            metrics = correct(samples, algorithm(correction=correction, correction_level=level))
            assert samples[0].correction is not None
            assert list(samples[0].correction[FIRST:]) == [1.0, 1.0]
            assert metrics["sampling/effective_sample_size"] == 1.0 and metrics["sampling/kl"] == 0.0


def test_metrics_of_a_mismatch() -> None:
    """Tokens' ratios 1, 8, 1/4, 1, 1: mean |log| (3 + 2) log 2 / 5; k3 = ratio - 1 - log ratio of each."""
    metrics = correct([*mismatched(), sample(2, 5, None)], algorithm())
    ratios = [1, 8, 0.25, 1, 1]
    assert metrics == pytest.approx({
        "sampling/sampling_logp_difference/mean": LOG2,
        "sampling/sampling_logp_difference/max": 3 * LOG2,
        "sampling/kl": sum(r - 1 - math.log(r) for r in ratios) / 5,
        "sampling/importance_sampling_ratio/min": 0.25,
        "sampling/importance_sampling_ratio/mean": sum(ratios) / 5,
        "sampling/importance_sampling_ratio/max": 8.0,
        "sampling/effective_sample_size": sum(ratios) ** 2 / (5 * sum(r * r for r in ratios)),
        "sampling/clipped": 0.2,
    }, rel=1e-6)  # fmt: skip
    assert correct(mismatched(), algorithm(correction="icepop"))["sampling/masked"] == 0.4
    bare = mismatched()
    assert "sampling/clipped" not in correct(bare, algorithm(correction="none")) and bare[0].correction is None


@pytest.mark.covers("rl.old_logprobs")
def test_old_logprobs_of_the_rollout() -> None:
    samples = mismatched()
    assert correct(samples, algorithm(old_logprobs="rollout")) == {}
    assert all(
        np.array_equal(s.old_logprobs, s.rollout_logprobs) and s.correction is None
        for s in samples
        if s.old_logprobs is not None
    )


def test_truncated_sampling_is_compared_among_all_tokens() -> None:
    """Half of the distribution was kept: the engine's logprobs are log 2 more than the trainer's, which is no mismatch.
    Without the mass nobody can tell."""
    truncated = sample(
        0, 2, 1.0, old_logprobs=[-1.0, -2.0], rollout_logprobs=[-1 + LOG2, -2 + LOG2], kept_logmass=[-LOG2, -LOG2]
    )
    metrics = correct([truncated], algorithm())
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0, abs=1e-6)
    require_comparable([truncated], SamplingParams(8, top_p=0.9))
    truncated.kept_logmass = None
    assert correct([truncated], algorithm())["sampling/importance_sampling_ratio/mean"] == pytest.approx(0.5)
    with pytest.raises(UserError, match=r"sample 0\.0/0 cannot be trained: rollout.top_p"):
        require_comparable([truncated], SamplingParams(8, top_p=0.9))
    require_comparable([truncated], SamplingParams(8))


@pytest.mark.covers("rollout.allow_truncated")
def test_truncated_samples_of_an_engine_that_does_not_say_the_kept_share() -> None:
    """Shares 1/2 and 1/8 were kept, and engine and trainer agree: factors are the shares, whose geometric mean is 1/4.
    An engine that says its share has the same metric, and factors of 1."""
    unmeasured = sample(0, 2, 1.0, old_logprobs=[-1.0, -4.0], rollout_logprobs=[-1 + LOG2, -4 + 3 * LOG2])
    require_comparable([unmeasured], SamplingParams(8, top_k=2), allowed=True)
    metrics = correct([unmeasured], algorithm(), truncated=True)
    assert metrics["sampling/kept_share"] == pytest.approx(0.25)
    assert unmeasured.correction is not None and unmeasured.correction[unmeasured.sampled] == pytest.approx(
        [0.5, 0.125]
    )
    unmeasured.kept_logmass = np.where(
        unmeasured.sampled, unmeasured.old_logprobs - unmeasured.rollout_logprobs, 0
    ).astype(np.float32)
    metrics = correct([unmeasured], algorithm(), truncated=True)
    assert metrics["sampling/kept_share"] == pytest.approx(0.25)
    assert unmeasured.correction[unmeasured.sampled] == pytest.approx([1, 1])
    assert "sampling/kept_share" not in correct([unmeasured], algorithm())


@pytest.mark.parametrize(
    ("keys", "above", "is_right"),
    [
        ({"top_p": 0.5}, LOG2, True),
        ({"top_p": 0.5}, 2 * LOG2, False),  # more than the smallest share explains
        ({"top_p": 0.5}, -0.1, False),  # an engine is never below
        ({"top_p": 0.5, "top_k": 2}, 9.0, True),
        ({"min_p": 0.1}, -0.1, False),
        ({}, LOG2, False),
    ],
)
def test_a_comparison_after_a_sync_knows_what_truncation_explains(
    keys: dict[str, Any], above: float, is_right: bool
) -> None:
    compared = sample(0, 2, 1.0, old_logprobs=[-1.0, -2.0], rollout_logprobs=[-1 + above, -2 + above])
    with nullcontext() if is_right else pytest.raises(ActorError, match="another distribution"):
        require_parity([compared], 0, "vllm", ["fp32"], RolloutConfig(**keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"top_p": 0.99, "top_k": 100, "engine": "vllm", "allow_truncated": True},
            "top_p 0.99, top_k 100: excluded tokens",
        ),
        ({"engine": "vllm", "min_p": 0.1, "allow_truncated": True}, "vllm does not report the kept probability mass"),
        ({"top_k": 3}, "the policy is trained as if they could be (metric sampling/kept_share"),
    ],
)
def test_truncated_sampling_is_said_at_the_start(keys: dict[str, Any], words: str) -> None:
    assert words in truncation_line(RolloutConfig(**keys))


# ---------------------------------------------------------------- documents


@pytest.mark.covers("rl.loss_aggregation", "rl.mask_truncated")
@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("token_mean", [1.0, 1.0]), ("sequence_mean", [1 / 3, 1.0]), ("sequence_sum", [0.1, 0.1])],
)
def test_documents(aggregation: str, weights: list[float]) -> None:
    """Loss falls on what was drawn, and only samples that count become documents."""
    samples = [sample(0, 4, 1.0, gaps=[1]), sample(1, 1, 0.0), sample(2, 3, None), sample(3, 0, 1.0)]
    samples[1].finish = "length"
    for member in samples:
        member.old_logprobs = member.advantages = member.correction = np.arange(len(member), dtype=np.float32)
    config = rl_config(algorithm(loss_aggregation=aggregation), max_new_tokens=10)
    documents = build_documents(samples, config)
    first, second = (torch.tensor(w) for w in weights)
    zero = torch.zeros(())
    assert torch.equal(documents[0].weights, torch.stack([zero] * 3 + [first, zero, first, first]))
    assert torch.equal(documents[1].weights, torch.stack([zero] * 3 + [second]))
    assert len(documents) == 2 and documents[0].source == "sample 0.0/0"
    assert sorted(documents[0].arrays) == ["advantages", "correction", "old_logprobs"]
    masked = build_documents(samples, rl_config(algorithm(mask_truncated=True, correction="none")))
    samples[0].finish = "abort"  # ended by something else than its length
    assert len(build_documents(samples, rl_config(algorithm(mask_truncated=True)))) == 1
    assert [d.source for d in masked] == ["sample 0.0/0"] and "correction" not in masked[0].arrays


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_samples_are_measured_as_their_documents_are(aggregation: str) -> None:
    random = np.random.default_rng(0)
    samples = [sample(n, int(random.integers(1, 400)), 1.0, gaps=[1, 5]) for n in range(50)]
    for number, member in enumerate(samples):
        member.sampled[0] = number % 7 == 0  # whose weight is never used
        member.old_logprobs = member.advantages = member.correction = np.zeros(len(member), np.float32)
        member.routes = np.zeros((len(member), 1, 1), np.int16) if number % 3 else None
    trained = TrainedSamples(samples, rl_config(algorithm(loss_aggregation=aggregation), max_new_tokens=77))
    costs = Costs(lambda n: 1, float, lambda patches, pairs: (0.0, 0))
    measured, built = (document_metadata(member, costs) for member in (trained, list(trained)))
    assert measured == built and len(built) == 50
    read = ReadSamples(samples, routed=False)
    assert document_metadata(read, costs) == document_metadata(list(read), costs)


def test_dealing() -> None:
    groups = [group([1.0], index=n) for n in range(7)]
    dealt = deal(groups, 3, seed=1)
    assert sorted(len(update) for update in dealt) == [2, 2, 3]
    assert sorted(g.prompt.index for update in dealt for g in update) == list(range(7))
    order = [[g.prompt.index for g in update] for update in dealt]
    assert [[g.prompt.index for g in update] for update in deal(groups, 3, seed=1)] == order
    assert [[g.prompt.index for g in update] for update in deal(groups, 3, seed=2)] != order
    assert len(deal(groups[:2], 3, seed=0)) == 2 and deal([], 3, seed=0) == []


def test_groups_without_signal_are_found() -> None:
    groups = [group([1.0, 0.0]), group([1.0, 1.0]), group([1.0, None]), group([0.0, 1.0, 1.0])]
    groups[3].samples[0].trained = False
    assert [g.has_signal for g in groups] == [True, False, False, False]


# ---------------------------------------------------------------- presets and keys

NEEDED = ["model.path=org/name", f"data.path={__file__}", "rl.reward=[math]", "step.max_tokens_per_device=4096"]


def read(*overrides: str) -> RlConfig:
    return load_config([], [*NEEDED, *overrides], RlConfig)


@pytest.mark.covers("rl.algorithm")
def test_a_preset_sets_what_nobody_has() -> None:
    assert read().rl == algorithm()
    chosen = read("rl.algorithm=dapo", "rl.clip=[0.1, 0.3]").rl
    assert chosen == algorithm("dapo", clip=(0.1, 0.3)) and chosen.loss_aggregation == "token_mean"
    assert read("rl.algorithm=gspo").rl.clip == (3e-4, 4e-4)


@pytest.mark.covers("rl.preset")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rl.preset=trl"], {"loss_aggregation": "token_mean", "correction": "mis", "correction_level": "sequence",
                           "correction_limits": (0.0, 3.0), "count_masked": True, "dual_clip": None}),
        (["rl.preset=verl"], {"loss_aggregation": "token_mean", "dual_clip": 3.0, "kl_clamp": 10.0,
            "correction": "none"}),
        (["rl.preset=verl", "rl.dual_clip=null", "rl.loss_aggregation=sequence_mean"],
         {"loss_aggregation": "sequence_mean", "dual_clip": None, "kl_clamp": 10.0}),
        (["rl.preset=nemo-rl"], {"kl_coef": 0.01, "kl_clamp": 10.0, "kl_estimator": "k3", "dual_clip": None}),
        (["rl.preset=trl", "rl.algorithm=rloo"], {"policy_loss": "ppo_sequence", "advantage": "rloo", "kl_coef": 0.05,
                                                "kl_in": "reward", "loss_aggregation": "sequence_mean"}),
        (["rl.preset=roll", "rl.algorithm=ppo"], {"gae_lambda": 0.95, "advantage_norm": "none",
            "loss_aggregation": "sequence_mean"}),
        (["rl.preset=roll"], {"kl_estimator": "k3", "kl_clamp": 10.0, "correction": "none", "dual_clip": None}),
        (["rl.preset=miles"], {"kl_estimator": "k1", "kl_clamp": None, "loss_aggregation": "sequence_mean"}),
        (["rl.preset=slime"], {"kl_estimator": "k1", "correction": "none", "dual_clip": None}),
        (["rl.preset=openrlhf", "rl.algorithm=ppo"], {"kl_coef": 0.01, "kl_in": "reward",
            "loss_aggregation": "token_mean"}),
        (["rl.preset=trl", "rl.algorithm=gspo"], {"clip": (3e-4, 4e-4), "policy_loss": "gspo"}),
        (["rl.preset=verl", "rl.algorithm=dapo"], {"clip": (0.2, 0.28), "dynamic_sampling": 10, "dual_clip": 3.0}),
    ],
)  # fmt: skip
def test_the_defaults_of_another_trainer(overrides: list[str], expected: dict[str, Any]) -> None:
    config = read(*overrides).rl
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_default_of_another_trainer_is_a_key_that_loads() -> None:
    for like, algorithms in LIKE.items():
        for name, keys in algorithms.items():
            config = read(f"rl.preset={like}", f"rl.algorithm={name}").rl
            for leaf, value in keys.items():
                assert getattr(config, leaf) == (tuple(value) if isinstance(value, list) else value), (like, name, leaf)


def test_the_tables_of_algorithms_are_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md").read_text()
    assert tables.filled(page) == page, "run: python -m weft.rl.algorithms.tables docs/reference/algorithms.md"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rl.algorithm=drgrpo"], "rl.algorithm must be one of ppo, grpo, rloo"),
        (["rl.advantage=best"], "rl.advantage is best: it must be one of gae, grpo, rloo"),
        (["rl.policy_loss=best"], "rl.policy_loss is best: it must be one of ppo, ppo_sequence"),
        (["rl.group_size=1"], "set rl.group_size=2 or more, or rl.advantage=reinforce"),
        (["rl.advantage=gae"], "set rl.advantage_norm=batch or none"),
        (["rl.kl_coef=0.1", "rl.kl_estimator=k1"], "whose gradient in the loss is zero on average"),
        (["rl.kl_in=reward"], "rl.kl_in would have no effect: rl.kl_coef is 0"),
        (["rl.kl_coef=1", "rl.kl_in=reward", "rl.kl_unbiased=true"], "which has no gradient"),
        (["rl.algorithm=rloo", "rl.advantage_norm=none"], "only rl.advantage=gae and grpo read it"),
        (["rl.gamma=0.9"], "only rl.advantage=gae and reinforce++ read it"),
        (["rl.gae_lambda=0.9"], "only rl.advantage=gae reads it"),
        (
            ["rl.policy_loss=reinforce", "rl.clip=[0.1, 0.1]"],
            "only rl.policy_loss=ppo, ppo_sequence, cispo, gspo and dppo read it",
        ),
        (["rl.policy_loss=cispo", "rl.dual_clip=3"], "only rl.policy_loss=ppo, ppo_sequence and gspo read it"),
        (["rl.correction=mis", "rl.correction_limits=[0.5, 2]"], "or rl.correction=icepop"),
        (["rl.correction_limits=[1.5, 2]"], "two numbers, 1 between them"),
        (["rl.old_logprobs=rollout", "rl.correction=tis"], "also corrects for the engine"),
        (["rl.correction=none", "rl.correction_level=token"], "rl.correction is none"),
        (["rl.on_policy=exact", "rl.correction=tis"], "there is nothing to correct"),
        (["rl.on_policy=exact", "rl.old_logprobs=rollout"], "set rl.old_logprobs=recompute"),
        (["rl.on_policy=exact", "rollout.top_k=5"], "exclude tokens, which the trainer includes"),
        (["rl.on_policy=exact", "rollout.engine=hf", "cluster.max_staleness=1"], "set cluster.max_staleness=0"),
        (["rl.on_policy=exact", "model.compile=true"], "set model.compile=false"),
        (["rl.on_policy=exact", "model.attention=per_document"], "rl.on_policy=exact uses its own kernel"),
        (["rl.kl_clamp=10"], "rl.kl_clamp would have no effect: rl.kl_coef is 0"),
        (["rl.entropy_aggregation=token_mean"], "rl.entropy_coef is 0"),
        (["rl.count_masked=true"], "rl.mask_truncated is false"),
        (
            ["rl.count_masked=true", "rl.mask_truncated=true", "rl.algorithm=dapo"],
            "rl.loss_aggregation=token_mean counts",
        ),
        (["rl.preset=nemo-rl", "rl.algorithm=ppo"], "set rl.algorithm to one of grpo, gspo, or rl.preset=null"),
        (["rl.preset=prime-rl"], "rl.preset must be one of trl, verl, roll, miles, slime, openrlhf, nemo-rl or null"),
        (["rl.overlong_buffer=2000"], "set it to at most rollout.max_new_tokens = 1024"),
        (["rl.overlong_penalty=2"], "rl.overlong_buffer is not set"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(*overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_what_truncated_sampling_left_out_is_measured_after_the_update(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[bool] = []

    def corrected(samples: Any, config: Any, *, truncated: bool = False) -> dict[str, float]:
        passed.append(truncated)
        return {}

    async def trained(*_: Any) -> dict[str, object]:
        return {}

    monkeypatch.setattr(recipe, "correct", corrected)
    monkeypatch.setattr(recipe, "old_is_current", lambda config: True)
    config = rl_config(algorithm(prompts_per_step=1, group_size=2), top_p=top_p)
    plan = SimpleNamespace(per_rollout=1, steps=1)
    run: Any = SimpleNamespace(config=config, plan=plan, updates=0, trainer_group=SimpleNamespace(update=trained))
    groups = [group([1.0, 0.0])]
    step: Any = SimpleNamespace(
        number=1, groups=groups, samples=groups[0].samples, metrics={}, phases=lambda name: nullcontext()
    )
    assert asyncio.run(recipe.update(run, step)) == [{}] and run.updates == 1
    assert passed == [top_p < 1.0]


def test_versions_of_tokens_are_run_lengths() -> None:
    assert spans_of([]) == () and spans_of([3]) == ((3, 1),)
    assert spans_of([3, 3, 4, 3]) == ((3, 2), (4, 1), (3, 1))
