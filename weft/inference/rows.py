"""The rows of a generating batch: the model's state of each row, and one forward for all rows.

Rows join in groups that share a prompt, which is forwarded once. They leave when their completion has ended. R rows, P
prompts, T tokens of the longest prompt, S slots, K key heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.engine.batch.media import Media
from weft.models import hf
from weft.models.cost import expert_counts
from weft.models.facts import find_facts
from weft.models.families import family_of
from weft.models.routing import RouteRecorder
from weft.models.state_mixers import find_mixers
from weft.models.vision import find_vision
from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds

Routes = NDArray[np.int16]
_SLOTS, _FIRST_SLOTS = (
    64,
    16,
)  # slots grow by a quarter, rounded up to a multiple of _SLOTS; up to _SLOTS, of _FIRST_SLOTS
_PREFILL_TOKENS = 16_384  # most tokens of one forward of prompts, including padding; a longer prompt is forwarded alone
_FILL = 0.8  # least share of real tokens in a padded forward of prompts


class DecodingRows(Protocol):
    """The rows of a batch. Row r has lengths[r] tokens. Methods that forward return fp32 logits.

    routes: of the last forward, per prompt or row [new tokens, decoder layers, top_k], with -1 where a layer routes
    nothing. Empty for dense models, or if routes are not recorded.
    """

    lengths: NDArray[np.int64]
    routes: list[Routes]

    def join(
        self, prompts: Sequence[Sequence[int]], copies: Sequence[int], media: Sequence[Media | None] | None = None
    ) -> Tensor:
        """Add copies[p] rows for each prompt p, after the existing rows; returns logits [P, V] after each prompt.
        media: the images of each prompt; None if no prompt has any."""
        ...

    def advance(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to every row; returns logits [R, V]."""
        ...

    def leave(self, finished: Sequence[int]) -> list[int]:
        """Remove rows. Returns `order`: new row i was row order[i]."""
        ...

    def drop(self) -> None:
        """Remove all rows and free their memory."""
        ...


def _without(finished: Sequence[int], rows: int) -> list[int]:
    """The order of the remaining rows: the last ones fill the gaps of the removed ones."""
    num_left, out = rows - len(finished), set(finished)
    order, movers = list(range(num_left)), [row for row in range(num_left, rows) if row not in out]
    for gap, mover in zip((row for row in finished if row < num_left), movers, strict=True):
        order[gap] = mover
    return order


@dataclass(frozen=True)
class _PromptBatch:
    """Prompts laid out for one forward. positions: [P, T], or [3, P, T] for models with multimodal positions. ahead:
    position after the prompt's last token, minus its length; images make it nonzero."""

    ids_PT: Tensor
    positions: Tensor
    bounds: Bounds
    media: Mapping[str, Tensor] = field(default_factory=dict)
    ahead: int = 0


