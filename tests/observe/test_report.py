"""`weft report`: what the page says of a run, and that it needs nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from weft import cli
from weft.errors import UserError
from weft.inference.records import read_answers, write_rollouts
from weft.inference.types import Prompt, Sample, SampleGroup, samples_of
from weft.observe.report import svg as drawing
from weft.observe.report.charts import RL_CHARTS, system_charts
from weft.observe.report.charts import charts as charts_of
from weft.observe.report.page import page
from weft.observe.report.read import read_run
from weft.observe.report.samples import extremes
from weft.observe.report.svg import Chart, Series, axis_texts, draw, number, ticks
from weft.observe.rollouts import reward_text
from weft.rl.resume import find_collected

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
    shown = Text(text)
    assert shown.open == [] and shown.references == [] and "http" not in re.sub(r"\{.*?\}", "", shown.text)
    assert not re.search(r"@import|url\(|https?://", text)
    for words in (
        "finished after 120 steps", "some/model", "12K", "7.2K of them trained", "1.50 GiB", "Tokens/s 200 median",
        "1.8000 best, at step 120", "1 skipped; epoch 1", "mean of the last 10; first 10:", "1:40",
        "▲ 1 skipped", "loss is not <finite>", "2 & 2? step 40 <b>1</b> step 80 <b>2</b> step 120 <b>3</b>",
        "120 checkpoints/step-000120 2 KiB", "latest", "optimizer.lr 0.001 1e-05",
        "optimizer step", "nats per trained token, log scale", "accuracy share of",
        "eval/*/loss nats per trained token math code",
        "held out (eval/loss)", f"weft chat {run}", "train 1:30 (90%)", "lr: 0.001",
    ):  # fmt: skip
        assert words in shown.text, words
    assert "<b>3</b>" not in text  # it is shown, not obeyed


@pytest.mark.parametrize(
    ("steps", "words"), [(1, "the last step; the first: 100.0000"), (6, "mean of the last 3; first 3: 61.1111")]
)
def test_the_first_losses_of_a_short_run_are_not_the_last(tmp_path: Path, steps: int, words: str) -> None:
    assert words in page([read_run(make_run(tmp_path / "a", steps=steps))])


START = {
    "started": "2026-01-02T03:04:05+00:00", "step": 0, "command": "weft sft <c>.yaml", "host": "node1",
    "device": "H100", "ranks": 8, "mesh": {"dp_replicate": 2, "dp_shard": 4}, "engines": "", "commit": "abc123",
    "versions": {"torch": "2.13.0", "transformers": None, "python": "3.12.1"},
}  # fmt: skip
END = {"ended": "2026-01-02T04:04:05+01:00", "error": ""}


def with_starts(run: Path, *lines: dict[str, Any]) -> Path:
    (run / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_where_when_and_by_which_command_it_ran(tmp_path: Path) -> None:
    restarted = {**START, "started": "2026-01-03T00:00:00+00:00", "step": 60, "device": "H200"}
    run = with_starts(make_run(tmp_path / "one"), START, END, restarted, END)
    text = page([read_run(run)])
    for words in (
        "device 8 x H200", "mesh dp_replicate 2, dp_shard 4", "host node1", "command weft sft <c>.yaml",
        "started 2026-01-02 03:04:05 UTC; 2 starts, the last after step 60", "ended 2026-01-02 03:04:05 UTC",
        "git commit abc123", "versions torch 2.13.0, python 3.12.1", "finished after 120 steps",
    ):  # fmt: skip
        assert words in Text(text).text, words
    assert "<c>" not in text
    second = with_starts(make_run(tmp_path / "two"), START)
    compared = Text(page([read_run(run), read_run(second)])).text
    assert "device 8 x H200 8 x H100" in compared and "ended 2026-01-02 03:04:05 UTC -" in compared


def test_engines_that_were_replaced_are_counted(tmp_path: Path) -> None:
    run = with_starts(make_run(tmp_path / "one"), {**START, "engines": "2 hf"}, END)
    with (run / "metrics.jsonl").open("a") as file:
        for step, count in ((121, 1.0), (122, 2.0), (123, "<b>")):
            file.write("\n" + json.dumps({"step": step, "rollout/engine_restarts": count}) + "\n")
    assert "rollout engines 2 hf; 3 replaced" in Text(page([read_run(run)])).text


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([START, {"ended": "", "error": "ValueError: <bad> rows"}], "failed after step 120: ValueError: <bad> rows"),
        ([START], "ended without a message after step 120: killed, or its machine failed"),
        ([START, {"ended": "", "error": "ValueError"}, START, END], "finished after 120 steps"),
        ([], "finished after 120 steps"),
    ],
)  # fmt: skip
def test_how_a_run_ended(tmp_path: Path, lines: list[dict[str, Any]], status: str) -> None:
    """Of the last start, whatever an earlier one has left in summary.json."""
    assert status in Text(page([read_run(with_starts(make_run(tmp_path / "a"), *lines))])).text


def test_the_rank_that_failed_first_is_named(tmp_path: Path) -> None:
    """And not the first rank, which lost its connection; nothing of it where a later start has ended well."""
    lost = {"ended": "2026-01-02T04:04:05+01:00", "error": "RuntimeError: Connection closed by peer"}
    run = with_starts(make_run(tmp_path / "a"), START, lost)
    (run / "flight").mkdir()
    (run / "flight" / "rank-00003.json").write_text("[")
    failures = (("peer", "RuntimeError: Connection"), ("failed", "KeyError: <x>\nmore"), ("", ""))
    for rank, (kind, message) in enumerate(failures):
        record = {"kind": kind, "message": message, "where": f"in step {rank}, forward"}
        (run / "flight" / f"rank-{rank:05d}.json").write_text(json.dumps(record))
    text = Text(page([read_run(run)])).text
    assert "failed after step 120: KeyError: <x> " in text
    assert "1 KeyError: <x> more in step 1, forward 2 in step 2, forward 0 RuntimeError: Connection in step 0" in text
    assert "rank-00003.json: not valid JSON, omitted" in text
    os.utime(run / "flight" / "rank-00001.json", (0, 0))  # of an earlier start
    assert "failed after step 120: RuntimeError: Connection closed" in Text(page([read_run(run)])).text
    text = Text(page([read_run(with_starts(run, START, lost, START, END))])).text
    assert "finished after 120 steps" in text and "How it failed" not in text
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="nothing to show. The run failed: RuntimeError: Connection closed by peer."):
        read_run(with_starts(run, START, lost))


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """Its lock is held or, on another machine, its last line is young; the lock of a run that was killed is neither."""
    run = with_starts(make_run(tmp_path / "a", finished=False), START)
    os.utime(run / "metrics.jsonl", (0, 0))
    with (run / "lock").open("w") as lock:
        assert not read_run(run).is_running
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "running: 120 steps so far" in Text(page([read_run(run)])).text
    assert not read_run(run).is_running
    os.utime(run / "metrics.jsonl")
    assert read_run(run).is_running
    assert not read_run(with_starts(run, {**START, "host": socket.gethostname()})).is_running
    with_starts(run, START)
    (run / "lock").unlink()
    assert not read_run(run).is_running


def test_keys_that_differ_from_their_defaults_come_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    config = {
        "model": {"path": "some/model"}, "data": {"path": "chat.jsonl", "image_pixels": {"max": 100}, "shuffle": True},
        "optimizer": {"lr": 1e-5, "betas": [0.9, 0.99]}, "train": {"epochs": 1, "steps": None}, "own": {"x": "<i>"},
    }  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    shown = Text(page([read_run(run)])).text
    table, _, defaults = shown.split("Configuration")[1].partition("keys have their defaults")
    assert "key value default" in table and "model.path some/model -" in table and "own.x <i> -" in table
    assert "optimizer.betas [0.9, 0.99] [0.9, 0.95]" in table and "data.image_pixels {max: 100} {}" in table
    assert "optimizer.lr" not in table and "data.shuffle true true" in defaults
    (run / "config.yaml").write_text(yaml.safe_dump({"data": {"system": "long " * 1000}}))
    assert f"{'long ' * 60}..." in Text(page([read_run(run)])).text


def test_the_machine_over_time(tmp_path: Path) -> None:
    """In minutes, or hours, and without the pause before a run was resumed."""
    run = make_run(tmp_path / "a")
    times = [1000.0 + 10 * n for n in range(31)] + [9e6 + 10 * n for n in range(3)]
    lines = [
        {"step": n, "time": time, "system/cpu": 0.5, "system/memory_gib": 2.0, "system/gpu0/utilisation": 1.0,
         "system/gpu1/utilisation": 0.5, "system/gpu0/watts": 300.0, "system/gpu1/memory_gib": None}
        for n, time in enumerate(times)
    ]  # fmt: skip
    (run / "system.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    charts = {chart.title: chart for chart in system_charts([read_run(run)])}
    assert list(charts) == ["GPU utilisation", "GPU power", "Processor", "Host memory"]
    assert [(series.name, series.y[0]) for series in charts["GPU utilisation"].series] == [("gpu0", 1.0), ("gpu1", 0.5)]
    minutes = charts["Processor"].series[0].x
    assert charts["Processor"].over == "minutes" and list(minutes) == pytest.approx([n / 6 for n in range(34)])
    assert "minutes" in Text(page([read_run(run)])).text and "Machine" in Text(page([read_run(run)])).text
    second = make_run(tmp_path / "b")
    (second / "system.jsonl").write_text((run / "system.jsonl").read_text())
    (compared, *_) = system_charts([read_run(run), read_run(second), read_run(make_run(tmp_path / "c"))])
    assert [(series.name, series.y[0], series.colour) for series in compared.series] == [("a", 0.75, 0), ("b", 0.75, 1)]


def test_many_answers_to_a_prompt_are_folded_away(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    samples = [{"step": n, "prompt": "p", "answer": f"answer {n}."} for n in range(1, 101)]
    samples.append({"step": 1, "prompt": "q", "answer": ""})
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    shown, _, folded = Text(page([read_run(run)])).text.split("Answers over time")[1].partition("all 100")
    assert re.findall(r"answer (\d+)", shown) == ["1", "21", "41", "60", "80", "100"]
    assert len(re.findall(r"answer \d+", folded)) == 100 and "q step 1 (nothing)" in folded


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=5e-4, finished=False)
    target = tmp_path / "both.html"
    assert cli.main(["report", str(first), str(second), "--output", str(target)]) == 0
    shown = Text(target.read_text())
    assert "2 runs compared" in shown.text and "not finished: 120 steps so far" in shown.text
    assert "optimizer.lr 0.001 0.0005" in shown.text and "model.path" not in shown.text.split("Curves")[0]
    config = yaml.safe_load((second / "config.yaml").read_text())
    config |= {"train": {"seed": 0, "epochs": 2}, "data": {"path": "chat.jsonl", "image_pixels": {"max": 9}}}
    (second / "config.yaml").write_text(yaml.safe_dump(config))
    differing = Text(page([read_run(first), read_run(second)])).text.split("Differences between")[1].split("Curves")[0]
    assert "train.epochs - 2" in differing and "data.image_pixels - {max: 9}" in differing
    assert "train.seed" not in differing, "a key that is left out has its default"
    runs = [read_run(first), read_run(second)]
    main, _ = charts_of(runs)
    assert [series.name for series in main[0].series] == ["a", "b", "a, held out", "b, held out"]
    assert [series.colour for series in main[0].series] == [0, 1, 0, 1]
    same = read_run(make_run(tmp_path / "c" / "a"))
    assert page([runs[0], same]).count(str(same.folder)) > 1


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "it does not exist. Write the run.dir of a run." in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "it contains no metrics.jsonl" in capsys.readouterr().err
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


def groups_of(rewards: list[list[float | None]], texts: list[str]) -> list[SampleGroup]:
    prompts = [Prompt(index, 0, (1,), f"<i>question</i> {index}") for index in range(len(rewards))]
    groups = [
        SampleGroup(prompt, [sample_of(prompt, number, reward) for number, reward in enumerate(group)])
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
    main, further = charts_of([run])
    series_of_chart = {chart.title: {series.name: list(series.y) for series in chart.series} for chart in main}
    assert series_of_chart == {
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
    assert [chart.title for chart in further] == ["own/metric"]
    text = page([run])
    shown = Text(text)
    for words in (
        "Reward 0.5000 the last step; the first: 0.2500", "Held-out accuracy 0.7500 best, at step 4; last: 0.7500",
        "The best of rollout step 2 <i>question</i> 0 reward 1 (exact 1, style 0.25); 2 tokens, ended "
        "<b>right</b>", "The worst of rollout step 2 <i>question</i> 0 reward 0 ", "all samples: weft rollouts",
    ):  # fmt: skip
        assert words in shown.text, words
    assert "<b>right</b>" not in text and "<i>" not in text and "failed" not in shown.text
    assert "an earlier one" not in shown.text.split("Samples of the last rollout step")[1]


def test_answers_and_rewards_over_time(tmp_path: Path) -> None:
    """Of prompts that come again in evaluations and rollouts, at some of the steps with the first and the last."""
    run = make_rl_run(tmp_path / "rl")
    for step in range(0, 101, 10):
        texts = [f"greedy {step}", f"drawn {step}", "other", "other"]
        groups = groups_of([[step / 100, 0.5], [0.0, None]], texts)
        write_rollouts(run, step, groups, "evaluations")
    evaluated, trained = read_run(run).over_time
    first, second = evaluated["prompts"]
    assert (evaluated["name"], first["prompt"]) == ("Held-out prompts", "<i>question</i> 0")
    assert [moment["when"] for moment in first["moments"]] == [
        f"step {step}" for step in (0, 10, 30, 40, 60, 70, 90, 100)
    ]
    assert [moment["text"] for moment in first["moments"]][-1] == "greedy 100"
    assert first["moments"][-1]["about"] == "reward 1 (exact 1, style 0.25); mean of 2: 0.75"
    assert second["moments"][0]["about"] == "reward 0 (exact 0, style 0.25)"
    (prompt,) = trained["prompts"]
    assert [(moment["when"], moment["text"]) for moment in prompt["moments"]] == [
        ("rollout step 1", "an earlier one"), ("rollout step 2", "<b>right</b>"),
    ]  # fmt: skip
    shown = Text(page([read_run(run)]))
    assert "<i>question</i> 0 step 0 reward 0 (exact 0, style 0.25); mean of 2: 0.25 greedy 0 step 10" in shown.text
    (run / "evaluations" / "step-000030.parquet").write_bytes(b"PAR1")
    assert len(read_run(run).over_time[0]["prompts"][0]["moments"]) == 7
    assert "step-000030.parquet: contains no rollouts" in Text(page([read_run(run)])).text


def test_prompts_of_rollouts_that_do_not_come_again(tmp_path: Path) -> None:
    run = make_rl_run(tmp_path / "rl")
    groups = [SampleGroup(prompt := Prompt(9, 0, (1,), "another"), [sample_of(prompt, 0, 0.25)])]
    groups[0].samples[0].text = "its answer"
    write_rollouts(run, 2, groups)
    (part,) = read_run(run).over_time
    moments = part["prompts"][0]["moments"]
    assert part["name"] == "Training prompts: the first of each step"
    assert [(moment["prompt"], moment["text"]) for moment in moments] == [
        ("<i>question</i> 0", "an earlier one"), ("another", "its answer"),
    ]  # fmt: skip


def test_runs_of_reinforcement_learning_are_compared(tmp_path: Path) -> None:
    runs = [read_run(make_rl_run(tmp_path / "a")), read_run(make_rl_run(tmp_path / "b"))]
    main, further = charts_of(runs)
    assert [series.name for series in main[0].series] == ["a", "b", "a, held out", "b, held out"]
    assert {"reward_std", "eval/pass@4", "seconds/train"} <= {chart.title for chart in further}
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
    text = files("weft.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    assert "event.clientY" not in text  # where the tip is does not depend on where on the curve the pointer is
    assert re.search(r"\.scroll table \{ width: max-content; min-width: 100%; \}", text)
    (phone,) = re.findall(r"@media \(max-width: 700px\) \{(.*?)\n\}", text, re.DOTALL)
    (size,) = (float(match) for match in re.findall(r"svg \.tick \{ font-size: ([\d.]+)px", phone))
    card = 360 - 2 * 10 - 12 - 26
    assert size * card / drawing.WIDTH >= 10.0, "in pixels of the screen"
    longest = 0.6 * size * len("0.99975")  # of a y axis, which may reach into the card's padding
    assert longest <= drawing.LEFT - 7 + 26 * drawing.WIDTH / card


def test_metrics_that_have_a_chart_are_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    keys = [key for _, patterns, evaluated in RL_CHARTS for key in (*patterns, evaluated) if key]
    assert [key for key in keys if "*" not in key and f"`{key}`" not in documented] == []


def test_the_best_and_the_worst_are_of_other_prompts(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path, 1, groups_of([[1.0, 1.0, 0.0], [0.5, None], [0.75, -1.0]], list("abcdefg")))
    best, worst = extremes(read_answers(path), 2)
    assert [(answer.prompt_id, answer.number) for answer in best] == [("0.0", 0), ("2.0", 0)]
    assert [(answer.prompt_id, answer.number) for answer in worst] == [("2.0", 1), ("0.0", 2)]


# ---------------------------------------------------------------- charts


def test_where_a_line_is_drawn() -> None:
    """Steps 1 to 3 span the width between the margins; 0 to 10, with 5% above, the height."""
    svg, data = draw(Chart("t", "u", [Series("s", [1, 2, 3], [10.0, None, 5.0])], zero=True, marks=[2]))
    top, bottom = drawing.TOP, drawing.HEIGHT - drawing.BOTTOM
    start, right = drawing.LEFT, drawing.WIDTH - drawing.RIGHT
    y = [bottom + (top - bottom) * value / 10.5 for value in (10.0, 5.0)]
    assert f'd="M{start:.1f} {y[0]:.1f}M{right:.1f} {y[1]:.1f}"' in svg  # a gap, no line over the missing step
    assert f"M{(start + right) / 2:.1f} {bottom - 8}" in svg  # the mark
    assert data["series"][0]["y"] == [10.0, None, 5.0] and data["x"] == [1.0, 3.0]


def test_stacked_areas_stand_on_each_other() -> None:
    chart = Chart("t", "u", [Series("a", [1, 2], [1.0, 1.0]), Series("b", [1, 2], [2.0, None])], stacked=True)
    svg, _ = draw(chart)
    scale = (drawing.TOP - drawing.HEIGHT + drawing.BOTTOM) / (3.0 * 1.05)
    heights = [drawing.HEIGHT - drawing.BOTTOM + scale * value for value in (3.0, 1.0)]
    start, right = drawing.LEFT, drawing.WIDTH - drawing.RIGHT
    upper = f"{start:.1f},{heights[0]:.1f} {right:.1f},{heights[1]:.1f} {right:.1f},{heights[1]:.1f}"
    assert f'points="{upper}' in svg


def test_a_long_series_is_drawn_as_means_and_ranges() -> None:
    steps = list(range(1, 2401))
    svg, data = draw(Chart("t", "u", [Series("s", steps, [float(step % 3) for step in steps])]))
    assert data["series"][0]["y"] == [1.0] * 800 and data["series"][0]["x"][:2] == [2, 5]
    assert "<polygon" in svg


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 60.0], True), ([1.0, 40.0], False), ([0.0, 60.0], False), ([None, None], False)]
)
def test_when_a_scale_is_logarithmic(values: list[float | None], expected: bool) -> None:
    chart = Chart("t", "u", [Series("s", [1, 2], values)], log=True)
    assert drawing.logarithmic(chart) is expected
    draw(chart)


def test_ticks_are_round() -> None:
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.13, 0.61) == [0.2, 0.3, 0.4, 0.5, 0.6]
    assert ticks(1.0, 600.0, 8) == [100, 200, 300, 400, 500, 600]
    assert ticks(1e-14, 3e-14, 2) == [1e-14, 2e-14, 3e-14]


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (10, 30, [10, 15, 20, 25, 30]), (1, 3, [1, 2, 3]), (1, 21, [5, 10, 15, 20]), (3, 203, list(range(25, 201, 25))),
        (7, 7, [7]),
    ],
)  # fmt: skip
def test_steps_on_an_axis_are_whole_and_equally_far_apart(first: int, last: int, expected: list[int]) -> None:
    svg, _ = draw(Chart("t", "u", [Series("s", [first, last], [1.0, 2.0])]))
    assert [int(text) for text in re.findall(r'class="tick step[^>]*>([^<]*)<', svg)] == expected


def test_neighbours_on_an_axis_are_told_apart() -> None:
    """By short numbers: ratios of similar policies are all close to 1, and 1.00000004 has no room beside a chart."""
    svg, data = draw(Chart("t", "u", [Series("s", [1, 2], [1 - 2e-6, 1 + 2e-6])]))
    for text in (">-2e-6<", ">0<", ">+2e-6<"):
        assert text in svg, text
    assert data["base"] == "1" and data["series"][0]["y"] == [1 - 2e-6, 1 + 2e-6]
    assert axis_texts(ticks(0.99999997, 1.00000004), False) == (["-2e-8", "0", "+2e-8", "+4e-8"], "1")
    assert axis_texts([0.5, 1.0, 1.5], False) == (["0.5", "1", "1.5"], "")
    assert axis_texts([0.9999990, 0.9999995], True) == (["-5e-5%", "0"], "99.99995%")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5"), (1234.0, "1234"), (12000.0, "12k"), (2.5e6, "2.5M"), (1e-5, "1e-5"), (2.5e-5, "2.5e-5")],
)
def test_numbers_on_axes(value: float, text: str) -> None:
    assert number(value) == text


def test_the_reward_of_a_sample_in_words() -> None:
    (sample,) = samples_of(groups_of([[0.123456]], ["right"]))
    sample.rewards = {}
    assert reward_text(sample) == "0.1235"
    sample.rewards = {"math": 0.25, "style": None}
    assert reward_text(sample) == "0.1235 (math 0.25, style -)"
    sample.reward = None
    assert reward_text(sample) == "- (math 0.25, style -)"


def test_rollouts_alone_go_on_behind_the_last_whole_step(tmp_path: Path) -> None:
    lines = [{"rollout": 1, "taken": 4}, {"rollout": 2, "taken": 9}, {"rollout": 3, "taken": 11}]
    for step in (1, 2, 3):
        write_rollouts(tmp_path, step, groups_of([[1.0]], ["a"]))
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines)[:-1])
    start = find_collected(tmp_path)
    assert (start.rollout, start.taken, start.notes) == (2, 9, ("resumed  after rollout step 2",))
    (tmp_path / "rollouts" / "step-000002.parquet").write_bytes(b"cut")
    start = find_collected(tmp_path)
    assert (start.rollout, start.taken) == (1, 4) and "skipped" in start.notes[0]
