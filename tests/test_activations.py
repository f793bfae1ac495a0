"""What is said of activations before a run, beside what autograd keeps in a forward of the whole thing.

Of families whose attention needs no mask: on the CPU a window is one, and keeps more than the kernels that are counted.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.cases import saved_model
from weft.engine.startup import hidden_of, implementation
from weft.models import hf
from weft.models.train_module import TrainModule
from weft.ops.attention_call import Bounds
from weft.planner.activations import saved_bytes

TOKENS = 192


def kept(path: str, dtype: torch.dtype, recompute: bool) -> int:
    """Bytes, of one document of so many tokens, with weft's own attention."""
    config = hf.without_noise(hf.read_config(path))
    hf.register_kernels()
    attention = implementation(config, "auto")
    model = hf.build_random(copy.deepcopy(config), dtype=dtype, attention=attention, seed=0).train()
    if recompute:
        hf.enable_recompute(model)
    module = TrainModule(model)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    ids = [torch.arange(TOKENS) % config.get_text_config().vocab_size]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_of(module, ids, "packed", Bounds.packed((TOKENS,), torch.device("cpu")))
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("llama", "qwen3", "glm4")),
        *((family, torch.bfloat16) for family in ("llama", "qwen3_moe", "mixtral")),
    ],
)
def test_what_is_foreseen_is_kept(family: str, dtype: torch.dtype) -> None:
    path = saved_model(family)
    config = hf.without_noise(hf.read_config(path))
    foreseen = saved_bytes(config, TOKENS, dtype, recompute=False)
    assert foreseen == pytest.approx(kept(path, dtype, False), rel=0.1)
    layers = config.get_text_config().num_hidden_layers
    again = saved_bytes(config, TOKENS, dtype, recompute=True)
    assert again - foreseen // layers == pytest.approx(kept(path, dtype, True), rel=0.1)
    assert saved_bytes(config, 2 * TOKENS, dtype, recompute=False) == pytest.approx(2 * foreseen, rel=1e-3)
