"""What torch calls differently from version to version; the one place that asks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# all_gather_single is the name from 2.13 on; the older one warns there at every call.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
