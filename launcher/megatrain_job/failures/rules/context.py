"""Lines that are not a sign of a failure, but give context to later lines: frames of tracebacks, torch's table of
failures, sequence numbers of NCCL's watchdog.

The weight of each rule decides how long its lines are read: the classifier skips lines whose weight is too low to
change the verdict.
"""

from __future__ import annotations

from typing import Final

from megatrain_job.failures.rule import ABORT, EXCEPTION, SPECIFIC, TIMEOUT, Rule, rule
from megatrain_job.failures.verdict import Label

FRAME: Final = "traceback-frame"
TABLE_HEAD: Final = "table-head"
TABLE_FIELD: Final = "table-field"
SEQUENCE: Final = "watchdog-sequence"
IGNORED: Final = "exception-ignored"

RULES: tuple[Rule, ...] = (
    rule(FRAME, Label.BENIGN, EXCEPTION, "file \" & line", pattern=r'File "[^"]+", line \d+', is_context=True),
    rule(IGNORED, Label.BENIGN, SPECIFIC, "exception ignored in", "error in sys.excepthook", is_context=True),
    rule(
        TABLE_HEAD, Label.BENIGN, ABORT, "root cause (first observed failure)", "failures:",
        pattern=r"Root Cause \(first observed failure\)|^\W*Failures:\s*$", is_context=True,
    ),
    rule(
        TABLE_FIELD, Label.BENIGN, ABORT, "rank      : & (local_rank", "host      : ",
        pattern=r"^\s*(?:rank\s+: \d+ \(local_rank|host\s+: \S)", is_context=True,
    ),
    rule(
        SEQUENCE, Label.BENIGN, TIMEOUT + 1, "seqnum=", "last enqueued", "last completed",
        pattern=r"SeqNum=\d+|last (?:enqueued|completed)", is_context=True,
    ),
)  # fmt: skip
