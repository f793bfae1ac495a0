"""The commands of `weft`.

The process that the user starts reads and checks the config without importing torch, so that errors in it are shown at
once. Then it runs the recipe, or starts ranks, which run this same command line and join.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast

from weft import parsers
from weft.api import rl_options
from weft.checkpoint.remote.enter import fetched_config
from weft.checkpoint.remote.local import local_path
from weft.checkpoint.retention import ranks_of
from weft.config import SftConfig, check_reshard, load_config, resolve_mesh, shrink_mesh
from weft.config.load import chosen_keys, read_config_file, written_config
from weft.config.mesh import AXES, fewest_ranks
from weft.config.migrate.migrate import migrate_and_compare
from weft.config.reference import SCHEMAS, find_keys, starter
from weft.config.rl_schema import RlConfig
from weft.config.urls import is_url, uses_stores
from weft.config.yaml12 import override
from weft.errors import UserError
from weft.launch.entrypoint import Body, env_rank, guarded, joined, program
from weft.launch.launch import ResumeCommand, run, run_with_restarts
from weft.launch.launchers import join_launcher
from weft.launch.machine import accelerator, accelerator_count, check_ranks_fit, cpu_cores
from weft.launch.options import (
    ChatOptions,
    ExportOptions,
    MeasureOptions,
    MergeOptions,
    PlanOptions,
    PreviewOptions,
    PushOptions,
    ReportOptions,
    RlOptions,
    RolloutsOptions,
    SftOptions,
    VerifyOptions,
)
from weft.launch.reports import folder as launchers_folder
from weft.launch.status import SUCCESS, USER_ERROR
from weft.launch.stopping import announce_ending_signal
from weft.observe.measured import measured_config
from weft.observe.profiling import check_profile
from weft.observe.trackers import check_installed
from weft.parsers import OTHER_COMMANDS, SUMMARIES
from weft.terminal import clean_everything, display_name, say, say_all
from weft.version import __version__

Schema = TypeVar("Schema")
Options = TypeVar("Options")
AnyConfig = SftConfig | RlConfig

_PROGRAM_HELP = """\
usage: weft COMMAND [CONFIG ...] [section.key=value ...] [options]

Post-train HuggingFace models with PyTorch FSDP2.

commands:
{commands}

