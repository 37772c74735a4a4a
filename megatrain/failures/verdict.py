"""The words of a verdict on a failure: what it was, what to do, whether it follows from another, and who."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Label(StrEnum):
    """What went wrong."""

    GPU_HARDWARE = "gpu_hardware"
    NETWORK = "network"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    CUDA_OOM = "cuda_oom"
    HOST_OOM = "host_oom"
    CUDA_ILLEGAL_ACCESS = "cuda_illegal_access"
    USER_CODE = "user_code"
    DATA = "data"
    STORAGE = "storage"
    NUMERICS = "numerics"
    PREEMPTION = "preemption"
    DRIVER_SOFTWARE = "driver_software"
    SEGFAULT = "segfault"
    BENIGN = "benign"


class Action(StrEnum):
    """What the driver does about it."""

    EVICT_HOST = "evict_host"
    TOLERATE_THEN_EVICT = "tolerate_then_evict"
    DIAGNOSE_HANG = "diagnose_hang"
    STOP_USER = "stop_user"
    RESTART_THEN_CHECK = "restart_then_check"
    RESTART = "restart"
    RETRY_THEN_STOP = "retry_then_stop"
    ROLLBACK = "rollback"
    REQUEUE = "requeue"
    NONE = "none"


ACTIONS: dict[Label, Action] = {
    Label.GPU_HARDWARE: Action.EVICT_HOST,
    # one flap is no reason to give up a host: MegaScale and ByteRobust tolerate the first
    Label.NETWORK: Action.TOLERATE_THEN_EVICT,
    Label.COLLECTIVE_TIMEOUT: Action.DIAGNOSE_HANG,
    # the same step needs the same memory again
    Label.CUDA_OOM: Action.STOP_USER,
    Label.HOST_OOM: Action.STOP_USER,
    # the program's mistake or a GPU's: a restart with a check of the host shows which
    Label.CUDA_ILLEGAL_ACCESS: Action.RESTART_THEN_CHECK,
    Label.SEGFAULT: Action.RESTART_THEN_CHECK,
    Label.USER_CODE: Action.STOP_USER,
    Label.DATA: Action.STOP_USER,
    Label.STORAGE: Action.RETRY_THEN_STOP,
    Label.NUMERICS: Action.ROLLBACK,
    Label.PREEMPTION: Action.REQUEUE,
    # most often the image and the host do not fit together; rules name the cases in which the host alone is broken
    Label.DRIVER_SOFTWARE: Action.STOP_USER,
    Label.BENIGN: Action.NONE,
}
"""What to do when the rule that decided names nothing else."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause that a log names best so far. A log without a sign of failure is benign."""

    label: Label
    action: Action
    is_cascade: bool
    """The line was caused by another rank's failure: look there."""
    culprit: str | None = None
    """Who the text names, as `host7 rank 48`, `gpu PCI:0000:10:1c` or `peer 10.1.2.3`."""
    rule: str = ""
    """The name of the rule that decided; empty when none matched."""
    line: str = ""
    """The line that it matched, cut to a bounded length."""

    def to_dict(self) -> dict[str, str | bool | None]:
        """Return the fields as JSON holds them."""
        return {
            "label": self.label.value,
            "action": self.action.value,
            "cascade": self.is_cascade,
            "culprit": self.culprit,
            "rule": self.rule,
            "line": self.line,
        }


NO_FAILURE = Verdict(Label.BENIGN, Action.NONE, is_cascade=False)
