"""Mixers by kernels that know documents: which are chosen, what they are given, and that a packed row by them is the
row by documents. The packages need a GPU; stand-ins have their functions' signatures, and compute by torch."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from tests.support.cases import saved_model
from weft.engine.selfcheck.architecture import hidden_of, small_copies
from weft.models import hf, mixer_kernels
from weft.models.mixer_kernels import MixerKernels, describe_kernels, kernels_of
from weft.models.train_module import TrainModule
from weft.ops.attention_call import Bounds

LENGTHS = (17, 1, 30, 5, 11)
LIMITS = (0.0, float("inf"))
Torch = dict[str, Callable[..., Any]]  # the name in a package -> transformers' function of torch


def pieces(lengths: Tensor | None, sequence: Tensor | None, tokens: int) -> list[slice]:
    """The documents that a kernel was told of; the whole row if it was told of none."""
    if sequence is not None:
        assert sequence.shape == (1, tokens) and sequence.dtype == torch.int32
        _, counts = sequence[0].unique_consecutive(return_counts=True)
        ends = [0, *counts.cumsum(0).tolist()]
    else:
        ends = [0, tokens] if lengths is None else lengths.tolist()
    return [slice(start, stop) for start, stop in pairwise(ends)]


class Packages:
    """Stand-ins for causal-conv1d 1.5, fla 0.4 and mamba-ssm 2.3, by their signatures. torch: transformers' functions.
    calls: what each was told of documents."""

    def __init__(self, torch_functions: Torch) -> None:
        self.torch = torch_functions
        self.calls: list[tuple[str, int]] = []

    def causal_conv1d_fn(
        self, x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, initial_states: Any = None,
        return_final_states: bool = False, final_states_out: Any = None, activation: Any = None,
    ) -> Tensor:  # fmt: skip
        assert x.stride(1) == 1 or seq_idx is None, "seq_idx is only supported for channel last layout"
        parts = pieces(None, seq_idx, x.shape[2])
        self.calls.append(("causal_conv1d_fn", len(parts)))
        run = self.torch["causal_conv1d_fn"]
        return torch.cat([run(x[:, :, part], weight, bias, activation=activation) for part in parts], 2)

    def chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None,
        head_first: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert cu_seqlens is None or (cu_seqlens.dtype == torch.int64 and len(q) == 1)
        parts = pieces(cu_seqlens, None, q.shape[1])
        self.calls.append(("chunk_gated_delta_rule", len(parts)))
        run, norm = self.torch["chunk_gated_delta_rule"], use_qk_l2norm_in_kernel
        rows = [
            run(*(x[:, part] for x in (q, k, v)), g=g[:, part], beta=beta[:, part], use_qk_l2norm_in_kernel=norm)[0]
            for part in parts
        ]
        return torch.cat(rows, 1), None

    def chunk_kda(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
        safe_gate: bool = False, lower_bound: Any = None, cu_seqlens: Any = None, cu_seqlens_cpu: Any = None,
        cp_context: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert not kwargs and (cu_seqlens is None) == (cu_seqlens_cpu is None)
        parts = pieces(cu_seqlens, None, q.shape[1])
        self.calls.append(("chunk_kda", len(parts)))
        run = self.torch["chunk_kda"]
        rows = [
            run(*(x[:, part] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
            for part in parts
        ]
        return torch.cat(rows, 1), None

    def mamba_chunk_scan_combined(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None, z: Any = None,
        dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None, cu_seqlens: Any = None,
        dt_softplus: bool = False, dt_limit: Any = LIMITS, return_final_states: bool = False,
        return_varlen_states: bool = False,
    ) -> Tensor:  # fmt: skip
        parts = pieces(None, seq_idx, x.shape[1])
        self.calls.append(("mamba_chunk_scan_combined", len(parts)))
        rows = [
            self.torch["mamba_chunk_scan_combined"](
                x[:, part], dt[:, part], A, B[:, part], C[:, part], chunk_size=chunk_size, D=D, dt_bias=dt_bias,
                dt_softplus=dt_softplus, dt_limit=dt_limit,
            )
            for part in parts
        ]  # fmt: skip
        return torch.cat(rows, 1)

    def mamba_split_conv1d_scan_combined(
        self, zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Any, dt_bias: Tensor, A: Tensor, D: Tensor,
        chunk_size: int, initial_states: Any = None, seq_idx: Any = None, dt_limit: Any = LIMITS,
        return_final_states: bool = False, activation: str = "silu", rmsnorm_weight: Any = None,
        rmsnorm_eps: float = 1e-6, outproj_weight: Any = None, outproj_bias: Any = None, headdim: Any = None,
        ngroups: int = 1, norm_before_gate: bool = True,
    ) -> Tensor:  # fmt: skip
        """All of a Mamba 2 mixer but its first projection: norm and last projection from their weights."""
        self.calls.append(("mamba_split_conv1d_scan_combined", len(pieces(None, seq_idx, zxbcdt.shape[1]))))
        inner, heads = len(D) * headdim, len(D)
        states = (zxbcdt.shape[2] - 2 * inner - heads) // 2
        gate, mixed, dt = zxbcdt.split([inner, inner + 2 * states, heads], -1)
        mixed = self.causal_conv1d_fn(
            mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation
        )
        x, b, c = mixed.transpose(1, 2).split([inner, states, states], -1)
        grouped = (*x.shape[:2], ngroups, -1)
        out = self.mamba_chunk_scan_combined(
            x.view(*x.shape[:2], heads, headdim), dt, A, b.reshape(grouped), c.reshape(grouped), chunk_size, D,
            dt_bias=dt_bias, seq_idx=seq_idx, dt_softplus=True, dt_limit=dt_limit,
        ).flatten(2)  # fmt: skip
        if rmsnorm_weight is not None:
            assert not norm_before_gate
            wide = (out * F.silu(gate.float())).unflatten(-1, (ngroups, -1))
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rmsnorm_eps)
            out = rmsnorm_weight * wide.flatten(-2)
        else:
            out = out * F.silu(gate)
        return F.linear(out.to(outproj_weight.dtype), outproj_weight, outproj_bias)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self, name)
        return method


PLACES = {
    "causal_conv1d_fn": ("causal_conv1d", ""),
    "chunk_gated_delta_rule": ("fla", "ops.gated_delta_rule"),
    "chunk_kda": ("fla", "ops.kda"),
    "mamba_split_conv1d_scan_combined": ("mamba_ssm", "ops.triton.ssd_combined"),
    "mamba_chunk_scan_combined": ("mamba_ssm", "ops.triton.ssd_combined"),
}


def module_of(family: str) -> TrainModule:
    hf.register_kernels()
    config = hf.read_config(saved_model(family))
    return TrainModule(hf.build_random(config, dtype=torch.float32, attention="weft_per_document", seed=0))


def install(
    monkeypatch: pytest.MonkeyPatch, module: TrainModule, changed: dict[str, Callable[..., Any]] | None = None
) -> Packages:
    """Decide anew, as transformers does when it is imported, which functions the family's mixers call, with stand-ins
    for packages. changed: other functions of packages; None in place of one that is not there."""
    packages = Packages({})
    functions = {name: packages[name] for name in PLACES} | (changed or {})
    for name, (package, path) in PLACES.items():
        root = sys.modules.get(package) or ModuleType(package)
        monkeypatch.setitem(sys.modules, package, root)
        holder: Any = root
        for part in filter(None, path.split(".")):
            if not hasattr(holder, part):
                setattr(holder, part, SimpleNamespace())
            holder = getattr(holder, part)
        if functions[name] is not None:
            setattr(holder, name, functions[name])
    for boundary in module.mixers.values():
        forward = inspect.unwrap(type(boundary.mixer).forward)
        for called in forward.__code__.co_names:
            function = forward.__globals__.get(called)
            choice = mixer_kernels.choice_of(function) if inspect.isfunction(function) else None
            if choice is None or choice["func_name"] not in PLACES or choice["is_new_implementation"]:
                continue
            name = choice["func_name"]
            packages.torch[name] = inspect.unwrap(function)
            if functions[name] is not None:
                chosen = use_kernel_func_from_hub_with_fallback(name, PLACES[name][0])(packages.torch[name])
                monkeypatch.setitem(forward.__globals__, called, chosen)
        mixer_kernels.dispatch_by_device(type(boundary.mixer))
    mixer_kernels._KERNELS.clear()
    return packages


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, and in fp32, where differences are mistakes."""
    monkeypatch.setattr(mixer_kernels, "DEVICES", ("cpu",))
    monkeypatch.setattr(mixer_kernels, "_DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(mixer_kernels, "_TRIED", {})
    monkeypatch.setattr(mixer_kernels, "_KERNELS", {})


def row_of(module: TrainModule) -> tuple[Tensor, dict[str, Tensor]]:
    """(Hidden states of a packed row, gradients of the weights)."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, 100, (n,), generator=generator) for n in LENGTHS]
    module.zero_grad()
    hidden = torch.cat(hidden_of(module, documents, "packed", Bounds.packed(LENGTHS, torch.device("cpu"))))
    (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def agree(actual: tuple[Tensor, dict[str, Tensor]], true: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(actual[0], true[0], rtol=1e-4, atol=1e-5)
    assert actual[1].keys() == true[1].keys()
    for name, gradient in true[1].items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-6)


DELTA = {"causal_conv1d_fn", "chunk_gated_delta_rule"}
SCAN = {"causal_conv1d_fn", "mamba_chunk_scan_combined"}  # not the fused one, which bypasses norm and projection
FAMILIES = {
    "qwen3_next": DELTA, "qwen3_5_text": DELTA, "olmo_hybrid": DELTA, "kimi_linear": {"causal_conv1d_fn", "chunk_kda"},
    "nemotron_h": SCAN, "falcon_h1": SCAN, "bamba": SCAN, "mamba2": SCAN, "granitemoehybrid": SCAN, "zamba2": SCAN,
    "lfm2": {"causal_conv1d_fn"},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_by_kernels_is_the_row_by_documents(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients; after the trial each kernel is called once for all documents of a row."""
    module = module_of(family).train()
    monkeypatch.setattr(mixer_kernels, "DEVICES", ())
    true = row_of(module)
    monkeypatch.setattr(mixer_kernels, "DEVICES", ("cpu",))
    packages = install(monkeypatch, module)
    row_of(module)  # with the trial
    assert set(mixer_kernels._TRIED.values()) == {""}
    packages.calls.clear()
    agree(row_of(module), true)
    assert {name for name, _ in packages.calls} == FAMILIES[family]
    assert {documents for _, documents in packages.calls} == {len(LENGTHS)}


def test_without_packages_everything_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function of transformers is replaced, and each mixer says what it lacks."""
    for family in FAMILIES:
        mixer = next(iter(module_of(family).mixers.values())).mixer
        functions = mixer_kernels.functions_of(type(mixer)).values()
        assert not any(hasattr(function, "weft_chosen") for function in functions)
        assert "causal-conv1d is not installed" in kernels_of(type(mixer)).missing
        monkeypatch.setattr(mixer_kernels, "DEVICES", ("cuda",))
        assert describe_kernels(mixer, torch.device("cpu"), torch.float32) == "document by document"
        assert "is not installed" in describe_kernels(mixer, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("family", ["mamba", "jamba", "minimax"])
def test_mixers_whose_kernels_know_no_documents_run_by_documents(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(family).train()
    true = row_of(module)
    install(monkeypatch, module)
    mixer = next(iter(module.mixers.values())).mixer
    assert kernels_of(type(mixer)).missing == "no kernels accept sequence boundaries"
    agree(row_of(module), true)


def without(method: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """A version of a kernel that does not have this argument."""

    def old(*args: Any, **kwargs: Any) -> Any:
        assert argument not in kwargs
        return method(*args, **kwargs)

    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != argument]
    old.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return old


@pytest.mark.parametrize(
    ("family", "kernel", "argument"),
    [
        ("qwen3_next", "chunk_gated_delta_rule", "cu_seqlens"),
        ("qwen3_5_text", "causal_conv1d_fn", "seq_idx"),
        ("kimi_linear", "chunk_kda", "cu_seqlens"),
        ("nemotron_h", "mamba_chunk_scan_combined", "seq_idx"),
    ],
)
def test_a_version_that_would_drop_the_bounds_is_refused(
    family: str, kernel: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers leaves out arguments that a function does not have: documents would see each other."""
    module = module_of(family).train()
    true = row_of(module)
    monkeypatch.undo()
    for name, value in (("DEVICES", ("cpu",)), ("_DTYPES", (torch.float32,)), ("_TRIED", {}), ("_KERNELS", {})):
        monkeypatch.setattr(mixer_kernels, name, value)
    helpers = Packages({})
    packages = install(monkeypatch, module, {kernel: without(helpers[kernel], argument)})
    helpers.torch = packages.torch
    mixer = next(iter(module.mixers.values())).mixer
    missing = kernels_of(type(mixer)).missing
    assert missing.startswith(f"{kernel} of ") and missing.endswith(f"has no argument {argument}")
    assert missing in describe_kernels(mixer, torch.device("cpu"), torch.float32)
    agree(row_of(module), true)


@pytest.mark.parametrize("fault", ["leaks", "fails"])
def test_kernels_that_are_wrong_in_the_trial_are_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is torch's, document by document, in this step and all that follow; a warning says so once."""
    module = module_of("qwen3_next").train()
    monkeypatch.setattr(mixer_kernels, "DEVICES", ())
    true = row_of(module)
    monkeypatch.setattr(mixer_kernels, "DEVICES", ("cpu",))
    helpers = Packages({})

    def wrong(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any = None, **options: Any) -> Any:
        if fault == "fails":
            raise RuntimeError("CUDA error: no kernel image\nmore")
        return helpers.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)

    packages = install(monkeypatch, module, {"chunk_gated_delta_rule": wrong})
    helpers.torch = packages.torch
    problem = {"leaks": "off by .* of a row", "fails": r"they do not run \(RuntimeError: CUDA error: no kernel image\)"}
    warning = "Qwen3NextGatedDeltaNet runs document by document, not by causal-conv1d .*, flash-linear-attention .*: "
    with pytest.warns(UserWarning, match=warning + problem[fault]):
        agree(row_of(module), true)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(row_of(module), true)


