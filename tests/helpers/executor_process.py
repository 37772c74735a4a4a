"""An executor in a separate process, without the command line: `python -m tests.helpers.executor_process FILE`.

FILE holds the arguments of `settings_of` as JSON. Health checks pass at once. FILE also sets whether this host is a
driver candidate.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain.config.load import load_config
from megatrain.contracts.errors import MegatrainError
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.executor.settings import ExecutorSettings
from tests.helpers.forked_launch import forked_executor
from tests.helpers.forked_program import ForkedProgram


def settings_of(
    config: str, endpoints: Sequence[str], host: str, *, num_workers: int, min_hosts: int, max_hosts: int, **more: Any
) -> ExecutorSettings:
    """Return the settings of an executor on this machine; a file describes its job."""
    return ExecutorSettings(
        config=load_config(Path(config)).config,
        etcd=EtcdSettings.of(list(endpoints)),
        host=host,
        address="127.0.0.1",
        num_workers=num_workers,
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        feasible_hosts={count: max_hosts + 1 - count for count in range(min_hosts, max_hosts + 1)},
        arguments=(config,),
        **more,
    )


@contextmanager
def executor_process(file: Path, log: Path, **arguments: Any) -> Iterator[ForkedProgram]:
    """Start an executor; at the end of the block, it and its workers are dead."""
    file.write_text(json.dumps(arguments))
    words = ["-m", "tests.helpers.executor_process", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as output, forked_executor(words, environment, output) as process:
        yield process


def main() -> int:
    from megatrain_launcher.executor.executor import run_executor

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    arguments = json.loads(Path(sys.argv[1]).read_text())
    try:
        return run_executor(settings_of(**arguments))
    except MegatrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
