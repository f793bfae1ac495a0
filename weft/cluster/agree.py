"""Numbers on which all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def largest(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Each number where it is largest among the ranks of `group`; one all-reduce, collective."""
    if dist.get_world_size(group) == 1:
        return [float(value) for value in values]
    vector = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    return list(vector.tolist())
