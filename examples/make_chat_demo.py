"""Writes the data of `make demo-sft`: questions and answers, a tokenizer, and the config of a small model.

The answers are first paragraphs of docstrings in Python's standard library, so the script downloads nothing.

    .demo/chat.jsonl   about 600 documents of one question and one answer
    .demo/model        a byte-level BPE tokenizer with a chat template, and the config of a 5.2M-parameter Qwen3

usage: python examples/make_chat_demo.py [OUT]
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

# Importing these modules has no visible side effects.
MODULES = """
abc argparse array ast asyncio base64 bisect bz2 calendar cmath cmd code codecs collections collections.abc colorsys
concurrent.futures configparser contextlib contextvars copy csv dataclasses datetime decimal difflib dis doctest
email.message email.utils enum filecmp fileinput fnmatch fractions ftplib functools gc getpass gettext glob graphlib
gzip hashlib heapq hmac html html.parser http.client http.cookiejar http.cookies http.server imaplib
importlib.metadata importlib.resources inspect io ipaddress itertools json keyword linecache locale logging
logging.handlers lzma mailbox math mimetypes multiprocessing multiprocessing.pool netrc numbers operator optparse os
os.path pathlib pickle pickletools pkgutil platform plistlib poplib pprint profile pstats queue random re reprlib
sched secrets selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat statistics string
struct subprocess sys sysconfig tarfile tempfile textwrap threading time timeit tokenize trace traceback tracemalloc
types typing unittest unittest.mock urllib.parse urllib.request urllib.robotparser uuid venv warnings wave weakref
xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipfile zoneinfo
"""

DOCUMENTS = 600
VOCABULARY = 4096
PAD, TURN, END = "<|pad|>", "<|im_start|>", "<|im_end|>"

# Training covers the text between the generation markers: the answer and the end of the turn.
CHAT_TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def public_objects() -> Iterator[tuple[str, Any]]:
    """Name and object of the public modules, functions, classes and methods of the standard library."""
    for module_name in MODULES.split():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                module = importlib.import_module(module_name)
            except ImportError:  # some builds of Python lack ssl, sqlite3 or lzma
                continue
        yield module_name, module
        for name in sorted(getattr(module, "__all__", None) or vars(module)):
            item = getattr(module, name, None)
            if name.startswith("_") or not (inspect.isroutine(item) or inspect.isclass(item)):
                continue
            yield f"{module_name}.{name}", item
            for attribute in sorted(vars(item)) if inspect.isclass(item) else []:
                if not attribute.startswith("_"):
                    yield f"{module_name}.{name}.{attribute}", getattr(item, attribute, None)


def docstrings() -> dict[str, str]:
    """Object name -> docstring, without duplicate texts."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for name, item in public_objects():
        described = inspect.isroutine(item) or inspect.isclass(item) or inspect.ismodule(item)
        text = inspect.getdoc(item) if described or isinstance(item, property) else None
        if text and text not in seen and name not in found:
            seen.add(text)
            found[name] = text
    return found


def question(name: str) -> str:
    return f"What does {name} do?"


def chat(asked: str, answer: str) -> dict[str, Any]:
    """One line of a chat file."""
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def short_answers(texts: dict[str, str]) -> dict[str, str]:
    """The first paragraph of each docstring on one line, if it has 20 to 200 characters, without duplicates."""
    answers: dict[str, str] = {}
    for name, text in texts.items():
        paragraph = " ".join(text.split("\n\n")[0].split())
        if 20 <= len(paragraph) <= 200:
            answers.setdefault(paragraph, name)
    return {name: paragraph for paragraph, name in answers.items()}


def train_tokenizer(texts: dict[str, str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with exactly `vocabulary` tokens, and a chat template with generation markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, TURN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{question(name)}\n{text}" for name, text in texts.items()), trainer)
    assert tokenizer.get_vocab_size() == vocabulary, tokenizer.get_vocab_size()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE.strip()
    return fast


def small_qwen3(tokenizer: PreTrainedTokenizerFast, positions: int) -> Qwen3Config:
    """5.2 million parameters: 2.1 in the embedding and the head, 3.1 in the layers."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def main() -> None:
    if len(sys.argv) > 2 or (sys.argv[1:] and sys.argv[1].startswith("-")):
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ".demo")
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "run", ignore_errors=True)  # the run of an earlier demo: weft never overwrites a run
    texts = docstrings()
    answers = short_answers(texts)
    names = random.Random(0).sample(sorted(answers), min(DOCUMENTS, len(answers)))
    lines = [json.dumps(chat(question(name), answers[name])) + "\n" for name in names]
    (out / "chat.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(out / "model")
    small_qwen3(tokenizer, positions=1024).save_pretrained(out / "model")
    print(f"{out}/chat.jsonl: {len(lines)} questions and answers from Python's docstrings")
    print(f"{out}/model: a tokenizer of {len(tokenizer)} tokens and the config of a Qwen3 with random weights")


if __name__ == "__main__":
    main()
