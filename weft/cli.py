"""The commands of `weft`.

The process that the user starts reads and checks the config without importing torch, so errors in it are printed at
once. Then it runs the recipe, or it starts ranks, which run the same command line and join the run.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast

from weft.api import rl_options
from weft.checkpoint.remote.enter import fetched_config
from weft.checkpoint.remote.local import local_path
from weft.checkpoint.retention import ranks_of
from weft.config import SftConfig, check_reshard, load_config, resolve_mesh, shrink_mesh
from weft.config.commands import SCHEMAS, job_lines, schema_of
from weft.config.frozen_ranks import frozen_ranks, frozen_section, in_turns
from weft.config.load import chosen_keys, read_config_file, written_config
from weft.config.mesh import AXES, fewest_ranks
from weft.config.migrate.migrate import migrate_and_compare
from weft.config.model_limits import check_model
from weft.config.reference import find_keys, starter
from weft.config.rl_schema import RlConfig
from weft.config.schema import MeshConfig
from weft.config.urls import is_url, uses_stores
from weft.config.yaml12 import override
from weft.errors import UserError
from weft.launch import reports
from weft.launch.entrypoint import Body, env_rank, guarded, joined, program
from weft.launch.launch import Attempt, ResumeCommand, attempt, attempt_alone, run, run_with_restarts
from weft.launch.launchers import join_launcher
from weft.launch.machine import accelerator, accelerator_count, check_ranks_fit, cpu_cores
from weft.launch.options import (
    ChatOptions,
    CommandOptions,
    CompareStepOptions,
    Device,
    EngineOptions,
    ExportOptions,
    InitOptions,
    KeysOptions,
    MeasureOptions,
    MergeOptions,
    MigrateOptions,
    PlanOptions,
    PluginsOptions,
    PreviewOptions,
    PushOptions,
    RankOptions,
    ReportOptions,
    RlOptions,
    RolloutsOptions,
    RunOptions,
    TrainOptions,
    VerifyOptions,
    WatchOptions,
)
from weft.launch.status import STATUS, SUCCESS, USER_ERROR
from weft.launch.stopping import announce_ending_signal
from weft.observe.measured import measured_config
from weft.observe.profiling import check_profile
from weft.observe.trackers import check_installed
from weft.parsers import OTHER_COMMANDS, parse
from weft.terminal import clean_everything, display_name, say, say_all
from weft.version import __version__

Schema = TypeVar("Schema")
Run = TypeVar("Run", bound=RunOptions)
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
    """A checked command. body: the function that each rank runs. world: number of ranks. words: the command line of a
    rank.

    restarts: maximum number of attempts after the first one fails. resume_command: RUN -> the command line of such an
    attempt. attempt: runs a command line as one attempt.
    account: lines that explain the memory use of the ranks, printed after an out-of-memory error.
    """

    body: Body
    world: int
    words: Sequence[str]
    restarts: int = 0
    resume_command: ResumeCommand | None = None
    attempt: Attempt = attempt
    account: Callable[[], Sequence[str]] | None = None


@dataclass(frozen=True)
class Command:
    """A subcommand. options: the class from which its parser is made. make: makes a job from the parsed options and the
    command line. usage: the first line of --help, if it is not argparse's default."""

    options: type[CommandOptions]
    prepare: Callable[[Any, Sequence[str]], Job]
    summary: str
    usage: str | None = None


def entry() -> NoReturn:
    """Run the program `weft`. Every rank that it starts also runs this function."""
    clean_everything()
    try:
        join_launcher()
    except UserError as error:  # outside `guarded`, which would set this process up as a rank
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
        status = run_with_restarts(
            command, lambda run: [*weft, *resume_command(run)], job.world, job.restarts, debug, job.attempt
        )
    else:
        status = run(job.body, [*weft, *job.words], job.world, debug)
    if status == STATUS["memory"] and job.account is not None and not joined():
        for line in job.account():
            say(line, error=True)
    return status


