"""What people get wrong: each mistake, what weft must say of it, and the remedy that the message proposes.

tests/cli/test_mistakes.py makes each of them and follows the remedy. `make mistakes` does so with processes of their
own, and writes what came of it, with seconds, into docs/reference/failures.md.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.toy_tokenizers import CHATML, byte_tokenizer

Files = Mapping[str, str | bytes | None]  # None: the file is removed

# Seconds until the message is there.
CONFIG, PATHS, DATA = 1, 5, 20

SFT_YAML = """\
model: {path: tiny}
data: {path: chats.jsonl}
step: {documents: 2, max_tokens_per_device: 256}
run: {dir: run}
"""
RL_YAML = """\
model: {path: tiny}
data: {path: sums.jsonl}
step: {max_tokens_per_device: 256}
rl: {prompts_per_step: 2, group_size: 2, reward: [exact_match]}
rollout: {max_prompt_tokens: 32, max_new_tokens: 4}
run: {dir: run}
"""
REWARDS = "def is_right(completions, **more):\n    return [1.0] * len(completions)\n"


@dataclass(frozen=True)
class Mistake:
    """One that a user makes, in a folder with the files of `write_folder`.

    words: of `weft`. says: pieces of the message. within: seconds, in which it is said. remedy: the words that follow
    what the message proposes; None where a file is mended. files: as they are when the mistake is made. mended: those
    that the remedy changes.
    """

    what: str
    words: Sequence[str]
    says: Sequence[str]
    remedy: Sequence[str] | None = None
    within: int = CONFIG
    files: Files = field(default_factory=dict)
    mended: Files = field(default_factory=dict)


def write_folder(folder: Path) -> None:
    """A model of one layer with its tokenizer, two chats, two sums with answers, and a config for each command."""
    byte_tokenizer().save_pretrained(folder / "tiny")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(vocab_size=300, head_dim=16, intermediate_size=64, tie_word_embeddings=True, **shape)
    ).save_pretrained(folder / "tiny")
    sums = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    write(
        folder, {"chats.jsonl": rows(CHAT, CHAT), "sums.jsonl": rows(*sums), "sft.yaml": SFT_YAML, "rl.yaml": RL_YAML}
    )


def write(folder: Path, files: Files) -> None:
    """Write these files, or remove them."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def make(mistake: Mistake, shared: Path, folder: Path) -> None:
    """The folder in which it is made. shared: as write_folder left it."""
    shutil.copytree(shared, folder, dirs_exist_ok=True)
    write(folder, mistake.files)


def mend(mistake: Mistake, shared: Path, folder: Path) -> Sequence[str]:
    """Follow the remedy. Returns the words of the command that works then."""
    if mistake.remedy is None and not mistake.mended:  # what is damaged is fetched again
        shutil.copytree(shared, folder, dirs_exist_ok=True)
    write(folder, mistake.mended)
    return mistake.words if mistake.remedy is None else mistake.remedy


def problem(mistake: Mistake, done: subprocess.CompletedProcess[str]) -> str:
    """What is wrong with what weft said; empty where nothing is."""
    if done.returncode != 2 or "Traceback" in done.stderr:
        return f"status {done.returncode}: {done.stderr}"
    missing = [piece for piece in mistake.says if piece not in done.stderr]
    return f"{missing} not in: {done.stderr}" if missing else ""


def rows(*values: Any) -> str:
    """JSONL."""
    return "".join(json.dumps(value) + "\n" for value in values)


def chat(user: str, assistant: str, text: str = "a") -> list[dict[str, str]]:
    return [{"role": user, "content": text}, {"role": assistant, "content": "b"}]


def sft(*words: str) -> list[str]:
    """One step of weft sft."""
    return ["sft", "sft.yaml", "train.steps=1", *words]


def rl(*words: str) -> list[str]:
    """A dry run of weft rl: with Ray, each would take a minute."""
    return ["rl", "rl.yaml", "--dry-run", *words]


