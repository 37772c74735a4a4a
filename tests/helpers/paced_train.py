"""`python -m tests.helpers.paced_train CONFIG ...`: the trainer itself, whose compute takes stated times.

Forward and backward run the true numerics on tiny tensors and wait until their duration is over, as a GPU would with
the host free: with more ranks than cores nothing else measures anything but the scheduler. Slowness is ordered in a
directory (environment variable MEGATRAIN_PACE) and holds from the next step on; the kinds are

    compute  forward and backward of one worker of a host take `factor` times as long
    gc       that worker collects garbage in each forward, for `factor - 1` times the forward's duration
    data     its batches come late by `factor - 1` times the time of a micro-batch
    lengths  the samples of one rank are one document each, those of the others four: attention costs the square
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatrain.contracts.process import HOST_VARIABLE

VARIABLE = "MEGATRAIN_PACE"
KINDS = ("compute", "gc", "data", "lengths")
_PACE = "pace.json"
_SHORT_DOCUMENTS = 4


@dataclass(frozen=True, slots=True)
class Slowness:
    """A slow worker, and the kind of its slowness."""

    kind: str
    host: str = ""
    """Empty for `lengths`, where the rank counts."""
    local_rank: int = 0
    factor: float = 1.3
    rank: int = -1


@dataclass(frozen=True, slots=True)
class StepPace:
    """The compute time of one micro-batch; `noise`: standard deviation, as a fraction."""

    forward_s: float = 0.06
    backward_s: float = 0.12
    noise: float = 0.01
    seed: int = 0
    slow: tuple[Slowness, ...] = field(default=())


class PaceDirectory:
    """The pace of one job, which a test sets before or during the run."""

    def __init__(self, root: Path, pace: StepPace) -> None:
        assert all(one.kind in KINDS for one in pace.slow)
        self.root = root
        self.pace = pace
        root.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: str(self.root)}

    def slow_down(self, *slow: Slowness) -> None:
        """Make exactly these workers slow from the next step on."""
        assert all(one.kind in KINDS for one in slow)
        self.pace = replace(self.pace, slow=slow)
        self._write()

    def _write(self) -> None:
        temporary = self.root / f".{_PACE}"
        temporary.write_text(json.dumps(asdict(self.pace)))
        temporary.rename(self.root / _PACE)


def read_pace(root: Path) -> StepPace:
    values = json.loads((root / _PACE).read_text())
    return StepPace(**{**values, "slow": tuple(Slowness(**value) for value in values["slow"])})


class Pacer:
    """Makes the calls of this worker take as long as requested."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._host = os.environ.get(HOST_VARIABLE, "")
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.pace = read_pace(root)
        self._random = random.Random(f"{self.pace.seed} {self.rank}")
        self.cost = 1.0
        """The cost of the micro-batches of this step, relative to that of equal lengths."""

    def begin_step(self) -> None:
        self.pace = read_pace(self._root)

    def factor(self, kind: str) -> float:
        """Return by how much an operation of this worker is slowed down."""
        return max([1.0, *(one.factor for one in self.pace.slow if one.kind == kind and self._is_meant(one))])

    def has(self, kind: str) -> bool:
        return any(one.kind == kind for one in self.pace.slow)

    def is_meant(self, kind: str) -> bool:
        return any(one.kind == kind and self._is_meant(one) for one in self.pace.slow)

    def _is_meant(self, slowness: Slowness) -> bool:
        if slowness.rank >= 0:
            return slowness.rank == self.rank
        return (slowness.host, slowness.local_rank) == (self._host, self._local_rank)

    def take(self, duration_s: float, work: Callable[[], Any]) -> Any:
        """Do work that takes this time for a worker that is not slow."""
        noisy = 1.0 + self.pace.noise * self._random.gauss(0.0, 1.0)
        until = time.monotonic() + duration_s * max(0.1, noisy) * self.factor("compute") * self.cost
        result = work()
        pause_until(until)
        return result

    def collect_garbage(self) -> None:
        """Keep the garbage collector busy for a while, if requested."""
        extra_s = (self.factor("gc") - 1.0) * self.pace.forward_s
        if extra_s <= 0.0:
            return
        until = time.monotonic() + extra_s
        while time.monotonic() < until:
            rings: list[Any] = [[] for _ in range(20_000)]
            for ring in rings:
                ring.append(ring)
            del rings, ring
            gc.collect()


def pause_until(until: float) -> None:
    """Wait as for a device: the wait is for the clock."""
    threading.Event().wait(max(0.0, until - time.monotonic()))


def cut_documents(batch: Any, count: int) -> Any:
    """Return a batch whose samples have `count` documents of equal lengths each."""
    import numpy as np

    def cut(micro: Any) -> Any:
        length, num_samples = micro.tokens_SB.shape
        numbers_S = np.arange(length) * count // length
        document_SB = np.repeat(numbers_S[:, None], num_samples, axis=1)
        squared_lengths = num_samples * int((np.bincount(numbers_S) ** 2).sum())
        return replace(
            micro, document_SB=document_SB, squared_lengths=squared_lengths, num_documents=num_samples * count
        )

    return replace(batch, microbatches=[cut(micro) for micro in batch.microbatches])


def main() -> int:
    """Train as `megatrain.train` does, at the requested pace."""
    from megatrain.cli import main as cli_main
    from megatrain.data.reader import BatchReader
    from megatrain.parallel.pipeline import PipelineChunk
    from megatrain.training.step_loop import StepLoop

    pacer = Pacer(Path(os.environ[VARIABLE]))
    train_step: Any = StepLoop._train_step
    read_step: Any = BatchReader.read_step
    forward: Any = PipelineChunk.forward

    def paced_train_step(trainer: Any, batch: Any) -> Any:
        pacer.begin_step()
        longest = sum(micro.tokens_SB.shape[0] ** 2 * micro.tokens_SB.shape[1] for micro in batch.microbatches)
        # Half of the time is not attention.
        pacer.cost = 0.5 + 0.5 * batch.squared_lengths / longest if pacer.has("lengths") else 1.0
        return train_step(trainer, batch)

    def paced_read_step(reader: Any, *arguments: Any, **options: Any) -> Any:
        batch = read_step(reader, *arguments, **options)
        extra_s = (pacer.factor("data") - 1.0) * (pacer.pace.forward_s + pacer.pace.backward_s)
        pause_until(time.monotonic() + extra_s * len(batch.microbatches))
        if pacer.has("lengths"):
            batch = cut_documents(batch, 1 if pacer.is_meant("lengths") else _SHORT_DOCUMENTS)
        return batch

    def paced_forward(chunk: Any, *arguments: Any) -> Any:
        def work() -> Any:
            pacer.collect_garbage()
            return forward(chunk, *arguments)

        out, backward = pacer.take(pacer.pace.forward_s, work)
        return out, lambda gradient: pacer.take(pacer.pace.backward_s, lambda: backward(gradient))

    StepLoop._train_step = paced_train_step  # type: ignore[method-assign]
    BatchReader.read_step = paced_read_step  # type: ignore[method-assign]
    PipelineChunk.forward = paced_forward  # type: ignore[method-assign]
    return cli_main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
