"""Reads pickles as data: files that other programs wrote with pickle or torch.save. No code in them is ever run.

A pickle is a program for a small stack machine. This machine implements the instructions that build data. For an
instruction that would import or call something, it creates a `PickledObject` with the name and the arguments. A name
that the caller does not allow is an error. So a malicious file can only return wrong data.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_LONGEST_NAME = 256  # characters in the name of a module or class
# Real files have at least this many bytes per container. The limit is needed because an empty dict takes 1 byte of a
# file but 64 bytes of memory.
_BYTES_PER_CONTAINER = 8
PERSISTENT = "persistent id"  # the name that allows references to storages

Constructor = Callable[..., Any]


def new_dict(*_: Any) -> dict[Any, Any]:
    """Replaces the constructor of OrderedDict and similar classes. Later instructions fill the dict."""
    return {}


class UnreadableError(ValueError):
    """Raised if a file cannot be read. The message is the reason."""


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object that a pickle would construct. args: arguments of its constructor. state: argument of its __setstate__.
    fields: items that the pickle would set in it."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    fields: dict[Any, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The attribute with this name. None if there is none."""
        return self.state.get(key) if isinstance(self.state, dict) else None


@dataclass(frozen=True, slots=True)
class GlobalName:
    """The name of a class or function that a pickle refers to. It is not imported."""

    name: str


def read_pickle(data: bytes, allowed: Mapping[str, Constructor | None]) -> Any:
    """The content of a pickle.

    allowed: module.name that it may refer to -> a function that computes a value from the arguments of a call, or None
    to represent the call by a PickledObject. Raises UnreadableError for other names, for instructions outside _STEPS,
    and for a truncated pickle.
    """
    machine = _PickleMachine(data, allowed)
    try:
        while not machine.done:
            _STEPS[machine.take(1)[0]](machine)
        return machine.stack[-1]
    except KeyError as error:
        raise UnreadableError(f"it has an instruction, {error}, that no such file needs") from error
    except UnreadableError:
        raise
    except (IndexError, TypeError, ValueError, struct.error, AttributeError, OverflowError) as error:
        raise UnreadableError("its instructions do not fit together") from error


_KEYS = (str, int, PickledObject)  # allowed keys of dicts; hashing a deeply nested tuple could take very long


