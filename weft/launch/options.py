"""The options of each command that are not config keys. weft/parsers.py makes parsers and --help from these classes.
Imports no torch.

An option is a field: its name (`--max-new-tokens` for max_new_tokens), its type (bool: a switch; Literal: choices),
its default, and its line of help. A field without help, such as `world`, is computed and is not an option.
"""
# ruff: noqa: RUF009 - option() and argument() are dataclasses.field()

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.config.sources import HUB_NAME, is_hub_name

Device = Literal["auto", "cpu", "cuda"]
Detail = Literal["quiet", "normal", "verbose"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]


def option(
    help: str,
    metavar: str | None = None,
    *,
    default: Any = None,
    type: Callable[[str], Any] | None = None,
    name: str | None = None,
    group: str | None = None,
    exclusive: str | None = None,
    needs: str | None = None,
) -> Any:
    """A field that is an option. type: converts the text; None: the text is the value. name: without dashes, if it
    differs from the field's. group: the heading in --help. exclusive: options with the same word exclude each other.
    needs: the option without which this one has no effect, so that weft refuses it."""
    about: dict[str, Any] = {"metavar": metavar, "type": type}
    about = {"help": help} | {key: value for key, value in about.items() if value is not None}
    spec = {"option": about, "name": name, "group": group, "exclusive": exclusive, "needs": needs}
    return field(default=default, metadata=spec)


def argument(
    help: str, metavar: str, *, nargs: Literal["*", "+"] | None = None, type: Callable[[str], Any] | None = None
) -> Any:
    """A field that is a positional argument. nargs: `*` for any number of words, `+` for one or more."""
    spec = {"help": help, "metavar": metavar, "nargs": nargs, "type": type}
    metadata = {"argument": {key: value for key, value in spec.items() if value is not None}}
    return field(default=(), metadata=metadata) if nargs == "*" else field(metadata=metadata)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def _ranks(text: str) -> int:
    if _count(text) > 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is too many: weft plans for up to 1,000,000 ranks")
    return int(text)


def _hub_name(text: str) -> str:
    if not is_hub_name(text):
        raise argparse.ArgumentTypeError(f"{text} must be {HUB_NAME}")
    return text


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a temperature: write a number, 0 or more")
    return value


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a number, 0 or more")
    return int(text)


# Help texts that several commands share.
_CONFIG = "CONFIG | section.key=value"
_NEWEST = "a run folder means its newest checkpoint"
_STEP = "with a run folder: use the checkpoint of this step"


def _device() -> Any:
    return option("default: %(default)s", default="auto")


