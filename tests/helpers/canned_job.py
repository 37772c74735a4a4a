"""Responses of the dashboard's API for an invented job: 48 hosts, a straggler, a lost host.

For tests of the page alone: the documents' classes check the responses; how the real server computes them does not
matter here. `NOW_S` is the time at which all of it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from megatrain.contracts.layout import Layout
from megatrain_dashboard.api.hosts import CheckDocument, HostDocument, HostHistoryDocument, HostsDocument
from megatrain_dashboard.api.job import JobDocument, OperationDocument, RoundDocument
from megatrain_dashboard.api.marks import (
    ChangedKeyDocument,
    ConfigChangeDocument,
    MarkDocument,
    MarkKind,
    MarksDocument,
)
from megatrain_dashboard.api.notes import NoteDocument, NotesDocument
from megatrain_dashboard.api.overview.document import (
    CheckpointAge,
    DiagnosisState,
    GapDocument,
    HostCounts,
    NextAction,
    OverviewDocument,
    RangeDocument,
    ReasonDocument,
    SeriesDocument,
    SourceDocument,
    SourcesDocument,
    SourceSeriesDocument,
)
from megatrain_dashboard.responses.document import Document, ThresholdsDocument, layout_document
from tests.helpers.canned_devices import host_devices
from tests.helpers.canned_host_data import host_data

NOW_S = 1_795_000_000.0
JOB = "gpt-13b-demo"
NUM_HOSTS = 48
WORKERS = 8
STEP = 48_230
SLOW_HOST = "host-017"
LOST_HOST = "host-031"
NOTE_ID = "1794900000000-0a1b2c3d"
MARKUP = "<img src=x onerror=\"document.title='attacked'\"><b>bold</b>"
"""Contained in a log line, a host's label and a reason: the page must show it unchanged."""


def host_name(number: int) -> str:
    return f"host-{number:03d}"


def job_document(*, can_act: bool = False) -> JobDocument:
    return JobDocument(
        job=JOB, run_directory="/data/runs/gpt-13b-demo", is_recorded=False,
        layout=layout_document(Layout(tp_size=8, pp_size=8, dp_size=6)),
        rounds=(
            RoundDocument(number=1, began_unix_s=NOW_S - 90_000, world_size=384, first_step=1, last_step=31_000),
            RoundDocument(number=2, began_unix_s=NOW_S - 30_000, world_size=384, first_step=30_801, last_step=STEP),
        ),
        operations=(
            OperationDocument(name="forward-compute", number=1, lane="compute", is_exchange=False),
            OperationDocument(name="backward-compute", number=2, lane="compute", is_exchange=False),
            OperationDocument(name="grads-reduce-scatter", number=7, lane="dp", is_exchange=True),
        ),
        role="operator" if can_act else "viewer", can_act=can_act,
        why_not_act="" if can_act else "Actions are switched off: start the dashboard with --enable-actions.",
        has_session=False, perfetto_url="", version="0.1.0",
    )  # fmt: skip


_REASONS: dict[str, tuple[ReasonDocument, ...]] = {
    "good": (),
    "warning": (
        ReasonDocument(
            code="verdict-waiting", level="amber",
            text=f"{SLOW_HOST} makes the job slow: its forward-compute takes 1.18 times that of its peers",
            since_unix_s=NOW_S - 900, runbook="verdict.md", hosts=(SLOW_HOST,), ranks=tuple(range(136, 144)),
        ),
    ),
    "bad": (
        ReasonDocument(
            code="host-lost", level="red",
            text=f"{LOST_HOST} is lost: its lease ended 12 s ago, and none of its 8 ranks completes a step",
            since_unix_s=NOW_S - 12, runbook="host-evicted-or-cordoned.md", hosts=(LOST_HOST,),
            ranks=tuple(range(248, 256)),
        ),
        ReasonDocument(
            code="save-late", level="amber",
            text="the newest checkpoint is 42 minutes old, twice as old as checkpoint.every_steps promises",
            since_unix_s=None, runbook="checkpoints.md", hosts=(), ranks=(),
        ),
    ),
}  # fmt: skip


