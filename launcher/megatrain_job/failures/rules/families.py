"""Common kinds of failure in messages that no other rule matches: a subject, and what happened to it.

If several rules match one line, a rule for a known message takes precedence over these, and these over the rule for any
Python exception.
"""

from __future__ import annotations

import itertools

from megatrain_job.failures.rule import (
    ENDED_BY_OTHERS,
    EXCEPTION,
    HARDWARE,
    HOST,
    LINK,
    LOST_PEER,
    SPECIFIC,
    TIMEOUT,
    Rule,
    rule,
)
from megatrain_job.failures.verdict import Label

_HARMLESS = (
    r"\bno\b|\bnot?e:|\b0 (?:errors?|failures?)|enabled|disabled|configured|installed|default|setting|threshold|avoid|"
    r"prevent|\bif you\b|\bmay\b|\bmight\b|\bcould\b|to reduce|help:|usage:|retr(?:y|ies)|recovered|resolved|"
    r"\bsuccess|\bpassed\b|\bok\b"
)
_LOW_LEVEL = r"(?:^|[\s\[|(/:])(?:info|debug|notice|trace)\b"
_SETTING = (
    r"timeouts?\W{0,3}(?:set|=|is)\b|setting|default|init_process_group|\busing\b|configured|enabled|retr(?:y|ies)"
)
_NAME = r"(?:error|exception|invalid|corrupted\w*|failure)\b"


def _pairs(subjects: str, events: str) -> tuple[str, ...]:
    """Return the alternatives of each subject with each event; both are comma-separated lists."""
    found = itertools.product(subjects.split(", "), events.split(", "))
    return tuple(f"{subject} & {event}" for subject, event in found)


_DATA_MODULES = (
    "lmdb", "h5py", "tarfile", "gzip", "zlib", "lzma", "zstandard", "decord", "soundfile", "librosa",
    "torchaudio", "torchvision", "webdataset", "datasets", "sentencepiece", "tokenizers", "tiktoken", "pandas",
    "orjson", "ujson", "msgpack", "fastavro", "litdata", "petastorm", "streaming", "polars", "energon", "pyarrow",
    "cv2",
)  # fmt: skip
_STORE_MODULES = (
    "botocore", "boto3", "s3fs", "s3transfer", "gcsfs", "adlfs", "fsspec", "google.api_core", "google.cloud", "azure",
    "minio", "hdfs", "safetensors", "torch.distributed.checkpoint", "zarr", "tensorstore", "orbax",
    "ocifs", "cosfs", "tosfs", "aiobotocore", "fastpersist",
)  # fmt: skip


def _of_modules(modules: tuple[str, ...]) -> str:
    """Return a pattern of an exception that one of these modules defines, for the start of a message."""
    return rf"(?:{'|'.join(module.replace('.', '[.]') for module in modules)})(?:[._]\w+)*[._]?{_NAME}"


