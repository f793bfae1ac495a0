"""Configs that attack who reads them: each is refused in a sentence, at once and in little memory."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft import cli
from weft.config import load_config
from weft.config.load import read_config_file
from weft.data.order import StepSampler
from weft.errors import UserError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MAPPINGS = "a: &a {x: 1, y: 2, z: 3}\n" + "".join(
    f"{b}: &{b} {{{', '.join(f'k{i}: *{a}' for i in range(9))}}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

TEXTS = {
    "100,000 brackets": ("a: " + "[" * 100_000, "the nesting is too deep"),
    "100,000 braces": ("a: " + "{b: " * 100_000, "the nesting is too deep"),
    "brackets that are closed": ("a: " + "[" * 70 + "]" * 70, "nested more than 64 levels deep"),
    "an anchor in itself": ("data: &a\n  b: *a\n", "nested more than 64 levels deep"),
    "a list in itself": ("data:\n  path: &a [*a]\n", "nested more than 64 levels deep"),
    "a bomb of lists": (BOMB, "over 100,000 values"),
    "a bomb of mappings": (MAPPINGS, "over 100,000 values"),
    "an integer of 10,000 digits": (f"train:\n  seed: {'1' * 10_000}\n", "cannot be read"),
    "a tag that does not fit": ("train:\n  seed: !!int x\n", "cannot be read"),
    "a tag of Python": ("train:\n  seed: !!python/object/apply:os.getcwd []\n", ":2: not valid YAML"),
    "NUL": ("model:\n  path: a\0b\n", "not valid YAML"),
    "too much": ("# " + "x" * (5 << 20), "larger than 4 MiB"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, message = TEXTS[name]
    Path("a.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(UserError, match=f"(?s)^a.yaml.*{message}") as caught:
        load_config(["a.yaml"], [])
    assert time.process_time() - began < 5.0
    assert len(str(caught.value)) < 500


def test_aliases_that_are_no_bomb_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: {path: &p /some/where}\nrun: {dir: *p}\n")
    assert read_config_file(str(path)).value["run"].value["dir"].value == "/some/where"


LARGE = (
    "train.steps", "train.epochs", "step.documents", "step.max_tokens_per_device", "data.max_length", "data.workers",
    "train.timeout", "checkpoint.keep", "mesh.dp_shard", "fsdp.prefetch", "train.log_every", "eval.every",
)  # fmt: skip


@pytest.mark.parametrize("key", LARGE)
@pytest.mark.parametrize("value", ["2147483648", "9" * 30])
def test_numbers_beyond_all_bounds(value: str, key: str) -> None:
    """Libraries count in 31, 32 or 63 bits; a list of so many is memory. Some keys have a bound of their own."""
    bound = {"step.documents": "1 to 1,000,000", "data.workers": "1 to 4,096"}.get(key, "at most 2147483647")
    further = ["train.epochs=null"] if key == "train.steps" else []
    with pytest.raises(UserError, match=f"{key} is .*; it must be {bound}"):
        load_config([], [f"{key}={value}", "model.path=m/m", "data.path=d/d", *further], weights=False)
    limits = {"data.max_row_bytes": "1099511627776", "train.seed": "9" * 15}
    load_config([], [*(f"{name}={limit}" for name, limit in limits.items()), "model.path=m/m", "data.path=d/d"])


@pytest.mark.timeout(60)
def test_epochs_are_multiplied() -> None:
    assert len(StepSampler([1] * 5, documents=2, epochs=2**31 - 1)) == 3 * (2**31 - 1)


@pytest.mark.parametrize("value", ["[" * 100_000, "1" * 10_000, "!!int x", "&a [*a]"])
def test_a_hostile_override(value: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config([], [f"train.seed={value}", "model.path=m/m", "data.path=d/d"])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["a\nb", "a #b", "a\n\nb", "runs/x y"])
def test_a_text_of_the_command_line_is_as_it_was_typed(text: str) -> None:
    """YAML would fold lines, and drop what follows a #: another folder than the one that was named."""
    assert load_config([], [f"run.dir={text}", "model.path=m/m", "data.path=d/d"]).run.dir == text
    assert load_config([], ["run.dir='a #b'", "model.path=m/m", "data.path=d/d"]).run.dir == "a #b"


def test_no_name_is_suggested_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lora").symlink_to("nowhere")
    Path("lora.yaml").symlink_to("nowhere")
    for word in ("lora.yaml", "lora.path=lora", "eval.prompts=lora.yaml", "model.path=./lora"):
        words = ([word], []) if "=" not in word else ([], [word, "data.path=d/d"])
        with pytest.raises(UserError) as caught:
            load_config(*words)
        assert "Did you mean" not in str(caught.value)


def test_toml_that_is_nested(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(UserError, match="the nesting is too deep"):
        load_config([str(path)], [])


LONG = "x" * 300
NAMES = ([f"run.dir={LONG}"], [LONG], ["--resume", LONG], ["loop/a"], ["--resume", "loop"])


COMMANDS = ("report", "rollouts", "export", "merge", "chat", "migrate")
LINES = [["sft", *words] for words in NAMES] + [[one, name] for name in (LONG, "loop", "loop/a") for one in COMMANDS]


@pytest.mark.parametrize("words", LINES, ids=lambda words: " ".join(words)[:20])
def test_names_that_no_file_can_have(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert cli.main(words) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and "Traceback" not in errors


def test_neighbours_that_cannot_be_looked_at_are_not_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is missing beside one whose kind the system does not tell."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml"):
        Path(name).touch()
    stat = os.stat

    def denied(path: object, *arguments: object, **options: object) -> os.stat_result:
        if str(path).endswith("b.yaml"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(UserError, match="no such config file. Did you mean"):
        load_config(["c.yaml"], [])


def make_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(path.name)  # by its name, because those paths are short


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a FIFO"),
    "socket": (make_socket, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "loop": (lambda path: path.symlink_to(path.name), "a loop of symbolic links"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = SPECIAL[kind]
    make(Path("a.yaml"))
    with pytest.raises(UserError, match=f"a.yaml: is .*{message}"):
        load_config(["a.yaml"], [])


@pytest.mark.parametrize("error", [RecursionError("maximum recursion depth exceeded"), MemoryError()])
def test_nothing_that_is_read_shows_a_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the one place where errors become exit statuses, whoever has read what."""

    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "load_config", load)
    status = cli.main(["sft", "a.yaml"])
    errors = capsys.readouterr().err
    assert status == (2 if isinstance(error, RecursionError) else 12)
    assert "Traceback" not in errors and errors.startswith("error: ")
