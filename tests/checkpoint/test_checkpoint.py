"""Saving: what is kept, what a writer's failure does, and that nothing damaged is loaded."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.cases import open_engine, saved_model
from tests.support.pool import run
from tests.support.resuming import Sections, config_of, equal, inputs, lines, process, whole_state
from weft import cli
from weft.checkpoint import rng, save, snapshot
from weft.checkpoint.retention import (
    commit,
    complete_steps,
    point_best,
    point_latest,
    prune,
    set_aside,
    step_folder,
    sweep,
)
from weft.checkpoint.save import Notes, Saver
from weft.checkpoint.state import (
    DamagedError,
    check_contents,
    find_state_shards,
    load_state,
    read_state,
    write_rank_file,
)
from weft.config.schema import CheckpointConfig
from weft.engine import host
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.launch.process import join
from weft.observe.folder import cut_lines, open_folder
from weft.parallel.shards.boxes import Box, Shard
from weft.parallel.shards.ranges import RangeWriter, join_seams
from weft.parallel.shards.safetensors_files import create, lay_out

# ---------------------------------------------------------------- which folders stay, and who writes them


def folders(path: Path, *steps: int) -> Path:
    for step in steps:
        (step_folder(path, step) / "trainer_state").mkdir(parents=True)
    return path


@pytest.mark.covers("checkpoint.keep", "checkpoint.keep_every")
@pytest.mark.parametrize(
    ("keep", "keep_every", "remaining"),
    [
        (3, None, [30, 40, 50]),
        (1, None, [50]),
        (1, 20, [20, 40, 50]),
        (None, None, [10, 20, 30, 40, 50]),
        (9, 10, [10, 20, 30, 40, 50]),
    ],
)
def test_keep_and_keep_every(keep: int | None, keep_every: int | None, remaining: list[int], tmp_path: Path) -> None:
    folders(tmp_path, 10, 20, 30, 40, 50)
    prune(tmp_path, keep=keep, keep_every=keep_every, trainer_state="all")
    assert complete_steps(tmp_path) == remaining


@pytest.mark.covers("checkpoint.trainer_state")
def test_trainer_state_of_the_last_only(tmp_path: Path) -> None:
    folders(tmp_path, 1, 2, 3)
    prune(tmp_path, keep=2, keep_every=None, trainer_state="last")
    assert [(step_folder(tmp_path, step) / "trainer_state").exists() for step in (2, 3)] == [False, True]


def test_trainer_state_of_the_last_only_beside_an_older_best(tmp_path: Path) -> None:
    """What can be resumed from is the newest, whatever `best` names."""
    folders(tmp_path, 1, 2, 3)
    point_best(step_folder(tmp_path, 1))
    prune(tmp_path, keep=1, keep_every=None, trainer_state="last")
    assert complete_steps(tmp_path) == [1, 3]
    assert [(step_folder(tmp_path, step) / "trainer_state").exists() for step in (1, 3)] == [False, True]


def test_latest_names_a_checkpoint_at_every_moment(tmp_path: Path) -> None:
    """A kill after any call of the system leaves the old link or the new one."""
    folders(tmp_path, 1, 2)
    point_latest(step_folder(tmp_path, 1))
    targets: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event.startswith("c_"):
            targets.append(os.readlink(tmp_path / "latest") if (tmp_path / "latest").is_symlink() else "nothing")

    sys.setprofile(look)
    try:
        point_latest(step_folder(tmp_path, 2))
    finally:
        sys.setprofile(None)
    assert list(dict.fromkeys(targets)) == ["step-000001", "step-000002"]


def test_each_tensor_has_one_writer_and_every_replica_writes_some() -> None:
    box, values = Box((0,), (1,)), torch.ones(1)
    replicas = [Shard(box, values, ((outer, 2), (inner, 3))) for outer in range(2) for inner in range(3)]
    writers = [[replica for replica, shard in enumerate(replicas) if shard.is_writer(number)] for number in range(12)]
    assert sorted(writers) == [[replica] for replica in range(6) for _ in range(2)]


def replacement(path: Path) -> tuple[Path, Path]:
    """A complete folder, and the checkpoint whose place it takes: each holds two files."""
    target, partial = step_folder(path, 1), path / "step-000001.partial"
    for folder in (target, partial):
        (folder / "inside").mkdir(parents=True)
        for name in ("a", "inside/b"):
            (folder / name).write_text(folder.name)
    return partial, target


def test_a_folder_has_its_name_only_while_it_is_whole(tmp_path: Path) -> None:
    """A kill after any call of the system, while one takes the place of another."""
    partial, target = replacement(tmp_path)
    states: list[tuple[str, ...]] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event.startswith("c_"):
            files = (target / "a", target / "inside" / "b")
            states.append(tuple(file.read_text() for file in files if file.exists()))

    sys.setprofile(look)
    try:
        commit(partial, target)
    finally:
        sys.setprofile(None)
    assert list(dict.fromkeys(states)) == [(target.name,) * 2, (), (partial.name,) * 2]
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_on_the_disk_before_it_is_named_and_its_name_before_the_old_one_goes(tmp_path: Path) -> None:
    partial, target = replacement(tmp_path)
    done: list[str] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def synced(descriptor: int) -> None:
        done.append(f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        done.append(f"rename {old}")
        rename(old, new)

    def removed(folder: Path, **options: Any) -> None:
        if folder.exists():
            done.append("remove")
        rmtree(folder, **options)

    with mock.patch.multiple(os, fsync=synced, rename=renamed), mock.patch.object(shutil, "rmtree", removed):
        commit(partial, target)
    files = ["", "/a", "/inside", "/inside/b"]
    assert sorted(done[:4]) == [f"fsync {partial}{file}" for file in files]
    assert done[4:] == [f"rename {target}", f"rename {partial}", f"fsync {tmp_path}", "remove"]


def test_a_rank_waits_until_its_file_is_on_the_disk(tmp_path: Path) -> None:
    """All of it: another machine's rank commits the folder, and can flush its own files alone."""
    flushed: dict[str, int] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        flushed[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size
        fsync(descriptor)

    with mock.patch.object(os, "fsync", noted):
        tensors = {"weights/a": host.HostTensor.wrap(torch.ones(1000))}
        file = write_rank_file(tmp_path, 0, "id", tensors, {"weights/a": Box((0,), (1000,))})
        with RangeWriter(tmp_path, tmp_path / "seams") as writer:
            layout = lay_out({"a": torch.ones(1 << 16)})
            create(tmp_path / "weights", layout)
            box = Box((0,), (1 << 16,))
            writer.write("weights", layout.entries["a"], box, box, torch.ones(1 << 16))
        written = dict(flushed)
        flushed.clear()
        join_seams(tmp_path, "weights", [tmp_path / "seams"])
    for name in (file.name, "weights", "seams"):
        assert written[str(tmp_path / name)] == (tmp_path / name).stat().st_size > 0, name
    assert flushed == {str(tmp_path / "weights"): (tmp_path / "weights").stat().st_size}


def test_what_a_kill_leaves_is_swept(tmp_path: Path) -> None:
    folders(tmp_path, 1, 2)
    leftovers = ("step-000003.partial", "step-000000.removing", "step-000003.ranks-a1", "step-000003.ranks-a1.over")
    for name in (*leftovers, "step-000002/trainer_state.removing"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("step-000001")
    (tmp_path / "latest.new").symlink_to("step-000002")
    (tmp_path / "step-000009.aside-1").mkdir()
    sweep(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000001", "step-000002", "latest", "step-000009.aside-1"}
    assert [p.name for p in (tmp_path / "step-000002").iterdir()] == ["trainer_state"]
    assert os.readlink(tmp_path / "latest") == "step-000002"


def test_a_note_that_comes_late_does_not_keep_the_folder(tmp_path: Path) -> None:
    """Ranks that end look whether it is there: with it they would wait for a checkpoint that is whole already."""
    first, second = (Notes(tmp_path / "step-000001.ranks-a", rank, 2) for rank in (0, 1))
    first.begin()
    first.leave("written", [1])
    assert second.read("written", 0) == [1] and second.any("written") and not second.all("written")
    remove = os.rmdir

    def late(path: Any, **options: Any) -> None:
        with suppress(OSError):
            second.leave("ending")
        remove(path, **options)

    with mock.patch.object(os, "rmdir", late):
        first.end()
    assert second.listed() is None and list(tmp_path.iterdir()) == []


def test_later_checkpoints_are_set_aside_and_never_over_others(tmp_path: Path) -> None:
    folders(tmp_path, 1, 2, 3)
    assert set_aside(tmp_path, 1) == ["step-000002.aside-1", "step-000003.aside-1"]
    folders(tmp_path, 2)
    assert set_aside(tmp_path, 1) == ["step-000002.aside-2"]
    assert complete_steps(tmp_path) == [1]


def test_a_line_cut_short_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2')
    assert cut_lines(tmp_path / "metrics.jsonl", 2) == 2
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert cut_lines(tmp_path / "metrics.jsonl", 2) == 0


def test_generators_come_back_and_ranks_differ() -> None:
    rng.seed_rank(1, 0)
    states = rng.capture(torch.device("cpu"))
    drawn = [draw() for draw in DRAWS]
    rng.seed_rank(1, 1)
    assert [draw() for draw in DRAWS] != drawn
    rng.restore(states, torch.device("cpu"))
    assert [draw() for draw in DRAWS] == drawn


DRAWS: list[Callable[[], Any]] = [
    lambda: float(torch.rand(())),
    lambda: __import__("random").random(),
    lambda: __import__("random").gauss(0.0, 1.0),
]


# ---------------------------------------------------------------- a Saver of one and two ranks


def opened(folder: str, **config: Any) -> Saver:
    """A Saver for a tiny Llama with moments, on as many ranks as there are."""
    torch.manual_seed(0)
    engine = open_engine(saved_model_path(), str(torch.distributed.get_world_size()))
    assert engine.optimizer is not None
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.apply(1e-3)
    return Saver(engine, Path(folder), CheckpointConfig(**config), {"config": {}})


def saved_model_path() -> str:
    return _path[0]


_path: list[str] = []


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run(world, _called, function, saved_model("llama"), *args)


def _called(function: Callable[..., Any], path: str, *args: Any) -> Any:
    _path[:] = [path]
    return function(*args)


def pieces(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: piece.local.clone() for name, piece in find_state_shards(engine).items()}


@mock.patch.object(host, "CHUNK", 5120)  # most tensors lie over several
def saves_while_weights_move(folder: str) -> bool:
    saver = opened(folder, async_=True)
    before, write = pieces(saver.engine), snapshot.write_export

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return write(*arguments, **options)

    with mock.patch.object(snapshot, "write_export", slow), saver:
        saver.save(1, {})
        busy = saver._busy
        with torch.no_grad():
            for piece in find_state_shards(saver.engine).values():
                piece.local.zero_()
        saver.finish()
    return busy and equal(before, whole_state(Path(folder), 1))


@pytest.mark.covers("checkpoint.async")
def test_an_asynchronous_save_holds_what_stood_when_it_began(tmp_path: Path) -> None:
    assert on_ranks(1, saves_while_weights_move, str(tmp_path)) == [True]


def saves_with_an_error(folder: str, number: int) -> tuple[str, str]:
    """A first save that is whole; then rank 1 meets an error of the system. (kind, text) of what each rank raises."""
    saver = opened(folder)
    saver.save(1, {})
    saver.wait()

    def fails(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    broken = mock.patch.object(snapshot, "write_rank_file", fails)
    with saver, broken if torch.distributed.get_rank() == 1 else mock.patch.object(snapshot, "DTYPES", {}):
        saver.save(2, {})
        try:
            saver.wait()
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def test_a_full_disk_of_one_rank_ends_all_with_its_name_and_the_last_whole_checkpoint_stands(tmp_path: Path) -> None:
    errors = on_ranks(2, saves_with_an_error, str(tmp_path), errno.ENOSPC)
    assert errors[0] == errors[1] and errors[0][0] == "StorageError"
    text = errors[0][1]
    assert text.startswith(f"rank 1 could not save step 2 to {tmp_path}/checkpoints/step-000002.partial: No space left")
    assert f"weft sft --resume {tmp_path}" in text
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-000001", "latest"}
    assert read_state(tmp_path / "checkpoints" / "latest").step == 1


def saves_into_nothing(folder: str) -> str:
    saver = opened(folder)
    shutil.rmtree(folder)
    with saver:
        saver.save(1, {})
        try:
            saver.finish()
        except UserError as error:
            return str(error)
    return ""


def test_a_run_folder_that_has_vanished_is_an_error_and_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (text,) = on_ranks(1, saves_into_nothing, str(tmp_path / "run"))
    assert "No such file or directory" in text and "rank 0" in text
    assert not (tmp_path / "run").exists()


def saves_infinity(folder: str) -> tuple[str, list[str]]:
    saver = opened(folder)
    saver.save(1, {})
    saver.wait()
    saver.pop_messages()
    if torch.distributed.get_rank() == 1:
        name = next(name for name, piece in find_state_shards(saver.engine).items() if name.startswith("weights/"))
        find_state_shards(saver.engine)[name].local.view(-1)[0] = float("inf")
    with saver:
        saver.save(2, {})
        try:
            saver.finish()
        except FloatingPointError as error:
            return str(error), saver.pop_messages()
    return "", []


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    (text, news), (second_text, _) = on_ranks(2, saves_infinity, str(tmp_path))
    assert text == second_text and text.startswith(
        "step 2 is not saved: weights are not finite: model.embed_tokens.weight."
    )
    assert len(news) == 1
    assert complete_steps(tmp_path / "checkpoints") == [1]


def tensor_bytes() -> int:
    """Of all tensors that this process holds, each storage once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@mock.patch.object(host, "CHUNK", 5120)
def saves_often(folder: str) -> list[int]:
    saver, sizes = opened(folder, async_=True, keep=2), []
    with saver:
        sizes.append(tensor_bytes())
        for step in range(1, 5):
            saver.save(step, {})
            saver.wait()
            sizes.append(tensor_bytes())
        sizes.append(sum(part.local.nbytes for part in find_state_shards(saver.engine).values()))
    return sizes


def test_many_saves_take_the_memory_of_one(tmp_path: Path) -> None:
    (sizes,) = on_ranks(1, saves_often, str(tmp_path))
    before, *after, copied = sizes
    assert len(set(after)) == 1
    assert copied <= after[0] - before < 1.1 * copied + 20_000  # and the states of random number generators
    assert complete_steps(tmp_path / "checkpoints") == [3, 4]


def loses_checkpoints(folder: str) -> list[list[str]]:
    """News after each of four saves, of which two are removed by somebody else."""
    saver, news = opened(folder, keep=3), []
    with saver:
        for step in range(1, 5):
            saver.save(step, {})
            saver.wait()
            news.append([text for text in saver.pop_messages() if text.startswith("gone")])
            if step in (2, 4):
                shutil.rmtree(step_folder(Path(folder, "checkpoints"), step - 1))
        saver.finish()
        news.append([text for text in saver.pop_messages() if text.startswith("gone")])
    return news


def test_checkpoints_that_somebody_else_removes_are_said(tmp_path: Path) -> None:
    ((first, second, third, fourth, last),) = on_ranks(1, loses_checkpoints, str(tmp_path))
    assert first == second == fourth == []  # what this run removes itself is not said
    assert third == [f"gone     step-000001 of {tmp_path}/checkpoints: removed by another program, not by this run"]
    assert last == [f"gone     step-000003 of {tmp_path}/checkpoints: removed by another program, not by this run"]


def saves_by_the_clock(folder: str) -> list[bool]:
    saver = opened(folder, every=0, every_minutes=10.0)
    overdue = []
    with mock.patch.object(save.time, "monotonic", return_value=saver._clock + 601.0):
        overdue.append(saver.overdue)
    with mock.patch.object(save.time, "monotonic", return_value=saver._clock + 599.0):
        overdue.append(saver.overdue)
    saver._clock -= 601.0  # a checkpoint is due, and begins the time anew
    saver.save(1, {})
    overdue.append(saver.overdue)
    saver.finish()
    return [*overdue, saver.is_due(5, 10), saver.is_due(10, 10)]


@pytest.mark.covers("checkpoint.every_minutes")
def test_a_checkpoint_is_due_by_the_clock(tmp_path: Path) -> None:
    assert on_ranks(1, saves_by_the_clock, str(tmp_path)) == [[True, False, False, False, True]]


# ---------------------------------------------------------------- what a run saves


@pytest.mark.covers("checkpoint.every", "checkpoint.dtype")
def test_trainer_state_none_and_another_dtype(tmp_path: Path) -> None:
    sections: Sections = {"checkpoint": {"every": 4, "trainer_state": "none", "dtype": "bf16", "keep": 2}}
    process(tmp_path / "run", "2", sections=sections)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert {p.name for p in checkpoints.iterdir()} == {"step-000008", "step-000010", "latest"}
    assert not (checkpoints / "latest" / "trainer_state").exists()
    weights = load_file(checkpoints / "latest" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    with pytest.raises(
        AssertionError, match=r"it has weights, but no trainer state[\s\S]*start a new run from the weights only"
    ):
        process(tmp_path / "run", "2", resume=True, sections=sections)


def saves_a_family(folder: str) -> None:
    saver = opened(folder, dtype="fp32")
    with saver:
        saver.save(1, {})
        saver.finish()


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_export_writes_the_masters_in_another_dtype(family: str, tmp_path: Path) -> None:
    """From the files of two ranks, in one process; the checkpoint's own weights are the masters as they are."""
    run(2, _called, saves_a_family, saved_model(family), str(tmp_path))
    masters = load_file(tmp_path / "checkpoints" / "latest" / "model.safetensors")
    assert cli.main(["export", str(tmp_path), "--dtype", "fp32", "--output", str(tmp_path / "exact")]) == 0
    assert equal(load_file(tmp_path / "exact" / "model.safetensors"), masters)
    assert cli.main(["export", str(tmp_path / "checkpoints" / "latest")]) == 0
    rounded = load_file(tmp_path / "checkpoints" / "step-000001-bf16" / "model.safetensors")
    buffers = {name for name in masters if name.endswith("e_score_correction_bias")}  # never cast
    assert equal(rounded, {name: t if name in buffers else t.bfloat16() for name, t in masters.items()})
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step-000001-bf16")


def test_export_says_what_it_cannot(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(tmp_path)]) == 2
    assert "neither a run folder with checkpoints nor a checkpoint" in capsys.readouterr().err
    assert cli.main(["export", str(written), "--output", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err
    run_folder = shutil.copytree(written, tmp_path / "run", symlinks=True)
    shutil.rmtree(run_folder / "checkpoints" / "step-000004" / "trainer_state")
    assert cli.main(["export", str(run_folder)]) == 2
    assert "contains no master weights to export" in capsys.readouterr().err


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks killed after step 4, with checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("written") / "run"
    process(folder, "2", steps=5, sections={"checkpoint": {"every": 2}})
    return folder


def edit_state(path: Path, change: Callable[[dict[str, Any]], None], sign: bool = False) -> None:
    from weft.checkpoint.state import _checksum

    content = json.loads((path / "state.json").read_text())
    content.pop("checksum")
    old = _checksum(content)
    change(content)
    (path / "state.json").write_text(json.dumps({**content, "checksum": _checksum(content) if sign else old}))


def swap(path: Path) -> None:
    first, second = path / "rank-00000.safetensors", path / "rank-00001.safetensors"
    first.rename(path / "x"), second.rename(first), (path / "x").rename(second)


def flip(path: Path) -> None:
    data = bytearray((path / "rank-00001.safetensors").read_bytes())
    data[-100] ^= 1
    (path / "rank-00001.safetensors").write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no trainer state": (shutil.rmtree, "it has weights, but no trainer state"),
    "no state.json": (lambda p: (p / "state.json").unlink(), "state.json: cannot be opened: No such file"),
    "half a state.json": (lambda p: os.truncate(p / "state.json", 500), "state.json: is not JSON"),
    "a list": (lambda p: (p / "state.json").write_text("[]"), "is list, not an object"),
    "tampered step": (lambda p: edit_state(p, lambda c: c.update(step=3)), "its checksum differs"),
    "another format": (lambda p: edit_state(p, lambda c: c.update(format=99), sign=True), "has format 99;"),
    "a file missing": (lambda p: (p / "rank-00001.safetensors").unlink(), "rank-00001.safetensors is missing"),
    "a file cut short": (lambda p: os.truncate(p / "rank-00000.safetensors", 3000), "has 3,000 bytes instead of"),
    "an empty file": (lambda p: os.truncate(p / "rank-00000.safetensors", 0), "has 0 bytes instead of"),
    "files swapped": (swap, "another rank or another save"),
    "a file of another step": (
        lambda p: shutil.copy(p.parent.parent / "step-000002/trainer_state/rank-00001.safetensors", p),
        "rank-00001.safetensors",
    ),
    "a bit flipped": (flip, "rank-00001.safetensors was changed after it was written"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name: str, written: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(written, tmp_path / "run", symlinks=True)
    harm, words = DAMAGE[name]
    harm(run_folder / "checkpoints" / "step-000004" / "trainer_state")

    def read(step: int) -> None:
        state = read_state(step_folder(run_folder / "checkpoints", step))
        for rank in (0, 1):
            check_contents(state, rank, 2)

    read(2)
    with pytest.raises(DamagedError, match=words):
        read(4)


def leaves_a_hole(folder: str) -> str:
    """What is said of a state whose only file lacks a tensor that state.json has."""
    with opened(folder) as saver:
        saver.save(1, {})
        path = saver.finish()
    name = next(name for name in find_state_shards(saver.engine) if name.startswith("optimizer/exp_avg/"))
    edit_state(path / "trainer_state", lambda content: content["files"][0]["boxes"].pop(name), sign=True)
    with pytest.raises(DamagedError) as error:
        load_state(saver.engine, read_state(path))
    return str(error.value).removeprefix(name)


def test_what_no_file_holds_is_not_taken_for_filled(tmp_path: Path) -> None:
    (message,) = on_ranks(1, leaves_a_hole, str(tmp_path))
    assert message.startswith(": its files have 0 of ")


def test_the_newest_whole_checkpoint_is_taken_and_others_named(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = shutil.copytree(written, tmp_path / "run", symlinks=True)
    flip(run_folder / "checkpoints" / "step-000004" / "trainer_state")
    before = sorted(run_folder.rglob("*"))
    assert resume(run_folder, "schedule.warmup_steps=2") == 2
    assert "the learning rate of update 1 was" in capsys.readouterr().err
    assert sorted(run_folder.rglob("*")) == before
    copied = shutil.copytree(run_folder, tmp_path / "other", symlinks=True)
    assert (
        resume(copied, "train.steps=3", "schedule.name=constant") == 0
    )  # another rate from update 4 on, which is not done
    assert resume(run_folder) == 0
    out = capsys.readouterr().out
    assert "skipped  " in out and "step-000004: rank-00001.safetensors was changed after it was written" in out
    assert "resumed  step 2 of 10" in out and "now step-000004.aside-1" in out
    assert [line["step"] for line in lines(run_folder)] == list(range(1, 11))
    assert complete_steps(run_folder / "checkpoints") == [2, 4, 6, 8, 10]
    assert os.readlink(run_folder / "checkpoints" / "latest") == "step-000010"


def test_where_none_is_whole_the_way_on_is_shown(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = shutil.copytree(written, tmp_path / "run", symlinks=True)
    for step in (2, 4):
        flip(run_folder / "checkpoints" / f"step-{step:06d}" / "trainer_state")
    before = sorted(run_folder.rglob("*"))
    assert resume(run_folder) == 2
    error = capsys.readouterr().err
    assert "cannot resume from any checkpoint" in error and "Traceback" not in error
    words = error.rpartition("weft sft ")[2].split()
    assert words[1] == f"model.path={run_folder}/checkpoints/step-000004"
    assert sorted(run_folder.rglob("*")) == before
    words = [word.replace("NEW", str(tmp_path / "new")) for word in words]
    assert cli.main(["sft", *words, "--device", "cpu", "--nproc", "1", "mesh.dp_shard=1", "checkpoint.every=0"]) == 0


def resume(run_folder: Path, *overrides: str) -> int:
    """`weft sft --resume`, in this process, on one rank."""
    words = ["--device", "cpu", "--nproc", "1", "mesh.dp_shard=-1"]
    return cli.main(["sft", "--resume", str(run_folder), *words, *overrides])


# ---------------------------------------------------------------- what a resumed run refuses, and allows


REFUSED = {
    "optimizer.lr=1.0": "optimizer.lr: 0.01 -> 1.0",
    "step.documents=5": "step.documents: 6 -> 5",
    "train.seed=4": "train.seed: 3 -> 4",
    "data.shuffle=false": "data.shuffle: true -> false",
    "model.init=random": "model.init: pretrained -> random",
    "fsdp.master_dtype=bf16": "fsdp.master_dtype: fp32 -> bf16",
    "train.steps=20": "the learning rate of update",  # cosine
    "train.steps=3": "ends before step 4",
    "schedule.warmup_steps=1": "the learning rate of update 1",
    "data.path=other.jsonl": "has other documents than before",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_would_be_another_training_is_refused(
    override: str, written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written.parent)
    text = (inputs() / "chats.jsonl").read_text().splitlines(keepends=True)
    Path("other.jsonl").write_text("".join(text[::-1]))
    before = {path: path.stat().st_mtime_ns for path in written.rglob("*") if path.is_file()}
    assert resume(written, override) == 2
    error = capsys.readouterr().err
    assert REFUSED[override] in error and "model.path=" in error and "Traceback" not in error
    assert {path: path.stat().st_mtime_ns for path in written.rglob("*") if path.is_file()} == before


ALLOWED = (
    "step.max_tokens_per_device=200",
    "fsdp.reduce=every",
    "model.recompute=full",
    "checkpoint.every=3",
    "data.max_length=48",
)


def test_how_a_run_computes_may_change(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = shutil.copytree(written, tmp_path / "run", symlinks=True)
    assert resume(run_folder, *ALLOWED) == 0
    out = capsys.readouterr().out
    for override in ALLOWED:
        key, _, value = override.partition("=")
        assert f"changed  {key}: " in out and f"-> {value}\n" in out
    assert "ranks    1, 2 in the checkpoint: random number generators are seeded again" in out
    assert "every: 3" in (run_folder / "config.yaml").read_text()
    assert resume(run_folder) == 0
    assert "has already finished: step 10 of 10" in capsys.readouterr().out


def test_a_run_grows_where_its_schedule_allows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """wsd before its decay; in its decay it does not."""
    folder = tmp_path / "run"
    process(folder, "1", steps=6, sections={"schedule": {"name": "wsd", "warmup_steps": 2, "decay_ratio": 0.2}})
    assert resume(folder, "train.steps=12") == 0
    assert [line["step"] for line in lines(folder)] == list(range(1, 13))
    capsys.readouterr()
    assert resume(folder, "train.steps=20") == 2
    assert "with wsd before its decay" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_what_a_finished_run_proposes_works(schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, new = tmp_path / "run", tmp_path / "new"
    process(folder, "1", sections={"schedule": {"name": schedule}, "train": {"steps": 5}})
    assert resume(folder) == 0
    proposal = re.search(r"already finished: step 5 of 5\. .*?: weft (.*)", capsys.readouterr().out)
    assert proposal is not None
    words = shlex.split(proposal[1].replace("run.dir=NEW", f"run.dir={new}"))
    assert cli.main([*words, "--device", "cpu", "--nproc", "1"]) == 0
    grown = lines(folder if schedule == "constant" else new)
    assert [line["step"] for line in grown] == list(range(1, 11))


def test_a_run_goes_on_with_the_ranks_that_it_had(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds = []
    monkeypatch.setattr(cli, "run", lambda body, command, world, debug: worlds.append(world) or 0)
    words = ["sft", "--resume", str(written), "--device", "cpu", "mesh.dp_shard=-1"]
    assert cli.main(words) == cli.main([*words, "--nproc", "1"]) == 0
    assert worlds == [2, 1]
    assert capsys.readouterr().out == f"ranks    2, as in {written} (--nproc N sets another number)\n"


def test_a_folder_in_use_is_refused_and_a_dead_lock_is_not(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    run_folder = shutil.copytree(written, tmp_path / "run", symlinks=True)
    (run_folder / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": 1, "token": "x"}))
    with (run_folder / "lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert resume(run_folder) == 2
    assert f"is in use by process 1 on {socket.gethostname()}" in capsys.readouterr().err
    assert resume(run_folder) == 0  # the file is still there; its process is not
    assert not (run_folder / "lock").exists()


def not_shared(folder: str) -> str:
    """A relative run.dir, which the second rank sees from elsewhere."""
    folder_of_rank = Path(folder, str(torch.distributed.get_rank()))
    folder_of_rank.mkdir()
    before = os.getcwd()
    os.chdir(folder_of_rank)
    try:
        with open_folder(config_of(inputs(), Path("run"), "2", {}), join("cpu")):
            return ""
    except UserError as error:
        return str(error)
    finally:
        os.chdir(before)


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    errors = run(2, not_shared, str(tmp_path))
    assert all("is not the same folder for all ranks: rank 1 on " in text for text in errors)
    assert "on a file system that all ranks share" in errors[0]


def test_before_the_first_checkpoint_it_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    process(folder, "1", steps=2, sections={"checkpoint": {"every": 5}})
    assert resume(folder) == 0
    out = capsys.readouterr().out
    assert "has no checkpoint yet, so the run starts at step 1" in out and "dropped  2 lines" in out
    assert [line["step"] for line in lines(folder)] == list(range(1, 11))
