"""What is said of activations before a run, beside what autograd keeps in a forward of the whole thing.

Of families whose attention needs no mask: on the CPU a window is one, and keeps more than the kernels that are counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.support.cases import saved_model
from weft.config.recompute import FULL, SELECTIVE, STORE_ALL, Activations, RecomputePolicy
from weft.engine.batch.document import Document, DocumentMeta
from weft.engine.batch.rows import build_row, cut_row
from weft.engine.selfcheck.architecture import hidden_of, implementation
from weft.engine.selfcheck.context import axis_of
from weft.engine.selfcheck.harness import in_threads
from weft.engine.step_plan.plan import plan_step
from weft.models import hf
from weft.models.experts import expert_blocks, group_experts, hide
from weft.models.train_module import TrainModule
from weft.models.transforms import recompute_layers, tile_mlps
from weft.ops.attention_call import Bounds
from weft.ops.recompute import LayerResults, _Stored
from weft.ops.shapes import GroupedProducts
from weft.parallel.activations import LayerSetup, RowSharing, saved_bytes
from weft.parallel.mesh import TPAxis
from weft.parallel.tp.divide import tensor_parallel

TOKENS = 192
MODES = (
    *map(Activations, (FULL, SELECTIVE, RecomputePolicy(("attention",)), RecomputePolicy(("matmuls",), 2))),
    Activations(FULL, "inputs"), Activations(SELECTIVE, "kept"), Activations(SELECTIVE, "kept", tile=50),
    Activations(None, tile=50),
)  # fmt: skip


def build(path: str, dtype: torch.dtype) -> TrainModule:
    config = hf.without_noise(hf.read_config(path))
    hf.register_kernels()
    attention = implementation(config, "auto")
    module = TrainModule(hf.build_random(copy.deepcopy(config), dtype=dtype, attention=attention, seed=0).train())
    group_experts(module)
    return module


def kept_bytes(path: str, dtype: torch.dtype, mode: Activations) -> tuple[int, int]:
    """(Bytes of the device, bytes that went to the host), of one document of so many tokens, with weft's own
    attention."""
    module = build(path, dtype)
    if mode.tile is not None:
        tile_mlps(mode.tile, module, required=False)
    if mode.recompute is not None:
        recompute_layers(mode.recompute, module, mode.offload)
    ids = [torch.arange(TOKENS) % module.head.weight.shape[0]]
    bounds = Bounds.packed((TOKENS,), torch.device("cpu"))
    append, results = LayerResults.append, list[LayerResults]()

    def watched(of_layer: LayerResults, kind: str, result: Any) -> None:
        append(of_layer, kind, result)
        results.append(of_layer)

    with mock.patch.object(LayerResults, "append", watched):
        size = kept_by(module, lambda: hidden_of(module, ids, "packed", bounds), results)
    return size, 0 if module.offload is None else module.offload.traffic.bytes


def kept_by(module: TrainModule, forward: Callable[[], Any], results: Sequence[LayerResults] = ()) -> int:
    """Bytes of the device. results: of layers that are recomputed, which forward adds to. Threads may call this at the
    same time, so that it replaces nothing."""
    weights = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward()
    for of_layer in results:
        for item in tree_leaves(list(of_layer._results.values())):
            if isinstance(item, _Stored):
                keep(item.alias)
    for layer in () if module.offload is None else module.offload._flying:
        for item in layer._alive():
            if item._source is not None:
                keep(item._source)
    del out
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("llama", "qwen3", "glm4")),
        *((family, torch.float32) for family in ("olmo2", "olmoe", "minimax_m2", "bamba", "qwen3_5_text")),
        *((family, torch.bfloat16) for family in ("llama", "qwen3_moe", "mixtral")),
    ],
)
def test_what_is_foreseen_is_kept(family: str, dtype: torch.dtype) -> None:
    path = saved_model(family)
    config = hf.without_noise(hf.read_config(path))
    saved = saved_bytes(config, dtype)
    foreseen = saved.bytes(TOKENS, STORE_ALL)
    assert foreseen == pytest.approx(kept_bytes(path, dtype, STORE_ALL)[0], rel=0.1)
    assert saved.bytes(2 * TOKENS, STORE_ALL) == pytest.approx(2 * foreseen, rel=1e-3)
    tiled = saved_bytes(config, dtype, setup=LayerSetup(tiled=True))
    for mode in MODES:
        figures = saved if mode.tile is None else tiled
        on_device, sent = kept_bytes(path, dtype, mode)
        close = 0.1 * foreseen if mode.recompute is None else saved.passed * TOKENS + 300  # one tensor
        assert abs(figures.after_forward(TOKENS, mode) - on_device) <= close, mode
        assert sent == figures.moved(TOKENS, mode), mode


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_compiled_layers_keep_is_foreseen(family: str) -> None:
    """With the graphs that torch cuts for inductor, run by torch's own operations: blocks of experts stay outside."""
    path = saved_model(family)
    config = hf.without_noise(hf.read_config(path))
    module = build(path, torch.bfloat16)
    for _, layer in module.layers:
        for block in expert_blocks(layer):
            hide(block)
        layer.compile(dynamic=True, backend="aot_eager_decomp_partition")
    bounds = Bounds.packed((TOKENS,), torch.device("cpu"))
    kept = kept_by(module, lambda: hidden_of(module, [torch.arange(TOKENS) % 128], "packed", bounds))
    torch._dynamo.reset()
    plain, compiled = (
        saved_bytes(config, torch.bfloat16, setup=LayerSetup(compiled=mode)).bytes(TOKENS, STORE_ALL)
        for mode in (False, True)
    )
    assert compiled == pytest.approx(kept, rel=0.1) and compiled < 0.8 * plain