class _PickleMachine:
    def __init__(self, data: bytes, allowed: Mapping[str, Constructor | None]) -> None:
        self.data, self.position, self.allowed = data, 0, allowed
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.done = False
        self._containers = 64 + len(data) // _BYTES_PER_CONTAINER

    def take(self, count: int) -> bytes:
        """The next `count` bytes of the program."""
        end = self.position + count
        if end > len(self.data):
            raise UnreadableError("it is truncated")
        data = self.data[self.position : end]
        self.position = end
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + _LONGEST_NAME)
        if end < 0:
            raise UnreadableError("it is truncated")
        return self.take(end + 1 - self.position)[:-1].decode()

    def push_new(self, container: Any) -> None:
        self._containers -= 1
        if self._containers < 0:
            raise UnreadableError(f"no file of {len(self.data):,} bytes holds so many objects")
        self.stack.append(container)

    def above_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        if mark > len(self.stack):
            raise IndexError
        del self.stack[mark:]
        return items

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo. Indices must be consecutive, as in all real files: a large index
        would allocate a large memo."""
        if index > len(self.memo):
            raise UnreadableError("its notes are out of order")
        self.memo[index : index + 1] = [self.stack[-1]]

    def refer(self, name: str) -> None:
        if name not in self.allowed:
            raise UnreadableError(f"it refers to {name[:100]!r}, which no such file needs")
        self.stack.append(GlobalName(name))

    def call(self) -> None:
        args, called = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or type(called) is not GlobalName:
            raise TypeError
        make = self.allowed[called.name]
        self.push_new(PickledObject(called.name, args) if make is None else make(*args))

    def build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) is PickledObject:
            record.state = state
        elif type(record) is not dict:  # attributes of an OrderedDict are ignored
            raise TypeError

    def put(self, pairs: list[Any]) -> None:
        owner = self.stack[-1]
        target = owner.fields if type(owner) is PickledObject else owner
        if type(target) is not dict or len(pairs) % 2 or not all(type(key) in _KEYS for key in pairs[::2]):
            raise TypeError
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError
        self.stack[-1].extend(items)

    def fold(self, count: int) -> None:
        """Replace the topmost `count` items by a tuple of them."""
        if count > len(self.stack):
            raise IndexError
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push_new(items)

    def global_from_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError
        self.refer(f"{module}.{name}")

    def persistent(self) -> None:
        self.refer(PERSISTENT)
        called, reference = self.stack.pop(), self.stack.pop()
        self.stack += [called, (reference,)]
        self.call()

    def text(self, length: int) -> None:
        self.stack.append(self.take(length).decode("utf-8"))

    def stop(self) -> None:
        self.done = True

    def long(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.number("<B")), "little", signed=True))


def _code(name: str) -> int:
    code: bytes = getattr(pickle, name)
    return code[0]


_STEPS: dict[int, Callable[[_PickleMachine], Any]] = {
    _code(name): step
    for name, step in {
        "PROTO": lambda m: m.take(1),
        "FRAME": lambda m: m.take(8),
        "STOP": _PickleMachine.stop,
        "MARK": lambda m: m.marks.append(len(m.stack)),
        "POP": lambda m: m.stack.pop(),
        "NONE": lambda m: m.stack.append(None),
        "NEWTRUE": lambda m: m.stack.append(True),
        "NEWFALSE": lambda m: m.stack.append(False),
        "BININT": lambda m: m.stack.append(m.number("<i")),
        "BININT1": lambda m: m.stack.append(m.number("<B")),
        "BININT2": lambda m: m.stack.append(m.number("<H")),
        "LONG1": _PickleMachine.long,
        "BINFLOAT": lambda m: m.stack.append(m.number(">d")),
        "SHORT_BINUNICODE": lambda m: m.text(m.number("<B")),
        "BINUNICODE": lambda m: m.text(m.number("<I")),
        "SHORT_BINBYTES": lambda m: m.stack.append(m.take(m.number("<B"))),
        "BINBYTES": lambda m: m.stack.append(m.take(m.number("<I"))),
        "EMPTY_TUPLE": lambda m: m.stack.append(()),
        "TUPLE1": lambda m: m.fold(1),
        "TUPLE2": lambda m: m.fold(2),
        "TUPLE3": lambda m: m.fold(3),
        "TUPLE": lambda m: m.push_new(tuple(m.above_mark())),
        "EMPTY_LIST": lambda m: m.push_new([]),
        "APPEND": lambda m: m.extend([m.stack.pop()]),
        "APPENDS": lambda m: m.extend(m.above_mark()),
        "EMPTY_DICT": lambda m: m.push_new({}),
        "SETITEM": lambda m: m.put([m.stack.pop(-2), m.stack.pop()]),
        "SETITEMS": lambda m: m.put(m.above_mark()),
        "EMPTY_SET": lambda m: m.push_new([]),
        "ADDITEMS": lambda m: m.extend(m.above_mark()),
        "FROZENSET": lambda m: m.push_new(m.above_mark()),
        "MEMOIZE": lambda m: m.remember(len(m.memo)),
        "BINPUT": lambda m: m.remember(m.number("<B")),
        "LONG_BINPUT": lambda m: m.remember(m.number("<I")),
        "BINGET": lambda m: m.stack.append(m.memo[m.number("<B")]),
        "LONG_BINGET": lambda m: m.stack.append(m.memo[m.number("<I")]),
        "GLOBAL": lambda m: m.refer(f"{m.line()}.{m.line()}"),
        "STACK_GLOBAL": _PickleMachine.global_from_stack,
        "REDUCE": _PickleMachine.call,
        "NEWOBJ": _PickleMachine.call,
        "BUILD": _PickleMachine.build,
        "BINPERSID": _PickleMachine.persistent,
    }.items()
}
