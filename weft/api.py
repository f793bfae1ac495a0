"""weft from Python. `weft.sft(...)` runs the command `weft sft` in this process. `weft.rl(...)` runs `weft rl`, with
this process as its controller. These functions import torch when they are called, not before."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from weft.checkpoint.remote.enter import fetched_config
from weft.checkpoint.remote.local import local_path, with_local_paths
from weft.checkpoint.retention import ranks_of
from weft.config import check_reshard, resolve_mesh, to_dict
from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.load import load_values, written_config
from weft.config.model_limits import check_model
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.urls import is_url
from weft.errors import UserError
from weft.launch.entrypoint import joined
from weft.launch.launchers import join_launcher
from weft.launch.machine import accelerator_count
from weft.launch.options import Device, RlOptions, TrainOptions
from weft.launch.scratch import scratch_folder
from weft.observe.hooks import Hooks, OnStep, RlHooks

if TYPE_CHECKING:
    from weft.engine.losses.base import Loss

ROWS = "data.jsonl"
Schema = TypeVar("Schema", bound=SftConfig | RlConfig)


@dataclass(frozen=True)
class Run:
    """The files of a run. folder: the path of the run folder, a Path or a string."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).expanduser())

    @property
    def model(self) -> Path:
        """The last checkpoint, a HuggingFace directory."""
        return self.folder / "checkpoints" / "latest"

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return summary

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one for each optimizer step."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    @property
    def rollouts(self) -> list[Path]:
        """The Parquet files of the samples of weft.rl, one for each rollout step."""
        return sorted((self.folder / "rollouts").glob("step-*.parquet"))


def sft(
    config: SftConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    objective: Loss | type[Loss] | None = None,
    on_step: OnStep | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    device: Device = "auto",
    **sections: Mapping[str, Any],
) -> Run:
    """Supervised fine-tuning in this process, as one rank. Under torchrun, srun or mpirun, this process is one of the
    launcher's ranks.

    config: the base config: a YAML file, its sections as a dict, or a loaded config. The other arguments override it.
    model, data: a path or hub id, or the section as a dict. data may also be rows in memory: a Dataset, or dicts with
    the keys of a data file. To set other keys of the section, write data={"rows": [...], "max_length": 2048}. Rows are
    written to RUN/data.jsonl, so the command line can resume the run. sections: further sections of the config
    (docs/reference/config.md), as in optimizer={"lr": 1e-5}.

    objective: a loss that replaces cross entropy (docs/how-to/objective.md). on_step: a function that every rank calls
    after each optimizer step, with the step's line of metrics.jsonl. resume: the folder of a run to resume with its
    config, which the other arguments override. overwrite: the value of run.overwrite; True lets a notebook cell run
    again. Raises UserError for a config or arguments that the command line would refuse, and StoppedError if a signal
    ended the run early.
    """
    hooks = Hooks(objective=objective() if isinstance(objective, type) else objective, on_step=on_step)
    return _train(SftConfig, hooks, device, config, model, data, resume, overwrite, dict(sections))


def dpo(
    config: DpoConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    on_step: OnStep | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    device: Device = "auto",
    **sections: Mapping[str, Any],
) -> Run:
    """Preference tuning in this process, as one rank. Under torchrun, srun or mpirun, this process is one of the
    launcher's ranks.

    data: rows of preferences in a form that docs/how-to/dpo.md lists. sections: further sections of the config
    (docs/reference/config.md), as in preference={"loss": "ipo"}. Other arguments and errors: see weft.sft.
    """
    return _train(DpoConfig, Hooks(on_step=on_step), device, config, model, data, resume, overwrite, dict(sections))


def distill(
    config: DistillConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    teacher: str | Path | None = None,
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    on_step: OnStep | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    device: Device = "auto",
    **sections: Mapping[str, Any],
) -> Run:
    """Distillation in this process, like `weft distill`: a student learns the distributions of a teacher.

    model: the student. teacher: the value of distill.teacher (docs/how-to/distill.md). sections: as in
    distill={"loss": "jsd", "beta": 0.1}. Other arguments and errors: see weft.sft.
    """
    if teacher is not None and "teacher" in sections.get("distill", {}):
        raise UserError("teacher and distill={'teacher': ...} are both set: remove one.")
    hooks = Hooks(on_step=on_step)
    return _train(DistillConfig, hooks, device, config, model, data, resume, overwrite, dict(sections), _text(teacher))


