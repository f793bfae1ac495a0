"""Messages about losses and gradients that are not finite, equal on every rank. All functions are collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from weft.launch.process import world_group
from weft.parallel.mesh import local_shard


def name_losses(sources: Sequence[Sequence[str]], micro_batches: Sequence[int]) -> str:
    """The message for losses that are not finite: rank, micro-batch and documents of each. sources: by micro-batch.
    micro_batches: this rank's."""
    local = [
        f"rank {dist.get_rank(world_group())}, micro-batch {micro + 1}, documents {_first(sources[micro], 8)}"
        for micro in micro_batches
    ]
    return f"loss is not finite: {_first(_gathered(local), 4, '; ')}"


def name_gradients(module: nn.Module) -> str:
    """The message for gradients that are not finite although every loss is: their parameters."""
    local = [
        name
        for name, p in module.named_parameters()
        if p.grad is not None and not bool(local_shard(p.grad).isfinite().all())
    ]
    names = _gathered(local)
    return "gradient norm is not finite, though every loss is" + (f": {_first(names, 4)}" if names else "")


def _gathered(local: list[str]) -> list[str]:
    """The lists of all ranks, merged, without duplicates."""
    group = world_group()
    parts: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, local, group=group)
    return list(dict.fromkeys(text for part in parts for text in part))


def _first(texts: Sequence[str], limit: int, separator: str = ", ") -> str:
    """The first texts, and the number of the others."""
    ending = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return separator.join(texts[:limit]) + ending
