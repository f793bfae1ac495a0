"""Divergences of two distributions over a whole vocabulary, by their definitions. Imports nothing of weft."""

from __future__ import annotations

from torch import Tensor


def divergence_of(name: str, log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """[T] by the definitions. log_p, log_q: [T, V] log-probabilities of the student and of the teacher."""

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if name == "forward_kl":
        return kl(log_q, log_p)
    if name == "reverse_kl":
        return kl(log_p, log_q)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
