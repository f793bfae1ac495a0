"""Whether compiled layers serve a run: tried on a small copy, on the run's device and in its compute dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PretrainedConfig

from weft.engine.selfcheck.architecture import ModelSupport, hidden_of, small_copy, text_vocabulary
from weft.engine.selfcheck.device import TOLERANCES, on_device
from weft.models.train_module import TrainModule
from weft.models.transforms import compile_layers

# Lengths of the documents of rows that run one after another. torch compiles for any length at the second row; later
# rows must not compile anew. No length equals a width of a small copy, because torch would specialise a graph to it.
_ROWS = ((130, 60), (96, 51), (200, 3), (64, 53), (171, 40))


def try_compiled(
    config: PretrainedConfig, kernel: str, support: ModelSupport, device: torch.device, dtype: torch.dtype
) -> str:
    """Why layers of this family must not be compiled: they fail, compute different values or gradients, or recompile
    for many lengths; "" if they may. Takes tens of seconds on CUDA if torch's cache does not have the graphs."""
    try:
        return _try(config, kernel, support, device, dtype)
    except Exception as error:  # from a compiler, a driver, or code that cannot be traced
        return f"they do not run ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    finally:
        torch._dynamo.reset()  # else graphs of the small copy count towards torch's limit for the model


def _try(config: PretrainedConfig, kernel: str, support: ModelSupport, device: torch.device, dtype: torch.dtype) -> str:
    module = on_device(small_copy(config, kernel), device, dtype)
    # The reference has the same rounded weights in fp32, to measure the error of eager layers: weights with a large
    # standard deviation amplify it (0.75 for a llama with initializer_range=0.2 in bf16). fp32 has no varlen attention.
    exact = on_device(small_copy(config, "per_document"), device, dtype).float()
    references = [_results(exact, support, lengths) for lengths in _ROWS]
    eager_errors = [_errors(module, support, lengths, r) for lengths, r in zip(_ROWS, references, strict=True)]
    compile_layers(module)
    graphs = []
    for lengths, reference, eager in zip(_ROWS, references, eager_errors, strict=True):
        for error, noise in zip(_errors(module, support, lengths, reference), eager, strict=True):
            allowed = max(TOLERANCES[dtype], 2 * noise)
            if not error <= allowed:
                return f"values or gradients differ by {error:.1e}, more than the allowed {allowed:.0e}"
        graphs.append(counters["stats"]["unique_graphs"])
    if graphs[-1] != graphs[1]:
        return f"{graphs[-1] - graphs[1]} graphs are compiled anew for rows of other lengths"
    return ""


def _errors(
    module: TrainModule, support: ModelSupport, lengths: tuple[int, ...], reference: list[Tensor]
) -> list[float]:
    results = _results(module, support, lengths)
    return [
        float((x - r).square().mean().sqrt() / r.square().mean().sqrt())
        for x, r in zip(results, reference, strict=True)
    ]


def _results(module: TrainModule, support: ModelSupport, lengths: tuple[int, ...]) -> list[Tensor]:
    """Hidden states of a row, and the gradients of all layer weights in one tensor, in fp64."""
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(1, text_vocabulary(module), (n,), generator=generator) for n in lengths]
    hidden = torch.cat(hidden_of(module, documents, support.layout, support.uses_bounds))
    upstream = torch.randn(hidden.shape, generator=generator).to(hidden)
    weights = [p for _, layer in module.layers for p in layer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(hidden, weights, upstream, allow_unused=True)
    return [hidden.detach().double(), torch.cat([g.double().flatten() for g in gradients if g is not None])]
