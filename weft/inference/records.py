"""RUN/rollouts: every sample of every rollout step as Parquet, so that rollouts can be browsed and trained on again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import numpy as np

from weft.data.image_columns import Image
from weft.data.image_files import MediaInfo, PromptImages
from weft.errors import UserError, first_line
from weft.files import regular_file
from weft.importing import import_extra
from weft.inference.base import CallTimes
from weft.inference.types import Prompt, Sample, SampleGroup, samples_of

FOLDER = "rollouts"
EVALUATIONS = "evaluations"
# Column -> array of a sample, and its dtype; null if the sample has none. Other programs read the columns.
_ARRAYS: dict[str, tuple[str, Any]] = {
    "tokens": ("tokens", np.int64),
    "sampled": ("sampled", np.bool_),
    "rollout": ("rollout_logprobs", np.float32),
    "versions": ("versions", np.int32),
    "kept_logmass": ("kept_logmass", np.float32),
    "old": ("old_logprobs", np.float32),
    "reference": ("ref_logprobs", np.float32),
    "teacher": ("teacher_logprobs", np.float32),
    "values": ("values", np.float32),
    "advantages": ("advantages", np.float32),
    "correction": ("correction", np.float32),
}


def import_arrow() -> tuple[Any, Any]:
    """(pyarrow, pyarrow.parquet); UserError if pyarrow is not installed."""
    need = "the record of rollouts"
    return import_extra("pyarrow", "rl", need), import_extra("pyarrow.parquet", "rl", need)


def rollout_file(folder: Path, step: int, into: str = FOLDER) -> Path:
    """The file of a step, such as RUN/rollouts/step-000001.parquet. folder: RUN. into: subfolder of RUN."""
    return folder / into / f"step-{step:06d}.parquet"


def write_rollouts(
    folder: Path, step: int, groups: Sequence[SampleGroup], into: str = FOLDER, *, routes: bool = False
) -> Path:
    """Write all samples of a rollout step, or of an evaluation, in order; atomic. Returns the file. routes: whether to
    include the routes of a mixture of experts, which take layers x top_k bytes per token, more than everything else."""
    pa, pq = import_arrow()
    rows = [_row(step, sample) | _packed_routes(sample.routes if routes else None) for sample in samples_of(groups)]
    path = rollout_file(folder, step, into)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        pq.write_table(pa.Table.from_pylist(rows), partial, compression="zstd")
    except OSError as error:
        partial.unlink(missing_ok=True)  # an incomplete file only takes space
        error.filename = error.filename or str(path)
        raise
    os.replace(partial, path)
    return path


def read_rollouts(path: Path) -> list[SampleGroup]:
    """The groups of one file. UserError if it is not a file of weft's rollouts."""
    _, pq = import_arrow()
    try:
        rows = pq.ParquetFile(regular_file(path, "a file of rollouts")).read().to_pylist()
        samples = [_sample(row) for row in rows]
    except UserError:
        raise
    except Exception as error:  # pyarrow's, or Python's for values of unexpected types
        raise UserError(f"{path}: contains no rollouts of weft: {first_line(error)}.") from error
    groups: dict[str, SampleGroup] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.id, SampleGroup(sample.prompt, [])).samples.append(sample)
    return list(groups.values())


@dataclass(frozen=True)
class Answer:
    """A recorded sample for a reader. prompt_id: as Prompt.id. number: in its group. rewards: of each function. length:
    number of sampled tokens. images: names of the prompt's images."""

    prompt_id: str
    prompt: str
    number: int
    text: str
    reward: float | None
    rewards: Mapping[str, float | None]
    length: int
    finish: str
    images: Any = None


_READ = ("prompt_index", "visit", "number", "branch", "prompt", "completion", "reward", "rewards", "finish", "columns")


def read_answers(path: Path) -> list[Answer]:
    """The answers of one file, in order; one for each episode of an agent. Tokens and logprobs, most of the file, are
    not read. UserError if it is not a file of weft's rollouts."""
    _, pq = import_arrow()
    try:
        table = pq.ParquetFile(regular_file(path, "a file of rollouts")).read([*_READ, "sampled"])
        sampled = table["sampled"].combine_chunks()
        drawn = np.concatenate([[0], np.cumsum(sampled.values.to_numpy(zero_copy_only=False).astype(np.int64))])
        offsets = sampled.offsets.to_numpy()
        lengths = (drawn[offsets[1:]] - drawn[offsets[:-1]]).tolist()
        rows = table.select(_READ).to_pylist()
        return [_answer(row, length) for row, length in zip(rows, lengths, strict=True) if not row["branch"]]
    except UserError:
        raise
    except Exception as error:  # as in read_rollouts
        raise UserError(f"{path}: contains no rollouts of weft: {first_line(error)}.") from error


