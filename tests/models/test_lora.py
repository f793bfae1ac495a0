"""LoRA: however a step is cut, adapters train as peft trains them in one process; what is saved is what peft loads."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.cases import describe, open_engine, pairs, parity, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import Sections, inputs, lines, process, whole_state
from tests.support.zoo import tiny_config
from weft.checkpoint.export import save_adapter
from weft.config.schema import LoraConfig, ParameterGroup
from weft.engine.contract import check_contract
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.launch.options import ExportOptions, MergeOptions
from weft.models import hf
from weft.models.lora import first_values
from weft.models.low_rank import linear_hook
from weft.parallel.shards import adapter_files
from weft.parallel.shards.adapter_files import plan_lora
from weft.recipes import export, merge
from weft.verify.adapter import randomize_adapters
from weft.verify.documents import awkward_steps
from weft.verify.observed import gather_readouts, neighbours, one_gradient, to_documents
from weft.verify.peft_reference import PeftReference
from weft.verify.plants import planted
from weft.verify.reference import Reference

EXPERTS = ("all-linear", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
STEPS = awkward_steps(128)
GROUPS = (
    ParameterGroup(match=("transformer.h.1.*.B",), lr_scale=16.0),
    ParameterGroup(match=("*.lora.A",), weight_decay=0.5),
)
BALANCED = {"router_aux_loss": "document", "router_aux_loss_coef": 0.1}

# ---------------------------------------------------------------- parity with peft


@pytest.mark.covers("lora.rank", "lora.alpha", "lora.rslora", "lora.modules_to_save")
@pytest.mark.parametrize(("family", "mesh", "sections"), pairs(
    [
        ("llama", "2", {"lora": {"rank": 4, "rslora": True, "modules_to_save": ("lm_head",)}}),
        ("llama", "2x2", {"lora": {"rank": 3, "alpha": 5.0, "targets": ("q_proj", "*.0.mlp.down_proj", "lm_head")}}),
        ("qwen3", "2", {"lora": {"rank": 4, "targets": ("all-linear", "embed_tokens")}}),
        ("qwen3_moe", "2", {"lora": {"rank": 2, "targets": EXPERTS}, "model": BALANCED}),
        ("llama", "4", {"lora": {"rank": 4}, "fsdp": {"overrides": {"*.self_attn": "replicate", "*.q_proj": 2}}}),
        ("llama", "2", {"lora": {"rank": 4}, "fsdp": {"cpu_offload": True, "reshard_after_forward": False}}),
        ("gpt2", "2", {"lora": {"rank": 4}, "optimizer": {"groups": GROUPS}}),
    ],
    [
        ("llama", "1", {"lora": {"rank": 4}}),
        ("qwen3", "4", {"lora": {"rank": 4, "modules_to_save": ("lm_head", "norm")}}),
        ("qwen3_moe", "1", {"lora": {"rank": 2, "targets": EXPERTS}}),
        ("qwen3_moe", "4", {"lora": {"rank": 2, "targets": EXPERTS}, "model": {"recompute": "full"}}),
    ],
))  # fmt: skip
def test_parity(family: str, mesh: str, sections: Sections) -> None:
    """Base weights, which are compared too, must not move by a bit."""
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def in_bf16(path: str, mesh: str, adapter: str) -> dict[str, Any]:
    """One gradient over a bf16 base, and how everything is stored."""
    engine = open_engine(path, mesh, lora={"path": adapter}, fsdp={"param_dtype": "bf16"})
    loss, gradients, _ = one_gradient(engine, STEPS[0], None)
    documents, metas = to_documents(engine, STEPS[0])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-3)
    check_contract(engine)
    stored = {(p.requires_grad, p.dtype) for p in engine.module.parameters()}
    moved = neighbours(engine, STEPS[0], gather_readouts(engine, STEPS[0]))
    return {"loss": loss, "gradients": gradients, "stored": stored, "weights": engine.memory.weights, "moved": moved}


@pytest.mark.covers("lora.path")
def test_a_bf16_base_under_fp32_adapters_is_within_pefts_own_noise(adapter: str) -> None:
    path, names = saved_model("llama"), file_keys(adapter)
    exact_loss, exact = PeftReference(path, adapter).gradients(STEPS[0])
    loss, noisy = PeftReference(path, adapter, base=torch.bfloat16).gradients(STEPS[0])
    noise = {name: distance(noisy[name], exact[name]) for name in exact}
    for mesh in ("1", "2", "4"):
        for facts in run(world_of(mesh), in_bf16, path, mesh, adapter):
            assert facts["stored"] == {(True, torch.float32), (False, torch.bfloat16)}
            assert facts["moved"] == 0.0
            assert abs(facts["loss"] - exact_loss) < max(3 * abs(loss - exact_loss), 3e-3)
            for name, gradient in facts["gradients"].items():
                stored = names[name]
                assert distance(gradient, exact[stored]) < 3 * noise[stored], name
        assert {facts["weights"] for facts in run(world_of(mesh), in_bf16, path, mesh, adapter)}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def adapter() -> Any:
    """A random adapter for the tiny Llama, as peft writes it."""
    with tempfile.TemporaryDirectory(prefix="weft-lora-") as folder:
        made_by_peft(saved_model("llama"), folder, target_modules="all-linear", r=4, lora_alpha=6)
        yield folder


def made_by_peft(path: str, folder: str, **settings: Any) -> None:
    model = Reference(path).model
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
    wrapped.save_pretrained(folder)


def file_keys(folder: str) -> dict[str, str]:
    """weft's name -> the file's without prefix, for plain linear layers."""
    stored = [name.removeprefix("base_model.model.") for name in load_file(Path(folder) / "adapter_model.safetensors")]
    return {name.replace(".lora_A.weight", ".lora.A").replace(".lora_B.weight", ".lora.B"): name for name in stored}


# ---------------------------------------------------------------- saved, loaded, merged


def trained(path: str, mesh: str, sections: Sections, folder: str) -> dict[str, Any]:
    """One step from random adapters, saved; logprobs with the adapter and, where the base can be read, without."""
    engine = open_engine(path, mesh, **sections)
    randomize_adapters(engine)
    documents, metas = to_documents(engine, STEPS[0])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-2)
    check_contract(engine)
    save_adapter(engine, folder)
    out = {"adapted": engine.readout(engine.plan(metas), documents)}
    if not sections["lora"].get("modules_to_save"):
        with engine.without_adapter():
            out["base"] = engine.readout(engine.plan(metas), documents)
    reopened = open_engine(path, mesh, purpose="inference", lora={"path": folder})
    out["again"] = reopened.readout(reopened.plan(metas), documents)
    return out


@pytest.mark.parametrize(
    ("family", "mesh", "lora"),
    [
        ("llama", "2", {"rank": 4, "rslora": True}),
        pytest.param("qwen3", "1", {"rank": 4, "targets": ("all-linear", "embed_tokens")}, marks=pytest.mark.table),
        ("qwen3", "2", {"rank": 4, "targets": ("*.self_attn.*",), "modules_to_save": ("lm_head",)}),
        ("qwen3_moe", "4", {"rank": 3, "targets": EXPERTS}),
        ("gpt_oss", "2", {"rank": 2, "targets": ("experts.down_proj",)}),
        ("glm4_moe", "1", {"rank": 2}),  # dense layers and shared experts, whose names peft takes for experts
        ("gemma3_text", "1", {"rank": 2, "targets": ("embed_tokens", "lm_head", "v_proj")}),
        ("gpt2", "1", {"rank": 2}),
    ],
)
def test_peft_loads_what_was_saved_and_the_merged_model_equals_it(
    family: str, mesh: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    path, folder = saved_model(family), tmp_path / "adapter"
    ranks = run(world_of(mesh), trained, path, mesh, {"lora": lora}, str(folder))
    merged = merge.run(MergeOptions(path=str(folder)))
    references = {
        "adapted": PeftReference(path, str(folder)), "base": Reference(path), "again": Reference(str(merged)),
    }  # fmt: skip
    for name, plain in references.items():
        for facts in ranks:
            for index, values in facts.get(name, {}).items():
                expected = plain.logprobs(STEPS[0][index][0])[0]
                assert float((values["logprob"] - expected).abs().max()) < 2e-5 * max(1, float(expected.abs().max())), (
                    name
                )
    before = load_file(Path(path) / "model.safetensors")
    after = load_file(merged / "model.safetensors")
    assert {name: t.dtype for name, t in before.items()}.items() <= {name: t.dtype for name, t in after.items()}.items()


def test_without_its_adapter_a_model_is_its_base() -> None:
    assert base_is_read(None)


def base_is_read(plant: str | None) -> bool:
    path = saved_model("llama")
    with tempfile.TemporaryDirectory() as folder:
        readouts = run(1, planted_readout, plant, path, f"{folder}/adapter")[0]
    plain = Reference(path)
    return all(
        float((values["logprob"] - plain.logprobs(STEPS[0][index][0])[0]).abs().max()) < 1e-4
        for index, values in readouts["base"].items()
    )


def planted_readout(plant: str | None, path: str, folder: str) -> dict[str, Any]:
    with planted(plant):
        return trained(path, "1", {"lora": {"rank": 2}}, folder)


def reads_the_base(path: str) -> None:
    engine = open_engine(path, "1", lora={"rank": 2, "modules_to_save": ("lm_head",)})
    with pytest.raises(UserError, match="lora.modules_to_save replaced lm_head"), engine.without_adapter():
        pass


def test_a_base_that_is_not_kept_is_not_read() -> None:
    run(1, reads_the_base, saved_model("llama"))


# ---------------------------------------------------------------- runs


RUN: Sections = {"lora": {"rank": 3, "modules_to_save": ("lm_head",)}}


@pytest.fixture(scope="module")
def unbroken() -> Any:
    """A run of ten steps on one rank."""
    with tempfile.TemporaryDirectory(prefix="weft-lora-") as folder:
        process(Path(folder) / "run", "1", sections=RUN)
        yield Path(folder) / "run"


@pytest.mark.parametrize(("before", "after"), pairs([("1", "3"), ("4", "2xtp2")], [("4", "2"), ("2xtp2", "2")]))
def test_an_adapter_is_resumed_whole_on_another_mesh(before: str, after: str, unbroken: Path, tmp_path: Path) -> None:
    process(tmp_path, before, steps=4, sections=RUN)
    process(tmp_path, after, resume=True, sections=RUN)
    for cut, uncut in zip(lines(tmp_path), lines(unbroken), strict=True):
        assert cut["loss"] == pytest.approx(uncut["loss"], rel=1e-5)
    actual, expected = whole_state(tmp_path, 10), whole_state(unbroken, 10)
    assert actual.keys() == expected.keys()
    assert {name.split("/")[-1].rpartition(".")[2] for name in actual} == {"A", "B", "weight"}
    for name, tensor in actual.items():
        assert not tensor.isnan().any()
        assert torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-5), name


def test_on_another_base_an_adapter_is_not_resumed(tmp_path: Path) -> None:
    """Its config.json is the same, and no checkpoint holds the base."""
    base, sections = tmp_path / "base", {**RUN, "model": {"path": str(tmp_path / "base")}}
    shutil.copytree(inputs() / "model", base)
    process(tmp_path / "run", "1", steps=2, sections=sections)
    weights = load_file(base / "model.safetensors")
    save_file({name: 1.01 * tensor for name, tensor in weights.items()}, base / "model.safetensors")
    with pytest.raises(AssertionError, match=r"model\.path: config\.json or the weights of .*base differ from before"):
        process(tmp_path / "run", "1", resume=True, sections=sections)


def test_a_run_ends_in_an_adapter_that_is_exported_and_merged(tmp_path: Path) -> None:
    process(tmp_path / "run", "2", sections={"lora": {"rank": 2}, "checkpoint": {"every": 0}})
    (checkpoint,) = (p for p in (tmp_path / "run" / "checkpoints").iterdir() if not p.is_symlink())
    files = {file.name for file in checkpoint.iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "trainer_state"}
    assert not {"config.json", "model.safetensors"} & files
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4) and config["target_modules"] == sorted(LLAMA)
    exported = export.run(ExportOptions(path=str(tmp_path / "run"), dtype="bf16"))
    with pytest.raises(UserError, match=r"--format dcp: .* is an adapter: weft merge"):
        export.run(ExportOptions(path=str(tmp_path / "run"), format="dcp"))
    masters, rounded = (load_file(folder / "adapter_model.safetensors") for folder in (checkpoint, exported))
    assert {name: tensor.bfloat16() for name, tensor in masters.items()}.keys() == rounded.keys()
    assert all(torch.equal(masters[name].bfloat16(), rounded[name]) for name in masters)
    merged = merge.run(MergeOptions(path=str(tmp_path / "run"), output=str(tmp_path / "merged")))
    base, after = (load_file(folder / "model.safetensors") for folder in (inputs() / "model", merged))
    name = "model.layers.0.mlp.up_proj"
    delta = masters[f"base_model.model.{name}.lora_B.weight"] @ masters[f"base_model.model.{name}.lora_A.weight"]
    assert torch.allclose(after[f"{name}.weight"], base[f"{name}.weight"] + 2 * delta, atol=1e-6)
    assert torch.equal(after["lm_head.weight"], base["lm_head.weight"])
    assert (merged / "tokenizer.json").is_file() and not (merged / "trainer_state").exists()


LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# ---------------------------------------------------------------- what is adapted


def plan_for(family: str, **keys: Any) -> Any:
    model = hf.build_meta(tiny_config(family), dtype=torch.float32, attention="eager")
    return plan_lora(model, LoraConfig(**{"rank": 2, **keys}))


@pytest.mark.parametrize("family", ["llama", "gpt2", "lfm2", "gpt_oss", "falcon", "phi"])
def test_all_linear_is_pefts(family: str) -> None:
    model = hf.build_meta(tiny_config(family), dtype=torch.float32, attention="eager")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    expected = {
        n.removeprefix("base_model.model.").partition(".lora_A")[0]
        for n, _ in wrapped.named_parameters()
        if "lora_A" in n
    }
    assert {target.module for target in plan_for(family).targets} == expected


@pytest.mark.covers("lora.targets")
def test_targets_by_pattern() -> None:
    assert [t.name for t in plan_for("llama", targets=("*.1.*.q_proj", "embed_tokens")).targets] == [
        "model.embed_tokens", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    assert {t.name for t in plan_for("qwen3_moe", targets=("experts.down_proj",)).targets} == {
        f"model.layers.{n}.mlp.experts.down_proj" for n in (0, 1)
    }
    assert len(plan_for("llama").targets) == 14
    assert "lm_head" not in {t.module for t in plan_for("llama", modules_to_save=("lm_head",), targets=("*",)).targets}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"targets": ("q_prj",)}, "lora.targets: 'q_prj' matches nothing in this model; did you mean"),
        ({"targets": ("self_attn",)}, "contains layers. Write self_attn.*"),
        ({"targets": ("input_layernorm",)}, "cannot be adapted"),
        ({"modules_to_save": ("head",)}, "lora.modules_to_save: 'head' matches no module"),
    ],
)
def test_what_names_nothing_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_for("llama", **keys)
    assert words in str(caught.value)


def test_dropout_of_fused_experts_is_refused() -> None:
    with pytest.raises(UserError, match="lora.dropout cannot be combined with an adapter of .*experts.down_proj"):
        plan_for("qwen3_moe", targets=("experts.down_proj",), dropout=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "of type LOHA"),
        ({"use_dora": True}, "lacks base_model.model.*lora_magnitude_vector"),
        ({"r": 5}, "should be"),
        ({"modules_to_save": ["lm_head"]}, "lacks base_model.model.lm_head.weight"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    changes: dict[str, Any], words: str, adapter: str, tmp_path: Path
) -> None:
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "adapter_model.safetensors").symlink_to(Path(adapter) / "adapter_model.safetensors")
    with pytest.raises(UserError, match=words):
        plan_for("llama", rank=None, path=str(tmp_path))


def written(adapter: str, folder: Path, **changes: Any) -> str:
    """The adapter with other keys in its config."""
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    (folder / "adapter_model.safetensors").symlink_to(Path(adapter) / "adapter_model.safetensors")
    return str(folder)


# A value of each field of peft's LoraConfig by which it is used, and what is said of it; None: it is read as without.
FIELDS: dict[str, tuple[Any, str | None]] = {
    "bias": ("all", "bias: all"), "use_dora": (True, "lacks base_model.model"), "lora_bias": (True, "lora_bias"),
    "rank_pattern": ({"q_proj": 2}, "rank_pattern"), "alpha_pattern": ({"q_proj": 2}, "alpha_pattern"),
    "trainable_token_indices": ([1], "trainable_token_indices"), "layer_replication": ([[0, 2]], "layer_replication"),
    "alora_invocation_tokens": ([1], "alora_invocation_tokens"), "arrow_config": ({"top_k": 2}, "arrow_config"),
    "use_bdlora": ({"nblocks": 2}, "use_bdlora"), "use_qalora": (True, "use_qalora"),
    "megatron_config": ({"a": 1}, "megatron_config"), "velora_config": ({"num_groups": 2}, "velora_config"),
    "monteclora_config": ({"a": 1}, "monteclora_config"), "kasa_config": ({"a": 1}, "kasa_config"),
    "peft_type": ("LOHA", "of type LOHA"), "r": (5, "should be"), "lora_alpha": (0, "lora_alpha: 0 disables"),
    "use_rslora": ("yes", "use_rslora cannot be"), "modules_to_save": (["lm_head"], "lacks base_model.model.lm_head"),
    "target_parameters": ("x", "target_parameters cannot be"), "base_model_name_or_path": (3, "cannot be 3"),
    "init_lora_weights": ("pissa", "init_lora_weights: 'pissa' means"), "revision": ("v2", None),
    "ensure_weight_tying": (True, None), "task_type": ("SEQ_CLS", None), "auto_mapping": ({"a": "b"}, None),
    "peft_version": ("9", None), "inference_mode": (False, None), "target_modules": (["q_proj"], None),
    "exclude_modules": (["x"], None), "layers_to_transform": ([0], None), "layers_pattern": ("layers", None),
    "fan_in_fan_out": (True, None), "lora_dropout": (0.1, None), "megatron_core": ("megatron", None),
    "qalora_group_size": (8, None), "runtime_config": ({"ephemeral_gpu_offload": True}, None),
    "eva_config": ({"rho": 2.0}, None), "corda_config": ({"a": 1}, None), "lora_ga_config": ({"a": 1}, None),
    "loftq_config": ({"loftq_bits": 4}, None),
}  # fmt: skip


def test_every_field_of_an_adapters_config_is_known() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields == FIELDS.keys()
    assert fields == adapter_files.READ | adapter_files.HARMLESS | adapter_files.UNUSED.keys()


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_an_adapters_config_is_read_harmless_or_refused(field: str, adapter: str, tmp_path: Path) -> None:
    value, words = FIELDS[field]
    path = written(adapter, tmp_path, **{field: value})
    if words is None:
        assert plan_for("llama", rank=None, path=path).targets == plan_for("llama", rank=None, path=adapter).targets
        return
    with pytest.raises(UserError, match=words):
        plan_for("llama", rank=None, path=path)


def test_a_feature_of_a_later_peft_is_refused_and_a_note_of_another_trainer_is_not(
    adapter: str, tmp_path: Path
) -> None:
    for name, value in (("use_later", True), ("later_config", {"a": 1})):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=f"uses features that weft does not support: {name}"):
            plan_for("llama", rank=None, path=written(adapter, tmp_path / name, **{name: value}))
    plan_for("llama", rank=None, path=written(adapter, tmp_path, lorap_lr_ratio=2.0, later_config=None))


@pytest.mark.parametrize(
    "begins", ["pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq", "later", {"a": 1}], ids=str
)
def test_an_adapter_that_changes_its_base_is_refused(begins: Any, adapter: str, tmp_path: Path) -> None:
    path = written(adapter, tmp_path, init_lora_weights=begins)
    for read in (lambda: plan_for("llama", rank=None, path=path), lambda: merge.run(MergeOptions(path=path))):
        with pytest.raises(UserError, match="init_lora_weights: .*unchanged base"):
            read()


@pytest.mark.parametrize("begins", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_an_adapter_that_leaves_its_base_is_merged_as_peft_merges_it(begins: Any, adapter: str, tmp_path: Path) -> None:
    path = written(adapter, tmp_path, init_lora_weights=begins)
    merged = merge.run(MergeOptions(path=path, output=str(tmp_path / "merged")))
    ids = torch.arange(5, 40)[None]
    expected = peft.PeftModel.from_pretrained(Reference(saved_model("llama")).model, path)(input_ids=ids).logits
    torch.testing.assert_close(Reference(str(merged)).model(input_ids=ids).logits, expected, rtol=0, atol=1e-4)
    if begins == "mica":
        with pytest.raises(UserError, match="mica trains only A"):
            plan_for("llama", rank=None, path=path)


@pytest.mark.parametrize("begins", ["pissa", "olora"])
def test_what_is_said_of_such_an_adapter_works(begins: str, tmp_path: Path) -> None:
    """Untrained it is the base itself: so is what peft merges, and a sum on the whole base would not be."""
    base = Reference(saved_model("llama")).model
    ids = torch.arange(5, 40)[None]
    before = base(input_ids=ids).logits.detach()
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": begins}
    peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"merge_and_unload\(\)"):
        merge.run(MergeOptions(path=str(tmp_path), base=saved_model("llama")))
    merged = peft.PeftModel.from_pretrained(Reference(saved_model("llama")).model, str(tmp_path)).merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, before, rtol=0, atol=1e-4)


def test_modules_to_save_are_those_of_pefts_rule(tmp_path: Path) -> None:
    """`norm` means input_layernorm, too."""
    made_by_peft(saved_model("llama"), str(tmp_path), target_modules=["q_proj"], r=2, modules_to_save=["norm"])
    plan = plan_for("llama", rank=None, path=str(tmp_path))
    assert {name.rpartition(".")[2] for name in plan.trained} == {"norm", "input_layernorm", "post_attention_layernorm"}


def test_an_embedding_that_peft_saved_whole_is_called_that(tmp_path: Path) -> None:
    model = Reference(saved_model("llama")).model
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2))
    wrapped.save_pretrained(tmp_path, save_embedding_layers=True)
    with pytest.raises(UserError, match=r"lm_head.weight, a complete weight of the base model \(2"):
        plan_for("llama", rank=None, path=str(tmp_path))


def test_weights_that_peft_keeps_tied_are_refused(tmp_path: Path) -> None:
    made_by_peft(saved_model("qwen3"), str(tmp_path), target_modules=["q_proj"], r=2, modules_to_save=["embed_tokens"],
                 ensure_weight_tying=True)  # fmt: skip
    with pytest.raises(UserError, match=r"ensure_weight_tying: true ties lm_head.weight to"):
        plan_for("qwen3", rank=None, path=str(tmp_path))


def test_the_base_of_a_revision_is_not_taken_from_another(adapter: str, tmp_path: Path) -> None:
    path = written(adapter, tmp_path, revision="v2", base_model_name_or_path="someone/model")
    advice = "hf download someone/model --revision v2 --local-dir BASE, then use --base BASE"
    with pytest.raises(UserError, match=advice):
        merge.run(MergeOptions(path=path))


def test_an_adapter_of_another_model_is_refused(adapter: str) -> None:
    with pytest.raises(UserError, match="is it of this model"):
        plan_for("gpt2", rank=None, path=adapter)


# ---------------------------------------------------------------- first values, dropout, what takes no part


def test_first_values_are_pefts_and_come_from_the_seed() -> None:
    a, b = first_values("x.lora.A", (4, 100), 0), first_values("x.lora.B", (6, 4), 0)
    assert float(a.abs().max()) <= 0.1 and float(a.std()) == pytest.approx(0.1 / 3**0.5, rel=0.1)
    assert not b.any()
    assert not first_values("x.lora_embedding.A", (4, 9), 0).any()
    assert first_values("x.lora_embedding.B", (90, 4), 0).std() == pytest.approx(1.0, rel=0.2)
    assert not torch.equal(a, first_values("x.lora.A", (4, 100), 1))
    assert not torch.equal(a, first_values("y.lora.A", (4, 100), 0))


def dropped(path: str) -> list[float]:
    """Losses of the same step: with seed 1 twice, with seed 2, and without dropout in readouts."""
    engine = open_engine(path, "1", lora={"rank": 4, "dropout": 0.5})
    randomize_adapters(engine)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(one_gradient(engine, STEPS[0], None)[0])
    return [*losses, neighbours(engine, STEPS[0], gather_readouts(engine, STEPS[0]))]


@pytest.mark.covers("lora.dropout")
def test_dropout_is_seeded_and_for_training_only() -> None:
    first, repeated, other_step, moved = run(1, dropped, saved_model("llama"))[0]
    assert first == repeated != other_step
    assert moved < 1e-6


def idle(path: str) -> None:
    engine = open_engine(path, "1", lora={"rank": 2})
    owner = engine.module.get_submodule("model.layers.1.mlp.up_proj")
    owner._forward_hooks = type(owner._forward_hooks)(
        (number, hook) for number, hook in owner._forward_hooks.items() if hook is not linear_hook
    )
    documents, metas = to_documents(engine, STEPS[0])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-3)
    with pytest.raises(UserError, match="the adapter of model.layers.1.mlp.up_proj had no gradient"):
        check_contract(engine)


def test_an_adapter_that_takes_no_part_is_found() -> None:
    run(1, idle, saved_model("llama"))


# ---------------------------------------------------------------- what it takes


def test_flops_by_hand() -> None:
    """Two layers of q and o 64 to 64, k and v 64 to 32, gate and up 64 to 80, down 80 to 64."""
    facts = run(1, flops_of, saved_model("llama"))[0]
    assert facts.frozen and facts.trained == 4 * 2 * (2 * 128 + 2 * 96 + 3 * 144)


def flops_of(path: str) -> Any:
    return open_engine(path, "1", lora={"rank": 4}).built.flops
