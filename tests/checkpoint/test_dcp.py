"""Directories of torch.distributed.checkpoint: those of others are read bit for bit, on any mesh, with the optimizer's
state; those that weft writes are read by torch."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_load import no_forward, plain, refused
from tests.support.cases import open_engine, saved_model, world_of
from tests.support.foreign_dcp import BETAS, DOCUMENTS, EPS, LR, load, save, save_alone, save_as_verl, train_and_save
from tests.support.pool import run
from tests.support.resuming import equal, process, state_of, whole_state
from weft import cli
from weft.checkpoint.state import OPTIMIZER, WEIGHTS
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.launch.options import ExportOptions
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.cuts import shards_of
from weft.recipes import export

_folder = tempfile.TemporaryDirectory(prefix="weft-dcp-")
ADAMW = {"betas": BETAS, "eps": EPS, "weight_decay": 0.0, "max_grad_norm": None}


@cache
def written(family: str, world: int, tp: int = 1, layout: str = "torch") -> tuple[str, str, dict[str, Any]]:
    """(directory with config.json alone, directory of DCP, what was saved)."""
    path = saved_model(family)
    folder, config = (Path(_folder.name) / f"{family}-{world}-{tp}-{layout}{end}" for end in ("", "-config"))
    result = run(world, train_and_save, path, str(folder), tp, layout)[0]
    config.mkdir()
    shutil.copy(Path(path) / "config.json", config)
    return str(config), str(folder), result


def open_and_step(path: str, weights: str, mesh: str, expected: dict[str, Any], state: bool) -> dict[str, Any]:
    """Open an engine on a directory and take a step. wrong: tensors and moments that differ from what was saved in a
    bit. off: how far the weights are, after the step, from where they should be, and how far they went."""
    optimizer = {**ADAMW, "load_state": state}
    with no_forward():  # no check of the architecture, which other tests have
        engine = open_engine(path, mesh, model={"dcp_weights": weights}, optimizer=optimizer)
    assert engine.loaded is not None
    wrong = differing(engine, expected["saved"]) + (differing_moments(engine, expected["moments"]) if state else [])
    documents = [Document(torch.tensor(ids), torch.ones(len(ids))) for ids in DOCUMENTS]
    plan, local = engine.plan_step(documents)
    engine.accumulate(plan, local, CrossEntropy())
    engine.apply(LR)
    off = went = 0.0
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        for shard in shards_of(tensor, engine.divided.cuts.get(name)):
            region = shard.box.within(whole_box(expected["after"][name]))
            off += (shard.values - expected["after"][name][region]).square().sum().item()
            went += (expected["after"][name] - expected["saved"][name])[region].square().sum().item()
    return {"wrong": wrong, "off": (off / went) ** 0.5, "read": engine.loaded.bytes_read}


def whole_box(tensor: torch.Tensor) -> Box:
    return Box.from_shape(tuple(tensor.shape))


def differing(engine: Engine, saved: dict[str, torch.Tensor]) -> list[str]:
    wrong = []
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        for shard in shards_of(tensor, engine.divided.cuts.get(name)):
            if not torch.equal(shard.values, saved[name][shard.box.within(whole_box(saved[name]))]):
                wrong.append(name)
    return wrong


def differing_moments(engine: Engine, moments: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    wrong = []
    for name, parameter in engine.module.named_parameters():
        state = engine.optimizer.state[parameter]
        assert state.keys() == {"exp_avg", "exp_avg_sq", "step"}
        if state["step"] != moments[name]["step"]:
            wrong.append(f"{name} step")
        for key in ("exp_avg", "exp_avg_sq"):
            for shard in shards_of(state[key], engine.divided.cuts.get(name)):
                moment = moments[name][key]
                if not torch.equal(shard.values, moment[shard.box.within(whole_box(moment))]):
                    wrong.append(f"{name} {key}")
    return wrong


# family, ranks and tp of the writer, its layout, mesh of the reader
CASES = [
    ("llama", 2, 1, "torch", "1"), ("llama", 3, 1, "torchtitan", "2"), ("llama", 4, 2, "torch", "tp2"),
    ("llama", 4, 2, "torch", "pp2"), ("qwen3", 2, 1, "app", "3"), ("qwen3_moe", 2, 1, "torch", "ep2xtp2"),
    pytest.param("qwen3_moe", 2, 1, "torch", "ep2", marks=pytest.mark.table),
]  # fmt: skip


@pytest.mark.covers("optimizer.load_state")
@pytest.mark.parametrize(("family", "world", "tp", "layout", "mesh"), CASES, ids=lambda part: str(part))
def test_another_mesh_goes_on_as_torch_would(family: str, world: int, tp: int, layout: str, mesh: str) -> None:
    """Weights and moments bit for bit; then the step that torch's own AdamW takes on the ranks that saved."""
    config, folder, saved = written(family, world, tp, layout)
    for result in run(world_of(mesh), open_and_step, config, folder, mesh, saved, True):
        assert result["wrong"] == []
        assert result["off"] < 1e-4


