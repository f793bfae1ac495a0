"""The model card of a checkpoint: README.md with front matter for the hub, from the files of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, try_to_load_from_cache

from weft.checkpoint.retention import STATE_FILE, TRAINER_STATE
from weft.config.sources import looks_like_hub_dataset
from weft.config.yaml12 import read_sections
from weft.errors import UserError
from weft.files import read_object, regular_file
from weft.parallel.shards.adapter_files import CONFIG as ADAPTER
from weft.version import __version__

CARD = "README.md"
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # files of a model that reads images
_SECONDS = 5.0
_MOST_OF_CARD = 1 << 20  # characters read of a base model's card
# The metrics on a card, in addition to all of eval/ and reward/.
_SHOWN = ("loss", "reward", "lr", "tokens", "kl")


@dataclass(frozen=True)
class Origin:
    """How a checkpoint was trained. config: section -> key -> value. step: its optimizer step; steps: number of steps
    of the run; 0 if unknown. versions: of libraries. metrics: the last line of metrics.jsonl up to the step."""

    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    step: int = 0
    steps: int = 0
    versions: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_checkpoint(checkpoint: Path) -> Origin:
        """Reads the origin from the trainer state, or else from the run folder that contains the checkpoint."""
        run, state = checkpoint.parent.parent, checkpoint / TRAINER_STATE / STATE_FILE
        content: Mapping[str, Any] = {}
        if state.is_file():
            content = read_object(state, "the state of a trainer")
        config = content.get("config")
        if not config:
            with suppress(UserError):
                config = read_sections(str(run / "config.yaml"))
        named = re.match(r"step-(\d+)", checkpoint.name)
        step = content.get("step") or (int(named[1]) if named else 0)
        return Origin(
            config if isinstance(config, dict) else {}, step, content.get("steps") or 0, content.get("versions") or {},
            _last_line(run / "metrics.jsonl", step),
        )  # fmt: skip

    def get(self, section: str, key: str, default: Any = None) -> Any:
        """The value of a key of the run's config."""
        values = self.config.get(section)
        return values.get(key, default) if isinstance(values, Mapping) else default

    @property
    def data(self) -> list[str]:
        """The paths of the training data."""
        sources = self.get("data", "sources") or []
        return [path for path in (self.get("data", "path"), *(source.get("path") for source in sources)) if path]


def model_card(checkpoint: Path, name: str) -> str:
    """The text of README.md. name: the repository, OWNER/NAME."""
    origin = Origin.from_checkpoint(checkpoint)
    base, adapter = _base_model(checkpoint, origin), (checkpoint / ADAPTER).is_file()
    vision = any((checkpoint / file).is_file() for file in _PROCESSORS)
    front = {key: value for key, value in _front_matter(origin, base, adapter, vision).items() if value}
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(),
            "---",
            "",
            f"# {name.partition('/')[2]}",
            "",
            _summary(origin, base, adapter),
            *_results(origin),
            *_usage(name, base, adapter, vision),
            *_configuration(origin),
            "",
        ]
    )


def _front_matter(origin: Origin, base: str | None, adapter: bool, vision: bool) -> dict[str, Any]:
    on_hub = base is not None and _is_hub_model(base)
    return {
        "base_model": base if on_hub else None,
        "base_model_relation": ("adapter" if adapter else "finetune") if on_hub else None,
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if vision else "text-generation",
        "license": None if base is None else _license_of(base),
        "datasets": [path for path in dict.fromkeys(origin.data) if looks_like_hub_dataset(path)],
        "tags": ["weft", *([_method(origin)[0]] if origin.config else []), *(["lora"] if adapter else [])],
    }


def _method(origin: Origin) -> tuple[str, str]:
    """(tag, description) of the training method."""
    if "rl" not in origin.config:
        return "sft", "supervised fine-tuning"
    algorithm = str(origin.get("rl", "algorithm", "grpo"))
    return algorithm, f"reinforcement learning ({algorithm})"


