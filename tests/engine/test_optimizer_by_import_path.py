"""Optimizers by import path: exact on shards, resumed bit for bit, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.test_optimizer import full_value, small_model
from tests.support.cases import describe, open_engine, parity, saved_model
from tests.support.pool import run
from weft.checkpoint import state as trainer_state
from weft.checkpoint.save import Saver
from weft.checkpoint.state import find_scalars, load_state, read_state
from weft.config.schema import CheckpointConfig, OptimizerConfig
from weft.engine.contract import check_contract
from weft.engine.describe import dtype_rows
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.optim.custom_optimizer import CustomOptimizerSpec, ShardOptimizer, find_rule
from weft.engine.optim.optimizer import build_optimizer, set_learning_rate
from weft.errors import UserError
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

USABLE: dict[str, dict[str, Any]] = {
    "torch.optim.Adagrad": {"options": {"eps": 1e-6}},
    "torch.optim.RAdam": {"options": {"betas": [0.8, 0.9], "decoupled_weight_decay": True}},
    "torch.optim.NAdam": {},
    "torch.optim.Adamax": {},
    "torch.optim.RMSprop": {"options": {"momentum": 0.9, "centered": True}},
    "torch.optim.Adadelta": {},
    "torch.optim.ASGD": {},
    "torch.optim.AdamW": {"options": {"amsgrad": True, "fused": True}},
    "tests.support.optimizers:Lion": {},
    "tests.support.optimizers:Ramp": {},
    "tests.support.optimizers:TensorRate": {},
}


def rule_of(name: str, *, sharded: bool = True, staged: bool = False, **keys: Any) -> CustomOptimizerSpec:
    config = OptimizerConfig(name=name, **keys)
    return find_rule(config, sharded=sharded, staged=staged, dtype=torch.float32, device=torch.device("cpu"))


# ---------------------------------------------------------------- exact on shards


def steps_are_those_of_the_whole() -> None:
    """Three ranks, a matrix that divides by nothing and one with fewer rows than ranks."""
    for name, keys in USABLE.items():
        sharded, plain = small_model(("dp_shard",), (3,))
        config = OptimizerConfig(name=name, lr=0.01, weight_decay=0.2, **keys)
        rule = rule_of(name, lr=0.01, weight_decay=0.2, **keys)
        optimizer = build_optimizer(sharded.named_parameters(), config, rule)
        decayed = {True: 0.2, False: 0.0}
        reference = rule.make(
            [{"params": [p], "weight_decay": decayed[p.ndim >= 2], "lr_scale": 1.0} for p in plain.parameters()]
        )
        for rate in (0.01, 0.02, 0.005):
            set_learning_rate(optimizer, rate)
            set_learning_rate(reference, rate)
            optimizer.step()
            reference.step()
        for (key, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full_value(p.detach()), q.detach(), rtol=1e-6, atol=1e-7, msg=f"{name}: {key}")
        optimizer.zero_grad()
        assert all(p.grad is None for p in sharded.parameters())


@pytest.mark.covers("optimizer.options")
def test_steps_are_those_of_the_whole() -> None:
    run(3, steps_are_those_of_the_whole)


@pytest.mark.parametrize(("family", "mesh", "name"), [("llama", "2x2", "RAdam"), ("qwen3_moe", "pp2", "Adamax")])
def test_training_is_that_of_one_process(family: str, mesh: str, name: str) -> None:
    optimizer = {"name": f"torch.optim.{name}", "options": {"eps": 1e-5, "betas": [0.9, 0.95]}}
    verdict = run(4 if mesh == "2x2" else 2, parity, saved_model(family), mesh, {"optimizer": optimizer})[0]
    assert verdict.passed, describe(verdict)


def shards_left_behind(path: str) -> Any:
    """Parity where the optimizer steps the shards that it was given first, wherever FSDP2 keeps them now."""
    original = ShardOptimizer.__init__

    def init(self: ShardOptimizer, *arguments: Any) -> None:
        original(self, *arguments)
        for shard in self._shards.values():
            shard.data = shard.data.clone()

    def step(self: ShardOptimizer) -> None:
        for parameter, shard in self._shards.items():
            shard.grad = None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]
        self._optimizer.step()

    with mock.patch.object(ShardOptimizer, "__init__", init), mock.patch.object(ShardOptimizer, "step", step):
        return parity(path, "2", {"optimizer": {"name": "torch.optim.RAdam"}})


def test_parity_sees_shards_that_are_not_the_models() -> None:
    assert "weights after 3 steps" in run(2, shards_left_behind, saved_model("llama"))[0].failed


# ---------------------------------------------------------------- what the engine knows of it


def described(path: str) -> dict[str, Any]:
    engine = open_engine(path, "2", optimizer={"name": "tests.support.optimizers.Lion"})
    take_steps(engine, 1)
    check_contract(engine)
    table = {row["use"]: row["dtype"] for row in dtype_rows(engine)}
    with mock.patch.object(engine, "state_dtypes", {torch.float32}), pytest.raises(RuntimeError, match="average of"):
        check_contract(engine)
    elements = sum(p.to_local().numel() for p in engine.module.parameters())  # type: ignore[attr-defined]
    return {"table": table["optimizer"], "foreseen": engine.memory.optimizer, "held": elements}


def test_dtype_table_contract_and_memory_know_its_state() -> None:
    ranks = run(2, described, saved_model("llama"))
    assert {rank["table"] for rank in ranks} == {"bfloat16"}
    assert ranks[0]["foreseen"] == 2 * max(rank["held"] for rank in ranks)


# ---------------------------------------------------------------- saved and resumed


def take_steps(engine: Engine, count: int, first: int = 0) -> None:
    steps = awkward_steps(128)
    for number in range(first, first + count):
        documents, metas = to_documents(engine, steps[number % len(steps)])
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        assert not engine.apply(1e-3).skipped


def state_tensors(engine: Engine) -> dict[str, Any]:
    """Weights, state and numbers, whole."""
    assert engine.optimizer is not None
    state: dict[str, Any] = dict(find_scalars(engine))
    for name, parameter in engine.module.named_parameters():
        state[name] = full_value(parameter.detach()).clone()
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim:
                state[f"{key} of {name}"] = value.clone()
    return state


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    same = {n: torch.equal(v, second[n]) if isinstance(v, torch.Tensor) else v == second[n] for n, v in first.items()}
    return [name for name in same if not same[name]] + sorted(first.keys() ^ second.keys())


def sections_of(name: str) -> dict[str, Any]:
    return {"optimizer": {"eps": 1e-8, "name": name, **USABLE.get(name, {})}}


def broken(path: str, folder: str, mesh: str, name: str) -> list[str]:
    """Two steps, a checkpoint, two more; what differs where another engine takes the latter two."""
    engine = open_engine(path, mesh, **sections_of(name))
    take_steps(engine, 2)
    home = Path(folder) / name
    if engine.ranks.is_first:
        home.mkdir()
    with Saver(engine, home, CheckpointConfig(async_=False), {}) as saver:
        saver.save(2, {})
        checkpoint = saver.finish()
    reloaded = open_engine(path, mesh, seed=1, **sections_of(name))
    load_state(reloaded, read_state(checkpoint))
    loaded = [f"loaded: {text}" for text in differing(state_tensors(engine), state_tensors(reloaded))]
    for resumed in (engine, reloaded):
        take_steps(resumed, 2, 2)
    return loaded + [f"stepped: {text}" for text in differing(state_tensors(engine), state_tensors(reloaded))]


def all_broken(path: str, folder: str, mesh: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    return {name: broken(path, folder, mesh, name) for name in names}


RESUMED = ("torch.optim.Adagrad", "torch.optim.RAdam", "torch.optim.NAdam", "torch.optim.Adamax", "torch.optim.ASGD",
           "tests.support.optimizers:Lion", "tests.support.optimizers:Ramp")  # fmt: skip


def on_one_rank(path: str, folder: str, name: str) -> tuple[list[str], dict[str, Any]]:
    """Two ranks' checkpoint as one rank reads it, beside what is in its files."""
    engine = open_engine(path, "1", seed=1, **sections_of(name))
    state = read_state(Path(folder) / name / "checkpoints" / "step-000002")
    load_state(engine, state)
    values = state_tensors(engine)
    take_steps(engine, 1, 2)
    return [key for key in values if " of " in key], state.content["scalars"]


