"""The embedded engine: a plain HuggingFace model in the trainer's own ranks that generates.

It is filled by the tensor walker, like any other engine, and dropped on sleep, so that it works on every mesh.
B prompts of a batch, T tokens of the longest.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from weft.checkpoint.boxes import Box
from weft.checkpoint.export import manifest_of
from weft.engine.engine import Engine, whole
from weft.models import hf
from weft.models.facts import position_limit
from weft.models.lora import add_delta
from weft.models.walker import checked, walk
from weft.observe import flight
from weft.parallel.parallelize import materialize, move_buffers

_BATCH = 8  # prompts at once


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token each time. seed: of the tokens that are drawn."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """tokens: without the one that ended it. finished: whether one did, before max_new_tokens."""

    tokens: tuple[int, ...]
    finished: bool


class EmbeddedEngine:
    """A copy of a trainer's model, whole and in its compute dtype, on the ranks that want one."""

    def __init__(self, engine: Engine, ends: Sequence[int]) -> None:
        """ends: tokens that end an answer."""
        self.engine, self.ends = engine, sorted(set(ends))
        self.model: PreTrainedModel | None = None
        # Padding is exact for attention alone: a state would run through it, and some rotary tables depend on length.
        alike = engine.built.layout == "packed" and position_limit(engine.built.config.get_text_config()) is None
        self._size = _BATCH if alike else 1

    @property
    def bytes(self) -> int:
        """Of the copy."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._manifest().values())

    def wake(self, here: bool = True) -> None:
        """Take the trainer's weights as they are now; collective. here: whether this rank is going to generate."""
        model = self._build() if here else None
        state = {} if model is None else model.state_dict(keep_vars=True)
        manifest = self._manifest()
        pieces = {piece.disk: piece for piece in self.engine.built.pieces}
        for name, tensor in checked(walk(self.engine.module, pieces.values(), manifest), manifest):
            flight.beat()
            if model is not None:
                piece = pieces[name]
                target = state[piece.runtime].detach()
                target[piece.box.within(Box.whole(tuple(target.shape)))] = piece.to_runtime(tensor, piece.box)
        self._add_adapters(state)
        if model is not None:
            hf.rebuild_buffers(model)
            move_buffers(model, self.engine.device)
        self.model = model

    def sleep(self) -> None:
        """Drop the copy."""
        self.model = None

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """An answer to each prompt, on this rank alone; the process's generators of random numbers stay as they are."""
        out: list[Completion] = []
        for start in range(0, len(prompts), self._size):
            out += self._generate(prompts[start : start + self._size], sampling)
        return out

    def _manifest(self) -> dict[str, Tensor]:
        return manifest_of(self.engine, self.engine.precision.compute)

    def _build(self) -> PreTrainedModel:
        """The model with storage and nothing in it; tied where the trainer's is, and no adapter changes one alone."""
        built = self.engine.built
        model = hf.build_meta(copy.deepcopy(built.config), dtype=self.engine.precision.compute, attention=None)
        for name in hf.tied_parameters(model).keys() - self._tied().keys():
            hf.untie(model, name)
        materialize(model, self.engine.device)
        return model.eval().requires_grad_(False)

    def _tied(self) -> dict[str, str]:
        tied, lora = hf.tied_parameters(self.engine.built.module.hf_model), self.engine.lora
        apart = set() if lora is None else {target.weight for target in lora.targets}
        return {name: owner for name, owner in tied.items() if not {name, owner} & apart}

    def _add_adapters(self, state: Mapping[str, Tensor]) -> None:
        """W + s B A of what is adapted, rounded once to the copy's dtype; collective. state: of the copy, or empty."""
        lora, parameters = self.engine.lora, dict(self.engine.module.named_parameters())
        if lora is None:
            return
        for name, owner in hf.tied_parameters(self.engine.built.module.hf_model).items():
            if name in state and name not in self._tied():
                state[name].detach().copy_(state[owner].detach())  # the walker gave it under its owner's name alone
        for target in lora.targets:
            a, b = (whole(parameters[name]).float() for name in target.names)
            if state:
                weight = state[target.weight].detach()
                weight.copy_(add_delta(weight.float(), target, lora, a, b))

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        assert self.model is not None, "asleep"
        device, longest = self.engine.device, max(len(prompt) for prompt in prompts)
        pad = self.ends[0] if self.ends else 0
        ids_BT = torch.full((len(prompts), longest), pad)
        seen_BT = torch.zeros_like(ids_BT)
        for row, prompt in enumerate(prompts):
            ids_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
            seen_BT[row, longest - len(prompt) :] = 1
        drawn = {"temperature": sampling.temperature, "top_k": 0} if sampling.temperature else {}
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, do_sample=bool(drawn), **drawn,
            eos_token_id=self.ends or None, pad_token_id=pad,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            torch.manual_seed(sampling.seed)
            out = self.model.generate(
                ids_BT.to(device), attention_mask=seen_BT.to(device), generation_config=config,
                stopping_criteria=StoppingCriteriaList([_SignOfLife()]),
            )  # fmt: skip
        assert isinstance(out, Tensor)
        return [self._completion(tokens) for tokens in out[:, longest:].tolist()]

    def _completion(self, tokens: list[int]) -> Completion:
        end = next((place for place, token in enumerate(tokens) if token in self.ends), None)
        return Completion(tuple(tokens[:end]), end is not None)


class _SignOfLife(StoppingCriteria):
    """Stops nothing, and tells the watchdog that tokens are coming."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **extra: object) -> Tensor:
        flight.beat()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def end_tokens(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer, by the model's generation_config.json and config.json, and by the tokenizer."""
    named = [engine.built.config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    with suppress(OSError):  # the file is there for models that are to generate only
        named.append(GenerationConfig.from_pretrained(str(engine.built.source or engine.built.path)).eos_token_id)
    flat = [token for ids in named for token in (ids if isinstance(ids, list) else [ids])]
    return sorted({int(token) for token in flat if token is not None})
