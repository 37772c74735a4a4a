"""Training data: loaders and their workers, samples that cannot be read, and missing data sets."""

from __future__ import annotations

from megatrain_job.failures.rule import EXCEPTION, HOST, SPECIFIC, Rule, rule
from megatrain_job.failures.verdict import Label

RULES: tuple[Rule, ...] = (
    rule(
        "loader-shared-memory", Label.DATA, HOST,
        "out of shared memory", "unable to open shared memory object", "no space left on device & /dev/shm",
        "insufficient shared memory", "dataloader worker & bus error", "shm_open & fail",
        "unable to mmap & shared memory", "unable to allocate shared memory",
        "error while creating shared memory segment", "unable to write to file </torch_",
        "shared memory & limit & raise", "shared memory manager & fail", "torch_shm_manager",
        "received & items of ancdata",
        unless=r"nccl",
    ),
    rule(
        "loader-worker-killed", Label.HOST_OOM, SPECIFIC, "dataloader worker & killed by signal: killed",
    ),
    rule(
        "loader-worker", Label.DATA, EXCEPTION + 1,
        "dataloader worker & exited unexpectedly", "dataloader worker & killed by signal",
        "in dataloader worker process", "dataloader timed out after", "in pin memory thread",
        "dataloader worker & abort", "dataloader & worker & died", "dataloader & worker & crash",
        "in dataloader & error", "background worker & error",
        "one of the subprocesses has abruptly died during map", "data loader & fail", "dataloader & stall",
        "worker & dataset & died",
        unless=r"killed by signal: killed|suggested max number of worker|cpu threads",
    ),
    rule(
        "sample-unreadable", Label.DATA, SPECIFIC,
        "resize storage that is not resizable", "stack expects each tensor to be equal size", "not a gzip file",
        "equal size & collate", "error while fetching sample", "codec can't decode", "unidentifiedimageerror",
        "cannot identify image file", "image file is truncated", "broken data stream when reading image",
        "jsondecodeerror", "json parse error", "arrowinvalid", "parquet magic bytes not found", "corrupt snappy",
        "could not open parquet", "parquet & corrupt", "truncated file read", "error parsing json", "json.decoder",
        "invalid data found when processing input", "moov atom not found", "decordeerror", "error opening & video",
        "readererror: & tar", "tarfile.readerror", "error when reading & shard", "corrupt sample",
        "corrupted sample", "sample is corrupt", "corrupt record", "record is corrupt", "corrupt shard",
        "shard is corrupt", "truncated shard", "shard is truncated", "datasetgenerationerror",
        "datasets.exceptions.", "datasets.utils. & error", "datasets.builder. & error",
        "datasetgenerationcasterror", "datafilesnotfounderror", "datasetnotfounderror", "expectedmoresplitserror",
        "nonmatchingsplitssizeserror", "nonmatchingchecksumerror", "castenerror", "couldn't cast array",
        "couldn't cast", "unable to read & shard", "data corruption & dataset", "datalosserror", "corrupted record",
        "dataset is empty", "empty dataset", "error tokenizing data", "not a gzipped file",
        "error decoding & sample", "zlib.error", "invalid record", "unexpected end of file & dataset",
        "msgpack & unpack", "error & while decompressing", "lzma & error", "compressed file ended before",
        "eoferror: compressed", "error reading & mds", "streaming & shard & error",
        "num_samples should be a positive",
        unless=r"\bskip(?:ping|ped)?\b|^.{0,80}\bwarn(?:ing)?\b|ignor",
    ),
    rule(
        "dataset-file-missing", Label.DATA, SPECIFIC,
        "couldn't find a dataset script", "couldn't find any data file", "couldn't reach & on the hub",
        "filenotfounderror & dataset", "filenotfounderror & data", "filenotfounderror & .idx",
        "filenotfounderror & .jsonl", "filenotfounderror & .bin", "filenotfounderror & .parquet",
        "filenotfounderror & corpus", "filenotfounderror & tokeniz", "filenotfounderror & .arrow",
        "filenotfounderror & shard", "filenotfounderror & train", "could not find index files",
        "index file & does not exist", "no such file & .idx", "no such file & .jsonl", "no such file & dataset",
        "no such file & .parquet", "could not find & index map", "no such file & .tar", "dataset & does not exist",
        "doesn't exist on the hub & dataset", "no such file & corpus",
        unless=r"checkpoint|ckpt|distcp|train\.py|\.so\b|config|\.yaml|\.json\b",
    ),
    rule(
        "index-format", Label.DATA, SPECIFIC,
        "index file doesn't match expected format", "bin/.idx & mismatch", "blendable & index", "bad magic & idx",
        "cannot mmap an empty file", "mmap length is greater than file size", "indexed dataset & invalid",
        "memmap & size", "dataset & mismatch & size", "document index & out of", "not enough samples",
        "is not a multiple of & index", "dataset index & corrupt", "buffer is smaller than requested size",
        "offset must be non-negative and no greater",
        unless=r"\bwarn(?:ing)?\b",
    ),
    rule(
        "token-out-of-range", Label.DATA, SPECIFIC,
        "token id & out of & vocab", "token & exceeds vocab", "input_ids & out of range", "label & out of & vocab",
        "token ids & larger than & vocab", "found token & greater than", "invalid token id",
        unless=r"\bwarn(?:ing)?\b",
    ),
)  # fmt: skip
