"""`weft data preview`: what training would see of the data, from a sample of it or from all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from weft.cluster.options import PreviewOptions
from weft.config.schema import SftConfig
from weft.data.blocks import Block
from weft.data.opened import Source, open_data
from weft.data.records import NEEDED
from weft.data.sources import Part
from weft.errors import UserError
from weft.observe.preview import Planned, Preview, Read, Sampled, show_preview, show_sampled

# Of a larger file so many bytes are read, from all over it.
SAMPLE_BYTES = 1 << 20
_PLANNED = 8  # steps that are planned


def run(config: SftConfig, options: PreviewOptions) -> None:
    """Entry point of the one process. Raises UserError for data that training would refuse, but for its length.

    Rows are read and checked first, which takes no time: what tokenizers need is imported after that.
    """
    sources = open_data(config.data)
    sampled = [_sample(source, part, options.all) for source in sources for part in source.parts]
    if not any(one.formats for one in sampled):
        raise UserError(f"{sampled[0].part.origin}: holds no documents. data.path must name data with {NEEDED}.")
    show_sampled(sampled)
    _tokenised(config, sampled, options)


def _sample(source: Source, part: Part, everything: bool) -> Sampled:
    whole = everything or part.size <= SAMPLE_BYTES
    blocks = list(part.blocks() if whole else _sampled(part))
    formats: dict[str, int] = {}
    for block in blocks:
        for _, record in block.records(source.reading(chat=True)):
            formats[record.format] = formats.get(record.format, 0) + 1
    taken = 1.0 if whole else min(1.0, sum(block.size for block in blocks) / part.size)
    return Sampled(source, part, blocks, formats, taken)


def _sampled(part: Part) -> Iterator[Block]:
    """Blocks from all over the part where it knows how, else the first."""
    if part.sample is not None:
        yield from part.sample()
        return
    taken = 0
    for block in part.blocks():
        yield block
        taken += block.size
        if taken >= SAMPLE_BYTES:
            return


def _tokenised(config: SftConfig, sampled: Sequence[Sampled], options: PreviewOptions) -> None:
    from weft.data.encode import has_template, read_encoding
    from weft.data.limits import Limits, check_trained, length_limit
    from weft.data.table import in_memory
    from weft.data.tokenise import Work
    from weft.data.tokenizer import load_tokenizer

    tokenizer, read = load_tokenizer(config.model.path), []
    encoding = read_encoding(config.data, tokenizer)
    for one in sampled:
        work = Work(tokenizer, encoding, one.source.reading(has_template(tokenizer, encoding)))
        encoder = work.make()
        chunks = [work.encode(encoder, block) for block in one.blocks]
        read.append(Read(one.source, in_memory(one.part.origin, one.part.by_line, chunks), one.taken))
    check_trained([one.table for one in read])
    limits = Limits(*length_limit(config.data, config.step.max_tokens_per_device), config.data.long_documents)
    # What training would refuse is left out of the plan, to show what the rest makes.
    kept = replace(limits, long="drop") if limits.long == "error" else limits
    planned = _plan(config, read, [kept.piece(one.table, one.source.name) for one in read], options.world)
    show_preview(Preview(config, limits, read, planned), tokenizer, options.samples)


def _plan(config: SftConfig, read: Sequence[Read], pieces: Sequence[Any], world: int) -> Planned | None:
    """The first steps that the documents at hand make; None where there are none."""
    from weft.data.order import Share, Steps
    from weft.engine.plan import DocumentMeta, plan_step, unread_tokens

    whole = config.model.router_aux_loss != "none"
    metas = [
        DocumentMeta(int(length), float(trained), int(trained), unread=unread_tokens(int(length), whole=whole))
        for piece in pieces
        for length, trained in zip(piece.lengths, piece.losses, strict=True)
    ]
    if not metas:
        return None
    steps = Steps(
        [meta.length for meta in metas],
        documents=config.step.documents,
        tokens=config.step.tokens,
        epochs=1,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        shares=[Share(len(p.kept), one.source.weight) for p, one in zip(pieces, read, strict=True) if len(p.kept)],
    )
    budget, shapes = config.step.max_tokens_per_device, config.step.shapes
    plans = [
        plan_step([metas[i] for i in step.documents], ranks=world, budget=budget, shapes=shapes)
        for step in islice(steps, _PLANNED)
    ]
    return Planned(plans, _steps_in_epoch(config, read, pieces, len(steps)), world)


def _steps_in_epoch(config: SftConfig, read: Sequence[Read], pieces: Sequence[Any], counted: int) -> int:
    """Exact where everything was read."""
    if all(one.taken == 1.0 for one in read):
        return counted
    weights = [one.source.weight / one.taken for one in read]
    if config.step.documents is not None:
        documents = sum(weight * len(piece.kept) for weight, piece in zip(weights, pieces, strict=True))
        return math.ceil(documents / config.step.documents)
    assert config.step.tokens is not None
    tokens = sum(weight * int(piece.lengths.sum()) for weight, piece in zip(weights, pieces, strict=True))
    return math.ceil(tokens / config.step.tokens)
