"""Checkpoints that were damaged, or made to do harm: each is named and skipped, and the one before is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.hostile.test_models import DEEP, KINDS
from tests.support.fuzz import fuzz
from tests.support.pool import run
from tests.support.resuming import config_of
from weft import cli
from weft.checkpoint import state
from weft.checkpoint.resume import find_newest, read_or_reason, resumed_notes
from weft.checkpoint.retention import complete_steps, step_folder
from weft.checkpoint.state import ENGINE, RL_RUN, RUN, DamagedError, find_problem, write_rank_file, write_state
from weft.config import to_dict
from weft.config.schema import SftConfig
from weft.engine.host import HostTensor
from weft.errors import UserError
from weft.launch.process import join
from weft.launch.summary import Phases, RunSummary
from weft.observe.resume import changes, newest_complete, rates_changed
from weft.parallel.shards import digests
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.digests import BoxDigest, check_digests, write_digests

CONFIG = config_of(Path("home"), Path("run"), "2", {})
VALUES = torch.arange(12.0).reshape(4, 3)


def make(checkpoints: Path, step: int) -> Path:
    """A checkpoint of two ranks, as a run of weft sft leaves it, with what weft rl has besides."""
    checkpoint, save_id = step_folder(checkpoints, step), f"save-{step}"
    (checkpoint / "trainer_state").mkdir(parents=True)
    files = []
    for rank in (0, 1):
        box = Box((2 * rank, 0), (2, 3))
        tensors = {"weights/w": HostTensor.wrap(VALUES[2 * rank : 2 * rank + 2].contiguous())}
        files.append(write_rank_file(checkpoint / "trainer_state", rank, save_id, tensors, {"weights/w": box}))
    best = {
        "kept": True,
        "metric": "eval/loss",
        "of": "x",
        "value": 1.0,
        "step": 1,
        "mark": None,
        "waited": 0,
        "exact": 0.0,
    }
    content = {
        "id": save_id, "step": step, "mesh": {"world": 2, "dp_shard": 2},
        "tensors": {"weights/w": {"dtype": "float32", "shape": [4, 3]}},
        "scalars": {"optimizer/step/w": {"value": 1.0, "dtype": "float32", "host": True}}, "loss_scale": None,
        "steps": 10, "updates": step, "bad_in_a_row": 0, "config": to_dict(CONFIG), "model": {"sha256": "m"},
        "data": {"documents": 20, "digest": "d"}, "evaluation": {**best, "waited": 0, "exact": 0.0},
        "summary": RunSummary("m").counts(),
        "seconds": {"train": 1.5}, "rollout": 1, "taken": 4, "empty_in_a_row": 0, "replayed": False,
    }  # fmt: skip
    write_state(checkpoint / "trainer_state", content, files)
    save_file({"w": VALUES, "v": VALUES + 1}, checkpoint / "model.safetensors")
    boxes = [("w", Box((0, 0), (2, 3))), ("w", Box((2, 0), (2, 3))), ("v", Box.from_shape((4, 3)))]
    full_tensors = {"w": VALUES, "v": VALUES + 1}
    digests = [
        BoxDigest.compute("model.safetensors", n, b, full_tensors[n][b.within(Box.from_shape((4, 3)))])
        for n, b in boxes
    ]
    write_digests(checkpoint, digests)
    (checkpoint / "config.json").write_text("{}")
    return checkpoint


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Of a run, after steps 1 and 2."""
    make(tmp_path / "run" / "checkpoints", 1)
    make(tmp_path / "run" / "checkpoints", 2)
    return tmp_path / "run" / "checkpoints"