def _prepare(words: Sequence[str]) -> Job:
    command = COMMANDS.get(words[0])
    if command is None:
        raise UserError(_unknown_command(words[0]))
    return command.prepare(parse(command.options, words[1:], words[0], command.summary, command.usage), words)


def _train(command: str, options: TrainOptions, words: Sequence[str]) -> Job:
    """`weft sft`, and the commands that share its loop."""
    loaded, options = _load_run(options, SCHEMAS[command])
    config: Any = loaded
    frozen = frozen_ranks(config)
    world = _world(options, config)
    check_installed(config.track)
    check_profile(config.profile, world=world - frozen)
    options = replace(options, world=world - frozen)
    if not options.dry_run and not joined():
        from weft.data.first_rows import check_first_rows

        check_first_rows(config)

    def body() -> None:
        recipe = importlib.import_module(f"weft.recipes.{command}")
        if not options.dry_run or env_rank() == 0:
            recipe.run(config, options)

    if options.dry_run:
        return Job(body, 1, words)  # one process describes all ranks
    return Job(
        body, world, words, _restarts(options), lambda run: _resume_command(command, options, words, run),
        account=None if frozen else partial(_account, config, world, options.device),
    )  # fmt: skip


def _account(config: Any, world: int, device: Device) -> Sequence[str]:
    from weft.recipes.plan.account import memory_account

    return memory_account(config, world, device)


def _rl(options: RlOptions, words: Sequence[str]) -> Job:
    _require_one_process("rl")
    config, options = _load_run(options, RlConfig)
    resolved = rl_options(config, options.device, _ranks_wanted(options, config))
    options = replace(options, device=resolved.device, world=resolved.world)
    if config.rollout.engine == "vllm" and config.cluster.address is None and not (options.dry_run or options.replay):
        from weft.inference.vllm import interpreter

        interpreter.find(config.rollout.python)  # its environment is missing, or is one of another version

    def body() -> None:
        from weft.recipes import rl, rl_preview

        (rl_preview.dry_run if options.dry_run else rl.run)(config, options)

    if options.dry_run:
        return Job(body, 1, words)
    return Job(
        body, 1, words, 0 if reports.RUN_NOTE in os.environ else options.restarts,
        lambda run: _resume_command("rl", options, words, run), partial(attempt_alone, timeout=config.train.timeout),
        partial(_account, config, options.world, options.device),
    )  # fmt: skip


def _restarts(options: TrainOptions) -> int:
    """The number of restarts that this process makes. It is 0 in its ranks, which also receive the option."""
    if options.restarts and joined() and reports.folder() is None:
        raise UserError("--restarts only restarts ranks that weft started: under torchrun use its --max-restarts.")
    return 0 if joined() else options.restarts


def _resume_command(command: str, options: TrainOptions | RlOptions, words: Sequence[str], run: Path) -> Sequence[str]:
    """The command line of an attempt that resumes RUN. RUN/config.yaml contains the config files and overrides."""
    if options.resume is not None:
        return words
    words_of_run = ["--device", options.device] + (["--nproc", str(options.nproc)] if options.nproc else [])
    words_of_run += [f"--{name}" for name in ("quiet", "verbose", "debug") if getattr(options, name)]
    if isinstance(options, RlOptions):
        words_of_run += (
            ["--rollout-only"] if options.rollout_only else ["--replay", options.replay] if options.replay else []
        )
    return [command, "--resume", display_name(str(run)), *words_of_run]


def _verify(options: VerifyOptions, words: Sequence[str]) -> Job:
    schema = _schema(options.config)
    config: Any = _load(options.config, schema)
    if options.rollouts is not None and not isinstance(config, RlConfig):
        raise UserError("--rollouts needs a weft rl config, and this config has no section rl.")
    config, in_place = in_turns(config)
    if not joined() and options.nproc is None:
        config, nproc, words = _fit_to_machine(config, options.device, words)
        options = replace(options, nproc=nproc)
    world = _world(options, config)
    options = replace(options, world=world)

    def body() -> bool:
        from weft.recipes import verify

        if env_rank() == 0:
            say_all([*job_lines(schema.command), *in_place])
        return verify.run(config, options)

    return Job(body, world, words)


