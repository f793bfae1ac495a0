"""Checks of a run's kernels on its device, before anything large is loaded, on a small copy in the compute dtype:

1. For every kind of attention call that the copy makes, output and gradients equal per_document's in fp64.
2. Documents do not see each other, neither forward nor backward.
Passed checks are remembered in the user's cache folder.

B, H, T: batch, heads, tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from weft.engine.plan import Layout
from weft.engine.startup import Findings, hidden_of, small_copy, text_vocabulary
from weft.errors import UserError
from weft.models.train_module import TrainModule
from weft.ops import attention
from weft.ops.attention import choose
from weft.ops.attention_call import Bounds, Call, Traits
from weft.ops.per_document import per_document
from weft.version import __version__

# Whole blocks of 128 keys and cut ones, a document of one token, a row that no block divides; all within 256 positions.
LENGTHS = (256, 1, 140, 129)
# For the RMS error of each document, relative to the RMS of the row. per_document itself: up to 1.1e-2, 1.5e-3, 7e-7.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}
FOLDER = Path("~/.cache/weft/kernels")  # beside what data.cache keeps


def check_on_device(
    config: PretrainedConfig, kernel: str, findings: Findings, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises UserError if a kernel that model.attention chooses is wrong, or fails, on this device in this dtype.

    per_document is the reference for the other kernels, and is not checked itself.
    """
    if not (findings.uses_bounds and findings.attends) or kernel == "per_document":
        return
    content = _content(config, kernel, findings, device, dtype)
    file = FOLDER.expanduser() / f"{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.json"
    with suppress(OSError, UnicodeDecodeError):
        if file.read_text() == content:
            return
    try:
        failures = list(_failures(config, kernel, findings.layout, device, dtype))
    except Exception as error:  # from a compiler, a driver, or a kernel that this device lacks
        failures = [f"it does not run ({type(error).__name__}: {error})"]
    if failures:
        raise UserError(
            f"model.attention={kernel} is not right on {_device_name(device)} in {str(dtype).removeprefix('torch.')}, "
            f"tried on a small copy: {'; '.join(failures)}. Set model.attention=per_document, and please report it."
        )
    with suppress(OSError):  # if it cannot be written, the next run checks again
        _write(file, content)


def _failures(
    config: PretrainedConfig, kernel: str, layout: Layout, device: torch.device, dtype: torch.dtype
) -> Iterator[str]:
    model = small_copy(config, kernel).to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    module = TrainModule(model)
    calls: dict[Traits, Call] = {}

    def keep(call: Call) -> None:
        calls.setdefault(call.traits, call)

    with attention.watched(keep):
        yield from _leaks(module, layout, TOLERANCES[dtype])
    for traits, call in calls.items():
        name = choose(kernel, device, dtype, traits)
        for what, error in errors(call, attention.KERNELS[name].run).items():
            if not error <= TOLERANCES[dtype]:
                yield f"{what} of {name} ({traits}) are off by {error:.1e}, {TOLERANCES[dtype]:.0e} is allowed"


# ---------------------------------------------------------------- one call


def errors(call: Call, run: Callable[[Call], Tensor]) -> dict[str, float]:
    """Errors of a kernel's output and gradients, by name: the worst document's, relative to the row's size; NaN stays
    NaN."""
    generator = torch.Generator().manual_seed(3)
    shape = (*call.query_BHTD.shape[:3], call.value_BKTE.shape[3])
    upstream = torch.randn(shape, generator=generator).to(call.query_BHTD)
    found = _with_gradients(call, run, upstream)
    true = _with_gradients(call, per_document, upstream.double())
    return {name: _error(found[name], true[name], call.bounds) for name in true}


