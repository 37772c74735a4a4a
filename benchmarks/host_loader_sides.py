"""The measured parts of `host_loader`: a process that opens the sources, and a host whose ranks share one loader."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from megatrain.arena.directory import create_arena
from megatrain.config.config import Config
from megatrain.config.step_sequence import StepSequence
from megatrain.contracts.layout import Layout
from megatrain.contracts.step_plan import NO_SAMPLE
from megatrain.data.loader.host_loader import HostLoader, RingLocation
from megatrain.data.loader.plan import loader_plan
from megatrain.data.reader import BatchReader
from megatrain.data.step_batch import StepBatch
from megatrain.training.training_data import open_reader, sample_stream
from tests.helpers.processes import descendants, is_running, words_of
from tests.helpers.training_case import make_config

SEQ_LEN = 4096
BATCH_SAMPLES = 16
PACE_S = 0.1
RESIZED = (8, 7, 3, 8)
"""The replicas of the hosts of `is_resized_stream_the_same`."""
SHARED_MEMORY = "/dev/shm"
_TOKEN_BYTES = 2


@dataclass(frozen=True, slots=True)
class FirstSample:
    """What a process needs from opening the files to its first batch. memory_mb: 10^6 bytes of private memory."""

    seconds: float
    cpu_s: float
    memory_mb: float


@dataclass(frozen=True, slots=True)
class HostRun:
    """A run of a host's ranks.

    memory_mb: private memory of the loader, in 10^6 bytes. num_read: bytes that it read from the first step to the
    middle of the run. num_used: bytes of the tokens of as many steps. waits_s: for each step after the first, the
    longest wait of any rank for its batch. is_same: whether each batch is that of a single reader.
    """

    memory_mb: float
    num_read: int
    num_used: int
    waits_s: Sequence[float]
    seconds: float
    is_same: bool


def first_sample(prefixes: Sequence[Path]) -> FirstSample:
    """Measure a separate process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(_first_sample, prefixes).result()


def _first_sample(prefixes: Sequence[Path]) -> FirstSample:
    config = _config(prefixes)
    before = _private_mb(os.getpid())
    began, cpu_began = time.perf_counter(), time.process_time()
    (plan,) = config.steps(Layout(), 0, 1).plans()
    open_reader(config).read_step(plan, 0)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return FirstSample(seconds, cpu_s, _private_mb(os.getpid()) - before)


