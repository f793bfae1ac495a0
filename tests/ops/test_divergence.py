"""weft.ops.divergence against the same divergences computed from all logits at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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
    TeacherLogits,
    Terms,
    TopTokens,
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


def full(case: Problem, name: str, temperature: float, ce_temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, divergence, agreement) from all logits."""
    z = STUDENT(case.hidden @ case.weight.T + case.bias)
    z_q = TEACHER(case.hidden_q @ case.weight_q.T + case.bias_q)
    common = min(z.shape[1], z_q.shape[1])
    z_p, z_q = z[:, :common], z_q[:, :common]
    value = full_divergence(name, (z_p / temperature).log_softmax(1), (z_q / temperature).log_softmax(1))
    logprob = (z / ce_temperature).log_softmax(1).gather(1, case.targets[:, None])[:, 0]
    return logprob, value, (z_p.argmax(1) == z_q.argmax(1)).double()


def head_of(case: Problem) -> TeacherHead:
    common = min(len(case.weight), len(case.weight_q))
    return TeacherHead(case.weight_q, case.bias_q, TEACHER, common)


def chunked(case: Problem, name: str, of_divergence: float, **options: Any) -> Divergences:
    comparison = Comparison(DIVERGENCES[name], TeacherLogits(case.hidden_q, head_of(case)), of_divergence)
    return divergences(case.hidden, case.weight, case.bias, case.targets, STUDENT, comparison, **options)


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [(37, 37), (40, 37), (37, 48)], ids=["", "student padded", "teacher padded"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_and_gradients_equal_full_logits(name: str, temperature: float, rows: tuple[int, int]) -> None:
    case = problem(*rows)
    upstream = torch.randn(2, 11, dtype=torch.float64)
    inputs = [case.hidden, case.weight, case.bias]
    for ce_temperature in (1.0, 0.7):
        logprob, value, _ = full(case, name, temperature, ce_temperature)
        expected = torch.autograd.grad([logprob, value], inputs, list(upstream))
        for height in (None, 1, 4):
            for direction in (None, KnownGrad(3.0 * upstream.flatten())):
                out = chunked(
                    case, name, temperature, temperature=ce_temperature, rows_per_tile=height, known_grad=direction
                )
                near(out.logprob, logprob)
                near(out.divergence, value)
                actual = torch.autograd.grad([out.logprob, out.divergence], inputs, list(upstream))
                for result, reference in zip(actual, expected, strict=True):
                    near(result, reference)
                assert direction is None or not any(direction.wrong)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_each_readout_alone_may_have_a_gradient(name: str) -> None:
    case = problem()
    for index in (0, 1):
        expected = torch.autograd.grad(full(case, name, 1.0)[index].sum(), case.weight)
        near(torch.autograd.grad(chunked(case, name, 1.0)[:2][index].sum(), case.weight)[0], expected[0])


def test_a_wrong_direction_is_flagged() -> None:
    case = problem()
    direction = KnownGrad(torch.ones(22, dtype=torch.float64))
    out = chunked(case, "forward_kl", 1.0, known_grad=direction)
    (out.divergence.sum() + 2 * out.logprob.sum()).backward()
    assert any(direction.wrong)


def parts_of(case: Problem, ranks: int) -> list[slice]:
    """The rows of the student's head of each rank."""
    bounds = torch.linspace(0, len(case.weight), ranks + 1).long().tolist()
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def of_shards(
    case: Problem, ranks: int, comparisons: Sequence[Comparison], upstream: Tensor
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of each rank of a divided vocabulary: (logprob, divergence and agreement; gradients of hidden states, weight and
    bias). comparisons: of each rank."""
    group, parts = ThreadGroup(ranks), parts_of(case, ranks)

    def of_rank(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        try:
            part = parts[rank]
            shards = (case.hidden, case.weight[part], case.bias[part])
            local = [x.detach().clone().requires_grad_() for x in shards]
            shard = VocabularyShard(part.start, ThreadCommunicator(group, rank))
            arguments = (*local, case.targets, STUDENT, comparisons[rank])
            direction = KnownGrad(upstream.flatten())
            out = divergences(*arguments, rows_per_tile=4, shard=shard, known_grad=direction)
            grads = torch.autograd.grad([out.logprob, out.divergence], local, list(upstream))
            with torch.no_grad():
                agreed = divergences(*arguments, shard=shard, agreement=True).agreement
            assert agreed is not None
            return [out.logprob, out.divergence, agreed], list(grads)
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of_rank, range(ranks)))


def near_sum_of_shards(
    results: Sequence[tuple[list[Tensor], list[Tensor]]], values: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    """Each rank reads these values; the gradients of hidden states add up, those of weight and bias are the ranks'
    rows. expected: gradients of hidden states, weight and bias."""
    for read, _ in results:
        for actual, value in zip(read, values, strict=True):
            near(actual, value)
    hidden, weight, bias = zip(*(grads for _, grads in results), strict=True)
    near(torch.stack(hidden).sum(0), expected[0])
    near(torch.cat(weight), expected[1])
    near(torch.cat(bias), expected[2])


@pytest.mark.parametrize("rows", [(37, 37), (44, 37), (37, 44)], ids=["", "student padded", "teacher padded"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd 0.1", "skewed"])
def test_a_divided_vocabulary(name: str, ranks: int, rows: tuple[int, int]) -> None:
    """Shards are uneven, the teacher's head is whole or divided like the student's."""
    case = problem(*rows)
    upstream = torch.randn(2, 11, dtype=torch.float64)
    inputs = [case.hidden, case.weight, case.bias]
    *values, agreement = full(case, name, 2.0)
    expected = torch.autograd.grad(values, inputs, list(upstream))
    comparisons = []
    for rank, part in enumerate(parts_of(case, ranks)):
        head = head_of(case)
        if rank:
            head = head.rows(part.start, part.stop - part.start)
        comparisons.append(Comparison(DIVERGENCES[name], TeacherLogits(case.hidden_q, head), 2.0))
    results = of_shards(case, ranks, comparisons, upstream)
    near_sum_of_shards(results, [*values, agreement], expected)


def test_agreement_is_equality_of_the_likeliest_tokens() -> None:
    inputs = problem()
    with torch.no_grad():
        out = chunked(inputs, "forward_kl", 1.0, agreement=True, rows_per_tile=3)
    assert out.agreement is not None
    near(out.agreement, full(inputs, "forward_kl", 1.0)[2])


@pytest.mark.parametrize("name", DIVERGENCES)
def test_certain_distributions_stay_finite(name: str) -> None:
    """Logits hundreds of nats apart: probabilities underflow, and nothing is NaN."""
    inputs = problem(dtype=torch.float32)
    sharp = inputs._replace(
        weight=(inputs.weight * 60).detach().requires_grad_(), weight_q=inputs.weight_q * 60, bias=inputs.bias
    )
    head = TeacherHead(sharp.weight_q, sharp.bias_q, LogitTransform(), 37)
    comparison = Comparison(DIVERGENCES[name], TeacherLogits(sharp.hidden_q, head))
    out = divergences(sharp.hidden, sharp.weight, sharp.bias, sharp.targets, LogitTransform(), comparison)
    grad = torch.autograd.grad(out.divergence.sum(), sharp.weight)[0]
    assert out.divergence.isfinite().all() and grad.isfinite().all()


def test_a_teacher_that_is_the_student_gets_no_gradient() -> None:
    """At p = q every divergence is at its minimum; a gradient into the teacher's side would not be seen there, so
    the teacher shares the head and has other hidden states."""
    case = problem()
    different = case._replace(hidden_q=2 * case.hidden.detach(), weight_q=case.weight.detach())
    expected = torch.autograd.grad(full(different, "reverse_kl", 1.0)[1].sum(), case.weight)
    head = TeacherHead(case.weight, case.bias_q, TEACHER, 37)
    comparison = Comparison(reverse_kl, TeacherLogits(2 * case.hidden, head))
    out = divergences(case.hidden, case.weight, case.bias, case.targets, STUDENT, comparison)
    near(torch.autograd.grad(out.divergence.sum(), case.weight)[0], expected[0])


def test_no_predictions_give_zero_gradients() -> None:
    inputs = problem(tokens=0)
    out = chunked(inputs, "jsd 0.5", 1.0)
    out.divergence.sum().backward()
    assert inputs.weight.grad is not None and not inputs.weight.grad.any()


def test_impossible_settings_are_refused() -> None:
    inputs = problem()
    with pytest.raises(ValueError, match="the temperature of a divergence must be above 0"):
        chunked(inputs, "forward_kl", 0.0)
    summed = differentiated(lambda log_p, log_q: (log_p - log_q).sum(1), "mine.py:kl")
    comparison = Comparison(summed, TeacherLogits(inputs.hidden_q, head_of(inputs)))
    with pytest.raises(ValueError, match=r"mine.py:kl returns \(11,\); it must return a term for each token"):
        divergences(inputs.hidden, inputs.weight, inputs.bias, inputs.targets, STUDENT, comparison)


# ---------------------------------------------------------------- a teacher's likeliest tokens and a tail


def listed(inputs: Problem, count: int, temperature: float) -> TopTokens:
    """The teacher's `count` likeliest tokens, in two more entries of which none is used, shuffled."""
    z_q = TEACHER(inputs.hidden_q @ inputs.weight_q.T + inputs.bias_q)
    log_q, ids = (z_q / temperature).log_softmax(1).topk(count, 1)
    unused = torch.full((len(ids), 2), -1)
    order = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))
    return TopTokens(torch.cat([ids, unused], 1)[:, order], torch.cat([log_q, unused.double()], 1)[:, order])


