"""Data directories built in one process, with the options of a build as keywords."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.data.build import build
from megatrain.data.build_tokenizer import BuildOptions
from megatrain.data.meta import DataMeta


def build_data(
    inputs: list[str],
    output: Path,
    *,
    num_workers: int = 1,
    is_forced: bool = False,
    is_strict: bool = False,
    report: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> DataMeta:
    """Return the meta.json of the built directory `output`."""
    return build(
        inputs,
        output,
        BuildOptions(**options),
        num_workers=num_workers,
        is_forced=is_forced,
        is_strict=is_strict,
        report=report,
    )