def overview_document(*, health: str = "warning", step: int = STEP) -> OverviewDocument:
    """Return the overview of a job that trains with a straggler, or is healthy, or recovers ("bad")."""
    is_bad = health == "bad"
    level: Literal["green", "amber", "red"] = "red" if is_bad else "amber" if health == "warning" else "green"
    return OverviewDocument(
        at_unix_s=NOW_S, state="recovering" if is_bad else "training", level=level, reasons=_REASONS[health],
        headline=f"recovering, waits until {LOST_HOST} is replaced by host-047"
        if is_bad
        else f"training, step {step:,}",
        since_unix_s=NOW_S - (41 if is_bad else 30_000), round=2, step=step, last_step_unix_s=NOW_S - 2,
        train_steps=120_000, tokens=step * 4_194_304, loss=2.3114, grad_norm=0.41, step_s=6.34, tokens_per_s=661_562.0,
        mfu=0.5512, remaining_s=(120_000 - step) * 6.34, effective_time_ratio=0.934,
        effective_time_ratio_last_hour=0.871,
        checkpoint=CheckpointAge(step=48_000, branch="main", written_unix_s=NOW_S - 1458),
        hosts=HostCounts(total=51, training=NUM_HOSTS, spare=2, cordoned=1, unfit=0, lost=1 if is_bad else 0),
        num_open_incidents=1 if is_bad else 0, num_incidents=3, open_incident="000003" if is_bad else "",
        next_action=NextAction(
            what="restart with host-047 in its place: rendezvous"
            if is_bad
            else f"evict {SLOW_HOST}, once a person approves it",
            why='a restart costs 164 s and gains 21 h over the rest of the job; diagnostics.eviction is "propose"',
            verdict_id="" if is_bad else "v-000017",
        ),
        diagnosis=DiagnosisState(
            is_daemon_alive=True, silent_ranks=tuple(range(248, 256)) if is_bad else (),
            num_silent_ranks=8 if is_bad else 0, rows_dropped=0, rows_refused=0, problems=(),
        ),
    )  # fmt: skip


