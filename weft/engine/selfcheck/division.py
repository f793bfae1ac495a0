"""Checks tensor and expert parallelism before a model is divided. A small random copy of its architecture is divided
over threads that act as ranks. Readouts and all gradients must equal the undivided copy's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.batch.document import Document
from weft.engine.selfcheck.architecture import ModelSupport, once_per_process, small_copy
from weft.engine.selfcheck.harness import (
    Groups,
    Result,
    compare,
    copy_of,
    in_threads,
    row_of,
    run_row,
    sum_by_name,
    text_documents,
    tolerance_of,
)
from weft.errors import UserError
from weft.models.experts import find_experts
from weft.models.families import carries_state
from weft.models.mixer_shards import find_mixer_spec
from weft.models.train_module import TrainModule
from weft.ops.communicator import Communicator
from weft.parallel.ep.experts import expert_parallel
from weft.parallel.mesh import EPAxis, TPAxis
from weft.parallel.shards.cuts import AnyShardSpec
from weft.parallel.tp.divide import sum_partial_gradients, tensor_parallel


@dataclass(frozen=True)
class Division:
    """How the model can be divided. error: largest difference of a gradient, relative to the largest gradient of its
    parameter. sequence: tokens can be divided between blocks."""

    error: float
    sequence: bool


@once_per_process
def check_division(config: PretrainedConfig, support: ModelSupport, tp: int) -> Division:
    """Check a division over `tp` ranks. Raises UserError, with the family and what differs, if it is not exact."""
    small = small_copy(config, "per_document")
    reference, ranks = copy_of(small), _ranks(small, tp)
    row = row_of(text_documents(reference, support.longest), support.layout)
    expected, tolerance = run_row(reference, row, support.uses_bounds), tolerance_of(reference)

    def run(sequence: bool) -> Result:
        def run_rank(rank: int, groups: Groups) -> Result:
            def neighbours(size: int) -> Communicator:
                first = rank // size * size
                return groups(tuple(range(first, first + size)), rank)

            module = copy_of(small)
            parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
            axis = TPAxis(rank, ranks, neighbours(ranks), neighbours)
            divided = tensor_parallel(module, axis, small.config, sequence=sequence)
            _take_shards(module, divided.cuts, parameters)
            readouts, gradients = run_row(module, row, support.uses_bounds)
            sum_partial_gradients(module, divided)
            return readouts, {name: divided.cuts[name].join(gradient) for name, gradient in gradients.items()}

        return in_threads(ranks, run_rank)[0]

    # Mixers with state, and code that adds values of all tokens to hidden states, need complete rows between blocks.
    # So might code that the documents do not run.
    if support.uses_all:
        with suppress(UserError):
            return Division(compare("tp", config, lambda: run(True), expected, tolerance), True)
    return Division(compare("tp", config, lambda: run(False), expected, tolerance), False)


def _ranks(small: PreTrainedModel, tp: int) -> int:
    """Number of ranks for the copy: tp, if it is at most 4 and divides the copy's heads, else 2."""
    heads = int(getattr(small.config.get_text_config(), "num_attention_heads", None) or tp)
    styles = [find_mixer_spec(mixer) for mixer in small.modules() if carries_state(mixer)]
    divide = heads % tp == 0 and all(style is None or style.divides(tp) for style in styles)
    return tp if tp <= 4 and divide else 2


@torch.no_grad()
def _take_shards(module: TrainModule, cuts: Mapping[str, AnyShardSpec], parameters: Mapping[str, Tensor]) -> None:
    """Fill a divided module with this rank's parts of the whole copy's parameters."""
    for name, parameter in parameters.items():
        if name in cuts:
            module.get_parameter(name).copy_(cuts[name].take(parameter))


@once_per_process
def check_experts(config: PretrainedConfig, support: ModelSupport, ep: int) -> float:
    """The largest difference of a gradient, relative to the largest gradient of its parameter. Raises UserError, with
    the family and what differs, if it is too large, or if the model has no experts to divide."""
    small = small_copy(config, "per_document")
    reference = copy_of(small)
    experts = find_experts(reference)
    if not experts:
        raise UserError(
            f"mesh.ep={ep}: weft finds no experts in a model of type {config.get_text_config().model_type}. "
            "Set mesh.ep=1."
        )
    documents = text_documents(reference, support.longest)
    ranks = min(ep, len(documents), *(child.num_experts for child in experts.values()))
    expected = run_row(reference, row_of(documents, support.layout), support.uses_bounds)
    return compare("ep", config, lambda: _run_experts(small, documents, support, ranks), expected)


def _run_experts(
    small: PreTrainedModel, documents: Mapping[int, Document], support: ModelSupport, ranks: int
) -> Result:
    """Readouts and summed gradients of `ranks` threads, each with every `ranks`-th document."""

    def run_rank(rank: int, groups: Groups) -> Result:
        module = copy_of(small)
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
        cuts = expert_parallel(module, EPAxis(rank, ranks, groups(tuple(range(ranks)), rank), None), {})
        _take_shards(module, cuts, parameters)
        row = row_of(documents, support.layout, indices=list(documents)[rank::ranks])
        readouts, gradients = run_row(module, row, support.uses_bounds)
        return readouts, {name: cuts[name].join(g) if name in cuts else g for name, g in gradients.items()}

    results = in_threads(ranks, run_rank)
    by_document: list[Tensor] = [torch.empty(0)] * len(documents)
    predictions = [len(document) - 1 for document in documents.values()]
    for rank, (readouts, _) in enumerate(results):
        by_document[rank::ranks] = readouts.split(predictions[rank::ranks], 1)
    # Gradients of experts are joined, and equal on each thread. Other gradients are of the documents of one thread.
    experts = tuple(f"{path}." for path in find_experts(small))
    shared_gradients = [{n: g for n, g in gradients.items() if not n.startswith(experts)} for _, gradients in results]
    return torch.cat(by_document, 1), {**results[0][1], **sum_by_name(shared_gradients)}
