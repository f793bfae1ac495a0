"""`weft data preview`: the data as training would read them, completely or a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from weft.config.schema import SftConfig
from weft.data.blocks import Block
from weft.data.records import NEEDED, ParseOptions
from weft.data.sources import DataSource, SourcePart, open_data
from weft.errors import UserError, first_line
from weft.launch.options import PreviewOptions
from weft.observe.preview import (
    Planned,
    Preview,
    SampledPart,
    TokenisedPart,
    refuse_bad,
    show_preview,
    show_sampled,
    trained_kinds,
)
from weft.observe.progress import loading

# With --sample, approximate number of bytes that are read of a larger file.
SAMPLE_BYTES = 1 << 20
_PLANNED = 8  # number of steps that are planned
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def run(config: SftConfig, options: PreviewOptions) -> None:
    """Entry point; runs in one process. Raises UserError for data that training would refuse, except long documents.

    All rows are read before the tokenizer is imported. Reading is fast, so data of another format is refused at once.
    If some rows are bad, the others are still tokenised, so that all bad rows are listed together.
    """
    sources, bad = open_data(config.data), list[str]()
    with loading(label="reading") as progress:
        chat = _may_have_template(config)
        parts = [(source, part) for source in sources for part in source.parts]
        rows = ParseOptions(**config.row_options)
        sampled = [
            _read(source, part, bad, progress, sample=options.sample, chat=chat, rows=rows) for source, part in parts
        ]
    count = sum(sum(sample.formats.values()) for sample in sampled)
    if not count:
        refuse_bad(bad, len(bad))
        raise UserError(f"{sampled[0].part.origin}: contains no documents. Set data.path to data with {NEEDED}.")
    _tokenise_and_show(config, sampled, options)


def _may_have_template(config: SftConfig) -> bool:
    """Whether there is a chat template, according to the model's files, because the tokenizer is not imported yet. True
    if the files are not on this machine."""
    folder = Path(config.model.path)
    if config.data.chat_template is not None or not folder.is_dir():
        return True
    if any((folder / name).exists() for name in _TEMPLATES):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8", errors="replace")


def _read(
    source: DataSource,
    part: SourcePart,
    bad: list[str],
    progress: Callable[[int, int], None],
    *,
    sample: bool,
    chat: bool,
    rows: ParseOptions,
) -> SampledPart:
    """Reads and counts the rows of a part. bad: the errors of bad rows are appended to it. chat: whether there is a
    chat template. rows: see DataSource.parse_options."""
    reads_all = not sample or part.size <= SAMPLE_BYTES
    blocks = None if reads_all else list(_sample_blocks(part))
    formats: dict[str, int] = {}
    done = 0
    for block in part.blocks() if blocks is None else blocks:
        options = source.parse_options(chat, rows)
        for _, record in block.records(options, lambda _, error: bad.append(first_line(error))):
            formats[record.kind] = formats.get(record.kind, 0) + 1
        done += block.size
        progress(min(done, part.size), part.size)
    share = 1.0 if reads_all else min(1.0, done / part.size)
    return SampledPart(source, part, blocks, formats, share)


def _sample_blocks(part: SourcePart) -> Iterator[Block]:
    """Yields blocks spread over the part if it supports that, otherwise its first blocks."""
    if part.sample is not None:
        yield from part.sample()
        return
    size = 0
    for block in part.blocks():
        yield block
        size += block.size
        if size >= SAMPLE_BYTES:
            return


def _tokenise_and_show(config: SftConfig, sampled: Sequence[SampledPart], options: PreviewOptions) -> None:
    from weft.data.encode import has_template, load_tokenizer, read_encoding
    from weft.data.images import read_images
    from weft.data.limits import Limits, bad_rows, length_limit
    from weft.data.table import in_memory
    from weft.data.tokenise import TokeniseOptions, TokeniseTask, tokenise
    from weft.models import hf

    hf.import_architectures(config.model.imports, config.model.path)

    tokenizer, read = load_tokenizer(config.model.path), []
    images = read_images(config.model.path, tokenizer, config.data)
    encoding = read_encoding(config.data, tokenizer)
    with loading(label="tokenising") as progress:
        how = TokeniseOptions(config.data.workers, config.data.cache, progress)
        for sample in sampled:
            parsing = sample.source.parse_options(has_template(tokenizer, encoding), ParseOptions(**config.row_options))
            work = TokeniseTask(tokenizer, encoding, parsing, True, images)
            if sample.blocks is None:
                (table,) = tokenise([(sample.part, work)], how)
            else:
                encoder = work.make_encoder()
                chunks = [work.encode(encoder, block) for block in sample.blocks]
                table = in_memory(sample.part.origin, sample.part.by_line, chunks)
            read.append(TokenisedPart(sample.source, table, sample.share))
    bad = [text for sample in read for _, text in bad_rows(sample.table)]
    rows = sum(len(sample.table) + len(sample.table.bad) for sample in read)
    if config.data.bad_rows == "error" or len(bad) == rows:
        refuse_bad(bad, rows)
    show_sampled(
        [replace(sample, formats=trained_kinds(part.table)) for sample, part in zip(sampled, read, strict=True)]
    )
    limit = length_limit(config.data, config.step.max_tokens_per_device, config.mesh.cp)
    limits = Limits(*limit, config.data.long_documents, drop_untrained=True)
    # The plan omits documents that training would refuse, to show the steps of the others.
    plan_limits = replace(limits, long="drop") if limits.long == "error" else limits
    planned = _plan(
        config, read, [plan_limits.select(sample.table, sample.source.name) for sample in read], options.world
    )
    template = has_template(tokenizer, encoding)
    show_preview(
        Preview(config, limits, read, planned, bad, images, template), tokenizer, options.samples, full=options.full
    )


def _plan(config: SftConfig, read: Sequence[TokenisedPart], pieces: Sequence[Any], world: int) -> Planned | None:
    """The plans of the first steps, for `world` data ranks; None if no documents remain."""
    import numpy as np

    from weft.data.documents import unit_of
    from weft.data.limits import joined_example_ends
    from weft.data.order import SourceShare, StepSampler
    from weft.engine.batch.document import DocumentMeta, omitted_tokens
    from weft.engine.step_plan.plan import plan_step

    has_router_loss = config.model.router_aux_loss != "none"
    lengths = [int(length) for piece in pieces for length in piece.lengths]
    if not lengths:
        return None
    losses = np.concatenate([piece.losses for piece in pieces])
    patches = np.concatenate([piece.table.patches[piece.indices] for piece in pieces])

    def meta(index: int) -> DocumentMeta:
        length, trained = lengths[index], int(losses[index])
        return DocumentMeta(
            length,
            float(trained),
            trained,
            omitted=omitted_tokens(length, read_all=has_router_loss),
            patches=int(patches[index]),
        )

    steps = StepSampler(
        lengths,
        documents=config.step.documents,
        tokens=config.step.tokens,
        epochs=1,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        shares=[
            SourceShare(len(p.example_ends), sample.source.weight)
            for p, sample in zip(pieces, read, strict=True)
            if len(p.indices)
        ],
        example_ends=joined_example_ends(pieces).tolist() if config.reads_preferences else None,
    )
    budget, shapes = config.step.max_tokens_per_device, config.step.padding
    plans = [
        plan_step([meta(i) for i in step.documents], ranks=world, budget=budget, shapes=shapes, ring=config.mesh.cp)
        for step in islice(steps, _PLANNED)
    ]
    unit = unit_of([piece.table.roles[piece.indices] for piece in pieces])
    return Planned(plans, _steps_in_epoch(config, read, pieces, len(steps)), world, unit)


def _steps_in_epoch(config: SftConfig, read: Sequence[TokenisedPart], pieces: Sequence[Any], counted: int) -> int:
    """The number of steps of an epoch: exactly `counted` if all data was read, otherwise scaled up from the sample."""
    if all(sample.share == 1.0 for sample in read):
        return counted
    weights = [sample.source.weight / sample.share for sample in read]
    if config.step.documents is not None:
        documents = sum(weight * len(piece.example_ends) for weight, piece in zip(weights, pieces, strict=True))
        return math.ceil(documents / config.step.documents)
    assert config.step.tokens is not None
    tokens = sum(weight * int(piece.lengths.sum()) for weight, piece in zip(weights, pieces, strict=True))
    return math.ceil(tokens / config.step.tokens)
