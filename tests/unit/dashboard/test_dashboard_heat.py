"""The heat map: scales compared with the standard library's statistics, the order of rows, pooling, and the routes."""

from __future__ import annotations

import csv
import io
import shutil
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain_dashboard.api.heat.order import By
from megatrain_dashboard.api.heat.route import router
from megatrain_dashboard.api.heat.subject import Measure, subject_of
from megatrain_dashboard.api.heat.view import HeatCells, heat_picture, safe_text
from megatrain_dashboard.responses.binary import unpack
from megatrain_diagnostics.analysis.heat_scale import (
    NO_VALUE,
    NUM_LEVELS,
    Scale,
    codes,
    color_range,
    peer_values,
    pooled,
    pooled_by,
    scaled,
)
from megatrain_diagnostics.analysis.peers import Peers
from megatrain_diagnostics.events.tables import Ranks, StepTotals, joined, num_rows, select
from tests.helpers.dashboard_pictures import PictureSource, picture_client, stored_events
from tests.helpers.synthetic_steps import SyntheticJob

LAYOUT = Layout(tp_size=2, pp_size=2, dp_size=10)
SLOW_RANK, SLOW_FACTOR = 7, 1.3
STEPS = range(5, 25)
HOLE = (3, 9)
"""A rank and a step without values."""
FORWARD = Operation.FORWARD_COMPUTE.number
FORWARD_SUM = subject_of(Operation.FORWARD_COMPUTE.value, Measure.SUM)


def job() -> SyntheticJob:
    return SyntheticJob(LAYOUT, ranks_per_host=2, compute_factor={SLOW_RANK: SLOW_FACTOR}, noise=0.01, seed=4)


def made_totals() -> StepTotals:
    made = job()
    table = joined(StepTotals, [made.step(step)[0] for step in STEPS])
    is_hole = (table.rank == HOLE[0]) & (table.step == HOLE[1])
    return select(table, ~is_hole)


TOTALS = made_totals()


@cache
def value_of(rank: int, step: int) -> float | None:
    rows = np.flatnonzero((TOTALS.rank == rank) & (TOTALS.step == step) & (TOTALS.operation == FORWARD))
    return None if not len(rows) else float(TOTALS.sum_ns[rows[0]]) / 1e9


def peers_of(rank: int) -> list[int]:
    """Return the ranks of the same stage: it has more than eight hosts, so all of them are compared."""
    stage = LAYOUT.coordinate(rank)["pp"]
    return [other for other in range(LAYOUT.world_size) if LAYOUT.coordinate(other)["pp"] == stage]


def expected(rank: int, step: int) -> tuple[float, float]:
    """Return the median and the spread of a rank's peers, by the standard library."""
    values = [value for other in peers_of(rank) if (value := value_of(other, step)) is not None]
    median = statistics.median(values)
    return median, 1.4826 * statistics.median(abs(value - median) for value in values)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PictureSource:
    directory = stored_events(tmp_path_factory.mktemp("run"), job().ranks(), TOTALS)
    return PictureSource(directory)


@pytest.fixture(scope="module")
def client(source: PictureSource) -> TestClient:
    return picture_client(source, router)


def picture(client: TestClient, query: str = "") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    response = client.get(f"/heat?{query}")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-megatrain-arrays"
    return unpack(response.content)


def shown_value(fields: dict[str, Any], code: int) -> float:
    return fields["low"] + code * (fields["high"] - fields["low"]) / (fields["num_levels"] - 1)


@pytest.mark.slow(kept=["relative"])
@pytest.mark.parametrize("scale", ["absolute", "relative", "z"])
def test_every_cell_equals_the_statistics(client: TestClient, scale: str) -> None:
    fields, arrays = picture(client, f"scale={scale}")

    assert arrays["cells"].shape == (40, 20)
    assert arrays["row_rank"].tolist() == list(range(40))
    assert arrays["column_step"].tolist() == list(STEPS)
    half_a_level = 0.5001 * (fields["high"] - fields["low"]) / (fields["num_levels"] - 1)
    for rank in range(40):
        for step in STEPS:
            code = int(arrays["cells"][rank, step - STEPS[0]])
            value = value_of(rank, step)
            if value is None:
                assert ((rank, step), code) == (HOLE, NO_VALUE)
                continue
            median, spread = expected(rank, step)
            reported = {
                "absolute": value,
                "relative": value / median,
                "z": (value - median) / max(spread, 0.01 * median),
            }[scale]
            clamped = min(max(reported, fields["low"]), fields["high"])
            assert shown_value(fields, code) == pytest.approx(clamped, abs=half_a_level)


