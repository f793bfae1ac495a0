"""The assumptions of a plan about accelerators, the links between them and their hosts.

Rates come from launch/accelerators.py, which has the numbers of the vendors' data sheets. The shares of a rate that a
run reaches are assumptions, which are printed and can be overridden. Measurements of `make gpu` on an accelerator
(measured/NAME.json, written by benchmarks/gpu.py) replace both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.launch.accelerators import ASSUMABLE
from weft.launch.machine import Accelerator

GB = 1e9
MEASURED = Path(__file__).parent / "measured"


@dataclass(frozen=True)
class Machine:
    """Rates of a machine, in FLOP/s and bytes/s. ranks: accelerators of a machine. matmul, attention: shares of `peak`
    that matmuls and attention of long documents reach. copied: share of the memory rate that copies reach. operated:
    the same for operations between the matmuls of a layer. moved: the same for link, network and host. host: rate
    between an accelerator and its host. host_memory: bytes that a rank's processors read and write per second in an
    optimizer step. hop, far_hop: seconds for a step of a ring within a machine and between machines. launch: host
    seconds per operation, including Python. fused: bytes of passes in compiled layers, relative to eager layers.
    usable: share of the memory that a plan may use. measured: how rates were measured; "" if they are assumptions."""

    accelerator: Accelerator
    peak: float
    memory_rate: float
    link: float
    network: float
    host: float
    ranks: int = 8
    matmul: float = 0.7
    attention: float = 0.5
    copied: float = 0.8
    moved: float = 0.8
    host_memory: float = 25 * GB
    hop: float = 2e-6
    far_hop: float = 8e-6
    launch: float = 15e-6
    operated: float = 0.46
    fused: float = 0.4
    usable: float = 0.92
    measured: str = ""

    def lines(self) -> list[str]:
        """The assumptions, as lines to print."""
        return [
            f"{self.accelerator.name}: {self.peak / 1e12:g} TFLOP/s, memory {self.memory_rate / GB:g} GB/s; machines "
            f"of {self.ranks}: {self.link / GB:g} GB/s within a machine, {self.network / GB:g} GB/s per accelerator to "
            f"other machines, {self.host / GB:g} GB/s to the host;",
            f"matmuls reach {self.matmul:.0%} of the peak, attention {self.attention:.0%}; copies reach "
            f"{self.copied:.0%} of the memory's rate, other operations {self.operated:.0%}, "
            f"links {self.moved:.0%}; a hop of a ring takes {self.hop * 1e6:g} us, between machines "
            f"{self.far_hop * 1e6:g} us; an operation takes {self.launch * 1e6:.2g} us of host time.",
            f"Of these, matmuls, attention, memory, host and operations were measured: {self.measured}."
            if self.measured
            else "None of this was measured; --help lists options that override it.",
        ]

    def passing(self, size: float) -> float:
        """Seconds of passes over tensors that read and write `size` bytes."""
        return size / (self.memory_rate * self.copied)

    def operating(self, size: float) -> float:
        """Seconds of the operations between matmuls of a layer, which read and write `size` bytes."""
        return size / (self.memory_rate * self.operated)

    def ranks_here(self, size: int, stride: int) -> int:
        """The number of a group's ranks on one machine. stride: difference between the numbers of neighbours."""
        return max(1, min(size, self.ranks // stride)) if stride < self.ranks else 1

    def gathering(self, payload: float, size: int, stride: int) -> float:
        """Seconds of an all-gather or reduce-scatter in a ring. payload: bytes of the complete tensor."""
        if size == 1:
            return 0.0
        local = self.ranks_here(size, stride)
        machines = -(-size // local)
        within = payload * (size - 1) / size / (self.link * self.moved)
        between = payload * (1 - local / size) / (local * self.network * self.moved)
        return max(within, between) + (size - machines) * self.hop + (machines - 1) * self.far_hop

    def exchanging(self, payload: float, size: int, stride: int) -> float:
        """Seconds of an all-to-all. payload: bytes that each rank distributes evenly over the group, including
        itself."""
        if size == 1:
            return 0.0
        local = self.ranks_here(size, stride)
        within = payload * (local - 1) / size / (self.link * self.moved)
        between = payload * (size - local) / size / (self.network * self.moved)
        return max(within, between) + (self.far_hop if local < size else self.hop) * 2

    def sending(self, payload: float, stride: int) -> float:
        """Seconds of a message of `payload` bytes to a rank whose number differs by `stride`."""
        near = stride < self.ranks
        rate = self.link if near else self.network
        return payload / (rate * self.moved) + (self.hop if near else self.far_hop)


def machine_of(accelerator: Accelerator, **overrides: float | int | None) -> Machine:
    """The machine of an accelerator. overrides: values that replace fields, link and network in GB/s; None keeps a
    field. Raises UserError for a value out of range."""
    card, rates = ASSUMABLE[accelerator.name]
    machine = Machine(
        accelerator, card.peak * 1e12, rates.memory * GB, rates.link * GB, rates.network * GB, rates.host * GB,
        matmul=rates.matmul, attention=rates.attention,
    )  # fmt: skip
    machine = _as_measured(machine)
    changed: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    for name, value in changed.items():
        share = name in ("matmul", "attention")
        if not value > 0 or (share and value > 1):
            raise UserError(f"--{name} {value:g}: must be above 0{', and at most 1' if share else ''}.")
    for rate in ("link", "network"):
        if rate in changed:
            changed[rate] *= GB
    return replace(machine, **changed)


def _as_measured(machine: Machine) -> Machine:
    """The machine with the measurements on its accelerator, if there are any."""
    path = MEASURED / f"{machine.accelerator.name}.json"
    if not path.exists():
        return machine
    constants = json.loads(path.read_text())
    shares = {"matmul_rate": ("matmul", machine.peak), "attention_rate": ("attention", machine.peak)}
    shares["copy_rate"] = ("copied", machine.memory_rate)
    shares["operation_rate"] = ("operated", machine.memory_rate)
    changed: dict[str, Any] = {
        field: constants[name] / peak for name, (field, peak) in shares.items() if name in constants
    }
    if "host_rate" in constants:
        changed["host"] = constants["host_rate"] / machine.moved
    if "launch" in constants:
        changed["launch"] = constants["launch"]
    return replace(machine, **changed, measured=str(constants["source"]))
