"""The loop that `weft sft` and other commands share: `run` and `train`. A Recipe is a command's addition
(recipe.py)."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.checkpoint.remote.uploads import Uploads, upload_all
from weft.checkpoint.remote.uploads import prepare as prepare_uploads
from weft.checkpoint.save import Saver
from weft.config.conditions import BUILT_IN_OPTIMIZERS
from weft.config.schema import SftConfig
from weft.data.encode import changed_files
from weft.data.order import SampledStep, StepSampler
from weft.engine.batch.document import Document, choose, first_sources
from weft.engine.config import EngineConfig
from weft.engine.contract import check_contract
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.optim.custom_optimizer import find_class
from weft.engine.optim.schedule import learning_rate
from weft.engine.prefetch import prefetch
from weft.errors import StoppedError
from weft.launch import flight
from weft.launch.consistency import max_over_ranks, require_agreement, run_on_first_rank
from weft.launch.machine import accelerator
from weft.launch.options import TrainOptions
from weft.launch.process import join
from weft.launch.stopping import StopSignals
from weft.launch.summary import Phases, RunSummary
from weft.models import hf
from weft.observe.closing import say_finished, say_stopped
from weft.observe.folder import open_folder, write_bad_rows
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.observe.opening import pipeline_hint, print_opening
from weft.observe.profiling import check_profile, own_peak_memory_gib, profiled
from weft.observe.progress import Progress, loading
from weft.observe.recorder import RunRecorder, StepOutcome
from weft.observe.resume import Start, advice_after_last_step, constants, find_start, identity, restore
from weft.observe.trackers import check_installed
from weft.recipes.evaluate import Evaluator, ended_by
from weft.recipes.plan.account import with_chosen_recompute
from weft.recipes.recipe import Config, PreparedStep, Recipe
from weft.recipes.run_data import RunData, dated, make_steps
from weft.recipes.training_preview import dry_run
from weft.terminal import say_all

FRESH = Start()
_PROMISE = "this step is finished and saved, then the run ends"


def run(kind: type[Recipe[Config]], config: Config, options: TrainOptions, hooks: Hooks = NO_HOOKS) -> None:
    """Entry point of one rank. Raises StoppedError if a signal ended the run early."""
    hf.import_architectures(config.model.imports, config.model.path)
    config = config if options.dry_run else dated(config)
    config, choice = with_chosen_recompute(config, options.world, options.device, accelerator(options.assume))
    # Errors in the loss and the optimizer are reported before the data is read, which may take long.
    recipe = kind(config, hooks)
    check_installed(config.track)
    if options.dry_run:
        dry_run(recipe, options, *filter(None, [choice]))
        return
    separate = recipe.frozen_ranks
    with (
        join(options.device, config.train.timeout, frozen=0 if separate is None else separate.count) as ranks,
        nullcontext() if separate is None else separate.alongside(ranks),
    ):
        phases, resume = Phases(), options.resume is not None
        flight.watch(config.train.timeout)
        if separate is not None and ranks.is_frozen:
            flight.enter("data")
            separate.serve(ranks, recipe.read_data())
            return
        if config.optimizer.name not in BUILT_IN_OPTIMIZERS:
            find_class(config.optimizer)
        if config.checkpoint.push is not None:
            run_on_first_rank(partial(prepare_uploads, config), ranks)
        flight.enter("data")
        with phases("data"), loading(ranks.is_first, "tokenising") as progress:
            data = recipe.read_data(progress)
        require_agreement(identity(config, data.report) | {"documents of eval.path": data.held_out.digest}, ranks.group)
        with open_folder(config, ranks, resume=resume) as folder:
            steps = make_steps(config, data.documents)
            num_steps = len(steps)
            check_profile(config.profile, steps=num_steps)
            start = find_start(config, folder, data.report, num_steps, ranks) if resume else FRESH
            stopped_by = ended_by(config, data.held_out, start.evaluation)
            if start.step == num_steps or stopped_by is not None:
                advice = advice_after_last_step(start, config, num_steps, folder)
                if ranks.is_first:
                    say_all(upload_all(config, folder))
                say_finished(folder, start.step, num_steps, stopped_by, ranks, advice)
                return
            flight.in_run(folder)
            flight.enter("load")
            with phases("load"):
                with loading(ranks.is_first) as progress:
                    engine = Engine(
                        EngineConfig.from_config(config),
                        ranks,
                        progress=progress,
                        fill=start.state is None,  # otherwise a checkpoint fills it
                        readouts=recipe.objective.readouts,
                    )
                for documents in data.data_sets.values():
                    engine.planner.check_images(documents)
                notes = restore(config, engine, start, folder)
                with loading(ranks.is_first) as progress:
                    notes = [*recipe.open_models(engine, data, progress), *notes]
                recipe.readings.restore(start.read)
            if ranks.is_first:
                write_bad_rows([*data.report.bad, *data.held_out.bad], folder)
            template = f"template {data.report.template_use(config.data, data.template)}"
            opening = [*filter(None, [choice]), template, *data.ends.lines(), *data.held_out.lines(), *notes]
            print_opening(config, engine, data.report, folder, steps, opening, options.detail)
            train(recipe, engine, data, folder, phases, start, resume=resume)


def train(
    recipe: Recipe[Config],
    engine: Engine,
    data: RunData,
    folder: Path,
    phases: Phases,
    start: Start = FRESH,
    *,
    resume: bool = False,
) -> None:
    """The training loop. It always saves the last weights. Raises StoppedError if a signal ended the run early."""
    phases.add(start.seconds)
    config, objective, on_step = recipe.config, recipe.objective, recipe.hooks.on_step
    steps, updates, stop = make_steps(config, data.documents), start.updates, 0
    if recipe.is_users_objective:
        engine.check_sums(objective)
    evaluator = Evaluator(
        config, engine, data.held_out, start.evaluation, folder, phases, recipe.held_out_objective,
        recipe.before_evaluation,
    )  # fmt: skip
    recorder = RunRecorder(config, engine, folder, RunSummary(model=config.model.path, data=data.report.path), start)
    saver = open_saver(config, engine, data, folder, steps, start)
    progress = Progress(len(steps), show=engine.ranks.is_first, interval=config.train.log_every)

    def prepare(step: SampledStep) -> PreparedStep:
        ahead, announce = not recipe.lays_out_again, recipe.readings.announce
        return prepare_step(engine, data.documents, objective, step, ahead=ahead, announce=announce)

    upcoming = closing(prefetch(steps.starting_at(start.step + 1), prepare))
    uploads = Uploads(config, folder, resume=resume, first=engine.ranks.is_first)
    with (
        uploads,
        recorder,
        saver,
        StopSignals(_PROMISE * engine.ranks.is_first) as signals,
        progress,
        upcoming as prepared_steps,
    ):
        if not start.step:
            recorder.record_start(evaluator.evaluate(0, len(steps)))
        progress.notes(evaluator.pop_messages())
        for step, prepared in prepared_steps:
            sources = first_sources(data.documents, step.documents)
            with profiled(config.profile, step.number, folder, engine.ranks.rank), phases("train"):
                flight.step(step.number, len(steps), sources, len(step.documents))
                lr = learning_rate(updates + 1, len(steps), config.optimizer.lr, config.schedule)
                outcome = take_step(engine, prepared, objective, lr, recipe.before_step)
            updates += not outcome.result.skipped
            flight.enter("record")
            if step.number == start.step + 1:
                check_contract(engine)
                progress.notes(pipeline_hint(engine, outcome.plan))
            evaluation = evaluator.evaluate(step.number, len(steps))
            memory_gib, stop, overdue, failed = reduce_after_step(engine, signals, saver)
            line = recorder.record(step, outcome, memory_gib, evaluation)
            progress.step(line)
            progress.notes(evaluator.pop_messages())
            if on_step is not None:
                on_step(line)
            recorder.stop_if_diverged(line, sources)
            if failed:
                saver.raise_failure()
            done = bool(stop) or evaluator.best.ends is not None
            if done or overdue or evaluator.is_to_keep or saver.is_due(step.number, len(steps)):
                flight.enter("save")
                with phases("save"):
                    state = (
                        recorder.progress(step, updates, phases) | evaluator.state() | {"read": recipe.readings.state()}
                    )
                    saver.save(step.number, state, best=evaluator.is_to_keep)
            progress.notes([*saver.pop_messages(), *uploads.pop_messages()])
            if done:
                break
        flight.enter("save")
        with phases("save"):
            saved = saver.finish()
        progress.notes(saver.pop_messages())
    early = step.number < len(steps)
    stopped = (signal.Signals(stop).name if stop else evaluator.best.ends) if early else None
    recorder.finish(phases, saved, stopped, evaluator.summary(saved.parent))
    flight.enter("upload")
    say_all(uploads.finish(bool(stop), flight.recorder.beat))
    if stop:
        # Ranks that a signal ends have a nonzero status. Launchers treat the first such end as a failure and kill the
        # others (torchrun; srun with KillOnBadExit), so all ranks wait until the first rank has written its files.
        max_over_ranks([0.0], engine.mesh.world_group, engine.device)
    if stopped is not None:
        if engine.ranks.is_first:
            override = "" if stop else f" {stopped}=null"
            say_stopped(stopped, step.number, f"weft {config.command} --resume {shlex.quote(str(folder))}{override}")
        if stop:
            raise StoppedError(stop)


def prepare_step(
    engine: Engine,
    documents: Sequence[Document],
    objective: Loss,
    step: SampledStep,
    *,
    ahead: bool = True,
    announce: Callable[[PreparedStep], None] = lambda step: None,
) -> PreparedStep:
    """Plans a step and lays out this rank's rows. Builds only the documents of these rows, and uses no device. ahead:
    whether rows are built now, or when they are accessed. announce: FrozenReadings.announce."""
    chosen = choose(documents, step.documents)
    plan, local = engine.plan_step(chosen)
    rows = engine.rows(plan, local, objective, step.number)
    prepared = PreparedStep(step.number, step.documents, chosen, plan, local, rows)
    announce(prepared)
    return replace(prepared, rows=rows.ahead()) if ahead else prepared


def take_step(
    engine: Engine,
    prepared: Future[PreparedStep],
    objective: Loss,
    lr: float,
    before: Callable[[PreparedStep], PreparedStep] = lambda step: step,
) -> StepOutcome:
    """Waits until the rows are built, then runs one step. before: Recipe.before_step. seconds: of this complete
    call."""
    began = time.perf_counter()
    step = before(prepared.result())
    metrics, result = engine.step(step.plan, step.rows, objective, lr)
    return StepOutcome(step.plan, metrics, result, lr, time.perf_counter() - began)


def open_saver(
    config: SftConfig, engine: Engine, data: RunData, folder: Path, steps: StepSampler, start: Start
) -> Saver:
    """The Saver of a run. Every checkpoint gets the files of `changed_files`, such as the template of
    data.chat_template, and a generation_config.json with the tokens that end answers in the training data."""
    return Saver(
        engine,
        folder,
        config.checkpoint,
        constants(config, data.report.documents, data.report.digest, len(steps)),
        last=start.step,
        command=config.command,
        texts=changed_files(config.model.path, config.data) | data.ends.files(config.model.path),
        timeout=config.train.timeout,
    )


def reduce_after_step(engine: Engine, signals: StopSignals, saver: Saver) -> tuple[float, int, bool, bool]:
    """(Peak memory of the fullest rank in GiB, signal to stop or 0, whether a save by time is due, whether a checkpoint
    writer failed), the maximum over all ranks. Collective."""
    values = [own_peak_memory_gib(engine.device), signals.number, saver.overdue, saver.failed]
    memory, stop, overdue, failed = max_over_ranks(values, engine.mesh.world_group, engine.device)
    return memory, int(stop), bool(overdue), bool(failed)
