"""The command on the pool of ranks: the whole `megatrain train`, in a process that need not import torch first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatrain.cli import main
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.rank_protocol import RankContext


def run_command(pool: RankPool, arguments: Sequence[str], output: Path) -> int:
    """Run `megatrain ARGUMENTS` and return its exit code; its output is in the file `output`."""
    try:
        (code,) = pool.run(_command_on_rank, 1, list(arguments), str(output))
    except RankError as error:
        # A failing worker ends its process.
        ended = re.search(r"its process ended with exit code (\d+)$", str(error))
        if ended is None:
            raise
        return int(ended[1])
    return int(code)


def _command_on_rank(context: RankContext, arguments: Sequence[str], output: str) -> int:
    with open(output, "wb") as file, _output_to(file.fileno()):
        return main(list(arguments))


@contextmanager
def _output_to(file: int) -> Iterator[None]:
    saved = [(number, os.dup(number)) for number in (1, 2)]
    try:
        for number, _ in saved:
            os.dup2(file, number)
        yield
    finally:
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)
