"""Checksums of weights, which show that an engine has the bytes that it was sent. Loaded wherever protocol.py is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROW = 1024  # words of 8 bytes
_BLOCK = 32  # rows: 256 KiB, which stay in the CPU's cache between the two sums


def _mixed(first: int, count: int) -> NDArray[np.uint64]:
    """[count] outputs first, first + 1, ... of splitmix64 with seed 0 (Steele et al. 2014, 10.1145/2714064.2660195)."""
    z = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_OF_COLUMN = _mixed(0, _ROW) | np.uint64(1)


def checksum(data: Any) -> int:
    """A 64-bit checksum of a contiguous array's bytes, nearly at the speed of memory. The bytes form a zero-padded
    matrix x of 8-byte words, 1024 to a row. With y = x ^ (x >> 32), the checksum is the sum of y[i, j] (q[i] + p[j]),
    plus a multiple of the length, modulo 2**64.

    p is odd and q even, so every factor is odd and every change of a single word changes the sum. Moved or swapped
    words get other factors. y copies a word's high bits to low ones, which influence more bits of the product. The
    checksum detects errors, not attacks.
    """
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes | memoryview) else data.reshape(-1).view(np.uint8)
    rows = raw.size // (8 * _ROW)
    body = raw[: rows * 8 * _ROW].view(np.uint64).reshape(rows, _ROW)
    last = np.zeros(8 * _ROW, np.uint8)
    last[: raw.size - body.nbytes] = raw[body.nbytes :]
    of_row = _mixed(1 << 32, rows + 1) & ~np.uint64(1)
    columns, total = np.zeros(_ROW, np.uint64), raw.size * 0x9E3779B97F4A7C15
    folded = np.empty((_BLOCK, _ROW), np.uint64)
    blocks = [body[first : first + _BLOCK] for first in range(0, rows, _BLOCK)]
    for number, block in enumerate([*blocks, last.view(np.uint64)[None]]):
        first = min(number * _BLOCK, rows)  # the padded last row follows the full rows
        y = np.right_shift(block, np.uint64(32), out=folded[: len(block)])
        np.bitwise_xor(y, block, out=y)
        columns += y.sum(axis=0)
        total += int((y.sum(axis=1) * of_row[first : first + len(y)]).sum())
    return (total + int((columns * _OF_COLUMN).sum())) % (1 << 64)
