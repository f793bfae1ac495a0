"""fsdp.cpu_offload. On a CPU the policy and equal numbers can be shown; copies to an accelerator cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.support.cases import describe, open_engine, parity_of_two_steps, saved_model, world_of
from tests.support.pool import run
from weft import upstream
from weft.config.schema import FsdpConfig
from weft.engine.contract import check_contract
from weft.engine.losses.base import CrossEntropy
from weft.observe.opening import fsdp_line
from weft.parallel import fsdp
from weft.parallel.fsdp import fsdp_modules
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("mesh", "sections"),
    [
        ("2", {"fsdp": {"reduce": "last"}, "model": {"recompute": "full"}}),
        ("2", {"fsdp": {"prefetch": 2, "overrides": {"model.layers.0": "replicate"}}}),
        ("2x2", {"step": {"max_tokens_per_device": 61}, "optimizer": {"state_dtype": "bf16"}}),
    ],
)
def test_parity(family: str, mesh: str, sections: dict[str, Any]) -> None:
    sections = {**sections, "fsdp": {**sections.get("fsdp", {}), "cpu_offload": True}}
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def policies(path: str, offload: bool, init: str) -> tuple[set[Any], str]:
    """(whether FSDP offloads, whether it pins) of every parameter, and the line at start."""
    engine = open_engine(path, "2", fsdp={"cpu_offload": offload}, model={"init": init})
    documents, metas = to_documents(engine, awkward_steps(128)[1])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-3)
    check_contract(engine)
    assert engine.storage == torch.device("cpu")
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in fsdp_modules(engine.module)]
    owned = [p for group in groups if group is not None for p in group.fsdp_params]
    return {(p.offload_to_cpu, p.pin_memory) for p in owned}, fsdp_line(engine)


@pytest.mark.covers("fsdp.cpu_offload")
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_every_unit_has_the_policy(init: str) -> None:
    for policies_of_rank, line in run(2, policies, saved_model("llama"), True, init):
        assert policies_of_rank == {(True, False)}
        assert line.endswith("parameters, gradients and optimizer state on the host")
    for policies_of_rank, line in run(2, policies, saved_model("llama"), False, init):
        assert policies_of_rank == {(False, False)}
        assert "host" not in line


def pinned_on_cuda(path: str, mesh: str, sections: dict[str, Any]) -> dict[str, bool]:
    """Names of a unit's mesh axes -> whether FSDP would pin the unit's shards if the mesh were of CUDA devices."""
    pinned: dict[str, bool] = {}
    original = fsdp._offload

    def offload(config: FsdpConfig, device_mesh: DeviceMesh) -> OffloadPolicy:
        on_cuda: Any = SimpleNamespace(ndim=device_mesh.ndim, device_type="cuda")
        policy = original(config, on_cuda)
        pinned[" x ".join(device_mesh.mesh_dim_names or ())] = (
            isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        )
        return original(config, device_mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "_offload", offload)
        open_engine(path, mesh, **sections)
    return pinned


@pytest.mark.parametrize(
    ("family", "mesh", "overrides", "expected"),
    [
        ("llama", "2", {}, {"dp_shard": True}),
        ("llama", "2x2", {}, {"dp_replicate x dp_shard": False}),
        ("llama", "2", {"model.layers.0": "replicate"}, {"copies x shards": False, "dp_shard": True}),
        ("llama", "4", {"model.layers.1": 2}, {"copies x shards": False, "dp_shard": True}),
        ("qwen3_moe", "2xep2", {}, {"expert_copies x expert_shards": False, "dp_replicate x dp_shard": False}),
    ],
)
def test_units_that_are_replicated_are_not_pinned(
    family: str, mesh: str, overrides: dict[str, Any], expected: dict[str, bool]
) -> None:
    """Where torch lets go of a reduced gradient under its pinned copy: the blocking copy is the safe one."""
    sections = {"fsdp": {"cpu_offload": True, "overrides": overrides}}
    pinned = run(world_of(mesh), pinned_on_cuda, saved_model(family), mesh, sections)
    assert pinned == [expected] * world_of(mesh)


def test_replicated_units_are_pinned_again_once_torch_keeps_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        def lazy_init(self) -> None:
            self.grad_offload_state = None

    replicated: Any = SimpleNamespace(ndim=2, device_type="cuda")
    config = FsdpConfig(cpu_offload=True)
    assert fsdp._offload(config, replicated) == CPUOffloadPolicy(pin_memory=False)
    monkeypatch.setattr(_fsdp_param_group, "FSDPCommContext", Fixed)
    upstream.hsdp_offload_races.cache_clear()
    try:
        assert fsdp._offload(config, replicated) == CPUOffloadPolicy(pin_memory=True)
    finally:
        upstream.hsdp_offload_races.cache_clear()
