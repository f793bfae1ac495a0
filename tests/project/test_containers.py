"""The Dockerfile and the manifests of docs/how-to/containers.md, as far as they can be read without docker."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import yaml

from tests.support.docs_runner import blocks
from weft.launch import launchers
from weft.launch.options import TrainOptions
from weft.parsers import parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "containers.md"


def test_the_image_installs_what_the_suite_runs_with() -> None:
    text = (ROOT / "Dockerfile").read_text()
    pinned = re.search(r"torch==[\d.]+", (ROOT / "Makefile").read_text())
    assert pinned is not None and set(re.findall(r"torch==[\d.]+", text)) == {pinned[0]}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras_installed = {extra for names in re.findall(r"'\.\[(.*?)\]'", text) for extra in names.split(",")}
    assert extras_installed == set(extras) - {"dev"}
    copied = {word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    not_ignored = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert not_ignored == copied
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["python:${PYTHON}-slim"]


def test_the_manifest_starts_ranks_that_join() -> None:
    (block,) = [block for block in blocks(PAGE) if block.language == "yaml"]
    service, job = yaml.safe_load_all(block.text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["selector"] == {"job-name": "weft"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    script = container["args"][0].replace("\\\n", " ")
    words = shlex.split(script.splitlines()[-1])
    assert words[words.index("--nnodes") + 1] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert words[words.index("--nproc-per-node") + 1] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert words[words.index("-m") : words.index("-m") + 3] == ["-m", "weft", "sft"]
    assert parse(TrainOptions, ["--resume", "/shared/runs/mine"], "sft", "").resume


def test_the_variables_of_launchers_are_listed() -> None:
    text = PAGE.read_text().replace("`..._", "`OMPI_COMM_WORLD_")
    for launcher in launchers.LAUNCHERS:
        for name in (launcher.rank, launcher.world, launcher.local_rank, launcher.local_world):
            assert f"`{name}`" in text, name
