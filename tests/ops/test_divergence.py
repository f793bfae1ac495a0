"""weft.ops.divergence against the same divergences computed from all logits at once."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.ops.communicator import ThreadCommunicator, ThreadGroup
from weft.ops.divergence import (
    Comparison,
    Divergences,
    TeacherHead,
    Terms,
    differentiated,
    divergences,
    forward_kl,
    reverse_kl,
    terms_of,
)
from weft.ops.head import KnownGrad, LogitTransform, VocabularyShard


def skewed(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || 0.1 q + 0.9 p) of a user, as terms."""
    mixture = torch.logaddexp(log_q + math.log(0.1), log_p + math.log(0.9))
    return log_q.exp() * (log_q - mixture)


def full_divergence(name: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(1)

    if name == "forward_kl":
        return kl(log_q, log_p)
    if name == "reverse_kl":
        return kl(log_p, log_q)
    beta = {"jsd 0.5": 0.5, "jsd 0.1": 0.1, "skewed": 0.1}[name]
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    if name == "skewed":
        return kl(log_q, log_m)
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


DIVERGENCES: dict[str, Terms] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd 0.5": terms_of("jsd", 0.5),
    "jsd 0.1": terms_of("jsd", 0.1),
    "skewed": differentiated(skewed, "skewed"),
}


class Problem(NamedTuple):
    """A student's hidden states, head and bias, with gradients, the targets, and the teacher's."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    hidden_q: Tensor
    weight_q: Tensor
    bias_q: Tensor


def problem(rows: int = 37, rows_q: int = 37, tokens: int = 11, dtype: torch.dtype = torch.float64) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden, weight, bias = (normal(*shape).requires_grad_() for shape in ((tokens, 6), (rows, 6), (rows,)))
    targets = torch.randint(rows, (tokens,), generator=generator)
    return Problem(hidden, weight, bias, targets, 1.5 * normal(tokens, 10), normal(rows_q, 10), normal(rows_q))


STUDENT, TEACHER = LogitTransform(scale=1.3, softcap=4.0), LogitTransform(scale=0.7, softcap=6.0)


def full(given: Problem, name: str, temperature: float, ce_temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, divergence, agreement) from all logits."""
    z = STUDENT(given.hidden @ given.weight.T + given.bias)
    z_q = TEACHER(given.hidden_q @ given.weight_q.T + given.bias_q)
    common = min(z.shape[1], z_q.shape[1])
    z_p, z_q = z[:, :common], z_q[:, :common]
    value = full_divergence(name, (z_p / temperature).log_softmax(1), (z_q / temperature).log_softmax(1))
    logprob = (z / ce_temperature).log_softmax(1).gather(1, given.targets[:, None])[:, 0]
    return logprob, value, (z_p.argmax(1) == z_q.argmax(1)).double()


def head_of(given: Problem) -> TeacherHead:
    common = min(len(given.weight), len(given.weight_q))
    return TeacherHead(given.weight_q, given.bias_q, TEACHER, common)


