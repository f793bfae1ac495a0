"""Of transformers' internals (hf.py), those that render chats: without torch, which processes that tokenise never load.

Used, checked on transformers 5.17 to 5.19: utils.chat_template_utils._compile_jinja_template (its environment: sandbox,
filters, globals, activate_tracker; its extension's _generation_support, called around what generation markers enclose)
"""

from __future__ import annotations

import itertools
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template

GENERATION_CALL = "_generation_support"


_numbers = itertools.count()


def environment() -> Any:
    """The jinja2 environment of chat templates, a new one: transformers' sandbox with its filters and globals, and its
    activate_tracker, which notes where generation markers lie. No template is compiled by it yet."""
    return _compile_jinja_template(f"{{# {next(_numbers)} #}}").environment  # transformers keeps one for each text
