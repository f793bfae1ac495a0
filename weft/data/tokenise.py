"""Tokenises sources to tables of tokens, in this process or in worker processes (workers.py). All ranks of a machine
and later runs share a cache on disk."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from weft.data import table as tables
from weft.data.blocks import Block, raise_bad_row, with_skip_advice
from weft.data.encode import Encoded, Encoder, Encoding
from weft.data.image_columns import Image, Video
from weft.data.image_files import MediaLocation
from weft.data.images import Images
from weft.data.preference_tokens import separate_answers
from weft.data.records import ParseOptions, Record
from weft.data.sources import SourcePart
from weft.data.table import BadRow, Chunk, DamagedTableError, TokenTable
from weft.data.taught import with_lists
from weft.data.workers import WorkerPool
from weft.errors import BadRowError, StorageError, UserError, first_line
from weft.launch import flight
from weft.launch.machine import cpu_cores
from weft.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Smaller data are not cached: every rank tokenises them in less than a second.
KEPT_BYTES = 1 << 20
# Smaller data get no workers: they take seconds to start, and the tokenizer has its own threads.
CREW_BYTES = 64 << 20
# While the tokenizers library processes a block in its threads, without the GIL, the next block is read and rendered.
_THREADS = 2
# A block that takes longer is an error: seconds for a text of any size, and bytes per second.
_PATIENCE, _SLOWEST = 60.0, 10_000
_ENDING_SECONDS = 5.0  # seconds to wait for unneeded blocks after an error
_LOCK_SECONDS = 0.2  # seconds between two attempts to take a lock
_STAT_THREADS = 16

R = TypeVar("R")
Progress = Callable[[int, int], None]  # (bytes done, total bytes)


@dataclass(frozen=True)
class TokeniseTask:
    """The options and inputs with which a worker tokenises blocks. encoding, images: as in Encoder. parsing: options
    for parsing rows. drop: whether to skip and record bad rows; else the first bad row is an error."""

    tokenizer: PreTrainedTokenizerBase
    encoding: Encoding | None = None
    parsing: ParseOptions = field(default_factory=ParseOptions)
    drop: bool = False
    images: Images | None = None

    def make_encoder(self) -> Encoder:
        return Encoder(self.tokenizer, self.encoding, self.images)

    def inputs(self, part: SourcePart, location: str, places: Sequence[MediaLocation]) -> tuple[dict[str, Any], int]:
        """(the model's inputs for the images of a document of this part, the number of their patches). location: the
        name of the document. places: the locations of its images. Rows that contain images are read again."""
        assert self.images is not None
        rows: dict[int, tuple[Image | Video, ...]] = {}
        for position in {media.position for media in places if media.in_row}:
            assert part.row is not None
            (_, record), *_ = part.row(position).records(self.parsing)
            rows[position] = record.images
        return self.images.inputs(location, [(p.source(rows.get(p.position, ())), p.info) for p in places])

    def encode(self, encoder: Encoder, block: Block) -> Chunk:
        """The documents of a block. Raises UserError at the first bad row, unless `drop`."""
        bad: list[BadRow] = []

        def note(number: int, error: UserError) -> None:
            bad.append((number, first_line(error)))

        numbered = list(block.records(self.parsing, note if self.drop else raise_bad_row))

        def encode_all(records: list[Record]) -> list[Encoded]:
            encoded = encoder.encode(records)
            if self.parsing.preferences:
                return separate_answers(records, encoded)
            return with_lists(records, encoded) if self.parsing.listed else encoded

        try:
            encoded = encode_all([record for _, record in numbered])
        except BadRowError as error:
            if not self.drop:
                raise with_skip_advice(error) from error
            encoded, good = [], []
            for number, rows in groupby(numbered, key=itemgetter(0)):  # row by row, to find the bad rows
                records = [record for _, record in rows]
                try:
                    encoded += encode_all(records)
                except BadRowError as problem:
                    note(number, problem)
                else:
                    good += [(number, record) for record in records]
            numbered = good
        return Chunk.from_records(
            [number for number, _ in numbered], [record for _, record in numbered], encoded, sorted(bad)
        )

    def seconds_for(self, block: Block) -> float | None:
        """The time limit for the texts of a block: ten times the time of a slow tokenizer on a busy machine. None for
        images, because disks and networks have separate limits."""
        return None if self.images is not None else _PATIENCE + block.size / _SLOWEST

    def too_slow(self, block: Block) -> UserError:
        """The error for a block that takes too long. It names the row, found by tokenising each row alone."""
        # The stuck thread holds this encoder's lock and uses its tokenizer.
        encoder = copy.deepcopy(self).make_encoder()
        location, seconds = "", 0.0
        for _, record in block.records(self.parsing, lambda number, error: None):
            seconds = _PATIENCE / 4 + len(str(record.value)) / _SLOWEST
            location = location or f"{record.location} or a row after it"
            if not wait([_in_thread(partial(encoder.encode, [record]))[0]], seconds).done:
                location = record.location
                break
        return UserError(
            f"{location}: the tokenizer has not finished this text within {seconds:.0f} s. Its rules (tokenizer.json: "
            "normalizer, pre_tokenizer) are too slow for this text. Shorten the row, or copy tokenizer.json from the "
            "original model."
        )


@dataclass(frozen=True)
class TokeniseOptions:
    """Options of `tokenise`. workers, cache: as data.workers and data.cache. show: called with (bytes done, total
    bytes)."""

    workers: int | None = 1
    cache: str | None = None
    show: Progress | None = None


def tokenise(tasks: Sequence[tuple[SourcePart, TokeniseTask]], options: TokeniseOptions) -> list[TokenTable]:
    """Returns a table for each task, in order."""
    total, before = sum(part.size for part, _ in tasks), 0
    result = []
    for part, task in tasks:

        def show(size: int, before: int = before) -> None:
            if options.show is not None:
                options.show(before + size, total)

        table = _tokenise_part(part, task, options, show)
        table.inputs = partial(task.inputs, part)
        result.append(table)
        before += part.size
    return result


def _tokenise_part(
    part: SourcePart, task: TokeniseTask, options: TokeniseOptions, show: Callable[[int], None]
) -> TokenTable:
    small = part.size < KEPT_BYTES and task.images is None  # small rows may name large images
    key = None if small or options.cache is None else _cache_key(part, task)
    has_all_cores = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == 1 or key is not None
    workers = 1 if part.size < CREW_BYTES else options.workers or _default_workers(has_all_cores)

    def chunks() -> Generator[Chunk]:
        size = 0
        with closing(_encode_blocks(part.blocks(), task, workers)) as encoded:
            for block_size, chunk in encoded:
                flight.beat()
                size += block_size
                show(min(size, part.size))
                yield chunk

    if key is None or options.cache is None:
        with closing(chunks()) as stream:
            return tables.in_memory(part.origin, part.by_line, stream)
    table = _cached_table(options.cache, key, part, chunks)
    if table.bad and not task.drop:  # the table was cached by a run with data.bad_rows=drop
        raise with_skip_advice(UserError(table.bad[0][1]))
    return table


def _default_workers(has_all_cores: bool) -> int:
    """The default number of workers of this rank: its share of the cores, or all cores if no other rank tokenises this
    part (`has_all_cores`). 1 for two cores or fewer, because the threads of a single process use two cores."""
    cores = cpu_cores() if has_all_cores else cpu_cores() // int(os.environ["LOCAL_WORLD_SIZE"])
    return cores if cores > _THREADS else 1


def _encode_blocks(blocks: Iterable[Block], task: TokeniseTask, workers: int) -> Generator[tuple[int, Chunk]]:
    """Yields (bytes of the source, documents) of each block, in order. Close the generator to end its threads or
    processes."""
    if workers > 1:
        with WorkerPool(task, workers) as pool:
            yield from pool.map(blocks)
        return
    encoder, running = task.make_encoder(), deque[tuple[Block, Future[Chunk], Thread]]()

    def finish_first() -> tuple[int, Chunk]:
        block, chunk, thread = running[0]
        if not wait([chunk], task.seconds_for(block)).done:
            running.clear()  # do not wait after an error
            raise task.too_slow(block)
        thread.join()
        running.popleft()
        return block.size, chunk.result()

    try:
        for block in blocks:
            if len(running) == _THREADS:
                yield finish_first()
            running.append((block, *_in_thread(partial(task.encode, encoder, block))))
        while running:
            yield finish_first()
    finally:
        for *_, thread in running:
            thread.join(_ENDING_SECONDS)


def _in_thread(call: Callable[[], R]) -> tuple[Future[R], Thread]:
    """The result of a call in a daemon thread. The tokenizers library cannot be interrupted, so the call may never
    return; an executor would wait for its thread at exit, but a daemon thread ends with the process."""
    future = Future[R]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return future, thread


# ---------------------------------------------------------------- the cache


def _cache_key(part: SourcePart, task: TokeniseTask) -> str | None:
    """Digest of all inputs of the tokens: the bytes of the data, the options for parsing rows, the tokenizer, the code.
    None, for tokens that are not cached, if the data have no digest or the tokenizer is not fast."""
    tokenizer, images = task.tokenizer, task.images
    if part.digest is None or not tokenizer.is_fast:
        return None
    words = [
        part.digest(), str(part.by_line), repr(task.parsing),
        type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template),
        str(sorted(tokenizer.special_tokens_map.items())), repr(task.encoding),
        version("tokenizers"), version("transformers"), __version__, _code_digest(),
    ]  # fmt: skip
    if images is not None:  # includes the path of the data, because image paths in rows are relative to it
        words += [images.settings, images.problem, str(images.template), repr(images.checks)]
        words.append(os.path.abspath(part.origin))
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).hexdigest()


def _cached_table(folder: str, key: str, part: SourcePart, chunks: Callable[[], Generator[Chunk]]) -> TokenTable:
    """The table `key` of a cache folder. The first process builds it from `chunks`; other processes wait. A damaged
    table is built again, because a crash may lose recent writes. Raises StorageError if the folder cannot be used."""
    root = Path(folder).expanduser() / "tokens"
    path = root / key
    try:
        root.mkdir(parents=True, exist_ok=True)
        table = _read_cached(path, part)
        if table is None:
            with _locked(root / f"{key}.lock"):
                table = _read_cached(path, part)
                if table is None:
                    _build_cached(path, chunks)
                    table = tables.read(path, part.origin, part.by_line)
        return table
    except OSError as error:
        raise StorageError(
            f"data.cache: {root} cannot be used: {error.strerror or error}. Set data.cache to a folder on a disk with "
            "free space, or to null for no cache."
        ) from error


def _read_cached(path: Path, part: SourcePart) -> TokenTable | None:
    """The cached table; None if it is missing or damaged, or if its image files have changed."""
    try:
        table = tables.read(path, part.origin, part.by_line) if path.is_dir() else None
    except DamagedTableError:
        return None
    if table is None or not table.images.any():
        return table
    with ThreadPoolExecutor(_STAT_THREADS) as pool:  # stat mostly waits for the file system
        return table if all(pool.map(MediaLocation.is_unchanged, table.image_files())) else None


def _build_cached(path: Path, chunks: Callable[[], Generator[Chunk]]) -> None:
    """Build and publish a table. The caller has its lock, so an existing partial folder is from a dead process."""
    for abandoned in path.parent.glob(f"{path.name}.*.partial"):
        shutil.rmtree(abandoned, ignore_errors=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.partial")
    unfinished.mkdir()
    try:
        with closing(chunks()) as stream:
            tables.write(unfinished, stream)
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a table. The kernel releases the lock when the process exits, even by a crash."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                flight.beat()
                time.sleep(_LOCK_SECONDS)
        yield


@cache
def _code_digest() -> str:
    """Digest of the source files of weft.data, which affect the tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.is_file() and path.suffix in (".py", ".jinja"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