class _GenerationModel:
    """The forward of a causal LM in two parts: last hidden states, and logits for chosen positions."""

    def __init__(self, model: PreTrainedModel, routes: bool) -> None:
        facts = find_facts(model)
        self.config, self.device = model.config.get_text_config(), model.device
        self._base, self._transform = model.get_submodule(facts.base), facts.transform
        self._vision = find_vision(self._base, facts)
        head = model.get_submodule(facts.head)
        assert isinstance(head, nn.Linear)
        self._head = head
        self._positions = hf.accepts(self._base, "position_ids")
        family = family_of(self.config.model_type)
        self._bounded = family.attention is None and hf.accepts(self._base, BOUNDS_ARGUMENT)
        carries = next(find_mixers(self._base), None) is not None  # a state would leak between packed documents
        self.packs = self._bounded and family.layout == "packed" and not carries
        self._cache_argument = hf.cache_argument(self._base)
        self._recorder: RouteRecorder | None = None
        if routes and any(".experts." in name for name, _ in model.named_parameters()):
            layers = list(model.get_submodule(facts.layers).children())
            self._recorder = RouteRecorder(layers, *expert_counts(self.config))

    def hidden(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        bounds: Bounds,
        cache: hf.RowCache | None,
        media: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The last hidden states [B, T, H]. cache: receives new keys and values; None: no cache. media: as in
        TrainModule."""
        extra: dict[str, Any] = {"use_cache": False, **(media or {})}
        if cache is not None:
            extra |= {"use_cache": True, self._cache_argument: cache}
        if self._positions:
            extra["position_ids"] = positions_BT
        if self._bounded:
            extra[BOUNDS_ARGUMENT] = bounds
        hidden_BTH: Tensor = self._base(input_ids=ids_BT, **extra).last_hidden_state
        return hidden_BTH

    def routes(self, batch: int, lengths: Sequence[int]) -> list[Routes]:
        """The routes of the last forward, for the first lengths[b] tokens of each entry b of its batch. Empty if they
        are not recorded, or if the model's routers do not choose by topk (phimoe's)."""
        if self._recorder is None or not len(recorded := self._recorder.take()):
            return []
        return [entry[:length] for entry, length in zip(np.split(recorded, batch), lengths, strict=True)]

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] in fp32: the product in the weight's dtype, the rest in fp32, as in the trainer's head."""
        weight = self._head.weight
        hidden_NH = hidden_NH.to(weight.dtype)
        logits_NV, adapter = F.linear(hidden_NH, weight, self._head.bias), getattr(self._head, "lora", None)
        return self._transform((logits_NV if adapter is None else logits_NV + adapter(hidden_NH)).float())

    def laid(self, prompts: Sequence[Sequence[int]], media: Media | None = None) -> _PromptBatch:
        """Lay out prompts as one right-padded batch. media: the images of a prompt, which must be the only one."""
        if media is not None:
            return self._with_images(prompts[0], media)
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        positions_PT = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        bounds = Bounds((longest,) * len(prompts), padded=True)
        return _PromptBatch(torch.from_numpy(ids).to(self.device), positions_PT, bounds)

    def _with_images(self, prompt: Sequence[int], media: Media) -> _PromptBatch:
        vision, tokens_T, length = self._vision, torch.tensor(prompt), len(prompt)
        assert vision is not None, "text-only models refuse prompts with images"
        positions = vision.positions(self._base, tokens_T, media.inputs)
        ahead = 0 if positions is None else int(positions.max()) + 1 - length
        positions = torch.arange(length) if positions is None else positions
        bounds = Bounds((length,), padded=True)
        if vision.both_ways:
            last_T = vision.last_seen(tokens_T).to(self.device)
            bounds = replace(Bounds.packed((length,), self.device), last_seen=last_T)
        inputs = {name: value.to(self.device) for name, value in media.inputs.items()}
        return _PromptBatch(
            tokens_T[None].to(self.device), positions[..., None, :].to(self.device), bounds, inputs, ahead
        )


