"""Verification of the weights in vLLM's worker after a load, read from where its kernels read them.

On CPU, vLLM 0.32 multiplies with packed copies of weights and empties the weights themselves. A matmul with the
identity returns the packed weight exactly, because all other products are zero. It costs as much as a prompt with as
many tokens as the model is wide.

Values are compared without regard to their positions, because vLLM joins tensors (q, k and v), pads them, and reorders
them for its kernels. Tests check the positions, against an engine that was started from the same weights.

Like receiver.py, this file runs in vLLM's own environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.inference.weight_sync.protocol import SyncError

STALE = " (its packed copy)"
_ROWS = 256  # rows of the identity at once
_CHUNK = 1 << 20  # elements of a digest at once
_FACTORS = (-7046029254386353131, -4658895280553007687)  # odd; splitmix64's, as signed numbers

Digests = dict[str, int]
Names = tuple[str, ...]


def digest(values: Tensor) -> int:
    """A 64-bit digest of all values, regardless of their order: the sum of a hash of each value's fp32 bits, modulo
    2**64. Zeros add nothing, so padding does not matter. Subnormal fp32 values count as zero, as in the kernels."""
    total = 0
    for chunk in values.detach().reshape(-1).split(_CHUNK):
        exact = chunk.to(torch.float32)
        exact = torch.where(exact.abs() < torch.finfo(torch.float32).tiny, 0.0, exact)
        bits = exact.view(torch.int32).to(torch.int64) * _FACTORS[0]
        total += int(((bits ^ (bits >> 32 & 0xFFFFFFFF)) * _FACTORS[1]).sum())
    return total % (1 << 64)


def digests_of(model: torch.nn.Module) -> Digests:
    """The digest of every parameter, by name. For a head that keeps its weight besides the packed copy, also whether
    the two differ (0 or 1), under the name with STALE."""
    digests, visited = Digests(), set[int]()
    for path, module in model.named_modules():
        packs = hasattr(module, "cpu_linear")
        for name, parameter in module.named_parameters(path, recurse=False):
            if packs and parameter.numel() == 0 and name == f"{path}.weight":
                digests[name] = _packed(module)
            elif id(parameter) not in visited:
                digests[name] = digest(parameter)
            visited.add(id(parameter))
        if packs and _is_head(module):
            digests[f"{path}.weight{STALE}"] = int(_packed(module) != digest(module.weight))
    return digests


def _packed(module: Any) -> int:
    """The digest of a CPU linear layer's weight, as its packed copy has it."""
    weight = module.weight
    width = weight.shape[1] if weight.dim() == 2 else getattr(module, "input_size_per_partition", module.input_size)
    identity = torch.eye(width, dtype=weight.dtype)
    return sum(digest(module.cpu_linear(rows, weight, None)) for rows in identity.split(_ROWS)) % (1 << 64)


def _is_head(module: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)


class LoadVerifier:
    """Verifies that a model holds the values that were sent, in a worker that receives full tensors. Parameters whose
    values vLLM changes as it loads them are recognised at the first load, which must change them, and are not compared
    at later loads."""

    def __init__(self) -> None:
        self._plain: set[Names] | None = None  # groups that were equal to the sent values at the first load

    @property
    def first(self) -> bool:
        """Whether nothing has been checked yet."""
        return self._plain is None

    def check(self, model: Any, sent: Digests, before: Digests) -> None:
        """Raise SyncError, naming vLLM's parameters, if values differ from those sent. sent: digests by the tensors'
        names. before: digests_of(model) before the first load; {} later."""
        now = digests_of(model)
        groups = _groups(now, sent, getattr(model, "packed_modules_mapping", {}))
        differing = [params for params, tensors in groups if _total(now, params) != _total(sent, tensors)]
        plain = {params for params, _ in groups} - set(differing) if self._plain is None else self._plain
        unchanged = [params for params in differing if _total(now, params) == _total(before, params)]
        wrong = [name for params in differing if params in plain or params in unchanged for name in params]
        wrong += [name for name, differs in now.items() if name.endswith(STALE) and differs]
        if wrong:
            raise SyncError(
                f"vLLM's weights differ from the sent weights: {', '.join(wrong[:3])} ({len(wrong)} parameters in all)"
            )
        self._plain = plain


