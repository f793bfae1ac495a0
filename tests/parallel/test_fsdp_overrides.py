"""fsdp.overrides: modules that are replicated, or sharded over fewer ranks, beside those that are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.support.cases import (
    ALL_GATHER,
    REDUCE_SCATTER,
    describe,
    open_engine,
    parity,
    parity_of_two_steps,
    saved_model,
    world_of,
)
from tests.support.pool import run
from weft.engine.contract import check_contract
from weft.engine.describe import parameter_rows, unit_rows
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.optim import optimizer
from weft.errors import UserError
from weft.parallel import fsdp
from weft.parallel.mesh import full_tensor
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict
from weft.verify.observed import to_documents

MIXES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "2", {"model.layers.0": "replicate"}),
    ("llama", "2", {"*": "replicate", "*.mlp": "full"}),
    ("llama", "2", {"model.embed_tokens": "replicate", "lm_head": "replicate"}),
    ("llama", "4", {"model.layers": 2, "model.layers.1.self_attn": "replicate"}),
    ("llama", "2x2", {"*.mlp": "replicate"}),
    ("qwen3_moe", "2", {"*.mlp.experts": "replicate"}),
    ("qwen3_moe", "2", {"model.layers.*": "replicate", "*.mlp.experts": "full"}),
    ("qwen3_moe", "4", {"*.mlp.experts": 2, "*.self_attn": "replicate"}),
]
MORE_MIXES = [MIXES[0], MIXES[3]]  # part of the next one; in the suite with reduce=last


@pytest.mark.parametrize(
    ("family", "mesh", "overrides", "reduce"),
    [
        *((*mix, "scatter") for mix in MIXES if mix not in MORE_MIXES),
        *((*mix, "last") for mix in MIXES[3:5]),
        *(pytest.param(*mix, "scatter", marks=pytest.mark.table) for mix in MORE_MIXES),
    ],
    ids=lambda value: str(value)[:60],
)
def test_parity(family: str, mesh: str, overrides: dict[str, Any], reduce: str) -> None:
    sections: dict[str, Any] = {
        "fsdp": {"overrides": overrides, "reduce": reduce},
        "optimizer": {"max_grad_norm": 0.05},  # every step is clipped, so that the weights depend on the norm
        "model": {"recompute": "full" if reduce == "last" else "none"},
    }
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def test_a_group_that_does_not_divide_the_shards_is_the_unit_itself() -> None:
    expected = {(2, 4): 2, (2, 3): True, (3, 3): True, (4, 2): True, (True, 4): True, (False, 4): False}
    assert {arguments: fsdp._reshard(*arguments) for arguments in expected} == expected


def test_parity_with_an_integer_reshard() -> None:
    sections = {"fsdp": {"overrides": {"*.mlp": 2, "lm_head": "replicate"}, "reshard_after_forward": 2}}
    verdict = run(4, parity_of_two_steps, saved_model("llama"), "4", sections)[0]
    assert verdict.passed, describe(verdict)


# ---------------------------------------------------------------- the bugs


@contextmanager
def unsummed() -> Iterator[None]:
    """Gradients of replicated modules stay with their rank."""
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        return original(tensor, *args, **options) if tensor.dtype == torch.float64 else None

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


@contextmanager
def counted_twice() -> Iterator[None]:
    """Every rank adds its copy of a replicated gradient to the norm."""
    original = optimizer.sharding_groups

    def groups(parameter: Any) -> Any:
        return original(parameter) or (dist.group.WORLD,)

    with mock.patch.object(optimizer, "sharding_groups", groups):
        yield


PLANTS = {
    "unsummed": (unsummed, {"gradients, every parameter", "copies on several ranks are equal"}),
    "counted twice": (counted_twice, {"gradient norm, documents 1", "gradient norm along 3 steps"}),
}


def planted(path: str, plant: str) -> Verdict | None:
    with PLANTS[plant][0]():
        return parity(path, "2", {"fsdp": {"overrides": {"model.layers.0": "replicate"}}})


@pytest.mark.parametrize("plant", PLANTS)
def test_parity_sees_the_bug(plant: str) -> None:
    assert PLANTS[plant][1] <= set(run(2, planted, saved_model("llama"), plant)[0].failed)


# ---------------------------------------------------------------- effects


def placed(path: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Shards and bytes of each parameter, and the collectives of one step, on four ranks."""
    engine, log = open_engine(path, "4", fsdp={"overrides": overrides}), Counter()
    documents, metas = to_documents(engine, awkward_steps(128)[1])
    names = (ALL_GATHER, REDUCE_SCATTER, "all_reduce")
    originals = {name: getattr(dist, name) for name in names}

    def watch(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            log[name, dist.get_world_size(options["group"])] += 1
            return originals[name](*args, **options)

        return call

    with mock.patch.multiple(dist, **{name: watch(name) for name in names}):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-3)
    check_contract(engine)
    named = dict(engine.module.named_parameters())
    assert engine.optimizer is not None
    return {
        "ranks": {n: round(p.numel() / p.to_local().numel()) for n, p in named.items()},
        "state": {
            n: round(p.numel() / engine.optimizer.state[p]["exp_avg"].to_local().numel()) for n, p in named.items()
        },
        "log": log,
        "axes": {row["name"]: row["axes"] for row in parameter_rows(engine)},
        "units": {row["name"]: row["sharding"] for row in unit_rows(engine)},
    }


