"""The command line of each command. Its parser is made from the command's class in weft/launch/options.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from weft.config import SftConfig
from weft.config.keys import schema_keys
from weft.config.migrate.names import advice_for
from weft.config.unknown import Unknown, foreign_config
from weft.errors import UserError

Options = TypeVar("Options")

_ADAPTERS = "adapters are keys of the config: weft sft ... lora.rank=16"
_WORDS = (
    ("train finetune fine-tune fine_tune tune fit run", "`weft sft` fine-tunes, and `weft rl` trains on rewards"),
    ("pretrain pt cpt", "use `weft sft` with rows of `text`; model.init=random starts from random weights"),
    *(
        (name, f"it is a loss of `weft dpo`: weft dpo ... preference.loss={name}")
        for name in ("orpo", "kto", "ipo", "simpo", "cpo")
    ),
    ("preference preferences preference_tuning rpo", "`weft dpo` trains on preferences"),
    ("rm reward-model reward_model reward_modeling", "`weft reward` trains a reward model"),
    *(
        (name, f"it is an algorithm of `weft rl`: weft rl ... rl.algorithm={name}")
        for name in ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo", "ppo")
    ),
    ("reinforce rlhf rlvr online", "`weft rl` trains on rewards (rl.algorithm: docs/reference/algorithms.md)"),
    ("lora peft adapter dora", _ADAPTERS),
    ("qlora", f"{_ADAPTERS} lora.base=nf4"),
    (
        "serve server deploy api",
        "`vllm serve` loads a checkpoint, which is a HuggingFace directory (docs/how-to/serve-with-vllm.md); "
        "`weft chat` talks to it",
    ),
    (
        "gguf ollama llama.cpp llama-cpp llama_cpp quantize quantise",
        "llama.cpp's convert_hf_to_gguf.py converts RUN/checkpoints/latest (docs/how-to/serve-with-vllm.md)",
    ),
    ("vllm-serve vllm", "`weft rl` starts its engines: run weft engine install vllm, then set rollout.engine=vllm"),
    (
        "generate infer inference predict ask sample",
        "`weft chat RUN|MODEL` answers each line of standard input, and `weft eval RUN|MODEL DATA` measures answers",
    ),
    ("evaluate test validate benchmark lm_eval lm-eval score", "`weft eval RUN|MODEL DATA` measures a model"),
    (
        "merge_adapter merge-adapter merge_lora merge-lora fuse",
        "`weft merge RUN|ADAPTER` merges an adapter into its base model",
    ),
    (
        "convert save to_hf consolidate merge-weights merge_fsdp_weights",
        "a checkpoint is a HuggingFace directory already; `weft export` writes another dtype, or DCP",
    ),
    ("upload publish hub", "`weft push RUN OWNER/NAME` uploads a checkpoint to the hub"),
    (
        "launch torchrun accelerate deepspeed ray",
        "weft starts its own ranks: weft sft ... --nproc N; on several machines torchrun ... -m weft sft ...",
    ),
    ("config new create template example", "`weft init` writes a config with comments, `weft keys WORD` finds keys"),
    ("preprocess prepare tokenize tokenise inspect preview", "`weft data preview` shows the trained text"),
    ("estimate memory estimate-memory", "`weft plan` gives memory and time, `weft sft ... --dry-run` the sharding"),
    ("resume continue", "use the option: weft sft --resume RUN, or weft rl --resume RUN"),
    ("version env info", "weft --version prints the version"),
    ("logs plot dashboard tensorboard wandb", "`weft report RUN` draws curves; 'track.report_to=[wandb]' sends them"),
    ("bench", "docs/benchmarks has the command of each measurement"),
)
# Commands that users of other tools may try -> advice.
OTHER_COMMANDS = {word: answer for words, answer in _WORDS for word in words.split()}


class _Parser(argparse.ArgumentParser):
    """The parser of a command. Errors are UserErrors, with a hint where an override was written as an option."""

    def __init__(self, name: str, summary: str, usage: str | None) -> None:
        super().__init__(prog=f"weft {name}", usage=usage, description=summary, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        foreign = _foreign_options(message)
        if foreign:
            raise UserError(f"{self.prog}: keys are set without dashes, as section.key=value.\n" + "\n".join(foreign))
        hint = ""
        dashed = next((word for word in message.split() if word.startswith("--") and "." in word), None)
        if dashed is not None:
            key = dashed.lstrip("-")
            hint = f" Keys of the config are set without dashes: {key if '=' in key else key + '=VALUE'}."
        elif "--config" in message:
            hint = " Config files are named without an option, as in weft sft sft.yaml."
        raise UserError(f"{self.prog}: {message}.{hint} See {self.prog} --help.")


def _foreign_options(message: str) -> list[str]:
    """Lines of advice for other trainers' options in an error of argparse, and where to read on."""
    if not message.startswith("unrecognized arguments"):
        return []
    options = [word.lstrip("-").partition("=")[0] for word in message.split() if word.startswith("--")]
    # --device is an option of other commands of weft, such as weft sft
    advice = {name: advice_for(name) for name in options if name not in {*schema_keys(SftConfig), "device"}}
    matches = [
        Unknown(name, "command line", f"is not an option of weft: {text}", foreign=True)
        for name, text in advice.items()
        if text
    ]
    lines, first, last = foreign_config(matches, {key.name: True for key in matches}, SftConfig)
    return [line for line in (first, *lines, last) if line]


def parse(options: type[Options], words: Sequence[str], name: str, summary: str, usage: str | None = None) -> Options:
    """The options of the command `name` from the words after it. Raises UserError; --help prints the help and exits."""
    parser, groups = _Parser(name, summary, usage), dict[str, Any]()
    kinds, specs = get_type_hints(options), fields(cast(Any, options))
    for spec in specs:
        if "argument" in spec.metadata:
            parser.add_argument(spec.name, **spec.metadata["argument"])
        elif "option" in spec.metadata:
            kind, group, exclusive = kinds[spec.name], spec.metadata["group"], spec.metadata["exclusive"]
            literal = next((part for part in (kind, *get_args(kind)) if get_origin(part) is Literal), None)
            more: dict[str, Any] = {"default": spec.default}
            if kind is bool:
                more["action"] = "store_true"
            elif literal is not None:
                more["choices"] = get_args(literal)
            elif spec.default == ():
                more = {"action": "append", "default": []}
            if exclusive and exclusive not in groups:
                groups[exclusive] = parser.add_mutually_exclusive_group()
            if group and group not in groups:
                groups[group] = parser.add_argument_group(group)
            flag = f"--{spec.metadata['name'] or spec.name.replace('_', '-')}"
            container = groups.get(exclusive or group, parser)
            container.add_argument(flag, dest=spec.name, **spec.metadata["option"], **more)
    values = vars(parser.parse_intermixed_args(words))
    parsed = options(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    for spec in specs:
        needed = spec.metadata.get("needs")
        if needed and getattr(parsed, spec.name) and not getattr(parsed, needed):
            raise UserError(f"--{spec.name} needs --{needed.replace('_', '-')}: add it.")
    return parsed
