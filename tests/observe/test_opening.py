"""What a run says of its length and its rates before it begins, and what of that --quiet leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config import load_config
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.engine.describe import AxisRow
from weft.observe.opening import ModelOpening, few_rollout_steps, show_opening, steps_lines, update_lines
from weft.observe.tables import mesh_table
from weft.terminal import counted


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "d.jsonl").write_text("{}\n")


def sft(*overrides: str) -> SftConfig:
    return load_config([], ["model.path=m", "data.path=d.jsonl", *overrides], weights=False)


def rl(*overrides: str) -> RlConfig:
    needed = ["model.path=m", "data.path=d.jsonl", "rl.reward=[length]"]
    return load_config([], [*needed, *overrides], RlConfig, weights=False)


@pytest.mark.parametrize(
    ("overrides", "steps", "documents", "expected", "advice"),
    [
        ((), 1, 40, "1 optimizer step of 64 documents; 1 epoch of 40 documents", "step.documents=4 "),
        ((), 8, 500, "8 optimizer steps of 64 documents; 1 epoch of 500 documents", "step.documents=12 "),
        (("step.documents=1",), 3, 3, "3 optimizer steps of 1 document; 1 epoch of 3", "train.epochs=14 "),
        (("step.tokens=4096",), 2, 9, "2 optimizer steps of up to 4,096 tokens", "step.tokens=1024 "),
        ((), 20, 1280, "20 optimizer steps", None),
        (("train.steps=1",), 1, 40, "1 optimizer step of 64 documents", None),
    ],
)
def test_a_run_of_few_steps_is_told_how_to_get_more(
    overrides: tuple[str, ...], steps: int, documents: int, expected: str, advice: str | None
) -> None:
    lines = steps_lines(sft(*overrides), steps, documents, steps)
    assert lines[0].startswith(f"steps    {expected}") and len(lines) == (1 if advice is None else 2)
    if advice is not None:
        assert lines[1].startswith(f"hint     {counted(steps, 'optimizer step')} in all") and advice in lines[1]
        for word in lines[1].replace(",", " ").split():
            if "=" in word:
                sft(*overrides, word)  # accepted as printed


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs=3", "of 64 documents; 3 epochs of 1,280 documents, 20 each"),
        ("train.steps=60", "of 64 documents; an epoch, 1,280 documents, has 20"),
    ],
)
def test_steps_of_an_epoch_and_in_all(override: str, expected: str) -> None:
    assert steps_lines(sft(override), 60, 1280, 20)[0] == f"steps    60 optimizer steps {expected}"


def test_a_reinforced_run_of_few_steps_is_told_so() -> None:
    assert few_rollout_steps(rl(), 1, 40) == [
        "hint     1 rollout step in all may be too few: rl.prompts_per_step=4 makes smaller steps and more of them, "
        "train.epochs=40 repeats the prompts more often"
    ]
    assert few_rollout_steps(rl("train.steps=3"), 3, 40) == [] == few_rollout_steps(rl(), 20, 1280)


def test_the_opening_says_which_rates_are_defaults() -> None:
    assert update_lines(rl()) == [
        "update   adamw, lr 1e-06, weight_decay 0, schedule constant; "
        "defaults of weft rl: optimizer.lr, optimizer.weight_decay, schedule.name"
    ]
    assert update_lines(sft("lora.rank=4", "schedule.name=linear")) == [
        "update   adamw, lr 0.0001, weight_decay 0, schedule linear; "
        "defaults of weft sft with lora: optimizer.lr, optimizer.weight_decay"
    ]
    assert update_lines(sft("optimizer.lr=1", "optimizer.weight_decay=1", "schedule.name=wsd")) == [
        "update   adamw, lr 1, weight_decay 1, schedule wsd"
    ]


def test_how_much_of_an_opening_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it is in the file, whatever is printed; a resumed run adds to it."""
    lines = ["model    m", "fsdp     x", "hint     less", "warning  new", "update   adamw", "memory   1 GiB"]
    model = ModelOpening(lines, [mesh_table([AxisRow(name="dp_shard", size=2, groups=[[0, 1]], meaning="shards")])])
    printed = {}
    for detail in ("quiet", "normal", "verbose"):
        show_opening(["run      r"], model, tmp_path, detail)
        printed[detail] = capsys.readouterr().out.splitlines()
    assert printed["quiet"] == ["run      r", "model    m", "hint     less", "warning  new", "update   adamw"]
    assert printed["normal"][:-1] == ["run      r", *(line for line in lines if not line.startswith("fsdp"))]
    assert printed["normal"][-1].startswith(f"details  {tmp_path}/opening.txt has ")
    assert printed["verbose"][:7] == ["run      r", *lines] and printed["verbose"][7].strip() == "mesh"
    assert (tmp_path / "opening.txt").read_text().splitlines() == printed["verbose"] * 3


def test_plurals() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1234)] == ["0 steps", "1 step", "2 steps", "1,234 steps"]
    assert counted(1, "micro-batch") == "1 micro-batch" and counted(2, "micro-batch") == "2 micro-batches"
