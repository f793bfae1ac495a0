"""Checks of the values that a loss returns, because it may be a user's class."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from weft.engine.losses.base import Batch, Loss, LossOutput
from weft.errors import UserError
from weft.models.readouts import TOP, TOP_IDS, ReadoutSpec
from weft.ops.divergence import Comparison

_MOST_PREDICTIONS = 1024  # number of predictions of a row that the check duplicates
_TOLERANCE = 1e-3  # relative to a gradient's largest element: losses compute in fp32


def check_terms(output: Any, objective: Loss) -> LossOutput:
    """The LossOutput of a loss. Raises UserError if it returned something else."""
    if isinstance(output, LossOutput) and isinstance(output.loss_sum, Tensor) and not output.loss_sum.ndim:
        for name, pair in output.metrics.items():
            if isinstance(pair, tuple) and len(pair) == 2 and all(_is_number(value) for value in pair):
                continue
            raise UserError(
                f"train.loss: metric `{name}` of {type(objective).__name__} is {_in_words(pair)}; it must be a pair "
                "(sum, weight) of two numbers. weft sums both over all rows, then divides."
            )
        return output
    value = output.loss_sum if isinstance(output, LossOutput) else output
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    raise UserError(
        f"train.loss: {type(objective).__name__} returned {'a loss_sum that is ' * isinstance(output, LossOutput)}a "
        f"{type(value).__name__}{shape}; it must be LossOutput(loss_sum=...), with the sum over all predictions of "
        "the batch as a scalar tensor. docs/how-to/objective.md has a complete example."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and not value.ndim)


def _in_words(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_in_words, value))})"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_normaliser(value: Any, objective: Loss) -> float:
    """The divisor that a loss returned, as a number. Raises UserError if it is not a number, or 0. It may be inf or nan
    if loss weights are; such a step is skipped like every step with a loss that is not finite."""
    if _is_number(value) and float(value) != 0.0:
        return float(value)
    text = float(value) if _is_number(value) else _in_words(value)
    raise UserError(
        f"train.loss: normaliser(plan) of {type(objective).__name__} returns {text}; it must be a number other "
        "than zero, the divisor of the whole step's loss sum, such as plan.totals.weight or 1.0."
    )


def check_tokens(chosen_NC: Tensor | None, vocabulary: int, objective: Loss) -> None:
    """Raise UserError if a loss reads the logits of tokens outside of the model's vocabulary."""
    if chosen_NC is None or not chosen_NC.numel():
        return
    lowest, highest = int(chosen_NC.min()), int(chosen_NC.max())
    if lowest < 0 or highest >= vocabulary:
        raise UserError(
            f"train.loss: token_ids() of {type(objective).__name__} returns token "
            f"{lowest if lowest < 0 else highest}; the model has logits for tokens 0 to {vocabulary - 1}."
        )


def check_is_sum(objective: Loss, batch: Batch) -> bool:
    """Raise UserError if a loss is not a sum over documents: if a row holds its documents twice, the gradient of each
    prediction must not change. Returns whether this batch was conclusive. Losses that draw random numbers are not
    compared."""
    single = _copied(batch, 1)
    loss, gradients = _differentiate(objective, single)
    if not gradients and loss and bool((batch.weights_N != 0).any()):
        raise UserError(
            f"train.loss: the loss_sum of {type(objective).__name__} has no gradient: it was computed under "
            "torch.no_grad(), detached, or created from numbers. Compute it from the batch's readouts."
        )
    largest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=0.0)
    if not math.isfinite(largest) or largest == 0.0:
        return False
    if _differentiate(objective, single)[0] != loss:
        return True
    _, doubled_gradients = _differentiate(objective, _copied(batch, 2))
    for name, gradient in gradients.items():
        doubled = doubled_gradients.get(name, torch.zeros(0))[: len(gradient)]
        if len(doubled) == len(gradient) and float((doubled - gradient).abs().max()) <= _TOLERANCE * largest:
            continue
        raise UserError(
            f"train.loss: {type(objective).__name__} is not a sum over documents: if a row holds its documents "
            f"twice, the gradient with respect to {name} changes, {_ratio(doubled, gradient)}. Do not divide by a "
            "count or sum of the batch, because a batch is one row of one rank. Return the sum, and return the "
            "whole step's divisor from normaliser(plan). docs/how-to/objective.md has an example."
        )
    return True


