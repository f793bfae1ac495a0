"""The output of `weft data preview`: documents with their trained tokens marked, their lengths, and the first steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from weft.config.schema import SftConfig
from weft.data.blocks import Block
from weft.data.order import SourceShare
from weft.data.records import ALL_KINDS, template_use
from weft.data.sources import DataSource, SourcePart
from weft.errors import UserError
from weft.terminal import Console, byte_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from weft.data.image_files import MediaLocation
    from weft.data.images import Images
    from weft.data.limits import Limits
    from weft.data.table import Array, TokenTable
    from weft.engine.step_plan.plan import StepPlan

_BARS = 12
_WIDTH = 40
_MOST_TOKENS = 400  # of a document that is shown completely
# Tokens that are shown of a longer document: at its beginning, and inside and outside both ends of a trained part.
_FIRST, _AROUND, _TRAINED = 60, 30, (150, 50)
_MOST_BAD = 20  # errors of bad rows that are listed
_LOCATED = re.compile(r"(.+?(?::\d+|\[\d+\])): (.*)", re.DOTALL)  # file:line or file[row], and the problem
_PERCENTILES = (0, 10, 50, 90, 99, 100)
# Marks around trained text if the console has no colours.
_MARKS = ("\u00bb", "\u00ab")


@dataclass(frozen=True, slots=True)
class SampledPart:
    """A part of a source. blocks: the blocks that were read; None for all. formats: number of documents by format.
    share: share of the part's bytes that was read."""

    source: DataSource
    part: SourcePart
    blocks: Sequence[Block] | None
    formats: Mapping[str, int]
    share: float


@dataclass(frozen=True, slots=True)
class TokenisedPart:
    """A tokenised part of a source. share: share of the part's bytes that was read."""

    source: DataSource
    table: TokenTable
    share: float

    @property
    def lengths(self) -> Array:
        """The number of tokens of each trainable document."""
        lengths: Array = self.table.lengths[self.table.losses > 0]
        return lengths


@dataclass(frozen=True, slots=True)
class Planned:
    """plans: of the first steps. steps: number of steps in an epoch, estimated if only a sample was read. ranks: number
    of data ranks. unit: of step.documents."""

    plans: Sequence[StepPlan]
    steps: int
    ranks: int
    unit: str = "documents"


@dataclass(frozen=True, slots=True)
class Preview:
    """The results that are shown after tokenising. planned: None if no document remains. bad: the error of each bad
    row. images: the image reader of a vision model. template: whether there is a chat template."""

    config: SftConfig
    limits: Limits
    read: Sequence[TokenisedPart]
    planned: Planned | None
    bad: Sequence[str] = ()
    images: Images | None = None
    template: bool = False

    @property
    def exact(self) -> bool:
        return all(sample.share == 1.0 for sample in self.read)


def show_sampled(sampled: Sequence[SampledPart], console: Console | None = None) -> None:
    """Prints the number of documents of each part."""
    console = console or Console()
    for sample in sampled:
        count = sum(sample.formats.values())
        formats = ", ".join(name if len(sample.formats) == 1 else f"{n:,} {name}" for name, n in sample.formats.items())
        text = f"{count:,} documents ({formats})"
        if sample.share < 1.0:
            text = f"about {round(count / sample.share):,} documents, estimated from {text} (--sample)"
        origin = sample.part.origin
        label = f"{sample.source.name} ({origin})" if sample.source.name else origin
        size = f", {byte_count(sample.part.size)}" if sample.part.size else ""
        console.print_folded(f"data     {label}{size}: {text}")


def refuse_bad(bad: Sequence[str], rows: int) -> None:
    """Raises UserError if there are bad rows. bad: their errors, each starting with file:line. rows: number of all
    rows."""
    if not bad:
        return
    text = f"{len(bad):,} of {rows:,} rows cannot be trained on:"
    advice = "Fix them, or skip them with data.bad_rows=drop."
    if len(bad) == rows:
        text = f"none of the {rows:,} rows can be trained on:" if rows > 1 else text
        advice = "Fix them: data.bad_rows=drop would drop every row."
    raise UserError("\n".join([text, *_error_lines(bad), advice]))


