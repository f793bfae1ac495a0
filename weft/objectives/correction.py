"""What a token's loss is multiplied by, because it was not quite the trainer's policy that drew it (rl.correction).

With rho = old / rollout of what was sampled, a token's loss times rho is what it would be on average had the trainer
sampled (importance sampling); bounded, because rho of long samples is not. N sampled tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.config.rl_schema import RlAlgorithm

# rl.correction_limits where they are null: Yao et al. 2025 (fengyao.notion.site/off-policy-rl) and, for IcePop, Ling
# Team 2025, arXiv:2510.18855.
LIMITS = {"tis": (0.0, 2.0), "mis": (0.0, 2.0), "icepop": (0.5, 5.0)}
LARGEST = 20.0  # of |log rho|, so that no ratio is infinite


def importance_ratios(difference_N: Tensor, document_N: Tensor, documents: int, config: RlAlgorithm) -> Tensor:
    """[N] rho of each token, from log rho; or [documents] that of each sample: prod rho (`sequence`), or
    (prod rho)^(1/G) of its G tokens (`geometric`). fp64."""
    log_ratio = difference_N.double()
    if config.correction_level != "token":
        zeros = torch.zeros(documents, dtype=torch.float64, device=log_ratio.device)
        tokens = zeros.index_add(0, document_N, torch.ones_like(log_ratio))
        log_ratio = zeros.index_add(0, document_N, log_ratio)
        if config.correction_level == "geometric":
            log_ratio = log_ratio / tokens.clamp(min=1)
    return log_ratio.clamp(-LARGEST, LARGEST).exp()


def bounded(ratios: Tensor, config: RlAlgorithm) -> Tensor:
    """`tis` cuts a ratio at the limits (Yao et al. 2025), `mis` and `icepop` drop what is outside of them: `mis` only
    above (Liu et al. 2025, richardli.xyz/rl-collapse), `icepop` below, too (arXiv:2510.18855, section 3)."""
    if config.correction == "none":
        return torch.ones_like(ratios)
    low, high = config.correction_limits or LIMITS[config.correction]
    if config.correction == "tis":
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def of_tokens(values: Tensor, document_N: Tensor, config: RlAlgorithm) -> Tensor:
    """[N] from ratios, or what has become of them, of tokens or of samples."""
    return values if config.correction_level == "token" else values[document_N]
