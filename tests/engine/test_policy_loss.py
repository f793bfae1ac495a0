"""PolicyLoss on a policy small enough to know everything of: one token out of eight, all of them at once, each weighed
by how probable it was. So sums are exact means, and gradients are compared with those of the true quantities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.rl_samples import algorithm, rl_config, sample
from weft.config.load import load_config
from weft.config.rl_schema import RlAlgorithm, RlConfig
from weft.engine.batch.document import DocumentMeta
from weft.engine.losses.base import Batch, LossOutput
from weft.engine.losses.policy import PolicyLoss
from weft.engine.step_plan.plan import plan_step
from weft.errors import UserError
from weft.launch.options import RlOptions
from weft.rl.corrections import correct
from weft.rl.model_engines import reference_config
from weft.rl.reference_critic import own_ranks, read_before_training

TOKENS = 8


def logits(seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size


def terms(config: RlAlgorithm, logprob: Tensor, weights: Tensor, **arrays: Tensor) -> LossOutput:
    """Of documents of one trained token each."""
    count = len(logprob)
    empty = {"old_logprobs": logprob.detach(), "advantages": torch.zeros(count), "correction": torch.ones(count)}
    readouts = {"logprob": logprob, "entropy": torch.full((count,), 0.5)}
    return PolicyLoss(config)(Batch(readouts, weights, torch.arange(count), tuple(range(count)), {**empty, **arrays}))


def gradient(config: RlAlgorithm, policy: Tensor, drawn: Tensor, **arrays: Tensor) -> Tensor:
    """Of the mean loss in the policy's logits, over tokens drawn from `drawn`."""
    leaf = policy.clone().requires_grad_()
    terms(config, leaf.log_softmax(-1), drawn.softmax(-1), **arrays).loss_sum.backward()
    assert leaf.grad is not None
    return leaf.grad


def true_gradient(policy: Tensor, quantity: Any) -> Tensor:
    leaf = policy.clone().requires_grad_()
    quantity(leaf.log_softmax(-1)).backward()
    assert leaf.grad is not None
    return leaf.grad


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def test_corrections_recover_the_direction_of_the_gradient() -> None:
    """An engine that samples from quite another policy: uncorrected, the update points elsewhere."""
    policy = logits(1)
    engine, reward = policy + logits(5), logits(3)
    reference = -true_gradient(policy, lambda logprob: (logprob.exp() * reward).sum())
    samples = [
        sample(n, 1, 1.0, old_logprobs=[float(old)], rollout_logprobs=[float(rollout)])
        for n, (old, rollout) in enumerate(zip(policy.log_softmax(-1), engine.log_softmax(-1), strict=True))
    ]

    def direction(**keys: Any) -> float:
        config = algorithm(policy_loss="reinforce", **keys)
        correct(samples, config)
        weights = [1.0 if s.correction is None else float(s.correction[-1]) for s in samples]
        return cosine(gradient(config, policy, engine, advantages=reward, correction=torch.tensor(weights)), reference)

    assert direction(correction="none") < 0.8
    assert direction(correction_limits=(0.0, 100.0)) > 0.99999
    assert direction() > 0.98  # cut at 2


@pytest.mark.covers("rl.kl_estimator", "rl.kl_unbiased")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_what_the_gradient_of_a_kl_estimate_is_the_gradient_of(estimator: Any, unbiased: bool) -> None:
    """As the docstring of kl_loss says: with tokens of the policy itself, and corrected, of an older one."""
    policy, reference = logits(1), logits(2).log_softmax(-1)
    drawn = policy + 0.5 * logits(3) if unbiased else policy
    config = algorithm(kl_coef=1.0, kl_estimator=estimator, kl_unbiased=unbiased)
    old = drawn.log_softmax(-1)
    actual = gradient(config, policy, drawn, ref_logprobs=reference, old_logprobs=old)
    forward = true_gradient(policy, lambda logprob: (logprob.exp() * (logprob - reference)).sum())
    reverse = true_gradient(policy, lambda logprob: (reference.exp() * (reference - logprob)).sum())
    expected = forward if unbiased else {"k1": torch.zeros(TOKENS), "k2": forward, "k3": reverse}[estimator]
    torch.testing.assert_close(actual, expected.double(), atol=1e-6, rtol=1e-5)


