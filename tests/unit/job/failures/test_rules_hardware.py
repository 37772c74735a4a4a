"""Rules about GPUs, CUDA, the host's memory and driver, networks and collectives: label and action of each line."""

from __future__ import annotations

from megatrain_job.failures.classifier import classify

GPU = [
    ("Mar  3 02:11:09 gpu-017 kernel: [81723.1] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has "
     "fallen off the bus."),
    "[1234567.89] NVRM: Xid (PCI:0000:9b:00): 48, pid=2211, name=python, DBE (double bit error) ECC detected",
    "NVRM: Xid (PCI:0000:ab:00): 95, Uncontained ECC error. RST: Yes, D-RST: No",
    ("NVRM: Xid (PCI:0000:4e:00): 119, pid=881, name=nvidia-smi, Timeout after 6s of waiting for RPC "
     "response from GPU2 GSP!"),
    "NVRM: Xid (PCI:0000:c1:00): 64, pid=1, Row Remapper: Failure to remap row",
    "node exporter: gpu 3 reported XID error 79", "NVRM: GPU 0000:0a:00.0: RmInitAdapter failed! (0x24:0x72:1568)",
    "NVRM: GPU at 0000:01:00.0 has fallen off the bus.",
    "Unable to determine the device handle for GPU 0000:41:00.0: Unknown Error",
    "nvidia-smi: GPU 00000000:86:00.0: GPU is lost.  Reboot the system to recover this GPU",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution",
    "NCCL WARN Cuda failure 'uncorrectable ECC error encountered'",
    "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "kernel: mce: [Hardware Error]: Machine check events logged, CPU 12 uncorrected",
    "pcieport 0000:17:01.0: AER: Uncorrected (Fatal) error received: 0000:18:00.0",
    "amdgpu 0000:c1:00.0: amdgpu: uncorrectable hardware errors detected in UMC block",
    "DCGM diagnostic: memory test FAILED on GPU 5",
]  # fmt: skip
CUDA_OOM = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total capacity of 79.10 GiB",
    "RuntimeError: CUDA error: out of memory",
    "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 1.5 GiB",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "node3:71:88 [2] include/alloc.h:48 NCCL WARN Cuda failure 2 'out of memory'",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[rank11]: torch.AcceleratorError: CUDA error: out of memory",
]
ILLEGAL = [
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "torch.AcceleratorError: CUDA error: misaligned address", "CUDA error: device-side assert triggered",
    "RuntimeError: CUDA error: unspecified launch failure",
    ("../aten/src/ATen/native/cuda/Loss.cu:240: nll_loss_forward: block: [0,0,0], thread: [7,0,0] "
     "Assertion `t >= 0` failed."),
    ("NVRM: Xid (PCI:0000:1a:00): 13, pid=9, name=python, Graphics SM Warp Exception on (GPC 2, TPC 1): "
     "Out Of Range Address"),
    "NVRM: Xid (PCI:0000:1a:00): 43, pid=9, name=python, Ch 00000010",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    "Memory access fault by GPU node-4 (Agent handle: 0x55) on address 0x7f0000000000. Reason: Unknown.",
    "CUDA error: an illegal instruction was encountered",
    ("[rank5]:[E101 01:02:03.4 ProcessGroupNCCL.cpp:1896] [PG ID 0 Rank 5] Process group watchdog thread "
     "terminated with exception: CUDA error: an illegal memory access was encountered"),
]  # fmt: skip
HOST_OOM = [
    "Out of memory: Killed process 30123 (python3) total-vm:912345678kB, anon-rss:500000000kB",
    "Memory cgroup out of memory: Killed process 411 (pt_main_thread)",
    "Mar  3 02:11:09 gpu-017 kernel: python invoked oom-killer: gfp_mask=0x14200ca, order=0, oom_score_adj=0",
    "slurmstepd: error: Detected 3 oom_kill events in StepId=991.0. Some of the step tasks have been OOM Killed.",
    "srun: error: gpu-017: task 12: Out Of Memory", "Last State: Terminated  Reason: OOMKilled  Exit Code: 137",
    "RuntimeError: DataLoader worker (pid 812) is killed by signal: Killed.",
    "OSError: [Errno 12] Cannot allocate memory",
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 93.1 GiB for an array with shape (50000, 250000)",
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate "
     "memory: you tried to"),
    ("E0302 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) local_rank: 3 "
     "(pid: 41) of binary: python"),
    "train.sh: line 8: 10121 Killed                  python train.py",
]  # fmt: skip
SEGFAULT = [
    "Fatal Python error: Segmentation fault",
    "[gpu-017:2233 :0:2233] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x7f)",
    "srun: error: gpu-017: task 5: Segmentation fault (core dumped)",
    "python3[9911]: segfault at 0 ip 00007f91 sp 00007ffd error 4 in libtorch_cuda.so[7f91]",
    ("E0302 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -11) local_rank: 0 "
     "(pid: 77) of binary"),
    "double free or corruption (!prev)",
    "train.sh: line 8: 10121 Aborted                 (core dumped) python train.py", "free(): invalid pointer",
    "Process finished with exit code 139",
]  # fmt: skip
DRIVER_EVICT = [
    "Failed to initialize NVML: Driver/library version mismatch",
    "NVRM: API mismatch: the client has the version 550.54, but this kernel module has the version 535.183",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
    "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
    "RuntimeError: No CUDA-capable device is detected",
]
DRIVER_STOP = [
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    "ImportError: /opt/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
    "CUDA driver version is insufficient for CUDA runtime version",
    "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
    "ImportError: /lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /opt/x.so)",
    "RuntimeError: No CUDA GPUs are available",
    "ibv_create_cq failed: Cannot allocate memory",
    "gpu-7:71:88 [2] misc/ibvwrap.cc:212 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
    "ib_mlx5_log.c:177 UCX ERROR ibv_reg_mr(address=0x7f, length=4096) failed: Cannot allocate memory",
    "[gpu-7] openib BTL failed to initialize while trying to allocate some locked memory",
    "libfabric:71:efa:mr:efa_mr_reg_impl():489<warn> Unable to register memory region: Cannot allocate memory",
]

