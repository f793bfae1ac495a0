"""Checks the kernels of a run on its device, in the compute dtype, before anything large is loaded:

1. For every kind of attention call that a small copy makes, output and gradients equal per_document's in fp64.
2. Documents do not see each other, neither forward nor backward.
3. Modules with state compute the same as torch's code on the CPU, forward and backward.
4. The grouped matmul of experts equals single matmuls, also for experts without rows.
5. The fused AdamW follows its formula, scales gradients, and skips a step if requested. Passed checks are remembered in
  the user's cache folder. Collectives are tried at each start (`check_collectives`).

B, H, T: batch, heads, tokens. E: experts.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.optim.adamw import FusedAdamW
from weft.engine.selfcheck.architecture import ModelSupport, hidden_of, small_copy, text_vocabulary
from weft.errors import UserError
from weft.models import experts, hf
from weft.models.experts import UNWRITTEN, find_experts, grouped_linear
from weft.models.families.family import Layout
from weft.models.train_module import TrainModule
from weft.ops import attention
from weft.ops.attention import choose
from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds, Call, Traits
from weft.ops.flash4 import FLASH4
from weft.ops.per_document import per_document
from weft.version import __version__
from weft.versions import all_gather_single, installed_version, reduce_scatter_single

# Complete and partial blocks of 128 keys, a document of one token, a row that is no multiple of a block; all within
# 256 positions.
LENGTHS = (256, 1, 140, 129)
# For the RMS error of each document, relative to the RMS of the row. per_document itself: up to 1.1e-2, 1.5e-3, 7e-7.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}
# A device sums along a sequence in another order, so in fp32 the error is larger than a matmul's. Mistakes change
# results by 1e-3 and more.
_STATE_TOLERANCES = TOLERANCES | {torch.float32: 1e-4}
# For modules with state, and for attention.
KERNEL_PACKAGES = ("causal-conv1d", "mamba-ssm", "flash-linear-attention", "kernels", "triton", FLASH4)
FOLDER = Path("~/.cache/weft/kernels")  # next to the files of data.cache


def check_on_device(
    config: PretrainedConfig, kernel: str, support: ModelSupport, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises UserError if a kernel of the run fails or computes wrong results on this device in this dtype.

    per_document is the reference for the other kernels of attention, and is not checked itself. If the grouped matmul
    does not write gradients of experts without rows, this process sets them to 0 from now on.
    """
    content = content_of(config, kernel, support, device, dtype)
    result = remembered(content)
    if result == {"unwritten": False}:
        return
    if result == {"unwritten": True}:
        UNWRITTEN.add(device.type)
        return
    small = small_copy(config, kernel)
    for parts, fix, check in _checks(config, small, kernel, support, device, dtype):
        try:
            failures = list(check())
        except Exception as error:  # from a compiler, a driver, or a kernel that this device lacks
            failures = [f"it does not run ({type(error).__name__}: {error})"]
        if failures:
            raise UserError(
                f"{parts} computes wrong results on {_device_name(device)} in {str(dtype).removeprefix('torch.')} "
                f"(tried on a small copy): {'; '.join(failures)}. {fix}, and please report it."
            )
    remember(content, {"unwritten": device.type in UNWRITTEN})


Failures = Iterator[str]


def _checks(
    config: PretrainedConfig,
    small: PreTrainedModel,
    kernel: str,
    support: ModelSupport,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, str, Callable[[], Failures]]]:
    """(name of the kernel, how to avoid it, the check), for all kernels that this architecture uses."""
    if support.mixers:
        yield (
            f"the code of {', '.join(support.mixers)}",
            "Uninstall causal-conv1d, mamba-ssm and flash-linear-attention where they are installed, so that torch's "
            "code runs",
            lambda: _mixer_failures(small, support.layout, device, dtype),
        )
    if support.uses_bounds and support.attends and kernel != "per_document":
        yield (
            f"model.attention={kernel}",
            f"Uninstall {FLASH4} or set model.attention=varlen"
            if any(choose(kernel, device, dtype, traits) == "fa4" for traits in support.attention)
            else "Set model.attention=per_document",
            lambda: _attention_failures(small, kernel, support.layout, device, dtype),
        )
    transposed = {bool(part.is_transposed) for part in find_experts(small).values() if hf.is_fused_experts(part)}
    if transposed:
        yield (
            "torch's grouped matmul of experts",
            "Install another version of torch, or set fsdp.param_dtype=fp32",
            lambda: (failure for way in sorted(transposed) for failure in _grouped_failures(way, device, dtype)),
        )
    yield "torch's fused AdamW", "Install another version of torch", lambda: _adamw_failures(device)


