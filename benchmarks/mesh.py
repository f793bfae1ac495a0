"""What the axes of the mesh cost, and what they save, on ranks that are processes of this machine (gloo, CPU, fp32).

    python benchmarks/mesh.py                                # ten minutes on two idle cores
    python benchmarks/mesh.py --parts axes --before COMMIT   # beside the weft of another commit

axes: a step with tp and cp of size 1 beside the same step of a weft that has neither (--before, taken out of git), by
turns; processor time of all ranks, the least of all steps, because a shared machine changes its pace. rates: tokens/s
of two ranks as dp, tp and cp, with short documents and with one long one. memory: the rise of a rank's peak in one
forward and backward of a document over 1, 2 and 4 ranks of cp. experts: two ranks that gather all experts of a
mixture, and two that have half of them each. stages: two ranks that gather each layer, and two that have half of the
layers each.

On a CPU these are shapes of curves, not speeds: ranks share cores and memory, and gloo copies through the host.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
TREE = "WEFT_BENCH_TREE"  # the checkout whose weft a rank imports
sys.path.insert(0, os.environ.get(TREE, str(SCRIPT.parent.parent)))

Spec = dict[str, Any]
Answer = dict[str, Any]
SHORT = [96, 128, 160, 192, 224, 256, 288, 320] * 2
MESHES: dict[str, dict[str, int]] = {
    "dp 2": {"dp_shard": 2},
    "tp 2": {"dp_shard": 1, "tp": 2},
    "cp 2, ring": {"dp_shard": 1, "cp": 2, "ulysses": 1},
    "cp 2, Ulysses": {"dp_shard": 1, "cp": 2, "ulysses": 2},
}


# ---------------------------------------------------------------- a rank


def peak_gib() -> float:
    """The most memory that this process has had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / (1 << 20)


def rank(path: str) -> None:
    """Take the steps of a spec; the first rank prints one line of JSON."""
    import torch
    import torch.distributed as dist

    from weft.config.schema import MeshConfig, ModelConfig, OptimizerConfig, StepConfig
    from weft.engine.batch.document import Document
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.engine.losses.base import CrossEntropy
    from weft.launch.process import join, leave

    spec: Spec = json.loads(Path(path).read_text())
    random = torch.Generator().manual_seed(0)
    documents = [
        Document(torch.randint(3, spec["vocabulary"], (n,), generator=random), torch.ones(n)) for n in spec["lengths"]
    ]
    config = EngineConfig(
        model=ModelConfig(path=spec["model"]), mesh=MeshConfig(**spec["mesh"]), optimizer=OptimizerConfig(lr=1e-4),
        step=StepConfig(documents=len(documents), max_tokens_per_device=spec["budget"]),
    )  # fmt: skip
    engine, objective = Engine(config, join("cpu")), CrossEntropy()
    torch.set_num_threads(spec["threads"])
    before, seconds, processor = peak_gib(), [], []
    for _ in range(spec["warmup"] + spec["steps"]):
        wall, cpu_start = time.perf_counter(), time.process_time()
        plan, local = engine.plan_step(documents)
        metrics = engine.accumulate(plan, engine.rows(plan, local, objective), objective)
        if spec["steps"]:
            engine.apply(1e-4)
        seconds.append(time.perf_counter() - wall)
        processor.append(time.process_time() - cpu_start)
    figures = torch.tensor([min(processor[spec["warmup"] :] or processor)])
    peak = torch.tensor([peak_gib() - before])
    if dist.is_initialized():
        dist.all_reduce(figures)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    answer = {"seconds": statistics.median(seconds[spec["warmup"] :] or seconds), "processor": float(figures)}
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(answer | {"gib": float(peak), "loss": metrics["loss"], "tokens": plan.totals.tokens}))
    leave()  # else gloo's threads may abort the process as it ends