# ---------------------------------------------------------------- names


def load_only(
    path: str, weights: str, mesh: str, saved: dict[str, torch.Tensor], moments: dict[str, Any] | None = None
) -> list[Any]:
    """Names of tensors that differ from what was saved, and the bytes of weights that this rank read."""
    with no_forward():
        engine = open_engine(path, mesh, model={"dcp_weights": weights}, optimizer={"load_state": moments is not None})
        assert engine.loaded is not None
        wrong = differing(engine, saved) + (differing_moments(engine, moments) if moments is not None else [])
        return [wrong, engine.loaded.bytes_read]


def made_up_moments(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Multiples of the weights, which lie as they do."""
    return {n: {"exp_avg": 2 * t, "exp_avg_sq": 3 * t, "step": torch.tensor(5.0)} for n, t in tensors.items()}


def in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as torchtitan's llama has them: HuggingFace's two halves of each head, interleaved."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def as_torchtitan(tensors: dict[str, torch.Tensor], *, pairs: bool, new: bool) -> dict[str, torch.Tensor]:
    """HuggingFace's tensors of tiny llama or qwen3 under torchtitan's names. new: those of its later versions."""
    words = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "lm_head" if new else "output",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
        "mlp.gate.": "moe.router.gate.", "self_attn": "attention",
        **{f"{letter}_proj": f"qkv_linear.w{letter}" if new else f"w{letter}" for letter in "qkv"},
    }  # fmt: skip
    renamed, experts = {}, dict[str, dict[int, torch.Tensor]]()
    for name, tensor in tensors.items():
        if pairs and ("q_proj" in name or "k_proj" in name):
            tensor = in_pairs(tensor, 4 if "q_proj" in name else 2)
        parts = name.split(".")
        if "experts" in parts:
            number = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[parts[-2]]
            experts.setdefault(f"layers.{parts[2]}.moe.experts.{number}", {})[int(parts[5])] = tensor
            continue
        for titan_name, weft_name in words.items():
            name = name.replace(titan_name, weft_name)
        renamed[name.removeprefix("model.")] = tensor
    return renamed | {
        name: torch.stack([by_number[e] for e in sorted(by_number)]) for name, by_number in experts.items()
    }


TITANS = [("llama", True, False, "3"), ("llama", True, True, "tp2"), ("qwen3_moe", False, True, "ep2")]


@pytest.mark.parametrize(("family", "pairs", "new", "mesh"), TITANS, ids=lambda part: str(part))
def test_torchtitans_own_names(family: str, pairs: bool, new: bool, mesh: str, tmp_path: Path) -> None:
    """Boxes that end inside of heads, and experts that lie in one tensor; the moments lie as the weights do."""
    path = saved_model(family)
    tensors = load_file(Path(path) / "model.safetensors")
    titan = as_torchtitan(tensors, pairs=pairs, new=new)
    assert len(titan) < len(tensors) or family == "llama"
    state = {f"state.{n}.{key}": t for n, entries in made_up_moments(titan).items() for key, t in entries.items()}
    save({**titan, "optimizer": state}, tmp_path / "step-10")
    expected = plain(path).state_dict()
    size = sum(tensor.nbytes for tensor in tensors.values())
    moments = made_up_moments(expected)
    for wrong, read in run(world_of(mesh), load_only, path, str(tmp_path / "step-10"), mesh, expected, moments):
        assert wrong == []
        assert read < size


PREFIXES = {
    "none": ("llama", lambda name: name),
    "model": ("llama", lambda name: f"model.{name}"),
    "app.model": ("qwen3", lambda name: f"app.model.{name}"),
    "compiled": ("llama", lambda name: f"_orig_mod.{name}"),
    "in the middle": ("llama", lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module.")),
    "of the base model": ("qwen3", lambda name: name.removeprefix("model.")),
    "experts apart": ("qwen3_moe", lambda name: f"module.{name}"),
}


@pytest.mark.covers("model.dcp_weights")
@pytest.mark.parametrize("name", PREFIXES)
def test_what_names_stand_under(name: str, tmp_path: Path) -> None:
    family, rename = PREFIXES[name]
    path = saved_model(family)
    renamed = {n: rename(n) for n in load_file(Path(path) / "model.safetensors")}
    save_alone(path, tmp_path / "saved", renamed, optimizer={"step": torch.tensor(3)}, epoch=2)
    wrong, _ = run(1, load_only, path, str(tmp_path / "saved"), "1", plain(path).state_dict())[0]
    assert wrong == []


@pytest.mark.parametrize(("family", "world", "mesh"), [("llama", 3, "tp2"), ("qwen3_moe", 2, "ep2")])
def test_verls_file_of_each_rank(family: str, world: int, mesh: str, tmp_path: Path) -> None:
    """Shards of uneven sizes, and experts that are fused, as verl's FSDP2 saves them."""
    path, folder = saved_model(family), tmp_path / "global_step_1" / "actor"
    saved = run(world, save_as_verl, path, str(folder))[0]
    for wrong, _ in run(world_of(mesh), load_only, path, str(folder), mesh, saved):
        assert wrong == []


def test_what_is_refused_of_verl(tmp_path: Path) -> None:
    path = saved_model("llama")
    run(4, save_as_verl, path, str(tmp_path / "hsdp"), 2)
    text = refused(path, weights=str(tmp_path / "hsdp"))
    assert "its mesh has other axes than one that shards" in text and "python -m verl.model_merger merge" in text
    run(2, save_as_verl, path, str(tmp_path / "two"))
    file = tmp_path / "two" / "model_world_size_2_rank_1.pt"
    shutil.copy(tmp_path / "two" / "model_world_size_2_rank_0.pt", file)
    assert f"{file} cannot be read: it is the file of rank 0" in refused(path, weights=str(tmp_path / "two"))
    file.unlink()
    assert f"{file} is missing" in refused(path, weights=str(tmp_path / "two"))
    torch.save({"w": torch.ones(2)}, tmp_path / "two" / "model_world_size_3_rank_0.pt")
    assert "several world sizes" in refused(path, weights=str(tmp_path / "two"))


# ---------------------------------------------------------------- written by weft


@cache
def trained(family: str) -> Path:
    """A run of two steps on two ranks."""
    folder = Path(_folder.name) / f"run-{family}"
    process(folder, "2", family=family, sections={"train": {"steps": 2, "epochs": None}, "optimizer": {"lr": LR}})
    return folder


def export_to(output: Path, source: Path | str, **options: Any) -> Path:
    return export.run(ExportOptions(path=str(source), output=str(output), dtype="fp32", **options))


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_torch_reads_what_is_exported(family: str, tmp_path: Path) -> None:
    """As dcp.load fills a state dict, bit for bit what a HuggingFace export holds; a tied weight under both names."""
    run_folder = trained(family)
    files = load_file(export_to(tmp_path / "hf", run_folder) / "model.safetensors")
    written = export_to(tmp_path / "dcp", run_folder, format="dcp", optimizer=True)
    names = {**files, **({"lm_head.weight": files["model.embed_tokens.weight"]} if family == "llama_tied" else {})}
    into = {name: torch.zeros_like(tensor) for name, tensor in names.items()}
    moments = {name: {"exp_avg": torch.zeros_like(tensor), "step": torch.zeros(())} for name, tensor in files.items()}
    load({**into, "optimizer": {"state": moments}}, written)
    assert all(torch.equal(into[name], tensor) for name, tensor in names.items())
    state_tensors = whole_state(run_folder, 2)
    assert all(state["step"] == 2 for state in moments.values())
    for name, state in moments.items():
        assert ".experts." in name or torch.equal(state["exp_avg"], state_tensors[f"{OPTIMIZER}exp_avg/{name}"]), name
    stored = (written / "__0_0.distcp").stat().st_size
    state = sum(tensor.nbytes for tensor in files.values()) * 2
    assert stored < sum(tensor.nbytes for tensor in files.values()) + state + 3000 * 4 * len(files)


def test_it_is_a_source_again(tmp_path: Path) -> None:
    """With the optimizer's state, on another mesh: the run that goes on from it is in the place of the old one."""
    run_folder = trained("qwen3_moe")
    written = export_to(tmp_path / "dcp", run_folder, format="dcp", optimizer=True)
    results = run(2, masters_and_moments, str(written), str(written), "ep2", str(run_folder))
    assert results == [[], []]
    back = export_to(tmp_path / "hf", written, model=str(written))
    for name, tensor in load_file(export_to(tmp_path / "straight", run_folder) / "model.safetensors").items():
        assert torch.equal(load_file(back / "model.safetensors")[name], tensor)


def masters_and_moments(path: str, weights: str, mesh: str, run_folder: str) -> list[str]:
    """Names of what differs between an engine opened on an export, and the trainer state that was exported."""
    with no_forward():
        engine = open_engine(path, mesh, model={"dcp_weights": weights}, optimizer={"load_state": True})
    saved = whole_state(Path(run_folder), 2)
    wrong = differing(engine, {name.removeprefix(WEIGHTS): t for name, t in saved.items() if name.startswith(WEIGHTS)})
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for entry, tensor in saved.items():
        if entry.startswith(OPTIMIZER):
            key, _, name = entry.removeprefix(OPTIMIZER).partition("/")
            moments.setdefault(name, {"step": torch.tensor(2.0)})[key] = tensor
    return wrong + differing_moments(engine, moments)


# ---------------------------------------------------------------- runs


def test_a_run_begins_with_it_and_is_resumed(tmp_path: Path) -> None:
    """Steps of the optimizer go on from those of the old run. Resumed in another process, it is the unbroken run bit
    for bit."""
    run_folder = trained("llama")
    written = export_to(tmp_path / "dcp", run_folder, format="dcp", optimizer=True)
    sections = {
        "model": {"dcp_weights": str(written)}, "train": {"steps": 4, "epochs": None},
        "optimizer": {"lr": LR, "load_state": True},
    }  # fmt: skip
    process(tmp_path / "whole", "2", sections=sections)
    process(tmp_path / "cut", "2", steps=2, sections=sections)
    shutil.rmtree(written)
    model_section = {
        "path": str(tmp_path / "cut" / "checkpoints" / "step-000002")
    }  # in place of the directory that is gone
    process(tmp_path / "cut", "2", resume=True, sections={**sections, "model": model_section})
    assert equal(state_of(tmp_path / "whole", 4), state_of(tmp_path / "cut", 4))
    assert state_of(tmp_path / "whole", 4)["optimizer/step/model.norm.weight"]["value"] == 6
    assert (tmp_path / "whole" / "checkpoints" / "latest" / "tokenizer.json").is_file()


def test_a_state_under_numbers_is_refused(tmp_path: Path) -> None:
    """ROLL saves the state dict of torch's optimizer itself. Its weights are taken, and the optimizer starts anew."""
    config, folder, saved = written("llama", 2, 1, "roll")
    assert "under parameter numbers instead of names" in refused_state(config, folder)
    wrong, _ = run(1, load_only, config, folder, "1", saved["saved"])[0]
    assert wrong == []


def refused_state(path: str, weights: str, **optimizer: Any) -> str:
    with no_forward():
        try:
            open_engine(path, "1", model={"dcp_weights": weights}, optimizer={"load_state": True, **optimizer})
        except UserError as error:
            return str(error)
    return ""


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, weight = saved_model("llama"), "model.norm.weight"
    tensors = load_file(Path(path) / "model.safetensors")
    state = {
        name: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": torch.tensor(3.0)} for name, tensor in tensors.items()
    }
    without = {name: moments for name, moments in state.items() if name != weight}
    cases = {
        "none": ({}, "contains no optimizer state"),
        "lacking": (without, f"lacks the state of {weight} (exp_avg), {weight} (exp_avg_sq), {weight} (step)"),
        "of amsgrad": (
            {n: {**moments, "max_exp_avg_sq": moments["exp_avg"]} for n, moments in state.items()},
            "of another optimizer",
        ),
        "of another shape": ({**state, weight: {**state[weight], "exp_avg": torch.ones(3)}}, "and its weight is [64]"),
        "with an odd step": (
            {**state, weight: {**state[weight], "step": torch.tensor(-1.0)}},
            "several step counts, or none",
        ),
    }
    for name, (entries, words) in cases.items():
        save({**tensors, **({"optim": {"state": entries}} if entries else {})}, tmp_path / name)
        assert words in refused_state(path, str(tmp_path / name)), name
    assert "of another optimizer (exp_avg, exp_avg_sq)" in refused_state(
        path, str(tmp_path / "lacking"), name="sgd", momentum=0.9
    )
    sgd = {name: {"momentum_buffer": tensor} for name, tensor in tensors.items()}
    save({**tensors, "optimizer": {"state": sgd}}, tmp_path / "sgd")
    assert refused_state(path, str(tmp_path / "sgd"), name="sgd", momentum=0.9) == ""


def test_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_alone(saved_model("llama"), tmp_path / "saved")
    for words, text in (
        (["run", "--optimizer"], "--optimizer needs --format dcp"),
        (["run", "--model", "m", "--format", "dcp"], "remove --check, --ema and --format"),
        ([str(tmp_path / "saved")], "is another trainer's checkpoint: set --model to"),
    ):
        assert cli.main(["export", *words]) == 2
        assert text in capsys.readouterr().err
    options = ["--model", saved_model("llama"), "--dtype", "fp32", "--output", str(tmp_path / "hf")]
    assert cli.main(["export", str(tmp_path / "saved"), *options]) == 0
    expected = load_file(Path(saved_model("llama")) / "model.safetensors")
    actual = load_file(tmp_path / "hf" / "model.safetensors")
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)
