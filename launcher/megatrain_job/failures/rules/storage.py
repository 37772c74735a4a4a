"""File systems and checkpoints: full, unavailable, stale, read-only, damaged or incomplete."""

from __future__ import annotations

from megatrain_job.failures.rule import Rule, rule
from megatrain_job.failures.verdict import Label
from megatrain_job.failures.weights import HOST, SPECIFIC

RULES: tuple[Rule, ...] = (
    rule(
        "disk-full", Label.STORAGE, SPECIFIC,
        "no space left on device", "disk quota exceeded", "enospc", "edquot", "not enough free disk space",
        "disk is full", "filesystem full", "quota exceeded", "insufficient disk space", "disk full",
        "file write failed & no space", "not enough disk space", "fallocate & fail",
        unless=r"/dev/shm|gpu|resource quota|cpu quota",
    ),
    rule(
        "input-output-error", Label.STORAGE, SPECIFIC,
        "input/output error", "read-only file system", "stale file handle", "remote i/o error", "remote io error",
        "structure needs cleaning", "transport endpoint is not connected",
        "cannot send after transport endpoint shutdown", "estale", "erofs", "stale nfs file handle", "fsync failed",
        "error in fsync", "broken pipe & fuse", "resource deadlock & lustre", "communication error on send",
    ),
    rule(
        "kernel-storage", Label.STORAGE, SPECIFIC,
        "lustreerror", "nfs: server & not responding", "nfs: server & timed out", "ext-fs error", "xfs & i/o error",
        "i/o error, dev", "blk_update_request", "buffer i/o error", "nvme & timeout", "nvme & reset controller",
        "xfs & corruption", "ceph & timed out", "ceph: & session lost", "gpfs & unmount", "mmfs & error",
        "mmfsd & lost", "beegfs & error", "beegfs & communication", "weka & error", "nvme & i/o",
        "lustre: & connection to & lost", "lustre & was evicted", "critical medium error", "medium error",
        "fs error (device", "journal has aborted", "metadata corruption detected", "ceph & slow requests",
        "gpfs & stale", "osd & blocked", "mds & evicted", "remounting filesystem read-only", "remount-ro",
        "blocked for more than & seconds", "task & hung & jbd", "watchdog & rpc_wait",
        culprit=r"\b(?P<host>[\w.-]+) kernel: ",
        unless=r"task python|nvidia|server .* ok\b|restored|recovered",
    ),
    rule(
        "checkpoint-damaged", Label.STORAGE, SPECIFIC,
        "pytorchstreamreader failed", "iostream error", "unable to load weights from", "checkpoint & timed out",
        "pytorchstreamwriter failed", "inline_container", "safetensorerror", "safetensors_rust & error",
        "error while deserializing header", "metadataincompletebuffer", "headertoolarge",
        "invalid magic number; corrupt", "unexpected end of archive", "failed finding central directory",
        "checkpointexception ranks", "unexpected pos & vs", "corrupt checkpoint", "checkpoint & corrupt",
        "checkpoint & incomplete", "checkpoint & truncated", "checkpoint & checksum", "unpicklingerror",
        "ran out of input", "pickle data was truncated", "checkpoint & could not be read",
        "could not read checkpoint", "storage has wrong", "failed to read checkpoint",
        "failed to write checkpoint", "failed to save checkpoint", "failed to load checkpoint",
        "error saving checkpoint", "checkpoint save failed", "unable to save checkpoint", "async checkpoint & fail",
        "enforce fail at inline_container", "zarr & checkpoint & error", "checkpoint & is not a valid",
        "unable to load checkpoint", "checkpoint & missing & metadata", "checkpointingexception",
        "unable to open file & checkpoint", "badzipfile", "hdf & unable to open file",
        "unable to create file & errno", "checkpoint write & fail", "file_write & failed",
        "crc & mismatch & checkpoint", "checkpointexception",
        unless=r"\bno (?:corrupt|error|incomplete|truncated)|\b0 (?:corrupt|incomplete|truncated)|not corrupt",
    ),
    rule(
        "write-call-failed", Label.STORAGE, SPECIFIC,
        "write(): fd", "read(): fd", "posix_fallocate & fail", "file write failed", "short write",
        "fwrite & failed", "failed to write & bytes", "aio & write failed", "deepspeed_aio & fail",
        "file read failed", "unable to write",
        pattern=r"fail|short|unable|error",
    ),
    rule(
        "checkpoint-not-found", Label.STORAGE, SPECIFIC,
        "filenotfounderror & checkpoint", "filenotfounderror & ckpt", "filenotfounderror & distcp",
        "filenotfounderror & global_step", "filenotfounderror & .safetensors", "no such file & checkpoint",
        "no such file & ckpt", "filenotfounderror & .metadata", "unable to find checkpoint",
        "no checkpoint found in", "no such file & distcp", "latest_checkpointed & not",
        "no such file & optim_states", "no such file & model_states", "no such file & latest_checkpointed",
        "no such file or directory & mp_rank", "file & cannot be opened & mp_rank",
        "parent directory & does not exist", "mountpoint & no such file", "mount & stale",
        unless=r"\bwarn(?:ing)?\b|starting from (?:scratch|random)|will (?:not load|start)",
    ),
    rule(
        "object-store", Label.STORAGE, SPECIFIC,
        "botocore.exceptions", "slowdown & reduce your request rate", "requesttimeout",
        "an error occurred & when calling the & operation", "google.api_core.exceptions",
        "serviceunavailable: & gs", "azure.core.exceptions", "upload & bucket & failed", "endpointconnectionerror",
        "couldn't connect to storage", "gcsfs & error", "fsspec & error", "hdfs & ioexception", "hdfs & error",
        "objectfs & error", "minio & error", "nosuchkey", "nosuchbucket", "responsestreamingerror",
        "incompletereaderror", "internalerror & when calling", "connect timeout on endpoint",
        "connecttimeouterror & endpoint", "readtimeouterror & amazonaws", "transfererror", "could not upload",
        "ioexception: filesystem closed", "datastreamer exception", "could not obtain block", "obsutil & error",
        "tos & serviceerror",
        unless=r"retrying|will retry|attempt \d+ of|wandb",
    ),
    rule(
        "mount-or-permission", Label.STORAGE, SPECIFIC,
        "remote & read timed out & checkpoint", "permission denied & checkpoint", "permission denied & ckpt",
        "failed to mount", "mount & failed", "mount.nfs & error", "mount error",
        "unable to attach or mount volumes", "mountvolume.setup failed", "failedmount", "failedattachvolume",
    ),
    rule(
        "local-disk-failing", Label.STORAGE, HOST - 1,
        "smart & failing_now", "raid & degraded", "nvme & controller is down", "device & offline & sd",
    ),
)  # fmt: skip