CHAT = {"messages": chat("user", "assistant")}
GOOD, BAD_LINE = rows(CHAT), '{"text": "a"\n'
PREFERENCE = {"chosen": chat("user", "assistant"), "rejected": chat("user", "assistant")}
LONG_TEXT = rows({"text": "a"}, {"text": "a longer text"})
QUESTION_ONLY = "{{ messages[0]['content'] }}"
CONFIG_16 = (
    '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 16, "hidden_size": 32, '
    '"num_hidden_layers": 1}'
)

OF_THE_COMMAND = [
    Mistake("a command misspelt", ["stf", "sft.yaml"], ["no such command", "did you mean weft sft?"], sft()),
    Mistake("an option misspelt", sft("--dryrun"), ["unrecognized arguments: --dryrun"], sft("--dry-run")),
    Mistake("an override with dashes", sft("--step.documents=2"), ["without dashes"], sft("step.documents=2")),
    Mistake("no such config file", ["sft", "sfr.yaml"], ["no such config file", "Did you mean sft.yaml"], sft()),
    Mistake("a folder for a config", ["sft", "tiny"], ["tiny: this is a folder; write the path of a"], sft()),
    Mistake("nothing given", ["sft"], ["set model.path=...", "set data.path=..."],
            ["sft", "model.path=tiny", "data.path=chats.jsonl", "train.steps=1"]),
    Mistake("no ranks", sft("--nproc", "0"), ["--nproc: 0 is not a whole number of 1 or more"], sft("--nproc", "1")),
    Mistake("a number of ranks that does not match the mesh", sft("mesh.dp_shard=2", "--nproc", "3"),
            ["mesh.dp_shard", "3 ranks", "--nproc 2"], sft("mesh.dp_shard=2", "--nproc", "2")),
    Mistake("a config of weft rl for weft sft", ["sft", "rl.yaml"], ["rl and rollout belong to `weft rl`"], rl()),
    Mistake("resuming a missing run", ["sft", "--resume", "ruin"], ["--resume ruin: it does not exist"], sft()),
    Mistake("resuming a folder that is no run", ["sft", "--resume", "tiny"], ["contains no config.yaml"], sft()),
    Mistake("resuming a run of another command", ["rl", "--resume", "run"],
            ["weft sft wrote this run: use weft sft --resume run"], sft(), files={"run/config.yaml": SFT_YAML}),
]  # fmt: skip