def test_slow_rank_is_first_by_score_and_at_the_bright_end(client: TestClient) -> None:
    fields, arrays = picture(client, "sort=score")

    assert arrays["row_rank"][0] == SLOW_RANK
    assert arrays["cells"][0].min() > 200
    assert np.median(arrays["cells"][1:]) < 128
    assert fields["unit"] == "s"


@pytest.mark.parametrize("order", ["rank", "host", "dp", "pp", "tp"])
def test_rows_are_sorted_and_grouped(client: TestClient, order: str) -> None:
    fields, arrays = picture(client, f"sort={order}")

    ranks = arrays["row_rank"].tolist()
    at = {rank: LAYOUT.coordinate(rank) for rank in ranks}
    keys = {
        "rank": lambda rank: (rank,),
        "host": lambda rank: (rank // 2, rank),
        "dp": lambda rank: (at[rank]["dp"], at[rank]["pp"], at[rank]["tp"]),
        "pp": lambda rank: (at[rank]["pp"], at[rank]["dp"], at[rank]["tp"]),
        "tp": lambda rank: (at[rank]["tp"], at[rank]["pp"], at[rank]["dp"]),
    }
    assert ranks == sorted(range(40), key=keys[order])
    assert [fields["hosts"][host] for host in arrays["row_host"]] == [f"host-{rank // 2}" for rank in ranks]
    begins = [row for row in range(40) if row == 0 or keys[order](ranks[row])[0] != keys[order](ranks[row - 1])[0]]
    assert arrays["group_begin"].tolist() == ([] if order == "rank" else begins)
    word = {"host": "host-0", "rank": None}.get(order, f"{order} 0")
    assert fields["group_labels"][:1] == ([] if word is None else [word])
    # the cells moved with their rows
    plain = picture(client, "")[1]["cells"]
    np.testing.assert_array_equal(arrays["cells"], plain[ranks])


def test_host_shows_its_slowest_rank(client: TestClient) -> None:
    _, ranks = picture(client, "scale=absolute&low=0&high=1")
    fields, hosts = picture(client, "scale=absolute&by=host&low=0&high=1")

    assert hosts["cells"].shape == (20, 20)
    assert fields["hosts"][hosts["row_host"][3]] == "host-3"
    known = np.where(ranks["cells"] == NO_VALUE, -1, ranks["cells"].astype(int))
    expected_cells = known.reshape(20, 2, 20).max(axis=1)
    np.testing.assert_array_equal(hosts["cells"], expected_cells)


def test_columns_share_by_the_greatest_and_rows_never(client: TestClient) -> None:
    whole, cells = picture(client, "scale=absolute&first=5&last=24&low=0&high=1&max_cells=1000")
    book = HeatCells(*_cells_of(range(5, 25)))
    body = heat_picture(book, Scale.ABSOLUTE, By.RANK, "rank", 160)
    few_fields, few = unpack(body)

    assert whole["steps_per_bin"] == 1
    assert cells["cells"].shape == (40, 20)
    assert few_fields["steps_per_bin"] == 5
    assert few["cells"].shape == (40, 4)
    assert few["column_step"].tolist() == [5, 10, 15, 20]
    greatest = np.nanmax(book.values.T.reshape(40, 4, 5), axis=2)
    np.testing.assert_array_equal(few["cells"], codes(greatest, few_fields["low"], few_fields["high"]))


def _cells_of(steps: range) -> tuple[Any, ...]:
    roster = job().roster()
    values = np.array(
        [[np.nan if (value := value_of(rank, step)) is None else value for rank in range(40)] for step in steps]
    )
    return roster, Peers(roster), FORWARD_SUM, steps[0], values


def test_bad_rank_stays_visible_in_shared_rows() -> None:
    layout = Layout(tp_size=8, pp_size=2, dp_size=1250)
    made = SyntheticJob(layout, ranks_per_host=8)
    values = np.full((3, layout.world_size), 0.5)
    values[1, 12_345] = 0.56
    roster = made.roster()
    cells = HeatCells(roster, Peers(roster), FORWARD_SUM, 0, values)

    fields, arrays = unpack(heat_picture(cells, Scale.RELATIVE, By.RANK, "rank", 1_300_000))

    assert fields["rows_per_bin"] == 2
    assert arrays["cells"].shape == (10_000, 3)
    assert np.argwhere(arrays["cells"] > 0.6 * NUM_LEVELS).tolist() == [[12_345 // 2, 1]]


@given(
    values=st.lists(st.one_of(st.just(float("nan")), st.floats(-1e6, 1e6)), min_size=12, max_size=12),
    size=st.integers(1, 5),
)
@settings(max_examples=60)
def test_pooling_keeps_the_greatest(values: list[float], size: int) -> None:
    array = np.array(values).reshape(3, 4)

    found = pooled(array, size, axis=1)

    for row in range(3):
        for place in range(found.shape[1]):
            known = [one for one in array[row, place * size : (place + 1) * size].tolist() if one == one]
            assert found[row, place] == max(known) if known else np.isnan(found[row, place])
    groups = np.array([1, 0, 1, 1])
    by_group = pooled_by(array, groups, 3)
    assert np.isnan(by_group[:, 2]).all()
    np.testing.assert_array_equal(by_group[:, 0], array[:, 1])


@pytest.mark.slow
@given(
    values=st.lists(
        st.one_of(st.just(float("nan")), st.sampled_from([0.0, 1.0]), st.floats(0, 1e9)), min_size=40, max_size=40
    )
)
@settings(max_examples=60)
def test_scaled_values_are_numbers_wherever_there_was_one(values: list[float]) -> None:
    array, peers = np.array([values]), Peers(job().roster())
    against = peer_values(array, peers)
    for scale in Scale:
        found = scaled(array, against, scale, 1e-6)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(array))
        ends = color_range(found, scale)
        assert np.isfinite([ends.low, ends.high]).all()
        assert ends.low < ends.high
        painted = codes(found, ends.low, ends.high)
        np.testing.assert_array_equal(painted == NO_VALUE, np.isnan(array))


@pytest.mark.parametrize("scale", [Scale.RELATIVE, Scale.Z])
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.15])
def test_healthy_job_is_pale_and_slow_rank_is_not(scale: Scale, noise: float) -> None:
    """The page paints the lower half of the levels with one color: it covers values due to chance."""
    roster = job().roster()
    values = np.random.default_rng(7).normal(1.0, noise, (200, roster.layout.world_size)).clip(0.1)
    values[:, SLOW_RANK] += max(0.18, 8 * noise)
    found = scaled(values, peer_values(values, Peers(roster)), scale, 1e-6)
    ends = color_range(found, scale)
    painted = codes(found, ends.low, ends.high)
    healthy = np.delete(painted, SLOW_RANK, axis=1)
    assert (healthy < NUM_LEVELS / 2).mean() > 0.98
    assert (painted[:, SLOW_RANK] > 0.7 * NUM_LEVELS).mean() > 0.9


