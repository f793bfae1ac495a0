"""The data of a run: its documents, and the documents of each optimizer step."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from weft.config.paths import holds_weights
from weft.config.rl_schema import RlConfig
from weft.config.schema import DataConfig, SftConfig
from weft.config.sources import looks_like_hub_dataset
from weft.config.urls import is_url
from weft.data.documents import (
    DataReport,
    Documents,
    example_ends_of,
    find_leaks,
    hold_out,
    leak_hint,
    lengths_of,
    load_documents,
    shares_of,
)
from weft.data.encode import has_template, load_tokenizer, read_encoding
from weft.data.ends import NO_ENDS, AnswerEnds, answer_ends, taught_ends
from weft.data.images import Images, read_images
from weft.data.limits import length_limit
from weft.data.order import StepSampler
from weft.data.records import ParseOptions
from weft.data.tokenise import TokeniseOptions
from weft.engine.batch.document import Document
from weft.errors import UserError
from weft.models import hf
from weft.recipes.evaluate import NO_HELD_OUT, HeldOut, read_held_out

Config = TypeVar("Config", bound=SftConfig)
OnProgress = Callable[[int, int], None]
TRAINED = "training data"  # the name of this data set of a run


@dataclass(frozen=True)
class RunData:
    """The training and the evaluation data of a run. ends: the tokens that end answers, for checkpoints and
    evaluations. template: whether there is a chat template."""

    documents: Sequence[Document]
    report: DataReport
    held_out: HeldOut = NO_HELD_OUT
    ends: AnswerEnds = NO_ENDS
    template: bool = False

    @property
    def data_sets(self) -> dict[str, Sequence[Document]]:
        """All documents by name: the training data, and held-out documents by their source's name."""
        return {TRAINED: self.documents, **self.held_out.documents}

    @property
    def digests(self) -> dict[str, str]:
        """Digests that identify the data."""
        return {TRAINED: self.report.digest, "documents of eval.path": self.held_out.digest}


def read_run_data(config: SftConfig, progress: OnProgress | None = None) -> RunData:
    """Reads and tokenises all data. progress: called with (bytes done, total bytes). Raises UserError."""
    config = dated(config)
    tokenizer = load_tokenizer(config.model.path)
    images = read_images(config.model.path, tokenizer, config.data)  # first, because it may set the chat template
    read = partial(read_data, config, tokenizer=tokenizer, images=images)
    documents, report = read(config.data, progress=progress)
    of_training = None
    if config.eval.share is not None:
        (documents, report), of_training = hold_out(documents, config.eval.share, config.train.seed)
    encoding = read_encoding(config.data, tokenizer)
    ends = answer_ends(config.model.path, tokenizer, taught_ends(documents, tokenizer, encoding))
    held_out = read_held_out(config, read, tokenizer, images, ends, of_training)
    leaks = [
        line
        for name, documents_of_source in held_out.documents.items()
        if isinstance(documents_of_source, Documents)
        for line in leak_hint(name, find_leaks(documents_of_source, documents), len(documents_of_source), "documents")
    ]
    return RunData(documents, report, replace(held_out, leaks=leaks), ends, has_template(tokenizer, encoding))


def dated(config: Config) -> Config:
    """The config with today's date for chat templates, if it has no date. A resumed run reads the first run's date from
    RUN/config.yaml, so its data are the same."""
    day = config.data.template_date or datetime.date.today().isoformat()
    return replace(config, data=replace(config.data, template_date=day))


def read_data(
    config: SftConfig,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    images: Images | None,
    progress: OnProgress | None = None,
) -> tuple[Documents, DataReport]:
    """Reads and tokenises the documents of one data section. config: of the run, for limits and encoding. images: the
    image reader of a vision model. progress: called with (bytes done, total bytes)."""
    max_length, key = length_limit(config.data, config.step.max_tokens_per_device, config.mesh.cp)
    return load_documents(
        data,
        tokenizer,
        max_length=max_length,
        max_length_key=key,
        long_documents=config.data.long_documents,
        vocab_size=hf.vocabulary_size(config.model.path),
        encoding=read_encoding(config.data, tokenizer),
        bad_rows=config.data.bad_rows,
        images=images,
        how=TokeniseOptions(config.data.workers, config.data.cache, progress),
        rows=ParseOptions(**config.row_options),
        tail=config.tail_weight,
    )


def why_unread(config: SftConfig | RlConfig) -> str:
    """Why a dry run cannot read the data: data or tokenizer are not on this machine yet. "" if it can read them."""
    paths = [config.data.path, *(source.path for source in config.data.sources or ())]
    paths += [config.eval.path, *(source.path for source in config.eval.sources or ())]
    if isinstance(config, SftConfig) and isinstance(config.eval.prompts, str):
        paths.append(config.eval.prompts)
    for path in paths:
        if path and is_url(path):
            return f"{path} is on an object store, and a dry run downloads no data"
        if path and looks_like_hub_dataset(path) and not Path(path).exists():
            return f"{path} is on the hub, and a dry run downloads nothing"
    folder = Path(config.model.path)
    if folder.is_dir() and not holds_weights(folder):  # the model is not downloaded yet
        try:
            load_tokenizer(config.model.path)
        except UserError:
            return f"{folder} contains no tokenizer yet"
    return ""


def make_steps(config: SftConfig, documents: Sequence[Document]) -> StepSampler:
    """The documents of each optimizer step."""
    return StepSampler(
        lengths_of(documents),
        documents=config.step.documents,
        tokens=config.step.tokens,
        epochs=config.train.epochs,
        steps=config.train.steps,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        shares=shares_of(documents),
        example_ends=None if (ends := example_ends_of(documents)) is None else ends.tolist(),
    )
