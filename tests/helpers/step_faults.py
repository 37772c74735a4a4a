"""A small language of faults in training workers: `fail_at(rank, step, kind, place)`.

`python -m tests.helpers.step_faults CONFIG ...` is `megatrain.train` whose workers carry out the faults requested in a
directory (environment variable MEGATRAIN_FAULTS). A fault strikes once, in the first round that reaches its step: it
removes its file NN.json, and leaves NN.struck with the time. `pace_s` sets the duration of every step. The kinds are
those of nvidia-resiliency-ext's catalog that need no GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatrain.contracts.exit_codes import ExitCode
from tests.helpers.hang_sites import is_site, sites_in

VARIABLE = "MEGATRAIN_FAULTS"
PLACES = ("step", "snapshot", "evaluation", "load")
"""The moment in a rank's life: as a step begins, in the middle of a snapshot, before an evaluation, as a load ends."""
KERNEL_LOG = "kernel.log"
"""The kernel's log to which a fault of a GPU writes, in the directory of the faults."""
_PACE = "pace.json"
_HOLD = "hold-loads"
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class StepFault:
    """A fault of a rank at a given moment."""

    kind: str
    rank: int
    step: int
    """The number of completed steps at that moment; for a load, the round."""
    place: str = "step"
    """One of PLACES, "read", or "before" or "in" and the name of an operation: see hang_sites.py."""


def _hold_the_interpreter_lock() -> None:
    # A call by PyDLL keeps the lock; no handled signal ends this wait.
    ctypes.PyDLL(None).sem_wait(ctypes.create_string_buffer(64))


def _raise_in_a_thread() -> None:
    thread = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGABRT))
    thread.start()
    thread.join()


def _raise() -> None:
    raise RuntimeError("an injected fault in user code")


def _read_null() -> None:
    ctypes.string_at(0)


def gpu_error_now() -> str:
    """Return what the kernel logs when a GPU falls off the bus."""
    since_boot_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return f"4,100,{since_boot_us},-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"


def _lose_the_gpu() -> None:
    with Path(os.environ[VARIABLE], KERNEL_LOG).open("a") as log:
        log.write(gpu_error_now())
    raise RuntimeError("CUDA error: unspecified launch failure")


def _pause(seconds: float) -> None:
    threading.Event().wait(max(0.0, seconds))


def _by(number: signal.Signals) -> Callable[[], None]:
    def strike() -> None:
        os.kill(os.getpid(), number)

    return strike


KINDS: Mapping[str, Callable[[], None]] = {
    "exception": _raise,
    "abort": os.abort,
    "abort-in-thread": _raise_in_a_thread,
    "segfault": _read_null,
    "lost-gpu": _lose_the_gpu,
    "kill": _by(signal.SIGKILL),
    "stop": _by(signal.SIGSTOP),
    "interpreter-lock": _hold_the_interpreter_lock,
    "exit": lambda: os._exit(3),
    "exit-of-bad-data": lambda: os._exit(int(ExitCode.DATA)),
    "terminate": _by(signal.SIGTERM),
    "interrupt": _by(signal.SIGINT),
    "sleep": lambda: _pause(3600.0),
}


class FaultDirectory:
    """The faults of one job, requested by a test before or during the run."""

    def __init__(self, root: Path, pace_s: float = 0.0) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        (root / _PACE).write_text(json.dumps(pace_s))
        self._num = 0

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: str(self.root)}

    def fail_at(self, rank: int, step: int, kind: str, place: str = "step") -> StepFault:
        """Request a fault."""
        assert kind in KINDS
        assert place in PLACES or is_site(place)
        fault = StepFault(kind, rank, step, place)
        temporary = self.root / f".{self._num:02d}"
        temporary.write_text(json.dumps(asdict(fault)))
        temporary.rename(self.root / f"{self._num:02d}.json")
        self._num += 1
        return fault

    @contextmanager
    def loads_held(self) -> Iterator[None]:
        """Let no rank complete a load before the block ends, so that a recovery lasts at least as long."""
        hold = self.root / _HOLD
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def struck_unix_s(self, number: int = 0) -> float | None:
        """Return when a fault struck, None until then."""
        path = self.root / f"{number:02d}.struck"
        return float(path.read_text()) if path.exists() else None


def ordered(root: Path) -> dict[Path, StepFault]:
    """Return the faults that have not struck."""
    found = {}
    for path in sorted(root.glob("[0-9]*.json")):
        with suppress(FileNotFoundError):  # Another rank is taking it at this moment.
            found[path] = StepFault(**json.loads(path.read_text()))
    return found


def strike(path: Path, fault: StepFault) -> None:
    """Carry out the fault, unless another round was first."""
    taken = path.with_suffix(".struck")
    try:
        path.rename(path.with_suffix(".taken"))
    except FileNotFoundError:
        return
    temporary = taken.with_suffix(".now")
    temporary.write_text(repr(time.time()))
    temporary.rename(taken)
    KINDS[fault.kind]()


def obey_in_spans(root: Path, rank: int) -> None:
    """Let this rank's faults strike at sites within a step."""
    orders = {path: fault for path, fault in ordered(root).items() if fault.rank == rank and is_site(fault.place)}

    def strike_at(site: str, step: int) -> None:
        for path, fault in list(orders.items()):
            if (fault.place, fault.step) == (site, step):
                del orders[path]
                strike(path, fault)

    if orders:
        sites_in(strike_at)


def main() -> int:
    """Train as `megatrain.train` does, with faults."""
    from megatrain.checkpoint.arena_slots import ArenaSlot
    from megatrain.checkpoint.job import JobCheckpoints
    from megatrain.cli import main as cli_main
    from megatrain.training.evaluation import Evaluations
    from megatrain.training.step_loop import StepLoop

    root = Path(os.environ[VARIABLE])
    rank = int(os.environ.get("RANK", "0"))
    round_number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    pace_s = float(json.loads((root / _PACE).read_text()))

    def obey(place: str, step: int) -> None:
        for path, fault in ordered(root).items():
            if (fault.place, fault.rank, fault.step) == (place, rank, step):
                strike(path, fault)

    obey_in_spans(root, rank)

    train_step: Any = StepLoop._train_step
    evaluate: Any = Evaluations.after_step
    publish: Any = JobCheckpoints._publish
    copy_out: Any = ArenaSlot.copy_out

    def faulty_train_step(trainer: StepLoop, batch: Any) -> Any:
        started = time.monotonic()
        obey("step", trainer.step)
        outcome = train_step(trainer, batch)
        _pause(pace_s - (time.monotonic() - started))
        return outcome

    def faulty_evaluate(evaluations: Evaluations, step: int) -> None:
        obey("evaluation", step)
        evaluate(evaluations, step)

    def faulty_publish(checkpoints: JobCheckpoints, slots: Any) -> None:
        obey("load", round_number)
        while (root / _HOLD).exists():
            _pause(_POLL_S)
        publish(checkpoints, slots)

    def faulty_copy_out(slot: ArenaSlot) -> None:
        obey("snapshot", slot.words().step)
        copy_out(slot)

    StepLoop._train_step = faulty_train_step  # type: ignore[method-assign]
    Evaluations.after_step = faulty_evaluate  # type: ignore[method-assign]
    JobCheckpoints._publish = faulty_publish  # type: ignore[method-assign]
    ArenaSlot.copy_out = faulty_copy_out  # type: ignore[method-assign]
    return cli_main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