CASES = [
    *((line, "gpu_hardware", "evict_host") for line in GPU),
    *((line, "cuda_oom", "stop_user") for line in CUDA_OOM),
    *((line, "cuda_illegal_access", "restart_then_check") for line in ILLEGAL),
    *((line, "host_oom", "stop_user") for line in HOST_OOM),
    *((line, "segfault", "restart_then_check") for line in SEGFAULT),
    *((line, "driver_software", "evict_host") for line in DRIVER_EVICT),
    *((line, "driver_software", "stop_user") for line in DRIVER_STOP),
]


def test_lines_about_hardware_are_known() -> None:
    verdicts = [(classify(line), label, action) for line, label, action in CASES]

    assert [
        verdict
        for verdict, label, action in verdicts
        if (verdict.label, verdict.action, verdict.is_cascade) != (label, action, False)
    ] == []


def test_culprit_is_named() -> None:
    culprits = {
        GPU[0]: "gpu-017 gpu PCI:0000:3b:00", GPU[1]: "gpu PCI:0000:9b:00", CUDA_OOM[0]: "gpu 5",
        CUDA_OOM[-1]: "rank 11", "srun: error: gpu-017: task 12: Out Of Memory": "gpu-017 rank 12",
        "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered": "rank 3",
    }  # fmt: skip
    assert {line: classify(line).culprit for line in culprits} == culprits


def test_an_xid_is_read_by_its_number() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1, name=python"

    assert classify(line.format(31)).label == "cuda_illegal_access"
    assert classify(line.format(74)).label == "gpu_hardware"
    assert classify(line.format(45)).is_cascade
    # the same letters, another number, in one log: the rule with the higher weight decides
    assert classify("\n".join(line.format(number) for number in [13] * 100 + [79] + [13] * 100)).label == "gpu_hardware"


