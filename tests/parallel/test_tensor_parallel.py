"""Tensor parallelism: gradients and steps of plain transformers, whatever of a model is divided, and what is refused.

Pairs of family and mesh are chosen so that each way of dividing is met: heads of keys and values that are repeated
(qwen3, gpt_oss and phi3 on 4), fused projections (phi3, gpt2, falcon), norms over all heads (olmo2), MLA and shared
experts (deepseek_v3), sinks and biases of experts (gpt_oss), tied and odd vocabularies, several data ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.cases import describe, open_engine, pairs, parity, parity_of_two_steps, saved_model, world_of
from tests.support.pool import run
from tests.support.zoo import tiny_config
from weft.engine.selfcheck import division as division_check
from weft.engine.selfcheck.architecture import examine
from weft.engine.selfcheck.division import Division, check_division
from weft.engine.selfcheck.harness import STATE_TOLERANCE
from weft.errors import UserError
from weft.models import hf, mixer_shards
from weft.models.segments import even_ranges, repeated_ranges
from weft.models.train_module import TrainModule
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.cuts import ShardSpec
from weft.parallel.tp import divide
from weft.parallel.tp.plan import find_tp_plan

CASES = [
    ("llama", "tp2"), ("llama_tied", "2xtp2"), ("gemma3_text", "tp2"), ("qwen3_moe", "2xtp2"), ("deepseek_v3", "tp2"),
    ("olmo2", "tp2"), ("falcon", "tp2"), ("gemma4_text", "tp2"), ("qwen3_next", "tp2"), ("nemotron_h", "tp2"),
]  # fmt: skip
# The suite compares gradients of these families, too: test_a_small_copy_of_each_family_is_divided. Those of the first
# row also run there on real ranks, without a bug, beside those with one: tests/verify/test_plants_on_meshes.py.
TABLE = [
    ("qwen3", "tp4"), ("gpt_oss", "tp2"), ("phi3_longrope", "tp2"), ("gpt2", "tp2"), ("bamba", "tp2"),
    ("gpt_oss", "tp4"), ("olmo2", "tp4"), ("phi3_longrope", "tp4"), ("nemotron_h", "2xtp2"), ("cohere2", "tp2"),
    ("stablelm", "tp2"), ("llama4_text", "tp2"), ("lfm2", "tp2"),
]  # fmt: skip


@pytest.mark.covers("mesh.tp")
@pytest.mark.parametrize(("family", "mesh"), pairs(CASES, TABLE))
def test_steps_are_those_of_plain_transformers(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, {})[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("sections", [
    {"model": {"recompute": "full"}, "fsdp": {"reduce": "last"}},
    {"fsdp": {"reduce": "scatter", "cpu_offload": True}},
    pytest.param({"model": {"router_aux_loss": "document", "router_aux_loss_coef": 0.1}},
                 marks=pytest.mark.table),  # with the bugs of experts on tp2
], ids=["recompute and last", "scatter and offload", "balanced experts"])  # fmt: skip
def test_with_other_knobs(sections: dict[str, Any]) -> None:
    verdict = run(4, parity_of_two_steps, saved_model("qwen3_moe"), "2xtp2", sections)[0]
    assert verdict.passed, describe(verdict)


def test_sums_of_channels_with_gradients_of_weights_later() -> None:
    """The gradient of x_proj's weight is made of that of its own output, not of the sum."""
    path = saved_model("mamba", num_hidden_layers=4)
    verdict = run(4, parity_of_two_steps, path, "pp2vxtp2", {})[0]
    assert verdict.passed, describe(verdict)


def test_an_odd_vocabulary() -> None:
    verdict = run(2, parity_of_two_steps, saved_model("llama_tied", vocab_size=131), "tp2", {})[0]
    assert verdict.passed, describe(verdict)


# ---------------------------------------------------------------- bugs that others had, planted


