"""Values in vLLM are read back after a load: what is stale, withheld or misnamed in it is named.

In this process, with weft's part of the worker as a server has it; bugs are planted in vLLM and in that part.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tests.support.cases import saved_model
from tests.support.toy_tokenizers import byte_tokenizer
from weft.inference.vllm import receiver
from weft.inference.vllm.readback import digest

LARGE = {"head_dim": 32, "hidden_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", LARGE),
    "tied": ("qwen3", LARGE),
    "experts": ("qwen3_moe", {**LARGE, "num_experts": 8, "moe_intermediate_size": 64}),
}
Tensors = dict[str, torch.Tensor]


@contextmanager
def opened(path: str, **options: Any) -> Iterator[LLM]:
    llm = LLM(
        path, dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, seed=0,
        enable_prefix_caching=False, worker_extension_cls="weft.inference.vllm.receiver.VllmSyncWorker", **options,
    )  # fmt: skip
    yield llm
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def said(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their logprobs."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)
    answers = []
    for ids in ([5, 6, 7], list(range(20, 50))):
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0].outputs
        tokens = list(output.token_ids)
        answers.append((tokens, [logprobs[t].logprob for logprobs, t in zip(output.logprobs, tokens, strict=True)]))
    return answers


class Reloading:
    """A folder of weights that a vLLM of this process loads again and again."""

    def __init__(self, llm: LLM, path: str, folder: Path) -> None:
        self.llm, self.folder = llm, folder
        folder.mkdir()
        self.tensors = {name: tensor.clone() for name, tensor in load_file(Path(path) / "model.safetensors").items()}

    def changed(self, factor: float) -> Tensors:
        """The tensors as an update might leave them: each a little different."""
        return {
            name: tensor * (1 + factor * (1 + number % 3)) for number, (name, tensor) in enumerate(self.tensors.items())
        }

    def __call__(self, tensors: Tensors) -> str:
        """What the worker says of it; "" where all is well."""
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.folder / "model.safetensors")
        (answer,) = self.llm.collective_rpc("weft_reload", args=(str(self.folder),))
        return str(answer.get("error", ""))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {tensor_name: tensor for tensor_name, tensor in tensors.items() if tensor_name != name}


def misnamed(name: str, replacement: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        replacement if tensor_name == name else tensor_name: tensor for tensor_name, tensor in tensors.items()
    }


# What is loaded -> what is said of it. Of vLLM alone only the last ends in an error.
WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a norm withheld": (without("model.layers.1.input_layernorm.weight"), "layers.1.input_layernorm.weight"),
    "a part withheld": (without("model.layers.0.self_attn.k_proj.weight"), "layers.0.self_attn.qkv_proj"),
    "the embedding withheld": (without("model.embed_tokens.weight"), "embed_tokens.weight"),
    "misnamed": (
        misnamed("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.kk_proj.weight"), "kk_proj",
    ),
}  # fmt: skip


def packs_nothing_new(self: Any, layer: torch.nn.Module) -> None:
    """As it was at the first load: the packed copy is there already."""
    layer.weight = torch.nn.Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_loaded_is_read_back_and_what_is_not_is_named(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    path = saved_model(family, **changes)
    with opened(path, load_format="dummy") as llm:
        reload = Reloading(llm, path, tmp_path / "weights")
        for factor in (0.0, 0.1, 0.2):
            assert reload(reload.changed(factor)) == ""
        for wrong, named in WRONG.values():
            answer = reload(wrong(reload.changed(0.3)))
            assert named in answer, answer
        linear = patch.object(UnquantizedLinearMethod, "process_weights_after_loading", packs_nothing_new)
        with linear:
            assert "vLLM's weights differ from the sent weights: model.layers.0" in reload(reload.changed(0.4))
        if name == "tied":
            with patch.object(receiver, "_pack_heads", lambda model: None):
                assert "lm_head.weight (its packed copy)" in reload(reload.changed(0.5))
        last = {**reload.changed(0.6)}
        assert reload(last) == ""
        after = said(llm)
    byte_tokenizer().save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "config.json").write_text((Path(path) / "config.json").read_text())
    with opened(str(tmp_path / "weights")) as llm:
        assert said(llm) == after  # exactly


def write_adapter(folder: Path, path: str, seed: int) -> None:
    """Of all linear layers, rank 4, in peft's format."""
    generator, tensors = torch.Generator().manual_seed(seed), Tensors()
    for name, weight in load_file(Path(path) / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.timeout(600)
def test_an_adapter_is_read_back(tmp_path: Path) -> None:
    path, folder = saved_model("qwen3", **LARGE), tmp_path / "adapter"

    def check() -> str:
        (answer,) = llm.collective_rpc("weft_check_adapter", args=(str(folder),))
        return str(answer.get("error", ""))

    with opened(path, enable_lora=True, max_lora_rank=8) as llm:
        write_adapter(folder, path, 0)
        assert llm.collective_rpc("add_lora", args=(LoRARequest("policy", 1, str(folder)),)) == [True]
        assert check() == ""
        write_adapter(folder, path, 1)
        assert "adapter differs from the sent adapter: model.layers.0.mlp.down_proj" in (text := check())
        assert "self_attn.qkv_proj" in text and "(8 layers in all)" in text
        llm.collective_rpc("add_lora", args=(LoRARequest("policy", 1, str(folder)),))  # has its number: nothing is read
        assert "adapter differs" in check()
        (answer,) = llm.collective_rpc("weft_adapter", args=("policy", str(folder)))
        assert answer == {} and check() == ""


def test_a_digest_is_of_values_and_not_of_places() -> None:
    values = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0))
    expected = digest(values)
    assert expected == digest(values.flip(0).reshape(2, -1)) == digest(torch.cat([values, torch.zeros(9)]))
    assert expected == (digest(values[:100]) + digest(values[100:])) % (1 << 64)
    values[7] = torch.nextafter(values[7], torch.tensor(9.0))
    assert digest(values) != expected
    half = values[:64].bfloat16()
    assert digest(half) == digest(half.float())