def in_bins(log_p: Tensor, teacher: TopTokens) -> Tensor:
    """Log-probabilities [N, K + 1] of the listed tokens and of all others together; without others, [N, K]."""
    rows = [ids[ids >= 0] for ids in teacher.ids_NK]
    chosen = torch.stack([of_row[ids] for of_row, ids in zip(log_p, rows, strict=True)])
    if chosen.shape[1] == log_p.shape[1]:
        return chosen
    tails = [
        torch.cat([of_row[token : token + 1] for token in range(len(of_row)) if token not in ids.tolist()])
        for of_row, ids in zip(log_p, rows, strict=True)
    ]
    return torch.cat([chosen, torch.stack(tails).logsumexp(1, keepdim=True)], 1)


def full_of_list(inputs: Problem, name: str, teacher: TopTokens, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, divergence, agreement) from all logits of both."""
    z = STUDENT(inputs.hidden @ inputs.weight.T + inputs.bias)
    z_q = TEACHER(inputs.hidden_q @ inputs.weight_q.T + inputs.bias_q)
    log_p, log_q = (in_bins((x / temperature).log_softmax(1), teacher) for x in (z, z_q))
    logprob = z.log_softmax(1).gather(1, inputs.targets[:, None])[:, 0]
    return logprob, full_divergence(name, log_p, log_q), (z.argmax(1) == z_q.argmax(1)).double()


@pytest.mark.parametrize("count", [1, 5, 36, 37])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_list_and_a_tail_equal_bins_of_full_logits(name: str, ranks: int, count: int) -> None:
    """With all 37 tokens listed there is no tail, and the divergence is that of the whole vocabulary."""
    case, temperature = problem(), 2.0
    teacher = listed(case, count, temperature)
    *values, agreement = full_of_list(case, name, teacher, temperature)
    if count == 37:
        near(values[1], full(case, name, temperature)[1])
    inputs, upstream = [case.hidden, case.weight, case.bias], torch.randn(2, 11, dtype=torch.float64)
    expected = torch.autograd.grad(values, inputs, list(upstream))
    comparison = Comparison(DIVERGENCES[name], teacher, temperature)
    results = of_shards(case, ranks, [comparison] * ranks, upstream)
    near_sum_of_shards(results, [*values, agreement], expected)


def test_the_minimum_of_a_list_is_the_teacher() -> None:
    """Without the tail, a student with all its mass on the listed tokens would do better than the teacher itself."""
    inputs = problem()._replace(hidden_q=torch.eye(11, 10, dtype=torch.float64))
    student = TEACHER(inputs.hidden_q @ inputs.weight_q.T + inputs.bias_q)
    identity, hidden = torch.eye(37, dtype=torch.float64), student.clone().requires_grad_()
    for name in DIVERGENCES:
        comparison = Comparison(DIVERGENCES[name], listed(inputs, 3, 1.0))
        out = divergences(hidden, identity, None, inputs.targets, LogitTransform(), comparison)
        near(out.divergence, torch.zeros(11, dtype=torch.float64))
        near(torch.autograd.grad(out.divergence.sum(), hidden)[0], torch.zeros_like(hidden))


def test_a_tail_below_the_rounding_of_one_keeps_its_digits() -> None:
    """fp32: 1 minus the student's listed probabilities would be 0 here, and its gradient noise."""
    logits = torch.tensor([[20.0, 0.0, -1.0, -2.0]])
    teacher = TopTokens(torch.tensor([[0]]), torch.tensor([[0.6]]).log())
    results = []
    for dtype in (torch.float32, torch.float64):
        z = logits.to(dtype).requires_grad_()
        comparison = Comparison(forward_kl, TopTokens(teacher.ids_NK, teacher.logprobs_NK.to(dtype)))
        out = divergences(z, torch.eye(4, dtype=dtype), None, torch.tensor([1]), LogitTransform(), comparison)
        results.append((out.divergence.double(), torch.autograd.grad(out.divergence.sum(), z)[0].double()))
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-6, atol=1e-7)


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
@pytest.mark.parametrize("with_direction", [False, True])
def test_no_tensor_is_larger_than_a_tile(name: str, with_direction: bool) -> None:
    """Forward and backward of 200 tokens and 1000 tokens of the vocabulary, in tiles of 16 tokens."""
    case = problem(1000, 1000, tokens=200, dtype=torch.float32)
    direction = KnownGrad(torch.ones(400)) if with_direction else None
    with _Largest() as largest:
        out = chunked(case, name, 1.0, rows_per_tile=16, known_grad=direction)
        (out.logprob + out.divergence).sum().backward()
    assert largest.elements <= 16 * 1000, largest.elements
