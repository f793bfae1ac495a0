"""The table of attention kernels, and the kernels for CUDA as far as a CPU can run them.

flex runs as the graph that would be compiled, forward and backward, interpreted by torch; varlen on a stand-in for
torch's function that takes what that takes. Both are compared with per_document in fp64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from weft import versions
from weft.engine.selfcheck.device import errors
from weft.launch.simulated import Simulation, device_capability
from weft.ops import attention, attention_call, flex
from weft.ops import per_document as per_document_kernel
from weft.ops.attention import choose, varlen
from weft.ops.attention_call import Bounds, Call, Traits
from weft.ops.exact_attention import attend_exactly
from weft.ops.per_document import per_document
from weft.ops.segments import ROOT, Segments

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
PLAIN = Traits(128, 128)


def bounds_of(lengths: tuple[int, ...]) -> Bounds:
    """With the cumulative lengths that a row on CUDA has."""
    return Bounds(lengths, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32))


def call_of(bounds: Bounds, batch: int = 1, heads: int = 4, widths: tuple[int, int] = (16, 16), **options: Any) -> Call:
    """With half as many key heads, laid out as transformers has them: [B, T, H, D], transposed."""
    generator = torch.Generator().manual_seed(0)
    length = sum(bounds.lengths) // batch
    shapes = ((heads, widths[0]), (heads // 2, widths[0]), (heads // 2, widths[1]))
    tensors = (torch.randn(batch, length, n, width, generator=generator).transpose(1, 2) for n, width in shapes)
    return Call(*tensors, bounds, **{"scaling": 0.3, "window": None, "softcap": None, "sinks_H": None} | options)


# ---------------------------------------------------------------- per_document


def sliced(call: Call, first: int, length: int) -> Call:
    """One document of a row by itself."""
    parts = (x[:, :, first : first + length] for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE))
    query, key, value = parts
    return replace(call, query_BHTD=query, key_BKTD=key, value_BKTE=value, bounds=bounds_of((length,)))


@pytest.mark.parametrize(
    "kind", [{}, {"window": 4}, {"softcap": 2.0}, {"sinks_H": torch.linspace(-2, 3, 4), "window": 3}], ids=str
)
def test_neighbours_of_one_length_are_as_if_alone(kind: dict[str, Any]) -> None:
    lengths = (9, 5, 5, 5, 2, 1, 1, 7)
    call = call_of(bounds_of(lengths), **kind)
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    expected = [per_document(sliced(call, first, n)) for first, n in zip(firsts, lengths, strict=True)]
    assert torch.allclose(per_document(call), torch.cat(expected, dim=2), atol=2e-6)


def test_a_window_hides_what_is_as_far_away_as_it_is_long() -> None:
    call = call_of(bounds_of((5,)), window=4)
    changed = call.value_BKTE.clone()
    changed[:, :, 0] += 1.0
    moved = (per_document(replace(call, value_BKTE=changed)) - per_document(call)).abs().amax((0, 1, 3))
    assert (moved > 1e-3).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("window", [None, 90])
def test_blocks_of_queries_see_no_later_keys(window: int | None) -> None:
    """Documents of which this rank has the last tokens, more of them than one block holds: values and gradients are
    those of whole documents, whose mask is written here."""
    queries, keys, generator = (700, 40), (900, 40), torch.Generator().manual_seed(0)
    assert queries[0] > per_document_kernel._QUERIES
    shapes = (sum(queries), sum(keys), sum(keys))
    inputs = [torch.randn(1, 2, tokens, 8, generator=generator).requires_grad_() for tokens in shapes]
    bounds = Bounds(queries, key_lengths=keys)
    actual = per_document(Call(*inputs, bounds, scaling=0.3, window=window, softcap=None, sinks_H=None))
    parts = []
    for q, k, v in zip(*(x.split(list(n), 2) for x, n in zip(inputs, (queries, keys, keys), strict=True)), strict=True):
        key, query = torch.arange(k.shape[2]), torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        hidden = (key > query) | (key <= query - (window or 10**6))
        parts.append((q @ k.transpose(2, 3) * 0.3).masked_fill(hidden, float("-inf")).softmax(-1) @ v)
    expected = torch.cat(parts, 2)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(expected.shape, generator=generator)
    for gradient, reference in zip(
        *(torch.autograd.grad(out, inputs, upstream) for out in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- the table

SOFTCAP, SINKS, WINDOW = replace(PLAIN, softcap=True), replace(PLAIN, sinks=True), replace(PLAIN, window=True)
CHOICES = [
    (CUDA, BF16, PLAIN, "varlen"),
    (CUDA, BF16, replace(WINDOW, grouped=True), "varlen"),
    (CUDA, torch.float16, Traits(256, 256, window=True), "varlen"),
    (CUDA, BF16, Traits(80, 80), "varlen"),
    (CUDA, BF16, Traits(12, 12), "varlen"),
    (CUDA, BF16, Traits(192, 128), "varlen"),
    (CUDA, BF16, SOFTCAP, "flex"),
    (CUDA, BF16, replace(SINKS, window=True), "flex"),
    (CUDA, BF16, Traits(192, 128, softcap=True), "flex"),
    (CUDA, BF16, Traits(512, 512), "per_document"),
    (CUDA, BF16, Traits(256, 512), "per_document"),
    (CUDA, BF16, Traits(512, 256, sinks=True), "per_document"),
    (CUDA, BF16, Traits(8, 8, softcap=True), "per_document"),
    (CUDA, FP32, PLAIN, "per_document"),
    (CPU, BF16, PLAIN, "per_document"),
]


@pytest.mark.parametrize(("device", "dtype", "traits", "kernel"), CHOICES)
def test_auto_is_the_fastest_that_serves(device: torch.device, dtype: torch.dtype, traits: Traits, kernel: str) -> None:
    assert choose("auto", device, dtype, traits) == kernel


def test_a_kernel_that_cannot_serve_a_call_is_refused() -> None:
    with pytest.raises(
        ValueError, match="varlen does not support attention in torch.bfloat16 on cuda with heads 512 wide"
    ):
        choose("varlen", CUDA, BF16, Traits(512, 512))


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize(
    ("capability", "kernel"),
    [((7, 0), "per_document"), ((7, 5), "per_document"), ((8, 0), "varlen"), ((8, 9), "varlen"), ((12, 0), "varlen")],
)
def test_cards_before_ampere_get_no_flash_attention(
    capability: tuple[int, int], kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V100 and T4: there is no such kernel for them."""
    monkeypatch.setattr(attention, "device_capability", lambda device: capability)
    assert choose("auto", CUDA, dtype, Traits(64, 64)) == kernel
    assert attention.KERNELS["flex"].suits(CUDA, dtype, Traits(64, 64)) is (capability >= (8, 0))
    assert choose("auto", torch.device("cpu"), dtype, Traits(64, 64)) == "per_document"
    with Simulation("cuda", capability=capability).running():
        assert device_capability(CUDA) == capability


