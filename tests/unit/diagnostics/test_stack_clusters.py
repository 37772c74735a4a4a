"""Stacks of many ranks: normalized, clustered, and the smallest common group of the outliers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatrain import comm
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.stack_clusters import (
    cluster,
    find_outliers,
    is_waiting,
    newest_main_stacks,
    normalized,
    smallest_group,
)
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Stacks
from tests.helpers.table_rows import table_rows
from tests.helpers.work import assert_grows_linearly

OUTER = [
    "/opt/lib/runpy.py:198 _run",
    "/opt/job/megatrain/training/step_loop.py:{0} train",
    "/opt/job/megatrain/training/step.py:58 train_step",
]
WAIT = "\n".join([*OUTER, "/site/megatrain/comm/group.py:44 wait", "/site/megatrain/comm/group.py:{0} finish"])
LOADER = "\n".join([*OUTER, "/opt/job/megatrain/data/indexed.py:{0} read"])
DEEP = "\n".join(
    [
        *OUTER,
        *(f"/opt/job/megatrain/model/block.py:{n} forward_{n}" for n in range(20)),
        "/opt/job/megatrain/comm/group.py:{0} finish",
    ]
)


def roster(layout: Layout, per_host: int = 8) -> Roster:
    return Roster(1, layout, {rank: f"host-{rank // per_host}" for rank in range(layout.world_size)}, {})


def test_stacks_that_differ_only_in_numbers_are_the_same() -> None:
    assert normalized(WAIT.format(3)) == normalized(WAIT.format(4))
    assert normalized("/a/b/c/d.py:7 f")[0] == "c/d.py f"
    assert normalized("no answer within 2 s, process is asleep (S) in wait_17") == normalized(
        "no answer within 2 s, process is asleep (S) in wait_18"
    )
    assert normalized("") == ()


def test_rank_that_does_not_wait_is_the_outlier() -> None:
    layout = Layout(tp_size=2, pp_size=2, dp_size=4)
    stacks = {rank: WAIT.format(rank) for rank in range(16)} | {9: LOADER.format(1)}
    found = find_outliers(stacks, roster(layout))

    assert [(len(one.ranks), one.is_waiting) for one in found.clusters] == [(15, True), (1, False)]
    assert found.outliers == (9,)
    assert found.shared is not None
    assert (found.shared.kind, found.shared.ranks) == ("rank", (9,))


def test_the_smallest_group_that_holds_all_outliers() -> None:
    ranks = roster(Layout(tp_size=2, pp_size=2, dp_size=4), per_host=4)
    for odd, kind, num_ranks in (
        ((0, 1), "tp", 2),
        ((0, 8), "pp", 2),
        ((0, 2), "host", 4),
        ((0, 6), "dp", 4),
        ((0, 3), "host", 4),
        ((0, 7), "stage", 8),
        ((0, 9), "replica", 4),
    ):
        found = smallest_group(odd, ranks)
        assert found is not None, odd
        assert (found.kind, len(found.ranks)) == (kind, num_ranks), odd
        assert set(odd) <= set(found.ranks)
    assert smallest_group((0, 15), ranks) is None, "only the group of the whole job has both"


def test_a_rank_without_a_dump_is_an_outlier() -> None:
    found = find_outliers({rank: WAIT.format(rank) for rank in range(4) if rank != 2}, roster(Layout(dp_size=4)))
    assert (found.outliers, found.undumped) == ((2,), (2,))
    assert find_outliers({}, roster(Layout(dp_size=4))).outliers == ()
    assert find_outliers({0: WAIT}, roster(Layout(dp_size=4)), [0]).outliers == ()


def test_small_groups_are_outliers_where_no_rank_waits() -> None:
    stacks = dict.fromkeys(range(6), LOADER) | {6: "a.py:1 other"}
    assert find_outliers(stacks, roster(Layout(dp_size=7))).outliers == (6,)
    halves = dict.fromkeys(range(3), LOADER) | dict.fromkeys(range(3, 6), "a.py:1 other")
    assert find_outliers(halves, roster(Layout(dp_size=6))).outliers == ()


def test_waits_of_many_kinds_are_still_waits() -> None:
    # each stage waits at another place, so no cluster is large; ranks that do not wait are still the outliers
    stacks = {rank: WAIT.format(1).replace("step_loop.py", f"stage_{'abcd'[rank // 2]}.py") for rank in range(8)}
    stacks |= {6: LOADER.format(1), 7: LOADER.format(1)}
    found = find_outliers(stacks, roster(Layout(pp_size=4, dp_size=2)))
    assert len(found.clusters) == 4
    assert found.outliers == (6, 7)
    assert found.shared is not None
    assert found.shared.ranks == (6, 7)


def test_similar_waits_are_one_group_apart_from_work() -> None:
    wait = DEEP.format(7)
    deeper = wait.replace("forward_7", "forward_more")
    work = wait.replace("comm/group.py:7 finish", "model/mlp.py:9 forward")
    found = cluster({0: wait, 1: wait, 2: deeper, 3: work})
    assert [one.ranks for one in found] == [(0, 1, 2), (3,)]


def many_stacks(layout: Layout) -> dict[int, str]:
    return {rank: WAIT.format(rank % 900) for rank in range(layout.world_size)} | {400: LOADER}


def test_thousands_of_ranks_are_grouped() -> None:
    layout = Layout(tp_size=8, pp_size=8, dp_size=192)
    assert find_outliers(many_stacks(layout), roster(layout)).outliers == (400,)


def test_twice_as_many_ranks_are_twice_the_work() -> None:
    def search(dp_size: int) -> Callable[[], object]:
        layout = Layout(tp_size=8, pp_size=4, dp_size=dp_size)
        stacks, ranks = many_stacks(layout), roster(layout)
        return lambda: find_outliers(stacks, ranks)

    assert_grows_linearly(search, 32)


def test_the_newest_dump_of_the_main_thread_counts() -> None:
    rows = [
        (1, 0, 10, "MainThread", "old"),
        (1, 0, 20, "Thread 0x1", "loader"),
        (1, 0, 20, "MainThread", "new"),
        (2, 0, 90, "MainThread", "of another round"),
        (1, 3, 5, "Thread 0x1", "the only one"),
    ]
    columns = zip(("round", "rank", "at_ns", "thread", "stack"), zip(*rows, strict=True), strict=True)
    stacks = table_rows(Stacks, dict(columns))
    assert newest_main_stacks(stacks, 1) == {0: "new", 3: "the only one"}


def test_a_wait_in_any_module_of_comm_is_a_wait_for_other_ranks() -> None:
    modules = sorted(path.name for path in Path(comm.__file__).parent.glob("[a-z]*.py"))
    assert "lanes.py" in modules
    for module in modules:
        assert is_waiting(("training/step_loop.py train", f"comm/{module} wait", "python3.11/threading.py wait"))
