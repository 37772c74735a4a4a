"""Fixtures for the whole suite."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatrain.programs.background import NICENESS_VARIABLE
from tests.helpers import backend_packages
from tests.helpers.outside_data import absent_data
from tests.helpers.rank_pool import RankPool
from tests.helpers.run_record import RunRecorder
from tests.helpers.selection import quick_and_slow
from tests.helpers.shared_compilation import import_share
from tests.helpers.waiting import PATIENCE

if TYPE_CHECKING:
    from megatrain_job.coordination.client import EtcdClient
    from tests.helpers.etcd_server import EtcdServers

TIMEOUT_S = 300.0
"""The time limit of a test that sets none. It guards against hangs only."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=("reference", "emulated", "cuda"),
        default="reference",
        help="what carries out the operators of megatrain.ops",
    )
    parser.addoption(
        "--slow", choices=("with", "without", "only"), default="with", help="the tests that are marked as slow"
    )
    parser.addoption("--record", metavar="FILE", help="write what passed and what failed to FILE (tests.run reads it)")


# Tests and their ranks share the cores, and their computations are small. This is set here because torch reads it at
# import, and the conftest of a directory imports torch before pytest_configure.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with suppress(ModuleNotFoundError):  # a bare GPU machine has torch and pytest
    import hypothesis
    from hypothesis.internal.conjecture import providers

    # Otherwise each process parses all imported files for their constants, and a change of any file changes the
    # examples.
    providers._get_local_constants = lambda: providers._local_constants
    # The duration of an example depends on the machine, which other programs use too.
    hypothesis.settings.register_profile("megatrain", deadline=None)
    hypothesis.settings.load_profile("megatrain")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark "slow", and restore the signals that are ignored in the background or under nohup: tests send
    them."""
    # A bare GPU machine ignores pyproject.toml and has no pytest-timeout, so the marks are declared here.
    config.addinivalue_line(
        "markers", "slow(kept): left out by make test, but for the cases of these ids; make test-all runs it"
    )
    config.addinivalue_line("markers", "timeout(seconds): the time limit of a test, which pytest-timeout sets")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            # This process still ignores the signal, but its child processes start with the default disposition.
            signal.signal(number, lambda *_: None)
    if config.getoption("--kernels") != "reference":
        from tests.helpers.kernels import use_kernels

        use_kernels(config.getoption("--kernels"))
    # In xdist's worker processes, the controller process writes the file.
    record = None if hasattr(config, "workerinput") else config.getoption("--record")
    config.pluginmanager.register(RunRecorder(Path(record) if record else None))
    # Beside other tests, a writer or streamer of low priority would hardly run; only the tests of the priority unset
    # this.
    os.environ.setdefault(NICENESS_VARIABLE, "0")
    # Until collection ends: importing modules and creating thousands of tests produces no garbage.
    gc.disable()


# a bare GPU machine has torch and pytest, but not xdist
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return a process more than there are cores, for `-n auto`: many tests wait for a server."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the tests to processes by the resources that they share."""
    from tests.helpers.side_by_side import SharedFixtureScheduling

    return SharedFixtureScheduling(config, log)


def pytest_collection(session: pytest.Session) -> None:
    """Import a part of the test modules first, if there are several processes: see shared_compilation."""
    if worker := getattr(session.config, "workerinput", None):
        number = int(worker["workerid"].removeprefix("gw"))
        import_share(session.config.args, number, worker["workercount"])


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a test with binary data by its argument: all processes must use the same name, and gzip data contain the
    time."""
    is_binary = isinstance(val, bytes) and not val.decode("latin-1").isprintable()
    return argname if is_binary else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow or fast tests as the options request; multiply the time limits by the patience."""
    # a bare GPU machine has no plug-in for time limits, and pytest warns of the mark
    for item in items if config.pluginmanager.hasplugin("timeout") else ():
        limit = item.get_closest_marker("timeout")
        # In front, because the first mark of a test takes precedence.
        item.add_marker(pytest.mark.timeout((limit.args[0] if limit else TIMEOUT_S) * PATIENCE), append=False)
    if config.getoption("--slow") != "with":
        quick, slow = quick_and_slow(items)
        chosen, left_out = (quick, slow) if config.getoption("--slow") == "without" else (slow, quick)
        items[:] = chosen
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Start garbage collection; objects that exist now are frozen, so collections skip them."""
    # pytest adds the directory of a test again after that of another test; child processes search all of them for each
    # module.
    sys.path[:] = dict.fromkeys(sys.path)
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter exit as usual: extensions print a warning for each object that outlives them."""
    # At exit, because pytest collects garbage several times before that, and each collection would traverse all frozen
    # objects.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Print at the end which tests were skipped because their data is not part of the repository."""
    yield
    if absent := absent_data(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("NOT TESTED", red=True, bold=True)
        for line in absent:
            terminalreporter.line(line, red=True)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The pool of rank processes that all distributed tests share. Processes start at first use."""
    with RankPool(size=8) as pool:
        yield pool


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """The etcd that all tests share which do not disturb it; each test has its own keys. It starts at first use."""
    # Here, because a bare GPU machine lacks some of the imported packages.
    from tests.helpers.etcd_server import EtcdServers

    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


@pytest.fixture
def client(etcd: EtcdServers) -> Iterator[EtcdClient]:
    from megatrain_job.coordination.client import EtcdClient
    from megatrain_job.coordination.settings import EtcdSettings

    with EtcdClient(EtcdSettings.of(etcd.urls)) as one:
        yield one


@pytest.fixture
def package_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the import path during one test: packages written there replace NVIDIA's packages."""
    root = tmp_path / "packages"
    root.mkdir()
    for name in _backend_modules():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(root)
    yield root
    for name in _backend_modules():
        del sys.modules[name]


def _backend_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in backend_packages.NAMES]
