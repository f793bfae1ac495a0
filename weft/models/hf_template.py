"""transformers' internals (see hf.py) that render chats. Imports no torch, because tokenising processes never load it.

Used, checked on transformers 5.17 to 5.19: utils.chat_template_utils._compile_jinja_template (its environment: sandbox,
filters, globals, activate_tracker; its extension's _generation_support, called around text between generation markers)
"""

from __future__ import annotations

import itertools
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template

GENERATION_CALL = "_generation_support"


_numbers = itertools.count()


def environment() -> Any:
    """A new jinja2 environment for chat templates: transformers' sandbox with its filters, its globals, and its
    activate_tracker, which records where generation markers are."""
    return _compile_jinja_template(f"{{# {next(_numbers)} #}}").environment  # transformers caches it by text
