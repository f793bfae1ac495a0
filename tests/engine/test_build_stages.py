"""The stages of an engine, run one by one on one rank: what each promises the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.support.cases import saved_model
from tests.support.pool import run
from weft.config.schema import FsdpConfig, ModelConfig, OptimizerConfig, StepConfig
from weft.engine.builder import (
    build,
    build_optimizer_and_ema,
    check_adapters_in_layers,
    check_memory,
    cut_stages,
    fill_weights,
    make_spec,
    shard_model,
)
from weft.engine.config import EngineConfig
from weft.engine.loaded_state import _trained
from weft.errors import UserError
from weft.launch.process import join
from weft.parallel.mesh import full_tensor
from weft.parallel.pp.schedule import Placement

FROZEN = "model.embed_tokens"


def stages(path: str) -> dict[str, Any]:
    """What was there after each stage."""
    config = EngineConfig(
        model=ModelConfig(path=path, freeze=(FROZEN,)),
        fsdp=FsdpConfig(param_dtype="bf16"),
        step=StepConfig(max_tokens_per_device=128),
        optimizer=OptimizerConfig(state_dtype="bf16", ema_decay=0.5),
    )
    facts: dict[str, Any] = {}
    setup = make_spec(config, join("cpu"))
    facts["dtypes"] = setup.precision.master, setup.precision.compute, setup.moments, setup.state_dtypes

    built = build(setup)
    module = built.module
    parameters = dict(module.named_parameters())
    facts["built"] = (
        {p.device.type for p in parameters.values()},
        any(isinstance(p, DTensor) for p in parameters.values()),
    )
    facts["frozen"] = [name for name, p in parameters.items() if not p.requires_grad]

    sharded = shard_model(setup, built)
    parameters = dict(module.named_parameters())
    facts["cut"] = (
        {p.device.type for p in parameters.values()},
        all(isinstance(p, DTensor) for p in parameters.values()),
    )
    elements = sum(p.numel() for p in parameters.values())
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    facts["memory"] = sharded.memory.weights - 4 * elements, sharded.memory.optimizer - 2 * 2 * trained
    check_memory(setup, built, sharded, fill=True)

    report = fill_weights(setup, built, sharded)
    assert report is not None
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    filled = {name: full_tensor(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
    facts["filled"] = filled.keys() == plain.keys(), [n for n in plain if not torch.equal(filled[n], plain[n])]
    facts["storage"] = {t.device for t in [*module.parameters(), *module.buffers()]}, report.tensors

    optimizer, ema = build_optimizer_and_ema(setup, built, sharded)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    moments = [v for state in optimizer.state.values() for key, v in state.items() if key != "step"]
    facts["moments"] = {v.dtype for v in moments}, sum(v.numel() for v in moments) - 2 * trained
    assert ema is not None
    facts["average"] = {v.dtype for v in ema.shards.values()}, sum(v.numel() for v in ema.shards.values()) - trained
    return facts


def test_each_stage_keeps_what_it_promises() -> None:
    (facts,) = run(1, stages, saved_model("llama"))
    bf16, fp32 = torch.bfloat16, torch.float32
    assert facts["dtypes"] == (fp32, bf16, (bf16, bf16), frozenset({bf16}))
    assert facts["built"] == ({"meta"}, False)
    assert len(facts["frozen"]) == 1 and FROZEN in facts["frozen"][0]
    assert facts["cut"] == ({"meta"}, True)
    assert facts["memory"] == (0, 0)
    assert facts["filled"] == (True, [])
    assert facts["storage"][0] == {torch.device("cpu")} and facts["storage"][1] > 0
    assert facts["moments"] == ({bf16}, 0)
    assert facts["average"] == ({fp32}, 0)


def test_costs_of_stages_are_those_of_their_layers_and_of_the_head() -> None:
    costs, head = [1.0, 2.0, 4.0, 8.0, 16.0], 32.0
    interface: Any = None
    stages = cut_stages((costs, head), Placement(2), interface)
    (first, cut), (_, last) = stages.spans
    assert (first, last) == (0, 5)
    assert stages.costs == (sum(costs[:cut]), sum(costs[cut:]) + head)


def test_an_adapter_outside_of_the_layers_is_refused_on_stages() -> None:
    def check(*names: str) -> None:
        module: Any = SimpleNamespace(facts=SimpleNamespace(layers="model.layers"))
        lora: Any = SimpleNamespace(targets=[SimpleNamespace(name=name) for name in names])
        check_adapters_in_layers(module, lora)

    check("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")
    with pytest.raises(UserError, match="lora.targets: lm_head is outside of the decoder layers"):
        check("model.layers.0.self_attn.q_proj", "lm_head")


def test_state_is_loaded_for_trained_weights_under_each_of_their_names() -> None:
    module = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    module["head"].weight = module["embed"].weight
    module["frozen"].requires_grad_(False)
    assert list(_trained(module)) == ["embed.weight", "head.weight", "head.bias"]
