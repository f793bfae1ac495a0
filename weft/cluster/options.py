"""What the command line says beside the config. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """`weft sft`. world: ranks of the whole run; a dry run describes that many from one process.

    resume: the run folder whose newest checkpoint the run goes on from.
    dry_run: print the resolved config, the mesh and the sharding, and train nothing. parameters: in a dry run, also
    one line per parameter.
    """

    device: Device = "auto"
    world: int = 1
    resume: str | None = None
    ema: bool = False
    dry_run: bool = False
    parameters: bool = False
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """`weft verify`. layers: verify a copy of the model cut to so many layers. plant: name of a bug to plant."""

    device: Device = "auto"
    world: int = 1
    layers: int | None = None
    plant: str | None = None
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """`weft export`. path: a run folder or a checkpoint. output: null for a folder beside the checkpoint.

    ema: the average of the weights (optimizer.ema_decay) instead of the masters.
    """

    path: str
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "bf16"
    output: str | None = None
    ema: bool = False


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """`weft merge`. path: a run folder, one of its checkpoints, or an adapter of peft's. base: instead of the model
    that the adapter names. output: null for a folder beside the adapter."""

    path: str
    base: str | None = None
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    output: str | None = None
