"""`megatrain config check CONFIG --dry-run`: the whole job, laid out in one process."""

from __future__ import annotations

from megatrain.config.config import Config
from megatrain.planning.plan_text import render
from megatrain.planning.run_plan import plan_run


def dry_run(config: Config) -> str:
    """Return what every rank would do and hold, as text. An open parallel.dp_size counts as 1.

    Raises: TopologyError when layout, tensor plan or schedule cannot be built.
    """
    return render(plan_run(config))