def _groups(now: Digests, sent: Digests, joined: Mapping[str, Sequence[str]]) -> list[tuple[Names, Names]]:
    """(vLLM's parameters, sent tensors) that must have the same values: pairs of the same name; modules that vLLM joins
    from several; and per decoder layer everything else in one group. joined: name of a module -> names of its parts."""
    groups, ungrouped = list[tuple[Names, Names]](), dict[str, tuple[list[str], list[str]]]()
    grouped = set[str]()
    for param in now:
        if param.endswith(STALE):
            continue
        path, _, leaf = param.replace(".base_layer.", ".").rpartition(".")
        parent, _, module = path.rpartition(".")
        parts = tuple(f"{parent}.{part}.{leaf}" for part in joined.get(module, (module,)))
        if sent.keys() >= set(parts):
            groups.append(((param,), parts))
            grouped |= set(parts)
        else:
            ungrouped.setdefault(_layer(param), ([], []))[0].append(param)
    for tensor in sent.keys() - grouped:
        ungrouped.setdefault(_layer(tensor), ([], []))[1].append(tensor)
    return groups + [(tuple(param), tuple(tensor)) for param, tensor in ungrouped.values()]


def _layer(name: str) -> str:
    """The layer number in a parameter's name; "" if it has none."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def _total(digests: Digests, names: Names) -> int:
    return sum(digests.get(name, 0) for name in names) % (1 << 64)


def check_adapter(model: Any, slot: int, adapter: Mapping[str, Tensor], scaling: float) -> None:
    """Raise SyncError, naming vLLM's layers, if an adapter slot does not hold this adapter. Checks linear layers.
    adapter: in peft's format. scaling: factor on B A, which vLLM multiplies into B."""
    owners = {part: joined for joined, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_b_stacked")}
    expected = Digests()
    for name, matrix in adapter.items():
        path, _, kind = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        parent, _, leaf = path.rpartition(".")
        owner = f"{parent}.{owners.get(leaf, leaf)}"
        if owner in layers and kind in ("lora_A", "lora_B"):
            values = matrix.to(layers[owner].lora_b_stacked[0])
            expected[owner] = expected.get(owner, 0) + digest(values if kind == "lora_A" else values * scaling)
    wrong = [owner for owner, value in expected.items() if _in_slot(layers[owner], slot) != value % (1 << 64)]
    if wrong:
        raise SyncError(
            f"vLLM's adapter differs from the sent adapter: {', '.join(wrong[:3])} ({len(wrong)} layers in all)"
        )


def _in_slot(layer: Any, slot: int) -> int:
    stacked = (*layer.lora_a_stacked, *layer.lora_b_stacked)
    return sum(digest(matrices[slot]) for matrices in stacked) % (1 << 64)


@contextmanager
def complete(model: Any) -> Iterator[None]:
    """Inside, the model's load raises SyncError if parameters are missing. vLLM itself only logs that, and continues
    with previous or uninitialised values."""
    load = model.load_weights
    names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}  # tied ones once

    def load_all(tensors: Iterable[tuple[str, Tensor]]) -> Any:
        loaded = load(tensors)
        lacking = [] if loaded is None else sorted(names - {name.replace(".base_layer.", ".") for name in loaded})
        lacking += list(_half_loaded(model))
        if lacking:
            raise SyncError(
                f"vLLM did not receive all values of {', '.join(lacking[:3])} ({len(lacking)} parameters in all)"
            )
        return loaded

    model.load_weights = load_all
    try:
        yield
    finally:
        del model.load_weights


def _half_loaded(model: torch.nn.Module) -> Iterator[str]:
    """Names of linear layers and experts that have received only a part of their weights. Embeddings are omitted:
    because of their padding, vLLM always counts them as incomplete."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        waits = info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0)
        if waits and (isinstance(module, LinearBase) or hasattr(module, "w13_weight")):
            yield name
