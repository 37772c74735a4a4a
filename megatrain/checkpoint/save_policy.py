"""When checkpoints are taken by time, and what a run says of its checkpoints when it begins.

One rank looks at the clock, and all ranks learn in the sums of a step that the next checkpoint is due: so they take it
after the same step. What a checkpoint costs is the time for which training stands still; storage gets it meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megatrain.config.checkpoint import CheckpointConfig
from megatrain.contracts.texts import bytes_text, seconds_text

MOST_SHARE = 0.02
"""Of the time of training goes into checkpoints that are taken by time, at most."""


class SaveInterval:
    """Says on the rank that looks at the clock when the next checkpoint is due; the first interval begins now."""

    def __init__(self, settings: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._since = clock()
        self._stall_s = 0.0

    @property
    def length_s(self) -> float:
        """How long training goes on between two checkpoints, by what the last one cost."""
        return max(self._settings.interval_s, self._stall_s / MOST_SHARE)

    def is_over(self, *, is_storing: bool) -> bool:
        """Whether the next checkpoint is due. `is_storing`: storage does not have the last one yet."""
        return self._settings.is_by_time and not is_storing and self._clock() - self._since >= self.length_s

    def saved(self, stall_s: float) -> None:
        """Begin the next interval: a checkpoint was taken, for which training stood still for so long."""
        self._since, self._stall_s = self._clock(), stall_s


def policy_notes(settings: CheckpointConfig, place: str, num_bytes: int, free_bytes: int | None) -> list[str]:
    """Return what a run says of its checkpoints when it begins, with warnings where it risks what it computes.

    num_bytes: of one checkpoint. free_bytes: of the disk of `place`; None where that is not known, as behind a URL.
    """
    end = "; the last step is saved" if settings.save_at_end else ""
    if not settings.interval and not settings.is_by_time:
        what = f"no checkpoint is taken before the end{end}: checkpoint.interval=0 and checkpoint.interval_s=0"
        return [f"WARNING: {what}; a failure costs all that was trained, but for what is still in memory"]
    when = (
        f"every {settings.interval} steps (checkpoint.interval)"
        if settings.interval
        else f"every {seconds_text(settings.interval_s)} of training (checkpoint.interval_s), more seldom where they "
        f"would take more than {MOST_SHARE:.0%} of it"
    )
    size, free = bytes_text(num_bytes), "" if free_bytes is None else f", where {bytes_text(free_bytes)} are free"
    notes = [f"a checkpoint is taken {when}{end}"]
    if not settings.num_kept:
        return [*notes, f"all of them are kept (checkpoint.keep_last), {size} each in {place}{free}"]
    # the next one is whole before the oldest is removed
    needed = (settings.num_kept + 1) * num_bytes
    every = f" and those of every {settings.keep_every}th step" if settings.keep_every else ""
    notes.append(
        f"the newest {settings.num_kept}{every} are kept (checkpoint.keep_last), {size} each: up to "
        f"{bytes_text(needed)}{' and the latter' if every else ''} in {place}{free}"
    )
    if free_bytes is not None and free_bytes < needed:
        notes.append(
            f"WARNING: {place} may become too small for its checkpoints: {bytes_text(needed)} against "
            f"{bytes_text(free_bytes)} free; keep fewer (checkpoint.keep_last), or name a larger place "
            "(checkpoint.directory)"
        )
    return notes


def checkpoint_bytes(data_files: Iterable[int], metadata: bytes, tokenizer: str) -> int:
    """Return the size of the files of a checkpoint, as `ckpt ls` shows it.

    data_files: the size of each. tokenizer: the path of the file that goes into each checkpoint, "" for none.
    """
    path = Path(tokenizer)
    return sum(data_files) + len(metadata) + (path.stat().st_size if tokenizer and path.exists() else 0)


def free_bytes(place: str) -> int | None:
    """Return what is free on the disk of a directory, which need not be there yet; None for a URL."""
    if "://" in place:
        return None
    path = Path(place).absolute()
    existing = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    space = os.statvfs(existing)
    return space.f_bavail * space.f_frsize