def gradient_of_a_part(path: str) -> bool:
    """Whether the verdict is that all agrees, where the head's input has a gradient of a part of the vocabulary."""
    division = Division(0.0, sequence=True)
    started = mock.patch("weft.engine.builder.check_division", return_value=division)  # which would refuse it
    wrong = staticmethod(lambda ctx, grad: (grad, None))
    with started, mock.patch.object(divide._SumGradient, "backward", wrong):
        verdict = parity(path, "tp2", {})
    return verdict is None or verdict.passed


def test_a_bug_is_seen() -> None:
    """Many more are in tests/verify/test_plants_on_meshes.py."""
    assert not run(2, gradient_of_a_part, saved_model("llama"))[0]


# ---------------------------------------------------------------- before it starts: a small copy, divided over threads

TOKENS_WHOLE = {"gemma4_text", "falcon", "llama4_text", "gpt2"}
HYBRIDS = (
    "qwen3_5_text", "olmo_hybrid", "kimi_linear", "minimax", "mamba", "mamba2", "nemotron_h", "bamba", "falcon_h1",
    "granitemoehybrid", "zamba2", "recurrent_gemma", "lfm2_moe", "qwen3_5_moe_text",
)  # fmt: skip
DIVIDED = (
    "llama", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "stablelm",
    "cohere2", "lfm2", "qwen3_next", "falcon", "jamba", "llama4_text", "olmo2", "gpt2", "phi", "phi3_longrope",
    "granite", "mixtral", "glm4_moe", *HYBRIDS,
)  # fmt: skip


def divided(family: str, tp: int = 2) -> float:
    config = hf.without_noise(tiny_config(family))
    division = check_division(config, examine(config), tp)
    assert division.sequence == (family not in TOKENS_WHOLE)
    return division.error


@pytest.mark.parametrize("tp", [2, 4])
def test_norms_with_a_weight_for_each_head_are_divided_with_their_heads(tp: int) -> None:
    """Command-R+ has them, and two heads of keys here, which four ranks repeat."""
    config = hf.without_noise(tiny_config("cohere", use_qk_norm=True))
    assert check_division(config, examine(config), tp).error < 1e-5
    module = TrainModule(hf.build_meta(config, dtype=torch.float32, attention="eager"))
    styles = find_tp_plan(module, config, tp).specs
    for leaf, heads in (("q_norm", 4), ("k_norm", 2)):
        style = styles[f"model.layers.0.self_attn.{leaf}.weight"]
        assert (style.dim, [(part.count, part.width) for part in style.segments]) == (0, [(heads, 1)])


@pytest.mark.parametrize("family", [*HYBRIDS, "qwen3_next", "jamba", "lfm2"])
@pytest.mark.parametrize("tp", [2, 4])
def test_mixers_that_carry_state_are_divided(family: str, tp: int) -> None:
    """All of them, where their heads divide; a fused projection of two heads of keys does not divide by four."""
    module = TrainModule(hf.build_meta(tiny_config(family), dtype=torch.float32, attention="eager"))
    mixers = find_tp_plan(module, module.hf_model.config.get_text_config(), tp).mixers
    assert mixers.keys() == (set() if (family, tp) == ("qwen3_next", 4) else module.mixers.keys())


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text", "falcon_h1"])
def test_mixers_on_more_ranks_than_groups_are_divided(family: str) -> None:
    """Keys, B and C of a group are on several ranks, and a norm of a group is over several."""
    assert divided(family, 4) < 1e-4


@pytest.mark.parametrize("family", DIVIDED)
def test_a_small_copy_of_each_family_is_divided(family: str) -> None:
    """States amplify rounding, by how much depends on the processor: a tenth of what is refused is allowed."""
    module = TrainModule(hf.build_meta(tiny_config(family), dtype=torch.float32, attention="eager"))
    assert divided(family) < (STATE_TOLERANCE / 10 if module.mixers else 5e-5)


def test_heads_that_are_repeated_are_checked() -> None:
    assert divided("qwen3", 4) < 5e-5


