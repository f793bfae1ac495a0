"""The fault matrix of `weft rl`: whatever goes wrong ends soon, with the exit status and the words of its case, and
`weft rl --resume` goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from ray._private.utils import check_version_info

from tests.support import fault_matrix
from tests.support.control_group import can_limit_memory
from tests.support.fault_cases import CASES, FURTHER_CASES
from tests.support.local_rl import make_task
from tests.support.rl_fault_cases import RL_CASES, RlCase, check_resume, check_rl, run_rl_case
from tests.support.rl_faults import RlRun
from weft.errors import ActorError, UserError
from weft.launch import ray_actors
from weft.launch.ray_actors import ActorGroup, import_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# One of each kind; `make test-soak` and `make faults` run all.
QUICK = (
    "trainer rank 1 is killed in forward", "the first stage raises in backward",
    "SIGTERM, generating, step 2", "SIGINT, updating, step 2",
    "the controller is killed, syncing weights, step 2",
    "the advantage function hangs",
    "a trainer raises evaluating", "accelerator's memory", "disk full under rollouts", "folder vanishes before a save",
    "a sync delivers wrong bytes", "overlong prompts",
    "reward process is stopped", "reward crashes in native code", "reward returns infinity", "reward prints megabytes",
    "reward uses up memory, and the kernel kills it", "all rewards are always equal",
    "environment process is stopped", "environment ends by os._exit", "environment returns NaN",
    "agent process is killed after an answer",
    "fork server of environments is killed", "fork server of environments is stopped",
)  # fmt: skip
SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in RL_CASES if name not in QUICK]

Results = dict[str, Future[tuple[RlRun, Path]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Results]:
    """The chosen cases run two at a time, because those that hang only wait."""
    task = make_task(tmp_path_factory.mktemp("additions"))
    names = [item.callspec.params["name"] for item in request.session.items if item.name.startswith("test_rl_fault[")]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run_rl_case, name, RL_CASES[name], task) for name in names if _can_run(name)}


def _can_run(name: str) -> bool:
    return not RL_CASES[name].megabytes or can_limit_memory()


@pytest.mark.parametrize("name", [*QUICK, *SOAK])
def test_rl_fault(name: str, results: Results) -> None:
    case: RlCase = RL_CASES[name]
    if name not in results:
        pytest.skip("no memory control group can be made here")
    run, folder = results[name].result()
    check_rl(case, run, folder)
    check_resume(case, run, folder)


# ---------------------------------------------------------------- what needs no run


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            ("2.58.0", "3.11.7"),
            r"has Ray 2\.58\.0 and Python .*this process has Ray {ray} and .*pip install ray==2\.58\.0",
        ),
        ((None, "3.9.1"), r"has Ray {ray} and Python 3\.9\.1, and this process has .*start weft with its Python"),
    ],
)
def test_a_cluster_of_other_versions_is_told_apart_from_none(versions: tuple[str | None, str], message: str) -> None:
    """Ray's own comparison, with what such a cluster says of itself."""
    installed = import_ray().__version__
    cluster = {"ray_version": versions[0] or installed, "python_version": versions[1]}

    def join(**_: object) -> None:
        check_version_info(cluster, "127.0.0.1")

    with (
        mock.patch.object(import_ray(), "init", join),
        mock.patch.object(ray_actors, "_require_listener"),
        pytest.raises(UserError, match=message.format(ray=installed.replace(".", r"\."))) as error,
        ray_actors.ray_session("10.0.0.1:6379", []),
    ):
        """Not joined."""
    assert "no Ray cluster" not in str(error.value) and "token" not in str(error.value)


def test_a_ray_that_does_not_start_here_may_start_the_next_time() -> None:
    """--restarts tries again what is no error of the user's: a part of Ray was killed, or the machine was too busy."""

    def time_out(**_: object) -> None:
        raise RuntimeError("The current node timed out during startup.")

    with (
        mock.patch.object(import_ray(), "init", time_out),
        pytest.raises(ActorError, match="Ray could not be started on this machine: The current node") as error,
        ray_actors.ray_session(None, []),
    ):
        """Not started."""
    assert error.value.kind == "peer"


def test_an_actor_that_the_kernel_has_killed_for_want_of_memory_is_not_just_dead(tmp_path: Path) -> None:
    pulse = mock.Mock(scratch=tmp_path)
    for reason, before, after, kind in (
        ("The actor is dead because its worker process has died. Worker exit type: x", 2, 2, "killed"),
        ("The actor is dead because its worker process has died. Worker exit type: x", 2, 3, "memory"),
        ("Task was killed due to the node running low on memory.", 2, 2, "memory"),
    ):
        group = ActorGroup("trainer rank", [], pulse, oom_kills=before)
        with mock.patch.object(ray_actors, "oom_kills", lambda count=after: count):
            error = group._died(1, reason)
        assert error.kind == kind, reason
        words = "short of memory" if kind == "memory" else "died\nThe actor is dead because its worker process has died"
        assert str(error).startswith("trainer rank 1 ") and words in str(error)
        assert "Worker exit type" not in str(error)


def test_the_fault_matrix_has_every_case() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "failures.md").read_text()
    sft = {fault_matrix.row_begins(name, case) for name, case in (CASES | FURTHER_CASES).items()}
    rl = {fault_matrix.rl_row_begins(name, case) for name, case in RL_CASES.items()}
    quick = {fault_matrix.rl_row_begins(name, case) for name, case in RL_CASES.items() if not case.on_ray}
    assert sft | quick <= fault_matrix.shown(text) <= sft | rl and not sft & rl
