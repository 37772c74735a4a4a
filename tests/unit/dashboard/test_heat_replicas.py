"""The heat map of replicas with unequal numbers of micro-batches: computes are compared per pass, shown as measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.layout import Layout
from megatrain_dashboard.api.heat.route import router
from megatrain_dashboard.responses.binary import unpack
from megatrain_diagnostics.events.tables import StepTotals, joined
from tests.helpers.dashboard_pictures import PictureSource, picture_client, stored_events
from tests.helpers.synthetic_steps import SyntheticJob

STEPS = range(5, 25)
FULL, SLOW, USUAL = 0, 3, 1
"""Ranks: of the replica with two micro-batches, the slow one, another."""


@pytest.mark.parametrize("operation", ["forward-compute", "backward-compute"])
def test_replica_with_more_microbatches_is_no_outlier(tmp_path: Path, operation: str) -> None:
    made = SyntheticJob(
        Layout(dp_size=7), ranks_per_host=1, noise=0.01, num_microbatches={FULL: 2}, compute_factor={SLOW: 1.3}
    )
    totals = joined(StepTotals, [made.step(step)[0] for step in STEPS])
    client = picture_client(PictureSource(stored_events(tmp_path, made.ranks(), totals)), router)
    ask = f"operation={operation}"
    full, slow, usual = (client.get(f"/heat/cell?{ask}&step=9&rank={rank}").json() for rank in (FULL, SLOW, USUAL))
    brightest = {}
    for scale in ("absolute", "relative", "z"):
        _, arrays = unpack(client.get(f"/heat?{ask}&scale={scale}").content)
        brightest[scale] = int(np.median(arrays["cells"], axis=1).argmax())
    outliers = client.get(f"/heat/outliers?{ask}").json()["outliers"]

    assert full["value"] == pytest.approx(2 * usual["value"], rel=0.1)
    assert full["peers_median"] == pytest.approx(2 * usual["peers_median"], rel=0.1)
    assert (full["ratio"], slow["ratio"]) == (pytest.approx(1.0, abs=0.06), pytest.approx(1.3, abs=0.08))
    assert brightest == {"absolute": FULL, "relative": SLOW, "z": SLOW}
    assert [one["rank"] for one in outliers if one["num_steps"] == len(STEPS)] == [SLOW]
