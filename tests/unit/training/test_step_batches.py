"""What delivers the batches of a run, and that a host which cannot share a ring is refused before the first step."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.arena.directory import create_arena
from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError
from megatrain.data.loader.host_loader import HostLoader
from megatrain.data.prefetch import Prefetcher
from megatrain.training.step_batches import open_batches
from megatrain.training.training_data import open_reader, sample_stream
from tests.helpers.host_loading import content
from tests.helpers.mixed_data import write_mixture
from tests.helpers.single_rank import single_rank_mesh
from tests.helpers.training_case import make_config

NUM_STEPS = 3


@pytest.fixture
def open_all(tmp_path: Path) -> Callable[[str], Prefetcher | HostLoader]:
    """Opens the batches of a run of one rank by data.loader; its arena is tmp_path / "arena"."""
    tables = write_mixture(tmp_path)
    arena = create_arena(tmp_path / "arena")

    def open_with(loader: str) -> Prefetcher | HostLoader:
        config: Config = make_config(tables, {"data": {"loader": loader}, "job": {"run_directory": str(tmp_path)}})
        mesh, reader = single_rank_mesh(), open_reader(config)
        checkpoints: Any = SimpleNamespace(
            attachment=SimpleNamespace(arena=arena, ranks_of_host=lambda rank: (rank,)),
            round=1,
            stream=sample_stream(config, reader, ()),
        )
        sequence = config.steps(mesh.layout, 0, NUM_STEPS)
        return open_batches(config, mesh, reader, sequence, checkpoints, lambda line: None)

    return open_with


def test_host_loader_and_thread_deliver_the_same(
    open_all: Callable[[str], Prefetcher | HostLoader], tmp_path: Path
) -> None:
    found = {}
    for loader, kind in (("thread", Prefetcher), ("host", HostLoader)):
        with open_all(loader) as batches:
            assert isinstance(batches, kind)
            has_files = any((tmp_path / "arena").iterdir())
            assert has_files == (loader == "host")
            assert not list((tmp_path / "arena").glob("*.ring"))
            found[loader] = [content(batches.next()) for _ in range(NUM_STEPS)]
    assert found["host"] == found["thread"]
    assert not list((tmp_path / "arena").iterdir())


def test_host_loader_refuses_unordered_stores(
    open_all: Callable[[str], Prefetcher | HostLoader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r'this host is aarch64, .*; use data.loader="thread"'):
        open_all("host")
    assert not list((tmp_path / "arena").iterdir())
    open_all("thread").close()