def test_cell_has_the_exact_value(client: TestClient) -> None:
    document = client.get(f"/heat/cell?rank={SLOW_RANK}&step=12").json()

    median, spread = expected(SLOW_RANK, 12)
    value = value_of(SLOW_RANK, 12)
    assert value is not None
    assert document["value"] == value
    assert document["peers_median"] == pytest.approx(median, rel=1e-12)
    assert document["peers_spread"] == pytest.approx(spread, rel=1e-12)
    assert document["ratio"] == pytest.approx(value / median, rel=1e-12)
    assert document["z"] == pytest.approx((value - median) / max(spread, 0.01 * median), rel=1e-12)
    assert (document["host"], document["place"]) == ("host-3", {"pp": 0, "dp": 3, "tp": 1})
    assert (document["unit"], document["step"], document["num_peers"]) == ("s", 12, 19)


def test_merged_cell_shows_the_worst_value(client: TestClient) -> None:
    """On every scale it is the one with the greatest displayed value, which determines the cell's color."""
    alone = {step: client.get(f"/heat/cell?rank=0&step={step}").json() for step in STEPS[:5]}

    for scale, shown in (("absolute", "value"), ("relative", "ratio"), ("z", "z")):
        of_host = client.get(f"/heat/cell?rank={SLOW_RANK - 1}&step=12&by=host&scale={scale}").json()
        assert of_host["rank"] == SLOW_RANK, scale
        for first in STEPS[:3]:
            greatest = max((alone[step] for step in range(first, first + 3)), key=lambda one: one[shown])
            found = client.get(f"/heat/cell?rank=0&step={first}&num_steps=3&scale={scale}").json()
            assert found == greatest, (scale, first)


