"""Texts of others never command the terminal: escapes are sent through the data of every command."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.data.test_errors_in_data import model
from tests.observe.test_report import make_run
from tests.support import forked
from tests.support.toy_tokenizers import CHATML, byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft import cli
from weft.inference.records import write_rollouts
from weft.inference.types import Prompt, Sample, SampleGroup
from weft.models import hf
from weft.recipes import chat as chat_recipe
from weft.terminal import Console, clean, say, say_folded

# A title, the clipboard, colours and the cursor, C1's CSI and OSC, a bell, a return, bidi overrides and isolates.
EVIL = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x1b\\\x1b[2J\x1b[31m\x9b1A\x9d0;x\x9c\r\x08\x7f\u202egnp.\u2066\u2069"
NAME = EVIL.replace("/", "")
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """The same text; AssertionError where it would command a terminal."""
    assert not COMMANDS.search(text), ascii(text)
    return text


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_escaped() -> None:
    assert clean("a\x1b[1m\x9b\u202e\ud800") == "a\\x1b[1m\\x9b\\u202e\\ud800"
    printable = "tab\tline\nund Größe \u05d0\u200f \U0001f600 [bold] :bug: \\x1b"
    assert clean(printable) == printable
    assert clean("a\r\nb\rc") == "a\nb\\rc"
    harmless(clean(EVIL))


def test_say_and_console(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL, "[red]")
    say(EVIL, error=True)
    Console().print(EVIL + "[bold] :bug: [/nothing]", soft_wrap=True)
    out, err = capsys.readouterr()
    assert "[red]" in harmless(out) and "[bold] :bug: [/nothing]" in out and "\\x1b]0;title" in harmless(err)


def test_colours_of_ours_stay() -> None:
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="standard").print("a\x1b[2J", style="red", soft_wrap=True)
    assert file.getvalue() == "\x1b[31ma\\x1b[2J\x1b[0m\n"


def test_what_libraries_say() -> None:
    """Warnings, logs and what nobody has caught; and letters that the terminal does not have."""
    program = (
        "import logging, warnings\nfrom weft import terminal\nterminal.clean_everything()\n"
        f"logging.error('%s', {EVIL!r})\nwarnings.warn({EVIL!r})\nprint('\\u00e9')\nraise ValueError({EVIL!r})"
    )
    environment = forked.environment(PYTHONIOENCODING="ascii:strict", PYTHONPATH=str(Path(cli.__file__).parent.parent))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert harmless(done.stderr).count("title") >= 3 and done.stdout == "\\xe9\n"


@pytest.mark.parametrize(
    "words",
    [
        [EVIL],
        ["sft", f"{NAME}.yaml"],
        ["sft", f"data.path={NAME}"],
        ["sft", f"--{EVIL}"],
        ["sft", "evil.yaml"],
        ["report", NAME],
        ["rollouts", NAME],
        ["chat", f"./{NAME}"],
        ["export", NAME],
        ["migrate", f"{NAME}.sh"],
        ["data", "preview", f"data.path={NAME}.jsonl", "model.path=m/m"],
    ],
    ids=lambda words: words[0] if words[0] != EVIL else "command",
)
def test_error_messages(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(Path(f"{NAME}.jsonl"), {EVIL: EVIL})
    Path("evil.yaml").write_text(json.dumps({EVIL: {EVIL: EVIL}, "model": {"path": EVIL}}))
    assert cli.main(words) != 0
    out, err = capsys.readouterr()
    assert harmless(err).strip() and not harmless(out)


def test_data_preview(capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(Path(f"{NAME}.jsonl"), {"text": EVIL}, chat(("user", EVIL), ("assistant", EVIL)))
    words = [
        f"model.path={model(byte_tokenizer, 300)}",
        "model.init=random",
        f"data.path={json.dumps(NAME + '.jsonl')}",
    ]
    assert cli.main(["data", "preview", *words, "step.documents=1"]) == 0
    assert "title" in harmless(capsys.readouterr().out)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Path(NAME))
    lines = [{"step": 121, EVIL: 1.0, "loss": 1.0, "skipped": True, "reason": EVIL}]
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (run / "config.yaml").write_text(json.dumps({"model": {"path": EVIL}, "data": {"path": EVIL}}))
    (run / "samples.jsonl").write_text(json.dumps({"prompt": EVIL, "answer": EVIL, "step": EVIL}) + "\n")
    (run / "summary.json").write_text(json.dumps({"data": EVIL, "stopped": EVIL, "seconds": {EVIL: 1.0}}))
    assert cli.main(["report", str(run)]) == 0
    harmless(capsys.readouterr().out)
    page = (run / "report.html").read_text()
    assert "title" in harmless(page.replace("\x0b", ""))


def test_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(NAME)
    run.mkdir()
    prompt = Prompt(index=0, visit=0, tokens=(1, 2), text=EVIL, source=EVIL)
    arrays = {
        "tokens": np.array([1, 2, 3]), "sampled": np.array([False, False, True]),
        "rollout_logprobs": np.zeros(3, np.float32),
        "versions": np.zeros(3, np.int32), "turns": 1,
    }  # fmt: skip
    sample = Sample(
        prompt=prompt, number=0, text=EVIL, reward=1.0, rewards={EVIL: 1.0, "b": 2.0}, finish=EVIL, **arrays
    )  # type: ignore[arg-type]
    write_rollouts(run, 1, [SampleGroup(prompt, [sample])])
    assert cli.main(["rollouts", str(run)]) == 0
    assert harmless(capsys.readouterr().out).count("title") >= 4


def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that answers with escapes: what its generate streams is printed as it comes."""
    config = tiny_config("llama", vocab_size=264)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(NAME)
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.save_pretrained(NAME)
    evil = torch.tensor([tokenizer(EVIL, add_special_tokens=False)["input_ids"]])

    def generate(self: object, input_ids: torch.Tensor, streamer: chat_recipe._Streamer, **_: object) -> torch.Tensor:
        streamer.put(input_ids[0])
        for token in evil[0]:
            streamer.put(token.reshape(1))
        streamer.end()
        return torch.cat([input_ids, evil], 1)

    monkeypatch.setattr(AutoModelForCausalLM._model_mapping[type(config)], "generate", generate)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{EVIL}\n".replace("\r", "")))
    assert cli.main(["chat", f"./{NAME}", "--device", "cpu"]) == 0
    assert "title" in harmless(capsys.readouterr().out)


