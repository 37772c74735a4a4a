"""`python -m tests.mutate [--count N] [--part K/N] [--results FILE] [--against FILE] [--write]`: do the tests detect
faults?

It draws N mutations over all packages of the product, puts one at a time into a copy of the tree, and runs the quick
tests of its module there until one fails. --results adds the outcomes to a file; mutations that have an outcome there
are not run again, so parts of several days end up in one file: docs/benchmarks/mutation-outcomes.jsonl. --against takes
the mutations of such a file instead of drawing. A change of the product leaves the draw of the others as it was, and
outcomes follow their mutations to other lines. Run it before and after a change that makes the suite smaller; it ends
with exit code 1 if a mutation that was detected is no longer detected. --part selects mutations: K/N, or `today`, one
of 20 parts that follow each other day by day. --write: a table by package goes to docs/benchmarks/mutations.md, with
all outcomes of the file.

An outcome without a test has a place for a verdict, which is written by hand into the file of --results: `harmless:`,
`slow:` (only slow tests cover it) or `gap:`, and the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.result import Result, publish
from tests.helpers.importers import PRODUCT, files_that_test
from tests.helpers.mutation_sites import Mutation, mutated, mutations_of
from tests.helpers.source_tree import ROOT, python_files
from tests.helpers.waiting import PATIENCE

COUNT = 200
SEED = 0
NUM_COPIES = 2
NUM_DAYS = 20
"""All mutations are drawn once within this many days, a few minutes each day."""
NUM_FIRST = 5
"""The tests closest to a mutation run before the others are loaded: most mutations are detected by them."""
SHARE = 0.25
"""If a mutation blocks a test, a quarter of the usual deadline detects it."""
LIMIT_S = 900 * PATIENCE
"""A mutation whose tests have not ended by then makes them hang, which counts as detected."""
VERDICTS = ("harmless", "slow", "gap")
NOTES = (
    "each mutation ran against the quick tests of its package, and those that import its module or an importer of it",
    "harmless: nothing depends on it, such as a log line, a pause or the size of a cache; or the code does the same",
    "slow: only tests marked slow cover it",
    "gap: no quick test detected it; one that does was added",
    "with `--results` the table has all parts in that file, with the verdicts there",
)

RunTests = Callable[["Drawn", Path], str]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A mutation of one file of the product, by its path below the root."""

    path: str
    mutation: Mutation

    @property
    def site(self) -> tuple[str, str, str, int]:
        """Return what a change of other lines keeps."""
        return self.path, self.mutation.before, self.mutation.after, self.mutation.number


@dataclass(frozen=True, slots=True)
class MutationOutcome:
    """found_by: the first test that failed; empty if none did. verdict: why none did, such as `harmless: a pause`."""

    drawn: Drawn
    found_by: str
    verdict: str = ""


def main(arguments: Sequence[str]) -> int:
    """Run the mutations and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument(
        "--part", type=part_of, default="1/1", help="K/N: each N-th mutation, from the K-th on; or today"
    )
    parser.add_argument("--results", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(arguments)
    mutations = all_mutations(product_sources())
    before = found_again(read_outcomes(args.against), mutations) if args.against else []
    is_continued = args.results and args.results.exists() and not args.against
    outcomes = found_again(read_outcomes(args.results), mutations) if is_continued else []
    drawn = [one.drawn for one in before] or draw(mutations, args.count, SEED)
    part, num_parts = args.part
    for outcome in run_all(left_to_run(drawn[part - 1 :: num_parts], outcomes), _run_tests):
        outcomes.append(outcome)
        print(shown(outcome), flush=True)
        if args.results:
            write_outcomes(args.results, outcomes)
    undetected = [f"`{shown(one)}`" for one in outcomes if not one.found_by]
    publish(
        Result(
            "mutations",
            "Small faults that the tests detect",
            _command(args),
            by_package(outcomes),
            (*NOTES, *undetected),
            (),
            settings={"drawn": len(drawn), "not run": len(left_to_run(drawn, outcomes)), "outcomes": len(outcomes)},
        ),
        is_written=args.write,
    )
    lost = lost_outcomes(before, outcomes)
    for one in lost:
        print(f"found before, not found now: {shown(one)}")
    return int(bool(lost))


def part_of(text: str, today: date | None = None) -> tuple[int, int]:
    """Return which part of how many a command line names. Raises: argparse.ArgumentTypeError."""
    if text == "today":
        return (today or datetime.now(UTC).date()).toordinal() % NUM_DAYS + 1, NUM_DAYS
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: is neither K/N, with K from 1 to N, nor `today`")
    return int(found[1]), int(found[2])


def product_sources() -> dict[str, str]:
    """Return the product's files by their path below the root."""
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in python_files(*PRODUCT)}


def all_mutations(sources: Mapping[str, str]) -> list[Drawn]:
    """Return every mutation of these files."""
    return [Drawn(path, mutation) for path in sorted(sources) for mutation in mutations_of(sources[path])]


def draw(mutations: Sequence[Drawn], count: int, seed: int) -> list[Drawn]:
    """Return `count` mutations, one of each package in turn, in an order that only their sites and the seed decide."""

    def order(one: Drawn) -> bytes:
        return hashlib.sha256(repr((seed, one.site)).encode()).digest()

    by_package: dict[str, list[Drawn]] = {}
    for one in sorted(mutations, key=order):
        by_package.setdefault(package_of(one.path), []).append(one)
    turns = zip_longest(*(by_package[package] for package in sorted(by_package)))
    return [one for turn in turns for one in turn if one is not None][:count]


