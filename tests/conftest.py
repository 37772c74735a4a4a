"""Fixtures for the whole suite."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import backend_packages
from tests.helpers.rank_pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=("reference", "emulated", "cuda"),
        default="reference",
        help="what carries out the operators of megatrain.ops",
    )


with suppress(ModuleNotFoundError):  # a bare GPU machine has torch and pytest
    import hypothesis

    # how long one example takes is the machine's, which others use too
    hypothesis.settings.register_profile("megatrain", deadline=None)
    hypothesis.settings.load_profile("megatrain")


def pytest_configure(config: pytest.Config) -> None:
    """Take signals that are ignored where the suite runs in the background, or under nohup: tests send them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            # still nothing to this process, but what it starts is born with the usual disposition
            signal.signal(number, lambda *_: None)
    if config.getoption("--kernels") != "reference":
        from tests.helpers.kernels import use_kernels

        use_kernels(config.getoption("--kernels"))
    # until all is collected: imported modules and thousands of tests, of which nothing is garbage
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on; what is there already stays, and need not be walked each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The one pool of rank processes that all distributed tests share. Processes start when first needed."""
    with RankPool(size=8) as pool:
        yield pool


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