def reward(
    config: RewardConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    on_step: OnStep | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    device: Device = "auto",
    **sections: Mapping[str, Any],
) -> Run:
    """Training of a reward model in this process, as one rank. Under torchrun, srun or mpirun, this process is one of
    the launcher's ranks.

    data: rows of preferences or rows with labels, in a form that docs/how-to/reward-models.md lists. sections: further
    sections of the config (docs/reference/config.md), as in reward={"center_rewards_coefficient": 0.01}. Other
    arguments and errors: see weft.sft.
    """
    return _train(RewardConfig, Hooks(on_step=on_step), device, config, model, data, resume, overwrite, dict(sections))


def rl(
    config: RlConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    on_step: OnStep | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    replay: str | Path | None = None,
    rollout_only: bool = False,
    device: Device = "auto",
    **sections: Mapping[str, Any],
) -> Run:
    """Reinforcement learning. This process is the controller of trainers and engines on Ray.

    config, model, data, resume, overwrite: see weft.sft. reward: the value of rl.reward, where a function may replace
    an import path (docs/how-to/write-a-reward.md). A function defined in this program or notebook is pickled and sent
    to the processes that run it; pass it again to resume the run. on_step: a function that this process calls after
    each optimizer step, with the step's line of metrics.jsonl. sections: further sections of the config
    (docs/reference/config.md), as in rl={"prompts_per_step": 32}; cluster={"trainer_ranks": 2} starts two trainer
    ranks. replay, rollout_only: the options of `weft rl`. Raises UserError for a config or arguments that the command
    line would refuse, StoppedError if a signal ended the run early, and ActorError if a trainer or an engine failed.
    """
    join_launcher()
    if joined():
        raise UserError(
            "weft.rl is one process, which starts trainers and engines itself: start it without torchrun, srun and "
            "mpirun, or as one task."
        )
    _check_on_step(on_step)
    arguments = _CallArguments("weft.rl", config, model, data, resume, overwrite, dict(sections))
    pickled = _take_rewards(arguments.values, reward)
    loaded = arguments.load(RlConfig)
    options = rl_options(loaded, device, None if resume is None else ranks_of(Path(str(loaded.run.dir))))
    options = replace(options, rollout_only=rollout_only, resume=_text(resume), replay=_text(replay))
    return _run_rl(loaded, options, RlHooks(rewards=pickled, on_step=on_step))


class _CallArguments:
    """The arguments of a call: a config file, the values of sections that override it, and rows in memory, which weft
    writes to a file."""

    def __init__(
        self, caller: str, config: Any, model: Any, data: Any, resume: Any, overwrite: bool, sections: dict[str, Any]
    ) -> None:
        self.caller, self.resume = caller, resume
        self.files = [local_path(caller, str(config))] if isinstance(config, str | Path) else []
        self.values = _base(config, resume) | sections
        if model is not None:
            self.values["model"] = _model(model)
        if overwrite:
            self.values["run"] = {**self.values.get("run", {}), "overwrite": True}
        section, self.rows = ({}, None) if data is None else _split(data)
        if data is not None:
            self.values["data"] = section
        if self.rows is not None and ("path" in section or "sources" in section):
            raise UserError("data={'rows': ..., 'path': ...} sets the data twice: remove one of the keys.")
        if self.rows is not None and resume is not None:
            raise UserError("resume reads the data of the resumed run: remove the argument data.")

    def load(self, schema: type[Schema]) -> Schema:
        """The checked config. Rows are written only after all other checks have passed."""
        if self.resume is not None:
            staging = {key: value for key, value in self.values.get("run", {}).items() if key == "staging"}
            self.values["run"] = {**staging, "dir": str(self.resume)}
            if is_url(str(self.resume)):
                with fetched_config(str(self.resume)) as folder:
                    self.files = [written_config(str(folder), schema, str(self.resume))]
                    return with_local_paths(load_values(self.values, self.caller, schema, self.files), "resumed")
            self.files = [written_config(str(self.resume), schema)]
        if self.rows is None:
            return with_local_paths(load_values(self.values, self.caller, schema, self.files), "new")
        if is_url(self.values.get("run", {}).get("dir")):
            raise UserError(
                "data is rows in memory, but run.dir is on an object store: write the rows to a file there, and set "
                "data to its URL."
            )
        with scratch_folder() as scratch:
            self.values["data"]["path"] = str(_write(self.rows, scratch / ROWS))
            return _with_rows(load_values(self.values, self.caller, schema, self.files), scratch / ROWS)


