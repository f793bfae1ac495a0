"""Mixers of a row of trees: each token has what the mixer's own code computes in its documents, alone."""

from __future__ import annotations

import inspect
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.zoo import tiny_config
from weft.models import hf, state_forks
from weft.models.state_forks import States, can_fork
from weft.models.state_mixers import PerDocumentMixer, find_mixers
from weft.ops.attention_call import Bounds
from weft.ops.segments import ROOT, Segments

TREES = Segments(
    (70, 80, 9, 13, 3, 21, 66, 20, 18, 17, 2, 1, 1, 4),
    (ROOT, 0, 1, 1, 0, 0, ROOT, 6, 6, ROOT, ROOT, 10, 10, ROOT),
    (2, 3, 4, 5, 7, 8, 9, 11, 12, 1),
)
TOLERANCE = 1e-5
FORKING = (
    "lfm2", "qwen3_next", "qwen3_5_text", "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2",
    "olmo_hybrid", "kimi_linear",
)  # fmt: skip
UNFOLDING = ("mamba", "jamba", "minimax", "recurrent_gemma")


def mixer_of(family: str) -> nn.Module:
    model = hf.build_random(tiny_config(family), dtype=torch.float32, attention="eager", seed=0)
    mixer = next(mixer for _, mixer in find_mixers(model))
    for name, parameter in mixer.named_parameters():
        if name.endswith("A_log"):  # states that last for some tokens
            nn.init.constant_(parameter, -2.0)
    return mixer


def arguments_of(mixer: nn.Module) -> dict[str, Any]:
    """What the mixer needs beside hidden states."""
    parameters = inspect.signature(type(mixer).forward).parameters
    optional = {"position_embeddings": None, "attention_mask": None}
    arguments: dict[str, Any] = {name: value for name, value in optional.items() if name in parameters}
    if "position_ids" in parameters:
        pairs = zip(TREES.before, TREES.lengths, strict=True)
        arguments["position_ids"] = torch.cat([torch.arange(first, first + count) for first, count in pairs])[None]
    return arguments


def first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def compare(mixer: nn.Module) -> float:
    """The largest difference of an output or gradient of the trees' row, relative to the largest expected, or to a
    thousandth of the largest of all gradients."""
    boundary, arguments = PerDocumentMixer(mixer), arguments_of(mixer)
    hidden = torch.randn(1, sum(TREES.lengths), 64, requires_grad=True)
    expected = torch.zeros_like(hidden)
    for segment in range(len(TREES.lengths)):
        places = TREES.path_tokens(segment)
        parts = {name: value[:, places] if isinstance(value, Tensor) else value for name, value in arguments.items()}
        last = places[-TREES.lengths[segment] :]
        out = first(type(mixer).forward(mixer, hidden[:, places], **parts))[0]
        expected = expected.index_put((torch.zeros_like(last), last), out[-len(last) :])
    upstream = torch.randn_like(hidden)
    leaves = [hidden, *(p for p in mixer.parameters() if p.requires_grad)]
    boundary.bounds = Bounds(TREES.lengths, segments=TREES)
    out = first(boundary.forward(hidden, **arguments))
    assert boundary.calls == 1
    gradients, references = (
        torch.autograd.grad(result, leaves, upstream, allow_unused=True) for result in (out, expected)
    )
    pairs = [(a, b) for a, b in zip(gradients, references, strict=True) if a is not None and b is not None]
    floor = 1e-3 * max(float(b.abs().max()) for _, b in pairs)
    pairs.append((out.detach(), expected.detach()))
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), floor) for a, b in pairs)


@pytest.mark.parametrize("family", [*FORKING, *UNFOLDING])
def test_paths_share_what_they_have_in_common(family: str) -> None:
    mixer = mixer_of(family)
    state_forks.reset_trials()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        difference = compare(mixer)
    assert difference < TOLERANCE
    assert can_fork(mixer) == (family in FORKING)
    assert state_forks.tried(mixer, torch.float32) is (True if family in FORKING else None)


def test_a_state_that_runs_on_over_siblings_is_found() -> None:
    """Siblings begin with one another's states; the trial refuses such forks, and without it gradients are wrong."""
    mixer = mixer_of("mamba2")
    for trial in (True, False):
        state_forks.reset_trials()
        with (
            mock.patch("weft.models.state_mixers.joined_states", wrong_states),
            mock.patch("weft.models.state_mixers.try_forks", state_forks.try_forks if trial else lambda *_: True),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            assert (compare(mixer) < TOLERANCE) == trial
        assert ("runs the documents of a tree separately" in str(caught[0].message)) if trial else not caught
    state_forks.reset_trials()


def wrong_states(chosen: Any) -> States:
    """The states of the first sequence for all of them."""
    return state_forks.joined_states([chosen[0]] * len(chosen))
