"""The logs of several ranks: where the failure began."""

from __future__ import annotations

from itertools import product

from megatrain_job.failures.bundle import classify_bundle

TIMEOUT = (
    "[rank{0}]:[E101 01:02:03.4 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600011 milliseconds before timing out.\n"
)
ENQUEUED = "[rank{0}]:[E] [PG ID 0 PG GUID 0 Rank {0}] last enqueued work: {1}, last completed work: {2}\n"
LOST = "[rank{0}]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.1.7]:23411\n"
CLOSING = "W0302 multiprocessing/api.py:900] Sending process 77 closing signal SIGTERM\n"
REFUSED = (
    "node{0}:1:2 [0] misc/socket.cc NCCL WARN socketStartConnect: Connect to 10.0.3.4<41> failed : Connection refused\n"
)


CAUSES = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", "cuda_oom", "stop_user"),
    ("KeyError: 'x'\n", "user_code", "stop_user"),
    (
        "RuntimeError: CUDA error: an illegal memory access was encountered\n",
        "cuda_illegal_access",
        "restart_then_check",
    ),
    ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n", "gpu_hardware", "evict_host"),
    ("train.sh: line 8: 10121 Killed                  python train.py\n", "host_oom", "stop_user"),
    ("Fatal Python error: Segmentation fault\n", "segfault", "restart_then_check"),
    ("OSError: [Errno 28] No space left on device\n", "storage", "retry_then_stop"),
]
"""The log of rank 2, its label and its action."""


def test_the_rank_with_a_cause_of_its_own_is_the_root() -> None:
    for others, (tail, label, action) in product((LOST, TIMEOUT, CLOSING, REFUSED), CAUSES):
        tails = {str(rank): others.format(rank, 9) for rank in range(4)} | {"2": tail}
        found = classify_bundle(tails)
        assert (found.root_rank, found.verdict.label, found.verdict.action) == ("2", label, action), tails
        assert not found.verdict.is_cascade, tails


def test_the_earliest_of_equal_causes_is_the_root() -> None:
    tails = {str(rank): f"2026-01-02 03:04:{20 - rank:02d},1 ERROR RuntimeError: boom\n" for rank in range(4)}

    assert classify_bundle(tails).root_rank == "3"


def test_rank_that_is_behind_is_the_root_of_a_hang() -> None:
    tails = {str(rank): TIMEOUT.format(rank, 9) + ENQUEUED.format(rank, 11, 8) for rank in range(4)}
    tails["1"] = TIMEOUT.format(1, 9) + ENQUEUED.format(1, 9, 8)

    found = classify_bundle(tails)

    assert (found.root_rank, found.verdict.label, found.verdict.action) == ("1", "collective_timeout", "diagnose_hang")


def test_silent_rank_is_the_root() -> None:
    silent: dict[str, str]
    for others, silent in product((LOST, TIMEOUT), ({"3": ""}, {"3": "step 100 loss: 2.3\n"}, {})):
        tails = {str(rank): others.format(rank, 9) for rank in range(5) if rank != 3} | silent
        found = classify_bundle(tails)
        assert (found.root_rank, found.verdict.culprit) == ("3", "rank 3"), tails
        assert found.verdict.action != "none", tails
        assert not found.verdict.is_cascade, tails


def test_rank_named_by_the_others_is_the_root() -> None:
    line = "[rank{0}]: RuntimeError: received errors while waiting for send/recv from rank 2\n"
    tails = {str(rank): line.format(rank) for rank in range(4)} | {"2": LOST.format(2)}

    assert classify_bundle(tails).root_rank == "2"


def test_benign_logs_have_no_root() -> None:
    found = classify_bundle({"0": "step 1\n", "1": "UserWarning: odd\n"})

    assert (found.root_rank, found.verdict.label, found.verdict.action) == (None, "benign", "none")


def test_order_and_names_of_ranks_change_nothing() -> None:
    tails = {str(rank): TIMEOUT.format(rank, 9) for rank in range(12)} | {"10": "KeyError: 'x'\n"}
    reverse = dict(reversed(tails.items()))

    assert classify_bundle(tails) == classify_bundle(reverse)
    assert classify_bundle({"host-a": "KeyError: 'x'\n", "host-b": CLOSING}).root_rank == "host-a"