OF_THE_CONFIG = [
    Mistake("a key misspelt", sft("optimizer.learning_rat=1e-3"), ["did you mean learning_rate?", "set `optimizer.lr`"],
            sft("optimizer.lr=1e-3")),
    Mistake("a key without its section", sft("lr=1e-3"), ["set `optimizer.lr`"], sft("optimizer.lr=1e-3")),
    Mistake("a key of another trainer", sft("train.gradient_accumulation_steps=2"), ["`step.documents` = per-device"],
            sft("step.documents=2")),
    Mistake("a float for a whole number", sft("step.documents=1e1"), ["write 10"], sft("step.documents=10")),
    Mistake("yes for true", sft(), ["sft.yaml:5: checkpoint.async must be true or false, not yes: write true"],
            files={"sft.yaml": SFT_YAML + "checkpoint: {async: yes}\n"},
            mended={"sft.yaml": SFT_YAML + "checkpoint: {async: true}\n"}),
    Mistake("an optimizer that weft does not have", sft("optimizer.name=adam"), ["write adamw"],
            sft("optimizer.name=adamw")),
    Mistake("out of range", sft("optimizer.lr=-1e-3"), ["optimizer.lr is -0.001; it must be above 0"],
            sft("optimizer.lr=1e-3")),
    Mistake("two keys with the same purpose", sft("train.epochs=1"), ["train.steps replaces train.epochs"],
            sft("train.epochs=1", "train.steps=null")),
    Mistake("both sizes of a step", sft("step.tokens=64"), ["set one of them to null"],
            sft("step.tokens=64", "step.documents=null")),
    Mistake("a key without effect", sft("optimizer.name=sgd", "optimizer.betas=[0.9, 0.99]"),
            ["optimizer.betas would have no effect", "Remove it"], sft("optimizer.name=sgd")),
    Mistake("LoRA without a rank", sft("lora.alpha=16"), ["lora.rank=16 makes some"],
            sft("lora.alpha=16", "lora.rank=16")),
    Mistake("documents longer than a row", sft("data.max_length=900"), ["step.max_tokens_per_device=900"],
            sft("data.max_length=900", "step.max_tokens_per_device=900")),
    Mistake("no documents in a step, under weft verify", ["verify", "sft.yaml", "step.documents=0"],
            ["step.documents is 0; it must be 1 to 1,000,000"], ["verify", "sft.yaml"]),
    Mistake("a warm-up longer than the run", sft("schedule.warmup_steps=5"), ["set schedule.warmup_steps=1 or less"],
            sft("schedule.warmup_steps=1")),
    Mistake("a tab in YAML", sft(), ["sft.yaml:2: not valid YAML", "Indent with spaces"],
            files={"sft.yaml": "model:\n\tpath: tiny\n"}, mended={"sft.yaml": SFT_YAML}),
    Mistake("a section twice", sft(), ["`run` is set twice (first at sft.yaml:4): remove one"],
            files={"sft.yaml": SFT_YAML + "run: {overwrite: true}\n"},
            mended={"sft.yaml": SFT_YAML.replace("dir: run", "dir: run, overwrite: true")}),
    Mistake("groups of one sample", rl("rl.group_size=1"), ["set rl.group_size=2 or more"], rl("rl.group_size=2")),
    Mistake("no reward", rl("rl.reward=[]"), ["as in 'rl.reward=[math]'"], rl("rl.reward=[math]")),
    Mistake("samples longer than a row", rl("rollout.max_new_tokens=900"), ["set step.max_tokens_per_device=932"],
            rl("rollout.max_new_tokens=900", "step.max_tokens_per_device=932")),
]  # fmt: skip

OF_PATHS = [
    Mistake("a model misspelt", sft("model.path=./tinny"), ["model.path ./tinny does not exist", "Did you mean tiny?"],
            sft("model.path=./tiny"), PATHS),
    Mistake("data misspelt", sft("data.path=chat.jsonl"), ["Did you mean chats.jsonl"], sft(), PATHS),
    Mistake("a file for a model", sft("model.path=tiny/config.json"), ["is a file: write the path of"], sft(), PATHS),
    Mistake("no weights", sft(), ["contains no weights (*.safetensors)", "set model.init=random"],
            sft("model.init=random"), PATHS, {"tiny/model.safetensors": None}),
    Mistake("a reward misspelt", rl("rl.reward=[exat_match]"), ["Did you mean exact_match?"], rl(), PATHS),
    Mistake("a reward function misspelt", rl("rl.reward=[mine:is_rihgt]"), ["Did you mean mine:is_right?"],
            rl("rl.reward=[mine:is_right]"), PATHS, {"mine.py": REWARDS}),
    Mistake("a reward's file misspelt", rl("rl.reward=[mien:is_right]"), ["there is no module mien", "fix the path"],
            rl("rl.reward=[mine:is_right]"), PATHS, {"mine.py": REWARDS}),
    Mistake("an optimizer's class misspelt", sft("optimizer.name=torch.optim:Adamaxx"),
            ["Did you mean torch.optim:Adamax?"], sft("optimizer.name=torch.optim:Adamax"), PATHS),
    Mistake("prompts misspelt", sft("eval.prompts=prompt.jsonl"), ["is not a file", "Did you mean prompts.jsonl"],
            sft("eval.prompts=prompts.jsonl", "eval.max_new_tokens=4"), PATHS,
            {"prompts.jsonl": rows({"prompt": "1+1="})}),
    Mistake("a chat template misspelt", sft("data.chat_template=tinny.jinja"),
            ["does not exist", "Did you mean tiny.jinja?"],
            sft("data.chat_template=tiny.jinja"), PATHS, {"tiny.jinja": CHATML}),
    Mistake("a GPU that is not there", sft("--device", "cuda"), ["use --device cpu"], sft("--device", "cpu"), PATHS),
]  # fmt: skip

