"""Section [telemetry]: the black box of each rank, and the peak that utilization is measured against."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.options import option
from megatrain.contracts.black_box.encoding import MAX_RECORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """The black box of each rank, and the peak that utilization is measured against."""

    black_box_directory: str = field(
        default="/dev/shm",
        metadata=option(
            "Directory of the black boxes, which lie in a subdirectory megatrain-UID that only this user can open. On "
            "a memory file system they use no disk and survive the process. Empty: off."
        ),
    )
    black_box_records: int = field(
        default=65536,
        metadata=option(
            "Spans that a black box holds before it overwrites the oldest.",
            unit="records",
            minimum=256,
            maximum=MAX_RECORDS,
        ),
    )
    peak_tflops: float = field(
        default=0.0,
        metadata=option(
            "Peak of one device in the precision used, for MFU. 0: from the table of known GPUs; without one, MFU is "
            "not printed.",
            unit="TFLOP/s",
            minimum=0,
        ),
    )
