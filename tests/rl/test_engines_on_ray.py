"""cluster.engines on a real Ray cluster, whose second host comes and goes while a run trains."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.local_rl import KEYS, lines_of, make_task

STEPS = 400


@pytest.mark.table
@pytest.mark.timeout(900)
def test_a_host_that_comes_and_goes_changes_no_metric(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    task = make_task(tmp_path)
    words = [f"model.path={task}/adder", f"data.path={task}/additions.jsonl", *KEYS, "rollout.engine=hf"]
    words += ["rl.on_policy=exact", f"train.steps={STEPS}", "checkpoint.every=0"]
    command = [sys.executable, "-m", "weft", "rl", *words]
    subprocess.run([*command, f"run.dir={tmp_path}/fixed", "cluster.placement=disaggregated"], check=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    run, log = tmp_path / "coming", tmp_path / "log"
    with log.open("w") as out:
        command += [f"run.dir={run}", f"cluster.address={cluster.address}", "cluster.engines={min: 1, max: 2}"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def wait_for(condition: Callable[[], bool]) -> None:
        while not condition():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)

    def steps() -> int:
        metrics = run / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    try:
        wait_for(lambda: steps() > 2)
        node = cluster.add_node(num_cpus=1)
        wait_for(lambda: "has joined: 2 of 1 to 2" in log.read_text())
        joined_at = steps()
        wait_for(lambda: steps() > joined_at + 3)
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: "has left: 1 of 1 to 2" in log.read_text())
        assert process.wait(240) == 0, log.read_text()
    finally:
        process.kill()
        cluster.shutdown()
    lines = lines_of(run)
    assert {line.pop("rollout/engines") for line in lines} == {1.0, 2.0}
    restarts = "rollout/engine_restarts"
    assert sum(line.pop(restarts) for line in lines) == 1
    expected = [{key: line[key] for key in line if key != restarts} for line in lines_of(tmp_path / "fixed")]
    assert lines == expected
