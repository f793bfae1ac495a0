"""`make mutants`: does the suite see a bug? Each is planted into a copy of weft, whose own tests run until one fails.

The status is 1 where fewer than 95% are seen, of the drawn ones or of the others, or where a mutant no longer fits its
function.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.drawn import BY_HAND, COUNT, ROOT, SEED, Drawn, draw, why_equivalent
from tests.mutants.mutant import Mutant
from tests.mutants.warm import Warm

MUTANTS = BY_HAND
MIN_SHARE = 0.95
SECONDS = 900
BROKEN = "BROKEN"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. words: seen, SURVIVED, equivalent (recorded as such, and not run), HANGS (for SECONDS:
    its tests have no time limit that ends them), or BROKEN (it is no program). by: the test that failed."""

    mutant: Mutant | Drawn
    words: str
    by: str = ""


def main() -> int:
    """Plant those that are asked for, some at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose names hold one of these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--drawn", type=int, default=COUNT, help="how many are drawn from the seed")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only-drawn", action="store_true", help="not those that were thought of")
    arguments = parser.parse_args()
    mutants = (*(() if arguments.only_drawn else MUTANTS), *draw(arguments.drawn, arguments.seed))
    chosen = [m for m in mutants if not arguments.words or any(word in m.name for word in arguments.words)]
    warm: SimpleQueue[Warm] = SimpleQueue()
    for _ in range(arguments.workers):
        warm.put(Warm(ROOT))
    with ThreadPoolExecutor(arguments.workers) as pool:
        verdicts = list(pool.map(lambda mutant: look(mutant, warm), chosen))
        flawed = fail_without({verdict.by for verdict in verdicts if verdict.words == "seen" and verdict.by}, warm)
        repeated = [verdict.mutant for verdict in verdicts if verdict.by in flawed]
        reliable = [verdict for verdict in verdicts if verdict.by not in flawed]
        verdicts = [*reliable, *pool.map(lambda mutant: look(mutant, warm, flawed), repeated)]
    of_hand = [verdict for verdict in verdicts if isinstance(verdict.mutant, Mutant)]
    of_seed = [verdict for verdict in verdicts if isinstance(verdict.mutant, Drawn)]
    passed = [summed("mutants", of_hand), summed(f"mutants drawn from seed {arguments.seed}", of_seed)]
    while not warm.empty():
        warm.get().close()
    return int(not all(passed))


def summed(kind: str, verdicts: Sequence[Verdict]) -> bool:
    """Whether enough of those that change anything are seen; a line about them."""
    changing = [verdict for verdict in verdicts if verdict.words != "equivalent"]
    caught = sum(verdict.words == "seen" for verdict in changing)
    if verdicts:
        print(f"{caught} of {len(changing)} {kind} were seen ({len(verdicts) - len(changing)} more change nothing)")
    return caught >= MIN_SHARE * len(changing)


def look(mutant: Mutant | Drawn, warm: SimpleQueue[Warm], without: Sequence[str] = ()) -> Verdict:
    """What becomes of it; a line about it. without: tests that fail anyway."""
    why = why_equivalent(mutant) if isinstance(mutant, Drawn) else None
    if why is not None:
        return _print(Verdict(mutant, "equivalent", why))
    with tempfile.TemporaryDirectory(prefix="weft-mutant-") as folder:
        root = copy(Path(folder) / "weft")
        try:
            mutant.plant(root / "weft")
        except (ValueError, SyntaxError) as error:
            return _print(Verdict(mutant, f"{BROKEN}: {error}"))
        status, failed = run(root, mutant.tests.split(), warm, without, drawn=isinstance(mutant, Drawn))
    words = {0: "SURVIVED", 1: "seen", None: "HANGS"}.get(status)
    if words is None:  # a drawn one may end what imports it, or the process
        words = "seen" if isinstance(mutant, Drawn) and status != 5 else f"{BROKEN}: pytest ends with {status}"
    return _print(Verdict(mutant, words, failed))


def _print(verdict: Verdict) -> Verdict:
    mutant = verdict.mutant
    why = verdict.by or (f"{mutant.shown()}  [{mutant.tests}]" if isinstance(mutant, Drawn) else f"[{mutant.tests}]")
    print(f"{verdict.words:9} {mutant.name}  {why}", flush=True)
    return verdict


def fail_without(tests: Set[str], warm: SimpleQueue[Warm]) -> list[str]:
    """Those of the tests, and of the files that cannot be imported, that fail in a copy without any mutant, and would
    see anything."""
    with tempfile.TemporaryDirectory(prefix="weft-mutant-") as folder:
        root = copy(Path(folder) / "weft")
        if not tests or run(root, sorted(tests), warm)[0] == 0:
            return []
        failing = [test for test in sorted(tests) if run(root, [test], warm)[0] != 0]
    for test in failing:
        print(f"fails without any mutant: {test}")
    return failing


def copy(root: Path) -> Path:
    """A checkout of its own. All of it: pytest resolves links, and would find our weft beside its tests."""
    root.mkdir()
    for entry in ROOT.iterdir():
        if entry.name.startswith(".") or entry.name in ("runs", "build", "dist"):
            continue
        if entry.is_dir():
            shutil.copytree(entry, root / entry.name, symlinks=True)  # bytecode too: times are kept, so it holds
        else:
            shutil.copy2(entry, root)
    return root


def run(
    root: Path, tests: Sequence[str], warm: SimpleQueue[Warm], without: Sequence[str] = (), *, drawn: bool = False
) -> tuple[int | None, str]:  # fmt: skip
    """(pytest's status: 1 where one failed, None where it took longer than SECONDS; the test that failed). drawn: the
    tests of the suite alone, the files in this order."""
    marked = "not soak and not table and not oracle" if drawn else "not soak"
    tests = [test for test in tests if test not in without]
    if not tests:
        return 0, ""
    words = ["-x", "-q", "-m", marked, "-p", "no:cacheprovider", "-p", "no:xdist", "--in-order", *tests]
    words += [f"--deselect={test}" for test in without]
    process = warm.get()
    try:
        return process.run(root, words, SECONDS * (1 if drawn or len(tests) < 5 else len(tests)))
    finally:
        warm.put(process)


if __name__ == "__main__":
    sys.exit(main())
