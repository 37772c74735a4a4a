"""Section [checkpoint]: when to save, where to, what to keep, and where to start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.checkpoint_format.retention import resolved_keep_last
from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save, where to, what to keep, and where to start from."""

    interval: int = option(
        0, "Steps between checkpoints. 0: checkpoints are taken by time, see interval_s.", unit="steps", minimum=0
    )
    interval_s: float = option(
        600.0,
        "Seconds of training between checkpoints when interval is 0. If taking a checkpoint stalls training for "
        "more than 2 % of this time, checkpoints are taken less often. 0: no checkpoint before the end.",
        unit="s",
        minimum=0,
    )
    save_at_end: bool = option(True, "Whether the last step is saved.")
    directory: str = option(
        "",
        "Where checkpoints go: a directory, or a URL that fsspec supports, such as s3://bucket/job. Empty: "
        "checkpoints in the run directory.",
    )
    keep_last: int = option(
        -1,
        "How many of a branch's newest checkpoints are kept. 0: all. -1: the newest 3 if checkpoints are taken by "
        "time, all if interval is set.",
        unit="checkpoints",
        minimum=-1,
    )
    keep_every: int = option(
        0, "Checkpoints whose step is a multiple of this are kept, too. 0: none.", unit="steps", minimum=0
    )
    slots: Literal[1, 2] = option(
        2,
        "Number of snapshots of each rank in the host's memory. 2: one stays complete while the next is written. "
        "1: half the memory, but after a crash during a snapshot the job restarts from storage.",
    )
    arena_directory: str = option(
        "/dev/shm", "Directory of the snapshots, on a memory file system with space for slots times the state."
    )
    has_peer_copies: bool = option(
        False,
        "Whether each snapshot is copied to the memory of a host outside the groups of its rank along every axis, "
        "so that the loss of all hosts of any one group loses no data. It needs pp_size and dp_size above 1, and "
        "memory for two more snapshots per rank.",
    )
    keep_arena_s: float = option(
        1800.0,
        "How long snapshots stay in memory for a restart after the last worker of the job on the host has exited.",
        unit="s",
        minimum=0,
    )
    resume: bool = option(True, "Whether to continue from the run's newest checkpoint or snapshot if there is one.")
    load: str = option("", "Checkpoint (directory or URL) to start from as long as this run has not written one.")

    @property
    def is_by_time(self) -> bool:
        """Whether checkpoints are taken at intervals of time."""
        return not self.interval and self.interval_s > 0

    @property
    def num_kept(self) -> int:
        """How many of the newest checkpoints are kept; 0: all."""
        return resolved_keep_last(self.keep_last, self.interval)
