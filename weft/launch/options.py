"""The options of each command, apart from the config. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
Detail = Literal["quiet", "normal", "verbose"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every command that trains. world: ranks of the whole run, in `weft rl` trainer ranks; a dry run
    describes that many from one process.

    resume: the run folder whose newest checkpoint is resumed. dry_run: print the resolved config, the mesh and the
    sharding, and train nothing. parameters: in a dry run, also one line per parameter. json: in a dry run, config and
    model as JSON, and nothing else. assume: in a dry run, the accelerator of each rank, by its name in
    launch/machine.py. quiet: print the essential lines of the opening only. verbose: print all of it, tables included.
    """

    device: Device = "auto"
    world: int = 1
    resume: str | None = None
    dry_run: bool = False
    parameters: bool = False
    json: bool = False
    assume: str | None = None
    quiet: bool = False
    verbose: bool = False
    debug: bool = False

    @property
    def detail(self) -> Detail:
        """How much of the opening is printed."""
        return "quiet" if self.quiet else "verbose" if self.verbose else "normal"


@dataclass(frozen=True, kw_only=True)
class SftOptions(RunOptions):
    """`weft sft`."""


@dataclass(frozen=True, kw_only=True)
class RlOptions(RunOptions):
    """`weft rl`. replay: train from the rollouts of this folder, RUN/rollouts of another run, instead of new ones.
    rollout_only: generate and reward, and train nothing.
    """

    replay: str | None = None
    rollout_only: bool = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """`weft verify`. layers: number of layers to which a copy of the model is cut. plant: name of a bug to plant.

    rollouts: with a config of `weft rl`, the RUN/rollouts to train from, instead of synthetic ones.
    """

    device: Device = "auto"
    world: int = 1
    layers: int | None = None
    plant: str | None = None
    rollouts: str | None = None
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """`weft export`. path: a run folder, a checkpoint, or a directory of torch.distributed.checkpoint. output: None for
    a folder next to it.

    ema: export the average of the weights (optimizer.ema_decay) instead of the masters. format: output format.
    optimizer: with format dcp, write the optimizer's state, too. model: for a directory of
    torch.distributed.checkpoint, the HuggingFace model whose config and tokenizer belong to it. imports: modules that
    register architectures, beside model.imports of a run.
    """

    path: str
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "bf16"
    output: str | None = None
    ema: bool = False
    format: Literal["hf", "dcp"] = "hf"
    optimizer: bool = False
    model: str | None = None
    imports: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """`weft push`. path: a run folder or a checkpoint. repository: OWNER/NAME on the hub. private: whether a new
    repository is private. revision: a branch; None for main. message: of the commit. step, best: which checkpoint of a
    run folder; by default the newest."""

    path: str
    repository: str
    private: bool = False
    revision: str | None = None
    message: str | None = None
    step: int | None = None
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """`weft merge`. path: a run folder, one of its checkpoints, or a peft adapter. base: replaces the model that the
    adapter names. output: None for a folder next to the adapter. imports: as for `weft export`."""

    path: str
    base: str | None = None
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    output: str | None = None
    imports: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """`weft chat`. path: a run folder, a model directory or a hub id. step: of a run folder; None for the newest.

    images: paths of images before the first message. temperature: 0 is greedy; None for that of generation_config.json.
    imports: as for `weft export`.
    """

    path: str
    step: int | None = None
    system: str | None = None
    images: tuple[str, ...] = ()
    max_new_tokens: int = 512
    temperature: float | None = None
    device: Device = "auto"
    imports: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """`weft report`. runs: run folders. output: the page; None for RUN/report.html, or report.html for several runs."""

    runs: tuple[str, ...]
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutsOptions:
    """`weft rollouts`. run: the folder of a run of weft rl. step: rollout step; None for the last. groups, samples: the
    number of prompts, and of answers per prompt, to show. order: of the prompts."""

    run: str
    step: int | None = None
    groups: int = 5
    samples: int = 3
    order: Literal["drawn", "best", "worst"] = "drawn"


@dataclass(frozen=True, kw_only=True)
class PreviewOptions:
    """`weft data preview`. world: ranks of the steps that are planned. samples: the number of documents to show. full:
    show all of their tokens. sample: read only a part of large files and extrapolate."""

    world: int = 1
    samples: int = 3
    full: bool = False
    sample: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """`weft plan`. ranks: number of ranks of the planned run; none is started. assume: the accelerator of each rank, by
    its name in launch/machine.py. length: tokens of every document; None for the lengths of the data. search: propose
    meshes instead of describing the config's. simulate: run a step of one rank of the real mesh with tensors that hold
    nothing. machine: ranks per machine. link, network: GB/s of a rank within its machine and to other machines. matmul,
    attention: share of the peak that they reach. None: as in recipes/plan/machines.py."""

    ranks: int = 1
    assume: str = "h100-80gb"
    length: int | None = None
    machine: int | None = None
    link: float | None = None
    network: float | None = None
    matmul: float | None = None
    attention: float | None = None
    search: bool = False
    simulate: bool = False
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """`weft eval`. world: ranks. json: print one line of JSON instead of a table. output: a file for the figures, as
    JSON."""

    device: Device = "auto"
    world: int = 1
    json: bool = False
    output: str | None = None
    debug: bool = False
