"""Black boxes of a tiny job: their directory, and their content after the job has ended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import BlackBox, read_black_box
from megatrain.contracts.black_box.values import Record, RecordFlag
from megatrain.run_files.run_directory import own_box_paths

_NUM_RECORDS = 8192


def recording_in(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the tables with which every rank of a job records all operations in `directory`."""
    return {"telemetry": {"black_box_directory": str(directory), "black_box_records": _NUM_RECORDS}}


def boxes_by_rank(directory: Path) -> dict[int, BlackBox]:
    """Return the black boxes in `directory`, each complete: no record was overwritten."""
    boxes = {box.identity.rank: box for box in map(read_black_box, own_box_paths(directory))}
    assert boxes, f"no black box in {directory}"
    assert all(box.cursor <= box.capacity and not box.num_torn for box in boxes.values())
    return boxes


def spans(box: BlackBox, operation: Operation) -> list[Record]:
    """Return the spans of one operation, oldest first."""
    is_sum = RecordFlag.STEP_TOTAL
    return [record for record in box.records if record.operation == operation and not record.flags & is_sum]


def spans_by_step(box: BlackBox, operation: Operation) -> dict[int, int]:
    """Return how many spans of one operation began in each step."""
    return dict(Counter(span.step for span in spans(box, operation)))
