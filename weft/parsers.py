"""The parsers of the command line, one for each command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from weft.config import SftConfig
from weft.config.compat.names import advice_for
from weft.config.keys import schema_keys
from weft.config.sources import HUB_NAME, is_hub_name
from weft.config.unknown import Unknown, foreign_config
from weft.errors import UserError

SUMMARIES = {
    "sft": "Supervised fine-tuning.",
    "rl": "Reinforcement learning from rewards.",
    "chat": "Talk to a run's last checkpoint, or to any model.",
    "rollouts": "What was sampled in a run of weft rl, and how it was rewarded.",
    "eval": "Loss and accuracy of a model on held-out data, or pass@k by rewards.",
    "report": "One HTML page about a run, or several compared.",
    "data": "Look at the data before training: weft data preview.",
    "export": "Write a checkpoint's weights in another dtype.",
    "push": "Upload a checkpoint to the HuggingFace hub, with a model card.",
    "merge": "Write a base model with an adapter merged into it.",
    "plan": "Memory and time of a run on a mesh of any size, without an accelerator.",
    "verify": "Show that the configured mesh computes what one plain process does.",
    "init": "A first config, with comments.",
    "keys": "Keys of the config, by name, meaning, or another trainer's name.",
    "engine": "Environments of rollout engines: weft engine install vllm.",
    "migrate": "A config of another trainer as a draft of weft's.",
}


_ADAPTERS = "adapters are keys of a config: weft sft ... lora.rank=16"
_ELSEWHERE = (
    ("train finetune fine-tune fine_tune tune fit run", "`weft sft` fine-tunes, and `weft rl` learns from rewards"),
    ("pretrain pt cpt", "`weft sft` does it with rows of `text`; model.init=random begins without weights"),
    (
        "dpo orpo kto ipo simpo cpo",
        "preference tuning is not in this version. `weft sft` with "
        "'data.columns={instruction: prompt, output: chosen}' trains the chosen answers alone",
    ),
    (
        "reward rm reward-model reward_model reward_modeling",
        "reward models are not trained in this version. Rewards are functions: docs/how-to/write-a-reward.md",
    ),
    *(
        (name, f"it is an algorithm of `weft rl`: weft rl ... rl.algorithm={name}")
        for name in ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo", "ppo")
    ),
    ("reinforce rlhf rlvr online", "`weft rl` learns from rewards (rl.algorithm: docs/reference/algorithms.md)"),
    ("lora peft adapter dora", _ADAPTERS),
    ("qlora", f"quantised bases are not in this version; {_ADAPTERS}"),
    (
        "serve server deploy api",
        "a checkpoint is a HuggingFace directory, which `vllm serve` takes (docs/how-to/serve-with-vllm.md); "
        "`weft chat` talks to it",
    ),
    (
        "gguf ollama llama.cpp llama-cpp llama_cpp quantize quantise",
        "llama.cpp's convert_hf_to_gguf.py takes RUN/checkpoints/latest as it is (docs/how-to/serve-with-vllm.md)",
    ),
    ("vllm-serve vllm", "`weft rl` starts its engines: rollout.engine=vllm, after weft engine install vllm"),
    (
        "generate infer inference predict ask sample",
        "`weft chat RUN|MODEL` answers each line of standard input, and `weft eval RUN|MODEL DATA` measures answers",
    ),
    ("evaluate test validate benchmark lm_eval lm-eval score", "`weft eval RUN|MODEL DATA` measures a model"),
    ("merge_adapter merge-adapter merge_lora merge-lora fuse", "`weft merge RUN|ADAPTER` writes one model of both"),
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
    ("preprocess prepare tokenize tokenise inspect preview", "`weft data preview` shows what would be trained"),
    ("estimate memory estimate-memory", "`weft plan` gives memory and time, `weft sft ... --dry-run` the sharding"),
    ("resume continue", "it is an option: weft sft --resume RUN, or weft rl --resume RUN"),
    ("version env info", "weft --version prints the version"),
    ("logs plot dashboard tensorboard wandb", "`weft report RUN` draws curves; 'track.to=[wandb]' sends them"),
    ("bench", "it is not in this version; docs/benchmarks says how each measurement is made"),
)
# What users of other tools try as a command -> what to do here.
ELSEWHERE = {word: answer for words, answer in _ELSEWHERE for word in words.split()}


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
    found = [
        Unknown(name, "command line", f"is not an option of weft: {text}", foreign=True)
        for name, text in advice.items()
        if text
    ]
    lines, first, last = foreign_config(found, {key.name: True for key in found}, SftConfig)
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
        "config", nargs="*", metavar="CONFIG | section.key=value", help="YAML files, merged left to right; overrides"
    )
    parser.add_argument(
        "--nproc",
        type=_count,
        metavar="N",
        help="ranks to start here (default: those of --resume RUN, else one per accelerator, or 1)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    return parser


def _training_parser(name: str) -> argparse.ArgumentParser:
    parser = _config_parser(name)
    parser.add_argument(
        "--resume", metavar="RUN", help="go on from the newest checkpoint of this run folder, with its config"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config and data, print config, mesh, memory and steps; train nothing",
    )
    parser.add_argument("--parameters", action="store_true", help="with --dry-run: one line per parameter")
    parser.add_argument("--assume", metavar="DEVICE", help="with --dry-run: accelerators as h100-80gb instead of yours")
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
        help="after a crash (not a configuration mistake), restart from the last checkpoint, up to N times",
    )  # fmt: skip
    return parser


def rl_parser() -> argparse.ArgumentParser:
    parser = _training_parser("rl")
    parser.add_argument(
        "--rollout-only", action="store_true", help="generate and reward into RUN/rollouts, and train nothing"
    )
    parser.add_argument(
        "--replay", metavar="RUN/rollouts", help="train from these rollouts in their order, in place of new ones"
    )
    return parser


def plan_parser() -> argparse.ArgumentParser:
    usage = "weft plan [CONFIG ...] [section.key=value ...] [options]"
    parser = _Parser("plan", usage)
    parser.add_argument("config", nargs="*", metavar="CONFIG | section.key=value", help="as for weft sft or weft rl")
    parser.add_argument(
        "--ranks", type=_ranks, metavar="N", help="ranks of the run (default: what mesh says); none is started"
    )
    parser.add_argument("--assume", default="h100-80gb", metavar="DEVICE", help="accelerators (default: %(default)s)")
    parser.add_argument(
        "--length", type=_count, metavar="N", help="tokens of every document (default: the lengths of the data)"
    )
    rates = parser.add_argument_group("what is assumed of machines, where it is not what the vendor states")
    rates.add_argument("--machine", type=_count, metavar="N", help="accelerators of a machine (default: 8)")
    rates.add_argument("--link", type=float, metavar="GB/S", help="of an accelerator to others of its machine")
    rates.add_argument("--network", type=float, metavar="GB/S", help="of an accelerator to other machines")
    rates.add_argument(
        "--matmul", type=float, metavar="SHARE", help="fraction of peak FLOP/s that matrix multiplications reach"
    )
    rates.add_argument(
        "--attention", type=float, metavar="SHARE", help="fraction of peak FLOP/s that attention reaches"
    )
    parser.add_argument("--search", action="store_true", help="propose the five best meshes for these ranks")
    parser.add_argument(
        "--simulate", action="store_true", help="run a step of one rank of this mesh, with tensors that hold nothing"
    )
    return parser


def verify_parser() -> argparse.ArgumentParser:
    parser = _config_parser("verify")
    parser.add_argument("--layers", type=int, metavar="N", help="verify a copy of the model cut to N layers")
    parser.add_argument("--plant", metavar="NAME", help="plant a known bug, to see it caught")
    parser.add_argument(
        "--rollouts", metavar="RUN/rollouts", help="of a config of weft rl: updates of these (default: of awkward ones)"
    )
    return parser


def data_parser() -> argparse.ArgumentParser:
    usage = "weft data preview [CONFIG ...] [section.key=value ...] [options]"
    parser = _Parser("data", usage)
    parser.add_argument("config", nargs="*", metavar="CONFIG | section.key=value", help="as for weft sft")
    parser.add_argument(
        "--nproc", type=_count, metavar="N", help="ranks that rows are planned for (default: what mesh says, else 1)"
    )
    parser.add_argument(
        "--samples", type=_number, default=3, metavar="N", help="documents to show (default: %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="show all tokens of these documents")
    parser.add_argument(
        "--sample", action="store_true", help="read a part of large files: faster, and bad rows elsewhere stay unseen"
    )
    return parser


def export_parser() -> argparse.ArgumentParser:
    parser = _Parser("export")
    parser.add_argument(
        "path", metavar="RUN | CHECKPOINT | DCP", help="for a run folder, the newest checkpoint is used"
    )
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), help="default: bf16")
    parser.add_argument("--output", metavar="DIR", help="where to write (default: beside the checkpoint)")
    parser.add_argument(
        "--check", action="store_true", help="write nothing: compare what is there with the digests of what was written"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the average of the weights (optimizer.ema_decay) instead of the weights"
    )
    parser.add_argument(
        "--format", choices=("hf", "dcp"), default="hf",
        help="what is written: a HuggingFace directory (default), or one that torch.distributed.checkpoint reads",
    )  # fmt: skip
    parser.add_argument("--optimizer", action="store_true", help="with --format dcp: the optimizer's state, too")
    parser.add_argument(
        "--model", metavar="MODEL",
        help="of a directory that another trainer saved with torch.distributed.checkpoint: the HuggingFace model whose "
        "config and tokenizer it goes with",
    )  # fmt: skip
    _add_imports(parser)
    return parser


def push_parser() -> argparse.ArgumentParser:
    parser = _Parser("push")
    parser.add_argument("path", metavar="RUN | CHECKPOINT", help="for a run folder, the newest checkpoint is used")
    parser.add_argument("repository", type=_hub_name, metavar="OWNER/NAME", help="created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create it as a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="created if it does not exist (default: main)")
    parser.add_argument("--message", metavar="TEXT", help="commit message (default: Upload step-N)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=_count, metavar="N", help="for a run folder, the checkpoint of this step")
    which.add_argument(
        "--best", action="store_true", help="for a run folder, the best checkpoint (checkpoint.keep_best)"
    )
    return parser


def _add_imports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import", action="append", default=[], dest="imports", metavar="MODULE",
        help="a module that registers an architecture of your own (a run's model.imports are known)",
    )  # fmt: skip


def merge_parser() -> argparse.ArgumentParser:
    parser = _Parser("merge")
    parser.add_argument("path", metavar="RUN | ADAPTER", help="for a run folder, the newest checkpoint is used")
    parser.add_argument("--base", metavar="MODEL", help="instead of the model that the adapter names")
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
        "a script (.sh) that starts a run",
    )  # fmt: skip
    parser.add_argument(
        "--nproc", type=_count, metavar="N", help="GPUs of the old run (default: what the files say, else 1)"
    )
    return parser


def chat_parser() -> argparse.ArgumentParser:
    parser = _Parser("chat")
    parser.add_argument("path", metavar="RUN | MODEL", help="for a run folder, the newest checkpoint is used")
    parser.add_argument("--step", type=_count, metavar="N", help="the checkpoint of this step instead")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--image", action="append", default=[], metavar="PATH",
        help="an image before the first message, for a vision model; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=_count, default=512, metavar="N", help="longest answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, metavar="T",
        help="0: always the likeliest token (default: as generation_config.json says)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    _add_imports(parser)
    return parser


def eval_parser() -> argparse.ArgumentParser:
    parser = _Parser("eval", "weft eval RUN|MODEL DATA [section.key=value ...] [options]")
    parser.add_argument("path", metavar="RUN | MODEL", help="for a run folder, the newest checkpoint is used")
    parser.add_argument(
        "config", nargs="*", metavar="DATA | section.key=value",
        help="held-out rows, as data.path takes them; overrides. With rl.reward answers are generated and rewarded",
    )  # fmt: skip
    parser.add_argument("--step", type=_count, metavar="N", help="for a run folder, the checkpoint of this step")
    parser.add_argument(
        "--nproc", type=_count, metavar="N", help="ranks to start here (default: one per accelerator, or 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="also write the figures there, as JSON")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    return parser


def rollouts_parser() -> argparse.ArgumentParser:
    parser = _Parser("rollouts")
    parser.add_argument("run", metavar="RUN", help="the folder of a run of weft rl")
    parser.add_argument("--step", type=_count, metavar="N", help="rollout step (default: the last)")
    parser.add_argument("--groups", type=_count, default=5, metavar="N", help="prompts to show (default: %(default)s)")
    parser.add_argument(
        "--samples", type=_count, default=3, metavar="N", help="answers to each, the best first (default: %(default)s)"
    )
    parser.add_argument(
        "--order", choices=("drawn", "best", "worst"), default="drawn", help="of the prompts (default: %(default)s)"
    )
    return parser


def report_parser() -> argparse.ArgumentParser:
    parser = _Parser("report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; several are compared")
    parser.add_argument("--output", metavar="FILE", help="where to write (default: RUN/report.html)")
    return parser


def init_parser() -> argparse.ArgumentParser:
    parser = _Parser("init", "weft init [sft | rl] [section.key=value ...] [--output FILE]")
    parser.add_argument(
        "words", nargs="*", metavar="sft | rl | section.key=value", help="the command (default: sft); keys to set"
    )
    parser.add_argument("--output", metavar="FILE", help="where to write (default: standard output)")
    return parser


def keys_parser() -> argparse.ArgumentParser:
    parser = _Parser("keys", "weft keys [WORD ...]")
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="part of a key, of its meaning, or of a name elsewhere"
    )
    return parser


def engine_parser() -> argparse.ArgumentParser:
    usage = "weft engine install vllm [options]"
    parser = _Parser("engine", usage)
    parser.add_argument("what", nargs="+", metavar="install vllm", help="make an environment with vLLM, or mend it")
    parser.add_argument("--python", metavar="DIR", help="where to put it (default: where rollout.python=null looks)")
    parser.add_argument(
        "--torch", default="", metavar="ARGUMENTS", help="for pip when it installs torch, as in '--index-url URL'"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    return parser
