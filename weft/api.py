"""weft from Python: `weft.sft(...)` is the command `weft sft`, in this process. Imports torch when it is called."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cluster.options import Device, SftOptions
from weft.config.load import load_values
from weft.config.schema import SftConfig
from weft.errors import UserError
from weft.recipes.hooks import Hooks, OnStep

if TYPE_CHECKING:
    from weft.objectives.base import Objective

ROWS = "data.jsonl"


@dataclass(frozen=True)
class Run:
    """What a run has left in its folder."""

    folder: Path

    @property
    def model(self) -> Path:
        """The last checkpoint, a HuggingFace directory."""
        return self.folder / "checkpoints" / "latest"

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json says."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one for each optimizer step."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def sft(
    model: str | Path | Mapping[str, Any],
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]],
    *,
    objective: Objective | type[Objective] | None = None,
    on_step: OnStep | None = None,
    device: Device = "auto",
    **sections: Mapping[str, Any],
) -> Run:
    """Supervised fine-tuning in this process, as one rank; under torchrun as one of its ranks.

    model, data: a path or hub id, or that section as a dict. data may be rows in memory: dicts such as the lines of a
    file, or a Dataset of them; beside other keys, data={"rows": [...], "max_length": 2048}. They are written to
    RUN/data.jsonl, so that the run can go on from the command line.

    objective: in place of cross entropy (docs/how-to/objective.md). on_step: called after each optimizer step, on
    every rank, with the step's line of metrics.jsonl. sections: those of docs/config.md, as in optimizer={"lr": 1e-5}.

    Raises UserError for what the command line would refuse; StoppedError where a signal ended the run early.
    """
    values: dict[str, Any] = dict(sections)
    values["model"] = _model(model)
    if on_step is not None and not callable(on_step):
        raise UserError(
            f"on_step is of type {type(on_step).__name__}: give a function of one argument, the step's line."
        )
    section, rows = _split(data)
    if rows is not None:
        if "path" in section or "sources" in section:
            raise UserError("data={'rows': ..., 'path': ...} names the data twice: keep one.")
        folder = _folder_of(values)
        values["run"] = {**values.get("run", {}), "dir": str(folder)}
        section["path"] = str(_write(rows, folder / ROWS))
    values["data"] = section
    config = load_values(values)
    if isinstance(objective, type):
        objective = objective()
    return _run(config, Hooks(objective=objective, on_step=on_step), device)


def _model(model: Any) -> dict[str, Any]:
    """The section."""
    if isinstance(model, Mapping):
        return dict(model)
    if isinstance(model, str | Path):
        return {"path": str(model)}
    raise UserError(
        f"model is a {type(model).__name__}, not a path or hub id: weft reads weights from files, each rank its part. "
        'Call save_pretrained("base") on the model and on its tokenizer, and say model="base".'
    )


def _split(data: Any) -> tuple[dict[str, Any], Iterable[Any] | None]:
    """The keys of the section, and the rows that are in memory."""
    if isinstance(data, str | Path):
        return {"path": str(data)}, None
    if not isinstance(data, Mapping):
        return {}, data
    if hasattr(data, "num_rows"):  # a DatasetDict
        raise UserError(f"data has splits ({', '.join(map(str, data))}): give the rows of one, data=data[...].")
    return {key: value for key, value in data.items() if key != "rows"}, data.get("rows")


def _run(config: SftConfig, hooks: Hooks, device: Device) -> Run:
    from weft.observe import flight
    from weft.recipes import sft as recipe
    from weft.recipes.folder import default_folder

    if hooks.objective is not None:  # named in config.yaml, so that no other objective goes on with this run
        if config.train.objective is not None:
            raise UserError("objective and train={'objective': ...} are both given: keep one.")
        kind = type(hooks.objective)
        config = replace(config, train=replace(config.train, objective=f"{kind.__module__}:{kind.__qualname__}"))
    if config.run.dir is None:
        _require_one_rank("run={'dir': ...} has to be set, so that all of them write to one folder.")
        config = replace(config, run=replace(config.run, dir=str(default_folder(config.model.path))))
    try:
        recipe.run(config, SftOptions(device=device), hooks)
    finally:
        flight.own.close()
    return Run(Path(str(config.run.dir)))


def _folder_of(values: Mapping[str, Any]) -> Path:
    from weft.recipes.folder import make_folder

    _require_one_rank("data has to be the path of a file that all of them can read, not rows in memory.")
    return make_folder(values.get("run", {}).get("dir"), str(values["model"].get("path")))


def _require_one_rank(otherwise: str) -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"weft.sft runs in {os.environ['WORLD_SIZE']} ranks: {otherwise}")


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
            f"data: row {number}{column} cannot be written as JSON: {error}. Leave it out, or make it text or null."
        ) from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    """What numpy and torch hold, as Python has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
