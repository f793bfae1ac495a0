"""optimizer.groups: who is in which, that the rates and decays are those of a plain loop, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.cases import describe, open_engine, parity, saved_model
from tests.support.pool import run
from tests.support.zoo import tiny_config
from weft.config.schema import OptimizerConfig, ParameterGroup
from weft.engine.optim import groups
from weft.engine.optim.groups import check_groups, describe_groups, param_group_rules
from weft.engine.optim.optimizer import build_optimizer, set_learning_rate
from weft.errors import UserError
from weft.verify.harness import Verdict


def model(family: str = "llama") -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family))


def config(*groups: dict[str, Any], **keys: Any) -> OptimizerConfig:
    return OptimizerConfig(groups=tuple(ParameterGroup(**group) for group in groups), **keys)


# ---------------------------------------------------------------- who is in which


def test_the_first_group_that_names_a_parameter_has_it() -> None:
    module = model()
    settings = config(
        {"match": ("*.mlp", "model.norm"), "lr_scale": 0.1},
        {"match": ("model.layers.1",), "lr": 3e-4, "weight_decay": 0.5},
        lr=1e-3,
        weight_decay=0.2,
    )
    named = dict(module.named_parameters())
    rules = param_group_rules(named.items(), settings)
    by_name = {name: (rules[p].group, rules[p].lr_scale, rules[p].weight_decay) for name, p in named.items()}
    assert by_name["model.layers.1.mlp.up_proj.weight"] == (0, 0.1, 0.2)
    assert by_name["model.norm.weight"] == (0, 0.1, 0.0)  # a norm is not decayed, unless the group says so
    assert by_name["model.layers.1.self_attn.q_proj.weight"] == (1, 3e-4 / 1e-3, 0.5)
    assert by_name["model.layers.1.input_layernorm.weight"] == (1, 3e-4 / 1e-3, 0.5)
    assert by_name["model.layers.0.self_attn.q_proj.weight"] == (None, 1.0, 0.2)


def test_a_tied_weight_is_named_by_any_of_its_names() -> None:
    module = model("llama_tied")
    named = list(module.named_parameters(remove_duplicate=False))
    assert [name for name, p in named if p is module.lm_head.weight] == ["model.embed_tokens.weight", "lm_head.weight"]
    rules = param_group_rules(named, config({"match": ("lm_head",), "lr_scale": 0.5}))
    assert rules[module.lm_head.weight].group == 0
    assert len(rules) == len(named) - 1


def test_the_table_shows_them() -> None:
    settings = config(
        {"match": ("*.mlp", "*.input_layernorm"), "lr_scale": 0.1},
        {"match": ("lm_head",), "weight_decay": 0.0},
        lr=1e-3,
    )
    module = model()
    module.model.norm.weight.requires_grad_(False)
    rows = describe_groups(module.named_parameters(), settings)
    assert [(row.name, row.weight_decay, row.lr and round(row.lr, 9), row.parameters) for row in rows] == [
        ("decayed", 0.1, 1e-3, 9),  # embeddings, four projections in two layers
        ("not decayed", 0.0, 1e-3, 2),
        ("groups[0], decayed", 0.1, 1e-4, 6),
        ("groups[0], not decayed", 0.0, 1e-4, 2),
        ("groups[1]", 0.0, 1e-3, 1),
        ("frozen", 0.0, None, 1),
    ]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"match": ("*.mpl",), "lr_scale": 0.1}], r"optimizer.groups\[0\]: '\*.mpl' matches no parameter"),
        ([{"match": ("model.layer",), "lr_scale": 0.1}], "did you mean model.layers"),
        (
            [{"match": ("*.mlp",), "lr_scale": 0.1}, {"match": ("*.up_proj",), "lr_scale": 0.2}],
            r"optimizer.groups\[1\] has no parameter: every parameter that \*.up_proj matches is in an earlier group",
        ),
        ([{"match": ("model.norm",), "lr_scale": 0.1}], r"optimizer.groups\[0\] has no parameter: .* or frozen"),
    ],
)
def test_a_group_without_parameters_is_refused(groups: list[dict[str, Any]], words: str) -> None:
    module = model()
    module.model.norm.weight.requires_grad_(False)
    with pytest.raises(UserError, match=words):
        check_groups(module, config(*groups))


def refused_unread(path: str) -> None:
    with (
        mock.patch("weft.engine.builder.load_weights", side_effect=AssertionError("weights were read")),
        pytest.raises(UserError, match="matches no parameter"),
    ):
        open_engine(path, "1", optimizer={"groups": (ParameterGroup(match=("nothing",), lr_scale=0.1),)})


def test_the_refusal_comes_before_loading() -> None:
    run(1, refused_unread, saved_model("llama"))


# ---------------------------------------------------------------- rates and decays


def test_a_step_by_hand() -> None:
    """SGD from ones, gradients of one, at rate 0.5: w - 0.5 f (1 + d) with each group's factor f and decay d."""
    named = [(name, nn.Parameter(torch.ones(1, 1))) for name in ("a.weight", "b.weight", "c.weight")]
    settings = config(
        {"match": ("b",), "lr": 2.0}, {"match": ("c",), "lr_scale": 0.1, "weight_decay": 3.0},
        name="sgd", lr=8.0, weight_decay=0.5,
    )  # fmt: skip
    optimizer = build_optimizer(named, settings)
    for rate in (4.0, 0.5):  # the schedule multiplies every group's alike, whatever came before
        set_learning_rate(optimizer, rate)
    for _, parameter in named:
        parameter.grad = torch.ones(1, 1)
    optimizer.step()
    moved = [1.0 - parameter.item() for _, parameter in named]
    assert moved == pytest.approx([0.5 * 1.5, 0.5 * 0.25 * 1.5, 0.5 * 0.1 * 4.0])