def _compare_step(options: CompareStepOptions, words: Sequence[str]) -> Job:
    _require_one_process("compare-step")
    overrides = [word for word in options.config if _is_override(word)]
    files = [local_path("weft", word) for word in options.config if not _is_override(word)]
    from weft.rl.dump_files import dump_paths

    path = str(dump_paths(options.dump)[0])
    base: dict[str, dict[str, Any]] = {"data": {"path": path}, "rl": {"reward": ["length"]}}  # never read
    config = _with_local_paths(load_config(files, overrides, RlConfig, base=base), None)

    def body() -> bool:
        from weft.recipes import compare_step

        return compare_step.run(config, options)

    return Job(body, 1, words)


def _plan(options: PlanOptions, words: Sequence[str]) -> Job:
    _require_one_process("plan")
    schema = _schema(options.config)
    config: Any = _load(options.config, schema, dry_run=True)  # a plan needs no weights, like a dry run
    accelerator(options.assume)
    trained = getattr(getattr(config, "cluster", None), "trainer_ranks", None) or fewest_ranks(config.mesh)
    ranks = options.ranks or trained + frozen_ranks(config)
    _check_frozen_ranks(config, ranks, "--ranks")
    ranks -= frozen_ranks(config)
    if not options.search:
        check_reshard(config, resolve_mesh(config.mesh, ranks, "--ranks"))
    options = replace(options, ranks=ranks)

    def body() -> None:
        from weft.recipes.plan import recipe as plan

        say_all(job_lines(schema.command))
        plan.run(config, options)

    return Job(body, 1, words)


def _export(options: ExportOptions, words: Sequence[str]) -> Job:
    _require_one_process("export")
    if options.check and (options.dtype or options.output or options.ema):
        raise UserError("--check writes nothing: remove --dtype, --output and --ema.")
    if options.optimizer and options.format != "dcp":
        raise UserError("--optimizer needs --format dcp: a HuggingFace directory has no optimizer state.")
    if options.model and (options.check or options.ema or options.format == "dcp"):
        raise UserError("--model is for checkpoints of other trainers: remove --check, --ema and --format.")
    path = local_path("weft export", options.path, output=bool(options.output or options.check))
    options = replace(options, path=path)

    def body() -> None:
        from weft.recipes import export

        say(f"checked  {export.check(Path(options.path))}" if options.check else f"exported {export.run(options)}")

    return Job(body, 1, words)


def _push(options: PushOptions, words: Sequence[str]) -> Job:
    _require_one_process("push")
    path = local_path("weft push", options.path, step=options.step, best=options.best)
    if path != options.path:  # the local copy of the chosen checkpoint
        options = replace(options, path=path, step=None, best=False)

    def body() -> None:
        from weft.recipes import push

        say(f"pushed   {push.run(options)}")

    return Job(body, 1, words)


def _data(options: PreviewOptions, words: Sequence[str]) -> Job:
    _require_one_process("data")
    if tuple(options.config[:1]) != ("preview",):
        raise UserError("weft data needs a subcommand: weft data preview [CONFIG ...] [section.key=value ...]")
    schema = _schema(options.config[1:])
    config: Any = _load(options.config[1:], SftConfig if schema is RlConfig else schema)
    sizes = resolve_mesh(config.mesh, options.nproc or fewest_ranks(config.mesh))
    options = replace(options, world=sizes.dp_replicate * sizes.shards)

    def body() -> None:
        from weft.recipes import preview

        say_all(job_lines(schema.command))
        preview.run(config, options)

    return Job(body, 1, words)


def _migrate(options: MigrateOptions, words: Sequence[str]) -> Job:
    draft, differing = migrate_and_compare(options.files, options.nproc)

    def body() -> None:
        say(draft, end="")
        if differing:
            count = "1 quantity differs" if len(differing) == 1 else f"{len(differing)} quantities differ"
            names = ", ".join(differing)
            say(f"weft migrate: {count} ({names}). The draft explains each; add your values there.", error=True)

    return Job(body, 1, words)


