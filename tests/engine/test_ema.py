"""The average of the weights: its numbers, its checkpoints, and which weights a checkpoint's directory holds."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.engine.test_optimizer import full_value
from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import Sections, equal, inputs, lines, process, state_of, whole_state
from weft.checkpoint.state import EMA, WEIGHTS
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.optim.optimizer import Ema
from weft.errors import UserError
from weft.launch.options import ExportOptions
from weft.recipes import export
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

DECAY = 0.75
LAST = 4
SECTIONS: Sections = {
    "optimizer": {"lr": 1e-2, "ema_decay": DECAY},
    "train": {"steps": LAST, "epochs": None, "seed": 3},
    "checkpoint": {"every": 1, "keep": None, "async_": False, "weights": "ema", "dtype": "fp32"},
    "model": {"freeze": ("model.layers.0.mlp",)},
}


def test_by_hand() -> None:
    weight, fixed = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.ones(1), requires_grad=False)
    ema = Ema([weight, fixed], 0.75)
    for value in ([3.0, 2.0], [-1.0, 6.0]):
        weight.data = torch.tensor(value)
        ema.update()
    assert ema.shards[weight].tolist() == [0.875, 3.0]  # 1, 1.5, 0.875 and 2, 2, 3
    assert list(ema.shards) == [weight]


def test_it_is_fp32_over_bf16_masters() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    ema = Ema([weight], 0.999)
    weight.data = torch.full((1,), 2.0, dtype=torch.bfloat16)
    ema.update()
    assert ema.shards[weight].dtype == torch.float32
    assert ema.shards[weight].item() == pytest.approx(1.001)


def averages(path: str, mesh: str) -> dict[str, Any]:
    """Three steps, the second of which is not finite: the average, and that of the weights by the formula."""
    engine = open_engine(path, mesh, optimizer={"ema_decay": 0.5}, fsdp={"cpu_offload": mesh == "2"})
    assert engine.ema is not None
    expected: dict[str, Tensor] = {}
    for number, step in enumerate(awkward_steps(128)):
        weights = {name: full_value(p.detach()).clone() for name, p in engine.module.named_parameters()}
        if not number:
            expected = {name: weight.double() for name, weight in weights.items()}
        documents, metas = to_documents(engine, step)
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        if number == 1:
            for parameter in engine.module.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(torch.nan)
        skipped = engine.apply(1e-2).skipped
        assert skipped == (number == 1)
        if not skipped:
            for name, parameter in engine.module.named_parameters():
                expected[name] = 0.5 * expected[name] + 0.5 * full_value(parameter.detach()).double()
    averaged = {}
    for name, parameter in engine.module.named_parameters():
        shard = engine.ema.shards[parameter]
        assert shard.shape == parameter.to_local().shape  # type: ignore[attr-defined]
        like = parameter.detach().clone()
        like.to_local().copy_(shard)  # type: ignore[attr-defined]
        averaged[name] = full_value(like)
    worst = max(float((averaged[name] - expected[name]).abs().max()) for name in expected)
    moved = max(
        float((averaged[name] - full_value(p.detach())).abs().max()) for name, p in engine.module.named_parameters()
    )
    return {"worst": worst, "moved": moved, "bytes": engine.memory.average, "held": average_bytes(engine)}


def average_bytes(engine: Engine) -> int:
    assert engine.ema is not None
    return sum(shard.nbytes for shard in engine.ema.shards.values())


@pytest.mark.covers("optimizer.ema_decay")
@pytest.mark.parametrize("mesh", ["1", "2", "3"])
def test_after_steps_of_a_model(mesh: str) -> None:
    ranks = run(world_of(mesh), averages, saved_model("llama"), mesh)
    assert max(rank["worst"] for rank in ranks) < 1e-6 < 1e-3 < ranks[0]["moved"]
    assert {rank["bytes"] for rank in ranks} == {max(rank["held"] for rank in ranks)}


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on two ranks, all of them saved."""
    folder = tmp_path_factory.mktemp("ema") / "run"
    process(folder, "2", sections=SECTIONS)
    return folder


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"


