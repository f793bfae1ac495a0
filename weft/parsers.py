"""The parsers of the command line, one for each command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from weft.config import SftConfig
from weft.config.keys import schema_keys
from weft.config.migrate.names import advice_for
from weft.config.sources import HUB_NAME, is_hub_name
from weft.config.unknown import Unknown, foreign_config
from weft.errors import UserError

SUMMARIES = {
    "sft": "Fine-tune a model on documents or conversations.",
    "rl": "Train a model on rewards, by reinforcement learning.",
    "chat": "Talk to the last checkpoint of a run, or to any model.",
    "rollouts": "Show the samples of a weft rl run, with their rewards.",
    "eval": "Measure loss and accuracy on held-out data, or pass@k with rewards.",
    "report": "Write an HTML page about a run, or one that compares several.",
    "data": "Show the training data as the model sees it: weft data preview.",
    "export": "Write the weights of a checkpoint in another dtype or format.",
    "push": "Upload a checkpoint to the HuggingFace hub, with a model card.",
    "merge": "Merge an adapter into its base model.",
    "plan": "Estimate memory and time of a run on any mesh, without a GPU.",
    "verify": "Compare the configured mesh with one plain process.",
    "init": "Write a commented config to start from.",
    "keys": "Search the config keys by name, meaning, or another trainer's name.",
    "engine": "Install a rollout engine: weft engine install vllm.",
    "migrate": "Convert another trainer's config to a draft for weft.",
}


_ADAPTERS = "adapters are keys of the config: weft sft ... lora.rank=16"
_WORDS = (
    ("train finetune fine-tune fine_tune tune fit run", "`weft sft` fine-tunes, and `weft rl` trains on rewards"),
    ("pretrain pt cpt", "use `weft sft` with rows of `text`; model.init=random starts from random weights"),
    (
        "dpo orpo kto ipo simpo cpo",
        "preference tuning is not supported yet. `weft sft` with "
        "'data.columns={instruction: prompt, output: chosen}' trains the chosen answers alone",
    ),
    (
        "reward rm reward-model reward_model reward_modeling",
        "reward models cannot be trained yet. Rewards are functions: docs/how-to/write-a-reward.md",
    ),
    *(
        (name, f"it is an algorithm of `weft rl`: weft rl ... rl.algorithm={name}")
        for name in ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo", "ppo")
    ),
    ("reinforce rlhf rlvr online", "`weft rl` trains on rewards (rl.algorithm: docs/reference/algorithms.md)"),
    ("lora peft adapter dora", _ADAPTERS),
    ("qlora", f"quantised bases are not supported yet; {_ADAPTERS}"),
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
# What users of other tools try as a command -> what to do here.
OTHER_COMMANDS = {word: answer for words, answer in _WORDS for word in words.split()}


class _Parser(argparse.ArgumentParser):
    """The parser of a command. Errors are UserErrors, with a hint where an override was written as an option."""

    def __init__(self, name: str, usage: str | None = None) -> None:
        super().__init__(prog=f"weft {name}", usage=usage, description=SUMMARIES[name], allow_abbrev=False)
        self.add_argument(
            "--debug", action="store_true", help="also show tracebacks for configuration and data mistakes"
        )

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
    advice = {name: advice_for(name) for name in options if name not in schema_keys(SftConfig)}
    matches = [
        Unknown(name, "command line", f"is not an option of weft: {text}", foreign=True)
        for name, text in advice.items()
        if text
    ]
    lines, first, last = foreign_config(matches, {key.name: True for key in matches}, SftConfig)
    return [line for line in (first, *lines, last) if line]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def _ranks(text: str) -> int:
    if _count(text) > 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is too many: weft plans for up to 1,000,000 ranks")
    return int(text)


def _hub_name(text: str) -> str:
    if not is_hub_name(text):
        raise argparse.ArgumentTypeError(f"{text} must be {HUB_NAME}")
    return text


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a temperature: 0 or more")
    return value


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a number: 0 or more")
    return int(text)


def _config_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command that reads a config and starts ranks."""
    parser = _Parser(name)
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG | section.key=value",
        help="YAML files, merged left to right, and overrides",
    )
    parser.add_argument(
        "--nproc",
        type=_count,
        metavar="N",
        help="ranks to start on this machine (default: as in --resume RUN, else one per accelerator, or 1)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    return parser


def _training_parser(name: str) -> argparse.ArgumentParser:
    parser = _config_parser(name)
    parser.add_argument("--resume", metavar="RUN", help="continue this run from its newest checkpoint, with its config")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config and data, print config, mesh, memory and steps, and train nothing",
    )
    parser.add_argument("--parameters", action="store_true", help="with --dry-run: print one line per parameter")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print config and model as JSON only")
    parser.add_argument(
        "--assume",
        metavar="DEVICE",
        help="with --dry-run: assume these accelerators, such as h100-80gb, instead of yours",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quiet", action="store_true", help="print only the most important lines at the start")
    amount.add_argument(
        "--verbose", action="store_true", help="print all of RUN/opening.txt at the start: dtypes, units, kernels"
    )
    return parser


def sft_parser() -> argparse.ArgumentParser:
    parser = _training_parser("sft")
    parser.add_argument(
        "--restarts", type=_number, default=0, metavar="N",
        help="after a crash, restart from the last checkpoint, up to N times; not after a configuration mistake",
    )  # fmt: skip
    return parser


def rl_parser() -> argparse.ArgumentParser:
    parser = _training_parser("rl")
    parser.add_argument(
        "--rollout-only", action="store_true", help="generate and reward samples into RUN/rollouts, and train nothing"
    )
    parser.add_argument(
        "--replay", metavar="RUN/rollouts", help="train on these rollouts, in their order, instead of generating"
    )
    return parser


def plan_parser() -> argparse.ArgumentParser:
    usage = "weft plan [CONFIG ...] [section.key=value ...] [options]"
    parser = _Parser("plan", usage)
    parser.add_argument("config", nargs="*", metavar="CONFIG | section.key=value", help="as for weft sft or weft rl")
    parser.add_argument(
        "--ranks",
        type=_ranks,
        metavar="N",
        help="number of ranks (default: the product of mesh); weft starts none of them",
    )
    parser.add_argument("--assume", default="h100-80gb", metavar="DEVICE", help="accelerators (default: %(default)s)")
    parser.add_argument(
        "--length", type=_count, metavar="N", help="tokens of every document (default: the lengths in the data)"
    )
    rates = parser.add_argument_group("assumptions about machines (default: the vendor's data sheet)")
    rates.add_argument("--machine", type=_count, metavar="N", help="accelerators per machine (default: 8)")
    rates.add_argument(
        "--link", type=float, metavar="GB/S", help="bandwidth from one accelerator to others in its machine"
    )
    rates.add_argument("--network", type=float, metavar="GB/S", help="bandwidth from one accelerator to other machines")
    rates.add_argument(
        "--matmul", type=float, metavar="SHARE", help="fraction of peak FLOP/s that matrix multiplications reach"
    )
    rates.add_argument(
        "--attention", type=float, metavar="SHARE", help="fraction of peak FLOP/s that attention reaches"
    )
    parser.add_argument("--search", action="store_true", help="find the five best meshes for these ranks")
    parser.add_argument(
        "--simulate", action="store_true", help="also simulate a step of this mesh, with tensors that have no values"
    )
    return parser


def verify_parser() -> argparse.ArgumentParser:
    parser = _config_parser("verify")
    parser.add_argument("--layers", type=int, metavar="N", help="verify a copy of the model with only N layers")
    parser.add_argument("--plant", metavar="NAME", help="plant a known bug, to see that it is found")
    parser.add_argument(
        "--rollouts",
        metavar="RUN/rollouts",
        help="for a weft rl config: train on these rollouts (default: artificial edge cases)",
    )
    return parser


def data_parser() -> argparse.ArgumentParser:
    usage = "weft data preview [CONFIG ...] [section.key=value ...] [options]"
    parser = _Parser("data", usage)
    parser.add_argument("config", nargs="*", metavar="CONFIG | section.key=value", help="as for weft sft")
    parser.add_argument(
        "--nproc",
        type=_count,
        metavar="N",
        help="number of ranks for planning rows (default: the product of mesh, else 1)",
    )
    parser.add_argument(
        "--samples", type=_number, default=3, metavar="N", help="documents to show (default: %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="show all tokens of these documents")
    parser.add_argument(
        "--sample", action="store_true", help="read only a part of large files: faster, but misses bad rows in the rest"
    )
    return parser


def export_parser() -> argparse.ArgumentParser:
    parser = _Parser("export")
    parser.add_argument("path", metavar="RUN | CHECKPOINT | DCP", help="a run folder means its newest checkpoint")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), help="default: bf16")
    parser.add_argument("--output", metavar="DIR", help="where to write (default: beside the checkpoint)")
    parser.add_argument(
        "--check", action="store_true", help="write nothing: compare existing files with their recorded digests"
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="write the average of the weights (optimizer.ema_decay) instead of the weights",
    )
    parser.add_argument(
        "--format", choices=("hf", "dcp"), default="hf",
        help="a HuggingFace directory (default), or a directory for torch.distributed.checkpoint",
    )  # fmt: skip
    parser.add_argument("--optimizer", action="store_true", help="with --format dcp: also write the optimizer state")
    parser.add_argument(
        "--model", metavar="MODEL",
        help="for another trainer's directory in torch.distributed.checkpoint format: the HuggingFace model with its "
        "config and tokenizer",
    )  # fmt: skip
    _add_imports(parser)
    return parser


