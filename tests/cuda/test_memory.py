"""What moves between a device and the host comes over bit for bit, also while the device has other work."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.cases import BF16, STEPS, busy, gradient, kind
from tests.support.cases import open_engine, saved_model
from tests.support.resuming import whole_state
from weft.checkpoint.save import Saver
from weft.checkpoint.state import find_state_shards
from weft.config.schema import CheckpointConfig
from weft.engine.contract import check_contract
from weft.engine.engine import Engine
from weft.launch.process import Ranks
from weft.parallel.mesh import local_shard

# Several chunks of pinned memory (64 MiB), and tensors that lie over two of them.
LARGE: dict[str, Any] = {"vocab_size": 50_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}


def model(device: torch.device) -> str:
    return saved_model("llama", **(LARGE if device.type == "cuda" else {}))


def stepped(device: torch.device, **sections: Any) -> Engine:
    """An engine after one step, with a gradient accumulated for the next."""
    engine = open_engine(model(device), "1", device=kind(device), **{**BF16, **sections})
    gradient(engine, 0)
    engine.apply(1e-3)
    gradient(engine, 2)
    return engine


def state(engine: Engine) -> dict[str, Tensor]:
    """A copy of all that the engine keeps, on its device."""
    tensors = {name: part.local for name, part in find_state_shards(engine).items()}
    tensors |= {f"gradient/{n}": local_shard(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def memory(device: torch.device) -> int:
    """Bytes that this process keeps from others."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(actual[name].cpu(), expected[name].cpu())]
    assert not differing, differing


@pytest.mark.parametrize("ema", [None, 0.9])
def test_sleep_gives_the_memory_back_and_wake_brings_every_bit(
    device: torch.device, ranks: Ranks, ema: float | None
) -> None:
    engine = stepped(device, optimizer={"ema_decay": ema})
    before = {name: tensor.cpu() for name, tensor in state(engine).items()}
    size = sum(tensor.nbytes for tensor in before.values())
    for meanwhile in (busy(device), nullcontext(), busy(device)):  # the second time with the pinned memory of the first
        awake = memory(device)
        with meanwhile:
            assert engine.sleep() == size
            asleep = memory(device)
            assert engine.wake() == size
            assert_equal(state(engine), before)
        if isinstance(meanwhile, nullcontext) and device.type == "cuda":
            assert asleep < awake - 0.9 * size
    gradient(engine, 1)
    assert not engine.apply(1e-3).skipped


def test_a_snapshot_is_of_its_moment_while_training_goes_on(device: torch.device, ranks: Ranks, tmp_path: Path) -> None:
    """The second one reuses the host memory of the first."""
    engine = stepped(device)
    saver = Saver(engine, tmp_path, CheckpointConfig(), {"config": {}})
    for step in (1, 2):
        with busy(device):
            engine.apply(1e-3)
            before = {name: part.local.detach().clone() for name, part in find_state_shards(engine).items()}
            saver.save(step, {})
            for parameter in engine.module.parameters():  # what a step does, at once
                local_shard(parameter.detach()).zero_()
            gradient(engine, 1)
            engine.apply(1e-3)
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                local_shard(parameter).copy_(before[f"weights/{name}"])
        gradient(engine, 0)
        saver.finish()
        assert_equal(whole_state(tmp_path, step), before)


def test_offloaded_state_stays_on_the_host_and_gives_the_same_step(device: torch.device, ranks: Ranks) -> None:
    results = []
    for offload in (False, True):
        sections: dict[str, Any] = {"fsdp": {"param_dtype": "fp32", "cpu_offload": offload}}
        engine = open_engine(saved_model("llama"), "1", device=kind(device), **sections)
        losses = []
        for number in range(len(STEPS)):
            losses.append(gradient(engine, number))
            engine.apply(1e-3)
            check_contract(engine)  # parameters and moments lie where engine.storage says
        assert engine.storage.type == ("cpu" if offload else device.type)
        results.append((losses, {name: tensor.cpu() for name, tensor in engine.tensors()}))
    (losses, weights), (offloaded_losses, offloaded) = results
    assert offloaded_losses == pytest.approx(losses, rel=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(offloaded[name], tensor, rtol=0, atol=1e-5)  # AdamW of the host, a step is 1e-3


def test_peak_memory_is_near_what_was_foretold(cuda: torch.device, ranks: Ranks) -> None:
    """What is kept, to the rounding of the allocator; activations are not in it."""
    gc.collect()  # engines of earlier tests in this process: freed later, they would be subtracted
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(cuda)
    engine = open_engine(model(cuda), "1", device="cuda", **BF16)
    gradient(engine, 0)
    engine.apply(1e-3)
    engine.drop_gradients()
    allocated = torch.cuda.memory_allocated(cuda) - before
    expected = sum(part.local.nbytes for part in find_state_shards(engine).values())
    assert allocated == pytest.approx(expected, rel=0.1)
