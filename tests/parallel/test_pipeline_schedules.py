"""Schedules of pipeline parallelism: orders of forwards, backwards and gradients of weights, with several stages per
rank, against plain transformers.

`i` is Interleaved1F1B, `z` InterleavedZeroBubble, `v` ZBVZeroBubble (tests/support/cases.py).
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_pipeline import given, model_of
from tests.support.cases import describe, open_engine, pairs, parity_of_two_steps, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import Sections, equal, process, whole_state
from tests.support.toy_tokenizers import byte_tokenizer
from tests.support.zoo import tiny_config
from weft.config import load_config
from weft.config.recompute import FULL
from weft.errors import UserError
from weft.models import hf
from weft.ops.recompute import run_layer
from weft.parallel.mesh import P2PChannel
from weft.parallel.pp.communication import P2PMessage
from weft.parallel.pp.schedule import DELAYED, Action, Kind, Placement, Schedule, bubble, in_flight, order, placement_of
from weft.parallel.pp.weight_gradients import WeightGradients

# ---------------------------------------------------------------- orders

SCHEDULES: list[tuple[Schedule, int]] = [
    ("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3),
    ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2), ("InterleavedZeroBubble", 3), ("ZBVZeroBubble", 2),
]  # fmt: skip
SIZES = list(itertools.product((2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 9, 16, 19)))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_micro_batch_goes_forward_then_backward_in_every_stage(schedule: Schedule, chunks: int) -> None:
    kinds: tuple[Kind, ...] = ("forward", "backward", "weights")[: 3 if schedule in DELAYED else 2]
    for ranks, micro_batches in SIZES:
        placement = placement_of(schedule, ranks, chunks)
        orders = [order(schedule, placement, rank, micro_batches) for rank in range(ranks)]
        for rank, actions in enumerate(orders):
            for kind, chunk in itertools.product(kinds, range(chunks)):
                micros = [a.micro for a in actions if (a.kind, a.chunk) == (kind, chunk)]
                assert micros == list(range(micro_batches))
            assert len(actions) == len(kinds) * chunks * micro_batches
            for action in actions:
                before = [actions.index(action._replace(kind=kind)) for kind in kinds[: kinds.index(action.kind) + 1]]
                assert before == sorted(before)
            alive = list(itertools.accumulate({"forward": 1, kinds[-1]: -1}.get(a.kind, 0) for a in actions))
            assert max(alive) == in_flight(schedule, placement, rank, micro_batches)
        bubble(orders, placement, lambda stage, action: 1.0)  # which fails where ranks wait for ever


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("onward", [True, False])
def test_what_is_sent_first_is_asked_for_first(schedule: Schedule, chunks: int, onward: bool) -> None:
    """Of each pair of ranks, in each direction."""
    for ranks, micro_batches in SIZES:
        placement, sent, received = placement_of(schedule, ranks, chunks), {}, {}
        for rank in range(ranks):
            for kind, micro, chunk in order(schedule, placement, rank, micro_batches):
                stage = placement.stage_of(rank, chunk)
                to, source = placement.neighbour(stage, onward), placement.neighbour(stage, not onward)
                if kind == ("forward" if onward else "backward"):
                    if to is not None:
                        sent.setdefault((rank, placement.rank_of(to)), []).append((to, micro))
                    if source is not None:
                        received.setdefault((placement.rank_of(source), rank), []).append((stage, micro))
        assert sent == received


def streamed_bubble(
    schedule: Schedule, ranks: int, chunks: int, micro_batches: int, cost: Callable[[int, Action], float]
) -> float:
    """The bubble where each rank runs sends and receives of one channel in the order of posting, as NCCL does.

    As PipelineExecutor.train does, a rank posts the receives of this action and of the next, computes, and posts the
    send. A message is there when both ends have reached it in their channels and the sender has computed it.
    """
    placement = placement_of(schedule, ranks, chunks)
    channels: dict[
        tuple[int, P2PChannel], list[tuple[P2PMessage, int]]
    ] = {}  # -> (message, actions before it was posted)
    places: dict[tuple[int, P2PMessage], tuple[tuple[int, P2PChannel], int]] = {}
    orders = [order(schedule, placement, rank, micro_batches) for rank in range(ranks)]

    def needs(rank: int, action: Action) -> P2PMessage | None:
        stage, onward = placement.stage_of(rank, action.chunk), action.kind == "forward"
        source = None if action.kind == "weights" else placement.neighbour(stage, not onward)
        return None if source is None else P2PMessage(onward, stage, action.micro)

    def post(rank: int, message: P2PMessage, source: int, target: int, done: int) -> None:
        if source != target and (rank, message) not in places:
            key = rank, P2PChannel.between(message.onward, source, target)
            channels.setdefault(key, []).append((message, done))
            places[rank, message] = key, len(channels[key]) - 1

    for rank, actions in enumerate(orders):
        for done, action in enumerate(actions):
            for near in actions[done : done + 2]:
                if (message := needs(rank, near)) is not None:
                    source = placement.neighbour(message.stage, not message.onward)
                    assert source is not None
                    post(rank, message, placement.rank_of(source), rank, done)
            stage, onward = placement.stage_of(rank, action.chunk), action.kind == "forward"
            target = None if action.kind == "weights" else placement.neighbour(stage, onward)
            if target is not None:
                post(rank, P2PMessage(onward, target, action.micro), rank, placement.rank_of(target), done + 1)

    @functools.cache
    def reached(rank: int, message: P2PMessage) -> float:
        """When a rank's end of a message can begin: after all that the channel has before it."""
        key, index = places[rank, message]
        before = 0.0 if index == 0 else arrived(channels[key][index - 1][0])
        return max(before, computed(rank, channels[key][index][1] - 1))

    @functools.cache
    def arrived(message: P2PMessage) -> float:
        return max(reached(rank, message) for rank in range(ranks) if (rank, message) in places)

    @functools.cache
    def computed(rank: int, index: int) -> float:
        if index < 0:
            return 0.0
        message = needs(rank, orders[rank][index])
        begin = computed(rank, index - 1)
        if message is not None and (rank, message) in places:
            begin = max(begin, arrived(message))
        return begin + seconds_of(rank, orders[rank][index])

    def seconds_of(rank: int, action: Action) -> float:
        return cost(placement.stage_of(rank, action.chunk), action)

    duration = max(computed(rank, len(orders[rank]) - 1) for rank in range(ranks))
    return 1.0 - sum(seconds_of(rank, action) for rank in range(ranks) for action in orders[rank]) / (duration * ranks)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_messages_in_order_of_their_channels_keep_no_rank_waiting(schedule: Schedule, chunks: int) -> None:
    """No rank both sends and receives on a channel. With one channel for both, a send waits for the message that was
    requested before it: ZBVZeroBubble's 4 ranks and 16 micro-batches of one cost have a bubble of 4%, not of 3%."""
    for ranks, micro_batches in itertools.product((2, 3, 4), (1, 4, 9, 16)):
        placement = placement_of(schedule, ranks, chunks)
        stages = [placement.rank_of(stage) for stage in range(placement.stages)]
        for onward, stages_in_order in ((True, stages), (False, stages[::-1])):
            pairs = [pair for pair in itertools.pairwise(stages_in_order) if pair[0] != pair[1]]
            sends = {(source, P2PChannel.between(onward, source, target)) for source, target in pairs}
            assert sends.isdisjoint((target, P2PChannel.between(onward, source, target)) for source, target in pairs)
        orders = [order(schedule, placement, rank, micro_batches) for rank in range(ranks)]
        for cost in (lambda stage, action: 1.0, uneven):
            ideal = bubble(orders, placement, cost)
            assert streamed_bubble(schedule, ranks, chunks, micro_batches, cost) == pytest.approx(ideal)


