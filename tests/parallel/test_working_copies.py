"""One data rank: how often parameters are copied to the compute dtype, and that nothing else differs."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cases import open_engine, saved_model
from tests.support.pool import run
from weft.engine.batch.document import Document
from weft.engine.losses.base import CrossEntropy
from weft.parallel import fsdp
from weft.parallel.fsdp import WorkingCopies, fsdp_modules
from weft.parallel.mesh import local_shard
from weft.verify.documents import awkward_steps

SEVERAL_MICRO_BATCHES = {"step": {"max_tokens_per_device": 64}}


class Copies(TorchDispatchMode):
    """Elements that are copied or divided, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if name in ("aten::copy_", "aten::_to_copy", "aten::div.Tensor", "aten::div_.Tensor"):
            self.elements[name] += args[0].numel()
        return out


def documents() -> list[Document]:
    return [Document(torch.tensor(i), torch.tensor(m, dtype=torch.float32)) for i, m in awkward_steps(128)[0]]


def a_step(path: str, sections: dict[str, Any], steps: int) -> tuple[Counter[str], list[Tensor], int, int]:
    """(Elements by operation in the last step's micro-batches; weights afterwards; trained elements; micro-batches)."""
    engine = open_engine(path, "1", **{**SEVERAL_MICRO_BATCHES, **sections})
    for _ in range(steps):
        plan, local = engine.plan_step(documents())
        rows = engine.rows(plan, local, CrossEntropy()).ahead()
        with Copies() as copies:
            engine.accumulate(plan, rows, CrossEntropy())
        assert all(not name or "weight" in name or "lora" in name for name, _ in engine.module.named_parameters())
        engine.apply(1e-3)
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    return (
        copies.elements,
        [local_shard(p.detach()).clone() for p in engine.module.parameters()],
        trained,
        plan.micro_batches,
    )


def test_kept_copies_are_made_once_a_step() -> None:
    """Each gather of a parameter in bf16 is a cast and a copy."""
    results = []
    for reshard in (True, False):
        sections = {"fsdp": {"param_dtype": "bf16", "reshard_after_forward": reshard}}
        results.append(run(1, a_step, saved_model("llama"), sections, 2)[0])
    (freed, weights, elements, micro_batches), (retained, same, _, _) = results
    assert micro_batches >= 3
    saved = (freed["aten::copy_"] - retained["aten::copy_"]) / elements
    assert saved > 0.8 * (2 * micro_batches - 1)  # the units that always stay gathered until backward save less
    assert freed["aten::_to_copy"] - retained["aten::_to_copy"] > 0.8 * (2 * micro_batches - 1) * elements
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_gradients_are_not_divided_by_one() -> None:
    counts, _, elements, _ = run(1, a_step, saved_model("llama"), {}, 1)[0]
    assert counts["aten::div.Tensor"] + counts["aten::div_.Tensor"] < elements / 10


def packed_into(path: str, mesh: str) -> tuple[int, int]:
    """(Reductions of a step's only micro-batch, those whose packed gradients are the unit's gradients afterwards)."""
    engine, same = open_engine(path, mesh, step={"max_tokens_per_device": 4096}), list[bool]()
    original = _fsdp_param_group.foreach_reduce

    def foreach_reduce(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        results = original(parameters, *args, **kwargs)
        gradients = [local_shard(parameter.sharded_param.grad) for parameter in parameters]
        packed = results[0].untyped_storage().data_ptr()
        same.append(all(gradient.untyped_storage().data_ptr() == packed for gradient in gradients))
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_reduce", foreach_reduce)
        plan, local = engine.plan_step(documents())
        assert plan.micro_batches == 1
        engine.accumulate(plan, local, CrossEntropy())
    return len(same), sum(same)


def test_gradients_of_one_rank_are_packed_once() -> None:
    """FSDP would keep the packed ones beside them until the next unit's backward is done."""
    count, same = run(1, packed_into, saved_model("llama"), "1")[0]
    assert count == same > 1
    assert run(2, packed_into, saved_model("llama"), "2")[0][1] == 0


def test_a_frozen_base_is_not_copied() -> None:
    sections = {"lora": {"rank": 4}, "fsdp": {"param_dtype": "bf16"}}
    counts, weights, elements, micro_batches = run(1, a_step, saved_model("llama"), sections, 1)[0]
    base = sum(w.numel() for w in weights) - elements
    assert base > 4 * elements
    assert counts["aten::copy_"] < 2 * micro_batches * (elements + base / 10)


def frozen_and_trained(path: str, mesh: str) -> tuple[set[type], set[type]]:
    engine = open_engine(path, mesh, lora={"rank": 4})
    kinds: tuple[set[type], set[type]] = (set(), set())
    for parameter in engine.module.parameters():
        kinds[parameter.requires_grad].add(DTensor if isinstance(parameter, DTensor) else torch.nn.Parameter)
    return kinds


def test_a_frozen_base_is_sharded_over_several_ranks() -> None:
    assert run(1, frozen_and_trained, saved_model("llama"), "1")[0] == ({torch.nn.Parameter}, {DTensor})
    for mesh in ("2", "tp2", "pp2"):  # also where each holds a part of it
        assert run(2, frozen_and_trained, saved_model("llama"), mesh)[0] == ({DTensor}, {DTensor})


def decisions(path: str, mesh: str, peaks: list[int]) -> list[bool]:
    engine = open_engine(path, mesh, fsdp={"param_dtype": "bf16"})
    plan, local = engine.plan_step(documents())
    engine.accumulate(plan, local, CrossEntropy())
    copies = WorkingCopies(engine.module, False, torch.device("cuda"))
    decided = []
    with pytest.MonkeyPatch.context() as patch:
        for peak in peaks:
            device = SimpleNamespace(
                max_memory_allocated=lambda device, peak=peak: peak,
                mem_get_info=lambda device: (100_000_000, 0), memory_reserved=lambda device: 0,
            )  # fmt: skip
            patch.setattr(fsdp.torch, "cuda", device)
            copies.decide()
            decided.append(copies.on)
    reshard_settings = {
        unit._get_fsdp_state()._fsdp_param_group._reshard_after_forward for unit in fsdp_modules(engine.module)
    }
    assert reshard_settings == ({False} if copies.on else {True, False}), "what decide() says is what the units do"
    return decided


def test_copies_are_kept_where_the_steps_so_far_leave_room() -> None:
    path, small, large, over = saved_model("llama"), 50_000_000, 90_000_000, 96_000_000
    assert run(1, decisions, path, "1", [small, small, small])[0] == [False, True, True]  # nothing is known at first
    assert run(1, decisions, path, "1", [small, large, large])[0] == [False, False, False]
    assert run(1, decisions, path, "1", [small, small, large, over])[0] == [False, True, True, False]
    assert run(2, decisions, path, "2", [small, small])[0] == [False, False]
