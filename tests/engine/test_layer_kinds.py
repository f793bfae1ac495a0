"""A small copy has every kind of layer that the whole model has, whatever the config calls the pattern."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import PretrainedConfig

from tests.support.zoo import tiny_config
from weft.engine.selfcheck import architecture, shrink
from weft.engine.selfcheck.architecture import examine
from weft.engine.selfcheck.kinds import LayerKinds, kinds_of, meta_model
from weft.engine.selfcheck.shrink import fewer_layers, narrow
from weft.errors import UserError
from weft.models.facts import find_facts
from weft.models.patterns import outermost, similar_names

_RECURRENT = ["recurrent", "recurrent", "attention"]
# family, keys, layers of the copy, what must be left of a key of its config
PATTERNS: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    ("llama", dict(num_hidden_layers=9), 2, {}),
    ("jamba", dict(num_hidden_layers=16, attn_layer_period=8, attn_layer_offset=4), 5, {}),
    ("jamba", dict(num_hidden_layers=9, expert_layer_period=8, expert_layer_offset=6), 7, {}),
    ("recurrent_gemma", dict(num_hidden_layers=8, block_types=_RECURRENT), 3, {"block_types": _RECURRENT}),
    ("deepseek_v3", dict(num_hidden_layers=7, first_k_dense_replace=3), 4, {"first_k_dense_replace": 3}),
    ("llama4_text", dict(num_hidden_layers=12), 2, {"no_rope_layers": [1, 0], "moe_layers": [0, 1]}),
    ("llama4_text", dict(num_hidden_layers=12, interleave_moe_layer_step=4), 2, {"moe_layers": [1]}),
    ("smollm3", dict(num_hidden_layers=8), 2, {"no_rope_layers": [1, 0]}),
    ("gemma3_text", dict(num_hidden_layers=12, layer_types=None), 2, {}),
    ("qwen3_moe", dict(num_hidden_layers=6, mlp_only_layers=[2]), 2, {"mlp_only_layers": [1]}),
    ("qwen3_moe", dict(num_hidden_layers=6, decoder_sparse_step=4), 4, {}),
    ("lfm2_moe", dict(num_hidden_layers=6, num_dense_layers=2, layer_types=["conv", "conv", "full_attention"] * 2),
     4, {}),
    ("zamba2", dict(num_hidden_layers=8, hybrid_layer_ids=[5, 7], layer_types=[
        *["linear_attention"] * 5, "hybrid", "linear_attention", "hybrid"]), 2, {"hybrid_layer_ids": [1]}),
]  # fmt: skip


def classes(config: PretrainedConfig) -> set[frozenset[str]]:
    """The set of classes in each decoder layer."""
    model = meta_model(config)
    layers = model.get_submodule(find_facts(model).layers).children()
    return {frozenset(type(module).__name__ for module in layer.modules()) for layer in layers}


@pytest.mark.parametrize(("family", "keys", "layers", "remaining"), PATTERNS)
def test_a_copy_with_fewer_layers_has_every_kind(
    family: str, keys: dict[str, Any], layers: int, remaining: dict[str, Any]
) -> None:
    config = tiny_config(family, **keys)
    small = fewer_layers(config, 2, kinds_of(config))
    assert small.num_hidden_layers == layers
    assert {name: getattr(small, name) for name in remaining} == remaining
    assert classes(narrow(small)) == classes(small) == classes(config)
    assert kinds_of(config).are_those_of(meta_model(narrow(small)))


def test_more_layers_than_kinds_are_kept_as_asked() -> None:
    config = tiny_config("gpt_oss", num_hidden_layers=8, layer_types=["sliding_attention", "full_attention"] * 4)
    kinds = kinds_of(config)
    assert fewer_layers(config, 1, kinds).num_hidden_layers == 2
    assert fewer_layers(config, 5, kinds).layer_types == config.layer_types[:5]
    assert fewer_layers(config, 9, kinds).num_hidden_layers == 8


def test_a_flag_makes_a_kind_where_the_classes_are_the_same() -> None:
    """A window or none, rotary positions or none; not the layer's own number, of which the first is 0."""
    kinds = kinds_of(tiny_config("gemma2", num_hidden_layers=4)).layers
    assert kinds[0] == kinds[2] != kinds[1] == kinds[3]
    config = tiny_config("smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1])
    kinds = kinds_of(config).layers
    assert len(classes(config)) == 1 and kinds[0] == kinds[2] == kinds[3] != kinds[1]


# ---------------------------------------------------------------- a copy without one


def without_late_kinds(config: PretrainedConfig, layers: int, kinds: LayerKinds) -> PretrainedConfig:
    """As if the first layers were all there is."""
    return shrink._with_layers(config, list(range(layers)))


@pytest.mark.parametrize("family", ["jamba", "recurrent_gemma", "deepseek_v3"])
def test_a_copy_that_lacks_a_kind_is_not_examined(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(family, **({"first_k_dense_replace": 2} if family == "deepseek_v3" else {}))
    expected = examine(config)
    architecture.forget_checks()
    monkeypatch.setattr(architecture, "fewer_layers", without_late_kinds)
    findings = examine(config)
    assert findings.copy == "all layers, narrow"
    assert findings.attends and findings.attention == expected.attention


def test_a_family_of_which_no_copy_has_every_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "fewer_layers", without_late_kinds)
    monkeypatch.setattr(architecture, "narrow", lambda config: narrow(shrink._with_layers(config, [0, 1])))
    with pytest.raises(
        UserError, match="model_type 'jamba'.*a copy with 2 layers, narrow does not have the same kinds of layers"
    ):
        examine(tiny_config("jamba"))


def test_a_pattern_that_is_like_no_name_is_told_what_names_begin_with() -> None:
    names = ["gpt_neox.embed_in.weight", "gpt_neox.layers.0.mlp.weight", "gpt_neox.layers.1.mlp.weight", "head.weight"]
    assert similar_names("model.decoder", names) == "; names begin with gpt_neox.embed_in, gpt_neox.layers, head."
    assert similar_names("gpt_neox.embed_inn", names).startswith("; did you mean gpt_neox.embed_in")


def test_patterns_name_the_outermost_modules_and_members_of_lists() -> None:
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(1, 1), "mlp": nn.Linear(1, 1)})})
    root = nn.Module()
    root.layers, root.mlp = nn.ModuleList([nn.Sequential(nn.Identity(), nn.Identity())]), nn.Linear(1, 1)
    root.block = nn.Sequential()
    root.block.mlp = nn.Sequential(nn.Linear(1, 1))
    root.block.mlp.mlp = layer
    assert outermost(root, "*mlp") == ["mlp", "block.mlp"]
    assert outermost(root, "layers") == outermost(root, "layers.*") == ["layers.0"]
    assert outermost(root, "nothing") == []
