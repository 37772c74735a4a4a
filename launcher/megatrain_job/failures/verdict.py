"""The parts of a verdict: label, action, whether the failure follows from another one, and culprit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Label(StrEnum):
    """The kind of a failure. LABELS has the consequences of each kind."""

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

    STOP_USER, RETRY_THEN_STOP and ROLLBACK: one restart, and a stop if the failure recurs without a new step. The
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


@dataclass(frozen=True, slots=True)
class LabelRow:
    """The consequences of a label.

    action: the action if the deciding rule names no other.
    counts_against_host: repeated failures of the label evict the host. False for a failure that would have occurred on
    any other host too.
    runbook: the page of docs/runbooks to read first; empty for the page of the kind of incident.
    is_failure: False if a log with this label shows no failure.
    is_sign_of_loss: ranks fail like this when other ranks are gone or hang, unless their logs show another cause.
    is_wait: the rank waited for others. This is stronger evidence than a lost connection, which follows when the first
    rank that waits gives up.
    ends_its_rank: the rank's process ended by itself, so the others lost it.
    """

    action: FailureAction
    counts_against_host: bool
    runbook: str = ""
    is_failure: bool = True
    is_sign_of_loss: bool = False
    is_wait: bool = False
    ends_its_rank: bool = False


LABELS: Mapping[Label, LabelRow] = {
    Label.GPU_HARDWARE: LabelRow(FailureAction.EVICT_HOST, counts_against_host=True, runbook="gpu-errors.md"),
    # one link flap is no reason to evict a host: MegaScale and ByteRobust tolerate the first
    Label.NETWORK: LabelRow(FailureAction.TOLERATE_THEN_EVICT, counts_against_host=True, is_sign_of_loss=True),
    Label.COLLECTIVE_TIMEOUT: LabelRow(
        FailureAction.DIAGNOSE_HANG, counts_against_host=False, is_sign_of_loss=True, is_wait=True
    ),
    # the same step needs the same memory again
    Label.CUDA_OOM: LabelRow(FailureAction.STOP_USER, counts_against_host=False),
    Label.HOST_OOM: LabelRow(FailureAction.STOP_USER, counts_against_host=False, ends_its_rank=True),
    # a bug in the program, or a broken GPU: a restart with a check of the host shows which
    Label.CUDA_ILLEGAL_ACCESS: LabelRow(FailureAction.RESTART_THEN_CHECK, counts_against_host=True),
    Label.SEGFAULT: LabelRow(FailureAction.RESTART_THEN_CHECK, counts_against_host=True, ends_its_rank=True),
    Label.USER_CODE: LabelRow(FailureAction.STOP_USER, counts_against_host=False, ends_its_rank=True),
    Label.DATA: LabelRow(FailureAction.STOP_USER, counts_against_host=False),
    Label.STORAGE: LabelRow(FailureAction.RETRY_THEN_STOP, counts_against_host=False, runbook="checkpoints.md"),
    Label.NUMERICS: LabelRow(FailureAction.ROLLBACK, counts_against_host=False),
    Label.PREEMPTION: LabelRow(FailureAction.REQUEUE, counts_against_host=False),
    # usually the container image and the host do not match; rules name the cases in which only the host is broken
    Label.DRIVER_SOFTWARE: LabelRow(FailureAction.STOP_USER, counts_against_host=False),
    # The log does not show the cause. A process that ends without a message, such as one that is killed, counts against
    # its host, because a host that loses processes again and again must be evicted.
    Label.BENIGN: LabelRow(FailureAction.NONE, counts_against_host=True, is_failure=False, is_sign_of_loss=True),
}
"""Everything that depends on a label: a new label needs one row here."""

UNKNOWN_LABEL = LabelRow(FailureAction.NONE, counts_against_host=False)
"""The row of a label that LABELS lacks: of a later version, or of another program.

Its log did show a cause. Whether the host is at fault is not known, so repeated failures evict no host.
"""


def label_row(label: str) -> LabelRow:
    """Return the row of a label in a record. An empty label counts as benign."""
    if label in set(Label):
        return LABELS[Label(label)]
    return UNKNOWN_LABEL if label else LABELS[Label.BENIGN]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The most likely cause in a log so far. A log without a sign of failure is benign."""

    label: Label
    action: FailureAction
    is_cascade: bool
    """Another rank's failure caused this line; look for the cause in that rank's log."""
    culprit: str | None = None
    """The culprit in the text, as `host7 rank 48`, `gpu PCI:0000:10:1c` or `peer 10.1.2.3`."""
    rule: str = ""
    """The name of the rule that decided; empty when none matched."""
    line: str = ""
    """The line that the rule matched, cut to a bounded length."""

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