weft COMMAND --help lists the options; docs/reference/config.md lists the keys. weft --version prints the version.
"""


@dataclass(frozen=True)
class Job:
    """A checked command. body: what each rank runs. world: number of ranks. words: the command line of a rank.

    restarts: how often a failed attempt may be followed by another. again: RUN -> the command line of that attempt.
    """

    body: Body
    world: int
    words: Sequence[str]
    restarts: int = 0
    resume_command: ResumeCommand | None = None


@dataclass(frozen=True)
class Command:
    """A subcommand: its parser, and the function that makes a job from the parsed arguments and the command line."""

    parser: Callable[[], argparse.ArgumentParser]
    prepare: Callable[[argparse.Namespace, Sequence[str]], Job]


def entry() -> NoReturn:
    """Run the program `weft`; every rank that it starts runs this, too."""
    clean_everything()
    try:
        join_launcher()
    except UserError as error:  # without `guarded`, which would set this process up as a rank
        say(f"error: {error}", error=True)
        sys.exit(USER_ERROR)
    if not joined():  # the launcher needs the exit statuses that signals give to ranks
        announce_ending_signal()
    program(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit status (docs/reference/failures.md)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        return guarded(lambda: say(_program_help())) or (SUCCESS if words else USER_ERROR)
    if words[0] == "--version":
        return guarded(lambda: say(f"weft {__version__}"))
    debug = "--debug" in words
    jobs: list[Job] = []

    def prepare() -> None:
        jobs.append(_prepare(words))

    status = guarded(prepare, debug)
    if status != SUCCESS:
        return status
    job, weft = jobs[0], [sys.executable, "-m", "weft"]
    resume_command = job.resume_command
    if job.restarts and resume_command is not None:
        command = [*weft, *job.words]
        return run_with_restarts(command, lambda run: [*weft, *resume_command(run)], job.world, job.restarts, debug)
    return run(job.body, [*weft, *job.words], job.world, debug)


def _prepare(words: Sequence[str]) -> Job:
    command = COMMANDS.get(words[0])
    if command is None:
        raise UserError(_unknown_command(words[0]))
    return command.prepare(command.parser().parse_intermixed_args(words[1:]), words)


def _sft(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    config = _load_run(arguments, SftConfig)
    world = _world(arguments, config)
    check_installed(config.track)
    check_profile(config.profile, world=world)
    options = _options(SftOptions, arguments, world=world)

    def body() -> None:
        from weft.recipes import sft

        if not options.dry_run or env_rank() == 0:
            sft.run(config, options)

    if options.dry_run:
        return Job(body, 1, words)  # one process describes all ranks
    return Job(body, world, words, _restarts(arguments), lambda run: _resume_command(arguments, words, run))


def _rl(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("rl")
    config = _load_run(arguments, RlConfig)
    resolved = rl_options(config, arguments.device, _ranks_wanted(arguments, config))
    options = _options(RlOptions, arguments, device=resolved.device, world=resolved.world)

    def body() -> None:
        from weft.recipes import rl, rl_preview

        (rl_preview.dry_run if options.dry_run else rl.run)(config, options)

    return Job(body, 1, words)


def _check_dry_run(arguments: argparse.Namespace) -> None:
    """Raise UserError if an option of dry runs is given without --dry-run."""
    for option, value in (
        ("--parameters", arguments.parameters),
        ("--json", arguments.json),
        ("--assume", arguments.assume),
    ):
        if value and not arguments.dry_run:
            raise UserError(f"{option} needs --dry-run: add it.")
    if accelerator(arguments.assume) is not None:
        arguments.device = "cpu"  # this machine's accelerators are not used


def _restarts(arguments: argparse.Namespace) -> int:
    """The number of restarts that this process makes: 0 in its ranks, which get the option, too."""
    if arguments.restarts and joined() and launchers_folder() is None:
        raise UserError("--restarts only restarts ranks that weft started: under torchrun use its --max-restarts.")
    return 0 if joined() else int(arguments.restarts)


def _resume_command(arguments: argparse.Namespace, words: Sequence[str], run: Path) -> Sequence[str]:
    """The command line of an attempt that resumes RUN, whose config.yaml has the config files and overrides."""
    if arguments.resume is not None:
        return words
    options = ["--device", arguments.device] + (["--nproc", str(arguments.nproc)] if arguments.nproc else [])
    options += [f"--{name}" for name in ("quiet", "verbose", "debug") if getattr(arguments, name)]
    return ["sft", "--resume", display_name(str(run)), *options]


def _verify(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    config = _load(arguments, RlConfig) if _names_rl(arguments) else _load(arguments, SftConfig)
    if arguments.rollouts is not None and not isinstance(config, RlConfig):
        raise UserError("--rollouts needs a weft rl config, and this config has no section rl.")
    if arguments.layers is not None and arguments.layers < 1:
        raise UserError(f"--layers is {arguments.layers}; it must be 1 or more.")
    if not joined() and arguments.nproc is None:
        config, words = _fit_to_machine(config, arguments, words)
    world = _world(arguments, config)
    options = _options(VerifyOptions, arguments, world=world)

    def body() -> bool:
        from weft.recipes import verify

        return verify.run(config, options)

    return Job(body, world, words)


def _plan(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("plan")
    arguments.dry_run = True  # like a dry run, it needs no weights
    schema = RlConfig if _names_rl(arguments) else SftConfig
    config: Any = _load(arguments, schema)
    accelerator(arguments.assume)
    ranks = (
        arguments.ranks or getattr(getattr(config, "cluster", None), "trainer_ranks", None) or fewest_ranks(config.mesh)
    )
    if not arguments.search:
        check_reshard(config, resolve_mesh(config.mesh, ranks, "--ranks"))
    options = _options(PlanOptions, arguments, ranks=ranks)

    def body() -> None:
        from weft.recipes.plan import recipe as plan

        plan.run(config, options)

    return Job(body, 1, words)


def _export(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("export")
    if arguments.check and (arguments.dtype or arguments.output or arguments.ema):
        raise UserError("--check writes nothing: remove --dtype, --output and --ema.")
    if arguments.optimizer and arguments.format != "dcp":
        raise UserError("--optimizer needs --format dcp: a HuggingFace directory has no optimizer state.")
    if arguments.model and (arguments.check or arguments.ema or arguments.format == "dcp"):
        raise UserError("--model is for checkpoints of other trainers: remove --check, --ema and --format.")
    path = local_path("weft export", arguments.path, output=bool(arguments.output or arguments.check))
    options = _options(ExportOptions, arguments, path=path, dtype=arguments.dtype or "bf16")

    def body() -> None:
        from weft.recipes import export

        say(f"checked  {export.check(Path(options.path))}" if arguments.check else f"exported {export.run(options)}")

    return Job(body, 1, words)


def _push(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("push")
    path = local_path("weft push", arguments.path, step=arguments.step, best=arguments.best)
    chosen = path == arguments.path
    step, best = (arguments.step, arguments.best) if chosen else (None, False)
    options = _options(PushOptions, arguments, path=path, step=step, best=best)

    def body() -> None:
        from weft.recipes import push

        say(f"pushed   {push.run(options)}")

    return Job(body, 1, words)


def _data(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("data")
    files_and_keys = arguments.config
    if files_and_keys[:1] != ["preview"]:
        raise UserError("weft data needs a subcommand: weft data preview [CONFIG ...] [section.key=value ...]")
    arguments.config = files_and_keys[1:]
    config = _load(arguments, SftConfig)
    sizes = resolve_mesh(config.mesh, arguments.nproc or fewest_ranks(config.mesh))
    ranks = sizes.dp_replicate * sizes.shards
    options = _options(PreviewOptions, arguments, world=ranks)

    def body() -> None:
        from weft.recipes import preview

        preview.run(config, options)

    return Job(body, 1, words)


def _migrate(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    draft, differing = migrate_and_compare(arguments.files, arguments.nproc)

    def body() -> None:
        say(draft, end="")
        if differing:
            count = "1 quantity differs" if len(differing) == 1 else f"{len(differing)} quantities differ"
            names = ", ".join(differing)
            say(f"weft migrate: {count} ({names}): the draft says how, and waits for your line.", error=True)

    return Job(body, 1, words)


def _merge(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("merge")
    path = local_path("weft merge", arguments.path, output=bool(arguments.output))
    options = _options(MergeOptions, arguments, path=path)

    def body() -> None:
        from weft.recipes import merge

        say(f"merged {merge.run(options)}")

    return Job(body, 1, words)


def _chat(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("chat")
    path = local_path("weft chat", arguments.path, step=arguments.step)
    step = arguments.step if path == arguments.path else None
    options = _options(ChatOptions, arguments, path=path, step=step, images=tuple(arguments.image))

    def body() -> None:
        from weft.recipes import chat

        chat.run(options)

    return Job(body, 1, words)


def _eval(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    path = local_path("weft eval", arguments.path, step=arguments.step)
    config = measured_config(path, arguments.config, arguments.step if path == arguments.path else None)
    if isinstance(config, RlConfig):
        _require_one_process("eval")
        resolved = rl_options(config, arguments.device, arguments.nproc)
        options, world = _options(MeasureOptions, arguments, device=resolved.device, world=resolved.world), 1
    else:
        world = _world(arguments, config)
        options = _options(MeasureOptions, arguments, world=world)

    def body() -> None:
        from weft.recipes import measure

        measure.run(config, options)

    return Job(body, world, words)


def _rollouts(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("rollouts")
    options = _options(RolloutsOptions, arguments, run=local_path("weft rollouts", arguments.run, records=True))

    def body() -> None:
        from weft.observe import rollouts

        rollouts.run(options)

    return Job(body, 1, words)


def _report(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("report")
    runs = tuple(local_path("weft report", run, records=True) for run in arguments.runs)
    is_beside_run = len(runs) > 1 or runs[0] == arguments.runs[0]
    options = ReportOptions(runs=runs, output=arguments.output or (None if is_beside_run else "report.html"))

    def body() -> None:
        from weft.observe.report import page

        written, notes = page.run(options)
        say(f"wrote {written}", *(f"note: {note}" for note in notes))

    return Job(body, 1, words)


def _init(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("init")
    command, overrides = "sft", list(arguments.words)
    if overrides and "=" not in overrides[0]:
        command = overrides.pop(0)
    if command not in SCHEMAS:
        raise UserError(f"weft init {command}: weft init writes configs for `weft sft` and `weft rl`: weft init sft")
    if stray := [word for word in overrides if "=" not in word]:
        raise UserError(f"weft init: {stray[0]} is not an override: write section.key=value.")
    text = starter(command, chosen_keys(overrides, SCHEMAS[command]))

    def body() -> None:
        if arguments.output is None:
            say(text, end="")
            return
        file = Path(arguments.output).expanduser()
        try:
            with file.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError as error:
            raise UserError(f"--output {file} exists already: remove it, or name another file.") from error
        except OSError as error:
            raise UserError(f"cannot write --output {file}: {error.strerror}.") from error
        say(f"wrote {file}", f"next  weft {command} {shlex.quote(str(file))} --dry-run")

    return Job(body, 1, words)


def _keys(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    lines = find_keys(arguments.words)
    return Job(lambda: say_all(lines), 1, words)


def _engine(arguments: argparse.Namespace, words: Sequence[str]) -> Job:
    _require_one_process("engine")
    if arguments.what != ["install", "vllm"]:
        raise UserError("weft engine needs a subcommand: weft engine install vllm [--python DIR]")

    def body() -> None:
        from weft.inference.vllm import interpreter

        folder = Path(arguments.python).expanduser() if arguments.python else interpreter.home()
        device: Literal["cpu", "cuda"] = "cuda" if accelerator_count(arguments.device) else "cpu"
        interpreter_path = interpreter.install(folder, device, shlex.split(arguments.torch))
        name = "" if arguments.python is None else f"; set {override('rollout.python', str(folder))}"
        say(f"vLLM {interpreter_path.version} for {device} is in {folder}{name}")

    return Job(body, 1, words)


def _options(kind: type[Options], arguments: argparse.Namespace, **values: object) -> Options:
    """The options of a command: `values`, and the parsed arguments with the names of its fields."""
    names = {field.name for field in fields(cast(Any, kind))} - values.keys()
    return kind(**{name: value for name, value in vars(arguments).items() if name in names}, **values)


def _require_one_process(command: str) -> None:
    if joined():
        raise UserError(
            f"weft {command} runs in one process: start it without torchrun, srun or mpirun, or as one task."
        )


def _load(arguments: argparse.Namespace, schema: type[Schema], run: Literal["new"] | None = None) -> Schema:
    """The config of files and overrides, with local copies of its files on object stores. run: "new" if a run
    begins."""
    overrides = [word for word in arguments.config if _is_override(word)]
    files = [local_path("weft", word) for word in arguments.config if not _is_override(word)]
    dry_run = getattr(arguments, "dry_run", False)
    return _with_local_paths(load_config(files, overrides, schema, weights=not dry_run), run, dry_run)


def _with_local_paths(config: Schema, run: Literal["new", "resumed"] | None, dry_run: bool = False) -> Schema:
    if not uses_stores(config):
        return config
    from weft.checkpoint.remote.local import with_local_paths

    return cast(Schema, with_local_paths(cast(Any, config), run, dry_run=dry_run))


def _load_run(arguments: argparse.Namespace, schema: type[Schema]) -> Schema:
    """The config of a run that begins or resumes. It is checked before torch is asked for the device."""
    _check_dry_run(arguments)
    if arguments.resume is None:
        config: Any = _load(arguments, schema, "new")
    else:
        config = _load_resumed(arguments, schema)
        if is_url(arguments.resume) and not arguments.dry_run:
            arguments.resume = config.run.dir
    if arguments.dry_run:
        accelerator_count(arguments.device)
    return cast(Schema, config)


def _load_resumed(arguments: argparse.Namespace, schema: type[Schema]) -> Schema:
    """The config of RUN with the overrides."""
    run = arguments.resume
    files = [word for word in arguments.config if not _is_override(word)]
    if files:
        raise UserError(
            f"--resume {run} reads {run}/config.yaml: remove {files[0]}, and set keys as section.key=value."
        )
    if any(word.startswith("run.dir=") for word in arguments.config):
        raise UserError(f"--resume {run} continues in that folder: remove run.dir.")
    overrides = [*arguments.config, f"run.dir={json.dumps(run)}"]
    if not is_url(run):
        return _with_local_paths(
            load_config([written_config(run, schema)], overrides, schema, of_run=True), "resumed", arguments.dry_run
        )
    with fetched_config(run) as folder:
        config = load_config([written_config(str(folder), schema, run)], overrides, schema, of_run=True)
    return _with_local_paths(config, "resumed", arguments.dry_run)


def _names_rl(arguments: argparse.Namespace) -> bool:
    """Whether the files and overrides have a section `rl`."""
    words = arguments.config
    sections = {word.partition("=")[0].partition(".")[0] for word in words if _is_override(word)}
    return "rl" in sections.union(*(read_config_file(word).value for word in words if not _is_override(word)))


def _is_override(word: str) -> bool:
    return "=" in word and not Path(word).is_file()


def _world(arguments: argparse.Namespace, config: AnyConfig) -> int:
    """The number of ranks of the run, after checking that the mesh fits it, and that this machine has room for it."""
    if joined():
        world = int(os.environ["WORLD_SIZE"])
        if arguments.nproc not in (None, world):
            raise UserError(
                f"--nproc {arguments.nproc}, but WORLD_SIZE={world} in the environment: under torchrun remove --nproc; "
                "otherwise unset RANK and WORLD_SIZE."
            )
    else:
        world = _ranks_wanted(arguments, config) or accelerator_count(arguments.device) or 1
    sizes = resolve_mesh(config.mesh, world)
    check_reshard(config, sizes)
    if not joined() and not getattr(arguments, "dry_run", False):
        check_ranks_fit(world, arguments.device)
    return world


def _ranks_wanted(arguments: argparse.Namespace, config: AnyConfig) -> int | None:
    """The number of ranks: --nproc, else that of the resumed run, else in a dry run the fewest that mesh allows. None
    if this machine's accelerators decide, or cluster.trainer_ranks does."""
    if arguments.nproc is not None or (isinstance(config, RlConfig) and config.cluster.trainer_ranks):
        return arguments.nproc
    run = getattr(arguments, "resume", None)
    world, origin = None if run is None else ranks_of(Path(run)), f"{run} had"
    if world is None and getattr(arguments, "dry_run", False):
        fewest = fewest_ranks(config.mesh)
        world, origin = fewest if fewest > 1 else None, "mesh says"
    if world is not None:
        say(f"ranks    {world}, as {origin} (--nproc N for others)")
    return world


