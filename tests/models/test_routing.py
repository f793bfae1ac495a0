"""Routes are recorded, followed, and counted where the model would have chosen otherwise."""

from __future__ import annotations

import pytest
import torch

from tests.support.zoo import tiny_config
from weft.models import hf
from weft.models.families import family_of
from weft.models.routing import replaced
from weft.models.train_module import TrainModule
from weft.ops.attention_call import Bounds
from weft.verify.routing import Recorder, Replay

FAMILIES = {"qwen3_moe": (5, 2), "deepseek_v3": (8, 2), "gpt_oss": (4, 2)}
DOCUMENTS = [list(range(3, 20)), list(range(40, 51))]


def plain_and_ours(family: str) -> tuple[hf.PreTrainedModel, TrainModule]:
    hf.register_kernels()
    family_of(family)
    plain, patched = (  # a config each: it carries the attention implementation
        hf.build_random(tiny_config(family, initializer_range=0.2), dtype=torch.float32, attention=name, seed=0).eval()
        for name in ("eager", "weft_auto")
    )
    return plain, TrainModule(patched)


def forward_packed(module: TrainModule) -> None:
    ids = torch.tensor([[*DOCUMENTS[0], *DOCUMENTS[1]]])
    positions = torch.cat([torch.arange(len(d)) for d in DOCUMENTS])[None]
    no_tokens = torch.zeros(0, dtype=torch.int64)
    module(ids, positions, Bounds(tuple(map(len, DOCUMENTS))), no_tokens, no_tokens, {"logprob"})


@pytest.mark.parametrize("family", FAMILIES)
def test_same_weights_choose_alike_and_other_weights_are_steered(family: str) -> None:
    plain, module = plain_and_ours(family)
    layers = [layer for _, layer in module.layers]
    recorder = Recorder(*FAMILIES[family])
    with torch.no_grad(), recorder.watching(plain, list(plain.model.layers)):
        for document in DOCUMENTS:
            plain(input_ids=torch.tensor([document]))
    assert len(recorder.routes) == 2

    replay = Replay(recorder.routes, *FAMILIES[family])
    with torch.no_grad(), replay.replaying(module, layers):
        forward_packed(module)
    assert replay.differences.choices > 0
    assert replay.differences.differing == replay.differences.wrong == 0

    # Other weights in a router: the routes are still the recorded ones, and the difference is not called a tie.
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.copy_(torch.randn_like(parameter))
    replay = Replay(recorder.routes, *FAMILIES[family])
    with torch.no_grad(), replay.replaying(module, layers):
        forward_packed(module)
    assert replay.differences.wrong > 0


def test_replaced_experts_come_with_their_own_scores() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    actual = replaced(scores, scores.topk(2), torch.tensor([[1, 0], [0, 2]]))
    assert actual.indices.tolist() == [[1, 0], [0, 2]]
    assert torch.equal(actual.values, torch.tensor([[0.2, 0.1], [0.5, 0.2]]))