def test_packages_are_called_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of small copies run on the CPU, where packages' functions fail."""
    module = module_of("bamba").train()
    monkeypatch.setattr(mixer_kernels, "DEVICES", ())
    true = row_of(module)
    packages = install(monkeypatch, module)
    agree(row_of(module), true)
    assert packages.calls == []


def test_in_fp32_torchs_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a GPU: packages' kernels compile for minutes, and torch's code is the truth."""
    module = module_of("bamba").train()
    monkeypatch.setattr(mixer_kernels, "_DTYPES", (torch.bfloat16,))
    true = row_of(module)
    packages = install(monkeypatch, module)
    agree(row_of(module), true)
    assert packages.calls == []


def test_adapters_of_a_mixers_last_projection_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """mamba-ssm's fused kernel for training takes the projection's weight, and would leave out its adapter."""
    module = module_of("nemotron_h").train()
    packages = install(monkeypatch, module)
    mixer = next(iter(module.mixers.values())).mixer
    before = row_of(module)[0]
    mixer.out_proj.register_forward_hook(lambda linear, args, out: out + 1.0)
    assert (row_of(module)[0] - before).abs().max() > 1e-2
    assert "mamba_split_conv1d_scan_combined" not in {name for name, _ in packages.calls}
    assert mixer.training


def test_small_copies_are_checked_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weft has replaced any mixer's forward: transformers' own would call packages with CPU tensors."""
    module = module_of("qwen3_next")
    packages = install(monkeypatch, module)
    monkeypatch.setattr(mixer_kernels, "DEVICES", ())
    names = inspect.unwrap(type(next(iter(module.mixers.values())).mixer).forward).__globals__
    for name, function in list(names.items()):
        if hasattr(function, "weft_chosen"):
            monkeypatch.setitem(names, name, function.weft_chosen)
    small_copies(hf.read_config(saved_model("qwen3_next")), "per_document")
    assert packages.calls == []


