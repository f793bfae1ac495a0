"""`weft verify` of a small config, in pooled ranks, without the comparisons that all commands share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.cases import MESHES, byte_tokenizer, saved_model, world_of
from tests.support.pool import run
from weft.config.commands import SCHEMAS
from weft.config.load import load_config
from weft.launch.options import VerifyOptions
from weft.launch.process import join
from weft.recipes import verify
from weft.verify.harness import Verdict
from weft.verify.plants import planted

COMMON = {"data.path": "owner/data", "step.max_tokens_per_device": 128, "optimizer.eps": 1e-5, "train.timeout": 300}
# Words in keys that stand for models.
MODELS = {"{other}": ("llama", {"vocab_size": 272}), "{teacher}": ("gemma2", {"vocab_size": 264})}


def model(family: str, **changes: Any) -> str:
    path = saved_model(family, **changes)
    if not (Path(path) / "tokenizer.json").exists():
        byte_tokenizer().save_pretrained(path)
    return path


def verdict_of(
    command: str, keys: dict[str, Any], mesh: str = "1", plant: str | None = None, family: str = "llama"
) -> Verdict:
    text = json.dumps({f"mesh.{axis}": size for axis, size in MESHES[mesh].items()} | COMMON | keys)
    for word, (of_family, changes) in MODELS.items():
        text = text.replace(word, model(of_family, **changes)) if word in text else text
    words = [f"{key}={json.dumps(value)}" for key, value in json.loads(text).items()]
    config = load_config([], [f"model.path={model(family, vocab_size=264)}", *words], SCHEMAS[command])
    verdict: Verdict = run(world_of(mesh), _verdict, config, plant)[0]
    return verdict


def _verdict(config: Any, plant: str | None) -> Verdict | None:
    ranks, subject = join("cpu"), verify.VerifiedModel(config.model.path, "")
    with mock.patch.object(verify, "check", return_value=Verdict([])), planted(plant):
        return verify.CHECKS[config.command](config, subject, ranks, VerifyOptions(device="cpu", world=ranks.world))


@cache
def cached_verdict(command: str, keys: str, mesh: str, plant: str | None) -> Verdict:
    """keys: as JSON."""
    return verdict_of(command, json.loads(keys), mesh, plant)
