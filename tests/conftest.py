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


# tests and their ranks share the cores, and what they compute is small; here, because torch reads it when it is loaded,
# which the conftest of a directory does before pytest_configure
os.environ.setdefault("OMP_NUM_THREADS", "1")

with suppress(ModuleNotFoundError):  # a bare GPU machine has torch and pytest
    import hypothesis
    from hypothesis.internal.conjecture import providers

    # else each process parses all imported files for their constants, and a change of any file changes the examples
    providers._get_local_constants = lambda: providers._local_constants
    # how long one example takes is the machine's, which others use too
    hypothesis.settings.register_profile("megatrain", deadline=None)
    hypothesis.settings.load_profile("megatrain")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark "slow", and take signals that are ignored in the background or under nohup: tests send them."""
    # here, because a bare GPU machine ignores pyproject.toml
    config.addinivalue_line(
        "markers", "slow(kept): left out by make test, but for the cases of these ids; make test-all runs it"
    )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            # still nothing to this process, but what it starts is born with the usual disposition
            signal.signal(number, lambda *_: None)
    if config.getoption("--kernels") != "reference":
        from tests.helpers.kernels import use_kernels

        use_kernels(config.getoption("--kernels"))
    # in xdist's processes, the file is written by the one that started them
    record = None if hasattr(config, "workerinput") else config.getoption("--record")
    config.pluginmanager.register(RunRecorder(Path(record) if record else None))
    # beside other tests, a writer or streamer of low priority would hardly run; only tests of the priority unset this
    os.environ.setdefault(NICENESS_VARIABLE, "0")
    # until all is collected: imported modules and thousands of tests, of which nothing is garbage
    gc.disable()


# a bare GPU machine has torch and pytest, but not xdist
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return a process more than there are cores, for `-n auto`: many tests wait for a server."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal the tests to processes by what they share."""
    from tests.helpers.side_by_side import SharedFixtureScheduling

    return SharedFixtureScheduling(config, log)


def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the test modules first, in a process of several: see shared_compilation."""
    if worker := getattr(session.config, "workerinput", None):
        number = int(worker["workerid"].removeprefix("gw"))
        import_share(session.config.args, number, worker["workercount"])


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a test of binary data by its argument: processes must agree on its name, and gzip's data hold the time."""
    is_binary = isinstance(val, bytes) and not val.decode("latin-1").isprintable()
    return argname if is_binary else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, or what is not, where that is asked for; multiply the time limits by the patience."""
    # a bare GPU machine has no plug-in for time limits, and pytest warns of the mark
    for item in items if config.pluginmanager.hasplugin("timeout") else ():
        limit = item.get_closest_marker("timeout")
        # in front: the first mark of a test counts
        item.add_marker(pytest.mark.timeout((limit.args[0] if limit else TIMEOUT_S) * PATIENCE), append=False)
    if config.getoption("--slow") != "with":
        quick, slow = quick_and_slow(items)
        chosen, left_out = (quick, slow) if config.getoption("--slow") == "without" else (slow, quick)
        items[:] = chosen
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Collect garbage from here on; what is there already stays, and need not be walked each time."""
    # pytest adds the directory of a test again after that of another; child processes search them all for each module
    sys.path[:] = dict.fromkeys(sys.path)
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter exit as usual: extensions print a warning for each object that outlives them."""
    # at exit, because pytest collects garbage several times before, and each time it would walk all that is frozen
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Say last, and loudly, what was not tested because its data is not part of the repository."""
    yield
    if absent := absent_data(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("NOT TESTED", red=True, bold=True)
        for line in absent:
            terminalreporter.line(line, red=True)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The one pool of rank processes that all distributed tests share. Processes start when first needed."""
    with RankPool(size=8) as pool:
        yield pool


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """The one etcd of all tests that do it no harm; each has keys of its own in it. It starts when first needed."""
    # here, because a bare GPU machine has not all that it imports
    from tests.helpers.etcd_server import EtcdServers

    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


@pytest.fixture
def package_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place that modules are imported from during one test: what is put there stands in for NVIDIA's packages."""
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
