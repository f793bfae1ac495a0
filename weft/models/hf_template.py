"""Of transformers' internals (hf.py), those that render chats: without torch, which processes that tokenise never load.

Used, checked on transformers 5.17 to 5.19: utils.chat_template_utils._compile_jinja_template (its environment: sandbox,
filters, globals, activate_tracker; its extension's _generation_support, called around what generation markers enclose)
"""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template

GENERATION_CALL = "_generation_support"


def chat_template(source: str) -> Any:
    """The compiled jinja2.Template of a chat template, in transformers' sandbox with its filters and globals; its
    environment's activate_tracker notes where generation markers lie. Raises jinja2.TemplateSyntaxError."""
    return _compile_jinja_template(source)
