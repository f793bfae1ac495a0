"""An algorithm: GRPO whose advantage is only the sign of a reward's difference from the mean of its group.
rl.algorithm=sign"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec


def estimate(groups: Sequence[Any], keys: Any) -> list[list[float]]:
    """For each group and sample: -1, 0 or 1."""
    import numpy as np

    from weft.rl.algorithms import returns

    return [list(np.sign(returns.centred(returns.scores(group, keys)))) for group in groups]


def plain(rows: Sequence[Any], rewards: Sequence[Any], keys: Any) -> list[Any]:
    """The same row by row, with which `weft verify` compares."""
    from weft.rl.algorithms.plain import per_token, scores_of_groups

    pairs = scores_of_groups(rows, rewards)
    return per_token(rows, [0.0 if bool((g == g[0]).all()) else (score - g.mean()).sign() for score, g in pairs])


DECLARES = (
    AdvantageSpec("sign", estimate, plain, "sign(r - mean of the group)", compares_group=True),
    AlgorithmSpec("sign", "2402.03300", {"advantage": "sign", "policy_loss": "ppo"}),
)