def _copied(batch: Batch, times: int) -> Batch:
    """The first predictions of a batch, repeated this many times, without the parts of their documents on other
    ranks."""
    count = min(len(batch.weights_N), _MOST_PREDICTIONS)

    def repeated(values: Tensor) -> Tensor:
        return torch.cat([values[:count].detach()] * times)

    document_N = torch.cat([batch.document_N[:count] + copy * len(batch.documents) for copy in range(times)])
    return replace(
        batch,
        readouts={name: repeated(values) for name, values in batch.readouts.items()},
        weights_N=repeated(batch.weights_N), document_N=document_N, documents=batch.documents * times,
        arrays={name: repeated(values) for name, values in batch.arrays.items()}, shared=None,
    )  # fmt: skip


def _differentiate(objective: Loss, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """(loss sum, its gradient with respect to each readout that it depends on)."""
    leaves = {
        name: values.detach().clone().requires_grad_(values.is_floating_point())
        for name, values in batch.readouts.items()
    }
    with torch.enable_grad():
        loss = check_terms(objective(replace(batch, readouts=leaves)), objective).loss_sum
        inputs = {name: values for name, values in leaves.items() if values.requires_grad}
        if not loss.requires_grad:
            return float(loss), {}
        gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return float(loss.detach()), {name: g for name, g in zip(inputs, gradients, strict=True) if g is not None}


def _ratio(doubled: Tensor, gradient: Tensor) -> str:
    if len(doubled) != len(gradient):
        return "and some have none"
    return f"from {float(gradient.norm()):.3g} to {float(doubled.norm()):.3g} in all"


def chosen_tokens(objective: Loss, targets_N: Tensor, arrays: dict[str, Tensor]) -> Tensor | None:
    """[N, C] tokens whose logits a loss reads; None if it does not read `chosen_logits`. Raises UserError for another
    shape or dtype."""
    if "chosen_logits" not in objective.readouts:
        return None
    ask: Any = objective
    ids, count = ask.token_ids(targets_N, arrays), len(targets_N)
    # an error of a row without documents, which has no arrays
    if not count and isinstance(ids, Tensor) and ids.ndim < 2:
        return targets_N.new_empty(0, 0)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2 or len(ids) != count:
        result = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UserError(
            f"train.loss: token_ids() of {type(objective).__name__} returns {result}; it must return int64 of "
            f"shape [{count}, tokens], with the same number of tokens for each prediction."
        )
    return ids.to(targets_N)


def comparisons_of(objective: Loss, arrays: Mapping[str, Tensor], count: int) -> Sequence[Comparison]:
    """The teachers of a loss that reads `divergence`, for a row of `count` predictions; None for other losses."""
    if "divergence" not in objective.readouts:
        return ()
    ask: Any = objective
    comparisons: Sequence[Comparison] = ask.comparisons(arrays, count)
    return comparisons


def metrics_of(objective: Loss) -> list[str]:
    """The names of a loss's metrics, from a row without predictions."""
    empty, spec = torch.zeros(0), ReadoutSpec.parse(objective.readouts)
    targets_N, arrays = torch.zeros(0, dtype=torch.int64), defaultdict[str, Tensor](lambda: empty)
    readouts: dict[str, Tensor] = dict.fromkeys(("logprob", *objective.readouts), empty)
    for name in [name for name in objective.readouts if name.startswith(TOP)]:
        width = int(name.removeprefix(TOP))
        readouts |= {name: torch.zeros(0, width), TOP_IDS + str(width): targets_N.new_zeros(0, width)}
    chosen_NC = chosen_tokens(objective, targets_N, arrays)
    if chosen_NC is not None:
        readouts["chosen_logits"] = torch.zeros(chosen_NC.shape)
    assert not spec.hidden, "a stage that computes no loss has no modules to read"
    batch = Batch(readouts, empty, targets_N, (), arrays)
    return list(check_terms(objective(batch), objective).metrics)
