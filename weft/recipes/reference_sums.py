"""Logprob sums of a reference over documents of data sets, cached as preference.cache says.

On disk a cache is data.cache/reference/KEY, with a digest of the reference's files, those of its adapter, its dtype and
weft's version. Each row has the digest of its document's tokens and loss weights, so that a row serves any mesh, order
or selection, and never another document. A row that is missing or foreign after reading is an error.

In memory the sums of training data are part of checkpoints: read again in a row with other documents, they would differ
in their last bits, and a resumed run from the unbroken one.
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

_NO_REFERENCE = "against  no reference: preference.loss reads none"
_UNDER_ADAPTERS = "against  the base under the adapters"
_ROWS = 16  # rows of a rank in one plan, as in an evaluation
_FILE = "sums.npz"


class ReferenceSums(FrozenReadings):
    """engine: the reference, or the trained model, whose adapters are then switched off; None once all is cached, and
    where other ranks have it. documents: by name of the data set."""

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

    def of(self, name: str, indices: Sequence[int]) -> Tensor:
        """[indices] fp64: the sums of these documents of a data set. Raises RuntimeError for one that is in no cache.
        Collective."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        known = self.sums[name]
        if missing := self.missing(name, indices):
            values = self.read_of(name, missing)
            if self.config.preference.cache == "off":
                return values[torch.searchsorted(torch.tensor(missing), chosen)]
            known[missing] = values
        return known[chosen]

    def missing(self, name: str, indices: Sequence[int]) -> list[int]:
        """The documents of a data set, of these, whose sums are not kept; each once, in order."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        missing: list[int] = chosen[self.sums[name][chosen].isnan()].unique().tolist()
        return missing

    def read_of(self, name: str, indices: Sequence[int]) -> Tensor:
        """As `read`, of documents of a data set."""
        return self.read(choose(self.documents[name], indices))

    def read(self, documents: Sequence[Document]) -> Tensor:
        """[documents] fp64: the sums of any documents, computed now. Raises FloatingPointError for one that is not
        finite, on every rank. Collective."""
        if self.engine is None:
            raise RuntimeError("logprobs of the reference are missing in the cache, and the reference is closed")
        with flight.computing("the reference"):
            with self.engine.without_adapter() if self.adapters_off else nullcontext():
                sums = read_sums(self.engine, documents)
            if len(bad := (~sums.isfinite()).nonzero()[:, 0]):
                sources = ", ".join(first_sources(documents, bad[:4].tolist()))
                more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
                raise FloatingPointError(
                    f"the reference ({self.engine.config.model.path}) gives log probabilities that are not finite, of "
                    f"documents {sources}{more}. Look at its weights, or set reference.param_dtype=fp32."
                )
        return sums

    def state(self) -> dict[str, str]:
        """The sums of training data that are in memory only, base64 of their bytes (fp64)."""
        if self.config.preference.cache != "memory":
            return {}
        return {TRAINED: base64.b64encode(self.sums[TRAINED].numpy().astype("<f8").tobytes()).decode()}

    def restore(self, state: Mapping[str, str]) -> None:
        """Takes the `state` of a checkpoint, of the same data and reference. Raises UserError if it is damaged."""
        if TRAINED not in state or self.config.preference.cache != "memory":
            return
        known = self.sums[TRAINED]
        values = np.frombuffer(base64.b64decode(state[TRAINED]), "<f8")
        if len(values) != len(known):
            raise UserError(
                f"the checkpoint has logprobs of the reference for {len(values)} answers, and the data {len(known)}: "
                "resume from an earlier checkpoint, or set preference.cache=off."
            )
        known.copy_(torch.from_numpy(values.copy()))

    def fill(self) -> list[str]:
        """Reads what data.cache lacks of all documents, and keeps it there. Returns lines for the opening.
        Collective."""
        engine = self.engine
        assert engine is not None and self.config.data.cache is not None
        folder, stored, is_damaged = self._stored(engine)
        digests = {name: [document_digest(d) for d in data_set] for name, data_set in self.documents.items()}
        read, total = 0, sum(len(data_set) for data_set in self.documents.values())
        for name, documents in self.documents.items():
            known = self.sums[name]
            known.copy_(torch.tensor([stored.get(d, torch.nan) for d in digests[name]], dtype=torch.float64))
            missing = known.isnan().nonzero()[:, 0].tolist()
            chosen = choose(documents, missing)
            metas = engine.planner.metadata(chosen)
            budget = _ROWS * engine.mesh.loss_ranks * engine.config.step.max_tokens_per_device
            for first, last in split_by_tokens(metas, budget) if missing else ():
                flight.beat()
                known[missing[first:last]] = self.read(choose(documents, missing[first:last]))
                read += last - first
            stored |= dict(zip(digests[name], known.tolist(), strict=True))
            if bool(known.isnan().any()):
                raise RuntimeError(f"{folder}: rows of the reference's logprobs are missing")
        if read:
            run_on_first_rank(lambda: _write(folder, stored), engine.ranks)
        damaged = [f"cache    {folder / _FILE} was damaged: its rows were read again by the reference"] * is_damaged
        return [
            *damaged,
            f"cache    reference logprobs of {total:,} answers in {folder}: {total - read:,} were there, {read:,} read",
        ]

    def _stored(self, engine: Engine) -> tuple[Path, dict[int, float], bool]:
        """(The folder of this reference's cache, what is there, as in _read), the first rank's on every rank, because
        data.cache may be on a disk of each machine. Collective."""
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
    """Where no loss reads a reference: all sums are 0, and no checkpoint has them."""

    def __init__(self, config: DpoConfig, documents: Mapping[str, Sequence[Document]]) -> None:
        super().__init__(config, None, documents, adapters_off=False)

    def of(self, name: str, indices: Sequence[int]) -> Tensor:
        return torch.zeros(len(indices), dtype=torch.float64)

    def state(self) -> dict[str, str]:
        return {}


def check_reference(config: DpoConfig) -> None:
    """Raises UserError for a reference with another tokenizer than the trained model's."""
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
        lines = [f"against  {frozen.model.path}, a reference of its own: {model.memory}"]
    if config.preference.cache == "disk":
        lines += reference.fill()
        if frozen is not None and closes_reference(config):
            reference.engine = None
    return reference, lines


def reference_line(config: DpoConfig) -> str:
    """What a dry run says of the reference."""
    if not config.preference.has_reference:
        return _NO_REFERENCE
    if not own_reference(config):
        return _UNDER_ADAPTERS
    return f"against  {config.reference.path or config.model.path}, a reference of its own"


def _weight_files(config: EngineConfig) -> list[Path]:
    """The files that the weights of an engine come from: of the model, and of the adapter that it goes on with."""
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
    """(Digest of a document -> its sum, whether there is a file that cannot be used). All is read again then."""
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