def uneven(stage: int, action: Action) -> float:
    """A cost that differs by stage (its layers) and micro-batch (its documents)."""
    return (2.0 if action.kind == "backward" else 1.0) * (1.0 + 0.1 * stage) * (1.0 + action.micro % 3)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_the_bubble_is_that_of_the_papers(schedule: Schedule, chunks: int) -> None:
    """Where micro-batches are enough: Narayanan et al. 2021, sections 2.2.1 and 2.2.2; Qi et al. 2023, table 2 (H1)."""
    parts = 3 if schedule in DELAYED else 1  # of the time of a micro-batch, which one rank waits for another
    for ranks, rounds in itertools.product((2, 4, 8), (2, 3)):
        placement, micro_batches = placement_of(schedule, ranks, chunks), ranks * rounds
        orders = [order(schedule, placement, rank, micro_batches) for rank in range(ranks)]
        backward_time = 1.0 if schedule in DELAYED else 2.0
        share = bubble(
            orders,
            placement,
            lambda stage, action, backward_time=backward_time: backward_time if action.kind == "backward" else 1.0,
        )
        assert share == pytest.approx((ranks - 1) / (parts * chunks * micro_batches + ranks - 1))


def test_rows_that_are_kept_grow_neither_with_the_step_nor_beyond_the_stages() -> None:
    """Those of 1F1B are as many as there are ranks, and fewer on later ones."""
    for schedule, chunks in SCHEDULES:
        placement = placement_of(schedule, 4, chunks)
        first, then = ([in_flight(schedule, placement, p, m) for p in range(4)] for m in (16, 32))
        assert (first == then) == (schedule != "GPipe")
        assert schedule == "GPipe" or max(first) <= 4 * chunks + (3 if "Interleaved" in schedule and chunks > 1 else 0)
        assert schedule != "1F1B" or first == [4, 3, 2, 1]


def test_orders_that_wait_for_each_other_are_found() -> None:
    forward, backward = Action("forward", 0), Action("backward", 0)
    with pytest.raises(RuntimeError, match="wait for each other"):
        bubble([[backward, forward], [forward, backward]], Placement(2), lambda stage, action: 1.0)


# ---------------------------------------------------------------- steps

