"""Each kind of usage error has one exit code for all commands; each command is tested with every error that it
allows."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.cli import BUILT_IN_VERBS, find_verbs, main
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.layout import Layout
from megatrain.programs.stop_signals import STOP_SIGNALS
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Ranks
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_job.commands import job_location
from megatrain_launcher.commands import driver
from tests.helpers.ports import free_ports
from tests.helpers.synthetic_steps import SyntheticJob

OF_A_JOB = (
    "status", "driver", "dashboard", "incidents", "host ls", "host check", "host cordon --host h",
    "host uncordon --host h", "host evict --host h", "job checkpoint", "job restart", "job stop",
    "job approve --verdict v", "job dismiss --verdict v",
    "diag on", "diag off", "diag set", "diag verdicts", "diag daemon", "annotate --text hello",
)  # fmt: skip
PATIENT = ("driver", "dashboard", "diag daemon")
"""Long-running commands: they wait for etcd longer than a test does, or continue without it."""
OF_ALL_JOBS = ("dashboard",)
"""Without the name of a job they apply to all jobs."""
ALWAYS_ANSWERS = ("status", "annotate --text hello")
"""They answer from the run directory if etcd does not; then the exit code is that of the answer."""
OF_A_RUN = (
    "logs", "logs classify", "diag comm", "diag drift", "diag explain --step 1", "diag hang", "diag stragglers",
    "diag timeline --output t.json", "diag whatif",
)  # fmt: skip
WITH_ROUND = (
    "logs",
    "diag comm",
    "diag drift",
    "diag explain --step 1",
    "diag stragglers",
    "diag timeline --output t.json",
)
OF_A_FILE = {
    "launch {}": ExitCode.CONFIG, "config show {}": ExitCode.CONFIG, "notify test {}": ExitCode.CONFIG,
    "config check {}": ExitCode.CONFIG, "blackbox {}": ExitCode.DATA, "logs classify {}.jsonl": ExitCode.DATA,
    "sample {}": ExitCode.CHECKPOINT, "ckpt ls {}": ExitCode.CHECKPOINT, "ckpt inspect {}": ExitCode.CHECKPOINT,
    "ckpt verify {}": ExitCode.CHECKPOINT, "ckpt pin {}": ExitCode.CHECKPOINT, "ckpt prune {}": ExitCode.CHECKPOINT,
    "ckpt restore {}": ExitCode.CHECKPOINT, "ckpt diff {0} {0}": ExitCode.CHECKPOINT,
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty directory, where no argument names anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_location, "_OWN_CALL_S", 0.05)
    monkeypatch.setattr(driver, "log_to_stderr", lambda: None)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def own_etcd(text: str, mode: int = 0o600) -> None:
    """Write the address of its etcd to runs/demo."""
    place = Path("runs/demo/coordination")
    place.mkdir(parents=True, mode=0o700)
    (place / "endpoint").write_text(text)
    (place / "endpoint").chmod(mode)


def away() -> str:
    return json.dumps({"endpoints": [f"http://127.0.0.1:{free_ports(1)[0]}"], "job": "demo"})


def check(capsys: pytest.CaptureFixture[str], arguments: str, code: ExitCode) -> str:
    """Run a command line, and check its exit code, with one error and no traceback; return the output."""
    found = main(arguments.split())
    errors = capsys.readouterr().err
    assert found == code, f"megatrain {arguments}: {errors}"
    assert errors.count("error: ") == 1, f"megatrain {arguments}: {errors}"
    assert "Traceback" not in errors
    return errors


def test_malformed_command_line_of_a_job_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in OF_A_JOB:
        assert "--no-such" in check(capsys, f"{verb} --no-such", ExitCode.USAGE)
        assert "--hel" in check(capsys, f"{verb} --hel", ExitCode.USAGE)  # Abbreviations are not accepted.
        assert "two jobs" in check(capsys, f"{verb} a --job b", ExitCode.USAGE)
        check(capsys, f"{verb} a --rdzv-endpoint http://:0", ExitCode.USAGE)


def test_ambiguous_job_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    own_etcd(away())
    Path("runs/demo").rename("runs/one")
    own_etcd(away())
    for verb in OF_A_JOB:
        if verb not in OF_ALL_JOBS:
            assert "runs/demo and runs/one" in check(capsys, verb, ExitCode.USAGE)


def test_unknown_job_is_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in OF_A_JOB:
        assert "unknown" in check(capsys, f"{verb} unknown", ExitCode.NOT_FOUND)
        if verb not in ALWAYS_ANSWERS:
            assert "no/where" in check(capsys, f"{verb} no/where", ExitCode.NOT_FOUND)
        nothing = "runs: no such directory" if verb in OF_ALL_JOBS else "no job is named"
        assert nothing in check(capsys, verb, ExitCode.NOT_FOUND)


def test_damaged_endpoint_of_a_job_is_a_data_error(capsys: pytest.CaptureFixture[str]) -> None:
    own_etcd("{")
    for verb in OF_A_JOB:
        if verb not in ALWAYS_ANSWERS:
            assert "runs/demo/coordination/endpoint" in check(capsys, f"{verb} demo", ExitCode.DATA)


def test_job_of_another_users_etcd_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    own_etcd(away(), mode=0o666)
    for verb in OF_A_JOB:
        if verb not in ALWAYS_ANSWERS:
            errors = check(capsys, f"{verb} demo", ExitCode.NO_PERMISSION)
            assert "only the user who launched a job can reach its etcd" in errors


def test_unreachable_etcd_of_a_job_is_a_coordination_error(capsys: pytest.CaptureFixture[str]) -> None:
    own_etcd(away())
    for verb in OF_A_JOB:
        if verb not in (*PATIENT, *ALWAYS_ANSWERS):
            assert "out of reach" in check(capsys, f"{verb} demo", ExitCode.COORDINATION)


@pytest.mark.slow(kept=["diag drift", "diag stragglers", "diag whatif", "diag explain --step 1"])
@pytest.mark.parametrize("verb", OF_A_RUN)
def test_mistakes_about_a_run_have_their_exit_codes(verb: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--no-such" in check(capsys, f"{verb} a --no-such", ExitCode.USAGE)
    assert "--hel" in check(capsys, f"{verb} a --hel", ExitCode.USAGE)  # Abbreviations are not accepted.
    nowhere = "nowhere" if verb != "logs classify" else "runs/nowhere"
    if verb != "logs classify":  # FILE, or RUN
        assert "nowhere" in check(capsys, f"{verb} {nowhere}", ExitCode.NOT_FOUND)
    (empty / "bare").mkdir()
    assert "bare" in check(capsys, f"{verb} bare", ExitCode.DATA)
    if verb in ("diag whatif", "logs classify"):  # these read other inputs than runs, too
        return
    assert "no run is named" in check(capsys, verb, ExitCode.NOT_FOUND)
    for name in ("one", "two"):
        (empty / "runs" / name / "events").mkdir(parents=True)
    assert "runs/one and runs/two" in check(capsys, verb, ExitCode.USAGE)


@pytest.mark.slow(kept=["logs", "diag stragglers", "diag timeline --output t.json", "diag drift"])
@pytest.mark.parametrize("verb", WITH_ROUND)
def test_absent_round_is_not_found(verb: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SegmentStore(empty / "events") as store:
        store.append(Ranks, to_arrow(SyntheticJob(Layout(dp_size=2), round=3).ranks()))
        store.commit()
    assert "--round=9" in check(capsys, f"{verb} events --round 9", ExitCode.NOT_FOUND)


def test_absent_file_has_the_exit_code_of_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in OF_A_FILE.items():
        assert "absent" in check(capsys, arguments.format("absent"), code)


def test_malformed_flag_of_launch_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--nnodes=x", "--spares=-1", "--tee=some", "--label=x", "--rdzv-conf=a=b"):
        errors = check(capsys, f"launch {flag} absent", ExitCode.USAGE)
        assert "the command line has 1 problem" in errors


def test_every_verb_is_in_a_table() -> None:
    named = {line.split()[0] for line in (*OF_A_JOB, *OF_A_RUN, *OF_A_FILE)}
    # examines this machine; test_data_command tests its files; ends its process, so test_train_command tests it
    without_a_mistake = {"doctor", "data", "train"}
    assert {verb.split()[0] for verb in (*BUILT_IN_VERBS, *find_verbs())} - without_a_mistake == named
