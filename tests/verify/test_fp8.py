"""`weft verify` of model.transforms=[fp8]: each layer from equal inputs, and the whole beside plain transformers whose
layers round in the same way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.verified import COMMON, model
from weft.config.commands import SCHEMAS
from weft.config.load import load_config
from weft.launch.options import VerifyOptions
from weft.launch.process import join
from weft.recipes import verify
from weft.verify.bugs import FP8_INPUTS, FP8_OUTPUTS
from weft.verify.documents import awkward_steps
from weft.verify.fp8_layers import WEIGHTS, compare_layers
from weft.verify.harness import Figure, Verdict
from weft.verify.narrow import compare_as_configured
from weft.verify.plants import planted

Sections = dict[str, dict[str, Any]]
LAYERS = [FP8_OUTPUTS, FP8_INPUTS, WEIGHTS]
WHOLE = ["readout: logprob", "loss", "gradients, every parameter", "gradients of each token's row"]
RECOMPUTED: Sections = {"model": {"recompute": "full", "tiled_mlp": 16}}
IN_BF16: Sections = {"fsdp": {"param_dtype": "bf16"}}
ADAPTED: Sections = {"lora": {"rank": 4}}
ROUTED = {"num_experts": 16}  # a width that fp8 can have


def compared(path: str, mesh: str, sections: Sections, plant: str | None = None) -> tuple[list[Figure], str]:
    model = {"transforms": ("fp8",), **sections.get("model", {})}
    with planted(plant):
        engine = open_engine(path, mesh, **{**sections, "model": model})
        layers = compare_layers(engine, awkward_steps(128)[0])
        figures, remark = compare_as_configured(engine, path, awkward_steps(128)[0])
    return [*layers, *figures], remark


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    pairs(
        [("qwen3", "2", RECOMPUTED), ("jamba", "1", {}), ("qwen2_moe", "ep2", IN_BF16)],
        [("llama", "1", {}), ("gemma3_text", "cp2", {}), ("llama", "pp2", {}), ("llama", "2", ADAPTED),
         ("llama", "1", IN_BF16), ("deepseek_v3", "2", {}), ("zamba2", "1", {})],
    ),
)  # fmt: skip
def test_layers_and_models_that_round_alike(family: str, mesh: str, sections: Sections) -> None:
    path = saved_model(family, **ROUTED) if family == "jamba" else saved_model(family)
    figures, remark = run(world_of(mesh), compared, path, mesh, sections)[0]
    whole = [f"{name}, fp8" for name in WHOLE[: 3 if "lora" in sections else 4]]
    layers = LAYERS[: 2 if "lora" in sections else 3]
    assert [figure.name for figure in figures] == [*layers, "other documents do not change, configured dtypes", *whole]
    assert [figure for figure in figures if not figure.passed] == []
    assert all(figure.noise and figure.value < 2 * figure.noise for figure in figures if ", fp8" in figure.name), (
        figures
    )
    assert "verdict: at most 4 times the difference of plain transformers in this dtype" in remark


def figure_passes(name: str, plant: str | None) -> bool:
    path = saved_model("jamba", **ROUTED) if plant == "router-in-fp8" else saved_model("llama")
    (figure,) = [figure for figure in run(1, compared, path, "1", {}, plant)[0][0] if figure.name == name]
    return bool(figure.passed)


def test_a_bug_in_few_products_is_seen_in_16_bits() -> None:
    figures, _ = run(1, compared, saved_model("llama"), "1", IN_BF16, "columns-not-rounded")[0]
    assert [figure.name for figure in figures if not figure.passed] == [FP8_INPUTS]


def test_the_command_gives_a_verdict() -> None:
    words = [f"model.path={model('llama', vocab_size=264)}", *(f"{k}={v}" for k, v in COMMON.items())]
    config = load_config([], [*words, "model.transforms=[fp8]"], SCHEMAS["sft"])
    verdict = run(1, _verdict, config)[0]
    assert {*LAYERS, *(f"{name}, fp8" for name in WHOLE)} <= {figure.name for figure in verdict.figures}
    assert verdict.passed and any("'model.transforms=[fp8]': not exact" in remark for remark in verdict.remarks)


def _verdict(config: Any) -> Verdict | None:
    ranks, subject = join("cpu"), verify.VerifiedModel(config.model.path, "")
    return verify.check(config, subject, ranks, VerifyOptions(device="cpu", world=ranks.world))
