"""`megatrain config check CONFIG --dry-run`: plans the whole job in one process."""

from __future__ import annotations

from megatrain.config.config import Config
from megatrain.planning.plan_text import render
from megatrain.planning.run_plan import plan_run


def dry_run(config: Config) -> str:
    """Return a text about what every rank would do and hold. An open parallel.dp_size counts as 1.

    Raises: TopologyError when layout, tensor plan or schedule cannot be built.
    """
    return render(plan_run(config))
