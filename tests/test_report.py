"""`weft report`: what the page says of a run, and that it needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from weft import cli
from weft.report import charts, rl_page
from weft.report.charts import Chart, Series, draw, number, ticks
from weft.report.page import charts as charts_of
from weft.report.page import page, read_run
from weft.report.rl_page import extremes
from weft.rollout.records import write_rollouts
from weft.rollout.types import Group, Prompt, Sample, samples_of

STEPS = 120


def make_run(folder: Path, lr: float = 1e-3, finished: bool = True, steps: int = STEPS) -> Path:
    """A run folder as `weft sft` leaves it: step 7 is skipped, every 40th is evaluated, one checkpoint is there."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        bad = step == 7
        line: dict[str, Any] = {
            "step": step, "loss": None if bad else 100.0 / step, "grad_norm": None if bad else 1.0, "lr": lr,
            "documents": 4, "tokens": 100, "loss_tokens": 60, "micro_batches": 1, "fill": 0.9, "utilisation": 1.0,
            "seconds": 0.5, "tokens_per_second": 200.0, "mfu": None, "memory_gib": 1.5, "epoch": 1,
            "time/data": 0.1, "time/forward": 0.2, "time/backward": 0.2, "time/communication": None,
        }  # fmt: skip
        lines.append(line | ({"skipped": True, "reason": "loss is not <finite>"} if bad else {"accuracy": 0.5}))
        if step % 40 == 0:
            lines[-1] |= {"eval/loss": 3.0 - step / 100, "eval/math/loss": 2.0, "eval/code/loss": 1.0}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 121, "lo')  # as a kill leaves it
    config = {"model": {"path": "some/model"}, "data": {"path": "chat.jsonl"}, "optimizer": {"lr": lr}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    samples = [{"step": 40 * n, "prompt": "2 & 2?", "answer": f"<b>{n}</b>"} for n in (1, 2, 3)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    checkpoint = folder / "checkpoints" / "step-000120"
    (checkpoint / "trainer_state").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"0" * 2048)
    (folder / "checkpoints" / "latest").symlink_to("step-000120")
    if finished:
        seconds = {"data": 1.0, "load": 9.0, "train": 90.0, "total": 100.0}
        (folder / "summary.json").write_text(json.dumps({"seconds": seconds, "stopped": None, "data": "chat.jsonl"}))
    return folder


class Text(HTMLParser):
    """The words that a reader sees, and everything that is referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "line", "path", "circle", "polygon", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "path", "circle", "polygon"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_a_page_about_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "one")
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    text = (run / "report.html").read_text()
    seen = Text(text)
    assert seen.open == [] and seen.references == [] and "http" not in re.sub(r"\{.*?\}", "", seen.text)
    assert not re.search(r"@import|url\(|https?://", text)
    for words in (
        "finished after 120 steps", "some/model", "12K", "7.2K of them trained on", "1.50 GiB", "Tokens/s 200 median",
        "1.8000 best, at step 120", "1 skipped; epoch 1", "mean of the last 10; first 10:", "1:40",
        "▲ 1 skipped", "loss is not <finite>", "2 & 2?", "<b>3</b>", "2 earlier", "step-000120", "2 KiB", "latest",
        "optimizer step", "nats per trained token, log scale", "accuracy share of",
        "eval/*/loss nats per trained token math code",
        "held out (eval/loss)", f"weft chat {run}", "train 1:30 (90%)", "lr: 0.001",
    ):  # fmt: skip
        assert words in seen.text, words
    assert "<b>3</b>" not in text  # it is shown, not obeyed


@pytest.mark.parametrize(
    ("steps", "words"), [(1, "the last step; the first: 100.0000"), (6, "mean of the last 3; first 3: 61.1111")]
)
def test_the_first_losses_of_a_short_run_are_not_the_last(tmp_path: Path, steps: int, words: str) -> None:
    assert words in page([read_run(make_run(tmp_path / "a", steps=steps))])


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=5e-4, finished=False)
    target = tmp_path / "both.html"
    assert cli.main(["report", str(first), str(second), "--output", str(target)]) == 0
    seen = Text(target.read_text())
    assert "2 runs compared" in seen.text and "not finished: 120 steps so far" in seen.text
    assert "optimizer.lr 0.001 0.0005" in seen.text and "model.path" not in seen.text.split("Curves")[0]
    runs = [read_run(first), read_run(second)]
    main, _ = charts_of(runs)
    assert [series.name for series in main[0].series] == ["a", "b", "a, held out", "b, held out"]
    assert [series.colour for series in main[0].series] == [0, 1, 0, 1]
    same = read_run(make_run(tmp_path / "c" / "a"))
    assert page([runs[0], same]).count(str(same.folder)) > 1


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "it does not exist. Name the folder that run.dir named." in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "it holds no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "no step has ended yet" in capsys.readouterr().err


def test_torch_is_not_needed(tmp_path: Path) -> None:
    import subprocess
    import sys

    runs = [str(make_run(tmp_path / "one")), str(make_rl_run(tmp_path / "rl"))]
    code = "import sys; from weft.cli import main; statuses = [main(['report', run]) for run in sys.argv[1:]]\n"
    code += "print(statuses, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *runs], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[0, 0] False\n"), done.stdout + done.stderr


# ---------------------------------------------------------------- runs of weft rl


def sample_of(prompt: Prompt, number: int, reward: float | None) -> Sample:
    """One token is given, two are drawn."""
    drawn, none = np.array([False, True, True]), np.zeros(3, np.float32)
    return Sample(
        prompt, number, np.array([1, 2, 3]), drawn, none, np.zeros(3, np.int32), "end",
        rewards={"exact": reward, "style": 0.25}, reward=reward,
    )  # fmt: skip


def groups_of(rewards: list[list[float | None]], texts: list[str]) -> list[Group]:
    prompts = [Prompt(index, 0, (1,), f"<i>question</i> {index}") for index in range(len(rewards))]
    groups = [
        Group(prompt, [sample_of(prompt, number, reward) for number, reward in enumerate(group)])
        for prompt, group in zip(prompts, rewards, strict=True)
    ]
    for sample, text in zip(samples_of(groups), texts, strict=True):
        sample.text = text
    return groups


def make_rl_run(folder: Path) -> Path:
    """A run folder as `weft rl` leaves it: two optimizer steps of each of two rollout steps, evaluated at 0 and 4."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "loss": None, "eval/accuracy": 0.25, "eval/reward": 0.25}]
    for step in (1, 2, 3, 4):
        lines.append({"step": step, "loss": -0.5, "seconds": 1.0, "rollout": (step + 1) // 2, "entropy": 0.5,
                      "clip_ratio/low_mean": 0.125, "own/metric": 1.0})  # fmt: skip
        if step % 2 == 0:
            lines[-1] |= {
                "reward": step / 8, "reward_std": 0.5, "rewards/exact/mean": 0.5, "rewards/style/mean": 0.25,
                "completions/mean_length": 7.0, "sampling/kl": 1e-6, "staleness/mean": 0.0,
                "seconds/generate": 3.0, "seconds/train": 2.0,
            }  # fmt: skip
    lines[-1] |= {"eval/accuracy": 0.75, "eval/pass@1": 0.5, "eval/pass@4": 1.0, "eval/reward": 0.75}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "some/model"}, "rl": {"algorithm": "grpo"}}))
    write_rollouts(folder, 1, groups_of([[9.0]], ["an earlier one"]))
    write_rollouts(folder, 2, groups_of([[1.0, 0.0], [None, 0.5]], ["<b>right</b>", "wrong", "failed", "half"]))
    return folder


