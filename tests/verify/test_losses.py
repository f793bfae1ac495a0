"""`weft verify` of dpo, reward, distill and RL compares their losses, gradients, frozen models and training with plain
transformers (test_plants.py shows that each comparison fails)."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.cases import describe, pairs
from tests.support.verified import verdict_of
from tests.support.vision_zoo import saved_vision_model, vision_folder
from tests.verify.test_plants import PREFERENCES, TAUGHT
from weft.config.preference_losses import LOSSES

KTO = PREFERENCES | {"preference.loss": "kto", "preference.desirable_weight": 1.3, "preference.cache": "disk",
                     "data.cache": "cache"}  # fmt: skip
MIX = PREFERENCES | {"preference.loss": ["aot", "bco_pair", "sft"], "preference.weights": [0.5, 0.2, 1.0]}
ADAPTED = {"lora.rank": 4, "optimizer.name": "sgd", "optimizer.eps": None}
TWO = {"data.sources": [{"path": "owner/a", "name": "a"}, {"path": "owner/b", "name": "b"}], "data.path": None}
BASE_TEACHES = ADAPTED | {"distill.teacher": "base", "distill.loss": "reverse_kl", "distill.alpha": 0.1}
TEACHERS = TWO | {"distill.teachers": {"a": "{teacher}", "b": "{other}"}, "distill.loss": "jsd", "distill.alpha": 0.3}
CACHED = TAUGHT | {"distill.cache": "disk", "distill.temperature": 2.0, "distill.temperature_squared": True}


def squared(compared: Any) -> Any:
    """A loss of one's own."""
    return (1 - compared.logit) ** 2 + 0.1 * compared.chosen_nll


def of_every_loss() -> list[tuple[str, str, str, dict[str, Any]]]:
    cases = []
    for name, facts in LOSSES.items():
        keys = {"preference.loss": name, "preference.beta": 0.05} | (PREFERENCES if facts.reference else {})
        if facts.smoothing:
            keys["preference.label_smoothing"] = 0.1
        cases.append(("dpo", "llama", "1", keys))
    for divergence in ("forward_kl", "js_divergence", "alpha_divergence"):
        keys = {"preference.loss": ["sigmoid", "ipo", "hinge"], "preference.f_divergence": divergence}
        cases.append(("dpo", "llama", "1", PREFERENCES | keys))
    return cases


@pytest.mark.parametrize(
    ("command", "family", "mesh", "keys"),
    pairs(
        [
            ("dpo", "qwen3", "2", KTO),
            # The reference, without adapters, has routes of its own.
            ("dpo", "qwen3_moe", "ep2", ADAPTED | {"preference.loss": "kto"}),
            ("distill", "llama", "2", TEACHERS),
            ("reward", "llama", "2", ADAPTED | {"reward.center_rewards_coefficient": 0.05}),
        ],
        [
            *of_every_loss(),
            ("dpo", "llama", "1", PREFERENCES | {"preference.loss": "tests.verify.test_losses:squared"}),
            ("dpo", "llama", "2", ADAPTED), ("dpo", "qwen3_moe", "ep2", PREFERENCES),
            ("dpo", "qwen3", "tp2", PREFERENCES), ("dpo", "llama", "cp2", KTO), ("dpo", "llama", "pp2", MIX),
            ("dpo", "llama", "2x2", MIX), ("distill", "llama", "1", CACHED), ("distill", "qwen3", "tp2", TAUGHT),
            ("distill", "llama", "cp2", TAUGHT), ("distill", "llama", "pp2", TAUGHT),
            ("distill", "llama", "2", BASE_TEACHES),
            ("distill", "qwen3_moe", "ep2", TAUGHT), ("reward", "qwen3", "tp2", {}), ("reward", "llama", "cp2", {}),
            ("reward", "llama", "pp2", {"reward.loss": "regression"}),
            ("reward", "llama", "2", {"reward.loss": "process"}),
            ("reward", "llama", "1", {"reward.loss": "classification", "reward.num_labels": 3}),
        ],
    ),
)  # fmt: skip
def test_training_is_that_of_plain_transformers(command: str, family: str, mesh: str, keys: dict[str, Any]) -> None:
    verdict = verdict_of(command, keys, mesh, family=family)
    assert verdict.passed, describe(verdict)
    prefix = {"dpo": "preferences", "distill": "distillation", "reward": "scores"}[command]
    names = {figure.name for figure in verdict.figures}
    assert {f"{prefix}: gradients, many micro-batches", f"{prefix}: weights after 3 updates"} <= names
    assert ("preferences: z of KTO" in names) == (keys.get("preference.loss") == "kto")


@cache
def vision_path(family: str, layers: int = 2) -> str:
    """A vision model with its tokenizer and processor."""
    folder = Path(tempfile.mkdtemp(prefix="weft-verify-images-"))
    vision_folder(folder, family)
    transformers.AutoModelForImageTextToText.from_pretrained(saved_vision_model(family, layers)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("command", "family", "mesh", "keys"),
    pairs(
        [("dpo", "qwen2_5_vl", "2", {})],
        [
            ("dpo", "gemma3", "1", {"preference.loss": "kto"}), ("dpo", "qwen2_5_vl", "cp2", {}),
            ("dpo", "gemma3", "tp2", ADAPTED), ("dpo", "qwen2_5_vl", "1", {"preference.cache": "disk"}),
            ("distill", "qwen2_5_vl", "2", {}), ("distill", "gemma3", "tp2", {}), ("distill", "gemma3", "1", ADAPTED),
            ("reward", "gemma3", "2", {}), ("reward", "gemma3", "1", {"reward.loss": "regression"}),
            ("reward", "gemma3", "tp2", ADAPTED),
        ],
    ),
)  # fmt: skip
def test_training_on_images_is_that_of_plain_transformers(
    command: str, family: str, mesh: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts have images, which both answers of a pair, the reference and the teacher see."""
    keys = {"model.path": vision_path(family), "step.max_tokens_per_device": 256, **keys}
    if command == "distill":
        keys["distill.teacher"] = vision_path(family, 3)
    if keys.get("preference.cache") == "disk":
        keys["data.cache"] = str(tmp_path)
    verdict = verdict_of(command, keys, mesh)
    assert verdict.passed, describe(verdict)
    assert any(", with images" in remark for remark in verdict.remarks), verdict.remarks
