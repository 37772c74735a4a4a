"""The source of a run's batches; a host that cannot share a ring is refused before the first step."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.arena.directory import create_arena
from megatrain.cli import main
from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.contracts.errors import ConfigError
from megatrain.data import side_by_side
from megatrain.data.loader.host_loader import HostLoader
from megatrain.data.prefetch import Prefetcher
from megatrain.formatting import count_text
from megatrain.training.step_batches import open_batches
from megatrain.training.training_data import open_reader, sample_stream
from tests.helpers.host_loading import content
from tests.helpers.mixed_data import write_mixture
from tests.helpers.single_rank import single_rank_mesh
from tests.helpers.training_case import make_config

NUM_STEPS = 3
OpenAll = Callable[[str, ExitStack], Prefetcher | HostLoader]


def config_in(directory: Path, loader: str) -> Config:
    tables = write_mixture(directory)
    return make_config(tables, {"data": {"loader": loader}, "job": {"run_directory": str(directory)}})


@pytest.fixture
def open_all(tmp_path: Path) -> OpenAll:
    """Opens the batches of a run of one rank by data.loader; its arena is tmp_path / "arena"."""
    arena = create_arena(tmp_path / "arena")

    def open_with(loader: str, closing: ExitStack) -> Prefetcher | HostLoader:
        config = config_in(tmp_path, loader)
        mesh, reader = single_rank_mesh(), open_reader(config)
        checkpoints: Any = SimpleNamespace(
            attachment=SimpleNamespace(arena=arena, ranks_of_host=lambda rank: (rank,)),
            round=1,
            stream=sample_stream(config, reader, ()),
        )
        sequence = config.steps(mesh.layout, 0, NUM_STEPS)
        return open_batches(config, mesh, reader, sequence, checkpoints, print, closing)

    return open_with


def test_local_sources_open_in_as_many_threads_as_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    class CountedThreads(ThreadPoolExecutor):
        def __init__(self, max_workers: int, prefix: str) -> None:
            numbers.append(max_workers)
            super().__init__(max_workers, prefix)

    monkeypatch.setattr(side_by_side, "ThreadPoolExecutor", CountedThreads)
    for num_cores in (1, 2, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, num_cores=num_cores: set(range(num_cores)))
        open_reader(config_in(tmp_path, "thread"))
    assert numbers == [1, 2, 2], "there are two sources"


def test_host_loader_and_thread_deliver_the_same(open_all: OpenAll, tmp_path: Path) -> None:
    found = {}
    for loader, kind in (("thread", Prefetcher), ("host", HostLoader)):
        with ExitStack() as closing:
            batches = open_all(loader, closing)
            assert isinstance(batches, kind)
            has_files = any((tmp_path / "arena").iterdir())
            assert has_files == (loader == "host")
            assert not list((tmp_path / "arena").glob("*.ring"))
            found[loader] = [content(batches.next()) for _ in range(NUM_STEPS)]
    assert found["host"] == found["thread"]
    assert not list((tmp_path / "arena").iterdir())


def test_dry_run_states_the_ring_that_a_run_makes(
    open_all: OpenAll,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatrain.planning.plan_text.dry_run", lambda _: "")  # the memory of ranks takes seconds
    with ExitStack() as closing:
        open_all("host", closing)
    made = re.search(r"\(1 replica\), into (.*) of ", capsys.readouterr().out)
    assert made is not None
    file, prefetch = tmp_path / "config.toml", config_in(tmp_path, "host").data.prefetch
    slots = f"for {count_text(prefetch + 1, 'step')} (data.prefetch={prefetch})"
    for loader, world_size, expected in (
        ("thread", 1, []),
        ("host", 1, [f"rank 0 reads 1 replica (0), into a ring of {made[1]} {slots}"]),
        ("host", 4, ["ranks 0-3 reads 4 replicas (0-3), into a ring of "]),
    ):
        file.write_text(to_toml(config_in(tmp_path, loader)))
        assert main(["config", "check", str(file), "--dry-run", f"--world-size={world_size}"]) == 0
        found = [line.partition("with ")[2] for line in capsys.readouterr().out.splitlines() if "data.loader" in line]
        assert [line.startswith(start) for line, start in zip(found, expected, strict=True)] == [True] * len(expected)


def test_host_loader_refuses_unordered_stores(
    open_all: OpenAll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r'this host is aarch64, .*; use data.loader="thread"'):
        open_all("host", ExitStack())
    assert not list((tmp_path / "arena").iterdir())
    with ExitStack() as closing:
        open_all("thread", closing)
