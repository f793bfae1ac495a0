"""Load balancing of a mixture of experts, document by document, so that it does not depend on the cut of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_sum(router_logits: Sequence[Tensor], owner_M: Tensor, documents: int, top_k: int) -> Tensor:
    """Sum over documents of tokens x auxiliary loss: a scalar with gradient.

    The loss of a document is Switch Transformer's (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6) as
    transformers computes it, over all layers at once: E sum_e F_e P_e, F_e being how many of a token's top_k choices
    fall on expert e, on average, and P_e its mean probability.

    router_logits: of each layer [M, E] or [B, T, E], for the M = B T tokens of a row. owner_M: place of each token's
    document, -1 for padding, which counts nowhere.
    """
    experts = router_logits[0].shape[-1]
    places = torch.where(owner_M < 0, documents, owner_M)  # padding goes to a bin of its own
    device = router_logits[0].device
    chosen_DE = torch.zeros(documents + 1, experts, device=device)
    probability_DE = torch.zeros(documents + 1, experts, device=device)
    for logits in router_logits:
        probability_ME = logits.reshape(-1, experts).softmax(-1)
        choices_ME = torch.zeros_like(probability_ME).scatter_(1, probability_ME.topk(top_k, dim=-1).indices, 1.0)
        chosen_DE = chosen_DE.index_add(0, places, choices_ME.float())
        probability_DE = probability_DE.index_add(0, places, probability_ME.float())
    tokens_D = torch.bincount(places, minlength=documents + 1)[:documents].clamp(min=1)
    rows_D = tokens_D * len(router_logits)
    loss_D = experts * (chosen_DE * probability_DE)[:documents].sum(-1) / rows_D.float().square()
    return (loss_D * tokens_D).sum()
