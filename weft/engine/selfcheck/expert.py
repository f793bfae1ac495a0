"""Checks expert parallelism before a model is divided: the experts of a small random copy are dealt to threads that act
as ranks, each with documents of its own, and readouts and all gradients must equal those of the whole copy."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.selfcheck.architecture import ModelSupport, documents_of, once_per_process, small_copy, text_vocabulary
from weft.engine.selfcheck.division import Ran, compare, in_threads, run_copy, weights_of
from weft.errors import UserError
from weft.models.experts import find_experts
from weft.models.train_module import TrainModule
from weft.parallel.ep.experts import expert_parallel
from weft.parallel.mesh import EPAxis


@once_per_process
def check_experts(config: PretrainedConfig, support: ModelSupport, ep: int) -> float:
    """The largest difference of a gradient, relative to the largest gradient of its parameter. Raises UserError, with
    the family and what differs, if it is too large, or if the model has no experts to divide."""
    small = small_copy(config, "per_document")
    whole = TrainModule(copy.deepcopy(small))
    experts = find_experts(whole)
    if not experts:
        raise UserError(
            f"mesh.ep={ep}: {config.get_text_config().model_type} has no experts that weft knows: set mesh.ep=1."
        )
    documents = documents_of(text_vocabulary(whole))
    ranks = min(ep, len(documents), *(child.num_experts for child in experts.values()))
    expected = run_copy(whole, documents, support, weights_of(documents))
    return compare(
        lambda: _divided(small, documents, support, ranks), expected, partial(_refusal, config), "its experts"
    )


def _refusal(config: PretrainedConfig, reason: str) -> UserError:
    return UserError(
        f"mesh.ep: weft cannot divide the experts of model_type {config.get_text_config().model_type!r}: on a small "
        f"copy, {reason}. Set mesh.ep=1."
    )


def _divided(small: PreTrainedModel, documents: list[Tensor], support: ModelSupport, ranks: int) -> Ran:
    """Readouts and summed gradients of `ranks` threads, each with every `ranks`-th document."""
    of_each = weights_of(documents).split([len(ids) - 1 for ids in documents], 1)

    def one(place: int, groups: Any) -> Ran:
        members = groups(tuple(range(ranks)), place)
        module = TrainModule(copy.deepcopy(small))
        whole = {name: parameter.detach() for name, parameter in module.named_parameters()}
        cuts = expert_parallel(module, EPAxis(place, ranks, members, None), {})
        with torch.no_grad():
            for name, cut in cuts.items():
                module.get_parameter(name).copy_(cut.take(whole[name]))
        own = slice(place, None, ranks)
        readouts, gradients = run_copy(module, documents[own], support, torch.cat(of_each[own], 1))
        return readouts, {name: cuts[name].join(g) if name in cuts else g for name, g in gradients.items()}

    results = in_threads(ranks, one)
    found: list[Tensor] = [torch.empty(0)] * len(documents)
    for place, (readouts, _) in enumerate(results):
        found[place::ranks] = readouts.split([len(ids) - 1 for ids in documents[place::ranks]], 1)
    whole = tuple(f"{path}." for path in find_experts(small))  # joined, and equal, on each thread
    gradients = dict(results[0][1])
    for _, others in results[1:]:
        gradients |= {name: gradients[name] + g for name, g in others.items() if not name.startswith(whole)}
    return torch.cat(found, 1), gradients
