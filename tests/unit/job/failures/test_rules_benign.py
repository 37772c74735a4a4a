"""Lines that resemble a failure but are none, and verdicts on several lines."""

from __future__ import annotations

from megatrain_job.failures.classifier import classify

BENIGN = [
    "/opt/env/torch/nn/modules/module.py:1373: UserWarning: Full backward hook is firing, this is an error-prone use",
    "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.",
    "W0302 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1",
    "node1:2:3 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
    "node1:2:3 [0] NCCL INFO NET/IB : No device found.",
    (
        "[2026-01-02 03:04:05] [INFO] [stage_1_and_2.py] OVERFLOW! Rank 0 Skipping step. Attempted loss "
        "scale: 65536, reducing to 32768"
    ),
    "WARNING urllib3.connectionpool: Retrying (Retry(total=2)) after connection broken by 'ReadTimeoutError'",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "resource_tracker: There appear to be 3 leaked semaphore objects to clean up at shutdown",
    (
        "E0000 00:00:1730 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory "
        "for plugin cuDNN"
    ),
    "Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file",
    "Token indices sequence length is longer than the specified maximum sequence length for this model (5121 > 2048)",
    "Some weights of GPT2Model were not initialized from the model checkpoint and are newly initialized",
    "pcieport 0000:17:01.0: AER: Corrected error received: 0000:18:00.0",
    "Skipping corrupt sample 88121: cannot identify image file",
    (
        "data.bad_samples: sample 81 of source web is replaced by one without labels: /data/web.bin at byte 8192 "
        "(document 7): cannot be read: Input/output error; copy the file again"
    ),
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used.",
    (
        "[rank0]:[W] ProcessGroupNCCL.cpp Warning: using GPU 0 to perform barrier as devices used by this "
        "process are unknown"
    ),
    (
        " iteration 9/ 100 | lm loss: 2.1E+00 | grad norm: 0.9 | number of skipped iterations: 0 | number of "
        "nan iterations: 0 |"
    ),
    "INFO saved checkpoint to /ckpt/step-100 in 3.2 s, 0 errors",
    "check_for_nan_in_loss_and_grad ................. True",
    "epoch 3: loss 2.31, validation loss 2.44, information gain 0.1",
    "nvidia-smi: retired pages pending: No",
    "",
]


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