def start(spec: Spec, ranks: int, tree: Path) -> Answer:
    """What the first of so many ranks printed, which import the weft of `tree`."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(spec | {"threads": max(1, (os.cpu_count() or 1) // ranks)}))
        file.flush()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        environment = os.environ | {TREE: str(tree), "PYTHONPATH": str(tree), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), "OMP_WAIT_POLICY": "passive"}
        words = [sys.executable, *launch, str(SCRIPT), "--rank", file.name]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        sys.exit(f"{spec['mesh']} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    answer: Answer = json.loads(lines[-1])
    return answer


# ---------------------------------------------------------------- the work


def write_model(folder: Path, layers: int, width: int, vocabulary: int, positions: int) -> Spec:
    """A Qwen3 with random weights, four heads and two of keys and values."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=positions,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return {"model": str(folder), "vocabulary": vocabulary}


def tree_of(commit: str, folder: Path) -> Path:
    """The files of a commit."""
    packed = subprocess.run(["git", "archive", commit], cwd=SCRIPT.parent.parent, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def axes(folder: Path, before: str, runs: int) -> list[str]:
    """Rows of a table: the same step with axes of size 1, and without them."""
    old, new = tree_of(before, folder / "before"), SCRIPT.parent.parent
    model = write_model(folder / "model", layers=4, width=256, vocabulary=4096, positions=512)
    rows = []
    for ranks in (1, 2):
        spec = model | {"lengths": SHORT, "budget": 2048, "mesh": {"dp_shard": ranks}, "warmup": 2, "steps": 12}
        pairs = []
        for turn in range(runs):
            pair = {tree: start(spec, ranks, tree) for tree in ((old, new) if turn % 2 else (new, old))}
            assert abs(pair[old]["loss"] - pair[new]["loss"]) < 1e-5 * pair[old]["loss"]
            pairs.append((pair[old], pair[new]))
            log(f"axes, {ranks} ranks: {pair[new]['processor'] / pair[old]['processor']:.3f} by processor time")
        ratios = [now["processor"] / then["processor"] for then, now in pairs]
        times = [min(pair_of_times[n]["processor"] * 1e3 for pair_of_times in pairs) for n in (0, 1)]
        spread = f"{min(ratios):.3f} - {max(ratios):.3f}"
        rows.append(f"| {ranks} | {times[0]:.0f} | {times[1]:.0f} | {times[1] / times[0]:.3f} | {spread} |")
    head = "| ranks | before, processor ms of a step | now | now / before | of single rounds, lowest - highest |"
    return [head, "|---|---|---|---|---|", *rows]


def beside_dp(rows: dict[str, list[str]], measured: dict[str, list[tuple[float, float]]]) -> None:
    """Add the cells of (tokens/s, processor seconds) of each mesh's rounds to its row."""
    first = statistics.median(rate for rate, _ in measured["dp 2"])
    for name, values in measured.items():
        rate, processor = (statistics.median(pair[n] for pair in values) for n in (0, 1))
        rows[name] += [f"{rate:.0f}", f"{rate / first:.2f}", f"{processor:.2f}"]


def rates(folder: Path, long: int, runs: int) -> list[str]:
    """Rows of a table: two ranks, each way, with short documents and with a long one."""
    model = write_model(folder / "model", layers=2, width=128, vocabulary=2048, positions=long)
    rows: dict[str, list[str]] = {name: [] for name in MESHES}
    for lengths in (SHORT, [long]):
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in MESHES}
        for turn in range(runs if lengths is SHORT else 1):
            names = list(MESHES)[turn % 4 :] + list(MESHES)[: turn % 4]
            for name in names:
                budget = 2048 if lengths is SHORT else long // MESHES[name].get("cp", 1)
                steps = {"warmup": 1, "steps": 4} if lengths is SHORT else {"warmup": 0, "steps": 1}
                answer = start(model | steps | {"lengths": lengths, "budget": budget, "mesh": MESHES[name]}, 2, TOP)
                measured[name].append((answer["tokens"] / answer["seconds"], answer["processor"]))
                log(f"rates, {name}, {len(lengths)} documents: {measured[name][-1][0]:.0f} tokens/s")
        beside_dp(rows, measured)
    columns = "tokens/s | / dp 2 | processor seconds of a step"
    head = [f"| mesh | short: {columns} | one of {long:,}: {columns} |", "|---|---|---|---|---|---|---|"]
    return [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def memory(folder: Path, long: int) -> list[str]:
    """Rows of a table: peak memory of one document over more and more ranks."""
    model = write_model(folder / "model", layers=2, width=128, vocabulary=2048, positions=long)
    rows, single = [], 0.0
    for cp in (1, 2, 4):
        for ulysses in (u for u in (1, 2, 4) if u <= cp):
            mesh = {"dp_shard": 1, "cp": cp, "ulysses": ulysses}
            spec = model | {"lengths": [long], "budget": -(-long // cp), "mesh": mesh, "warmup": 1, "steps": 0}
            answer = start(spec, cp, TOP)
            single = single or answer["gib"]
            log(f"memory, cp {cp}, ulysses {ulysses}: {answer['gib']:.2f} GiB in {answer['seconds']:.0f} s")
            rows.append(f"| {cp} | {ulysses} | {answer['gib']:.2f} | {answer['gib'] / single:.2f} |")
    return ["| cp | of it Ulysses | GiB of the rank that takes most | / cp 1 |", "|---|---|---|---|", *rows]


def experts(folder: Path, runs: int) -> list[str]:
    """Rows of a table: a mixture of experts on two ranks, which gather its experts or send tokens to them."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=256, moe_intermediate_size=192, num_hidden_layers=4,
        num_experts=32, num_experts_per_tok=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "experts")
    model = {"model": str(folder / "experts"), "vocabulary": 2048}
    return two_lengths_of_rows(model, {"dp 2": {"dp_shard": 2}, "ep 2": {"dp_shard": 2, "ep": 2}}, runs)


def stages(folder: Path, runs: int) -> list[str]:
    """Rows of a table: a dense model on two ranks that shard its layers, or have half of them each."""
    model = write_model(folder / "model", layers=8, width=256, vocabulary=2048, positions=512)
    meshes = {
        "dp 2": {"dp_shard": 2},
        "pp 2, 1F1B": {"dp_shard": 1, "pp": 2},
        "pp 2, GPipe": {"dp_shard": 1, "pp": 2, "pp_schedule": "GPipe"},
    }
    return two_lengths_of_rows(model, meshes, runs)


def two_lengths_of_rows(model: Spec, meshes: dict[str, dict[str, Any]], runs: int) -> list[str]:
    """Rows of a table: rates of two ranks on each mesh, by turns, with rows of 2,048 and of 512 tokens."""
    spec = model | {"lengths": SHORT, "warmup": 2, "steps": 6}
    rows: dict[str, list[str]] = {name: [] for name in meshes}
    for budget in (2048, 512):  # one row of a data rank in a step, and four
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in meshes}
        for turn in range(runs):
            for name in list(meshes)[:: 1 if turn % 2 else -1]:
                answer = start(spec | {"budget": budget, "mesh": meshes[name]}, 2, TOP)
                measured[name].append((answer["tokens"] / answer["seconds"], answer["processor"]))
                log(f"{name}, rows of {budget}: {measured[name][-1][0]:.0f} tokens/s")
        beside_dp(rows, measured)
    columns = "tokens/s | / dp 2 | processor seconds of a step"
    head = [f"| mesh | rows of 2,048: {columns} | rows of 512: {columns} |", "|---|---|---|---|---|---|---|"]
    return [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


TOP = SCRIPT.parent.parent
PARTS = ["axes", "rates", "memory", "experts", "stages"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--before", metavar="COMMIT", help="of axes; without it that part is left out")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--long", type=int, default=16384, help="tokens of the long document of rates")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the document of memory")
    parser.add_argument("--rank", metavar="SPEC", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank)
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            if part == "axes" and options.before:
                print("\n".join(["\n## axes\n", *axes(Path(folder), options.before, options.runs)]), flush=True)
            elif part == "rates":
                print("\n".join(["\n## rates\n", *rates(Path(folder), options.long, options.runs)]), flush=True)
            elif part == "memory":
                print("\n".join(["\n## memory\n", *memory(Path(folder), options.longest)]), flush=True)
            elif part == "experts":
                print("\n".join(["\n## experts\n", *experts(Path(folder), options.runs)]), flush=True)
            elif part == "stages":
                print("\n".join(["\n## stages\n", *stages(Path(folder), options.runs)]), flush=True)
    print(f"\nload at the end {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
