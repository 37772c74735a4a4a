"""The settings of a streamer, passed as one JSON value on its command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint_format.branches import MAIN_BRANCH
from megatrain.fencing.phase_timeouts import PhaseTimeouts
from megatrain.run_files.run_directory import RunDirectory, safe_name


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamerSettings:
    """The streamer's job and host, the paths of black boxes and logs, and the times after which a rank is silent."""

    job: str
    host: str
    run: str
    """The run directory."""
    host_logs: str
    """Directory with the logs of this host's ranks."""
    black_box_directory: str
    """Empty: black boxes are off; only logs and readings of devices are streamed."""
    spool_bytes: int
    phase_timeouts: PhaseTimeouts
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 0
    metrics_token_file: str = ""
    telemetry_interval_s: float = 0.0
    """Time between two readings of GPUs and network interfaces; 0: never."""
    dcgm_url: str = ""

    @property
    def box_prefix(self) -> str:
        """Return the common prefix of the names of this run's black boxes, of any round."""
        names = (self.job, RunDirectory(Path(self.run)).key, MAIN_BRANCH)
        return f"megatrain.{'.'.join(map(safe_name, names))}."

    @property
    def own_directory(self) -> Path:
        """Return the directory of the streamer's spool and positions."""
        return Path(self.run) / "hosts" / safe_name(self.host) / "streamer"
