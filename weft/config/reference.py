"""Text generated from the schema: docs/reference/config.md (`python -m weft.config.reference >
docs/reference/config.md`), the output of `weft keys`, and the config that `weft init` writes."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.config.coerce import describe
from weft.config.commands import SCHEMAS
from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.keys import Key, schema_keys, sections
from weft.config.load import show_default
from weft.config.migrate.trainer import TABLES
from weft.config.presets import ADAPTER_DEFAULTS
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.yaml12 import show, written
from weft.errors import UserError

_INTRODUCTION = """\
# Configuration

`python -m weft.config.reference > docs/reference/config.md` writes this page, and a test checks that it is current.

A config is one or more YAML (or TOML) files, merged left to right, and `section.key=value` on the command line:

    weft sft base.yaml mine.yaml optimizer.lr=2e-5 step.documents=32 data.max_length=null

Only `model.path` and `data.path` are required; you need no file. Numbers and booleans follow YAML 1.2: `1e-5` is a
number, `yes` is a string. An unknown key, a value of another type, and a key that would have no effect are errors.
`weft sft --dry-run` prints the resolved config. For renamed keys the tables give the former name: configs may still use
it, and the resolved config has the new name. Paths are relative to the working directory.
"""

_PREFERENCES = """\
# Keys of `weft dpo`

These are in addition to the sections above. For `optimizer` the table lists only keys with another default.
`step.documents` and `step.tokens` count pairs, or answers with a label.
"""

_REWARD_MODELS = """\
# Keys of `weft reward`

These are in addition to the sections of `weft sft`. For `optimizer` the table lists only keys with another default.
`step.documents` and `step.tokens` count pairs with `reward.loss=bradley_terry`, otherwise rows.
"""

_REINFORCEMENT = """\
# Keys of `weft rl`

These are in addition to the sections above, except `profile`, which `weft rl` does not have, and `eval`, which is
different here. For `optimizer` and `schedule` the tables list only keys with another default.
"""


_DISTILLATION = """\
# Keys of `weft distill`