def push_parser() -> argparse.ArgumentParser:
    parser = _Parser("push")
    parser.add_argument("path", metavar="RUN | CHECKPOINT", help="a run folder means its newest checkpoint")
    parser.add_argument("repository", type=_hub_name, metavar="OWNER/NAME", help="created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="created if it does not exist (default: main)")
    parser.add_argument("--message", metavar="TEXT", help="commit message (default: Upload step-N)")
    checkpoint_choice = parser.add_mutually_exclusive_group()
    checkpoint_choice.add_argument(
        "--step", type=_count, metavar="N", help="with a run folder: use the checkpoint of this step"
    )
    checkpoint_choice.add_argument(
        "--best", action="store_true", help="with a run folder: use the best checkpoint (checkpoint.keep_best)"
    )
    return parser


def _add_imports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import", action="append", default=[], dest="imports", metavar="MODULE",
        help="a module that registers your own architecture (weft knows model.imports of a run)",
    )  # fmt: skip


def merge_parser() -> argparse.ArgumentParser:
    parser = _Parser("merge")
    parser.add_argument("path", metavar="RUN | ADAPTER", help="a run folder means its newest checkpoint")
    parser.add_argument("--base", metavar="MODEL", help="use this base model instead of the adapter's own")
    parser.add_argument(
        "--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto", help="default: each tensor as in the base"
    )
    parser.add_argument("--output", metavar="DIR", help="where to write (default: beside the adapter)")
    _add_imports(parser)
    return parser