def test_what_a_row_tells_kernels_is_made_once() -> None:
    bounds = Bounds.packed((3, 1, 2), torch.device("cpu"))
    arguments = MixerKernels(arguments=("seq_idx", "cu_seq_lens_q", "cu_seqlens_cpu")).arguments_for(
        bounds, torch.device("cpu")
    )
    assert arguments["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2]] and arguments["cu_seq_lens_q"].tolist() == [0, 3, 4, 6]
    second = MixerKernels(arguments=("seq_idx", "cu_seqlens")).arguments_for(bounds, torch.device("cpu"))
    assert second["seq_idx"] is arguments["seq_idx"] and second["cu_seqlens"] is arguments["cu_seq_lens_q"]


def test_functions_that_the_package_kernels_has_wrapped_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HuggingFace's `kernels` is installed, its decorator makes a module of each function."""
    module = module_of("lfm2").train()
    packages = install(monkeypatch, module)
    mixer = type(next(iter(module.mixers.values())).mixer)
    names = inspect.unwrap(mixer.forward).__globals__
    func = names["causal_conv1d_fn"].weft_chosen

    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    monkeypatch.setitem(names, "causal_conv1d_fn", Func())
    monkeypatch.setattr(mixer_kernels, "_KERNELS", {})
    mixer_kernels.dispatch_by_device(mixer)
    assert kernels_of(mixer).packages
    row_of(module)
    assert packages.calls
    packages.calls.clear()
    with mixer_kernels.by_torch():
        monkeypatch.setattr(mixer_kernels, "_TRIED", {})
        monkeypatch.setattr(mixer_kernels, "DEVICES", ())
        row_of(module)
    assert packages.calls == []
