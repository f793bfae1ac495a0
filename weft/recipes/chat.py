"""`weft chat`: a conversation with a checkpoint of a run, or with any model, through transformers' generate()."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerBase, TextStreamer

from weft.checkpoint.retention import chosen_step, complete_steps
from weft.config.load import imports_of_run
from weft.data.chat_template import RenderError
from weft.data.encode import Encoder, Encoding, load_tokenizer, renderer
from weft.data.ends import template_ends
from weft.data.messages import Message
from weft.data.prompts import up_to_the_answer
from weft.data.template_bounds import RenderLimitError
from weft.errors import UserError, first_line, how_to_install, runs_own_code
from weft.files import read_object
from weft.launch.options import ChatOptions
from weft.launch.process import choose_device
from weft.launch.status import failure_kind
from weft.models import hf
from weft.parallel.shards.adapter_files import CONFIG as ADAPTER
from weft.recipes.chat_images import ChatImage, ChatImages, sees_images
from weft.terminal import say

_HELP = "/new starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer, /help prints this help."
_ENDINGS = ("/exit", "/quit", "/bye", "/q")
_FOR_STREAMS = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
_HELP_IMAGES = "/image PATH adds an image to your next message; a message may have several images."


def run(options: ChatOptions) -> None:
    """Starts a conversation on a terminal. Without a terminal, answers each line of standard input independently."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    chat = open_chat(options)
    if sys.stdin.isatty():
        _talk(chat)
        return
    for line in sys.stdin:
        if line.strip():
            chat.begin()
            chat.say(line.rstrip("\n"))


def find_model(path: str, step: int | None) -> str:
    """The path or hub id for transformers to load: a checkpoint of a run folder (the newest, or that of `step`), or
    `path` itself. Raises UserError if there is no such model."""
    folder = Path(path)
    steps = complete_steps(folder / "checkpoints")
    if steps:
        return str(chosen_step(folder / "checkpoints", path, steps[-1] if step is None else step))
    if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():
        raise UserError(f"{path} has no complete checkpoint yet: wait for the first, or lower checkpoint.every.")
    if step is not None:
        raise UserError(
            f"--step {step} selects a checkpoint of a run folder, but {path} is not a run folder: remove --step."
        )
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", ADAPTER)):
            raise UserError(f"{path} contains no config.json: write a run folder, a model directory, or a hub id.")
        return path
    # "runs/x" cannot be a hub id if there is a folder "runs".
    parent_exists = folder.parent != Path() and folder.parent.is_dir()
    if folder.exists() or parent_exists or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise UserError(f"{path} is not a folder: write a run folder, a model directory, or a hub id.")
    return path


def open_chat(options: ChatOptions) -> Chat:
    """Loads the model, its tokenizer and its processor. Raises UserError if a model or an image cannot be loaded."""
    hf.import_architectures([*imports_of_run(options.path), *options.imports], options.path, "--import")
    path = find_model(options.path, options.step)
    device = choose_device(options.device, 0)
    tokenizer = load_tokenizer(path)
    base, adapter = path, Path(path) / ADAPTER
    if adapter.is_file():
        named = read_object(adapter, "the config of an adapter").get("base_model_name_or_path")
        base = named if isinstance(named, str) and named else path
    config, task = hf.read_config(base), ""
    if adapter.is_file():
        task = str(read_object(adapter, "the config of an adapter").get("task_type"))
    if hf.classifies(config) or "_CLS" in task:
        raise UserError(f"{path} returns scores, not text: `weft eval {options.path} DATA` measures its scores.")
    vision = sees_images(config)
    images = ChatImages.for_model(base, path, tokenizer) if vision else ChatImages(path, None)
    if options.system is not None:
        if tokenizer.chat_template is None:
            raise UserError(f"--system: the tokenizer of {path} has no chat template: remove --system.")
        images.refuse_marks("--system", options.system)
    # Before the weights are loaded, which takes long, so that an error of an image is reported at once.
    first = tuple(images.take("--image", image_path) for image_path in options.images)
    model = _load(path, base, vision, torch.float32 if device.type == "cpu" else "auto")
    settings = _settings(options)
    chat = Chat(model.to(device).eval(), tokenizer, path, options.system, settings, images, first)
    chat.begin()
    return chat


def _load(path: str, base: str, vision: bool, dtype: Any) -> Any:
    """Loads the model, with peft if the directory is an adapter. vision: whether the model accepts images."""
    try:
        if not (Path(path) / ADAPTER).is_file():
            kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
            return kind.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        try:
            peft = import_module("peft")
        except ImportError as error:
            raise UserError(f"{path} is an adapter, which needs peft: {how_to_install('peft', 'lora')}.") from error
        if not vision:
            return peft.AutoPeftModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        model = AutoModelForImageTextToText.from_pretrained(base, dtype=dtype, trust_remote_code=False)
        return peft.PeftModel.from_pretrained(model, path)
    except UserError:
        raise
    except Exception as error:  # transformers raises errors of any type for damaged files
        if refusal := runs_own_code(path, error, "weft chat"):
            raise refusal from error
        raise UserError(f"{path} cannot be loaded: {first_line(error)}.") from error


def _settings(options: ChatOptions) -> dict[str, Any]:
    """The arguments of generate(). Without --temperature, the model's generation_config determines the sampling."""
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if options.temperature == 0:
        return settings | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if options.temperature is not None:
        return settings | {"do_sample": True, "temperature": options.temperature}
    return settings