WRONG: dict[str, tuple[str, Any, str, Any]] = {
    "no sum of outputs": ("gpt2", divide._Sum, "forward", staticmethod(lambda ctx, x, ranks: x.clone())),
    "no sum of gradients": ("llama", divide._SumGradient, "backward", staticmethod(lambda ctx, grad: (grad, None))),
    "copies are not summed": ("qwen3", division_check, "sum_partial_gradients", lambda *_: None),
    "biases of every rank": ("gpt_oss", divide, "share_bias", lambda *_: None),
    "norms over a part of a mixer's heads": (
        "mamba2",
        mixer_shards,
        "mean_square",
        lambda parts, sums: parts.pow(2).mean(-1, keepdim=True),
    ),
    "time steps of a part of the channels": ("mamba", mixer_shards, "all_reduce_autograd", lambda x, ranks: x),
    "norms over a part of the heads": (
        "olmo2",
        divide,
        "_along_last_dim",
        lambda cut, x: replace(cut, ranges=((),) * 2),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_divided_wrongly_is_refused(name: str) -> None:
    family, owner, attribute, wrong = WRONG[name]
    with mock.patch.object(owner, attribute, wrong), pytest.raises(UserError, match="cannot divide model_type"):
        divided(family)


def test_a_family_whose_heads_are_mixed_is_refused() -> None:
    """Differential attention subtracts heads from one another, those of other ranks among them."""
    config = hf.without_noise(transformers.DiffLlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, architectures=["DiffLlamaForCausalLM"],
    ))  # fmt: skip
    with pytest.raises(UserError, match="cannot divide model_type 'diffllama'.*log-probabilities differ"):
        check_division(config, examine(config), 2)


# ---------------------------------------------------------------- what is refused, and how things are dealt


def refused(path: str, mesh: str) -> str:
    try:
        open_engine(path, mesh)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("family", "changes", "mesh", "words"), [
    ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, "tp4",
     ("mesh.tp=4 does not divide the 6 heads of model.layers.0.self_attn.q_proj", "one of 1, 2, 3, 6")),
    ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 3}, "tp4",
     ("3 heads of keys and values", "one of 1, 3")),
    ("opt", {}, "tp2", ("weft has no rule to shard", "Set mesh.tp=1")),
], ids=["heads", "heads of keys", "a matrix that no rule knows"])  # fmt: skip
def test_what_does_not_divide_is_refused_by_name(
    family: str, changes: dict[str, Any], mesh: str, words: tuple[str, ...]
) -> None:
    messages = run(world_of(mesh), refused, saved_model(family, **changes), mesh)
    assert len(set(messages)) == 1
    assert all(part in messages[0] for part in words), messages[0]


def test_things_are_dealt_in_order_and_few_are_repeated() -> None:
    assert even_ranges(5, 2) == [(0, 2), (2, 3)]
    assert even_ranges(8, 4) == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert repeated_ranges(2, 4) == [(0, 1), (0, 1), (1, 1), (1, 1)]


def test_a_cut_of_a_fused_projection_has_a_box_for_each_part() -> None:
    """Of [8, 3], queries 0-3 and keys 4-7, each rank has half of both; FSDP2 holds rows 1 and 2 of its part."""
    ranges = (((0, 2), (4, 2)), ((2, 2), (6, 2)))
    ranks: Any = None
    cut = ShardSpec((8, 3), 0, ranges, (1, 1), 1, ranks)
    assert cut.local_shape() == (4, 3)
    assert cut.boxes(Box((1, 0), (2, 3))) == [
        (Box((3, 0), (1, 3)), Box((1, 0), (1, 3)), 1),
        (Box((6, 0), (1, 3)), Box((2, 0), (1, 3)), 1),
    ]
    weight: Tensor = torch.arange(24.0).view(8, 3)
    assert torch.equal(cut.take(weight), weight[[2, 3, 6, 7]])