def test_a_page_about_reinforcement_learning(tmp_path: Path) -> None:
    run = read_run(make_rl_run(tmp_path / "rl"))
    main, others = charts_of([run])
    found = {chart.title: {series.name: list(series.y) for series in chart.series} for chart in main}
    assert found == {
        "Reward": {"reward": [0.25, 0.5], "reward_std": [0.5, 0.5], "held out (eval/reward)": [0.25, 0.75]},
        "Rewards by function": {"rewards/exact/mean": [0.5, 0.5], "rewards/style/mean": [0.25, 0.25]},
        "Evaluation": {"eval/accuracy": [0.25, 0.75], "eval/pass@1": [0.5], "eval/pass@4": [1.0]},
        "Entropy": {"entropy": [0.5] * 4},
        "Completion lengths": {"completions/mean_length": [7.0, 7.0]},
        "Clipped ratios": {"clip_ratio/low_mean": [0.125] * 4},
        "Engine and trainer: KL": {"sampling/kl": [1e-6, 1e-6]},
        "Staleness": {"staleness/mean": [0.0, 0.0]},
        "Rollout step by phase": {"generate": [3.0, 3.0], "train": [2.0, 2.0]},
        "Loss": {"loss": [None, -0.5, -0.5, -0.5, -0.5]},
        "Time": {"seconds": [1.0] * 4},
    }
    assert [chart.title for chart in others] == ["own/metric"]
    text = page([run])
    seen = Text(text)
    for words in (
        "Reward 0.5000 the last step; the first: 0.2500", "Held-out accuracy 0.7500 best, at step 4; last: 0.7500",
        "The best of rollout step 2 <i>question</i> 0 reward 1 (exact 1, style 0.25); 2 tokens, ended by itself "
        "<b>right</b>", "The worst of rollout step 2 <i>question</i> 0 reward 0 ", "all of them: weft rollouts",
    ):  # fmt: skip
        assert words in seen.text, words
    assert "<b>right</b>" not in text and "<i>" not in text and "failed" not in seen.text
    assert "an earlier one" not in seen.text