def chunked(given: Problem, name: str, of_divergence: float, **options: Any) -> Divergences:
    comparison = Comparison(DIVERGENCES[name], given.hidden_q, head_of(given), of_divergence)
    return divergences(given.hidden, given.weight, given.bias, given.targets, STUDENT, comparison, **options)


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [(37, 37), (40, 37), (37, 48)], ids=["", "student padded", "teacher padded"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_and_gradients_equal_full_logits(name: str, temperature: float, rows: tuple[int, int]) -> None:
    given = problem(*rows)
    upstream = torch.randn(2, 11, dtype=torch.float64)
    inputs = [given.hidden, given.weight, given.bias]
    for ce_temperature in (1.0, 0.7):
        logprob, value, _ = full(given, name, temperature, ce_temperature)
        expected = torch.autograd.grad([logprob, value], inputs, list(upstream))
        for height in (None, 1, 4):
            for known in (None, KnownGrad(3.0 * upstream.flatten())):
                out = chunked(
                    given, name, temperature, temperature=ce_temperature, rows_per_tile=height, known_grad=known
                )
                near(out.logprob, logprob)
                near(out.divergence, value)
                actual = torch.autograd.grad([out.logprob, out.divergence], inputs, list(upstream))
                for one, other in zip(actual, expected, strict=True):
                    near(one, other)
                assert known is None or not any(known.wrong)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_each_readout_alone_may_have_a_gradient(name: str) -> None:
    given = problem()
    for index in (0, 1):
        expected = torch.autograd.grad(full(given, name, 1.0)[index].sum(), given.weight)
        near(torch.autograd.grad(chunked(given, name, 1.0)[:2][index].sum(), given.weight)[0], expected[0])


def test_a_wrong_direction_is_flagged() -> None:
    given = problem()
    known = KnownGrad(torch.ones(22, dtype=torch.float64))
    out = chunked(given, "forward_kl", 1.0, known_grad=known)
    (out.divergence.sum() + 2 * out.logprob.sum()).backward()
    assert any(known.wrong)


@pytest.mark.parametrize("rows", [(37, 37), (44, 37), (37, 44)], ids=["", "student padded", "teacher padded"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd 0.1", "skewed"])
def test_a_divided_vocabulary(name: str, ranks: int, rows: tuple[int, int]) -> None:
    """Shards are uneven, the teacher's head is whole or divided like the student's."""
    given = problem(*rows)
    upstream = torch.randn(2, 11, dtype=torch.float64)
    inputs = [given.hidden, given.weight, given.bias]
    *values, agreement = full(given, name, 2.0)
    expected = torch.autograd.grad(values, inputs, list(upstream))
    group, bounds = ThreadGroup(ranks), torch.linspace(0, rows[0], ranks + 1).long().tolist()

    def of_rank(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        try:
            part = slice(bounds[rank], bounds[rank + 1])
            shards = (given.hidden, given.weight[part], given.bias[part])
            local = [x.detach().clone().requires_grad_() for x in shards]
            head = head_of(given)
            if rank:
                head = head.rows(part.start, part.stop - part.start)
            comparison = Comparison(DIVERGENCES[name], given.hidden_q, head, 2.0)
            shard = VocabularyShard(part.start, ThreadCommunicator(group, rank))
            arguments = (*local, given.targets, STUDENT, comparison)
            known = KnownGrad(upstream.flatten())
            out = divergences(*arguments, rows_per_tile=4, shard=shard, known_grad=known)
            grads = torch.autograd.grad([out.logprob, out.divergence], local, list(upstream))
            with torch.no_grad():
                agreed = divergences(*arguments, shard=shard, agreement=True).agreement
            assert agreed is not None
            return [out.logprob, out.divergence, agreed], list(grads)
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        results = list(threads.map(of_rank, range(ranks)))
    for read, _ in results:
        for one, other in zip(read, [*values, agreement], strict=True):
            near(one, other)
    grads = [grads for _, grads in results]
    near(torch.stack([grad[0] for grad in grads]).sum(0), expected[0])
    near(torch.cat([grad[1] for grad in grads]), expected[1])
    near(torch.cat([grad[2] for grad in grads]), expected[2])


def test_agreement_is_equality_of_the_likeliest_tokens() -> None:
    given = problem()
    with torch.no_grad():
        out = chunked(given, "forward_kl", 1.0, agreement=True, rows_per_tile=3)
    assert out.agreement is not None
    near(out.agreement, full(given, "forward_kl", 1.0)[2])


@pytest.mark.parametrize("name", DIVERGENCES)
def test_certain_distributions_stay_finite(name: str) -> None:
    """Logits hundreds of nats apart: probabilities underflow, and nothing is NaN."""
    given = problem(dtype=torch.float32)
    sharp = given._replace(
        weight=(given.weight * 60).detach().requires_grad_(), weight_q=given.weight_q * 60, bias=given.bias
    )
    comparison = Comparison(
        DIVERGENCES[name], sharp.hidden_q, TeacherHead(sharp.weight_q, sharp.bias_q, LogitTransform(), 37)
    )
    out = divergences(sharp.hidden, sharp.weight, sharp.bias, sharp.targets, LogitTransform(), comparison)
    grad = torch.autograd.grad(out.divergence.sum(), sharp.weight)[0]
    assert out.divergence.isfinite().all() and grad.isfinite().all()


def test_a_teacher_that_is_the_student_gets_no_gradient() -> None:
    """At p = q every divergence is at its minimum; a gradient into the teacher's side would not be seen there, so
    the teacher shares the head and has other hidden states."""
    given = problem()
    apart = given._replace(hidden_q=2 * given.hidden.detach(), weight_q=given.weight.detach())
    expected = torch.autograd.grad(full(apart, "reverse_kl", 1.0)[1].sum(), given.weight)
    comparison = Comparison(reverse_kl, 2 * given.hidden, TeacherHead(given.weight, given.bias_q, TEACHER, 37))
    out = divergences(given.hidden, given.weight, given.bias, given.targets, STUDENT, comparison)
    near(torch.autograd.grad(out.divergence.sum(), given.weight)[0], expected[0])


def test_no_predictions_give_zero_gradients() -> None:
    given = problem(tokens=0)
    out = chunked(given, "jsd 0.5", 1.0)
    out.divergence.sum().backward()
    assert given.weight.grad is not None and not given.weight.grad.any()


def test_impossible_settings_are_refused() -> None:
    given = problem()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        chunked(given, "forward_kl", 0.0)
    summed = differentiated(lambda log_p, log_q: (log_p - log_q).sum(1), "mine.py:kl")
    comparison = Comparison(summed, given.hidden_q, head_of(given))
    with pytest.raises(ValueError, match=r"mine.py:kl gives \(11,\); it must give a term for each token"):
        divergences(given.hidden, given.weight, given.bias, given.targets, STUDENT, comparison)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("known", [False, True])
def test_no_tensor_is_larger_than_a_tile(name: str, known: bool) -> None:
    """Forward and backward of 200 tokens and 1000 tokens of the vocabulary, in tiles of 16 tokens."""
    given = problem(1000, 1000, tokens=200, dtype=torch.float32)
    direction = KnownGrad(torch.ones(400)) if known else None
    with _Largest() as largest:
        out = chunked(given, name, 1.0, rows_per_tile=16, known_grad=direction)
        (out.logprob + out.divergence).sum().backward()
    assert largest.elements <= 16 * 1000, largest.elements
