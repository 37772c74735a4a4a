"""A checkpoint of 1 GB from 4 ranks, compared with torch's dcp.save and dcp.async_save, plain copies and plain writes.

Run alone on the machine: python -m benchmarks checkpoint [--size-gb G] [--storage DIRECTORY] [--write]
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import as_written
from benchmarks.checkpoint_ranks import BUCKET_SIZE, BenchmarkPlaces, SaveFigures, measure_saves
from benchmarks.checkpoint_state import state_tables
from benchmarks.checkpoint_steps import SaveStepFigures, measure_steps
from benchmarks.result import Result
from tests.helpers.rank_pool import RankPool
from tests.helpers.waiting import wait_until

NUM_RANKS, NUM_STEP_RANKS = 4, 2
ROUNDS = 5
_TIMEOUT_S = 1800.0
_SHARED_MEMORY = Path("/dev/shm")
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds or ratios, one for each round except the warm-up round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def over(self, other: _Times) -> _Times:
        """Return the ratios round by round."""
        return _Times(tuple(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def row(self, what: str, unit: str, bar: str = "") -> Row:
        return _row(what, unit, self.median, min(self.values), max(self.values), bar)


def run(size_gb: float = 1.0, storage: str = "") -> Result:
    """Measure. storage: a directory on a disk for the files; "" means a temporary directory."""
    tables = state_tables(size_gb)
    with _places(storage) as places, RankPool(NUM_RANKS) as pool:
        file_system = _file_system(places.storage)
        saves: list[SaveFigures] = pool.run(measure_saves, NUM_RANKS, tables, ROUNDS, places, timeout_s=_TIMEOUT_S)
    with _places(storage) as places, RankPool(NUM_STEP_RANKS) as pool:
        figures: list[SaveStepFigures] = pool.run(
            measure_steps, NUM_STEP_RANKS, tables, ROUNDS, places, timeout_s=_TIMEOUT_S
        )
    steps = figures[0]
    options = "" if size_gb == 1.0 else f" --size-gb {size_gb:g}"
    rows = [*_save_rows(saves), *_restore_rows(saves), *_step_rows(steps)]
    return Result(
        name="checkpoint",
        title="Taking, storing and restoring a checkpoint, compared with torch's and with plain copies and writes",
        command=f"python -m benchmarks checkpoint{options} --write",
        rows=rows,
        notes=_notes(steps),
        settings={
            "ranks": NUM_RANKS,
            "state_GB": sum(save.state_bytes for save in saves) / 1e9,
            "tensors_per_rank": max(save.num_tensors for save in saves),
            "hidden_size": tables["model"]["hidden_size"],
            "bucket_size": BUCKET_SIZE,
            "storage_file_system": file_system,
            "arena": str(_SHARED_MEMORY),
        },
        bars=[one for row in rows for one in as_written(row["figure"], row["median"], row["bar"])],
    )


def _save_rows(ranks: Sequence[SaveFigures]) -> list[Row]:
    times = {key: _spans([rank.windows[key] for rank in ranks]) for key in ranks[0].windows}
    stall, stage_2 = times["megatrain", "stall"], times["megatrain", "stage 2"]
    copy, whole = times["copy, tensor by tensor", "copy"], times["copy, one memcpy a rank", "copy"]
    plain = [times[f"write and fsync by {count}", "write"] for count in (1, NUM_RANKS)]
    kept, fresh = ("dcp.async_save, stager kept", "dcp.async_save")
    best_plain = min(plain, key=lambda one: one.median)
    gigabytes = sum(rank.state_bytes for rank in ranks) / 1e9
    speed = _Times(tuple(gigabytes / seconds for seconds in stage_2.values))
    return [
        stall.row("stall: take", "s"),
        copy.row("copy to shared memory, tensor by tensor", "s"),
        whole.row("copy to shared memory, one memcpy a rank", "s"),
        times[kept, "stall"].row("dcp.async_save, stager kept: until it returns", "s"),
        times[fresh, "stall"].row("dcp.async_save: until it returns", "s"),
        stall.over(copy).row("stall / copy tensor by tensor", "ratio", "<= 1.3"),
        stall.over(whole).row("stall / one memcpy a rank", "ratio", "<= 1.3"),
        stall.over(times[kept, "stall"]).row("stall / dcp.async_save's, stager kept", "ratio", "<= 1"),
        stall.over(times[fresh, "stall"]).row("stall / dcp.async_save's", "ratio", "<= 1"),
        stage_2.row("stage 2: to COMMIT", "s"),
        speed.row("stage 2: to COMMIT", "GB/s"),
        plain[0].row("write and fsync by 1 process", "s"),
        plain[1].row(f"write and fsync by {NUM_RANKS} processes", "s"),
        times["dcp.save", "save"].row("dcp.save", "s"),
        times[kept, "save"].row("dcp.async_save, stager kept: until it is written", "s"),
        times[fresh, "save"].row("dcp.async_save: until it is written", "s"),
        best_plain.over(stage_2).row("throughput of stage 2 / better plain write", "ratio", ">= 0.8"),
        best_plain.over(times["dcp.save", "save"]).row("throughput of dcp.save / better plain write", "ratio"),
        _count_row("collective calls: planning, before the first take", ranks[0].planning_calls),
        _count_row("collective calls: first take", ranks[0].calls_by_take[0]),
        _count_row("collective calls: second take", ranks[0].calls_by_take[1], "<= 1"),
    ]


def _restore_rows(ranks: Sequence[SaveFigures]) -> list[Row]:
    size = ranks[0].checkpoint_bytes
    rows = []
    for cut in ranks[0].bytes_read:
        read, received = sum(rank.bytes_read[cut] for rank in ranks), sum(rank.bytes_received[cut] for rank in ranks)
        seconds = _Times((_span([rank.load_windows[cut] for rank in ranks]),))
        rows += [
            _count_row(f"load, {cut}: bytes read / checkpoint's size", read / size, "<= 1.05", "ratio"),
            _count_row(f"load, {cut}: bytes between ranks / checkpoint's size", received / size, "", "ratio"),
            seconds.row(f"load, {cut}", "s"),
        ]
    restore = _spans([rank.restore_windows for rank in ranks])
    rows += [
        restore.row("warm restore", "s", "<= 2"),
        _count_row(
            "warm restore: bytes read from storage", sum(rank.restore_bytes_read for rank in ranks), "<= 0", "bytes"
        ),
    ]
    return rows


def _step_rows(steps: SaveStepFigures) -> list[Row]:
    beside, alone = _Times(tuple(steps.beside[1:])), _Times(tuple(steps.alone[1:]))
    return [
        _Times(tuple(1e3 * value for value in alone.values)).row("step without stage 2", "ms"),
        _Times(tuple(1e3 * value for value in beside.values)).row("step beside stage 2", "ms"),
        beside.over(alone).row("step beside stage 2 / without", "ratio", "<= 1.05"),
        _Times(tuple(steps.stage_2_s[1:])).row("stage 2 beside the step", "s"),
        _Times(tuple(map(float, steps.num_steps[1:]))).row("steps in a block", "count"),
    ]


def _notes(steps: SaveStepFigures) -> list[str]:
    beside = "until COMMIT"
    if steps.num_unfinished:
        beside = f"until COMMIT, but for {steps.num_unfinished} that were cut off"
    return [
        f"{ROUNDS} rounds after a warm-up round; in each, all sides take turns; every other round reverses the order",
        "median, lowest and highest of the rounds; ratios round by round; before each side os.sync; files are new",
        "a time runs from the start of the first rank to the end of the last one; all ranks start together",
        "stall: JobCheckpoints.take, the agreement of all ranks included",
        "stage 2: from there to COMMIT, SHA-256 of every item included; ranks wait meanwhile and poll every 2 ms",
        "dcp: the same tensors as plain tensors, one key a box; default writer: one file a rank, synced, no checksums",
        "stager kept: one DefaultStager for all saves, which reuses its memory; else async_save with its defaults",
        "copies: numpy.copyto from the state to pre-faulted shared memory; plain writes write from there",
        f"loads: by {NUM_RANKS} data-parallel ranks, page cache of the files dropped, every value checked",
        "another cut: other buckets, so that most stored items are needed by other ranks than those that wrote them",
        "warm restore: a new JobCheckpoints and its restore(), every value checked",
        f"steps: the trainer's own on a small model; its {NUM_STEP_RANKS} ranks use all cores; means of a block",
        f"blocks beside stage 2 (without the stall) last {beside}; in turn with them, as many steps without stage 2",
    ]


def _spans(ranks: Sequence[Sequence[tuple[float, float]]]) -> _Times:
    """Return the duration of each round over all ranks, without the first, which is the warm-up."""
    return _Times(tuple(_span(windows) for windows in list(zip(*ranks, strict=True))[1:]))


def _span(windows: Sequence[tuple[float, float]]) -> float:
    return max(end for _, end in windows) - min(begin for begin, _ in windows)


def _row(what: str, unit: str, median: float, lowest: float, highest: float, bar: str) -> Row:
    return {"figure": what, "unit": unit, "median": median, "lowest": lowest, "highest": highest, "bar": bar}


def _count_row(what: str, value: float, bar: str = "", unit: str = "count") -> Row:
    return _row(what, unit, value, value, value, bar)


@contextmanager
def _places(storage: str) -> Iterator[BenchmarkPlaces]:
    """Make temporary directories. They are removed when the writer that was started has ended."""
    with (
        tempfile.TemporaryDirectory(prefix="megatrain-benchmark-", dir=storage or _disk_directory()) as disk,
        tempfile.TemporaryDirectory(prefix="megatrain-benchmark-", dir=_SHARED_MEMORY) as memory,
    ):
        yield BenchmarkPlaces(Path(disk), Path(memory))
        wait_until(lambda: not any(Path(memory).glob("megatrain-arena*")), "the end of the writer")


def _disk_directory() -> str:
    """Return a directory for temporary files that is not on a memory file system."""
    candidates = [tempfile.gettempdir(), "/var/tmp", str(Path.cwd())]
    return next(
        candidate
        for candidate in candidates
        if Path(candidate).is_dir() and _file_system(Path(candidate)) not in _MEMORY_FILE_SYSTEMS
    )


def _file_system(path: Path) -> str:
    """Return the type of the file system that a directory is on."""
    found = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount_point, kind, *_ = line.split()
        if os.path.commonpath([path.resolve(), mount_point]) == mount_point and len(mount_point) >= len(found[0]):
            found = (mount_point, kind)
    return found[1]
