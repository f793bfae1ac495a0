"""Compares an engine's linear layers in fp8 one by one with plain layers that round, for equal inputs and gradients.

The last bit of a sum decides to which e4m3 number a number halfway between two is rounded, and this changes every
number of later layers. So two models that round in the same way still differ by some percent, and only layers with
equal inputs agree to the last bits. narrow.py compares the complete model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.engine.engine import Engine
from weft.models.lora import is_read_only
from weft.verify import reference_fp8
from weft.verify.harness import GRADIENT, Figure, worst_of
from weft.verify.observed import Step, one_gradient

OUTPUTS, INPUTS, WEIGHTS = "fp8: outputs of layers", "fp8: gradients of layers' inputs", "fp8: gradients of weights"
Figures = dict[str, list[Figure]]


def compare_layers(engine: Engine, step: Step) -> list[Figure]:
    """Figures of the decoder's linear layers in a step, including layers that must not round; on the first rank.
    Collective."""
    figures: Figures = defaultdict(list)
    family, layers = engine.module.facts.model_type, dict[nn.Module, tuple[str, str]]()
    calls = dict[Tensor, list[tuple[Tensor, Tensor]]]()
    for layer, root in engine.module.layers:
        for name, child in root.named_modules():
            if type(child).forward is nn.Linear.forward and not is_read_only(family, name):
                layers.setdefault(child, (name, f"{layer}.{name}"))  # some families share modules between layers
    with ExitStack() as stack:
        for child, names in layers.items():
            stack.enter_context(_observed(child, *names, figures, calls))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compare_as_configured runs compiled layers
        one_gradient(engine, step, None)
    gathered: list[Figures] = [{}] * engine.ranks.world
    dist.all_gather_object(gathered, dict(figures), group=engine.ranks.group)
    together = {
        kind: [figure for part in gathered for figure in part.get(kind, [])] for kind in (OUTPUTS, INPUTS, WEIGHTS)
    }
    return [worst_of(kind, of_kind) for kind, of_kind in together.items() if of_kind and engine.ranks.is_first]


@contextmanager
def _observed(
    layer: Any, name: str, full_name: str, figures: Figures, calls: dict[Tensor, list[tuple[Tensor, Tensor]]]
) -> Iterator[None]:
    """A context in which every matmul of the layer is compared. name: its name within the decoder layer. calls:
    weight -> (input, gradient of the output) of each call since its last gradient; layers may share a weight."""
    rounds, forward, hooks = reference_fp8.is_rounded(name, layer), layer.forward, list[Any]()

    def compare(kind: str, actual: Tensor, expected: Tensor) -> None:
        off = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
        figures[kind].append(Figure(full_name, float(off), 10 * GRADIENT + torch.finfo(actual.dtype).eps))

    def weight_gradient(weight: Tensor, gradient: Tensor) -> None:
        if calls[weight]:  # empty for the sum over tiles of an MLP, because each tile was compared
            products = [g.flatten(0, -2).T @ x.flatten(0, -2) for x, g in calls[weight]]
            compare(WEIGHTS, gradient, torch.stack(products).sum(0))
        calls[weight].clear()

    def observe(x: Tensor) -> Tensor:
        entry = x.view_as(x)  # its gradient is that of this layer alone
        out: Tensor = forward(entry)
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        with torch.no_grad():
            expected = reference_fp8.product(x, weight) if rounds else F.linear(x, weight)
            compare(OUTPUTS, out, expected if bias is None else expected + bias)
        if not out.requires_grad:
            return out
        received = list[Tensor]()

        def output_gradient(gradient: Tensor) -> None:
            received.append(gradient)
            if layer.weight in calls:
                calls[layer.weight].append((x.detach(), gradient))

        def input_gradient(gradient: Tensor) -> None:
            weight = layer.weight.detach()
            expected = reference_fp8.gradient_of_input(received[0], weight) if rounds else received[0] @ weight
            compare(INPUTS, gradient, expected)

        out.register_hook(output_gradient)
        if entry.requires_grad:
            entry.register_hook(input_gradient)
        if layer.weight.requires_grad and layer.weight not in calls:
            calls[layer.weight] = []
            hooks.append(layer.weight.register_hook(partial(weight_gradient, layer.weight)))
        return out

    layer.forward = observe
    try:
        yield
    finally:
        layer.forward = forward
        for hook in hooks:
            hook.remove()