def _answer(row: dict[str, Any], length: int) -> Answer:
    rewards = _checked_rewards(row, _READ)
    columns = json.loads(row["columns"])
    return Answer(
        prompt_id=f"{row['prompt_index']}.{row['visit']}",
        prompt=row["prompt"],
        number=row["number"],
        text=row["completion"],
        reward=row["reward"],
        rewards=rewards,
        length=length,
        finish=row["finish"],
        images=columns.get("images") if isinstance(columns, dict) else None,
    )


@dataclass(frozen=True)
class SampleLife:
    """When the steps of a sample's life ended, as in SampleTimes. name: as Sample.id."""

    prompt_id: str
    name: str
    queued: float
    calls: tuple[CallTimes, ...]
    ended: float
    rewarded: float
    trained: float | None


def read_lives(path: Path) -> list[SampleLife]:
    """The times of the samples of one file that were generated and rewarded; none for files of older versions of weft.
    UserError if it is not a file of weft's rollouts."""
    _, pq = import_arrow()
    try:
        table = pq.ParquetFile(regular_file(path, "a file of rollouts"))
        if "times" not in table.schema_arrow.names:
            return []
        rows = table.read(["prompt_index", "visit", "number", "branch", "times"]).to_pylist()
        return [life for row in rows if (life := _life(row)) is not None]
    except UserError:
        raise
    except Exception as error:  # as in read_rollouts
        raise UserError(f"{path}: contains no rollouts of weft: {first_line(error)}.") from error


def _life(row: dict[str, Any]) -> SampleLife | None:
    times = row["times"]
    calls = tuple(
        CallTimes(int(call["engine"]), *(float(call[name]) for name in ("queued", "began", "ended")))
        for call in times["calls"] or ()
    )
    if not calls or times["ended"] is None or times["rewarded"] is None:
        return None
    prompt_id = f"{int(row['prompt_index'])}.{int(row['visit'])}"
    name = f"{prompt_id}/{int(row['number'])}" + (f".{int(row['branch'])}" if row["branch"] else "")
    trained = None if times["trained"] is None else float(times["trained"])
    life = SampleLife(
        prompt_id, name, float(times["queued"]), calls, float(times["ended"]), float(times["rewarded"]), trained
    )
    shown = [life.queued, life.ended, life.rewarded, life.trained or 0.0, *(c.ended for c in calls)]
    if not all(math.isfinite(value) for value in shown + [value for c in calls for value in (c.queued, c.began)]):
        raise ValueError("times must be numbers")
    return life


def has_routes(path: Path) -> bool:
    """Whether a file of rollouts includes the routes of every sample."""
    _, pq = import_arrow()
    return "routes" in pq.read_schema(path).names and pq.read_table(path, columns=["routes"])["routes"].null_count == 0


def rollout_files(folder: Path) -> dict[int, Path]:
    """Rollout step -> file, in a folder RUN/rollouts; by rising step."""
    named = [(path, path.stem.partition("-")[2]) for path in sorted(folder.glob("step-*.parquet"))]
    return {int(step): path for path, step in named if step.isdecimal() and step.isascii()}


def recorded_files(folder: str, option: str) -> list[Path]:
    """The files of RUN/rollouts in order. UserError, naming the option, if there are none."""
    files = list(rollout_files(Path(folder)).values())
    if not files:
        raise UserError(f"{option} {folder}: contains no rollouts. Name the folder RUN/rollouts of a `weft rl` run.")
    return files


def cut_rollouts(folder: Path, after: int, into: str = FOLDER) -> list[Path]:
    """Move the files of steps after `after` to RUN/rollouts/dropped (with `into`, to RUN/into/dropped); returns their
    new paths."""
    moved = []
    for step, path in rollout_files(folder / into).items():
        if step > after:
            aside = path.parent / "dropped"
            aside.mkdir(exist_ok=True)
            moved.append(path.replace(aside / path.name))
    return moved


