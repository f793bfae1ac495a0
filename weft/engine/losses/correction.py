"""Importance weights of tokens, because the rollout policy differs from the trainer's (rl.correction).

With rho = old / rollout, the mean of rho x loss is the mean loss under the trainer's old policy. rho is limited,
because over long samples it may grow without bound. N sampled tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.config.rl_schema import RlAlgorithm

# Defaults of rl.correction_limits: Yao et al. 2025 (fengyao.notion.site/off-policy-rl) and, for IcePop, Ling Team 2025,
# arXiv:2510.18855.
LIMITS = {"tis": (0.0, 2.0), "mis": (0.0, 2.0), "icepop": (0.5, 5.0)}
LARGEST = 20.0  # of |log rho|, so that no ratio is infinite


def importance_ratios(difference_N: Tensor, document_N: Tensor, documents: int, config: RlAlgorithm) -> Tensor:
    """rho, fp64, from log rho of each token. Depends on rl.correction_level: [N] rho of each token (`token`), or
    [documents] prod rho (`sequence`) or (prod rho)^(1/G) over the G tokens (`geometric`) of each sample."""
    log_ratio = difference_N.double()
    if config.correction_level != "token":
        zeros = torch.zeros(documents, dtype=torch.float64, device=log_ratio.device)
        tokens = zeros.index_add(0, document_N, torch.ones_like(log_ratio))
        log_ratio = zeros.index_add(0, document_N, log_ratio)
        if config.correction_level == "geometric":
            log_ratio = log_ratio / tokens.clamp(min=1)
    return log_ratio.clamp(-LARGEST, LARGEST).exp()


def bounded(ratios: Tensor, config: RlAlgorithm) -> Tensor:
    """The factors of rl.correction, from ratios. `tis` clips ratios at the limits (Yao et al. 2025). `mis` and `icepop`
    set ratios outside of the limits to zero (Liu et al. 2025, richardli.xyz/rl-collapse; arXiv:2510.18855, section 3);
    the lower limit of `mis` is 0 by default."""
    if config.correction == "none":
        return torch.ones_like(ratios)
    low, high = config.correction_limits or LIMITS[config.correction]
    if config.correction == "tis":
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def of_tokens(values: Tensor, document_N: Tensor, config: RlAlgorithm) -> Tensor:
    """[N] values per token, from values per token or per sample."""
    return values if config.correction_level == "token" else values[document_N]