OF_DATA = [
    Mistake("a line that is not JSON", sft(), ["chats.jsonl:2: is not valid JSON", "data.bad_rows=drop"],
            sft("data.bad_rows=drop"), DATA, {"chats.jsonl": GOOD + BAD_LINE}),
    Mistake("columns of another format", sft(), ["Set 'data.columns={instruction: question, output: answer}'"],
            sft("data.columns={instruction: question, output: answer}"), DATA,
            {"chats.jsonl": rows({"question": "a", "answer": "b"})}),
    Mistake("preference pairs", sft(), ["set 'data.columns={messages: chosen}'"],
            sft("data.columns={messages: chosen}"), DATA, {"chats.jsonl": rows(PREFERENCE)}),
    Mistake("unknown roles", sft(), ["Set 'data.roles={bot: assistant, human: user}'"],
            sft("data.roles={bot: assistant, human: user}"), DATA,
            {"chats.jsonl": rows({"messages": chat("human", "bot")})}),
    Mistake("no message of the assistant", sft(), ["chats.jsonl:2: no token of this document is trained"],
            sft("data.bad_rows=drop"), DATA, {"chats.jsonl": GOOD + rows({"messages": chat("user", "assistant")[:1]})}),
    Mistake("no documents", sft(), ["chats.jsonl: contains no documents"], within=DATA, files={"chats.jsonl": "\n"},
            mended={"chats.jsonl": GOOD}),
    Mistake("not UTF-8", sft(), ["chats.jsonl:1: is not UTF-8", "Save the file as UTF-8"], within=DATA,
            files={"chats.jsonl": '{"text": "ä"}\n'.encode("latin-1")}, mended={"chats.jsonl": '{"text": "ä"}\n'}),
    Mistake("a comma too many in CSV", sft("data.path=a.csv"), ["a.csv:2: has 3 fields, but the header has 2"],
            None, DATA, {"a.csv": "prompt,completion\na,b,c\n"}, {"a.csv": 'prompt,completion\na,"b,c"\n'}),
    Mistake("a truncated gzip file", sft("data.path=a.jsonl.gz"), ["is a truncated or damaged gzip file"], None, DATA,
            {"a.jsonl.gz": gzip.compress(GOOD.encode())[:-12]}, {"a.jsonl.gz": gzip.compress(GOOD.encode())}),
    Mistake("labels of another length", sft(), ["`labels` has 1 values, but `input_ids` has 2"], None, DATA,
            {"chats.jsonl": rows({"input_ids": [9, 8], "labels": [8]})},
            {"chats.jsonl": rows({"input_ids": [9, 8], "labels": [9, 8]})}),
    Mistake("a document longer than data.max_length", sft("data.max_length=8"), ["data.long_documents"],
            sft("data.max_length=8", "data.long_documents=drop"), DATA, {"chats.jsonl": LONG_TEXT}),
    Mistake("a template that omits the answer", sft(),
            ["cannot determine which tokens are the assistant's", "data.chat_template"],
            sft("data.chat_template=right.jinja"), DATA, {"tiny/chat_template.jinja": QUESTION_ONLY},
            {"right.jinja": CHATML}),
    Mistake("a tokenizer of another model", sft("model.init=random"),
            ["the tokenizer gives id", "vocabulary has 16"], None, DATA, {"tiny/config.json": CONFIG_16},
            {"tiny/config.json": CONFIG_16.replace("16", "300", 1)}),
    Mistake("prompts too long", rl("rollout.max_prompt_tokens=2"), ["Set rollout.max_prompt_tokens=4"],
            rl("rollout.max_prompt_tokens=4"), DATA),
    Mistake("no reference answers", rl(), ["the row has `target`", "Set 'data.columns={answer: COLUMN}'"],
            rl("data.columns={answer: target}"), DATA,
            {"sums.jsonl": rows({"prompt": "1+1=", "target": "2"})}),
]  # fmt: skip