@pytest.mark.covers("rl.dual_clip", "rl.entropy_coef")
def test_metrics() -> None:
    """Ratios 1/2, 1, 5/4, 3 with advantages -1, 1, 1, -1 and a band of [0.8, 1.2]: the first and the third are cut."""
    ratio = torch.tensor([0.5, 1.0, 1.25, 3.0])
    old, reference, advantage = torch.full((4,), -2.0), torch.full((4,), -2.5), torch.tensor([-1.0, 1.0, 1.0, -1.0])
    weights, arrays = torch.tensor([1.0, 1.0, 0.5, 0.5]), {"old_logprobs": old, "advantages": advantage}

    def means(**keys: Any) -> dict[str, float]:
        config = algorithm(loss_aggregation="token_mean", **keys)
        metrics = terms(config, old + ratio.log(), weights, ref_logprobs=reference, **arrays).metrics
        return {name: float(total) / float(weight) for name, (total, weight) in metrics.items()}

    d = ratio.log() + 0.5
    shared = {
        "entropy": 0.5,
        "policy/ratio": float(ratio.mean()),
        "policy/kl_old": float((ratio - 1 - ratio.log()).mean()),
    }
    cut = {"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.25, "clip_ratio/region_mean": 0.5}
    loss = (0.8 * 1 - 1 * 1 - 0.5 * 1.2 + 0.5 * 3) / 3
    assert means() == pytest.approx({"loss": loss, **shared, **cut}, rel=1e-5)
    dual = (0.8 * 1 - 1 * 1 - 0.5 * 1.2 + 0.5 * 2) / 3
    assert means(dual_clip=2.0)["loss"] == pytest.approx(dual)
    kl = float(((-d).exp() - 1 + d).mean())
    assert means(kl_coef=0.1, kl_in="reward") == pytest.approx({"loss": loss, "kl": kl, **shared, **cut}, rel=1e-5)
    bonus = means(entropy_coef=0.1)["loss"]
    assert bonus == pytest.approx(loss - 0.1 * 0.5)
    outside = {"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.5, "clip_ratio/region_mean": 0.75}
    assert means(policy_loss="cispo").items() >= outside.items()
    assert not any(name.startswith("clip") for name in means(policy_loss="reinforce"))


@pytest.mark.covers("rl.measure_kl")
def test_a_kl_of_weight_0_is_measured_and_trains_nothing() -> None:
    arrays = {"old_logprobs": torch.tensor([-1.0, -2.0, -3.0]), "advantages": torch.ones(3)}
    reference = arrays["old_logprobs"] - 0.5
    logprob = arrays["old_logprobs"].clone().requires_grad_()
    plain = terms(algorithm(), logprob, torch.ones(3), **arrays)
    measured = terms(algorithm(measure_kl=True), logprob, torch.ones(3), ref_logprobs=reference, **arrays)
    total, weight = measured.metrics["kl"]
    assert float(total) / float(weight) == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert "kl" not in plain.metrics
    (of_plain,) = torch.autograd.grad(plain.loss_sum, logprob)
    (of_measured,) = torch.autograd.grad(measured.loss_sum, logprob)
    assert torch.equal(of_plain, of_measured)


def test_a_measured_kl_has_a_reference() -> None:
    """The reference is loaded, and reads the samples, with ranks of its own, too."""
    words = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]"]
    for extra, is_read in ((["rl.measure_kl=true"], True), (["rl.kl_coef=0.1"], True), ([], False)):
        config = load_config([], [*words, *extra], RlConfig)
        assert ("reference" in read_before_training(config.rl, old=False)) == is_read
        assert (reference_config(config) is not None) == is_read
    config = load_config([], [*words, "rl.measure_kl=true", "reference.ranks=2", "reference.path=org/other"], RlConfig)
    assert own_ranks(config) == {"reference": 2}


@pytest.mark.parametrize(("aggregation", "divisor"), [("token_mean", 5.0), ("sequence_mean", 2.0)])
def test_a_document_without_a_trained_token_is_no_sample(aggregation: Any, divisor: float) -> None:
    documents = [DocumentMeta(9, float(trained), trained) for trained in (2, 0, 3)]
    plan = plan_step(documents, ranks=1, budget=16)
    assert PolicyLoss(algorithm(loss_aggregation=aggregation)).normaliser(plan) == divisor


def test_the_share_of_samples_that_are_clipped() -> None:
    """TRL's share of gspo: one of two samples, however many tokens each has."""
    readouts = {"logprob": torch.tensor([0.5, 0.5, 0.5, 0.0]), "entropy": torch.zeros(4)}
    arrays = {"old_logprobs": torch.zeros(4), "advantages": torch.ones(4), "correction": torch.ones(4)}
    batch = Batch(readouts, torch.ones(4), torch.tensor([0, 0, 0, 1]), (0, 1), arrays)
    for loss in ("gspo", "ppo_sequence"):
        metrics = PolicyLoss(algorithm("gspo", policy_loss=loss, clip=(0.2, 0.2)))(batch).metrics
        shares = {name: float(total) / float(weight) for name, (total, weight) in metrics.items()}
        assert (shares["clip_ratio/samples_mean"], shares["clip_ratio/region_mean"]) == (0.5, 0.75)


def test_a_row_without_documents_has_the_same_metrics() -> None:
    empty = terms(algorithm(kl_coef=0.1), torch.zeros(0), torch.zeros(0), ref_logprobs=torch.zeros(0))
    assert float(empty.loss_sum) == 0 and all(float(weight) == 0 for _, weight in empty.metrics.values())
    full = terms(algorithm(kl_coef=0.1), torch.zeros(2), torch.ones(2), ref_logprobs=torch.zeros(2))
    assert empty.metrics.keys() == full.metrics.keys()


def test_a_loss_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loss.py").write_text(
        "def squared(tokens, config):\n    return -tokens.ratio * tokens.advantage + (tokens.ratio - 1) ** 2\n"
        "def total(tokens, config):\n    return tokens.ratio.sum()\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arrays = {"old_logprobs": torch.zeros(2), "advantages": torch.tensor([1.0, -1.0])}
    logprob = torch.tensor([2.0, 3.0]).log()
    result = terms(algorithm(policy_loss="own_loss:squared"), logprob, torch.ones(2), **arrays)
    assert float(result.loss_sum) == pytest.approx(-2 + 1 + 3 + 4)
    with pytest.raises(UserError, match=r"own_loss:total must return a loss for each of the 2 tokens, not \(\)"):
        terms(algorithm(policy_loss="own_loss:total"), logprob, torch.ones(2), **arrays)
    with pytest.raises(UserError, match="own_loss:number is not a function"):
        PolicyLoss(algorithm(policy_loss="own_loss:number"))


@pytest.mark.parametrize("leaf", ["policy_loss", "advantage"])
def test_what_cannot_be_imported_is_missed_before_anything_is_loaded(leaf: str) -> None:
    from weft.recipes import rl  # it takes a second

    options = RlOptions(device="cpu", world=1)
    with pytest.raises(UserError, match=f"rl.{leaf}: there is no module nowhere"):
        rl.run(rl_config(algorithm(**{leaf: "nowhere:mine"})), options)