def _merge(options: MergeOptions, words: Sequence[str]) -> Job:
    _require_one_process("merge")
    path = local_path("weft merge", options.path, output=bool(options.output))
    options = replace(options, path=path)

    def body() -> None:
        from weft.recipes import merge

        say(f"merged {merge.run(options)}")

    return Job(body, 1, words)


def _chat(options: ChatOptions, words: Sequence[str]) -> Job:
    _require_one_process("chat")
    path = local_path("weft chat", options.path, step=options.step)
    if path != options.path:  # the local copy of the chosen checkpoint
        options = replace(options, path=path, step=None)

    def body() -> None:
        from weft.recipes import chat

        chat.run(options)

    return Job(body, 1, words)


def _eval(options: MeasureOptions, words: Sequence[str]) -> Job:
    path = local_path("weft eval", options.path, step=options.step)
    config = measured_config(path, options.config, options.step if path == options.path else None)
    config, in_place = in_turns(config)
    if isinstance(config, RlConfig):
        _require_one_process("eval")
        resolved, world = rl_options(config, options.device, options.nproc), 1
        options = replace(options, device=resolved.device, world=resolved.world)
    else:
        world = _world(options, config)
        options = replace(options, world=world)

    def body() -> None:
        from weft.recipes import measure

        if env_rank() == 0:
            say_all(in_place)
        measure.run(config, options)

    return Job(body, world, words)


def _rollouts(options: RolloutsOptions, words: Sequence[str]) -> Job:
    _require_one_process("rollouts")
    options = replace(options, run=local_path("weft rollouts", options.run, records=True))

    def body() -> None:
        from weft.observe import rollouts

        rollouts.run(options)

    return Job(body, 1, words)


def _report(options: ReportOptions, words: Sequence[str]) -> Job:
    _require_one_process("report")
    runs = tuple(local_path("weft report", run, records=True) for run in options.runs)
    is_beside_run = len(runs) > 1 or runs[0] == options.runs[0]
    options = replace(options, runs=runs, output=options.output or (None if is_beside_run else "report.html"))

    def body() -> None:
        from weft.observe.report import page

        written, notes = page.run(options)
        say(f"wrote {written}", *(f"note: {note}" for note in notes))

    return Job(body, 1, words)


def _watch(options: WatchOptions, words: Sequence[str]) -> Job:
    _require_one_process("watch")

    def body() -> None:
        from weft.observe import watch

        watch.run(options)

    return Job(body, 1, words)


def _init(options: InitOptions, words: Sequence[str]) -> Job:
    _require_one_process("init")
    command, overrides = "sft", list(options.words)
    if overrides and "=" not in overrides[0]:
        command = overrides.pop(0)
    if command not in SCHEMAS:
        commands = " and ".join(f"`weft {name}`" for name in SCHEMAS)
        raise UserError(f"weft init {command}: there is no such config; choose one of {commands}, as in weft init sft.")
    if stray := [word for word in overrides if "=" not in word]:
        raise UserError(f"weft init: {stray[0]} is not an override: write section.key=value.")
    text = starter(command, chosen_keys(overrides, SCHEMAS[command]))

    def body() -> None:
        if options.output is None:
            say(text, end="")
            return
        file = Path(options.output).expanduser()
        try:
            with file.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError as error:
            raise UserError(f"--output {file} exists already: remove it, or name another file.") from error
        except OSError as error:
            raise UserError(f"cannot write --output {file}: {error.strerror}.") from error
        say(f"wrote {file}", f"next  weft {command} {shlex.quote(str(file))} --dry-run")

    return Job(body, 1, words)


def _keys(options: KeysOptions, words: Sequence[str]) -> Job:
    lines = find_keys(options.words)
    return Job(lambda: say_all(lines), 1, words)


