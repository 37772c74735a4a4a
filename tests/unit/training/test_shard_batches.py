"""Batches with pictures from shards, by both loaders: producers of the host or at addresses, killed or failing."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.arena.directory import create_arena
from megatrain.cli import main
from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.contracts.black_box.operations import OF_PRODUCERS
from megatrain.contracts.errors import DataError, UnreachableError
from megatrain.contracts.layout import Layout
from megatrain.data.loader.host_loader import HostLoader
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.pictures.picture_source import Producers
from megatrain.data.pictures.producers import local_producers, producer_command
from megatrain.data.prefetch import Prefetcher
from megatrain.formatting import bytes_text
from megatrain.peers.link import SECRET_BYTES
from megatrain.training import picture_data
from megatrain.training.picture_data import find_decoder
from megatrain.training.read_records import values_of_reads
from megatrain.training.step_batches import open_batches
from megatrain.training.training_data import all_shards, open_reader, sample_stream
from tests.helpers.host_loading import content
from tests.helpers.picture_shards import shard_tables, write_shards
from tests.helpers.processes import descendants, is_running, words_of
from tests.helpers.single_rank import single_rank_mesh
from tests.helpers.thread_starts import no_thread_starts
from tests.helpers.training_case import make_config

NUM_STEPS = 5
LOADERS = ("thread", "host")
Batches = Prefetcher | HostLoader


def config_of(shards: Path, root: Path, loader: str, **pictures: str) -> Config:
    tables = shard_tables(shards)
    return make_config(
        tables,
        {
            "data": {**tables["data"], "loader": loader, "bad_samples": "replace"},
            "pictures": {"shards": str(shards), "decoder": "dali"} | (pictures or tables["pictures"]),
            "job": {"run_directory": str(root)},
        },
    )


@contextmanager
def opened(config: Config, root: Path) -> Iterator[Batches]:
    """Open the batches of a run of one rank, in a new arena."""
    mesh, reader = single_rank_mesh(), open_reader(config)
    find_decoder(config, all_shards(reader, ()), has_begun=False)
    arena = create_arena(root / f"arena-{config.data.loader}")
    attachment = SimpleNamespace(arena=arena, ranks_of_host=lambda rank: (rank,))
    checkpoints: Any = SimpleNamespace(attachment=attachment, round=1, stream=sample_stream(config, reader, ()))
    with ExitStack() as closing:
        sequence = config.steps(mesh.layout, 0, NUM_STEPS)
        yield open_batches(config, mesh, reader, sequence, checkpoints, print, closing)
    assert not list(arena.root.iterdir())


def producers_of(shards: Path) -> list[int]:
    """Return the running producers of some shards that this process has started."""
    wanted = str(shards).encode()
    return [pid for pid in descendants(os.getpid()) if wanted in words_of(pid) and is_running(pid)]


def own_sockets() -> set[str]:
    """Return the open sockets of this process."""
    found = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {name for name in map(os.readlink, filter(os.path.lexists, found)) if name.startswith("socket:")}


def delivered(config: Config, root: Path, after_step: Callable[[int], None] = lambda step: None) -> list[Any]:
    with opened(config, root) as batches:
        found = []
        for step in range(NUM_STEPS):
            found.append(content(batches.next()))
            after_step(step)
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data") / "shards", 2, 16, bad=(5, 21))


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    root = tmp_path_factory.mktemp("undisturbed")
    found = delivered(config_of(shards, root, "thread"), root)
    bad = {number for *_, bad in found for number, _, _ in bad}
    assert len(bad) == 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_killed_producers_change_no_batch(loader: str, shards: Path, undisturbed: list[Any], tmp_path: Path) -> None:
    killed = []

    def kill(step: int) -> None:
        if step in (0, 2):
            for pid in producers_of(shards):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    config = config_of(shards, tmp_path, loader)
    assert delivered(config, tmp_path, kill) == undisturbed
    assert killed
    assert producers_of(shards) == []


def test_host_loader_delivers_what_the_thread_does(shards: Path, undisturbed: list[Any], tmp_path: Path) -> None:
    assert delivered(config_of(shards, tmp_path, "host"), tmp_path) == undisturbed


@pytest.mark.parametrize("loader", LOADERS)
def test_values_of_steps_count_each_picture_once(loader: str, shards: Path, tmp_path: Path) -> None:
    with opened(config_of(shards, tmp_path, loader), tmp_path) as batches:
        found = [batches.next() for _ in range(NUM_STEPS)]
    values = [value for batch in found for value in values_of_reads(batch)]
    of_kind = [[value for found_kind, value in values if found_kind is kind] for kind in OF_PRODUCERS]
    pictures, answer_s, _, failures = of_kind
    assert sum(pictures) == sum(batch.global_batch_size for batch in found)
    assert all(seconds > 0 for seconds, count in zip(answer_s, pictures, strict=True) if count)
    assert sum(failures) == 0


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_running_producers_are_asked(loader: str, shards: Path, undisturbed: list[Any], tmp_path: Path) -> None:
    command = producer_command([shards], "pillow")
    with local_producers(command, 2, tmp_path / "logs", lambda text: None) as local:
        secret = tmp_path / "secret"
        secret.write_bytes(local.secret)
        secret.chmod(0o600)
        addresses = ", ".join(map(str, local.addresses))
        config = config_of(shards, tmp_path, loader, addresses=addresses, secret=str(secret))
        assert delivered(config, tmp_path) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_producers_that_fail_again_and_again_end_the_run(loader: str, tmp_path: Path) -> None:
    """Their index is damaged after the run has opened it, so no start of a producer can succeed."""
    own = write_shards(tmp_path / "shards")
    config = config_of(own, tmp_path, loader)
    mesh, reader = single_rank_mesh(), open_reader(config)
    find_decoder(config, all_shards(reader, ()), has_begun=False)
    arena = create_arena(tmp_path / "arena")
    attachment = SimpleNamespace(arena=arena, ranks_of_host=lambda rank: (rank,))
    checkpoints: Any = SimpleNamespace(attachment=attachment, round=1, stream=sample_stream(config, reader, ()))
    damaged = bytearray((own / "pictures.index").read_bytes())
    damaged[0] ^= 1
    (own / "copy").write_bytes(damaged)
    (own / "copy").replace(own / "pictures.index")
    with ExitStack() as closing, pytest.raises(DataError, match=r"pictures\.index: has magic"):
        sequence = config.steps(mesh.layout, 0, NUM_STEPS)
        open_batches(config, mesh, reader, sequence, checkpoints, print, closing).next()


@pytest.mark.parametrize("loader", LOADERS)
def test_start_is_refused_without_shard_or_secret(loader: str, shards: Path, tmp_path: Path) -> None:
    own = write_shards(tmp_path / "shards")
    (own / "shard-1.tar").unlink()
    with (
        pytest.raises(DataError, match=r"shard-1\.tar: the shard cannot be read"),
        opened(config_of(own, tmp_path, loader), tmp_path),
    ):
        raise AssertionError("the run began")
    assert not list((tmp_path / f"arena-{loader}").iterdir())
    config = config_of(shards, tmp_path, loader, addresses="127.0.0.1:9", secret=str(tmp_path / "no"))
    with pytest.raises(DataError, match=r"no: the secret cannot be read: No such file"):
        find_decoder(config, all_shards(open_reader(config), ()), has_begun=False)


@pytest.mark.parametrize("num_started", [0, 1])
def test_start_is_refused_at_a_thread_limit(num_started: int, shards: Path, tmp_path: Path) -> None:
    """The threads are the one that watches the only producer, and the one that waits for the end of all."""
    before = own_sockets()
    with (
        no_thread_starts(after=num_started),
        pytest.raises(
            DataError, match=r"could not be started: .*pids\.max\); use fewer of them \(pictures\.producers\)"
        ),
        opened(config_of(shards, tmp_path, "host"), tmp_path),
    ):
        raise AssertionError("the run began")
    assert not list((tmp_path / "arena-host").iterdir())
    assert producers_of(shards) == []
    assert own_sockets() <= before, "no listener stays open"


def test_wrong_addresses_end_a_run_that_has_not_begun(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(shards, tmp_path, "thread", addresses="127.0.0.1:9", secret=str(tmp_path / "secret"))
    absent = Producers(config.pictures.peers, bytes(SECRET_BYTES), patience_s=0.0)
    monkeypatch.setattr(picture_data, "named_producers", lambda config: absent)
    with pytest.raises(DataError, match=r"addresses='127\.0\.0\.1:9': no producer .* The run has not begun"):
        find_decoder(config, all_shards(open_reader(config), ()), has_begun=False)
    with pytest.raises(UnreachableError, match="no producer of pictures has answered"):
        find_decoder(config, all_shards(open_reader(config), ()), has_begun=True)


def test_dry_run_states_pictures_and_ring(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the index, as on the machine of a user, the data are not checked."""
    monkeypatch.setattr("megatrain.planning.plan_text.dry_run", lambda _: "")  # the memory of ranks takes seconds
    config, file = config_of(shards, tmp_path, "host"), tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert main(["config", "check", str(file), "--dry-run", "--world-size=1"]) == 0
    found = capsys.readouterr().out
    ring = RingLayout.of_host(config, Layout(), [0])
    assert ring.picture_shape == (4, 432)
    assert f"into a ring of {bytes_text(ring.num_bytes)} for" in found
    assert re.search(r"source +pictures +samples read.*\n +pictures\.shards +32 ", found)
    absent = config_of(tmp_path, tmp_path, "host")
    file.write_text(to_toml(replace(absent, data=config.data)))
    assert main(["config", "check", str(file), "--dry-run", "--world-size=1"]) == 0
    assert "Training data: not checked, because they cannot be read here: " in capsys.readouterr().out