CASES = [
    ("llama", "pp2i3"), ("lfm2", "pp2i"), ("llama_tied", "pp2ix2"), ("qwen3", "pp2zi"), ("llama", "pp2zxtp2"),
    ("gpt2", "pp2v"),
]  # fmt: skip
TABLE = [
    ("llama", "pp4i"), ("llama", "pp4z"), ("qwen3", "pp2v"), ("qwen3", "pp2i"), ("qwen3", "pp2ixtp2"),
    ("deepseek_v3", "pp2v"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh"), pairs(CASES, TABLE))
def test_steps_are_those_of_plain_transformers(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, model_of(family, mesh), mesh, {})[0]
    assert verdict.passed, describe(verdict)


KNOBS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "pp2zx2", {"model": {"recompute": "full"}, "fsdp": {"reduce": "last"}}),
    ("llama_tied", "pp2vx2", {"model": {"recompute": "full"}, "fsdp": {"cpu_offload": True, "prefetch": 1}}),
    ("llama", "pp2v", {"model": {"freeze": ("model.embed_tokens", "model.layers.2.mlp")}}),
    ("llama", "pp2v", {"lora": {"rank": 4}}),
]
MORE_KNOBS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama_tied", "pp2vx2x1", {"fsdp": {"reduce": "every"}}),
    ("llama", "pp2ix2", {"fsdp": {"reshard_after_forward": False, "reduce": "scatter"}}),
]


@pytest.mark.parametrize(("family", "mesh", "sections"), pairs(KNOBS, MORE_KNOBS))
def test_with_other_knobs(family: str, mesh: str, sections: dict[str, Any]) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, model_of(family, mesh), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_linear_weights_come_after_the_backward_and_are_the_same(recompute: bool) -> None:
    config = tiny_config("llama")
    plain = hf.build_random(config, dtype=torch.float32, attention="eager", seed=0)
    delayed = copy.deepcopy(plain)
    ids = torch.arange(24).view(2, 12)
    plain(ids).logits.square().sum().backward()
    if recompute:
        hf.enable_recompute(delayed, functools.partial(run_layer, FULL))
        delayed.train()
    weights = WeightGradients(delayed)
    delayed(ids).logits.square().sum().backward()
    late = {f"{name}.weight" for name, child in delayed.named_modules() if type(child) is torch.nn.Linear}
    assert {name for name, parameter in delayed.named_parameters() if parameter.grad is None} == late
    for add in weights.take():
        add()
    for (name, expected), (_, actual) in zip(plain.named_parameters(), delayed.named_parameters(), strict=True):
        assert expected.grad is not None and actual.grad is not None
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-5, atol=1e-6, msg=name)
        assert actual.requires_grad and weights.take() == []


# ---------------------------------------------------------------- what is saved


def test_a_run_goes_on_with_other_schedules_bit_for_bit(tmp_path: Path) -> None:
    """Also on other numbers of stages. Without clipping, whose norm is added up by stages. With zero bubble, gradients
    of other weights than linear layers' are added up in another order."""
    path = saved_model("llama", num_hidden_layers=4, vocab_size=264)
    byte_tokenizer().save_pretrained(path)
    sections: Sections = {"model": {"path": path}, "optimizer": {"max_grad_norm": None}}
    process(tmp_path / "whole", "1", steps=7, sections=sections)
    for begin, mesh in enumerate(("pp2i", "pp2g", "pp2v", "pp2zi", "pp2")):
        process(tmp_path / "chain", mesh, resume=begin > 0, steps=2 if begin < 2 else 1, sections=sections)
    assert equal(whole_state(tmp_path / "chain", 4), whole_state(tmp_path / "whole", 4))
    actual, expected = (whole_state(tmp_path / name, 7) for name in ("chain", "whole"))
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


# ---------------------------------------------------------------- what is refused

REFUSED = [
    ("fsdp.reduce", "scatter", "every"),
    ("model.compile", "true", "false"),
]


@pytest.mark.parametrize("schedule", DELAYED)
@pytest.mark.parametrize(("key", "value", "instead"), REFUSED)
def test_what_does_not_go_together_is_refused_by_key(schedule: str, key: str, value: str, instead: str) -> None:
    words = [*given(), f"mesh.pp_schedule={schedule}", "mesh.dp_replicate=2", "fsdp.reduce=every"]
    message = rf"{key} cannot be combined with mesh\.pp_schedule = {schedule}: .*Set {key}={instead}, or mesh\.pp_sch"
    with pytest.raises(UserError, match=message):
        load_config([], [*words, f"{key}={value}"])
    load_config([], [*words, f"{key}={instead}"])


def loaded_stages(path: str, mesh: str) -> list[str]:
    """Names of the layers that this rank has weights of."""
    names = dict(open_engine(path, mesh).module.named_parameters())
    return sorted({name.split(".")[2] for name in names if name.startswith("model.layers.")})


@pytest.mark.covers("mesh.pp_stages_per_rank")
def test_a_rank_has_the_layers_of_its_stages() -> None:
    path = saved_model("llama", num_hidden_layers=4)
    assert run(2, loaded_stages, path, "pp2i") == [["0", "2"], ["1", "3"]]
    assert run(2, loaded_stages, path, "pp2v") == [["0", "3"], ["1", "2"]]
