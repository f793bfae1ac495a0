"""Every planted bug of tensor, context and pipeline parallelism is reached, and caught by the check its entry names."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.parallel import test_context_parallel, test_tensor_parallel_weights
from tests.parity import test_vision_parity
from tests.recipes import test_eval
from tests.support.cases import describe, open_engine, saved_model
from tests.support.pool import run
from tests.support.vision_zoo import saved_vision_model
from tests.verify.test_plants import BALANCED, PlantCase, figure_passes, of_the_mesh, one_step
from weft.checkpoint import export
from weft.errors import RanksDisagreeError
from weft.parallel.shards.walker import walk
from weft.verify.bugs.context_parallel import HELD_OUT_CUT, SAMPLES
from weft.verify.bugs.tensor_parallel import REPLICA_CHECK, WALKED
from weft.verify.harness import Verdict
from weft.verify.plants import PLANTS, planted

FOUR_LAYERS = (("num_hidden_layers", 4),)
QWEN3, QWEN3_4 = PlantCase("qwen3", "tp2"), PlantCase("qwen3", "tp4")
CASES = {
    "head-norms-apart": QWEN3,
    "routers-apart": PlantCase("qwen3_moe", "tp2"),
    "repeated-heads-apart": QWEN3_4,
    "repeated-heads-twice": QWEN3_4,
    "sums-made-again": QWEN3,
    "sums-of-every-micro-batch": QWEN3,
    "tied-head-twice": PlantCase("llama_tied", "tp2"),
    "balance-per-tp-rank": PlantCase("qwen3_moe", "tp2", BALANCED.sections),
    "bias-of-every-rank": PlantCase("gpt2", "tp2"),
    "expert-bias-of-every-rank": PlantCase("gpt_oss", "tp2"),
    "sinks-of-another-rank": PlantCase("gpt_oss", "tp2"),
    "fused-cut-as-one": PlantCase("phi3_longrope", "tp2"),
    "border-embedded-twice": PlantCase("qwen3", "tp2", special=True),
    "padding-in-every-part": PlantCase("qwen3", "tp2", special=True),
    "mixer-norm-of-own-heads": PlantCase("bamba", "tp2"),
    "state-runs-into-the-next": PlantCase("mamba2", "cp4u4"),
    "state-begins-at-the-cut": PlantCase("mamba2", "cp2u2"),
    "windows-end-at-the-cut": PlantCase("gemma3_text", "cp2"),
    "windows-forgotten": PlantCase("gemma3_text", "cp2"),
    "sinks-of-the-first-heads": PlantCase("gpt_oss", "cp2u2"),
    "tied-weight-not-summed": PlantCase("qwen3", "pp2"),
    "tied-weight-steps-apart": PlantCase("qwen3", "pp2"),
    "tied-weight-counted-twice": PlantCase("qwen3", "pp2"),
    "tied-weight-summed-per-stage": PlantCase("qwen3", "pp2i", changes=FOUR_LAYERS),
    "stages-in-another-order": PlantCase(mesh="pp2i", changes=FOUR_LAYERS),
    "balance-of-own-layers": PlantCase("qwen3_moe", "pp2", BALANCED.sections),
    "last-weights-forgotten": PlantCase(mesh="pp2z"),
    "weights-after-the-sum": PlantCase(mesh="pp2z"),
    "repeated-keys-multiplied": PlantCase("qwen3", "cp2u2", changes=(("num_key_value_heads", 1),)),
}
USUAL = {
    "tensor_parallel": PlantCase(mesh="tp2"), "context_parallel": PlantCase(mesh="cp2"),
    "expert_parallel": PlantCase("mixtral", "ep2"), "pipeline_parallel": PlantCase(mesh="pp2"),
}  # fmt: skip
WITH_IMAGES = {
    "features-in-the-order-of-the-row": "qwen2_5_vl", "images-see-beyond-themselves": "gemma3",
    "images-see-by-another-place": "gemma3",
}  # fmt: skip
SHORT = {"step": {"max_tokens_per_device": 64}}


def case_of(name: str) -> PlantCase:
    axis = PLANTS[name].replacement.__module__.rpartition(".")[2]
    return CASES.get(name, USUAL[axis])


# ---------------------------------------------------------------- checks that are no figure of `weft verify`


def ranks_agree(plant: str | None) -> bool:
    """Whether two steps end without an error that says which ranks differ in what."""
    return all(run(2, two_steps, plant, saved_model("llama"), 0.3 if plant == "dropout-apart" else 0.0))


def two_steps(plant: str | None, path: str, dropout: float) -> bool:
    lora = {"rank": 4, "targets": ("q_proj",), "dropout": dropout} if dropout else {}
    with planted(plant):
        engine = open_engine(path, "tp2", lora=lora)
        try:
            one_step(engine)
            one_step(engine)
        except RanksDisagreeError:
            return False
    return True


def walked(plant: str | None) -> bool:
    return all(run(4, walked_as_stored, plant, saved_model("qwen3")))


def walked_as_stored(plant: str | None, path: str) -> bool:
    """Whether the walker gives what the files have; two heads of keys on four ranks."""
    engine = open_engine(path, "tp4")
    manifest, stored = export.manifest_of(engine), test_tensor_parallel_weights.tensors_of(Path(path))
    with planted(plant):
        try:
            stream = walk(engine.local_tensors(), engine.built.mappings, manifest, engine.divided.cuts)
            walked = {name: tensor.clone() for name, tensor in stream}
        except RuntimeError:
            return False
    return all(torch.equal(tensor, stored[name]) for name, tensor in walked.items())


def ratios_of_whole_samples(plant: str | None) -> bool:
    expected, _ = run(1, test_context_parallel.policy_step, saved_model("qwen3"), "1", "gspo")[0]
    metrics = run(2, planted_ratios, plant, saved_model("qwen3"))[0]
    return all(math.isclose(metrics[name], value, rel_tol=1e-5, abs_tol=1e-7) for name, value in expected.items())


def planted_ratios(plant: str | None, path: str) -> dict[str, float]:
    with planted(plant):
        metrics, _ = test_context_parallel.policy_step(path, "cp2", "gspo")
    return metrics


def held_out_of_cut_documents(plant: str | None) -> bool:
    measured = test_eval.on_mesh("cp2", "llama", plant, SHORT)
    means = {name: test_eval.plain_means("llama", name)[0] for name in test_eval.SETS}
    return all(math.isclose(measured[name]["eval/loss"] or 0.0, mean, rel_tol=3e-6) for name, mean in means.items())


@cache
def verdict_of_images(plant: str | None, family: str) -> Verdict:
    verdict: Verdict = run(2, planted_images, plant, saved_vision_model(family))[0]
    return verdict


def planted_images(plant: str | None, path: str) -> Verdict | None:
    with planted(plant):
        return test_vision_parity.parity(path, "cp2", {}, steps=1)


TESTS: dict[str, Callable[[str | None], bool]] = {
    REPLICA_CHECK: ranks_agree,
    "weft.parallel.tp.divide.random_difference": ranks_agree,
    WALKED: walked,
    SAMPLES: ratios_of_whole_samples,
    HELD_OUT_CUT: held_out_of_cut_documents,
}


@cache
def passes_without(caught_by: str) -> bool:
    return TESTS[caught_by](None)


@pytest.mark.parametrize("name", [name for name in PLANTS if of_the_mesh(name)])
def test_planted_bug_is_caught(name: str) -> None:
    caught_by = PLANTS[name].caught_by
    if name in WITH_IMAGES:
        verdicts = [verdict_of_images(plant, WITH_IMAGES[name]) for plant in (None, name)]
        assert verdicts[0].passed, describe(verdicts[0])
        without, with_it = (caught_by not in verdict.failed for verdict in verdicts)
    elif caught_by in TESTS:
        without, with_it = passes_without(caught_by), TESTS[caught_by](name)
    else:
        without, with_it = (figure_passes(case_of(name), caught_by, plant) for plant in (None, name))
    assert without, f"{caught_by} fails without the bug"
    assert not with_it, f"{caught_by} does not catch it"
