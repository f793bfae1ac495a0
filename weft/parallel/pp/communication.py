"""Communication between the stages of a pipeline: hidden states go onward, their gradients back. Gradients of
parameters that two stages hold (a head tied to the embedding) are summed.

All stages compute the shapes from the plan, so shapes are not sent. B batch, T tokens of a row, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.launch import flight
from weft.launch.simulated import has_ended
from weft.launch.timing import waiting
from weft.parallel.mesh import P2PChannel, PPAxis, local_shard
from weft.parallel.pp.model import Pipeline
from weft.parallel.pp.schedule import Placement
from weft.parallel.shards.cuts import AnyShardSpec, ShardSpecs, full_shape


class P2PMessage(NamedTuple):
    """Identifies a message of one micro-batch: hidden states (onward) or their gradient. stage: the receiving stage."""

    onward: bool
    stage: int
    micro: int


class P2PCommunicator:
    """One rank's sends and receives. send() does not wait. receive() waits for a message; request() must come
    before."""

    def __init__(
        self,
        axis: PPAxis,
        placement: Placement,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: int,
    ) -> None:
        """width: H. dtype: of hidden states between layers. parts: number of ranks that share the tokens of a row
        (sequence parallelism)."""
        self.axis, self.placement, self.width, self.parts = axis, placement, width, parts
        self.dtype, self.device = dtype, device
        self._pending: dict[P2PMessage, tuple[Tensor, Any]] = {}
        self._local_messages: dict[P2PMessage, Tensor] = {}  # messages between stages of this rank
        self._sent: list[tuple[Tensor, Any]] = []
        self._connected = device.type == "cpu"

    def connect(self) -> None:
        """Open the connections, once. NCCL opens a connection at its first message, and blocks the thread until the
        peer opens it too. So all ranks open them in the same order, which cannot deadlock."""
        if self._connected:
            return
        self._connected = True
        value = torch.zeros(1, device=self.device)
        for onward in (True, False):
            # Each pair of ranks occurs once, in the same order on all ranks.
            ranks = [self.placement.rank_of(stage) for stage in range(self.placement.stages)]
            ranks = ranks if onward else ranks[::-1]
            for source, end in dict.fromkeys((a, b) for a, b in pairwise(ranks) if a != b):
                group = self.axis.channels[P2PChannel.between(onward, source, end)]
                if self.axis.rank == source:
                    _wait(dist.isend(value, group=group, group_dst=end), self.device)
                elif self.axis.rank == end:
                    _wait(dist.irecv(value, group=group, group_src=source), self.device)

    def request(self, message: P2PMessage, shape: Sequence[int]) -> None:
        """Start to receive a message for a stage of this rank. Does nothing if this was already requested, or if this
        rank is the sender.

        shape: [B, T] of the row. Request the messages of one sender and direction in the order in which it sends them.
        """
        source = self.placement.neighbour(message.stage, not message.onward)
        if source is None or message in self._pending:
            return
        rank = self.placement.rank_of(source)
        if rank == self.axis.rank:
            return
        buffer = torch.empty(self._shape(shape), dtype=self.dtype, device=self.device)
        group = self.axis.channels[P2PChannel.between(message.onward, rank, self.axis.rank)]
        self._pending[message] = buffer, dist.irecv(buffer, group=group, group_src=rank)

    def receive(self, message: P2PMessage) -> Tensor | None:
        """Wait for a requested message and return its tensor. None for a stage without a sender (the first stage for
        hidden states, the last stage for gradients)."""
        if message in self._local_messages:
            return self._local_messages.pop(message)
        pending = self._pending.pop(message, None)
        if pending is None:
            return None
        buffer, work = pending
        _wait(work, self.device)
        return buffer

    def send(self, stage: int, onward: bool, micro: int, tensor: Tensor | None, shape: Sequence[int]) -> None:
        """Send a stage's hidden states to the next stage (onward), or their gradient to the previous stage.

        shape: [B, T] of the row. Raises RuntimeError for another shape or dtype; the peer would crash without a
        message."""
        target = self.placement.neighbour(stage, onward)
        if target is None:
            return
        if tensor is None or tuple(tensor.shape) != self._shape(shape) or tensor.dtype != self.dtype:
            name = "hidden states" if onward else "gradients of hidden states"
            actual = "None" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise RuntimeError(
                f"stage {stage} must send {name} in {self.dtype} of shape {list(self._shape(shape))}, but they are "
                f"{actual}. Set mesh.pp=1, and please report the model."
            )
        rank, sent = self.placement.rank_of(target), tensor.detach().contiguous()
        if rank == self.axis.rank:
            self._local_messages[P2PMessage(onward, target, micro)] = sent
            return
        group = self.axis.channels[P2PChannel.between(onward, self.axis.rank, rank)]
        self._sent = [(buffer, work) for buffer, work in self._sent if not has_ended(work)]
        self._sent.append((sent, dist.isend(sent, group=group, group_dst=rank)))

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for _, work in self._sent:
            _wait(work, self.device)
        self._sent.clear()

    def _shape(self, row: Sequence[int]) -> tuple[int, ...]:
        return (row[0], row[1] // self.parts, self.width)


def _wait(work: Any, device: torch.device) -> None:
    """Wait for a send or receive. On CPU this thread waits for at most train.timeout, because torch applies the timeout
    only to the group of all ranks. On an accelerator the device waits, and this thread continues."""
    limit = flight.recorder.limit
    with waiting():
        if device.type == "cpu" and limit is not None:
            work.wait(timedelta(seconds=limit))
        else:
            work.wait()


@torch.no_grad()
def sum_shared_gradients(module: nn.Module, pipeline: Pipeline, axis: PPAxis) -> None:
    """Sum the gradients of parameters that both the first and the last stage hold, once per step. Collective over the
    first and the last rank of pp. Does nothing if one rank has both stages."""
    named = dict(module.named_parameters())
    shared = [named[name] for name in sorted(pipeline.shared_params(axis.rank)) if name in named]
    shared = [parameter for parameter in shared if parameter.requires_grad]
    works, received = [], []
    peer = axis.size - 1 - axis.rank
    later = axis.channels[P2PChannel.between(True, 0, axis.size - 1)]
    earlier = axis.channels[P2PChannel.between(False, axis.size - 1, 0)]
    for parameter in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = local_shard(parameter.grad).contiguous()
        received.append(torch.empty_like(gradient))
        if axis.rank == 0:
            works.append(dist.isend(gradient, group=later, group_dst=peer))
            works.append(dist.irecv(received[-1], group=earlier, group_src=peer))
        else:  # NCCL needs matching orders: this rank receives first what the peer sends first
            works.append(dist.irecv(received[-1], group=later, group_src=peer))
            works.append(dist.isend(gradient, group=earlier, group_dst=peer))
    for work in works:
        _wait(work, shared[0].device)
    for parameter, peer_gradient in zip(shared, received, strict=True):
        assert parameter.grad is not None
        local_shard(parameter.grad).add_(peer_gradient)


def gather_over_stages(
    pipeline: Pipeline,
    axis: PPAxis,
    device: torch.device,
    names: Iterable[str],
    shards: Mapping[str, Tensor | None],
    cuts: ShardSpecs,
    gather_full: Callable[[Tensor, AnyShardSpec | None], Tensor],
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, full tensor) for these names of the full model, on every stage. The tensor is None if the stage of
    the name has none, such as for a missing gradient. Collective; gathers one tensor at a time.

    shards: of this stage. cuts: how tp and ep shard them. gather_full: gathers a tensor from its shards, in its dtype.
    """
    local_shapes = {n: (full_shape(n, t, cuts), t.dtype) for n, t in shards.items() if t is not None}
    shapes_by_rank: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}] * axis.size
    dist.all_gather_object(shapes_by_rank, local_shapes, group=axis.group)
    for name in names:
        stages = pipeline.holders[name]
        shard = shards.get(name) if axis.rank in stages else None
        tensor = None if shard is None else gather_full(shard, cuts.get(name)).contiguous()
        if name not in shapes_by_rank[stages[0]]:
            yield name, None
            continue
        if axis.rank != stages[0]:
            shape, dtype = shapes_by_rank[stages[0]][name]
            tensor = torch.empty(shape, dtype=dtype, device=device)
        assert tensor is not None
        dist.broadcast(tensor, group=axis.group, group_src=stages[0])
        yield name, tensor
