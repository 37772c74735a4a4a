"""Lines that no specific rule matches, lines that only resemble a failure, and verdicts on several lines."""

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
    "sampler: infinite=True, loss weights normalized",
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


BENIGN = [
    "/opt/env/torch/nn/modules/module.py:1373: UserWarning: Full backward hook is firing, this is an error-prone use",
    "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.",
    "W0302 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1",
    "node1:2:3 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
    "node1:2:3 [0] NCCL INFO NET/IB : No device found.",
    ("[2026-01-02 03:04:05] [INFO] [stage_1_and_2.py] OVERFLOW! Rank 0 Skipping step. Attempted loss "
     "scale: 65536, reducing to 32768"),
    "WARNING urllib3.connectionpool: Retrying (Retry(total=2)) after connection broken by 'ReadTimeoutError'",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "resource_tracker: There appear to be 3 leaked semaphore objects to clean up at shutdown",
    ("E0000 00:00:1730 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory "
     "for plugin cuDNN"),
    "Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file",
    "Token indices sequence length is longer than the specified maximum sequence length for this model (5121 > 2048)",
    "Some weights of GPT2Model were not initialized from the model checkpoint and are newly initialized",
    "pcieport 0000:17:01.0: AER: Corrected error received: 0000:18:00.0",
    "Skipping corrupt sample 88121: cannot identify image file",
    ("data.bad_samples: sample 81 of source web is replaced by one without labels: /data/web.bin at byte 8192 "
     "(document 7): cannot be read: Input/output error; copy the file again"),
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used.",
    ("[rank0]:[W] ProcessGroupNCCL.cpp Warning: using GPU 0 to perform barrier as devices used by this "
     "process are unknown"),
    (" iteration 9/ 100 | lm loss: 2.1E+00 | grad norm: 0.9 | number of skipped iterations: 0 | number of "
     "nan iterations: 0 |"),
    "INFO saved checkpoint to /ckpt/step-100 in 3.2 s, 0 errors",
    "check_for_nan_in_loss_and_grad ................. True",
    "epoch 3: loss 2.31, validation loss 2.44, information gain 0.1", "nvidia-smi: retired pages pending: No", "",
]  # fmt: skip


def test_benign_lines_raise_no_alarm() -> None:
    verdicts = {line: classify(line) for line in BENIGN}

    assert {
        line: verdict for line, verdict in verdicts.items() if (verdict.label, verdict.action) != ("benign", "none")
    } == {}


def test_signals_of_torchruns_agent_are_a_consequence() -> None:
    verdict = classify("W0302 multiprocessing/api.py:900] Sending process 77 closing signal SIGTERM")

    assert (verdict.label, verdict.is_cascade) == ("benign", True)


def test_a_cause_beats_its_consequences_wherever_it_stands() -> None:
    cause = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 80 GiB"
    )
    consequences = [
        "[rank3]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.1.7]:23411",
        "[rank2]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",
        "W0302 multiprocessing/api.py:900] Sending process 77 closing signal SIGTERM",
        "UserWarning: something is odd",
    ]
    for place in range(len(consequences) + 1):
        lines = [*consequences[:place], cause, *consequences[place:]]
        assert classify("\n".join(lines)).label == "cuda_oom"


def test_hardware_fault_outranks_the_programs_message() -> None:
    log = "RuntimeError: CUDA error: an illegal memory access was encountered\nNVRM: Xid (PCI:0000:3b:00): 79, lost\n"

    assert classify(log).label == "gpu_hardware"


def test_a_cause_beats_a_consequence_of_the_same_weight() -> None:
    consequence = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.1.7]:23411"
    cause = "torch.distributed.DistBackendError: NCCL error: unhandled system error, NCCL version 2.21.5"

    assert not classify(f"{consequence}\n{cause}").is_cascade
    assert not classify(f"{cause}\n{consequence}").is_cascade


def test_the_first_of_equal_causes_decides() -> None:
    line = "E0302 multiprocessing/api.py:882] failed (exitcode: -9) local_rank: {} (pid: 41) of binary: python"

    assert classify("\n".join(line.format(rank) for rank in (5, 1, 3))).culprit == "rank 5"
    assert classify("KeyError: 'a'\nValueError: b\n").line == "KeyError: 'a'"


def test_retried_checkpoint_did_not_end_the_rank() -> None:
    trace = 'Traceback (most recent call last):\n  File "/app/step.py", line 4, in step\nRuntimeError: it is wrong\n'
    for reason in (
        "/s/step-000000020/rank-00002.slot-1: cannot be written: No space left on device",
        "/s/step-000000020: waited 600 s for the data files of host 1; see the writer's log there",
        "/s/step-000000020: a newer round needs a checkpoint; no longer waiting for the data files of host 1",
    ):
        line = f"a checkpoint FAILED and is tried again at the next interval: step 20: not saved: {reason}"
        assert classify(line).label == "benign", reason
        assert classify(f"{line}\n{trace}").label == "user_code", reason
        assert classify(f"{trace}{line}\n").label == "user_code", reason