def signed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a state.json so that its checksum is right."""
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    path.write_text(json.dumps({**content, "checksum": state._checksum(content)}))


def skipped(checkpoints: Path, parts: dict[str, Any] = RL_RUN) -> str:
    """Why the second checkpoint was left out; the first is taken in its place."""
    newest, reasons = find_newest(
        checkpoints, complete_steps(checkpoints), lambda folder: read_or_reason(folder, parts)
    )
    assert newest is not None and newest.step == 1 and len(reasons) == 1
    assert "\n" not in reasons[0]
    return reasons[0].removeprefix(f"{step_folder(checkpoints, 2)}: ")


def test_a_whole_one_is_taken(checkpoints: Path) -> None:
    newest, reasons = find_newest(checkpoints, [1, 2], lambda folder: read_or_reason(folder, RL_RUN))
    assert newest is not None and newest.step == 2 and reasons == []


# ---------------------------------------------------------------- state.json


def parent(content: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    *above, leaf = name.removesuffix("?").split(".")
    for key in above:
        content = content[key]
    return content, leaf


@pytest.mark.parametrize("name", [name for name in {**ENGINE, **RL_RUN} if not name.endswith("?")])
def test_a_part_that_is_missing(name: str, checkpoints: Path) -> None:
    def remove(content: dict[str, Any]) -> None:
        owner, leaf = parent(content, name)
        del owner[leaf]

    signed(checkpoints / "step-000002/trainer_state/state.json", remove)
    assert f"it lacks {name}" in skipped(checkpoints)


@pytest.mark.parametrize("name", {**ENGINE, **RL_RUN})
def test_a_part_of_another_type(name: str, checkpoints: Path) -> None:
    """Refused, or what the part may be: then nothing that reads it raises."""
    file = checkpoints / "step-000002/trainer_state/state.json"
    before = file.read_text()
    for value in (None, True, -1, 1.5, "x", [], {"x": []}, [[1]]):

        def change(content: dict[str, Any], value: Any = value) -> None:
            owner, leaf = parent(content, name)
            owner[leaf] = value

        file.write_text(before)
        signed(file, change)
        read_as_a_run_does(file.parent.parent)


def read_as_a_run_does(checkpoint: Path) -> None:
    """All that `weft sft --resume` makes of a state.json before it fills an engine."""
    state, _ = read_or_reason(checkpoint, RUN)
    if state is None:
        return
    content = state.content
    list(changes(content["config"], to_dict(CONFIG), SftConfig))
    rates_changed(content, CONFIG, 10, min(content["updates"], 100))
    resumed_notes(state, 10, {})
    RunSummary("m").restore(content["summary"])
    Phases().add(content["seconds"])


def put(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(changes)


def box(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["files"][1]["boxes"].update({"weights/w": value})


def of_file(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["files"][1].update(changes)


LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another step": (put(step=3), "is of step 3"),
    "more updates than steps": (put(updates=3), "3 updates in 2 steps"),
    "no steps": (put(steps=0), "steps is 0"),
    "a negative count": (put(taken=-1), "taken is -1"),
    "a file less": (lambda content: content["files"].pop(), "1 files for 2 ranks"),
    "a file twice": (of_file(name="rank-00000.safetensors"), "has no valid entry for the file of rank 1"),
    "a file elsewhere": (of_file(name="../../rank-00001.safetensors"), "has no valid entry for the file of rank 1"),
    "a file with more to say": (of_file(more=1), "has no valid entry for the file of rank 1"),
    "a negative box": (box([[-2, 0], [2, 3]]), "is not a valid box of weights/w"),
    "a negative size": (box([[2, 0], [-2, 3]]), "is not a valid box of weights/w"),
    "a box outside": (box([[3, 0], [2, 3]]), "is not a valid box of weights/w"),
    "a box of two dimensions less": (box([[], []]), "is not a valid box of weights/w"),
    "a box that is text": (box("ab"), "is not a valid box of weights/w"),
    "a box of text": (box([["2", 0], [2, 3]]), "is not a valid box of weights/w"),
    "another box than in the file": (box([[3, 0], [1, 3]]), "differs from the entry"),
    "a box of another tensor": (
        lambda content: content["files"][1]["boxes"].update(other=[[0], [1]]), "is not a valid box of other",
    ),
    "a dtype that is none": (
        put(tensors={"weights/w": {"dtype": "Tensor", "shape": [4, 3]}}), "has the dtype 'Tensor'",
    ),
    "another dtype than in the file": (
        put(tensors={"weights/w": {"dtype": "int32", "shape": [4, 3]}}), "differs from the entry",
    ),
    "a part more in the summary": (put(summary={}), "it lacks summary.steps"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_state_that_lies(name: str, checkpoints: Path) -> None:
    change, words = LIES[name]
    signed(checkpoints / "step-000002/trainer_state/state.json", change)
    assert words in skipped(checkpoints)


TEXTS = {
    "deep nesting": (DEEP, "nested too deep"),
    "deep nesting of a part": ('{"format": 2, "x": ' + DEEP + "}", "nested too deep"),
    "nesting that Python still reads": ('{"format": 2, "x": ' + "[" * 300 + "]" * 300 + "}", "nested too deep"),
    "NaN": ('{"format": 2, "step": NaN, "checksum": ""}', "its checksum differs"),
    "no UTF-8": ("\xff", "is not JSON"),
    "a format that is a list": ('{"format": [2]}', "has format [2]"),
    "nothing": ("", "is not JSON"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_no_state(name: str, checkpoints: Path) -> None:
    text, words = TEXTS[name]
    (checkpoints / "step-000002/trainer_state/state.json").write_bytes(text.encode("latin-1"))
    assert words in skipped(checkpoints)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["trainer_state/state.json", "trainer_state/rank-00001.safetensors", "digests.json"])
def test_what_is_no_file_is_skipped_by_what_it_is(file: str, kind: str, checkpoints: Path) -> None:
    path = checkpoints / "step-000002" / file
    path.unlink()
    KINDS[kind](path)
    assert f"{path.name}: {kind}" in skipped(checkpoints)


def judged(checkpoints: str) -> tuple[int, list[str]]:
    newest, reasons = newest_complete(Path(checkpoints), join("cpu"))
    assert newest is not None
    return newest.step, reasons


def test_ranks_agree_which_is_whole(checkpoints: Path) -> None:
    """Each compares its share of the weights; what one of them finds skips the checkpoint on all."""
    flip(checkpoints / "step-000002", 5)
    (first, reasons), second = run(2, judged, str(checkpoints))
    assert (first, reasons) == second and first == 1 and "its digest differs" in reasons[0]


# ---------------------------------------------------------------- weights and their digests


def flip(checkpoint: Path, from_end: int) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-from_end] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Of what digests.json says of the file."""

    def harm(checkpoint: Path) -> None:
        content = json.loads((checkpoint / "digests.json").read_text())
        change(content["files"])
        (checkpoint / "digests.json").write_text(json.dumps(content))

    return harm


