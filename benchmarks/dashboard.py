"""The dashboard of the largest job: pictures, lists and news in a browser, the overview for 50 people, and its memory.

Pictures and lists: a recorded run of 12,288 ranks and 100 steps, in headless chromium without a GPU, 1920 x 1080.
Overview and news: a job of 1,536 hosts in a real etcd, whose statuses change as often as those of executors; etcd and
the clients run on the same machine.
Run alone on the machine: python -m benchmarks dashboard [--write]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bars import as_written
from benchmarks.dashboard_browser import heat_figures, news_ms, opened_page, pan_figures, search_ms
from benchmarks.dashboard_job import KEYS, NUM_HOSTS, changing_statuses, put_status, write_job
from benchmarks.process_usage import resident_mb
from benchmarks.result import Result
from megatrain.config.dashboard import DashboardConfig
from megatrain.contracts.records.diag_records import DashboardRecord
from megatrain.contracts.records.record import decode, encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.etcd.server import free_port
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.synthetic_run import LARGEST, NUM_STEPS, write_run
from tests.helpers.waiting import wait_until

NUM_CLIENTS = 50
SECONDS = 30.0
_FULL_STEP = NUM_STEPS - 1
_FULL_RANKS = range(0, LARGEST.world_size, 40)
"""308 ranks of 322 spans: 99,176 slices."""


def run() -> Result:
    """Measure the pictures, then the overview."""
    with tempfile.TemporaryDirectory(prefix="dashboard-") as directory:
        run_directory = Path(directory) / "run"
        write_run(run_directory, full_steps=(_FULL_STEP,), full_ranks=_FULL_RANKS)
        rows = [*_pictures(run_directory), *_overview(run_directory, Path(directory) / "etcd")]
    return Result(
        name="dashboard",
        title="The dashboard of a job of 12,288 ranks",
        command="python -m benchmarks dashboard --write",
        rows=rows,
        notes=[
            (
                "heat map: painted = the loop over the cells and the canvas calls; shown = from the last byte of the "
                "answer to the picture, with all that the page does in between: in an open page when another "
                "operation is chosen, and in a newly opened page; medians of 14 after one that is not counted"
            ),
            (
                "timeline: painted = time to draw one frame while it is dragged, median of 120 frames; interval = "
                "time between two frames, at least that of a screen of 60 Hz"
            ),
            f"overview: {NUM_CLIENTS} clients, each with one request a second for {SECONDS:g} s",
            "memory: resident memory of the dashboard's process afterwards",
            "list of hosts: from a name in its search field to the list of that one row, median of 15",
            "news: from a step that is in etcd to that step on an open page; etcd is read at most twice a second",
        ],
        settings={"ranks": LARGEST.world_size, "steps": NUM_STEPS, "layout": str(LARGEST)},
        bars=[one for row in rows for one in as_written(f"{row['case']}, {row['figure']}", row["value"], row["asked"])],
    )


def _pictures(run_directory: Path) -> Iterator[dict[str, Any]]:
    ranks = ",".join(map(str, _FULL_RANKS))
    with _served("--replay", str(run_directory)) as (process, url), opened_page() as page:
        for scale in ("absolute", "relative", "z"):
            query = f"scale={scale}&first=0&last={NUM_STEPS - 1}"
            found = heat_figures(page, url, query)
            yield _row(f"heat map, {scale}", "painted ms", found["painted_ms"], 50)
            yield _row(f"heat map, {scale}", "shown ms", found["shown_ms"], 50)
            yield _row(f"heat map, {scale}", "shown ms, opening", found["opening_ms"])
            yield _row(f"heat map, {scale}", "answer ms", found["answer_ms"])
            yield _row(f"heat map, {scale}", "MB", found["bytes"] / 1e6, 1.5)
        pan = pan_figures(page, url, f"first={_FULL_STEP}&last={_FULL_STEP}&ranks={ranks}")
        yield _row(f"timeline, {pan['slices']:,} slices", "painted ms", pan["painted_ms"], 16)
        yield _row(f"timeline, {pan['slices']:,} slices", "worst painted ms", pan["worst_ms"])
        yield _row(f"timeline, {pan['slices']:,} slices", "interval ms", pan["interval_ms"], 16.7)
        found_ms = search_ms(page, url, (f"host-{host}" for host in range(1000, 1536)))
        yield _row("list of 1,536 hosts", "search ms", found_ms, 2000)
        yield _row("recorded run", "memory, MB", resident_mb(process.pid))


def _overview(run_directory: Path, etcd_directory: Path) -> Iterator[dict[str, Any]]:
    with EtcdServers(etcd_directory) as etcd, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        write_job(client, str(run_directory))
        arguments = ("--run", str(run_directory), "--job", KEYS.job, "--rdzv-endpoint", etcd.urls[0], "--port", "0",
                     "--section", encode(DashboardConfig()).decode())  # fmt: skip
        with _kept("megatrain_dashboard", *arguments) as process:
            wait_until(lambda: client.get(KEYS.dashboard) is not None, "the page")
            item = client.get(KEYS.dashboard)
            assert item is not None
            url = decode(DashboardRecord, item.value, KEYS.dashboard).url
            with changing_statuses(client):
                took_ms = _asked(url)
            case = f"overview, {NUM_CLIENTS} clients"
            yield _row(case, "median ms", statistics.median(took_ms), 50)
            yield _row(case, "99 % ms", sorted(took_ms)[int(0.99 * len(took_ms))], 50)
            yield _row(case, "worst ms", max(took_ms))
            yield from _news(client, url)
            yield _row("running job", "memory, MB", resident_mb(process.pid))


def _news(client: EtcdClient, url: str) -> Iterator[dict[str, Any]]:
    first_step = 10_000
    for host in range(1, NUM_HOSTS):
        put_status(client, host, 2 * first_step)
    with opened_page() as page:
        took_ms = news_ms(page, url, lambda step: put_status(client, 0, step), first_step)
    yield _row("news, one page", "median ms", statistics.median(took_ms), 2000)
    yield _row("news, one page", "worst ms", max(took_ms), 2000)


def _asked(url: str) -> Sequence[float]:
    arguments = [sys.executable, "-m", "benchmarks.dashboard_clients", url, str(NUM_CLIENTS), str(SECONDS)]
    found: list[float] = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    return found


@contextmanager
def _served(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a dashboard at a free port during the block."""
    port = free_port("127.0.0.1")
    with _kept("megatrain", "dashboard", "--port", str(port), *arguments) as process:
        url = f"http://127.0.0.1:{port}/"
        wait_until(lambda: _is_ready(url), "the page")
        yield process, url


def _is_ready(url: str) -> bool:
    arguments = ["-c", f"import urllib.request; urllib.request.urlopen('{url}readyz')"]
    return subprocess.run([sys.executable, *arguments], capture_output=True, check=False).returncode == 0


@contextmanager
def _kept(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _row(case: str, figure: str, value: float, asked: float | None = None) -> dict[str, Any]:
    return {
        "case": case,
        "figure": figure,
        "value": round(value, 2),
        "asked": "-" if asked is None else f"<= {asked:g}",
    }
