"""`make mutants`: does the suite see a bug? Each is planted into a copy of weft, whose own tests run until one fails.

The status is 1 where fewer than 95% are seen, or where a mutant no longer fits its function.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from tests.mutants import data, models, rl, step, storage
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
MUTANTS: tuple[Mutant, ...] = (*step.MUTANTS, *data.MUTANTS, *models.MUTANTS, *storage.MUTANTS, *rl.MUTANTS)
LEAST = 0.95
SECONDS = 900


def main() -> int:
    """Plant those that are asked for, some at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose names hold one of these")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.words or any(word in m.name for word in arguments.words)]
    tests = sorted(set(chain.from_iterable(mutant.tests.split() for mutant in chosen)))
    if not passes_alone(tests):
        print("these tests fail without any mutant")
        return 1
    with ThreadPoolExecutor(arguments.workers) as pool:
        seen = list(pool.map(report, chosen))
    print(f"{sum(seen)} of {len(seen)} mutants were seen")
    return int(sum(seen) < LEAST * len(seen))


def report(mutant: Mutant) -> bool:
    """Whether its tests see it; a line about it."""
    verdict = look(mutant)
    print(f"{verdict:9} {mutant.name}  [{mutant.tests}]", flush=True)
    return verdict == "seen"


def look(mutant: Mutant) -> str:
    """seen, SURVIVED, HANGS (for SECONDS: its tests have no time limit that ends them), or BROKEN: it is no program."""
    with tempfile.TemporaryDirectory(prefix="weft-mutant-") as folder:
        root = copy(Path(folder))
        try:
            mutant.plant(root / "weft")
            status = run(root, mutant.tests.split())
        except subprocess.TimeoutExpired:
            return "HANGS"
        except (ValueError, SyntaxError) as error:
            return f"BROKEN: {error}"
    return {0: "SURVIVED", 1: "seen"}.get(status, f"BROKEN: pytest ends with {status}")


def copy(root: Path) -> Path:
    """A checkout of its own. All of it: pytest resolves links, and would find our weft beside its tests."""
    for entry in ROOT.iterdir():
        if entry.name.startswith(".") or entry.name in ("runs", "build", "dist"):
            continue
        if entry.is_dir():
            shutil.copytree(entry, root / entry.name, symlinks=True)  # bytecode too: times are kept, so it holds
        else:
            shutil.copy2(entry, root)
    return root


def run(root: Path, tests: Sequence[str], seconds: float = SECONDS) -> int:
    """pytest's status: 1 where one failed."""
    words = ["-m", "pytest", "-x", "-q", "-m", "not soak", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=root, env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def passes_alone(tests: Sequence[str]) -> bool:
    """Whether all pass as things are: else they would see anything."""
    with tempfile.TemporaryDirectory(prefix="weft-mutant-") as folder:
        return run(copy(Path(folder)), tests, SECONDS * len(tests)) == 0


if __name__ == "__main__":
    sys.exit(main())