def text(content: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / "digests.json").write_text(content) and None


FILE = "model.safetensors"
HARM: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of the first tensor": (
        lambda folder: flip(folder, 96),
        "was changed after it was written: its digest differs",
    ),
    "a bit of the last tensor": (
        lambda folder: flip(folder, 1),
        "was changed after it was written: its digest differs",
    ),
    "a file that is gone": (lambda folder: (folder / FILE).unlink(), "cannot be opened: No such file"),
    "a file cut short": (lambda folder: os.truncate(folder / FILE, 100), "model.safetensors: is "),
    "no digest of a tensor": (edit(lambda files: files[FILE].pop("v")), "v is in only one of"),
    "a digest of no tensor": (edit(lambda files: files[FILE].update(u=[])), "u is in only one of"),
    "no digest of a box": (edit(lambda files: files[FILE]["w"].pop()), "w was changed after it was written"),
    "no boxes": (edit(lambda files: files[FILE].update(w=[])), "w was changed after it was written"),
    "a box outside": (
        edit(lambda files: files[FILE]["w"][0].__setitem__(0, [3, 0])),
        "w was changed after it was written",
    ),
    "a box before": (
        edit(lambda files: files[FILE]["w"][0].__setitem__(0, [-1, 0])),
        "w was changed after it was written",
    ),
    "boxes that are a number": (edit(lambda files: files[FILE].update(w=7)), "w was changed after it was written"),
    "boxes that are text": (edit(lambda files: files[FILE].update(w=["abc"])), "w was changed after it was written"),
    "a box of text": (
        edit(lambda files: files[FILE]["w"][0].__setitem__(0, ["0", 0])),
        "w was changed after it was written",
    ),
    "tensors that are a list": (edit(lambda files: files.update({FILE: []})), "has no list of the tensors"),
    "a file elsewhere": (edit(lambda files: files.update({"../x": {}})), "is not a file of this folder"),
    "files that are a list": (text('{"files": []}'), "has no list of the tensors"),
    "no files": (text("{}"), "has no list of the tensors"),
    "a list": (text("[]"), "is list, not an object"),
    "deep nesting": (text(DEEP), "nested too deep"),
    "half of it": (lambda folder: os.truncate(folder / "digests.json", 50), "is not JSON"),
}