def _with_gradients(call: Call, run: Callable[[Call], Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients in the dtype of `upstream`."""
    names = {"query_BHTD": "queries", "key_BKTD": "keys", "value_BKTE": "values", "sinks_H": "sinks"}
    given = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    inputs = {name: x.detach().clone().to(upstream.dtype).requires_grad_() for name, x in given.items()}
    with torch.enable_grad():
        out = run(replace(call, **inputs))
    gradients = torch.autograd.grad(out, list(inputs.values()), upstream)
    return {"outputs": out.detach()} | {
        f"gradients of {names[name]}": gradient for name, gradient in zip(inputs, gradients, strict=True)
    }


def _error(found: Tensor, true: Tensor, bounds: Bounds) -> float:
    """The worst document's error of a [B, H, T, width]; that of sinks, [H], as a whole."""
    off = found.double() - true
    documents = [off] if off.ndim == 1 else off.unbind(0) if bounds.padded else off.split(bounds.lengths, dim=2)
    worst = torch.stack([document.square().mean() for document in documents]).max()
    return float((worst / true.square().mean()).sqrt())


# ---------------------------------------------------------------- the whole copy


def _leaks(module: TrainModule, layout: Layout, tolerance: float) -> Iterator[str]:
    """Messages about documents that see each other."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = text_vocabulary(module)
    documents = [torch.randint(1, vocabulary, (n,), generator=generator) for n in LENGTHS]
    # With gradients, though none are needed yet: the kernels compiled for them are needed later, and take longest.
    hidden = hidden_of(module, documents, layout, _bounds(module, layout))
    largest = torch.cat(hidden).detach().abs().max()
    for place in (0, 2):
        changed = list(documents)
        changed[place] = (documents[place] + 7) % vocabulary
        moved = hidden_of(module, changed, layout, _bounds(module, layout))
        others = [moved[n].detach() - hidden[n].detach() for n in range(len(documents)) if n != place]
        off = torch.cat(others).abs().max() / largest
        if not off <= tolerance:
            yield f"another document moves hidden states by {float(off):.1e}, {tolerance:.0e} is allowed"
    reached = _reached(module, documents, layout, 2)
    share = torch.stack([x for n, x in enumerate(reached) if n != 2]).max() / reached[2]
    if not share <= tolerance:
        yield f"gradients reach another document, {float(share):.1e} of its own, {tolerance:.0e} is allowed"


def _reached(module: TrainModule, documents: list[Tensor], layout: Layout, place: int) -> list[Tensor]:
    """The largest gradient at each document's embeddings, of a loss of the one at `place`."""
    embedded: list[Tensor] = []
    embedding: Any = module.hf_model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    hidden = hidden_of(module, documents, layout, _bounds(module, layout))[place]
    hook.remove()
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4)).to(hidden)
    (gradient_BTH,) = torch.autograd.grad(hidden, embedded[0], upstream)
    parts = gradient_BTH[0].split(LENGTHS) if layout == "packed" else gradient_BTH.unbind(0)
    return [part.abs().max() for part in parts]


def _bounds(module: TrainModule, layout: Layout) -> Bounds:
    if layout == "packed":
        return Bounds.packed(LENGTHS, module.head.weight.device)
    return Bounds((max(LENGTHS),) * len(LENGTHS), padded=True)


# ---------------------------------------------------------------- what is remembered


def _content(
    config: PretrainedConfig, kernel: str, findings: Findings, device: torch.device, dtype: torch.dtype
) -> str:
    """All that the result depends on, as JSON."""
    code = hashlib.blake2b(digest_size=8)
    for path in (Path(__file__), *sorted(Path(attention.__file__).parent.glob("*.py"))):
        code.update(path.read_bytes())
    said = {
        "family": config.get_text_config().model_type, "layout": findings.layout,
        "attention": [str(traits) for traits in findings.attention], "kernel": kernel, "dtype": str(dtype),
        "device": _device_name(device), "torch": torch.__version__, "transformers": version("transformers"),
        "weft": __version__, "code": code.hexdigest(),
    }  # fmt: skip
    return json.dumps(said, indent=1)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _write(file: Path, content: str) -> None:
    """Write the file atomically; other ranks may write the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(content)
    partial.replace(file)
