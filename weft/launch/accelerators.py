"""The table of accelerators: the vendors' numbers, by the name that torch reports.

Peaks are dense 16-bit matmuls with fp32 accumulation, in TFLOP/s: half of a data sheet's number if that assumes
sparsity. Peaks of GeForce cards come from the architecture's white paper. Rates, for names that plans can assume, are
in GB/s: of the memory; of NVLink, Infinity Fabric or PCIe, in one direction; of the network for each accelerator, in
the usual machines; to the host, for the PCIe generation (NVLink-C2C for GH200, GB200 and GB300).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NVIDIA = "https://www.nvidia.com/en-us/data-center"
AMD = "https://www.amd.com/en/products/accelerators/instinct"


@dataclass(frozen=True, slots=True)
class Rates:
    """The assumptions of a plan. gib: memory that torch reports. memory, link, network, host: GB/s. matmul, attention:
    the shares of the peak that matmuls and attention reach."""

    gib: float
    memory: float
    link: float
    network: float
    host: float
    matmul: float = 0.7
    attention: float = 0.5


@dataclass(frozen=True, slots=True)
class Card:
    """A row. pattern: matches torch's name. peak: TFLOP/s. capability: CUDA's; None for AMD. source: of the peak. name:
    for `--assume`, with `rates`; "" if plans do not support the card."""

    pattern: str
    peak: float
    capability: tuple[int, int] | None
    source: str
    name: str = ""
    rates: Rates | None = None


# The first row with a matching pattern counts. The shares are 0.7 and 0.5 by default. Hopper's fractions are from 700
# TFLOP/s for 8192^3 matmuls and 350 for flash attention 2, which uses none of Hopper's newer instructions; A100's are
# from 250 and 190; MI300X's are from 650 for matmuls.
CARDS = (
    Card(r"\bGB300\b", 2500, (10, 3), f"{NVIDIA}/gb300-nvl72", "gb300-288gb",
         Rates(277.0, 8000, 900, 100, 450, 0.7, 0.15)),
    Card(r"\bGB200\b", 2500, (10, 0), f"{NVIDIA}/gb200-nvl72", "gb200-192gb",
         Rates(184.0, 8000, 900, 50, 450, 0.7, 0.15)),
    Card(r"\bB300\b", 2250, (10, 3), f"{NVIDIA}/hgx", "b300-288gb", Rates(268.0, 8000, 900, 100, 50, 0.7, 0.15)),
    Card(r"\bB200\b", 2250, (10, 0), f"{NVIDIA}/hgx", "b200-192gb", Rates(178.4, 8000, 900, 50, 50, 0.7, 0.15)),
    Card(r"\bB100\b", 1750, (10, 0), f"{NVIDIA}/hgx"),
    Card(r"\bGH200\b", 989, (9, 0), f"{NVIDIA}/grace-hopper-superchip", "gh200-96gb",
         Rates(94.5, 4000, 450, 50, 400, 0.7, 0.35)),
    Card(r"\bH200 NVL\b", 835, (9, 0), f"{NVIDIA}/h200"),
    Card(r"\bH200\b", 989, (9, 0), f"{NVIDIA}/h200", "h200-141gb", Rates(139.8, 4800, 450, 50, 50, 0.7, 0.35)),
    Card(r"\bH100 PCIe\b", 756, (9, 0), f"{NVIDIA}/h100"),
    Card(r"\bH100 NVL\b", 835, (9, 0), f"{NVIDIA}/h100"),
    Card(r"\bH[18]00\b", 989, (9, 0), f"{NVIDIA}/h100", "h100-80gb", Rates(79.1, 3350, 450, 50, 50, 0.7, 0.35)),
    Card(r"\bH20\b", 148, (9, 0), "NVIDIA H20 data sheet"),
    Card(r"\bA[18]00\b.*40GB", 312, (8, 0), f"{NVIDIA}/a100", "a100-40gb", Rates(39.4, 1555, 300, 25, 25, 0.8, 0.6)),
    Card(r"\bA[18]00\b", 312, (8, 0), f"{NVIDIA}/a100", "a100-80gb", Rates(79.1, 2039, 300, 25, 25, 0.8, 0.6)),
    Card(r"\bA40\b", 149.7, (8, 6), f"{NVIDIA}/a40"),
    Card(r"\bA30\b", 165, (8, 0), f"{NVIDIA}/products/a30-gpu"),
    Card(r"\bA10G\b", 70, (8, 6), "https://aws.amazon.com/ec2/instance-types/g5", "a10g-24gb",
         Rates(22.0, 600, 32, 3, 25)),
    Card(r"\bA10\b", 125, (8, 6), f"{NVIDIA}/products/a10-gpu", "a10-24gb", Rates(22.0, 600, 32, 3, 25)),
    Card(r"\bL40S\b", 362, (8, 9), f"{NVIDIA}/l40s", "l40s-48gb", Rates(44.4, 864, 32, 12.5, 25)),
    Card(r"\bL40\b", 181, (8, 9), f"{NVIDIA}/l40"),
    Card(r"\bL4\b", 121, (8, 9), f"{NVIDIA}/l4", "l4-24gb", Rates(22.0, 300, 32, 3, 25)),
    Card(r"\bRTX PRO 6000\b", 503.8, (12, 0), "NVIDIA RTX Blackwell PRO GPU architecture", "rtxpro6000-96gb",
         Rates(94.9, 1792, 64, 12.5, 50)),
    Card(r"\bRTX 6000 Ada\b", 364.2, (8, 9), "NVIDIA RTX 6000 Ada Generation data sheet", "rtx6000ada-48gb",
         Rates(47.4, 960, 32, 3, 25)),
    Card(r"\bRTX A6000\b", 154.8, (8, 6), "NVIDIA RTX A6000 data sheet", "rtxa6000-48gb", Rates(47.4, 768, 32, 3, 25)),
    Card(r"\bRTX A5000\b", 111.1, (8, 6), "NVIDIA RTX A5000 data sheet"),
    Card(r"\bRTX 5000 Ada\b", 261.1, (8, 9), "NVIDIA RTX 5000 Ada Generation data sheet"),
    Card(r"\bL20\b", 119.5, (8, 9), "NVIDIA L20 data sheet"),
    Card(r"\bRTX 5080\b", 112.6, (12, 0), "NVIDIA RTX Blackwell GPU architecture"),
    Card(r"\bRTX 5090\b", 209.5, (12, 0), "NVIDIA RTX Blackwell GPU architecture", "rtx5090-32gb",
         Rates(31.4, 1792, 64, 3, 50)),
    Card(r"\bRTX 4090\b", 165.2, (8, 9), "NVIDIA Ada GPU architecture", "rtx4090-24gb", Rates(23.5, 1008, 32, 3, 25)),
    Card(r"\bRTX 4080\b", 97.5, (8, 9), "NVIDIA Ada GPU architecture"),
    Card(r"\bRTX 3090 Ti\b", 80, (8, 6), "NVIDIA Ampere GA102 GPU architecture"),
    Card(r"\bRTX 3080\b", 59.5, (8, 6), "NVIDIA Ampere GA102 GPU architecture"),
    Card(r"\bRTX 3090\b", 71, (8, 6), "NVIDIA Ampere GA102 GPU architecture", "rtx3090-24gb",
         Rates(23.6, 936, 32, 3, 25)),
    Card(r"\bV100-PCIE\b", 112, (7, 0), f"{NVIDIA}/v100"),
    Card(r"\bV100S\b", 130, (7, 0), f"{NVIDIA}/v100"),
    Card(r"\bV100\b", 125, (7, 0), f"{NVIDIA}/v100", "v100-32gb", Rates(31.7, 900, 150, 12.5, 12, 0.7, 0.3)),
    Card(r"\bT4\b", 65, (7, 5), f"{NVIDIA}/tesla-t4", "t4-16gb", Rates(14.6, 320, 16, 3, 12, 0.7, 0.3)),
    Card(r"\bMI355X\b", 2516, None, f"{AMD}/mi350/mi355x.html"),
    Card(r"\bMI350X\b", 2307, None, f"{AMD}/mi350/mi350x.html"),
    Card(r"\bMI3(00|25)X\b", 1307, None, f"{AMD}/mi300/mi300x.html", "mi300x-192gb",
         Rates(191.5, 5300, 448, 50, 50, 0.5, 0.3)),
    Card(r"\bMI300A\b", 980.6, None, f"{AMD}/mi300/mi300a.html"),
    Card(r"\bMI250X\b", 383, None, f"{AMD}/mi200/mi250x.html"),
)  # fmt: skip
ASSUMABLE = {
    card.name: (card, card.rates)
    for card in sorted(CARDS, key=lambda card: 0.0 if card.rates is None else card.rates.gib)
    if card.rates is not None
}


def card_of(device: str) -> Card | None:
    """The row for a name that torch reports; None if there is none."""
    return next((card for card in CARDS if re.search(card.pattern, device)), None)


def limits_of(capability: tuple[int, int] | None, bf16: bool) -> str:
    """The limitations of a device with this capability (None: AMD's), which a user must know before a run; "" if there
    are none. bf16: whether the run computes in bf16."""
    if capability is None:
        return (
            "weft does not support AMD accelerators: kernels, collectives and memory are written for CUDA and have not "
            "been run on ROCm"
        )
    if capability >= (8, 0):
        return ""
    slow = ", and bf16 is emulated, which is slow: set fsdp.param_dtype=fp16" if bf16 else ""
    return (
        f"compute capability {capability[0]}.{capability[1]}: weft uses the attention kernel per_document, because "
        f"flash attention needs 8.0{slow}"
    )