def rl_options(config: RlConfig, device: Device, nproc: int | None = None) -> RlOptions:
    """Device and number of trainer ranks of a config. nproc: the number of ranks if cluster.trainer_ranks is null.
    Raises UserError if the mesh does not fit the number of ranks, or the model."""
    accelerators = accelerator_count(device)
    world = config.cluster.trainer_ranks or nproc or accelerators or 1
    sizes = resolve_mesh(config.mesh, world)
    check_reshard(config, sizes)
    check_model(config, sizes)
    return RlOptions(device="cuda" if accelerators or device == "cuda" else "cpu", world=world)


def _base(config: Any, resume: str | Path | None) -> dict[str, Any]:
    """The sections of a config that is an object or a dict; {} for a file."""
    if resume is not None and config is not None:
        raise UserError("resume reads the config of the resumed run: remove config, and pass sections as keywords.")
    if isinstance(config, SftConfig | RlConfig):
        return to_dict(config)
    if config is None or isinstance(config, str | Path):
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    raise UserError(f"config is a {type(config).__name__}: pass a YAML file, a dict of sections, or a loaded config.")


def _take_rewards(values: dict[str, Any], reward: Any) -> dict[str, bytes]:
    """Add the names of reward functions to section rl. Returns name -> pickled function, for functions that must be
    sent to other processes."""
    from weft.rl.rewards.given import name_rewards

    section = values.get("rl", {})
    if not isinstance(section, Mapping):
        raise UserError(f'rl is a section, not a {type(section).__name__}: pass rl={{"prompts_per_step": 32}}.')
    if reward is not None and "reward" in section:
        raise UserError("reward and rl={'reward': ...} are both set: remove one.")
    rewards = section.get("reward") if reward is None else reward
    if rewards is None:
        return {}
    names, pickled = name_rewards(rewards)
    values["rl"] = {**section, "reward": names}
    return pickled


def _with_rows(config: Any, written: Path) -> Any:
    """Create the run's folder, and move the written rows into it. Returns the config with both paths."""
    from weft.observe.folder import make_folder

    folder = make_folder(config.run, config.model.path, config.command)
    shutil.move(written, folder / ROWS)
    data = replace(config.data, path=str(folder / ROWS))
    return replace(config, data=data, run=replace(config.run, dir=str(folder)))


def _run_rl(config: RlConfig, options: RlOptions, hooks: RlHooks) -> Run:
    from weft.launch import flight
    from weft.launch.ray_actors import import_ray
    from weft.observe.folder import default_folder
    from weft.recipes import rl as recipe

    if import_ray().is_initialized():
        raise UserError("this process has already started Ray: call ray.shutdown() before weft.rl.")
    if config.run.dir is None:
        config = replace(config, run=replace(config.run, dir=str(default_folder(config.model.path))))
    try:
        _beside_loops(lambda: recipe.run(config, options, hooks))
    finally:
        flight.recorder.close()
    return Run(Path(str(config.run.dir)))