def test_sft(tmp_path: Path) -> None:
    """A whole run: names of files and folders, prompts that are sampled, and sources."""
    folder = tmp_path / "model"
    hf.build_random(
        tiny_config("llama", vocab_size=264), dtype=torch.float32, attention="eager", seed=0
    ).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    write_jsonl(Path(f"{NAME}.jsonl"), *[chat(("user", EVIL), ("assistant", EVIL))] * 4)
    config = {
        "model": {"path": "model"}, "data": {"path": f"{NAME}.jsonl"},
        "step": {"documents": 2, "max_tokens_per_device": 512}, "train": {"steps": 2}, "run": {"dir": f"runs/{NAME}"},
        "eval": {"prompts": [EVIL], "path": f"{NAME}.jsonl", "every": 1, "max_new_tokens": 4},
    }  # fmt: skip
    Path("c.yaml").write_text(json.dumps(config))
    done = forked.run(["sft", "c.yaml", "--device", "cpu"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "title" in harmless(done.stdout)
    harmless(done.stderr)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["migrate", "a.yaml"]], ids=lambda words: words[0])
@pytest.mark.parametrize("full", [False, True], ids=["gone", "full"])
def test_output_that_nobody_takes(words: list[str], full: bool, tmp_path: Path) -> None:
    """As of `weft ... | head`, whose reader ends when it has enough; or on a disk that is full."""
    Path("a.yaml").write_text("per_device_train_batch_size: 2\nlearning_rate: 1e-4\nlr_scheduler_type: cosine\n")
    reads, writes = os.pipe()
    os.close(reads)
    environment = forked.environment(PYTHONPATH=str(Path(cli.__file__).parent.parent))
    with open("/dev/full" if full else writes, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "weft", *words], stdout=out, stderr=subprocess.PIPE, env=environment, timeout=60
        )
    errors = done.stderr.decode()
    assert "Traceback" not in errors and "Exception ignored" not in errors
    assert (
        (done.returncode, "No space left" in errors) == (13, True)
        if full
        else (done.returncode == 2 and errors.startswith("error: the program that reads this output has ended"))
    )


TRAINING = """
import sys
from weft.observe.progress import Progress
from weft.terminal import say

sys.stdin.readline()
with Progress(3, interval=1) as progress:
    for step in (1, 2, 3):
        progress.step({"step": step, "loss": 1.0})
        print("a line of a user's hook")
say("done")
"""


@pytest.mark.parametrize("terminal", [False, True], ids=["reader", "terminal"])
def test_a_run_does_not_end_with_its_output(terminal: bool) -> None:
    """As of `weft sft ... | tee log` without tee, or of a terminal that is closed."""
    environment = forked.environment(PYTHONPATH=str(Path(cli.__file__).parent.parent))
    here, there = os.openpty() if terminal else os.pipe()
    words = [sys.executable, "-c", TRAINING]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "stdout": there}
    with subprocess.Popen(words, env=environment, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        os.close(there)
        os.close(here)
        _, errors = process.communicate(b"\n", timeout=60)
    text = "output   the program or terminal that reads it has ended; the run continues, and writes metrics.jsonl\n"
    assert (process.returncode, errors.decode()) == (0, text)


def test_the_log_of_a_program_is_its_own() -> None:
    """clean_everything() is for the program: a library leaves logging and warnings alone."""
    assert "weft" not in repr(logging.getLogRecordFactory()) and "weft" not in repr(warnings.formatwarning)


def test_lines_are_folded_under_their_labels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the width of a terminal, or of COLUMNS; not for logs, and not what has no label."""
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = [
        "memory   " + "a bc " * 12,
        "held out " + "xy " * 20,
        "a command of --long words that is not a line of labels",
    ]
    say_folded(lines)
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setenv("COLUMNS", "40")
    say_folded(lines)
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "memory   a bc a bc a bc a bc a bc a bc a", "         bc a bc a bc a bc a bc a bc",
        "held out xy xy xy xy xy xy xy xy xy xy", "         xy xy xy xy xy xy xy xy xy xy", lines[2],
    ]  # fmt: skip