@pytest.mark.covers("fsdp.overrides")
def test_where_parameters_lie() -> None:
    overrides = {"model.layers.0": "replicate", "model.layers.0.mlp": 2, "lm_head": "replicate"}
    for facts in run(4, placed, saved_model("llama"), overrides):
        for name, ranks in facts["ranks"].items():
            mlp = name.startswith("model.layers.0.mlp")
            replicated = name.startswith(("model.layers.0.", "lm_head")) and not mlp
            assert ranks == facts["state"][name] == (1 if replicated else 2 if mlp else 4), name
            assert facts["axes"][name] == (() if replicated else ("dp_shard in groups of 2",) if mlp else ("dp_shard",))
        assert {unit: note for unit, note in facts["units"].items() if note} == {
            "model.layers.0": "replicated", "model.layers.0.mlp": "groups of 2", "lm_head": "replicated",
        }  # fmt: skip
        # Forward and backward: layer 1 and the group of two; root and norm once. Nothing is gathered of what is whole.
        assert facts["log"][ALL_GATHER, 4] == 4
        assert facts["log"][ALL_GATHER, 2] == 2
        assert facts["log"][REDUCE_SCATTER, 4] == 3
        assert facts["log"][REDUCE_SCATTER, 2] == 1
        # Summed over the copies: layer 0 and the head over four, the group of two over two; then the metrics.
        assert facts["log"]["all_reduce", 2] == 1
        assert facts["log"]["all_reduce", 4] == 3


# ---------------------------------------------------------------- checkpoints


def tensors_of(engine: Engine) -> dict[str, Tensor]:
    """Masters and moments by name: what a checkpoint holds."""
    assert engine.optimizer is not None
    out = {}
    for name, parameter in engine.module.named_parameters():
        out[name] = parameter.detach()
        moments = engine.optimizer.state[parameter]
        out |= {f"{key}/{name}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
    return out


def saved_and_loaded(path: str, folder: str) -> bool:
    """Masters and moments of a mixed engine, saved by DCP and loaded into one that is sharded throughout."""
    mixed = open_engine(path, "2", fsdp={"overrides": {"model.layers.0": "replicate"}})
    plain = open_engine(path, "2", model={"init": "random"})
    documents, metas = to_documents(mixed, awkward_steps(128)[0])
    for engine in (mixed, plain):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        engine.apply(1e-3)
    saved, loaded = tensors_of(mixed), tensors_of(plain)
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(loaded, checkpoint_id=folder)
    same = all(torch.equal(full_tensor(saved[name]), full_tensor(loaded[name])) for name in saved)
    for engine in (mixed, plain):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        engine.apply(1e-3)
    pairs = zip(mixed.tensors(), plain.tensors(), strict=True)
    return same and all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for (_, a), (_, b) in pairs)


def test_a_checkpoint_does_not_care(tmp_path: Path) -> None:
    assert all(run(2, saved_and_loaded, saved_model("llama"), str(tmp_path)))


# ---------------------------------------------------------------- refusals


def refusal(path: str, overrides: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        open_engine(path, "1", fsdp={"overrides": overrides})
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("llama", {"model.layer.0": "replicate"}, "'model.layer.0' matches no module with parameters; did you mean"),
        ("llama_tied", {"model.embed_tokens": "replicate"}, "are one tensor (tied)"),
    ],
)
def test_refusals(family: str, overrides: dict[str, Any], words: str) -> None:
    message = run(1, refusal, saved_model(family), overrides)[0]
    assert words in message and message.startswith("fsdp.overrides: ")