def test_traits_of_a_call() -> None:
    call = call_of(bounds_of((5,)), widths=(24, 16), window=3, sinks_H=torch.zeros(4))
    assert call.traits == Traits(24, 16, grouped=True, window=True, sinks=True)
    assert str(call.traits) == "heads 24/16 wide, grouped, window, sinks"
    assert str(PLAIN) == "heads 128 wide"


# ---------------------------------------------------------------- flex: the block mask


def rule_of(lengths: tuple[int, ...], window: int | None) -> Callable[..., Tensor]:
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = (document[q] == document[kv]) & (q >= kv)
        return allowed if window is None else allowed & (q - kv < window)

    return visible


def tables(mask: BlockMask) -> dict[str, list[list[int]]]:
    """Which blocks each block has, of all four tables."""
    blocks = {}
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, places = getattr(mask, f"{name}_num_blocks")[0, 0], getattr(mask, f"{name}_indices")[0, 0]
        blocks[name] = [places[i, :n].tolist() for i, n in enumerate(counts.tolist())]
    return blocks


def random_rows() -> Iterator[tuple[tuple[int, ...], int | None]]:
    dice = random.Random(0)
    for _ in range(40):
        lengths = tuple(dice.choice((1, 7, 127, 128, 129, 250, 256, 600)) for _ in range(dice.randint(1, 5)))
        yield lengths, dice.choice((None, 1, 2, 100, 127, 128, 129, 300, 5000))