NETWORK = [
    ("node7:88:91 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.3.4<4791> "
     "with status=12 opcode=0 len=0 vendor err 129 (Send) localGid fe80::1"),
    "node7:88:91 [3] NCCL WARN NET/IB : mlx5_2:1 Got async fatal event: port error", "ib0: link is down",
    ("node7:88:91 [3] misc/socket.cc:538 NCCL WARN socketStartConnect: Connect to 10.0.3.4<40511> failed "
     ": Connection refused"),
    "node7:88:91 [3] NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",
    "node7:88:91 [3] NCCL WARN Call to recv from 10.0.3.4<39211> failed : Connection timed out",
    ("torch.distributed.DistNetworkError: The client socket has failed to connect to any network address "
     "of (node0, 29500)."),
    "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    "mlx5_core 0000:12:00.0: poll_health:941: device's health compromised - reached miss count",
    "torch.distributed.DistBackendError: NCCL error: unhandled system error, NCCL version 2.21.5",
    "node1:11:22 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
    *(
        f"megatrain: error: s3://bucket/web.bin at byte 6000: cannot be read, after 7 tries: {reason}; check the "
        "network and the storage"
        for reason in ("Connection reset by peer", 'EndpointConnectionError: Could not connect to "http://s3"')
    ),
]  # fmt: skip
LOST_PEER = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.1.7]:23411",
    "[W222 TCPStore.cpp:343] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "node7:88:91 [3] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node2<4411>",
    "RuntimeError: Connection reset by peer",
    '[rank2]:[E ProcessGroupNCCL.cpp] [PG 0 Rank 2] Failed to check the "should dump" flag on TCPStore',
]
TIMEOUT = [
    ("[rank3]:[E ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: "
     "WorkNCCL(SeqNum=91, OpType=_ALLGATHER_BASE, Timeout(ms)=600000) ran for 600011 milliseconds before "
     "timing out."),
    ("RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
     "operation to complete"),
    ("[rank0]: RuntimeError: Rank 0 timed out in monitoredBarrier after 30000 ms. Ranks 5 failed to pass "
     "monitoredBarrier"),
    "[E ProcessGroupNCCL.cpp:1375] Heartbeat monitor timed out! Process will be terminated after dumping debug info.",
    "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 15/16 clients joined.",
    "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
]  # fmt: skip
TIMEOUT_AFTER_ANOTHER = [
    "RuntimeError: NCCL communicator was aborted on rank 6. Original reason for failure was: watchdog timeout",
    (
        "[rank4]: DistBackendError: [4] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
        "via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms"
    ),
    "[rank1]:[E] Observed flight recorder dump signal from another rank via TCPStore: timeout on rank 5",
]
USER = [
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is running collective: BROADCAST",
    (
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU "
        "detected : rank 1"
    ),
]

NETWORK_CASES = [
    *((line, "network", "tolerate_then_evict", False) for line in NETWORK),
    *((line, "network", "tolerate_then_evict", True) for line in LOST_PEER),
    *((line, "collective_timeout", "diagnose_hang", False) for line in TIMEOUT),
    *((line, "collective_timeout", "diagnose_hang", True) for line in TIMEOUT_AFTER_ANOTHER),
    *((line, "user_code", "stop_user", False) for line in USER),
]


def test_lines_about_networks_are_known() -> None:
    verdicts = [(classify(line), expected) for line, *expected in NETWORK_CASES]

    assert [
        verdict for verdict, expected in verdicts if [verdict.label, verdict.action, verdict.is_cascade] != expected
    ] == []


def test_a_retry_is_benign_until_it_is_the_last() -> None:
    line = (
        "node1:1:2 [0] NCCL INFO socketPollConnect: connect returned Connection refused, retrying ({}/34) after sleep"
    )

    assert classify(line.format(1)).label == "benign"
    assert classify(line.format(1) + "\n" + line.format(34)).label == "network"


def test_rank_that_logs_a_timeout_is_not_its_culprit() -> None:
    assert classify(TIMEOUT[0]).culprit is None


def test_the_peer_of_a_broken_path_is_named() -> None:
    assert classify(NETWORK[0]).culprit == "peer 10.0.3.4"
