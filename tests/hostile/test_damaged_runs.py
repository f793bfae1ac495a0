"""`weft report`, `rollouts` and `chat` on run folders that are damaged, or attack who reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.observe.test_report import Text, make_run
from weft import cli

BIG = "9" * 5000
DAMAGE: dict[str, tuple[str, bytes | str, str]] = {
    "NaN and Infinity": (
        "metrics.jsonl", '{"step": 1, "loss": NaN, "lr": Infinity, "a": -Infinity, "b": 1e999, "grad_norm": 1e308}\n'
        '{"step": 2, "loss": 1e-320, "lr": 1e300, "seconds": -1e308, "tokens": 1e309}\n', ""),
    "steps that are none": (
        "metrics.jsonl", '{"step": 1, "loss": 1}\n{"step": true}\n{"step": "2"}\n{"step": -3}\n{"step": 1e9}\n'
        '{"step": 99999999999999999999}\n', "5 lines without a step"),
    "values that are none": (
        "metrics.jsonl", '{"step": 1, "loss": [1], "lr": {"a": 1}, "skipped": [], "reason": {}, "epoch": [], "x": "y",'
        '"time/forward": "a", "seconds/a": [], "rollout": {}}\n', ""),
    "bad UTF-8": ("metrics.jsonl", b'{"step": 1, "loss": 1}\n{"step": 2, "\xff\xfe": 1}\n\x80\n', "is not UTF-8"),
    "lists and brackets": (
        "metrics.jsonl", '{"step": 1, "loss": 1}\n[1]\n' + "[" * 100_000 + "\n1\n", "3 lines are not"),
    "digits": ("metrics.jsonl", f'{{"step": 1, "loss": 1}}\n{{"step": 2, "loss": {BIG}}}\n', "1 lines are not"),
    "a thousand metrics": (
        "metrics.jsonl", json.dumps({"step": 1, **{f"m/{n}": 1.0 for n in range(5000)}}) + "\n", ""),
    "tagged YAML": ("config.yaml", "model: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    "broken YAML": ("config.yaml", "model: [1\n", "not valid YAML"),
    "YAML in itself": ("config.yaml", "a: &a\n  b: *a\n", "nested"),
    "lists for mappings": ("config.yaml", "model: [a]\ndata: b\nrl:\ntrain: {seed: [1, {a: b}]}\n", ""),
    "a list of YAML": ("config.yaml", "- a\n", "expected sections"),
    "bytes for YAML": ("config.yaml", b"\xff\xfe\x00", "cannot be read"),
    "a broken summary": ("summary.json", "{", "not valid JSON"),
    "a list for a summary": ("summary.json", "[1]", "not a JSON object"),
    "a summary of other types": (
        "summary.json", '{"seconds": [1], "versions": 3, "stopped": {}, "data": [], "skipped_steps": "a"}', ""),
    "seconds that are none": (
        "summary.json", '{"seconds": {"a": "b", "c": NaN, "total": -1, "d": {}}, "versions": {"x": []}}', ""),
    "samples of other types": (
        "samples.jsonl", '{"answer": {"a": [1]}, "prompt": [1, {"role": []}], "step": {}}\n7\n', ""),
    "starts of other types": (
        "starts.jsonl", '7\n{"ended": 3}\n{"started": "x", "mesh": [1], "ranks": "a", "versions": {"b": [1]}}\n'
        '{"started": "9999-12-31T23:59:59-23:00", "mesh": {"a": {}}, "ranks": 1e9, "step": -1}\n{"ended": []}\n',
        "1 lines are not"),
    "samples of a machine that is none": (
        "system.jsonl", '{"time": "x", "system/cpu": []}\n{"time": NaN, "system/cpu": "a", "system/gpu/watts": 1e308}\n'
        '{"time": 1e29, "system/memory_gib": 1e29, "system/gpu0/watts": 1}\n{"time": -5, "system/cpu": 0.5}\n', ""),
    "rollouts that are none": ("rollouts/step-000001.parquet", b"PAR1", "contains no rollouts"),
    "a file that is no step": ("rollouts/step-x.parquet", b"PAR1", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_report_shows_the_rest(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    file, content, message = DAMAGE[name]
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cli.main(["report", str(run)]) == 0
    out, err = capsys.readouterr()
    assert message in out and err == ""
    page = Text((run / "report.html").read_text())
    assert page.open == [] and message in page.text
    second = make_run(tmp_path / "other")
    assert cli.main(["report", str(run), str(second), "--output", str(tmp_path / "both.html")]) == 0


def loop(run: Path) -> None:
    (run / "checkpoints" / "best").symlink_to("best")
    (run / "checkpoints" / "step-000120" / "gone").symlink_to("nowhere")


def pipes(run: Path) -> None:
    for name in ("config.yaml", "summary.json", "samples.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)


def nothing_else(run: Path) -> None:
    for name in ("config.yaml", "summary.json", "samples.jsonl"):
        (run / name).unlink(missing_ok=True)


def a_file_for_a_folder(run: Path) -> None:
    for name in ("rollouts", "evaluations"):
        (run / name).write_text("")


@pytest.mark.parametrize("damage", [loop, pipes, nothing_else, a_file_for_a_folder])
def test_files_that_are_none(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    damage(run)
    assert cli.main(["report", str(run)]) == 0


def to_a_file(path: Path) -> None:
    path.with_name("other").write_text("precious")
    path.symlink_to("other")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [to_a_file, os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_a_report_is_written_to_no_file_that_a_run_points_at(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    make(run / "report.html")
    assert cli.main(["report", str(run)]) == 2
    assert f"{run}/report.html: not a regular file, so weft does not overwrite it" in capsys.readouterr().err
    assert not (run / "nowhere").exists() and (make is not to_a_file or (run / "other").read_text() == "precious")
    assert cli.main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0


def rows(**changes: object) -> pa.Table:
    row = {
        "step": 1, "prompt_index": 0, "visit": 0, "number": 0, "branch": 0, "source": "a:1", "prompt": "p",
        "completion": "c", "reward": 1.0, "rewards": "{}", "trained": True, "finish": "end", "turns": 1,
        "prompt_tokens": 1, "messages": None, "columns": "{}", "notes": "{}", "tokens": [1, 2],
        "sampled": [False, True], "rollout": [0.0, 0.0], "versions": [0, 0], "kept_logmass": None, "old": None,
        "reference": None, "values": None, "advantages": None, "correction": None,
    }  # fmt: skip
    return pa.Table.from_pylist([row | changes])


ROLLOUTS = {
    "no Parquet": b"PAR1" * 10, "no rows": rows().slice(0, 0), "other columns": pa.table({"a": [1]}),
    "a reward of text": rows(reward="x"), "no tokens": rows(tokens=None), "rewards of text": rows(rewards='{"a": "b"}'),
    "rewards that are a list": rows(rewards="[1]"), "rewards that are nested": rows(rewards="[" * 100_000),
    "a prompt of numbers": rows(prompt=1), "no finish": rows(finish=None), "messages of a number": rows(messages="1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLLOUTS)
def test_rollouts_that_are_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rollouts").mkdir()
    path, content = tmp_path / "rollouts" / "step-000001.parquet", ROLLOUTS[name]
    path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, path)
    assert cli.main(["rollouts", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: contains no ")


def test_rewards_that_are_no_numbers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rollouts").mkdir()
    pq.write_table(
        rows(reward=float("nan"), rewards='{"a": NaN, "b": Infinity}'), tmp_path / "rollouts/step-000001.parquet"
    )
    assert cli.main(["rollouts", str(tmp_path)]) == 0
    assert "reward nan (a nan, b inf)" in capsys.readouterr().out
    make_run(tmp_path / "run")
    (tmp_path / "rollouts").rename(tmp_path / "run" / "rollouts")
    assert cli.main(["report", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"model_type": "llama", "hidden_size": "x"}', "[" * 100_000, '{"model_type": []}']
)
def test_chat_with_a_damaged_checkpoint(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(content)
    (checkpoint / "tokenizer.json").write_text(content)
    assert cli.main(["chat", str(tmp_path), "--device", "cpu"]) == 2
    assert "Traceback" not in capsys.readouterr().err