def _engine(options: EngineOptions, words: Sequence[str]) -> Job:
    _require_one_process("engine")
    if options.what[0] == "check" and len(options.what) == 2:
        return _plugins(PluginsOptions(what=("engine", options.what[1])), words)
    if tuple(options.what) != ("install", "vllm"):
        raise UserError(
            "weft engine needs a subcommand: weft engine install vllm [--python DIR], or weft engine check NAME"
        )

    def body() -> None:
        from weft.inference.vllm import interpreter

        folder = Path(options.python).expanduser() if options.python else interpreter.home()
        device: Literal["cpu", "cuda"] = "cuda" if accelerator_count(options.device) else "cpu"
        interpreter_path = interpreter.install(folder, device, shlex.split(options.torch))
        name = "" if options.python is None else f"; set {override('rollout.python', str(folder))}"
        say(f"vLLM {interpreter_path.version} for {device} is in {folder}{name}")

    return Job(body, 1, words)


def _plugins(options: PluginsOptions, words: Sequence[str]) -> Job:
    _require_one_process("plugins")
    kinds = ("engine", "environment", "reward")
    if options.what and (len(options.what) != 2 or options.what[0] not in kinds):
        raise UserError(
            f"weft plugins checks these kinds by name: {', '.join(kinds)}, as in `weft plugins reward short`. To check "
            "an algorithm, set rl.algorithm to its name and run weft verify."
        )
    try:
        is_row = isinstance(json.loads(options.row), dict)
    except ValueError:
        is_row = False
    if not is_row:
        raise UserError(f'--row is {options.row!r}: write a JSON object, as in --row \'{{"answer": "7"}}\'.')

    def body() -> None:
        from weft.recipes import plugins

        plugins.run(options)

    return Job(body, 1, words)


def _require_one_process(command: str) -> None:
    if joined():
        raise UserError(
            f"weft {command} runs in one process: start it without torchrun, srun or mpirun, or as one task."
        )


def _load(
    words: Sequence[str], schema: type[Schema], run: Literal["new"] | None = None, *, dry_run: bool = False
) -> Schema:
    """The config of files and overrides. Its files on object stores are replaced by local copies. run: "new" if the
    command starts a run."""
    overrides = [word for word in words if _is_override(word)]
    files = [local_path("weft", word) for word in words if not _is_override(word)]
    return _with_local_paths(load_config(files, overrides, schema, weights=not dry_run), run, dry_run)


def _with_local_paths(config: Schema, run: Literal["new", "resumed"] | None, dry_run: bool = False) -> Schema:
    if not uses_stores(config):
        return config
    from weft.checkpoint.remote.local import with_local_paths

    return cast(Schema, with_local_paths(cast(Any, config), run, dry_run=dry_run))


def _load_run(options: Run, schema: type[Schema]) -> tuple[Schema, Run]:
    """The config of a run that starts or resumes, and its options with local paths. The config is checked before torch
    is imported to look for devices."""
    if accelerator(options.assume) is not None:
        options = replace(options, device="cpu")  # a dry run does not use this machine's accelerators
    if options.resume is None:
        config: Any = _load(options.config, schema, "new", dry_run=options.dry_run)
    else:
        config = _load_resumed(options.resume, options, schema)
        if is_url(options.resume) and not options.dry_run:
            options = replace(options, resume=config.run.dir)
    if options.dry_run:
        accelerator_count(options.device)
    return cast(Schema, config), options


def _load_resumed(run: str, options: RunOptions, schema: type[Schema]) -> Schema:
    """The config of RUN, changed by the overrides."""
    files = [word for word in options.config if not _is_override(word)]
    if files:
        raise UserError(
            f"--resume {run} reads {run}/config.yaml: remove {files[0]}, and set keys as section.key=value."
        )
    if any(word.startswith("run.dir=") for word in options.config):
        raise UserError(f"--resume {run} continues in that folder: remove run.dir.")
    overrides = [*options.config, f"run.dir={json.dumps(run)}"]
    if is_url(run):
        with fetched_config(run) as folder:
            config = load_config([written_config(str(folder), schema, run)], overrides, schema, of_run=True)
    else:
        config = load_config([written_config(run, schema)], overrides, schema, of_run=True)
    return _with_local_paths(config, "resumed", options.dry_run)