@dataclass
class Chat:
    """A conversation. path: the loaded path. settings: arguments of generate. first: the images at the start of every
    conversation. seen: the images of all messages, in order. waiting: the images of the next message."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    path: str
    system: str | None
    settings: dict[str, Any]
    images: ChatImages
    first: tuple[ChatImage, ...] = ()
    messages: list[Message] = field(default_factory=list)
    shown_images: tuple[ChatImage, ...] = ()
    waiting: tuple[ChatImage, ...] = ()

    def begin(self) -> None:
        """Starts a new conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.shown_images, self.waiting = (), self.first

    def show(self, path: str) -> ChatImage:
        """Adds an image file to the next message, and returns it. Raises UserError if the model cannot process it."""
        image = self.images.take("/image", path)
        self.waiting = (*self.waiting, image)
        return image

    def say(self, text: str) -> str:
        """Generates the model's answer, prints it as it streams, and adds it to the conversation. Raises UserError; the
        waiting images then stay for the next message."""
        self.images.refuse_marks("the message", text)
        images, content = (*self.shown_images, *self.waiting), [{"type": "image"}] * len(self.waiting)
        message = [*content, {"type": "text", "text": text}] if content else text
        messages: list[Message] = [*self.messages, {"role": "user", "content": message}]
        answer = self._generate(self._inputs(text, messages, images))
        if self.tokenizer.chat_template is not None:
            self.messages = [*messages, {"role": "assistant", "content": self.images.without_marks(answer)}]
            self.shown_images, self.waiting = images, ()
        return answer

    def _inputs(self, text: str, messages: list[Message], images: Sequence[ChatImage]) -> Mapping[str, Any]:
        """The model's inputs: for the conversation, or for the text alone if the model has no chat template."""
        chats = self.tokenizer.chat_template is not None
        prompt = prompt_text(self.tokenizer, messages) if chats else text
        if images:
            return self.images.inputs(prompt, images, self.model)
        encoder = Encoder(self.tokenizer)
        tokens = encoder.plain([prompt]) if chats else encoder.beginnings([prompt])
        ids = torch.tensor(tokens, dtype=torch.long, device=self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _generate(self, inputs: Mapping[str, Any]) -> str:
        ends = end_tokens(self.tokenizer, self.model.generation_config.eos_token_id)
        streamer = _Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else ends[0] if ends else None
        settings = {"eos_token_id": ends or None, "pad_token_id": pad, "tokenizer": self.tokenizer, **self.settings}
        try:
            with torch.inference_mode():
                tokens = self.model.generate(**inputs, streamer=streamer, **_FOR_STREAMS, **settings)
        except Exception as error:  # transformers raises errors of any type for a bad generation_config.json
            if failure_kind(error) != "failed":
                raise
            refusal = runs_own_code(self.path, error, "weft chat")
            raise refusal or UserError(
                f"{self.path} cannot generate an answer: {first_line(error)}. Check its generation_config.json."
            ) from error
        return str(self.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


class _Streamer(TextStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        say(text, end="\n" if stream_end else "")


def prompt_text(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str:
    """The rendered conversation up to the beginning of the answer, also for templates without a generation prompt."""
    try:
        return up_to_the_answer(renderer(tokenizer, Encoding()), messages)
    except (RenderError, RenderLimitError) as error:
        raise UserError(f"the chat template of this model is invalid: {error}.") from error


def end_tokens(tokenizer: PreTrainedTokenizerBase, configured: int | Sequence[int] | None) -> list[int]:
    """The ids of tokens that end an answer: the configured ones, the tokenizer's, and the template's."""
    ends = [configured] if isinstance(configured, int) else list(configured or ())
    if tokenizer.eos_token_id is not None:
        ends.append(int(tokenizer.eos_token_id))
    ends += template_ends(tokenizer)
    return list(dict.fromkeys(ends))


def _talk(chat: Chat) -> None:
    """Runs the conversation on a terminal until /exit or the end of input."""
    import readline  # noqa: F401  (lets input() edit lines)

    kind = "" if chat.tokenizer.chat_template is not None else "; without a chat template, it continues your text"
    say(f"{chat.path} on {chat.model.device}{kind}\n{_help(chat)}")
    _say_waiting(chat)
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            say()
            return
        if text in _ENDINGS:
            return
        try:
            _turn(chat, text)
        except UserError as error:
            say(f"error: {error}")
        except KeyboardInterrupt:
            say(" (stopped)")


def _turn(chat: Chat, text: str) -> None:
    """Handles one line of input: a command, or a message to answer."""
    command, _, argument = text.partition(" ")
    if text == "/new":
        chat.begin()
        say("(a new conversation)")
        _say_waiting(chat)
    elif text == "/help":
        say(_help(chat))
    elif command == "/image":
        say(f"({chat.show(argument)} is added to your next message)")
    elif re.fullmatch(r"/[a-z?]+", command):  # a path would have more slashes, a capital or a dot
        say(f"{command} is not a command, and weft did not send it to the model. {_help(chat)}")
    elif text:
        chat.say(text)


def _say_waiting(chat: Chat) -> None:
    for image in chat.waiting:
        say(f"({image} is added to your first message)")


def _help(chat: Chat) -> str:
    return f"{_HELP}\n{_HELP_IMAGES}" if chat.images.on else _HELP
