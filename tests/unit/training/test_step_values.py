"""The values of a step that a rank writes to its black box about its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatrain.contracts.black_box.operations import StepValue
from megatrain.contracts.layout import Layout
from megatrain.data.cache_use import CacheUse
from megatrain.data.loader_report import LoaderReport
from megatrain.data.step_batch import StepBatch
from megatrain.training.observers.device_memory import HostMemory
from megatrain.training.observers.step_reports import StepValues
from tests.helpers.completed_steps import completed_step
from tests.helpers.host_loading import corpus, steps
from tests.helpers.training_case import make_config


def recorded(batch: StepBatch) -> dict[StepValue, float]:
    """Return the values of a step with this batch."""
    found: dict[StepValue, float] = {}
    rank_model: Any = SimpleNamespace(mesh=SimpleNamespace(layout=Layout()), device=torch.device("cpu"))
    recorder: Any = SimpleNamespace(record_value=found.__setitem__)
    values = StepValues(make_config(), rank_model, recorder, HostMemory())
    values.after_step(replace(completed_step(0), batch=batch))
    return found


def test_step_records_the_cache_and_the_loader_of_its_batch(tmp_path: Path) -> None:
    (plan,) = steps(Layout(), 1).plans()
    local, remote = (
        corpus(tmp_path / name, is_remote=name == "remote").reader.read_step(plan, 0) for name in ("local", "remote")
    )
    assert remote.cache_use is not None
    assert remote.cache_use.hit_bytes > 0
    found = recorded(replace(remote, cache_use=CacheUse(1, 2, 3, 4), loader=LoaderReport(5, num_starts=6)))
    kinds = (StepValue.CACHE_HIT_BYTES, StepValue.CACHE_FETCHED_BYTES, StepValue.CACHE_EVICTED_BYTES)
    more = (StepValue.CACHE_NOT_STORED, StepValue.STEPS_READY, StepValue.LOADER_STARTS)
    assert [found[kind] for kind in (*kinds, *more)] == [1, 2, 3, 4, 5, 6]
    assert not {*kinds, *more} & set(recorded(local))