@pytest.mark.parametrize("name", HARM)
def test_weights_that_are_not_as_written(name: str, checkpoints: Path) -> None:
    harm, words = HARM[name]
    harm(checkpoints / "step-000002")
    assert words in skipped(checkpoints)
    with pytest.raises(UserError, match=words):
        check_digests(checkpoints / "step-000002")


def test_every_rank_compares_its_share(checkpoints: Path) -> None:
    """The first tensor is one rank's, the second the other's; all bytes are read once."""
    assert [check_digests(checkpoints / "step-000002", rank, 2) for rank in (0, 1)] == [48, 48]
    assert check_digests(checkpoints / "step-000002") == 96


def test_without_digests_nothing_is_compared(checkpoints: Path) -> None:
    """checkpoint.verify=size writes none."""
    (checkpoints / "step-000002" / "digests.json").unlink()
    flip(checkpoints / "step-000002", 1)
    state, _ = read_or_reason(checkpoints / "step-000002", RUN)
    assert state is not None and state.step == 2


def test_export_check(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, newest_one = checkpoints.parent, checkpoints / "step-000002"
    assert cli.main(["export", "--check", str(folder)]) == 0
    assert f"{newest_one}: 96 bytes of weights and the trainer state equal their digests" in capsys.readouterr().out
    weights = shutil.copytree(newest_one, tmp_path / "weights")
    shutil.rmtree(weights / "trainer_state")
    assert cli.main(["export", "--check", str(weights)]) == 0
    assert f"{weights}: 96 bytes of weights equal their digests" in capsys.readouterr().out
    flip(weights, 1)
    assert cli.main(["export", str(weights), "--check"]) == 2
    assert "was changed after it was written: its digest differs" in capsys.readouterr().err
    (weights / "digests.json").unlink()
    assert cli.main(["export", "--check", str(weights)]) == 2
    assert "contains no digests.json" in capsys.readouterr().err
    (newest_one / "trainer_state" / "rank-00000.safetensors").unlink()
    assert cli.main(["export", "--check", str(folder)]) == 2
    assert "rank-00000.safetensors is missing" in capsys.readouterr().err
    for extra in (["--ema"], ["--dtype", "bf16"], ["--output", "x"]):
        assert cli.main(["export", "--check", str(folder), *extra]) == 2
        assert "--check writes nothing: remove --dtype, --output and --ema" in capsys.readouterr().err


def test_check_looks_at_engines_that_were_trained_beside_it(checkpoints: Path) -> None:
    critic = checkpoints / "step-000002" / "critic"
    critic.mkdir()
    for name in ("model.safetensors", digests.DIGESTS):
        shutil.copy(checkpoints / "step-000002" / name, critic)
    flip(critic, 1)
    assert cli.main(["export", "--check", str(checkpoints.parent)]) == 2


# ---------------------------------------------------------------- at random


def fuzz_all(folder: Path, count: int) -> None:
    checkpoint = make(folder / "checkpoints", 2)
    file, listed = checkpoint / "trainer_state" / "state.json", checkpoint / "digests.json"
    seeds = [file.read_bytes()]

    def parse(path: Path) -> None:
        """As it is, and with the checksum that it would need."""
        file.write_bytes(path.read_bytes())
        read_as_a_run_does(checkpoint)
        try:
            signed(file, lambda content: None)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            return
        read_as_a_run_does(checkpoint)

    def parse_digests(path: Path) -> None:
        listed.write_bytes(path.read_bytes())
        check_digests(checkpoint)

    fuzz(parse_digests, [listed.read_bytes()], count, suffix=".json")
    fuzz(parse, seeds, count, suffix=".json", allowed=(DamagedError,))


def test_damage_at_random(tmp_path: Path) -> None:
    fuzz_all(tmp_path, 500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_much_damage_at_random(tmp_path: Path) -> None:
    fuzz_all(tmp_path, 20_000)


def test_parts_with_a_question_mark_may_be_missing() -> None:
    parts = {"steps": int, "evaluation?": dict[str, int]}
    assert find_problem({"steps": 1}, parts) is None and find_problem({"steps": 1, "evaluation": {}}, parts) is None
    assert find_problem({"evaluation": {}}, parts) == "it lacks steps"
    assert str(find_problem({"steps": 1, "evaluation": 3}, parts)).startswith("evaluation must be ")