def test_cell_without_a_value_has_its_peers(client: TestClient) -> None:
    document = client.get(f"/heat/cell?rank={HOLE[0]}&step={HOLE[1]}").json()

    assert (document["value"], document["ratio"], document["z"]) == (None, None, None)
    assert document["peers_median"] > 0


def test_cell_comes_from_the_picture_that_is_kept(tmp_path: Path) -> None:
    directory = stored_events(tmp_path, job().ranks(), TOTALS)
    fresh = picture_client(PictureSource(directory), router)
    picture(fresh, "round=1")
    shutil.rmtree(directory / "events")

    assert fresh.get(f"/heat/cell?round=1&rank={SLOW_RANK}&step=12").json()["value"] == value_of(SLOW_RANK, 12)


def test_outliers_name_the_slow_rank_first(client: TestClient) -> None:
    document = client.get("/heat/outliers").json()

    first = document["outliers"][0]
    assert (first["rank"], first["num_steps"]) == (SLOW_RANK, 20)
    z = {
        step: (value_of(SLOW_RANK, step) - expected(SLOW_RANK, step)[0])  # type: ignore[operator]
        / max(expected(SLOW_RANK, step)[1], 0.01 * expected(SLOW_RANK, step)[0])
        for step in STEPS
    }
    assert first["step"] == max(z, key=lambda step: z[step])
    assert first["z"] == pytest.approx(max(z.values()), rel=1e-12)
    assert len(document["outliers"]) <= 20
    assert [one["z"] for one in document["outliers"]] == sorted((o["z"] for o in document["outliers"]), reverse=True)
    assert len({one["rank"] for one in document["outliers"]}) == len(document["outliers"])


def test_picture_is_continued_with_new_steps(client: TestClient) -> None:
    fields, whole = picture(client, "scale=absolute")
    ends = f"low={fields['low']!r}&high={fields['high']!r}"

    more_fields, more = picture(client, f"scale=absolute&first=21&{ends}")

    assert (more_fields["first_step"], more_fields["last_step"]) == (21, 24)
    np.testing.assert_array_equal(more["cells"], whole["cells"][:, 16:])


def test_new_events_are_shown_and_old_responses_reused(tmp_path: Path) -> None:
    directory = stored_events(tmp_path, job().ranks(), select(TOTALS, TOTALS.step < 10))
    source = PictureSource(directory)
    with picture_client(source, router) as client:
        first = client.get("/heat")
        again = client.get("/heat", headers={"if-none-match": first.headers["etag"]})
        stored_events(directory, select(TOTALS, TOTALS.step >= 10))
        source.versions["heat"] = 1
        newer = client.get("/heat", headers={"if-none-match": first.headers["etag"]})

    assert again.status_code == 304
    assert newer.status_code == 200
    assert unpack(newer.content)[0]["last_step"] == 24