def host_run(prefixes: Sequence[Path], layout: Layout, num_steps: int, *, is_killed: bool = False) -> HostRun:
    """Get the steps of all ranks of a host through its loader. is_killed: kill the loader in the middle of the run."""
    config = _config(prefixes)
    reader, steps = open_reader(config), config.steps(layout, 0, num_steps)
    with _opened_ranks(config, reader, steps, layout) as (place, ranks):
        digests, waits_s, began = list[list[str]](), list[float](), 0.0
        num_read, memory_mb = 0, 0.0
        for step in range(num_steps):
            # after the pause of a step the ring is full
            if step == 1:
                num_read, began = -_bytes_read(place), time.perf_counter()
            if step == num_steps // 2:
                # the loader still runs here: it ends when the ring has the last step
                num_read, memory_mb = num_read + _bytes_read(place), _private_mb(_loader_of(place))
                if is_killed:
                    os.kill(_loader_of(place), signal.SIGKILL)
            batches, waits = list[StepBatch](), list[float]()
            for rank in ranks:
                requested = time.perf_counter()
                batches.append(rank.next())
                waits.append(time.perf_counter() - requested)
            digests.append([_digest(batch) for batch in batches])
            if step:
                waits_s.append(max(waits))
            time.sleep(PACE_S)
        seconds = time.perf_counter() - began
    replicas = [layout.sample_share(rank)[0] for rank in range(layout.world_size)]
    alone = [[_digest(reader.read_step(one, replica)) for replica in replicas] for one in steps.plans()]
    num_used = (num_steps // 2 - 1) * BATCH_SAMPLES * SEQ_LEN * _TOKEN_BYTES
    return HostRun(memory_mb, num_read, num_used, waits_s, seconds, digests == alone)


def is_resized_stream_the_same(prefixes: Sequence[Path], num_steps: int) -> bool:
    """Return whether hosts of RESIZED replicas, one after the other, read the samples that a single reader reads.

    num_steps: of each host. Two stages begin meanwhile: the second host gets other weights and larger batches, the
    third one shorter samples.
    """
    tokens = BATCH_SAMPLES * SEQ_LEN * num_steps
    names = {f"source-{number}": 1 + number % 3 for number in range(0, len(prefixes), 2)}
    weights = ", ".join(f"{name}={weight}" for name, weight in names.items())
    config = _config(
        prefixes,
        {
            "data_stage": {"after_tokens": tokens + 1, "weights": weights, "global_batch_size": BATCH_SAMPLES + 5},
            "data_stage-2": {"after_tokens": 2 * tokens + SEQ_LEN * BATCH_SAMPLES, "seq_len": SEQ_LEN // 2},
        },
    )
    reader, cursor, found = open_reader(config), 0, dict[int, str]()
    for num_replicas in RESIZED:
        layout = Layout(dp_size=num_replicas)
        with _opened_ranks(config, reader, config.steps(layout, cursor, num_steps), layout) as (_, ranks):
            for _ in range(num_steps):
                for rank in ranks:
                    found |= _samples(rank.next())
        cursor = config.batch_schedule.cursor_after(cursor, num_steps, ())
    alone = dict[int, str]()
    for plan in config.steps(Layout(), 0, num_steps * len(RESIZED)).plans():
        alone |= _samples(reader.read_step(plan, 0))
    return found == alone and sorted(found) == list(range(cursor))


@contextmanager
def _opened_ranks(
    config: Config, reader: BatchReader, steps: StepSequence, layout: Layout
) -> Iterator[tuple[RingLocation, list[HostLoader]]]:
    """Yield the ranks of a host that computes the whole layout, and the place of their ring."""
    plan = loader_plan(reader, sample_stream(config, reader, ()), steps, layout, range(layout.world_size), config.data)
    with TemporaryDirectory(prefix="host-loader-", dir=SHARED_MEMORY) as directory, ExitStack() as stack:
        place = RingLocation(create_arena(Path(directory) / "arena"), 1, Path(directory) / "data-loader.log")
        place.create(plan)
        names = reader.source_names
        ranks = [stack.enter_context(HostLoader(place, plan, number, names)) for number in range(plan.num_readers)]
        place.remove_ring()
        yield place, ranks


def _config(prefixes: Sequence[Path], stages: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Config:
    sources = {
        f"data_source-{number + 1}" if number else "data_source": {
            "name": prefix.name,
            "path": str(prefix),
            "weight": 1.0 + number % 7,
        }
        for number, prefix in enumerate(prefixes)
    }
    return make_config(
        {"data": {"train": "", "has_document_mask": True}, "model": {"seq_len": SEQ_LEN}, **sources},
        {"batch": {"micro_batch_size": 1, "global_batch_size": BATCH_SAMPLES}},
        stages,
    )


def _digest(batch: StepBatch) -> str:
    """Return a digest of what a batch is: its samples and the bounds of their documents. All tokens are 0."""
    found = hashlib.sha256()
    for one in batch.microbatches:
        assert one.document_SB is not None
        for array in (one.sample_B, one.num_labels_B, one.tokens_SB, one.labels_SB, one.document_SB):
            found.update(array.tobytes())
    return found.hexdigest()


def _samples(batch: StepBatch) -> dict[int, str]:
    """Return a digest of each sample of a batch, by its number. Micro-batches have one sample."""
    found = dict[int, str]()
    for one in batch.microbatches:
        (number,) = one.sample_B.tolist()
        if number != NO_SAMPLE:
            assert one.document_SB is not None
            arrays = (one.tokens_SB, one.labels_SB, one.document_SB)
            found[number] = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return found


def _loader_of(place: RingLocation) -> int:
    """Return the process of the running loader."""
    wanted = str(place.arena.root).encode()
    (pid,) = (pid for pid in descendants(os.getpid()) if wanted in words_of(pid) and is_running(pid))
    return pid


def _bytes_read(place: RingLocation) -> int:
    """Return the bytes that the loader has read, from the page cache or the disk."""
    lines = Path(f"/proc/{_loader_of(place)}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def _private_mb(pid: int) -> float:
    """Return the private memory of a process, in 10^6 bytes; mapped files are not counted."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) * 1024 / 1e6
