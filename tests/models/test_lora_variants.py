"""DoRA, initial values made from the base's weights, and LoRA+, against peft in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from torch import Tensor

from tests.support.cases import describe, engine_config, open_engine, parity, saved_model, world_of
from tests.support.pool import run
from weft.checkpoint.export import save_adapter
from weft.engine.losses.base import CrossEntropy
from weft.engine.optim.groups import param_group_rules
from weft.launch.options import MergeOptions
from weft.parallel.shards.adapter_files import file_names
from weft.recipes import merge
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents
from weft.verify.peft_reference import PeftReference, nf4_and_back
from weft.verify.plants import planted

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
RATE = 1e-3


def lora(**changes: Any) -> dict[str, Any]:
    return {"lora": {"rank": 4, **changes}, "optimizer": {"weight_decay": 0.0}}


@pytest.mark.covers("lora.dora", "lora.init")
@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    [
        ("llama", "2xtp2", lora(dora=True, base="nf4")),
        pytest.param("qwen3_moe", "ep2", lora(dora=True), marks=pytest.mark.table),
        pytest.param("gpt2", "2", lora(dora=True), marks=pytest.mark.table),
        pytest.param("qwen2", "tp2", lora(dora=True), marks=pytest.mark.table),
        pytest.param("llama", "pp2", lora(dora=True, rslora=True), marks=pytest.mark.table),
        pytest.param("llama", "tp2", lora(init="pissa"), marks=pytest.mark.table),
        pytest.param("llama", "pp2", lora(init="olora", dora=True), marks=pytest.mark.table),
        pytest.param("qwen3_moe", "ep2", lora(init="pissa_niter_16"), marks=pytest.mark.table),
    ],
)  # fmt: skip
def test_parity(family: str, mesh: str, sections: dict[str, Any]) -> None:
    """Three steps, with random adapters."""
    verdict = run(world_of(mesh), parity, saved_model(family, **(WIDE if family == "llama" else {})), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def first_steps(path: str, mesh: str, sections: dict[str, Any], folder: str, plant: str | None = None) -> Any:
    """(Loss of a first step, gradients by the file's names, the file after two steps is in `folder`)."""
    with planted(plant):
        engine = open_engine(path, mesh, **sections)
        documents, metas = to_documents(engine, awkward_steps(128)[0])
        metrics = engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        trained = [name for name in engine.whole_parameters() if engine.lora is not None and engine.lora.trains(name)]
        stored = file_names(trained)
        gradients = {
            stored[name].removeprefix("base_model.model."): grad.clone()
            for name, grad in engine.gradients() if name in stored and grad is not None
        }  # fmt: skip
        engine.apply(RATE)
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        engine.apply(RATE)
        save_adapter(engine, folder)
    return float(metrics["loss"]), gradients


def of_peft(path: str, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """(Loss, gradients) of the first step of peft's own adapters of that kind."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)
    reference = PeftReference.__new__(PeftReference)
    reference.model = peft.get_peft_model(plain, config).eval()
    reference.plain, reference.device = plain, "cpu"
    reference.balance, reference.whole_step, reference.optimizer, reference.scale = 0.0, False, None, 1.0
    return reference.gradients(awkward_steps(128)[0])


@pytest.mark.parametrize(
    ("mesh", "changes", "options"),
    [
        ("2", {"init": "pissa"}, {"init_lora_weights": "pissa"}),
        ("tp2", {"init": "olora", "dora": True}, {"init_lora_weights": "olora", "use_dora": True}),
    ],
)
def test_first_values_and_gradients_are_pefts(
    mesh: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Also the saved adapter: on the whole base, peft computes what the trained model computes."""
    path, folder = saved_model("llama", **WIDE), tmp_path / "adapter"
    loss, gradients = run(world_of(mesh), first_steps, path, mesh, lora(**changes), str(folder))[0]
    # In a process of its own: what other tests have set in this one changes the order of sums, which SVDs amplify.
    expected_loss, expected = run(1, of_peft, path, options)[0]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        actual = gradients[name]
        if ".lora_A." in name:
            assert not actual[4:].any()
            actual = actual[:4]
        elif ".lora_B." in name:
            assert not actual[:, 4:].any()
            actual = actual[:, :4]
        assert float((actual - gradient).abs().max()) <= 2e-5 * max(float(gradient.abs().max()), 1e-2 * largest), name


def test_loftq_begins_near_the_weight_and_merges_into_the_rounded_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = saved_model("llama", **WIDE), tmp_path / "run" / "checkpoints" / "step-000002"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("lora: {base: nf4, init: loftq}\n")
    run(1, first_steps, path, "1", lora(base="nf4", init="loftq"), str(folder))
    name, start = "model.layers.0.mlp.up_proj", run(1, first_values_of, path)[0]
    plain = load_file(Path(path) / "model.safetensors")[f"{name}.weight"]
    rounded = nf4_and_back(plain)
    u, s, vh = torch.linalg.svd(plain - rounded, full_matrices=False)
    assert torch.allclose(start, (u[:, :4] * s[:4]) @ vh[:4], atol=1e-5)
    adapter = load_file(folder / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    merged = load_file(merge.run(MergeOptions(path=str(folder))) / "model.safetensors")
    assert torch.allclose(merged[f"{name}.weight"], rounded + 2.0 * b @ a, atol=1e-6)
    assert "by 0.00% of their norm on average" in capsys.readouterr().out
    merge.run(MergeOptions(path=str(folder), base_format="compute", output=str(tmp_path / "other")))
    printed = capsys.readouterr().out
    assert "--base-format nf4 merges into that base" in printed and "by 0.00%" not in printed


def first_values_of(path: str) -> Tensor:
    """s B A of a layer before training."""
    engine = open_engine(path, "1", **lora(base="nf4", init="loftq"))
    adapter = engine.module.get_submodule("model.layers.0.mlp.up_proj.lora")
    product = adapter.scale * adapter.B.full_tensor() @ adapter.A.full_tensor()
    return product.detach()


@pytest.mark.covers("lora.plus_ratio")
def test_lora_plus_is_pefts() -> None:
    path = saved_model("llama", **WIDE)
    config = engine_config(path, "1", lora={"rank": 4, "plus_ratio": 16.0})
    rates = run(1, rates_by_name, path)[0]
    plain = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(path), peft.LoraConfig(r=4, target_modules="all-linear")
    )
    optimizer = create_loraplus_optimizer(plain, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16.0)
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    expected = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert sorted(rates.values()) == sorted(expected.values())
    assert {rate for name, rate in rates.items() if name.endswith(".B")} == {16.0}
    assert {rate for name, rate in rates.items() if name.endswith(".A")} == {1.0}
    assert len(config.optimizer.groups) == 1


def rates_by_name(path: str) -> dict[str, float]:
    engine = open_engine(path, "1", lora={"rank": 4, "plus_ratio": 16.0})
    rules = param_group_rules(engine.module.named_parameters(), engine.config.optimizer)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    return {names[id(parameter)]: rule.lr_scale for parameter, rule in rules.items()}
