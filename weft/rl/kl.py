"""KL divergences estimated from sampled tokens (Schulman 2020, http://joschu.net/blog/kl-approx.html).

For tokens drawn from p, with d = log p - log q of each, three estimates of KL(p || q) = E_p[d]:

    k1 = d                  unbiased, of high variance, often negative
    k2 = d^2 / 2            biased, never negative
    k3 = exp(-d) - 1 + d    unbiased, never negative

Those are values, for rewards and metrics. As a loss, whose gradient counts, they are something else: see
weft/objectives/policy.py.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Estimator = Literal["k1", "k2", "k3"]
Exact = NDArray[np.float64]


def kl(difference: Exact, estimator: Estimator, clamp: float | None = None) -> Exact:
    """Of each token, from its log p - log q; the tokens were drawn from p. clamp: how far from 0 it may be."""
    if estimator == "k1":
        found = difference
    elif estimator == "k2":
        found = np.square(difference) / 2
    else:
        found = np.expm1(-difference) + difference
    return found if clamp is None else found.clip(-clamp, clamp)
