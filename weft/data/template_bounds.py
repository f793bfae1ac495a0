"""Limits on the time and memory of a chat template while it renders. Templates come with models and are not trusted.

jinja's sandbox protects Python's internals, but does not prevent gigabytes of text or endless loops. weft estimates the
result of every operation that can enlarge text or lists before the operation runs, and checks the clock in loops and
calls. Compiling a template evaluates nothing.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import LoopContext, Macro
from jinja2.visitor import NodeTransformer

SECONDS = 2.0  # CPU time of the thread for one rendering
_CHARACTERS = 128 << 20  # characters made during one rendering, in total
_FREE, _TIMES = 1 << 20, 16  # a rendering may have _FREE characters plus _TIMES the characters of its inputs
_VALUES = 1_000_000  # values in a list or mapping, nested ones included
_NUMBER = 1_000_000  # largest width, count or repetition
_BITS = 100_000  # largest integer, in bits
_ITEM = 8  # characters counted for an item of a list, in addition to its text
_WIDE = re.compile(r"\d{7}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")  # large widths in formats, or widths from arguments
_TICKS, _LONG = 200, 1 << 16  # the clock is read after so many ticks, or after a text of more characters
_LARGE_INPUT = 1 << 20  # for filters whose time may grow faster than their input
_SLOW_FILTERS = frozenset(("urlize", "striptags", "wordwrap", "pprint", "xmlattr", "wordcount"))
_BINARY = ("+", "*", "**", "%")


class RenderLimitError(Exception):
    """A rendering exceeds a limit; the message names it."""


class RenderLimits(threading.local):
    """The limits of one template, with separate counters for each thread. source: characters of the template."""

    def __init__(self, source: int = 0) -> None:
        self.source = source
        self._end: float | None = None
        self._characters_left, self._until = _CHARACTERS, _TICKS

    def begin(self) -> None:
        """Start a rendering."""
        self._end, self._characters_left, self._until = None, _CHARACTERS, _TICKS

    def tick(self) -> None:
        """Called at every loop iteration and every call. Reads the clock only sometimes, because reading may be
        slow."""
        self._until -= 1
        if self._until > 0:
            return
        self._until = _TICKS
        now = time.thread_time()
        self._end = now + SECONDS if self._end is None else self._end
        if now > self._end:
            raise RenderLimitError(f"it runs for more than {SECONDS:g} seconds")

    def charge(self, characters: int) -> None:
        """Called before `characters` characters are produced."""
        self._characters_left -= characters
        if characters > _LONG:  # this takes time: the next tick reads the clock
            self._until = 0
        if self._characters_left < 0:
            raise RenderLimitError(f"it makes more than {_CHARACTERS >> 20} MiB of text")

    def check(self, text: str, *inputs: Any) -> None:
        """Called with the complete rendering and its inputs, because tokenising a text needs a hundred times its
        memory."""
        if len(text) <= _FREE:
            return
        weight = self.source + sum(map(self.weigh, inputs))
        if len(text) > _FREE + _TIMES * weight:
            raise RenderLimitError(f"it makes {len(text):,} characters from {weight:,}")

    def weigh(self, value: Any) -> int:
        """The approximate number of characters of a value when it is printed. Raises RenderLimitError for large
        lists."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if not isinstance(value, (list, tuple, dict)):
            return _ITEM
        stack, num_values, weight = [value], 0, 0
        while stack:
            container = stack.pop()
            items = [*container.keys(), *container.values()] if isinstance(container, dict) else container
            num_values += len(items)
            weight += _ITEM * len(items)
            if num_values > _VALUES or weight > _CHARACTERS:
                raise RenderLimitError(f"it makes lists of more than {_VALUES:,} values")
            weight += sum(len(child) for child in items if isinstance(child, str | bytes))
            stack += [child for child in items if isinstance(child, list | tuple | dict)]
        return weight

    # ------------------------------------------------------------ hooks that templates call

    @pass_context
    def finalize(self, _: Any, value: Any) -> Any:
        """Called with every value that is printed."""
        self.charge(len(value) if type(value) is str else self.weigh(value))
        return value

    def turns(self, items: Iterable[Any], text: int) -> Iterator[Any]:
        """Yields the items of a loop. text: characters of literal template text that one iteration may print."""
        for item in items:
            self.tick()
            self.charge(text)
            yield item

    def concat(self, parts: Sequence[Any]) -> str:
        """The operator `~`."""
        self.charge(sum(map(self.weigh, parts)))
        return "".join(map(str, parts))

    def literal(self, value: Any) -> Any:
        """A list, tuple or mapping literal; nested literals grow fast."""
        self.weigh(value)
        return value

    def binary(self, table: Mapping[str, Callable[[Any, Any], Any]], operator: str, a: Any, b: Any) -> Any:
        """The operators `+ * ** %`."""
        for operand, count in ((a, b), (b, a)):
            if operator == "*" and isinstance(operand, str | bytes | list | tuple) and isinstance(count, int):
                self.charge(self.weigh(operand) * max(0, count))
                if isinstance(operand, list | tuple) and len(operand) * count > _VALUES:
                    raise RenderLimitError(f"it makes lists of more than {_VALUES:,} values")
        if operator == "+" and isinstance(a, str | list | tuple):
            self.charge(self.weigh(a) + self.weigh(b))
        elif operator == "%" and isinstance(a, str):
            self._check_format(a, self.weigh(b))
        elif isinstance(a, int) and isinstance(b, int):
            bits = a.bit_length() * abs(b) if operator == "**" else a.bit_length() + b.bit_length()
            if bits > _BITS:
                raise RenderLimitError("it computes with very large numbers")
        return table[operator](a, b)

    def before_call(self, called: Any, arguments: Sequence[Any]) -> None:
        """Called before every call: of macros, recursive loops, functions and methods of values."""
        self.tick()
        if isinstance(called, Macro | LoopContext):
            self.charge(self.source)
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if name in ("strftime_now", "strftime"):
            self._check_format("".join(map(str, arguments[:1])), 0)
        if isinstance(method, BuiltinMethodType) or isinstance(owner, str):
            self._check_method(owner, name, arguments)

    def before_filter(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Called before a filter. value: the filter's input. arguments: its other arguments, positional and by name."""
        self.tick()
        if name in ("length", "count"):
            return
        if any(type(argument) is int and abs(argument) > _NUMBER for argument in arguments) and name not in (
            "default",
            "d",
        ):
            raise RenderLimitError(f"it calls the filter {name} with a number above {_NUMBER:,}")
        size = self.weigh(value)
        self.charge(size)
        texts = [argument for argument in arguments if isinstance(argument, str)]
        if name in _SLOW_FILTERS and (size > _LARGE_INPUT or any(len(text) > 100 for text in texts)):
            raise RenderLimitError(f"it filters {size:,} characters with {name}")
        if name == "sum" and any(isinstance(argument, list | tuple | str) for argument in arguments):
            raise RenderLimitError("it sums lists, which takes quadratic time")
        if isinstance(value, str):
            self._check_growth(name, value, arguments)
        elif name == "join" and isinstance(value, Sequence):
            self.charge(len(value) * max(map(len, texts), default=0))
        elif name == "tojson":
            self.charge(size + size * sum(argument for argument in arguments if type(argument) is int) // _ITEM)

    # ------------------------------------------------------------ estimates

    def _check_method(self, owner: Any, name: str, arguments: Sequence[Any]) -> None:
        if isinstance(owner, bytes) or name in ("encode", "to_bytes", "translate", "maketrans"):
            raise RenderLimitError(f"it calls {name}, which no conversation needs")
        if any(isinstance(argument, int) and abs(argument) > _NUMBER for argument in arguments):
            raise RenderLimitError(f"it calls {name} with a number above {_NUMBER:,}")
        if isinstance(owner, str):
            if name in ("format", "format_map"):
                self._check_format(owner, sum(map(self.weigh, arguments)))
            self._check_growth(name, owner, arguments)

    def _check_growth(self, name: str, text: str, arguments: Sequence[Any]) -> None:
        """Charges the estimated result of a string method, or of the filter of the same name."""
        numbers = [argument for argument in arguments if type(argument) is int]
        texts = [argument for argument in arguments if isinstance(argument, str)]
        estimate = len(text)
        if name == "replace" and len(texts) > 1:
            estimate += text.count(texts[0]) * len(texts[1])
        elif name == "join":
            self.charge(
                sum(
                    self.weigh(argument) + len(text) * len(argument)
                    for argument in arguments
                    if isinstance(argument, list)
                )
            )
        elif name in ("split", "rsplit", "splitlines", "list", "sort", "reverse", "batch", "slice"):
            estimate += (
                8 * _ITEM * (text.count(texts[0]) if texts and texts[0] else len(text) if len(text) > 1000 else 0)
            )
        elif name in ("expandtabs", "indent"):
            indent = max([8, *numbers, *map(len, texts)])
            estimate += indent * (1 + text.count("\t" if name == "expandtabs" else "\n"))
        elif name == "format":
            self._check_format(text, 0)
        else:
            estimate += sum(abs(number) for number in numbers)
        self.charge(estimate)

    def _check_format(self, text: str, arguments: int) -> None:
        if _WIDE.search(text):
            raise RenderLimitError("it formats with a very large width")
        widths = sum(int(digits) for digits in re.findall(r"\d+", text))
        self.charge(len(text) + widths + arguments * (1 + text.count("%") + text.count("{")))


def install_limits(environment: Any, source: int) -> RenderLimits:
    """Installs limits in a Jinja environment, which must be private to one template. source: length of the template in
    characters."""
    bounds = RenderLimits(source)
    call = environment.call

    def bounded_call(context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        values = [value for name, value in named.items() if not name.startswith("_")]
        bounds.before_call(called, [*arguments, *values])
        return call(context, called, *arguments, **named)

    def binary(_: Any, operator: str, a: Any, b: Any) -> Any:
        return bounds.binary(environment.binop_table, operator, a, b)

    environment.optimized = False  # the optimizer would evaluate constants while it compiles
    environment.finalize = bounds.finalize
    environment.call, environment.call_binop = bounded_call, binary
    environment.intercepted_binops = frozenset(_BINARY)
    environment.globals.pop("lipsum", None)
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _bounded(bounds, name, function)
    environment.filters |= {
        "weft_turns": bounds.turns, "weft_concat": bounds.concat, "weft_literal": bounds.literal,
    }  # fmt: skip
    return bounds


def _bounded(bounds: RenderLimits, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = int(hasattr(function, "jinja_pass_arg"))  # 1 if a context or an environment is the first argument

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        value = arguments[passed] if len(arguments) > passed else None
        bounds.before_filter(name, value, [*arguments[passed + 1 :], *named.values()])
        result = function(*arguments, **named)
        bounds.charge(bounds.weigh(result) if result is not value else 0)
        return bounds.turns(result, 0) if isinstance(result, Iterator) else result

    return bounded


class LimitInserter(NodeTransformer):
    """Inserts limits into a parsed template where Jinja has no hooks: loops, `~` and literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        text = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, "weft_turns", nodes.Const(text, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "weft_concat")

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filtered(node, "weft_literal")

    visit_Tuple = visit_Dict = visit_List


def _filtered(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)
