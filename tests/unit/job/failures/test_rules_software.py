"""Rules about storage, data, numerics, schedulers and the user's program."""

from __future__ import annotations

from megatrain_job.failures.classifier import classify

STORAGE = [
    "OSError: [Errno 28] No space left on device: '/ckpt/step_100'",
    "OSError: [Errno 116] Stale file handle",
    "OSError: [Errno 30] Read-only file system: '/mnt/out/log.txt'",
    "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "LustreError: 11-0: fs-OST0003-osc: Communicating with 10.1.1.1@o2ib, operation ost_write failed with -107",
    "nfs: server filer2 not responding, timed out",
    "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 1152 vs 1046",
    "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL",
    "blk_update_request: I/O error, dev nvme0n1, sector 123456",
    "OSError: [Errno 5] Input/output error",
    "_pickle.UnpicklingError: pickle data was truncated",
]
DATA = [
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 12: invalid start byte",
    "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object>",
    "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 1 column 881 (char 880)",
    "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.",
    "RuntimeError: DataLoader worker (pid(s) 8812, 8813) exited unexpectedly",
    "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
    "FileNotFoundError: [Errno 2] No such file or directory: '/corpus/part-0012_text_document.idx'",
    "tarfile.ReadError: unexpected end of data",
    "RuntimeError: unable to open shared memory object </torch_12> in read-write mode: No space left on device (28)",
]
NUMERICS = [
    "step 1201 loss: nan grad_norm: nan lr: 1.0e-4",
    "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.3}",
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
    "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 3 at iteration #3",
    "ValueError: Rank 2: found Inf in local grad norm for bucket #1 in backward pass",
    "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
    "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.",
    "loss spike detected at step 900: 2.1 -> 11.7",
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
]
PREEMPTION = [
    "slurmstepd: error: *** JOB 88 ON gpu-017 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***",
    "slurmstepd: error: *** STEP 88.0 ON gpu-[1-4] CANCELLED AT 2026-01-02T03:04:05 DUE TO NODE FAILURE ***",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4411 got signal: 15",
    "WARNING:torch.distributed.elastic.agent.server.api:Received Signals.SIGTERM death signal, shutting down workers",
    "EC2 spot instance interruption notice: terminate at 2026-01-02T03:04:05Z",
    "Warning  Preempted  pod/worker-3  Preempted by default/big-job on node gpu-017",
    "The node was low on resource: ephemeral-storage. Container trainer was using 91Gi",
    "received SIGUSR1, saving a checkpoint",
    "GCE instance was preempted",
]
USER = [
    "ModuleNotFoundError: No module named 'flash_attn'",
    "TypeError: forward() got an unexpected keyword argument 'position_ids'",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x512 and 768x512)",
    "train.py: error: unrecognized arguments: --lrr 0.1",
    "numactl: unrecognized option '--cpu'",
    "numactl: unrecognised option '--cpu'",  # codespell:ignore unrecognised
    "[rank0]: AssertionError: hidden size must match",
    "KeyError: 'lm_head.weight'",
    "RuntimeError: Error(s) in loading state_dict for GPT: size mismatch for wte.weight",
    "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "2026-01-02 03:04:05 ERROR mypkg.errors.BadConfigError: no such optimizer",
]

CASES = [
    *((line, "storage", "retry_then_stop") for line in STORAGE),
    *((line, "data", "stop_user") for line in DATA),
    *((line, "numerics", "rollback") for line in NUMERICS),
    *((line, "preemption", "requeue") for line in PREEMPTION),
    *((line, "user_code", "stop_user") for line in USER),
]


CANCELLED = "slurmstepd: error: *** STEP 88.0 ON gpu-[1-4] CANCELLED AT 2026-01-02T03:04:05 ***"
TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nKeyError: 1'


CANCELLED_STEPS = [
    ("srun: error: gpu-3: task 3: Bus error (core dumped)", "", "segfault", "gpu-3 rank 3"),
    ("srun: error: gpu-3: task 3: Bus error", "", "segfault", "gpu-3 rank 3"),
    ("srun: error: gpu-3: task 3: Segmentation fault", "", "segfault", "gpu-3 rank 3"),
    ("srun: error: gpu-3: task 3: Illegal instruction", "", "segfault", "gpu-3 rank 3"),
    ("srun: error: gpu-3: task 3: Aborted (core dumped)", "", "segfault", "gpu-3 rank 3"),
    ("srun: error: gpu-3: task 3: Killed", "", "host_oom", "gpu-3 rank 3"),
    ("srun: error: gpu-3: task 3: Exited with exit code 1", "", "user_code", "gpu-3 rank 3"),
    (f"{TRACEBACK}\nsrun: error: gpu-3: task 3: Exited with exit code 1", "", "user_code", None),
    ("", "srun: error: gpu-1: tasks 0-7: Terminated", "preemption", None),
    ("", "srun: error: gpu-1: task 0: Killed", "preemption", None),
    ("", "", "preemption", None),
]
"""Lines before and after the cancellation, label, culprit."""


