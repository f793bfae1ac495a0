"""The check of kernels on the run's own device: the CPU is the device, per_document the kernel, and bugs are planted.

B batch, H heads, T tokens, E value width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from tests.zoo import tiny_config
from weft.engine import build, device_check
from weft.engine.device_check import TOLERANCES, check_on_device
from weft.engine.startup import Findings, check_kernel, examine
from weft.errors import UserError
from weft.ops import attention
from weft.ops.attention_call import Bounds, Call, Traits
from weft.ops.per_document import per_document

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "FOLDER", tmp_path / "kernels")


@cache
def examined(family: str) -> tuple[PretrainedConfig, Findings]:
    config = tiny_config(family)
    return config, examine(config)


def check(family: str, dtype: torch.dtype = BF16) -> None:
    config, findings = examined(family)
    check_on_device(config, "auto", findings, CPU, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "lfm2", "llama4_text"])
def test_right_kernels_pass(family: str, dtype: torch.dtype) -> None:
    check(family, dtype)


def test_a_family_without_attention_of_ours_has_none_to_try() -> None:
    check("mamba2")
    check("falcon")
    assert not device_check.FOLDER.exists()


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


@pytest.mark.parametrize(("bug", "family", "found"), PLANTED)
def test_a_planted_bug_is_found(
    bug: Callable[[Call], Tensor], family: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined(family)
    kernel = attention.KERNELS["per_document"]
    monkeypatch.setitem(attention.KERNELS, "per_document", replace(kernel, run=bug))
    with pytest.raises(UserError, match=r"model\.attention=auto is not right on cpu in bfloat16") as refusal:
        check(family)
    assert found in str(refusal.value) and "Set model.attention=per_document" in str(refusal.value)
    assert not list(device_check.FOLDER.glob("*"))
    config, findings = examined(family)
    check_on_device(config, "per_document", findings, CPU, BF16)  # as the refusal says


# ---------------------------------------------------------------- what is remembered


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every check that is made."""
    made: list[str] = []
    original = device_check.small_copy

    def small_copy(config: PretrainedConfig, kernel: str) -> Any:
        made.append(kernel)
        return original(config, kernel)

    monkeypatch.setattr(device_check, "small_copy", small_copy)
    return made


def test_what_passed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    check("llama")
    check("llama")
    assert len(made) == 1
    (file,) = device_check.FOLDER.iterdir()
    said = json.loads(file.read_text())
    assert said["family"] == "llama" and said["attention"] == ["heads 16 wide, grouped"] and said["device"] == "cpu"
    assert said["torch"] == torch.__version__ and said["transformers"] == transformers.__version__
    check("llama", torch.float16)
    check("qwen3")
    monkeypatch.setattr(torch, "__version__", "9.9")
    check("llama")
    assert len(made) == 4


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe\x00", b"[]"])
def test_a_damaged_file_is_ignored_and_replaced(damage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    check("llama")
    (file,) = device_check.FOLDER.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage)
    made = counted(monkeypatch)
    check("llama")
    assert len(made) == 1 and file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_a_check_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device_check.FOLDER.write_text("a file where the folder should be")
    made = counted(monkeypatch)
    check("llama")
    check("llama")
    assert len(made) == 2


# ---------------------------------------------------------------- where it stands


def test_a_run_on_cuda_is_checked_and_one_on_the_cpu_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class ReachedError(Exception):
        pass

    def reached(*given: Any) -> None:
        raise ReachedError(given[1:])

    monkeypatch.setattr(build, "check_on_device", reached)
    tiny_config("llama").save_pretrained(tmp_path)
    config = build.ModelConfig(path=str(tmp_path), init="random")
    of_run: dict[str, Any] = {"dtype": torch.float32, "compute": BF16}
    with pytest.raises(ReachedError, match=r"'auto', Findings.*device\(type='cuda'\), torch.bfloat16"):
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
    sliding, whole = Traits(256, 256, grouped=True, window=True), Traits(512, 512, grouped=True)
    assert list(findings.attention) == [sliding, whole] and findings.copy.endswith("narrow")
    chosen = [attention.choose("auto", CUDA, BF16, traits) for traits in findings.attention]
    assert chosen == ["varlen", "per_document"]
    refusal = r"model.attention=varlen cannot serve this run: bfloat16 on cuda, heads 512 wide, grouped\. Set"
    with pytest.raises(UserError, match=refusal + re.escape(" model.attention to auto or per_document.")):
        check_kernel(config, "varlen", findings, CUDA, BF16)