def _beside_loops(body: Callable[[], None]) -> None:
    """Run `body` in this thread. If an event loop runs in this thread, as in a notebook, run `body` in another thread,
    which then receives this thread's signals."""
    from weft.launch.stopping import StopSignals

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # no event loop runs
        body()
        return
    with StopSignals(), ThreadPoolExecutor(1) as thread:
        thread.submit(body).result()


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def _check_on_step(on_step: Any) -> None:
    if on_step is not None and not callable(on_step):
        raise UserError(
            f"on_step is a {type(on_step).__name__}: pass a function of one argument, the step's line of metrics."
        )


def _model(model: Any) -> dict[str, Any]:
    """The section `model`."""
    if isinstance(model, Mapping):
        return dict(model)
    if isinstance(model, str | Path):
        return {"path": str(model)}
    raise UserError(
        f"model is a {type(model).__name__}, not a path or hub id: weft reads weights from files, each rank its shard. "
        'Call save_pretrained("base") on the model and on its tokenizer, and pass model="base".'
    )


def _split(data: Any) -> tuple[dict[str, Any], Iterable[Any] | None]:
    """(Keys of the section `data`; the rows in memory, or None)."""
    if isinstance(data, str | Path):
        return {"path": str(data)}, None
    if not isinstance(data, Mapping):
        return {}, data
    if hasattr(data, "num_rows"):  # a DatasetDict
        raise UserError(f"data has splits ({', '.join(map(str, data))}): pass the rows of one split, data=data[...].")
    return {key: value for key, value in data.items() if key != "rows"}, data.get("rows")


def _train(
    schema: type[SftConfig],
    hooks: Hooks,
    device: Device,
    config: Any,
    model: Any,
    data: Any,
    resume: Any,
    overwrite: bool,
    sections: dict[str, Any],
    teacher: str | None = None,
) -> Run:
    """weft.sft, and the functions of the commands that share its loop. schema: the class of their config."""
    join_launcher()
    _check_on_step(hooks.on_step)
    caller = f"weft.{schema.command}"
    arguments = _CallArguments(caller, config, model, data, resume, overwrite, sections)
    if teacher is not None:  # in addition to the section distill in `sections`
        arguments.values["distill"] = {**arguments.values.get("distill", {}), "teacher": teacher}
    if arguments.rows is not None:
        _require_one_rank(
            caller, "set data to the path of a file that all ranks can read; rows in memory are not shared."
        )
    return _run(arguments.load(schema), TrainOptions(device=device, resume=_text(resume)), hooks)


def _run(config: SftConfig, options: TrainOptions, hooks: Hooks) -> Run:
    from weft.launch import flight
    from weft.observe.folder import default_folder

    recipe = importlib.import_module(f"weft.recipes.{config.command}")
    if hooks.objective is not None:  # config.yaml names it, so that the run cannot be resumed with another loss
        if config.train.loss is not None:
            raise UserError("objective and train={'loss': ...} are both set: remove one.")
        kind = type(hooks.objective)
        config = replace(config, train=replace(config.train, loss=f"{kind.__module__}:{kind.__qualname__}"))
    if config.run.dir is None:
        _require_one_rank(f"weft.{config.command}", "set run={'dir': ...}, so that all ranks write to one folder.")
        config = replace(config, run=replace(config.run, dir=str(default_folder(config.model.path))))
    try:
        recipe.run(config, options, hooks)
    finally:
        flight.recorder.close()
    return Run(Path(str(config.run.dir)))


def _require_one_rank(caller: str, otherwise: str) -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"{caller} runs in {os.environ['WORLD_SIZE']} ranks: {otherwise}")


def _write(rows: Iterable[Mapping[str, Any]], path: Path) -> Path:
    with path.open("w", encoding="utf-8") as stream:
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise UserError(
                    f"data: row {number} is a {type(row).__name__}, not a dict such as "
                    '{"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}.'
                )
            stream.write(_line(row, number) + "\n")
    return path


def _line(row: Mapping[str, Any], number: int) -> str:
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        column = next((f", column {key!r}" for key in row if not _is_json(row[key])), "")
        raise UserError(
            f"data: row {number}{column} cannot be written as JSON: {error}. Remove it, or convert it to text or null."
        ) from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    """Convert values of numpy and torch to plain Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
