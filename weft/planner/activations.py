"""The memory that a forward keeps for backward, from shapes alone: the model runs on the meta device, which stores
nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from weft.models import hf

_ATTENTION = "weft_shapes"
_TOKENS = 256  # of the row that is run; what is kept grows with the tokens


def saved_bytes(config: PretrainedConfig, tokens: int, dtype: torch.dtype, *, recompute: bool) -> int:
    """Bytes that autograd keeps of the layers for a row of so many tokens, computed in `dtype`.

    recompute: as model.recompute=full has it; then with all of the one layer that is run again. Not counted: weights,
    the head, masks (of kernels that make one, of windows on the CPU), and what a kernel takes for the time that it
    runs. Raises whatever a family does that cannot run on meta.
    """
    kept = _saved(config, dtype, recompute=recompute)
    if recompute:
        kept += _saved(config, dtype, recompute=False) // config.get_text_config().num_hidden_layers
    return kept * tokens // _TOKENS


def _saved(config: PretrainedConfig, dtype: torch.dtype, *, recompute: bool) -> int:
    AttentionInterface.register(_ATTENTION, _attend)
    model = hf.build_meta(copy.deepcopy(config), dtype=dtype, attention=_ATTENTION).train()
    if recompute:
        hf.enable_recompute(model)
    weights = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}  # kept alive: another would get the number of one that is gone

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in weights:
            found[_storage(tensor)] = tensor.untyped_storage()
        return tensor

    ids_BT = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    positions_BT = torch.arange(_TOKENS, device="meta")[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.base_model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
    del out
    return sum(storage.nbytes() for storage in found.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _attend(
    module: nn.Module, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor, mask: Any, **others: Any
) -> tuple[Tensor, None]:
    out: Tensor = _Attended.apply(query_BHTD, key_BKTD, value_BKTE)
    return out.transpose(1, 2), None


class _Attended(torch.autograd.Function):
    """Counts what the kernels of ops/attention.py keep: inputs, output and the logsumexp of each query."""

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor) -> Tensor:
        batch, heads, tokens, _ = query_BHTD.shape
        out = query_BHTD.new_empty(batch, heads, tokens, value_BKTE.shape[3])
        sums = query_BHTD.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query_BHTD, key_BKTD, value_BKTE, out, sums)
        return out
