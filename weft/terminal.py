"""Printing, so that texts from outside (data, models, metrics, errors, file names) cannot control the terminal. All of
weft prints with `say` or a `Console` of this file.

Characters that move the cursor, change the title or the clipboard, or reverse the order of letters are escaped as in
Python: \\x1b.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from weft.errors import UserError

# C0 except tab and line feed, DEL and C1; line separators; overrides of the text's direction; surrogates.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_NARROWEST = 40  # columns; narrower terminals fold by themselves

_called: dict[str, str] = {}  # local folder -> the name that is printed


def set_display_name(folder: str, name: str) -> None:
    """Print this folder as `name` from now on. name: the URL whose local copy the folder is."""
    _called[folder] = name


def display_name(text: str) -> str:
    """The text with local copies replaced by their URLs."""
    for folder, name in _called.items():
        text = text.replace(folder, name)
    return text


def clean(text: str, *, as_is: bool = False) -> str:
    """The text with control characters escaped."""
    text = text if as_is else display_name(text)
    return _COMMANDS.sub(lambda match: repr(match[0])[1:-1], text.replace("\r\n", "\n"))


def say(*texts: object, error: bool = False, end: str = "\n", as_is: bool = False) -> None:
    """Print each text on a line, unbuffered. error: to standard error. as_is: without replacing local copies by
    URLs."""
    stream = sys.stderr if error else sys.stdout
    try:
        print("\n".join(clean(str(text), as_is=as_is) for text in texts), file=stream, end=end, flush=True)
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python would write the rest at exit
        raise UserError("the program that reads this output has ended: write the output to a file instead.") from error


class _Outlet:
    """A stream for text. Text that cannot be written, because the program or terminal that reads it has ended, is
    lost."""

    def __init__(self, stream: Any, note: str) -> None:
        self._stream, self._note = stream, note

    def write(self, text: str) -> int:
        """Write, or lose the text."""
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._close(error)
            return len(text)

    def flush(self) -> None:
        """Flush, or lose what is in the buffer."""
        try:
            self._stream.flush()
        except OSError as error:
            self._close(error)

    def _close(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if self._stream is not sys.__stderr__:
            say(self._note, error=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def optional_output(note: str) -> Iterator[None]:
    """Inside, this process continues if what reads its output ends. note: printed to standard error when standard
    output is lost."""
    before = sys.stdout, sys.stderr
    # A stream is None if the process was started without it.
    sys.stdout, sys.stderr = (cast(Any, _Outlet(stream, note)) if stream is not None else stream for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def say_folded(texts: Iterable[object]) -> None:
    """Print each text on a line. A text that begins with a label, `data     chat.jsonl: ...`, is folded at spaces to
    the width of the terminal, under its label. Without a terminal nothing is folded, unless COLUMNS is set: logs are
    searched by line."""
    width = folded_width()
    for text in texts:
        say(text if width is None else "\n".join(_folded(line, width) for line in str(text).split("\n")))


def folded_width() -> int | None:
    """The columns to fold output to; None if the output is not a terminal and COLUMNS is not set."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(_NARROWEST, shutil.get_terminal_size().columns)
    return None


def _folded(line: str, width: int) -> str:
    label = re.match(r" {9,}|[a-z][a-z. ]{7} (?=\S)", line)
    if label is None or len(line) <= width:
        return line
    return textwrap.fill(
        line, width, subsequent_indent=" " * len(label[0]), break_long_words=False, break_on_hyphens=False
    )


def say_all(texts: Iterable[object], *, error: bool = False) -> None:
    """Print each text on a line; nothing for no texts."""
    for text in texts:
        say(text, error=error)


class Console(rich.console.Console):
    """rich's Console, without markup and emoji: `[red]` and `:bug:` in a text are printed as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print_folded(self, text: str) -> None:
        """Print a line; on a terminal it is folded as by say_folded. Elsewhere it is not, because another program may
        read it."""
        self.print(_folded(text, self.width) if self.is_terminal else text, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)


def clean_everything() -> None:
    """Escape log records, warnings and uncaught exceptions of this process, too. Called by the program `weft` only."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a letter is no error
    logging.setLogRecordFactory(_Record)
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda *words, **more: clean(formatted(*words, **more))
    sys.excepthook = _show_exception


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return clean(super().getMessage())


def _show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    say("".join(traceback.format_exception(kind, error, trace)), error=True, end="")


def count(number: int) -> str:
    """`999`, `4.98M`, `70.6B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def counted(number: int, noun: str) -> str:
    """`1 step`, `1,234 steps`, `2 micro-batches`, `3 epochs`."""
    hissing = noun.endswith(("ch", "sh", "s", "x")) and not noun.endswith("epoch")
    ending = "" if number == 1 else "es" if hissing else "s"
    return f"{number:,} {noun}{ending}"


def byte_count(number: int) -> str:
    """`12 B`, `19.7 MiB`, `1.5 TiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.4g} {unit}"
    return f"{number} B"
