"""What all ranks agree on: numbers, and whether to go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from weft.cluster.process import Ranks
from weft.errors import UserError


def largest(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Each number where it is largest among the ranks of `group`; one all-reduce, collective."""
    if dist.get_world_size(group) == 1:
        return [float(value) for value in values]
    vector = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    return list(vector.tolist())


def done_by_first(do: Callable[[], None], ranks: Ranks) -> None:
    """Let the first rank do something, and all raise its UserError; collective."""
    said: list[str | None] = [None]
    if ranks.is_first:
        try:
            do()
        except UserError as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise UserError(said[0])
