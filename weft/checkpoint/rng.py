"""The random number generators of a rank, as tensors: torch's on CPU and accelerator, and Python's.

Data ranks have different states, so they draw different numbers. tp ranks of one data rank have equal states.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping

import torch
from torch import Tensor

_VERSION = 3  # of random.getstate(), which has had this layout since Python 3.2


def capture(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator of this rank, by name."""
    version, words, gauss = random.getstate()
    assert version == _VERSION, version
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set this rank's generators to captured states."""
    torch.set_rng_state(states["torch"])
    gauss = float(states["python_gauss"][0])
    random.setstate((_VERSION, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed the generators for the steps after `step`. The sequence differs between data ranks and steps. rank: the data
    rank (Mesh.loss_rank)."""
    digest = hashlib.sha256(f"{seed}:{rank}:{step}".encode()).digest()
    number = int.from_bytes(digest[:8], "big") >> 1  # torch accepts 63 bits
    torch.manual_seed(number)  # seeds every device
    random.seed(number)
