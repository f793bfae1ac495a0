"""A reference of preferences on separate ranks (reference.ranks)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.config.dpo_schema import DpoConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.frozen import open_frozen
from weft.launch import flight
from weft.launch.process import Ranks
from weft.recipes.frozen_models import preference_reference
from weft.recipes.frozen_ranks import Answer, FrozenSide, ModelRanks
from weft.recipes.recipe import PreparedStep
from weft.recipes.reference_sums import ReferenceSums
from weft.recipes.run_data import TRAINED, RunData
from weft.terminal import counted


class RemoteSums(ReferenceSums):
    """The sums of a reference on separate ranks."""

    def __init__(self, config: DpoConfig, documents: Mapping[str, Sequence[Document]], side: FrozenSide) -> None:
        super().__init__(config, None, documents, adapters_off=False)
        self.side = side

    def announce(self, step: PreparedStep) -> None:
        missing = self.missing(TRAINED, step.indices)
        if self.config.preference.cache == "memory":  # the current step's sums are already requested
            missing = [index for index in missing if not self.side.is_asked(TRAINED, index)]
        self.side.ask(TRAINED, missing)

    def read_of(self, name: str, indices: Sequence[int]) -> Tensor:
        flight.enter("logprobs")
        values = np.frombuffer(self.side.answer(name, indices), "<f8")
        if len(values) != len(indices):
            raise RuntimeError(f"the reference returned {len(values)} sums for {len(indices)} documents")
        return torch.from_numpy(values.copy())


class ReferenceRanks(ModelRanks):
    """The ranks of reference.ranks."""

    def __init__(self, config: DpoConfig) -> None:
        super().__init__(config)
        self.config = config

    def open(self, data: RunData) -> tuple[ReferenceSums, list[str]]:
        """On the trained model's ranks, like open_reference, after the reference is loaded. Collective."""
        lines = self.side.wait_until_ready(data.digests)
        return RemoteSums(self.config, data.data_sets, self.side), lines

    def open_frozen(self, ranks: Ranks, data: RunData | None, *, weights: bool = True) -> tuple[Answer, list[str]]:
        frozen = preference_reference(self.config, EngineConfig.from_config(self.config))
        assert frozen is not None
        model = open_frozen("reference", frozen, ranks, weights=weights)
        documents = {} if data is None else data.data_sets
        for data_set in documents.values():
            model.planner.check_images(data_set)
        sums = ReferenceSums(self.config, model, documents, adapters_off=False)

        def answer(number: int, request: Mapping[str, Any]) -> bytes:
            return sums.read_of(request["name"], request["indices"]).numpy().astype("<f8").tobytes()

        where = counted(self.count, "separate rank")
        return answer, [f"against  {frozen.model.path}, a reference on {where}: {model.memory}"]
