"""cluster.devices: what each role gets, what follows from it, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.config.devices import device_lines, device_lists
from weft.config.load import load_config
from weft.config.render import to_dict, to_yaml
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.launch.ray_actors import Bundle
from weft.rl.actors import actor_resources, device_places
from weft.rl.colocation import shares_devices
from weft.rl.placement import shared_ranks
from weft.rl.reference_critic import own_ranks

NEEDED = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]"]
ROLL = "cluster.devices={trainer: 0-15, rollout: 0-11, reference: 0-7}"  # the reference on 8 of the trainer's 16
WITH_KL = "rl.kl_coef=0.1"


def config(*words: str) -> RlConfig:
    return load_config([], [*NEEDED, *words], RlConfig)


@pytest.mark.parametrize(
    ("devices", "lists"),
    [
        ({"trainer": [3, 1]}, {"trainer": (3, 1)}),
        ({"rollout": "trainer", "trainer": "0-2, 6"}, {"trainer": (0, 1, 2, 6), "rollout": (0, 1, 2, 6)}),
        ({"trainer": 2, "rollout": 2, "critic": [0]}, {"trainer": (1, 2), "rollout": (3, 4), "critic": (0,)}),
    ],
)
def test_lists_of_devices(devices: dict[str, Any], lists: dict[str, tuple[int, ...]]) -> None:
    assert device_lists(devices) == lists


@pytest.mark.covers("cluster.devices")
def test_what_follows_from_the_devices(tmp_path: Path) -> None:
    loaded = config("rollout.engine=vllm", "rollout.tp=2", WITH_KL, ROLL)
    assert (loaded.cluster.trainer_ranks, loaded.cluster.placement) == (16, "colocated")
    assert (loaded.rollout.num_engines, own_ranks(loaded)) == (6, {"reference": 8})
    assert [shared_ranks(loaded, number) for number in (0, 5)] == [[0, 1], [10, 11]]
    assert {role for role in ("trainer", "reference") if shares_devices(loaded, role)} == {"trainer", "reference"}
    assert device_lines(loaded) == [
        "devices  0-7: trainer, rollout, reference, alternating", "devices  8-11: trainer, rollout, alternating",
        "devices  12-15: trainer",
    ]  # fmt: skip
    # What follows is not written, so that a resumed run may change cluster.devices alone.
    written = to_dict(loaded)
    assert "trainer_ranks" not in written["cluster"] and "num_engines" not in written["rollout"]
    (tmp_path / "c.yaml").write_text(to_yaml(loaded))
    assert load_config([str(tmp_path / "c.yaml")], [], RlConfig) == loaded
    separate = config("rollout.engine=hf", "cluster.devices={trainer: 2, rollout: 3}", "cluster.max_staleness=1")
    assert (separate.cluster.placement, separate.rollout.num_engines) == ("disaggregated", 3)
    assert not shares_devices(separate)


def test_what_actors_of_listed_devices_ask_of_a_cluster() -> None:
    """Not run on GPUs: what Ray is asked for there. Processes on one device have equal shares of it."""
    mixed = "cluster.devices={trainer: [4, 5], rollout: [5, 7], reference: [5]}"
    places = device_places(config("rollout.engine=hf", WITH_KL, mixed), gpu=True)
    assert (places.devices, places.bundle) == ([4, 5, 7], Bundle(gpus=1.0))
    assert places.roles == {"trainer": [0, 1], "rollout": [1, 2], "reference": [1]}
    third, full = Bundle(gpus=0.3333), Bundle(gpus=1.0)
    assert places.shares == {"trainer": [full, third], "rollout": [third, full], "reference": [third]}
    served = config("rollout.engine=vllm", "rollout.tp=2", WITH_KL, ROLL)
    assert "rollout" not in device_places(served, gpu=True).roles
    resources = actor_resources(served, 16, gpu=True)
    assert (resources.engines, resources.colocated_with) == ([Bundle()] * 6, [0, 2, 4, 6, 8, 10])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.devices={trainer: [0, 0]}"], "trainer names device 0 twice"),
        (["cluster.devices={trainers: 2}"], "`trainers` is not a role: the roles are trainer, rollout"),
        (["cluster.devices={trainer: some}"], "trainer is 'some': write a number, a list, ranges as in '0-7'"),
        (["cluster.devices={trainer: 0}"], "trainer has no device"),
        (["cluster.devices={trainer: 2, reference: 1}"], "names reference, but rl.kl_coef is 0.*remove reference"),
        (["cluster.devices={trainer: 2, rollout: 1}"], "names rollout, but rollout.engine=embedded is in the trainers"),
        (["cluster.devices={trainer: 2, reference: 1}", WITH_KL, "lora.rank=4"], "with adapters the reference is"),
        (["cluster.devices={rollout: 1}", "rollout.engine=hf"], "does not name trainer: add the devices of trainer"),
        (["cluster.devices={trainer: 1}", "rollout.engine=hf"], "does not name rollout"),
        (
            ["cluster.devices={trainer: 0-3, rollout: 2-5}", "rollout.engine=hf", "cluster.max_staleness=1"],
            "trainer and rollout share 2-3, but with cluster.max_staleness = 1",
        ),
        (
            ["cluster.devices={trainer: 0-3, rollout: 4-5, reference: [5]}", "rollout.engine=hf", WITH_KL,
             "cluster.max_staleness=1"], "reference and rollout share 5",
        ),
        (
            ["cluster.devices={trainer: 0-3, rollout: 2-5}", "rollout.engine=vllm"],
            "rollout shares devices with trainer, but 4-5 are not a trainer's.*or set rollout.engine=hf",
        ),
        (["cluster.devices={trainer: 3, rollout: trainer}", "rollout.engine=vllm", "rollout.tp=2"], "a multiple"),
        (
            ["cluster.devices={trainer: 2, teacher: 1}", "rl.teacher=org/t"],
            "must be on the trainer's ranks: write teacher: trainer",
        ),
        (["cluster.devices={trainer: 2}", "cluster.trainer_ranks=2"], "cluster.devices sets it"),
        ([ROLL, "rollout.engine=hf", WITH_KL, "reference.ranks=8"], "cluster.devices names reference"),
    ],
)  # fmt: skip
def test_devices_that_cannot_be_are_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(*words)
