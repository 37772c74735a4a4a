"""The parts of a verdict on a failure: its label, the action, whether it follows from another, and the culprit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Label(StrEnum):
    """What went wrong.

    The driver counts repeated failures against the host, which can evict it, unless their label is in
    `_NOT_CAUSED_BY_HOST` (launcher/megatrain_launcher/driver/responses.py).
    """

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


class FailureAction(StrEnum):
    """The action that the log suggests; driver/responses.py decides.

    STOP_USER, RETRY_THEN_STOP and ROLLBACK: one restart, and a stop if the same happens again without a new step. The
    driver rolls back only after exit code 67 or a verdict of the diagnosis.
    """

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


ACTIONS: dict[Label, FailureAction] = {
    Label.GPU_HARDWARE: FailureAction.EVICT_HOST,
    # one flap is no reason to give up a host: MegaScale and ByteRobust tolerate the first
    Label.NETWORK: FailureAction.TOLERATE_THEN_EVICT,
    Label.COLLECTIVE_TIMEOUT: FailureAction.DIAGNOSE_HANG,
    # the same step needs the same memory again
    Label.CUDA_OOM: FailureAction.STOP_USER,
    Label.HOST_OOM: FailureAction.STOP_USER,
    # the program's mistake or a GPU's: a restart with a check of the host shows which
    Label.CUDA_ILLEGAL_ACCESS: FailureAction.RESTART_THEN_CHECK,
    Label.SEGFAULT: FailureAction.RESTART_THEN_CHECK,
    Label.USER_CODE: FailureAction.STOP_USER,
    Label.DATA: FailureAction.STOP_USER,
    Label.STORAGE: FailureAction.RETRY_THEN_STOP,
    Label.NUMERICS: FailureAction.ROLLBACK,
    Label.PREEMPTION: FailureAction.REQUEUE,
    # usually the image and the host do not match; rules name the cases in which only the host is broken
    Label.DRIVER_SOFTWARE: FailureAction.STOP_USER,
    Label.BENIGN: FailureAction.NONE,
}
"""The action if the deciding rule names no other."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best cause that a log has named so far. A log without a sign of failure is benign."""

    label: Label
    action: FailureAction
    is_cascade: bool
    """Another rank's failure caused this line; look for the cause in that rank's log."""
    culprit: str | None = None
    """The culprit in the text, as `host7 rank 48`, `gpu PCI:0000:10:1c` or `peer 10.1.2.3`."""
    rule: str = ""
    """The name of the rule that decided; empty when none matched."""
    line: str = ""
    """The line that it matched, cut to a bounded length."""

    def to_dict(self) -> dict[str, str | bool | None]:
        """Return the fields in JSON form."""
        return {
            "label": self.label.value,
            "action": self.action.value,
            "cascade": self.is_cascade,
            "culprit": self.culprit,
            "rule": self.rule,
            "line": self.line,
        }


NO_FAILURE = Verdict(Label.BENIGN, FailureAction.NONE, is_cascade=False)
