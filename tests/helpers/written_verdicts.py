"""Verdicts as a daemon would write them."""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.records.host_verdict import Cause, HostVerdict, VerdictConfidence, VerdictKind

STRAGGLER = HostVerdict(
    verdict_id="v-1", kind=VerdictKind.STRAGGLER, round=1, cause=Cause.COMPUTE, confidence=VerdictConfidence.HIGH,
    created_unix_s=0.0, by="daemon-1", hosts=("host-2",), ranks=(2,), evidence=("its forward takes 1.3 x its peers'",),
    first_step=10, last_step=20, step_s=0.13, gain_s_per_step=0.03,
)  # fmt: skip
NUMERICS = replace(
    STRAGGLER, kind=VerdictKind.NUMERICS, cause=Cause.UNKNOWN, hosts=(), evidence=("loss is no number at step 21",),
    rollback_to=21, skip_from=21, skip_to=23, gain_s_per_step=0.0,
)  # fmt: skip