def _schema(words: Sequence[str]) -> type[AnyConfig]:
    """The schema that matches the sections in the files and overrides."""
    sections = {word.partition("=")[0].partition(".")[0] for word in words if _is_override(word)}
    files = [local_path("weft", word) for word in words if not _is_override(word)]
    return schema_of(sections.union(*(read_config_file(path).value for path in files)))


def _is_override(word: str) -> bool:
    return "=" in word and not Path(word).is_file()


def _world(options: RankOptions | MeasureOptions, config: AnyConfig) -> int:
    """The number of ranks of the run, including the ranks of frozen models. Raises UserError if the meshes do not fit
    this number, or if the machine has too few devices or cores."""
    frozen = frozen_ranks(config)
    if joined():
        world = int(os.environ["WORLD_SIZE"])
        if options.nproc not in (None, world):
            raise UserError(
                f"--nproc {options.nproc}, but WORLD_SIZE={world} in the environment: under torchrun remove --nproc; "
                "otherwise unset RANK and WORLD_SIZE."
            )
    else:
        count = _ranks_wanted(options, config)
        if count is not None and options.nproc is None:
            count += frozen  # a checkpoint stores the number of the trained model's ranks only
        world = count or accelerator_count(options.device) or 1
    _check_frozen_ranks(config, world, "--nproc")
    sizes = resolve_mesh(config.mesh, world - frozen)
    check_reshard(config, sizes)
    check_model(config, sizes)
    if not joined() and not getattr(options, "dry_run", False):
        check_ranks_fit(world, options.device)
    return world


def _check_frozen_ranks(config: AnyConfig, world: int, option: str) -> None:
    """Raises UserError if a model on separate ranks leaves none to the trained model, or if its mesh does not divide
    its ranks. option: the option that sets the number of ranks."""
    named = frozen_section(config)
    if named is None:
        return
    (name, section), frozen = named, frozen_ranks(config)
    if world <= frozen:
        raise UserError(
            f"{name}.ranks={frozen} of {world} leaves no rank for the trained model: start with {option} {frozen + 1} "
            f"or more, or set {name}.ranks=null."
        )
    mesh = MeshConfig(
        dp_replicate=section.dp_replicate or 1, dp_shard=section.dp_shard or -1, tp=section.tp or 1, pp=section.pp or 1
    )
    try:
        resolve_mesh(mesh, frozen, f"{name}.ranks")
    except UserError as error:
        raise UserError(f"the {name} (its mesh has the keys {name}.*, not mesh.*): {error}") from error


def _ranks_wanted(options: RankOptions | MeasureOptions, config: AnyConfig) -> int | None:
    """The number of ranks: --nproc; otherwise the number of the resumed run; otherwise, in a dry run, the smallest
    number that mesh allows. None if the accelerators of this machine or cluster.trainer_ranks determine the number."""
    if options.nproc is not None or (isinstance(config, RlConfig) and config.cluster.trainer_ranks):
        return options.nproc
    run = getattr(options, "resume", None)
    world, origin = None if run is None else ranks_of(Path(run)), f"as in {run}"
    if world is None and getattr(options, "dry_run", False):
        fewest = fewest_ranks(config.mesh)
        world, origin = fewest if fewest > 1 else None, "the product of mesh"
    if world is not None:
        say(f"ranks    {world}, {origin} (--nproc N sets another number)")
    return world


def _fit_to_machine(config: AnyConfig, device: Device, words: Sequence[str]) -> tuple[AnyConfig, int, Sequence[str]]:
    """(Config, ranks, command line) of `weft verify` without --nproc. The number of ranks is the number that the mesh
    needs. On a small machine, axes of the mesh are shrunk."""
    accelerators = accelerator_count(device)
    mesh, notes = shrink_mesh(config.mesh, accelerators or cpu_cores(), share=accelerators == 0)
    for note in notes:
        say(note)
    sizes = resolve_mesh(mesh, fewest_ranks(mesh))
    overrides = [f"mesh.{axis}={getattr(sizes, axis)}" for axis in AXES]
    overrides.append(f"mesh.ulysses={'null' if mesh.ulysses is None else mesh.ulysses}")
    return replace(config, mesh=mesh), sizes.world, [*words, *overrides]


