"""The data loader of a host as a process: its ranks, SIGKILL, errors, and the remains of an earlier round."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.directory import create_arena
from megatrain.arena.locks import wake
from megatrain.contracts.errors import CheckpointError, DataError
from megatrain.contracts.layout import Layout
from megatrain.data.loader import host_loader
from megatrain.data.loader.host_loader import HostLoader, RingLocation
from megatrain.data.loader.plan import LoaderPlan
from megatrain.data.loader.ring import create_ring
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.loader_report import LoaderReport
from tests.helpers.host_loading import Corpus, content, corpus, read_alone, steps
from tests.helpers.processes import descendants, is_running, words_of
from tests.helpers.small_disk import small_disk
from tests.helpers.waiting import wait_until

LAYOUT = Layout(tp_size=2, pp_size=2)
RANKS = range(4)
CHECKS_WITHOUT_A_SIGN = 30
"""After as many checks of a rank, a loader that a test has stopped continues, so that the test ends."""


@pytest.fixture
def place(tmp_path: Path) -> RingLocation:
    return RingLocation(create_arena(tmp_path / "arena"), 3, tmp_path / "logs" / "data-loader.log")


def loaders(place: RingLocation) -> list[int]:
    """Return the running loaders of an arena."""
    wanted = str(place.arena.root).encode()
    return [pid for pid in descendants(os.getpid()) if wanted in words_of(pid) and is_running(pid)]


def kill_loader(place: RingLocation) -> None:
    (pid,) = loaders(place)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), "the end of the loader")


def opened(place: RingLocation, plan: LoaderPlan, stack: ExitStack) -> list[HostLoader]:
    place.create(plan)
    ranks = [stack.enter_context(HostLoader(place, plan, reader, ("web",))) for reader in range(plan.num_readers)]
    place.remove_ring()
    return ranks


def alone(data: Corpus, plan: LoaderPlan, layout: Layout, ranks: Sequence[int]) -> list[list[Any]]:
    return [[content(batch) for batch in read_alone(data.reader, plan.steps, layout, rank)] for rank in ranks]


def test_ranks_of_a_host_read_through_one_process(tmp_path: Path, place: RingLocation) -> None:
    data = corpus(tmp_path)
    plan = data.plan(LAYOUT, RANKS, steps(LAYOUT, 6))
    with ExitStack() as stack:
        ranks = opened(place, plan, stack)
        found = [[content(rank.next())] for rank in ranks]
        assert len(loaders(place)) == 1
        for _ in range(5):
            for rank, batches in zip(ranks, found, strict=True):
                batches.append(content(rank.next()))
        assert found == alone(data, plan, LAYOUT, RANKS)
        for rank in ranks:
            with pytest.raises(StopIteration):
                rank.next()
    assert loaders(place) == []
    with pytest.raises(RuntimeError, match="the data loader is closed"):
        ranks[0].next()
    assert list(place.arena.root.iterdir()) == []


def test_the_loader_loads_no_torch(tmp_path: Path, place: RingLocation) -> None:
    """The libraries that a loader has mapped after its first reads."""
    plan = corpus(tmp_path).plan(LAYOUT, RANKS, steps(LAYOUT, 8))
    with ExitStack() as stack:
        opened(place, plan, stack)[0].next()
        (pid,) = loaders(place)
        libraries = Path(f"/proc/{pid}/maps").read_text()
    assert "/numpy/" in libraries
    assert "/torch/" not in libraries


def test_peers_map_the_same_pages(tmp_path: Path, place: RingLocation) -> None:
    plan = corpus(tmp_path).plan(LAYOUT, RANKS, steps(LAYOUT, 2))
    with ExitStack() as stack:
        first, second = (rank.next() for rank in opened(place, plan, stack)[:2])
        before = int(second.microbatches[0].tokens_SB[0, 0])
        first.microbatches[0].tokens_SB[0, 0] += 1
        assert second.microbatches[0].tokens_SB[0, 0] == before + 1


def test_a_killed_loader_is_restarted_with_the_same_stream(tmp_path: Path, place: RingLocation) -> None:
    data, layout = corpus(tmp_path), Layout(dp_size=2)
    plan = data.plan(layout, (0, 1), steps(layout, 8))
    with ExitStack() as stack:
        ranks = opened(place, plan, stack)
        found: list[list[Any]] = [[], []]
        # No batch would remain in memory if the ranks were killed too.
        assert max(file.stat().st_size for file in place.arena.root.iterdir()) < mmap.PAGESIZE
        for step in range(8):
            for rank, batches in zip(ranks, found, strict=True):
                batches.append(content(rank.next()))
            if step in (1, 3):
                kill_loader(place)
        assert found == alone(data, plan, layout, (0, 1))
    assert loaders(place) == []


def test_rank_that_waits_for_its_loader_shows_it(
    tmp_path: Path, place: RingLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = corpus(tmp_path).plan(Layout(), [0], steps(Layout(), 8))
    shown: list[int] = []
    with ExitStack() as stack:
        (rank,) = opened(place, plan, stack)
        rank.next()
        (pid,) = loaders(place)
        os.kill(pid, signal.SIGSTOP)
        checks = count(1)

        def counted_wake(path: Path) -> bool:
            if next(checks) == CHECKS_WITHOUT_A_SIGN:
                os.kill(pid, signal.SIGCONT)
            return wake(path)

        monkeypatch.setattr(host_loader, "wake", counted_wake)
        for step in range(1, 8):

            def show(step: int = step) -> None:
                shown.append(step)
                os.kill(pid, signal.SIGCONT)

            rank.next(show)
    assert shown, "the rank waited without a sign of life"
    # the stopped loader has filled at most the slots of the ring
    assert 1 <= shown[0] <= plan.depth + 1


def test_reports_name_each_read_of_a_replica_once(tmp_path: Path, place: RingLocation) -> None:
    plan = corpus(tmp_path).plan(LAYOUT, RANKS, steps(LAYOUT, 6))
    with ExitStack() as stack:
        ranks, starts = opened(place, plan, stack), []
        reports: list[list[LoaderReport]] = [[] for _ in ranks]
        for step in range(6):
            if step == 3:
                kill_loader(place)
            for rank, found in zip(ranks, reports, strict=True):
                loader = rank.next().loader
                assert loader is not None
                found.append(loader)
            starts.append(reports[0][-1].num_starts)
    reads = [read for report in reports[0] for read in report.reads]
    assert len({read.start_ns for read in reads}) == len(reads) == 6
    assert (starts[0], starts[-1]) == (1, 2)
    assert {report.num_ready for found in reports for report in found} <= set(range(plan.depth + 1))
    assert all(report.reads == () and report.num_starts is None for found in reports[1:] for report in found)


def test_first_rank_reports_the_cache_of_all_loaders(tmp_path: Path, place: RingLocation) -> None:
    """A restarted loader continues the sums, although it counts from 0."""
    plan = corpus(tmp_path, is_remote=True).plan(LAYOUT, RANKS, steps(LAYOUT, 6))
    with ExitStack() as stack:
        ranks, found = opened(place, plan, stack), []
        for step in range(6):
            if step == 3:
                kill_loader(place)
            uses = [rank.next().cache_use for rank in ranks]
            assert uses[1:] == [None] * (len(ranks) - 1)
            found.append(uses[0])
    sums = [use for use in found if use is not None]
    assert len(sums) == 6
    assert sums == sorted(sums), "sums never become smaller"
    assert sums[-1].hit_bytes > sums[0].hit_bytes > 0


def test_the_error_of_a_read_is_raised_by_each_rank(tmp_path: Path, place: RingLocation) -> None:
    data = corpus(tmp_path, vocab_size=80)
    plan = data.plan(LAYOUT, RANKS, steps(LAYOUT, 2))
    with pytest.raises(DataError) as expected:
        list(read_alone(data.reader, plan.steps, LAYOUT, 0))
    with ExitStack() as stack:
        for rank in opened(place, plan, stack):
            for _ in range(2):
                with pytest.raises(DataError) as found:
                    rank.next()
                assert str(found.value) == str(expected.value)


@pytest.mark.slow
def test_a_loader_that_always_dies_ends_the_rank(tmp_path: Path, place: RingLocation) -> None:
    plan = corpus(tmp_path).plan(Layout(), [0], steps(Layout(), 2))
    place.create(plan)
    place.arena.loader_plan(place.round).write_text("{}")
    with (
        pytest.raises(DataError, match=r"ended 5 times before it had read step 0 of this round; see .*data-loader.log"),
        HostLoader(place, plan, 0, ("web",)) as rank,
    ):
        rank.next()
    assert place.log.read_text().count("schema_version=None") == 5


def test_rings_of_earlier_rounds_are_removed(tmp_path: Path, place: RingLocation) -> None:
    plan = corpus(tmp_path).plan(Layout(), [0], steps(Layout(), 2))
    earlier = RingLocation(place.arena, 2, place.log)
    earlier.create(plan)
    stale = set(place.arena.root.iterdir())
    newer = place.arena.loader_ring(4)
    newer.write_bytes(b"the ring of a round that has superseded this one")
    slot = place.arena.slot(0, 0)
    slot.write_bytes(b"a snapshot")
    place.create(plan)
    assert not stale & set(place.arena.root.iterdir())
    assert slot.exists()
    assert newer.exists()
    with pytest.raises(CheckpointError, match=r"loader-r000002\.ring: the ring cannot be opened"):
        HostLoader(earlier, plan, 0, ("web",))


def test_a_start_that_fails_leaves_no_file(
    tmp_path: Path, place: RingLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise CheckpointError(f"{path.name}: the FIFO cannot be created")

    monkeypatch.setattr(host_loader, "create_wake", refuse)
    with pytest.raises(CheckpointError, match=r"loader-r000003\.wake: the FIFO cannot be created"):
        place.create(corpus(tmp_path).plan(Layout(), [0], steps(Layout(), 2)))
    assert list(place.arena.root.iterdir()) == []


def test_a_ring_of_another_plan_is_refused(tmp_path: Path, place: RingLocation) -> None:
    data = corpus(tmp_path)
    place.create(data.plan(Layout(), [0], steps(Layout(), 2)))
    with pytest.raises(CheckpointError, match=r"the ring of the data loader has \d+ bytes, expected \d+"):
        HostLoader(place, data.plan(Layout(), [0], steps(Layout(), 2), prefetch=3), 0, ("web",))


def test_too_little_shared_memory_is_one_sentence(tmp_path: Path) -> None:
    plan = corpus(tmp_path).plan(LAYOUT, RANKS, steps(LAYOUT, 2))
    with small_disk(tmp_path / "shm", 64 << 20) as disk:
        place = RingLocation(create_arena(disk.seen / "arena"), 3, tmp_path / "log")
        with pytest.raises(CheckpointError, match=r"for 2 steps \(data.prefetch=1\) of 1 replica, and 67.1 MB must"):
            place.create(plan)
        large = RingLayout(2, 1, 1, 64, 1, 1 << 15, has_document_mask=False)
        with pytest.raises(CheckpointError, match=r"no space for a ring of 67.* bytes; use a smaller data.prefetch"):
            create_ring(place.arena.loader_ring(3), large)
        assert list(place.arena.root.iterdir()) == []
