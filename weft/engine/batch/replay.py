"""Routing replay (R3; Ma et al. 2025, arXiv:2510.11370): experts are chosen as they were when the sample was drawn, so
that rounding cannot make trainer and rollout engine choose differently.

Documents carry the routes. Routers still score, and learn through the scores of the recorded experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.engine.batch.document import Document
from weft.errors import UserError
from weft.models.routing import differ, replace_choices, replaced
from weft.models.train_module import TrainModule

LIVE = -1  # this token was not recorded: the router chooses its expert


@dataclass
class RouteCounts:
    """The choices of one forward, by decoder layer: (number that differ from the record, number recorded)."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def share(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(differing, recorded), summed over layers."""
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return sum((a for a, _ in self.layers.values()), zero), sum((b for _, b in self.layers.values()), zero)


class RouteReplay:
    """Applies documents' routes in one model. experts: number of routed experts of a layer, 0 for a dense model.
    chosen: number of experts per token. compiled: the graphs of layers contain their routers."""

    def __init__(self, module: TrainModule, experts: int, chosen: int, compiled: bool) -> None:
        self.module, self.experts, self.chosen, self.compiled = module, experts, chosen, compiled

    def check(self, document: Document) -> None:
        """Raises ValueError, with the document, if its routes do not fit its tokens or this model; UserError if
        routers are compiled."""
        routes = document.routes
        if routes is None:
            return
        name = f"routes of {document.source or 'a document'}"
        if not self.experts:
            raise ValueError(f"{name}: this model has no experts, so it cannot use routes")
        if self.compiled:
            raise UserError("model.compile: routes cannot be replayed in compiled routers. Set model.compile=false.")
        expected = (len(document), len(self.module.layers), self.chosen)
        if tuple(routes.shape) != expected:
            raise ValueError(
                f"{name} have shape {list(routes.shape)}, but must have {list(expected)}: tokens, decoder layers, "
                "experts per token. They belong to other tokens or to another model."
            )
        lowest, highest = (int(value) for value in routes.aminmax())
        if lowest < LIVE or highest >= self.experts:
            wrong = lowest if lowest < LIVE else highest
            raise ValueError(f"{name} contain expert {wrong}, but the model has experts 0 to {self.experts - 1}")

    @contextmanager
    def following(self, routes_MLk: Tensor | None, multiplicity_M: Tensor | None = None) -> Iterator[RouteCounts]:
        """Inside, forwards of a row, and their recomputation in backward, follow its routes, if it has any.

        multiplicity_M: the number of documents that hold each token, if any is shared: its choices count that many
        times.
        """
        counts = RouteCounts()
        if routes_MLk is None:
            yield counts
            return

        def choose(layer: int, scores: Tensor, out: Any) -> Any:
            recorded_Mk = routes_MLk[:, layer].long()
            known_M = recorded_Mk[:, 0] != LIVE
            differing_M = differ(out[1], recorded_Mk) & known_M
            if layer not in counts.layers:  # recomputed layers are already counted
                times_M = 1 if multiplicity_M is None else multiplicity_M
                counts.layers[layer] = (differing_M * times_M).sum(), (known_M * times_M).sum()
            return replaced(scores, out, torch.where(known_M[:, None], recorded_Mk, out[1]))

        layers = [layer for _, layer in self.module.layers]
        with replace_choices(layers, self.experts, self.chosen, choose):
            yield counts


def align_routes(routes: Any, tokens: int) -> Tensor:
    """[T, layers, k] int16 from an engine's record. The record may lack the last token, because nothing was sampled
    after it.

    routes: [T - 1 or T, layers, k]. Raises ValueError for another length.
    """
    record = torch.as_tensor(routes).to(torch.int16)
    if len(record) not in (tokens - 1, tokens):
        raise ValueError(f"the engine recorded routes of {len(record)} tokens for a sample of {tokens} tokens")
    missing = torch.full((tokens - len(record), *record.shape[1:]), LIVE, dtype=torch.int16)
    return torch.cat([record, missing])
