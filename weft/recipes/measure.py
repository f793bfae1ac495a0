"""`weft eval`: the metrics of a model on held-out data, the same as those of an evaluation during training."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config.dpo_schema import DpoConfig
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.data.encode import load_tokenizer
from weft.data.images import read_images
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.inference.records import import_arrow
from weft.launch import flight
from weft.launch.consistency import require_agreement
from weft.launch.options import MeasureOptions, RlOptions
from weft.launch.process import join
from weft.launch.ray_actors import import_ray
from weft.launch.scratch import scratch_folder
from weft.launch.summary import Phases
from weft.observe.folder import lock_folder
from weft.observe.progress import loading, number
from weft.observe.tables import new_table, show
from weft.recipes import rl as reinforcement
from weft.recipes.dpo import Dpo
from weft.recipes.evaluate import PREFIX, Evaluator, HeldOut
from weft.recipes.recipe import Recipe
from weft.recipes.reward import RewardRecipe
from weft.recipes.run_data import RunData, dated, read_data
from weft.rl.actors import open_actors
from weft.rl.evaluate import EvaluationResult, HeldOutPrompts
from weft.rl.placement import resolve_placement
from weft.rl.served_pool import check_engines
from weft.rl.state import FRESH, RlPlan, RlRun
from weft.terminal import say

_SHARES = ("accuracy", "exact", "clipped_ratio")


def run(config: SftConfig | RlConfig, options: MeasureOptions) -> None:
    """Measures and prints the metrics. For SftConfig it is the entry point of each rank, otherwise of the
    controller."""
    measured = _rewards(config, options) if isinstance(config, RlConfig) else _losses(config, options)
    if measured is None:
        return
    name = config.lora.path or config.model.path
    content = {"model": name, "data": config.data.path, **measured}
    if options.output is not None:
        try:
            Path(options.output).expanduser().write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--output: {options.output} cannot be written: {error.strerror}.") from error
    if options.json:
        say(json.dumps(content))
        return
    say(f"model    {name}")
    say(f"data     {config.data.path or 'several sources'}")
    _show(measured)
    base = config.model.path + (f",peft={config.lora.path}" if config.lora.on else "")
    say(f"more     public benchmarks: lm_eval --model hf --model_args pretrained={base} --tasks gsm8k")


def _losses(config: SftConfig, options: MeasureOptions) -> dict[str, Any] | None:
    """The metrics of an evaluation of `weft sft`, on the first rank."""
    if config.data.sources is not None:
        raise UserError(
            "weft eval measures one set of documents: run it once for each path of data.sources. Evaluations during "
            "training measure each entry of eval.sources."
        )
    config = dated(config)
    recipe: Recipe[Any] = Recipe(config)
    if isinstance(config, DpoConfig):
        recipe = Dpo(config)
    elif isinstance(config, RewardConfig):
        recipe = RewardRecipe(config)
    objective = recipe.held_out_objective
    with join(options.device, config.train.timeout) as ranks:
        flight.enter("data")
        tokenizer = load_tokenizer(config.model.path)
        images = read_images(config.model.path, tokenizer, config.data)
        with loading(ranks.is_first and not options.json, "tokenising") as shown:
            documents, report = read_data(config, config.data, tokenizer, images, shown)
        require_agreement({"documents": report.digest}, ranks.group)
        held_out = HeldOut({"": recipe.prepared(documents)}, {"": report})
        flight.enter("load")
        engine_config = replace(EngineConfig.from_config(config), purpose="inference")
        with loading(ranks.is_first and not options.json) as shown:
            engine = Engine(engine_config, ranks, progress=shown, readouts=objective.readouts)
        engine.planner.check_images(documents)
        recipe.open_models(engine, RunData(documents, report, held_out))
        figures = Evaluator(
            config, engine, held_out, {}, Path(), Phases(), objective, recipe.before_evaluation
        ).evaluate(1, 1)
        if not ranks.is_first:
            return None
        counts = {"documents": report.documents, "tokens": report.tokens, "bad_rows": len(report.bad)}
        return {**counts, **figures}


def _rewards(config: RlConfig, options: MeasureOptions) -> dict[str, Any]:
    """The metrics of an evaluation of `weft rl`."""
    import_ray()
    import_arrow()
    check_engines(config)
    with scratch_folder("eval-") as scratch:
        folder = config.run.dir or str(scratch / "run")
        config = replace(config, run=replace(config.run, dir=folder))
        rl_options = RlOptions(device="cuda" if options.device == "cuda" else "cpu", world=options.world)
        config = resolve_placement(config, rl_options, 1, _untimed).config
        task = reinforcement.read_task(config)
        task = replace(task, held_out=HeldOutPrompts({"": task.prompts}))
        quiet = redirect_stdout(io.StringIO()) if options.json else nullcontext()
        with quiet, lock_folder(config) as run_lock, open_actors(config, rl_options, fill=True) as actors:
            plan = RlPlan(1, 1)
            run = RlRun(config, run_lock, task, actors, plan, FRESH, device=rl_options.device, opening=False)
            evaluated = asyncio.run(_answer(run))
    return {"prompts": len(task.prompts), "bad_rows": len(task.prompts.bad), **evaluated.metrics}


def _untimed(config: RlConfig) -> float:
    raise UserError("rl: one evaluation needs no trial of placements")


async def _answer(run: RlRun) -> EvaluationResult:
    """One evaluation with the current weights."""
    async with AsyncExitStack() as opened:
        switch, _, evaluator = await reinforcement.prepare(run, opened)
        await switch.to_rollouts(0)
        evaluated = await evaluator()
        await run.trainer_group.close()
    return evaluated


def _show(measured: Mapping[str, Any]) -> None:
    """Prints the metrics as a table."""
    table = new_table("", "figure", ">value")
    first = ("documents", "prompts", "tokens", "bad_rows", f"{PREFIX}loss", f"{PREFIX}perplexity")
    for name in [*(name for name in first if name in measured), *(name for name in measured if name not in first)]:
        value = measured[name]
        leaf = name.removeprefix(PREFIX)
        share = leaf in _SHARES or leaf.startswith("pass@")
        form = ".1%" if share else ",d" if isinstance(value, int) else ".1f" if leaf == "seconds" else ".4f"
        table.add_row(leaf, number(value, form))
    show(table)
