"""Whether compiled layers serve a run: tried on a small copy, on the run's device and in its compute dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PretrainedConfig

from weft.engine.selfcheck.architecture import ModelSupport, hidden_of, small_copy, text_vocabulary
from weft.engine.selfcheck.device import TOLERANCES, content_of, on_device, remember, remembered
from weft.models.cost import expert_counts
from weft.models.experts import hides_routers
from weft.models.routing import replace_choices, replaced
from weft.models.train_module import TrainModule
from weft.models.transforms import compile_layers

# Lengths of the documents of rows that run one after another. torch compiles for any length at the second row; later
# rows must not be compiled again. No length equals a width of a small copy, because torch would specialise a graph to
# it.
_ROWS = ((130, 60), (96, 51), (200, 3), (64, 53), (171, 40))


def try_compiled(
    config: PretrainedConfig, kernel: str, support: ModelSupport, device: torch.device, dtype: torch.dtype
) -> str:
    """Why layers of this family must not be compiled: they fail, compute different values or gradients, or recompile
    for many lengths; "" if they may. The trial takes tens of seconds on CUDA. Later runs of the same model with the
    same device and software read its result from a file. Errors are not cached, because their cause may be
    temporary."""
    content = content_of(config, kernel, support, device, dtype) | {"layers": config.to_json_string(use_diff=False)}
    if (result := remembered(content)) is not None:
        return str(result["failure"])
    try:
        failure = _try(config, kernel, support, device, dtype)
    except Exception as error:  # from a compiler, a driver, or code that cannot be traced
        return f"they do not run ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    finally:
        torch._dynamo.reset()  # else graphs of the small copy count towards torch's limit for the model
    remember(content, {"failure": failure})
    return failure


def _try(config: PretrainedConfig, kernel: str, support: ModelSupport, device: torch.device, dtype: torch.dtype) -> str:
    module = on_device(small_copy(config, kernel), device, dtype)
    # The reference has the same rounded weights in fp32, to measure the error of eager layers: weights with a large
    # standard deviation amplify it (0.75 for a llama with initializer_range=0.2 in bf16). fp32 has no varlen attention.
    exact = on_device(small_copy(config, "per_document"), device, dtype).float()
    references = [_Reference(exact, support, lengths) for lengths in _ROWS]
    eager_errors = [reference.errors(module) for reference in references]
    compile_layers(module)
    graphs = []
    for reference, eager in zip(references, eager_errors, strict=True):
        for error, noise in zip(reference.errors(module), eager, strict=True):
            allowed = max(TOLERANCES[dtype], 2 * noise)
            if not error <= allowed:
                return f"values or gradients differ by {error:.1e}, more than the allowed {allowed:.0e}"
        graphs.append(counters["stats"]["unique_graphs"])
    if graphs[-1] != graphs[1]:
        return f"{graphs[-1] - graphs[1]} graphs are compiled anew for rows of other lengths"
    return ""


class _Reference:
    """Results of a row in fp32. Other modules follow its choices of experts, which rounding would change."""

    def __init__(self, exact: TrainModule, support: ModelSupport, lengths: tuple[int, ...]) -> None:
        self._support, self._lengths = support, lengths
        self._routes: dict[int, Tensor] = {}  # of each layer, [tokens, experts per token]
        self._results = self._run(exact)

    def errors(self, module: TrainModule) -> list[float]:
        """The relative differences of a module's hidden states and of its gradients."""
        return [
            float((x - r).square().mean().sqrt() / r.square().mean().sqrt())
            for x, r in zip(self._run(module), self._results, strict=True)
        ]

    def _run(self, module: TrainModule) -> list[Tensor]:
        """Hidden states, and the gradients of all layer weights in one tensor, in fp64."""
        generator = torch.Generator().manual_seed(5)
        documents = [torch.randint(1, text_vocabulary(module), (n,), generator=generator) for n in self._lengths]
        layers = [layer for _, layer in module.layers]
        following: AbstractContextManager[None] = nullcontext()
        if hides_routers(layers):
            following = replace_choices(layers, *expert_counts(module.hf_model.config.get_text_config()), self._choose)
        with following:
            hidden = torch.cat(hidden_of(module, documents, self._support.layout, self._support.uses_bounds))
        upstream = torch.randn(hidden.shape, generator=generator).to(hidden)
        weights = [p for layer in layers for p in layer.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(hidden, weights, upstream, allow_unused=True)
        return [hidden.detach().double(), torch.cat([g.double().flatten() for g in gradients if g is not None])]

    def _choose(self, layer: int, scores: Tensor, out: Any) -> Any:
        return replaced(scores, out, self._routes.setdefault(layer, out[1]))
