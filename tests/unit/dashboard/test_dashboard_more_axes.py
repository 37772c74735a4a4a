"""Pages of jobs that are also sharded along cp and ep, and the heat map of replicas with unequal numbers of passes."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain_dashboard.api.heat.order import By
from megatrain_dashboard.api.heat.route import router
from megatrain_dashboard.api.heat.subject import Measure, subject_of
from megatrain_dashboard.api.heat.view import HeatCells, heat_csv, heat_outliers, heat_picture
from megatrain_dashboard.api.ranks.picture_view import ranks_picture
from megatrain_dashboard.responses.binary import unpack
from megatrain_dashboard.responses.document import layout_document
from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.heat_scale import Scale
from megatrain_diagnostics.analysis.peers import Peers
from megatrain_diagnostics.events.tables import StepTotals, joined
from megatrain_diagnostics.store.rank_progress import ProgressByRank
from tests.helpers.dashboard_pictures import PictureSource, picture_client, stored_events
from tests.helpers.synthetic_steps import SyntheticJob

LAYOUT = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2, ep_size=2)
SLOW = 13
AXES = [("pp", 2, 8), ("dp", 2, 4), ("cp", 2, 2), ("tp", 2, 1), ("edp", 4, 2), ("ep", 2, 1)]


def cells() -> HeatCells:
    roster = SyntheticJob(LAYOUT).roster()
    values = np.random.default_rng(0).normal(0.5, 0.001, size=(3, 16))
    values[1, SLOW] = 0.9
    subject = subject_of(Operation.FORWARD_COMPUTE.value, Measure.SUM)
    assert subject is not None
    return HeatCells(roster, Peers(roster), subject, 0, values)


def axes_of(layout: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(axis["name"], axis["size"], axis["stride"]) for axis in layout["axes"]]


def test_the_layout_is_reported_axis_by_axis() -> None:
    document = layout_document(LAYOUT).model_dump()
    assert axes_of(document) == AXES
    assert document["world_size"] == 16


def test_the_heat_map_groups_by_every_axis() -> None:
    for axis in LAYOUT.axes:
        fields, arrays = unpack(heat_picture(cells(), Scale.RELATIVE, By.RANK, axis, 100_000))
        assert axes_of(fields["layout"]) == AXES
        places = [(LAYOUT.index(axis, rank), rank) for rank in arrays["row_rank"].tolist()]
        assert places == sorted((LAYOUT.index(axis, rank), rank) for rank in range(16)), axis
        assert fields["group_labels"] == [f"{axis} {place}" for place in range(LAYOUT.size(axis))]


def test_tables_of_the_heat_map_have_the_place_on_every_axis() -> None:
    outliers = heat_outliers(cells(), Thresholds()).outliers
    assert (outliers[0].rank, outliers[0].place) == (SLOW, dict(LAYOUT.coordinate(SLOW)))
    rows = list(csv.reader(io.StringIO("".join(heat_csv(cells(), Scale.ABSOLUTE, By.RANK, "rank")))))
    assert rows[0][:8] == ["rank", "host", *LAYOUT.axes]
    assert rows[1 + SLOW][2:8] == [str(place) for place in LAYOUT.coordinate(SLOW).values()]


def test_the_picture_of_ranks_contains_the_axes() -> None:
    progress = ProgressByRank(np.full(16, 5, dtype=np.int32), np.zeros(16, dtype=np.uint8))
    fields, arrays = unpack(ranks_picture(SyntheticJob(LAYOUT).roster(), progress, scores=None, silent=(), hang=None))
    assert axes_of(fields["layout"]) == AXES
    assert len(arrays["state"]) == 16


STEPS = range(5, 25)
FULL, SLOW_REPLICA, USUAL = 0, 3, 1
"""Ranks: of the replica with two micro-batches, the slow one, another."""


@pytest.mark.parametrize("operation", ["forward-compute", "backward-compute"])
def test_replica_with_more_microbatches_is_no_outlier(tmp_path: Path, operation: str) -> None:
    made = SyntheticJob(
        Layout(dp_size=7), ranks_per_host=1, noise=0.01, num_microbatches={FULL: 2}, compute_factor={SLOW_REPLICA: 1.3}
    )
    totals = joined(StepTotals, [made.step(step)[0] for step in STEPS])
    client = picture_client(PictureSource(stored_events(tmp_path, made.ranks(), totals)), router)
    ask = f"operation={operation}"
    full, slow, usual = (
        client.get(f"/heat/cell?{ask}&step=9&rank={rank}").json() for rank in (FULL, SLOW_REPLICA, USUAL)
    )
    brightest = {}
    for scale in ("absolute", "relative", "z"):
        _, arrays = unpack(client.get(f"/heat?{ask}&scale={scale}").content)
        brightest[scale] = int(np.median(arrays["cells"], axis=1).argmax())
    outliers = client.get(f"/heat/outliers?{ask}").json()["outliers"]

    assert full["value"] == pytest.approx(2 * usual["value"], rel=0.1)
    assert full["peers_median"] == pytest.approx(2 * usual["peers_median"], rel=0.1)
    assert (full["ratio"], slow["ratio"]) == (pytest.approx(1.0, abs=0.06), pytest.approx(1.3, abs=0.08))
    assert brightest == {"absolute": FULL, "relative": SLOW_REPLICA, "z": SLOW_REPLICA}
    assert [one["rank"] for one in outliers if one["num_steps"] == len(STEPS)] == [SLOW_REPLICA]
