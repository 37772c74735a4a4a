"""When checkpoints by time are due, and the log lines about checkpoints at the start of a run.

One rank checks the clock. Its decision reaches all ranks with the sums of a step, so all take the checkpoint after the
same step. The cost of a checkpoint is the time for which training stops; the write to storage runs in the background.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megatrain.checkpoint_format.checkpoint_names import TOKENIZER_CONFIG_NAME
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.formatting import bytes_text, seconds_text

MAX_COST_SHARE = 0.02
"""The largest fraction of the training time that checkpoints by time may cost."""


class SaveInterval:
    """Decides on one rank when the next checkpoint is due. The first interval begins when this object is created."""

    def __init__(self, settings: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._since = clock()
        self._pause_s = 0.0

    @property
    def length_s(self) -> float:
        """The training time until the next checkpoint: longer than configured after a checkpoint with a long pause."""
        return max(self._settings.interval_s, self._pause_s / MAX_COST_SHARE)

    def is_over(self, *, is_storing: bool) -> bool:
        """Return whether the next checkpoint is due. `is_storing`: whether the last one is still being stored."""
        return self._settings.is_by_time and not is_storing and self._clock() - self._since >= self.length_s

    def saved(self, pause_s: float) -> None:
        """Begin the next interval after a checkpoint that stopped training for `pause_s`."""
        self._since, self._pause_s = self._clock(), pause_s


def policy_notes(settings: CheckpointConfig, location: str, num_bytes: int, free_bytes: int | None) -> list[str]:
    """Return the log lines about checkpoints at the start of a run, with warnings when progress may be lost.

    num_bytes: of one checkpoint. free_bytes: on the disk of `location`; None when unknown, as for a URL.
    """
    end = "; the last step is saved" if settings.save_at_end else ""
    if not settings.interval and not settings.is_by_time:
        what = f"no checkpoint is taken before the end{end}: checkpoint.interval=0 and checkpoint.interval_s=0"
        return [f"WARNING: {what}; a failure loses all training progress that is not still in memory"]
    when = (
        f"every {settings.interval} step{'s' if settings.interval > 1 else ''} (checkpoint.interval)"
        if settings.interval
        else f"every {seconds_text(settings.interval_s)} of training (checkpoint.interval_s), less often if they "
        f"would take more than {MAX_COST_SHARE:.0%} of it"
    )
    size, free = bytes_text(num_bytes), "" if free_bytes is None else f", where {bytes_text(free_bytes)} are free"
    notes = [f"a checkpoint is taken {when}{end}"]
    if not settings.num_kept:
        return [*notes, f"all of them are kept (checkpoint.keep_last), {size} each in {location}{free}"]
    # the next checkpoint is complete before the oldest is removed
    needed = (settings.num_kept + 1) * num_bytes
    every = f" and those of every {settings.keep_every}th step" if settings.keep_every else ""
    notes.append(
        f"the newest {settings.num_kept}{every} are kept (checkpoint.keep_last), {size} each: up to "
        f"{bytes_text(needed)}{' for the newest' if every else ''} in {location}{free}"
    )
    if free_bytes is not None and free_bytes < needed:
        notes.append(
            f"WARNING: {location} may become too small for its checkpoints: they need {bytes_text(needed)}, and "
            f"{bytes_text(free_bytes)} are free; keep fewer (checkpoint.keep_last), or name a larger directory "
            "(checkpoint.directory)"
        )
    return notes


def checkpoint_bytes(data_files: Iterable[int], metadata_bytes: int, tokenizer: str) -> int:
    """Return the size of a checkpoint's files, as `ckpt ls` shows it.

    data_files: the size of each. metadata_bytes: the size of metadata and index. tokenizer: the path of the tokenizer
    file that each checkpoint contains, with its configuration; "" without one.
    """
    paths = (Path(tokenizer), Path(tokenizer).with_name(TOKENIZER_CONFIG_NAME)) if tokenizer else ()
    return sum(data_files) + metadata_bytes + sum(path.stat().st_size for path in paths if path.exists())


def free_bytes(location: str) -> int | None:
    """Return the free bytes on a directory's disk, None for a URL. The directory need not exist yet."""
    if "://" in location:
        return None
    path = Path(location).absolute()
    existing = next((directory for directory in (path, *path.parents) if directory.exists()), Path("/"))
    space = os.statvfs(existing)
    return space.f_bavail * space.f_frsize
