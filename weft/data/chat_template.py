"""Chat templates: where they come from, and a rendering that says which message each character belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.visitor import NodeTransformer

from weft.errors import UserError
from weft.models import hf

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
NAMED = Path(__file__).parent / "templates"

# What a template raises on messages that it was not written for.
RENDER_ERRORS = (TemplateError, ValueError, TypeError, KeyError, AttributeError, OverflowError)

Span = tuple[int, int]  # first character and the one behind the last


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation.

    regions: message -> the characters that the template wrote while it was at this message, where they are one piece;
    scattered: messages where they are several. marked: what lies between generation markers.
    """

    text: str
    regions: dict[int, Span] = field(default_factory=dict)
    scattered: frozenset[int] = frozenset()
    marked: tuple[Span, ...] = ()

    def of(self, message: int) -> str:
        """The text of a message, "" where it has none."""
        start, end = self.regions.get(message, (0, 0))
        return self.text[start:end]


class Unclear(Exception):
    """What of a rendering is an answer cannot be told; the message says why."""

    def __init__(self, reason: str, rendering: Rendering) -> None:
        super().__init__(reason)
        self.rendering = rendering


class ChatTemplate:
    """A Jinja chat template, with transformers' filters and globals, that notes what it writes for which message.

    Notes are calls at the beginning and end of its loops, put into the parsed template. They write nothing, so the
    text is the template's own. Loops in macros and captured blocks are left out: their text is not yet in its place.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = hf.chat_template(source).environment
        tree = _NotedLoops().visit(environment.parse(source))
        self._template = environment.template_class.from_code(
            environment, environment.compile(tree), environment.make_globals(None)
        )
        self._track: Any = environment.activate_tracker
        self._variables = dict(variables)
        self.source = source
        self.has_markers = bool(GENERATION_TAG.search(source))

    def names(self, word: str) -> bool:
        """Whether the template reads something of this name."""
        return re.search(rf"\b{word}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        tools: Sequence[Any] | None = None,
        ask: bool = False,
    ) -> Rendering:
        """The conversation as text; ask: with what the template writes to ask for an answer. Raises RENDER_ERRORS."""
        notes = _Notes({id(message): i for i, message in enumerate(messages)})
        marked: list[Span] = []
        with self._track(notes.blocks, marked) if self.has_markers else nullcontext():
            stream = self._template.generate(
                {**self._variables, **kwargs},
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=ask,
                weft_loop_begins=notes.loop_begins,
                weft_item_begins=notes.item_begins,
                weft_loop_ends=notes.loop_ends,
            )
            for block in stream:
                notes.blocks.append(block)
                notes.length += len(block)
        return notes.rendering(tuple(marked))


class _Notes:
    """Collects the blocks that a template writes, and cuts them where another message begins."""

    def __init__(self, places: Mapping[int, int]) -> None:
        self.blocks: list[str] = []
        self.length = 0
        self._places = places  # id of a message -> its place
        self._stack: list[int | None] = []  # what each open loop is at; None: no message
        self._pieces: dict[int, list[Span]] = {}
        self._start = 0

    def loop_begins(self) -> None:
        self._cut()
        self._stack.append(None)

    def item_begins(self, item: Any) -> None:
        self._cut()
        self._stack[-1] = self._places.get(id(item))

    def loop_ends(self) -> None:
        self._cut()
        self._stack.pop()

    def _cut(self) -> None:
        start, self._start = self._start, self.length
        if start == self.length:
            return
        message = next((place for place in reversed(self._stack) if place is not None), None)
        if message is not None:
            pieces = self._pieces.setdefault(message, [])
            if pieces and pieces[-1][1] == start:
                start = pieces.pop()[0]
            pieces.append((start, self.length))

    def rendering(self, marked: tuple[Span, ...]) -> Rendering:
        regions = {message: pieces[0] for message, pieces in self._pieces.items() if len(pieces) == 1}
        return Rendering("".join(self.blocks), regions, frozenset(self._pieces) - frozenset(regions), marked)


class _NotedLoops(NodeTransformer):
    """Puts calls of _Notes around the loops of a template and at the beginning of each turn."""

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        if node.recursive or not isinstance(node.target, nodes.Name):
            return node
        item = nodes.Name(node.target.name, "load", lineno=node.lineno)
        node.body.insert(0, _call("weft_item_begins", node.lineno, item))
        return [_call("weft_loop_begins", node.lineno), node, _call("weft_loop_ends", node.lineno)]

    def _leave(self, node: nodes.Node) -> nodes.Node:
        return node

    visit_Macro = visit_CallBlock = visit_FilterBlock = visit_AssignBlock = _leave


def _call(name: str, lineno: int, *arguments: nodes.Expr) -> nodes.Node:
    function = nodes.Name(name, "load", lineno=lineno)
    return nodes.ExprStmt(nodes.Call(function, list(arguments), [], None, None, lineno=lineno), lineno=lineno)


def common_start(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def common_header(text: str, prompt: str, tokens: Sequence[str]) -> str:
    """The longest beginning that text and prompt share, which cuts none of the prompt's tokens in two."""
    n = common_start(text, prompt)
    cut = (
        i
        for token in tokens
        for i in range(max(0, n - len(token) + 1), n)
        if i + len(token) > n and prompt.startswith(token, i)
    )
    return prompt[: min(cut, default=n)]


def read_template(name: str) -> str:
    """The source of data.chat_template: a Jinja file, or one of those that come with weft. Raises UserError."""
    known = sorted(path.stem for path in NAMED.glob("*.jinja"))
    path = NAMED / f"{name}.jinja" if name in known else Path(name)
    try:
        source = path.read_text(encoding="utf-8")
        hf.chat_template(source)
    except FileNotFoundError:
        raise UserError(
            f"data.chat_template: there is no file {name} (looked from {Path.cwd()}), and no template of that name. "
            f"Name a Jinja file, or one of: {', '.join(known)}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: cannot read {name}: {error}.") from None
    except TemplateSyntaxError as error:
        raise UserError(f"data.chat_template: {name}:{error.lineno} is not valid Jinja: {error.message}.") from None
    return source