GROUPS = (
    ParameterGroup(match=("model.embed_tokens", "*.o_proj"), lr_scale=0.1),
    ParameterGroup(match=("*norm*",), weight_decay=0.3),
    ParameterGroup(match=("model.layers.0", "lm_head"), lr=2e-5, weight_decay=0.0),  # twice optimizer.lr
)


@pytest.mark.covers("optimizer.groups")
@pytest.mark.parametrize(
    ("family", "mesh", "optimizer"),
    [
        ("llama", "2", {}),
        ("llama_tied", "2", {"name": "sgd", "lr": 1e-5}),
        ("qwen3_moe", "2x2", {"state_dtype": "bf16"}),
    ],
)
def test_they_train_as_in_a_plain_loop_with_the_same_groups(family: str, mesh: str, optimizer: dict[str, Any]) -> None:
    sections = {"optimizer": {"groups": GROUPS, **optimizer}}
    verdict = run(4 if mesh == "2x2" else 2, parity, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def planted(path: str, bug: str) -> Verdict | None:
    """Parity where a group's rate, or its decay, is not followed."""
    original = groups.find_rule_of

    def treatment(names: Any, ndim: int, optimizer: Any) -> groups.ParamGroupRule:
        right = original(names, ndim, optimizer)
        usual = optimizer.weight_decay if groups.decays(names[0], ndim) else 0.0
        if bug == "rate":
            return groups.ParamGroupRule(right.group, 1.0, right.weight_decay)
        return groups.ParamGroupRule(right.group, right.lr_scale, usual)

    with mock.patch.object(groups, "find_rule_of", treatment):
        return parity(path, "2", {"optimizer": {"groups": GROUPS}})


@pytest.mark.parametrize("bug", ["rate", "decay"])
def test_parity_sees_a_group_that_is_not_followed(bug: str) -> None:
    assert "weights after 3 steps" in run(2, planted, saved_model("llama"), bug)[0].failed


def test_a_frozen_module_outside_of_layers_is_named_as_a_whole() -> None:
    trained = ["language.layers.0.weight", "language.norm.weight"]
    assert groups._frozen_module("visual.blocks.0.weight", trained) == "visual"
    assert groups._frozen_module("language.embed.tokens.weight", trained) == "language.embed"
    assert groups._frozen_module("language.layers.1.weight", trained) is None
    assert groups._frozen_module("visual.blocks.0.weight", None) is None