def test_cancelled_slurm_step_follows_from_a_failed_task() -> None:
    for before, after, label, culprit in CANCELLED_STEPS:
        log = "\n".join(filter(None, [before, CANCELLED, after]))
        verdict = classify(log)
        assert (verdict.label, verdict.culprit) == (label, culprit), log


def test_scheduler_ended_step_outweighs_its_tasks() -> None:
    for reason, label in {
        "TIME LIMIT": "preemption",
        "PREEMPTION": "preemption",
        "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS": "preemption",
        "TASK FAILURE": "host_oom",
    }.items():
        end = CANCELLED.replace("05 ***", f"05 DUE TO {reason} ***")
        assert classify(f"srun: error: gpu-3: task 3: Killed\n{end}").label == label, reason


def test_lines_about_software_are_known() -> None:
    verdicts = [(classify(line), label, action) for line, label, action in CASES]

    assert [
        verdict
        for verdict, label, action in verdicts
        if (verdict.label, verdict.action, verdict.is_cascade) != (label, action, False)
    ] == []


def test_lines_of_our_own_programs() -> None:
    step = "step 8/100 | loss {} | grad norm nan | data wait 0.1 ms | skipped 1 | consumed 9 tokens"
    group = "all-reduce on group dp (ranks 0-3) failed on rank 1: {} (an exchange of this phase may take 9 s)"
    skips = "megatrain: error: loss=nan at step 9: not finite for 9 steps in a row (train.max_skipped_steps)"
    differ = (
        "megatrain: error: parameters differ at step 8 in a.weight (chunk 0): rank 3 differs from most of the "
        "replicas on ranks 1, 3, 5 (train.checksum_interval=4, last found equal at step 4); check the memory and the "
        "network of their hosts, and resume from a save that is older than step 4"
    )
    killed = (
        "megatrain: rank 3 (process 4711) got SIGTERM, but did not finish its step within 60 s "
        "(runtime.save_grace_s=60)"
    )
    unsaved = (
        "megatrain: error: the checkpoint of step 20 did not reach /s/checkpoints/main: step 20: not saved: "
        "/s/step-000000020: waited 600 s for the data files of host 1; see the writer's log there"
    )

    assert classify(step.format("nan")).label == "benign"
    assert classify(skips).label == "numerics"
    assert (classify(differ).label, classify(differ).rule) == ("numerics", "replicas-differ")
    assert classify(killed).label == "preemption"
    assert (classify(unsaved).label, classify(unsaved).rule) == ("storage", "saving-failed")
    assert classify(group.format("something odd")).is_cascade
    assert classify(
        group.format("[unbound_buffer.cc:81] Timed out waiting 120000ms for recv operation to complete")
    ).label == ("collective_timeout")


def test_an_exception_is_placed_by_its_frames() -> None:
    loading = '  File "/opt/env/torch/utils/data/_utils/fetch.py", line 52, in fetch\n    data = [self.dataset[i]]\n'
    saving = '  File "/opt/env/torch/distributed/checkpoint/filesystem.py", line 81, in write_data\n'

    assert classify(loading + "ValueError: bad length 7").label == "data"
    assert classify(loading + "TypeError: bad call").label == "user_code"
    assert classify(saving + "PermissionError: [Errno 13] Permission denied: 'x'").label == "storage"
    assert classify("PermissionError: [Errno 13] Permission denied: 'x'").label == "user_code"


def test_frames_belong_to_the_rank_that_wrote_them() -> None:
    log = '[rank1]:   File "/opt/env/torch/utils/data/fetch.py", line 52, in fetch\n[rank0]: ValueError: wrong flag\n'

    assert classify(log).label == "user_code"


def test_the_root_of_torchs_table_decides_over_heavier_codes() -> None:
    entry = "{}\n[0]:\n  host      : node{}\n  rank      : {} (local_rank: 1)\n  exitcode  : {} (pid: 12)\n"
    first = entry.format("Failures:", 3, 9, -9)
    root = entry.format("Root Cause (first observed failure):", 2, 4, 1)

    verdict = classify(first + root)

    assert (verdict.label, verdict.culprit) == ("user_code", "node2 rank 4")
    log = """Failures:
[1]:
  host      : node3
  rank      : 9 (local_rank: 1)
  exitcode  : -11 (pid: 12)
  traceback : Signal 11 (SIGSEGV) received by PID 12
Root Cause (first observed failure):
[0]:
  host      : node2
  rank      : 4 (local_rank: 0)
  exitcode  : -9 (pid: 11)
  traceback : Signal 9 (SIGKILL) received by PID 11
"""
    verdict = classify(log)

    assert (verdict.label, verdict.culprit) == ("host_oom", "node2 rank 4")
