"""`weft rl` with a real vLLM on another host than the trainer: two Ray nodes of this machine, with an address each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/bin/python"
CLUSTER = """
import subprocess, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
try:
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
    words = [sys.executable, "-m", "weft", "rl", *sys.argv[1:], f"cluster.address={cluster.address}"]
    tries = [["run.dir=run"], ["run.dir=shared", "rollout.transport=shared"]]
    print("statuses", [subprocess.run([*words, *more]).returncode for more in tries])
finally:
    cluster.shutdown()
"""
KEYS = [
    "model.path=adder", "data.path=additions.jsonl", "model.init=random", "rl.prompts_per_step=4", "rl.group_size=4",
    "rollout.max_prompt_tokens=6", "rollout.max_new_tokens=4", "step.max_tokens_per_device=256",
    "optimizer.lr=1e-3", "schedule.name=constant", "schedule.warmup_steps=0", "rl.reward=[length]",
    "rl.reward_options={length.longest: 4}", "data.columns={answer: completion}", "train.steps=3",
    "cluster.placement=disaggregated", "rollout.engine=vllm", f"rollout.python={Path(sys.executable).parents[1]}",
]  # fmt: skip


@pytest.mark.timeout(900)
def test_weights_reach_an_engine_on_another_host(tmp_path: Path) -> None:
    """One core each, so that trainer and engine are on different nodes: shared memory is refused, a group is taken."""
    subprocess.run([PYTHON, ROOT / "examples/make_arithmetic_demo.py", tmp_path], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    words = [PYTHON, "-c", CLUSTER, *KEYS]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert "statuses [0, 2]" in done.stdout, done.stdout
    assert "rollout.transport=shared: vllm-0 is on " in done.stdout, done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and lines[-1]["grad_norm"] > 0
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-5 for line in lines)
