"""A run that is killed and resumed is the run that was not, bit for bit; on another mesh, the same curve."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.cases import MESHES, pairs, world_of
from tests.support.pool import run
from tests.support.resuming import STEPS, Sections, config_of, equal, inputs, lines, process, state_of, whole_state
from weft.checkpoint import resume
from weft.checkpoint.resume import restore_engine
from weft.checkpoint.state import load_state, read_state
from weft.config.load import load_config
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.launch.process import join
from weft.observe.resume import rates_changed, refused_changes
from weft.parallel.mesh import full_tensor

CASES: dict[str, tuple[str, Sections]] = {
    "1 rank, sync": ("1", {}),
    "1 rank, async, SGD": (
        "1",
        {"checkpoint": {"async_": True}, "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.1}},
    ),
    "2 ranks, sync, fp16 with a loss scale that moves": (
        "2",
        {"fsdp": {"param_dtype": "fp16", "loss_scale": 4.0, "loss_scale_interval": 2}},
    ),
    "2 ranks, async, a row for each document": (
        "2",
        {"checkpoint": {"async_": True}, "step": {"max_tokens_per_device": 48}},
    ),
    "4 ranks, sync, one module in groups of 2, one frozen": (
        "4",
        {"fsdp": {"overrides": {"model.embed_tokens": 2}}, "model": {"freeze": ("model.layers.0.mlp",)}},
    ),
    "HSDP 2x2, async, bf16 state, a replicated module": (
        "2x2",
        {
            "checkpoint": {"async_": True},
            "fsdp": {"overrides": {"model.layers.1.mlp": "replicate"}},
            "optimizer": {"state_dtype": "bf16", "betas": (0.9, 0.95)},
        },
    ),
    "cp 2, documents that are cut": ("cp2", {"step": {"max_tokens_per_device": 24}}),
    "2 x tp 2, async, with an average": (
        "2xtp2",
        {"checkpoint": {"async_": True, "weights": "ema"}, "optimizer": {"ema_decay": 0.9}},
    ),
}


def rates(before: int, now: int, updates: int, step: int, **schedule: Any) -> list[str]:
    """rates_changed of a constant schedule without warm-up that goes on with this one."""
    words = ["model.path=org/m", "data.path=org/d"]
    config = load_config([], [*words, *(f"schedule.{name}={value}" for name, value in schedule.items())])
    old = {"schedule": {"name": "constant", "warmup_steps": 0}, "optimizer": {"lr": config.optimizer.lr}}
    return rates_changed({"config": old, "steps": before, "step": step}, config, now, updates)


def test_a_finished_run_is_not_too_short() -> None:
    constant = {"name": "constant", "warmup_steps": 0}
    assert rates(10, 10, 10, 10, **constant) == []
    assert rates(10, 9, 10, 10, **constant) == ["train.steps, train.epochs: a run of 9 steps ends before step 10"]


def test_the_rate_of_the_last_update_is_compared() -> None:
    """wsd of 10 steps, the last 4 of which fall: the rate of step 7 is the first that differs from a constant one."""
    falling = {"name": "wsd", "warmup_steps": 0, "decay_ratio": 0.4}
    assert rates(10, 10, 6, 6, **falling) == []
    (message,) = rates(10, 10, 7, 7, **falling)
    assert message.startswith("the learning rate of update 7 was")


def test_masters_keep_their_dtype() -> None:
    changed = {"fsdp.master_dtype": ("fp32", "bf16"), "fsdp.param_dtype": ("auto", "bf16")}
    assert refused_changes(changed) == ["fsdp.master_dtype: fp32 -> bf16: it changes the training"]


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ({}, "mesh.pp  2, 1 in the checkpoint: random number generators are seeded again"),
        ({"pp": 2, "tp": 2}, "mesh.tp  1, 2 in the checkpoint: random number generators are seeded again"),
        ({"pp": 2}, None),
    ],
)
def test_ranks_take_up_random_numbers_of_the_same_place_only(
    before: dict[str, int], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many ranks as before, in stages."""
    restored: list[int] = []
    monkeypatch.setattr(resume.rng, "seed_rank", lambda *_: None)
    monkeypatch.setattr(resume.rng, "restore", lambda *_: restored.append(1))
    monkeypatch.setattr(resume, "read_rng", lambda *_: None)
    mesh = SimpleNamespace(tp_size=1, pp_size=2, loss_rank=0)
    engine: Any = SimpleNamespace(ranks=SimpleNamespace(rank=0, world=4), mesh=mesh, device=None)
    state: Any = SimpleNamespace(content={"mesh": before}, world=4, step=3)
    assert resume._take_up_rng(engine, state, 0) == ([] if line is None else [line])
    assert len(restored) == (line is None)


