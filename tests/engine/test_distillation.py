"""The loss on a teacher's most likely tokens against formulas by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.engine.losses.base import Batch
from weft.engine.losses.distillation import TOP_IDS, TOP_LOGPROBS, TopKDistillationLoss


def loss_of(logits: Tensor, ids: Tensor, log_q: Tensor, alpha: float = 0.0) -> Tensor:
    """The loss sum of predictions with weights 1, 2, ..."""
    objective = TopKDistillationLoss(alpha=alpha)
    arrays, targets = {TOP_IDS: ids, TOP_LOGPROBS: log_q}, torch.arange(len(logits))
    readouts = {
        "logprob": logits.log_softmax(1).gather(1, targets[:, None])[:, 0],
        "logsumexp": logits.logsumexp(1),
        "chosen_logits": logits.gather(1, objective.token_ids(targets, arrays)),
    }
    weights = torch.arange(1.0, len(logits) + 1, dtype=logits.dtype)
    return objective(Batch(readouts, weights, torch.zeros_like(targets), (0,), arrays)).loss_sum


@pytest.mark.parametrize("listed", [1, 3, 9, 10])
def test_listed_tokens_and_a_tail_are_a_divergence_of_bins(listed: int) -> None:
    """With all tokens listed it is the KL over the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits, of_teacher = (torch.randn(4, 10, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_q, ids = of_teacher.log_softmax(1).topk(listed, 1)

    def bins(log_p: Tensor) -> Tensor:
        chosen = log_p.gather(1, ids).exp()
        rest = 1 - chosen.sum(1, keepdim=True)
        return torch.cat([chosen, rest], 1) if listed < 10 else chosen

    p, q = bins(logits.log_softmax(1)), bins(of_teacher.log_softmax(1))
    expected = ((q * (q.log() - p.log())).sum(1) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()
    actual = loss_of(logits, ids, log_q)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    (of_actual,), (of_expected,) = (torch.autograd.grad(x, logits) for x in (actual, expected))
    torch.testing.assert_close(of_actual, of_expected, rtol=1e-9, atol=1e-9)


def test_places_that_are_not_used_count_nothing() -> None:
    """A served teacher may list fewer tokens for some predictions."""
    logits = torch.randn(1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    short = loss_of(logits, torch.tensor([[4, 2]]), torch.tensor([[-0.7, -1.9]], dtype=torch.float64))
    filled = torch.tensor([[4, 2, -1]]), torch.tensor([[-0.7, -1.9, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(loss_of(logits, *filled), short)


def test_the_minimum_is_the_teacher() -> None:
    """Without the tail, a student that puts all mass on the listed tokens would do better than the teacher itself."""
    of_teacher = torch.randn(1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    log_q, ids = of_teacher.log_softmax(1).topk(3, 1)
    at_teacher = of_teacher.clone().requires_grad_()
    loss = loss_of(at_teacher, ids, log_q)
    assert abs(loss.item()) < 1e-12
    assert float(torch.autograd.grad(loss, at_teacher)[0].abs().max()) < 1e-12