These are in addition to the sections of `weft sft`.
"""


def reference() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION, *_tables(SftConfig, sections(SftConfig))]
    described = {*sections(SftConfig).values()}
    pages: dict[type[SftConfig] | type[RlConfig], str] = {
        DpoConfig: _PREFERENCES,
        RewardConfig: _REWARD_MODELS,
        RlConfig: _REINFORCEMENT,
        DistillConfig: _DISTILLATION,
    }
    for schema, text in pages.items():
        further = {section: kind for section, kind in sections(schema).items() if kind not in described}
        parts += [text, *_tables(schema, further)]
        described |= {kind for section, kind in further.items() if section not in sections(SftConfig)}
    return "\n".join(parts)


def _tables(config: type[SftConfig] | type[RlConfig], section_types: Mapping[str, type]) -> Iterator[str]:
    """One table for each section in section_types. If `weft sft` has the section with other defaults, the table has
    only the keys with different defaults."""
    for section, kind in section_types.items():
        keys = [key for key in schema_keys(config).values() if key.name.startswith(section + ".")]
        base = sections(SftConfig).get(section, kind)
        if kind is not base and issubclass(kind, base):
            keys = [key for key in keys if key.default != schema_keys(SftConfig)[key.name].default]
        rows = "\n".join(_row(key, ADAPTER_DEFAULTS[config.command]) for key in keys)
        yield (
            f"## {section}\n\n{kind.__doc__}\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |\n{rows}\n"
        )


def _row(key: Key, adapted: Mapping[str, Any]) -> str:
    default = "required" if key.required else f"`{show_default(key)}`"
    if key.name in adapted:
        default += f", with lora `{show(adapted[key.name])}`"
    return f"| `{key.name}` | {_kind(key)} | {default} | {key.help} |"


def _kind(key: Key) -> str:
    """The type and range of a key, such as `an integer; 1 or more`."""
    return describe(key.type) + (f"; {key.within.words}" if key.within else "")


# ---------------------------------------------------------------- weft keys

_WIDTH = 96


def find_keys(words: Sequence[str]) -> list[str]:
    """The lines of `weft keys WORDS`: the keys with all words in their name, otherwise the keys with all words in their
    help text; then other trainers' names with these words, and weft's keys for them. Without words: every key and its
    default. Raises UserError if nothing contains the words."""
    search_words = [word.lower().lstrip("-").partition("=")[0] for word in words]
    if not search_words:
        lines = [f"{key.name:<34} {_default(key)}" for key in _all_keys()]
        return [
            *lines,
            "\nweft keys WORD describes the keys that have WORD in their name, their meaning or another trainer's "
            "name.",
        ]
    named = [key for key in _all_keys() if all(word in key.name.lower() for word in search_words)]
    exact = [key for key in named if key.name in search_words]
    named = exact or named
    matching = [key for key in _all_keys() if all(word in f"{key.name} {key.help}".lower() for word in search_words)]
    foreign = _foreign(search_words) if not exact else {}
    if not named and not matching and not foreign:
        spellings = [key.name for key in _all_keys()] + [key.leaf for key in _all_keys()]
        close = difflib.get_close_matches(".".join(search_words), spellings, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(dict.fromkeys(close))}?" if close else " `weft keys` lists all keys."
        raise UserError(f"weft keys: no key has {' and '.join(search_words)} in its name or meaning.{hint}")
    lines = [line for key in named or matching for line in _described(key)]
    if named and not exact and len(matching) > len(named):
        mentioned = [key.name for key in matching if key not in named]
        lines += [
            "",
            *textwrap.wrap(
                f"Mentioned in the descriptions of: {', '.join(mentioned)}", _WIDTH, subsequent_indent="    "
            ),
        ]
    if foreign:
        lines += ["", "Names of other trainers:"]
        lines += [
            line
            for names, answer in foreign.items()
            for line in textwrap.wrap(f"{names}: {answer}", _WIDTH, initial_indent="  ", subsequent_indent="      ")
        ]
    return lines


def _all_keys() -> list[Key]:
    """The keys of all commands. If several commands have a key, the first command of commands.SCHEMAS defines it."""
    return list({name: key for s in reversed(SCHEMAS.values()) for name, key in schema_keys(s).items()}.values())


def _default(key: Key) -> str:
    """The default of a key, and the different defaults of other commands."""
    defaults: dict[str, str] = {}
    for command, schema in SCHEMAS.items():
        command_key = schema_keys(schema).get(key.name)
        if command_key is not None:
            adapted = ADAPTER_DEFAULTS[command].get(key.name)
            text = "required" if command_key.required else show_default(command_key)
            defaults[f"weft {command}"] = text + ("" if adapted is None else f", with lora {show(adapted)}")
    if len(set(defaults.values())) == 1:
        only = f"  ({next(iter(defaults))} alone)" if len(defaults) == 1 else ""
        return f"{next(iter(defaults.values()))}{only}"
    return "; ".join(f"{command}: {text}" for command, text in defaults.items())


def _described(key: Key) -> list[str]:
    """The full description of a key: name, type, range and default, and below them its meaning."""
    default = _default(key)
    head = f"{key.name}  {_kind(key)}" + (", required" if key.required else f"; default {default}")
    return [
        *textwrap.wrap(head, _WIDTH, subsequent_indent="    ", break_on_hyphens=False),
        *textwrap.wrap(key.help, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False),
    ]


def _foreign(search_words: Sequence[str]) -> dict[str, str]:
    """Names of other trainers that contain every word -> the advice for them."""
    by_answer: dict[str, list[str]] = {}
    for table in (TABLES.names, TABLES.rl_names):
        for name, answer in table.items():
            if all(word.replace("-", "_") in name for word in search_words):
                names = by_answer.setdefault(answer, [])
                names += [] if name in names else [name]
    return {", ".join(names): answer for answer, names in by_answer.items()}


# ---------------------------------------------------------------- weft init

# The keys that a first config sets, and the keys that it shows in comments, in this order. A value replaces the
# default.
_FIRST: dict[str, dict[str, Any]] = {
    "dpo": {
        "model.path": "Qwen/Qwen3-0.6B", "data.path": "preferences.jsonl", "step.documents": 32, "train.epochs": 1,
    },
    "sft": {"model.path": "Qwen/Qwen3-0.6B", "data.path": "chat.jsonl", "step.documents": 16, "train.epochs": 3},
    "distill": {
        "model.path": "Qwen/Qwen3-0.6B", "data.path": "chat.jsonl", "distill.teacher": "Qwen/Qwen3-4B",
        "step.documents": 16, "train.epochs": 3,
    },
    "reward": {
        "model.path": "Qwen/Qwen3-0.6B", "data.path": "preferences.jsonl", "step.documents": 64, "train.epochs": 1,
    },
    "rl": {
        "model.path": "Qwen/Qwen3-0.6B", "data.path": "problems.jsonl", "rl.reward": ["exact_match"], "rl.chat": True,
        "rl.prompts_per_step": 32, "rollout.max_new_tokens": 512,
    },
}  # fmt: skip
_SET = {
    "dpo": "model.path data.path preference.loss preference.beta step.documents step.max_tokens_per_device "
    "optimizer.lr schedule.name schedule.warmup_ratio train.epochs checkpoint.every checkpoint.keep",
    "sft": "model.path data.path step.documents step.max_tokens_per_device optimizer.lr schedule.name "
    "schedule.warmup_ratio train.epochs checkpoint.every checkpoint.keep",
    "distill": "model.path data.path distill.teacher distill.loss step.documents step.max_tokens_per_device "
    "optimizer.lr schedule.name schedule.warmup_ratio train.epochs checkpoint.every checkpoint.keep",
    "reward": "model.path data.path reward.loss step.documents step.max_tokens_per_device optimizer.lr schedule.name "
    "schedule.warmup_ratio train.epochs checkpoint.every checkpoint.keep",
    "rl": "model.path data.path rl.reward rl.chat rl.algorithm rl.prompts_per_step rl.group_size rollout.engine "
    "rollout.max_prompt_tokens rollout.max_new_tokens rollout.temperature step.max_tokens_per_device optimizer.lr "
    "schedule.name train.epochs checkpoint.every checkpoint.keep",
}
_SHOWN = {
    "dpo": "model.recompute data.columns data.max_length data.long_documents preference.cache reference.path "
    "mesh.dp_shard mesh.tp mesh.cp lora.rank eval.share eval.every track.report_to run.dir",
    "sft": "model.recompute data.columns data.max_length data.long_documents data.train_on mesh.dp_shard mesh.tp "
    "mesh.cp lora.rank optimizer.weight_decay eval.share eval.every track.report_to run.dir",
    "distill": "distill.temperature distill.alpha distill.cache teacher.param_dtype teacher.cpu_offload data.columns "
    "data.max_length data.train_on mesh.dp_shard mesh.tp lora.rank eval.share eval.every track.report_to run.dir",
    "reward": "model.recompute data.columns data.max_length data.long_documents mesh.dp_shard mesh.tp mesh.cp "
    "lora.rank reward.center_rewards_coefficient eval.share eval.every track.report_to run.dir",
    "rl": "data.columns rl.kl_coef rl.instruction rl.environment mesh.dp_shard mesh.tp lora.rank eval.path eval.every "
    "eval.samples track.report_to run.dir",
}
_EXAMPLES: dict[str, Any] = {
    "model.recompute": "full", "data.columns": {"prompt": "question"}, "data.max_length": 4096, "lora.rank": 16,
    "data.long_documents": "drop", "data.train_on": "all", "mesh.dp_shard": 4, "mesh.tp": 2, "mesh.cp": 2,
    "optimizer.weight_decay": 0.0, "eval.share": 0.05, "eval.path": "held_out.jsonl", "eval.every": 20,
    "distill.temperature": 2.0, "distill.alpha": 0.5, "distill.cache": "disk", "teacher.param_dtype": "bf16",
    "teacher.cpu_offload": True, "eval.samples": 4, "track.report_to": ["tensorboard"], "run.dir": "runs/mine",
    "rl.kl_coef": 0.001, "reward.center_rewards_coefficient": 0.01,
    "preference.cache": "disk", "reference.path": "Qwen/Qwen3-0.6B",
    "rl.instruction": "Put the answer in \\boxed{}.", "rl.environment": "my_envs:Calculator",
}  # fmt: skip

# Comments in a first config for keys with a long help text.
_COMMENTS = {
    "model.path": "a HuggingFace model: a directory, or a hub id",
    "data.path": "rows of messages, of prompt and completion, or of text: JSONL, CSV, Parquet, a hub dataset",
    "data.columns": "maps weft's columns to the columns of your rows",
    "data.long_documents": "error, truncate or drop: how to handle documents longer than data.max_length",
    "data.train_on": "answers, last or all: the trained tokens",
    "mesh.tp": "ranks that split each layer (tensor parallelism)",
    "mesh.cp": "ranks that share documents longer than step.max_tokens_per_device (context parallelism)",
    "mesh.dp_shard": "ranks over which parameters are sharded (FSDP2); without this line: all",
    "model.recompute": "less memory, about a third more compute",
    "rl.reward": "built-in: math, exact_match, regex, format, length; your function: my_rewards:is_right",
    "reward.loss": "bradley_terry (pairs), regression, classification, or process (a label per step)",
    "rl.algorithm": "grpo, dr_grpo, dapo, rloo, reinforce++, gspo, cispo or ppo, with the values of its paper",
    "rl.chat": "render prompts that are texts with the chat template; false: the policy continues the text",
    "rollout.engine": "embedded, hf, vllm or sglang",
    "eval.share": "share of the documents that is held out and evaluated",
    "lora.rank": "adapters instead of all weights; optimizer.lr is then 1e-4 (weft rl, dpo: 1e-5) unless it is set",
    "schedule.name": "constant, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt or wsd, after warm-up",
    "step.max_tokens_per_device": "tokens of one forward on one rank; lower it if memory runs out",
    "run.dir": "the run folder; without this line: runs/NAME-DATE",
}
# Command -> key -> the comment in its first config, if the comment for all commands does not apply.
_PAIR_COMMENTS = {
    "data.path": "rows of prompt, chosen and rejected, or of prompt, completion and label: JSONL, a hub dataset",
    "step.documents": "Pairs, or answers with a label, in an optimizer step, over all ranks",
    "eval.share": "share of the pairs or answers that is held out and evaluated",
}
_COMMENTS_OF = {"dpo": _PAIR_COMMENTS, "reward": _PAIR_COMMENTS}


def starter(command: str, chosen: Mapping[str, Any]) -> str:
    """A first config for a command, as YAML with a comment for each key. chosen: dotted key -> value, which replaces
    the value in this file or adds the key."""
    keys = schema_keys(SCHEMAS[command])
    active = {name: _FIRST[command].get(name, keys[name].default) for name in _SET[command].split()}
    if command == "rl" and "rl.reward" not in chosen:
        active["rl.reward"] = _FIRST["rl"]["rl.reward"]
    active |= {name: value for name, value in chosen.items() if name in keys}
    shown = {name: _EXAMPLES[name] for name in _SHOWN[command].split() if name not in active}
    comments = _COMMENTS | _COMMENTS_OF.get(command, {})
    lines = [
        f"# A config of `weft {command}`. Check it: weft {command} THIS --dry-run; run it: weft {command} THIS",
        "# Every key has a default. Lines behind a # are examples. `weft keys WORD` describes keys in full.",
    ]
    for section in sections(SCHEMAS[command]):
        set_here = {name: value for name, value in active.items() if name.startswith(f"{section}.")}
        examples_here = {name: value for name, value in shown.items() if name.startswith(f"{section}.")}
        if not set_here and not examples_here:
            continue
        lines += ["", f"{section}:" if set_here else f"# {section}:"]
        lines += [_line(keys[name], value, "  ", comments) for name, value in set_here.items()]
        indent = "  # " if set_here else "#   "
        lines += [_line(keys[name], value, indent, comments) for name, value in examples_here.items()]
    return "\n".join(lines) + "\n"


def _line(key: Key, value: Any, indent: str, comments: Mapping[str, str]) -> str:
    """A line of YAML such as `  lr: 1e-05  # peak learning rate`."""
    text = f"{indent}{key.leaf}: {written(list(value) if isinstance(value, tuple) else value)}"
    return f"{text:<44}  # {comments.get(key.name) or _beginning(key.help)}"


def _beginning(text: str) -> str:
    """A help text up to the first full stop outside of brackets."""
    stop = re.match(r"(?:\([^)]*\)|[^(.;:]|[.;:](?! |$))+", text)
    return text if stop is None else stop[0]


if __name__ == "__main__":
    print(reference(), end="")