EACH_STEP = ("1 rank, sync", "2 ranks, async, a row for each document")
TABLE = (
    "1 rank, sync", "4 ranks, sync, one module in groups of 2, one frozen",
    "4 -> 2", "2 -> 3", "2 -> tp 2", "2 -> cp 2", "FSDP 4 -> HSDP 2x2", "HSDP 2x2 -> 1", "2 x tp 2 -> 3",
    "ep 4 -> HSDP 2 x ep 2",
)  # fmt: skip
ONCE = (
    "2 ranks, sync, fp16 with a loss scale that moves", "HSDP 2x2, async, bf16 state, a replicated module",
    "cp 2, documents that are cut", "2 x tp 2, async, with an average",
)  # fmt: skip


def named(names: Iterable[str]) -> list[Any]:
    """Cases by their names; those of TABLE are for `make verify-all`."""
    return pairs([(n,) for n in names if n not in TABLE], [(n,) for n in names if n in TABLE])


def chain(folder: Path, mesh: str, sections: Sections, kills: Sequence[int]) -> list[list[float]]:
    """Processes that go on from the last checkpoint; all but the last are killed in the step after one of `kills`."""
    drawn: list[list[float]] = [[] for _ in range(world_of(mesh))]
    for done, end in pairwise((0, *kills, STEPS)):
        part = process(folder, mesh, resume=done > 0, steps=end - done, sections=sections)
        drawn = [before + now for before, now in zip(drawn, part, strict=True)]
    return drawn


def same_run(first: Path, second: Path) -> list[str]:
    """What differs between two runs."""
    weights = [load_file(folder / "checkpoints" / "latest" / "model.safetensors") for folder in (first, second)]
    verdicts = {
        "metrics": lines(first) == lines(second),
        "trainer state": equal(state_of(first, STEPS), state_of(second, STEPS)),
        "weights": equal(weights[0], weights[1]),
    }
    return [name for name, same in verdicts.items() if not same]


def kills() -> list[Any]:
    """(case, steps after which it is killed): the first, at the end of an epoch and in one. The suite kills the cases
    of ONCE in an epoch alone: which documents come next is no matter of the mesh. In the table, the two simplest are
    killed after each step."""
    thrice = [(name, (1, 4, 7)) for name in CASES]
    suite = [(name, (7,) if name in ONCE else steps) for name, steps in thrice if name not in TABLE]
    table = [(name, steps) for name, steps in thrice if name in (*ONCE, *TABLE) and name not in EACH_STEP]
    return pairs(suite, [*table, *((name, tuple(range(1, STEPS))) for name in EACH_STEP)])


@pytest.mark.parametrize(("name", "steps"), kills())
def test_killed_and_gone_on_with_it_is_the_unbroken_run_bit_for_bit(
    name: str, steps: Sequence[int], tmp_path: Path
) -> None:
    mesh, sections = CASES[name]
    expected = process(tmp_path / "whole", mesh, sections=sections)
    drawn = chain(tmp_path / "killed", mesh, sections, steps)
    assert same_run(tmp_path / "whole", tmp_path / "killed") == []
    assert drawn == expected
    tp = MESHES[mesh].get("tp", 1)
    assert len({tuple(rank) for rank in drawn}) == world_of(mesh) // tp  # no two ranks draw the same, but those of tp
    assert all(drawn[rank] == drawn[rank - rank % tp] for rank in range(len(drawn)))


# ---------------------------------------------------------------- with a bug planted


@cache
def unbroken(family: str = "llama") -> Path:
    """A run on two ranks, for those that are compared with it."""
    folder = Path(tempfile.mkdtemp(dir=inputs(family)))
    process(folder / "run", "2", family=family)
    return folder / "run"


