"""A launch that could not write the logs of its ranks is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain_launcher.launch.host import run_launch
from megatrain_launcher.launch.plan import make_plan
from tests.helpers.launch_cases import small_flags


def launch(tmp_path: Path, **changes: str) -> None:
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
