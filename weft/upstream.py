"""Bugs of torch that change numbers or memory or hang a run, and weft's workarounds.

`present` tests whether the installed torch has a bug, by the code that its fix adds. It is None if only a device can
show the bug; a run then tests for it at the start (engine/selfcheck/device.py). A test fails if a bug is fixed in the
installed version, or if `present` is None and `known` does not include this version. Then read the bug's thread, and
either widen `known`, or remove the entry and the workaround.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class UpstreamBug:
    """A bug of torch. effect: on a run. weft: the workaround, with its file. known: (oldest, newest) version of torch
    whose source has the bug, or for which its thread is open."""

    name: str
    url: str
    effect: str
    weft: str
    known: tuple[tuple[int, int], tuple[int, int]]
    present: Callable[[], bool] | None = None


@cache
def hsdp_offload_races() -> bool:
    """Whether FSDP2 may free a reduced gradient while the all-reduce stream still copies it to pinned memory.

    The fix keeps it in the context that all units share.
    """
    return not _communication_keeps("grad_offload_state")


@cache  # inspect parses torch's whole file, and a search calls this for every candidate
def _all_reduce_buffers_stay() -> bool:
    return not _communication_keeps("all_reduce_state")


def _communication_keeps(name: str) -> bool:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return f"self.{name}" in inspect.getsource(_fsdp_param_group.FSDPCommContext)


HSDP_OFFLOAD = UpstreamBug(
    "hsdp-offload-race",
    "https://github.com/pytorch/pytorch/pull/180665",
    "where units are replicated (mesh.dp_replicate, or `fsdp.overrides` with `replicate` or a number) and "
    "fsdp.cpu_offload copies gradients to pinned memory, other tensors overwrite gradients under the copy",
    "such units are not pinned, so that the copy blocks (parallel/fsdp.py)",
    ((2, 11), (2, 13)),
    hsdp_offload_races,
)
HSDP_BUFFERS = UpstreamBug(
    "hsdp-reduce-buffers",
    "https://github.com/pytorch/pytorch/pull/179443",
    "where units are replicated and gradients are reduced in another dtype than the masters', the reduced gradients of "
    "all units stay until the end of backward: fsdp.reduce_dtype bytes of every parameter's shard",
    "weft plan counts them (recipes/plan/memory.py); with fp32 masters and fsdp.reduce_dtype=fp32, the defaults, they "
    "are the gradients themselves",
    ((2, 11), (2, 13)),
    _all_reduce_buffers_stay,
)
GROUPED_MM_EMPTY = UpstreamBug(
    "grouped-mm-empty-groups",
    "https://github.com/pytorch/pytorch/issues/172439",
    "on Blackwell (sm100) the gradient of an expert without tokens is not written, so it is what the memory held",
    "a run with experts tries its grouped matmul at start with empty groups, and where it is wrong sets the gradients "
    "of experts without tokens to 0 (engine/selfcheck/device.py, models/experts.py)",
    ((2, 9), (2, 15)),
)
GROUPED_MM_NO_ROWS = UpstreamBug(
    "grouped-mm-no-rows",
    "https://github.com/pytorch/pytorch/issues/152668",
    "the weight gradient of a grouped matmul without any row hangs, or fails in a compiled region (also pull/192497)",
    "a rank of mesh.ep without tokens computes one row of zeros (ops/dispatch.py)",
    ((2, 9), (2, 15)),
)

BUGS = (HSDP_OFFLOAD, HSDP_BUFFERS, GROUPED_MM_EMPTY, GROUPED_MM_NO_ROWS)


def out_of_date(installed: tuple[int, int]) -> list[str]:
    """A sentence for each entry that is not confirmed for the installed version of torch, or not true there."""
    lines = []
    for bug in BUGS:
        version = ".".join(map(str, installed))
        if bug.present is None and not bug.known[0] <= installed <= bug.known[1]:
            lines.append(f"{bug.name}: not checked for torch {version} ({bug.url})")
        elif bug.present is not None and not bug.present():
            lines.append(f"{bug.name}: fixed in torch {version} ({bug.url})")
    return lines