def _imports() -> Any:
    text = "a module that registers your architecture (for a run, weft uses its model.imports)"
    return option(text, "MODULE", default=(), name="import")


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of all commands."""

    debug: bool = option("also show tracebacks for configuration and data mistakes", default=False)


@dataclass(frozen=True, kw_only=True)
class RankOptions(CommandOptions):
    """Options of commands that read a config and start ranks. world: number of ranks of the complete run, or in `weft
    rl` of trainer ranks; a dry run describes all of them from one process."""

    config: Sequence[str] = argument("YAML files, merged left to right, and overrides", _CONFIG, nargs="*")
    nproc: int | None = option(
        "ranks to start on this machine (default: as in --resume RUN, otherwise one per accelerator, or 1)",
        "N",
        type=_count,
    )
    device: Device = _device()
    world: int = 1


@dataclass(frozen=True, kw_only=True)
class RunOptions(RankOptions):
    """Options of commands that train."""

    resume: str | None = option("continue this run from its newest checkpoint, with its config", "RUN")
    dry_run: bool = option(
        "check config and data, print config, mesh, memory and steps, and train nothing", default=False
    )
    parameters: bool = option("with --dry-run: print one line per parameter", default=False, needs="dry_run")
    json: bool = option("with --dry-run: print config and model as JSON only", default=False, needs="dry_run")
    assume: str | None = option(
        "with --dry-run: assume these accelerators, such as h100-80gb, instead of yours", "DEVICE", needs="dry_run"
    )
    quiet: bool = option(
        "print only the most important lines at the start", default=False, exclusive="lines at the start"
    )
    verbose: bool = option(
        "print all of RUN/opening.txt at the start: dtypes, units, kernels",
        default=False,
        exclusive="lines at the start",
    )

    restarts: int = option(
        "after a crash, restart from the last checkpoint, up to N times. weft does not restart after a configuration "
        "mistake, or if the same error repeats at one step",
        "N", default=0, type=_number,
    )  # fmt: skip

    @property
    def detail(self) -> Detail:
        """How many of the first lines are printed."""
        return "quiet" if self.quiet else "verbose" if self.verbose else "normal"


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """`weft sft`, and commands that share its loop (weft/recipes/training.py)."""


@dataclass(frozen=True, kw_only=True)
class RlOptions(RunOptions):
    """`weft rl`."""

    rollout_only: bool = option("generate and reward samples into RUN/rollouts, and train nothing", default=False)
    replay: str | None = option("train on these rollouts, in their order, instead of generating", "RUN/rollouts")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(RankOptions):
    """`weft verify`."""

    layers: int | None = option("verify a copy of the model with only N layers", "N", type=_count)
    plant: str | None = option("plant a known bug, to show that weft verify detects it", "NAME")
    rollouts: str | None = option(
        "for a weft rl config: train on these rollouts (default: artificial edge cases)", "RUN/rollouts"
    )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a relative tolerance: write a number above 0 and below 1")
    return value


@dataclass(frozen=True, kw_only=True)
class CompareStepOptions(CommandOptions):
    """`weft compare-step`."""

    dump: str = argument(
        "the other trainer's batch: .npz, .safetensors, .jsonl, .pt, .pkl; or a folder of files of one step", "DUMP"
    )
    config: Sequence[str] = argument("as for weft rl", _CONFIG, nargs="*")
    tolerance: float = option(
        "maximum relative difference of numbers that agree (default: %(default)s)", "X", default=1e-4, type=_tolerance
    )
    loss: float | None = option("the other trainer's loss, if the file has none", "X", type=float)
    grad_norm: float | None = option("the other trainer's gradient norm, if the file has none", "X", type=float)
    device: Device = _device()


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """`weft export`."""

    path: str = argument(_NEWEST, "RUN | CHECKPOINT | DCP")
    dtype: Dtype | None = option("default: bf16")
    output: str | None = option("where to write (default: next to the checkpoint)", "DIR")
    check: bool = option("write nothing: compare existing files with their recorded digests", default=False)
    ema: bool = option("write the average of the weights (optimizer.ema_decay) instead of the weights", default=False)
    format: Literal["hf", "dcp"] = option(
        "a HuggingFace directory (default), or a directory for torch.distributed.checkpoint", default="hf"
    )
    optimizer: bool = option("with --format dcp: also write the optimizer state", default=False)
    model: str | None = option(
        "for another trainer's directory in torch.distributed.checkpoint format: the HuggingFace model with its config "
        "and tokenizer",
        "MODEL",
    )
    imports: Sequence[str] = _imports()

    @property
    def weights_dtype(self) -> Dtype:
        return self.dtype or "bf16"


@dataclass(frozen=True, kw_only=True)
class PushOptions(CommandOptions):
    """`weft push`."""

    path: str = argument(_NEWEST, "RUN | CHECKPOINT")
    repository: str = argument("created if it does not exist", "OWNER/NAME", type=_hub_name)
    private: bool = option("create a private repository", default=False)
    revision: str | None = option("created if it does not exist (default: main)", "BRANCH")
    message: str | None = option("commit message (default: Upload step-N)", "TEXT")
    step: int | None = option(_STEP, "N", type=_count, exclusive="checkpoint")
    best: bool = option(
        "with a run folder: use the best checkpoint (checkpoint.keep_best)", default=False, exclusive="checkpoint"
    )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(CommandOptions):
    """`weft merge`."""

    path: str = argument(_NEWEST, "RUN | ADAPTER")
    base: str | None = option("use this base model instead of the adapter's", "MODEL")
    dtype: Dtype = option("default: each tensor as in the base", default="auto")
    base_format: Literal["compute", "nf4", "int8", "fp8"] | None = option(
        "merge into the base in the format of this lora.base (default: as in the files; with lora.init=loftq, the "
        "run's)"
    )
    output: str | None = option("where to write (default: next to the adapter)", "DIR")
    imports: Sequence[str] = _imports()


@dataclass(frozen=True, kw_only=True)
class ChatOptions(CommandOptions):
    """`weft chat`."""

    path: str = argument(_NEWEST, "RUN | MODEL")
    step: int | None = option("use the checkpoint of this step", "N", type=_count)
    system: str | None = option("a system message", "TEXT")
    images: Sequence[str] = option(
        "an image before the first message, for a vision model; repeat for more", "PATH", default=(), name="image"
    )
    max_new_tokens: int = option("maximum length of an answer (default: %(default)s)", "N", default=512, type=_count)
    temperature: float | None = option(
        "0: always the most likely token (default: from generation_config.json)", "T", type=_temperature
    )
    device: Device = _device()
    imports: Sequence[str] = _imports()


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommandOptions):
    """`weft report`."""

    runs: Sequence[str] = argument("run folders; with several, the page compares them", "RUN", nargs="+")
    output: str | None = option("where to write (default: RUN/report.html)", "FILE")
    follow: bool = option("rewrite the page until the runs end; it reloads itself in the browser", default=False)
    every: int = option(
        "seconds between two versions of the page (default: %(default)s)", "SECONDS", default=15, type=_count
    )


@dataclass(frozen=True, kw_only=True)
class WatchOptions(CommandOptions):
    """`weft watch`."""

    run: str = argument("run folder of any command that trains", "RUN")
    once: bool = option("print once, also without a terminal", default=False)
    every: int = option("seconds between two readings (default: %(default)s)", "SECONDS", default=2, type=_count)


@dataclass(frozen=True, kw_only=True)
class RolloutsOptions(CommandOptions):
    """`weft rollouts`."""

    run: str = argument("run folder of weft rl", "RUN")
    step: int | None = option("rollout step (default: the last)", "N", type=_count)
    groups: int = option("prompts to show (default: %(default)s)", "N", default=5, type=_count)
    samples: int = option("answers to each prompt, best first (default: %(default)s)", "N", default=3, type=_count)
    order: Literal["drawn", "best", "worst"] = option("order of the prompts (default: %(default)s)", default="drawn")


@dataclass(frozen=True, kw_only=True)
class PreviewOptions(CommandOptions):
    """`weft data preview`. world: number of ranks for which steps are planned."""

    config: Sequence[str] = argument("as for weft sft", _CONFIG, nargs="*")
    nproc: int | None = option(
        "number of ranks for planning rows (default: the product of mesh, otherwise 1)", "N", type=_count
    )
    samples: int = option("documents to show (default: %(default)s)", "N", default=3, type=_number)
    full: bool = option("show all tokens of these documents", default=False)
    sample: bool = option("read only a part of large files: faster, but misses bad rows in the rest", default=False)
    world: int = 1


_MACHINES = "assumptions about machines (default: the vendor's data sheet)"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CommandOptions):
    """`weft plan`. launch/machine.py has the names of accelerators; recipes/plan/machines.py has the defaults of the
    assumptions."""

    config: Sequence[str] = argument("as for weft sft or weft rl", _CONFIG, nargs="*")
    ranks: int = option(
        "number of ranks (default: the product of mesh); weft starts none of them", "N", default=0, type=_ranks
    )
    assume: str = option("accelerators (default: %(default)s)", "DEVICE", default="h100-80gb")
    length: int | None = option("tokens of every document (default: the lengths in the data)", "N", type=_count)
    machine: int | None = option("accelerators per machine (default: 8)", "N", type=_count, group=_MACHINES)
    link: float | None = option(
        "bandwidth from one accelerator to others in its machine", "GB/S", type=float, group=_MACHINES
    )
    network: float | None = option(
        "bandwidth from one accelerator to other machines", "GB/S", type=float, group=_MACHINES
    )
    matmul: float | None = option(
        "fraction of peak FLOP/s that matrix multiplications reach", "SHARE", type=float, group=_MACHINES
    )
    attention: float | None = option(
        "fraction of peak FLOP/s that attention reaches", "SHARE", type=float, group=_MACHINES
    )
    search: bool = option("find the five best meshes for these ranks", default=False)
    simulate: bool = option("also simulate a step on this mesh, with tensors without values", default=False)


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(CommandOptions):
    """`weft eval`."""

    path: str = argument(_NEWEST, "RUN | MODEL")
    config: Sequence[str] = argument(
        "held-out rows, in the forms of data.path, and overrides; with rl.reward, weft samples answers and rewards "
        "them",
        "DATA | section.key=value", nargs="*",
    )  # fmt: skip
    step: int | None = option(_STEP, "N", type=_count)
    nproc: int | None = option("ranks to start here (default: one per accelerator, or 1)", "N", type=_count)
    json: bool = option("print one line of JSON instead of a table", default=False)
    output: str | None = option("also write the results to FILE, as JSON", "FILE")
    device: Device = _device()
    world: int = 1


@dataclass(frozen=True, kw_only=True)
class InitOptions(CommandOptions):
    """`weft init`."""

    words: Sequence[str] = argument(
        "the command (default: sft), and keys to set", "sft | rl | section.key=value", nargs="*"
    )
    output: str | None = option("where to write (default: standard output)", "FILE")


@dataclass(frozen=True, kw_only=True)
class KeysOptions(CommandOptions):
    """`weft keys`."""

    words: Sequence[str] = argument("part of a key, of its meaning, or of another trainer's name", "WORD", nargs="*")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(CommandOptions):
    """`weft engine`."""

    what: Sequence[str] = argument(
        "install vllm: create or repair an environment with vLLM; check NAME: check the engine of an installed package",
        "COMMAND",
        nargs="+",
    )
    python: str | None = option("folder of the environment (default: the folder that rollout.python=null uses)", "DIR")
    torch: str = option("pip arguments for installing torch, such as '--index-url URL'", "ARGUMENTS", default="")
    device: Device = _device()


@dataclass(frozen=True, kw_only=True)
class PluginsOptions(CommandOptions):
    """`weft plugins`."""

    what: Sequence[str] = argument(
        "engine, environment or reward, and a name: check that it meets the requirements of a run",
        "KIND NAME",
        nargs="*",
    )
    row: str = option("a row of data, as JSON, that is passed to an environment or a reward", "JSON", default="{}")


@dataclass(frozen=True, kw_only=True)
class MigrateOptions(CommandOptions):
    """`weft migrate`."""

    files: Sequence[str] = argument(
        "YAML or TOML of TRL, axolotl, LLaMA-Factory, torchtune, accelerate, verl, ROLL, torchtitan or Automodel; or a "
        "launch script (.sh)",
        "FILE", nargs="+",
    )  # fmt: skip
    nproc: int | None = option("GPUs of the old run (default: as in the files, otherwise 1)", "N", type=_count)
