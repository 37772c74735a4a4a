"""Rules about networks and collectives."""

from __future__ import annotations

from megatrain_job.failures.classifier import classify

NETWORK = [
    (
        "node7:88:91 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.3.4<4791> "
        "with status=12 opcode=0 len=0 vendor err 129 (Send) localGid fe80::1"
    ),
    "node7:88:91 [3] NCCL WARN NET/IB : mlx5_2:1 Got async fatal event: port error",
    "ib0: link is down",
    (
        "node7:88:91 [3] misc/socket.cc:538 NCCL WARN socketStartConnect: Connect to 10.0.3.4<40511> failed "
        ": Connection refused"
    ),
    "node7:88:91 [3] NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",
    "node7:88:91 [3] NCCL WARN Call to recv from 10.0.3.4<39211> failed : Connection timed out",
    (
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address "
        "of (node0, 29500)."
    ),
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
]
LOST_PEER = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.1.7]:23411",
    "[W222 TCPStore.cpp:343] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "node7:88:91 [3] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node2<4411>",
    "RuntimeError: Connection reset by peer",
    '[rank2]:[E ProcessGroupNCCL.cpp] [PG 0 Rank 2] Failed to check the "should dump" flag on TCPStore',
]
TIMEOUT = [
    (
        "[rank3]:[E ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=91, OpType=_ALLGATHER_BASE, Timeout(ms)=600000) ran for 600011 milliseconds before "
        "timing out."
    ),
    (
        "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
        "operation to complete"
    ),
    (
        "[rank0]: RuntimeError: Rank 0 timed out in monitoredBarrier after 30000 ms. Ranks 5 failed to pass "
        "monitoredBarrier"
    ),
    "[E ProcessGroupNCCL.cpp:1375] Heartbeat monitor timed out! Process will be terminated after dumping debug info.",
    "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 15/16 clients joined.",
    "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
]
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

CASES = [
    *((line, "network", "tolerate_then_evict", False) for line in NETWORK),
    *((line, "network", "tolerate_then_evict", True) for line in LOST_PEER),
    *((line, "collective_timeout", "diagnose_hang", False) for line in TIMEOUT),
    *((line, "collective_timeout", "diagnose_hang", True) for line in TIMEOUT_AFTER_ANOTHER),
    *((line, "user_code", "stop_user", False) for line in USER),
]


def test_lines_about_networks_are_known() -> None:
    verdicts = [(classify(line), expected) for line, *expected in CASES]

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
