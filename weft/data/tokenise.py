"""Sources -> tables of tokens: in this process or in workers, with a cache for later runs and other ranks."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from weft.data import cache, table
from weft.data.blocks import Block, raise_bad_row, with_skip_advice
from weft.data.encode import Encoded, Encoder, Encoding
from weft.data.image_columns import Image, Video
from weft.data.images import Images
from weft.data.places import MediaLocation
from weft.data.records import ParseOptions, Record
from weft.data.sources import SourcePart
from weft.data.table import BadRow, Chunk, TokenTable
from weft.data.workers import WorkerPool
from weft.errors import BadRowError, UserError, first_line
from weft.launch import flight
from weft.launch.machine import cpu_cores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Smaller data are not cached: every rank tokenises them in less than a second.
KEPT_BYTES = 1 << 20
# Smaller data get no workers: they take seconds to start, and the tokenizer has threads of its own.
CREW_BYTES = 64 << 20

# While the tokenizers library processes a block, in its own threads and without the GIL, another is read and rendered.
_THREADS = 2

# Texts of a block that take longer are an error: seconds for whatever size, and bytes a second.
_PATIENCE = 60.0
_SLOWEST = 10_000
_ENDING_SECONDS = 5.0  # how long to wait for blocks that nobody needs after an error

R = TypeVar("R")

Shown = Callable[[int, int], None]


@dataclass(frozen=True)
class TokeniseTask:
    """What a worker needs to tokenise blocks. encoding, images: as in Encoder. drop: whether bad rows are skipped and
    recorded, or else the first one is an error."""

    tokenizer: PreTrainedTokenizerBase
    encoding: Encoding | None = None
    reading: ParseOptions = field(default_factory=ParseOptions)
    drop: bool = False
    images: Images | None = None

    def make(self) -> Encoder:
        return Encoder(self.tokenizer, self.encoding, self.images)

    def inputs(self, part: SourcePart, location: str, places: Sequence[MediaLocation]) -> tuple[dict[str, Any], int]:
        """(the model's inputs for the images of a document of this part, the number of their patches). location: the
        name of the document. places: of its images. Reads the rows of images in rows again."""
        assert self.images is not None
        rows: dict[int, tuple[Image | Video, ...]] = {}
        for position in {place.position for place in places if place.in_row}:
            assert part.row is not None
            ((_, record),) = part.row(position).records(self.reading)
            rows[position] = record.images
        found = [(place.source(rows.get(place.position, ())), place.info) for place in places]
        return self.images.inputs(location, found)

    def encode(self, encoder: Encoder, block: Block) -> Chunk:
        """The documents of a block. Raises UserError at the first bad row, unless `drop`."""
        bad: list[BadRow] = []
        numbered = list(block.records(self.reading, partial(_keep, bad) if self.drop else raise_bad_row))
        try:
            encoded = encoder.encode([record for _, record in numbered])
        except BadRowError as error:
            if not self.drop:
                raise with_skip_advice(error) from error
            numbered, encoded = _one_by_one(encoder, numbered, bad)
        return Chunk.of([number for number, _ in numbered], [record for _, record in numbered], encoded, sorted(bad))

    def seconds_for(self, block: Block) -> float | None:
        """How long the texts of a block may take: ten times what a slow tokenizer takes on a busy machine. None for
        images, which come from disks and networks with limits of their own."""
        return None if self.images is not None else _PATIENCE + block.size / _SLOWEST

    def too_slow(self, block: Block) -> UserError:
        """The error that names the row of a block that the tokenizer does not end with: they are tried one by one."""
        # The thread that does not end holds this encoder's lock, and has borrowed its tokenizer.
        encoder = copy.deepcopy(self).make()
        location, seconds = "", 0.0
        for _, record in block.records(self.reading, lambda number, error: None):
            seconds = _PATIENCE / 4 + len(str(record.value)) / _SLOWEST
            location = location or f"{record.location} or a row after it"
            if not wait([_in_thread(partial(encoder.encode, [record]))[0]], seconds).done:
                location = record.location
                break
        return UserError(
            f"{location}: the tokenizer has not ended with this text in {seconds:.0f} s. Its rules (tokenizer.json: "
            "normalizer, pre_tokenizer) take too long for it. Shorten the row, or copy tokenizer.json from the model "
            "you started from."
        )


def _keep(bad: list[BadRow], number: int, error: UserError) -> None:
    bad.append((number, first_line(error)))


def _one_by_one(
    encoder: Encoder, numbered: Sequence[tuple[int, Record]], bad: list[BadRow]
) -> tuple[list[tuple[int, Record]], list[Encoded]]:
    """The records that can be encoded; the others go to `bad`."""
    kept, encoded = [], []
    for number, record in numbered:
        try:
            encoded += encoder.encode([record])
        except BadRowError as error:
            _keep(bad, number, error)
        else:
            kept.append((number, record))
    return kept, encoded


@dataclass(frozen=True)
class TokeniseOptions:
    """How to tokenise. workers, cache: as data.workers and data.cache. show: called with (bytes done, total bytes)."""

    workers: int | None = 1
    cache: str | None = None
    show: Shown | None = None


def tokenise(jobs: Sequence[tuple[SourcePart, TokeniseTask]], how: TokeniseOptions) -> list[TokenTable]:
    """Returns a table for each job, in order."""
    done, total = 0, sum(part.size for part, _ in jobs)
    tables = []
    for part, work in jobs:
        tables.append(_table(part, work, how, _counting(how.show, done, total)))
        done += part.size
    return tables


def _table(part: SourcePart, work: TokeniseTask, how: TokeniseOptions, shown: Shown) -> TokenTable:
    found = _tokens(part, work, how, shown)
    found.inputs = partial(work.inputs, part)
    return found


def _tokens(part: SourcePart, work: TokeniseTask, how: TokeniseOptions, shown: Shown) -> TokenTable:
    small = part.size < KEPT_BYTES and work.images is None  # small rows may name large images
    key = None if small or how.cache is None else cache.key(part, work)
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == 1 or key is not None
    workers = 1 if part.size < CREW_BYTES else how.workers or _cores(alone)

    def chunks() -> Generator[Chunk]:
        return _shown(part, _chunks(part.blocks(), work, workers), shown)

    if key is None or how.cache is None:
        with closing(chunks()) as made:
            return table.in_memory(part.origin, part.by_line, made)
    found = cache.table(how.cache, key, part, chunks)
    if found.bad and not work.drop:  # the table was cached by a run with data.bad_rows=drop
        raise with_skip_advice(UserError(found.bad[0][1]))
    return found


def _cores(alone: bool) -> int:
    """The default number of workers of this rank: its share of the cores, or all if no other rank tokenises this part
    (`alone`). 1 if that is two cores or fewer: a single process with its threads fills two.
    """
    cores = cpu_cores() if alone else cpu_cores() // int(os.environ["LOCAL_WORLD_SIZE"])
    return cores if cores > _THREADS else 1


def _chunks(blocks: Iterable[Block], work: TokeniseTask, workers: int) -> Generator[tuple[int, Chunk]]:
    """Yields (bytes of the source, documents) of each block, in order. Close it: it owns threads or processes."""
    if workers > 1:
        with WorkerPool(work, workers) as pool:
            yield from pool.map(blocks)
        return
    encoder, begun = work.make(), deque[tuple[Block, Future[Chunk], Thread]]()
    try:
        for block in blocks:
            if len(begun) == _THREADS:
                yield _finished(begun, work)
            begun.append((block, *_in_thread(partial(work.encode, encoder, block))))
        while begun:
            yield _finished(begun, work)
    finally:
        for *_, thread in begun:
            thread.join(_ENDING_SECONDS)


def _in_thread(call: Callable[[], R]) -> tuple[Future[R], Thread]:
    """The result of a call in a thread that ends with the process, although it may never return: the tokenizers library
    cannot be interrupted, and a pool's threads are waited for at exit."""
    future = Future[R]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return future, thread


def _finished(begun: deque[tuple[Block, Future[Chunk], Thread]], work: TokeniseTask) -> tuple[int, Chunk]:
    """Removes the first block from the queue, once it is tokenised. UserError if that takes too long."""
    block, chunk, thread = begun[0]
    if not wait([chunk], work.seconds_for(block)).done:
        begun.clear()  # none is waited for
        raise work.too_slow(block)
    thread.join()
    begun.popleft()
    return block.size, chunk.result()


def _shown(part: SourcePart, chunks: Generator[tuple[int, Chunk]], shown: Shown) -> Generator[Chunk]:
    done = 0
    with closing(chunks):
        for size, chunk in chunks:
            flight.beat()
            done += size
            shown(min(done, part.size), part.size)
            yield chunk


def _counting(show: Shown | None, before: int, total: int) -> Shown:
    return lambda done, _: show(before + done, total) if show is not None else None
