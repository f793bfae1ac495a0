"""Runs of `weft dpo`, `weft reward` and `weft distill` that are killed and resumed: on the same mesh the unbroken run
bit for bit, on another mesh the same state bit for bit, and the same curve up to the rounding of sums."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.support.cases import MESHES, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import KilledRun, equal, lines, state_of, whole_state
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from weft.checkpoint.save import Saver
from weft.checkpoint.state import load_state, read_state
from weft.config.commands import SCHEMAS
from weft.config.load import load_config
from weft.config.schema import CheckpointConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.launch.options import TrainOptions
from weft.launch.process import join

STEPS = 4
Case = tuple[str, str, dict[str, Any]]
# Name -> command, mesh, keys. Steps have several micro-batches, and pairs are parted.
CASES: dict[str, Case] = {
    "dpo, a reference of the whole step": ("dpo", "2", {"preference.loss": ["aot", "sft"]}),
    "reward, pairs": ("reward", "2", {"eval.every": 2}),
    "distill, an average": ("distill", "2", {"distill.teacher": "average", "optimizer.ema_decay": 0.9,
                                             "distill.alpha": 0.5}),
}  # fmt: skip
TABLE: dict[str, Case] = {
    "dpo, adapters": ("dpo", "2", {"lora.rank": 4, "preference.loss": ["aot", "sft"]}),
    "dpo, kto": ("dpo", "cp2", {"preference.loss": "kto"}),
    "dpo, no cache": ("dpo", "2", {"preference.cache": "off"}),
    "dpo, cached on disk": ("dpo", "2x2", {"preference.cache": "disk"}),
    "dpo, stages": ("dpo", "pp2", {}),
    "dpo, tp": ("dpo", "tp2", {"preference.loss": "ipo"}),
    "reward, stages": ("reward", "pp2", {}),
    "reward, adapters and a head": ("reward", "2x2", {"lora.rank": 4}),
    "reward, classes": ("reward", "tp2", {"reward.loss": "classification"}),
    "distill, a teacher": ("distill", "cp2", {"distill.loss": "jsd"}),
    "distill, kept on disk": ("distill", "2", {"distill.cache": "disk"}),
}


@cache
def home() -> Path:
    """A model, another of its vocabulary, and files of 12 rows: pairs, labelled answers, chats."""
    path, source = Path(tempfile.mkdtemp(prefix="weft-resume-commands-")), random.Random(2)
    for name, changes in (("model", {}), ("other", {"num_hidden_layers": 3})):
        shutil.copytree(saved_model("llama", vocab_size=264, **changes), path / name)
        byte_tokenizer().save_pretrained(path / name)

    def words() -> str:
        return "".join(source.choice("abcdef ") for _ in range(source.randint(2, 25)))

    write_jsonl(path / "pairs.jsonl", *({"prompt": words(), "chosen": "x" + words(), "rejected": "y" + words()}
                                        for _ in range(12)))  # fmt: skip
    write_jsonl(path / "labels.jsonl", *({"prompt": words(), "completion": "x" + words(), "label": n % 3 > 0}
                                         for n in range(12)))  # fmt: skip
    write_jsonl(path / "chats.jsonl", *(chat(("user", words()), ("assistant", "x" + words())) for _ in range(12)))
    return path


def config_of(case: Case, folder: Path, mesh: str, **extra: Any) -> Any:
    """Four steps of four examples, an epoch has three; a checkpoint after two."""
    command, _, keys = case
    labelled = keys.get("preference.loss") == "kto" or "reward.loss" in keys
    data = "chats" if command == "distill" else "labels" if labelled else "pairs"
    of_command = {"distill": {"distill.teacher": f"{home()}/other"},
           "dpo": {"data.cache": f"{folder}-cache"}, "reward": {"eval.path": f"{home()}/{data}.jsonl"}}  # fmt: skip
    overrides = {
        "model.path": f"{home()}/model", "data.path": f"{home()}/{data}.jsonl", "run.dir": str(folder),
        "step.documents": 4, "step.max_tokens_per_device": 48 if "cp" in mesh else 80, "optimizer.lr": 1e-2,
        "train.epochs": None, "train.steps": STEPS, "schedule.warmup_ratio": None, "schedule.warmup_steps": 1,
        "checkpoint.every": 2, "checkpoint.keep": None, "checkpoint.async": False, "checkpoint.trainer_state": "all",
        "track.timing": False, "track.system": False,
        **{f"mesh.{axis}": size for axis, size in MESHES[mesh].items()}, **of_command[command], **keys, **extra,
    }  # fmt: skip
    if overrides.get("distill.cache") == "disk":
        overrides["distill.cache_dir"] = f"{folder}-cache"
    return load_config([], [f"{key}={json.dumps(value)}" for key, value in overrides.items()], SCHEMAS[command])


def attempt(config: Any, resume: bool, steps: int | None) -> None:
    """A process of a run, on one rank; it ends in the step after `steps` of its own, before the update."""
    applied, original = [0], Engine.apply

    def apply(engine: Engine, lr: float) -> Any:
        if applied[0] == steps:
            raise KilledRun
        applied[0] += 1
        return original(engine, lr)

    options = TrainOptions(device="cpu", quiet=True, resume=config.run.dir if resume else None)
    with mock.patch.object(Engine, "apply", apply), suppress(KilledRun):
        importlib.import_module(f"weft.recipes.{config.command}").run(config, options)


def process(case: Case, folder: Path, mesh: str, resume: bool = False, steps: int | None = None, **extra: Any) -> None:
    run(world_of(mesh), attempt, config_of(case, folder, mesh, **extra), resume, steps)


@pytest.mark.parametrize("name", pairs([(name,) for name in CASES], [(name,) for name in TABLE]))
def test_a_killed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Killed in step 3: metrics, weights and trainer state at the end."""
    case = (CASES | TABLE)[name]
    process(case, tmp_path / "whole", case[1])
    process(case, tmp_path / "killed", case[1], steps=2)
    process(case, tmp_path / "killed", case[1], resume=True)
    assert len(lines(tmp_path / "whole")) >= STEPS and lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert equal(state_of(tmp_path / "whole", STEPS), state_of(tmp_path / "killed", STEPS))
    for file in (tmp_path / "whole" / "checkpoints" / "latest").glob("*.safetensors"):
        assert equal(load_file(file), load_file(tmp_path / "killed" / "checkpoints" / "latest" / file.name))