OF_MODELS = [
    Mistake("no tokenizer", sft(), ["contains no tokenizer", "tokenizer.json"], None, DATA,
            {"tiny/tokenizer.json": None, "tiny/tokenizer_config.json": None}),
    Mistake("truncated weights", sft(), ["or is truncated: 3 bytes", "Fetch or write it again"], None, DATA,
            {"tiny/model.safetensors": b"abc"}),
    Mistake("a broken config.json", sft(), ["tiny/config.json: is not JSON", "Fetch or write it again"], None, DATA,
            {"tiny/config.json": "{"}),
    Mistake("weights in a pickle", sft(), ["a pickle, which weft does not open", "save_pretrained"], None, DATA,
            {"tiny/model.safetensors": None, "tiny/pytorch_model.bin": b"abc"}),
]  # fmt: skip

MISTAKES = [*OF_THE_COMMAND, *OF_THE_CONFIG, *OF_PATHS, *OF_DATA, *OF_MODELS]


# ---------------------------------------------------------------- the table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "failures.md"
HEAD = "## Mistakes"
INTRODUCTION = """\
Generated by `make mistakes` on {date} ({cores} cores, no accelerator): each command ended with status 2 and a message
that contains these words. With the fix from the message, it then succeeded. Seconds: the whole command
until the message. `weft rl` ran with `--dry-run`.

| mistake | the message has | then this works | seconds |
|---|---|---|---|
"""


def main() -> int:
    """Make every mistake and follow its remedy, in processes of their own. The status is 1 where one is not as it
    should be."""
    lines, failed = [], 0
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name) / "shared"
        write_folder(shared)
        for number, mistake in enumerate(MISTAKES):
            wrong, seconds = tried(mistake, shared, Path(name) / str(number))
            if wrong:
                failed += 1
                print(f"{mistake.what}: {wrong}", flush=True)
            lines.append(
                f"| {mistake.what} | {' ... '.join(map(_code, mistake.says))} | {_remedy(mistake)} | {seconds:.1f} |"
            )
    text = PAGE.read_text(encoding="utf-8")
    before, _, after_head = text.partition(f"{HEAD}\n")
    introduction = INTRODUCTION.format(date=datetime.date.today(), cores=os.cpu_count())
    after = after_head[after_head.index("\n## ") :] if "\n## " in after_head else ""
    if not failed:
        PAGE.write_text(f"{before}{HEAD}\n\n{introduction}" + "\n".join(lines) + f"\n{after}", encoding="utf-8")
    print(f"{len(MISTAKES) - failed} of {len(MISTAKES)} are said in time, and mended as the message says")
    return int(bool(failed))


def tried(mistake: Mistake, shared: Path, folder: Path) -> tuple[str, float]:
    """(what is not as it should be, seconds until the message)."""
    make(mistake, shared, folder)
    began = time.monotonic()
    done = _weft(mistake.words, folder)
    seconds = time.monotonic() - began
    if wrong := problem(mistake, done):
        return wrong, seconds
    if seconds > mistake.within:
        return f"took {seconds:.1f} s, more than {mistake.within}", seconds
    done = _weft(mend(mistake, shared, folder), folder)
    return (f"the remedy ended with {done.returncode}: {done.stderr}" if done.returncode else ""), seconds


def _weft(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def _remedy(mistake: Mistake) -> str:
    """In the words of the command that differ, or the files."""
    if mistake.remedy is None:
        return "fixed " + ", ".join(map(_code, mistake.mended or mistake.files))
    new = [word for word in mistake.remedy if word not in mistake.words]
    if mistake.words[:2] != mistake.remedy[:2]:
        new = ["weft", *mistake.remedy]
    return _code(" ".join(new)) if new else "removed"


def _code(text: str) -> str:
    return f"``{text}``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    sys.exit(main())
