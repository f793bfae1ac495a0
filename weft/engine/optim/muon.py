"""Muon: orthogonalised updates of matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon); AdamW for other
parameters.

    B = momentum B + (1 - momentum) g
    U = momentum B + (1 - momentum) g        (Nesterov)
    w = w (1 - lr d) - lr s NS(U)

NS is five Newton-Schulz iterations on the full matrix, as in torch.optim.Muon. s is 0.2 sqrt(max(rows, columns)) for
muon_scale=match_rms_adamw (Liu et al. 2025, arXiv:2502.16982), which makes AdamW's learning rates suitable, and
sqrt(max(1, rows / columns)) for muon_scale=original.

The matrices are assigned to all ranks of a stage, replicas included, balanced by cost. Ranks send their parts of U to
the rank that orthogonalises the matrix, and that rank sends parts of the result back to every rank that holds them. A
round is as many matrices as fit into a buffer, and needs two all-to-alls. The next round's parts are sent while a round
is computed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.config.schema import OptimizerConfig
from weft.engine.optim.adamw import FusedAdamW
from weft.engine.optim.kinds import OptimizerKind, ParameterSet, WholeTensor
from weft.engine.optim.placement import ParameterPlacement
from weft.launch.simulated import device_kind
from weft.launch.timing import waiting
from weft.parallel.mesh import local_shard
from weft.parallel.shards.boxes import Box, overlap
from weft.parallel.shards.cuts import RankBox

COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # torch.optim.Muon's
_ROUND = 1 << 24  # most elements that a rank orthogonalises in a round, unless one matrix has more

Boxes = Mapping[
    str, Sequence[tuple[Box, bool]]
]  # of one rank: name of a parameter -> (box, whether this rank sends it)


@dataclass(frozen=True)
class Matrix:
    """A matrix and the rank of the stage that orthogonalises it. name: its parameter. box: its position in the full
    tensor of the parameter."""

    name: str
    box: Box
    rank: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.box.size[-2], self.box.size[-1]


def newton_schulz(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearly orthogonal factor of a matrix [rows, columns] or a stack [n, rows, columns], computed in `dtype`."""
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype, copy=True)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS) if x.ndim > 2 else x.norm().clamp(min=EPS))
    product = torch.baddbmm if x.ndim > 2 else torch.addmm
    for _ in range(STEPS):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def step_scale(scale: str, shape: tuple[int, int]) -> float:
    """The factor s on a matrix's update. scale: optimizer.muon_scale. shape: [rows, columns]."""
    rows, columns = shape
    if scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def cost(shape: Sequence[int]) -> int:
    """Number of multiplications of one Newton-Schulz iteration, for a matrix of this shape."""
    small, large = min(shape), max(shape)
    return 2 * small * small * large + small**3


def assign(boxes: Sequence[tuple[str, Box]], ranks: int) -> list[Matrix]:
    """Assign matrices to ranks: the costliest first, each to the rank with the least work. Equal on every rank."""
    loads = [0] * ranks
    matrices = []
    for name, box in sorted(boxes, key=lambda item: (-cost(item[1].size[-2:]), item[0], item[1].start)):
        rank = loads.index(min(loads))
        matrices.append(Matrix(name, box, rank))
        loads[rank] += cost(matrices[-1].shape)
    return matrices


def rounds_of(matrices: Sequence[Matrix], ranks: int) -> list[list[Matrix]]:
    """Matrices in rounds. In a round each rank has at most about _ROUND elements."""
    rounds: dict[int, list[Matrix]] = defaultdict(list)
    number, filled = [0] * ranks, [0] * ranks
    for matrix in matrices:
        rank, size = matrix.rank, math.prod(matrix.shape)
        if filled[rank] and filled[rank] + size > _ROUND:
            number[rank], filled[rank] = number[rank] + 1, 0
        rounds[number[rank]].append(matrix)
        filled[rank] += size
    return [rounds[n] for n in range(len(rounds))]


@dataclass
class _MatrixExchange:
    """An all-to-all of one round. received: parts of this rank's matrices, rank by rank. sizes: elements from each
    rank. work: None if nothing is sent."""

    matrices: Sequence[Matrix]
    received: Tensor
    sizes: Sequence[int]
    work: Any = None
    sent: Tensor | None = field(default=None, repr=False)  # kept, because NCCL reads it until the work has ended


