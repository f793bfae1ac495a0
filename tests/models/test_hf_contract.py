"""The transformers internals that weft/models/hf.py uses, held to the signatures it was written against.

Runs on the installed transformers and, by `make test-compat`, on the oldest supported one.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import AttentionInterface, remove_tied_weights_from_state_dict

from tests.support.cases import describe, parity, saved_model
from tests.support.pool import run
from tests.support.vision_zoo import vision_config, vision_tokenizer
from tests.support.zoo import tiny_config
from weft.engine.selfcheck.architecture import examine
from weft.models import hf, hf_template
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.layout import map_tensors

pytestmark = pytest.mark.compat


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_signatures() -> None:
    assert parameters(revert_weight_conversion) == ["model", "state_dict"]
    assert parameters(remove_tied_weights_from_state_dict) == ["state_dict", "model"]
    assert "cls" not in parameters(PreTrainedModel._from_config) and "config" in parameters(
        PreTrainedModel._from_config
    )
    assert "gradient_checkpointing_kwargs" in parameters(PreTrainedModel.gradient_checkpointing_enable)
    assert parameters(AttentionInterface.register) == ["key", "value"]


def test_the_registered_function_gets_what_weft_reads() -> None:
    """un-repeated keys, scaling, window, soft-cap and weft's own argument; no mask."""
    calls: list[dict[str, Any]] = []

    def probe(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        calls.append({"mask": attention_mask, "heads": (query.shape[1], key.shape[1]), **kwargs})
        out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()
        return out, None

    hf.register_attention("weft_probe", probe)
    model = hf.build_random(tiny_config("gemma2"), dtype=torch.float32, attention="weft_probe", seed=0)
    model.model(input_ids=torch.arange(20)[None], use_cache=False, doc_bounds="arrives")
    assert [call["doc_bounds"] for call in calls] == ["arrives", "arrives"]
    assert all(call["mask"] is None and call["heads"] == (4, 2) for call in calls)
    assert {call["sliding_window"] for call in calls} == {16, None}
    assert calls[0]["softcap"] == 5.0 and calls[0]["scaling"] == pytest.approx(24**-0.5)


def test_a_row_cache_hands_keys_on_and_keeps_states_by_row() -> None:
    """lfm2: a convolution, attention, a convolution."""
    calls: list[tuple[int, tuple[int, ...]]] = []

    def hold(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((layer, tuple(keys.shape)))
        return keys, values

    model = hf.build_random(tiny_config("lfm2"), dtype=torch.float32, attention="eager", seed=0)
    assert hf.cache_argument(model.model) == "past_key_values" and hf.takes_dynamic_cache(model)
    caches = [hf.RowCache(model.config, hold) for _ in range(2)]
    for cache in caches:
        model.model(input_ids=torch.arange(6).view(2, 3), past_key_values=cache, use_cache=True)
    assert calls == [(1, (2, 2, 3, 16))] * 2 and caches[0].has_states
    before = caches[1].layers[2].conv_states[0]
    caches[0].keep([1, 1, 0])
    caches[0].append(caches[1])
    assert torch.equal(caches[0].layers[2].conv_states[0], before[[1, 1, 0, 0, 1]])


def test_ties_are_facts() -> None:
    tied = hf.build_meta(tiny_config("llama_tied"), dtype=torch.float32, attention="eager")
    assert hf.tied_parameters(tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    untied = hf.build_meta(tiny_config("llama"), dtype=torch.float32, attention="eager")
    assert hf.tied_parameters(untied) == {}


def test_experts_are_fused_in_memory_and_apart_on_disk() -> None:
    model = hf.build_random(tiny_config("qwen3_moe"), dtype=torch.float32, attention="eager", seed=0)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (5, 80, 64) and experts.down_proj.shape == (5, 64, 40)
    on_disk = hf.run_rules_backwards(model, dict(model.state_dict()))
    gate = on_disk["model.layers.0.mlp.experts.3.gate_proj.weight"]
    assert torch.equal(gate, experts.gate_up_proj[3, :40])
    piece = next(p for p in map_tensors(model, None) if p.disk == "model.layers.0.mlp.experts.3.gate_proj.weight")
    assert piece.runtime == "model.layers.0.mlp.experts.gate_up_proj" and piece.dims == (1, 2)
    assert piece.box == Box((3, 0, 0), (1, 40, 64))


def test_rules_that_a_checkpoint_needs_are_chosen_by_its_names() -> None:
    model = hf.build_meta(tiny_config("mixtral"), dtype=torch.float32, attention="eager")
    names = [piece.disk for piece in map_tensors(model, None)]
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in names
    fused = list(model.state_dict())
    assert sorted(piece.disk for piece in map_tensors(model, fused)) == sorted(fused)
    assert sorted(piece.disk for piece in map_tensors(model, names)) == sorted(names)
    bare = {name: hf.runtime_names(model, [name])[name] for name in ("layers.0.input_layernorm.weight", "norm.weight")}
    assert bare == {name: f"model.{name}" for name in bare}


def test_critics_are_classifiers_with_one_label() -> None:
    config = tiny_config("llama_tied")
    values = hf.with_scores(config)
    model = hf.build_meta(values, dtype=torch.float32, attention="eager")
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.score.weight.shape == (1, 64)
    assert hf.tied_parameters(model) == {} and config.architectures == ["LlamaForCausalLM"]
    assert hf.label_names(values) == {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert hf.with_logits(config) is config and hf.with_scores(values).architectures == values.architectures
    assert hf.model_class(hf.with_logits(values)).__name__ == "LlamaForCausalLM"
    assert set(model.state_dict()) >= {piece.disk for piece in map_tensors(model, None)} >= {"score.weight"}


def test_buffers_are_rebuilt_and_weights_stay() -> None:
    model = hf.build_random(tiny_config("gemma3_text"), dtype=torch.float32, attention="eager", seed=0)
    before = {name: tensor.clone() for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    for _, buffer in model.named_buffers():
        buffer.fill_(torch.nan)
    hf.rebuild_buffers(model)
    assert all(
        torch.equal(before[name], tensor) for name, tensor in [*model.named_buffers(), *model.named_parameters()]
    )


def test_fused_experts_go_through_the_registered_function() -> None:
    calls: list[tuple[torch.Size, ...]] = []

    def probe(experts: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
        calls.append((hidden.shape, chosen.shape, weights.shape))
        return hidden

    model = hf.build_random(tiny_config("qwen3_moe"), dtype=torch.float32, attention="eager", seed=0)
    experts = model.model.layers[0].mlp.experts
    assert hf.is_fused_experts(experts) and not hf.is_fused_experts(model.model.layers[0].mlp)
    assert (experts.has_gate, experts.has_bias, experts.is_transposed, experts.num_experts) == (True, False, False, 5)
    hf.set_experts_function(experts, probe)
    model(input_ids=torch.arange(7)[None], use_cache=False)
    assert calls == [((7, 64), (7, 2), (7, 2))] * 2
    assert hf.checkpoint_layout(model) == "qwen2_moe"
    rows, ends = torch.randn(4, 64), torch.tensor([1, 1, 3, 3, 4], dtype=torch.int32)
    grouped = hf.grouped_linear(rows, experts.gate_up_proj, ends, None, False)
    expected = torch.stack([experts.gate_up_proj[e] @ row for e, row in zip((0, 2, 2, 4), rows, strict=True)])
    assert torch.allclose(grouped, expected, atol=1e-6)


def test_parity() -> None:
    verdict = run(2, parity, saved_model("qwen3_moe"), "2", {})[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "mistral3"])
def test_images_in_packed_rows(family: str) -> None:
    """The tower runs in the base's forward, by get_image_features and get_video_features; get_rope_index gives the
    positions of one document."""
    traits = examine(vision_config(family, vision_tokenizer(family)))
    assert traits.images == "" and (traits.videos == "") == (family == "qwen2_5_vl")


def test_chat_templates_are_compiled_with_what_weft_reads() -> None:
    """An environment with a sandbox, transformers' filters, and the tracker of generation markers."""
    template = hf_template.environment().from_string("{% generation %}a{% endgeneration %}{{ [1] | tojson }}")
    blocks: list[str] = []
    marked: list[tuple[int, int]] = []
    with template.environment.activate_tracker(blocks, marked):
        blocks += template.generate()
    assert "".join(blocks) == "a[1]" and marked == [(0, 1)]
    assert isinstance(template.environment, ImmutableSandboxedEnvironment)
    assert {"raise_exception", "strftime_now"} <= set(template.environment.globals)