def series_document(num: int = 600) -> SeriesDocument:
    """Return a falling loss, a step time with a straggler in the last sixth, and constant noise."""
    stride = STEP // num
    steps = tuple(stride * (index + 1) for index in range(num))
    noise = [math.sin(index * 12.9898) * 0.5 + math.sin(index * 78.233) * 0.3 for index in range(num)]
    loss = [1.9 + 8.2 * (step + 300) ** -0.24 + 0.03 * noise[index] for index, step in enumerate(steps)]
    slow = [1.06 if index > num * 5 // 6 else 1.0 for index in range(num)]
    step_s = [6.0 * slow[index] * (1 + 0.01 * noise[index]) for index in range(num)]
    spike = {num // 2: 4.0, num // 3: 2.2}
    tokens = [4_194_304 / one for one in step_s]
    return SeriesDocument(
        stride=stride, step=steps, at_unix_s=tuple(NOW_S - (STEP - step) * 6.34 for step in steps), loss=tuple(loss),
        loss_low=tuple(one - 0.05 for one in loss),
        loss_high=tuple(one + 0.06 + spike.get(index, 0) * 0.3 for index, one in enumerate(loss)),
        grad_norm=tuple(0.4 + 0.1 * one + 20 / (steps[index] + 60) for index, one in enumerate(noise)),
        grad_norm_high=tuple(0.5 + 0.1 * one + spike.get(index, 0) for index, one in enumerate(noise)),
        step_s=tuple(step_s), step_s_low=tuple(one * 0.98 for one in step_s),
        step_s_high=tuple(one * (1.05 + spike.get(index, 0)) for index, one in enumerate(step_s)),
        tokens_per_s=tuple(tokens), mfu=tuple(token / 1_200_000 for token in tokens),
        round=tuple(1 if step <= 31_000 else 2 for step in steps), bad_steps=(),
        gaps=(GapDocument(begin_unix_s=NOW_S - 110_000, end_unix_s=NOW_S - 108_000, round=1),),
        range=RangeDocument(first_step=None, last_step=None, begin_unix_s=None, end_unix_s=None),
    )  # fmt: skip


def sources_document(shown: str = "code") -> SourcesDocument:
    """Return the losses of three sources; that of "code" rises."""
    series = series_document(60)
    rises = {"web": -0.31, "code": 0.12, "books": -0.02}
    return SourcesDocument(
        sources=tuple(
            SourceDocument(
                name=name,
                num_tokens=1_000_000 * (place + 1),
                token_share=(place + 1) / 6,
                loss=2.0 + place / 10,
                change=rise,
                num_bad_steps=2 * (name == "code"),
                last_bad_step=41_002 if name == "code" else None,
                line=tuple(2.0 + rise * point / 32 for point in range(32)),
            )
            for place, (name, rise) in enumerate(rises.items())
        ),
        stride=series.stride, step=series.step, at_unix_s=series.at_unix_s,
        series=SourceSeriesDocument(
            name=shown, loss=tuple(2.0 + rises[shown] * point / 60 for point in range(60)),
            loss_high=tuple(2.1 + rises[shown] * point / 60 for point in range(60)),
        ),
        is_sampled=False, range=series.range,
    )  # fmt: skip


def marks_document() -> MarksDocument:
    """Return marks of every kind, most of them checkpoints, which share places."""
    saved = [
        _mark("checkpoint", STEP * place // 200, f"checkpoint of step {STEP * place // 200:,}") for place in range(200)
    ]
    others = (
        _mark("incident", 30_999, "hosts made the job slow", "000002"),
        _mark("incident", STEP, "a host was lost", "000003"),
        _mark("note", 20_000, f"ada: switch 4 was replaced {MARKUP}", NOTE_ID),
        _mark("config", 30_801, "round 2 began with optimizer.lr=0.0001 instead of 0.0003", "2"),
        _mark("round", 30_801, "round 2 began", "2"),
    )
    keys = (ChangedKeyDocument(key="optimizer.lr", before="0.0003", after="0.0001"),)
    change = ConfigChangeDocument(round=2, first_step=30_801, at_unix_s=NOW_S - 30_000, keys=keys)
    return MarksDocument(marks=(*saved, *others), changes=(change,))


def _mark(kind: MarkKind, step: int, text: str, ref: str = "") -> MarkDocument:
    at_s = NOW_S - (STEP - step) * 6.34
    return MarkDocument(
        kind=kind, step=step, at_unix_s=at_s, text=text, ref=ref, count=1, last_step=step, last_unix_s=at_s
    )


def notes_document(*, can_act: bool = False) -> NotesDocument:
    note = NoteDocument(
        note_id=NOTE_ID, written_unix_s=NOW_S - 100_000, user="ada", text=f"switch 4 was replaced {MARKUP}",
        step=20_000, at_unix_s=None, retracted_unix_s=None, retracted_by="", retraction="", incident_ids=("000001",),
    )  # fmt: skip
    why_not = "" if can_act else "viewers may only read: log in with the token of an operator"
    return NotesDocument(notes=(note,), can_write=can_act, why_not_write=why_not)


def host(number: int) -> HostDocument:
    name = host_name(number)
    is_training = number < NUM_HOSTS
    is_lost = name == LOST_HOST
    is_cordoned = number == NUM_HOSTS + 2
    state = "lost" if is_lost else "running" if is_training else "cordoned" if is_cordoned else "spare"
    return HostDocument(
        host=name, state=state, is_in_order=not is_lost and not is_cordoned, is_driver=number == 0,
        remark=f"makes the job slow by 18 %; {MARKUP}" if name == SLOW_HOST else "its lease is gone" if is_lost else "",
        address=f"10.0.3.{number + 1}", hardware="8 x NVIDIA H800",
        labels={"rack": f"r{number // 8}", "switch": f"s{number // 16}", "note": MARKUP if name == SLOW_HOST else ""},
        first_rank=number * WORKERS if is_training else None, num_workers=WORKERS if is_training else None,
        step=STEP - (3 if is_lost else 0) if is_training else None, median_step_s=6.34 if is_training else None,
        last_step_unix_s=NOW_S - (21 if is_lost else 2) if is_training else None, joined_unix_s=NOW_S - 30_000,
        straggler_score=8.7 if name == SLOW_HOST else abs(math.sin(number)) * 1.4 if is_training else None,
        clock_offset_s=math.sin(number * 3) * 4e-4 if is_training else None,
        clock_error_s=6e-5 if is_training else None,
        cordon_reason="bandwidth to its pair is 40 % of what it should be" if is_cordoned else "",
        cordon_by="alice" if is_cordoned else "", cordon_unix_s=NOW_S - 86_000 if is_cordoned else None,
        is_connected=not is_lost,
    )  # fmt: skip


def hosts() -> HostsDocument:
    thresholds = ThresholdsDocument(excess=0.1, score=3.5, num_steps=8)
    return HostsDocument(hosts=tuple(host(number) for number in range(NUM_HOSTS + 3)), thresholds=thresholds)


def host_history(number: int) -> HostHistoryDocument:
    return HostHistoryDocument(
        host=host(number),
        checks=(
            CheckDocument(name="gpu-memory", outcome="passed", detail="", duration_s=3.2, value=79.1, unit="GiB"),
            CheckDocument(
                name="pair-bandwidth", outcome="warning", detail="with host-018: 8 % below the median of all pairs",
                duration_s=11.8, value=181.0, unit="GB/s",
            ),
            CheckDocument(
                name="loopback-rdma", outcome="skipped", detail="no RDMA device", duration_s=0.0, value=None, unit="",
            ),
            CheckDocument(name="disk", outcome="passed", detail="", duration_s=0.8, value=2.9, unit="GB/s"),
        ),
        checks_unix_s=NOW_S - 30_100, incident_ids=("000002",) if host_name(number) == SLOW_HOST else (),
        victim_incident_ids=("000001",), rounds=(1, 2),
    )  # fmt: skip


def job_responses(*, health: str = "warning", can_act: bool = False) -> Mapping[str, Document]:
    """Return path -> response of job, overview, series and hosts."""
    found: dict[str, Document] = {
        "job": job_document(can_act=can_act), "overview": overview_document(health=health), "series": series_document(),
        "sources": sources_document(), "marks": marks_document(), "notes": notes_document(can_act=can_act),
        "hosts": hosts(),
    }  # fmt: skip
    found.update({f"hosts/{host_name(number)}": host_history(number) for number in range(NUM_HOSTS + 3)})
    healthy = host_devices("host-000", 0, NOW_S, has_problems=False)
    for name in map(host_name, range(NUM_HOSTS + 3)):
        found[f"hosts/{name}/devices"] = healthy.model_copy(update={"host": name})
        found[f"hosts/{name}/data"] = host_data(name, 0, WORKERS, STEP, is_slow=False)
    found[f"hosts/{SLOW_HOST}/data"] = host_data(SLOW_HOST, 136, WORKERS, STEP, is_slow=True)
    found[f"hosts/{SLOW_HOST}/devices"] = host_devices(SLOW_HOST, 136, NOW_S, has_problems=True)
    return found
