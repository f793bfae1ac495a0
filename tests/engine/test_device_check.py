"""The check of kernels on the run's own device: the CPU is the device, per_document the kernel, and bugs are planted.

B batch, H heads, T tokens, E value width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from tests.support.cases import open_engine, saved_model
from tests.support.pool import run
from tests.support.zoo import tiny_config
from weft.engine import build, builder
from weft.engine.optim.adamw import FusedAdamW
from weft.engine.selfcheck import device as device_check
from weft.engine.selfcheck.architecture import ModelSupport, check_kernel, examine
from weft.engine.selfcheck.device import TOLERANCES, check_on_device
from weft.errors import UserError
from weft.launch.simulated import Simulation, device_memory
from weft.models import experts, hf
from weft.ops import attention
from weft.ops.attention_call import Bounds, Call, Traits
from weft.ops.per_document import per_document

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "FOLDER", tmp_path / "kernels")


@cache
def examined(family: str) -> tuple[PretrainedConfig, ModelSupport]:
    config = tiny_config(family)
    return config, examine(config)


def check(family: str, dtype: torch.dtype = BF16) -> None:
    config, findings = examined(family)
    check_on_device(config, "auto", findings, CPU, dtype)


@pytest.mark.parametrize(("family", "dtype"), [
    pytest.param(family, dtype, marks=() if (number + shift) % 3 == 0 else pytest.mark.table)
    for number, family in enumerate(["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "lfm2", "llama4_text"])
    for shift, dtype in enumerate(TOLERANCES)
])  # fmt: skip
def test_right_kernels_pass(family: str, dtype: torch.dtype) -> None:
    check(family, dtype)


@pytest.mark.parametrize("family", ["mamba2", "falcon", "jamba", "qwen3_next"])
def test_a_family_without_attention_of_ours_has_other_things_to_try(family: str) -> None:
    check(family)
    assert len(list(device_check.FOLDER.iterdir())) == 1


# ---------------------------------------------------------------- planted bugs


def ignores_bounds(call: Call) -> Tensor:
    return per_document(call if call.bounds.padded else replace(call, bounds=Bounds((call.query_BHTD.shape[2],))))


def window_off_by_one(call: Call) -> Tensor:
    return per_document(call if call.window is None else replace(call, window=call.window + 1))


def no_softcap(call: Call) -> Tensor:
    return per_document(replace(call, softcap=None))


def next_groups(call: Call) -> Tensor:
    return per_document(replace(call, key_BKTD=call.key_BKTD.roll(1, 1), value_BKTE=call.value_BKTE.roll(1, 1)))


class _ShortBackward(torch.autograd.Function):
    """No gradient for the last document."""

    @staticmethod
    def forward(ctx: Any, x_BHTE: Tensor, tokens: int) -> Tensor:
        ctx.tokens = tokens
        return x_BHTE.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        gradient[:, :, -ctx.tokens :] = 0
        return gradient, None


def drops_a_document_backward(call: Call) -> Tensor:
    out: Tensor = _ShortBackward.apply(per_document(call), call.bounds.lengths[-1])
    return out


def backward_leaks(call: Call) -> Tensor:
    out = per_document(call)
    return out + (call.query_BHTD.sum() - call.query_BHTD.detach().sum()) * 1e-2


def sinks_without_gradient(call: Call) -> Tensor:
    return per_document(
        replace(call, sinks_H=None if call.sinks_H is None else call.sinks_H.detach() + 0 * call.sinks_H)
    )


def coarse(call: Call) -> Tensor:
    return per_document(call) * 1.05


def not_a_number(call: Call) -> Tensor:
    return torch.cat([per_document(call)[:, :, :-1], torch.full_like(call.query_BHTD[:, :, :1], torch.nan)], 2)


def broken(call: Call) -> Tensor:
    raise RuntimeError("out of resource: shared memory")


PLANTED = [
    (ignores_bounds, "llama", "another document moves hidden states by"),
    (ignores_bounds, "llama", "gradients reach another document"),
    (ignores_bounds, "llama", "outputs of per_document (heads 16 wide, grouped) are off by"),
    (window_off_by_one, "gemma3_text", "outputs of per_document (heads 16 wide, grouped, window) are off by"),
    (no_softcap, "gemma2", "outputs of per_document (heads 16 wide, grouped, window, softcap)"),
    (next_groups, "llama", "outputs of per_document (heads 16 wide, grouped) are off by"),
    (drops_a_document_backward, "llama", "gradients of keys of per_document (heads 16 wide, grouped) are off by"),
    (backward_leaks, "llama", "gradients of queries of per_document"),
    (sinks_without_gradient, "gpt_oss", "gradients of sinks of per_document"),
    (coarse, "llama", "outputs of per_document (heads 16 wide, grouped) are off by"),
    (not_a_number, "llama", "are off by nan"),
    (broken, "llama", "it does not run (RuntimeError: out of resource: shared memory)"),
]


@pytest.mark.parametrize(("bug", "family", "symptom"), PLANTED)
def test_a_planted_bug_is_found(
    bug: Callable[[Call], Tensor], family: str, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined(family)
    kernel = attention.KERNELS["per_document"]
    monkeypatch.setitem(attention.KERNELS, "per_document", replace(kernel, run=bug))
    with pytest.raises(UserError, match=r"model\.attention=auto computes wrong results on cpu in bfloat16") as refusal:
        check(family)
    assert symptom in str(refusal.value) and "Set model.attention=per_document" in str(refusal.value)
    assert not list(device_check.FOLDER.glob("*"))
    config, findings = examined(family)
    check_on_device(config, "per_document", findings, CPU, BF16)  # as the refusal says


# ---------------------------------------------------------------- experts


class _Unwritten(torch.autograd.Function):
    """The gradient of an expert without rows is what the memory held, as on Blackwell."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ends,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
        return gradient, None