def found_again(outcomes: Sequence[MutationOutcome], mutations: Sequence[Drawn]) -> list[MutationOutcome]:
    """Return the outcomes whose mutations are among these, with their present lines."""
    present = {one.site: one for one in mutations}
    return [replace(one, drawn=present[one.drawn.site]) for one in outcomes if one.drawn.site in present]


def package_of(path: str) -> str:
    """Return the package of a product file, such as `megatrain/ops` or `launcher/megatrain_launcher/driver`."""
    parents = Path(path).parent.parts
    return "/".join(parents[: 3 if parents[0] in ("launcher", "diagnostics") else 2])


def left_to_run(drawn: Sequence[Drawn], outcomes: Sequence[MutationOutcome]) -> list[Drawn]:
    """Return the mutations without an outcome, in their order."""
    done = {one.drawn for one in outcomes}
    return [one for one in drawn if one not in done]


def run_all(drawn: Sequence[Drawn], run_tests: RunTests) -> Iterator[MutationOutcome]:
    """Put each mutation into a copy of the tree, run its tests, and yield the outcomes in order."""
    with _copies(NUM_COPIES) as free, ThreadPoolExecutor(NUM_COPIES) as pool:

        def outcome(one: Drawn) -> MutationOutcome:
            tree = free.get()
            file = tree / one.path
            source = file.read_text()
            try:
                file.write_text(mutated(source, one.mutation))
                return MutationOutcome(one, run_tests(one, tree))
            finally:
                file.write_text(source)
                free.put(tree)

        yield from pool.map(outcome, drawn)


def by_package(outcomes: Sequence[MutationOutcome]) -> list[dict[str, Any]]:
    """Return a row for each package, and the sum: numbers of mutations, of detected ones, and of others by verdict."""
    rows = []
    for package in [*sorted({package_of(outcome.drawn.path) for outcome in outcomes}), ""]:
        of_package = [outcome for outcome in outcomes if package in ("", package_of(outcome.drawn.path))]
        found = sum(bool(one.found_by) for one in of_package)
        verdicts = {kind: sum(one.verdict.startswith(f"{kind}:") for one in of_package) for kind in VERDICTS}
        rows.append({"package": package or "all", "mutations": len(of_package), "detected": found, **verdicts})
    return rows


def lost_outcomes(before: Sequence[MutationOutcome], now: Sequence[MutationOutcome]) -> list[MutationOutcome]:
    """Return what was detected before and is not detected now."""
    found = {one.drawn for one in before if one.found_by}
    return [one for one in now if one.drawn in found and not one.found_by]


def write_outcomes(path: Path, outcomes: Sequence[MutationOutcome]) -> None:
    """Write one line of JSON for each outcome."""
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in outcomes))


def read_outcomes(path: Path) -> list[MutationOutcome]:
    """Return the outcomes that --results has written."""
    return [
        MutationOutcome(
            Drawn(load["drawn"]["path"], Mutation(**load["drawn"]["mutation"])), load["found_by"], load["verdict"]
        )
        for load in map(json.loads, path.read_text().splitlines())
    ]


def shown(outcome: MutationOutcome) -> str:
    """Return an outcome as one line."""
    path, mutation = outcome.drawn.path, outcome.drawn.mutation
    before, after = (" ".join(text.split())[:80] for text in (mutation.before, mutation.after))
    return f"{path}:{mutation.line}: {before} -> {after}: {outcome.found_by or outcome.verdict or 'NOT FOUND'}"


@contextmanager
def _copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Yield copies of the committed files, with the compiled modules."""
    with tempfile.TemporaryDirectory(prefix="megatrain-mutations-") as directory:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            tree = Path(directory) / str(number)
            subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
            for built in ROOT.glob("megatrain/_host_*.so"):
                (tree / "megatrain" / built.name).symlink_to(built)
            free.put(tree)
        yield free


def _run_tests(drawn: Drawn, tree: Path) -> str:
    """Return the first failure of the tests of a mutation; empty if they passed, or if there are none.

    A test that fails in ROOT too, without the mutation, detects nothing and is left out.
    """
    tests = files_that_test(ROOT / drawn.path)
    for part in (tests[:NUM_FIRST], tests[NUM_FIRST:]):
        left_out: list[str] = []
        while found := _first_failure(part, tree, left_out):
            test = failed_test(found)
            if not test or not _first_failure([test], ROOT).startswith(("FAILED ", "ERROR ")):
                return found
            left_out.append(test)
    return ""


def failed_test(failure: str) -> str:
    """Return the test that a line of pytest's summary names; empty if it names a file."""
    found = re.match(r"(?:FAILED|ERROR) ([^\s\[]+::[^\s\[]+(?:\[.*?\](?= - |$))?)", failure)
    return found[1] if found else ""


def _first_failure(tests: Sequence[str], tree: Path, left_out: Sequence[str] = ()) -> str:
    if not tests:
        return ""
    # The copy's packages come before the installed ones, which are those of ROOT.
    paths = os.pathsep.join(str(tree / name) for name in ("", "launcher", "diagnostics"))
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--slow=without"]
    command = [sys.executable, "-m", "pytest", *options, *(f"--deselect={test}" for test in left_out), *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": paths, "MEGATRAIN_TEST_PATIENCE": str(SHARE * PATIENCE)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT_S:g} s"
    if done.returncode in (0, 5):  # passed, or none of them is a quick test
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit code {done.returncode}"


def _command(args: argparse.Namespace) -> str:
    part, num_parts = args.part
    results = " --results FILE" if args.results else ""
    return f"python -m tests.mutate --count {args.count} --part {part}/{num_parts}{results} --write"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