def test_the_block_mask_is_the_one_that_torch_makes_from_all_pairs() -> None:
    for lengths, window in random_rows():
        mask = flex._mask(call_of(bounds_of(lengths), window=window))
        expected = create_block_mask(rule_of(lengths, window), None, None, sum(lengths), sum(lengths), device="cpu")
        assert tables(mask) == tables(expected), (lengths, window)
        assert torch.equal(mask.to_dense(), expected.to_dense())
        assert mask.shape == expected.shape and mask.BLOCK_SIZE == expected.BLOCK_SIZE
        token = torch.arange(sum(lengths))
        pairs = (None, None, token[:, None], token)
        assert torch.equal(mask.mask_mod(*pairs), expected.mask_mod(*pairs)), (lengths, window)


class Largest(TorchDispatchMode):
    """The most elements that a tensor of any operation has."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_block_mask_of_a_long_row_is_small() -> None:
    """[T, T] would be 1.7e10 elements."""
    call = call_of(bounds_of((100_000, 1, 31_071)), heads=2, widths=(1, 1), window=4096)
    with Largest() as largest:
        flex._mask(call)
    assert 131_072 <= largest.elements < 1024 * 1100


def test_one_block_mask_per_window_and_row() -> None:
    bounds = bounds_of((300, 20))
    first = flex._mask(call_of(bounds, window=16))
    assert flex._mask(call_of(bounds, window=16)) is first
    assert flex._mask(call_of(bounds)) is not first


# ---------------------------------------------------------------- flex: numbers


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flex as one graph that torch interprets, because its compilers know no backward on a CPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    flex.compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    flex.compiled.cache_clear()
    torch._dynamo.reset()


ROW, PADDED = bounds_of((200, 1, 40, 129)), Bounds((150, 150), padded=True)
S = torch.linspace(-2, 3, 4)
FLEX = {
    "plain": call_of(ROW),
    "window": call_of(ROW, window=100),
    "softcap": call_of(ROW, softcap=2.0, window=130),
    "sinks": call_of(ROW, sinks_H=S, window=17),
    "everything": call_of(ROW, sinks_H=S, window=64, softcap=1.5, widths=(24, 16)),
    "padded": call_of(PADDED, batch=2, sinks_H=S, window=64, softcap=5.0),
    "short": call_of(bounds_of((9, 4)), sinks_H=S),
}


@pytest.mark.parametrize("kind", FLEX)
def test_flex_and_its_gradients(kind: str, interpreted: None) -> None:
    deviations = errors(FLEX[kind], attention.flex)
    assert max(deviations.values()) < 2e-6, deviations
    assert ("gradients of sinks" in deviations) == (FLEX[kind].sinks_H is not None)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_rows_and_windows_share_a_graph_and_kinds_of_calls_have_their_own(interpreted: None) -> None:
    torch._dynamo.utils.counters.clear()
    run = torch.compiler.disable(attention.flex)  # as model.compile leaves it: outside of the layers' graphs
    for lengths, window in (((200, 100), None), ((300, 17, 100), None), ((500,), 64), ((333, 1), 99), ((400,), 700)):
        run(call_of(bounds_of(lengths), window=window))
        assert graphs() == 1, (lengths, window)
    for number, softcap in enumerate((30.0, 50.0) * 2):
        run(call_of(bounds_of((300 + number,)), softcap=softcap))
    assert graphs() == 3
    with torch._dynamo.config.patch(recompile_limit=2):
        flex.compiled.cache_clear()
        for number in range(3):  # more than torch's own limit allows, which is raised
            run(call_of(bounds_of((300,)), scaling=0.1 + number))
    assert graphs() == 6


def test_a_graph_too_many_is_an_error(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not scores of [T, T], as torch's own choice would be."""
    monkeypatch.setattr(flex, "_GRAPHS", 1)
    with torch._dynamo.config.patch(recompile_limit=1):
        attention.flex(call_of(ROW))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            attention.flex(call_of(ROW, softcap=3.0))


# ---------------------------------------------------------------- varlen


def stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """torch 2.11's varlen_attn: key t of a document is seen by queries t - right .. t + left of it; if it has more keys
    than queries, these are its last tokens."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    ends, key_ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    out = []
    for (start, end), (first, last) in zip(pairwise(ends), pairwise(key_ends), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[start:end], key[first:last], value[first:last]))
        distance = torch.arange(last - first)[start - end :, None] - torch.arange(last - first)
        visible = distance >= -window_size[1]
        if window_size[0] >= 0:
            visible &= distance <= window_size[0]
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


VARLEN = {
    "plain": call_of(ROW),
    "window": call_of(ROW, window=17),
    "two widths": call_of(ROW, widths=(24, 16), window=100),
    "two widths, values wider": call_of(ROW, widths=(16, 24)),
    "no multiple of 8": call_of(ROW, widths=(20, 20), window=5),
    "padded": call_of(PADDED, batch=2, window=64),
}


@pytest.mark.parametrize("kind", VARLEN)
def test_varlen_and_its_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    versions.varlen_attention.cache_clear()
    deviations = errors(VARLEN[kind], varlen)
    versions.varlen_attention.cache_clear()
    assert max(deviations.values()) < 2e-6, deviations


def test_grouped_heads_are_said_where_torch_has_a_word_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(query: Tensor, *, enable_gqa: bool = False) -> bool:
        return enable_gqa

    for function, answer in ((newer, True), (lambda query: False, False)):
        monkeypatch.setattr(torch_varlen, "varlen_attn", function)
        versions.varlen_attention.cache_clear()
        assert versions.varlen_attention()(torch.zeros(1)) is answer
    versions.varlen_attention.cache_clear()


def test_torch_takes_what_varlen_gives_it() -> None:
    """The names of arguments, in the version at hand."""
    with pytest.raises((NotImplementedError, RuntimeError), match="CPU|cpu|backend"):
        varlen(VARLEN["window"])


def test_ends_of_documents_are_of_the_dtype_that_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    ends = attention_call._cumulative((2, 3), torch.device("meta"))
    assert ends is not None and ends.shape == (3,) and ends.dtype == torch.int32
    assert attention_call._cumulative((2, 3), torch.device("cpu")) is None


# ---------------------------------------------------------------- trees


TREE = Segments((150, 40, 9, 9, 70, 5), (ROOT, 0, 1, 1, 0, ROOT), (2, 3, 4, 5))


def of_paths(call: Call) -> Tensor:
    """Attention of each segment's path alone, of which its own tokens are kept."""
    parts = []
    for segment, length in enumerate(TREE.lengths):
        places = TREE.path_tokens(segment)
        query, key, value = (x[:, :, places] for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE))
        path_call = replace(call, query_BHTD=query, key_BKTD=key, value_BKTE=value, bounds=bounds_of((len(places),)))
        parts.append(per_document(path_call)[:, :, -length:])
    return torch.cat(parts, 2)


KINDS_OF_TREES: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 30}, "everything": {"window": 64, "softcap": 1.5, "sinks_H": S},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS_OF_TREES)
@pytest.mark.parametrize("name", ["flex", "varlen", "per_document", "exact"])
def test_every_kernel_sees_the_paths_of_a_tree(
    name: str, kind: str, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "varlen" and kind == "everything":
        return
    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    versions.varlen_attention.cache_clear()
    bounds = Bounds(TREE.lengths, segments=TREE)
    queries, keys = bounds_of(TREE.lengths), bounds_of(TREE.key_lengths)
    bounds.cache["paths", CPU] = replace(queries, key_lengths=keys.lengths, cu_keys=keys.cu_seqlens)  # as on CUDA
    call = call_of(bounds, **KINDS_OF_TREES[kind])
    tensors = [x.clone().requires_grad_() for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE)]
    call = replace(call, query_BHTD=tensors[0], key_BKTD=tensors[1], value_BKTE=tensors[2])
    run = attend_exactly if name == "exact" else getattr(attention, name)
    results = attention.attend_by_paths(run, call), of_paths(call)
    gradients = [torch.autograd.grad(out, tensors, torch.ones_like(out)) for out in results]
    versions.varlen_attention.cache_clear()
    for actual, expected in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=3e-5)