def trained_kinds(table: TokenTable) -> dict[str, int]:
    """The number of trainable documents of a table, by kind."""
    kinds = table.formats[table.losses > 0]
    counts = {kind: int((kinds == number).sum()) for number, kind in enumerate(ALL_KINDS)}
    return {kind: count for kind, count in counts.items() if count}


def _error_lines(bad: Sequence[str]) -> list[str]:
    """Each error once, with the first and the last of its rows, because a mistake is often in every row."""
    rows_of: dict[str, list[str]] = {}
    for text in bad:
        located = _LOCATED.match(text)
        row, wrong = (located[1], located[2]) if located else ("", text)
        rows_of.setdefault(wrong, []).append(row)
    lines = []
    for wrong, rows in list(rows_of.items())[:_MOST_BAD]:
        span = f"{len(rows):,} rows, {rows[0]} to {rows[-1]}: " if rows[0] else ""
        lines.append(f"  {span if len(rows) > 1 else rows[0] and f'{rows[0]}: '}{wrong}")
    hidden = sum(len(rows) for rows in list(rows_of.values())[_MOST_BAD:])
    return [*lines, *([f"  and {hidden:,} more rows"] if hidden else [])]


def show_preview(
    preview: Preview,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    console: Console | None = None,
    full: bool = False,
) -> None:
    """Prints the preview. samples: how many documents to show. full: whether to print all of their tokens."""
    console = console or Console()
    _show_samples(console, preview, tokenizer, samples, full)
    _show_lengths(console, preview)
    console.print()
    counts: Counter[str] = Counter()
    for sample in preview.read:
        counts.update(trained_kinds(sample.table))
    use = template_use(counts, preview.config.data, preview.template)
    share = "" if preview.exact else " of the sample"
    bad_lines = []
    if preview.bad:
        title = f"bad      {len(preview.bad):,} rows{share} are omitted (data.bad_rows=drop):"
        bad_lines = [title, *_error_lines(preview.bad)]
    for line in [
        f"template {use}",
        *_token_lines(preview),
        *bad_lines,
        *_long_lines(preview),
        *_plan_lines(preview),
    ]:
        console.print_folded(line)


# ---------------------------------------------------------------- documents


def _show_samples(
    console: Console, preview: Preview, tokenizer: PreTrainedTokenizerBase, samples: int, full: bool
) -> None:
    """Prints the first documents of all parts in turn, so that each source is shown."""
    coloured = console.color_system is not None
    places = [(sample.table, row) for row in range(samples) for sample in preview.read if row < len(sample.table)][
        :samples
    ]
    if not places:
        return
    trained = Text("trained", style="bold green") if coloured else Text("{}trained{}".format(*_MARKS))
    console.print(Text.assemble("Documents, with their ", trained, " tokens; the other tokens are context:"))
    for table, row in places:
        length = int(table.lengths[row])
        console.rule(
            f"{table.row_name(row)}{f', {role}' if (role := table.role(row)) else ''}  {length:,} tokens, "
            f"{int(table.losses[row]):,} trained",
            align="left",
            style="dim",
        )
        for line in _image_lines(preview.images, tokenizer, table.places(row)):
            console.print(line, style="dim", soft_wrap=True)
        ids, mask = table.tokens(row, length)
        shown = np.ones(length, bool) if full or length <= _MOST_TOKENS else _worth_showing(mask)
        text = render(tokenizer, ids, mask, coloured, shown, () if preview.images is None else preview.images.marks)
        console.print(text, soft_wrap=True, end="" if text.plain.endswith("\n") else "\n")
    console.rule(style="dim")