def test_runs_of_reinforcement_learning_are_compared(tmp_path: Path) -> None:
    runs = [read_run(make_rl_run(tmp_path / "a")), read_run(make_rl_run(tmp_path / "b"))]
    main, others = charts_of(runs)
    assert [series.name for series in main[0].series] == ["a", "b", "a, held out", "b, held out"]
    assert {"reward_std", "eval/pass@4", "seconds/train"} <= {chart.title for chart in others}
    assert "2 runs compared" in Text(page(runs)).text


def test_what_is_zero_throughout_is_one_line(tmp_path: Path) -> None:
    """A chart of nothing but zeros goes, and of one with other series those that are zero; not where runs differ."""
    runs = [read_run(make_rl_run(tmp_path / name)) for name in ("a", "b")]
    zeros = [replace(run, lines=[{**line, "clip_ratio/high_mean": 0.0} for line in run.lines]) for run in runs]
    (line,) = (text for text in re.findall(r"<p class=\"facts\"[^>]*>(.*?)</p>", page(zeros[:1])) if "Zero" in text)
    assert line == "Zero throughout, and not drawn: Clipped ratios (clip_ratio/high_mean); Staleness"
    titles = re.findall(r"<h3>(.*?)</h3>", page(zeros[:1]))
    assert "Staleness" not in titles and "Clipped ratios" in titles
    stale = replace(
        runs[1], lines=[line | ({"staleness/mean": 1.0} if "reward" in line else {}) for line in runs[1].lines]
    )
    assert "<h3>Staleness</h3>" in page([runs[0], stale]) and "<h3>Staleness</h3>" not in page(runs)
    assert "Zero throughout" not in page([read_run(make_run(tmp_path / "c"))])


def test_the_page_on_a_phone() -> None:
    """What a browser was seen to do with it at a width of 360: tests of a style sheet go no further."""
    text = files("weft.report").joinpath("page.html").read_text(encoding="utf-8")
    assert "event.clientY" not in text  # where the tip is does not depend on where on the curve the pointer is
    assert re.search(r"\.scroll table \{ width: max-content; min-width: 100%; \}", text)
    (phone,) = re.findall(r"@media \(max-width: 700px\) \{(.*?)\n\}", text, re.DOTALL)
    (size,) = (float(found) for found in re.findall(r"svg \.tick \{ font-size: ([\d.]+)px", phone))
    card = 360 - 2 * 10 - 12 - 26
    assert size * card / charts.WIDTH >= 10.0, "in pixels of the screen"
    longest = 0.6 * size * len("0.99975")  # of a y axis, which may reach into the card's padding
    assert longest <= charts.LEFT - 7 + 26 * charts.WIDTH / card


