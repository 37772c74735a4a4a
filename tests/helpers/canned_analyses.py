"""Responses of the dashboard's API about logs and stragglers of the job of canned_job.py."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain_dashboard.api.logs import LogCauseDocument, LogCausesDocument, LogLineDocument, LogLinesDocument
from megatrain_dashboard.api.stragglers.document import (
    ActionBalance,
    FindingDocument,
    HostScore,
    PartDocument,
    StragglersDocument,
    WhatIfDocument,
)
from megatrain_dashboard.responses.document import Document, ThresholdsDocument
from tests.helpers.canned_job import MARKUP, NOW_S, SLOW_HOST, STEP, host_name

NUM_LINES = 2000


def log_lines() -> LogLinesDocument:
    """Return two thousand lines, one of which holds markup and one a traceback's head."""
    texts = (
        "step {step}: loss 2.3114, grad norm 0.41, 6.34 s",
        "NCCL WARN: call to ibv_poll_cq took 212 ms",
        "Traceback (most recent call last): RuntimeError: CUDA error: uncorrectable ECC error",
        MARKUP,
    )
    lines = []
    for index in range(NUM_LINES):
        kind = 3 if index == NUM_LINES - 4 else 2 if index % 500 == 90 else 1 if index % 47 == 3 else 0
        rank = (index * 37) % 384
        lines.append(
            LogLineDocument(
                rank=rank,
                host=host_name(rank // 8),
                at_unix_s=NOW_S - (NUM_LINES - index) * 0.4,
                line=texts[kind].format(step=STEP - (NUM_LINES - index) // 16),
            )
        )
    return LogLinesDocument(round=2, num_matching=41_230, num_searched=1_204_118, lines=tuple(lines), is_partial=False)


def log_causes() -> LogCausesDocument:
    return LogCausesDocument(
        round=2, label="cuda-ecc", action="replace the host", culprit="host-011", root_rank=91,
        root_text="rank 91 on host-011", incident_id="000001",
        reason="rank 91 failed first, 2.5 s before the others, and its line names a device", num_ranks=384,
        num_lines=1_204_118, line="CUDA error: uncorrectable ECC error encountered",
        causes=(
            LogCauseDocument(
                rank=91, host="host-011", label="cuda-ecc", action="replace the host", role="root", culprit="host-011",
                rule="cuda-ecc", at_unix_s=NOW_S - 71_000,
                line=f"CUDA error: uncorrectable ECC error encountered {MARKUP}",
            ),
            *(
                LogCauseDocument(
                    rank=rank,
                    host="host-012",
                    label="nccl-remote",
                    action="restart",
                    role="follows",
                    culprit="",
                    rule="nccl-remote",
                    at_unix_s=NOW_S - 70_997.5,
                    line="NCCL error: remote process exited or there was a network error",
                )
                for rank in range(96, 100)
            ),
        ),
    )  # fmt: skip


def stragglers() -> StragglersDocument:
    def finding(cause: str, confidence: str, host: str, first: int, share: float) -> FindingDocument:
        return FindingDocument(
            cause=cause, is_of_host=True, confidence=confidence, hosts=(host,), ranks=tuple(range(first, first + 8)),
            stage=None, first_step=48_010, last_step=48_230, num_seen=208, num_steps=220, is_over=False, excess=share,
            excess_s=share * 2.1, score=8.7, gain_s=share * 2.0, step_s=6.34, num_victims=376,
            evidence=(
                f"forward-compute takes {1 + share:.2f} times as long as that of 47 hosts that do the same work",
                "its wait in grads-reduce-scatter is the shortest of all", "the same since step 48,010",
            ),
        )  # fmt: skip

    return StragglersDocument(
        round=2, source="daemon", is_enough=True,
        headline=f"{SLOW_HOST} makes every step 0.36 s longer: a slow device, high confidence.", first_step=48_010,
        last_step=48_230, num_steps=220,
        findings=(
            finding("slow-device", "high", SLOW_HOST, 136, 0.18), finding("slow-link", "low", "host-040", 320, 0.03),
        ),
        scores=tuple(
            HostScore(host=host_name(number), score=score)
            for number, score in ((17, 8.7), (40, 2.6), (3, 1.4), (22, 1.2), (9, 1.1), (30, 0.9), (1, 0.4))
        ),
        thresholds=ThresholdsDocument(excess=0.1, score=3.5, num_steps=8), silent_ranks=(), ranks_without_peers=(),
    )  # fmt: skip


def what_if() -> WhatIfDocument:
    def parts(**slowdowns: float) -> tuple[PartDocument, ...]:
        return tuple(PartDocument(name=name.replace("_", "-"), slowdown=value) for name, value in slowdowns.items())

    return WhatIfDocument(
        round=2, steps=tuple(range(48_020, 48_231, 10)), slowdown=1.083, launch_slowdown=1.004, waste=0.077,
        measured_s=6.36, replayed_s=6.34, ideal_s=5.85, m_w=0.81, m_s=0.11, worst_ranks=tuple(range(136, 144)),
        by_operation=parts(
            forward_compute=1.051, backward_compute=1.022, grads_reduce_scatter=1.008, params_all_gather=1.003,
            forward_send=1.002, backward_send=1.001,
        ),
        by_stage=tuple(
            PartDocument(name=f"stage {one}", slowdown=1.002 + (0.06 if one == 2 else 0)) for one in range(8)
        ),
        by_dp_rank=tuple(
            PartDocument(name=f"dp {one}", slowdown=1.004 + (0.05 if one == 5 else 0)) for one in range(6)
        ),
        slowdown_by_step=tuple(1.07 + (index % 5) * 0.006 for index in range(22)),
        by_cause=parts(slow_device=1.060, slow_link=1.009), advice=f"Replace {SLOW_HOST}: 81 % of the slowdown is its.",
        actions=(
            ActionBalance(
                action="evict", target=SLOW_HOST, gain_s_per_step=0.36, gain_s=25_800.0, cost_s=164.0, is_worth_it=True,
                text="a spare is there; the restart is paid back after 456 steps",
            ),
            ActionBalance(
                action="balance stages", target="stage 7", gain_s_per_step=0.05, gain_s=3_600.0, cost_s=None,
                is_worth_it=None, text="needs another configuration and a restart by hand",
            ),
        ),
        notes=("Queues of the network are not in the model: exchanges take what they took.",),
    )  # fmt: skip


def analysis_responses() -> Mapping[str, Document]:
    """Return path -> response."""
    return {"logs": log_lines(), "logs/causes": log_causes(), "stragglers": stragglers(), "whatif": what_if()}