def _worth_showing(trained: Array) -> Array:
    """A mask of the tokens of a long document that are shown: its beginning, and both ends of each trained part with
    neighbouring tokens."""
    shown = np.zeros(len(trained), bool)
    shown[:_FIRST] = True
    edges = np.diff(np.concatenate([[0], trained != 0, [0]]).astype(np.int8))
    for begin, end in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        shown[max(0, begin - _AROUND) : min(end, begin + _TRAINED[0])] = True
        shown[max(begin, end - _TRAINED[1]) : end + _AROUND] = True
    return shown


def render(
    tokenizer: PreTrainedTokenizerBase,
    ids: Array,
    trained: Array,
    coloured: bool,
    shown: Array | None = None,
    marks: Sequence[str] = (),
) -> Text:
    """A document's text with trained parts in green if `coloured`, otherwise between marks. shown: mask of the tokens
    to print; the others are only counted. marks: image tokens; runs of four or more are abbreviated to their number."""
    text = Text()
    shown = np.ones(len(ids), bool) if shown is None else shown
    changes = (np.diff(trained) != 0) | (np.diff(shown) != 0)
    for begin, end in pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(ids)]):
        if not shown[begin]:
            kind = "trained tokens" if trained[begin] else "tokens"
            text.append(
                f"\n[... {end - begin:,} {kind}: --full shows them ...]\n", style="italic" if coloured else None
            )
            continue
        piece = tokenizer.decode(ids[begin:end].tolist())
        for mark in marks:
            for run in sorted(set(re.findall(f"(?:{re.escape(mark)}){{4,}}", piece)), key=len, reverse=True):
                piece = piece.replace(run, f"{mark}[x {len(run) // len(mark):,}]")
        if not trained[begin]:
            text.append(piece, style="dim" if coloured else None)
        elif coloured:
            text.append(piece, style="bold green")
        else:
            text.append(f"{_MARKS[0]}{piece}{_MARKS[1]}")
    return text


def _image_lines(
    images: Images | None, tokenizer: PreTrainedTokenizerBase, places: Sequence[MediaLocation]
) -> list[str]:
    """Describes each image and video of a document: its size, and its tokens and patches."""
    if images is None or not places:
        return []
    lines = []
    for number, image in enumerate(places, start=1):
        measured, clip = image.info, image.info.clip
        layout = images.processor().layout((measured.shape,))
        tokens = len(tokenizer(layout.texts[0], add_special_tokens=False)["input_ids"])
        kind = "image" if clip is None else "video"
        frames = (
            "" if clip is None else f"{clip.num_frames:,} of {clip.total:,} frames ({clip.sampled_fps:.3g} a second), "
        )
        lines.append(
            f"{kind} {number}: {frames}{measured.width} x {measured.height} pixels, {byte_count(measured.size)}, "
            f"{tokens:,} tokens, {layout.patches:,} patches{f', {image.paths[0]}' if image.paths else ''}"
        )
    return lines


# ---------------------------------------------------------------- numbers


def _token_lines(preview: Preview) -> list[str]:
    about = "" if preview.exact else "about "
    tokens = sum(int(sample.lengths.sum()) / sample.share for sample in preview.read)
    trained = sum(int(sample.table.losses.sum()) / sample.share for sample in preview.read)
    lines = [f"tokens   {about}{round(tokens):,}, of which {round(trained):,} trained ({trained / tokens:.0%})"]
    for sample in preview.read:
        if sample.source.weight != 1.0:
            count = SourceShare(round(len(sample.lengths) / sample.share), sample.source.weight).in_epoch
            lines.append(
                f"weight   {sample.source.weight:g} of {sample.source.name}: an epoch takes {about}{count:,} documents"
            )
    return [*lines, *_image_totals(preview)]


def _image_totals(preview: Preview) -> list[str]:
    images = sum(int(sample.table.images.sum()) / sample.share for sample in preview.read)
    if not images:
        return []
    patches = np.concatenate([sample.table.patches for sample in preview.read])
    documents = sum(int((sample.table.images > 0).sum()) / sample.share for sample in preview.read)
    about = "" if preview.exact else "about "
    return [
        f"images   {about}{round(images):,} in {round(documents):,} documents; the vision tower processes "
        f"{patches[patches > 0].mean():,.0f} patches per document on average, and {patches.max():,} at most"
    ]


