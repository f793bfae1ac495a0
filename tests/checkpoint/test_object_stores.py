"""Runs, data and models on object stores: what is there is whole, and a run goes on from there as the unbroken one."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import forked, local_rl, object_stores
from tests.support.object_stores import FailsFor, KilledUpload, KillsItself, OpenedStore, counted, die, open_store
from tests.support.resuming import equal, inputs, state_of
from weft import cli, terminal
from weft.checkpoint.remote import mirror
from weft.checkpoint.remote.enter import begin_run, fetch_run, own_token, resume_run
from weft.checkpoint.remote.layout import BEST, LATEST, Manifest, RemoteRun
from weft.checkpoint.remote.local import with_local_paths
from weft.checkpoint.remote.mirror import Mirror
from weft.checkpoint.remote.staging import fetch
from weft.checkpoint.remote.store import Store, StoreError
from weft.checkpoint.retention import point_best
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.config.schema import CheckpointConfig, ModelConfig
from weft.config.urls import LocalCopy
from weft.errors import StorageError, UserError

S3 = pytest.param("s3", marks=pytest.mark.skipif(not object_stores.HAS_S3, reason="needs moto and s3fs"))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_called", {})


@pytest.fixture(params=["file", S3])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenedStore]:
    with open_store(request.param, tmp_path) as store:
        yield store


@pytest.fixture
def files(tmp_path: Path) -> Iterator[OpenedStore]:
    with open_store("file", tmp_path) as store:
        yield store


# ---------------------------------------------------------------- checkpoints on a store


def checkpoint(root: Path, step: int, critic: bool = False, text: str = "") -> Path:
    """A run folder with one that is whole, of three files and its state."""
    for inner in ("checkpoints", "critic/checkpoints")[: 1 + critic]:
        folder = root / inner / f"step-{step:06d}"
        (folder / "trainer_state").mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "trainer_state/state.json", "trainer_state/rank.safetensors"):
            (folder / name).write_text(f"{inner} {name} {step} {text}")
    return root


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_downloaded_is_what_was_uploaded(bucket: OpenedStore, tmp_path: Path) -> None:
    remote = RemoteRun(bucket.store("run"))
    remote.claim("mine", {})
    remote.upload(5, checkpoint(tmp_path / "a", 5, critic=True))
    assert (remote.steps(), remote.named(LATEST)) == ([5], 5)
    fetch_run(remote, tmp_path / "b", resumable=True)
    assert content(tmp_path / "b/checkpoints/step-000005") == content(tmp_path / "a/checkpoints/step-000005")
    assert content(tmp_path / "b/critic") == content(tmp_path / "a/critic")
    assert (tmp_path / "b/checkpoints/latest").readlink() == Path("step-000005")


def test_a_kill_at_any_moment_leaves_the_checkpoint_before_whole_and_named(files: OpenedStore, tmp_path: Path) -> None:
    """Before each change of the store, of an upload with retention: what `latest` names is whole, and downloads."""
    number = 1
    while True:
        store, config = files.store(f"run-{number}"), CheckpointConfig(keep=1, trainer_state="last")
        remote = RemoteRun(store)
        remote.claim("mine", {})
        remote.upload(5, checkpoint(tmp_path / f"{number}/a", 5))
        killed = False
        with counted(number, die):
            try:
                remote.upload(10, checkpoint(tmp_path / f"{number}/b", 10))
                remote.prune(config.keep, None, None, last_state=True)
            except KilledUpload:
                killed = True
        remote_run = RemoteRun(store)
        named = remote_run.named(LATEST)
        assert named in remote_run.steps(), number
        fetch_run(remote_run, tmp_path / f"{number}/c", resumable=True)
        newest = max(remote_run.steps())
        assert newest >= 5 and named in (5, 10)
        assert content(tmp_path / f"{number}/c/checkpoints/step-{newest:06d}") == content(
            tmp_path / f"{number}/{'b' if newest == 10 else 'a'}/checkpoints/step-{newest:06d}"
        )
        remote_run.token = "mine"
        remote_run.sweep()
        assert {name.split("/")[1] for name in store.list("checkpoints") if "step" in name} == {
            f"step-{step:06d}" for step in remote_run.steps()
        }
        if not killed:
            break
        number += 1
    assert number > 10 and remote_run.steps() == [10]


def test_the_same_step_again_is_whole_as_one_or_the_other(files: OpenedStore, tmp_path: Path) -> None:
    """A run that has gone back uploads a step that is there: never a mixture of both."""
    for number in range(1, 16):
        store = files.store(f"run-{number}")
        remote = RemoteRun(store)
        remote.claim("mine", {})
        remote.upload(3, checkpoint(tmp_path / f"{number}/z", 3))
        remote.upload(5, checkpoint(tmp_path / f"{number}/a", 5, text="before"))
        with counted(number, die), suppress(KilledUpload):
            remote.upload(5, checkpoint(tmp_path / f"{number}/b", 5, text="after"))
        remote_run = RemoteRun(store)
        assert remote_run.named(LATEST) in remote_run.steps() and 3 in remote_run.steps()
        if 5 in remote_run.steps():
            manifest = remote_run.manifest(5)
            assert manifest is not None
            remote_run.download(manifest, tmp_path / f"{number}/c")
            assert len({text.split(b" ")[-1] for text in content(tmp_path / f"{number}/c").values()}) == 1


def test_retention_there(bucket: OpenedStore, tmp_path: Path) -> None:
    remote = RemoteRun(bucket.store("run"))
    remote.claim("mine", {})
    for step in (10, 20, 30, 40):
        remote.upload(step, checkpoint(tmp_path / "run", step))
        shutil.rmtree(tmp_path / "run")
        if step == 10:
            remote.point(BEST, 10)
        remote.prune(1, None, None, last_state=False)
    assert remote.steps() == [10, 40]
    names = bucket.names("run")
    assert not [name for name in names if "000020" in name or "000030" in name]
    remote.prune(1, None, 40, last_state=True)
    assert "checkpoints/step-000010/trainer_state/state.json" not in bucket.names("run")
    manifest = remote.manifest(10)
    assert manifest is not None and not manifest.resumable
    remote.download(manifest, tmp_path / "again")


@pytest.mark.parametrize("damage", ["gone", "short", "changed", "marker"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(
    damage: str, files: OpenedStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = RemoteRun(files.store("run"))
    remote.claim("mine", {})
    remote.upload(5, checkpoint(tmp_path / "a", 5))
    remote.upload(10, checkpoint(tmp_path / "b", 10))
    file = tmp_path / "bucket/run/checkpoints/step-000010/model.safetensors"
    if damage == "gone":
        file.unlink()
    elif damage == "marker":
        (file.parent / "complete.json").write_text('{"step": 10, "fil')
    else:
        file.write_text(file.read_text()[:-1] + ("" if damage == "short" else "x"))
    fetch_run(remote, tmp_path / "c", resumable=True)
    assert (tmp_path / "c/checkpoints/latest").readlink() == Path("step-000005")
    assert not (tmp_path / "c/checkpoints/step-000010").exists()
    if damage != "marker":
        assert "skipped" in capsys.readouterr().out


# ---------------------------------------------------------------- beside training


def mirrored(url: str, tmp_path: Path, **config: Any) -> Mirror:
    folder = Path(begin_run(url, tmp_path / "staging", overwrite=False, command="sft"))
    remote = RemoteRun(Store(url, delays=()), own_token(folder))
    return Mirror(remote, folder, CheckpointConfig(**config), "weft sft --resume", critic=False, fresh=True)


def test_checkpoints_that_are_removed_here_are_uploaded_whole(
    files: OpenedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that came while an earlier one was uploaded, what `keep` keeps is there in the end."""
    mirror = mirrored(f"{files.url}/run", tmp_path, keep=2)
    put, lock = Store.put, threading.Lock()

    def slowly(store: Store, local: Path, name: str) -> None:
        with lock:
            if "step-000001" in name and not (mirror.run / "checkpoints/step-000004").exists():
                for step in (2, 3, 4):
                    checkpoint(mirror.run, step)
                    mirror._link_new()
                for step in (1, 2):
                    shutil.rmtree(mirror.run / f"checkpoints/step-{step:06d}")
        put(store, local, name)

    monkeypatch.setattr(Store, "put", slowly)
    checkpoint(mirror.run, 1)
    mirror.start()
    news = mirror.finish(lambda: None)
    assert mirror.remote.steps() == [3, 4] and mirror.remote.named(LATEST) == 4
    assert any("step-000001" in line for line in news)
    assert not (mirror.run / "uploading/step-000001").exists()


