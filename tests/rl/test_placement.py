"""cluster.placement: what is chosen and why, and what actors ask of a cluster then."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.launch.options import RlOptions
from weft.launch.ray_actors import Bundle
from weft.rl import placement as rl_placement
from weft.rl.actors import actor_resources
from weft.rl.placement import LONG, resolve_placement

NEEDED = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]"]


def config(*words: str) -> RlConfig:
    return load_config([], [*NEEDED, *words], RlConfig)


def never(config: RlConfig) -> float:
    raise AssertionError("a trial, where none is needed")


@pytest.mark.covers("cluster.placement")
@pytest.mark.parametrize(
    ("words", "options", "rollouts", "placement", "why"),
    [
        ([], {}, LONG, "auto", ""),
        (["rollout.engine=hf"], {}, LONG - 1, "colocated", "499 rollout steps are too few to time both"),
        (["rollout.engine=hf", "cluster.max_staleness=1"], {}, LONG, "disaggregated", "with cluster.max_staleness"),
        (["rollout.engine=hf", "cluster.placement=disaggregated"], {}, LONG, "disaggregated", ""),
        (["rollout.engine=vllm"], {"device": "cuda", "world": 8}, LONG, "colocated", "trainers use all accelerators"),
        (["rollout.engine=vllm", "cluster.trainer_ranks=6", "rollout.tp=2", "rollout.num_engines=2"],
         {"device": "cuda", "world": 6}, LONG, "colocated", "trainers leave too few of the 8 accelerators"),
        (["rollout.engine=vllm", "rollout.tp=2"], {"device": "cuda", "world": 3}, LONG, "disaggregated",
         "3 trainer ranks are not a multiple of rollout.tp = 2"),
        (["rollout.engine=hf"], {"rollout_only": True}, LONG, "colocated", "would be idle"),
    ],
)  # fmt: skip
def test_what_needs_no_trial(
    words: list[str], options: dict[str, Any], rollouts: int, placement: str, why: str
) -> None:
    with patch.object(rl_placement, "accelerator_count", lambda device: 8):
        resolved = resolve_placement(config(*words), RlOptions(**options), rollouts, never)
    assert resolved.config.cluster.placement == resolved.recorded.cluster.placement == placement
    (note,) = resolved.notes or ("",)
    assert why in note and bool(note) == bool(why)


def test_auto_times_both_and_takes_the_faster() -> None:
    requested = config("rollout.engine=hf")
    times = {"colocated": 2.5, "disaggregated": 1.25}
    resolved = resolve_placement(requested, RlOptions(), LONG, lambda tried: times[tried.cluster.placement])
    assert resolved.recorded.cluster.placement == "disaggregated"
    assert resolved.notes == ("placed   disaggregated: seconds of a rollout step: colocated 2.5, disaggregated 1.25",)
    # A resumed run reads what was recorded, and tries nothing again.
    repeated = resolve_placement(resolved.recorded, RlOptions(), LONG, never)
    assert (repeated.recorded, repeated.notes) == (resolved.recorded, ())


def test_a_placement_that_is_not_possible_is_not_taken() -> None:
    def seconds(tried: RlConfig) -> float:
        if tried.cluster.placement == "disaggregated" or hopeless:
            raise UserError("the Ray cluster has 1 GPUs. And more.\nSecond line.")
        return 3.0

    hopeless = False
    (note,) = resolve_placement(config("rollout.engine=hf"), RlOptions(), LONG, seconds).notes
    assert note.endswith("step: colocated 3, disaggregated not possible (the Ray cluster has 1 GPUs. And more)")
    hopeless = True
    with pytest.raises(UserError, match="cluster.placement=auto: no placement is possible"):
        resolve_placement(config("rollout.engine=hf"), RlOptions(), LONG, seconds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.tp=3"], "rollout.tp=3: .* of the 4 trainer ranks. Set rollout.tp to a divisor of 4"),
        (
            ["rollout.num_engines=3", "rollout.tp=2"],
            "4 trainer ranks have room for 2: set rollout.num_engines=2 or fewer",
        ),
        (["rollout.transport=group"], "which NCCL does not support in one group. Set rollout.transport=auto"),
    ],
)
def test_what_cannot_be_colocated_is_refused(words: list[str], message: str) -> None:
    requested = config("rollout.engine=vllm", "cluster.placement=colocated", *words)
    with pytest.raises(UserError, match=message):
        resolve_placement(requested, RlOptions(device="cuda", world=4), LONG, never)


def test_memory_of_a_device_takes_one_that_both_have() -> None:
    gpu, words = RlOptions(device="cuda", world=2), ("rollout.engine=hf", "rollout.transport=ipc")
    resolved = resolve_placement(config("cluster.placement=colocated", *words), gpu, LONG, never)
    assert resolved.config.rollout.transport == "ipc"
    for placement, options in (("disaggregated", gpu), ("colocated", RlOptions(world=2))):
        with pytest.raises(UserError, match=f"with cluster.placement={placement} on .* Set rollout.transport=auto"):
            resolve_placement(config(f"cluster.placement={placement}", *words), options, LONG, never)


def test_what_actors_ask_of_a_cluster() -> None:
    """Not run on GPUs: what Ray is asked for there."""
    gpu, options = Bundle(gpus=1.0), RlOptions(device="cuda", world=4)

    def places(*words: str) -> Any:
        return actor_resources(resolve_placement(config(*words), options, 1, never).config, 4, gpu=True)

    shared = "cluster.placement=colocated"
    resources = places("rollout.engine=hf", shared)
    assert (resources.reservations, resources.trainer, resources.busy) == ([gpu] * 4, Bundle(gpus=0.5), 4)
    assert (resources.engines, resources.colocated_with) == ([Bundle(gpus=0.5)] * 4, [0, 1, 2, 3])
    resources = places("rollout.engine=vllm", shared, "rollout.tp=2")
    assert (resources.trainer, resources.engines, resources.colocated_with) == (gpu, [Bundle()] * 2, [0, 2])
    resources = places("rollout.engine=vllm", "cluster.placement=disaggregated", "rollout.tp=2")
    assert (resources.reservations, resources.engines, resources.colocated_with, resources.busy) == (
        [gpu] * 4,
        [Bundle(gpus=2.0)],
        None,
        4,
    )
    assert places("rollout.engine=vllm", "rollout.tp=2", "cluster.max_staleness=1").busy == 5  # at the same time
    on_cpu = resolve_placement(config("rollout.engine=hf", shared), RlOptions(world=2), 1, never).config
    resources = actor_resources(on_cpu, 2, gpu=False)
    assert (resources.reservations, resources.engines, resources.colocated_with) == (
        [Bundle(cpus=1.0)] * 2,
        [Bundle()],
        [0],
    )
    assert resources.busy == 2  # each has all cores in its turn