def on_device(small: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> TrainModule:
    """A copy of a small model, with its parameters in `dtype`."""
    model = copy.deepcopy(small).to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return TrainModule(model)


def _attention_failures(
    small: PreTrainedModel, kernel: str, layout: Layout, device: torch.device, dtype: torch.dtype
) -> Failures:
    calls: dict[Traits, Call] = {}

    def keep(call: Call) -> None:
        calls.setdefault(call.traits, call)

    with attention.watched(keep):
        yield from _leaks(on_device(small, device, dtype), layout, TOLERANCES[dtype])
    for traits, call in calls.items():
        name = choose(kernel, device, dtype, traits)
        for tensor_name, error in errors(call, attention.KERNELS[name].run).items():
            if not error <= TOLERANCES[dtype]:
                yield f"{tensor_name} of {name} ({traits}) are off by {error:.1e}, {TOLERANCES[dtype]:.0e} is allowed"


# ---------------------------------------------------------------- one call


def errors(call: Call, run: Callable[[Call], Tensor]) -> dict[str, float]:
    """Errors of a kernel's output and gradients, by name: the largest over documents, relative to the row's RMS; NaN
    stays NaN."""
    generator = torch.Generator().manual_seed(3)
    shape = (*call.query_BHTD.shape[:3], call.value_BKTE.shape[3])
    upstream = torch.randn(shape, generator=generator).to(call.query_BHTD)
    result = _with_gradients(call, run, upstream)
    true = _with_gradients(call, per_document, upstream.double())
    return {name: _error(result[name], true[name], call.bounds) for name in true}


def _with_gradients(call: Call, run: Callable[[Call], Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients in the dtype of `upstream`."""
    names = {"query_BHTD": "queries", "key_BKTD": "keys", "value_BKTE": "values", "sinks_H": "sinks"}
    arguments = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    inputs = {name: x.detach().clone().to(upstream.dtype).requires_grad_() for name, x in arguments.items()}
    with torch.enable_grad():
        out = run(replace(call, **inputs))
    gradients = torch.autograd.grad(out, list(inputs.values()), upstream)
    return {"outputs": out.detach()} | {
        f"gradients of {names[name]}": gradient for name, gradient in zip(inputs, gradients, strict=True)
    }


def _error(result: Tensor, true: Tensor, bounds: Bounds) -> float:
    """The largest error of a tensor of queries or keys, [B, H, T, width], over its documents, or of sinks, [H]."""
    off = result.double() - true
    if off.ndim == 1 or bounds.padded:
        documents = off.unbind(0) if off.ndim > 1 else [off]
    else:
        lengths = bounds.lengths if off.shape[2] == sum(bounds.lengths) else bounds.key_lengths
        documents = off.split(lengths, dim=2)
    worst = torch.stack([document.square().mean() for document in documents]).max()
    return float((worst / true.square().mean()).sqrt())


# ---------------------------------------------------------------- the whole copy


def _leaks(module: TrainModule, layout: Layout, tolerance: float) -> Iterator[str]:
    """Messages about documents that influence each other."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = text_vocabulary(module)
    documents = [torch.randint(1, vocabulary, (n,), generator=generator) for n in LENGTHS]
    # With gradients, although they are not used here: the kernels compiled for them are needed later, and their
    # compilation takes longest.
    hidden = hidden_of(module, documents, layout, uses_bounds=True)
    largest = torch.cat(hidden).detach().abs().max()
    for index in (0, 2):
        changed = list(documents)
        changed[index] = (documents[index] + 7) % vocabulary
        moved = hidden_of(module, changed, layout, uses_bounds=True)
        differences = [moved[n].detach() - hidden[n].detach() for n in range(len(documents)) if n != index]
        off = torch.cat(differences).abs().max() / largest
        if not off <= tolerance:
            yield f"another document moves hidden states by {float(off):.1e}, {tolerance:.0e} is allowed"
    reached = _reached(module, documents, layout, 2)
    share = torch.stack([x for n, x in enumerate(reached) if n != 2]).max() / reached[2]
    if not share <= tolerance:
        yield f"gradients reach another document, {float(share):.1e} of its own, {tolerance:.0e} is allowed"


def _reached(module: TrainModule, documents: list[Tensor], layout: Layout, index: int) -> list[Tensor]:
    """The largest gradient at each document's embeddings, if only the document at `index` has a loss."""
    embedded: list[Tensor] = []
    embedding: Any = module.hf_model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    hidden = hidden_of(module, documents, layout, uses_bounds=True)[index]
    hook.remove()
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4)).to(hidden)
    (gradient_BTH,) = torch.autograd.grad(hidden, embedded[0], upstream)
    parts = gradient_BTH[0].split(LENGTHS) if layout == "packed" else gradient_BTH.unbind(0)
    return [part.abs().max() for part in parts]


# ---------------------------------------------------------------- modules that carry state


def _mixer_failures(small: PreTrainedModel, layout: Layout, device: torch.device, dtype: torch.dtype) -> Failures:
    """Compares each module on the device in `dtype` with the module on the CPU in fp32, for equal rounded weights and
    inputs. The CPU's own error in `dtype` counts as noise."""
    module = on_device(small, device, dtype)
    inputs: dict[str, tuple[Any, Any]] = {}
    hooks = [
        boundary.mixer.register_forward_pre_hook(partial(_keep_inputs, inputs, name), with_kwargs=True)
        for name, boundary in module.mixers.items()
    ]
    yield from _leaks(module, layout, TOLERANCES[dtype])
    for hook in hooks:
        hook.remove()
    tried = set[type]()
    for name, boundary in module.mixers.items():
        mixer, kind = boundary.mixer, type(boundary.mixer)
        if kind in tried or name not in inputs:
            continue
        tried.add(kind)
        result = _mixed(mixer, inputs[name], device, dtype)
        cpu = torch.device("cpu")
        true = rounded = _mixed(mixer, inputs[name], cpu, torch.float32)
        # the CPU may lack a kernel in this dtype; then there is no noise to add to the tolerance
        with suppress(RuntimeError):
            rounded = _mixed(mixer, inputs[name], cpu, dtype)
        for tensor_name, expected in true.items():
            scale = _rms(expected) + 1e-30
            error, noise = (_rms(outcome[tensor_name].double() - expected) / scale for outcome in (result, rounded))
            allowed = max(_STATE_TOLERANCES[dtype], 4 * noise)
            if not error <= allowed:
                yield f"{tensor_name} of {kind.__name__} are off by {error:.1e}, {allowed:.0e} is allowed"


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _keep_inputs(inputs: dict[str, tuple[Any, Any]], name: str, mixer: nn.Module, args: Any, kwargs: Any) -> None:
    inputs.setdefault(name, (args, kwargs))


def _mixed(mixer: nn.Module, inputs: tuple[Any, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients, on the CPU, of the module's own forward on a whole row as one document."""
    placed = copy.copy(mixer)
    placed.__dict__ = {name: value for name, value in copy.deepcopy(mixer.__dict__).items() if name != "forward"}
    placed = placed.to(device=device, dtype=dtype).requires_grad_(True)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None if isinstance(value, Bounds) else value
        return value.detach().to(device, dtype if value.is_floating_point() else value.dtype)

    args, kwargs = tree_map(moved, inputs)
    kwargs = {name: value for name, value in kwargs.items() if name not in (BOUNDS_ARGUMENT, "attention_mask")}
    hidden = args[0] if args else kwargs["hidden_states"]
    hidden.requires_grad_(True)
    with torch.enable_grad():
        out = placed(*args, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    out.backward(upstream)
    named = {"outputs": out.detach(), "gradients of inputs": hidden.grad}
    named |= {f"gradients of {name}": parameter.grad for name, parameter in placed.named_parameters()}
    return {name: value.float().cpu() for name, value in named.items() if value is not None}


# ---------------------------------------------------------------- experts

# Rows of each expert: none empty; the first, one in the middle, the last empty; all but one.
GROUPS_E = ((5, 33, 1, 16, 2, 7), (0, 33, 1, 16, 2, 7), (5, 33, 0, 16, 2, 7), (5, 33, 1, 16, 2, 0), (0, 0, 0, 64, 0, 0))


def _grouped_failures(transposed: bool, device: torch.device, dtype: torch.dtype) -> Failures:
    """Tries the grouped matmul. If only the gradients of experts without rows are wrong, this process sets them to 0
    from now on, and tries again."""
    failures, unwritten = _grouped_errors(transposed, device, dtype)
    if unwritten and not failures:
        UNWRITTEN.add(device.type)
        failures, unwritten = _grouped_errors(transposed, device, dtype)
    yield from failures
    if unwritten:
        yield "gradients of experts without rows are not 0"


def _grouped_errors(transposed: bool, device: torch.device, dtype: torch.dtype) -> tuple[list[str], bool]:
    """(errors beyond the tolerance; whether an expert without rows has a gradient that is not 0)."""
    failures, unwritten = list[str](), False
    generator = torch.Generator().manual_seed(6)
    for counts in GROUPS_E:
        shape = (len(counts), 64, 128) if transposed else (len(counts), 128, 64)
        weight, rows = (torch.randn(size, generator=generator).to(dtype) for size in (shape, (sum(counts), 64)))
        upstream = torch.randn(sum(counts), 128, generator=generator).to(dtype)
        ends = torch.tensor(counts).cumsum(0).to(torch.int32)
        result = _grouped(grouped_linear, rows, weight, ends, upstream, transposed, device, dtype)
        true = _grouped(_one_by_one, rows, weight, ends, upstream, transposed, torch.device("cpu"), torch.float64)
        empty = torch.tensor(counts) == 0
        unwritten |= not bool((result["gradients of weights"][empty] == 0).all())
        for tensor_name, expected in true.items():
            chosen = ~empty if tensor_name == "gradients of weights" else slice(None)
            error = _rms((result[tensor_name].double() - expected)[chosen]) / _rms(expected[chosen])
            if not error <= TOLERANCES[dtype]:
                failures.append(
                    f"{tensor_name} with {counts} rows are off by {error:.1e}, {TOLERANCES[dtype]:.0e} is allowed"
                )
    return failures, unwritten


def _grouped(
    product: Callable[..., Tensor],
    rows: Tensor,
    weight: Tensor,
    ends: Tensor,
    upstream: Tensor,
    transposed: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    rows, weight = (x.to(device, dtype, copy=True).requires_grad_() for x in (rows, weight))
    with torch.enable_grad():
        out = product(rows, weight, ends.to(device), None, transposed)
    # Fill free memory with NaN, so that an unwritten result is not the zeros of fresh memory.
    used = [torch.full_like(weight, torch.nan) for _ in range(8)]
    del used
    gradients = torch.autograd.grad(out, (rows, weight), upstream.to(out))
    names = ("outputs", "gradients of rows", "gradients of weights")
    return {name: x.detach().cpu() for name, x in zip(names, (out, *gradients), strict=True)}


def _one_by_one(rows: Tensor, weight: Tensor, ends: Tensor, bias: None, transposed: bool) -> Tensor:
    parts = rows.tensor_split(ends.tolist()[:-1])
    return torch.cat([part @ (matrix if transposed else matrix.T) for part, matrix in zip(parts, weight, strict=True)])


# ---------------------------------------------------------------- the optimizer


def _adamw_failures(device: torch.device) -> Failures:
    """Two steps of the fused kernel in fp32, one of them with scaled gradients, and a third that it must skip."""
    generator = torch.Generator().manual_seed(7)
    sizes, settings = (1, 1000, 65537), dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    starts, *gradients = ([torch.randn(n, generator=generator) for n in sizes] for _ in range(3))
    true = [start.double().requires_grad_() for start in starts]
    fused = [start.to(device, copy=True).requires_grad_() for start in starts]
    plain = torch.optim.AdamW(true, **settings, foreach=False, fused=False)
    tried = FusedAdamW(fused, **settings, fused=True)
    for step, (scale, skipped) in enumerate(((1.0, False), (4.0, False), (1.0, True))):
        for reference, parameter, gradient in zip(true, fused, gradients[step % 2], strict=True):
            reference.grad, parameter.grad = gradient.double(), (gradient * scale).to(device)
        tried.divisor = torch.tensor(scale, device=device)
        tried.skip = torch.tensor(float(skipped), device=device)
        tried.step()
        if not skipped:
            plain.step()
    for reference, parameter, start in zip(true, fused, starts, strict=True):
        moved = reference.detach() - start
        error = float((parameter.detach().cpu().double() - reference.detach()).abs().max() / moved.abs().max())
        if not error <= 1e-4:
            yield f"{len(start)} parameters are off by {error:.1e} of the update, 1e-04 is allowed"


# ---------------------------------------------------------------- collectives


def check_collectives(
    groups: Mapping[str, dist.ProcessGroup], device: torch.device, dtypes: Sequence[torch.dtype]
) -> None:
    """Raises UserError if an all-reduce, reduce-scatter or all-gather of a few numbers over one of these groups is
    wrong on this rank. groups: by the name of the mesh's part. Collective over all of them.

    The numbers are small integers, whose sums every dtype holds exactly, in any order.
    """
    for name, group in groups.items():
        index, size = group.rank(), group.size()
        element = torch.arange(size * 33, device=device)
        for dtype in dict.fromkeys(dtypes):
            of_ranks = torch.stack([((element + rank) % 4 == 0) for rank in range(size)])
            summed, sent = of_ranks.sum(0), of_ranks[index].to(dtype)
            reduced, scattered, gathered = sent.clone(), sent.new_empty(33), sent.new_empty(size * len(sent))
            dist.all_reduce(reduced, group=group)
            reduce_scatter_single(scattered, sent, group=group)
            all_gather_single(gathered, sent, group=group)
            wrong = {
                "all-reduce": reduced != summed,
                "reduce-scatter": scattered != summed[index * 33 : (index + 1) * 33],
                "all-gather": gathered.view(size, -1) != of_ranks,
            }
            counted = torch.stack([x.sum() for x in wrong.values()]).tolist()
            if any(counted):
                parts = ", ".join(kind for kind, count in zip(wrong, counted, strict=True) if count)
                raise UserError(
                    f"{parts} over {name} ({size} ranks) returned wrong numbers on its rank {index}, in "
                    f"{str(dtype).removeprefix('torch.')} on {_device_name(device)}. The fault is in the library of "
                    "collectives or in a link between devices: try NCCL_NVLS_ENABLE=0, NCCL_P2P_DISABLE=1 or "
                    "NCCL_ALGO=Ring in the environment, and please report it."
                )


# ---------------------------------------------------------------- what is remembered


def content_of(
    config: PretrainedConfig, kernel: str, support: ModelSupport, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The key of a check: everything on which its result depends."""
    code = hashlib.blake2b(digest_size=8)
    for folder in (Path(file).parent for file in (__file__, experts.__file__, attention.__file__)):
        for path in sorted(folder.rglob("*.py")):
            code.update(path.read_bytes())
    return {
        "family": config.get_text_config().model_type, "layout": support.layout,
        "attention": [str(traits) for traits in support.attention], "kernel": kernel, "dtype": str(dtype),
        "device": _device_name(device), "torch": torch.__version__, "transformers": version("transformers"),
        "mixers": list(support.mixers), "weft": __version__, "code": code.hexdigest(),
        "kernels": {name: installed_version(name) for name in KERNEL_PACKAGES},
    }  # fmt: skip


def remembered(content: dict[str, Any]) -> Any:
    """The result of an earlier check with this key; None if there is none, or if its file is damaged."""
    with suppress(OSError, ValueError):
        kept = json.loads(_file(content).read_text())
        if isinstance(kept, dict) and kept | content == kept:
            return {name: value for name, value in kept.items() if name not in content}
    return None


def remember(content: dict[str, Any], result: dict[str, Any]) -> None:
    """Keep a result for later runs, atomically; other ranks may write the same. If it cannot be written, the next run
    checks again."""
    file = _file(content)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content | result, indent=1))
        partial.replace(file)


def _file(content: dict[str, Any]) -> Path:
    return FOLDER.expanduser() / f"{hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()}.json"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
