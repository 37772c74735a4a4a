"""A launch is refused before it starts if it cannot write its ranks' logs, or read the named kernel's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain_job.commands.etcd_flags import EtcdFlags
from megatrain_launcher.launch.host import run_launch
from megatrain_launcher.launch.plan import make_plan
from tests.helpers.launch_cases import small_flags


def launch(tmp_path: Path, **changes: Any) -> None:
    plan = make_plan(small_flags(tmp_path, **changes), {})
    run_launch(plan, {}, lambda _: pytest.fail("an executor was started"), lambda _: None)


def test_unusable_log_directory_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    place = tmp_path / "taken" / "logs"
    with pytest.raises(ConfigError, match=f"--log-dir={place}: cannot be written .Not a directory., and the ranks'"):
        launch(tmp_path, log_dir=str(place))
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "logs").write_text("a file")
    with pytest.raises(ConfigError, match=r"run/logs: cannot be written .File exists., and .* set job\.run_directory"):
        launch(tmp_path)


def test_unreadable_kernel_log_is_refused_if_it_is_named(tmp_path: Path) -> None:
    place = tmp_path / "kmsg"
    launches: list[dict[str, Any]] = [{"is_standalone": True}, {"etcd": EtcdFlags("e:1")}]
    for changes in launches:
        with pytest.raises(ConfigError, match=f"--kernel-log={place}: cannot be read .No such file or directory., and"):
            launch(tmp_path, kernel_log=str(place), **changes)