def test_resumed_bit_for_bit_and_on_another_mesh(tmp_path: Path) -> None:
    path = saved_model("llama", num_hidden_layers=1)
    assert run(2, all_broken, path, str(tmp_path), "2", RESUMED)[0] == {name: [] for name in RESUMED}
    kinds, numbers = run(1, on_one_rank, path, str(tmp_path), "tests.support.optimizers:Lion")[0]
    assert len(kinds) == len(numbers) == 12  # an average and a count of every parameter
    assert {(n["value"], n["dtype"]) for n in numbers.values()} == {(2, None)}


def numbers_lost(path: str, folder: str) -> list[str]:
    with mock.patch.object(trainer_state, "_number", return_value=0):
        return broken(path, folder, "1", "tests.support.optimizers:Lion")


def test_it_is_seen_where_numbers_begin_anew(tmp_path: Path) -> None:
    differences = run(1, numbers_lost, saved_model("llama", num_hidden_layers=1), str(tmp_path))[0]
    assert any(text.startswith("stepped: model.") for text in differences)


def test_where_nothing_is_sharded_any_optimizer_works_and_is_resumed(tmp_path: Path) -> None:
    path, names = saved_model("llama", num_hidden_layers=1), ("torch.optim.Adafactor", "tests.support.optimizers:Rows")
    assert run(2, all_broken, path, str(tmp_path), "2x1", names)[0] == {name: [] for name in names}


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("torch.optim.Adagrat", {}, r"optimizer.name: torch.optim has no Adagrat"),
        ("no_such_package.Lion", {}, "cannot be imported: No module named 'no_such_package'"),
        ("tests.support.optimizers.not_a_class", {}, "is not a class derived from torch.optim.Optimizer"),
        (
            "torch.optim.Adagrad",
            {"options": {"epsilon": 1}},
            "has no argument `epsilon`. Its arguments: lr_decay, ",
        ),
        (
            "torch.optim.Adagrad",
            {"options": {"eps": -1}},
            "fails in a trial step: ValueError: Invalid epsilon value: -1",
        ),
        (
            "tests.support.optimizers.NoDecay",
            {},
            "optimizer.weight_decay is 0.1, but .* has no argument `weight_decay`",
        ),
        ("torch.optim.Muon", {}, "Muon only supports 2D parameters"),
        ("torch.optim.LBFGS", {"weight_decay": 0.0}, "torch.optim.LBFGS fails in a trial step"),
        ("torch.optim.SparseAdam", {"weight_decay": 0.0}, "does not support dense gradients"),
        ("torch.optim.Adafactor", {}, r"keeps row_var of \[192, 1\] for a parameter of \[192, 64\].*mesh.dp_shard=1"),
        ("tests.support.optimizers.Normed", {}, "updates a tensor differently from its rows, .*mesh.dp_shard=1"),
        ("tests.support.optimizers.Rows", {}, r"keeps rows of \[192\]"),
        ("tests.support.optimizers.JointRule", {}, "keeps largest in its groups, and its value depends on all rows"),
        (
            "tests.support.optimizers.Counts",
            {},
            "keeps state outside of `state` and the numbers in its parameter groups",
        ),
        ("tests.support.optimizers.Remembers", {}, "keeps state that a checkpoint cannot store: norms"),
        ("tests.support.optimizers.OwnRate", {}, "ignores the entry `lr` of its parameter groups"),
    ],
)
def test_refused(name: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        rule_of(name, **keys)


def test_what_is_refused_where_it_is_sharded_is_not_where_it_is_whole() -> None:
    for name in ("torch.optim.Adafactor", "tests.support.optimizers.Normed", "tests.support.optimizers.Rows"):
        rule_of(name, sharded=False)
    rule_of("tests.support.optimizers.NoDecay", weight_decay=0.0)


@pytest.mark.parametrize("name", USABLE)
def test_stages_may_have_what_steps_each_tensor_by_itself(name: str) -> None:
    rule_of(name, staged=True, **USABLE[name])
    rule_of("torch.optim.Adafactor", sharded=False, staged=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("JointRule", r"keeps largest in its groups, and its value depends on all tensors, .*mesh\.pp=1"),
        ("Clipped", r"updates a tensor differently alone than together with others, .*mesh\.pp=1"),
    ],
)
def test_refused_in_stages(name: str, words: str) -> None:
    rule_of(f"tests.support.optimizers.{name}", sharded=False)
    with pytest.raises(UserError, match=words):
        rule_of(f"tests.support.optimizers.{name}", sharded=False, staged=True)


def test_trying_it_draws_no_random_numbers_of_the_run() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    rule_of("torch.optim.RAdam")
    assert torch.equal(before, torch.random.get_rng_state())


def refused_unread(path: str) -> None:
    with (
        mock.patch("weft.engine.builder.build_model", side_effect=AssertionError("a model was built")),
        pytest.raises(UserError, match="row_var"),
    ):
        open_engine(path, "2", optimizer={"name": "torch.optim.Adafactor"})


def test_the_refusal_comes_before_a_model_is_built() -> None:
    run(2, refused_unread, saved_model("llama"))