class CachedRows:
    """Rows with a key-value cache, so that every token is forwarded once. A layer has a pair of tensors [rows, K,
    slots, D], with a row's token t in slot t. So rows of different lengths need no alignment, and moving a row copies
    only that row."""

    def __init__(self, model: PreTrainedModel, routes: bool = False) -> None:
        self.lengths = np.zeros(0, dtype=np.int64)
        self.routes: list[Routes] = []
        self._model = _GenerationModel(model, routes)
        self._ahead = np.zeros(0, dtype=np.int64)  # of each row, as in _Laid
        self._tensors_by_layer: dict[int, tuple[Tensor, Tensor]] = {}
        self._room = (0, 0)  # allocated rows and slots
        self._states = self._new_cache()
        # For the current forward: slots in use, prompt of each new row, tokens of each row, whether these are equal.
        self._longest, self._owner_R, self._past_R, self._even = 0, torch.empty(0), torch.empty(0), True

    def join(
        self, prompts: Sequence[Sequence[int]], copies: Sequence[int], media: Sequence[Media | None] | None = None
    ) -> Tensor:
        """As in DecodingRows. Prompts ordered by length need the least padding."""
        logits = []
        self.routes = []
        media = [None] * len(prompts) if media is None else media
        for start, end in self._forwards(prompts, media):
            laid = self._model.laid(prompts[start:end], media[start])
            logits.append(self._prefill(laid, [len(prompt) for prompt in prompts[start:end]], copies[start:end]))
        return torch.cat(logits)

    def advance(self, tokens: Sequence[int]) -> Tensor:
        """As in DecodingRows."""
        device, rows = self._model.device, len(tokens)
        assert rows == len(self.lengths), (rows, len(self.lengths))
        self._longest = int(self.lengths.max()) + 1
        self._reserve(rows, self._longest)
        self._past_R = torch.from_numpy(self.lengths.copy()).to(device)
        self._even = bool((self.lengths == self.lengths[0]).all())
        bounds = Bounds((1,) * rows, padded=True, past=self._past_R, even=self._even)
        ids_R1 = torch.tensor(tokens, device=device)[:, None]
        self._states.hold = self._store_token
        positions_R = self._past_R + torch.from_numpy(self._ahead).to(device)
        hidden_R1H = self._model.hidden(ids_R1, positions_R[:, None], bounds, self._states)
        self.routes = self._model.routes(rows, [1] * rows)
        self.lengths = self.lengths + 1
        return self._model.logits(hidden_R1H[:, 0])

    def leave(self, finished: Sequence[int]) -> list[int]:
        """As in DecodingRows. The last rows fill the gaps, so that little is moved."""
        order = _without(finished, len(self.lengths))
        gaps = [row for row in finished if row < len(order)]
        movers = [order[gap] for gap in gaps]
        if movers:
            longest = int(self.lengths[movers].max())
            for keys_values in self._tensors_by_layer.values():
                for tensor in keys_values:
                    tensor[gaps, :, :longest] = tensor[movers, :, :longest]
        self._states.keep(order)
        self.lengths, self._ahead = self.lengths[order], self._ahead[order]
        return order

    def drop(self) -> None:
        """As in DecodingRows."""
        self.lengths, self._tensors_by_layer, self._room = np.zeros(0, dtype=np.int64), {}, (0, 0)
        self._ahead = self.lengths.copy()
        self._states = self._new_cache()

    def _forwards(self, prompts: Sequence[Sequence[int]], media: Sequence[Media | None]) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of consecutive prompts that are forwarded as one batch. A prompt with images is a batch of
        its own. Layers with a recurrent state allow no padding, which would change the state."""
        fill = 1.0 if self._states.has_states else _FILL
        start = 0
        while start < len(prompts):
            end, longest, real = start, 0, 0
            while end < len(prompts):
                wider, num_tokens = max(longest, len(prompts[end])), real + len(prompts[end])
                area = wider * (end + 1 - start)
                pictured = media[start] is not None or media[end] is not None
                if end > start and (pictured or area > _PREFILL_TOKENS or num_tokens < fill * area):
                    break
                end, longest, real = end + 1, wider, num_tokens
            yield start, end
            start = end

    def _prefill(self, laid: _PromptBatch, lengths: Sequence[int], copies: Sequence[int]) -> Tensor:
        """Forward prompts and add their rows; returns logits [P, V] after each prompt."""
        owner = np.repeat(np.arange(len(lengths)), copies)
        self._reserve(len(self.lengths) + len(owner), laid.ids_PT.shape[1])
        self._owner_R = torch.from_numpy(owner).to(self._model.device)
        cache = self._new_cache()
        hidden_PTH = self._model.hidden(laid.ids_PT, laid.positions, laid.bounds, cache, laid.media)
        self.routes += self._model.routes(len(lengths), lengths)
        cache.keep(owner.tolist())
        if len(self.lengths):
            self._states.append(cache)
        else:
            self._states = cache
        self.lengths = np.concatenate([self.lengths, np.array(lengths)[owner]])
        self._ahead = np.concatenate([self._ahead, np.full(len(owner), laid.ahead)])
        last_P = torch.tensor(lengths, device=self._model.device) - 1
        return self._model.logits(hidden_PTH[torch.arange(len(lengths), device=last_P.device), last_P])

    def _new_cache(self) -> hf.RowCache:
        return hf.RowCache(self._model.config, self._store_prompts)

    def _store_prompts(self, layer: int, keys_PKTD: Tensor, values_PKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store each prompt's keys and values in its new rows; attention receives only the prompts' keys and values."""
        rows = slice(len(self.lengths), len(self.lengths) + len(self._owner_R))
        for stored, new in zip(self._tensors(layer, keys_PKTD, values_PKTD), (keys_PKTD, values_PKTD), strict=True):
            stored[rows, :, : new.shape[2]] = new[self._owner_R]
        return keys_PKTD, values_PKTD

    def _store_token(self, layer: int, keys_RK1D: Tensor, values_RK1D: Tensor) -> tuple[Tensor, Tensor]:
        """Store each row's new token in its next slot; attention gets all slots up to the longest row's."""
        rows = len(self._past_R)
        keys_values = self._tensors(layer, keys_RK1D, values_RK1D)
        for stored, new in zip(keys_values, (keys_RK1D, values_RK1D), strict=True):
            if self._even:
                stored[:rows, :, self._longest - 1] = new[:, :, 0]
            else:
                stored[torch.arange(rows, device=new.device), :, self._past_R] = new[:, :, 0]
        keys, values = keys_values
        return keys[:rows, :, : self._longest], values[:rows, :, : self._longest]

    def _tensors(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._tensors_by_layer:
            rows, slots = self._room
            self._tensors_by_layer[layer] = (
                keys.new_zeros(rows, keys.shape[1], slots, keys.shape[3]),
                values.new_zeros(rows, values.shape[1], slots, values.shape[3]),
            )
        return self._tensors_by_layer[layer]

    def _reserve(self, rows: int, slots: int) -> None:
        """Allocate this many rows and slots. Unused slots are zeroed: they are masked, but NaN x 0 would be NaN."""
        had_rows, had_slots = self._room
        if rows <= had_rows and slots <= had_slots:
            return
        if slots > had_slots:
            slots = max(slots, had_slots + had_slots // 4)
            step = _FIRST_SLOTS if slots <= _SLOTS else _SLOTS
            slots = -(-slots // step) * step
        self._room = (max(rows, had_rows), max(slots, had_slots))
        for layer, keys_values in self._tensors_by_layer.items():
            self._tensors_by_layer[layer] = (_grown(keys_values[0], *self._room), _grown(keys_values[1], *self._room))


def _grown(tensor: Tensor, rows: int, slots: int) -> Tensor:
    grown, (had_rows, _, had_slots, _) = tensor.new_empty(rows, tensor.shape[1], slots, tensor.shape[3]), tensor.shape
    grown[:had_rows, :, :had_slots] = tensor
    grown[had_rows:, :, :had_slots] = 0
    grown[:, :, had_slots:] = 0
    return grown


class UncachedRows:
    """Rows without a cache: every step forwards all tokens again, with rows of equal length in one batch, laid out as
    in the trainer. For families whose cache CachedRows does not support."""

    def __init__(self, model: PreTrainedModel, routes: bool = False) -> None:
        self.lengths = np.zeros(0, dtype=np.int64)
        self.routes: list[Routes] = []
        self._model = _GenerationModel(model, routes)
        self._tokens: list[list[int]] = []
        self._media: list[Media | None] = []

    def join(
        self, prompts: Sequence[Sequence[int]], copies: Sequence[int], media: Sequence[Media | None] | None = None
    ) -> Tensor:
        """As in DecodingRows."""
        media = [None] * len(prompts) if media is None else media
        self._tokens += [list(prompt) for prompt, n in zip(prompts, copies, strict=True) for _ in range(n)]
        self._media += [images for images, n in zip(media, copies, strict=True) for _ in range(n)]
        self._count()
        return self._logits(prompts, media)

    def advance(self, tokens: Sequence[int]) -> Tensor:
        """As in DecodingRows."""
        for row, token in zip(self._tokens, tokens, strict=True):
            row.append(token)
        self._count()
        logits_RV = self._logits(self._tokens, self._media)
        self.routes = [routes[-1:] for routes in self.routes]
        return logits_RV

    def leave(self, finished: Sequence[int]) -> list[int]:
        """As in DecodingRows."""
        order = _without(finished, len(self._tokens))
        self._tokens = [self._tokens[row] for row in order]
        self._media = [self._media[row] for row in order]
        self._count()
        return order

    def drop(self) -> None:
        """As in DecodingRows."""
        self._tokens, self._media = [], []
        self._count()

    def _count(self) -> None:
        self.lengths = np.array([len(row) for row in self._tokens], dtype=np.int64)

    def _logits(self, rows: Sequence[Sequence[int]], media: Sequence[Media | None]) -> Tensor:
        equal_length: dict[tuple[int, int], list[int]] = {}  # rows of equal length; a row with images is alone
        for index, row in enumerate(rows):
            equal_length.setdefault((len(row), 0 if media[index] is None else index + 1), []).append(index)
        logits: dict[int, Tensor] = {}
        routes: dict[int, Routes] = {}
        for (length, _), places in equal_length.items():
            laid = self._model.laid([rows[index] for index in places], media[places[0]])
            ids_RT, positions, bounds = laid.ids_PT, laid.positions, laid.bounds
            if self._model.packs and not laid.media:
                ids_RT, positions = ids_RT.view(1, -1), positions.reshape(1, -1)
                bounds = Bounds.packed((length,) * len(places), ids_RT.device)
            hidden = self._model.hidden(ids_RT, positions, bounds, None, laid.media)
            last_RH = hidden.flatten(0, 1).unflatten(0, (len(places), length))[:, -1]
            logits.update(zip(places, self._model.logits(last_RH), strict=True))
            routes.update(zip(places, self._model.routes(len(places), [length] * len(places)), strict=False))
        self.routes = [routes[index] for index in sorted(routes)]
        return torch.stack([logits[index] for index in range(len(rows))])
