"""Hosts that register in a job without an executor."""

from __future__ import annotations

import os
from dataclasses import replace

from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.rounds import JobRecord


def a_host(host: str = "a", session: str = "1", **more: object) -> HostRecord:
    record = HostRecord(
        host=host, session=session, pid=os.getpid(), address="127.0.0.1", store_port=1, liveness_port=1, num_workers=2,
        config_hash="c", version="v", hardware="", joined_unix_s=0.0, is_fit=True,
    )  # fmt: skip
    return replace(record, **more)  # type: ignore[arg-type]


def a_job(keys: JobKeys, host: str, launch_id: str = "", **config: str) -> JobRecord:
    return JobRecord(
        job=keys.job, launch_id=launch_id, config_hash=str(sorted(config.items())), config=config, min_hosts=1,
        max_hosts=2, num_workers=2, run_directory="runs/j", first_host=host, created_unix_s=0.0,
    )  # fmt: skip
