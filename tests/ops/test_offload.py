"""Results of layers on the host: order, waits, memory that is given back, and gradients that do not change."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from weft.config.recompute import FULL, SELECTIVE, RecomputePolicy
from weft.ops import offload
from weft.ops.offload import PAGE, ActivationOffload, HostPages
from weft.ops.recompute import run_layer

CPU = torch.device("cpu")


class LateCopies:
    """Copies that happen when something waits for them, no earlier: until then their targets are NaN."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.started = 0

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
        self.started += 1
        for target, source in pairs:
            target.fill_(255)
            self.pending.append((self.started, target, source))
        return self.started

    def wait(self, event: int) -> None:
        while self.pending and self.pending[0][0] <= event:
            _, target, source = self.pending.pop(0)
            target.copy_(source)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def gradients(
    layers: nn.ModuleList, x: Tensor, policy: RecomputePolicy, transfers: ActivationOffload | None = None, rows: int = 1
) -> list[Tensor]:
    """Of `rows` forwards, whose backwards come after all of them, as in a pipeline."""
    layers.zero_grad()
    outputs = []
    for row in range(rows):
        hidden = x + row
        if transfers is not None:
            transfers.begin_row()
        for layer in layers:
            hidden = run_layer(policy, layer, hidden, offload=transfers)
        outputs.append(hidden.square().sum())
    while outputs:
        outputs.pop(0).backward()
    return [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]


@pytest.fixture
def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(6))


@pytest.mark.parametrize("keep_results", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_are_those_without(layers: nn.ModuleList, keep_results: bool, in_flight: int, rows: int) -> None:
    x = torch.randn(1, 50, 64, requires_grad=True)
    expected = gradients(layers, x, SELECTIVE, rows=rows)
    transfers, copies = ActivationOffload(kept=keep_results), LateCopies()
    transfers.open(CPU, None, copies)
    with mock.patch.object(offload, "LAYERS_IN_FLIGHT", in_flight):
        observed = gradients(layers, x, SELECTIVE, transfers, rows)
    assert all(map(torch.equal, observed, expected))
    of_layer = 2 if keep_results else 1  # one product of two
    traffic = transfers.traffic
    assert traffic.sent == 6 * rows * of_layer and traffic.most_in_flight == in_flight
    assert traffic.fetched == traffic.sent - in_flight * of_layer  # the last layers never left
    assert transfers.used == 0


def test_the_layer_before_is_fetched_ahead(layers: nn.ModuleList) -> None:
    """When a layer's recomputation begins, the copies of the one before it have started."""
    transfers, copies, order = ActivationOffload(kept=False), LateCopies(), list[str]()
    transfers.open(CPU, None, copies)
    fetch, restore = offload.HostedTensor.fetch, offload.HostedTensor.restore
    numbers: dict[int, int] = {}

    def named(item: Any) -> int:
        return numbers.setdefault(id(item), len(numbers))

    def fetched(self: Any) -> None:
        if self._source is None and self._fetched is None:
            order.append(f"fetch {named(self)}")
        fetch(self)

    def restored(self: Any) -> Tensor:
        order.append(f"restore {named(self)}")
        return restore(self)

    with (
        mock.patch.object(offload.HostedTensor, "fetch", fetched),
        mock.patch.object(offload.HostedTensor, "restore", restored),
        mock.patch.object(offload, "LAYERS_IN_FLIGHT", 1),
    ):
        gradients(layers, torch.randn(1, 50, 64, requires_grad=True), FULL, transfers)
    expected = ["fetch 0", "restore 1"]  # the last layer never left; the one before it comes meanwhile
    for number in range(4):
        expected += [f"fetch {number + 2}", f"restore {0 if number == 0 else number + 1}"]
    assert order == [*expected, "restore 5"]


def test_an_error_gives_all_memory_back(layers: nn.ModuleList) -> None:
    transfers = ActivationOffload(kept=True)
    transfers.open(CPU, None, LateCopies())
    x = torch.randn(1, 50, 64, requires_grad=True)
    for failing in ("forward", "backward"):
        calls = 0

        def fail(self: Layer, hidden: Tensor, failing: str = failing) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == (5 if failing == "forward" else 8):
                raise RuntimeError("broken")
            return hidden + self.down(torch.tanh(self.up(hidden)))

        with mock.patch.object(Layer, "forward", fail), pytest.raises(RuntimeError, match="broken"):
            gradients(layers, x, SELECTIVE, transfers)
        gc.collect()  # the traceback held the frames
        assert transfers.used == 0, failing
    assert all(map(torch.equal, gradients(layers, x, SELECTIVE, transfers), gradients(layers, x, SELECTIVE)))


def test_what_the_pool_has_no_room_for_stays(layers: nn.ModuleList) -> None:
    transfers = ActivationOffload(kept=False)
    transfers.open(CPU, 3 * PAGE)
    x = torch.randn(1, 50, 64, requires_grad=True)
    assert all(map(torch.equal, gradients(layers, x, FULL, transfers), gradients(layers, x, FULL)))
    assert (transfers.traffic.sent, transfers.traffic.stayed, transfers.limit) == (3, 3, 3 * PAGE)


def test_a_change_in_place_before_the_copy_is_done_is_an_error(layers: nn.ModuleList) -> None:
    transfers = ActivationOffload(kept=False)
    transfers.open(CPU, None, LateCopies())
    hidden = torch.randn(1, 50, 64, requires_grad=True) * 1.0
    outputs = [run_layer(FULL, layers[0], hidden, offload=transfers)]
    with torch.no_grad():
        hidden.add_(1.0)
    outputs.append(run_layer(FULL, layers[1], outputs[-1], offload=transfers))
    with pytest.raises(RuntimeError, match=r"Set model.offload_activations=off"):
        run_layer(FULL, layers[2], outputs[-1], offload=transfers)


@pytest.mark.parametrize("tensor", [
    torch.arange(600_000.0).view(3, -1), torch.randn(70, 900, 3).transpose(0, 1), torch.randn(5, 1).expand(5, 300),
    torch.arange(7, dtype=torch.int64)[3:], torch.randn(9, 4)[:, 1:], torch.randn(()).bfloat16(),
])  # fmt: skip
def test_a_tensor_comes_back_as_it_was(tensor: Tensor) -> None:
    transfers = ActivationOffload(kept=False)
    transfers.open(CPU, None, LateCopies())
    pages = transfers._pages.take(5 * PAGE)  # pages of one tensor need not be neighbours
    assert pages is not None
    transfers._pages.give(pages[1::2])
    item = transfers.layer(tensor).hosted(tensor, narrow=False)
    assert item is not None
    item.finish()
    restored = item.restore()
    assert torch.equal(restored, tensor) and restored.dtype == tensor.dtype
    if tensor.is_contiguous() or tensor.transpose(0, 1).is_contiguous():
        assert restored.stride() == tensor.stride()


def test_pages_grow_up_to_their_limit() -> None:
    pages = HostPages(300 * PAGE, pinned=False)
    first, second = pages.take(200 * PAGE), pages.take(100 * PAGE - 5)
    assert first is not None and second is not None and pages.take(1) is None
    assert pages.used == 300 * PAGE
    pages.give(second)
    third = pages.take(90 * PAGE)
    assert (
        third is not None and set(third) <= set(second) and sum(map(len, pages.pieces(third, 90 * PAGE))) == 90 * PAGE
    )
