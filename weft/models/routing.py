"""Recording and replacing the choices of mixture-of-experts routers.

Routers of all families select experts by torch.topk over [tokens, experts], so weft intercepts this call, independent
of the family's code. A replacement returns other indices and their scores, so the router still learns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.models.experts import find_experts

# (decoder layer, scores [M, E], result of topk) -> the result that the router sees instead
Choose = Callable[[int, Tensor, Any], Any]
_ATTENTION = re.compile(r"attn|attention")


@contextmanager
def replace_choices(layers: Sequence[nn.Module], experts: int, chosen: int, choose: Choose) -> Iterator[None]:
    """A context that passes every choice of `chosen` out of `experts` in these decoder layers through `choose`, also in
    recomputation. Choices inside attention (jetmoe also has experts there) stay unchanged, so a layer has one choice.

    The hooks are on the layers' children: a mode around the forward would miss recomputation, which backward starts,
    and newer transformers recompute a layer without the layer's own hooks. Of a compiled layer they are on the blocks
    that stay outside its graphs.
    """
    watched = [
        (child, _TopK(number, experts, chosen, choose))
        for number, layer in enumerate(layers)
        for name, child in layer.named_children()
        if not _ATTENTION.search(name) and (layer._compiled_call_impl is None or find_experts(child))
    ]

    def enter(mode: _TopK) -> Any:
        return lambda module, args: mode.__enter__() and None

    def leave(mode: _TopK) -> Any:
        return lambda module, args, out: mode.__exit__(None, None, None)

    handles = [child.register_forward_pre_hook(enter(mode)) for child, mode in watched]
    handles += [child.register_forward_hook(leave(mode), always_call=True) for child, mode in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class RouteRecorder:
    """Records the experts that later forwards of a model choose. The hooks stay on the model."""

    def __init__(self, layers: Sequence[nn.Module], experts: int, chosen: int) -> None:
        self._layers, self._chosen = len(layers), chosen
        self._choices: dict[int, Tensor] = {}
        self._hooks = ExitStack()
        self._hooks.enter_context(replace_choices(layers, experts, chosen, self._keep))

    def take(self) -> NDArray[np.int16]:
        """[M, decoder layers, k]: experts of the M tokens of the last forward; -1 for layers without routing."""
        tokens = max((len(chosen_Mk) for chosen_Mk in self._choices.values()), default=0)
        none_Mk = torch.full((tokens, self._chosen), -1)
        routes = [self._choices.get(layer, none_Mk).to("cpu", torch.int16) for layer in range(self._layers)]
        self._choices.clear()
        return torch.stack(routes, dim=1).numpy()

    def _keep(self, layer: int, scores: Tensor, out: Any) -> Any:
        self._choices[layer] = out[1]
        return out


class _TopK(TorchFunctionMode):
    """Calls `choose` for every topk over [tokens, experts]."""

    def __init__(self, layer: int, experts: int, chosen: int, choose: Choose) -> None:
        super().__init__()
        self.layer, self.experts, self.chosen, self.choose = layer, experts, chosen, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        scores = args[0]
        if scores.shape[-1] != self.experts or out[1].shape[-1] != self.chosen or scores.ndim != 2:
            return out
        return self.choose(self.layer, scores, out)


def replaced(scores: Tensor, out: Any, indices: Tensor) -> Any:
    """The result that topk would return for the chosen `indices` [M, k]."""
    return type(out)((scores.gather(-1, indices), indices))


def differ(a: Tensor, b: Tensor) -> Tensor:
    """[M]: whether two choices [M, k] differ as sets."""
    return (a.sort(-1)[0] != b.sort(-1)[0]).any(-1)