def test_csv_has_all_cells_and_no_formula(client: TestClient, tmp_path: Path) -> None:
    response = client.get("/heat.csv?scale=absolute&sort=dp")
    rows = list(csv.reader(io.StringIO(response.text)))

    assert response.headers["content-type"].startswith("text/csv")
    assert "attachment" in response.headers["content-disposition"]
    assert rows[0] == ["rank", "host", "pp", "dp", "tp", *(f"step {step}" for step in STEPS)]
    assert len(rows) == 41
    for row in rows[1:]:
        for step, cell in zip(STEPS, row[5:], strict=True):
            value = value_of(int(row[0]), step)
            assert (float(cell) if cell else None) == (None if value is None else pytest.approx(value, rel=1e-8))
    assert [safe_text(text) for text in ("=1+1", "+a", "-a", "@a", "\ta", "host-1")] == [
        "'=1+1", "'+a", "'-a", "'@a", "'\ta", "host-1",
    ]  # fmt: skip
    ranks = job().ranks()
    ranks.host[ranks.rank == 0] = "=cmd|' /C calc'!A0"
    bad = picture_client(PictureSource(stored_events(tmp_path, ranks, TOTALS)), router).get("/heat.csv").text
    assert next(csv.reader(io.StringIO(bad.splitlines()[1])))[1] == "'=cmd|' /C calc'!A0"


REFUSED = [
    ("/heat?operation=forwards", 400, "operation='forwards': there are step, data-wait"),
    ("/heat?scale=log", 400, "scale"),
    ("/heat?first=9&last=5", 400, "last=5: it must not be before first=9"),
    ("/heat?first=-1", 400, "first='-1': it must be greater than or equal to 0"),
    ("/heat?first=x", 400, "first='x': it must be a valid integer"),
    ("/heat?low=1", 400, "low and high=None go together"),
    ("/heat?low=2&high=1", 400, "high=1.0: it must be a number above low=2.0"),
    ("/heat?low=0&high=nan", 400, "it must be a number above"),
    ("/heat?max_cells=5", 400, "max_cells"),
    ("/heat?first=0&last=2147483647", 413, "choose at most 600,000 steps"),
    ("/heat?color=red", 400, "no such parameter"),
    ("/heat?round=9", 404, "9"),
    ("/heat/cell?rank=40&step=5", 400, "there are ranks 0 to 39"),
    ("/heat/cell?rank=1", 400, "step"),
]


def test_refusals_of_wrong_queries_name_the_mistake(client: TestClient) -> None:
    for path, status, message in REFUSED:
        response = client.get(path)
        assert response.status_code == status, path
        assert message in response.json()["text"], path


def test_round_without_a_step_is_an_empty_picture(tmp_path: Path) -> None:
    source = PictureSource(stored_events(tmp_path, job().ranks()))
    client = picture_client(source, router)

    fields, arrays = picture(client)

    assert arrays["cells"].shape == (40, 0)
    assert (fields["low"], fields["high"]) == (0.0, 1.0)
    assert client.get("/heat/outliers").json()["outliers"] == []


def test_step_invented_by_one_rank_hides_no_other(tmp_path: Path) -> None:
    rogue = select(TOTALS, (TOTALS.rank == 1) & (TOTALS.step == 24))
    rogue.step[:] = 2**31 - 5
    rogue.sequence[:] += 10**6
    source = PictureSource(stored_events(tmp_path, job().ranks(), TOTALS, rogue))

    fields, arrays = picture(picture_client(source, router))

    assert (fields["first_step"], fields["last_step"]) == (5, 24)
    assert num_rows(source.events.read(Ranks)) == 40
    assert arrays["cells"].shape == (40, 20)


def test_steps_of_another_round_do_not_hide_any_of_this_one(tmp_path: Path) -> None:
    later = SyntheticJob(LAYOUT, round=2)
    both = joined(StepTotals, [TOTALS, *(later.step(step)[0] for step in range(20, 35))])
    ranks = [job().ranks(), later.ranks()]
    source = PictureSource(stored_events(tmp_path, joined(Ranks, ranks), both))

    # 25 columns: according to the footers, the newest are steps 10 to 34
    fields, arrays = picture(picture_client(source, router), "round=1&max_cells=1000")
    assert (fields["first_step"], fields["last_step"]) == (5, 24)
    assert arrays["cells"].shape == (40, 20)
    fields, _ = picture(picture_client(source, router), "max_cells=1000")
    assert (fields["round"], fields["first_step"], fields["last_step"]) == (2, 20, 34)


def test_download_waits_for_a_slot_and_releases_it(client: TestClient, source: PictureSource) -> None:
    assert [client.get("/heat.csv").status_code for _ in range(2)] == [200, 200]
    assert picture_client(source, router, num_downloads=0).get("/heat.csv").status_code == 503
