"""What-if analysis at the scale of the paper: 12,288 ranks x 10 steps, in a separate process, to measure its memory.

Prints one JSON object. benchmarks/whatif.py starts it; by itself: python -m benchmarks.whatif_scale
"""

from __future__ import annotations

import json
import resource
import time

from megatrain_diagnostics.analysis.whatif import make_model, what_if
from tests.helpers.pipeline_job import PipelineJob

JOB = PipelineJob(
    pp_size=8,
    dp_size=192,
    tp_size=8,
    num_chunks=6,
    num_microbatches=32,
    steps=tuple(range(10)),
    noise=0.1,
    is_overlapped=True,
    slow_cells={(17, 3): 1.3},
    slow_stages={7: 1.1},
)


def measure() -> dict[str, float | int]:
    """Return times and the peak memory. Units: seconds, GB."""
    operations = JOB.run()
    started = time.perf_counter()
    model = make_model(operations, JOB.shape)
    prepared = time.perf_counter()
    result = what_if(model)
    ended = time.perf_counter()
    assert any(rank // JOB.tp_size == 3 * JOB.dp_size + 17 for rank in result.worst_ranks)
    return {
        "ranks": JOB.shape.world_size,
        "operations": operations.num_rows,
        "model_s": prepared - started,
        "figures_s": ended - prepared,
        "analysis_s": ended - started,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