def migrate_parser() -> argparse.ArgumentParser:
    parser = _Parser("migrate")
    parser.add_argument(
        "files", nargs="+", metavar="FILE",
        help="YAML or TOML of TRL, axolotl, LLaMA-Factory, torchtune, accelerate, verl, ROLL, torchtitan or Automodel; "
        "or a launch script (.sh)",
    )  # fmt: skip
    parser.add_argument(
        "--nproc", type=_count, metavar="N", help="GPUs of the old run (default: as in the files, else 1)"
    )
    return parser


def chat_parser() -> argparse.ArgumentParser:
    parser = _Parser("chat")
    parser.add_argument("path", metavar="RUN | MODEL", help="a run folder means its newest checkpoint")
    parser.add_argument("--step", type=_count, metavar="N", help="use the checkpoint of this step")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--image", action="append", default=[], metavar="PATH",
        help="an image before the first message, for a vision model; repeat for more",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens",
        type=_count,
        default=512,
        metavar="N",
        help="maximum length of an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=_temperature, metavar="T",
        help="0: always the likeliest token (default: from generation_config.json)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    _add_imports(parser)
    return parser


def eval_parser() -> argparse.ArgumentParser:
    parser = _Parser("eval", "weft eval RUN|MODEL DATA [section.key=value ...] [options]")
    parser.add_argument("path", metavar="RUN | MODEL", help="a run folder means its newest checkpoint")
    parser.add_argument(
        "config", nargs="*", metavar="DATA | section.key=value",
        help="held-out rows, as in data.path, and overrides; with rl.reward, weft generates answers and rewards them",
    )  # fmt: skip
    parser.add_argument("--step", type=_count, metavar="N", help="with a run folder: use the checkpoint of this step")
    parser.add_argument(
        "--nproc", type=_count, metavar="N", help="ranks to start here (default: one per accelerator, or 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="also write the results to FILE, as JSON")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    return parser


def rollouts_parser() -> argparse.ArgumentParser:
    parser = _Parser("rollouts")
    parser.add_argument("run", metavar="RUN", help="run folder of weft rl")
    parser.add_argument("--step", type=_count, metavar="N", help="rollout step (default: the last)")
    parser.add_argument("--groups", type=_count, default=5, metavar="N", help="prompts to show (default: %(default)s)")
    parser.add_argument(
        "--samples",
        type=_count,
        default=3,
        metavar="N",
        help="answers to each prompt, best first (default: %(default)s)",
    )
    parser.add_argument(
        "--order",
        choices=("drawn", "best", "worst"),
        default="drawn",
        help="order of the prompts (default: %(default)s)",
    )
    return parser


def report_parser() -> argparse.ArgumentParser:
    parser = _Parser("report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; with several, the page compares them")
    parser.add_argument("--output", metavar="FILE", help="where to write (default: RUN/report.html)")
    return parser


def init_parser() -> argparse.ArgumentParser:
    parser = _Parser("init", "weft init [sft | rl] [section.key=value ...] [--output FILE]")
    parser.add_argument(
        "words", nargs="*", metavar="sft | rl | section.key=value", help="the command (default: sft), and keys to set"
    )
    parser.add_argument("--output", metavar="FILE", help="where to write (default: standard output)")
    return parser


def keys_parser() -> argparse.ArgumentParser:
    parser = _Parser("keys", "weft keys [WORD ...]")
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="part of a key, of its meaning, or of another trainer's name"
    )
    return parser


def engine_parser() -> argparse.ArgumentParser:
    usage = "weft engine install vllm [options]"
    parser = _Parser("engine", usage)
    parser.add_argument("what", nargs="+", metavar="install vllm", help="create or repair an environment with vLLM")
    parser.add_argument(
        "--python", metavar="DIR", help="folder of the environment (default: the folder that rollout.python=null uses)"
    )
    parser.add_argument(
        "--torch", default="", metavar="ARGUMENTS", help="pip arguments for installing torch, such as '--index-url URL'"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    return parser