def _show_lengths(console: Console, preview: Preview) -> None:
    lengths = np.concatenate([sample.lengths for sample in preview.read])
    trained = np.concatenate([sample.table.losses[sample.table.losses > 0] for sample in preview.read])
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("tokens of a document")
    for name in ("shortest", "10%", "median", "90%", "99%", "longest", "mean"):
        grid.add_column(name, justify="right")
    for name, values in (("all", lengths), ("trained", trained)):
        figures = [*np.percentile(values, _PERCENTILES, method="higher"), values.mean()]
        grid.add_row(name, *(f"{figure:,.0f}" for figure in figures))
    console.print(grid)
    for line in histogram(lengths):
        console.print(line, soft_wrap=True)


def histogram(lengths: Array) -> list[str]:
    """The lines of a bar chart of lengths, one for each range, from the first range with a document to the last. The
    ranges have a round width."""
    longest = int(lengths.max())
    raw = max(1, -(-(longest + 1) // _BARS))
    scale = 10 ** (len(str(raw)) - 1)
    step = next(scale * digit for digit in (1, 2, 5, 10) if scale * digit >= raw)  # the next round number
    counts = np.bincount(lengths // step)
    width, largest = len(f"{len(counts) * step:,}"), int(counts.max())
    return [
        f"{index * step:>{width},} to {(index + 1) * step - 1:>{width},}  {count:>{len(f'{largest:,}')},}  "
        + "\u2588" * max(int(count > 0), round(_WIDTH * count / largest))
        for index, count in enumerate(counts)
        if index >= int(lengths.min()) // step
    ]


def _long_lines(preview: Preview) -> list[str]:
    limits = preview.limits
    long = sum(int((sample.lengths > limits.max_length).sum()) for sample in preview.read)
    total = sum(len(sample.lengths) for sample in preview.read)
    if not long:
        return [f"long     no document is longer than {limits.max_length:,} tokens ({limits.key})"]
    lost = sum(int((sample.lengths - limits.max_length).clip(0).sum()) for sample in preview.read)
    consequence = {
        "error": "training would refuse them: raise the limit, or set data.long_documents to truncate or drop",
        "truncate": f"their ends are removed, {lost:,} tokens (data.long_documents)",
        "drop": "they are omitted (data.long_documents)",
    }[limits.long]
    share = "" if preview.exact else f" of the sample ({long / total:.2%})"
    return [
        f"long     {long:,} documents{share} are longer than {limits.max_length:,} tokens ({limits.key}); {consequence}"
    ]


def _plan_lines(preview: Preview) -> list[str]:
    planned, step = preview.planned, preview.config.step
    if planned is None:
        return []
    about = "" if preview.exact else "about "
    plans = planned.plans
    rows = [plan.micro_batches for plan in plans]
    first = plans[0].totals
    size = f"{step.documents:,} {planned.unit}" if step.documents is not None else f"up to {step.tokens:,} tokens"
    first_steps = "the first step" if len(plans) == 1 else f"the first {len(plans)} steps"
    return [
        f"steps    {about}{planned.steps:,} in an epoch, with {size} each; the first has {first.tokens:,} tokens, of "
        f"which {first.loss_tokens:,} are trained",
        f"rows     of {step.max_tokens_per_device:,} tokens on {_count(planned.ranks, planned.ranks, 'rank')}: "
        f"{_count(min(rows), max(rows), 'micro-batch')} in a step, fill {np.mean([plan.fill for plan in plans]):.0%}, "
        f"utilisation {np.mean([plan.utilisation for plan in plans]):.0%} (packed; in {first_steps})",
    ]


def _count(low: int, high: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `3 to 4 micro-batches`."""
    numbers = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    plural = "" if high == 1 else "es" if noun.endswith("ch") else "s"
    return f"{numbers} {noun}{plural}"
