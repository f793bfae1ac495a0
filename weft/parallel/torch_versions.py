"""What torch calls differently from version to version; the one place that asks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# The names from 2.13 on; the older ones warn there at every call.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
