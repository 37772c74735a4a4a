"""Messages that no specific rule matches: the kind of failure follows from the thing and what happened to it."""

from __future__ import annotations

import pytest

from megatrain_job.failures.bundle import classify_bundle
from megatrain_job.failures.classifier import classify

FAILURES = [
    ("data", "[rank3]: lmdb.ReadersFullError: MDB_READERS_FULL: Environment maxreaders limit reached"),
    ("data", "loader.worker: ERROR shard 00031 is malformed: cannot decode frame 7"),
    ("data", "NotADirectoryError: [Errno 20] Not a directory: '/data/train/part-7/labels'"),
    ("data", "RuntimeError: Pin memory thread exited unexpectedly"),
    ("storage", "[rank0]: s3fs.errors.AccessError: signature expired"),
    ("storage", "ERROR writer: checkpoint shard 12 of step 4000 timed out after 900 s"),
    ("storage", "OSError: [Errno 16] Device or resource busy: '/nfs/run/ckpt/.nfs0001'"),
    ("cuda_oom", "allocator: device 3 failed to allocate 2.1 GiB"),
    ("cuda_oom", "vendor.cuda.OutOfMemoryError: requested 12 GiB"),
    ("host_oom", "monitor: 3 workers killed due to memory pressure on this machine"),
    ("collective_timeout", "E12 comm.cpp:7] reduce-scatter over 64 ranks has not completed within the deadline"),
    ("collective_timeout", "trainer: no step completed for 812 s; dumping stacks"),
    ("collective_timeout", "monitor: did not get a heartbeat from rank 5 within 180 s"),
    ("network", "switch: port Ethernet12 flapped 9 times, FEC errors 8812"),
    ("network", "[rank2]: torch.distributed.DistNetworkError: cannot assign requested address"),
    ("network", "node4:7:9 [1] transport/net_new.cc:47 NCCL WARN NET/New : peer message truncated"),
    ("gpu_hardware", "burn-in: GPU 4 matmul self-test FAILED, returns wrong results"),
    ("gpu_hardware", "EDAC skx MC3: HANDLING MCE MEMORY ERROR"),
    ("numerics", "[rank1]: layer 17 output contains NaNs, stopping"),
    ("numerics", "train step 81: grad norm is infinite"),
    ("preemption", "agent: this instance is being terminated by its provider in 30 s"),
    ("preemption", "User defined signal 1"),
    ("user_code", "thread 'main' panicked at src/lib.rs:44:9"),
]

HARMLESS = [
    "INFO resumed from checkpoint 1200 after failure; restarts so far 1",
    "INFO retention: checkpoint 400 deleted, 0 failed",
    "KL divergence: 0.012 | entropy 1.2",
    "memory: 71 GiB allocated on the gpu, num_ooms 0, oom retries 0",
    "collective timeout is set to 600 s",
    "NCCL watchdog timeouts are configured: barrier 60 s, broadcast 60 s",
    "mlx5_core 0000:3b:00.0: Port module event: module 0, Cable plugged",
    "checkpoint: validated 64 shards, no corruption found",
    "dataset: skipped 12 truncated samples of 1000000",
    "sampler: infinite=True, loss weights normalised",
    "saving an emergency checkpoint on SIGTERM is enabled",
    "node gpu-3 uncordoned; it rejoined as a spare",
    "gpu burn-in passed, hardware errors: no",
    "heartbeat of rank 3: step 12, 0.4 s ago",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0",
]


def test_unknown_messages_are_classified_by_their_terms() -> None:
    verdicts = [(label, classify(line)) for label, line in FAILURES]

    assert [verdict for label, verdict in verdicts if verdict.label != label or verdict.action == "none"] == []


def test_harmless_messages_with_failure_terms_raise_no_alarm() -> None:
    assert [line for line in HARMLESS if classify(line).action != "none"] == []


def test_message_that_is_known_decides_over_its_kind() -> None:
    verdict = classify("OSError: [Errno 28] No space left on device: '/data/train/cache.arrow'")

    assert (verdict.label, verdict.rule) == ("storage", "disk-full")


IGNORED = """\
Exception ignored in: <function Loader.__del__ at 0x7f>
Traceback (most recent call last):
  File "/opt/env/loader.py", line 1478, in __del__
    self._shutdown_workers()
AssertionError: can only test a child process
"""


def test_ignored_traceback_is_no_failure() -> None:
    assert classify(IGNORED).action == "none"
    assert classify(IGNORED + "KeyError: 'x'\n").label == "user_code"


def test_other_rank_than_the_one_of_the_ignored_traceback_counts() -> None:
    ignored = "".join(f"[rank0]: {line}\n" for line in IGNORED.splitlines()[:2])

    assert classify(ignored + "[rank1]: KeyError: 'x'\n").label == "user_code"


def test_deviating_rank_is_the_root_of_a_mismatch() -> None:
    line = "[rank{0}]: Detected mismatch between collectives. Rank {0} is running X, but Rank {1} is running Y\n"
    tails = {str(rank): line.format(rank, 2) for rank in (0, 1, 3)} | {"2": line.format(2, 0)}

    assert classify_bundle(tails).root_rank == "2"


@pytest.mark.parametrize("others", [{}, {"3": "[rank3]: Watchdog caught collective operation timeout: SeqNum=9\n"}])
def test_end_that_all_broken_paths_share_is_the_root(others: dict[str, str]) -> None:
    line = "node{0}:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.2.1<7> with error 12\n"
    tails = {"0": line.format(0), "1": line.format(1), "2": ""} | others

    found = classify_bundle(tails)

    assert (found.root_rank, found.verdict.label) == ("2", "network")


def test_numbers_of_a_dump_signal_show_which_rank_is_behind() -> None:
    line = "[rank{0}]:[E] Received a dump signal due to a timeout from rank 0. Last enqueued NCCL work: {1}\n"
    tails = {str(rank): line.format(rank, 500) for rank in range(4)} | {"3": line.format(3, 499)}

    assert classify_bundle(tails).root_rank == "3"
