"""The files of a run that its launches share."""

from __future__ import annotations

from pathlib import Path

from megatrain_launcher.launch.job_files import JobFiles


def test_second_launch_has_the_password_of_the_first(tmp_path: Path) -> None:
    first = JobFiles(tmp_path).credentials()

    assert JobFiles(tmp_path).credentials() == first
