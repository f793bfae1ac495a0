"""Checks a score head: on a small copy, weft's scores must equal the scores of the family's class in transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from weft.engine.selfcheck.architecture import (
    WIDEST_TOLERANCE,
    ModelSupport,
    documents_of,
    hidden_of,
    once_per_process,
    small_copies,
)
from weft.errors import UserError
from weft.models.train_module import TrainModule


@once_per_process
@torch.no_grad()
def check_scores(config: PretrainedConfig, support: ModelSupport) -> None:
    """Raises UserError unless the class in config.architectures computes a linear layer on the last hidden state of a
    document's last token, or of each token. config: of hf.with_scores."""
    model, reference, _ = small_copies(config, "per_document")
    module, text = TrainModule(model).eval(), reference.config.get_text_config()
    documents = [ids for ids in documents_of(int(text.vocab_size), support.longest) if len(ids) > 1]
    pad = text.pad_token_id
    documents = [torch.where(ids == pad, ids - 1, ids) for ids in documents] if pad else documents
    worst = 0.0
    for ids, hidden_TH in zip(
        documents, hidden_of(module, documents, support.layout, support.uses_bounds), strict=True
    ):
        expected: Tensor = reference(input_ids=ids[None], use_cache=False).logits[0]
        scores_TL = F.linear(hidden_TH, module.head.weight, module.head.bias)
        difference = scores_TL[-1] - expected if expected.ndim == 1 else scores_TL - expected
        worst = max(worst, float(difference.abs().max() / expected.abs().max()))
    if not worst <= WIDEST_TOLERANCE:
        raise UserError(
            f"model.path: weft cannot use model_type {text.model_type!r} as a critic or reward model: scores of its "
            f"{(config.architectures or ['class'])[0]} in transformers differ from its head on the last hidden state "
            f"by {worst:.1e} of the largest score. Use a model of another family, such as qwen3 or llama."
        )
