"""Seconds from a fault to the next completed step: megatrain and stock torchrun, both with a spare, in one run.

There are two hosts of two gloo ranks each, with paced steps of 80 ms, a checkpoint every 10 steps, and the fault at
step 24. All hosts are this machine. Each run is checked: the losses of every step equal those of a run without a fault,
bit by bit. megatrain must also leave no process and no memory file.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, at_most, must_hold
from benchmarks.recovery_sides import FAULT_STEP, GIVE_UP_S, RecoveryOutcome, RecoverySide, ours, torchrun
from benchmarks.result import Result
from benchmarks.tables import spread
from tests.helpers.waiting import wait_until

RUNS = 3
FAULTY_RANK = 3
OURS = "megatrain"


@dataclass(frozen=True, slots=True)
class RecoveryFault:
    """`kind`: one of step_faults; empty: the launcher of a host is killed."""

    title: str
    kind: str = ""
    is_driver: bool = False
    detected_within_s: float = 1.0
    next_step_within_s: float = 5.0


FAULTS = (
    RecoveryFault("kill -9 of a rank", "kill"),
    RecoveryFault("exception in a rank", "exception"),
    RecoveryFault("SIGSTOP of a rank", "stop", detected_within_s=6.0, next_step_within_s=12.0),
    RecoveryFault(
        "C call that holds the interpreter lock", "interpreter-lock", detected_within_s=6.0, next_step_within_s=12.0
    ),
    RecoveryFault("kill -9 of an executor", next_step_within_s=8.0),
    RecoveryFault("kill -9 of the driver's executor", is_driver=True, detected_within_s=5.0, next_step_within_s=6.0),
)


def run() -> Result:
    """Inject every fault into every side, in turn."""
    sides: list[tuple[str, Callable[[Path], AbstractContextManager[RecoverySide]]]] = [
        (OURS, ours),
        ("torchrun", partial(torchrun, is_store_shared=True)),
        ("torchrun, unshared store", partial(torchrun, is_store_shared=False)),
    ]
    expected = _losses(ours)
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for fault in FAULTS:
        found: dict[str, list[RecoveryOutcome]] = {name: [] for name, _ in sides}
        for number in range(RUNS):
            for name, side in sides:
                outcome = _break(side, fault) if name == OURS else _break_peer(side, fault)
                found[name].append(outcome)
                print(f"{fault.title}, {name}, run {number + 1}: {_outcome_text(outcome)}", file=sys.stderr, flush=True)
        rows += [_row(fault, name, outcomes, expected) for name, outcomes in found.items()]
        bars += _bars(fault, found[OURS], expected)
    return Result(
        name="recovery",
        title="Recovery from faults: 2 hosts of 2 gloo ranks, paced steps of 80 ms, a checkpoint every 10 steps",
        command="python -m benchmarks recovery --write",
        rows=rows,
        settings={"runs": RUNS, "fault at step": FAULT_STEP, "paced": "80 ms a step"},
        notes=[
            f"Seconds since the fault: median (least to most). never: no step in {GIVE_UP_S:.0f} s, or the job ended.",
            "detected: when the driver had noticed the fault. Stock torchrun does not report this.",
            "Both have a spare host: stock torchrun a third agent of --nnodes 2, which waits until a place is free.",
            "same losses: the loss of every step equals that without a fault, bit by bit.",
            "left behind: processes and files in memory that still exist 2 min after the end.",
            "torchrun's collectives time out after 10 s, as ours do (runtime.step_timeout_s).",
        ],
        bars=bars,
    )


def _losses(side: Callable[[Path], AbstractContextManager[RecoverySide]]) -> dict[int, float]:
    with _directory() as root, side(root) as running:
        return running.outcome(0.0).losses


def _break(side: Callable[[Path], AbstractContextManager[RecoverySide]], fault: RecoveryFault) -> RecoveryOutcome:
    with _directory() as root, side(root) as running:
        if fault.kind:
            running.faults.fail_at(FAULTY_RANK, FAULT_STEP, fault.kind)
            wait_until(lambda: running.faults.struck_unix_s() is not None, "the fault", GIVE_UP_S)
            struck = running.faults.struck_unix_s()
            assert struck is not None
        else:
            has_come = lambda: any(each["step"] >= FAULT_STEP for each in running.job.records("step"))  # noqa: E731
            wait_until(has_come, f"step {FAULT_STEP}", GIVE_UP_S)
            struck = running.kill_host(is_driver=fault.is_driver)
        return running.outcome(struck)


def _break_peer(side: Callable[[Path], AbstractContextManager[RecoverySide]], fault: RecoveryFault) -> RecoveryOutcome:
    """Inject a fault into a job of the peer. A job that does not reach the fault's step in time is repeated once.

    Raises: TimeoutError where the second job does not reach it either.
    """
    try:
        return _break(side, fault)
    except TimeoutError as error:
        print(f"{fault.title}: {error}; the run is repeated", file=sys.stderr, flush=True)
        return _break(side, fault)


def _outcome_text(outcome: RecoveryOutcome) -> str:
    if outcome.next_step_s is None:
        return "no further step"
    return f"next step after {outcome.next_step_s:.2f} s"


@contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="megatrain-recovery-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _row(
    fault: RecoveryFault, name: str, outcomes: list[RecoveryOutcome], expected: dict[int, float]
) -> dict[str, Any]:
    is_ours = name == OURS
    recovered = [each for each in outcomes if each.next_step_s is not None]
    is_same = all(each.losses == expected for each in recovered)
    return {
        "fault": fault.title,
        "launcher": name,
        "recovered": f"{len(recovered)} of {len(outcomes)}",
        "detected s": spread([each.detected_s for each in outcomes]) if is_ours else "",
        "next step s": spread([each.next_step_s for each in outcomes]),
        "culprit named": "; ".join(sorted({each.named or "none" for each in outcomes})) if is_ours else "",
        "same losses": "yes" if is_same and recovered else "no",
        "left behind": sum(each.num_orphans + len(each.leaked) for each in outcomes) if is_ours else "",
        "phases": _phases(outcomes) if is_ours else "",
    }


def _bars(fault: RecoveryFault, outcomes: list[RecoveryOutcome], expected: dict[int, float]) -> list[Bar]:
    """Return the bars of megatrain's recoveries. A missing value counts as infinite."""

    def median(values: list[float | None]) -> float:
        return statistics.median(math.inf if value is None else value for value in values)

    detected_s, next_step_s = ([getattr(each, name) for each in outcomes] for name in ("detected_s", "next_step_s"))
    return [
        at_most(f"{fault.title}: seconds until it is detected", median(detected_s), fault.detected_within_s),
        at_most(f"{fault.title}: seconds until the next step", median(next_step_s), fault.next_step_within_s),
        must_hold(f"{fault.title}: the same losses", all(each.losses == expected for each in outcomes)),
        must_hold(
            f"{fault.title}: nothing is left behind", not any(each.num_orphans or each.leaked for each in outcomes)
        ),
    ]


def _phases(outcomes: list[RecoveryOutcome]) -> str:
    """Return the median seconds of each phase of megatrain's recoveries."""
    names = next((list(each.phases) for each in outcomes if each.phases), [])
    parts = []
    for name in names:
        known = [seconds for each in outcomes if (seconds := each.phases.get(name)) is not None]
        if known:
            parts.append(f"{name} {statistics.median(known):.2f}")
    return ", ".join(parts)
