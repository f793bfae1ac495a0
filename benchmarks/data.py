"""Tokenising a file of chats beside a bare `tokenizers` batch call on the same rendered text.

    python benchmarks/inputs.py /tmp/inputs
    python benchmarks/data.py /tmp/inputs [--megabytes 64] [--rounds 3]

bare: tokenizers' encode_batch on texts that are in memory already, all cores (its own threads), ids taken. floor: the
least that takes chats from the file in Python -- json.loads, the template's own rendering, encode_batch, ids -- with no
check and no mask. weft: from the file on disk to tables in memory, without a cache -- read, checked, rendered,
tokenised, masked -- in one process and in one per core, whose start is told apart. Rounds are taken in turn, and the
median counts; run it on a quiet machine. CPU seconds are those of all threads and processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from weft.data import tokenise as tokenising
from weft.data.encode import load_tokenizer
from weft.data.sources import open_file
from weft.data.tokenise import TokeniseOptions, TokeniseTask, tokenise
from weft.data.workers import WorkerPool
from weft.models import hf_template

BATCH = 1000


def enlarge(source: Path, target: Path, megabytes: int) -> list[Any]:
    """The chats again and again, each time with another question, until the file is large enough."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    chats: list[Any] = []
    with target.open("w", encoding="utf-8") as file:
        for number in range(1_000_000):
            for row in rows:
                first, *following = row["messages"]
                chats.append([{**first, "content": f"{number}: {first['content']}"}, *following])
                file.write(json.dumps({"messages": chats[-1]}) + "\n")
            if file.tell() >= megabytes << 20:
                return chats
    raise AssertionError


def timed(function: Callable[[], int]) -> tuple[float, float, int]:
    """(seconds, CPU seconds, tokens)."""
    began, spent = time.perf_counter(), sum(os.times()[:4])
    tokens = function()
    return time.perf_counter() - began, sum(os.times()[:4]) - spent, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = load_tokenizer(str(options.inputs / "model"))
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        chats = enlarge(options.inputs / "chat.jsonl", path, options.megabytes)
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        work = TokeniseTask(tokenizer)

        def bare() -> int:
            backend = tokenizer.backend_tokenizer
            batches = (texts[i : i + BATCH] for i in range(0, len(texts), BATCH))
            return sum(
                len(encoded.ids)
                for batch in batches
                for encoded in backend.encode_batch(batch, add_special_tokens=False)
            )

        def floor() -> int:
            backend, token_count = tokenizer.backend_tokenizer, 0
            template = hf_template.environment().from_string(tokenizer.get_chat_template())
            special = tokenizer.special_tokens_map
            with path.open(encoding="utf-8") as file:
                while lines := list(islice(file, BATCH)):
                    rendered = [template.render(**json.loads(line), **special) for line in lines]
                    token_count += sum(
                        len(encoded.ids) for encoded in backend.encode_batch(rendered, add_special_tokens=False)
                    )
            return token_count

        def weft(workers: int) -> int:
            [table] = tokenise([(open_file(str(path)), work)], TokeniseOptions(workers=workers))
            return len(table.ids)

        def start() -> int:
            with WorkerPool(work, cores) as pool:
                return sum(len(chunk.ids) for _, chunk in pool.map([next(iter(open_file(str(path)).blocks()))] * cores))

        contestants: dict[str, Callable[[], int]] = {
            "bare encode_batch": bare,
            "floor: json.loads, Jinja, encode_batch": floor,
            "weft, 1 process": lambda: weft(1),
            f"weft, {cores} processes": lambda: weft(cores),
            f"start of {cores} processes, and a block each": start,
        }
        tokenising.CREW_BYTES = 0
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        cpu: dict[str, list[float]] = {name: [] for name in contestants}
        tokens = {}
        for _ in range(options.rounds):
            for name, function in contestants.items():
                duration, spent, tokens[name] = timed(function)
                seconds[name].append(duration)
                cpu[name].append(spent)
    assert len({count for name, count in tokens.items() if "start" not in name}) == 1, tokens
    print(f"{len(texts):,} chats, {options.megabytes} MB, {tokens['bare encode_batch']:,} tokens; {cores} cores\n")
    print("| | seconds | CPU seconds | tokens/s | of bare |\n| --- | --- | --- | --- | --- |")
    base = statistics.median(seconds["bare encode_batch"])
    for name, times in seconds.items():
        median = statistics.median(times)
        rate = "-" if "start" in name else f"{tokens[name] / median:,.0f}"
        share = "-" if "start" in name else f"{base / median:.0%}"
        print(f"| {name} | {median:.2f} | {statistics.median(cpu[name]):.2f} | {rate} | {share} |")


if __name__ == "__main__":
    main()
