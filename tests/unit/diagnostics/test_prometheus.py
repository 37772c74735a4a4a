"""A real Prometheus scrapes megatrain and evaluates its alerts; alerts and dashboards name series that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from megatrain.programs.processes import install_parent_death_guard
from megatrain_diagnostics.metrics.exposition import HostCollector, JobCollector, registry_of
from megatrain_diagnostics.metrics.server import MetricsServer
from tests.helpers.metric_readings import make_host_reading, make_job_reading
from tests.helpers.ports import free_ports
from tests.helpers.require import require
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

RULES = ROOT / "diagnostics" / "prometheus"
DASHBOARDS = sorted((ROOT / "diagnostics" / "grafana").glob("*.json"))
RUNBOOKS = ROOT / "docs" / "runbooks"
TOKEN = "s3cret"
_SCRAPE_S = 0.2
_HOST_METRIC = re.compile(r"\b(megatrain_[a-z0-9_]+)")
_VARIABLES = {"job_name": "demo", "host": ".*", "dp": ".*", "pp": ".*", "tp": ".*"}


def program(name: str) -> str:
    found = shutil.which(name)
    require("prometheus", found=found is not None, reason=f"no {name} on PATH (Debian: apt-get install prometheus)")
    assert found is not None
    return found


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, cwd=RULES, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rule_file() -> str:
    return (RULES / "alerts.yaml").read_text()


def exposed() -> set[str]:
    """Return the names of all series that we expose, with those of histograms."""
    text = b"".join(generate_latest(registry_of(one)) for one in (
        HostCollector(make_host_reading), JobCollector(make_job_reading)
    )).decode()  # fmt: skip
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in text.splitlines() if not line.startswith("#")}


def expressions(dashboard: Path) -> list[str]:
    board = json.loads(dashboard.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    found += [one["expr"] for one in board["annotations"]["list"]]
    for name, value in _VARIABLES.items():
        found = [one.replace(f"${name}", value) for one in found]
    return found


def test_rules_and_configuration_are_valid() -> None:
    num_rules = len(re.findall(r"- (?:alert|record): ", rule_file()))
    assert f"SUCCESS: {num_rules} rules found" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("check", "config", "--syntax-only", "prometheus.yaml")


@pytest.mark.slow
def test_alerts_fire_when_they_should_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yaml")


def test_every_alert_is_tested_and_has_a_runbook() -> None:
    text, tests = rule_file(), (RULES / "alerts_test.yaml").read_text()
    alerts = re.findall(r"- alert: (\w+)", text)
    fired = set(re.findall(r"alertname: (\w+)\n\s+eval_time: \w+\n\s+exp_alerts:\n", tests))
    assert set(alerts) == fired
    pages = re.findall(r"runbook_url: \S+/runbooks/(\S+)", text)
    assert len(pages) == len(alerts)
    assert [page for page in pages if not (RUNBOOKS / page).is_file()] == []
    assert len(re.findall(r"labels: \{severity: (?:critical|warning|info)\}", text)) == len(alerts)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_import_unedited(path: Path) -> None:
    board = json.loads(path.read_text())
    assert [one["name"] for one in board["__inputs"]] == ["DS_PROMETHEUS"]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    sources = re.findall(r'"uid": "(\$[^"]*)"', path.read_text())
    assert set(sources) == {"${DS_PROMETHEUS}"}
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    known = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)\b", " ".join(
        target["expr"] for panel in panels for target in panel.get("targets", [])
    ))) - {"1"} <= known  # fmt: skip


def test_alerts_and_dashboards_name_series_that_we_expose() -> None:
    named = set(_HOST_METRIC.findall(rule_file()))
    for dashboard in DASHBOARDS:
        named |= {name for expression in expressions(dashboard) for name in _HOST_METRIC.findall(expression)}
    recorded = set(re.findall(r"record: job_name:(megatrain_\w+):", rule_file()))
    assert named - exposed() - recorded == set()


@contextmanager
def prometheus(directory: Path, hosts: int, job: int) -> Iterator[str]:
    """Start Prometheus with our alerts on two of our ports; yield its address."""
    (port,) = free_ports(1)
    (directory / "token").write_text(TOKEN)
    shutil.copy(RULES / "alerts.yaml", directory)
    (directory / "prometheus.yaml").write_text(
        f"global: {{scrape_interval: {_SCRAPE_S * 1000:g}ms, evaluation_interval: {_SCRAPE_S * 1000:g}ms}}\n"
        "rule_files: [alerts.yaml]\n"
        "scrape_configs:\n"
        "  - job_name: megatrain-hosts\n"
        "    authorization: {credentials_file: token}\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{hosts}', '127.0.0.1:{job}']}}]\n"
    )
    command = [
        program("prometheus"),
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, preexec_fn=partial(install_parent_death_guard, os.getpid())
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def ask(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(
        f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=DEADLINE_S
    ) as answer:
        value = json.load(answer)
    assert value["status"] == "success", value
    return value["data"]


def is_up(url: str) -> bool:
    try:
        found = ask(url, "query", query="up == 1")["result"]
    except OSError:
        return False
    return len(found) == 2


def firing(url: str) -> set[str]:
    return {one["labels"]["alertname"] for one in ask(url, "alerts")["alerts"] if one["state"] == "firing"}


@pytest.mark.slow
def test_a_real_prometheus_scrapes_and_judges(tmp_path: Path) -> None:
    now_s = time.time()
    with ExitStack() as stack:
        ports = []
        for collector in (
            HostCollector(partial(make_host_reading, 1, now_s)),
            JobCollector(partial(make_job_reading, now_s)),
        ):
            listening = MetricsServer(registry_of(collector), "127.0.0.1", 0, TOKEN, key="metrics_port")
            stack.callback(listening.close)
            ports.append(listening.port)
        url = stack.enter_context(prometheus(tmp_path, *ports))
        wait_until(lambda: is_up(url), "two targets that are up")

        (info,) = ask(url, "query", query='megatrain_rank_info{rank="1"}')["result"]
        assert info["metric"]["host"] == "host-1"
        assert info["metric"]["gpu_uuid"] == "GPU-1"
        (compute,) = ask(url, "query", query=(
            'megatrain_rank_compute_seconds{rank="1"} * on (job_name, host, rank) group_left (tp) megatrain_rank_info'
        ))["result"]  # fmt: skip
        assert compute["metric"]["tp"] == "1"
        assert float(compute["value"][1]) == pytest.approx(0.4)
        for dashboard in DASHBOARDS:
            for expression in expressions(dashboard):
                ask(url, "query", query=expression)
        groups = {group["name"] for group in ask(url, "rules")["groups"]}
        assert groups == {"megatrain", "megatrain-recording", "megatrain-dcgm"}
        assert all(rule["health"] != "err" for group in ask(url, "rules")["groups"] for rule in group["rules"])
        assert firing(url) == set()
