"""TrainModule, the trained root: HuggingFace's base model, and a Head instead of the rest of the causal LM.

Its children have HuggingFace's names, so that parameter names are those of the causal LM. B batch, T tokens of a row, H
hidden width, V vocabulary, N selected predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.models import hf
from weft.models.balance import Balance, balance_sum, count_choices
from weft.models.facts import Facts, find_facts
from weft.models.families import family_of
from weft.models.low_rank import LowRank
from weft.models.readouts import HIDDEN, TOP, TOP_IDS, ReadoutSpec, capture_outputs, needs_logits
from weft.models.state_mixers import PerDocumentMixer, run_per_document
from weft.models.vision import vision_context
from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds
from weft.ops.communicator import FeatureExchange
from weft.ops.divergence import Comparison, divergences
from weft.ops.head import KnownGrad, LogitTransform, VocabularyShard, chunked_readouts, logprob_and_top1
from weft.ops.low_bit import Format
from weft.ops.offload import ActivationOffload
from weft.ops.selected import selected_logits

OF_ROUTERS = ("balance", "choices", "layers")  # outputs of TrainModule.forward that are not per prediction


class Head(nn.Module):
    """Computes per-token readouts from the last hidden states, without a [N, V] tensor."""

    def __init__(self, linear: nn.Linear, transform: LogitTransform) -> None:
        super().__init__()
        self.weight = linear.weight  # [V, H]; if tied, the embedding's Parameter
        self.bias = linear.bias
        self.transform = transform
        self.temperature = 1.0  # divides the logits, after the family's own transform
        self.exact = False  # readouts are bitwise equal to a sampler's records
        self.lora: LowRank | None = None
        self.shard: VocabularyShard | None = None
        self._enter: Callable[[Tensor], Tensor] = lambda hidden: hidden

    def divide(self, shard: VocabularyShard, enter: Callable[[Tensor], Tensor]) -> None:
        """Compute with this rank's shard of the vocabulary. enter: identity on hidden states whose backward sums the
        gradient over the ranks."""
        self.shard, self._enter = shard, enter

    def forward(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        readouts: Collection[str],
        known_grad: KnownGrad | None = None,
        chosen_NC: Tensor | None = None,
        comparisons: Sequence[Comparison] = (),
    ) -> dict[str, Tensor]:
        """Readouts of each prediction: `logprob` of the target and, if in `readouts`, `entropy`, [N] fp32.

        known_grad: the gradient of logprob (and then of `divergence`) up to a factor, if known; saves a pass. `top1`
        replaces `entropy`, without gradients: 1 where no token is likelier than the target. chosen_NC: the tokens of
        `chosen_logits` (models/readouts.py). Single logits together with `entropy` cost another pass. comparisons: the
        teachers of `divergence` and of `agreement`, which has no gradient (ops/divergence.py). `last_hidden`: [N, H],
        the head's input, in its dtype; it is then the only readout.
        """
        if "last_hidden" in readouts:
            return {"last_hidden": hidden_NH.to(self.weight.dtype)}
        hidden_NH, weight = self._enter(hidden_NH.to(self.weight.dtype)), self.weight
        if self.lora is not None and self.lora.switch.on:
            # W h + B (s A h) is one matrix, [W B], times one vector; the readouts never need the logits themselves.
            hidden_NH = torch.cat([hidden_NH, self.lora.down(hidden_NH)], 1)
            weight = torch.cat([weight, self.lora.B], 1)
        if "divergence" in readouts:
            return self._compared(hidden_NH, weight, targets_N, readouts, known_grad, comparisons)
        if needs_logits(readouts):
            outputs = self._selected(hidden_NH, weight, targets_N, readouts, chosen_NC)
            if "entropy" not in readouts:
                return outputs
            return outputs | self._chunked_readouts(hidden_NH, weight, targets_N, readouts, None)
        if "top1" in readouts:
            pair = logprob_and_top1(
                hidden_NH, weight, self.bias, targets_N, self.transform,
                temperature=self.temperature, shard=self.shard,
            )  # fmt: skip
            return dict(zip(("logprob", "top1"), pair, strict=True))
        return self._chunked_readouts(hidden_NH, weight, targets_N, readouts, known_grad)

    def _chunked_readouts(
        self,
        hidden_NH: Tensor,
        weight: Tensor,
        targets_N: Tensor,
        readouts: Collection[str],
        known_grad: KnownGrad | None,
    ) -> dict[str, Tensor]:
        logprob, entropy = chunked_readouts(
            hidden_NH, weight, self.bias, targets_N, self.transform,
            entropy="entropy" in readouts, temperature=self.temperature, known_grad=known_grad, exact=self.exact,
            shard=self.shard,
        )  # fmt: skip
        out = {"logprob": logprob}
        if entropy is not None:
            out["entropy"] = entropy
        return out

    def _compared(
        self,
        hidden_NH: Tensor,
        weight: Tensor,
        targets_N: Tensor,
        readouts: Collection[str],
        known_grad: KnownGrad | None,
        comparisons: Sequence[Comparison],
    ) -> dict[str, Tensor]:
        """`logprob`, `divergence` and, if in `readouts`, `agreement`; each teacher has separate predictions."""
        names = ["logprob", "divergence", *(["agreement"] if "agreement" in readouts else [])]
        parts: list[tuple[Tensor, ...]] = []
        for comparison in comparisons:
            chosen = slice(None) if comparison.chosen is None else comparison.chosen
            grad = known_grad
            if grad is not None:
                grad = KnownGrad(grad.values_N.view(2, -1)[:, chosen].flatten(), grad.wrong)
            out = divergences(
                hidden_NH[chosen], weight, self.bias, targets_N[chosen], self.transform, comparison,
                temperature=self.temperature, known_grad=grad, agreement="agreement" in readouts, shard=self.shard,
            )  # fmt: skip
            parts.append(tuple(values for values in out if values is not None))
        joined = dict(zip(names, map(torch.cat, zip(*parts, strict=True)), strict=True))
        orders = [comparison.chosen for comparison in comparisons if comparison.chosen is not None]
        if orders:
            back = torch.cat(orders).argsort()
            joined = {name: values[back] for name, values in joined.items()}
        if "entropy" in readouts or self.exact:  # a sampler's records need the sampler's operations
            joined |= self._chunked_readouts(hidden_NH, weight, targets_N, readouts, None)
        return joined

    def _selected(
        self,
        hidden_NH: Tensor,
        weight: Tensor,
        targets_N: Tensor,
        readouts: Collection[str],
        chosen_NC: Tensor | None,
    ) -> dict[str, Tensor]:
        """Readouts of single logits. The target is one more chosen token, whose logit gives `logprob`."""
        tops = [name for name in readouts if name.startswith(TOP)]
        ids = targets_N[:, None] if chosen_NC is None else torch.cat([targets_N[:, None], chosen_NC], 1)
        selected = selected_logits(
            hidden_NH, weight, self.bias, ids, self.transform,
            top=ReadoutSpec.parse(tops).top, temperature=self.temperature, shard=self.shard,
        )  # fmt: skip
        out = {"logprob": selected.chosen[:, 0] - selected.logsumexp, "logsumexp": selected.logsumexp}
        if chosen_NC is not None:
            out["chosen_logits"] = selected.chosen[:, 1:].clone()  # FSDP's hooks do not work on a view
        for name in tops:
            count = name.removeprefix(TOP)
            out |= {name: selected.top[:, : int(count)].clone(), TOP_IDS + count: selected.top_ids[:, : int(count)]}
        return out


class ScoreHead(Head):
    """A head of scores: numbers per prediction, from its hidden state. A critic's score is the expected return from the
    predicted token on; a reward model's is the score of the text before it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, LogitTransform())  # weight [L, H], L labels
        self.labels, self.width = linear.out_features, linear.in_features

    def forward(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        readouts: Collection[str],
        known_grad: KnownGrad | None = None,
        chosen_NC: Tensor | None = None,
        comparisons: Sequence[Comparison] = (),
    ) -> dict[str, Tensor]:
        """`value` or `score`, [N], or [N, L] for several labels; computed in fp32 (fp64 for fp64 weights) whatever the
        compute dtype."""
        unknown = set(readouts) - {"value", "score"}
        assert not unknown, f"a model with scores has no {', '.join(unknown)}"
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        score_NL = nn.functional.linear(hidden_NH.to(wide), self.weight.to(wide), bias)
        scores = score_NL[:, 0].clone() if self.labels == 1 else score_NL  # FSDP's hooks do not work on a view
        return dict.fromkeys(readouts, scores)