RULES: tuple[Rule, ...] = (
    rule(
        "exception-of-a-data-library", Label.DATA, EXCEPTION + 1,
        *(f"{module}. & {name}" for module in _DATA_MODULES for name in ("error", "exception", "invalid", "corrupted")),
        pattern=_of_modules(_DATA_MODULES), is_at_start=True, is_family=True,
    ),
    rule(
        "exception-of-a-store", Label.STORAGE, EXCEPTION + 1,
        *(f"{module}. & {name}" for module in _STORE_MODULES for name in ("error", "exception")),
        pattern=_of_modules(_STORE_MODULES), is_at_start=True, is_family=True,
    ),
    rule(
        "gpu-memory-exhausted", Label.CUDA_OOM, SPECIFIC,
        *_pairs("cuda, gpu, device, hbm, vram, npu, hip, xla, allocator", "out of memory, oom, outofmemory"),
        *_pairs("gpu, cuda, device, hbm", "failed to allocate, unable to allocate, exceed & memory"),
        "outofmemoryerror", "oom when allocating", "resource_exhausted & alloc",
        pattern=r"\boom\b|out ?of ?memory|alloc|exceed",
        unless=r"oom[-_]|_oom|\bno\b|num_|arrow|java|task was killed|\bhost|\bcpu\b|kill|polars|enabled|avoid|\bmay\b|"
               r"prevent|\bif you\b|retr(?:y|ies)|threshold",
        culprit=r"\b(?:gpu|device|cuda)[ :]*(?P<gpu>\d+)", is_family=True,
    ),
    rule(
        "host-memory-exhausted", Label.HOST_OOM, HOST,
        *_pairs("memory pressure, out of memory, memory limit, memory usage, rss, oom", "killed, killing, terminated"),
        *_pairs("process", "terminated abruptly, died & memory"), "brokenprocesspool", "memory limit reached",
        "worker & exceeded & memory limit", "exceeds the memory & threshold",
        unless=r"oom_score|\b(?:cuda|gpu|hbm|device)\b|" + _HARMLESS, is_family=True,
    ),
    rule(
        "collective-stuck", Label.COLLECTIVE_TIMEOUT, TIMEOUT,
        *_pairs(
            "allreduce, all_reduce, all-reduce, allgather, all_gather, all-gather, reducescatter, reduce_scatter, "
            "reduce-scatter, alltoall, all_to_all, all-to-all, broadcast, barrier, worknccl, workgloo, workxccl, "
            "communicator, collective, process group, processgroup, sendrecv, send/recv, work sequence, nccl work, "
            "deepep, remote rank",
            "timed out, timeout, time out, hung, stuck, stalled, deadline, not completed, did not complete, "
            "not finished, incomplete after",
        ),
        *_pairs("rank, worker", "heartbeat & timeout, heartbeat & timed out, no heartbeat, did not get & heartbeat"),
        *_pairs("rank, ranks, step, iteration", "no progress, hang, hung, stalled for, stuck for"),
        "no step completed for", "no step finished for", "no iteration completed", "stop_waiting response",
        "timed out in blocking wait", "heartbeat & missed & rank", "waiting for & ranks & timed out",
        pattern=r"\btimed?[ -]?out\b|\bhung\b|\bhang\b|stuck|stalled|deadline|not (?:completed?|finished)|"
                r"complete|incomplete|no (?:progress|heartbeat|step|iteration)|heartbeat|stop_waiting",
        unless=_SETTING + r"|watchdog (?:started|thread started)|connect|writev|readv|refused|reset by|"
               r"can (?:potentially)? ?cause|\bmay\b|\bmight\b|\bcould\b|change|detector|original reason|"
               r"aborted on rank|destroy|0 stuck|no hang",
        culprit=r"\bheartbeat (?:from|of) rank (?P<rank>\d+)|\brank (?P<rank2>\d+) (?:is |appears )?(?:hung|stuck)",
        names_own_rank=False, is_family=True,
    ),
    rule(
        "transport-path-broken", Label.NETWORK, LINK,
        *_pairs("gloo/transport, nccl, ucx, gloo, mlx5, rdma, roce, infiniband, libfabric, psm",
                "connection timed out, no route, unreachable, link flap, link is down, link down, not reachable, "
                "unable to reach, connection failed, port down"),
        *_pairs("nic, ethernet, infiniband, rdma, roce, hca, port, uplink, transceiver, qsfp",
                "link flap, flapping, flapped, link failure, link lost, no carrier, went down, is down, "
                "cable error, unplugged"),
        "distnetworkerror", "server socket has failed to listen", "eaddrnotavail", "cannot assign requested address",
        "multicast join failed", "gid table change", "netdev watchdog", "transmit queue & timed out",
        unless=_LOW_LEVEL + r"|link up|\bretr(?:y|ying)\b(?! .*exhaust)|NCCL INFO|falling back|eaddrinuse|"
               r"address already in use|recvvalue|sendbytes|failed to recv",
        culprit=r"\b(?:peer|remote|to)\W{0,2}(?P<peer>(?:\d{1,3}\.){3}\d{1,3})", is_family=True,
    ),
    rule(
        "transport-warns", Label.NETWORK, LOST_PEER,
        "nccl warn & net/", "nccl warn & net_ib", "nccl warn & net_socket", "nccl warn & socket.cc",
        "nccl warn & bootstrap", "nccl warn & ibv", "nccl warn & ofi", "nccl warn & proxy", "nccl warn & timeout",
        unless=r"plugin|not supported|disabled|cuda|out of memory|ignor|failed to open lib|no device", is_family=True,
    ),
    rule(
        "peer-lost", Label.NETWORK, LOST_PEER,
        *_pairs("peer, host, node, endpoint, server, master, store",
                "unreachable, unable to reach, cannot reach, not reachable, connection lost, lost connection, "
                "connection failed, connection marked as failed, heartbeat lost"),
        unless=_HARMLESS + "|" + _LOW_LEVEL + r"|nfs|lustre|ceph|gpfs|wandb|tensorboard|gpu|NCCL INFO",
        names_own_rank=False, is_family=True,
    ),
    rule(
        "hardware-at-fault", Label.GPU_HARDWARE, HARDWARE,
        *_pairs("gpu, cuda:, nvlink, nvswitch, pcie, hbm, dimm, cpu, memory controller, retimer, vrm, psu",
                "faulty, defective, is broken, self-test & fail, selftest & fail, wrong result, hardware error, "
                "hardware fault, hardware failure, unrecoverable, returned wrong, incorrect result, bad memory, "
                "power fault, failed burn, hardware malfunction"),
        *_pairs("ipmi, bmc, sel, idrac, redfish", "non-recoverable, asserted & critical, ac lost, power supply & fail"),
        "nvidia-smi & err!", "err! & n/a", "edac & memory read error", "edac & memory write error",
        "edac & memory scrubbing error", "hardware memory corruption", "mce memory error", "memory failure: & killing",
        unless=_LOW_LEVEL + r"|non-fatal|\bce\b|\bcorrected\b|\bno\b|\bnot\b|corrected error|\b0 (?:errors|failures)|"
                            r"passed|\bmight\b|\bmay\b|could|unable to|enabled",
        culprit=r"\b(?:gpu|cuda)[ :#-]*(?P<gpu>\d+)", is_family=True,
    ),
    rule(
        "checkpoint-error", Label.STORAGE, EXCEPTION + 1,
        *_pairs("checkpoint, ckpt, .distcp, .safetensors, optim_states, model_states",
                "fail, error, corrupt, unreadable, timed out, timeout, incomplete, unavailable, denied, refused, "
                "truncated, mismatch & checksum, cannot, could not, unable"),
        *_pairs("filesystem, file system, mount, volume, nfs, lustre, gpfs, ceph, bucket, blob, object store",
                "is full, unavailable, not responding, timed out, hung, went away, stale, quota, read-only, denied, "
                "connection lost, evicted"),
        pattern=r"\b(?:error|critical|fatal|severe)\b|\[e\d*\]|^\s*(?:\[\S+\]: ?)?[\w.]*(?:error|exception)\b|fail",
        unless=_LOW_LEVEL + r"|size mismatch|missing key|unexpected key|state_dict|unexpected keyword|has no attribute|"
               r"retr(?:y|ying)|activation|gradient checkpoint|recompute|wandb|\bwarn(?:ing)?\b|\b0 fail|cuda|nccl|"
               r"assert|barrier|collective|typeerror|valueerror|keyerror|attributeerror|import|not ?implemented|"
               r"on_error|memory",
        is_family=True,
    ),
    rule(
        "data-error", Label.DATA, EXCEPTION + 1,
        *_pairs("dataset, dataloader, data loader, sample, shard, tokenized, .jsonl, .parquet, .arrow, .tar, tfrecord",
                "corrupt, truncated, unreadable, malformed, cannot be read, could not be read, failed to read, "
                "failed to decode, failed to parse, checksum & match, exhausted unexpectedly, ended unexpectedly, "
                "cannot decode, invalid header, bad header"),
        *_pairs("sentencepiece, tokenizer", "parsefromarray, corrupt, cannot be parsed, could not be parsed"),
        "pin memory thread exited", "truncated file: eof", "mdb_corrupted", "mdb_page",
        pattern=r"\b(?:error|critical|fatal|exception)\b|\[e\d*\]|[\w.]*(?:error|exception)\b|fail|unexpectedly|"
                r"mdb_|mismatch|not match|"
                r"truncated file|parse",
        unless=_LOW_LEVEL + r"|\bskip(?:ping|ped)?\b|\bwarn(?:ing)?\b|ignor|checkpoint|ckpt|\b0 |\bno\b|retr(?:y|ying)",
        is_family=True,
    ),
    rule(
        "numbers-not-finite", Label.NUMERICS, EXCEPTION + 1,
        *_pairs("loss, grad, norm, activation, logits, weights, parameter, layer", "infinite, infinity, nans, "
                "diverged, exploded"),
        *_pairs("loss, grad, norm, activation, logits, weights, parameter, tensor, layer, output",
                " is nan, tensor(nan, tensor(inf,  are nan, nan in , nan at , inf in , inf at , nan or , inf or , "
                "nan value, inf value"),
        pattern=r"\b(?:nans?|inf|infinite|infinity|diverged|exploded)\b",
        unless=_LOW_LEVEL + r"|check_for_nan|nan_check|--|ignor|\bno\b|\bskip|clip|\bwill\b|enabled|monitor|watch|"
                       r"\b0 nan|infinite(?:=|:| (?:data|loader|sampler))|"
               r"\bif\b|attention|mask|\bnan_|_nan\b|max_|limit|\bwarn(?:ing)?\b|overflow",
        is_family=True,
    ),
    rule(
        "machine-withdrawn", Label.PREEMPTION, ENDED_BY_OTHERS,
        *_pairs("node, instance, host, machine, vm, allocation, reservation, pod, job",
                "being drained, drained for, is draining, reclaimed, scheduled maintenance, going down, "
                "will be terminated, being terminated, shutting down, deallocated, bumped by, ended by the scheduler, "
                "cancelled by the scheduler, higher priority"),
        "user defined signal", "wall clock limit", "wall-clock limit", "time limit reached", "out of time: job",
        unless=_LOW_LEVEL + r"|\bno\b|kv|cache|queue|worker group|graceful|interpreter|thread|service|server|pool|loop|"
                       r"stream|executor|logger|enabled|handler",
        is_family=True,
    ),
    rule(
        "file-of-the-data", Label.DATA, EXCEPTION + 1,
        "filenotfounderror", "notadirectoryerror", "isadirectoryerror", "permissionerror", "oserror: [errno",
        "unable to open", "cannot open",
        pattern=r"['\"/ ](?:[^'\" ]*/)?(?:data|datasets?|corpus|corpora|shards?|tokeniz\w*|train|valid\w*)/[^'\"]*|"
                r"\.(?:jsonl|parquet|tar|arrow|idx|h5|hdf5|lmdb|npy|npz|mds|tfrecords?|wav|mp4|jpe?g|csv|"
                r"tsv)(?:\.\w+)?\b",
        unless=r"ckpt|checkpoint|\.so\b|\.py\b|\.ya?ml|\.toml|\.json\b|\.pt\b|safetensors|distcp|iter_|global_step|"
               r"errno (?:5|28|30|107|108|110|116|121|122)\b|\bwarn",
        is_family=True,
    ),
    rule(
        "file-of-a-checkpoint", Label.STORAGE, EXCEPTION + 1,
        "filenotfounderror", "notadirectoryerror", "isadirectoryerror", "permissionerror", "oserror: [errno",
        "timeouterror: ", "fileexistserror", "blockingioerror",
        pattern=r"ckpt|checkpoint|distcp|safetensors|iter_\d|global_step|step[-_]?\d+/|\.pth?\b|optim|/nfs/|\.nfs\d",
        unless=r"\.py\b|\bwarn|starting from",
        is_family=True,
    ),
    rule(
        "program-exited", Label.USER_CODE, EXCEPTION - 2,
        "panicked at", "panicexception", "unhandled exception", "uncaught exception", "exited with exit code 127",
        "no such option", "invalid value for", "unknown argument", "error: argument & invalid",
        "unrecognized option",
        "unrecognised option",  # codespell:ignore unrecognised
        is_family=True,
    ),
)  # fmt: skip