def unwritten(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        return original(rows, _Unwritten.apply(weight, ends), ends, bias, transposed)

    return product


def next_expert(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An empty group is skipped as if it were not there."""

    def product(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return original(rows, torch.cat([weight[~empty], weight[empty]]), ends, bias, transposed)

    return product


@pytest.fixture
def written() -> Iterator[None]:
    """Nothing is known of the device, before and after."""
    experts.UNWRITTEN.clear()
    yield
    experts.UNWRITTEN.clear()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # the second holds weights transposed
def test_gradients_of_experts_without_rows_are_set_to_zero_where_they_are_not_written(
    family: str, monkeypatch: pytest.MonkeyPatch, written: None
) -> None:
    monkeypatch.setattr(hf, "grouped_linear", unwritten(hf.grouped_linear))
    check(family)
    assert {"cpu"} == experts.UNWRITTEN
    (file,) = device_check.FOLDER.iterdir()
    assert json.loads(file.read_text())["unwritten"] is True
    experts.UNWRITTEN.clear()
    checks = counted(monkeypatch)
    check(family)  # another process of this run, which only reads what is remembered
    assert {"cpu"} == experts.UNWRITTEN and not checks
    weight = torch.randn(4, 16, 8, requires_grad=True)
    ends = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    experts.grouped_linear(torch.randn(5, 8), weight, ends, None, False).backward(torch.randn(5, 16))
    assert weight.grad is not None and weight.grad.isfinite().all()
    assert (weight.grad[[0, 2]] == 0).all() and (weight.grad[[1, 3]] != 0).all()


def test_a_device_that_writes_them_is_left_alone(written: None) -> None:
    check("qwen3_moe")
    assert set() == experts.UNWRITTEN
    (file,) = device_check.FOLDER.iterdir()
    assert json.loads(file.read_text())["unwritten"] is False


def test_a_grouped_matmul_with_other_faults_is_refused(monkeypatch: pytest.MonkeyPatch, written: None) -> None:
    examined("qwen3_moe")
    monkeypatch.setattr(hf, "grouped_linear", next_expert(hf.grouped_linear))
    message = (
        r"grouped matmul of experts computes wrong results on cpu in bfloat16.*outputs with \(0, 33, 1, 16, 2, 7\) rows"
    )
    with pytest.raises(UserError, match=message):
        check("qwen3_moe")
    assert set() == experts.UNWRITTEN


# ---------------------------------------------------------------- modules with state, the optimizer


MIXERS = {
    "mamba2": transformers.models.mamba2.modeling_mamba2.Mamba2Mixer,
    "qwen3_next": transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet,
    "lfm2": transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv,
}


@pytest.mark.parametrize("family", MIXERS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_module_with_state_that_is_wrong_on_the_device_is_found(
    family: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is bf16 here: the fault is one of its kernels, not of torch's code in fp32."""
    examined(family)
    original = MIXERS[family].forward
    devices = iter(["the device", "truth", "rounding"] * 8)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        if kwargs.get("doc_bounds") is not None or not hasattr(self, "weft_alone") or next(devices) != "the device":
            return out
        first = out[0] if isinstance(out, tuple) else out
        wrong = first + 0.3 * (first - first.detach()) if backward else first * 1.3
        return (wrong, *out[1:]) if isinstance(out, tuple) else wrong

    mixed = device_check._mixed

    def marked(mixer: Any, *args: Any) -> Any:
        mixer.weft_alone = True
        return mixed(mixer, *args)

    monkeypatch.setattr(MIXERS[family], "forward", forward)
    monkeypatch.setattr(device_check, "_mixed", marked)
    quantity = "gradients of inputs" if backward else "outputs"
    with pytest.raises(
        UserError, match=rf"the code of {MIXERS[family].__name__} computes wrong.*{quantity} of .* are off by"
    ):
        check(family)


@pytest.mark.parametrize("ignored", ["skip", "divisor"])
def test_a_fused_optimizer_that_steps_where_it_should_not_is_found(
    ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FusedAdamW.step

    def step(self: FusedAdamW, closure: Any = None) -> None:
        setattr(self, ignored, None)
        original(self, closure)

    examined("llama")
    monkeypatch.setattr(FusedAdamW, "step", step)
    with pytest.raises(
        UserError, match="torch's fused AdamW computes wrong results on cpu.*1000 parameters are off by"
    ):
        check("llama")


# ---------------------------------------------------------------- collectives


def collectives_of(path: str, mesh: str, fault: str | None) -> tuple[list[str], str]:
    """(the groups that are tried, the refusal)."""
    engine = open_engine(path, mesh)
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = original(tensor, *args, **kwargs)
        if tensor.dtype == torch.bfloat16:
            tensor[-1] += 1
        return work

    message = ""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(dist, "all_reduce", all_reduce)
        try:
            device_check.check_collectives(engine.mesh.groups, CPU, (BF16, torch.float32))
        except UserError as error:
            message = str(error)
    return list(engine.mesh.groups), message


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [("2xep2", {"dp_replicate", "dp_shard", "loss", "ep"}), ("2xtp2", {"dp_shard", "tp"})],
)
def test_collectives_are_tried_on_every_group(mesh: str, groups: set[str]) -> None:
    for tried, refusal in run(4, collectives_of, saved_model("qwen3_moe"), mesh, None):
        assert groups - {"ep"} <= set(tried) and refusal == ""


def test_a_collective_with_wrong_numbers_is_named() -> None:
    for _, refusal in run(2, collectives_of, saved_model("llama"), "2", "planted"):
        assert refusal.startswith("all-reduce over dp_shard (2 ranks) returned wrong numbers on its rank")
        assert "in bfloat16 on cpu" in refusal


@pytest.mark.parametrize(
    ("device", "same_mesh", "tried"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_collectives_of_a_new_mesh_are_tried_on_cuda(
    device: str, same_mesh: bool, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is built, and once for engines that share a mesh."""

    class BuiltError(Exception):
        pass

    def build(*_: Any, **__: Any) -> None:
        raise BuiltError

    calls: list[tuple[Any, ...]] = []
    mesh: Any = SimpleNamespace(groups={"dp_shard": None})
    setup = SimpleNamespace(mesh=mesh, precision=SimpleNamespace(compute=BF16, reduce=torch.float32))
    monkeypatch.setattr(builder, "make_spec", lambda *_: setup)
    monkeypatch.setattr(builder, "new_groups_inherit_timeout", nullcontext)
    monkeypatch.setattr(builder, "check_collectives", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(builder, "build", build)
    config: Any = SimpleNamespace(deterministic=False)
    ranks: Any = SimpleNamespace(device=torch.device(device), simulated=None)
    options: Any = dict(weights=True, fill=True, progress=None, readouts=())
    with pytest.raises(BuiltError):
        builder.assemble(config, ranks, mesh=mesh if same_mesh else None, **options)
    assert calls == ([({"dp_shard": None}, CUDA, (BF16, torch.float32))] if tried else [])


# ---------------------------------------------------------------- what is remembered


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every check that is made."""
    kernels: list[str] = []
    original = device_check.small_copy

    def small_copy(config: PretrainedConfig, kernel: str) -> Any:
        kernels.append(kernel)
        return original(config, kernel)

    monkeypatch.setattr(device_check, "small_copy", small_copy)
    return kernels


def test_what_passed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = counted(monkeypatch)
    check("llama")
    check("llama")
    assert len(checks) == 1
    (file,) = device_check.FOLDER.iterdir()
    record = json.loads(file.read_text())
    assert (
        record["family"] == "llama" and record["attention"] == ["heads 16 wide, grouped"] and record["device"] == "cpu"
    )
    assert record["torch"] == torch.__version__ and record["transformers"] == transformers.__version__
    check("llama", torch.float16)
    check("qwen3")
    monkeypatch.setattr(torch, "__version__", "9.9")
    check("llama")
    assert len(checks) == 4


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe\x00", b"[]"])
def test_a_damaged_file_is_ignored_and_replaced(damage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    check("llama")
    (file,) = device_check.FOLDER.iterdir()
    intact = file.read_bytes()
    file.write_bytes(damage)
    checks = counted(monkeypatch)
    check("llama")
    assert len(checks) == 1 and file.read_bytes() == intact


def test_a_folder_that_cannot_be_written_costs_a_check_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device_check.FOLDER.write_text("a file where the folder should be")
    checks = counted(monkeypatch)
    check("llama")
    check("llama")
    assert len(checks) == 2


# ---------------------------------------------------------------- where it stands


def test_a_run_on_cuda_is_checked_and_one_on_the_cpu_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class ReachedError(Exception):
        pass

    def reached(*arguments: Any) -> None:
        raise ReachedError(arguments[1:])

    monkeypatch.setattr(build, "check_on_device", reached)
    tiny_config("llama").save_pretrained(tmp_path)
    config = build.ModelConfig(path=str(tmp_path), init="random")
    of_run: dict[str, Any] = {"dtype": torch.float32, "compute": BF16}
    with pytest.raises(ReachedError, match=r"'auto', ModelSupport.*device\(type='cuda'\), torch.bfloat16"):
        build.build_model(config, device=CUDA, **of_run)
    build.build_model(config, device=CPU, **of_run)


WIDTHS = [
    ("qwen3", dict(head_dim=128, num_attention_heads=32, num_key_value_heads=8), [Traits(128, 128, grouped=True)]),
    ("deepseek_v3", dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_attention_heads=16,
                         num_key_value_heads=16), [Traits(192, 128)]),
    ("llama", dict(num_attention_heads=8, num_key_value_heads=8), [Traits(64, 64)]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "kinds"), WIDTHS)
def test_small_copies_keep_the_widths_of_heads(family: str, keys: dict[str, int], kinds: list[Traits]) -> None:
    findings = examine(tiny_config(family, **{"hidden_size": 512} | keys))
    assert list(findings.attention) == kinds and findings.copy.endswith("narrow")


def test_layers_of_two_widths_get_a_kernel_each() -> None:
    """gemma4 says of single layers, by number, that they are wider."""
    config = transformers.Gemma4TextConfig(
        vocab_size=128, vocab_size_per_layer_input=128, hidden_size_per_layer_input=0, hidden_size=2048,
        intermediate_size=80, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
        global_head_dim=512, sliding_window=512, num_kv_shared_layers=0,
    )  # fmt: skip
    config.architectures = ["Gemma4ForCausalLM"]
    findings = examine(config)
    sliding, full = Traits(256, 256, grouped=True, window=True), Traits(512, 512, grouped=True)
    assert list(findings.attention) == [sliding, full] and findings.copy.endswith("narrow")
    chosen = [attention.choose("auto", CUDA, BF16, traits) for traits in findings.attention]
    assert chosen == ["varlen", "per_document"]
    refusal = r"model.attention=varlen cannot serve this run: bfloat16 on cuda, heads 512 wide, grouped\. Set"
    with pytest.raises(UserError, match=refusal + re.escape(" model.attention to auto or per_document.")):
        check_kernel(config, "varlen", findings, CUDA, BF16)


def test_a_simulation_takes_tensors_of_the_host() -> None:
    """A table that a model has made before."""
    table = torch.arange(3)
    with Simulation("cpu").running():
        assert (torch.ones(3) * table).shape == (3,)


def test_a_cpu_has_no_memory_for_which_sizes_are_chosen() -> None:
    assert device_memory(torch.device("cpu")) == 0