# The commands that share the loop of weft/recipes/training.py. Each is a module of weft/recipes.
RECIPES = {
    "sft": "Fine-tune a model on documents or conversations.",
    "distill": "Train a student on the distributions of a teacher.",
    "dpo": "Train a model on preferences: pairs of answers, or answers with a label.",
    "reward": "Train a reward model on preferences, labels or steps.",
}

COMMANDS = {
    **{name: Command(TrainOptions, partial(_train, name), summary) for name, summary in RECIPES.items()},
    "rl": Command(RlOptions, _rl, "Train a model on rewards, by reinforcement learning."),
    "chat": Command(ChatOptions, _chat, "Talk to the last checkpoint of a run, or to any model."),
    "eval": Command(
        MeasureOptions,
        _eval,
        "Measure loss and accuracy on held-out data, or pass@k with rewards.",
        "weft eval RUN|MODEL DATA [section.key=value ...] [options]",
    ),
    "watch": Command(WatchOptions, _watch, "Watch a run live in the terminal."),
    "rollouts": Command(RolloutsOptions, _rollouts, "Show the samples of a weft rl run, with their rewards."),
    "report": Command(ReportOptions, _report, "Write an HTML page about a run, or a page that compares several runs."),
    "data": Command(
        PreviewOptions,
        _data,
        "Show the training data as the model receives it: weft data preview.",
        "weft data preview [CONFIG ...] [section.key=value ...] [options]",
    ),
    "export": Command(ExportOptions, _export, "Write the weights of a checkpoint in another dtype or format."),
    "push": Command(PushOptions, _push, "Upload a checkpoint to the HuggingFace hub, with a model card."),
    "merge": Command(MergeOptions, _merge, "Merge an adapter into its base model."),
    "plan": Command(
        PlanOptions,
        _plan,
        "Estimate memory and time of a run on any mesh, without a GPU.",
        "weft plan [CONFIG ...] [section.key=value ...] [options]",
    ),
    "verify": Command(VerifyOptions, _verify, "Compare the configured mesh with one plain process."),
    "compare-step": Command(
        CompareStepOptions,
        _compare_step,
        "Compare loss and gradient norm of a batch from another trainer with weft's.",
        "weft compare-step DUMP [CONFIG ...] [section.key=value ...] [options]",
    ),
    "init": Command(
        InitOptions,
        _init,
        "Write a commented config to start from.",
        "weft init [sft | rl] [section.key=value ...] [--output FILE]",
    ),
    "keys": Command(
        KeysOptions,
        _keys,
        "Search the config keys by name, meaning, or another trainer's name.",
        "weft keys [WORD ...]",
    ),
    "engine": Command(
        EngineOptions,
        _engine,
        "Install a rollout engine (weft engine install vllm), or check a package's engine (weft engine check NAME).",
        "weft engine install vllm [options]\n       weft engine check NAME",
    ),
    "plugins": Command(
        PluginsOptions,
        _plugins,
        "List the engines, environments, rewards and algorithms in installed packages, or check one.",
        "weft plugins [KIND NAME] [options]",
    ),
    "migrate": Command(MigrateOptions, _migrate, "Convert another trainer's config to a draft for weft."),
}


def _program_help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}} {command.summary}" for name, command in COMMANDS.items()]
    return _PROGRAM_HELP.format(commands="\n".join(lines)).rstrip()


def _unknown_command(name: str) -> str:
    commands = ", ".join(COMMANDS)
    advice = OTHER_COMMANDS.get(name.lower())
    if advice is not None:
        return f"weft {name}: there is no such command: {advice}."
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if close:
        return f"weft {name}: there is no such command; did you mean weft {close[0]}?"
    if "=" in name or Path(name).suffix in (".yaml", ".yml"):
        return f"weft {name}: name the command first, as in `weft sft {name}`; the commands are {commands}."
    return f"weft {name}: there is no such command; the commands are {commands}."