def test_the_average_of_every_checkpoint_follows_from_the_one_before(unbroken: Path) -> None:
    states = [whole_state(unbroken, step) for step in range(1, LAST + 1)]
    names = [name.removeprefix(EMA) for name in states[0] if name.startswith(EMA)]
    assert len(names) == 21 - 3 and not any("layers.0.mlp" in name for name in names)  # what is frozen has none
    for before, after in pairwise(states):
        for name in names:
            expected = DECAY * before[EMA + name].double() + (1 - DECAY) * after[WEIGHTS + name].double()
            torch.testing.assert_close(after[EMA + name].double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.covers("checkpoint.weights")
def test_the_directory_holds_the_average_and_the_raw_weights_of_what_is_frozen(unbroken: Path) -> None:
    state, files = whole_state(unbroken, LAST), load_file(checkpoint(unbroken, LAST) / "model.safetensors")
    for name, tensor in files.items():
        assert torch.equal(tensor, state.get(EMA + name, state[WEIGHTS + name])), name
    assert not torch.equal(files["lm_head.weight"], state[WEIGHTS + "lm_head.weight"])


def test_export_writes_either(unbroken: Path, tmp_path: Path) -> None:
    state = whole_state(unbroken, LAST)
    for ema, prefix in ((True, EMA), (False, WEIGHTS)):
        options = ExportOptions(path=str(unbroken), dtype="fp32", output=str(tmp_path / f"out-{ema}"), ema=ema)
        files = load_file(export.run(options) / "model.safetensors")
        assert all(torch.equal(t, state.get(prefix + name, state[WEIGHTS + name])) for name, t in files.items())


def test_resumed_it_is_the_unbroken_run_bit_for_bit(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process(folder, "2", steps=2, sections=SECTIONS)
    process(folder, "2", resume=True, sections=SECTIONS)
    assert equal(state_of(folder, LAST), state_of(unbroken, LAST))
    assert lines(folder) == lines(unbroken)


def test_another_mesh_goes_on_with_it(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process(folder, "2", steps=2, sections=SECTIONS)
    process(folder, "1", resume=True, sections=SECTIONS)
    resumed, expected = whole_state(folder, LAST), whole_state(unbroken, LAST)
    for name in resumed:
        if name.startswith(EMA):
            torch.testing.assert_close(resumed[name], expected[name], rtol=1e-4, atol=1e-6)


def begun_anew(home: str, folder: str) -> None:
    """A process of the run in which the average begins at the weights that are loaded."""
    from tests.support.resuming import attempt
    from weft.checkpoint import resume

    original = resume.load_state

    def load(engine: Any, state: Any) -> int:
        read = original(engine, state)
        for parameter, shard in engine.ema.shards.items():
            shard.copy_(parameter.detach().to_local())
        return read

    with mock.patch.object(resume, "load_state", load):
        attempt(home, folder, "2", True, None, SECTIONS, None)


def test_it_is_seen_where_the_average_begins_anew(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process(folder, "2", steps=2, sections=SECTIONS)
    run(2, begun_anew, str(inputs()), str(folder))
    resumed, expected = whole_state(folder, LAST), whole_state(unbroken, LAST)
    unlike = {name for name in resumed if not torch.equal(resumed[name], expected[name])}
    assert unlike and all(name.startswith(EMA) for name in unlike)


def test_without_trainer_state_the_directory_still_holds_the_average(unbroken: Path, tmp_path: Path) -> None:
    sections = {**SECTIONS, "checkpoint": {**SECTIONS["checkpoint"], "every": 0, "trainer_state": "none"}}
    process(tmp_path / "run", "2", sections=sections)
    files = [load_file(checkpoint(run, LAST) / "model.safetensors") for run in (tmp_path / "run", unbroken)]
    assert equal(files[0], files[1])
    with pytest.raises(UserError, match="contains no master weights to export"):
        export.run(ExportOptions(path=str(tmp_path / "run"), ema=True))


def test_the_average_of_a_run_without_one_is_refused(tmp_path: Path) -> None:
    sections: Sections = {"train": {"steps": 1, "epochs": None}, "schedule": {"warmup_steps": 0}}
    process(tmp_path / "run", "1", sections=sections)
    assert not any(name.startswith(EMA) for name in json.loads(
        (checkpoint(tmp_path / "run", 1) / "trainer_state" / "state.json").read_text())["tensors"])  # fmt: skip
    with pytest.raises(UserError, match="--ema: .* has no average of the weights"):
        export.run(ExportOptions(path=str(tmp_path / "run"), ema=True))
