"""Options of [diagnostics] take effect in the streamer: its page of metrics shows what it reads and keeps."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatrain.contracts.records.record import decode
from megatrain_diagnostics.launched import streamer_command
from megatrain_diagnostics.streamer.settings import StreamerSettings
from megatrain_diagnostics.wire.spool import Spool
from tests.helpers.fake_nvml import fake_nvml
from tests.helpers.forked_program import forked_program
from tests.helpers.ports import free_ports
from tests.helpers.single_rank import make_config
from tests.helpers.waiting import wait_until

NO_ETCD = ["--rdzv-endpoint=http://127.0.0.1:1"]
MB = 1_000_000


class Page:
    """The metrics of a streamer."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def values(self, name: str, label: str = "host") -> dict[str, float] | None:
        """Return the values of a metric by a label, None while there is no page."""
        try:
            with urllib.request.urlopen(self._url) as answer:
                text = answer.read().decode()
        except OSError:
            return None
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return {one.labels[label]: one.value for one in samples if one.name == name}

    def first_values(self, name: str, label: str = "host") -> dict[str, float]:
        wait_until(lambda: self.values(name, label) is not None, "the page")
        found = self.values(name, label)
        assert found is not None
        return found


def settings_of(directory: Path, **diagnostics: Any) -> list[str]:
    config = make_config(
        job={"name": "demo"}, telemetry={"black_box_directory": ""}, diagnostics={"metrics_port": 0, **diagnostics}
    )
    return streamer_command(config=config, run=directory, host="h", logs=directory / "logs", etcd=NO_ETCD)


@contextmanager
def streamer(directory: Path, **diagnostics: Any) -> Iterator[Page]:
    """Run a streamer of a host with two GPUs, whose daemon is never found."""
    (port,) = free_ports(1)
    _, *words = settings_of(directory, metrics_port=port, **diagnostics)
    environment = {**os.environ, **fake_nvml(directory).environment}
    with forked_program(words, environment=environment):
        yield Page(port)


@pytest.mark.slow
def test_devices_are_read_at_the_interval_and_never_at_0(tmp_path: Path) -> None:
    with streamer(tmp_path, telemetry_interval_s=1.0) as page:
        wait_until(
            lambda: (page.values("megatrain_events_sent_total", "table") or {}).get("gpus", 0) >= 4, "two readings"
        )
    with streamer(tmp_path, telemetry_interval_s=0.0) as page:
        assert page.first_values("megatrain_telemetry_up") == {}


@pytest.mark.parametrize(("spool_mb", "kept"), [(2, 3), (1, 1)])
def test_a_spool_above_its_size_loses_the_oldest(tmp_path: Path, spool_mb: int, kept: int) -> None:
    arguments = settings_of(tmp_path)
    own = decode(StreamerSettings, arguments[4], "--settings").own_directory
    spool = Spool(own / "spool")
    for number in range(3):
        spool.write(pa.py_buffer(bytes(6 * MB // 10)), "values", number, 10, number)
    with streamer(tmp_path, spool_mb=spool_mb, telemetry_interval_s=0.0) as page:
        assert page.first_values("megatrain_spool_bytes") == {"h": kept * 6 * MB // 10}
        dropped = page.first_values("megatrain_events_dropped_total", "reason")
    assert dropped["spool-full"] == 10 * (3 - kept)
    assert [batch.made_unix_ns for batch in spool.found()] == list(range(3 - kept, 3))
