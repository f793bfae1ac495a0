"""The dry run of `weft sft`, and of commands that share its loop: data, steps, memory and time, without weights."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from weft.config.mesh import MeshSizes
from weft.config.schema import SftConfig
from weft.data.documents import lengths_of
from weft.data.order import StepSampler
from weft.data.sources import open_data
from weft.engine.batch.document import MeasuredDocuments, choose
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.launch.machine import accelerator, known_accelerator
from weft.launch.options import TrainOptions
from weft.launch.process import choose_device, fake_ranks
from weft.observe.opening import print_dry_run, steps_lines
from weft.observe.profiling import check_profile
from weft.observe.progress import duration, loading
from weft.observe.tables import EngineRow, engine_table, show
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.machines import machine_of
from weft.recipes.plan.other_models import (
    OtherModels,
    answers_of_example,
    list_other_models,
    prefix_of_pairs,
    with_waits,
)
from weft.recipes.plan.rows import StepLengths
from weft.recipes.plan.timing import time_of
from weft.recipes.recipe import Recipe
from weft.recipes.run_data import RunData, make_steps, why_unread
from weft.terminal import byte_count, say_folded

_MAX_BYTES = 256 << 20  # of data that a dry run reads; tokenising more would take minutes


def dry_run(recipe: Recipe[Any], options: TrainOptions, *choices: str) -> None:
    """Prints the preview. choices: lines about choices that were made for the run. Raises UserError for every problem
    that the run would refuse at its start. Data are checked first."""
    config = recipe.config
    unread, data = why_unread(config), None
    if not unread:
        size = sum(part.size for source in open_data(config.data) for part in source.parts)
        if size > _MAX_BYTES:
            unread = (
                f"it has {byte_count(size)}, and a dry run reads up to {byte_count(_MAX_BYTES)}; `weft data "
                "preview` reads all of it, or with --sample a part"
            )
    if not unread:
        with loading(label="tokenising") as progress:
            data = recipe.read_data(progress)
        check_profile(config.profile, steps=len(make_steps(config, data.documents)))
    trained, assumed = EngineConfig.from_config(config), accelerator(options.assume)
    of_frozen: list[str] = []
    if recipe.frozen_ranks is not None:
        with fake_ranks(recipe.frozen_ranks.count, options.device, assumed) as ranks:
            of_frozen = recipe.frozen_ranks.dry_run(ranks, data)
    with fake_ranks(options.world, options.device, assumed) as ranks:
        engine = Engine(trained, ranks, weights=False, readouts=recipe.objective.readouts)
        if data is not None:
            for documents in data.data_sets.values():
                engine.planner.check_images(documents)
        print_dry_run(config, engine, parameters=options.parameters, as_json=options.json)
        mesh, memory = engine.mesh.sizes, engine.memory
    if options.json:
        return
    if list_other_models(config, trained):
        model = Blueprint(trained, options.device, assumed)
        other_rows = OtherModels(config, model, options.world, options.device, assumed).rows(mesh)
        row = EngineRow("trained model", memory.weights, memory.gradients, memory.optimizer, memory.gathered)
        show(engine_table([row, *other_rows]))
    say_folded([*choices, *recipe.dry_run_lines(), *of_frozen])
    if data is None:
        say_folded([f"data     not read: {unread}"])
        return
    steps = make_steps(config, data.documents)
    say_folded(
        [
            f"data     {data.report}",
            *steps_lines(
                config, len(steps), data.report.in_epoch or data.report.documents, steps.in_epoch, data.report.unit
            ),
            f"template {data.report.template_use(config.data, data.template)}",
            *data.ends.lines(),
            *data.held_out.lines(),
            f"time     {_time(config, options, mesh, steps, data)}",
            "look     `weft data preview` with the same config shows documents and their trained tokens",
        ]
    )


def _time(config: SftConfig, options: TrainOptions, mesh: MeshSizes, steps: StepSampler, data: RunData) -> str:
    """The estimated time of all optimizer steps, or why there is no estimate. It is the first step's time, scaled by
    the tokens of each step."""
    device = accelerator(options.assume)
    if device is None and (own_device := choose_device(options.device, 0)).type == "cuda":
        properties = torch.cuda.get_device_properties(own_device)
        device = known_accelerator(properties.name, properties.total_memory)
    if device is None:
        return "not estimated: the rates of this device are unknown; --assume h100-80gb uses those of an H100"
    if isinstance(data.documents, MeasuredDocuments) and data.documents.measures().patches.any():
        return "not estimated: weft plan does not count images"
    lengths = lengths_of(data.documents)
    tokens = [sum(lengths[index] for index in step.documents) for step in islice(steps, steps.in_epoch)]
    model = Blueprint(EngineConfig.from_config(config), "cpu", device)
    first_step = next(iter(steps)).documents
    prefix = prefix_of_pairs(config, choose(data.documents, first_step))
    first_lengths = [lengths[index] for index in first_step]
    of_first = StepLengths(first_lengths, "the first step", answers_of_example(config), prefix)
    (plan, rows), machine = of_first.plan(model, mesh), machine_of(device)
    readings = OtherModels(config, model, mesh.world, "cpu", device).readings(mesh, plan, rows, machine, of_first.plan)
    epochs, trained = max(1.0, len(steps) / steps.in_epoch), time_of(model, mesh, rows, machine).seconds
    readings = with_waits(readings, trained)
    first = trained + sum(part.waits / (epochs if part.first_epoch else 1.0) for part in readings)
    seconds = first * sum(tokens) / tokens[0] * len(steps) / len(tokens)
    step_seconds = seconds / len(steps)
    return (
        f"about {duration(seconds) if seconds >= 1 else 'a second'} of optimizer steps, "
        f"{f'{step_seconds:.2g}' if step_seconds >= 0.01 else 'under 0.01'} s each, as `weft plan` estimates for "
        f"{device.name}; "
        f"rates {f'as measured: {machine.measured}' if machine.measured else 'not measured'}; without loading, "
        "evaluation and saving"
    )
