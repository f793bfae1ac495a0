"""A torch.distributed.checkpoint directory as a TensorSource: weights and optimizer state under HuggingFace's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.errors import UserError
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.dcp import METADATA, DcpDirectory, open_dcp
from weft.parallel.shards.dcp_names import STATES, TensorNaming, TensorView, name_tensors, unwrapped
from weft.parallel.shards.rank_files import holds_rank_files, open_rank_files
from weft.parallel.shards.safetensors_files import TensorEntry
from weft.parallel.shards.source import TensorSource

KEY = "model.weights"


class DcpTensors:
    """The tensors of a directory that `views` describes, by HuggingFace's name."""

    def __init__(self, directory: DcpDirectory, views: Mapping[str, TensorView]) -> None:
        self._directory, self._views = directory, views
        self.path: Path = directory.folder / METADATA
        tensors = directory.tensors
        places = {name: tensors[view.stored].chunks for name, view in views.items()}
        begins = {name: chunks[0][1].begin if chunks else 0 for name, chunks in places.items()}
        self.entries = {
            n: TensorEntry(tensors[v.stored].dtype, v.shape, begins[n], begins[n]) for n, v in views.items()
        }

    @property
    def bytes_read(self) -> int:
        """Bytes of elements read from the directory so far."""
        return self._directory.bytes_read

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, on the CPU in the directory's dtype."""
        view = self._views[name]
        box = box or Box.whole(view.shape)
        if view.expert is not None:
            return self._directory.read(view.stored, Box((view.expert, *box.start), (1, *box.size)))[0]
        if view.heads is not None:
            return self._turned(view.stored, view.shape[0] // view.heads, box)
        return self._directory.read(view.stored, box)

    def close(self) -> None:
        """Close the files."""
        self._directory.close()

    def _turned(self, stored: str, width: int, box: Box) -> Tensor:
        """A box of q or k in HuggingFace's order of rows. In each head of `width` rows, stored row 2 i + j is
        HuggingFace's row j width / 2 + i."""
        out = torch.empty(box.size, dtype=self._directory.tensors[stored].dtype)
        first, end = box.start[0], box.start[0] + box.size[0]
        for head in range(first // width, -(-end // width) if end > first else 0):
            rows = torch.arange(max(first, head * width), min(end, (head + 1) * width))
            inside = rows - head * width
            theirs = head * width + 2 * (inside % (width // 2)) + inside // (width // 2)
            low, high = int(theirs.min()), int(theirs.max()) + 1
            values = self._directory.read(stored, Box((low, *box.start[1:]), (high - low, *box.size[1:])))
            out[int(rows[0]) - first : int(rows[-1]) + 1 - first] = values[theirs - low]
        return out


@dataclass
class DcpSource(TensorSource):
    """states: stored name of a weight -> key of the optimizer's state (exp_avg) -> stored name of that state. numbered:
    whether states are keyed by number of a parameter, which does not identify the parameter."""

    directory: DcpDirectory = field(kw_only=True)
    views: Mapping[str, TensorView] = field(kw_only=True)
    states: Mapping[str, Mapping[str, str]] = field(kw_only=True)
    numbered: bool = field(kw_only=True)

    def has_state(self, name: str, key: str) -> bool:
        """Whether the optimizer has this state for a weight."""
        return name in self.views and key in self.states.get(self.views[name].stored, {})

    def moments(self, key: str) -> TensorSource:
        """The optimizer's tensors of one key, under the names of their weights."""
        found = {}
        for name, view in self.views.items():
            stored = self.states.get(view.stored, {}).get(key)
            if stored is not None and stored in self.directory.tensors:
                found[name] = replace(view, stored=stored)
        return _source(self.directory, found)

    def number(self, name: str, key: str) -> float | None:
        """A number in the optimizer's state of a weight; None if there is none."""
        stored = self.states.get(self.views[name].stored, {}).get(key)
        value = None if stored is None else self.directory.value(stored)
        return float(value) if isinstance(value, int | float) else None

    @property
    def keys(self) -> set[str]:
        """The keys of the optimizer's state: exp_avg, step, ..."""
        return {key for keys in self.states.values() for key in keys}


def open_weights(path: str, model: PreTrainedModel) -> DcpSource:
    """The directory of model.weights. Raises UserError if it is no such directory, or does not fit the model."""
    directory = (open_rank_files if holds_rank_files(Path(path).expanduser()) else open_dcp)(path, KEY)
    shapes = {name: stored.shape for name, stored in directory.tensors.items()}
    naming = name_tensors(shapes, model, KEY, str(directory.folder))
    for name, view in naming.weights.items():
        if view.heads is not None and (not view.shape or view.shape[0] % (2 * view.heads)):
            raise UserError(f"{KEY}: {view.stored} is {list(view.shape)}, which is no {name} of this model.")
    states, numbered = _states(directory, naming)
    base = _source(directory, naming.weights)
    return DcpSource(
        base.folder, base.files, key=KEY, directory=directory, views=naming.weights, states=states, numbered=numbered
    )


def _source(directory: DcpDirectory, views: Mapping[str, TensorView]) -> TensorSource:
    return TensorSource(directory.folder, dict.fromkeys(views, DcpTensors(directory, views)), key=KEY)


def _states(directory: DcpDirectory, naming: TensorNaming) -> tuple[dict[str, dict[str, str]], bool]:
    """(stored weight -> key -> stored state, from names such as optimizer.state.NAME.exp_avg; whether any NAME is a
    number)."""
    stored_as = {own: stored for stored, own in naming.own.items()}
    stored_as |= {unwrapped(stored): stored for stored in naming.own}
    found: dict[str, dict[str, str]] = {}
    numbered = False
    for name in (*directory.tensors, *directory.values):
        parts = unwrapped(name).split(".")
        if "state" not in parts or not any(part in STATES for part in parts[: parts.index("state")]):
            continue
        inner = parts[parts.index("state") + 1 :]
        numbered |= len(inner) == 2 and inner[0].isdecimal()
        weight = stored_as.get(".".join(inner[:-1]))
        if weight is None:
            continue
        shape, own = directory.tensors[weight].shape, directory.tensors.get(name)
        if own is not None and own.shape not in ((), shape):
            raise UserError(f"{KEY}: {name} is {list(own.shape)}, and its weight is {list(shape)}.")
        found.setdefault(weight, {})[inner[-1]] = name
    return found, numbered
