"""Readers of files that others wrote, fed with damage: `fuzz(parse, seeds, count, suffix=".json")`.

Each case is a seed that was changed at random, from the case's number alone, so that one that fails comes again. Bytes
are changed, and JSON (a whole file, a line of one, the header of safetensors) in its structure. All cases run in one
forked process: what hangs or crashes native code ends that process, and the case that did it is still on the disk. Its
limit counts processor time, so that a busy machine is no finding; what waits has a longer one.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.errors import UserError

SECONDS, MEGABYTES = 5.0, 500  # of processor time and memory that one case may take
_WAITS = 12  # times as long may it be under way, much of which other processes may have had the cores
_LENGTH = 8  # bytes before the header of safetensors, which say how long it is
_MARK = "@hostile@"

# What takes the place of a value: as text, since some of it is no JSON, or none that json.dumps would write.
HOSTILE = (
    "-1", "0", "1", "2", "1.5", "-0.0", "9223372036854775807", "9223372036854775808", "18446744073709551616",
    "-9223372036854775809", "1e400", "NaN", "-Infinity", "9" * 5000, "true", "false", "null", "{}", "[]", '""',
    '"1"', '"a\\u0000b"', '"\\ud800"', '"../outside"', '"/dev/zero"', '"."', f'"{"long " * 2000}"', "[[]]", "[null]",
    '{"": null}', "[" * 20_000, '{"a":' * 5_000, "[" * 5_000 + "]" * 5_000, "undefined", "",
)  # fmt: skip
_BYTES = (b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b"{", b"[", b"}", b"\n", b"\\u0000", b"\xed\xa0\x80", b"\x80" * 64)


def fuzz(
    parse: Callable[[Path], object],
    seeds: Sequence[bytes],
    count: int,
    *,
    suffix: str,
    allowed: tuple[type[BaseException], ...] = (UserError,),
) -> None:
    """Give `parse` the seeds and so many changed ones, each as a file with this suffix. AssertionError, with the case,
    where it raises what is not allowed, computes for 5 seconds, waits for a minute, ends the process, or asks for 500
    MB more than there were."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of files, which no disk need see
    with tempfile.TemporaryDirectory(prefix="weft-fuzz-", dir=memory) as name:
        file, report = Path(name, f"case{suffix}"), Path(name, "report")
        child = os.fork()
        if child == 0:
            _run(parse, seeds, count, file, report, allowed)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            how = {
                -signal.SIGPROF: f"computed for longer than {SECONDS:g} s",
                -signal.SIGALRM: f"waited for longer than {_WAITS * SECONDS:g} s",
                1: "raised",
            }.get(status, f"ended with {status}")
            content = file.read_bytes() if file.exists() else b""
            raise AssertionError(f"{_shown(content)}\n{how}\n{report.read_text() if report.exists() else ''}")


def _run(
    parse: Callable[[Path], object],
    seeds: Sequence[bytes],
    count: int,
    file: Path,
    report: Path,
    allowed: tuple[type[BaseException], ...],
) -> None:
    """The forked process, which never returns."""
    status = 1
    gc.freeze()  # what the suite left behind is not collected here: destructors would wait for threads of the parent
    try:
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)  # which ends native code, too
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 10**6,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in range(len(seeds) + count):
            content = seeds[number] if number < len(seeds) else changed(seeds, number)
            file.write_bytes(content)
            _allow(SECONDS)
            try:
                parse(file)
            except allowed:
                pass
            finally:
                _allow(0.0)
        status = 0
    except BaseException:
        report.write_text(traceback.format_exc()[-4000:])
    finally:
        os._exit(status)


def _allow(seconds: float) -> None:
    """From now on; 0 for without end."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WAITS * seconds)


def changed(seeds: Sequence[bytes], number: int) -> bytes:
    """The case of this number."""
    draw = random.Random(number)
    content = draw.choice(seeds)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        content = (_change_json if draw.random() < 0.6 else _change_bytes)(draw, content)
    return content


def _change_bytes(draw: random.Random, content: bytes) -> bytes:
    start, end = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    end = min(end, start + draw.choice((1, 2, 8, 64, 4096)))
    kind = draw.randrange(7)
    if kind == 0:  # a bit
        position = draw.randrange(max(1, len(content)))
        return (
            content[:position]
            + bytes(b ^ 1 << draw.randrange(8) for b in content[position : position + 1])
            + content[position + 1 :]
        )
    if kind == 1:
        return content[:start]
    if kind == 2:
        return content[:start] + content[end:]
    if kind == 3:
        return content[:end] + content[start:end] * draw.choice((1, 2, 100)) + content[end:]
    if kind == 4:
        return content[:start] + draw.choice(_BYTES) + content[start:]
    if kind == 5:
        return content[:start] + draw.randbytes(end - start) + content[end:]
    header = draw.choice((b"", b"\xff" * 8, (2**63).to_bytes(8, "little"), draw.randbytes(8)))
    return header + content[8:]


def _change_json(draw: random.Random, content: bytes) -> bytes:
    """Change a value of some JSON in it; bytes where there is none. A length before it stays true."""
    length = int.from_bytes(content[:_LENGTH], "little")
    framed = content[_LENGTH : _LENGTH + 1] == b"{" and length <= len(content) - _LENGTH
    begin, end = (_LENGTH, _LENGTH + length) if framed else (0, len(content))
    text = content[begin:end].decode("utf-8", "replace")
    new = _with_other_value(draw, text)
    if new is None:
        return _change_bytes(draw, content)
    out = new.encode("utf-8", "surrogatepass")
    return (len(out).to_bytes(_LENGTH, "little") if framed else b"") + out + content[end:]


def _with_other_value(draw: random.Random, text: str) -> str | None:
    opening = re.compile(r"[{[]").search(text, 0 if draw.random() < 0.7 else draw.randrange(len(text) + 1))
    if opening is None:
        return None
    start = opening.start()
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        new = json.dumps(_hostile(draw, value), ensure_ascii=draw.random() < 0.5)
    except (ValueError, RecursionError):
        return None
    return text[:start] + new.replace(f'"{_MARK}"', draw.choice(HOSTILE)) + text[end:]


def _hostile(draw: random.Random, value: Any) -> Any:
    """The value with one place in it changed: another value there, a key or an item more or less, or all swapped."""
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        kind = draw.randrange(10)
        if kind == 0:
            return {name: item for name, item in value.items() if name != key}
        if kind == 1:
            return {**value, draw.choice(("", "a\0b", "__metadata__", "\ue001", "../x", key + " ")): value[key]}
        if kind == 2:
            return {
                name: value[swapped] for name, swapped in zip(value, draw.sample(list(value), len(value)), strict=True)
            }
        if kind < 5:
            return {**value, key: _MARK}
        return {**value, key: _hostile(draw, value[key])}
    if isinstance(value, list) and value:
        position = draw.randrange(len(value))
        if draw.random() < 0.3:
            return value[:position] + value[position + 1 :]
        if draw.random() < 0.2:
            return value + value[position:]
        return [*value[:position], _hostile(draw, value[position]), *value[position + 1 :]]
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice((-1, 1, -8, 8, 2**31, -(2**31)))
    return _MARK


def _shown(content: bytes) -> str:
    return f"{len(content)} bytes: {content[:600]!r}{' ...' if len(content) > 600 else ''}"
