"""A plan's assumptions about accelerators and the links between them. Nothing here was measured by weft.

Rates are those of the vendors' data sheets: dense bf16 (fp16 where there is no bf16), memory, and NVLink, Infinity
Fabric or PCIe in one direction. The network is that of machines in which the accelerator is usually sold. The shares of
a rate that a run reaches are assumptions, which are printed and can be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from weft.cluster.machine import Accelerator
from weft.errors import UserError

GB = 1e9
# name: (TFLOP/s, memory GB/s, link GB/s, network GB/s for each accelerator)
_RATES = {
    "t4-16gb": (65, 320, 16, 3), "a10g-24gb": (70, 600, 32, 3), "l4-24gb": (121, 300, 32, 3),
    "rtx3090-24gb": (71, 936, 32, 3), "rtx4090-24gb": (165, 1008, 32, 3), "rtx5090-32gb": (209, 1792, 64, 3),
    "v100-32gb": (125, 900, 150, 12.5), "a100-40gb": (312, 1555, 300, 25), "l40s-48gb": (362, 864, 32, 12.5),
    "a100-80gb": (312, 2039, 300, 25), "h100-80gb": (989, 3350, 450, 50), "gh200-96gb": (989, 4000, 450, 50),
    "h200-141gb": (989, 4800, 450, 50), "b200-192gb": (2250, 8000, 900, 50), "mi300x-192gb": (1307, 5300, 448, 50),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Rates of a machine, in FLOP/s and bytes/s. ranks: accelerators of a machine. matmul, attention: the shares of
    `peak` that they reach. moved: the share that is reached of the rates of memory, link and network. hop, far_hop:
    seconds for a step of a ring within a machine and between machines. usable: the share of the memory that a plan may
    take."""

    accelerator: Accelerator
    peak: float
    memory_rate: float
    link: float
    network: float
    ranks: int = 8
    matmul: float = 0.6
    attention: float = 0.45
    moved: float = 0.8
    hop: float = 2e-6
    far_hop: float = 8e-6
    usable: float = 0.92

    def lines(self) -> list[str]:
        """The assumptions, as lines to print."""
        return [
            f"{self.accelerator.name}: {self.peak / 1e12:g} TFLOP/s, memory {self.memory_rate / GB:g} GB/s; machines "
            f"of {self.ranks}: {self.link / GB:g} GB/s within, {self.network / GB:g} GB/s for each between them;",
            f"matrices reach {self.matmul:.0%} of the peak, attention {self.attention:.0%}, rates {self.moved:.0%}; "
            f"a step of a ring takes {self.hop * 1e6:g} us, between machines {self.far_hop * 1e6:g} us.",
            "Nothing of this was measured; --help lists what replaces it.",
        ]

    def ranks_here(self, size: int, stride: int) -> int:
        """The number of a group's ranks that share a machine. stride: difference of the numbers of neighbours."""
        return max(1, min(size, self.ranks // stride)) if stride < self.ranks else 1

    def gathering(self, payload: float, size: int, stride: int) -> float:
        """Seconds of an all-gather or reduce-scatter in a ring. payload: bytes of the whole tensor."""
        if size == 1:
            return 0.0
        here = self.ranks_here(size, stride)
        machines = -(-size // here)
        within = payload * (size - 1) / size / (self.link * self.moved)
        between = payload * (1 - here / size) / (here * self.network * self.moved)
        return max(within, between) + (size - machines) * self.hop + (machines - 1) * self.far_hop

    def exchanging(self, payload: float, size: int, stride: int) -> float:
        """Seconds of an all-to-all. payload: bytes that each rank deals evenly over the group, itself included."""
        if size == 1:
            return 0.0
        here = self.ranks_here(size, stride)
        within = payload * (here - 1) / size / (self.link * self.moved)
        between = payload * (size - here) / size / (self.network * self.moved)
        return max(within, between) + (self.far_hop if here < size else self.hop) * 2

    def sending(self, payload: float, stride: int) -> float:
        """Seconds of a message of `payload` bytes to a rank whose number differs by `stride`."""
        near = stride < self.ranks
        rate = self.link if near else self.network
        return payload / (rate * self.moved) + (self.hop if near else self.far_hop)


def machine_of(accelerator: Accelerator, **others: float | int | None) -> Machine:
    """The machine of an accelerator. others: values that replace fields, link and network in GB/s; None keeps a field.
    Raises UserError for a value out of range."""
    tflops, memory, link, network = _RATES[accelerator.name]
    found = Machine(accelerator, tflops * 1e12, memory * GB, link * GB, network * GB)
    changed: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
    for name, value in changed.items():
        share = name in ("matmul", "attention")
        if not value > 0 or (share and value > 1):
            raise UserError(f"--{name} {value:g}: must be above 0{', and at most 1' if share else ''}.")
    for rate in ("link", "network"):
        if rate in changed:
            changed[rate] *= GB
    return replace(found, **changed)