def test_metrics_that_have_a_chart_are_documented() -> None:
    documented = (Path(__file__).parent.parent / "docs" / "reference" / "metrics.md").read_text()
    keys = [key for together in rl_page._CHARTS for key in (*together.keys, together.held_out) if key]
    assert [key for key in keys if "*" not in key and f"`{key}`" not in documented] == []


def test_the_best_and_the_worst_are_of_other_prompts() -> None:
    best, worst = extremes(groups_of([[1.0, 1.0, 0.0], [0.5, None], [0.75, -1.0]], list("abcdefg")), 2)
    assert [sample.id for sample in best] == ["0.0/0", "2.0/0"]
    assert [sample.id for sample in worst] == ["2.0/1", "0.0/2"]


# ---------------------------------------------------------------- charts


def test_where_a_line_is_drawn() -> None:
    """Steps 1 to 3 span the width between the margins; 0 to 10, with 5% above, the height."""
    svg, data = draw(Chart("t", "u", [Series("s", [1, 2, 3], [10.0, None, 5.0])], zero=True, marks=[2]))
    top, bottom = charts.TOP, charts.HEIGHT - charts.BOTTOM
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    y = [bottom + (top - bottom) * value / 10.5 for value in (10.0, 5.0)]
    assert f'd="M{left:.1f} {y[0]:.1f}M{right:.1f} {y[1]:.1f}"' in svg  # a gap, no line over the missing step
    assert f"M{(left + right) / 2:.1f} {bottom - 8}" in svg  # the mark
    assert data["series"][0]["y"] == [10.0, None, 5.0] and data["x"] == [1.0, 3.0]


def test_stacked_areas_stand_on_each_other() -> None:
    chart = Chart("t", "u", [Series("a", [1, 2], [1.0, 1.0]), Series("b", [1, 2], [2.0, None])], stacked=True)
    svg, _ = draw(chart)
    scale = (charts.TOP - charts.HEIGHT + charts.BOTTOM) / (3.0 * 1.05)
    heights = [charts.HEIGHT - charts.BOTTOM + scale * value for value in (3.0, 1.0)]
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    upper = f"{left:.1f},{heights[0]:.1f} {right:.1f},{heights[1]:.1f} {right:.1f},{heights[1]:.1f}"
    assert f'points="{upper}' in svg


def test_a_long_series_is_drawn_as_means_and_ranges() -> None:
    steps = list(range(1, 2401))
    svg, data = draw(Chart("t", "u", [Series("s", steps, [float(step % 3) for step in steps])]))
    assert data["series"][0]["y"] == [1.0] * 800 and data["series"][0]["x"][:2] == [2, 5]
    assert "<polygon" in svg


@pytest.mark.parametrize(
    ("values", "wanted"), [([1.0, 60.0], True), ([1.0, 40.0], False), ([0.0, 60.0], False), ([None, None], False)]
)
def test_when_a_scale_is_logarithmic(values: list[float | None], wanted: bool) -> None:
    chart = Chart("t", "u", [Series("s", [1, 2], values)], log=True)
    assert charts.logarithmic(chart) is wanted
    draw(chart)


def test_ticks_are_round() -> None:
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.13, 0.61) == [0.2, 0.3, 0.4, 0.5, 0.6]
    assert ticks(1.0, 600.0, 8) == [100, 200, 300, 400, 500, 600]
    assert ticks(1e-14, 3e-14, 2) == [1e-14, 2e-14, 3e-14]


def test_neighbours_on_an_axis_are_told_apart() -> None:
    svg, _ = draw(Chart("t", "u", [Series("s", [1, 2], [1 - 2e-6, 1 + 2e-6])]))
    for text in (">0.999998<", ">1<", ">1.000002<"):
        assert text in svg, text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5"), (1234.0, "1234"), (12000.0, "12k"), (2.5e6, "2.5M"), (1e-5, "1e-5"), (2.5e-5, "2.5e-5")],
)
def test_numbers_on_axes(value: float, text: str) -> None:
    assert number(value) == text
