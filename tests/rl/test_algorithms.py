"""Everything that weft/rl/algorithms declares equals its plain implementation; a new algorithm is tested without a
change."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.rl_samples import algorithm, sample
from weft.config.rl_schema import RlAlgorithm
from weft.engine.losses.policy import PolicyTokens
from weft.inference.types import SampleGroup
from weft.rl.algorithms import ADVANTAGES, ALGORITHMS, TOKEN_LOSSES
from weft.verify import rl_reference
from weft.verify.rl_reference import PlainSample

KEYS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "over the step, discounted": {"advantage_norm": "batch", "gamma": 0.9, "gae_lambda": 0.8},
    "not divided, KL in the reward": {"advantage_norm": "none", "kl_coef": 0.1, "kl_in": "reward"},
    "two bounds": {"clip": (0.1, 0.3), "dual_clip": 1.2},
}


def rollouts() -> list[SampleGroup]:
    """Three groups: of uneven lengths, with rewards that are all equal, and with rewards of 0 or 1."""
    generator, groups = np.random.default_rng(0), []
    for index, rewards in enumerate(([0.3, 1.7, -0.4, 0.9], [0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 1.0])):
        samples = []
        for number, reward in enumerate(rewards):
            tokens = 2 + (3 * number + index) % 5
            names = ("old_logprobs", "ref_logprobs", "values")
            arrays = {name: generator.normal(-1.0, 0.3, tokens).tolist() for name in names}
            samples.append(sample(number, tokens, reward, index=index, gaps=[1] if tokens > 4 else [], **arrays))
        groups.append(SampleGroup(samples[0].prompt, samples))
    return groups


def plain_rows(groups: list[SampleGroup]) -> list[PlainSample]:
    rows = []
    for group_number, group in enumerate(groups):
        for drawn_sample in group.samples:
            arrays = {
                n: torch.from_numpy(getattr(drawn_sample, n)[drawn_sample.sampled])
                for n in ("old_logprobs", "ref_logprobs", "values")
            }
            drawn = np.flatnonzero(drawn_sample.sampled).tolist()
            rows.append(
                PlainSample(
                    drawn_sample.tokens.tolist(),
                    drawn,
                    group_number,
                    drawn_sample.reward,
                    True,
                    torch.zeros(len(drawn)),
                    **arrays,
                )
            )
    return rows


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_is_that_of_single_rows(name: str, keys: dict[str, Any]) -> None:
    rl, groups = RlAlgorithm(reward=("math",), advantage=name, **keys), rollouts()
    rows = plain_rows(groups)
    estimates = [value for group in ADVANTAGES[name].estimate(groups, rl) for value in group]
    rl_reference.compare(rows, rl)
    samples = [drawn_sample for group in groups for drawn_sample in group.samples]
    for drawn_sample, estimate, row in zip(samples, estimates, rows, strict=True):
        expected = row.advantage.double().numpy()
        assert np.broadcast_to(estimate, expected.shape) == pytest.approx(expected, abs=1e-9), drawn_sample.id
        if ADVANTAGES[name].needs_critic:
            assert drawn_sample.returns is not None
            assert drawn_sample.returns[drawn_sample.sampled] == pytest.approx(row.returns.numpy(), abs=1e-6)


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_loss_and_its_gradient_are_those_of_single_rows(name: str, keys: dict[str, Any]) -> None:
    rl = RlAlgorithm(reward=("math",), policy_loss=name, **keys)
    generator = torch.Generator().manual_seed(1)
    for length in (1, 2, 7):
        old = torch.randn(length, generator=generator) - 2
        near = old + 0.4 * torch.randn(length, generator=generator)
        advantage = torch.randn(length, generator=generator)
        row = PlainSample([], [], 0, 1.0, True, old, old_logprobs=old, advantage=advantage)
        gradients, losses = [], []
        for plain in (False, True):
            logprob = near.clone().requires_grad_()
            if plain:
                loss = TOKEN_LOSSES[name].plain(logprob, row, rl)
            else:
                batch: Any = SimpleNamespace(per_token_document_sum=lambda x: x.sum().expand_as(x))
                loss = TOKEN_LOSSES[name].loss(PolicyTokens(logprob, old, advantage, batch), rl)
            loss.sum().backward()
            assert logprob.grad is not None
            losses.append(loss.detach())
            gradients.append(logprob.grad)
        assert torch.allclose(*losses, atol=1e-6) and torch.allclose(*gradients, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_combines_what_is_declared(name: str) -> None:
    keys = algorithm(name)
    assert keys.advantage in ADVANTAGES and keys.policy_loss in TOKEN_LOSSES
    assert all(hasattr(keys, leaf) for leaf in ALGORITHMS[name].preset)


def test_maxrl_divides_by_the_mean_of_the_group() -> None:
    """Tajwar et al. 2026: a prompt that is solved once in four times weighs four times as much as one always solved."""
    group = SampleGroup(sample(0, 1, 0.0).prompt, [sample(n, 1, r) for n, r in enumerate((1.0, 0.0, 0.0, 0.0))])
    lost = SampleGroup(group.prompt, [sample(n, 1, -1.0 * n) for n in range(2)])
    assert ADVANTAGES["max_rl"].estimate([group, lost], algorithm("max_rl")) == [[3.0, -1.0, -1.0, -1.0], [0.0, 0.0]]


def test_declarations_are_read_without_torch_and_numpy() -> None:
    code = "import sys, weft.rl.algorithms; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
