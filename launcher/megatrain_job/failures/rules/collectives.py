"""Collectives that did not end: NCCL's watchdog, heartbeat monitor, gloo's timeouts, barriers, and NCCL's calls."""

from __future__ import annotations

from megatrain_job.failures.rule import ABORT, LOST_PEER, SPECIFIC, TIMEOUT, Rule, rule
from megatrain_job.failures.verdict import Label

RULES: tuple[Rule, ...] = (
    rule(
        "watchdog-timeout", Label.COLLECTIVE_TIMEOUT, TIMEOUT,
        "watchdog caught collective operation timeout", "caught collective operation timeout",
        "milliseconds before timing out", "nccl & watchdog & timeout",
        unless=r"communicator was aborted|original reason|future work|timeouts? (?:is|are|set)\b|configured|enabled",
        names_own_rank=False,
    ),
    rule(
        "aborted-after-timeout", Label.COLLECTIVE_TIMEOUT, TIMEOUT,
        "original reason for failure was & time", "nccl communicator was aborted & time",
        "observed flight recorder dump signal", "received a dump signal", "another rank reported a timeout",
        "dump signal & from another rank", "timeout on another rank", "due to timeout & remote rank",
        "signal from rank & timeout", "received a timeout signal",
        pattern=r".", is_cascade=True,
        culprit=r"(?:from|by) rank (?P<rank>\d+)", names_own_rank=False,
    ),
    rule(
        "collective-timeout", Label.COLLECTIVE_TIMEOUT, TIMEOUT,
        "collective & timed out", "timed out waiting & for recv", "timed out waiting & for send",
        "timed out waiting & operation to complete", "monitoredbarrier", "monitored_barrier & fail",
        "barrier & timed out", "barrier timeout", "gloo & timed out", "allreduce & timed out",
        "allgather & timed out", "application timeout caused pair closure", "wait timeout & store",
        "wait timeout after & ms, keys", "processgroup & timeout", "opt_allreduce & timeout", "stalled ranks",
        "stall inspector", "one or more tensors were submitted to be reduced", "missing ranks:",
        "store.get & timed out", "workgloo & timeout", "deadline exceeded & barrier", "ncclinprogress & timeout",
        "commtimeout", "watchdog & hang", "nccl & operation & timed out", "workhccl & timeout", "hccl & timeout",
        "no progress & seconds & hang", "section & timed out", "did not receive heartbeat",
        "no heartbeat from rank", "training & appears & hung", "possible hang", "hang detected", "ranks are stuck",
        "rank is stuck",
        unless=r"but received errors|writev|connect|timeouts?\W{0,3}(?:set|=|is)\b|setting|default|"
               r"init_process_group|retry|using",
        culprit=r"\brank\(?s?\)? (?P<rank>\d+)[^.]{0,40}(?:failed to pass|did not|missing|stuck)|"
                r"(?:failed to pass|missing|no heartbeat from|stuck)[^.]{0,30}ranks?:? \[?(?P<peer>\d+(?:, ?\d+)*)",
        names_own_rank=False,
    ),
    rule(
        "peer-failed-barrier", Label.NETWORK, LOST_PEER,
        "but received errors while waiting for send/recv from rank", "received errors while waiting for",
        pattern=r"from rank (?P<rank>\d+)", is_cascade=True,
    ),
    rule(
        "waiting-for-workers", Label.COLLECTIVE_TIMEOUT, TIMEOUT,
        "timed out after & waiting for", "rendezvoustimeouterror", "waiting for workers",
        "diststoreerror: timed out", "diststoreerror: socket timeout", "timed out waiting for & clients",
        "clients joined", "workers joined", "rendezvous & timed out", "timed out & rendezvous",
        pattern=r"timed? ?out", names_own_rank=False,
    ),
    rule(
        "store-key-timeout", Label.COLLECTIVE_TIMEOUT, TIMEOUT,
        "ncclunique & store->get & timeout", "retrieving ncclunique & timeout", "retreiving ncclunique & timeout",
        "store->get & timeout", "store->get & timed out", "timeout waiting for key",
        "store based barrier & timed out", "timed out in _store_based_barrier", "store_based_barrier & timed out",
        "wait timeout & keys: /",
        culprit=r"from \[(?P<rank>\d+)\]", is_cascade=True, names_own_rank=False,
    ),
    rule(
        "store-key-lost", Label.NETWORK, LOST_PEER,
        "ncclunique & store->get", "store->get & connection", "store->get & broken pipe",
        unless=r"time", culprit=r"from \[(?P<rank>\d+)\]", is_cascade=True, names_own_rank=False,
    ),
    rule(
        "heartbeat-monitor", Label.COLLECTIVE_TIMEOUT, TIMEOUT - 1,
        "heartbeat monitor timed out", "watchdog thread got stuck", "watchdog got stuck", "watchdog got stuck for",
        "terminating the process after attempting to dump debug info", "no heartbeat & watchdog",
        names_own_rank=False,
    ),
    rule(
        "watchdog-exception", Label.COLLECTIVE_TIMEOUT, ABORT,
        "detected by watchdog at work", "some nccl operations have failed or timed out",
        "taking the entire process down", "timeout at nccl work", "last enqueued nccl work",
        "watchdog thread terminated with exception", "last enqueued work",
        unless=r"CUDA error|NCCL error|unhandled|no kernel image",
        names_own_rank=False,
    ),
    rule(
        "communicator-aborted", Label.COLLECTIVE_TIMEOUT, ABORT,
        "nccl communicator was aborted", "communicator & has been aborted", "comm & was aborted",
        "nccl & aborted on rank",
        is_cascade=True, names_own_rank=False,
    ),
    rule(
        "collective-mismatch", Label.USER_CODE, SPECIFIC,
        "detected mismatch between collectives", "collectives differ in the following aspects",
        "mismatched tensor shape & collective", "mismatched collective", "collective mismatch",
        "tensors must be contiguous & collective", "mismatched data types: one rank", "mismatched allreduce",
        "mismatched allgather", "mismatched broadcast", "one rank had type", "op.preamble.length <= op.nbytes",
        "different collective & rank", "nccl warn & mismatch", "tensor & must be on & nccl",
        "no backend type associated with device type",
        culprit=r"but rank (?P<rank>\d+) is running",
    ),
    rule(
        "nccl-invalid-usage", Label.USER_CODE, SPECIFIC,
        "ncclinvalidusage", "invalid usage & nccl", "duplicate gpu detected", "ncclinvalidargument",
    ),
)  # fmt: skip
