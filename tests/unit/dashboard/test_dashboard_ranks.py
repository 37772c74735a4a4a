"""The 3D picture: the state of each rank, arrows from waiting ranks, few of them in a large job; and the route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain_dashboard.api.ranks.picture_view import STATES, HangPicture, rank_states, ranks_picture
from megatrain_dashboard.api.ranks.route import router
from megatrain_dashboard.responses.binary import unpack
from megatrain_diagnostics.analysis.hang import RankActivity
from megatrain_diagnostics.analysis.waiting import Awaited, waiting_arrows
from megatrain_diagnostics.events.tables import StepTotals, joined, select
from megatrain_diagnostics.store.daemon_state import DaemonState, ranges_of, scores_text
from megatrain_diagnostics.store.hang_evidence import FiledEvidence
from megatrain_diagnostics.store.rank_progress import ProgressByRank, rank_progress
from megatrain_job.failures.hang import Position
from tests.helpers.dashboard_pictures import PictureSource, picture_client, stored_events
from tests.helpers.drawn_spans import draw_job
from tests.helpers.synthetic_steps import SyntheticJob

LAYOUT = Layout(tp_size=2, pp_size=2, dp_size=2)
NAMES = [name for name, _ in STATES]


def progress_of(*steps: int) -> ProgressByRank:
    return ProgressByRank(np.array(steps, dtype=np.int32), np.zeros(len(steps), dtype=np.uint8))


def asked(source: PictureSource, query: str = "") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    response = picture_client(source, router).get(f"/grid?{query}")
    assert response.status_code == 200, response.text
    return unpack(response.content)


def test_state_is_the_worst_that_is_true() -> None:
    roster = SyntheticJob(LAYOUT).roster()
    hang = HangPicture(suspects=[3], silent={4, 3}, waits_for={0: (3,), 1: (3,), 5: (3,), 6: (4,)}, outliers=[5])

    states = rank_states(roster, progress_of(9, 9, 9, 9, 9, 9, 9, 4), hang)

    assert [NAMES[state] for state in states] == [
        "waits", "waits", "in step", "suspect", "silent", "stack differs from the others", "waits", "behind",
    ]  # fmt: skip


def test_ranks_that_never_reported_a_step_are_distinguished() -> None:
    job = SyntheticJob(LAYOUT)
    roster = job.roster()
    partly = type(roster)(1, LAYOUT, dict.fromkeys(range(6), "h"), {})

    behind = rank_states(partly, progress_of(5, 5, 5, 3, -1, 2, -1, 5), HangPicture())
    fresh = rank_states(partly, progress_of(*[-1] * 8), HangPicture())

    assert [NAMES[state] for state in behind] == [
        "in step", "in step", "in step", "in step", "behind", "behind", "no report", "in step",
    ]  # fmt: skip
    assert [NAMES[state] for state in fresh] == ["in step"] * 6 + ["no report"] * 2


def test_names_and_letters_of_states_are_unique() -> None:
    assert len({letter for _, letter in STATES}) == len(STATES) == len(set(NAMES))


def test_arrows_of_a_small_job_are_rank_by_rank() -> None:
    arrows = waiting_arrows({0: (3,), 1: (3, 4), 4: (5,)}, [3], [5], LAYOUT)

    assert [(arrow.waiting, arrow.awaited, arrow.num_waiting, arrow.kind) for arrow in arrows] == [
        (0, 3, 1, Awaited.SUSPECT),
        (1, 3, 1, Awaited.SUSPECT),
        (4, 5, 1, Awaited.SILENT),
        (1, 4, 1, Awaited.WAITING),
    ]


def test_arrows_of_thousands_are_merged_and_lose_no_rank() -> None:
    layout = Layout(tp_size=8, pp_size=8, dp_size=192)
    waits = {rank: (777,) for rank in range(layout.world_size) if rank != 777}

    by_replica = waiting_arrows(waits, [777], [], layout, most=2000)
    assert len(by_replica) == 1536
    assert sum(one.num_waiting for one in by_replica) == 12_287
    by_stage = waiting_arrows(waits, [777], [], layout)
    assert sorted(one.waiting for one in by_stage) == [stage * 1536 for stage in range(8)]
    assert sum(one.num_waiting for one in by_stage) == 12_287
    assert {(one.awaited, one.kind) for one in by_stage} == {(777, Awaited.SUSPECT)}


@given(
    waits=st.dictionaries(
        st.integers(0, 7), st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True).map(tuple), max_size=8
    ),
    most=st.integers(1, 40),
)
@settings(max_examples=80)
def test_arrows_are_never_more_than_asked_for(waits: dict[int, tuple[int, ...]], most: int) -> None:
    arrows = waiting_arrows(waits, [1], [2], LAYOUT, most)

    assert len(arrows) <= most
    assert [arrow.kind for arrow in arrows] == sorted(arrow.kind for arrow in arrows)
    for arrow in arrows:
        assert any(arrow.awaited in others for others in waits.values())
    if sum(map(len, waits.values())) <= most:
        found = {(arrow.waiting, arrow.awaited) for arrow in arrows}
        assert found == {(rank, other) for rank, others in waits.items() for other in others}


def test_progress_is_read_from_sums_and_spans(tmp_path: Path) -> None:
    job = SyntheticJob(LAYOUT)
    totals = joined(StepTotals, [job.step(step)[0] for step in range(5, 9)])
    totals = select(totals, ~((totals.rank == 3) & (totals.step > 6)) & (totals.rank != 6))
    spans = [table for kind, table in draw_job(LAYOUT, range(7, 8), 1).tables().items() if kind.NAME == "spans"]
    source = PictureSource(stored_events(tmp_path, job.ranks(), totals, *spans))

    found = rank_progress(source.events, 1, 8)

    assert found.step.tolist() == [8, 8, 8, 6, 8, 8, -1, 8]
    assert {Operation.OPTIMIZER.number} == set(found.operation.tolist())
    fields, arrays = asked(source)
    assert [NAMES[state] for state in arrays["state"]][3:7:3] == ["in step", "behind"]
    assert fields["newest_step"] == 8
    assert fields["has_hang"] is False
    assert fields["operations"]["3"] == "forward-compute"
    assert [fields["hosts"][host] for host in arrays["host"]] == [f"host-{rank // 2}" for rank in range(8)]
    assert np.isnan(arrays["score"]).all()


def test_hang_is_drawn_with_its_culprit(tmp_path: Path) -> None:
    job = SyntheticJob(LAYOUT)
    source = PictureSource(stored_events(tmp_path, job.ranks(), job.step(5)[0]))
    group = "dp:0+8x1"
    activities = {
        rank: RankActivity(
            rank,
            {group: Position(3, 3) if rank == 5 else Position(4, 3)},
            in_flight="forward-compute" if rank == 5 else "grads-reduce-scatter",
            step=5,
        )
        for rank in range(8)
    }
    source.evidence = FiledEvidence(1, job.roster(), activities, {group: tuple(range(8))})

    fields, arrays = asked(source)

    assert fields["has_hang"] is True
    assert "rank 5 never entered collective 4" in fields["hang_reason"]
    assert [NAMES[state] for state in arrays["state"]] == ["suspect" if rank == 5 else "waits" for rank in range(8)]
    assert sorted(arrays["arrows"].tolist()) == [[rank, 5] for rank in range(8) if rank != 5]
    assert {fields["arrow_kinds"][kind] for kind in arrays["arrow_kind"]} == {"suspect"}
    assert arrays["operation"].tolist() == [3 if rank == 5 else 10 for rank in range(8)]


def test_scores_and_silence_are_the_daemons(tmp_path: Path) -> None:
    job = SyntheticJob(LAYOUT)
    source = PictureSource(stored_events(tmp_path, job.ranks(), job.step(5)[0]))
    scores = [0.0, 1.5, 9.0, 0.0, 0.0, 0.0, 0.0, 0.5]

    def state(round_number: int) -> DaemonState:
        return DaemonState(
            job="made", session="s", written_unix_s=0.0, round=round_number,
            rank_scores=scores_text(scores), silent=ranges_of([4, 5]),
        )  # fmt: skip

    source.state = state(1)
    fields, arrays = asked(source)
    assert arrays["score"].tolist() == scores
    assert [rank for rank, array in enumerate(arrays["state"]) if NAMES[array] == "silent"] == [4, 5]
    assert fields["has_scores"] is True

    source.state = state(2)  # of another round: not shown for this one
    source.versions["ranks"] = 1
    fields, arrays = asked(source)
    assert fields["has_scores"] is False
    assert not any(NAMES[array] == "silent" for array in arrays["state"])


def test_picture_of_a_large_job_is_small() -> None:
    job = SyntheticJob(Layout(tp_size=8, pp_size=8, dp_size=192), ranks_per_host=8)
    num_ranks = job.layout.world_size
    progress = ProgressByRank(np.full(num_ranks, 7, dtype=np.int32), np.full(num_ranks, 3, dtype=np.uint8))
    scores = np.zeros(num_ranks, dtype=np.float32)

    body = ranks_picture(job.roster(), progress, scores=scores, silent=(), hang=None)

    assert len(body) < 250_000
    assert unpack(body)[1]["state"].shape == (12_288,)


def test_wrong_queries_are_refused(tmp_path: Path) -> None:
    client = picture_client(PictureSource(stored_events(tmp_path, SyntheticJob(LAYOUT).ranks())), router)

    expected = {"round=-1": 400, "color=state": 400, "round=8": 404}
    assert {query: client.get(f"/grid?{query}").status_code for query in expected} == expected
