"""Peak memory of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weft.observe.profiling import own_peak_memory_gib

CPU = torch.device("cpu")


def grow(mib: int) -> float:
    before = own_peak_memory_gib(CPU)
    block = torch.ones(mib << 18)  # fp32
    del block
    return own_peak_memory_gib(CPU) - before


def test_the_peak_outlives_the_memory() -> None:
    # The process may have been larger before; 512 MiB on top of now can only raise the peak by as much or less.
    assert 0.0 < own_peak_memory_gib(CPU) < 1024.0
    assert 0.0 <= grow(512) < 0.6


PAGE_FAULTS = """
import resource, sys
from weft.launch.machine import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", PAGE_FAULTS, how], check=True, capture_output=True).stdout)
        for how in ("kept", "returned")
    }
    assert faults["kept"] + 16 < faults["returned"], faults  # with huge pages there are few


GAPS = """
import sys
from pathlib import Path
from weft.launch.machine import HeapGaps, keep_freed_memory

def resident(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) >> 10  # MiB

keep_freed_memory()
gaps, kept, before = HeapGaps(), [], resident("VmRSS")
for layer in range(8):
    if sys.argv[1] == "closed":
        gaps.before_layer()
    temporary = b"x" * (20 + 2 * layer << 20)
    kept.append(b"x" * (36 << 20))
    del temporary
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_gaps_between_kept_tensors_do_not_add_up() -> None:
    """At most 322 MiB are in use: eight kept tensors and the last temporary one. Each of these is larger than the one
    before, and does not fit into its gap."""
    grown = {
        how: int(subprocess.run([sys.executable, "-c", GAPS, how], check=True, capture_output=True).stdout)
        for how in ("closed", "left")
    }
    assert grown["closed"] < 430 < 480 < grown["left"], grown