def _summary(origin: Origin, base: str | None, adapter: bool) -> str:
    if not origin.config:
        return f"Written by weft {__version__}."
    subject = f"A LoRA adapter of `{base}`" if adapter else f"`{base}`"
    prefix = "random weights of the architecture of " if origin.get("model", "init") == "random" else ""
    data = ", ".join(f"`{path}`" for path in origin.data) or "unnamed data"
    total = f" of {origin.steps}" if origin.steps else ""
    version = origin.versions.get("weft") or __version__
    return (
        f"{prefix}{subject}, trained by {_method(origin)[1]} on {data}, with weft {version}. These are the weights "
        f"after optimizer step {origin.step}{total}."
    ).strip()


def _results(origin: Origin) -> Iterator[str]:
    shown = {
        name: value
        for name, value in origin.metrics.items()
        if isinstance(value, int | float)
        and (name in _SHOWN or name.startswith(("eval/", "reward/")))
        and name != "eval/seconds"
    }
    if shown:
        yield from ("", "## Results", "", f"At step {origin.metrics['step']}:", "", "| metric | value |", "|---|---|")
        for name, value in shown.items():
            yield f"| {name} | {value:,} |" if isinstance(value, int) else f"| {name} | {value:.4g} |"


def _usage(name: str, base: str | None, adapter: bool, vision: bool) -> Iterator[str]:
    model, reads = ("ImageTextToText", "AutoProcessor") if vision else ("CausalLM", "AutoTokenizer")
    variable = "processor" if vision else "tokenizer"
    yield from ("", "## Use", "", "```python")
    if adapter and vision:  # peft has no AutoPeftModel for these
        yield "from peft import PeftModel"
    elif adapter:
        yield "from peft import AutoPeftModelForCausalLM"
    if vision or not adapter:
        yield f"from transformers import AutoModelFor{model}, {reads}"
    else:
        yield f"from transformers import {reads}"
    yield ""
    if adapter and vision:
        yield f'model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained("{base}"), "{name}")'
    else:
        yield f'model = Auto{"Peft" if adapter else ""}ModelFor{model}.from_pretrained("{name}")'
    yield f'{variable} = {reads}.from_pretrained("{name}")'
    yield "```"


def _configuration(origin: Origin) -> Iterator[str]:
    if origin.config:
        plain = json.loads(json.dumps(origin.config, default=str))
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip()
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
        yield from ("", "## Configuration", "", f"{fence}yaml", text, fence)
    if origin.versions:
        versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items() if version)
        yield from ("", f"Trained with {versions}.")


def _base_model(checkpoint: Path, origin: Origin) -> str | None:
    if (checkpoint / ADAPTER).is_file():
        base = read_object(checkpoint / ADAPTER, "the config of an adapter").get("base_model_name_or_path")
        if isinstance(base, str) and base:
            return base
    path = origin.get("model", "path")
    return path if isinstance(path, str) else None


def _is_hub_model(path: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None and not Path(path).exists()


def _license_of(base: str) -> str | None:
    """The license in the base model's card, which is read from a local copy or the hub. None if it cannot be read."""
    cached = Path(base) / CARD if Path(base).is_dir() else None
    if cached is None:
        with suppress(Exception):  # the path may not be a valid model name
            cached_file = try_to_load_from_cache(base, CARD)
            cached = Path(cached_file) if isinstance(cached_file, str) else None
    if cached is not None:
        return _license_in(cached)
    if not _is_hub_model(base):
        return None
    with suppress(Exception):  # a card without license is fine, so no error of the hub matters
        data = HfApi(library_name="weft").model_info(base, timeout=_SECONDS).card_data
        license_name = None if data is None else data.get("license")
        return license_name if isinstance(license_name, str) else None
    return None


def _license_in(card: Path) -> str | None:
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        with regular_file(card, "a model card").open(encoding="utf-8") as file:
            match = re.match(r"---\s*\n(.*?)\n---", file.read(_MOST_OF_CARD), re.DOTALL)
        front = yaml.safe_load(match[1]) if match else None
        license_name = front.get("license") if isinstance(front, dict) else None
        return license_name if isinstance(license_name, str) else None
    return None


def _last_line(path: Path, step: int) -> dict[str, Any]:
    """The last line of metrics.jsonl up to `step`, plus the eval/ metrics of the last evaluation up to `step`."""
    metrics: dict[str, Any] = {}
    with suppress(OSError, UnicodeDecodeError):
        for text in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if line["step"] <= step:
                    metrics = {name: v for name, v in metrics.items() if name.startswith("eval/")} | line
    return metrics
