"""Files of others: commands on an untrusted run directory obey nothing in it; foreign black boxes are left alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ControlPage, Identity
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain.run_files.incidents import AUDIT_NAME
from megatrain.run_files.run_directory import RunDirectory
from megatrain.telemetry.recorder import open_recorder
from megatrain_launcher.executor.control_pages import ControlPages
from megatrain_launcher.executor.crash_evidence import BoxPaths, CrashEvidence
from megatrain_launcher.executor.evidence import hang_evidence
from megatrain_launcher.executor.progress import RankWatch, RoundProgress
from megatrain_launcher.health.storage import _free_bytes, judge_shared_memory
from tests.helpers.other_user import OTHER_USER, as_other_user, everybodys_place

SECRET = "a line of a file that is its reader's own"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    run = tmp_path / "run"
    (run / "incidents").mkdir(parents=True)
    return run


def printed(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the whole output of a command line."""
    main([str(word) for word in arguments])
    captured = capfd.readouterr()
    return captured.out + captured.err


PUTS: list[tuple[Callable[[Path], object], str]] = [
    (os.mkfifo, "is not a regular file"),
    (lambda path: path.symlink_to(path.parents[2] / "secret"), "is a symbolic link"),
    (lambda path: path.symlink_to("/dev/zero"), "is a symbolic link"),
    (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has more than"),
]


def test_incidents_leaves_out_files_that_are_no_records(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number, (put, _) in enumerate(PUTS):
        put(run / "incidents" / f"{number}.json")
    text = printed(capfd, "incidents", "--job", run)
    for number, (_, problem) in enumerate(PUTS):
        assert f"left out: {run}/incidents/{number}.json: cannot be read: {problem}" in text
    assert SECRET not in text


def test_verdicts_reads_no_audit_that_is_no_file(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    audit = run / "incidents" / AUDIT_NAME
    for put, problem in PUTS:
        put(audit)
        text = printed(capfd, "diag", "verdicts", "--job", run)
        assert f"{AUDIT_NAME}: cannot be read: {problem}" in text
        assert SECRET not in text
        audit.unlink()


def test_hang_leaves_out_evidence_that_is_no_file(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = run / "incidents" / "round-000001"
    place.mkdir()
    (run / "secret").symlink_to(run.parent / "secret")
    for number, (put, _) in enumerate(PUTS):
        put(place / f"host-{number}.json")
    text = printed(capfd, "diag", "hang", run)
    assert SECRET not in text
    assert "Traceback" not in text


def test_a_directory_of_incidents_that_is_elsewhere_is_not_read(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    elsewhere = run.parent / "elsewhere"
    (run / "incidents").rename(elsewhere)
    (elsewhere / "1.json").write_text("{}")
    (run / "incidents").symlink_to(elsewhere)
    assert f"{run}/incidents/1.json: cannot be read: is a symbolic link" in printed(capfd, "incidents", "--job", run)


def test_no_text_of_a_file_is_obeyed_by_the_terminal(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "incidents" / "\x1b]0;title\x07.json").write_text('{"kind": "\\u001b[2J"}')
    (run / "coordination").mkdir()
    (run / "coordination" / "endpoint").write_text('{"endpoints": ["\x1b[2J"], "job": "\x1b[31m"}')
    for verb in ("incidents", "status"):
        text = printed(capfd, verb, "--job", run)
        assert text, verb
        assert "\x1b" not in text, verb
        assert "\x07" not in text, verb


ROUND, RANK = 3, 2
FAR_STEP = 999_999
IDENTITY = Identity("demo", "main", ROUND, RANK, Layout(dp_size=4), os.getpid(), "host-1")


@pytest.fixture
def places(tmp_path: Path) -> BoxPaths:
    place = everybodys_place(tmp_path)
    run = RunDirectory(tmp_path / "run")
    run.create()
    return BoxPaths(place, "demo", run)


@pytest.fixture
def far_box(tmp_path: Path) -> bytes:
    """Return a black box whose rank is at step 999999, as any user can create it from /proc and our source."""
    directory = tmp_path / "elsewhere"
    recorder = open_recorder(IDENTITY, directory=str(directory), run_key="key", num_records=256)
    recorder.set_step(FAR_STEP)
    recorder.complete_step()
    (path,) = (path for path in directory.rglob("*.blackbox"))
    content = path.read_bytes()
    recorder.close()
    return content


def foreign(path: Path, make: Callable[[Path], object]) -> None:
    """Let another user create a file of this name, with its parent directory."""

    def act() -> None:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        make(path)
        if not path.is_symlink():
            path.chmod(0o666)

    as_other_user(act)


def own_box(places: BoxPaths) -> Path:
    return places.paths(ROUND, range(RANK, RANK + 1))[RANK]


def test_foreign_black_box_is_reported(places: BoxPaths, far_box: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = own_box(places)
    foreign(path, lambda path: path.write_bytes(far_box))
    watch = RankWatch(path, RANK, os.getpid())
    assert watch.poll() is None, "step 999999 of a foreign file"
    assert watch.poll() is None
    (warning,) = caplog.records
    assert f"rank {RANK} is not watched: " in warning.getMessage()
    assert f"belongs to user {OTHER_USER}, and this is user {os.geteuid()}" in warning.getMessage()
    progress = RoundProgress({RANK: path}, {RANK: os.getpid()}, 0.0)
    assert progress.poll() == {}
    assert hang_evidence("host-1", "s", ROUND, progress.watches, 0.0).silent == (RANK,)
    progress.close()


def test_directory_of_another_user_is_a_problem_of_the_host(places: BoxPaths, far_box: bytes) -> None:
    places.make()
    assert places.problem == ""
    assert isinstance(_free_bytes(places.directory), int)
    own_box(places).parent.rmdir()
    foreign(own_box(places), lambda path: path.write_bytes(far_box))
    places.make()
    assert f"{own_box(places).parent} belongs to user {OTHER_USER}" in places.problem
    assert "remove it, or name another telemetry.black_box_directory" in places.problem
    finding = judge_shared_memory(places.directory, 1, _free_bytes(places.directory))
    assert finding.outcome == "failed"
    assert f"belongs to user {OTHER_USER}" in finding.detail


def test_foreign_directory_has_no_black_box_of_a_rank(places: BoxPaths, caplog: pytest.LogCaptureFixture) -> None:
    foreign(own_box(places), lambda path: path.touch())
    with caplog.at_level(logging.WARNING):
        recorder = open_recorder(IDENTITY, directory=str(places.directory), run_key=places.run.key, num_records=256)
    recorder.close()
    (warning,) = caplog.records
    assert f"no black box for rank {RANK}" in warning.getMessage()
    assert f"belongs to user {OTHER_USER}" in warning.getMessage()
    assert own_box(places).stat().st_size == 0


def test_control_page_is_not_written_into_a_foreign_file(places: BoxPaths, far_box: bytes, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(far_box)
    foreign(own_box(places), lambda path: path.symlink_to(victim))
    ControlPages(ROUND).write({RANK: own_box(places)}, lease_ok_until_ns=7, now_unix_s=0.0)
    with pytest.raises(DataError, match="its content may belong to another user and is not read"):
        write_control(own_box(places), ControlPage(round=9))
    assert victim.read_bytes() == far_box


def test_foreign_black_box_is_no_evidence(places: BoxPaths, far_box: bytes) -> None:
    foreign(own_box(places), lambda path: path.write_bytes(far_box))
    keeper = CrashEvidence(places, 4)
    keeper.sweep()
    keeper.keep_boxes(ROUND, {RANK: own_box(places)})
    keeper.close()
    assert list(places.run.incidents.rglob("*.blackbox")) == []