def cut(run: Path, step: int, into: Path) -> Path:
    """What a run would have left had it been killed after this step: the folder, without its later checkpoints."""
    shutil.copytree(run, into, symlinks=True)
    for checkpoint in (into / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    return into


def resumed_run_is_the_unbroken_one(plant: str | None) -> bool:
    """Killed after step 5 of 10, in the middle of an epoch, and resumed; the bug is in the process that it concerns."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        saving = plant == "first-shards-only"
        try:
            process(folder, "2", steps=5, plant=plant if saving else None)
            process(folder, "2", resume=True, plant=None if saving else plant)
        except AssertionError as error:  # a rank that raised
            if not any(words in str(error) for words in ("cannot resume from", "bytes of weights written")):
                raise
            return False
        return same_run(unbroken(), folder) == []


# ---------------------------------------------------------------- what a resumed run says and does


def test_lines_and_checkpoints_after_the_one_resumed_from_make_way(tmp_path: Path) -> None:
    """Checkpoints at 3, 6 and 9; killed in step 9, so that two lines have no checkpoint yet."""
    sections: Sections = {"checkpoint": {"every": 3}}
    process(tmp_path / "run", "2", steps=8, sections=sections)
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 9))
    process(tmp_path / "run", "2", resume=True, sections=sections)
    assert lines(tmp_path / "run") == lines(unbroken())
    dropped = (tmp_path / "run" / "metrics.dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in dropped] == [7, 8]
    summaries = [json.loads((run / "summary.json").read_text()) for run in (unbroken(), tmp_path / "run")]
    for key in ("steps", "documents", "tokens", "loss_tokens", "first_losses", "last_losses"):
        assert summaries[0][key] == summaries[1][key]


RESHARDED = {
    "4 -> 2": ("4", "2"),
    "2 -> 3": ("2", "3"),
    "FSDP 4 -> HSDP 2x2": ("4", "2x2"),
    "HSDP 2x2 -> 1": ("2x2", "1"),
    "2 -> tp 2": ("2", "tp2"),
    "2 x tp 2 -> 3": ("2xtp2", "3"),
    "2 -> cp 2": ("2", "cp2"),
    "cp 2 x tp 2 -> 2": ("cp2xtp2", "2"),
}
EXPERTS_RESHARDED = {
    "4, ep 2 -> 3": ("4ep2", "3"),
    "2 -> ep 2 x tp 2": ("2", "ep2xtp2"),
    "ep 4 -> HSDP 2 x ep 2": ("ep4", "2xep2"),
}


@pytest.mark.parametrize("name", named(RESHARDED))
def test_another_mesh_goes_on_with_the_same_state_and_the_same_curve(name: str, tmp_path: Path) -> None:
    before, after = RESHARDED[name]
    go_on(tmp_path / "run", before, after, "llama")


@pytest.mark.parametrize("name", named(EXPERTS_RESHARDED))
def test_other_ranks_of_experts_go_on_with_the_same_state_and_the_same_curve(name: str, tmp_path: Path) -> None:
    before, after = EXPERTS_RESHARDED[name]
    go_on(tmp_path / "run", before, after, "qwen3_moe")


def go_on(folder: Path, before: str, after: str, family: str) -> None:
    process(folder, before, steps=5, family=family)
    written = whole_state(folder, 5)
    # Loaded and saved again by the other mesh, before any step: the elements are the same, bit for bit.
    loaded = run(world_of(after), loaded_whole, str(inputs(family)), str(folder), after)
    assert equal(loaded[0][0], written)
    replicas = 2 if after.startswith("2x") else 1
    # Of tp, each rank reads what all have: norms and routers.
    undivided = [t for name, t in written.items() if t.ndim == 1 or name.endswith("mlp.gate.weight")]
    reread = sum(t.nbytes for t in undivided) if "tp" in after else 0
    assert sum(read for _, read in loaded) == replicas * sum(tensor.nbytes for tensor in written.values()) + reread
    process(folder, after, resume=True, family=family)
    expected, actual = lines(unbroken(family)), lines(folder)
    assert [line["documents"] for line in actual] == [line["documents"] for line in expected]
    assert [line["lr"] for line in actual] == [line["lr"] for line in expected]
    for measured, reference in zip(actual, expected, strict=True):
        assert measured["loss"] == pytest.approx(reference["loss"], rel=1e-4)
        assert measured["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)


def loaded_whole(home: str, folder: str, mesh: str) -> tuple[dict[str, torch.Tensor], int]:
    """Masters and moments as an engine on this mesh has them after loading, gathered; the bytes that this rank read."""
    config = config_of(Path(home), Path(folder), mesh, {})
    engine = Engine(EngineConfig.from_config(config), join("cpu"))
    state = read_state(Path(folder) / "checkpoints" / "step-000005")
    read = load_state(engine, state)
    assert engine.optimizer is not None
    tensors = {}
    for name, parameter in engine.module.named_parameters():
        tensors[f"weights/{name}"] = full_tensor(parameter, engine.divided.cuts.get(name)).clone()
        for key, value in engine.optimizer.state[parameter].items():
            if value.ndim:
                tensors[f"optimizer/{key}/{name}"] = full_tensor(value, engine.divided.cuts.get(name)).clone()
    return tensors, read


def test_a_critic_is_filled_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[Any, Any]] = []
    monkeypatch.setattr(resume, "load_state", lambda engine, state: filled.append((engine, state)))
    monkeypatch.setattr(resume, "read_state", lambda folder: folder)
    monkeypatch.setattr(resume, "run_on_all_ranks", lambda load, ranks: (load(), ""))
    monkeypatch.setattr(resume, "_take_up_rng", lambda engine, state, seed: ["a note"])
    engine, critic, state = (SimpleNamespace(ranks=None, checkpoint=tmp_path) for _ in range(3))
    policy: Any = engine
    of_run: Any = state
    critics: Any = {"critic": critic}
    assert restore_engine(policy, of_run, 0, critics) == ["a note"]
    assert filled == [(engine, state), (critic, tmp_path / "critic")]