def load_and_save(config: Any, source: str, target: str) -> None:
    """What this mesh has read from a checkpoint, saved."""
    engine = Engine(EngineConfig.from_config(config), join("cpu"))
    load_state(engine, read_state(Path(source)))
    with Saver(engine, Path(target), CheckpointConfig(async_=False), {"config": {}}) as saver:
        saver.save(2, {"epoch": 1, "updates": 2, "summary": {}})


DEFAULT_PAIRS = [("dpo, a reference of the whole step", "1")]
OTHERS_TABLE = [
    ("reward, pairs", "tp2"),
    ("dpo, adapters", "tp2"), ("dpo, kto", "2"), ("dpo, cached on disk", "1"), ("dpo, stages", "2"),
    ("reward, stages", "1"), ("reward, adapters and a head", "1"), ("reward, classes", "2"), ("reward, pairs", "pp2"),
    ("distill, an average", "tp2"), ("distill, a teacher", "1"), ("distill, kept on disk", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "after"), pairs(DEFAULT_PAIRS, OTHERS_TABLE))
def test_another_mesh_goes_on(name: str, after: str, tmp_path: Path) -> None:
    """The state is loaded bit for bit. SGD does not divide rounding by small moments, as AdamW does: its curve on the
    other mesh is that of the unbroken run to 1e-5."""
    case = (CASES | TABLE)[name]
    sgd = {"optimizer.name": "sgd", "optimizer.lr": 0.05}
    process(case, tmp_path / "whole", case[1], **sgd)
    process(case, tmp_path / "parts", case[1], steps=2, **sgd)
    source = tmp_path / "parts" / "checkpoints" / "step-000002"
    (tmp_path / "again").mkdir()
    run(world_of(after), load_and_save, config_of(case, tmp_path / "parts", after, **sgd), str(source),
        str(tmp_path / "again"))  # fmt: skip
    assert equal(whole_state(tmp_path / "again", 2), whole_state(tmp_path / "parts", 2))
    process(case, tmp_path / "parts", after, resume=True, **sgd)
    uninterrupted, parts = lines(tmp_path / "whole"), lines(tmp_path / "parts")
    assert len(uninterrupted) == len(parts) >= STEPS
    for resumed, expected in zip(parts, uninterrupted, strict=True):
        for key in ("step", "lr", "documents", "tokens", "loss_tokens"):  # the same documents in the same order
            assert resumed.get(key) == expected.get(key), (resumed["step"], key)
        for key in ("loss", "grad_norm"):
            assert resumed.get(key) == pytest.approx(expected.get(key), rel=1e-5, abs=1e-6), (resumed["step"], key)
    assert torch.isfinite(torch.tensor([line["loss"] for line in parts if line["step"]])).all()