@dataclass
class StageIO:
    """Input and output of a pipeline stage in a forward (parallel/pp/model.py). is_last: whether it is the last stage.
    placeholders: (parent module, child's name, placeholder) of the modules that other stages of the rank run. mixers:
    number of the stage's modules that carry state."""

    is_last: bool
    placeholders: Sequence[tuple[nn.Module, str, nn.Module]] = ()
    mixers: int = 0
    received: Tensor | None = None
    sent: Tensor | None = None

    @contextmanager
    def entered(self, received: Tensor | None) -> Iterator[None]:
        """A context in which a forward of the model runs this stage. received: hidden states of the previous stage."""
        self.received = received
        modules = [getattr(parent, name) for parent, name, _ in self.placeholders]
        for parent, name, stand_in in self.placeholders:
            setattr(parent, name, stand_in)
        try:
            yield
        finally:
            for (parent, name, _), module in zip(self.placeholders, modules, strict=True):
                setattr(parent, name, module)

    def take(self) -> Tensor:
        """The hidden states to send. Drops all references to the forward's tensors."""
        sent = self.sent
        assert sent is not None, "the layers did not run"
        self.received = self.sent = None
        return sent.clone() if sent._is_view() else sent  # FSDP's hooks do not work on a view


class TrainModule(nn.Module):
    """The root module for fully_shard. `hf_model` is kept unregistered, for facts and conversion rules only."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.facts: Facts = find_facts(model)
        self.add_module(self.facts.base, model.get_submodule(self.facts.base))
        linear = model.get_submodule(self.facts.head)
        assert isinstance(linear, nn.Linear)
        self.add_module(
            self.facts.head, ScoreHead(linear) if hf.classifies(model.config) else Head(linear, self.facts.transform)
        )
        # Drops the linear layer, whose full weight would stay in memory next to the shards.
        setattr(model, self.facts.head, self.head)
        object.__setattr__(self, "hf_model", model)
        self.takes_positions = hf.accepts(self.base, "position_ids")
        self.bounds_argument = family_of(self.facts.model_type).bounds_argument
        self.mixers: dict[str, PerDocumentMixer] = run_per_document(self.layers)
        # Of the weights that lora.base stores in fewer bits: shapes, over all pipeline stages; the names of weights
        # with the bytes of the files; and the stored form of this rank's weights.
        self.quantised_shapes: dict[str, tuple[int, ...]] = {}
        self.quantised_form: Format | None = None
        self.kept_as_stored: frozenset[str] = frozenset()
        self.quantised: dict[str, Any] = {}
        self.offload: ActivationOffload | None = None  # of the tensors that recomputation keeps
        self.stage_ios: list[StageIO] = []  # of this rank's pipeline stages; empty for a whole model

    hf_model: PreTrainedModel

    def train(self, mode: bool = True) -> Self:
        """Switches training mode, except for modules that the family keeps in inference mode."""
        super().train(mode)
        hf.keep_in_inference_mode(self, self.facts.model_type)
        return self

    @property
    def base(self) -> nn.Module:
        return self.get_submodule(self.facts.base)

    @property
    def head(self) -> Head:
        head = self.get_submodule(self.facts.head)
        assert isinstance(head, Head)
        return head

    @property
    def layers(self) -> list[tuple[str, nn.Module]]:
        """(name, decoder layer), in order."""
        return [(f"{self.facts.layers}.{n}", m) for n, m in self.get_submodule(self.facts.layers).named_children()]

    def hidden(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        bounds: Bounds | None,
        media: Mapping[str, Tensor] | None = None,
        exchange: FeatureExchange | None = None,
    ) -> Tensor:
        """Last hidden states [B, T, H]. media, exchange: see Row."""
        with vision_context(self.base, media or {}, False, exchange):
            return self._base(input_ids_BT, position_ids_BT, bounds, **(media or {})).last_hidden_state

    def _base(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        bounds: Bounds | None,
        stage_io: StageIO | None = None,
        **extra: object,
    ) -> Any:
        if bounds is not None and not (bounds.padded and self.bounds_argument != BOUNDS_ARGUMENT):
            extra[self.bounds_argument] = bounds
        if self.takes_positions:
            extra["position_ids"] = position_ids_BT
        before, mixers = self._mixed(), len(self.mixers) if stage_io is None else stage_io.mixers
        out = self.base(input_ids=input_ids_BT, use_cache=False, **extra)
        if bounds is not None and not bounds.padded and self._mixed() - before != mixers:
            raise RuntimeError(
                f"document bounds reached {self._mixed() - before} of {mixers} modules that carry state, so "
                "documents would see each other. weft cannot pack this family; please report it."
            )
        return out

    def _mixed(self) -> int:
        """Number of calls so far, on packed rows, of modules that carry state."""
        return sum(boundary.calls for boundary in set(self.mixers.values()))

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        bounds: Bounds | None,
        selected_N: Tensor,
        targets_N: Tensor,
        readouts: Collection[str],
        known_grad: KnownGrad | None = None,
        balance: Balance | None = None,
        chosen_NC: Tensor | None = None,
        media: Mapping[str, Tensor] | None = None,
        placeholder: bool = False,
        received: Tensor | None = None,
        chunk: int = 0,
        exchange: FeatureExchange | None = None,
        comparisons: Sequence[Comparison] = (),
    ) -> dict[str, Tensor]:
        """Readouts at the selected positions of the flattened [B T]; the head runs nowhere else.

        A pipeline stage other than the last returns `sent`, its hidden states, instead. received: hidden states of the
        previous stage. chunk: which of this rank's stages runs.

        chosen_NC, comparisons: see Head. media, placeholder, exchange: see Row. `hidden/MODULE`: [N, width], the
        output of a module at the position of the prediction. balance: if a layer has experts, also return `balance`,
        the row's sum of their auxiliary loss, or, when counting, `choices` and `layers` (models/balance.py).
        """
        extra: dict[str, Any] = {} if balance is None else {"output_router_logits": True}
        extra |= media or {}
        names = ReadoutSpec.parse(readouts).hidden
        features = vision_context(self.base, extra, placeholder, exchange)
        stage_io = self.stage_ios[chunk] if self.stage_ios else None
        entered = nullcontext() if stage_io is None else stage_io.entered(received)
        with capture_outputs(self, names, input_ids_BT.numel()) as hidden, features, entered:
            out = self._base(input_ids_BT, position_ids_BT, bounds, stage_io, **extra)
        routed = {} if balance is None else _of_routers(getattr(out, "router_logits", None), balance)
        if stage_io is not None and not stage_io.is_last:
            return {"sent": stage_io.take()} | routed
        read_NH = out.last_hidden_state.flatten(0, 1)[selected_N]
        outputs = self.head(read_NH, targets_N, readouts, known_grad, chosen_NC, comparisons)
        outputs |= {HIDDEN + name: hidden[name][selected_N] for name in names}
        return outputs | routed


def _of_routers(logits: Sequence[Tensor] | None, balance: Balance) -> dict[str, Tensor]:
    """The routers' readouts. logits: router logits of each layer with experts."""
    if not logits:
        return {}
    if balance.counting:  # the names are OF_ROUTERS
        return {"choices": count_choices(logits, balance), "layers": torch.tensor(float(len(logits)))}
    return {"balance": balance_sum(logits, balance)}