class Muon(torch.optim.Optimizer):
    """Muon on the matrices of `matrix_groups`, torch's AdamW on `other_groups`.

    momentum, scale: optimizer.muon_momentum, muon_scale. dtype: in which matrices are sent and orthogonalised.
    """

    def __init__(
        self,
        matrix_groups: Sequence[dict[str, Any]],
        other_groups: Sequence[dict[str, Any]],
        parameters: ParameterSet,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        scale: str,
        dtype: torch.dtype,
    ) -> None:
        """Collective over the ranks of a stage."""
        super().__init__(list(matrix_groups) or [{"params": []}], {"lr": lr, "weight_decay": 0.0, "lr_scale": 1.0})
        self.momentum, self.scale, self.dtype, self.placements = momentum, scale, dtype, parameters.placements
        self._matrix_groups = list(self.param_groups)
        self._adamw = FusedAdamW(other_groups, lr=lr, betas=betas, eps=eps, fused=True) if other_groups else None
        if self._adamw is not None:
            self._adamw.state = self.state
            self.param_groups += self._adamw.param_groups
        stepped = [p for group in self._matrix_groups for p in group["params"]]
        self._placement_of: dict[str, ParameterPlacement] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for number, parameter in enumerate(stepped):
            name = parameters.names[parameter]
            self._parameters[name] = parameter
            self._placement_of[name] = self.placements.placement_of(name, parameter, number)
        local_boxes = {
            name: [(box.box, box.is_writer(placement.number)) for box in placement.boxes]
            for name, placement in self._placement_of.items()
        }
        self._boxes = cast("list[Boxes]", self.placements.gather(local_boxes))
        self._rank = self.placements.among[0] if len(self._boxes) > 1 else 0
        self._matrices = assign(
            [(name, box) for name in local_boxes for box in parameters.matrices[name]], len(self._boxes)
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient. Collective over the ranks of a stage."""
        assert closure is None
        if self._adamw is not None:
            self._adamw.step()
        updates, rates = {}, {}
        for group in self._matrix_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    updates[parameter] = self._momentum_of(parameter)
                    rates[parameter] = group["lr"], 1 - group["lr"] * group["weight_decay"]
        # All ranks agree on `rounds`: a parameter without a gradient here has none on any rank.
        matrices = [matrix for matrix in self._matrices if self._parameters[matrix.name] in updates]
        rounds = rounds_of(matrices, len(self._boxes))
        following = self._send(rounds[0], updates) if rounds else None
        for number in range(len(rounds)):
            current, following = following, None
            if number + 1 < len(rounds):
                following = self._send(rounds[number + 1], updates)
            assert current is not None
            self._finish_round(current, rates)

    def _momentum_of(self, parameter: nn.Parameter) -> Tensor:
        """Update the momentum B, and return this rank's shard of U."""
        state, gradient = self.state[parameter], local_shard(parameter.grad).float()
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, share = local_shard(state["momentum_buffer"]), gradient * (1 - self.momentum)
        # Separately rounded operations, not lerp or addcmul: a fused kernel may round the last elements of a shard
        # differently, and the result would depend on the mesh.
        momentum = buffer.float().mul(self.momentum).add_(share)
        buffer.copy_(momentum)
        return momentum.mul_(self.momentum).add_(share).to(self.dtype)

    # ------------------------------------------------------------ exchange of matrices

    def _send(self, matrices: Sequence[Matrix], updates: Mapping[nn.Parameter, Tensor]) -> _MatrixExchange:
        """Send this rank's parts of matrices to the ranks that orthogonalise them."""
        parts: list[list[Tensor]] = [[] for _ in self._boxes]
        for matrix in matrices:
            shard = updates[self._parameters[matrix.name]]
            for rank_box, (_, sends) in zip(
                self._placement_of[matrix.name].boxes, self._boxes[self._rank][matrix.name], strict=True
            ):
                shared = overlap(matrix.box, rank_box.box) if sends else None
                if shared is not None:
                    parts[matrix.rank].append(shard[rank_box.within(shared)].reshape(-1))
        local = self._local(matrices)
        sizes = [
            sum(shared.numel for matrix in local for shared in _shared(matrix, boxes, only_sent=True))
            for boxes in self._boxes
        ]
        return self._exchange(matrices, parts, sizes)

    def _local(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """The matrices that this rank orthogonalises."""
        return [matrix for matrix in matrices if matrix.rank == self._rank]

    def _exchange(
        self, matrices: Sequence[Matrix], parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]
    ) -> _MatrixExchange:
        """Start an all-to-all. parts: flat tensors to send, for each rank. sizes: elements to receive from each
        rank."""
        device = next(iter(self._parameters.values())).device
        empty = torch.empty(0, dtype=self.dtype, device=device)
        sent = torch.cat([empty, *(part for rank_parts in parts for part in rank_parts)])
        if self.placements.ranks is None:
            return _MatrixExchange(matrices, sent, [len(sent)])
        received = torch.empty(sum(sizes), dtype=self.dtype, device=device)
        sent_sizes = [sum(map(Tensor.numel, rank_parts)) for rank_parts in parts]
        work = dist.all_to_all_single(
            received, sent, list(sizes), sent_sizes, group=self.placements.ranks, async_op=True
        )
        return _MatrixExchange(matrices, received, sizes, work, sent)

    def _finish_round(self, exchange: _MatrixExchange, rates: Mapping[nn.Parameter, tuple[float, float]]) -> None:
        """Orthogonalise this rank's matrices of a round, send the results, and update weights with received results.

        rates: (learning rate, 1 - learning rate x weight decay) of each parameter.
        """
        _wait(exchange)
        matrices, local = exchange.matrices, self._local(exchange.matrices)
        gathered = [torch.empty(m.box.size, dtype=self.dtype, device=exchange.received.device) for m in local]
        for boxes, values in zip(self._boxes, exchange.received.split(list(exchange.sizes)), strict=True):
            offset = 0
            for matrix, target in zip(local, gathered, strict=True):
                for shared in _shared(matrix, boxes, only_sent=True):
                    target[shared.within(matrix.box)] = values[offset : offset + shared.numel].view(shared.size)
                    offset += shared.numel
        results = self.orthogonalise([x.view(m.shape) for x, m in zip(gathered, local, strict=True)])
        parts = [
            [
                result.reshape(matrix.box.size)[shared.within(matrix.box)].reshape(-1)
                for matrix, result in zip(local, results, strict=True)
                for shared in _shared(matrix, boxes, only_sent=False)
            ]
            for boxes in self._boxes
        ]
        sizes = [0] * len(self._boxes)
        for matrix in matrices:
            sizes[matrix.rank] += sum(
                shared.numel for shared in _shared(matrix, self._boxes[self._rank], only_sent=False)
            )
        results_exchange = self._exchange(matrices, parts, sizes)
        _wait(results_exchange)
        offsets = [sum(sizes[:rank]) for rank in range(len(sizes))]
        for matrix in matrices:
            parameter = self._parameters[matrix.name]
            shard, (rate, decay) = local_shard(parameter), rates[parameter]
            rate *= step_scale(self.scale, matrix.shape)
            for rank_box in self._placement_of[matrix.name].boxes:
                shared_box = overlap(matrix.box, rank_box.box)
                if shared_box is not None:
                    offset = offsets[matrix.rank]
                    values = results_exchange.received[offset : offset + shared_box.numel].view(shared_box.size)
                    _step(shard, rank_box, shared_box, values, rate, decay)
                    offsets[matrix.rank] += shared_box.numel

    def orthogonalise(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Newton-Schulz of each matrix. On CUDA, matrices of equal shape run as one batch."""
        results: list[Tensor] = [torch.empty(0)] * len(matrices)
        indices_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, matrix in enumerate(matrices):
            indices_of[tuple(matrix.shape) if device_kind(matrix.device) == "cuda" else (index,)].append(index)
        for indices in indices_of.values():
            if len(indices) == 1:
                results[indices[0]] = newton_schulz(matrices[indices[0]], self.dtype)
                continue
            stacked = newton_schulz(torch.stack([matrices[index] for index in indices]), self.dtype)
            for index, result in zip(indices, stacked.unbind(), strict=True):
                results[index] = result
        return results


def _shared(matrix: Matrix, boxes: Boxes, *, only_sent: bool) -> list[Box]:
    """The parts of a matrix that a rank holds, in the order of its boxes. only_sent: only the parts that it sends."""
    parts = (overlap(matrix.box, box) for box, sends in boxes[matrix.name] if sends or not only_sent)
    return [part for part in parts if part is not None]


def _step(shard: Tensor, rank_box: RankBox, box: Box, values: Tensor, rate: float, decay: float) -> None:
    """shard[box] = decay x shard[box] - rate x values, computed in fp32 and rounded once. Rounded to bf16 by itself,
    the decay would often change nothing."""
    target = shard[rank_box.within(box)]
    target.copy_(target.float().mul(decay).sub_(values.float().mul_(rate)))


def _wait(exchange: _MatrixExchange) -> None:
    if exchange.work is not None:
        with waiting():
            exchange.work.wait()


# ---------------------------------------------------------------- the kind


def build_muon(config: OptimizerConfig, parameters: ParameterSet) -> torch.optim.Optimizer:
    """Muon. Matrices use the learning rate optimizer.muon_lr, if it is set."""
    matrix_groups, other_groups = list[dict[str, Any]](), list[dict[str, Any]]()
    ratio = 1.0 if config.muon_lr is None else config.muon_lr / config.lr
    device = torch.device("cpu")
    for group in parameters.groups:
        inside = [p for p in group["params"] if parameters.names[p] in parameters.matrices]
        outside = [p for p in group["params"] if parameters.names[p] not in parameters.matrices]
        if inside:
            matrix_groups.append({**group, "params": inside, "lr_scale": group["lr_scale"] * ratio})
            device = inside[0].device
        if outside:
            other_groups.append({**group, "params": outside})
    auto = torch.bfloat16 if device_kind(device) == "cuda" else torch.float32
    dtype = {"auto": auto, "bf16": torch.bfloat16, "fp32": torch.float32}[config.muon_dtype]
    return Muon(
        matrix_groups, other_groups, parameters, lr=config.lr, betas=config.betas, eps=config.eps,
        momentum=config.muon_momentum, scale=config.muon_scale, dtype=dtype,
    )  # fmt: skip


def muon_moments(config: OptimizerConfig, master: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtype of a matrix's momentum."""
    return (master,)


def muon_bytes(config: OptimizerConfig, master: torch.dtype, tensor: WholeTensor, elements: int) -> int:
    """Bytes of the state: one momentum for a matrix, two moments for others."""
    return elements * master.itemsize * (1 if tensor.matrix else 2)


MUON = OptimizerKind(build_muon, muon_moments, muon_bytes)
