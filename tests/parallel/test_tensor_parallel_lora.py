"""Adapters under tensor parallelism: they train as peft trains them in one process, whatever layer they adapt, and what
is saved is what one process saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.test_lora import EXPERTS
from tests.support.cases import describe, open_engine, pairs, parity, parity_of_two_steps, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import Sections
from weft.checkpoint import rng
from weft.checkpoint.export import save_adapter
from weft.engine.losses.base import CrossEntropy
from weft.errors import RanksDisagreeError
from weft.models.low_rank import LowRank
from weft.parallel.tp import divide
from weft.verify.adapter import randomize_adapters
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

STEP = awkward_steps(128)[0]
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

# ---------------------------------------------------------------- parity with peft


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    pairs([
        ("llama", "tp2", {"lora": {"rank": 4, "rslora": True, "modules_to_save": ("lm_head",)}}),
        ("llama", "2xtp2", {"lora": {"rank": 3, "alpha": 5.0, "targets": ("all-linear", "lm_head")}}),
        ("qwen3", "tp2", {"lora": {"rank": 4, "targets": ("all-linear", "embed_tokens")}}),
        ("qwen3_moe", "2xtp2", {"lora": {"rank": 2, "targets": EXPERTS}, "model": {"recompute": "full"}}),
        ("gpt_oss", "tp4", {"lora": {"rank": 2, "targets": ("q_proj", "v_proj", "experts.gate_up_proj",
                                                            "experts.down_proj")}}),
        ("phi3_longrope", "tp2", {"lora": {"rank": 4, "targets": FUSED}, "fsdp": {"reduce": "last"}}),
        ("gpt2", "tp2", {"lora": {"rank": 4, "targets": ("all-linear", "wte")}}),
        ("mamba", "tp2", {"lora": {"rank": 4, "targets": ("all-linear",)}}),
    ], [
        ("deepseek_v3", "tp2", {"lora": {"rank": 2}}),
        ("falcon", "tp2", {"lora": {"rank": 2}, "fsdp": {"cpu_offload": True}}),
        ("qwen3", "tp4", {"lora": {"rank": 4, "targets": ("all-linear", "embed_tokens")}}),
        ("phi3_longrope", "tp4", {"lora": {"rank": 4, "targets": FUSED}, "fsdp": {"reduce": "last"}}),
        ("falcon", "2xtp2", {"lora": {"rank": 2}, "fsdp": {"cpu_offload": True}}),
    ]),
)  # fmt: skip
def test_parity(family: str, mesh: str, sections: Sections) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


PARTIAL = divide.find_partial_parameters


def vocabulary_left_out(*args: Any) -> Any:
    outside = ("model.embed_tokens.", "lm_head.")
    return {name: groups for name, groups in PARTIAL(*args).items() if not name.startswith(outside)}


def adapters_left_out(*args: Any) -> Any:
    return {name: groups for name, groups in PARTIAL(*args).items() if ".lora" not in name}


PLANTS = {
    "whole factors of layers are not summed": ("q_proj", adapters_left_out),
    "whole factors of an embedding are not summed": ("embed_tokens", vocabulary_left_out),
    "whole factors of a head are not summed": ("lm_head", vocabulary_left_out),
}


def with_a_bug(path: str, name: str) -> bool:
    target, wrong = PLANTS[name]
    with mock.patch.object(divide, "find_partial_parameters", wrong):
        verdict = parity(path, "tp2", {"lora": {"rank": 4, "targets": (target,)}})
    return verdict is None or verdict.passed


@pytest.mark.parametrize("name", PLANTS)
def test_a_bug_is_seen(name: str) -> None:
    assert not run(2, with_a_bug, saved_model("llama"), name)[0]


# ---------------------------------------------------------------- on disk


def saved(path: str, mesh: str, sections: Sections, folder: str) -> None:
    """New adapters, which are drawn, and those after a step from others."""
    engine = open_engine(path, mesh, **sections)
    save_adapter(engine, Path(folder) / f"new-{mesh}")
    randomize_adapters(engine)
    save_adapter(engine, Path(folder) / f"stirred-{mesh}")
    documents, metas = to_documents(engine, STEP)
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-2)
    save_adapter(engine, Path(folder) / mesh)
    reopened = open_engine(path, mesh, lora={"path": str(Path(folder) / mesh)})
    save_adapter(reopened, Path(folder) / f"again-{mesh}")


def tensors(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize(("family", "targets"), [("qwen3_moe", EXPERTS), ("phi3_longrope", FUSED)])
def test_what_is_saved_is_that_of_one_process(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    sections: Sections = {"lora": {"rank": 2, "targets": targets}}
    for mesh in ("1", "2xtp2", "tp4"):
        run(world_of(mesh), saved, saved_model(family), mesh, sections, str(tmp_path))
    for mesh in ("2xtp2", "tp4"):
        for kind in ("new-", "stirred-"):
            reference, actual = tensors(tmp_path / f"{kind}1"), tensors(tmp_path / f"{kind}{mesh}")
            assert reference.keys() == actual.keys() and all(
                torch.equal(reference[name], actual[name]) for name in reference
            )
        stepped, expected = tensors(tmp_path / mesh), tensors(tmp_path / "1")
        assert all(torch.allclose(stepped[name], expected[name], rtol=0, atol=1e-5) for name in expected)
        reloaded = tensors(tmp_path / f"again-{mesh}")
        assert all(torch.equal(stepped[name], reloaded[name]) for name in stepped)
        configs = [(tmp_path / kind / "adapter_config.json").read_text() for kind in ("1", mesh)]
        assert configs[0] == configs[1]


# ---------------------------------------------------------------- dropout


DROPPED: Sections = {"lora": {"rank": 4, "targets": ("q_proj", "o_proj", "down_proj", "lm_head"), "dropout": 0.3}}


def dropped(path: str, mesh: str, recompute: str) -> dict[str, Tensor]:
    """Gradients of a step whose masks every data rank draws from one seed."""
    engine = open_engine(path, mesh, **DROPPED, model={"recompute": recompute})
    randomize_adapters(engine)
    documents, metas = to_documents(engine, STEP)
    rng.seed_rank(3, engine.mesh.loss_rank)
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    return {name: gradient for name, gradient in engine.gradients() if gradient is not None}


@pytest.mark.parametrize(("first_mesh", "second_mesh"), pairs([("1", "tp2")], [("2", "2xtp2")]))
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_of_tp_drop_what_one_rank_drops(first_mesh: str, second_mesh: str, recompute: str) -> None:
    """Of what all have, all the same; of what each has a part of, its part of one mask."""
    path = saved_model("llama")
    expected, actual = (run(world_of(mesh), dropped, path, mesh, recompute)[0] for mesh in (first_mesh, second_mesh))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((actual[name] - gradient).abs().max()) <= 1e-5 * scale, name


def drops_apart(path: str) -> str:
    """As though each rank of tp were seeded by its own number."""
    engine = open_engine(path, "tp2", **DROPPED)
    documents, metas = to_documents(engine, STEP)
    rng.seed_rank(3, engine.ranks.rank)
    with pytest.raises(RanksDisagreeError) as caught:
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    return str(caught.value)


def test_ranks_of_tp_that_draw_differently_are_found() -> None:
    for message in run(2, drops_apart, saved_model("llama")):
        assert "ranks of one tp group draw different random numbers" in message


def own_masks(path: str) -> dict[str, Tensor]:
    with mock.patch.object(LowRank, "divide"):
        return dropped(path, "tp2", "none")


def test_masks_of_parts_that_are_alike_are_seen() -> None:
    """Each rank drops the same places of its own part: that is no mask of the whole."""
    path = saved_model("llama")
    expected, actual = run(1, dropped, path, "1", "none")[0], run(2, own_masks, path)[0]
    name = "model.layers.0.mlp.down_proj.lora.A"
    assert float((actual[name] - expected[name]).abs().max()) > 1e-2 * float(expected[name].abs().max())