def kept_divided(path: str, dtype: torch.dtype, tp: int) -> int:
    """The same on the first of ranks that divide the layers."""

    def on_rank(rank: int, groups: Any) -> int:
        module = build(path, dtype)
        ranks = groups(tuple(range(tp)), rank)
        tensor_parallel(module, TPAxis(rank, tp, ranks, lambda _: ranks), module.hf_model.config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        bounds = Bounds.packed((TOKENS,), torch.device("cpu"))
        return kept_by(module, lambda: hidden_of(module, [torch.arange(TOKENS) % 128], "packed", bounds))

    return in_threads(tp, on_rank)[0]


def kept_of_a_part(path: str, ring: int, ulysses: int) -> int:
    """The same on each of ranks that share the document; the largest."""
    document = {0: Document(torch.arange(TOKENS + 1) % 120 + 3, torch.ones(TOKENS + 1))}
    meta = DocumentMeta(TOKENS + 1, 1.0, TOKENS, omitted=1)
    ranks = ring * ulysses
    plan = plan_step([meta], ranks=ranks, budget=TOKENS // ranks, ring=ring, ulysses=ulysses)
    row = build_row([0], document, read=[TOKENS], length=TOKENS, layout="packed", every_token=False)

    def on_rank(rank: int, groups: Any) -> int:
        module = build(path, torch.float32)
        part = cut_row(row, plan, 0, rank, axis_of(rank, ring, ulysses, groups))
        return kept_by(module, lambda: module.hidden(part.input_ids_BT, part.position_ids_BT, part.bounds))

    return max(in_threads(ranks, on_rank))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32), ("qwen3", torch.float32), ("qwen3_moe", torch.bfloat16), ("olmo2", torch.float32),
        ("olmoe", torch.float32), ("olmoe", torch.bfloat16), ("minimax_m2", torch.float32), ("bamba", torch.float32),
        ("qwen3_5_text", torch.float32),
    ],
)  # fmt: skip
def test_what_ranks_of_tp_keep_is_foreseen(family: str, dtype: torch.dtype) -> None:
    path = saved_model(family)
    config = hf.without_noise(hf.read_config(path))
    foreseen = saved_bytes(config, dtype, RowSharing(tp=2)).bytes(TOKENS, STORE_ALL)
    assert foreseen == pytest.approx(kept_divided(path, dtype, 2), rel=0.1)
    assert foreseen < 0.85 * saved_bytes(config, dtype).bytes(TOKENS, STORE_ALL)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)])
def test_what_ranks_of_cp_keep_is_foreseen(ring: int, ulysses: int) -> None:
    """Of a document that all of them share: keys of all of it in a ring, repeated heads of keys with Ulysses."""
    path = saved_model("qwen3")
    config = hf.without_noise(hf.read_config(path))
    shared = RowSharing(ring=ring, ulysses=ulysses)
    foreseen = saved_bytes(config, torch.float32, shared).bytes(TOKENS // (ring * ulysses), STORE_ALL)
    assert foreseen == pytest.approx(kept_of_a_part(path, ring, ulysses), rel=0.1)


@pytest.mark.parametrize(("family", "ranks"), [("bamba", 2), ("bamba", 4), ("qwen3_5_text", 2)])
def test_what_ranks_of_cp_keep_of_layers_that_carry_state_is_foreseen(family: str, ranks: int) -> None:
    """Each reads the hidden states of all tokens, for its part of the heads."""
    path = saved_model(family)
    config = hf.without_noise(hf.read_config(path))
    shared = RowSharing(ulysses=ranks)
    foreseen = saved_bytes(config, torch.float32, shared).bytes(TOKENS // ranks, STORE_ALL)
    assert foreseen == pytest.approx(kept_of_a_part(path, 1, ranks), rel=0.1)


def test_shapes_of_grouped_products_and_all_else_as_it_is() -> None:
    grouped, ends = torch.ops.aten._grouped_mm.default, torch.tensor([3, 7, 10], dtype=torch.int32)
    with GroupedProducts():
        assert torch.zeros(2).add(torch.ones(2), alpha=3).tolist() == [3.0, 3.0]
        assert torch.empty(2, dtype=torch.float16).dtype == torch.float16
        assert grouped(torch.empty(10, 4), torch.empty(3, 4, 6), ends).shape == (10, 6)
        assert grouped(torch.empty(4, 10), torch.empty(10, 6), offs=ends).shape == (3, 4, 6)
