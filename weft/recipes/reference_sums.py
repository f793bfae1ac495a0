"""Logprob sums of a reference over documents of data sets, cached according to preference.cache.

On disk a cache is data.cache/reference/KEY. KEY is a digest of the reference's files, its adapter's files, its dtype
and weft's version. Each row has the digest of its document's tokens and loss weights, so a row applies on any mesh and
in any order or selection, and never to another document. If a row is missing or foreign after reading, weft reports an
error.

In memory the sums of training data are part of checkpoints. Computed again in a row with other documents, they would
differ in their last bits, and a resumed run would differ from an uninterrupted one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from weft.config.dpo_schema import DpoConfig, own_reference
from weft.data.same_tokenizer import check_same_tokenizer
from weft.engine.batch.document import Document, choose, first_sources
from weft.engine.config import EngineConfig
from weft.engine.document_sums import read_sums
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.errors import UserError
from weft.launch import flight
from weft.launch.consistency import run_on_first_rank
from weft.parallel.shards import adapter_files
from weft.parallel.shards.load import Progress
from weft.parallel.shards.source import fetch_model, open_model_weights
from weft.recipes.evaluate import split_by_tokens
from weft.recipes.frozen_models import closes_reference, preference_reference
from weft.recipes.recipe import FrozenReadings
from weft.recipes.run_data import TRAINED
from weft.version import __version__

_NO_REFERENCE = "against  no reference: no loss in preference.loss reads one"
_UNDER_ADAPTERS = "against  the base under the adapters"
_ROWS = 16  # rows per rank in one plan, as in an evaluation
_FILE = "sums.npz"


class ReferenceSums(FrozenReadings):
    """engine: the reference, or the trained model, whose adapters are then switched off; None if all sums are cached,
    or if other ranks have the reference. documents: by name of the data set."""

    def __init__(
        self,
        config: DpoConfig,
        engine: Engine | None,
        documents: Mapping[str, Sequence[Document]],
        *,
        adapters_off: bool,
    ) -> None:
        self.config, self.documents, self.adapters_off = config, documents, adapters_off
        self.engine = engine
        self.sums = {
            name: torch.full((len(data_set),), torch.nan, dtype=torch.float64) for name, data_set in documents.items()
        }

    def sums_of(self, name: str, indices: Sequence[int]) -> Tensor:
        """[indices] fp64: the sums of these documents of a data set. Raises RuntimeError for a document that is in no
        cache. Collective."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        cached = self.sums[name]
        if missing := self.missing(name, indices):
            values = self.read_of(name, missing)
            if self.config.preference.cache == "off":
                return values[torch.searchsorted(torch.tensor(missing), chosen)]
            cached[missing] = values
        return cached[chosen]

    def missing(self, name: str, indices: Sequence[int]) -> list[int]:
        """The documents among these whose sums are not cached; each once, in order."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        missing: list[int] = chosen[self.sums[name][chosen].isnan()].unique().tolist()
        return missing

    def read_of(self, name: str, indices: Sequence[int]) -> Tensor:
        """Like `read`, for documents of a data set."""
        return self.read(choose(self.documents[name], indices))

    def read(self, documents: Sequence[Document]) -> Tensor:
        """[documents] fp64: the sums of any documents, computed now. Raises FloatingPointError on every rank for a
        document with a non-finite sum. Collective."""
        if self.engine is None:
            raise RuntimeError("logprobs of the reference are missing in the cache, and the reference is closed")
        with flight.computing("the reference"):
            with self.engine.without_adapter() if self.adapters_off else nullcontext():
                sums = read_sums(self.engine, documents)
            if len(bad := (~sums.isfinite()).nonzero()[:, 0]):
                sources = ", ".join(first_sources(documents, bad[:4].tolist()))
                others_text = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
                raise FloatingPointError(
                    f"the reference ({self.engine.config.model.path}) computes log probabilities that are not finite, "
                    f"for documents {sources}{others_text}. Check its weights, or set reference.param_dtype=fp32."
                )
        return sums

    def state(self) -> dict[str, str]:
        """The sums of training data that are only in memory, base64 of their bytes (fp64)."""
        if self.config.preference.cache != "memory":
            return {}
        return {TRAINED: base64.b64encode(self.sums[TRAINED].numpy().astype("<f8").tobytes()).decode()}

    def restore(self, state: Mapping[str, str]) -> None:
        """Restores the `state` of a checkpoint with the same data and reference. Raises UserError if it is damaged."""
        if TRAINED not in state or self.config.preference.cache != "memory":
            return
        sums = self.sums[TRAINED]
        values = np.frombuffer(base64.b64decode(state[TRAINED]), "<f8")
        if len(values) != len(sums):
            raise UserError(
                f"the checkpoint has logprobs of the reference for {len(values)} answers, but the data has "
                f"{len(sums)}: resume from an earlier checkpoint, or set preference.cache=off."
            )
        sums.copy_(torch.from_numpy(values.copy()))

    def fill(self) -> list[str]:
        """Computes the sums that are missing in data.cache, and stores them there. Returns lines for the opening.
        Collective."""
        engine = self.engine
        assert engine is not None and self.config.data.cache is not None
        folder, stored, is_damaged = self._stored(engine)
        digests = {name: [document_digest(d) for d in data_set] for name, data_set in self.documents.items()}
        read, total = 0, sum(len(data_set) for data_set in self.documents.values())
        for name, documents in self.documents.items():
            sums = self.sums[name]
            sums.copy_(torch.tensor([stored.get(d, torch.nan) for d in digests[name]], dtype=torch.float64))
            missing = sums.isnan().nonzero()[:, 0].tolist()
            chosen = choose(documents, missing)
            metas = engine.planner.metadata(chosen)
            budget = _ROWS * engine.mesh.loss_ranks * engine.config.step.max_tokens_per_device
            for first, last in split_by_tokens(metas, budget) if missing else ():
                flight.beat()
                sums[missing[first:last]] = self.read(choose(documents, missing[first:last]))
                read += last - first
            stored |= dict(zip(digests[name], sums.tolist(), strict=True))
            if bool(sums.isnan().any()):
                raise RuntimeError(f"{folder}: rows of the reference's logprobs are missing")
        if read:
            run_on_first_rank(lambda: _write(folder, stored), engine.ranks)
        damaged = [f"cache    {folder / _FILE} was damaged: the reference computed its rows again"] * is_damaged
        return [
            *damaged,
            f"cache    reference logprobs of {total:,} answers in {folder}: {total - read:,} cached, {read:,} computed",
        ]

    def _stored(self, engine: Engine) -> tuple[Path, dict[int, float], bool]:
        """(The folder of this reference's cache, its content as in _read). Every rank gets the first rank's, because
        data.cache may be on a local disk of each machine. Collective."""
        shared: list[tuple[Path, dict[int, float], bool]] = [(Path(), {}, False)]
        if engine.ranks.is_first:
            config, digest = engine.config, hashlib.blake2b(digest_size=16)
            for file in _weight_files(config):
                with file.open("rb") as stream:
                    while block := stream.read(1 << 24):
                        digest.update(block)
            drawn = f"drawn from {config.seed}" if config.model.init == "random" else ""
            words = (str(engine.precision.compute), config.model.attention, config.lora.base, drawn, __version__)
            digest.update("\0".join(words).encode())
            folder = Path(str(self.config.data.cache)).expanduser() / "reference" / digest.hexdigest()
            shared = [(folder, *_read(folder))]
        dist.broadcast_object_list(shared, src=0, group=engine.ranks.group)
        return shared[0]


class NoReference(ReferenceSums):
    """For losses that read no reference: all sums are 0, and checkpoints do not contain them."""

    def __init__(self, config: DpoConfig, documents: Mapping[str, Sequence[Document]]) -> None:
        super().__init__(config, None, documents, adapters_off=False)

    def sums_of(self, name: str, indices: Sequence[int]) -> Tensor:
        return torch.zeros(len(indices), dtype=torch.float64)

    def state(self) -> dict[str, str]:
        return {}


def check_reference(config: DpoConfig) -> None:
    """Raises UserError if the reference and the trained model have different tokenizers."""
    if own_reference(config) and config.reference.path is not None:
        remedy = "Log probabilities of other tokens cannot be compared: choose a reference of the same family."
        check_same_tokenizer(config.model.path, config.reference.path, "reference.path", remedy)


def open_reference(
    config: DpoConfig, engine: Engine, documents: Mapping[str, Sequence[Document]], progress: Progress | None = None
) -> tuple[ReferenceSums, list[str]]:
    """(The reference of preferences, lines for the opening). engine: the trained model. documents: as in
    ReferenceSums. Collective."""
    if not config.preference.has_reference:
        return NoReference(config, documents), [_NO_REFERENCE]
    frozen = preference_reference(config, engine.config)
    if frozen is None:
        reference, lines = ReferenceSums(config, engine, documents, adapters_off=True), [_UNDER_ADAPTERS]
    else:
        model = open_frozen("reference", frozen, engine.ranks, shares_with=engine, progress=progress)
        reference = ReferenceSums(config, model, documents, adapters_off=False)
        lines = [f"against  {frozen.model.path}, a separate reference: {model.memory}"]
    if config.preference.cache == "disk":
        lines += reference.fill()
        if frozen is not None and closes_reference(config):
            reference.engine = None
    return reference, lines


def reference_line(config: DpoConfig) -> str:
    """The dry run's line about the reference."""
    if not config.preference.has_reference:
        return _NO_REFERENCE
    if not own_reference(config):
        return _UNDER_ADAPTERS
    return f"against  {config.reference.path or config.model.path}, a separate reference"


def _weight_files(config: EngineConfig) -> list[Path]:
    """The files with the weights of an engine: of the model, and of the adapter from which it continues."""
    folder, weights = fetch_model(config.model.path), list[Path]()
    if config.model.dcp_weights is not None:
        weights = sorted(path for path in Path(config.model.dcp_weights).expanduser().rglob("*") if path.is_file())
    elif config.model.init == "pretrained":
        with closing(open_model_weights(config.model.path)) as source:
            weights = sorted({file.path for file in source.files.values()})
    adapter = () if config.lora.path is None else (adapter_files.CONFIG, adapter_files.WEIGHTS)
    return [*weights, folder / "config.json", *(Path(str(config.lora.path)) / name for name in adapter)]


def document_digest(document: Document) -> int:
    """Digest of the tokens, loss weights and images of a document."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(document.tokens.numpy().tobytes())
    digest.update(document.weights.numpy().tobytes())
    if document.media is not None:
        for name, value in sorted(document.media.inputs.items()):
            digest.update(name.encode())
            digest.update(torch.as_tensor(value).contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def _read(folder: Path) -> tuple[dict[int, float], bool]:
    """(Digest of a document -> its sum, whether a file is unusable). If so, everything is computed again."""
    if not (folder / _FILE).exists():
        return {}, False
    try:
        with np.load(folder / _FILE, allow_pickle=False) as arrays:
            digests: NDArray[np.uint64] = arrays["digests"]
            sums: NDArray[np.float64] = arrays["sums"]
            check = hashlib.blake2b(digests.tobytes() + sums.tobytes(), digest_size=16).hexdigest()
            if len(digests) != len(sums) or str(arrays["check"]) != check:
                return {}, True
            return dict(zip(digests.tolist(), sums.tolist(), strict=True)), False
    except (OSError, KeyError, ValueError, EOFError, BadZipFile):
        return {}, True


def _write(folder: Path, stored: Mapping[int, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    digests, sums = np.array(list(stored), np.uint64), np.array(list(stored.values()), np.float64)
    check = hashlib.blake2b(digests.tobytes() + sums.tobytes(), digest_size=16).hexdigest()
    unfinished = folder / f"{_FILE}.partial"
    with unfinished.open("wb") as stream:
        np.savez(stream, digests=digests, sums=sums, check=np.array(check))
    unfinished.replace(folder / _FILE)