def _row(step: int, sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    arrays = {column: getattr(sample, name) for column, (name, _) in _ARRAYS.items()}
    return {
        "step": step,
        "prompt_index": prompt.index,
        "visit": prompt.visit,
        "number": sample.number,
        "branch": sample.branch,
        "source": prompt.source,
        "prompt": prompt.text,
        "completion": sample.text,
        "reward": sample.reward,
        "rewards": json.dumps(sample.rewards),
        "trained": sample.trained,
        "finish": sample.finish,
        "turns": sample.turns,
        "prompt_tokens": len(prompt.tokens),
        "messages": None if prompt.messages is None else json.dumps(prompt.messages, default=str),
        "columns": json.dumps(
            prompt.columns, default=lambda value: value.names if isinstance(value, PromptImages) else str(value)
        ),
        "notes": json.dumps(sample.notes, default=str),
        "times": asdict(sample.times),
        **_replied(sample.reply_images),
        **{name: None if value is None else value.tolist() for name, value in arrays.items()},
    }


def _replied(images: PromptImages | None) -> dict[str, Any]:
    """The columns for images of replies. Images that are not files are stored as bytes, because the data does not
    contain them."""
    if images is None:
        return {"reply_images": None, "reply_patches": None, "reply_pairs": None}
    pairs = zip(images.images, images.sizes, strict=True)
    rows = [{"path": image.path, "url": image.url, "data": image.data, **asdict(size)} for image, size in pairs]
    return {"reply_images": rows, "reply_patches": images.patches, "reply_pairs": images.pairs}


def _images(row: Mapping[str, Any]) -> PromptImages | None:
    """Read the images that `_replied` wrote."""
    if row.get("reply_images") is None:
        return None
    rows = row["reply_images"]
    images = tuple(Image(path=r["path"], url=r["url"], data=r["data"]) for r in rows)
    sizes = tuple(MediaInfo(r["height"], r["width"], r["size"], r["changed"]) for r in rows)
    counts = int(row["reply_patches"]), int(row["reply_pairs"])
    return PromptImages(f"{row['source']}, a reply", images, sizes, *counts)


def _packed_routes(routes: Any) -> dict[str, Any]:
    """The columns for routes, as bytes, one per expert if numbers fit: Parquet's lists are several times slower."""
    if routes is None:
        return {"routes": None, "routes_shape": None}
    compact = np.int8 if int(routes.max(initial=0)) <= np.iinfo(np.int8).max else np.int16
    return {"routes": np.asarray(routes, compact).tobytes(), "routes_shape": list(routes.shape)}


def _routes(row: dict[str, Any]) -> Any:
    if row.get("routes") is None:
        return None
    shape = row["routes_shape"]
    compact = np.int8 if len(row["routes"]) == np.prod(shape) else np.int16
    return np.frombuffer(row["routes"], compact).astype(np.int16).reshape(shape)


# Types that columns must have when they are read.
_TYPES: dict[str, type | UnionType] = {
    "prompt_index": int, "visit": int, "number": int, "branch": int, "turns": int, "prompt_tokens": int, "tokens": list,
    "prompt": str, "completion": str, "source": str, "finish": str, "reward": float | int | NoneType,
}  # fmt: skip


def _checked_rewards(row: dict[str, Any], names: Collection[str]) -> dict[str, float | None]:
    """The rewards by function, after a check of their types and of the columns in `names`."""
    for name, kind in _TYPES.items():
        if name in names and not isinstance(row[name], kind):
            raise ValueError(f"{name} is a {type(row[name]).__name__}")
    rewards = json.loads(row["rewards"])
    if not isinstance(rewards, dict) or not all(isinstance(v, float | int | NoneType) for v in rewards.values()):
        raise ValueError("rewards must be numbers")
    return rewards


def _sample(row: dict[str, Any]) -> Sample:
    rewards = _checked_rewards(row, _TYPES)
    arrays: dict[str, Any] = {
        name: None if row.get(column) is None else np.asarray(row[column], dtype=dtype)
        for column, (name, dtype) in _ARRAYS.items()
    }
    prompt = Prompt(
        index=row["prompt_index"],
        visit=row["visit"],
        tokens=tuple(row["tokens"][: row["prompt_tokens"]]),
        text=row["prompt"],
        messages=None if row["messages"] is None else tuple(json.loads(row["messages"])),
        columns=json.loads(row["columns"]),
        source=row["source"],
    )
    return Sample(
        prompt=prompt,
        number=row["number"],
        branch=row["branch"],
        finish=row["finish"],
        turns=row["turns"],
        text=row["completion"],
        rewards=rewards,
        reward=row["reward"],
        trained=row["trained"],
        notes=json.loads(row["notes"]),
        routes=_routes(row),
        reply_images=_images(row),
        **arrays,
    )
