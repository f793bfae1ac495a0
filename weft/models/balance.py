"""Load balancing of experts, per document or over the whole step; neither depends on how a step is split.

Both are the loss of Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6) as transformers computes
it, over all layers at once: E sum_e F_e P_e. F_e is the number of a token's top_k choices that fall on expert e,
averaged over a set of tokens; P_e is the expert's mean probability over them. F has no gradient, so for the whole step
only F must be known before the first backward; P is a sum over rows.

D documents, S segments (ops/segments.py), E experts, M tokens of a row. router_logits: per layer [M, E] or [B, T, E],
with M = B T. A token that several documents share counts in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.shared_documents import SharedDocuments


@dataclass(frozen=True)
class Counted:
    """Counts made before the forward of a row. layers: number of layers with routers in the whole model. chosen_DE:
    choices of experts in all these layers, for each document; None if the shares of the step are given."""

    layers: Tensor
    chosen_DE: Tensor | None


@dataclass(frozen=True)
class Balance:
    """Inputs of the auxiliary loss for a row.

    owner_M: index of each token's document, -1 for padding, which is not counted. shares_E: F over the whole step; None
    to balance each document. counting: only count the choices. shared: documents of which other ranks have parts.
    counted: set if layers on other ranks also count. holders_DS: 1 if a document contains a segment, for rows whose
    documents share segments; owner_M is then the index of each token's segment.
    """

    owner_M: Tensor
    documents: int
    top_k: int
    shares_E: Tensor | None = None
    counting: bool = False
    shared: SharedDocuments | None = None
    counted: Counted | None = None
    holders_DS: Tensor | None = None

    @property
    def owners(self) -> int:
        """Number of documents, or of segments, that owner_M counts."""
        return self.documents if self.holders_DS is None else self.holders_DS.shape[1]

    def of_documents(self, values: Tensor) -> Tensor:
        """[owners, ...] sums over each owner's tokens -> [D, ...] fp32 sums over each document's."""
        if self.holders_DS is None:
            return values.float()
        return torch.tensordot(self.holders_DS.float(), values.float(), 1)

    def complete(self, values: Tensor) -> Tensor:
        """[documents, ...] sums over the row's tokens -> sums over all tokens of its documents."""
        return values if self.shared is None else self.shared.complete(values)


def balance_sum(router_logits: Sequence[Tensor], balance: Balance) -> Tensor:
    """Sum over the row's tokens of the auxiliary loss of their document, or of the step: a scalar with gradient.

    With shares of the step, it is the contribution of the row's probabilities to tokens x loss; the contributions of
    all rows add up to the total. So do those of ranks with different layers, if the choices of all layers were counted.
    """
    probabilities, counted = _probabilities(router_logits), balance.counted
    experts, layers = probabilities[0].shape[-1], len(probabilities) if counted is None else counted.layers
    probability_DE = _by_document(probabilities, balance)
    if balance.shares_E is not None:
        return experts * (balance.shares_E * probability_DE.sum(0)).sum() / layers
    probability_DE = balance.complete(probability_DE)
    chosen_DE = None if counted is None else counted.chosen_DE
    if chosen_DE is None:
        chosen_DE = _by_document(_choices(probabilities, balance.top_k), balance)
    chosen_DE = balance.complete(chosen_DE)
    tokens = _count(_places(balance), balance.owners + 1)[:-1]
    tokens_D = balance.complete(balance.of_documents(tokens)).clamp(min=1)
    loss_D = experts * (chosen_DE * probability_DE).sum(-1) / (tokens_D * layers).square()
    loss_D = loss_D * tokens_D
    return (loss_D if balance.shared is None else loss_D.index_select(0, balance.shared.counted_indices)).sum()


def count_choices(router_logits: Sequence[Tensor], balance: Balance) -> Tensor:
    """[D, E]: number of times that each document's tokens choose each expert, summed over the layers."""
    return _by_document(_choices(_probabilities(router_logits), balance.top_k), balance)


def _probabilities(router_logits: Sequence[Tensor]) -> list[Tensor]:
    return [logits.reshape(-1, logits.shape[-1]).softmax(-1) for logits in router_logits]


def _choices(probabilities: Iterable[Tensor], top_k: int) -> Iterable[Tensor]:
    """For each layer, [M, E]: 1 where a token chooses an expert."""
    for probability_ME in probabilities:
        yield torch.zeros_like(probability_ME).scatter_(1, probability_ME.topk(top_k, dim=-1).indices, 1.0)


def _count(places_M: Tensor, bins: int) -> Tensor:
    """[bins] int64: number of occurrences of each bin. torch.bincount would synchronise with the device to find the
    largest."""
    zeros = torch.zeros(bins, dtype=places_M.dtype, device=places_M.device)
    return zeros.index_add(0, places_M, torch.ones_like(places_M))


def _places(balance: Balance) -> Tensor:
    """[M]: the index of each token's owner; padding has a separate index."""
    return torch.where(balance.owner_M < 0, balance.owners, balance.owner_M)


def _by_document(layers: Iterable[Tensor], balance: Balance) -> Tensor:
    """[D, E]: the sum over layers and over each document's tokens, in fp32."""
    places = _places(balance)
    sums = [
        torch.zeros(balance.owners + 1, values_ME.shape[-1], device=values_ME.device).index_add(
            0, places, values_ME.float()
        )
        for values_ME in layers
    ]
    return balance.of_documents(torch.stack(sums).sum(0)[:-1])