def _fit_to_machine(
    config: AnyConfig, arguments: argparse.Namespace, words: Sequence[str]
) -> tuple[AnyConfig, Sequence[str]]:
    """(Config, command line) of `weft verify` without --nproc, for as many ranks as the mesh needs. Axes of the mesh
    are shrunk to fit a small machine."""
    accelerators = accelerator_count(arguments.device)
    mesh, notes = shrink_mesh(config.mesh, accelerators or cpu_cores(), share=accelerators == 0)
    for note in notes:
        say(note)
    sizes = resolve_mesh(mesh, fewest_ranks(mesh))
    arguments.nproc = sizes.world
    overrides = [f"mesh.{axis}={getattr(sizes, axis)}" for axis in AXES]
    overrides.append(f"mesh.ulysses={'null' if mesh.ulysses is None else mesh.ulysses}")
    return replace(config, mesh=mesh), [*words, *overrides]


COMMANDS = {
    "sft": Command(parsers.sft_parser, _sft),
    "rl": Command(parsers.rl_parser, _rl),
    "chat": Command(parsers.chat_parser, _chat),
    "eval": Command(parsers.eval_parser, _eval),
    "rollouts": Command(parsers.rollouts_parser, _rollouts),
    "report": Command(parsers.report_parser, _report),
    "data": Command(parsers.data_parser, _data),
    "export": Command(parsers.export_parser, _export),
    "push": Command(parsers.push_parser, _push),
    "merge": Command(parsers.merge_parser, _merge),
    "plan": Command(parsers.plan_parser, _plan),
    "verify": Command(parsers.verify_parser, _verify),
    "init": Command(parsers.init_parser, _init),
    "keys": Command(parsers.keys_parser, _keys),
    "engine": Command(parsers.engine_parser, _engine),
    "migrate": Command(parsers.migrate_parser, _migrate),
}


def _program_help() -> str:
    lines = [f"  {name:<8} {SUMMARIES[name]}" for name in COMMANDS]
    return _PROGRAM_HELP.format(commands="\n".join(lines)).rstrip()


def _unknown_command(name: str) -> str:
    commands = ", ".join(COMMANDS)
    advice = OTHER_COMMANDS.get(name.lower())
    if advice is not None:
        return f"weft {name}: no such command: {advice}."
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if close:
        return f"weft {name}: no such command; did you mean weft {close[0]}?"
    if "=" in name or Path(name).suffix in (".yaml", ".yml"):
        return f"weft {name}: a command is missing, as in `weft sft {name}`; the commands are {commands}."
    return f"weft {name}: no such command; the commands are {commands}."