def test_the_best_checkpoint_is_uploaded_though_newer_ones_wait(files: OpenedStore, tmp_path: Path) -> None:
    """Of four that wait, the last is kept, and the second, which `best` names."""
    mirror = mirrored(f"{files.url}/run", tmp_path, keep=1)
    for step in (1, 2, 3, 4):
        checkpoint(mirror.run, step)
    point_best(mirror.run / "checkpoints/step-000002")
    mirror._tidy()
    mirror._link_new()
    mirror._round(ends=True)
    assert mirror.remote.steps() == [2, 4]
    assert (mirror.remote.named(BEST), mirror.remote.named(LATEST)) == (2, 4)


def test_a_file_that_changes_within_its_size_is_uploaded_again(files: OpenedStore, tmp_path: Path) -> None:
    mirror = mirrored(f"{files.url}/run", tmp_path)
    metrics = mirror.run / "metrics.jsonl"
    for text, nanoseconds in (("one", 10**18), ("two", 10**18 + 1)):
        metrics.write_text(text)
        os.utime(metrics, ns=(nanoseconds, nanoseconds))
        mirror._send_records()
        assert files.store("run").read("metrics.jsonl") == text.encode()


def test_a_store_that_fails_is_tried_again_and_training_is_told(
    files: OpenedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = mirrored(f"{files.url}/run", tmp_path)
    put, calls = Store.put, [0]

    def failing(store: Store, local: Path, name: str) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise StoreError("no answer")
        put(store, local, name)

    monkeypatch.setattr(Store, "put", failing)
    monkeypatch.setattr(mirror, "_LONGEST_PAUSE", 0.1)
    checkpoint(uploader.run, 1)
    uploader.start()
    news = uploader.finish(lambda: None)
    assert uploader.remote.steps() == [1]
    assert "upload   failed, will be retried: no answer. Training continues" in news


def test_a_store_that_stays_down_is_an_error_at_the_end_that_says_where_all_is(
    files: OpenedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = mirrored(f"{files.url}/run", tmp_path)
    checkpoint(mirror.run, 1)
    monkeypatch.setattr(Store, "put", lambda *words: down())
    mirror.start()
    with pytest.raises(StorageError, match=r"the run on file://.* is incomplete.*To upload it from here: weft sft"):
        mirror.finish(lambda: None)
    assert (mirror.run / "checkpoints/step-000001").is_dir() and mirror.failed


def down() -> None:
    raise StoreError("the store is down")


def test_a_run_that_another_process_has_taken_over_is_not_written(files: OpenedStore, tmp_path: Path) -> None:
    mirror = mirrored(f"{files.url}/run", tmp_path)
    checkpoint(mirror.run, 1)
    RemoteRun(files.store("run")).claim("another", {})
    mirror.start()
    with pytest.raises(StorageError, match="another process now writes to it"):
        mirror.finish(lambda: None)
    assert RemoteRun(files.store("run")).steps() == []


# ---------------------------------------------------------------- whole runs


def words(url: str, staging: Path, *overrides: str) -> list[str]:
    """Six steps, a checkpoint after each second, on two ranks."""
    return [
        "sft", f"model.path={inputs()}/model", f"data.path={inputs()}/chats.jsonl", f"run.dir={url}",
        f"run.staging={staging}", *KEYS, "--nproc", "2", "--device", "cpu", *overrides,
    ]  # fmt: skip


KEYS = ["train.steps=6", "step.documents=6", "step.max_tokens_per_device=64", "optimizer.lr=1e-2", "train.seed=3",
        "checkpoint.every=2", "checkpoint.keep=2"]  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    local = [word for word in words("run", folder) if not word.startswith("run.staging")]
    done = forked.run(local, folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def downloaded(bucket: OpenedStore, into: Path, name: str = "run") -> Path:
    remote = RemoteRun(bucket.store(name))
    fetch_run(remote, into, resumable=True)
    return into


def trained_alike(run: Path, unbroken: Path) -> bool:
    """The trainer state, the weights for use and the lines of metrics.jsonl, but for times."""
    ends = "checkpoints/step-000006"
    same = (run / ends / "model.safetensors").read_bytes() == (unbroken / ends / "model.safetensors").read_bytes()
    losses = [[json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()] for folder in (run, unbroken)]
    return same and equal(state_of(run, 6), state_of(unbroken, 6)) and losses[0] == losses[1]


@pytest.mark.covers("run.staging")
@pytest.mark.slow
def test_a_run_on_a_store_that_is_killed_in_an_upload_goes_on_elsewhere_bit_for_bit(
    bucket: OpenedStore, unbroken: Path, tmp_path: Path
) -> None:
    url = f"{bucket.url}/run"
    killed = forked.run(words(url, tmp_path / "one"), tmp_path, KillsItself("step-000004", 3), **bucket.variables)
    assert killed.returncode == 10, killed.stderr
    assert f"run      {url}" in killed.stdout and f"staging  {tmp_path}/one/runs/run-" in killed.stdout
    remote = RemoteRun(bucket.store("run"))
    assert remote.steps() == [2] and remote.named(LATEST) == 2
    command = ["sft", "--resume", url, f"run.staging={tmp_path}/two", "--device", "cpu"]
    resumed = forked.run(command, tmp_path, **bucket.variables)
    assert resumed.returncode == 0, resumed.stderr
    assert f"fetched  {url}/checkpoints/step-000002" in resumed.stdout
    assert f"resumed  step 2 of 6, from {url}/checkpoints/step-000002" in resumed.stdout
    assert remote.steps() == [4, 6] and remote.named(LATEST) == 6
    assert trained_alike(downloaded(bucket, tmp_path / "back"), unbroken)
    names = bucket.names("run")
    assert {"config.yaml", "metrics.jsonl", "summary.json"} <= names
    assert not [name for name in names if "step-000002" in name or "uploading" in name or name.endswith("lock")]
    assert f"dir: {url}" in (remote.store.read("config.yaml") or b"").decode()
    assert json.loads(remote.store.read("summary.json") or b"")["saved"] == f"{url}/checkpoints/step-000006"


@pytest.mark.slow
def test_what_this_machine_has_is_not_fetched_and_a_finished_run_uploads_what_is_missing(
    files: OpenedStore, unbroken: Path, tmp_path: Path
) -> None:
    url, staging = f"{files.url}/run", tmp_path / "staging"
    down = FailsFor("step-000004/config.json")  # not that of step 2, which may be superseded before its turn
    failed = forked.run(words(url, staging), tmp_path, down, **files.variables)
    assert failed.returncode == 13, failed.stdout + failed.stderr
    assert "the store is down. Training continues" in failed.stdout
    assert f"To upload it from here: weft sft --resume {url}" in failed.stderr
    assert not {4, 6} & set(RemoteRun(files.store("run")).steps())
    resumed = forked.run(["sft", "--resume", url, f"run.staging={staging}", "--device", "cpu"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "has already finished" in resumed.stdout and "fetched" not in resumed.stdout
    assert RemoteRun(files.store("run")).steps() == [4, 6]
    assert trained_alike(downloaded(files, tmp_path / "back"), unbroken)


@pytest.mark.slow
def test_a_store_that_dies_before_a_run_can_be_found_there_ends_it_before_it_trains(
    files: OpenedStore, tmp_path: Path
) -> None:
    url, staging = f"{files.url}/early", tmp_path / "staging"
    failed = forked.run(words(url, staging), tmp_path, FailsFor("writer.json"), **files.variables)
    assert failed.returncode == 13, failed.stdout + failed.stderr
    assert "but no longer: " in failed.stderr and "Nothing has been trained. Start again" in failed.stderr
    assert "step 1/" not in failed.stdout
    resumed = forked.run(words(url, staging), tmp_path, **files.variables)
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
def test_data_and_model_on_a_store(bucket: OpenedStore, unbroken: Path, tmp_path: Path) -> None:
    for path in sorted((inputs() / "model").iterdir()):
        bucket.store().put(path, f"base/{path.name}")
    rows = (inputs() / "chats.jsonl").read_text().splitlines(keepends=True)
    for part in range(2):
        bucket.store().write(f"data/part-{part}.jsonl", "".join(rows[part * 10 : part * 10 + 10]).encode())
    keys = [f"model.path={bucket.url}/base", f"data.path={bucket.url}/data/part-*.jsonl", f"run.dir={tmp_path}/run"]
    command = ["sft", *keys, f"run.staging={tmp_path}/staging", *KEYS, "--nproc", "2", "--device", "cpu"]
    done = forked.run(command, tmp_path, **bucket.variables)
    assert done.returncode == 0, done.stderr
    fetched = [line for line in done.stdout.splitlines() if line.startswith("fetched")]
    assert [line.split(":")[0] + ":" + line.split(":")[1] for line in fetched] == [
        f"fetched  {bucket.url}/base", f"fetched  {bucket.url}/data/part-*.jsonl"
    ]  # fmt: skip
    assert str(tmp_path / "staging") not in done.stdout
    assert trained_alike(tmp_path / "run", unbroken)
    config = (tmp_path / "run/config.yaml").read_text()
    assert f"path: {bucket.url}/base" in config and f"path: {bucket.url}/data/part-*.jsonl" in config
    resumed = forked.run(["sft", "--resume", f"{tmp_path}/run", "--device", "cpu"], tmp_path, **bucket.variables)
    assert "has already finished" in resumed.stdout, resumed.stderr


@pytest.mark.slow
def test_reinforcement_learning_on_a_store(files: OpenedStore, tmp_path: Path) -> None:
    task, url = local_rl.make_task(tmp_path), f"{files.url}/rl"

    def start(run: str, staging: str, *overrides: str, resume: bool = False) -> None:
        keys = [f"model.path={task}/adder", f"data.path={task}/additions.jsonl", *local_rl.KEYS, *overrides]
        if resume:
            store = Store(run)
            (tmp_path / "config.yaml").write_bytes(store.read("config.yaml") or b"")
        files_, keys = ([str(tmp_path / "config.yaml")], list(overrides)) if resume else ([], keys)
        config = load_config(files_, [*keys, f"run.dir={run}", f"run.staging={tmp_path}/{staging}"], RlConfig)
        config = with_local_paths(config, "resumed" if resume else "new")
        local_rl.run_config(config, resume=resume)

    local_rl.start(task, tmp_path / "plain", "train.steps=4", "checkpoint.keep=2")
    start(url, "one", "train.steps=2", "checkpoint.keep=2")
    remote = RemoteRun(files.store("rl"))
    assert remote.steps() == [1, 2]
    assert {"rollouts/step-000001.parquet"} <= files.names("rl")
    start(url, "two", "train.steps=4", resume=True)
    assert remote.steps() == [3, 4]
    back = downloaded(files, tmp_path / "back", "rl")
    assert equal(state_of(back, 4), state_of(tmp_path / "plain", 4))


# ---------------------------------------------------------------- what is refused, before anything is trained


def answer(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert cli.main(list(command)) == 2
    return capsys.readouterr().err


def on(url: str, tmp_path: Path, *overrides: str) -> list[str]:
    return ["sft", f"model.path={inputs()}/model", f"data.path={inputs()}/chats.jsonl", f"run.dir={url}",
            f"run.staging={tmp_path}/staging", *overrides]  # fmt: skip


def test_a_package_that_is_missing_is_named_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.config.urls.find_spec", lambda name: None)
    message = answer(capsys, *on("s3://bucket/run", tmp_path))
    assert "run.dir s3://bucket/run: s3:// needs the package s3fs, which is not installed: pip install s3fs" in message
    message = answer(capsys, "sft", f"model.path={inputs()}/model", "data.path=gs://bucket/x.jsonl")
    assert "data.path gs://bucket/x.jsonl: gs:// needs the package gcsfs" in message
    message = answer(capsys, "chat", "az://bucket/run")
    assert "pip install adlfs" in message
    message = answer(capsys, "sft", "--resume", "s3://bucket/run")
    assert "pip install s3fs" in message


def test_no_such_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fsspec has no protocol s4://" in answer(capsys, *on("s4://bucket/run", tmp_path))


def test_a_run_that_is_there_is_not_overwritten_unless_asked_to(
    files: OpenedStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{files.url}/run"
    remote = RemoteRun(files.store("run"))
    remote.claim("another", {})
    remote.upload(5, checkpoint(tmp_path / "a", 5))
    message = answer(capsys, *on(url, tmp_path))
    assert f"run.dir: {url} already contains a run" in message and f"weft sft --resume {url}" in message
    config = load_config([], [*on(url, tmp_path)[1:], "run.overwrite=true"])
    run = with_local_paths(config, "new").run.dir
    assert run is not None and remote.steps() == [5]  # until the run has something of its own
    remote_run = RemoteRun(Store(url), own_token(Path(run)))
    mirror = Mirror(remote_run, Path(run), config.checkpoint, "", critic=False, fresh=True)
    mirror.start()
    mirror.finish(lambda: None)
    assert remote.steps() == [] and not [name for name in files.names("run") if "step" in name]


def test_what_is_not_there(files: OpenedStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = answer(capsys, *on(f"{files.url}/run", tmp_path, f"data.path={files.url}/no.jsonl"))
    assert f"data.path {files.url}/no.jsonl does not exist" in message
    message = answer(capsys, *on(f"{files.url}/run", tmp_path, f"model.path={files.url}/no"))
    assert f"model.path {files.url}/no does not exist" in message
    message = answer(capsys, "sft", "--resume", f"{files.url}/no")
    assert f"--resume {files.url}/no: no config.yaml there" in message


def test_a_bad_row_is_called_by_its_url(files: OpenedStore, tmp_path: Path) -> None:
    files.store().write("x.jsonl", b'{"messages": []}\n')
    command = on(str(tmp_path / "run"), tmp_path, f"data.path={files.url}/x.jsonl")
    done = forked.run(command, tmp_path)
    assert done.returncode == 2 and f"{files.url}/x.jsonl:1" in done.stderr, done.stderr


def test_a_folder_that_holds_no_model_is_called_by_its_url(
    files: OpenedStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.store().write("base/x.txt", b"x")
    message = answer(capsys, *on(str(tmp_path / "run"), tmp_path, f"model.path={files.url}/base"))
    assert f"model.path {files.url}/base contains no config.json" in message


def test_run_staging_without_a_url_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "run.staging would have no effect" in answer(capsys, *on(str(tmp_path / "run"), tmp_path))


@pytest.mark.skipif(not object_stores.HAS_S3, reason="needs moto and s3fs")
def test_a_bucket_that_is_not_there_and_one_that_may_not_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store("s3", tmp_path) as store:
        message = answer(capsys, *on("s3://nobody-has-this/run", tmp_path))
        assert "run.dir: s3://nobody-has-this/run cannot be used" in message and "there is no such bucket" in message
        message = answer(capsys, *on(f"{store.url}/run", tmp_path, "data.path=s3://nobody-has-this/x.jsonl"))
        assert "data.path s3://nobody-has-this/x.jsonl does not exist" in message

        async def denied(*words: Any, **options: Any) -> Any:
            raise PermissionError("Access Denied")

        monkeypatch.setattr("s3fs.core.S3FileSystem._pipe_file", denied)
        object_stores.forget()
        message = answer(capsys, *on(f"{store.url}/run", tmp_path))
        assert (
            "access denied (Access Denied). The credentials must allow listing, reading, writing and deleting there"
            in message
        )
    for name in store.variables:
        monkeypatch.setenv(name, store.variables[name])
    object_stores.forget()
    message = answer(capsys, *on(f"{store.url}/run", tmp_path))  # the server has gone
    assert f"run.dir: {store.url}/run cannot be used" in message


# ---------------------------------------------------------------- copies


def test_a_copy_is_made_once_and_anew_where_the_store_has_something_else(
    bucket: OpenedStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, url = bucket.store(), f"{bucket.url}/data/x.jsonl"
    store.write("data/x.jsonl", b"one")
    first = fetch("data.path", url, tmp_path / "staging")
    assert Path(first).read_text() == "one" and Path(first).name == "x.jsonl" and first.remote == url
    assert fetch("data.path", url, tmp_path / "staging") == first
    assert capsys.readouterr().out.count("fetched") == 1
    store.write("data/x.jsonl", b"another")
    second = fetch("data.path", url, tmp_path / "staging")
    assert Path(second).read_text() == "another" and second != first


def test_a_pattern_keeps_names_and_order(bucket: OpenedStore, tmp_path: Path) -> None:
    for name in ("a/2.jsonl", "a/10.jsonl", "b/1.jsonl", "b/1.txt"):
        bucket.store().write(f"data/{name}", name.encode())
    local = fetch("data.path", f"{bucket.url}/data/*/*.jsonl", tmp_path / "staging")
    from weft.config.sources import matching_files

    assert [Path(path).read_text() for path in matching_files(local)] == ["a/10.jsonl", "a/2.jsonl", "b/1.jsonl"]


def test_latest_leads_to_a_checkpoint_without_its_trainer_state(bucket: OpenedStore, tmp_path: Path) -> None:
    remote = RemoteRun(bucket.store("run"))
    remote.claim("mine", {})
    remote.upload(5, checkpoint(tmp_path / "a", 5))
    local = fetch("model.path", f"{bucket.url}/run/checkpoints/latest", tmp_path / "staging")
    assert sorted(path.name for path in Path(local).rglob("*")) == ["config.json", "model.safetensors"]
    assert Path(local).name == "step-000005"


# ---------------------------------------------------------------- commands


@pytest.mark.slow
def test_commands_take_a_run_on_a_store(
    files: OpenedStore,
    unbroken: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    url, remote = f"{files.url}/run", RemoteRun(files.store("run"))
    remote.claim("mine", {})
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        remote.store.put(unbroken / name, name)
    for step in (4, 6):
        shutil.copytree(unbroken / f"checkpoints/step-{step:06d}", tmp_path / f"{step}/checkpoints/step-{step:06d}")
        remote.upload(step, tmp_path / str(step))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", url]) == 0 and (tmp_path / "report.html").is_file()
    assert cli.main(["data", "preview", f"{url}/config.yaml", "--samples", "1"]) == 0
    assert cli.main(["export", url, "--dtype", "fp32", "--output", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model/model.safetensors").is_file()
    assert cli.main(["export", "--check", f"{url}/checkpoints/latest"]) == 0
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115 - closed with the process
    assert cli.main(["chat", url, "--device", "cpu"]) == 0
    assert cli.main(["chat", url, "--step", "4", "--device", "cpu"]) == 0
    assert "--output" in answer(capsys, "export", url)
    assert "it has checkpoints of steps 4, 6" in answer(capsys, "chat", url, "--step", "5")
    assert f"weft chat {files.url}/no" in answer(capsys, "chat", f"{files.url}/no")


def test_a_copy_is_itself_wherever_it_is_sent() -> None:
    copy = LocalCopy("/here", "s3://there")
    for copied in (pickle.loads(pickle.dumps(copy)), deepcopy(copy), replace(ModelConfig(path=copy)).path):
        assert isinstance(copied, LocalCopy) and (str(copied), copied.remote) == ("/here", "s3://there")


@pytest.mark.slow
def test_a_run_that_is_stopped_uploads_what_it_has_saved(files: OpenedStore, tmp_path: Path) -> None:
    url = f"{files.url}/run"
    overrides = ["train.steps=2000", "checkpoint.every=0", "schedule.name=constant", "train.log_every=1"]
    run = forked.Run(words(url, tmp_path / "one", *overrides), tmp_path)
    run.wait_for(r"\b2/2000|step +2\b")
    os.kill(run.pid, signal.SIGTERM)
    run.wait(120.0)
    assert run.status == 143, run.errors()
    (step,) = RemoteRun(files.store("run")).steps()
    assert f"Resume with: weft sft --resume {url}" in run.output()
    summary = json.loads(files.store("run").read("summary.json") or b"")
    assert summary["stopped"] == "SIGTERM" and summary["saved"] == f"{url}/checkpoints/step-{step:06d}"


def test_going_on_fetches_again_what_was_removed_here(files: OpenedStore, tmp_path: Path) -> None:
    url, staging = f"{files.url}/run", tmp_path / "staging"
    folder = Path(begin_run(url, staging, overwrite=False, command="sft"))
    remote = RemoteRun(files.store("run"), own_token(folder))
    remote.store.write("config.yaml", b"x")
    remote.upload(5, checkpoint(tmp_path / "a", 5))
    checkpoint(folder, 5)
    assert resume_run(url, staging) == str(folder) and not list(folder.parent.glob("*.aside-*"))
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").write_text("mine\n")
    resume_run(url, staging)
    assert (folder / "checkpoints/step-000005/model.safetensors").is_file()
    (aside,) = folder.parent.glob("*.aside-1")
    assert (aside / "metrics.jsonl").read_text() == "mine\n"


def test_a_run_that_cannot_be_written_there_is_an_error_of_its_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.dir: file:///proc/nowhere/run cannot be used"):
        begin_run("file:///proc/nowhere/run", tmp_path / "staging", overwrite=False, command="sft")


def test_a_checkpoint_is_there_whose_sizes_and_json_are_those_of_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (folder / "weights").write_bytes(b"abc")
    names = [f"checkpoints/step-000001/{name}" for name in ("state.json", "weights")]
    manifest: Manifest | None = Manifest.from_folder(tmp_path, names, 1)
    remote: Any = SimpleNamespace(manifest=lambda step: manifest)
    uploads = Mirror(remote, tmp_path, CheckpointConfig(), "", critic=False, fresh=False)
    assert uploads._is_uploaded(1)
    (folder / "state.json").write_text("[]")
    assert not uploads._is_uploaded(1)
    (folder / "state.json").write_text("{}")
    (folder / "weights").write_bytes(b"ab")
    assert not uploads._is_uploaded(1)
    manifest = None
    assert not uploads._is_uploaded(1)
